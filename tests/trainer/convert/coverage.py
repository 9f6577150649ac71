"""Which elements links cover, counted one by one: the slow check of a table of links."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.convert.links import Link


def covers_exactly(links: Sequence[Link]) -> bool:
    """Whether each element of each tensor on our side has one link."""
    counts: dict[str, Tensor] = {}
    for link in links:
        count = counts.setdefault(link.ours.tensor, torch.zeros(link.ours.shape, dtype=torch.int8))
        view = count.view([factor.extent for dim in link.ours.dims for factor in dim])
        view[tuple(slice(f.first, f.first + f.length) for dim in link.ours.dims for f in dim)] += 1
    return all(bool((count == 1).all()) for count in counts.values())
