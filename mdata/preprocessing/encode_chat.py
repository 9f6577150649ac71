"""From conversations to ids: the counterpart of `encode_documents` for chat.

A conversation is a document; its sequences alternate between context and trained, context first; an empty one separates
two of the same kind. A pair is a document too: the first half of its sequences is the chosen conversation, the second
the rejected one, both of the same even number of sequences. All texts of a chunk are tokenized at once; control tokens
of the template are ids that are inserted between them. With append_eod the id is context: it extends the last span if
that is context, otherwise it is a span of its own.

Slow twin: tests/reference/chat.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mdata.chat.loss_spans import Span, Template, TemplateRefused, spans_of
from mdata.sources.chat_schema import pair_of
from mdata.sources.conversation import conversation_of
from mdata.sources.record_batch import Column
from mdata.tokenizers.base.token_matching import pattern_of_any
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TextRefused, Tokenizer
from mdata.util.arrays import running_sums


@dataclass(frozen=True)
class ChatSpec:
    """How conversations are tokenized.

    Attributes:
        template: turns messages into text.
        train_on: the turns that are trained on: "assistant", "last" or "all".
        pairs: records are pairs of conversations.
    """

    template: Template
    train_on: str
    pairs: bool = False


@dataclass(frozen=True)
class Tokenized:
    """All ids, int64[n] lengths of spans, int64[d] running count of spans by conversation, special tokens in texts.

    Attributes:
        contents: the messages' texts; roles, and what else a template writes, are none.
    """

    ids: IdArray
    lengths: LengthArray
    ends: LengthArray
    special: int
    contents: Column


def tokenize_chats(column: Column, tokenizer: Tokenizer, *, chat: ChatSpec, eod: int | None) -> Tokenized:
    """Tokenize a column of conversations (roles and contents).

    Raises:
        TextRefused: a text has no ids, or the template refuses a conversation.
    """
    assert column.ends is not None, "conversations are lists"
    spans: list[Span] = []
    ends: list[int] = []
    contents, content_ends = list[str](), list[int]()
    first = 0
    for number, end in enumerate(column.ends):
        flat = column.sentences[first:end]
        sides: list[list[Span]] = []
        for conversation in pair_of(flat) if chat.pairs else [flat]:
            messages, variables = conversation_of(conversation)
            contents += [message.content for message in messages]
            try:
                turns = spans_of(messages, chat.template, train_on=chat.train_on, variables=variables)
            except TemplateRefused as refused:
                raise TextRefused(number, str(refused)) from refused
            if eod is not None:
                turns = turns if len(turns) % 2 else [*turns, []]
                turns[-1].append(eod)
            sides.append(turns)
        content_ends.append(len(contents))
        for turns in _of_equal_number(sides) if chat.pairs else sides:
            spans += turns
        ends.append(len(spans))
        first = end
    encoded = _encode_spans(spans, tokenizer)
    if chat.template.spells_tokens:
        special = _spelled(contents, tuple(tokenizer.special_ids))
    else:
        special = tokenizer.special_in_text(encoded.text_ids, encoded.num_texts)
    return Tokenized(encoded.ids, encoded.lengths, np.array(ends, np.int64), special, Column(contents, content_ends))


def _of_equal_number(sides: Sequence[list[Span]]) -> list[list[Span]]:
    """The conversations of a pair with empty spans at their ends, to the same even number."""
    most = max(map(len, sides))
    most += most % 2
    return [[*turns, *([] for _ in range(most - len(turns)))] for turns in sides]


class _EncodedSpans(NamedTuple):
    """Ids and lengths of spans; the ids of their texts alone, and how many texts there are."""

    ids: IdArray
    lengths: LengthArray
    text_ids: IdArray
    num_texts: int


def _encode_spans(spans: Sequence[Span], tokenizer: Tokenizer) -> _EncodedSpans:
    parts = [part for span in spans for part in span]
    texts = [part for part in parts if isinstance(part, str)]
    text_ids, text_lengths = tokenizer.encode_batch(texts)
    is_id = np.fromiter((not isinstance(part, str) for part in parts), np.bool_, len(parts))
    lengths = np.ones(len(parts), np.int64)
    lengths[~is_id] = text_lengths
    before = running_sums(lengths)
    ids = np.empty(int(before[-1]), np.int32)
    from_text = np.ones(len(ids), np.bool_)
    positions = before[:-1][is_id]
    from_text[positions] = False
    ids[from_text] = text_ids
    ids[positions] = [part for part in parts if isinstance(part, int)]
    parts_before = running_sums(np.fromiter(map(len, spans), np.int64, len(spans)))
    return _EncodedSpans(ids, np.diff(before[parts_before]), text_ids, len(texts))


def _spelled(contents: Sequence[str], names: tuple[str, ...]) -> int:
    """How often contents spell a special token as text; ids cannot be counted, because the template adds such ids."""
    pattern = _any_of(names)
    return sum(len(pattern.findall(content)) for content in contents)


@lru_cache(maxsize=4)
def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    return pattern_of_any(names)
