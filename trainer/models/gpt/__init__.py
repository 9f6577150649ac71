"""GPT: decoder-only transformers, from GPT-2 to Llama 3, Mistral and Qwen 3."""

from __future__ import annotations

from trainer.models.family import Family, built_by
from trainer.models.gpt.check import cut_by_tp, float8_sizes, model_problems
from trainer.models.gpt.cost import active_parameters, flops_per_token, stage_cost
from trainer.models.gpt.huggingface import HUGGING_FACE
from trainer.models.gpt.megatron import MEGATRON
from trainer.models.gpt.memory import activation_bytes
from trainer.models.gpt.params import buffer_table, parameter_table
from trainer.models.gpt.shape import (
    counts,
    decode_state,
    effective_keys,
    expert_metrics,
    function_keys,
    gpt_shape,
    kinds,
    losses,
    scores_of,
)

FAMILY = Family(
    shape=gpt_shape,
    problems=model_problems,
    cut_by_tp=cut_by_tp,
    float8_sizes=float8_sizes,
    parameters=parameter_table,
    flops_per_token=flops_per_token,
    activation_bytes=activation_bytes,
    stage_cost=stage_cost,
    kinds=kinds,
    scores=scores_of,
    decode_state=decode_state,
    function=function_keys,
    effective=effective_keys,
    build=built_by("trainer.models.gpt.model", "build_gpt"),
    sections=("mla", "moe", "mtp", "lora"),
    buffers=buffer_table,
    losses=losses,
    counts=counts,
    metrics=expert_metrics,
    active=active_parameters,
    hugging_face=HUGGING_FACE,
    megatron=MEGATRON,
)
