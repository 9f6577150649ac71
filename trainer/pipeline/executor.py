"""Runs a list of actions: the one place where forward and backward passes happen.

Knows nothing of the order of actions (schedule.py), of communication between ranks (collectives.py) or of updates
(optimizer.py). Gradients of the *sum* of the loss accumulate; nothing is divided here, because how many tokens the
step has is only known when all of it was seen. Only for a mean of microbatch means, each microbatch's sum is divided by
its own tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.errors import FEWER_TOKENS, out_of_memory_in
from trainer.models.stage import Microbatch, Stage, Tensors
from trainer.pipeline.actions import Action


@out_of_memory_in("the forward and backward passes", fix=FEWER_TOKENS)
def run_actions(
    actions: Sequence[Action],
    stage: Stage,
    *,
    microbatches: Sequence[Microbatch],
    own_means: bool = False,
    scale: Tensor | None = None,
    num_components: int = 0,
) -> Tensor:
    """Do the actions in order; the layers add gradients to their main gradients.

    Args:
        own_means: gradients are those of the sum of microbatch means; what is returned stays the same.
        scale: scalar by which gradients are multiplied; what is returned stays the same. None: 1.
        num_components: of the blend; 0: losses by component are not wanted.

    Returns:
        fp64[2 + 2 num_components] on the device: the sum of the loss and the number of loss tokens of this rank's
        microbatches, then the sums of each component, then their numbers of tokens.
    """
    live: dict[int, Tensor] = {}
    device = microbatches[0].tokens_BS.device
    totals = torch.zeros(2 + 2 * num_components, dtype=torch.float64, device=device)
    for action in actions:
        batch = microbatches[action.microbatch]
        if action.kind == "F":
            mask_BS, tokens = batch.loss_mask_BS, batch.loss_mask_BS.sum()
            whole = tokens if batch.loss_tokens is None else batch.loss_tokens
            factor = _factor(whole, own_means=own_means, scale=scale)
            if factor is not None:  # the loss makes its gradient in its forward pass: only the mask reaches it
                batch = dataclasses.replace(batch, loss_mask_BS=mask_BS.double() * factor)
            outputs = stage((), batch)
            live[action.microbatch] = outputs[0]
            counted = _counted(outputs, microbatches[action.microbatch], factor, num_components)
            totals[: len(counted)] += counted
        else:
            torch.autograd.backward(live.pop(action.microbatch))
    assert not live, f"the schedule left microbatches {sorted(live)} without a backward pass"
    return totals


def _counted(outputs: Tensors, batch: Microbatch, factor: Tensor | None, num_components: int) -> Tensor:
    """What a microbatch adds to the totals, or to the first of them."""
    (loss, *losses), mask_BS = outputs, batch.loss_mask_BS
    pairs = [(loss.detach().double().view(1), mask_BS.sum().double().view(1))]
    if num_components:  # a user's loss may say only its sum
        add_up = partial(by_component, batch=batch, num_components=num_components)
        pairs += [(add_up(losses_N), add_up(mask_BS)) for losses_N in losses]
    scaled = ((sums if factor is None else sums / factor, tokens) for sums, tokens in pairs)
    return torch.cat([part for pair in scaled for part in pair])


def by_component(values: Tensor, batch: Microbatch, *, num_components: int) -> Tensor:
    """Sums of values of tokens, [N] or [B, S], over the rows of each component: fp64[num_components].

    Not index_add_: on a GPU its order of sums is another in each run, and times zero a NaN stays one.
    """
    assert batch.components_B is not None, "rows do not say their component"
    rows_B = values.reshape(len(batch.components_B), -1).sum(1, dtype=torch.float64)
    numbers_K = torch.arange(num_components, device=values.device)
    return torch.where(batch.components_B[:, None] == numbers_K, rows_B[:, None], 0.0).sum(0)


def _factor(tokens: Tensor, *, own_means: bool, scale: Tensor | None) -> Tensor | None:
    """What the loss of a microbatch is multiplied by; None: 1."""
    if not own_means:
        return scale
    share = 1 / tokens.clamp(min=1).double()
    return share if scale is None else share * scale
