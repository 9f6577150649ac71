"""BERT as Megatron-Core has it: its arguments, and the names and forms of its tensors. Blocks are a GPT's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdata import UsageError
from trainer.models.bert.shape import BertShape
from trainer.models.family import Form, Json, Megatron
from trainer.models.gpt import megatron as gpt

_NAMES: Mapping[str, str] = {
    "types": "embedding.tokentype_embeddings",
    "transform.dense": "lm_head.dense",
    "transform.norm": "lm_head.layer_norm",
    "head_bias": "output_layer",
    "pooler": "pooler.dense",
    "binary_head": "binary_head",
}


def tensor(name: str, size: tuple[int, ...], shape: BertShape, version: float, fused: bool) -> Form:
    """Where one of our tensors is in theirs."""
    part, kind = name.rsplit(".", 1)
    if part not in _NAMES:
        return gpt.tensor(name, size, shape, version, fused)
    lengths, dims = dict(zip(("row", "column"), size, strict=False)), "row column" if len(size) == 2 else "row"
    return Form(f"{_NAMES[part]}.{kind}", dims, dims, lengths, {}, "row" if part == "head_bias" else "")


def arguments(keys: Json) -> dict[str, Any]:
    """The arguments with which Megatron-LM builds a model with these keys of [model]."""
    if "bert.task" in keys:
        raise UsageError(
            "Megatron-Core has no head that classifies rows",
            found=f"model.bert.task = {keys['bert.task']!r}",
            fix="export to a Hugging Face folder",
        )
    return {**gpt.arguments(keys), "bert_binary_head": keys["bert.binary_head"]}


MEGATRON = Megatron(arguments=arguments, tensor=tensor, stack="encoder")
