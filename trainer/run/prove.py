"""`mtrain prove`: checks that an interrupted run ends with the same bits as an uninterrupted one.

Two runs of the same configuration are made in separate folders: one trains k + n steps at once, the other stops after k
with a checkpoint, is started again, and ends at the same step. Their curves are compared step by step, and their last
checkpoints slice by slice, using the hashes in their indexes. The user's run is not touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mdata import UsageError
from trainer.checkpoint.folder import folder_name
from trainer.checkpoint.format import Index
from trainer.checkpoint.load import verify_checkpoint
from trainer.config.sections import RunConfig, TrackSection
from trainer.plan.lengths import given_lengths
from trainer.run.metrics import read_metrics

STRAIGHT, INTERRUPTED = "straight", "interrupted"
# The fields of a metrics.jsonl line that are computed, not measured.
COMPUTED = ("loss", "train", "grad_norm", "lr", "weight_decay", "loss_scale", "consumed_samples")
# The parts of a run's state that have to be equal; the configurations differ in where they stop.
STATE = ("step", "consumed_samples", "data_id", "optimizer_steps", "skipped_samples", "scaler", "float8")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the two runs, such as "loss of step 7", and both values."""

    what: str
    straight: str
    interrupted: str


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """The result of the comparison.

    Args:
        steps: compared in the curves. slices: compared in the last checkpoint. differences: empty: bitwise equal.
    """

    steps: int
    slices: int
    differences: tuple[Difference, ...]


def prove(config: RunConfig, folder: Path, *, restart: int, steps: int, train: Callable[[RunConfig], None]) -> Proof:
    """Train both runs in a folder and compare them.

    Args:
        restart: k, the step after which the second run is interrupted. steps: k + n, after which both end.
        train: trains a configuration to its end, in separate processes or in this one.

    Raises:
        UsageError: the numbers of steps contradict each other or the run.
    """
    (unit, length), *_ = given_lengths(config.train).items()
    if not 0 < restart < steps:
        raise UsageError(
            f"--restart {restart} with --steps {steps}", expected="a restart after the first step and before the last"
        )
    if unit == "steps" and steps > length:
        raise UsageError(f"--steps {steps} is more than train.steps={length}", fix="choose fewer steps")
    straight, interrupted = (_shortened(config, folder / name, steps) for name in (STRAIGHT, INTERRUPTED))
    train(straight)
    train(_shortened(config, folder / INTERRUPTED, restart))
    train(interrupted)
    return compare(Path(straight.run.folder), Path(interrupted.run.folder), steps=steps)


def compare(straight: Path, interrupted: Path, *, steps: int) -> Proof:
    """Compare two run folders that ended after this many steps.

    Raises:
        DamageError: a checkpoint is incomplete.
    """
    curves = [{line["step"]: line for line in read_metrics(folder)} for folder in (straight, interrupted)]
    differences = [
        Difference(f"{name} of step {step}", _shown(value), _shown(other))
        for step in range(1, steps + 1)
        for name in COMPUTED
        if (value := curves[0].get(step, {}).get(name)) != (other := curves[1].get(step, {}).get(name))
    ]
    indexes = [verify_checkpoint(folder / "checkpoints" / folder_name(steps)) for folder in (straight, interrupted)]
    differences += _state_differences(*indexes)
    tensors = [_hashes(index) for index in indexes]
    differences += [
        Difference(f"tensor {name}", tensors[0].get(name, "missing"), tensors[1].get(name, "missing"))
        for name in dict.fromkeys((*tensors[0], *tensors[1]))
        if tensors[0].get(name) != tensors[1].get(name)
    ]
    return Proof(steps, sum(len(tensor.slices) for tensor in indexes[0].tensors.values()), tuple(differences))


def _shortened(config: RunConfig, folder: Path, steps: int) -> RunConfig:
    """The configuration ending after this many steps, with each step logged and the schedules of the whole run."""
    train = dataclasses.replace(config.train, exit_interval=steps, eval_interval=None)
    checkpoint = dataclasses.replace(
        config.checkpoint, interval=None, minutes=0.0, keep_best=0, folder=None, load="latest"
    )
    run = dataclasses.replace(config.run, folder=str(folder), log_interval=1)
    return dataclasses.replace(config, run=run, train=train, checkpoint=checkpoint, track=TrackSection())


def _state_differences(straight: Index, other: Index) -> Iterator[Difference]:
    for name in STATE:
        values = getattr(straight.run, name), getattr(other.run, name)
        if values[0] != values[1]:
            yield Difference(f"{name} of the checkpoint", *map(_shown, values))


def _hashes(index: Index) -> dict[str, str]:
    """state/tensor -> the hashes of its slices, by position."""
    return {
        name: " ".join(sorted(f"{list(part.start)}:{str(part.hash)[:16]}" for part in tensor.slices))
        for name, tensor in index.tensors.items()
    }


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)
