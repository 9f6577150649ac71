"""Mamba-2, and hybrids of it with attention, MLPs and experts: each layer is one of them, as a pattern says."""

from __future__ import annotations

from trainer.models.family import Family, built_by
from trainer.models.gpt.params import buffer_table
from trainer.models.gpt.shape import counts, expert_metrics, losses
from trainer.models.mamba.check import cut_by_tp, float8_sizes, problems
from trainer.models.mamba.cost import activation_bytes, active_parameters, flops_per_token, stage_cost
from trainer.models.mamba.huggingface import HUGGING_FACE
from trainer.models.mamba.megatron import MEGATRON
from trainer.models.mamba.params import parameter_table
from trainer.models.mamba.shape import decode_state, effective, function, kinds, mamba_shape, scores_of

FAMILY = Family(
    shape=mamba_shape,
    problems=problems,
    cut_by_tp=cut_by_tp,
    float8_sizes=float8_sizes,
    parameters=parameter_table,
    flops_per_token=flops_per_token,
    activation_bytes=activation_bytes,
    stage_cost=stage_cost,
    kinds=kinds,
    scores=scores_of,
    decode_state=decode_state,
    function=function,
    effective=effective,
    build=built_by("trainer.models.mamba.model", "build_mamba"),
    sections=("mamba", "moe"),
    buffers=buffer_table,
    losses=losses,
    counts=counts,
    metrics=expert_metrics,
    active=active_parameters,
    scans=lambda shape: "mixer" in kinds(shape),
    hugging_face=HUGGING_FACE,
    megatron=MEGATRON,
)
