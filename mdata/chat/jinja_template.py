"""A tokenizer's own template, written in Jinja: run in a sandbox and under limits, the clock out of reach.

Templates give the text of a whole conversation. What a turn is, is found by running them on the messages before it,
with the prompt that asks for an answer, and on those up to it: each text has to begin with the one before, as it does
where a model is used turn by turn. A template that changes earlier turns later on is refused, conversation by
conversation. Control tokens are part of the text. Not there: tools, documents, `strftime_now` (today would
change the tokens).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from blake3 import blake3

from mdata.chat.loss_spans import TemplateRefused, Turn
from mdata.errors import UsageError
from mdata.sources.conversation import ASSISTANT, Message

# What templates raise that are wrong, besides Jinja's own kinds: RuntimeError covers RecursionError.
_WHAT_COMPILING_RAISES = (SyntaxError, ValueError, OverflowError, RuntimeError, MemoryError)
_WHAT_RUNNING_RAISES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


@dataclass(frozen=True)
class JinjaTemplate:
    """See `mdata.chat.loss_spans.Template`.

    Args:
        name: where it comes from.
        source: the template.
        variables: bos_token and the like, with their texts.
    """

    name: str
    source: str
    variables: tuple[tuple[str, str], ...]
    spells_tokens = True

    @property
    def fingerprint(self) -> str:
        """See `Template`."""
        return blake3(json.dumps([self.source, *sorted(self.variables)]).encode()).hexdigest()

    def checked(self) -> JinjaTemplate:
        """This template, if it can be run here.

        Raises:
            UsageError: jinja2 is not installed, or it is no template.
        """
        _compiled(self.source)
        return self

    def turns(self, messages: Sequence[Message], *, every: bool = True) -> Iterator[Turn]:
        """See `Template`; templates that refuse half an exchange are asked for whole ones, unless `every`."""
        told = [message._asdict() for message in messages]
        whole = self._text(told, prompt=False)
        at = 0
        for number, message in enumerate(messages, start=1):
            if not every and message.role != ASSISTANT and number < len(messages):
                yield Turn([], [], [])
                continue
            stop = len(whole) if number == len(messages) else self._reach(told[:number], whole, at=at)
            start = at
            if message.role == ASSISTANT:
                start = self._reach(told[: number - 1], whole, at=at, prompt=True)
            if start > stop:
                raise TemplateRefused(f"the chat template asks for an answer after message {number} has ended")
            said = whole[start:stop]
            end = len(said.rstrip()) if message.role == ASSISTANT else len(said)
            yield Turn(_part(whole[at:start]), _part(said[:end]), _part(said[end:]))
            at = stop

    def _reach(self, told: list[dict[str, str]], whole: str, *, at: int, prompt: bool = False) -> int:
        """How far into the whole text these messages come."""
        if not told and not prompt:
            return at
        text = self._text(told, prompt=prompt)
        if not whole.startswith(text) or len(text) < at:
            raise TemplateRefused(
                f"the chat template writes the first {len(told)} messages differently when more follow,"
                " so its turns cannot be told apart"
            )
        return len(text)

    def _text(self, told: list[dict[str, str]], *, prompt: bool) -> str:
        import jinja2

        try:
            template = _compiled(self.source)
            characters = sum(len(text) for message in told for text in message.values())
            template.environment.begin(messages=len(told), characters=characters)
            variables = {"messages": told, "add_generation_prompt": prompt, **dict(self.variables)}
            return str(template.environment.rendered(template, variables))
        except (jinja2.TemplateError, *_WHAT_RUNNING_RAISES) as error:
            raise TemplateRefused(f"the chat template fails: {' '.join(str(error).split())[:200]}") from error


def _part(text: str) -> list[str | int]:
    return [text] if text else []


@lru_cache(maxsize=4)
def _compiled(source: str) -> Any:
    """The template, ready to run; one for each process."""
    try:
        import jinja2

        from mdata.chat.template_limits import LimitedEnvironment
    except ImportError as error:
        raise UsageError(
            "the tokenizer's chat template needs jinja2, which is not installed",
            fix='pip install jinja2 (or "mdata[chat]"), or --chat-template chatml',
        ) from error
    extensions = ["jinja2.ext.loopcontrols", _generation()]
    environment = LimitedEnvironment({"tojson": _as_json}, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _refusal()
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, *_WHAT_COMPILING_RAISES) as error:
        raise UsageError("the chat template is not valid Jinja", found=" ".join(str(error).split())[:200]) from error


def _as_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """As transformers has it: no escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refusal() -> Callable[[str], NoReturn]:
    import jinja2

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    return raise_exception


def _generation() -> Any:
    """Jinja's extension for {% generation %} ... {% endgeneration %}: its content, unchanged."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation
