"""Options of attention that change scores (the products of queries and keys), before and in the softmax.

Numbers and choices only: the arithmetic is in `plain.scored_attention`, and in gpu.py for a GPU. Pure, no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

WIDEST_CUDNN_HEAD = 128  # forward and backward
CUDNN_HEAD_MULTIPLE = 16  # within sequences: for other widths the workspace holds the longest row of each sequence
Sinks = Literal["none", "zero", "learned"]
Operation = Literal["attention", "document_attention", "padded_attention", "scored_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreShape:
    """The options of one attention layer, in the order in which they apply.

    Args:
        scale: factor of scores; 0: 1 / sqrt(head width).
        softcap: c of c tanh(score / c) (Gemma 2); 0: off.
        alibi: each head subtracts its slope times the distance (Press et al. 2022).
        window: number of newest tokens that a query attends to, including its own; 0: all.
        sinks: one more logit in each softmax, which takes weight but adds no value: 0, or learned for each head.
        dropout: probability with which a weight becomes 0.
        causal: a query attends to no later token; False: to all real tokens, and there may be more or fewer keys.
        relative: each head adds a learned bias of the distance (Raffel et al. 2020).
    """

    scale: float = 0.0
    softcap: float = 0.0
    alibi: bool = False
    window: int = 0
    sinks: Sinks = "none"
    dropout: float = 0.0
    causal: bool = True
    relative: bool = False

    @property
    def is_ordinary(self) -> bool:
        """Whether this is a causal softmax of scaled scores, for which libraries have kernels."""
        return self.causal and not self._is_changed

    @property
    def _is_changed(self) -> bool:
        changed = self.softcap or self.alibi or self.window or self.dropout or self.relative
        return bool(changed) or self.sinks != "none"

    def operation(self, *, documents: bool) -> Operation:
        """Which operation of kernels/table.py computes this; `documents`: rows hold several that must not mix."""
        if self._is_changed:
            return "scored_attention"
        if documents:
            return "document_attention"
        return "attention" if self.causal else "padded_attention"

    def factor(self, width: int) -> float:
        """The factor of scores for heads of this width."""
        return self.scale or 1 / math.sqrt(width)


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head: 2^(-8 i / n), i from 1; other n also take every second slope of 2n."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return (slopes + between)[:num_heads]
