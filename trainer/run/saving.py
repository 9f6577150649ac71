"""Decides when a checkpoint is due, and saves it while training continues.

`SaveSchedule`: at the end, at intervals of steps and of minutes, and when the run is asked to stop. A checkpoint that
is skipped because the state of its step is not finite stays due. One rank keeps the time; its vote travels with the
sums of the step (`Engine.step`), so that all ranks decide alike without further communication.

`Saver`: at most one save in flight. A rank that could not write its part reports that by a vote too; all ranks then
handle it at the same step. "saved" is reported once the checkpoint exists.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from mdata import MdataError
from mdata.errors import wanted_by
from trainer.checkpoint.background import BackgroundSave
from trainer.checkpoint.folder import folder_name, remove_leftovers, remove_old, steps_in
from trainer.checkpoint.format import RunState
from trainer.checkpoint.location import Location, checkpoints_folder
from trainer.checkpoint.save import Target, clear_place, discard, together
from trainer.config.sections import CheckpointSection, RunConfig
from trainer.errors import out_of_memory_in
from trainer.kernels.updates import state_names
from trainer.models.family import family_of
from trainer.parallel.collectives import gather_objects
from trainer.parallel.params import Place, num_elements
from trainer.plan.plan import Plan
from trainer.run.attempt import SupersededError
from trainer.run.engine import Engine
from trainer.run.metrics import read_metrics

PATIENCE_S = 10.0  # for the files of other ranks, when the run ends with an error while a save is in flight


class SaveSchedule:
    """Which checkpoints are due; every rank has one, and they agree.

    Args:
        settings: steps and minutes between checkpoints.
        keeps_time: whether this is the rank whose clock counts.
        clock: seconds, never going back.
    """

    def __init__(
        self, settings: CheckpointSection, *, keeps_time: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._keeps_time, self._clock = settings, keeps_time, clock
        self._last = clock()
        self._pending = self._refused = False

    def vote(self) -> float:
        """1.0 if this rank's clock says that a checkpoint is due, else 0.0."""
        seconds = 60 * self._settings.minutes
        return float(self._keeps_time and seconds > 0 and self._clock() - self._last >= seconds)

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is due that was not written yet."""
        return self._pending

    def add_votes(self, votes: Sequence[float]) -> None:
        """Add the sums over all ranks of `vote` and of requests to stop: any of them makes a checkpoint due."""
        self._pending |= any(votes)

    def is_step(self, step: int) -> bool:
        """Whether the interval of steps makes a checkpoint of this step due."""
        return self._settings.interval is not None and step % self._settings.interval == 0

    def due(self, step: int, *, last: bool) -> bool:
        """Whether a checkpoint of this step is to be written.

        Args:
            last: whether the run ends with it.
        """
        self._pending |= last or self.is_step(step)
        return self._pending

    def first_refusal(self) -> bool:
        """Whether a due checkpoint is postponed for the first time since the last one, so that it is reported once."""
        first, self._refused = not self._refused, True
        return first

    def saved(self) -> None:
        """A checkpoint was written."""
        self._last = self._clock()
        self._pending = self._refused = False


class Saver:
    """Writes a run's checkpoints, on one rank; every rank has one and calls it at the same steps.

    Args:
        config: of the run. engine: whose state is saved.
        extras: files that go into each checkpoint, by name.
        check_owner: on rank 0, raises an error where a newer attempt of the run writes the checkpoints.
        tell: (kind, facts, text) on rank 0: an event of the run, and its line for the user; "": no line.

    Attributes:
        longest_s: the longest time that a checkpoint took, on rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        *,
        extras: Mapping[str, bytes],
        tell: Callable[[str, dict[str, Any], str], None],
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_owner, self.longest_s = check_owner, 0.0
        self._settings, self._engine, self._extras, self._tell = config.checkpoint, engine, extras, tell
        self._root = checkpoints_folder(config)
        self._total_bytes = checkpoint_bytes(config, engine.plan)
        main = engine.world.is_main
        looked = together(engine.everyone, lambda: self._first_look() if main else None)[0]
        assert looked is not None, "rank 0 looks"
        self._attempt, self._there = looked
        self._in_flight: BackgroundSave | None = None
        self._told = False
        self._losses = recorded_losses(config) if main else {}

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End a save in flight; after an error without the other ranks, which may be gone."""
        save, self._in_flight = self._in_flight, None
        if save is None:
            return
        save.hurry(PATIENCE_S)
        try:
            save.join()
        finally:
            save.cancel()
            self._report(save)
            if not save.committed:
                discard(save.target, self._engine.everyone.rank)

    def vote(self) -> float:
        """1.0 if this rank could not write its part of the save in flight, else 0.0."""
        return float(self._in_flight is not None and self._in_flight.error is not None)

    @property
    def in_flight(self) -> bool:
        """Whether this rank is still writing its part of a save, or waits for others as rank 0."""
        return self._in_flight is not None and not self._in_flight.ended

    def poll(self) -> None:
        """Report a save that has ended in the meantime."""
        if self._in_flight is not None and self._in_flight.committed:
            self._report(self._in_flight)

    def evaluated(self, step: int, losses: Mapping[str, float | None]) -> None:
        """Record the validation losses of a step, or other results of `ranked_by`."""
        if (loss := _mean_loss(losses)) is not None:
            self._losses[step] = loss

    @out_of_memory_in("copying the state for a checkpoint", fix="checkpoint.background = false, or more ranks")
    def begin(self, run: RunState) -> None:
        """Copy the state and write it in the background, after waiting for a save that is still in flight.

        Without checkpoint.background there is no copy: `finish` has to come before the next step.

        Raises:
            MdataError: that save failed, and checkpoint.on_failure is "stop".
        """
        if self._in_flight is not None:
            before, began = self._in_flight, time.perf_counter()
            waits = not before.ended
            self.finish()
            if waits:
                facts = {
                    "step": run.step,
                    "for": before.target.run.step,
                    "seconds": round(time.perf_counter() - began, 3),
                }
                self._tell("save waited", facts, "")
        engine, world = self._engine, self._engine.everyone
        best, copies, shard, state = self._best(), engine.copies, engine.shard, engine.state
        if self._settings.background:
            shard, state = copies.take(shard, state)
        attempt = f"{self._attempt}-{run.step}"
        target = Target(self._root, engine.with_scale(run), attempt, self._extras, self._total_bytes, self._check_owner)
        problem = self._clear_place(target)
        self._told = False
        self._in_flight = BackgroundSave(
            target,
            (world.rank, world.size),
            shard=shard,
            state=state,
            ready=copies.wait if problem is None else partial(_fail, problem),
            after=lambda: self.prune(best),
        )

    def finish(self, *, needed: bool = False) -> bool:
        """Wait for the save in flight, on all ranks together; returns whether it succeeded.

        Args:
            needed: the run ends with it, so a failure is an error regardless of checkpoint.on_failure.

        Raises:
            MdataError: a rank could not write.
        """
        save = self._in_flight
        if save is None:
            return True
        save.written.wait()
        failed = self._first_error(save)
        if failed is not None:
            save.cancel()
        save.join()
        failed = failed or self._first_error(save)
        self._in_flight = None
        if failed is None:
            self._report(save)
            return True
        discard(save.target, self._engine.everyone.rank)
        step = save.target.run.step
        error = wanted_by(f"the checkpoint of step {step} was not written; the older ones are intact", failed)
        if isinstance(failed, SupersededError):
            raise error
        ends = needed or self._settings.on_failure == "stop"
        self._tell("save failed", {"step": step, "error": str(failed)}, "" if ends else str(error))
        if ends:
            raise error
        return False

    def _first_look(self) -> tuple[str, frozenset[int]]:
        """Agree on the attempt's name and list existing checkpoints, before any rank writes."""
        remove_leftovers(self._root)
        return secrets.token_hex(4), steps_in(self._root)

    def _clear_place(self, target: Target) -> MdataError | None:
        """Remove an older checkpoint of the same step; returns the error, on all ranks."""
        if target.run.step not in self._there:
            return None
        self._there -= {target.run.step}
        main = self._engine.world.is_main
        try:
            together(self._engine.everyone, lambda: clear_place(target) if main else None)
        except MdataError as error:
            return error
        return None

    def prune(self, best: Collection[int] | None = None) -> None:
        """Remove checkpoints that need not be kept.

        Args:
            best: the steps with the lowest losses; None: those known so far.
        """
        _prune(self._settings, self._root, self._best() if best is None else best)

    def _first_error(self, save: BackgroundSave) -> MdataError | None:
        errors = gather_objects(save.error, self._engine.everyone)
        return next((error for error in errors if error is not None), None)

    def _report(self, save: BackgroundSave) -> None:
        """Report once that a checkpoint exists."""
        if save.committed and not self._told:
            self._told = True
            self.longest_s = max(self.longest_s, save.seconds)
            step = save.target.run.step
            facts = {"step": step, "checkpoint": folder_name(step), "seconds": round(save.seconds, 3)}
            self._tell("saved", facts, "")

    def _best(self) -> frozenset[int]:
        """The steps with the lowest validation losses, whose checkpoints are kept."""
        return _best_steps(self._losses, self._settings.keep_best)


def prune_finished(config: RunConfig) -> None:
    """Clean up after a run that was killed after its last step: unfinished saves, and checkpoints not to be kept."""
    losses = recorded_losses(config)
    _prune(config.checkpoint, checkpoints_folder(config), _best_steps(losses, config.checkpoint.keep_best))


def recorded_losses(config: RunConfig) -> dict[int, float]:
    """The mean validation loss of each step in metrics.jsonl; empty if no checkpoint is kept for it."""
    lines = read_metrics(Path(config.run.folder)) if config.checkpoint.keep_best else []
    loss_of_step = {line["step"]: _mean_loss(ranked_by(line)) for line in lines}
    return {step: loss for step, loss in loss_of_step.items() if loss is not None}


def ranked_by(evaluated: Mapping[str, Any]) -> Mapping[str, float | None]:
    """The numbers by which an evaluation is ranked: losses, but of classifiers the share of wrong predictions."""
    accuracy = (evaluated.get("accuracy") or {}).get("overall")
    return {"wrong": 1 - accuracy} if accuracy is not None else evaluated.get("valid") or {}


def _mean_loss(losses: Mapping[str, float | None]) -> float | None:
    """The mean of the finite losses; None: there are none."""
    finite = [loss for loss in losses.values() if loss is not None and math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None


def _best_steps(losses: Mapping[int, float], count: int) -> frozenset[int]:
    """The steps with the lowest losses."""
    return frozenset(sorted(losses, key=lambda step: (losses[step], step))[:count])


def _prune(settings: CheckpointSection, root: Location, best: Collection[int]) -> None:
    # The newest checkpoint exists: if the disk or the storage does not answer, the next save removes the surplus.
    with suppress(MdataError, OSError):
        remove_old(root, settings.keep, every=settings.keep_every or 0, best=best)


def _fail(error: MdataError) -> None:
    raise error


def checkpoint_bytes(config: RunConfig, plan: Plan) -> int:
    """The size of a checkpoint: weights and moments in the optimizer's precision."""
    item_bytes, name = 8 if config.precision.dtype == "fp64" else 4, config.optimizer.name
    family = family_of(config)
    table, buffers = (of(plan.shape, Place()) for of in (family.parameters, family.buffers))
    table = tuple(spec for spec in table if not spec.frozen)
    states = sum(num_elements([spec]) * len(state_names(name, matrix=spec.matrix)) * item_bytes for spec in table)
    return states + 4 * num_elements(buffers)
