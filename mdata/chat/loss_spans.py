"""From messages to spans: alternately context and trained, the first one context (possibly empty).

A template gives each message as three lists of parts: the text before the model's (always context), the text that the
model writes (including its end-of-turn token), and the text after it. A part is text, or the id of a control token,
which no text can contain. Adjacent parts of text inside a span are one text for the tokenizer; a new span begins a new
text, as at inference, where the prompt is tokenized before there is an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from mdata.sources.conversation import Message, WritesMessages, trained_by_role

Part = str | int
Span = list[Part]
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class Turn(NamedTuple):
    """One message as a template writes it."""

    before: Span
    said: Span
    behind: Span


class Template(WritesMessages, Protocol):
    """Writes conversations; can be pickled."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def fingerprint(self) -> str:
        """BLAKE3 (hex) of what decides its parts."""

    @property
    def spells_tokens(self) -> bool:
        """Whether its control tokens are text instead of ids."""

    def spelled_tokens(self, tokens: Iterable[str]) -> list[str]:
        """The control tokens, of those given, that the template writes as text."""

    def turns(
        self,
        messages: Sequence[Message],
        *,
        separate: Sequence[bool] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> Iterator[Turn]:
        """One for each message.

        Args:
            messages: one or more.
            separate: for each message, whether it must be; others may be joined to the next of these. None: all.
            variables: from the record, such as tools.

        Raises:
            TemplateRefused: the template refuses this conversation.
        """

    def prompt(self, messages: Sequence[Message]) -> list[Span]:
        """The spans up to where the assistant's next message begins.

        Raises:
            TemplateRefused: as `turns`.
        """


class TemplateRefused(Exception):
    """A template refuses a conversation; the message says why."""


def spans_of(
    messages: Sequence[Message], template: Template, *, train_on: str, variables: Mapping[str, Any] = NO_VARIABLES
) -> list[Span]:
    """The spans of a conversation: context at 0, 2, 4 ..., trained at 1, 3, 5 ...

    Args:
        messages: one or more.
        template: writes them.
        train_on: "assistant": all of its turns; "last": its last turn; "all": every turn. Messages that say it
            themselves are trained on as they say.
        variables: of the template, from the record.
    """
    by_role = trained_by_role([message.role for message in messages], train_on)
    trained = [by if turn.trained is None else turn.trained for turn, by in zip(messages, by_role, strict=True)]
    spans: list[Span] = [[]]
    for i, turn in enumerate(template.turns(messages, separate=trained, variables=variables)):
        _add(spans[-1], turn.before)
        if trained[i]:
            spans += [list(turn.said), list(turn.behind)]
        else:
            _add(spans[-1], turn.said)
            _add(spans[-1], turn.behind)
    return spans if spans[-1] else spans[:-1]


def _add(span: Span, parts: Span) -> None:
    """Append parts; adjacent texts become one."""
    for part in parts:
        if isinstance(part, str) and span and isinstance(span[-1], str):
            span[-1] += part
        else:
            span.append(part)
