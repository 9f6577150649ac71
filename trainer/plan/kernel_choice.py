"""Which kernels a run uses on a CPU and on a GPU, with the reason for each, and for each that is not used.

The choices themselves are made in kernels/table.py, kernels/gpu.py and `ScoreShape.operation`; this module describes
them, and tests/trainer/plan/test_kernel_choice.py compares the two. Pure, no torch.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from trainer.config.sections import RunConfig
from trainer.kernels.scores import ScoreShape
from trainer.models.family import family_of
from trainer.plan.plan import Plan

Device = Literal["cpu", "gpu"]
DEVICES: tuple[Device, ...] = ("cpu", "gpu")
SDPA = "PyTorch's scaled_dot_product_attention"
FLEX = "FlexAttention, compiled"
VARLEN = "PyTorch's variable-length flash attention"
PLAIN = "plain PyTorch"
LIBRARY = "PyTorch's own kernels"
COMPILED = "torch.compile"
ALL_SCORES = "it holds all attention scores in memory"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of one operation.

    Args:
        operation: "attention", with the layers that it serves where these differ.
        kernel: what runs. reason: why.
        others: (kernel, why it is not used).
    """

    operation: str
    kernel: str
    reason: str
    others: tuple[tuple[str, str], ...] = ()


def kernel_choices(config: RunConfig, plan: Plan, *, device: Device) -> tuple[Choice, ...]:
    """The kernels of attention, in all its forms in the model, and of the pointwise operations."""
    dtype, family = config.precision.dtype, family_of(config)
    forms: dict[ScoreShape, list[int]] = {}
    for block in range(plan.shape.num_layers):
        forms.setdefault(family.block_scores(plan.shape, block), []).append(block)
    documents = config.data.document_masks
    attention = [attention_choice(scores, device, dtype=dtype, documents=documents) for scores in forms]
    if len(forms) > 1:
        attention = [
            dataclasses.replace(choice, operation=f"attention in {len(blocks)} of {plan.shape.num_layers} layers")
            for choice, blocks in zip(attention, forms.values(), strict=True)
        ]
    return (*attention, pointwise_choice(device, dtype=dtype))


def attention_choice(scores: ScoreShape, device: Device, *, dtype: str, documents: bool = False) -> Choice:
    """Attention of one form; `documents`: rows hold several that must not mix."""
    operation = scores.operation(documents=documents)
    keys = " and ".join(option_names(scores))
    if operation == "attention":
        return Choice("attention", SDPA, "causal attention over whole rows", _others_than_sdpa(device))
    no_sdpa = (SDPA, f"it has no fused kernel for {keys or 'documents within rows'}")
    if device == "cpu":
        return Choice("attention", PLAIN, f"{ALL_SCORES} (not in the estimate)", (no_sdpa, (FLEX, "used on GPUs only")))
    if scores.dropout:
        reason = f"model.attention_dropout; {ALL_SCORES} (not in the estimate)"
        return Choice("attention", PLAIN, reason, (no_sdpa, (FLEX, "it cannot drop attention weights")))
    not_plain = (PLAIN, ALL_SCORES)
    if operation == "scored_attention":
        return Choice("attention", FLEX, keys, (no_sdpa, not_plain))
    if dtype in ("bf16", "fp16"):
        reason = "documents within rows; FlexAttention where PyTorch is older than 2.10"
        return Choice("attention", VARLEN, reason, (no_sdpa, not_plain))
    return Choice("attention", FLEX, "documents within rows", (no_sdpa, (VARLEN, f"not for {dtype}"), not_plain))


def _others_than_sdpa(device: Device) -> tuple[tuple[str, str], ...]:
    flex = "used on GPUs only" if device == "cpu" else "no option of the model needs it"
    return ((FLEX, flex), (PLAIN, ALL_SCORES))


def option_names(scores: ScoreShape) -> list[str]:
    """The settings for which a fused kernel of causal attention does not do, in the order in which they apply."""
    named = {
        "model.attention_softcap": scores.softcap,
        'model.position = "alibi"': scores.alibi,
        "model.window": scores.window,
        "model.attention_sinks": scores.sinks != "none",
        "model.attention_dropout": scores.dropout,
    }
    return [name for name, is_set in named.items() if is_set]


def pointwise_choice(device: Device, *, dtype: str) -> Choice:
    """Norms, activations, rotary positions, the loss and the optimizer's update."""
    operation, slow = "norms, activations, rotary positions, loss, optimizer", "more passes over memory"
    if device == "gpu":
        return Choice(operation, COMPILED, "one or two passes over memory each", ((LIBRARY, slow), (PLAIN, slow)))
    compiled = (COMPILED, "used on GPUs only")
    if dtype in ("fp32", "fp64"):
        reason = f"where PyTorch has one, else {PLAIN}"
        return Choice(operation, LIBRARY, reason, (compiled,))
    rounding = f"they round intermediate results to {dtype}"
    return Choice(operation, PLAIN, f"exact up to one rounding to {dtype}", (compiled, (LIBRARY, rounding)))
