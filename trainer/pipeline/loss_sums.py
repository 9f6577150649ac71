"""The sums of a step's loss, over all tokens and over those of each component of the blend.

Sums and counts are kept, never means: the divisor of a mean is known only after all ranks have reported. Everything
stays on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.models.stage import Microbatch, NamedLoss, Tensors


def loss_factor(tokens: Tensor, *, own_means: bool, scale: Tensor | None) -> Tensor | None:
    """The factor of a microbatch's loss; None: 1."""
    if not own_means:
        return scale
    share = 1 / tokens.clamp(min=1).double()
    return share if scale is None else share * scale


def loss_sums(outputs: Tensors, batch: Microbatch, *, factor: Tensor | None, num_components: int) -> Tensor:
    """A microbatch's part of the totals of Executor.run, or of the first of them."""
    (loss, *losses), mask_BS = outputs, batch.loss_mask_BS
    pairs = [(loss.detach().double().view(1), mask_BS.sum().double().view(1))]
    if num_components:  # a user's loss may return only its sum
        add_up = partial(by_component, batch=batch, num_components=num_components)
        pairs += [(add_up(losses_N), add_up(mask_BS)) for losses_N in losses]
    scaled = ((sums if factor is None else sums / factor, tokens) for sums, tokens in pairs)
    return torch.cat([part for pair in scaled for part in pair])


def with_named(
    totals: Tensor | None,
    losses: Mapping[str, NamedLoss],
    counts: Mapping[str, Tensor],
    *,
    names: Sequence[str],
    lengths: Mapping[str, int],
    before: int,
    device: torch.device,
) -> Tensor:
    """The totals, then sum and weight of each named loss, then the counts: fp64, 0 where a stage added nothing.

    Args:
        totals: the first `before` numbers, or fewer; None: zeros. names, lengths: that the family lists.
    """
    assert losses.keys() <= set(names), f"the family does not list the losses {sorted(losses.keys() - set(names))}"
    assert counts.keys() <= lengths.keys(), f"the family does not list {sorted(counts.keys() - lengths.keys())}"
    place = before + 2 * len(names)
    out = torch.zeros(place + sum(lengths.values()), dtype=torch.float64, device=device)
    if totals is not None:
        out[: len(totals)] = totals
    for number, name in enumerate(names):
        if (loss := losses.get(name)) is not None:
            first = before + 2 * number
            out[first], out[first + 1] = loss.sum.detach(), loss.weight
    for name, length in lengths.items():
        if name in counts:
            out[place : place + length] = counts[name]
        place += length
    return out


def by_component(values: Tensor, batch: Microbatch, *, num_components: int) -> Tensor:
    """Sums of values of tokens, [N] or [B, S], over the rows or tokens of each component: fp64[num_components].

    Not index_add_: on a GPU its order of additions differs between runs; and NaN times zero stays NaN.
    """
    assert batch.components_B is not None, "rows do not say their component"
    rows_B = values.reshape(len(batch.components_B), -1).sum(1, dtype=torch.float64)
    numbers_K = torch.arange(num_components, device=values.device)
    return torch.where(batch.components_B[:, None] == numbers_K, rows_B[:, None], 0.0).sum(0)
