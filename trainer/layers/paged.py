"""Keys and values that lie in pages: what attention reads and writes when a model generates.

A row's tokens lie in pages of T tokens, anywhere in a pool; a table says which. A step computes new tokens of several
rows: one of each (decoding), or a part of each prompt (prefill). Both write the new tokens' keys and values first and
then attend to all that the row has. Page 0 belongs to no row: padded rows write there.

Shapes: N new tokens of B rows, P pages of a pool or of the longest row, T tokens of a page, H query heads, G key-value
heads, K head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.kernels import plain
from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import ScoreShape
from trainer.kernels.table import Kernels


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the tokens of a step's rows lie in one pool.

    Args:
        table_BP: int32, the page of each T tokens of a row; 0 where nothing is kept.
        length_B: int32, tokens of each row, with the new ones.
        place_N: int64, where each new token is kept: page * T + its place in the page.
        counts, lengths: of a prefill, on the host: new tokens of each row, and all of them; empty: one token of each.
    """

    table_BP: Tensor
    length_B: Tensor
    place_N: Tensor
    counts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pages:
    """What one block keeps: its pool of pages, and the rows of this step in it."""

    tensors: Mapping[str, Tensor]
    rows: PagedRows

    def keep(self, name: str, x_NGK: Tensor) -> None:
        """Write the new tokens."""
        self.tensors[name].flatten(0, 1).index_copy_(0, self.rows.place_N, x_NGK)

    def of_row(self, name: str, row: int, *, first: int) -> Tensor:
        """All tokens of a row from `first` on, which begins a page: [1, tokens, G, K]."""
        pool_PTGK, length = self.tensors[name], self.rows.lengths[row]
        page = pool_PTGK.shape[1]
        table = self.rows.table_BP[row, first // page : -(-length // page)]
        return pool_PTGK[table].flatten(0, 1)[None, : length - first]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step of generation, for all blocks of a stage.

    Args:
        pages: of each block, by its number in the model. longest: the model's context, for tables of positions.
    """

    pages: Mapping[int, Pages]
    longest: int


def attend_pages(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, pages: Pages, *, scores: ScoreShape, tensors: ScoreTensors,
    kernels: Kernels,
) -> Tensor:  # fmt: skip
    """Keep the new keys and values, and attend to all of each row: [N, H, K]."""
    pages.keep("key", k_NGK)
    pages.keep("value", v_NGK)
    rows = pages.rows
    if not rows.counts:
        pool = pages.tensors["key"], pages.tensors["value"]
        y_BHK: Tensor = kernels.paged_attention(q_NHK, *pool, rows.table_BP, rows.length_B, scores, tensors)
        return y_BHK
    parts = []
    news = (x.split(rows.counts) for x in (q_NHK, k_NGK, v_NGK))
    for row, (q, k, v) in enumerate(zip(*news, strict=True)):
        length, first = rows.lengths[row], 0
        if len(q) < length:
            page = pages.tensors["key"].shape[1]
            if scores.window:  # older pages may have gone
                first = max(0, length - len(q) - scores.window + 1) // page * page
            k_1TGK, v_1TGK = (pages.of_row(name, row, first=first) for name in ("key", "value"))
        else:
            k_1TGK, v_1TGK = k[None], v[None]
        parts.append(_prefill(q[None], k_1TGK, v_1TGK, scores=scores, tensors=tensors, kernels=kernels)[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _prefill(
    q_1SHK: Tensor, k_1TGK: Tensor, v_1TGK: Tensor, *, scores: ScoreShape, tensors: ScoreTensors, kernels: Kernels
) -> Tensor:
    """Attention of the last S of T tokens."""
    new, length = q_1SHK.shape[1], k_1TGK.shape[1]
    if scores.is_ordinary:
        ends = None if new == length else (length,)
        y_1SHK: Tensor = kernels.attention(q_1SHK, k_1TGK, v_1TGK, scores.scale or None, ends)
        return y_1SHK
    column_S = torch.arange(length - new, length, device=q_1SHK.device)
    only_window = not (scores.softcap or scores.alibi or scores.sinks != "none")
    if not only_window:
        return plain.scored_attention(q_1SHK, k_1TGK, v_1TGK, scores, tensors._replace(column_S=column_S))
    distance_ST = column_S.unsqueeze(1) - torch.arange(length, device=q_1SHK.device)
    visible_ST = (distance_ST >= 0) & (distance_ST < scores.window)
    q_1HSK, k_1GTK, v_1GTK = (x.transpose(1, 2) for x in (q_1SHK, k_1TGK, v_1TGK))
    grouped = q_1SHK.shape[2] != k_1TGK.shape[2]
    y_1HSK = F.scaled_dot_product_attention(
        q_1HSK, k_1GTK, v_1GTK, attn_mask=visible_ST, scale=scores.scale or None, enable_gqa=grouped
    )
    return y_1HSK.transpose(1, 2)
