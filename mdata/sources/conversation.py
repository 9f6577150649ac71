"""A record's conversation: [{"role", "content"}, ...], or [{"from", "value"}, ...] as ShareGPT writes it.

It becomes a list of texts, so that code that passes texts on works unchanged: role, content, role, content ..., or,
if a chat template of the tokenizer writes more than that (tool calls, reasoning, tools of the record), the whole
conversation as one text of JSON.

A flag of a message (`weight`, `train`, `loss` ...: 0 or 1) decides whether it is trained on; without one
--chat-train-on does. A field that nothing writes is an error that names it, unless it is metadata by the last word of
its name (`message_id`, `createdAt`), or repeats the content. Fields of the record are ignored, as for text, except
those that carry a part of the conversation (tools, files, a prompt that no message contains ...) or ask for another
loss. Null is the same as no field. ShareGPT's speakers become user, assistant, system and tool; an unknown one is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import orjson

ASSISTANT = "assistant"
TRAIN_ON = (ASSISTANT, "all", "last")
_FORMS = (("role", "content"), ("from", "value"))
_MODEL_NAMES = ("gpt", "chatgpt", "bing", "bard", "model")
_SPEAKERS = MappingProxyType(
    {"human": "user", **dict.fromkeys(_MODEL_NAMES, ASSISTANT)}
    | {role: role for role in ("user", ASSISTANT, "system", "tool")}
)
_ALSO_THE_MODEL = (ASSISTANT, "ai", "bot", "chatbot")
# A role becomes part of the template's text; other characters could imitate another turn.
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,32}")


def _words(names: str) -> frozenset[str]:
    return frozenset(names.split())


# A message's field is metadata if the last word of its name is one of these, and none refers to media or the loss.
METADATA_WORDS = _words(
    "at category control count country date hash header id identifier ids idx index info ip label lang language"
    " length locale meta metadata model moderation number quality rating redacted score scores source state status time"
    " timestamp toxic toxicity type url uuid version"
)
_MEDIA = _words("attachment attachments audio audios file files image images media video videos")
_NOT_METADATA = _MEDIA | _words("loss mask masked masks train trained training weight weights")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")

# Names of fields in lower case, without "_" and "-". These of a record carry text or media of its conversation.
_CARRIES_TEXT = _MEDIA | _words(
    "builtintools chattemplatekwargs customtools documents functions imageurl inputaudio pythontools tools xmltools"
)
# Lists and objects under a name with one of these words are tools, or calls of them.
_TOOLS = _words("function functions tool tools")
# An example of its own, unless the conversation contains it.
_EXAMPLE = _words("completion history input instruction instructions output prompt response")
_SYSTEM = _words("developermessage system systeminstruction systeminstructions systemmessage systemprompt")
# True or 1: train on this; false or 0: do not.
_FLAGS = _words("computeloss loss lossweight shouldtrain train trainable trained training trainon trainonturn weight")
_NEGATIVE_FLAGS = _words("ignore ignoreloss noloss")
_MASKS = _words(
    "assistantmask assistantmasks completionmask ismasked lossmask lossmasks lossscale lossscales lossweights mask"
    " masked masks steplossmask traindetail"
)
_LONGEST_NAME = 40  # longer than any name above; also bounds the memory for names in records
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class BadConversation(Exception):
    """A value that is not a usable conversation; the message says why."""


class Message(NamedTuple):
    """One turn.

    Args:
        content: its text, of all parts.
        fields: the whole message, if a template writes more of it.
        trained: whether it is trained on; None: its role decides.
    """

    role: str
    content: str
    fields: Mapping[str, Any] | None = None
    trained: bool | None = None

    def given(self) -> Mapping[str, Any]:
        """What a template of the tokenizer gets."""
        return {"role": self.role, "content": self.content} if self.fields is None else self.fields


class Whole(NamedTuple):
    """A conversation of which a template writes more than role and content.

    Args:
        written: names of the fields that change the text, of messages and of the record.
        messages: as the template gets them. variables: of the template, from the record.
    """

    written: frozenset[str]
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]


class WritesMessages(Protocol):
    """The part of a template that decides which fields matter (`mdata.chat.loss_spans.Template`)."""

    @property
    def takes_fields(self) -> bool:
        """Whether it gets whole messages; otherwise only role and content."""

    def whole(self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> Whole | None:
        """What it gets if it writes more than role and text; None: these are all that it writes.

        Args:
            messages: whole ones, with role and content. record: the fields beside the conversation.

        Raises:
            BadConversation: it would write a value as text that is not text.
        """


def flat_messages(
    value: Any,
    train_on: str,
    *,
    record: Mapping[str, Any] = _NO_FIELDS,
    template: WritesMessages | None = None,
    context: int = 0,
) -> list[str]:
    """Role, content, role, content ..., or one text of JSON; see `conversation_of`.

    Args:
        value: parsed from JSON.
        train_on: "assistant" or "last": at least one turn must be the assistant's.
        record: the fields beside the conversation.
        template: the template that will write the conversation, if known.
        context: number of messages at the beginning that are not trained on, regardless of their content.

    Raises:
        BadConversation: names the message by its number (from 1), and the field.
    """
    if not isinstance(value, list) or not value:
        raise BadConversation(
            "not a list of messages" if not isinstance(value, list) else "a conversation without messages"
        )
    takes_fields = template is not None and template.takes_fields
    turns = [_message(message, number, train_on, parts=takes_fields) for number, message in enumerate(value, start=1)]
    roles = [turn.role for turn in turns]
    if train_on != "all" and ASSISTANT not in roles:
        named = ", ".join(dict.fromkeys(roles))
        raise BadConversation(f"it has no assistant turn to train on (roles: {named[:100]})")
    flat = [text for turn in turns for text in (turn.role, turn.content)]
    if (
        not record
        and not context
        and all(len(message) == 2 and turn.fields is None for message, turn in zip(value, turns, strict=True))
    ):
        return flat
    rendered = None
    if template is not None and takes_fields:
        messages = [_whole_message(turn, message) for turn, message in zip(turns, value, strict=True)]
        rendered = template.whole(messages, {name: field for name, field in record.items() if field is not None})
    _check_fields(value, record, flat, train_on, written=rendered and rendered.written, takes_fields=takes_fields)
    flags = [_flag(message, number) for number, message in enumerate(value, start=1)]
    by_role = trained_by_role(roles, train_on)
    trained = [by if flag is None else flag for flag, by in zip(flags, by_role, strict=True)]
    trained[:context] = [False] * context
    if not any(trained):
        names = dict.fromkeys(
            repr(name[:_LONGEST_NAME]) for message in value for name in message if _is_about_loss(name)
        )
        by = f" by {', '.join(names)} of its messages" if names else ""
        raise BadConversation(f"no turn is left to train on{by}")
    if rendered is None and trained == by_role:
        return flat
    if rendered is None:
        rendered = Whole(frozenset(), [{"role": turn.role, "content": turn.content} for turn in turns], _NO_FIELDS)
    stored = {"messages": rendered.messages, "variables": dict(rendered.variables)}
    try:
        return [orjson.dumps(stored if trained == by_role else {**stored, "trained": trained}).decode()]
    except TypeError as error:  # orjson's limits are narrower for writing
        raise BadConversation(f"it cannot be written as JSON: {error}") from error


def trained_by_role(roles: Sequence[str], train_on: str) -> list[bool]:
    """Whether each turn is trained on where no flag says otherwise."""
    last = max((number for number, role in enumerate(roles) if role == ASSISTANT), default=-1)
    return [
        train_on == "all" or (role == ASSISTANT and (train_on == ASSISTANT or number == last))
        for number, role in enumerate(roles)
    ]


def conversation_of(flat: Sequence[str]) -> tuple[list[Message], Mapping[str, Any]]:
    """The messages in a list from `flat_messages`, and the template's variables from the record."""
    if len(flat) != 1:
        return [Message(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)], _NO_FIELDS
    stored = orjson.loads(flat[0])
    messages, trained = stored["messages"], stored.get("trained") or [None] * len(stored["messages"])
    turns = [Message(m["role"], text_of(m.get("content")), m, by) for m, by in zip(messages, trained, strict=True)]
    return turns, stored["variables"]


def text_of(content: Any) -> str:
    """The text of a content: a string, a list of parts of text, or null."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _whole_message(turn: Message, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message without fields that are null, except for its content."""
    content = turn.content if turn.fields is None else turn.fields.get("content")
    return {"role": turn.role, "content": content, **dict(_further_fields(message))}


def _message(message: Any, number: int, train_on: str, *, parts: bool) -> Message:
    """A turn; with `parts` its content may be a list of texts, or null beside other fields: it then has `fields`."""
    if not isinstance(message, Mapping):
        raise BadConversation(f"message {number} is not an object")
    forms = [form for form in _FORMS if message.get(form[0]) is not None]
    if not forms:
        present = ", ".join(repr(name[:40]) for name in islice(message, 5)) or "none"
        raise BadConversation(f"message {number} has no role (fields: {present})")
    turns = [_turn(message, number, *form, train_on=train_on, parts=parts) for form in forms]
    if turns[0] != turns[-1]:
        raise BadConversation(f"message {number} has two roles or texts: in role and content, and in from and value")
    return turns[0]


def _turn(
    message: Mapping[str, Any], number: int, role_name: str, content_name: str, *, train_on: str, parts: bool
) -> Message:
    role, content = message[role_name], message.get(content_name)
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise BadConversation(f"message {number}: its {role_name} is not a name: {_excerpt(role)}")
    fields = None
    if not isinstance(content, str):
        kind = _kind(content) if content_name in message else "missing"
        if parts and isinstance(content, list):
            _check_parts(content, f"message {number} ({role})")
        elif not (parts and content is None and any(not _is_empty(x) for _, x in _further_fields(message))):
            raise BadConversation(f"message {number} ({role}): its {content_name} is {kind}, not a string")
        content, fields = text_of(content), message
    if role_name == "from":
        if role not in _SPEAKERS:
            speakers = ", ".join(_SPEAKERS)
            raise BadConversation(
                f"message {number}: unknown speaker {role!r} in 'from'; known speakers are {speakers}"
            )
        return Message(_SPEAKERS[role], content, fields)
    # Roles belong to the template, so they are not renamed; but the model's turns must not be silently left untrained.
    if train_on != "all" and role != ASSISTANT and role.lower() in (*_MODEL_NAMES, *_ALSO_THE_MODEL):
        raise BadConversation(f"message {number}: role {role!r} would not be trained on; the model is {ASSISTANT!r}")
    return Message(role, content, fields)


def _check_parts(content: Sequence[Any], where: str) -> None:
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadConversation(f"{where}: its content has a part that is not text: {_excerpt(kind)}")


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", dict: "an object", list: "a list", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), "not text")


def _excerpt(value: Any) -> str:
    """A value in a reason; of lists and objects only the kind, because Python cannot write deeply nested ones."""
    return _kind(value) if isinstance(value, dict | list) else repr(str(value)[:40])


def _check_fields(
    messages: Sequence[Mapping[str, Any]],
    record: Mapping[str, Any],
    flat: Sequence[str],
    train_on: str,
    *,
    written: frozenset[str] | None,
    takes_fields: bool,
) -> None:
    """Refuse fields that may carry text and are not written, or that ask for another loss.

    Args:
        takes_fields: the template gets whole messages; what it leaves out of turns that are not the model's, and names
            of speakers, is then left out here, too.
    """
    reached, lost = written or frozenset(), partial(_lost, takes_fields=takes_fields)
    roles, contents = flat[::2], flat[1::2]
    for number, (message, role, content) in enumerate(zip(messages, roles, contents, strict=True)):
        if len(message) == 2:
            continue
        for name, value in _further_fields(message):
            where = f"message {number + 1} ({role}): its {name[:_LONGEST_NAME]!r}"
            if _is_about_loss(name) or _is_metadata(name) or name in reached:
                continue
            if takes_fields and (role != ASSISTANT or name == "name") and _MEDIA.isdisjoint(_words_of(name)):
                continue
            ends_turn = _word(name) == "endturn" and value is True  # as the template does for every turn
            if not (ends_turn or value == content or _is_empty(value)):
                raise lost(where)
    begins_with_system = roles[0] in ("system", "developer")
    for name, value in record.items():
        where = f"the record's {name[:_LONGEST_NAME]!r}"
        if _is_about_loss(name):
            if not (_is_empty(value) if _is_mask(name) else _asks_for(name, value) in (None, True)):
                text = (
                    f"{where} is {_excerpt(value)}, but only messages and --chat-train-on ({train_on}) decide the loss"
                )
                raise BadConversation(text)
            continue
        if _is_empty(value) or name in reached:
            continue
        word = _word(name)
        is_lost = word in _CARRIES_TEXT or _holds_tools(name, value) or (word in _SYSTEM and not begins_with_system)
        if is_lost or (word in _EXAMPLE and not _is_said(value, contents)):
            raise lost(where)


def _is_about_loss(name: str) -> bool:
    """Whether a field says what is trained on."""
    word, last_word = _word(name), next(reversed(_words_of(name)), "")
    return _is_mask(name) or word in _FLAGS or word in _NEGATIVE_FLAGS or last_word == "weight"


def _is_mask(name: str) -> bool:
    """Whether a field has flags or weights of parts of a text."""
    return _word(name) in _MASKS or next(reversed(_words_of(name)), "") == "weights"


def _asks_for(name: str, value: Any) -> bool | str | None:
    """The meaning of a flag: train on it or not; None: not given; a text: invalid."""
    if value is None:
        return None
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        return _excerpt(value)
    if _word(name) in _NEGATIVE_FLAGS:  # false asks for nothing
        return False if value else None
    return bool(value)


def _flag(message: Mapping[str, Any], number: int) -> bool | None:
    """What the flags of a message say: whether it is trained on; None: it has none.

    Raises:
        BadConversation: a value that the mask cannot hold, or two flags that contradict each other.
    """
    if len(message) == len(_FORMS[0]):
        return None
    flags: dict[str, bool] = {}
    for name, value in _further_fields(message):
        if not _is_about_loss(name):
            continue
        where = f"message {number}: its {name[:_LONGEST_NAME]!r} is {_excerpt(value)}"
        if _is_mask(name):
            if not _is_empty(value):
                raise BadConversation(f"{where}, but the loss of parts of a message is not stored; divide the message")
            continue
        asked = _asks_for(name, value)
        if isinstance(asked, str):
            advice = "; make two corpora, and weigh them in a blend" if isinstance(value, float) else ""
            raise BadConversation(f"{where}, but the loss mask holds only 0 and 1{advice}")
        if asked is not None:
            flags[name] = asked
    if len(set(flags.values())) > 1:
        names = ", ".join(name[:_LONGEST_NAME] for name in flags)
        raise BadConversation(f"message {number}: its flags {names} contradict each other")
    return next(iter(flags.values()), None)


def _is_said(value: Any, contents: Sequence[str]) -> bool:
    """Whether a message contains this text."""
    return isinstance(value, str) and any(value.strip() in content for content in contents)


def _further_fields(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields that are not null, except those that the turn was read from."""
    read = [name for form in _FORMS if message.get(form[0]) is not None for name in form]
    return ((name, value) for name, value in message.items() if value is not None and name not in read)


def _lost(field: str, *, takes_fields: bool) -> BadConversation:
    why = "the chat template does not write it" if takes_fields else "only role and content are written"
    return BadConversation(f"{field} would be lost, because {why}; remove the field if that is intended")


def _word(name: str) -> str:
    return _folded(name) if len(name) <= _LONGEST_NAME else ""


@lru_cache(maxsize=1024)
def _folded(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _is_metadata(name: str) -> bool:
    words = _words_of(name)
    return bool(words) and words[-1] in METADATA_WORDS and _NOT_METADATA.isdisjoint(words)


def _holds_tools(name: str, value: Any) -> bool:
    if _TOOLS.isdisjoint(_words_of(name)) or _is_metadata(name):
        return False
    return isinstance(value, list | Mapping) or (isinstance(value, str) and value.lstrip().startswith(("[", "{")))


def _words_of(name: str) -> tuple[str, ...]:
    return _split_name(name) if len(name) <= _LONGEST_NAME else ()


@lru_cache(maxsize=1024)
def _split_name(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD.findall(name))


def _is_empty(value: Any) -> bool:
    """Whether a value is null, empty, or made of nothing but empty values; also as JSON in a string."""
    waiting = [value]  # no recursion: JSON may be nested more deeply than Python calls
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        elif item is not None and not (isinstance(item, str) and item.strip() in ("", "[]", "{}", "null")):
            return False
    return True
