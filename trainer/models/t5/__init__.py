"""T5: an encoder that reads a text and a decoder that writes another, in Megatron's form and in the original one."""

from __future__ import annotations

from trainer.models.family import Family, built_by
from trainer.models.t5.check import cut_by_tp, float8_sizes, problems
from trainer.models.t5.cost import activation_bytes, flops_per_token, stage_cost
from trainer.models.t5.huggingface import HUGGING_FACE
from trainer.models.t5.megatron import MEGATRON
from trainer.models.t5.params import parameter_table
from trainer.models.t5.shape import decode_state, decoder_start, effective, function, kinds, scores_of, t5_shape

FAMILY = Family(
    shape=t5_shape,
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
    build=built_by("trainer.models.t5.model", "build_t5"),
    sections=("t5",),
    data_kinds=("t5",),
    decoder_start=decoder_start,
    hugging_face=HUGGING_FACE,
    megatron=MEGATRON,
)
