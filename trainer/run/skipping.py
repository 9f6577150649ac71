"""A user's decision to skip samples of a run, recorded in its folder and in events.jsonl.

It may be made while the run is active; it takes effect at the next start. Samples of steps that are already trained are
recorded, too: they are skipped if the run returns to a checkpoint before them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdata import UsageError
from mdata.tracing.run_folder import find_record
from mdata.tracing.run_steps import Steps
from trainer.checkpoint.folder import find_checkpoint, step_of, whole_checkpoints
from trainer.checkpoint.location import Location, checkpoints_of
from trainer.checkpoint.object_folder import LATEST
from trainer.run.metrics import append_event
from trainer.run.run_folder import record_skip


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
        (first, last), (first_step, last_step) = self.samples, self.steps
        steps = f"step {first_step:,}" if first_step == last_step else f"steps {first_step:,} to {last_step:,}"
        text = f"{self.folder}: samples {first:,} to {last:,} ({steps}) are skipped from the next start on"
        if self.newest < first_step:
            return text
        some = "some" if self.newest < last_step else "all"
        trained = f"the newest checkpoint, step-{self.newest}, was already trained on {some} of them"
        if self.before is None:
            return f"{text}\n{trained}, and there is no older one: only a new run can leave them out"
        pointer = self.before.parent / LATEST
        return f"{text}\n{trained}: to undo that, write {self.before.name} into {pointer}"


def skip(folder: Path, *, steps: tuple[int, int] | None = None, samples: tuple[int, int] | None = None) -> Skipped:
    """Record that a run does not train on the samples of some steps, or on some samples.

    Args:
        steps, samples: the first and the last; one of the two.

    Raises:
        UsageError: not a run folder, or the run has no such step. DamageError: a file of the run cannot be read.
    """
    record = find_record(folder)
    seed = int(record.options.get("seed", 0))
    of_run = Steps([span.steps for span in record.spans], seed=seed, total=record.num_steps)
    if steps is not None:
        first = of_run.bounds(steps[0])[0]
        samples = first, sum(of_run.bounds(steps[1])) - 1
    assert samples is not None, "steps or samples are given"
    if of_run.num_samples is not None and samples[0] >= of_run.num_samples:
        raise UsageError(f"{folder} has no sample {samples[0]:,}", expected=f"samples 0 to {of_run.num_samples - 1:,}")
    first_step, last_step = (of_run.step_of(sample) for sample in samples)
    record_skip(folder, [samples])
    append_event(
        folder,
        {
            "time_s": round(time.time(), 3),
            "event": "skip",
            "step": first_step,
            "steps": [first_step, last_step],
            "samples": list(samples),
            "why": "mtrain skip",
        },
    )
    root = checkpoints_of(folder)
    newest = find_checkpoint(root).folder
    latest = step_of(newest) if newest is not None else 0
    before = (place for place in whole_checkpoints(root) if step_of(place) < min(first_step, latest + 1))
    return Skipped(
        folder=folder, steps=(first_step, last_step), samples=samples, newest=latest, before=next(before, None)
    )
