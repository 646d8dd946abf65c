"""Chat templates: what a conversation becomes as text, and which part of it the assistant said.

Templates seldom mark that part ({% generation %}). It is found without: what the template adds between a conversation up to
the assistant's turn, with the header of its answer, and the same with that turn is what the assistant says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.layouts import Unfit
from recipes.schema import BadConfiguration

PROBE = "\u25c6probe\u25c6"
MARKUP = "<"
"""Where a text holds this, a template may look at what it says, as some do for tools and for thoughts."""


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` of a rendered text."""

    start: int
    end: int


class ChatTemplate:
    """A tokenizer's template with its variables.

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
        # A template that puts a plain question between two constant texts is asked for them once: 60 us less a record.
        before, found, after = self._prompt(PROBE).partition(PROBE)
        self.around = (before, after) if found and self._prompt("a b") == f"{before}a b{after}" else None

    def question(self, text: str) -> str:
        """The conversation up to where the assistant starts to answer."""
        if self.around is None or text != text.strip() or MARKUP in text:
            return self._prompt(text)
        return text.join(self.around)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Span]]:
        """A whole conversation, and where the assistant speaks in it.

        Raises:
            Unfit: the template refuses it, or writes earlier turns in another way once later ones are there.
        """
        given = list(messages)
        if self._system and given[0]["role"] != "system":
            given = [*self._system, *given]
        whole = self._render(given)
        spans = []
        for number, message in enumerate(given):
            if message["role"] != "assistant":
                continue
            header, turn = self._render(given[:number], answer=True), self._render(given[: number + 1])
            if not (turn.startswith(header) and whole.startswith(turn)):
                raise Unfit(f"message {number + 1} is written in another way by the chat template once others follow it")
            end = turn.rfind(self._end_token, len(header))
            spans.append(Span(len(header), len(turn) if end < 0 else end + len(self._end_token)))
        return whole, spans

    def _prompt(self, text: str) -> str:
        return self._render([*self._system, {"role": "user", "content": text}], answer=True)

    def _render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = False) -> str:
        # Here, not above: loading it takes a second, which a preparation without a chat template need not wait.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self._template,
                add_generation_prompt=answer,
                **self._variables,
            )
        except Exception as error:  # whatever a template raises: jinja's own errors, or Python's on a value it lacks
            raise Unfit(f"is refused by the chat template: {' '.join(str(error).split())[:200]}") from None
        return str(rendered[0])
