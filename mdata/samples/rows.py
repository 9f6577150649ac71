"""Rows: the tokens of many samples, with their labels, masks and positions.

A kind of sample gathers text, S + 1 tokens a row whose inputs and labels overlap; here rows get loss masks, positions
and lengths of documents, by C++ on whole batches. What follows from places alone (how much of a row is text, where
documents begin) is written when it is asked for: masks of ones and positions are more bytes than the tokens that they
go with. What follows from values is written when rows are read, as their text may be replaced. Native samples know
padding by place. Megatron's know it by value, so that a real token equal to its pad id loses its loss and becomes 0, as
there; but no sample depends on which was read first (Megatron's share one loss mask that is changed in place). Slow
twin: mdata/reference/gather.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mdata._core import RowRules, cumulative_lengths, finish_rows
from mdata.errors import UsageError
from mdata.indexed.gather import Cuts
from mdata.util.arrays import Int64s

Sample = dict[str, npt.NDArray[Any]]
Empty = Callable[[tuple[int, int], type[Any]], npt.NDArray[Any]]
"""Makes an array of a shape and a type, of any content, as np.empty does."""
_INT64 = np.dtype(np.int64)
NO_PAD = -1  # Megatron's: no id is padding


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Which masks and positions rows have.

    Args:
        sequence_length: inputs of a row, S.
        document_masks: positions restart with each document; cu_seqlens tells the documents' lengths.
        position_ids: positions are given, whether they restart or not.
        mask_eod: no loss where the input is the end of a document.
        reset_position_ids: positions restart behind the end of a document.
        attention_mask: a dense mask, [1, S, S], true where attention is cut off.
        reset_attention_mask: it cuts off what comes before the end of a document.
        mask_document_ends: the last token of a document has no loss: the next token is another's.
        eod: the end of a document; pad: whatever equals it is padding (Megatron); None: padding is known by place.
    """

    sequence_length: int
    document_masks: bool = False
    position_ids: bool = False
    mask_eod: bool = False
    reset_position_ids: bool = False
    attention_mask: bool = False
    reset_attention_mask: bool = False
    mask_document_ends: bool = False
    eod: int | None = None
    pad: int | None = None

    @property
    def with_positions(self) -> bool:
        """Whether rows have positions."""
        return self.position_ids or self.document_masks or self.reset_position_ids

    @property
    def loss_by_value(self) -> bool:
        """Whether loss depends on which ids a row has."""
        return self.pad is not None or self.mask_eod

    @property
    def rules(self) -> RowRules:
        """The part that C++ follows."""
        return RowRules(self.pad, self.eod, self.mask_eod, self.reset_position_ids, self.mask_document_ends)


def effective_pad(pad: int | None, eod: int | None, *, allow_ambiguous: bool = False) -> int:
    """The id that Megatron pads with and takes for padding: -1 where there is none, or where it is also the eod."""
    if pad is None or (pad == eod and not allow_ambiguous):
        return NO_PAD
    return pad


@dataclass(eq=False, slots=True)
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

    @property
    def only_counts(self) -> bool:
        """Whether nothing else is known."""
        return self.cuts is None and self.trained is None

    def part(self, rows: slice) -> Gathered:
        """What is known of some of the rows."""
        cuts, trained = self.cuts, self.trained
        if cuts is not None:
            ends, places = cuts
            before = int(ends[rows.start - 1]) if rows.start else 0
            cuts = ends[rows] - before, places[before : int(ends[rows.stop - 1])]
        return Gathered(self.counts[rows], cuts, None if trained is None else trained[rows])


class ByValue(NamedTuple):
    """Fields whose rules look at ids, loss_mask float32[n, S] and position_ids int64[n, S]; None: by no such rule."""

    loss_mask: npt.NDArray[np.float32] | None = None
    position_ids: Int64s | None = None

    def part(self, rows: slice) -> ByValue:
        """Those of some rows."""
        loss, positions = self
        return ByValue(None if loss is None else loss[rows], None if positions is None else positions[rows])


_NONE_BY_VALUE = ByValue()


@dataclass(eq=False)  # frozen would cost a twentieth of reading eight rows
class Rows:
    """n rows: their text, its masks and positions; `Rows(text)` is room to read into. Not to be changed.

    Args:
        text: int64[n, S + 1], inputs and labels.
        by_value: room for fields that reading fills.
        options: which of them there are; gathered: what was learned by reading. None: nothing was read.
        documents: (cu_seqlens, max_seqlen), where the options ask for them.
    """

    text: Int64s
    by_value: ByValue = _NONE_BY_VALUE
    options: RowOptions | None = None
    gathered: Gathered | None = None
    documents: tuple[npt.NDArray[np.int32], int] | None = None

    @property
    def tokens(self) -> Int64s:
        """The inputs, int64[n, S], a view of the text."""
        return self.text[:, :-1]

    @property
    def labels(self) -> Int64s:
        """The token after each input, int64[n, S], a view of the text."""
        return self.text[:, 1:]

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32] | None:
        """int32[m + 1], the rows laid end to end: where each document begins, then n S; None: not told."""
        return None if self.documents is None else self.documents[0]

    @property
    def max_seqlen(self) -> int | None:
        """Tokens of the longest document; None: not told."""
        return None if self.documents is None else self.documents[1]

    @property
    def unmasked(self) -> bool:
        """Whether it is known from places alone that every label has loss, so that a mask would be all ones."""
        options, gathered = self._read
        if options.loss_by_value or options.mask_document_ends or gathered.trained is not None:
            return False
        return bool((gathered.counts > options.sequence_length).all())

    @cached_property
    def loss_mask(self) -> npt.NDArray[np.float32]:
        """float32[n, S], 1 where a label counts."""
        options, gathered = self._read
        if self.by_value.loss_mask is not None:
            return self.by_value.loss_mask
        loss = np.empty(self.tokens.shape, np.float32)
        finish_rows(self.text, gathered.counts, gathered.cuts, loss, None, options.rules)
        return loss if gathered.trained is None else np.multiply(loss, gathered.trained, out=loss)

    @cached_property
    def position_ids(self) -> Int64s | None:
        """int64[n, S], each token's place in its row, or in its document; None: not told."""
        options, gathered = self._read
        if self.by_value.position_ids is not None or not options.with_positions:
            return self.by_value.position_ids
        positions = np.empty(self.tokens.shape, np.int64)
        finish_rows(self.text, gathered.counts, self._cuts, None, positions, options.rules)
        return positions

    @property
    def fields(self) -> Sample:
        """Those of its arrays that have a row for each sample, by the names that a sample has them under."""
        found: Sample = {"tokens": self.tokens, "labels": self.labels, "loss_mask": self.loss_mask}
        return found if self.position_ids is None else found | {"position_ids": self.position_ids}

    def split(self, num_parts: int) -> list[Rows]:
        """Its rows in so many parts of one size, which see the same memory."""
        options, gathered = self._read
        size = len(self.text) // num_parts
        places = [slice(first, first + size) for first in range(0, size * num_parts, size)]
        text, by_value, counts = self.text, self.by_value, gathered.counts
        if gathered.only_counts and self.documents is None and by_value is _NONE_BY_VALUE:
            return [Rows(text[rows], by_value, options, Gathered(counts[rows])) for rows in places]
        known = replace(gathered, cuts=self._cuts)
        return [_told(Rows(text[rows], by_value.part(rows)), known.part(rows), options) for rows in places]

    @property
    def _read(self) -> tuple[RowOptions, Gathered]:
        if self.options is None or self.gathered is None:
            raise ValueError("nothing has been read into these rows")
        return self.options, self.gathered

    @cached_property
    def _cuts(self) -> Cuts | None:
        """Where documents begin inside of each row."""
        _, gathered = self._read
        if gathered.cuts is not None or self.documents is None:
            return gathered.cuts
        rows, places = np.divmod(self.documents[0][:-1], self.text.shape[1] - 1)
        inside = places > 0
        return np.cumsum(np.bincount(rows[inside], minlength=len(self.text))), places[inside]


def empty_rows(num_rows: int, options: RowOptions, *, empty: Empty = np.empty) -> Rows:
    """Room for rows, to be filled again and again; `empty` makes the arrays."""
    text = empty((num_rows, options.sequence_length + 1), np.int64)
    return Rows(text, _room_by_value(num_rows, options, empty=empty))


def room_in(out: Rows | Int64s, num_rows: int, *, options: RowOptions) -> Rows:
    """Room over the caller's arrays, with new ones for the fields whose rules look at ids, where it has none.

    Raises:
        UsageError: the text of so many rows cannot be written there.
    """
    rows = out if isinstance(out, Rows) else Rows(out)
    text, shape = rows.text, (num_rows, options.sequence_length + 1)
    # What C++ writes to; carray: contiguous, aligned and writable.
    if not (isinstance(text, np.ndarray) and text.shape == shape and text.dtype == _INT64 and text.flags.carray):
        of_array = isinstance(text, np.ndarray)
        raise UsageError(
            f"out cannot take {num_rows} samples",
            found=f"{text.dtype}{list(text.shape)}" if of_array else type(text).__name__,
            expected=f"int64{list(shape)}, contiguous and writable",
            fix=f"out = dataset.empty_rows({num_rows})",
        )
    loss, positions = rows.by_value
    if (loss is None and options.loss_by_value) or (positions is None and options.reset_position_ids):
        return Rows(rows.text, _room_by_value(len(rows.text), options, empty=np.empty))
    return rows


def _room_by_value(num_rows: int, options: RowOptions, *, empty: Empty) -> ByValue:
    if not options.loss_by_value and not options.reset_position_ids:
        return _NONE_BY_VALUE
    shape = (num_rows, options.sequence_length)
    return ByValue(
        empty(shape, np.float32) if options.loss_by_value else None,
        empty(shape, np.int64) if options.reset_position_ids else None,
    )


def finish(rows: Rows, gathered: Gathered, *, options: RowOptions) -> Rows:
    """The rows with their masks and positions; their text was gathered."""
    loss, positions = rows.by_value
    if options.loss_by_value or options.reset_position_ids:
        finish_rows(rows.text, gathered.counts, gathered.cuts, loss, positions, options.rules)
    if gathered.trained is not None and loss is not None:
        np.multiply(loss, gathered.trained, out=loss)
    return _told(rows, gathered, options)


def _told(rows: Rows, gathered: Gathered, options: RowOptions) -> Rows:
    if gathered.cuts is None or not options.document_masks:
        return Rows(rows.text, rows.by_value, options, gathered)
    documents = cumulative_lengths(*gathered.cuts, options.sequence_length)
    return Rows(rows.text, rows.by_value, options, gathered, documents)


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
