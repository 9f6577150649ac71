"""BERT: encoders that predict masked tokens, and whether a text follows another; Megatron's and the original."""

from __future__ import annotations

from trainer.models.bert.check import cut_by_tp, model_problems
from trainer.models.bert.huggingface import HUGGING_FACE
from trainer.models.bert.megatron import MEGATRON
from trainer.models.bert.params import flops_per_token, parameter_table
from trainer.models.bert.shape import (
    bert_shape,
    classes,
    decode_state,
    effective_keys,
    function_keys,
    heads,
    loss_names,
    usual_kind,
)
from trainer.models.family import Family, built_by
from trainer.models.gpt.check import float8_sizes
from trainer.models.gpt.cost import stage_cost
from trainer.models.gpt.memory import activation_bytes
from trainer.models.gpt.shape import kinds, scores_of

FAMILY = Family(
    shape=bert_shape,
    problems=model_problems,
    cut_by_tp=cut_by_tp,
    float8_sizes=float8_sizes,
    parameters=parameter_table,
    losses=loss_names,
    flops_per_token=flops_per_token,
    activation_bytes=activation_bytes,
    stage_cost=stage_cost,
    kinds=kinds,
    scores=scores_of,
    decode_state=decode_state,
    function=function_keys,
    effective=effective_keys,
    build=built_by("trainer.models.bert.model", "build_bert"),
    predicts="masked",
    sections=("bert",),
    data_kinds=("bert", "classify"),
    usual_kind=usual_kind,
    classes=classes,
    heads=heads,
    hugging_face=HUGGING_FACE,
    megatron=MEGATRON,
)
