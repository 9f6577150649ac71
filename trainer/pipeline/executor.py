"""Runs a list of actions: the one place where forward and backward passes happen.

Knows nothing of the order of actions (schedule.py), of communication between ranks (collectives.py) or of updates
(optimizer.py). Gradients of the *sum* of the loss accumulate; nothing is divided here, because how many tokens the
step has is only known when all of it was seen. Only for a mean of microbatch means, each microbatch's sum is divided by
its own tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.errors import FEWER_TOKENS, out_of_memory_in
from trainer.models.stage import Microbatch, Stage
from trainer.pipeline.actions import Action


@out_of_memory_in("the forward and backward passes", fix=FEWER_TOKENS)
def run_actions(
    actions: Sequence[Action],
    stage: Stage,
    *,
    microbatches: Sequence[Microbatch],
    own_means: bool = False,
    scale: Tensor | None = None,
) -> Tensor:
    """Do the actions in order; the layers add gradients to their main gradients.

    Args:
        own_means: gradients are those of the sum of microbatch means; what is returned stays the same.
        scale: scalar by which gradients are multiplied; what is returned stays the same. None: 1.

    Returns:
        fp64[2] on the device: the sum of the loss and the number of loss tokens, of this rank's microbatches.
    """
    live: dict[int, Tensor] = {}
    device = microbatches[0].tokens_BS.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for action in actions:
        batch = microbatches[action.microbatch]
        if action.kind == "F":
            mask_BS, tokens = batch.loss_mask_BS, batch.loss_mask_BS.sum()
            whole = tokens if batch.loss_tokens is None else batch.loss_tokens
            factor = _factor(whole, own_means=own_means, scale=scale)
            if factor is not None:  # the loss makes its gradient in its forward pass: only the mask reaches it
                batch = dataclasses.replace(batch, loss_mask_BS=mask_BS.double() * factor)
            (loss,) = stage((), batch)
            live[action.microbatch] = loss
            summed = loss.detach().double() if factor is None else loss.detach().double() / factor
            totals += torch.stack((summed, tokens.double()))
        else:
            torch.autograd.backward(live.pop(action.microbatch))
    assert not live, f"the schedule left microbatches {sorted(live)} without a backward pass"
    return totals


def _factor(tokens: Tensor, *, own_means: bool, scale: Tensor | None) -> Tensor | None:
    """What the loss of a microbatch is multiplied by; None: 1."""
    if not own_means:
        return scale
    share = 1 / tokens.clamp(min=1).double()
    return share if scale is None else share * scale
