"""Rows: the tokens of many samples, with their labels, masks and positions.

A kind of sample gathers text: S + 1 tokens per row, whose inputs and labels overlap. This module adds loss masks,
positions and document lengths, in C++ on whole batches. Fields that depend on positions only (how much of a row is
text, where documents begin) are computed on request: masks of ones and positions have more bytes than the tokens.
Fields that depend on token values are computed when rows are read, because the text may be overwritten later. Native
samples know padding by position. Megatron's recognize it by value, so a real token equal to the pad id loses its loss
and becomes 0, as in Megatron; but no sample depends on which was read first (Megatron's samples share one loss mask
that is changed in place). Slow twin: tests/reference/gather.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mdata._core import RowRules, cumulative_lengths, finish_rows
from mdata.errors import UsageError, counted
from mdata.indexed.gather import Cuts
from mdata.samples.sample_options import FieldKind
from mdata.util.arrays import Int64s, ranges

Sample = dict[str, npt.NDArray[Any]]
Empty = Callable[[tuple[int, ...], type[Any]], npt.NDArray[Any]]
"""Makes an array of a shape and a type, of any content, as np.empty does."""
_INT64 = np.dtype(np.int64)
NO_PAD = -1  # Megatron's value for: no id is padding


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Which masks and positions rows have.

    Args:
        sequence_length: inputs of a row, S.
        document_masks: positions restart with each document; cu_seqlens gives the documents' lengths.
        position_ids: rows have positions, whether they restart or not.
        mask_eod: no loss where the input is the end of a document.
        reset_position_ids: positions restart after the end of a document.
        attention_mask: a dense mask, [1, S, S], true where attention is masked.
        reset_attention_mask: it masks everything before the end of a document.
        mask_document_ends: the last token of a document has no loss: the next token belongs to another document.
        eod: the end of a document; pad: tokens equal to it are padding (Megatron); None: padding is known by position.
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
        """Whether the loss mask depends on the ids in a row."""
        return self.pad is not None or self.mask_eod

    @property
    def rules(self) -> RowRules:
        """The rules in the form that C++ takes."""
        return RowRules(self.pad, self.eod, self.mask_eod, self.reset_position_ids, self.mask_document_ends)


def effective_pad(pad: int | None, eod: int | None, *, allow_ambiguous: bool = False) -> int:
    """The id with which Megatron pads and which it treats as padding: -1 if there is none, or if it is also the eod."""
    if pad is None or (pad == eod and not allow_ambiguous):
        return NO_PAD
    return pad


@dataclass(eq=False, slots=True)
class Gathered:
    """The facts about rows whose text was read.

    Attributes:
        counts: int64[n], real tokens of each row.
        trained: uint8[n, S], 0 where a label has no loss regardless of other masks; None: no such labels.
        first_piece: int64[n], the number of each row's first piece, if rows are pairs of conversations.
        cuts: where documents begin inside the inputs, if requested, or if rows keep them apart.
    """

    counts: Int64s
    cuts: Cuts | None = None
    trained: npt.NDArray[np.uint8] | None = None
    first_piece: Int64s | None = None

    @property
    def only_counts(self) -> bool:
        """Whether only `counts` is known."""
        return self.cuts is None and self.trained is None

    def part(self, rows: slice) -> Gathered:
        """The facts about some of the rows."""
        cuts, trained = self.cuts, self.trained
        if cuts is not None:
            ends, places = cuts
            before = int(ends[rows.start - 1]) if rows.start else 0
            cuts = ends[rows] - before, places[before : int(ends[rows.stop - 1])]
        pieces = None if self.first_piece is None else self.first_piece[rows]
        return Gathered(self.counts[rows], cuts, None if trained is None else trained[rows], pieces)


class ByValue(NamedTuple):
    """Fields that depend on ids, loss_mask float32[n, S] and position_ids int64[n, S]; None: does not depend on ids."""

    loss_mask: npt.NDArray[np.float32] | None = None
    position_ids: Int64s | None = None

    def part(self, rows: slice) -> ByValue:
        """The fields of some rows."""
        loss, positions = self
        return ByValue(None if loss is None else loss[rows], None if positions is None else positions[rows])


_NONE_BY_VALUE = ByValue()


@dataclass(eq=False)  # frozen would add a twentieth to the time of reading eight rows
class Rows:
    """n rows: text, masks and positions; `Rows(text)` is a buffer to read into. Do not modify.

    Args:
        text: int64[n, S + 1], inputs and labels.
        by_value: buffers for fields that are computed while reading.
        options: which fields there are; gathered: facts from reading. None: nothing was read.
        documents: (cu_seqlens, max_seqlen), if the options request them.
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
        """int32[m + 1] over the concatenated rows: where each document begins, then n S; None: not requested."""
        return None if self.documents is None else self.documents[0]

    @property
    def max_seqlen(self) -> int | None:
        """Tokens of the longest document; None: not requested."""
        return None if self.documents is None else self.documents[1]

    @property
    def unmasked(self) -> bool:
        """Whether positions alone show that every label has loss, so that the mask would be all ones."""
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
        """int64[n, S], each token's position in its row, or in its document; None: not requested."""
        options, gathered = self._read
        if self.by_value.position_ids is not None or not options.with_positions:
            return self.by_value.position_ids
        positions = np.empty(self.tokens.shape, np.int64)
        finish_rows(self.text, gathered.counts, self._cuts, None, positions, options.rules)
        return positions

    @property
    def conversations(self) -> Int64s | None:
        """int64[m], of pairs: the numbers of the conversations that `cu_seqlens` bounds, 2i and 2i + 1 of pair i."""
        _, gathered = self._read
        if gathered.first_piece is None:
            return None
        cuts = self._cuts
        assert cuts is not None, "conversations are kept apart"
        return ranges(gathered.first_piece, np.diff(cuts[0], prepend=0) + 1)

    @property
    def fields(self) -> Sample:
        """The arrays with one row per sample, by their names in a sample."""
        fields: Sample = {"tokens": self.tokens, "labels": self.labels, "loss_mask": self.loss_mask}
        return fields if self.position_ids is None else fields | {"position_ids": self.position_ids}

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """One of `fields`."""
        return self.fields[name]

    def split(self, num_parts: int) -> list[Rows]:
        """The rows in this many parts of equal size, as views of the same memory."""
        options, gathered = self._read
        size = len(self.text) // num_parts
        places = [slice(first, first + size) for first in range(0, size * num_parts, size)]
        text, by_value, counts = self.text, self.by_value, gathered.counts
        if gathered.only_counts and self.documents is None and by_value is _NONE_BY_VALUE:
            return [Rows(text[rows], by_value, options, Gathered(counts[rows])) for rows in places]
        facts = replace(gathered, cuts=self._cuts)
        return [_told(Rows(text[rows], by_value.part(rows)), facts.part(rows), options) for rows in places]

    @property
    def _read(self) -> tuple[RowOptions, Gathered]:
        if self.options is None or self.gathered is None:
            raise ValueError("nothing has been read into these rows")
        return self.options, self.gathered

    @cached_property
    def _cuts(self) -> Cuts | None:
        """Where documents begin inside each row."""
        _, gathered = self._read
        if gathered.cuts is not None or self.documents is None:
            return gathered.cuts
        rows, places = np.divmod(self.documents[0][:-1], self.text.shape[1] - 1)
        inside = places > 0
        return np.cumsum(np.bincount(rows[inside], minlength=len(self.text))), places[inside]


class FieldRows(Rows):
    """n samples of bert, t5 or classify, whose `fields` are those of `BertSamples`, `T5Samples`, `ClassifySamples`.

    `text` and `tokens` are what the (encoder's) model reads, int64[n, S], with no further token; of choices [n, C, S].
    """

    def __init__(self, fields: Sample, kind: FieldKind) -> None:
        super().__init__(next(iter(fields.values())))
        self._fields, self.kind = fields, kind

    @property
    def fields(self) -> Sample:
        """The arrays with one row per sample, by their names in a sample."""
        return self._fields

    @property
    def tokens(self) -> Int64s:
        """The (encoder's) inputs, int64[n, S]."""
        return self.text

    @property
    def labels(self) -> Int64s:
        """The tokens to predict, int64[n, S]; of T5 the decoder's, int64[n, decoder_length]."""
        return self._fields["labels"]

    @property
    def unmasked(self) -> bool:
        """Never: only the masked tokens have a loss."""
        return False

    @cached_property
    def loss_mask(self) -> npt.NDArray[np.float32]:
        """float32 of the labels' shape, 1 where a label counts."""
        return self._fields["loss_mask"].astype(np.float32)

    @cached_property
    def position_ids(self) -> None:
        """These samples have none."""

    def split(self, num_parts: int) -> list[Rows]:
        """The rows in this many parts of equal size, as views of the same memory."""
        size = len(self.text) // num_parts
        places = [slice(first, first + size) for first in range(0, size * num_parts, size)]
        return [FieldRows({name: array[rows] for name, array in self._fields.items()}, self.kind) for rows in places]


def empty_rows(num_rows: int, options: RowOptions, *, empty: Empty = np.empty) -> Rows:
    """A reusable buffer for rows; `empty` allocates the arrays."""
    text = empty((num_rows, options.sequence_length + 1), np.int64)
    return Rows(text, _room_by_value(num_rows, options, empty=empty))


def room_in(out: Rows | Int64s, num_rows: int, *, options: RowOptions) -> Rows:
    """A buffer over the caller's arrays, with new arrays for missing fields that depend on ids.

    Raises:
        UsageError: the text of this many rows does not fit.
    """
    rows = out if isinstance(out, Rows) else Rows(out)
    text, shape = rows.text, (num_rows, options.sequence_length + 1)
    # C++ writes to it; carray: contiguous, aligned and writable.
    if not (isinstance(text, np.ndarray) and text.shape == shape and text.dtype == _INT64 and text.flags.carray):
        of_array = isinstance(text, np.ndarray)
        raise UsageError(
            f"out cannot take {counted(num_rows, 'sample')}",
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
    """Add masks and positions to rows whose text was gathered."""
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
    """Combine the facts about parts of the rows, at the given positions, into those about all rows."""
    counts = np.zeros(num_rows, np.int64)
    of_row: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)] * num_rows
    trained = first_piece = None
    for places, part in parts:
        counts[places] = part.counts
        if part.first_piece is not None:
            first_piece = np.zeros(num_rows, np.int64) if first_piece is None else first_piece
            first_piece[places] = part.first_piece
        if part.trained is not None:
            trained = np.zeros((num_rows, part.trained.shape[1]), np.uint8) if trained is None else trained
            trained[places] = part.trained
        if part.cuts is not None:
            ends, cuts = part.cuts
            for place, row_cuts in zip(places.tolist(), np.split(cuts, ends[:-1]), strict=True):
                of_row[place] = row_cuts
    if not parts or parts[0][1].cuts is None:
        return Gathered(counts, trained=trained, first_piece=first_piece)
    joined: Cuts = np.cumsum([len(row_cuts) for row_cuts in of_row]), np.concatenate(of_row)
    return Gathered(counts, joined, trained, first_piece)
