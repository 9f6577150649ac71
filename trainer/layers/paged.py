"""Keys and values that lie in pages: what attention reads and writes when a model generates.

A row's tokens lie in pages of T tokens, anywhere in a pool; a table says which. A step computes new tokens of several
rows: one of each (decoding), or a part of each prompt (prefill). Both write the new tokens' keys and values first and
then attend to all that the row has. Page 0 belongs to no row: padded rows write there.

Shapes: N new tokens of B rows, P pages of a pool or of the longest row, T tokens of a page, H query heads, G key-value
heads, K head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import ScoreShape
from trainer.kernels.table import Kernels


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the tokens of a step's rows lie in one pool.

    Args:
        table_BP: int32, the page of each T tokens of a row; 0 where nothing is kept.
        length_B: int32, tokens of each row, with the new ones.
        place_N: int64, where each new token of a prefill is kept: page * T + its place in the page.
        counts, lengths: of a prefill, on the host: new tokens of each row, and all of them; empty: one token of each.
    """

    table_BP: Tensor
    length_B: Tensor
    place_N: Tensor | None = None
    counts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pages:
    """What one block keeps: its pool of pages, and the rows of this step in it."""

    tensors: Mapping[str, Tensor]
    rows: PagedRows

    def keep(self, name: str, x_NGK: Tensor) -> None:
        """Write the new tokens of a prefill."""
        assert self.rows.place_N is not None, "in decoding, paged_attention writes the new tokens"
        _in_words(self.tensors[name].flatten(0, 1)).index_copy_(0, self.rows.place_N, _in_words(x_NGK))

    def keep_rows(self, name: str, x_NGK: Tensor, *, window: int) -> tuple[Tensor, tuple[int, ...]]:
        """`keep`; and what the new tokens see of each row, one row after the other, and how many tokens of each."""
        self.keep(name, x_NGK)
        parts = [
            x_TGK
            if len(x_TGK) == self.rows.lengths[row]
            else self.of_row(name, row, first=self.first_seen(row, window=window))
            for row, x_TGK in enumerate(x_NGK.split(self.rows.counts))
        ]
        lengths = tuple(map(len, parts))
        return (x_NGK if lengths == self.rows.counts else torch.cat(parts)), lengths

    def of_row(self, name: str, row: int, *, first: int) -> Tensor:
        """All tokens of a row from `first` on, which begins a page: [tokens, G, K]."""
        pool_PTGK, length = self.tensors[name], self.rows.lengths[row]
        page = pool_PTGK.shape[1]
        table = self.rows.table_BP[row, first // page : -(-length // page)]
        return pool_PTGK[table].flatten(0, 1)[: length - first]

    def first_seen(self, row: int, *, window: int) -> int:
        """The beginning of the first page that new tokens of a row see; with a window, older ones may have gone."""
        page, seen = (
            next(iter(self.tensors.values())).shape[1],
            self.rows.lengths[row] - self.rows.counts[row] - window + 1,
        )
        return max(0, seen) // page * page if window else 0


def _in_words(x_NGK: Tensor) -> Tensor:
    """Rows of 8-byte words, if the bytes of a row allow it: PyTorch copies rows to their places word by word."""
    x_ND = x_NGK.flatten(1).contiguous()
    return x_ND if x_ND.shape[1] * x_ND.element_size() % 8 else x_ND.view(torch.int64)


@dataclass(frozen=True, slots=True)
class ReadRows:
    """What the encoder gave for the texts of a step's rows.

    Args:
        tensors: block -> name -> what it keeps of the tokens of every row's text: [slots, T, ...].
        slot_N: int64, the slot of each new token's row. length_N: int32, tokens of that row's text.
    """

    tensors: Mapping[int, Mapping[str, Tensor]]
    slot_N: Tensor
    length_N: Tensor


@dataclass(frozen=True, slots=True)
class RowStates:
    """What one block keeps of each row, whatever its length.

    Args:
        tensors: name -> [slots + 1, ...]; padded rows of a step have the last slot.
        slot_B: int64, the slot of each row of this step.
        counts, starts: of a prefill, on the host: new tokens of each row, and the tokens that it has already, without
            which its state is not read; empty: one token of each.
    """

    tensors: Mapping[str, Tensor]
    slot_B: Tensor
    counts: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step of generation, for all blocks of a stage.

    Args:
        pages: of each block that keeps tokens, by its number in the model. longest: the model's context, for tables of
            positions.
        read: of the encoder; None: the model has none.
        states: of each block that keeps states of rows.
    """

    pages: Mapping[int, Pages]
    longest: int
    read: ReadRows | None = None
    states: Mapping[int, RowStates] = field(default_factory=dict)


def attend_pages(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, pages: Pages, *, scores: ScoreShape, tensors: ScoreTensors,
    kernels: Kernels,
) -> Tensor:  # fmt: skip
    """Keep the new keys and values, and attend to all of each row: [N, H, K]."""
    rows = pages.rows
    if not rows.counts:
        pool = pages.tensors["key"], pages.tensors["value"]
        new = q_NHK, k_NGK, v_NGK
        y_BHK: Tensor = kernels.paged_attention(*new, *pool, rows.table_BP, rows.length_B, scores, tensors)
        return y_BHK
    k_MGK, lengths = pages.keep_rows("key", k_NGK, window=scores.window)
    v_MGK, _ = pages.keep_rows("value", v_NGK, window=scores.window)
    y_NHK: Tensor = kernels.ragged_attention(q_NHK, k_MGK, v_MGK, rows.counts, lengths, scores, tensors)
    return y_NHK
