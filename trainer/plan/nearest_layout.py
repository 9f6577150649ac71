"""Finds the nearest layout that works, for a configuration whose layout does not.

The search tries few changed keys before many, and small changes before large ones; the first layout that passes `check`
is the answer. A layout is the mesh and the microbatch. train.global_batch changes the training itself, so it is changed
only if no layout keeps it. Model, data and number of ranks stay the same. Memory is not considered: `mtrain plan
--gpus` does that. Pure and bounded: only the nearest values of each key are tried.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from mdata import UsageError
from trainer.arithmetic import common_divisors, round_up
from trainer.config.parse import value_problems
from trainer.config.sections import MeshSection, RunConfig, TrainSection
from trainer.plan.check import DataFacts, check, layout_problems
from trainer.plan.lengths import batch_sizes

# Among equally near layouts, the one that changes the earlier key is preferred.
AXES = ("mesh.tp", "mesh.cp", "mesh.pp")
RESETS = ("mesh.schedule", "mesh.virtual_pipeline", "mesh.stage_balance", "mesh.layers_per_stage")
KEYS = (*AXES, *RESETS, "mesh.sequence_parallel", "train.micro_batch", "train.global_batch")
MOST_VALUES = 8  # of a key, and the smallest
MOST_CHECKED = 8192  # layouts that the rules are applied to

Changes = dict[str, Any]


def nearest_layout(config: RunConfig, world_size: int, *, facts: DataFacts | None) -> Changes:
    """The settings to change, by section.key, so that the layout works; {}: the layout works, or none was found.

    Problems unrelated to the layout may remain; no new ones appear.
    """
    if value_problems(config) or not layout_problems(config, world_size):
        return {}
    others = set(check(config, world_size, facts=facts)) - set(layout_problems(config, world_size))
    others = {problem for problem in others if "mesh." not in problem}  # those of kernels: the layout shall solve them
    for changes in itertools.islice(candidates(config, world_size), MOST_CHECKED):
        changed = with_changes(config, changes)
        if layout_problems(changed, world_size):
            continue
        if others.issuperset(check(changed, world_size, facts=facts)):
            return changes
    return {}


def nearest_layout_text(changes: Mapping[str, Any]) -> str | None:
    """The changes in command-line form; None if there are none."""
    if not changes:
        return None
    return f"the nearest layout that works: {settings_text(changes)}"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as words of a command line: mesh.tp=2 mesh.sequence_parallel=true."""
    return " ".join(f"{name}={_value_text(value)}" for name, value in settings.items())


def with_changes(config: RunConfig, changes: Changes) -> RunConfig:
    """The configuration with other values of some settings, by section.key."""
    sections: dict[str, Changes] = {}
    for name, value in changes.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    made = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(config, **made)


def candidates(config: RunConfig, world_size: int) -> Iterator[Changes]:
    """Changes of the layout whose axes divide the ranks, the nearest first."""
    values = {name: alternatives(config, world_size, name=name) for name in KEYS[:-1]}
    unit = _batch_unit(config.train)
    fixed = config.train.batch_ramp or config.train.batch_schedule  # these end with the given batch
    for with_batch in (False,) if fixed else (False, True):
        for count in range(not with_batch, len(values) + 1):
            level = [
                changes
                for names in itertools.combinations([name for name in values if values[name]], count)
                for chosen in itertools.product(*(values[name] for name in names))
                for changes in _with_batch(config, world_size, dict(zip(names, chosen, strict=True)), wanted=with_batch)
                if _divides(config, world_size, changes, unit=unit)
            ]
            yield from sorted(level, key=lambda changes: distance(config, changes))


def distance(config: RunConfig, changes: Changes) -> tuple[Any, ...]:
    """The size of changes, for sorting: whether the batch changes, number of keys, factors of two, which keys."""
    factors = sum(_factors(_setting(config, name), value) for name, value in changes.items())
    return "train.global_batch" in changes, len(changes), factors, [KEYS.index(name) for name in changes]


def alternatives(config: RunConfig, world_size: int, *, name: str) -> list[Any]:
    """Other values that a key may take, the nearest first; those of train.global_batch depend on the rest."""
    current, default = _setting(config, name), MeshSection()
    if name in AXES:
        values = common_divisors(world_size)
    elif name == "train.micro_batch":  # a smaller one needs no more memory
        values = [size for size in common_divisors(config.train.global_batch) if size < current]
    else:
        return [default_value] if (default_value := getattr(default, name.split(".")[1])) != current else []
    ordered = sorted((value for value in values if value != current), key=lambda value: _factors(current, value))
    return sorted({*ordered[:MOST_VALUES], *values[:1]} - {current}, key=lambda value: _factors(current, value))


def batch_alternatives(config: RunConfig, world_size: int) -> list[int]:
    """The multiples of this layout's samples per step that are next to the requested batch."""
    mesh, batch = config.mesh, config.train.global_batch
    ranks, others = divmod(world_size, mesh.tp * mesh.cp * mesh.pp)
    if others:
        return []
    part = config.train.micro_batch * ranks * (mesh.pp if mesh.schedule == "interleaved" else 1)
    return sorted({round_up(batch, part), batch // part * part} - {0, batch})


def _with_batch(config: RunConfig, world_size: int, changes: Changes, *, wanted: bool) -> Iterator[Changes]:
    """The changes unchanged, and with each alternative batch."""
    if not wanted:
        yield changes
        return
    for batch in batch_alternatives(with_changes(config, changes), world_size):
        yield {**changes, "train.global_batch": batch}


def _batch_unit(train: TrainSection) -> int:
    """A number that divides each batch of the run; the microbatches of all data-parallel ranks have to divide it."""
    sizes = [train.global_batch]
    with suppress(UsageError):  # an invalid ramp is reported separately
        sizes += batch_sizes(train).sizes
    return math.gcd(*sizes)


def _divides(config: RunConfig, world_size: int, changes: Changes, *, unit: int) -> bool:
    """Whether axes divide the ranks, and microbatches each batch: almost all candidates fail at this."""
    model = math.prod(changes.get(name, _setting(config, name)) for name in AXES)
    if world_size % model:
        return False
    part = changes.get("train.micro_batch", config.train.micro_batch) * (world_size // model)
    return changes.get("train.global_batch", unit) % part == 0


def _setting(config: RunConfig, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def _factors(current: Any, value: Any) -> float:
    """Factors of two between two sizes; an option counts as less than a size."""
    sizes = type(current) is int and type(value) is int and current and value
    return abs(math.log2(value / current)) if sizes else 0.5


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)
