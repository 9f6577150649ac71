"""Chooses the chat template: the tokenizer's own, one from a file, ChatML, or a plain one.

By default it is the tokenizer's own if its folder has one (chat_template.jinja, or chat_template in
tokenizer_config.json), otherwise ChatML. ChatML and plain give control tokens as ids. How a tokenizer's template is run
is in mdata/chat/jinja_template.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from mdata.chat.jinja_template import JinjaTemplate
from mdata.chat.loss_spans import NO_VARIABLES, Span, Template, TemplateRefused, Turn, spans_of
from mdata.errors import UsageError, few, os_errors_named
from mdata.sources.conversation import ASSISTANT, Message
from mdata.tokenizers.base.tokenizer import Tokenizer, token_id
from mdata.util.config_text import parse_json
from mdata.util.regular_files import regular_file

CHATML, PLAIN, OWN = "chatml", "plain", "tokenizer"
TEMPLATE_SOURCE = "chat_template_source"  # of a corpus and of a run, see `source_to_record`
START, END = "<|im_start|>", "<|im_end|>"
# Those of OpenAI's chats. Another is more likely an error of spelling, whose turn would be context without a word.
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")
TEMPLATE_FILE = "chat_template.jinja"  # beside a tokenizer
_CONFIG = "tokenizer_config.json"
_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def choose_template(
    choice: str | None, tokenizer: Tokenizer, *, model: str | None = None, date: str | None = None
) -> Template:
    """The template for a tokenizer.

    Args:
        choice: "tokenizer", "chatml", "plain", the path of a file of jinja, or None.
        tokenizer: whose tokens it uses.
        model: the tokenizer's folder or file, beside which chat_template.jinja may be.
        date: YYYY-MM-DD, for templates in Jinja that write today's date; None: they have none.

    Raises:
        UsageError: the tokenizer lacks the template or its tokens, the file is not a template, the date is invalid, or
            jinja2 is not installed.
    """
    own = _own_template(tokenizer, model) if choice in (None, OWN) else None
    if choice == PLAIN:
        return _plain(tokenizer)
    if choice == CHATML or (choice is None and own is None):
        return _chatml(tokenizer)
    if choice in (None, OWN):
        if own is None:
            raise UsageError(
                "the tokenizer has no chat template of its own",
                expected=f"{TEMPLATE_FILE} beside it, or chat_template in {_CONFIG}",
                fix=f"{CHATML}, {PLAIN}, or a Jinja file",
            )
        return JinjaTemplate(OWN, own, _variables(tokenizer), date).checked()
    path = Path(str(choice))
    template = JinjaTemplate(path.name, _text_of(path), _variables(tokenizer), date).checked()
    if not template.reads_messages:
        raise UsageError(
            f"{path} is not a chat template",
            found="it does not use the variable messages",
            expected="Jinja such as {% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
        )
    return template


@dataclass(frozen=True)
class _RoleAndContent:
    """A template that uses no other field, and knows `ROLES`."""

    @property
    def takes_fields(self) -> bool:
        """See `Template`."""
        return False

    def whole(self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> None:
        """See `Template`."""

    def spelled_tokens(self, tokens: Iterable[str]) -> list[str]:
        """See `Template`: control tokens are ids."""
        return []

    @staticmethod
    def check_roles(messages: Sequence[Message], name: str) -> None:
        """Raise TemplateRefused for the first message whose role is not one of `ROLES`."""
        for number, message in enumerate(messages, start=1):
            if message.role not in ROLES:
                raise TemplateRefused(
                    f"message {number}: role {message.role!r} is unknown to the chat template {name}, which has"
                    f" {', '.join(ROLES)}; a Jinja file can have others"
                )

    def prompt(self: Template, messages: Sequence[Message]) -> list[Span]:
        """See `Template`; what a training on the assistant's turns has before the last of them."""
        spans = spans_of([*messages, Message(ASSISTANT, "")], self, train_on=ASSISTANT)
        return spans[: 2 * sum(message.role == ASSISTANT for message in messages) + 1]


@dataclass(frozen=True)
class ChatMl(_RoleAndContent):
    """<|im_start|>role, a new line, the content, <|im_end|>, a new line."""

    start: int
    end: int
    name = CHATML
    spells_tokens = False

    @property
    def fingerprint(self) -> str:
        """See `Template`."""
        return _fingerprint(self.name, self.start, self.end)

    def turns(
        self,
        messages: Sequence[Message],
        *,
        separate: Sequence[bool] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> Iterator[Turn]:
        """See `Template`."""
        self.check_roles(messages, self.name)
        for message in messages:
            yield Turn([self.start, f"{message.role}\n"], [message.content, self.end], ["\n"])


@dataclass(frozen=True)
class Plain(_RoleAndContent):
    """Role: content, two new lines; the assistant's turns end with the end-of-document token. For any tokenizer."""

    end: int
    name = PLAIN
    spells_tokens = False

    @property
    def fingerprint(self) -> str:
        """See `Template`."""
        return _fingerprint(self.name, self.end)

    def turns(
        self,
        messages: Sequence[Message],
        *,
        separate: Sequence[bool] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> Iterator[Turn]:
        """See `Template`."""
        self.check_roles(messages, self.name)
        for message in messages:
            end: list[str | int] = [self.end] if message.role == ASSISTANT else []
            yield Turn([f"{message.role.capitalize()}:"], [f" {message.content}", *end], ["\n\n"])


def _chatml(tokenizer: Tokenizer) -> ChatMl:
    ids = {text: token_id(tokenizer, text) for text in (START, END)}
    missing = [text for text, id in ids.items() if id is None]
    if missing:
        raise UsageError(
            f"the tokenizer has no token {' and no '.join(missing)}, which ChatML needs",
            fix=" or ".join(filter(None, ["a tokenizer that has them", _plain_advice(tokenizer)])),
        )
    start, end = (int(id) for id in ids.values() if id is not None)
    return ChatMl(start, end)


def _plain(tokenizer: Tokenizer) -> Plain:
    if tokenizer.eod is None:
        raise UsageError(
            f"--chat-template {PLAIN} ends turns with the end-of-document token, and the tokenizer has none",
            fix="use a tokenizer that has one, or a Jinja file",
        )
    return Plain(tokenizer.eod)


def check_spelling(template: Template, tokenizer: Tokenizer) -> None:
    """Refuse a template that writes control tokens as text if the tokenizer encodes them as plain text.

    Raises:
        UsageError: names the tokens, and what to use.
    """
    written = template.spelled_tokens(text for text in tokenizer.special_ids if text)
    _, lengths = tokenizer.encode_batch(written)
    split = [text for text, length in zip(written, lengths.tolist(), strict=True) if length > 1]
    if not split:
        return
    ways = ["a Jinja file that does not write them"]
    if plain := _plain_advice(tokenizer):
        ways.insert(0, plain)
    if all(token_id(tokenizer, text) is not None for text in (START, END)):
        ways.insert(0, f"--chat-template {CHATML}, which writes them as ids")
    if tokenizer.options.get("special_in_text") == "plain":
        ways.insert(0, "mdata preprocess --special-tokens-in-text special")
    raise UsageError(
        f"chat template {template.name} writes control tokens as text, which {tokenizer.name} encodes as plain text",
        found=few(split),
        fix=", or ".join(ways),
    )


def _plain_advice(tokenizer: Tokenizer) -> str | None:
    return (
        None if tokenizer.eod is None else f"--chat-template {PLAIN}, which ends answers with the end-of-document token"
    )


def _own_template(tokenizer: Tokenizer, model: str | None) -> str | None:
    place = Path(model) if model else None
    beside = place and (place if place.is_dir() else place.parent) / TEMPLATE_FILE
    if beside and beside.is_file():
        return _text_of(beside)
    template = _config(tokenizer).get("chat_template")
    if isinstance(template, list):
        entries = [(entry.get("name"), entry.get("template")) for entry in template if isinstance(entry, Mapping)]
        named = [(name, text) for name, text in entries if isinstance(name, str) and isinstance(text, str)]
        template = next((text for name, text in reversed(named) if name == "default"), None)
        if named and template is None:
            raise UsageError(
                f"{_CONFIG} has chat templates, and none is called default",
                found=few([repr(name) for name, _ in named], 4),
                fix=f"--chat-template with a Jinja file of one of them, {CHATML} or {PLAIN}",
            )
    return template if isinstance(template, str) else None


def source_to_record(template: Template, tokenizer: Tokenizer) -> str | None:
    """The text of a template in Jinja that cannot be had from the tokenizer's files; None: it can, or is none."""
    if not isinstance(template, JinjaTemplate) or template.source == _config(tokenizer).get("chat_template"):
        return None
    return template.source


class RecordedTemplate(NamedTuple):
    """The template of a corpus' conversations, by its name and by `source_to_record`."""

    name: str
    source: str | None = None

    @property
    def is_stored(self) -> bool:
        """Whether it can be had; versions before 0.1.0 did not record the text of a file."""
        return self.source is not None or self.name in (CHATML, PLAIN, OWN)

    def of(self, tokenizer: Tokenizer, *, date: str | None = None) -> Template:
        """The template itself.

        Raises:
            UsageError: it cannot be run, see `choose_template`.
        """
        if self.source is None:
            return choose_template(self.name, tokenizer, date=date)
        return JinjaTemplate(self.name, self.source, _variables(tokenizer), date).checked()

    @property
    def facts(self) -> dict[str, Any]:
        """As a run records it with its tokenizer, for `template_of_facts`."""
        return {"chat_template": self.name} | ({} if self.source is None else {TEMPLATE_SOURCE: self.source})


def template_of_facts(facts: Mapping[str, Any]) -> RecordedTemplate | None:
    """The template that a run records with its tokenizer; None: it had no conversations, or the tokenizer's own."""
    return recorded_template({**facts, "chat_template": {"name": facts.get("chat_template")}})


def recorded_template(options: Mapping[str, Any]) -> RecordedTemplate | None:
    """The template in the options that a manifest records; None: there is none, or it is not known."""
    template, source = options.get("chat_template"), options.get(TEMPLATE_SOURCE)
    name = template.get("name") if isinstance(template, Mapping) else None
    return RecordedTemplate(name, source if isinstance(source, str) else None) if isinstance(name, str) else None


def _text_of(path: Path) -> str:
    with os_errors_named("reading the chat template"):
        content = regular_file(path).read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a chat template", found=str(error), expected="text in UTF-8") from error


def _variables(tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    config = _config(tokenizer)
    values = {name: config.get(name) for name in _VARIABLES}
    texts = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in values.items()}
    return tuple((name, text) for name, text in texts.items() if isinstance(text, str))


def _config(tokenizer: Tokenizer) -> Mapping[str, Any]:
    content = tokenizer.files.get(_CONFIG)
    try:
        config = parse_json(content) if content else {}
    except ValueError as error:
        raise UsageError(f"{_CONFIG} cannot be read", found=str(error)) from error
    return config if isinstance(config, Mapping) else {}


def _fingerprint(name: str, *ids: int) -> str:
    return blake3(json.dumps([name, *ids]).encode()).hexdigest()
