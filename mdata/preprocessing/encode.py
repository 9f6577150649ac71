"""Encodes a chunk of the input as arrays: the stateless part of the work, done by workers.

Documents are those of Megatron's tool (docs/reference/formats.md): a sentence without ids is dropped; with append_eod
the end-of-document id follows the last id of a document and is part of its last sequence; a document without ids gets
none and remains as an empty document. If texts are split into sentences, each becomes a sequence; byte counts and
hashes are still those of the whole text. A record is used under all keys or under none: a text that the tokenizer
refuses, or an id that does not fit the token type, makes the row a bad row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata.sources.chunk import Chunk, chunk_digest, read_chunk
from mdata.sources.parse import parse
from mdata.sources.record_batch import BadRow, Column, ReadSpec, RecordBatch, in_members
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TextRefused, Tokenizer
from mdata.util.arrays import ranges, running_sums

if TYPE_CHECKING:
    from mdata.preprocessing.encode_chat import ChatSpec
    from mdata.sentences.splitter import Splitter

HOLDOUT_BITS = 64


@dataclass(frozen=True)
class EncodeSpec:
    """How records become tokens.

    Attributes:
        read: how records are read from bytes.
        eod: the id to append to each document, or None.
        dtype: numpy's name of the token type on disk.
        held_below: a record whose text hashes below this is held out; 0: none.
        splitter: splits each text into sentences; None: a text is one sequence.
        chat: how conversations are tokenized; None: records are texts.
        min_tokens, max_tokens: a record with a shorter or longer document under any key is left out; None: no limit.
    """

    read: ReadSpec
    eod: int | None
    dtype: str
    held_below: int = 0
    splitter: Splitter | None = None
    chat: ChatSpec | None = None
    min_tokens: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True)
class Encoded:
    """Whole documents of one key.

    Attributes:
        tokens: [t], in the token type on disk.
        lengths: int64[n], tokens of each sequence.
        document_ends: int64[d], running count of sequences.
        text_bytes: int64[d], UTF-8 bytes of each document's text.
        special_in_text: number of special tokens that the texts contained.
    """

    tokens: npt.NDArray[Any]
    lengths: LengthArray
    document_ends: LengthArray
    text_bytes: LengthArray
    special_in_text: int


@dataclass(frozen=True)
class EncodedChunk:
    """The result of encoding a chunk.

    Attributes:
        rows: number of rows, bad ones included.
        kept: int64[d], the row (from 1, in this chunk) of each record.
        held: bool[d], which of them are held out; None if nothing is held out.
        by_key: the documents, one `Encoded` per key.
        bad_rows: the other rows, in order.
        digest: BLAKE3 of the chunk.
        seconds: spent reading, parsing, encoding.
    """

    rows: int
    kept: LengthArray
    held: npt.NDArray[np.bool_] | None
    by_key: tuple[Encoded, ...]
    bad_rows: tuple[BadRow, ...]
    digest: bytes
    seconds: tuple[float, float, float]


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer, *, spec: EncodeSpec) -> EncodedChunk:
    """Read, parse and tokenize one chunk."""
    begun = time.perf_counter()
    data = read_chunk(chunk, spec.read)
    read = time.perf_counter()
    digest = chunk_digest(data)
    batch = parse(chunk.source.format, data, spec=spec.read)
    # Freed before its records are tokenized: one of them may be nearly all of it.
    del data
    parsed = time.perf_counter()
    batch, by_key = encode_records(batch, tokenizer, spec=spec)
    record_rows = np.arange(1, batch.rows + 1) if batch.kept is None else np.array(batch.kept, np.int64)
    held = held_out(batch.columns, spec.held_below) if spec.held_below else None
    seconds = (read - begun, parsed - read, time.perf_counter() - parsed)
    bad_rows = tuple(in_members(batch.bad_rows, chunk.members))
    encoded = EncodedChunk(batch.rows, record_rows, held, by_key, bad_rows, digest, seconds)
    return _of_length(encoded, spec) if spec.min_tokens or spec.max_tokens is not None else encoded


def _of_length(encoded: EncodedChunk, spec: EncodeSpec) -> EncodedChunk:
    """The records whose documents are neither too short nor too long, without their end-of-document ids."""
    chosen = np.ones(len(encoded.kept), np.bool_)
    for documents in encoded.by_key:
        sequence_ends = np.append(0, documents.document_ends)
        tokens = np.diff(running_sums(documents.lengths)[sequence_ends])
        if spec.eod is not None:
            tokens -= np.diff(sequence_ends) > 0
        chosen &= tokens >= spec.min_tokens
        if spec.max_tokens is not None:
            chosen &= tokens <= spec.max_tokens
    return encoded if chosen.all() else chosen_records(encoded, chosen)


def encode_records(
    batch: RecordBatch, tokenizer: Tokenizer, *, spec: EncodeSpec
) -> tuple[RecordBatch, tuple[Encoded, ...]]:
    """Tokenize all records; those that the tokenizer refuses become bad rows of the returned batch."""
    try:
        return batch, tuple(encode_documents(column, tokenizer, spec=spec) for column in batch.columns)
    except TextRefused:
        batch = _without_refused(batch, tokenizer, spec)
        return batch, tuple(encode_documents(column, tokenizer, spec=spec) for column in batch.columns)


def encode_documents(column: Column, tokenizer: Tokenizer, *, spec: EncodeSpec) -> Encoded:
    """Tokenize the documents of one key.

    Raises:
        TextRefused: a text has no ids, or an id that does not fit the token type.
    """
    if spec.chat is not None:
        return _encode_chats(column, tokenizer, spec.chat, spec=spec)
    if spec.read.tokens:
        return _given_tokens(column, tokenizer, spec)
    sentences, ends = column.sentences, column.ends
    if spec.splitter is not None:
        sentences, ends = spec.splitter.split_batch(sentences)
    tokens, lengths = tokenizer.encode_batch(sentences)
    assert len(lengths) == len(sentences), f"{len(lengths)} lengths for {len(sentences)} sentences"
    special = tokenizer.special_in_text(tokens, len(lengths))
    _check_fit(tokens, lengths, spec.dtype)
    narrow = tokens.astype(spec.dtype)
    del tokens  # for a single long text, as large as the text
    text_bytes = _text_bytes(column)
    if ends is None and (not len(lengths) or lengths.min() > 0):
        document_ends = np.arange(1, len(lengths) + 1)
    else:
        sentence_ends = np.arange(1, len(lengths) + 1) if ends is None else np.array(ends, np.int64)
        document_ends = running_sums(lengths > 0)[sentence_ends]
        lengths = lengths[lengths > 0]
    if spec.eod is not None:
        narrow, lengths = _with_eod(narrow, lengths, document_ends, spec.eod)
    return Encoded(narrow, lengths, document_ends, text_bytes, special)


def _given_tokens(column: Column, tokenizer: Tokenizer, spec: EncodeSpec) -> Encoded:
    """Documents that were tokenized before: ids with blanks between them."""
    texts = column.sentences
    counts = np.array([text.count(" ") + bool(text) for text in texts], np.int64)
    tokens = np.array(" ".join(filter(None, texts)).split(), np.int64)
    if len(tokens) and tokens.max() >= tokenizer.vocab_size:
        first = int(np.flatnonzero(tokens >= tokenizer.vocab_size)[0])
        document = int(np.searchsorted(np.cumsum(counts), first, side="right"))
        size = f"{tokenizer.vocab_size:,}"
        raise TextRefused(document, f"id {tokens[first]} is not below the size of the vocabulary, {size}")
    lengths, document_ends = counts[counts > 0], running_sums(counts > 0)[1:]
    ids = tokens.astype(spec.dtype)
    if spec.eod is not None:
        ids, lengths = _with_eod(ids, lengths, document_ends, spec.eod)
    return Encoded(ids, lengths, document_ends, np.zeros(len(texts), np.int64), 0)


def _encode_chats(column: Column, tokenizer: Tokenizer, chat: ChatSpec, *, spec: EncodeSpec) -> Encoded:
    from mdata.preprocessing.encode_chat import tokenize_chats

    tokenized = tokenize_chats(column, tokenizer, chat=chat, eod=spec.eod)
    _check_fit(tokenized.ids, tokenized.lengths, spec.dtype)
    text_bytes = _text_bytes(tokenized.contents)
    return Encoded(tokenized.ids.astype(spec.dtype), tokenized.lengths, tokenized.ends, text_bytes, tokenized.special)


def held_out(columns: Sequence[Column], held_below: int) -> npt.NDArray[np.bool_]:
    """bool[d]: which records are held out, because their text hashes below a bound.

    The hash is the first 8 bytes (little endian) of BLAKE3 over the sentences of all keys, each followed by byte FF,
    which UTF-8 never contains; so it depends on the text alone, not on its position in the corpus.
    """
    starts = [[0, *(column.ends or range(1, len(column.sentences) + 1))] for column in columns]
    held = np.zeros(len(starts[0]) - 1, np.bool_)
    for record in range(len(held)):
        hasher = blake3()
        for column, bounds in zip(columns, starts, strict=True):
            for sentence in column.sentences[bounds[record] : bounds[record + 1]]:
                hasher.update(sentence.encode() + b"\xff")
        held[record] = int.from_bytes(hasher.digest(length=HOLDOUT_BITS // 8), "little") < held_below
    return held


def divide(encoded: Encoded, numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64], Encoded]]:
    """The documents of each partition: its number, which documents, and these; in time linear in the documents.

    Partitions without documents are left out. `special_in_text`, which is not counted by document, becomes 0.

    Args:
        encoded: the documents.
        numbers: int64[d], the partition of each.
    """
    of_document = np.diff(encoded.document_ends, prepend=0)
    sums = running_sums(encoded.lengths)
    first = encoded.document_ends - of_document
    begin, end = sums[first], sums[encoded.document_ends]
    order = np.argsort(numbers, kind="stable")
    partitions, starts = np.unique(numbers[order], return_index=True)
    for number, documents in zip(partitions.tolist(), np.split(order, starts)[1:], strict=True):
        runs = zip(begin[documents].tolist(), end[documents].tolist(), strict=True)
        yield (
            number,
            documents,
            Encoded(
                np.concatenate([encoded.tokens[start:stop] for start, stop in runs]),
                encoded.lengths[ranges(first[documents], of_document[documents])],
                np.cumsum(of_document[documents], dtype=np.int64),
                encoded.text_bytes[documents],
                0,
            ),
        )


def chosen_records(encoded: EncodedChunk, chosen: npt.NDArray[np.bool_]) -> EncodedChunk:
    """A chunk without the records that are not chosen, bool[d]; special tokens are still those of all texts."""
    by_key = []
    for documents in encoded.by_key:
        parts = {number: part for number, _, part in divide(documents, chosen.astype(np.int64))}
        nothing = replace(
            documents, tokens=documents.tokens[:0], lengths=documents.lengths[:0],
            document_ends=documents.document_ends[:0], text_bytes=documents.text_bytes[:0],
        )  # fmt: skip
        by_key.append(replace(parts.get(1, nothing), special_in_text=documents.special_in_text))
    held = None if encoded.held is None else encoded.held[chosen]
    return replace(encoded, kept=encoded.kept[chosen], held=held, by_key=tuple(by_key))


def _text_bytes(column: Column) -> LengthArray:
    """int64[d]: UTF-8 bytes of each document's text."""
    sizes = np.fromiter(
        (len(text) if text.isascii() else len(text.encode()) for text in column.sentences),
        np.int64,
        len(column.sentences),
    )
    return sizes if column.ends is None else np.diff(running_sums(sizes)[np.array(column.ends, np.int64)], prepend=0)


def _check_fit(tokens: IdArray, lengths: LengthArray, dtype: str) -> None:
    if not len(tokens):
        return
    limits = np.iinfo(dtype)
    if tokens.min() < limits.min or tokens.max() > limits.max:
        first = int(np.flatnonzero((tokens < limits.min) | (tokens > limits.max))[0])
        text = int(np.searchsorted(np.cumsum(lengths), first, side="right"))
        reason = f"id {tokens[first]} does not fit {dtype} (the vocabulary's size decides the type)"
        raise TextRefused(text, reason)


def _without_refused(batch: RecordBatch, tokenizer: Tokenizer, spec: EncodeSpec) -> RecordBatch:
    """Encode record by record: slow, but only needed for chunks with a refused record."""
    record_rows = list(range(1, batch.rows + 1)) if batch.kept is None else batch.kept
    bounds = [[0, *(column.ends or range(1, len(column.sentences) + 1))] for column in batch.columns]
    good, bad_rows = [], list(batch.bad_rows)
    for record, row in enumerate(record_rows):
        try:
            for column, ends in zip(batch.columns, bounds, strict=True):
                sentences = column.sentences[ends[record] : ends[record + 1]]
                encode_documents(Column(sentences, [len(sentences)]), tokenizer, spec=spec)
            good.append(record)
        except TextRefused as refused:
            # A text that is split is shown as a whole, a conversation by its first content, or all of it if it is JSON.
            first_content = 0 if spec.chat is None else min(1, len(sentences) - 1)
            text = sentences[refused.index if spec.splitter is None and spec.chat is None else first_content]
            bad_rows.append(BadRow(row, "bad-text", refused.reason, repr(text[:80]), text.encode()))
    columns = []
    for column, ends in zip(batch.columns, bounds, strict=True):
        documents = [column.sentences[ends[record] : ends[record + 1]] for record in good]
        running = running_sums(np.array([len(document) for document in documents], np.int64))[1:]
        columns.append(Column([text for document in documents for text in document], running.tolist()))
    bad_rows.sort(key=lambda bad_row: bad_row.row)
    return RecordBatch(batch.rows, [record_rows[record] for record in good], tuple(columns), bad_rows)


def _with_eod(
    tokens: npt.NDArray[Any], lengths: LengthArray, document_ends: LengthArray, eod: int
) -> tuple[npt.NDArray[Any], LengthArray]:
    """Insert `eod` after the last id of every document that has a sequence."""
    last = document_ends[np.diff(document_ends, prepend=0) > 0] - 1
    token_ends = np.cumsum(lengths)[last]
    longer = lengths.copy()
    longer[last] += 1
    result = np.empty(len(tokens) + len(last), tokens.dtype)
    # The position of each eod in the result: that in the tokens, and the eods before it.
    positions = token_ends + np.arange(len(last))
    is_token = np.ones(len(result), np.bool_)
    is_token[positions] = False
    result[positions] = eod
    result[is_token] = tokens
    return result, longer
