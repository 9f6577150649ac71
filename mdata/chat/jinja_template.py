"""A tokenizer's own chat template, written in Jinja: run in a sandbox, with limits and without access to the clock.

A template gives the text of a whole conversation. Turns are found by running it on the messages before a turn, with the
prompt that requests an answer, and on the messages up to it: each text has to begin with the previous one, as when a
model is used turn by turn. A template that changes earlier turns later is refused, conversation by conversation.
Control tokens are part of the text. `tools` and `documents` are None, as in transformers if none are given. Not
available: `strftime_now` (the date would change the tokens).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

from blake3 import blake3

from mdata.chat.loss_spans import Span, TemplateRefused, Turn
from mdata.errors import UsageError, install_command
from mdata.sources.conversation import ASSISTANT, Message

# Errors of faulty templates, besides Jinja's own: RuntimeError covers RecursionError.
_WHAT_COMPILING_RAISES = (SyntaxError, ValueError, OverflowError, RuntimeError, MemoryError)
_WHAT_RUNNING_RAISES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


# What transformers gives to every template.
_NONE_GIVEN = MappingProxyType({"tools": None, "documents": None})
# Messages written over all runs for one conversation (about a minute); a long message counts as several.
_MOST_WORK, _CHARACTERS_OF_A_MESSAGE = 2_000_000, 4096
_MOST_TRIED = 20  # fields of a refused record that are tried, one run of the template each
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class JinjaTemplate:
    """See `mdata.chat.loss_spans.Template`.

    Args:
        name: its origin, for messages.
        source: the template.
        variables: bos_token and similar, with their texts.
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
        """This template, after checking that it can be run.

        Raises:
            UsageError: jinja2 is not installed, or it is not a template.
        """
        _compiled(self.source)
        return self

    def spelled_tokens(self, tokens: Iterable[str]) -> list[str]:
        """See `Template`: tokens in the template itself, in its variables, and in its text for a short conversation."""
        used = _variables_of(self.source)
        texts = [self.source, *(text for name, text in self.variables if name in used)]
        probe = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
        with suppress(TemplateRefused):  # for example, it needs a system message
            texts.append(self._text(probe, prompt=False))
        return [token for token in tokens if any(token in text for text in texts)]

    def turns(self, messages: Sequence[Message], *, every: bool = True) -> Iterator[Turn]:
        """See `Template`; a template that refuses half an exchange is run on whole exchanges, unless `every`."""
        fields = [message._asdict() for message in messages]
        _check_work(messages, every=every)
        text = self._text(fields, prompt=False)
        at = 0
        for number, message in enumerate(messages, start=1):
            if not every and message.role != ASSISTANT and number < len(messages):
                yield Turn([], [], [])
                continue
            stop = len(text) if number == len(messages) else self._reach(fields[:number], text, at=at)
            start = at
            if message.role == ASSISTANT:
                start = self._reach(fields[: number - 1], text, at=at, prompt=True)
            if start > stop:
                raise TemplateRefused(f"the chat template asks for an answer after message {number} has ended")
            said = text[start:stop]
            end = len(said.rstrip()) if message.role == ASSISTANT else len(said)
            if message.role == ASSISTANT and message.content.strip() and not end:
                raise TemplateRefused(f"the chat template writes nothing for the answer in message {number}")
            yield Turn(_part(text[at:start]), _part(said[:end]), _part(said[end:]))
            at = stop

    def prompt(self, messages: Sequence[Message]) -> list[Span]:
        """See `Template`; one span, as transformers tokenizes it."""
        return [_part(self._text([message._asdict() for message in messages], prompt=True))]

    def field_written(self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> str | None:
        """See `Template`; found by running the template with and without the fields."""
        own = {"messages", "add_generation_prompt", *(name for name, _ in self.variables)}
        variables = {name: record[name] for name in _variables_of(self.source) & record.keys() - own}
        bare = [{"role": message["role"], "content": message["content"]} for message in messages]
        names = [*dict.fromkeys(name for message in messages for name in message if name not in bare[0]), *variables]
        if not names:
            return None
        try:
            text = self._text(bare, prompt=False)
        except TemplateRefused:
            return None  # refused later, when the conversation is written

        def is_written(names: Sequence[str]) -> bool:
            names_in_use = {"role", "content", *names}
            filtered = [
                {name: value for name, value in message.items() if name in names_in_use} for message in messages
            ]
            record_fields = {name: value for name, value in variables.items() if name in names_in_use}
            try:
                return self._text(filtered, prompt=False, record=record_fields) != text
            except TemplateRefused:
                return True

        if not is_written(names):
            return None
        several = ", ".join(names[:_MOST_TRIED])  # several together, or one of very many
        return next((name for name in names[:_MOST_TRIED] if is_written([name])), several)

    def _reach(self, messages: list[dict[str, str]], full_text: str, *, at: int, prompt: bool = False) -> int:
        """The end of these messages in the whole text."""
        if not messages and not prompt:
            return at
        text = self._text(messages, prompt=prompt)
        if not full_text.startswith(text) or len(text) < at:
            raise TemplateRefused(
                f"the chat template writes the first {len(messages)} messages differently when more follow,"
                " so its turns cannot be told apart"
            )
        return len(text)

    def _text(
        self, messages: Sequence[Mapping[str, Any]], *, prompt: bool, record: Mapping[str, Any] = _NO_FIELDS
    ) -> str:
        import jinja2

        try:
            template = _compiled(self.source)
            characters = sum(len(str(value)) for fields in (*messages, record) for value in fields.values())
            template.environment.begin(messages=len(messages), characters=characters)
            variables = {**_NONE_GIVEN, **record, "messages": messages, "add_generation_prompt": prompt}
            variables |= dict(self.variables)
            return str(template.environment.rendered(template, variables))
        except (jinja2.TemplateError, *_WHAT_RUNNING_RAISES) as error:
            raise TemplateRefused(f"the chat template fails: {' '.join(str(error).split())[:200]}") from error


def _check_work(messages: Sequence[Message], *, every: bool) -> None:
    """Refuse a conversation with so many turns that running the template for each of them would take hours."""
    work = written = 0
    for number, message in enumerate(messages, start=1):
        written += len(message.content)
        runs = (1 if every or message.role == ASSISTANT else 0) + (message.role == ASSISTANT)
        work += runs * (number + written // _CHARACTERS_OF_A_MESSAGE)
    if work > _MOST_WORK:
        raise TemplateRefused(
            f"{len(messages):,} messages need {work:,} in all runs of the chat template;"
            f" the limit is {_MOST_WORK:,}: divide the conversation"
        )


def _part(text: str) -> list[str | int]:
    return [text] if text else []


@lru_cache(maxsize=4)
def _compiled(source: str) -> Any:
    """The compiled template; one for each process."""
    try:
        import jinja2

        from mdata.chat.template_limits import LimitedEnvironment
    except ImportError as error:
        raise UsageError(
            "the tokenizer's chat template needs jinja2, which is not installed",
            fix=f"pip install jinja2, or {install_command('chat')}; or --chat-template chatml",
        ) from error
    extensions = ["jinja2.ext.loopcontrols", _generation()]
    environment = LimitedEnvironment({"tojson": _as_json}, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _refusal()
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, *_WHAT_COMPILING_RAISES) as error:
        raise UsageError("the chat template is not valid Jinja", found=" ".join(str(error).split())[:200]) from error


@lru_cache(maxsize=4)
def _variables_of(source: str) -> frozenset[str]:
    """The variables that a template uses but does not set."""
    from jinja2 import meta

    environment = _compiled(source).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys())


def _as_json(
    value: Any,
    indent: int | None = None,
    *,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
