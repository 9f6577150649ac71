"""Rules between the keys of a BERT. Each problem is one line with the conflicting values and advice. Pure, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mdata.dataset.mock_data import MOCK
from trainer.config.sections import BertSamplesSection, BertSection, ModelSection, RunConfig
from trainer.models.bert.shape import section_of, token_types
from trainer.models.gpt import check as gpt
from trainer.models.gpt.check import cut_by_tp

__all__ = ["cut_by_tp", "model_problems"]

# What attention to both sides, or the published heads, have no form of.
_FIXED = (
    "window",
    "attention_softcap",
    "attention_sinks",
    "logit_softcap",
    "logit_scale",
    "embedding_multiplier",
    "residual_multiplier",
    "block_norm",
    "tie_embeddings",
)


def model_problems(config: RunConfig) -> Iterator[str]:
    """Every conflict among the model's sizes and options, and with the layout."""
    yield from gpt.model_problems(config)
    model, section = config.model, section_of(config)
    for key in _FIXED:
        value, only = getattr(model, key), ModelSection.__dataclass_fields__[key].default
        if value != only:
            instead = '; model.bert.norm="post" is where sums are normalized' if key == "block_norm" else ""
            yield f'model.{key}={json.dumps(value)} has no meaning with model.family="bert"; leave it out{instead}'
    if model.position == "alibi":
        yield 'model.position="alibi" has no form for tokens on both sides; set model.position="learned" or "rope"'
    if section.head_activation is None and model.activation not in ("gelu", "gelu_erf"):
        yield (
            f'model.bert.head_activation is not set, and the head cannot use model.activation="{model.activation}"; '
            'set it to "gelu" or "gelu_erf"'
        )
    yield from _task_problems(config, section)
    if section.task == "masked" and section.binary_head and token_types(config) == 1:
        yield (
            "model.bert.token_types=1 gives both texts of a pair the same type, but model.bert.binary_head=true reads "
            "pairs; set model.bert.token_types=2, or model.bert.binary_head=false"
        )
    masking = config.data.bert or BertSamplesSection()
    if section.task == "masked" and section.binary_head and config.data.kind == "bert" and not masking.head:
        yield (
            "data.bert.head=false makes rows of one text, but model.bert.binary_head=true learns from pairs; set both "
            "to true, or both to false"
        )
    if config.mesh.cp > 1:
        yield (
            f'mesh.cp={config.mesh.cp} divides rows for causal attention, which model.family="bert" does not have; '
            "set mesh.cp=1, and mesh.tp for rows that are too long for one GPU"
        )


def _task_problems(config: RunConfig, section: BertSection) -> Iterator[str]:
    """What the head predicts, and the rows that it learns from."""
    task, kind, choices = section.task, config.data.kind, config.data.rows_per_sample
    if kind in ("bert", "classify") and (task == "masked") != (kind == "bert"):  # others are no rows of any BERT
        tasks, other = ('"classify" or "choice"', "bert") if kind == "classify" else ('"masked"', "classify")
        yield f'data.kind="{kind}" does not fit model.bert.task="{task}"; set {tasks}, or data.kind="{other}"'
    elif task != "masked" and (task == "choice") != (choices > 1) and config.data.blend != MOCK:
        state = f"data.classify.choices={choices}" if choices > 1 else "data.classify.choices is not set"
        fix = "set it to at least 2" if task == "choice" else "leave it out"
        yield f'{state}, with model.bert.task="{task}"; {fix}'
    if task == "classify" and len(section.labels) < 2:
        yield f'model.bert.labels={list(section.labels)} with model.bert.task="classify"; name at least 2 classes'
    if task != "classify" and section.labels:
        yield f'model.bert.labels={list(section.labels)} are for model.bert.task="classify"; leave them out'
    if len(set(section.labels)) < len(section.labels):
        yield f"model.bert.labels={list(section.labels)} has a name twice; name each class once"
