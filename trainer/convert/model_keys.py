"""The keys of [model] that decide what a model computes, in one normal form.

A configuration of another project is written from ours, read back, and compared in this form: what differs cannot be
expressed there, and is refused by name (`refuse_differences`). So nothing is lost in silence, whatever key is added to
[model] later. Dropout and the first weights' deviation are not in it: they change training, not the trained model.
Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from mdata import UsageError
from trainer.config.parse import parse_config, problems_error, value_text
from trainer.config.sections import ModelSection, RunConfig
from trainer.layers.shapes import GATED
from trainer.models.gpt.shape import ffn_hidden_size

_NOT_FUNCTION = ("family", "preset", "init_std", "attention_dropout", "hidden_dropout")
_OF_SCALING = {
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow"),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
}
_SCALING_KEYS = {key for keys in _OF_SCALING.values() for key in keys}
# What is only there to make a model's configuration a whole one: a run gives its own.
_RUN: Mapping[str, Mapping[str, Any]] = {
    "run": {"folder": "."},
    "data": {"blend": "mock"},
    "train": {"global_batch": 1, "micro_batch": 1, "steps": 1},
    "optimizer": {"lr": 1e-4},
}


def model_config(
    keys: Mapping[str, Any], *, where: str, context: int, more: Mapping[str, Mapping[str, Any]] | None = None
) -> RunConfig:
    """A whole configuration around keys of [model].

    Args:
        where: which file they came from, for messages. context: train.sequence_length.
        more: values of other sections.

    Raises:
        UsageError: values that [model] refuses.
    """
    tables: dict[str, dict[str, Any]] = {name: dict(table) for name, table in _RUN.items()}
    tables["model"] = dict(keys)
    tables["train"]["sequence_length"] = context
    for name, table in (more or {}).items():
        tables[name] = {**tables.get(name, {}), **table}
    config, problems = parse_config(tables)
    if config is None:
        raise problems_error(where, problems, fix="the model cannot be read with these values")
    return config


def effective(config: RunConfig) -> dict[str, Any]:
    """The keys of [model] that have an effect on a trained model, every derived value written out."""
    model: ModelSection = config.model
    keys = {name: value for name, value in dataclasses.asdict(model).items() if name not in _NOT_FUNCTION}
    keys["num_kv_heads"] = model.num_kv_heads or model.num_heads
    keys["head_dim"] = size = model.head_dim or model.hidden_size // model.num_heads
    keys["ffn_hidden_size"] = ffn_hidden_size(config)
    keys["max_position"] = model.max_position or config.train.sequence_length
    if model.attention_scale and math.isclose(model.attention_scale, size**-0.5, rel_tol=1e-6):
        keys["attention_scale"] = None
    idle = {f"rope_{key}" for key in _SCALING_KEYS.difference(_OF_SCALING[model.rope_scaling])}
    if model.position != "rope":
        idle = {name for name in keys if name.startswith("rope_")}
    if model.position != "learned":
        idle.add("max_position")
    if model.activation not in GATED:
        idle |= {"activation_clamp", "activation_offset"}
    if not model.window:
        idle.add("window_interval")
    return {name: value for name, value in keys.items() if name not in idle}


def refuse_differences(ours: RunConfig, back: RunConfig, *, form: str, free: tuple[str, ...] = ()) -> None:
    """Refuse a model that another project's configuration does not express.

    Args:
        back: what reading the written configuration gave. form: its name.
        free: keys that may differ, because the weights are changed to fit.

    Raises:
        UsageError: names each key.
    """
    before, after = effective(ours), effective(back)
    names = sorted(
        name for name in before.keys() | after.keys() if name not in free and before.get(name) != after.get(name)
    )
    if names:
        raise UsageError(
            f"{form} cannot express this model",
            found=", ".join(f"model.{name} = {_text(name, before)}" for name in names),
            expected=", ".join(f"{name} = {_text(name, after)}" for name in names),
            fix="export to another format, or train a model that this one has",
        )


def _text(name: str, keys: Mapping[str, Any]) -> str:
    return value_text(keys[name]) if name in keys else "'without effect'"
