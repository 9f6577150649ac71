"""Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") in integer arithmetic of torch.

A draw is a function of only a counter and a key: the same on every device, in every layout and at each call. Words of
32 bits are held in int64, whose products overflow; that is harmless, because only their bits are used.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key_2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words of 32 bits for each counter of four such words (int64, broadcast) and a key int64[2]."""
    a, b, c, d = counter
    first, second = key_2.unbind(0)
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = (right >> 32 & _WORD) ^ b ^ first, (left >> 32 & _WORD) ^ d ^ second
        b, d = right & _WORD, left & _WORD
        first, second = first + _KEY_STEPS[0] & _WORD, second + _KEY_STEPS[1] & _WORD
    return a, b, c, d


def keep(
    sample_N: Tensor, position_N: Tensor, head_N: Tensor | None, *, features: int, key_2: Tensor, probability: float
) -> Tensor:
    """Which features of each row dropout keeps: bool[N, features]; one draw per element.

    Args:
        sample_N: int64, below 2^48. position_N: int64, in the sample. head_N: int64, below 2^16; None: 0.
        key_2: int64[2], of the run, layer and site. probability: of a feature to be dropped.
    """
    group_F = torch.arange((features + 3) // 4, device=sample_N.device).unsqueeze(0)
    high_N = sample_N >> 32 if head_N is None else sample_N >> 32 | head_N << 16
    # The group is a word that the first round does not multiply: torch.compile makes an arange of 32 bits of it.
    words = philox((position_N.unsqueeze(1), group_F, (sample_N & _WORD).unsqueeze(1), high_N.unsqueeze(1)), key_2)
    drawn_NF = torch.stack(words, dim=-1).flatten(1)[:, :features]
    return drawn_NF >= round(probability * 2**32)
