"""The keys of [model] that decide what a model computes, in one normal form.

A configuration of another project is written from ours, read back, and compared in this form: what differs cannot be
expressed there, and is refused by name (`refuse_differences`). So nothing is lost in silence, whatever key is added to
[model] later. Dropout and the first weights' deviation are not in it: they change training, not the trained model.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdata import UsageError
from trainer.config.parse import parse_config, problems_error, value_text
from trainer.config.presets import PRESETS
from trainer.config.sections import RunConfig
from trainer.models.family import family_named, family_of

OTHER_FORM = "export to another format, or train a model that this one has"
_UNUSED = object()  # stands for the value of a key that a model does not use
# What is only there to make a model's configuration a whole one: a run gives its own.
_RUN: Mapping[str, Mapping[str, Any]] = {
    "run": {"folder": "."},
    "data": {"blend": "mock"},
    "train": {"global_batch": 1, "micro_batch": 1, "steps": 1},
    "optimizer": {"lr": 1e-4},
}


def model_config(keys: Mapping[str, Any], *, where: str, context: int) -> RunConfig:
    """A whole configuration around keys of [model].

    Args:
        where: which file they came from, for messages. context: train.sequence_length.

    Raises:
        UsageError: values that [model] refuses.
    """
    tables: dict[str, dict[str, Any]] = {name: dict(table) for name, table in _RUN.items()}
    tables["model"] = dict(keys)
    tables["train"]["sequence_length"] = context
    family = keys.get("family") or PRESETS.get(keys.get("preset") or "", {}).get("family", "gpt")
    usual = family_named(family).usual_kind
    if (kind := usual(keys) if usual else family_named(family).data_kinds[0]) != "gpt":
        tables["data"]["kind"] = kind
    config, problems = parse_config(tables)
    if config is None:
        raise problems_error(where, problems, fix="the model cannot be read with these values")
    return config


def effective(config: RunConfig) -> dict[str, Any]:
    """The keys of [model] that have an effect on a trained model, every derived value written out."""
    return {"family": config.model.family, **family_of(config).effective(config)}


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
            found=", ".join(_setting(f"model.{name}", before.get(name, _UNUSED)) for name in names),
            expected=", ".join(_setting(name, after.get(name, _UNUSED)) for name in names),
            fix=OTHER_FORM,
        )


def _setting(name: str, value: object) -> str:
    return f"no {name}" if value is _UNUSED else f"{name} = {value_text(value)}"
