"""Rows: the tokens of many samples and what a model is told beside them.

A kind of sample gathers text, S + 1 tokens a row whose inputs and labels overlap; here rows become loss masks,
positions and lengths of documents, all by C++ on whole batches. Native samples know padding by place. Megatron's know
it by value, so that a real token equal to its pad id loses its loss and becomes 0, as there; but no sample depends on
which was read first (Megatron's share one loss mask that is changed in place). Dense attention masks are made only
where they are asked for. Slow twin: mdata/reference/gather.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mdata._core import RowRules, cumulative_lengths, finish_rows
from mdata.indexed.gather import Cuts, Int64s
from mdata.order.native import NativeOrder

Sample = dict[str, npt.NDArray[Any]]
Empty = Callable[[tuple[int, int], type[Any]], npt.NDArray[Any]]
"""Makes an array of a shape and a type, of any content, as np.empty does."""
NO_PAD = -1  # Megatron's: no id is padding


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """What is told of a row.

    Args:
        sequence_length: inputs of a row, S.
        document_masks: positions restart with each document; cu_seqlens tells the documents' lengths.
        position_ids: positions are given, whether they restart or not.
        mask_eod: no loss where the input is the end of a document.
        reset_position_ids: positions restart behind the end of a document.
        attention_mask: a dense mask, [1, S, S], true where attention is cut off.
        reset_attention_mask: it cuts off what stands before the end of a document.
        apart: the last token of a document has no loss: the next token is another's.
        eod: the end of a document; pad: whatever equals it is padding (Megatron); None: padding is known by place.
    """

    sequence_length: int
    document_masks: bool = False
    position_ids: bool = False
    mask_eod: bool = False
    reset_position_ids: bool = False
    attention_mask: bool = False
    reset_attention_mask: bool = False
    apart: bool = False
    eod: int | None = None
    pad: int | None = None

    @property
    def with_positions(self) -> bool:
        """Whether rows have positions."""
        return self.position_ids or self.document_masks or self.reset_position_ids

    @property
    def rules(self) -> RowRules:
        """The part that C++ follows."""
        return RowRules(self.pad, self.eod, self.mask_eod, self.reset_position_ids, self.apart)


def effective_pad(pad: int | None, eod: int | None, *, allow_ambiguous: bool = False) -> int:
    """The id that Megatron pads with and takes for padding: -1 where there is none, or where it is also the eod."""
    if pad is None or (pad == eod and not allow_ambiguous):
        return NO_PAD
    return pad


@dataclass(frozen=True)
class Gathered:
    """What is known of rows whose text was read.

    Attributes:
        counts: int64[n], real tokens of each row.
        trained: uint8[n, S], 0 where a label has no loss whatever else says; None: all may have.
        cuts: where documents begin inside the inputs, if it was asked for, or rows keep them apart.
    """

    counts: Int64s
    cuts: Cuts | None = None
    trained: npt.NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Rows:
    """Arrays of n rows; what is None was not asked for.

    Attributes:
        text: int64[n, S + 1]. tokens, labels: int64[n, S], views of it.
        loss_mask: float32[n, S], 1 where a label counts.
        position_ids: int64[n, S].
        cu_seqlens: int32[m + 1], the rows laid end to end: where each document begins, then n S.
        max_seqlen: tokens of the longest document.
    """

    text: Int64s
    loss_mask: npt.NDArray[np.float32] | None = None
    position_ids: Int64s | None = None
    cu_seqlens: npt.NDArray[np.int32] | None = None
    max_seqlen: int | None = None

    @property
    def tokens(self) -> Int64s:
        """The inputs."""
        return self.text[:, :-1]

    @property
    def labels(self) -> Int64s:
        """The token after each input."""
        return self.text[:, 1:]

    @property
    def fields(self) -> Sample:
        """Those of its arrays that have a row for each sample, by the names that a sample has them under."""
        found = {"tokens": self.tokens, "labels": self.labels}
        more = {"loss_mask": self.loss_mask, "position_ids": self.position_ids}
        return found | {name: array for name, array in more.items() if array is not None}


class SampleKind(Protocol):
    """A kind of sample."""

    @property
    def num_samples(self) -> int | None:
        """How many samples there are; None without end."""

    @property
    def samples_per_epoch(self) -> int:
        """How many samples read the corpus once."""

    def epochs(self, num_samples: int) -> float:
        """How many times so many samples read the corpus."""

    def sample(self, k: int) -> Sample:
        """One sample; of text as `sample_of` gives it."""


class RowKind(SampleKind, Protocol):
    """A kind of sample whose rows are text.

    Attributes:
        options: what is told of its rows.
    """

    options: RowOptions

    def gather(self, samples: Int64s, text: Int64s, *, places: Int64s | None = None, threads: int = 1) -> Gathered:
        """Fill rows of text[m, S + 1] with samples int64[n], row places[i] (None: i) with sample i.

        Raises:
            IndexError: a number below 0 or past the end.
        """


class NativelyOrdered:
    """What kinds of samples in native order have in common.

    Attributes:
        order: which of them is sample k.
    """

    order: NativeOrder

    @property
    def num_samples(self) -> int | None:
        """How many samples there are; None without end."""
        return self.order.num_samples

    @property
    def samples_per_epoch(self) -> int:
        """How many samples read the corpus once."""
        return self.order.samples_per_epoch

    def epochs(self, num_samples: int) -> float:
        """How many times so many samples read the corpus."""
        return num_samples / self.order.samples_per_epoch


def empty_rows(num_rows: int, options: RowOptions, *, empty: Empty = np.empty) -> Rows:
    """Room for rows, to be filled again and again; `empty` makes the arrays."""
    shape = (num_rows, options.sequence_length)
    return Rows(
        empty((num_rows, options.sequence_length + 1), np.int64),
        empty(shape, np.float32),
        empty(shape, np.int64) if options.with_positions else None,
    )


def finish(rows: Rows, gathered: Gathered, *, options: RowOptions) -> Rows:
    """The rows with their fields filled in; text was gathered."""
    finish_rows(rows.text, gathered.counts, gathered.cuts, rows.loss_mask, rows.position_ids, options.rules)
    if gathered.trained is not None and rows.loss_mask is not None:
        np.multiply(rows.loss_mask, gathered.trained, out=rows.loss_mask)
    if gathered.cuts is None or not options.document_masks:
        return rows
    cu_seqlens, longest = cumulative_lengths(*gathered.cuts, options.sequence_length)
    return replace(rows, cu_seqlens=cu_seqlens, max_seqlen=longest)


def in_order(parts: list[tuple[Int64s, Gathered]], num_rows: int) -> Gathered:
    """What is known of all rows, from parts that know it of the rows at some places."""
    counts = np.zeros(num_rows, np.int64)
    of_row: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)] * num_rows
    trained = None
    for places, part in parts:
        counts[places] = part.counts
        if part.trained is not None:
            trained = np.zeros((num_rows, part.trained.shape[1]), np.uint8) if trained is None else trained
            trained[places] = part.trained
        if part.cuts is not None:
            ends, cuts = part.cuts
            for place, found in zip(places.tolist(), np.split(cuts, ends[:-1]), strict=True):
                of_row[place] = found
    if not parts or parts[0][1].cuts is None:
        return Gathered(counts, trained=trained)
    joined: Cuts = np.cumsum([len(found) for found in of_row]), np.concatenate(of_row)
    return Gathered(counts, joined, trained)


def sample_of(kind: RowKind, k: int) -> Sample:
    """Sample k of a kind as {tokens int64[S], labels int64[S], loss_mask float32[S]}, and what its options ask for.

    `labels[i]` is the token after `tokens[i]`; where there is none the mask is 0 and the label 0. Also, in this order:
    attention_mask bool[1, S, S], position_ids int64[S], cu_seqlens int32[S + 1] (running lengths of documents from 0,
    filled up with S) and max_seqlen int32[].
    """
    options = kind.options
    rows = empty_rows(1, options)
    gathered = kind.gather(np.array([k], np.int64), rows.text)
    length = options.sequence_length
    cuts = [] if gathered.cuts is None else gathered.cuts[1].tolist()
    found: Sample = {"tokens": rows.text[0, :-1], "labels": rows.text[0, 1:]}
    if options.attention_mask:
        found["attention_mask"] = attention_mask(
            rows.text[0, :-1], options, cuts=cuts
        )  # before padding loses its value
    finish(rows, gathered, options=options)
    if rows.loss_mask is not None:
        found["loss_mask"] = rows.loss_mask[0]
    if rows.position_ids is not None:
        found["position_ids"] = rows.position_ids[0]
    if options.document_masks:
        found |= _lengths_of_documents(cuts, length)
    return found


def attention_mask(tokens: Int64s, options: RowOptions, *, cuts: list[int]) -> npt.NDArray[np.bool_]:
    """bool[1, S, S]: true where row i must not attend to column j: later tokens, and earlier documents if asked."""
    mask = ~np.tri(len(tokens), dtype=np.bool_)
    starts = list(cuts) if options.document_masks else []
    if options.reset_attention_mask and options.eod is not None:
        starts += (np.flatnonzero(tokens == options.eod) + 1).tolist()
    for start in starts:
        mask[start:, :start] = True
    return mask[None]


def _lengths_of_documents(cuts: list[int], length: int) -> Sample:
    starts = [0, *cuts, length]
    if len(starts) > length + 1:
        starts = sorted(set(starts))  # so many of them empty that they have no place
    filled = starts + [length] * (length + 1 - len(starts))
    longest = max(stop - start for start, stop in pairwise(starts))
    return {"cu_seqlens": np.array(filled, np.int32), "max_seqlen": np.array(longest, np.int32)}
