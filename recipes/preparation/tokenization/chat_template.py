"""Render conversations with a chat template, and locate the assistant's turns."""

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

# Chat templates: the text of a conversation, and which part of it is the assistant's.
#
# Few templates mark that part ({% generation %}). It is found without: the difference between the rendered conversation up
# to the assistant's turn, including the header of the answer, and the conversation with the turn.
#
# Nearly all templates insert plain texts between constants that only depend on the order of roles. So a template is rendered
# once for each such order with placeholder texts, and again with others to verify that the texts do not matter: rendering
# every conversation took longer than everything else.

PROBE_TEXT = "\u25c6Pro'be\u25c6"
OTHER_TEXTS = ('a B\n& "c" 1', "a b, " * 20_000 + "c")
"""Texts that any filter in a template would change, unless it leaves all plain texts unchanged; the second is for templates
that depend on the length of a text."""
MARKUP = "<"
"""A template may inspect texts with this character, as some do for tools and reasoning."""
LITERAL = r"""('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
SEARCHED_TEXT = re.compile(
    rf"{LITERAL}\s*(?:not\s+)?in\b|\.\w*(?:with|split|find|index|count|replace|partition)\(\s*{LITERAL}"
)
"""Other text that a template searches for in messages."""
MAX_SHAPES = 256
"""Number of role orders to cache; conversations with further ones are rendered individually."""


@dataclass(frozen=True)
class ConversationShape:
    """The constants around the texts of a conversation.

    `spoken` lists for each assistant text its number, and how many characters before and after it belong to the turn.
    """

    around: tuple[str, ...]
    spoken: tuple[tuple[int, int, int], ...]

    def fill(self, texts: Sequence[str]) -> tuple[str, list[Span]]:
        parts = [*chain.from_iterable(zip(self.around, texts, strict=False)), self.around[-1]]
        ends = list(accumulate(map(len, parts)))
        spans = [Span(ends[2 * number] - before, ends[2 * number + 1] + after) for number, before, after in self.spoken]
        return "".join(parts), spans


def find_shape(whole: str, texts: Sequence[str], spans: Sequence[Span], speakers: Sequence[str]) -> ConversationShape | None:
    """Return the shape of a rendered text with `texts` once each, or None."""
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
    """A tokenizer's chat template with its variables.

    Messages and tools must be in the form of `rendering`.

    Raises:
        BadConfiguration: the tokenizer has no template, or its output depends on the date.
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
                "the chat template writes the date into every record, so that equal input would not give equal output: "
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
        """Return the constants around a plain question, if the template has any.

        None if an answer would not follow unchanged.

        The answer must be followed by the end token. Otherwise a question with its answer is rendered like any conversation:
        the end token alone did not teach Gemma, Phi-3 and base models of Qwen and Llama how their turns end.
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
        """Render a question up to the start of the assistant's answer."""
        if self._around is None or not self._is_plain(text):
            return self._prompt(text)
        return text.join(self._around)

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> tuple[str, list[Span]]:
        """Render a conversation and return the spans of the assistant's turns.

        `tools` are the callable ones.

        Raises:
            UnfitRecord: the template rejects it, or the assistant's turns cannot be located.
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
        """Return the shape of plain texts with these roles.

        None if it depends on the texts.
        """
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
        """Return whether a text contains nothing that a template could inspect."""
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
                raise UnfitRecord(f"message {number + 1} is rendered differently by the chat template when others follow it")
        return whole, spans

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> str:
        """Render a conversation up to the start of the assistant's answer, for generation. Raises UnfitRecord."""
        before = self._system if messages[0]["role"] not in SYSTEM_ROLES else []
        return self._render([*before, *messages], answer=True, tools=tools)

    def _prompt(self, text: str) -> str:
        return self._render([*self._system, {"role": "user", "content": text}], answer=True)

    def _render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = False, tools: Tools | None = None) -> str:
        try:
            if self._rendering is Rendering.AS_STORED:
                return self._render_as_stored(messages, answer, tools)
            return self._engine_template.render([*map(dict, messages)], tools, answer=answer)
        except Exception as error:  # templates raise errors of jinja or of Python
            raise UnfitRecord(f"is rejected by the chat template: {' '.join(str(error).split())[:200]}") from None

    @cached_property
    def _engine_template(self) -> EngineTemplate:
        return EngineTemplate(self._template, self._variables)

    def _render_as_stored(self, messages: Sequence[Mapping[str, Any]], answer: bool, tools: Tools | None) -> str:
        # Imported here because it takes a second, which other callers need not wait.
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self._template,
            add_generation_prompt=answer,
            **(self._variables | ({"tools": tools} if tools else {})),
        )
        return str(rendered[0])


def find_text_end(turn: str, message: Mapping[str, Any], header: int) -> int:
    """Return where a message's text ends in its turn.

    The text may contain the end token itself.
    """
    text = (message.get("content") or "").strip()
    place = turn.find(text, header)
    return header if place < 0 else place + len(text)


def make_messages(speakers: Sequence[str], texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in zip(speakers, texts, strict=True)]


# Selection among a tokenizer's chat templates: some have one per use by name, such as those of Hermes and Command R.

Templates = str | dict[str, str] | None
"""A single template, or several by name."""
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
    """Create a tokenizer's template for a preparation, for conversations with tools or without."""
    template = choose_template(templates, tools)
    end_token = str(special["eos_token"])
    arguments, system_prompt = parameters.template_arguments, parameters.system_prompt
    return ChatTemplate(template, special, arguments, system_prompt, end_token, around, rendering)


def choose_template(templates: Templates, tools: bool) -> str | None:
    """Select a template as transformers does (`get_chat_template`).

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
        "set its `chat_template` to the right one, save it to a folder, and use that folder"
    )
