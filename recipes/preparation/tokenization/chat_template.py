"""Render conversations with a chat template, and locate the assistant's text."""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import TokenizeParameters
from recipes.contracts.rendering import CURRENT_RENDERING, Rendering
from recipes.preparation.tokenization.rewritten_turns import Span, find_assistant_turn
from recipes.records.conversation import SYSTEM_ROLES, UnfitRecord
from recipes.records.engine_template import EngineTemplate, Tools

# Chat templates: what a conversation becomes as text, and which part of it the assistant said.
#
# Templates seldom mark that part ({% generation %}). It is found without: what the template adds between a conversation
# up to the assistant's turn, with the header of its answer, and the same with that turn is what the assistant says.
#
# Nearly all templates put plain texts between constant ones, which depend on who speaks in which order alone. So a
# template is asked once for each such order, with texts that are found again in what it makes, and once more with others,
# to see that they do not matter: rendering every conversation took longer than all else.

PROBE_TEXT = "\u25c6Pro'be\u25c6"
OTHER_TEXTS = ('a B\n& "c" 1', "a b, " * 20_000 + "c")
"""Texts that no filter of a template leaves as they are, unless it leaves every plain text so; the second is for one that
looks at how long a text is."""
MARKUP = "<"
"""Where a text holds this, a template may look at what it says, as some do for tools and for thoughts."""
LITERAL = r"""('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
SEARCHED_TEXT = re.compile(
    rf"{LITERAL}\s*(?:not\s+)?in\b|\.\w*(?:with|split|find|index|count|replace|partition)\(\s*{LITERAL}"
)
"""What else a template looks for in texts."""
MAX_SHAPES = 256
"""Orders of speakers that are remembered; a conversation of one that is not among the first of them is rendered."""


@dataclass(frozen=True)
class ConversationShape:
    """What stands around the texts of a conversation; and of the assistant's texts their number, and how many characters
    before and after each are said by the assistant too."""

    around: tuple[str, ...]
    spoken: tuple[tuple[int, int, int], ...]

    def fill(self, texts: Sequence[str]) -> tuple[str, list[Span]]:
        parts = [*chain.from_iterable(zip(self.around, texts, strict=False)), self.around[-1]]
        ends = list(accumulate(map(len, parts)))
        spans = [Span(ends[2 * number] - before, ends[2 * number + 1] + after) for number, before, after in self.spoken]
        return "".join(parts), spans


def find_shape(whole: str, texts: Sequence[str], spans: Sequence[Span], speakers: Sequence[str]) -> ConversationShape | None:
    """The shape of a rendered text, in which each of `texts` stands once and in their order."""
    around, places, end = [], [], 0
    for text in texts:
        place = whole.find(text, end)
        if place < 0 or whole.count(text) > 1:
            return None
        around.append(whole[end:place])
        places.append(place)
        end = place + len(text)
    said = [number for number, role in enumerate(speakers) if role == "assistant"]
    spoken = [
        (number, places[number] - span.start, span.end - places[number] - len(texts[number]))
        for number, span in zip(said, spans, strict=True)
    ]
    return ConversationShape((*around, whole[end:]), tuple(spoken))


class ChatTemplate:
    """A tokenizer's template with its variables. Messages and tools come in the form that `rendering` asks for.

    Raises:
        BadConfiguration: the tokenizer has none, or one whose text depends on the day.
    """

    def __init__(
        self,
        template: str | None,
        special: Mapping[str, Any],
        arguments: Mapping[str, Any],
        system_prompt: str | None,
        end_token: str,
        around: tuple[str, str] | None = None,
        rendering: Rendering = CURRENT_RENDERING,
    ) -> None:
        if template is None:
            raise BadConfiguration("the tokenizer has no chat template: use records of the layout prompt/completion or text")
        if "strftime_now" in template and "date_string" not in arguments:
            raise BadConfiguration(
                "the chat template writes the day into every record, so that the same input would not give the same output: "
                "set tokenize.template_arguments.date_string"
            )
        self._template = template
        self._variables = {**special, **arguments}
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
        self._end_token = end_token
        self._around = around
        self._rendering = rendering
        looked_for = [ast.literal_eval(found) for found in chain.from_iterable(SEARCHED_TEXT.findall(template)) if found]
        self._marks = re.compile("|".join(map(re.escape, {MARKUP, end_token, *filter(None, looked_for)})))
        self._shapes: dict[tuple[str, ...], ConversationShape | None] = {}

    def question_frame(self) -> tuple[str, str] | None:
        """The two texts between which the template puts every plain question, if it does, and if an answer follows as it
        stands, with the end token.

        Else a question with its answer is a conversation like any other: the end token alone did not teach Gemma, Phi-3 and
        base models of Qwen and Llama how their turns end.
        """
        before, found, after = self._prompt(PROBE_TEXT).partition(PROBE_TEXT)
        asked = [*self._system, {"role": "user", "content": PROBE_TEXT}]
        is_so = found and all(
            self._prompt(text) == text.join((before, after))
            and self._render([*asked, {"role": "assistant", "content": text}]).startswith(
                before + PROBE_TEXT + after + text + self._end_token
            )
            for text in OTHER_TEXTS
        )
        return (before, after) if is_so else None

    def question(self, text: str) -> str:
        """The conversation up to where the assistant starts to answer."""
        if self._around is None or not self._is_plain(text):
            return self._prompt(text)
        return text.join(self._around)

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> tuple[str, list[Span]]:
        """A whole conversation, and where the assistant speaks in it; `tools` are what it may call.

        Raises:
            UnfitRecord: the template refuses it, or does not let it be seen where the assistant speaks.
        """
        given = list(messages)
        if self._system and given[0]["role"] not in SYSTEM_ROLES:
            given = [*self._system, *given]
        if not tools and all(len(message) == 2 and self._is_plain(message.get("content")) for message in given):
            speakers = tuple([message["role"] for message in given])
            if speakers not in self._shapes and len(self._shapes) < MAX_SHAPES:
                self._shapes[speakers] = self._shape(speakers)
            if shape := self._shapes.get(speakers):
                return shape.fill([message["content"] for message in given])
        return self._read(given, tools)

    def _shape(self, speakers: Sequence[str]) -> ConversationShape | None:
        """What the template does with plain texts of these speakers; None where it depends on what they say."""
        probes = [f"{PROBE_TEXT}{number}{PROBE_TEXT}" for number in range(len(speakers))]
        try:
            whole, spans = self._read(make_messages(speakers, probes))
            shape = find_shape(whole, probes, spans, speakers)
            others = [[text] * len(speakers) for text in OTHER_TEXTS]
            is_so = shape and all(shape.fill(texts) == self._read(make_messages(speakers, texts)) for texts in others)
        except UnfitRecord:
            return None
        return shape if is_so else None

    def _is_plain(self, text: Any) -> bool:
        """Whether a text says nothing that a template could look at."""
        return isinstance(text, str) and text != "" and text == text.strip() and not self._marks.search(text)

    def _read(self, given: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> tuple[str, list[Span]]:
        render = partial(self._render, tools=tools)
        whole = render(given)
        spans = []
        for number, message in enumerate(given):
            if message["role"] != "assistant":
                continue
            header, turn = render(given[:number], answer=True), render(given[: number + 1])
            if turn.startswith(header) and whole.startswith(turn):
                end = turn.rfind(self._end_token, find_text_end(turn, message, len(header)))
                spans.append(Span(len(header), len(turn) if end < 0 else end + len(self._end_token)))
            elif found := find_assistant_turn(render, given, number, whole, self._end_token):
                spans.append(found)
            else:
                raise UnfitRecord(
                    f"message {number + 1} is written in another way by the chat template once others follow it"
                )
        return whole, spans

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> str:
        """A conversation up to where the assistant starts to answer: the input of a generation. Raises UnfitRecord."""
        before = self._system if messages[0]["role"] not in SYSTEM_ROLES else []
        return self._render([*before, *messages], answer=True, tools=tools)

    def _prompt(self, text: str) -> str:
        return self._render([*self._system, {"role": "user", "content": text}], answer=True)

    def _render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = False, tools: Tools | None = None) -> str:
        try:
            if self._rendering is Rendering.AS_STORED:
                return self._render_as_stored(messages, answer, tools)
            return self._engine_template.render([*map(dict, messages)], tools, answer=answer)
        except Exception as error:  # whatever a template raises: jinja's own errors, or Python's on a value it lacks
            raise UnfitRecord(f"is refused by the chat template: {' '.join(str(error).split())[:200]}") from None

    @cached_property
    def _engine_template(self) -> EngineTemplate:
        return EngineTemplate(self._template, self._variables)

    def _render_as_stored(self, messages: Sequence[Mapping[str, Any]], answer: bool, tools: Tools | None) -> str:
        # Here, not above: loading it takes a second, which nobody else need wait.
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self._template,
            add_generation_prompt=answer,
            **(self._variables | ({"tools": tools} if tools else {})),
        )
        return str(rendered[0])


def find_text_end(turn: str, message: Mapping[str, Any], header: int) -> int:
    """Where the text of a message ends in its turn: it may itself hold the end token, and the template another one."""
    text = (message.get("content") or "").strip()
    place = turn.find(text, header)
    return header if place < 0 else place + len(text)


def make_messages(speakers: Sequence[str], texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in zip(speakers, texts, strict=True)]


# Which chat template of a tokenizer is asked: some have one by name for each use, such as those of Hermes and Command R.

Templates = str | dict[str, str] | None
"""The only one, or all by their names."""
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"


def make_chat_template(
    templates: Templates,
    special: Mapping[str, Any],
    parameters: TokenizeParameters,
    around: tuple[str, str] | None = None,
    rendering: Rendering = CURRENT_RENDERING,
    *,
    tools: bool = False,
) -> ChatTemplate:
    """A tokenizer's template as a preparation asks for it, for conversations with tools or without."""
    template = choose_template(templates, tools)
    end_token = str(special["eos_token"])
    arguments, system_prompt = parameters.template_arguments, parameters.system_prompt
    return ChatTemplate(template, special, arguments, system_prompt, end_token, around, rendering)


def choose_template(templates: Templates, tools: bool) -> str | None:
    """As transformers chooses (`get_chat_template`).

    Raises:
        BadConfiguration: there are several, and none is the default.
    """
    if not isinstance(templates, dict):
        return templates
    for name in (TOOL_TEMPLATE, DEFAULT_TEMPLATE) if tools else (DEFAULT_TEMPLATE,):
        if name in templates:
            return templates[name]
    raise BadConfiguration(
        f"the tokenizer has several chat templates ({', '.join(sorted(templates))}), and none is called "
        f"'{DEFAULT_TEMPLATE}': "
        "set its `chat_template` to the one that is wanted, save it into a folder, and name that folder"
    )
