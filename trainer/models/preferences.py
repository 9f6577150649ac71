"""DPO (Rafailov et al. 2023, "Direct Preference Optimization"): the loss of pairs of conversations.

A pair is two sequences of a microbatch, chosen and rejected. With r = beta (log p - log p of the reference model),
summed over the tokens that are trained on, its loss is -log sigmoid(r of the chosen - r of the rejected). The gradient
by log p is all that the head needs, so the loss of whole sequences costs one more pass through the head's logits.

Shapes: B rows, S tokens of a row, N = B * S, P pairs, K = 2 P conversations: 2i is the chosen one of pair i.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from trainer.layers.head import SequenceLoss, sequence_sums
from trainer.models.stage import Microbatch, NamedLoss, PairRows
from trainer.parallel.collectives import Group, all_reduce_

LOSS_NAMES = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")


def pair_sequences(batch: Microbatch, pairs: PairRows, *, cp: Group) -> SequenceLoss:
    """The conversations of a microbatch and their loss, for `head_loss`; puts rewards into `batch.losses`."""
    number_N, weight_N = pairs.number_BS.flatten(), batch.loss_mask_BS.flatten()
    # Of each pair the mask has one token with its weight, which is 0 if it does not count.
    weight_P = all_reduce_(sequence_sums(weight_N, number_N, len(pairs.reference_K)), cp)[::2]

    def loss(nats_K: Tensor) -> tuple[Tensor, Tensor]:
        chosen_P, rejected_P = (pairs.beta * (-nats_K - pairs.reference_K)).view(-1, 2).unbind(1)
        margin_P = chosen_P - rejected_P
        slope_P = pairs.beta * weight_P * (-margin_P).sigmoid()
        if batch.losses is not None:
            is_counted = weight_P > 0
            values = chosen_P, rejected_P, margin_P, (margin_P > 0).double()
            for name, value_P in zip(LOSS_NAMES, values, strict=True):
                batch.losses[name] = NamedLoss(value_P[is_counted].sum(), is_counted.sum(), factor=0.0)
        losses_N = -F.logsigmoid(margin_P)[number_N // 2] * weight_N
        return losses_N, slope_P.unsqueeze(1).mul(slope_P.new_tensor((1.0, -1.0))).flatten()

    return SequenceLoss(number_N, len(pairs.reference_K), cp, loss)
