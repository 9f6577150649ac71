"""Runs a list of actions: the one place where forward and backward passes happen.

Knows nothing of the order of actions (schedule.py), of communication between ranks (collectives.py) or of updates
(optimizer.py). Gradients of the *sum* of the loss accumulate; nothing is divided here, because how many tokens the
step has is only known when all of it was seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.errors import FEWER_TOKENS, out_of_memory_in
from trainer.models.stage import Microbatch, Stage
from trainer.pipeline.actions import Action


@out_of_memory_in("the forward and backward passes", fix=FEWER_TOKENS)
def run_actions(actions: Sequence[Action], stage: Stage, *, microbatches: Sequence[Microbatch]) -> Tensor:
    """Do the actions in order; the layers add gradients to their main gradients.

    Returns:
        fp64[2] on the device: the sum of the loss and the number of loss tokens, of this rank's microbatches.
    """
    live: dict[int, Tensor] = {}
    device = microbatches[0].tokens_BS.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for action in actions:
        batch = microbatches[action.microbatch]
        if action.kind == "F":
            (loss,) = stage((), batch)
            live[action.microbatch] = loss
            totals += torch.stack((loss.detach().double(), batch.loss_mask_BS.sum().double()))
        else:
            torch.autograd.backward(live.pop(action.microbatch))
    assert not live, f"the schedule left microbatches {sorted(live)} without a backward pass"
    return totals
