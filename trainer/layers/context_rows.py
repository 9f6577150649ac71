"""Context parallelism in attention and in mixers.

In attention each rank has the queries of its own chunks, and keys and values of all tokens. Keys and values are
gathered over the cp ranks; in backward their gradients are summed and scattered, the conjugate operation
(parallel/collectives.py). With few key-value heads they are small compared with the computation, and every form of
attention stays one call on whole keys (Grattafiori et al. 2024, section 3.3.2). context_attention.py does the same
beside computation, where a kernel tells its sums.

A mixer computes each chunk as a row of its own, from a state of 0. What chunks add to the state is gathered; each rank
computes the states before its own chunks, which are sums over the chunks before, and adds what its tokens read of them.

Shapes: B rows, S tokens of a row on this rank, T = cp * S of the whole row, G key-value heads, K head width; R = 2 * B
chunks of this rank, H heads of a mixer with states of P x N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.parallel.collectives import Group
from trainer.parallel.conjugates import gather_sequence
from trainer.parallel.context import chunk_ends, chunks_of, place_of


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
    chunks = gather_sequence(x_BS.unflatten(1, (2, -1)).transpose(0, 1).contiguous(), cp).unbind()
    return torch.stack([chunks[place_of(number, cp.size)] for number in range(2 * cp.size)], dim=1).flatten(1, 2)


class RowChunks:
    """The two chunks of each row on this rank as rows of their own, and what passes to them from chunks before.

    Attributes:
        document_RS: the document of each token; None: each row is one.
    """

    def __init__(self, cp: Group, document_BT: Tensor | None) -> None:
        self.cp, self._mine = cp, list(chunks_of(cp.rank, cp.size))
        self._documents = None if document_BT is None else document_BT.unflatten(1, (2 * cp.size, -1))  # [B, 2 cp, S/2]
        self.document_RS = None if self._documents is None else self._own(self._documents)

    def split(self, x_BS: Tensor) -> Tensor:
        """[B, S, ...] -> [R, S / 2, ...]."""
        return x_BS.unflatten(1, (2, -1)).flatten(0, 1)

    def tokens_before(self, x_RSC: Tensor, count: int) -> Tensor:
        """The last tokens of the chunk before each, which has as many: [R, count, C]; 0 before a row."""
        last = x_RSC[:, x_RSC.shape[1] - count :].unflatten(0, (-1, 2))
        return self._own(_shifted(gather_rows(last, cp=self.cp)))

    def follows(self) -> Tensor | None:
        """Which tokens belong to the document of the token before their chunk: [R, S / 2]; None: all."""
        return None if self.document_RS is None else self.document_RS == self.documents_before(1)

    def documents_before(self, count: int) -> Tensor:
        """Their documents: [R, count]; -1 before a row."""
        assert self._documents is not None, "only called where documents are told apart"
        return self._own(_shifted(self._documents[:, :, self._documents.shape[2] - count :], value=-1))

    def states_before(self, added_RHPN: Tensor, log_RH: Tensor) -> Tensor:
        """The state before each chunk, of what each adds to it and the log of what it leaves of one: [R, H, P, N]."""
        joined = torch.cat((added_RHPN.flatten(1), log_RH), 1).unflatten(0, (-1, 2))
        added, log = gather_rows(joined, cp=self.cp).split([added_RHPN[0].numel(), log_RH.shape[1]], 2)
        added, keeps = added.unflatten(2, added_RHPN.shape[1:]), log.exp()
        if self._documents is not None:
            last = self._documents[:, :, -1]
            keeps = keeps * (last == _shifted(last, value=-1))[..., None]
        state, states = torch.zeros_like(added[:, 0]), []
        for number in range(2 * self.cp.size):
            states.append(state)
            state = state * keeps[:, number, :, None, None] + added[:, number]
        return torch.stack([states[number] for number in self._mine], 1).flatten(0, 1)

    def _own(self, x: Tensor) -> Tensor:
        """This rank's chunks of those of whole rows: [B, 2 cp, ...] -> [R, ...].

        One by one: a list as an index is a tensor on the host, whose copy waits and cannot be part of a CUDA graph.
        """
        return torch.stack([x[:, number] for number in self._mine], 1).flatten(0, 1)


def _shifted(x: Tensor, value: int = 0) -> Tensor:
    """What the chunk before each has, of [B, 2 cp, ...]."""
    return F.pad(x[:, :-1], (0, 0) * (x.dim() - 2) + (1, 0), value=value)
