"""From a block of lines to arrays: the part that workers do, without files and without state.

What a document is follows Megatron's tool (docs/formats.md): a sentence that gives no id is dropped; with
append_eod the end-of-document id follows the last id of a document and counts in its last sequence; a
document that gave no id gets none and stays as an empty document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mdata.sources import Problem, Record, RowError, parse_block
from mdata.tokenizers import IdArray, LengthArray, Tokenizer


@dataclass(frozen=True)
class EncodeSpec:
    """What a worker needs to know besides the text."""

    json_keys: tuple[str, ...]
    eod: int | None


@dataclass(frozen=True)
class Encoded:
    """Whole documents of one key: int32[t] ids, int64[n] sequence lengths, int64[d] running sequence counts."""

    tokens: IdArray
    lengths: LengthArray
    document_ends: LengthArray
    text_bytes: int


@dataclass(frozen=True)
class EncodedBlock:
    """What a block of lines gave: its rows, one `Encoded` per key, and the line at which it stopped, if any."""

    rows: int
    parts: tuple[Encoded, ...]
    problem: Problem | None


def encode_block(data: bytes, tokenizer: Tokenizer, *, spec: EncodeSpec) -> EncodedBlock:
    """Tokenize the records of a block of whole lines; stops before the first line that cannot be taken."""
    records: list[Record] = []
    problem = None
    try:
        records.extend(parse_block(data, spec.json_keys))
    except RowError as error:
        problem = error.problem
    parts = tuple(
        encode_documents([record.texts[number] for record in records], tokenizer, eod=spec.eod)
        for number in range(len(spec.json_keys))
    )
    return EncodedBlock(len(records), parts, problem)


def encode_documents(documents: Sequence[Sequence[str]], tokenizer: Tokenizer, *, eod: int | None) -> Encoded:
    """Tokenize documents, each a list of sentences.

    Args:
        documents: the sentences of each document.
        tokenizer: gives the ids.
        eod: the id to put after each document that has any, or None.
    """
    sentences = [sentence for document in documents for sentence in document]
    tokens, lengths = tokenizer.encode_batch(sentences)
    assert len(lengths) == len(sentences), f"{len(lengths)} lengths for {len(sentences)} sentences"
    text_bytes = sum(len(sentence.encode()) for sentence in sentences)
    kept = lengths > 0
    sentence_ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    kept_before = np.concatenate(([0], np.cumsum(kept, dtype=np.int64)))
    document_ends = kept_before[sentence_ends]
    lengths = lengths[kept]
    if eod is not None:
        tokens, lengths = _with_eod(tokens, lengths, document_ends, eod)
    return Encoded(tokens, lengths, document_ends, text_bytes)


def _with_eod(
    tokens: IdArray, lengths: LengthArray, document_ends: LengthArray, eod: int
) -> tuple[IdArray, LengthArray]:
    """Put `eod` after the last id of every document that has a sequence."""
    last = document_ends[np.diff(document_ends, prepend=0) > 0] - 1
    token_ends = np.cumsum(lengths)[last]
    longer = lengths.copy()
    longer[last] += 1
    return np.insert(tokens, token_ends, np.int32(eod)), longer
