"""A record's conversation: [{"role", "content"}, ...], or [{"from", "value"}, ...] as ShareGPT writes it.

It becomes a flat list role, content, role, content ..., so that code that passes texts on works unchanged. A message
without a role and a text (tool calls without content, lists of parts, null) is an error that names the message's
number. Other fields of a message are ignored. ShareGPT's names (human, gpt) become user and assistant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

ASSISTANT = "assistant"
TRAIN_ON = (ASSISTANT, "all", "last")
_FORMS = (("role", "content"), ("from", "value"))
_SHAREGPT = MappingProxyType(
    {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT}
)
# A role becomes part of the template's text; other characters could imitate another turn.
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,32}")


class BadConversation(Exception):
    """A value that is not a usable conversation; the message says why."""


class Message(NamedTuple):
    """One turn."""

    role: str
    content: str


def flat_messages(value: Any, train_on: str) -> list[str]:
    """Role, content, role, content ...

    Args:
        value: parsed from JSON.
        train_on: "assistant" or "last": at least one turn must be the assistant's.

    Raises:
        BadConversation: names the message by its number (from 1).
    """
    if not isinstance(value, list) or not value:
        raise BadConversation(
            "not a list of messages" if not isinstance(value, list) else "a conversation without messages"
        )
    found: list[str] = []
    for number, message in enumerate(value, start=1):
        found += _message(message, number)
    if train_on != "all" and ASSISTANT not in found[::2]:
        raise BadConversation("it has no assistant turn to train on")
    return found


def messages_of(flat: Sequence[str]) -> list[Message]:
    """The messages in a list from `flat_messages`."""
    return [Message(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise BadConversation(f"message {number} is not an object")
    names = next(((role, content) for role, content in _FORMS if role in message), None)
    if names is None:
        raise BadConversation(
            f"message {number} has no role (fields: {', '.join(map(repr, list(message)[:5])) or 'none'})"
        )
    role, content = (message.get(name) for name in names)
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise BadConversation(f"message {number}: its {names[0]} is not a name: {str(role)[:40]!r}")
    if not isinstance(content, str):
        raise BadConversation(f"message {number} ({role}): its {names[1]} is {_kind(message, names[1])}, not a string")
    return Message(_SHAREGPT.get(role, role), content)


def _kind(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    kinds = {bool: "a boolean", dict: "an object", list: "a list", int: "a number", float: "a number"}
    return ("null" if name in message else "missing") if value is None else kinds.get(type(value), "not text")
