"""The length of a run and of its schedules: given in steps, samples or tokens, converted to one counter.

The samples per step may change (train.batch_ramp, train.batch_schedule) and may differ after a resume, so lengths in
samples and in steps are not interchangeable. `ScheduleLengths` counts in steps if every length of the schedules is in
steps, otherwise in samples; a length in steps then becomes the number of samples in that many first steps of the run.
Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

from mdata import UsageError
from mdata.errors import counted
from mdata.loader.batch_sizes import BatchSizes, by_steps, read_ramp
from trainer.config.sections import OptimizerSection, RunConfig, TrainSection

UNITS = ("steps", "samples", "tokens")
SCHEDULE_LENGTHS = ("warmup_", "decay_", "wsd_decay_", "weight_decay_")  # prefixes of keys of [optimizer]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunLength:
    """Steps and samples of a whole run, including those already done."""

    steps: int
    samples: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleLengths:
    """Lengths of the schedules of learning rate and weight decay, by one counter.

    Args:
        counter: what is counted: finished steps, or consumed samples.
        warmup: end of the warmup. decay: where the learning rate is smallest. wsd_decay: length of WSD's decay before
            that. weight_decay: where the weight decay has its last value.
    """

    counter: Literal["steps", "samples"]
    warmup: float
    decay: float
    wsd_decay: float
    weight_decay: float

    def span(self, *, steps: int, samples: int, batch: int) -> tuple[int, int]:
        """The counter before and after a step of `batch` samples, given the steps and samples before it."""
        return (steps, steps + 1) if self.counter == "steps" else (samples, samples + batch)


def given_lengths(section: TrainSection | OptimizerSection, prefix: str = "") -> dict[str, int]:
    """Which of the keys `prefix`steps, `prefix`samples and `prefix`tokens are set: unit -> amount."""
    return {unit: amount for unit in UNITS if (amount := getattr(section, prefix + unit))}


def batch_sizes(train: TrainSection) -> BatchSizes:
    """Samples of each step, by the samples consumed before it.

    Raises:
        UsageError: the ramp or schedule is invalid, or does not end with the global batch.
    """
    ramp, schedule, batch = train.batch_ramp, train.batch_schedule, train.global_batch
    if ramp and schedule:
        raise UsageError(f"train.batch_ramp={ramp!r} and train.batch_schedule={schedule!r} are both set; keep one")
    if schedule:
        try:
            sizes = by_steps(schedule, sequence_length=train.sequence_length)
        except UsageError as error:
            raise UsageError(f"train.batch_schedule={schedule!r}: {error}") from error
        if sizes.sizes[-1] != batch:
            raise UsageError(
                f"train.batch_schedule={schedule!r} ends with {counted(sizes.sizes[-1], 'sample')}, but "
                f"train.global_batch={batch}; make them equal"
            )
        return sizes
    try:
        return read_ramp(ramp or "", size=batch)
    except UsageError as error:
        raise UsageError(f"train.batch_ramp={ramp!r}: {error}") from error


def sizes_setting(train: TrainSection) -> str:
    """The setting that changes the samples per step, as "key=value"."""
    key = "batch_schedule" if train.batch_schedule else "batch_ramp"
    return f"train.{key}={getattr(train, key)!r}"


def run_length(train: TrainSection, *, steps: int = 0, samples: int = 0) -> RunLength:
    """The length of a run, given the steps and samples already done.

    A length in steps is that number. One in samples or tokens ends with the last step that does not exceed it, so a run
    that continues with another batch size still ends at the same sample.

    Raises:
        UsageError: as `batch_sizes`.
    """
    sizes = batch_sizes(train)
    if target := train.steps:
        left = target - steps
    else:
        left = sizes.within(training_samples(train), consumed=samples)
    return RunLength(steps=steps + left, samples=sizes.after(max(0, left), consumed=samples))


def training_samples(train: TrainSection) -> int:
    """Samples that the order of the data must provide; steps of changing sizes may read fewer.

    Raises:
        UsageError: as `batch_sizes`.
    """
    if train.steps:
        return train.steps * max(batch_sizes(train).sizes)
    return train.samples or (train.tokens or 0) // train.sequence_length


def skipped_ranges(skip: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """data.skip as (first, last) samples, in its order.

    Raises:
        UsageError: an entry that is no range.
    """
    ranges = []
    for text in skip:
        match = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", text.strip())
        if match is None or int(match[1]) > int(match[2]):
            raise UsageError(
                f"data.skip={text!r} is not a range of samples",
                expected='"FIRST-LAST", both counted from 0 in the run\'s order, such as "76800-77055"',
            )
        ranges.append((int(match[1]), int(match[2])))
    return tuple(ranges)


def order_samples(config: RunConfig) -> int:
    """Samples that Megatron's order is built for: data.order_samples, or those of the run.

    Raises:
        UsageError: as `batch_sizes`.
    """
    return config.data.order_samples or training_samples(config.train)


def schedule_lengths(config: RunConfig, *, in_samples: bool = False) -> ScheduleLengths:
    """The lengths of [optimizer]; a decay without an end of its own ends with the run.

    Args:
        in_samples: count in samples, even if every length is in steps.

    Raises:
        UsageError: as `batch_sizes`.
    """
    optimizer, sizes = config.optimizer, batch_sizes(config.train)
    lengths_of = {prefix: given_lengths(optimizer, prefix) for prefix in SCHEDULE_LENGTHS}
    run = given_lengths(config.train)
    lengths_of["decay_"] = lengths_of["decay_"] or run
    if optimizer.weight_decay_schedule != "constant":
        lengths_of["weight_decay_"] = lengths_of["weight_decay_"] or run
    by_samples = in_samples or any(unit != "steps" for lengths in lengths_of.values() for unit in lengths)

    def counted(prefix: str) -> float:
        for unit, amount in lengths_of[prefix].items():
            if unit == "tokens":
                return amount / config.train.sequence_length
            if unit == "samples" or not by_samples:
                return amount
            return sizes.last_steps(amount, end=int(decay)) if prefix == "wsd_decay_" else sizes.after(amount)
        return 0

    decay = counted("decay_")
    return ScheduleLengths(
        counter="samples" if by_samples else "steps",
        warmup=counted("warmup_") or (optimizer.warmup_fraction or 0.0) * decay,
        decay=decay,
        wsd_decay=counted("wsd_decay_"),
        weight_decay=counted("weight_decay_"),
    )


def horizon(config: RunConfig, before: RunConfig | None, *, prefix: str) -> dict[str, int | None]:
    """The keys `prefix`steps, `prefix`samples and `prefix`tokens of [optimizer], with derived values filled in.

    They are the configuration's own; otherwise those of the run so far; otherwise the run's length, in its own unit.
    All are None if the run's length is given twice, which is reported separately.
    """
    lengths = given_lengths(config.optimizer, prefix)
    if not lengths and before is not None:
        lengths = given_lengths(before.optimizer, prefix)
    run = given_lengths(config.train)
    lengths = lengths or (run if len(run) == 1 else {})
    return {prefix + unit: lengths.get(unit) for unit in UNITS}
