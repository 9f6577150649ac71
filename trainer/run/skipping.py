"""Records a user's decision to skip samples of a run, or to undo that, in its folder and in events.jsonl.

This works while the run is active and takes effect at its next start. Samples of steps that are already trained are
recorded, too: they are skipped if the run returns to a checkpoint before them. Only future steps can be undone, and
those that were trained on nevertheless, so that data.json never calls a sample trained that was not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdata import UsageError
from mdata.tracing.run_folder import find_record
from mdata.tracing.run_record import RunRecord, SampleRanges, common_ranges, merged_ranges
from mdata.tracing.run_steps import Steps
from mdata.util import file_lock
from trainer.checkpoint.folder import find_checkpoint, step_of, whole_checkpoints
from trainer.checkpoint.location import Location, checkpoints_of
from trainer.checkpoint.object_folder import LATEST
from trainer.config.parse import load_config
from trainer.config.sections import RunConfig
from trainer.plan.lengths import skipped_ranges
from trainer.run.metrics import append_event, read_metrics
from trainer.run.run_folder import record_skip, unrecord_skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """What was recorded.

    Args:
        steps: first and last step that read the samples. samples: first and last.
        newest: step of the checkpoint that the run continues from; 0: none.
        before: the newest checkpoint that was not trained on any of these samples; None: there is none.
    """

    folder: Path
    steps: tuple[int, int]
    samples: tuple[int, int]
    newest: int
    before: Location | None

    def facts(self) -> dict[str, Any]:
        """For programs."""
        trained = self.newest >= self.steps[0]
        before = self.before.name if self.before is not None and trained else None
        return {
            "run": str(self.folder),
            "steps": list(self.steps),
            "samples": list(self.samples),
            "trained_already": trained,
            "continue_from": before,
        }

    def text(self) -> str:
        """For people."""
        first_step, last_step = self.steps
        samples = _samples_text([self.samples])
        text = f"{self.folder}: {samples} ({_steps_text(self.steps)}) are skipped from the next start on"
        if self.newest < first_step:
            return text
        some = "some" if self.newest < last_step else "all"
        trained = f"the newest checkpoint, step-{self.newest}, was already trained on {some} of them"
        if self.before is None:
            return f"{text}\n{trained}, and there is no older one: only a new run can leave them out"
        pointer = self.before.parent / LATEST
        return f"{text}\n{trained}: to undo that, write {self.before.name} into {pointer}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unskipped:
    """The samples that are no longer skipped.

    Args:
        steps: first and last step that read the samples. samples: ranges, (first, last).
    """

    folder: Path
    steps: tuple[int, int]
    samples: tuple[tuple[int, int], ...]

    def facts(self) -> dict[str, Any]:
        """For programs."""
        return {"run": str(self.folder), "steps": list(self.steps), "unskipped": [list(span) for span in self.samples]}

    def text(self) -> str:
        """For people."""
        samples = f"{_samples_text(self.samples)} ({_steps_text(self.steps)})"
        unless = "unless data.skip of the run's configuration names them"
        return f"{self.folder}: {samples} are trained on after all from the next start on, {unless}"


def _steps_text(steps: tuple[int, int]) -> str:
    first, last = steps
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _samples_text(ranges: SampleRanges) -> str:
    return "samples " + ", ".join(f"{first:,} to {last:,}" for first, last in ranges)


def skip(folder: Path, *, steps: tuple[int, int] | None = None, samples: tuple[int, int] | None = None) -> Skipped:
    """Record that a run does not train on the samples of some steps, or on some samples.

    Args:
        steps, samples: the first and the last; one of the two.

    Raises:
        UsageError: not a run folder, or the run has no such step. DamageError: a file of the run cannot be read.
    """
    of_run = _steps_of(find_record(folder))
    samples = _span(folder, of_run, steps, samples)
    first_step, last_step = (of_run.step_of(sample) for sample in samples)
    record_skip(folder, [samples])
    _append(folder, "skip", (first_step, last_step), samples=[samples])
    root = checkpoints_of(folder)
    latest = _newest_step(root)
    before = (place for place in whole_checkpoints(root) if step_of(place) < min(first_step, latest + 1))
    return Skipped(
        folder=folder, steps=(first_step, last_step), samples=samples, newest=latest, before=next(before, None)
    )


def undo(folder: Path, *, steps: tuple[int, int] | None = None, samples: tuple[int, int] | None = None) -> Unskipped:
    """Record that a run trains on samples that were to be skipped.

    Args:
        steps, samples: the first and the last; one of the two. Samples that are not skipped stay as they are.

    Raises:
        UsageError: not a run folder, no such step, none of its samples is skipped, a step that is already done, or one
            that the run, which is active, skips. DamageError: a file of the run cannot be read.
    """
    record = find_record(folder)
    of_run = _steps_of(record)
    span = _span(folder, of_run, steps, samples)
    skipped = common_ranges(record.skip, span)
    if not skipped:
        recorded = _samples_text(record.skip) if record.skip else "no skipped samples"
        raise UsageError(f"{folder} skips none of {_samples_text([span])}", found=recorded)
    first_step, last_step = (of_run.step_of(sample) for sample in (skipped[0][0], skipped[-1][1]))
    newest = _newest_step(checkpoints_of(folder))
    done = [step for step in _steps_with(skipped, of_run) if step <= newest]
    if done and (without := sorted({*done} - _trained(folder, record.skip, of_run))):
        raise UsageError(
            f"{folder} has already done {_steps_text((without[0], without[-1]))} without these samples",
            found=f"its newest checkpoint is step-{newest}",
            fix=f"name steps from {newest + 1} on, or first return to a checkpoint before step {without[0]}",
        )
    if file_lock.held_by(folder / ".lock") and _skips(load_config(folder / "config.toml"), skipped):
        raise UsageError(
            f"{folder} is being trained, and skips {_samples_text(skipped)} when it gets there",
            fix="mtrain stop it first; then undo this and start it again",
        )
    unrecord_skip(folder, span)
    _append(folder, "skip undone", (first_step, last_step), samples=skipped)
    return Unskipped(folder=folder, steps=(first_step, last_step), samples=skipped)


def _steps_with(ranges: SampleRanges, of_run: Steps) -> Iterator[int]:
    """The steps that read some of these samples."""
    for first, last in ranges:
        yield from range(of_run.step_of(first), of_run.step_of(last) + 1)


def _trained(folder: Path, recorded: SampleRanges, of_run: Steps) -> set[int]:
    """Steps that have a loss, though all of their samples are recorded as skipped: that was done afterwards."""
    has_loss = {line["step"]: line.get("loss") is not None for line in read_metrics(folder)}  # the last line counts
    spans = {step: of_run.bounds(step) for step in {*_steps_with(recorded, of_run)} if has_loss.get(step)}
    whole = {step: (first, first + size - 1) for step, (first, size) in spans.items()}
    return {step for step, span in whole.items() if common_ranges(recorded, span) == (span,)}


def _skips(config: RunConfig, ranges: SampleRanges) -> bool:
    """Whether a start with this configuration skips some of these samples."""
    skipped = merged_ranges(skipped_ranges(config.data.skip))
    return any(common_ranges(skipped, span) for span in ranges)


def _steps_of(record: RunRecord) -> Steps:
    seed = int(record.options.get("seed", 0))
    return Steps([span.steps for span in record.spans], seed=seed, total=record.num_steps)


def _span(
    folder: Path, of_run: Steps, steps: tuple[int, int] | None, samples: tuple[int, int] | None
) -> tuple[int, int]:
    """The first and the last sample, after checking that the run has all between them."""
    if steps is not None:
        first = of_run.bounds(steps[0])[0]
        samples = first, sum(of_run.bounds(steps[1])) - 1
    assert samples is not None, "steps or samples are given"
    if of_run.num_samples is not None and samples[1] >= of_run.num_samples:
        raise UsageError(f"{folder} has no sample {samples[1]:,}", expected=f"samples 0 to {of_run.num_samples - 1:,}")
    return samples


def _newest_step(root: Location) -> int:
    """The step of the checkpoint that the run continues from; 0: there is none."""
    newest = find_checkpoint(root).folder
    return step_of(newest) if newest is not None else 0


def _append(folder: Path, event: str, steps: tuple[int, int], *, samples: SampleRanges) -> None:
    line = {"time_s": round(time.time(), 3), "event": event, "step": steps[0], "steps": list(steps)}
    span = [samples[0][0], samples[-1][1]]
    append_event(folder, {**line, "samples": span, "why": "mtrain skip"})
