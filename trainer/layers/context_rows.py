"""Context parallelism in attention: each rank has the queries of its own chunks, and keys and values of all tokens.

Keys and values are gathered over the cp ranks; in backward their gradients are summed and scattered, the conjugate
operation (parallel/collectives.py). With few key-value heads they are small compared with the computation, and every
form of attention stays one call on whole keys (Grattafiori et al. 2024, section 3.3.2).

Shapes: B rows, S tokens of a row on this rank, T = cp * S of the whole row, G key-value heads, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.parallel.collectives import Group
from trainer.parallel.conjugates import gather_sequence
from trainer.parallel.context import chunk_ends


@dataclass(frozen=True, slots=True)
class ContextRows:
    """The part of each row that this rank holds.

    Args:
        cp: the ranks that share the rows. columns_S: int64[S], positions of this rank's tokens in their rows.
    """

    cp: Group
    columns_S: Tensor

    @property
    def length(self) -> int:
        """T, tokens of a whole row."""
        return len(self.columns_S) * self.cp.size

    @property
    def ends(self) -> tuple[int, int]:
        """Where this rank's two chunks end in the row."""
        return chunk_ends(self.length, rank=self.cp.rank, size=self.cp.size)


def gather_keys(k_BSGK: Tensor, v_BSGK: Tensor, *, cp: Group) -> tuple[Tensor, Tensor]:
    """Keys and values of whole rows, in the order of the row: [B, S, G, K] -> [B, T, G, K] each."""
    k_BTGK, v_BTGK = gather_rows(torch.stack((k_BSGK, v_BSGK), dim=2), cp=cp).unbind(dim=2)
    return k_BTGK, v_BTGK


def gather_rows(x_BS: Tensor, *, cp: Group) -> Tensor:
    """What whole rows have for each token, in the order of the row: [B, S, ...] -> [B, T, ...]."""
    chunks = gather_sequence(x_BS.unflatten(1, (2, -1)).transpose(0, 1).contiguous(), cp)
    in_order = torch.cat((chunks[0::2], chunks[1::2].flip(0)))  # the first chunks of all ranks, then the second ones
    return in_order.transpose(0, 1).flatten(1, 2)
