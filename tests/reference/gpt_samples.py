"""Slow twins of whole GPT samples: Megatron's, the native order's, one document per row, and packed rows.

Tokens are joined token by token, and lengths are plain lists. The fast code is mdata/samples/megatron_gpt.py,
gpt.py, documents.py and packed.py; masks and positions are in tests/reference/gather.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mdata.order.megatron_order import MegatronRequest
from mdata.samples.rows import RowOptions
from tests.reference import gather as slow
from tests.reference.megatron_order import indices
from tests.reference.native_order import native_start
from tests.reference.packing import pack

Sample = dict[str, Any]


def megatron_samples(
    lengths: list[int], tokens: Sequence[int], *, request: MegatronRequest, options: RowOptions
) -> list[Sample]:
    """Return all samples: the concatenated pieces of each, padded and finished.

    Args:
        lengths: of all sequences of the file. tokens: theirs.
        request, options: as the samples take them.
    """
    extra, q = int(request.extra_token), request.sequence_length
    documents, rows, shuffle = indices(
        lengths,
        (request.first, request.stop),
        wanted=request.num_samples,
        q=q,
        seed=request.seed,
        extra=extra,
        keep=request.keep_partial,
    )
    starts = np.cumsum([0, *lengths]).tolist()
    samples = []
    for k in shuffle:
        (d0, o0), (d1, o1) = rows[k], rows[k + 1]
        parts: list[list[int]] = []
        for d in range(d0, d1 + 1):
            base = starts[documents[d]]
            stop = o1 + extra if d == d1 else lengths[documents[d]]
            parts.append(list(tokens[base + (o0 if d == d0 else 0) : base + stop]))
        samples.append(_finished(parts, extra=extra, options=options))
    return samples


def _finished(parts: list[list[int]], *, extra: int, options: RowOptions) -> Sample:
    length = options.sequence_length
    text = [token for part in parts for token in part]
    pieces = [len(part) for part in parts]
    if extra:
        pieces[-1] -= 1
        pieces = pieces[:-1] if pieces[-1] == 0 else pieces
    pieces[-1] += length - sum(pieces)  # padding belongs to the last piece
    cuts = np.cumsum([0, *pieces])[1:-1].tolist()
    return row_of(text, cuts, pad=-1 if options.pad is None else options.pad, options=options)


@dataclass(frozen=True)
class Native:
    """What decides a native order besides the length of its text; `extra` is 1 if a sample reads S + 1 tokens."""

    seed: int
    corpus_id: str
    extra: int = 1
    shuffle: bool = True


def native_sample(
    k: int,
    tokens: Sequence[int],
    *,
    span: tuple[int, int],
    document_lengths: Sequence[int],
    options: RowOptions,
    order: Native,
) -> Sample:
    """Return sample k of the tokens [span[0], span[1]) of a stream."""
    first, last = span
    length = options.sequence_length
    start = first + k * length
    if order.shuffle:
        known = {"tokens": last - first, "extra": order.extra, "seed": order.seed}
        start = first + native_start(k, length=length, corpus_id=order.corpus_id, **known)
    text = list(tokens[start : min(start + length + order.extra, last)])
    cuts = slow.cuts(document_lengths, (start, min(len(text), length)))
    return row_of(text, cuts, pad=0, options=options)


def document_sample(
    k: int, documents: Sequence[Sequence[int]], *, longer: str, options: RowOptions, order: Native
) -> Sample:
    """Return sample k of a range of documents, one of those that fit."""
    most = options.sequence_length + order.extra
    kept = [text for text in documents if longer == "cut" or min(2, most) <= len(text) <= most]
    place = k
    if order.shuffle:
        place = native_start(k, tokens=len(kept), length=1, extra=0, seed=order.seed, corpus_id=order.corpus_id)
    return row_of(list(kept[place])[:most], [], pad=0, options=options)


def packed_sample(
    k: int, documents: Sequence[Sequence[int]], *, longer: str, options: RowOptions, order: Native, window: int
) -> tuple[Sample, int]:
    """Return sample k of a range of documents that are packed into rows, and how many rows there are."""
    length = options.sequence_length + order.extra
    kept = [len(text) if longer == "cut" or len(text) <= length else 0 for text in documents]
    rows = pack(kept, length, window=window, overlap=order.extra, least=min(2, length))
    place = k
    if order.shuffle:
        place = native_start(k, tokens=len(rows), length=1, extra=0, seed=order.seed, corpus_id=order.corpus_id)
    parts = [list(documents[document][start : start + count]) for document, start, count in rows[place]]
    cuts = np.cumsum([len(part) for part in parts])[:-1].tolist()
    return row_of([token for part in parts for token in part], cuts, pad=0, options=options), len(rows)


def row_of(text: list[int], cuts: list[int], *, pad: int, options: RowOptions) -> Sample:
    """Return what a text of up to S + 1 tokens becomes, by the names of `mdata.samples.rows.sample_of`."""
    length = options.sequence_length
    row = slow.finish(
        text + [pad] * (length + 1 - len(text)),
        len(text),
        cuts=cuts if options.document_masks or options.mask_document_ends else [],
        mask_document_ends=options.mask_document_ends,
        pad=options.pad,
        mask_eod=options.eod if options.mask_eod else None,
        restart_at_eod=options.eod if options.reset_position_ids else None,
    )
    found: Sample = {"tokens": row.text[:-1], "labels": row.text[1:], "loss_mask": row.loss}
    if options.with_positions:
        found["position_ids"] = row.positions
    if options.document_masks:
        starts = [0, *cuts, length]
        starts = starts if len(starts) <= length + 1 else sorted(set(starts))
        longest = max(stop - start for start, stop in pairwise(starts))
        found |= {"cu_seqlens": starts + [length] * (length + 1 - len(starts)), "max_seqlen": longest}
    return found
