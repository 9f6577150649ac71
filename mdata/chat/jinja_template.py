"""A tokenizer's own chat template, written in Jinja: run in a sandbox, with limits and without access to the clock.

A template gives the text of a whole conversation. Turns are found by running it on the messages before a turn, with the
prompt that requests an answer, and on the messages up to it: each text has to begin with the previous one, as when a
model is used turn by turn. A template that changes earlier turns later is refused, conversation by conversation, unless
each answer is in a {% generation %} block; the block is then what is trained on, as in transformers.
Control tokens are part of the text. A message reaches the template with all of its fields, and so do the record's
`tools`, `documents` and `chat_template_kwargs`, as with transformers' apply_chat_template; without them `tools` and
`documents` are None. As there, null content is no field, and reasoning has all of its names (`REASONING`).
`strftime_now` has no clock, as the tokens would depend on the day of the command: it writes a given day, or is missing.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

from blake3 import blake3

from mdata.chat.loss_spans import NO_VARIABLES, Span, TemplateRefused, Turn
from mdata.errors import UsageError, counted, install_command
from mdata.sources.conversation import ASSISTANT, BadConversation, Message, Whole

# Errors of faulty templates, besides Jinja's own: RuntimeError covers RecursionError.
_WHAT_COMPILING_RAISES = (SyntaxError, ValueError, OverflowError, RuntimeError, MemoryError)
_WHAT_RUNNING_RAISES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


# What transformers gives to every template.
_NONE_GIVEN = MappingProxyType({"tools": None, "documents": None})
# Messages written over all runs for one conversation (about a minute); a long message counts as several.
_MOST_WORK, _CHARACTERS_OF_A_MESSAGE = 2_000_000, 4096
_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")
# Around {% generation %} blocks: noncharacters, which no text should have.
_BEGIN, _END = "\ufdd0", "\ufdd1"
# Names of an answer's reasoning, the one that counts first: the first of them has it, and the second if it is absent.
REASONING = ("reasoning_content", "thinking", "reasoning")
_CLOCK = "strftime_now"
_WIDTH = re.compile(r"%[^a-zA-Z%]*[0-9]")  # pads a field to any length
_MOST_TRIED = 20  # fields of a refused record that are tried, one run of the template each
# What a record gives to the template by itself, and the object with whatever else a template has as options.
_GIVEN, OPTIONS = ("tools", "documents"), "chat_template_kwargs"


@dataclass(frozen=True)
class JinjaTemplate:
    """See `mdata.chat.loss_spans.Template`.

    Args:
        name: its origin, for messages.
        source: the template.
        variables: bos_token and similar, with their texts.
        date: what `strftime_now` writes, as YYYY-MM-DD; None: the template has no such function.
    """

    name: str
    source: str
    variables: tuple[tuple[str, str], ...]
    date: str | None = None
    spells_tokens = True
    takes_fields = True

    @property
    def fingerprint(self) -> str:
        """See `Template`."""
        dated = [] if self.date is None else [self.date]
        return blake3(json.dumps([self.source, *sorted(self.variables), *dated]).encode()).hexdigest()

    def checked(self) -> JinjaTemplate:
        """This template, after checking that it can be run.

        Raises:
            UsageError: jinja2 is not installed, the template is invalid, or the date is invalid.
        """
        if self.date is not None:
            _midnight(self.date)
        _compiled(self.source)
        return self

    @property
    def reads_messages(self) -> bool:
        """Whether it uses the variable with the conversation."""
        return "messages" in _variables_of(self.source)

    def spelled_tokens(self, tokens: Iterable[str]) -> list[str]:
        """See `Template`: tokens in the template itself, in its variables, and in its text for a short conversation."""
        used = _variables_of(self.source)
        texts = [self.source, *(text for name, text in self.variables if name in used)]
        probe = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
        with suppress(TemplateRefused):  # for example, it needs a system message
            texts.append(self._text(probe, prompt=False))
        return [token for token in tokens if any(token in text for text in texts)]

    def turns(
        self,
        messages: Sequence[Message],
        *,
        separate: Sequence[bool] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> Iterator[Turn]:
        """See `Template`; a template that rewrites old turns may mark the answers by {% generation %} blocks."""
        separate = [True] * len(messages) if separate is None else separate
        try:
            yield from list(self._turns_by_prefix(messages, separate=separate, variables=variables))
        except TemplateRefused as refusal:
            marked = None
            if _BLOCK.search(self.source):
                with suppress(TemplateRefused):
                    marked = self._marked_turns(messages, separate=separate, variables=variables)
            if marked is None:
                raise refusal from None
            yield from marked

    def _marked_turns(
        self, messages: Sequence[Message], *, separate: Sequence[bool], variables: Mapping[str, Any]
    ) -> list[Turn] | None:
        """The turns by {% generation %} blocks; None: not every separate turn is an answer with a block of its own."""
        answers = [message.role == ASSISTANT for message in messages]
        if any(alone and not answer for alone, answer in zip(separate, answers, strict=True)):
            return None
        fields = [message.given() for message in messages]
        text = self._text(fields, prompt=False, record=variables)
        self._check_written(messages, fields, text, variables)
        marked = self._text(fields, prompt=False, record=variables, marks=True)
        if marked.count(_BEGIN) != sum(answers):
            marked = marked.replace(_END + _BEGIN, "")  # an answer's blocks, one right after the other
        between, marks = re.split(f"[{_BEGIN}{_END}]", marked), re.findall(f"[{_BEGIN}{_END}]", marked)
        if marks != [_BEGIN, _END] * sum(answers) or "".join(between) != text:
            return None
        turns, before = list[Turn](), ""
        blocks = iter(zip(between[::2], between[1::2], strict=False))
        for message, alone in zip(messages, separate, strict=True):
            context, said = next(blocks) if message.role == ASSISTANT else ("", "")
            if alone and not said.strip() and (message.content.strip() or message.fields):
                return None
            if alone:
                turns.append(Turn(_part(before + context), _part(said), []))
                before = ""
            else:
                turns.append(Turn([], [], []))
                before += context + said
        last = turns[-1]
        turns[-1] = last._replace(behind=[*last.behind, *_part(before + between[-1])])
        return turns

    def _turns_by_prefix(
        self, messages: Sequence[Message], *, separate: Sequence[bool], variables: Mapping[str, Any]
    ) -> Iterator[Turn]:
        """It runs up to separate turns only: it may refuse half an exchange, or rewrite old turns."""
        fields = [message.given() for message in messages]
        _check_work(messages, separate=separate)
        text = self._text(fields, prompt=False, record=variables)
        self._check_written(messages, fields, text, variables)
        at = 0
        for number, message in enumerate(messages, start=1):
            if not separate[number - 1] and number < len(messages):
                yield Turn([], [], [])
                continue
            stop = (
                len(text) if number == len(messages) else self._reach(fields[:number], text, at=at, variables=variables)
            )
            start = at
            if message.role == ASSISTANT and separate[number - 1]:
                start = self._reach(fields[: number - 1], text, at=at, prompt=True, variables=variables)
            if start > stop:
                raise TemplateRefused(f"the chat template asks for an answer after message {number} has ended")
            said = text[start:stop]
            end = len(said.rstrip()) if message.role == ASSISTANT else len(said)
            written = message.content.strip() or message.fields
            if message.role == ASSISTANT and separate[number - 1] and written and not end:
                raise TemplateRefused(f"the chat template writes nothing for the answer in message {number}")
            yield Turn(_part(text[at:start]), _part(said[:end]), _part(said[end:]))
            at = stop

    def prompt(self, messages: Sequence[Message]) -> list[Span]:
        """See `Template`; one span, as transformers tokenizes it."""
        fields = [message.given() for message in messages]
        text = self._text(fields, prompt=True)
        self._check_written(messages, fields, text, NO_VARIABLES, prompt=True)
        return [_part(text)]

    def whole(self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> Whole | None:
        """See `Template`; found by running the template without each of the fields in turn."""
        own = {"messages", "add_generation_prompt", _CLOCK, *(name for name, _ in self.variables)}
        used = _variables_of(self.source) - own
        options = _as_object(record.get(OPTIONS))
        given = {name: _as_object(record[name]) for name in _GIVEN if name in record}
        if isinstance(options, Mapping):
            given |= {name: value for name, value in options.items() if value is not None}
        variables = {name: value for name, value in given.items() if name in used}
        others = [name for name in record if name in used and name not in given]
        names = [*dict.fromkeys(name for message in messages for name in message if name not in ("role", "content"))]
        unusual = any(not isinstance(message["content"], str) for message in messages)
        if not (names or variables or others or unusual):
            return None
        try:
            text = self._text(messages, prompt=False, record=variables)
            if (parsed := _with_objects(messages, text)) is not None:
                messages = parsed
                text = self._text(messages, prompt=False, record=variables)
        except TemplateRefused:  # it says why when the conversation is written
            return Whole(frozenset((*names, *given, OPTIONS)), messages, variables)
        for name in others[:_MOST_TRIED]:
            if self._differs(text, messages, {**variables, name: record[name]}):
                raise BadConversation(
                    f"{name[:100]!r}, which the chat template uses, is a field of the record; put it into {OPTIONS!r},"
                    " or remove it if it is not meant for the template"
                )
        written = {name for name in names[:_MOST_TRIED] if self._differs(text, _without(messages, name), variables)}
        by_variable = {name for name in variables if self._differs(text, messages, _without([variables], name)[0])}
        if variables.keys() - set(_GIVEN):  # they have reached it, even if they say what it does anyway
            written.add(OPTIONS)
        bare = [{"role": message["role"], "content": message["content"]} for message in messages]
        if self._differs(text, bare, {}) and not written | by_variable:  # one of several, or one of very many
            written.update(names, variables)
        if unusual:
            self._check_contents(messages, text)
        elif not written and not by_variable:
            return None
        return Whole(frozenset(written | by_variable), messages, variables)

    def _differs(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        prompt: bool = False,
    ) -> bool:
        try:
            return self._text(messages, prompt=prompt, record=variables) != text
        except TemplateRefused:
            return True

    def _check_contents(self, messages: Sequence[Mapping[str, Any]], text: str) -> None:
        """Refuse a template that writes a list as Python does."""
        for number, message in enumerate(messages, start=1):
            content = message["content"]
            if isinstance(content, list) and str(content) in text:
                raise BadConversation(f"message {number}: its content is a list, which the chat template cannot write")

    def _check_written(
        self,
        messages: Sequence[Message],
        fields: Sequence[Mapping[str, Any]],
        text: str,
        variables: Mapping[str, Any],
        *,
        prompt: bool = False,
    ) -> None:
        """Refuse a role that the template does not have and does not write, as its message would be lost.

        Args:
            fields: what the template gets of each message. text: what it wrote for them.
            prompt: whether the text ends with the request for an answer.
        """
        roles = _roles_in(self.source)
        doubtful = [
            number
            for number, message in enumerate(messages)
            if message.role not in ("user", ASSISTANT, *roles)
            and (content := message.content.strip())
            and not (message.role == "system" and content in text)
        ]
        if not doubtful:
            return
        marked = list(fields)
        for number in doubtful:
            marked[number] = _with_mark(fields[number], f"{_BEGIN}{number}{_END}")
        with suppress(TemplateRefused):
            marked_text = self._text(marked, prompt=prompt, record=variables)
            doubtful = [number for number in doubtful if f"{_BEGIN}{number}{_END}" not in marked_text]
        for number in doubtful[:_MOST_TRIED]:
            marked_messages = [*fields[:number], marked[number], *fields[number + 1 :]]
            if not self._differs(text, marked_messages, variables, prompt=prompt):
                known = f"; it has {', '.join(roles)}" if roles else ""
                raise TemplateRefused(
                    f"message {number + 1}: role {messages[number].role!r} is unknown to the chat template,"
                    f" which writes nothing for it{known}"
                )

    def _reach(
        self,
        messages: Sequence[Mapping[str, Any]],
        full_text: str,
        *,
        at: int,
        variables: Mapping[str, Any],
        prompt: bool = False,
    ) -> int:
        """The end of these messages in the whole text."""
        if not messages and not prompt:
            return at
        text = self._text(messages, prompt=prompt, record=variables)
        if not full_text.startswith(text) or len(text) < at:
            if prompt and full_text.startswith(without := self._text(messages, prompt=False, record=variables)):
                raise TemplateRefused(
                    f"the prompt for the answer in message {len(messages) + 1} adds {text[len(without) :][:60]!r}, with"
                    f" which the chat template does not begin that answer ({full_text[len(without) :][:60]!r}); a field"
                    " such as reasoning_content, or an option in chat_template_kwargs, may change that"
                )
            raise TemplateRefused(
                f"the chat template writes the first {len(messages)} messages differently when more follow,"
                " so its turns cannot be told apart"
            )
        return len(text)

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool,
        record: Mapping[str, Any] = NO_VARIABLES,
        marks: bool = False,
    ) -> str:
        import jinja2

        try:
            template = _compiled(self.source, True) if marks else _compiled(self.source)
            characters = sum(len(str(value)) for fields in (*messages, record) for value in fields.values())
            template.environment.begin(messages=len(messages), characters=characters)
            given = [_as_transformers_has_it(message) for message in messages]
            variables = {**_NONE_GIVEN, **record, "messages": given, "add_generation_prompt": prompt}
            variables |= dict(self.variables)
            if self.date is not None:
                variables[_CLOCK] = _clock(self.date)
            return str(template.environment.rendered(template, variables))
        except (jinja2.TemplateError, *_WHAT_RUNNING_RAISES) as error:
            if self.date is None and _CLOCK in str(error):
                raise TemplateRefused("the chat template writes the date: give --chat-date YYYY-MM-DD") from error
            raise TemplateRefused(f"the chat template fails: {' '.join(str(error).split())[:200]}") from error


def _as_transformers_has_it(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message without null fields, and with its reasoning under each name that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None and None not in message.values():
        return message
    message = {name: value for name, value in message.items() if value is not None}
    first, second, _ = REASONING
    return message if reasoning is None else {second: reasoning, **message, first: reasoning}


def _midnight(date: str) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise UsageError(f"--chat-date {date} is no day", expected="YYYY-MM-DD, such as 2026-11-27") from error


@lru_cache(maxsize=4)
def _clock(date: str) -> Callable[[str], str]:
    day = _midnight(date)

    def strftime_now(format: str) -> str:
        if _WIDTH.search(format):
            raise ValueError(f"strftime_now with a width: {format[:40]!r}")
        return day.strftime(format)

    return strftime_now


def _with_mark(message: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """The message with a mark around its content."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{mark}{content}{mark}"}
    part = {"type": "text", "text": mark}
    return {**message, "content": [part, *content, part]}


@lru_cache(maxsize=4)
def _roles_in(source: str) -> tuple[str, ...]:
    """The roles with which a template compares those of messages."""
    from jinja2 import nodes

    roles: list[str] = []
    for comparison in _compiled(source).environment.parse(source).find_all(nodes.Compare):
        texts = [const.value for const in comparison.find_all(nodes.Const) if isinstance(const.value, str)]
        if "role" in texts or any(field.attr == "role" for field in comparison.find_all(nodes.Getattr)):
            roles += [text for text in texts if text != "role"]
    return tuple(dict.fromkeys(roles))


def _without(messages: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    return [{other: value for other, value in message.items() if other != name} for message in messages]


def _as_object(value: Any) -> Any:
    """What a string of JSON holds, since many datasets have tools as such; other values as they are."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _with_objects(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]] | None:
    """The messages with arguments of calls as objects, if they are strings of JSON that the text has in quotes.

    None: there are none. OpenAI has arguments as strings, most templates write them with `tojson`.
    """
    changed = False

    def call(given: Any) -> Any:
        nonlocal changed
        if not isinstance(given, Mapping):
            return given
        if isinstance(given.get("function"), Mapping):
            return {**given, "function": call(given["function"])}
        arguments = given.get("arguments")
        if not isinstance(arguments, str) or arguments in text:
            return given
        value, quoted = _as_object(arguments), json.dumps(arguments, ensure_ascii=False)[1:-1]
        if value is arguments or quoted not in text:
            return given
        changed = True
        return {**given, "arguments": value}

    parsed = [
        {**message, "tool_calls": [call(tool_call) for tool_call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]
    return parsed if changed else None


def _check_work(messages: Sequence[Message], *, separate: Sequence[bool]) -> None:
    """Refuse a conversation with too many turns: running the template for each would take hours."""
    work = written = 0
    for number, message in enumerate(messages, start=1):
        written += len(message.content) + (len(str(message.fields)) if message.fields else 0)
        runs = (1 + (message.role == ASSISTANT)) * separate[number - 1]
        work += runs * (number + written // _CHARACTERS_OF_A_MESSAGE)
    if work > _MOST_WORK:
        raise TemplateRefused(
            f"{counted(len(messages), 'message needs', 'messages need')} {work:,} in all runs of the chat template;"
            f" the limit is {_MOST_WORK:,}: divide the conversation"
        )


def _part(text: str) -> list[str | int]:
    return [text] if text else []


@lru_cache(maxsize=4)
def _compiled(source: str, marks: bool = False) -> Any:
    """The compiled template; one for each process. marks: its {% generation %} blocks are between _BEGIN and _END."""
    try:
        import jinja2

        from mdata.chat.template_limits import LimitedEnvironment
    except ImportError as error:
        raise UsageError(
            "the tokenizer's chat template needs jinja2, which is not installed",
            fix=f"pip install jinja2, or {install_command('chat')}; or --chat-template chatml",
        ) from error
    extensions = ["jinja2.ext.loopcontrols", _generation(marks)]
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


def _generation(marks: bool) -> Any:
    """Jinja's extension for {% generation %} ... {% endgeneration %}: its content, unchanged, or between marks."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            scope = nodes.Scope(body, lineno=line)
            if not marks:
                return scope
            begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END))
            return [begin, scope, end]

    return Generation
