"""The loop: read a global batch, step, measure, validate, save; the same on one rank and on many.

`train` is called by every rank. It continues from the run folder's newest checkpoint if there is one: the counter of
consumed samples gives the position in the data stream, so the rest of the run is the same as without the interruption.
A spike may send it back to an older checkpoint (spikes.py): it then starts again in the same process. Only rank 0
writes the folder's files, except checkpoints, which all ranks write. The work between two steps is in after_step.py.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from mdata import Batch, DamageError
from mdata.errors import explain_os_error
from mdata.progress import SILENT, Progress
from mdata.tracing.run_record import in_ranges, merged_ranges
from trainer.checkpoint.folder import folder_name, read_index
from trainer.checkpoint.format import RunState
from trainer.checkpoint.load import read_extras
from trainer.checkpoint.location import Location, checkpoints_folder
from trainer.checkpoint.save import check_target, together
from trainer.config.sections import RunConfig
from trainer.errors import rank_here
from trainer.models.stage import LossFunction, Microbatch
from trainer.optim.schedules import rates
from trainer.parallel.collectives import gather_objects
from trainer.parallel.mesh import mesh_of
from trainer.parallel.placement import Placement, find_placement
from trainer.parallel.world import World, join_world, leave_world, lost_ranks_named
from trainer.pipeline.actions import Action
from trainer.plan.lengths import batch_sizes, skipped_ranges
from trainer.plan.memory import explained
from trainer.plan.plan import Plan, make_plan
from trainer.run.after_step import AfterStep, Callback, unrecorded_step
from trainer.run.attempt import check_restarts
from trainer.run.data import RunData, open_data, training_batches
from trainer.run.determinism import make_deterministic
from trainer.run.engine import Engine
from trainer.run.goodput import Goodput, Tally
from trainer.run.health import check_health
from trainer.run.log_text import device_text, header
from trainer.run.metrics import MetricsWriter, held_parameters, tally_of, write_ranks
from trainer.run.profiling import Profiling
from trainer.run.rank_times import RankTimes
from trainer.run.references import needs_first_weights, references
from trainer.run.resume import Done, Start, check_agreed, find_start, found_by_all
from trainer.run.run_folder import Owner, owned_folder, with_recorded_skip, write_run_files
from trainer.run.saving import checkpoint_bytes, prune_finished
from trainer.run.signals import StopRequests
from trainer.run.spikes import RollBackError
from trainer.run.step_report import ExcludedStep, PendingReport, StepReport, reports_behind
from trainer.tracking.files import TRACKING, run_id
from trainer.tracking.follower import Follower


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The state of a run when `train` returns.

    Args:
        step: finished steps. loss: of the last one, in nats per token; None if none was left to do. valid, test:
            losses by corpus at the end. checkpoint: the newest. goodput: of all starts, on rank 0; None elsewhere.
    """

    step: int
    loss: float | None
    valid: dict[str, float]
    test: dict[str, float]
    checkpoint: Location
    goodput: Goodput | None = None


@dataclass(frozen=True)
class _Given:
    """What every start of a run in this process has in common, beside the configuration."""

    owner: Owner
    loss: LossFunction | None
    callbacks: Sequence[Callback]
    progress: Progress
    watch: Callable[[Action | None], None] | None
    ranks: RankTimes | None
    follower: Follower


def train(
    config: RunConfig,
    world: World | None = None,
    *,
    loss: LossFunction | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress = SILENT,
    watch: Callable[[Action | None], None] | None = None,
    ranks: RankTimes | None = None,
) -> TrainResult:
    """Train until the length of config.train is done, from the newest checkpoint in the run folder or from the start.

    Every rank calls this with the same arguments.

    Args:
        config: of the run.
        world: this rank's place, if it has joined the others; None: join them now, as torchrun or Slurm says.
        loss: replaces the built-in loss; see docs/howto/custom_loss.md.
        callbacks: each is called with every `FinishedStep`. One that returns True on any rank ends the run, as
            train.exit_interval does: after the steps that have begun by the next report, with a checkpoint.
        progress: receives the steps and notes.
        watch: is called with each action of a step before it is done, and with None behind the last (watchdog.py).
        ranks: times that the watchdogs of all ranks exchange.

    Raises:
        UsageError: the configuration does not fit the ranks, the data or the checkpoint; or the run has diverged.
        DamageError: the checkpoint to go on from is damaged.
        ResourceError: a checkpoint could not be written; the older one is whole. Or memory ran out, or another rank
            has ended.
        StoppedError, KeyboardInterrupt: SIGTERM or Ctrl-C; a checkpoint of the last step was written before.
    """
    with (
        _joined(config, world) as world,
        owned_folder(config, world) as owner,
        _rank_named(world),
        closing(Follower(progress.note)) as follower,  # waited for after the end of the run is written
    ):
        given = _Given(owner, loss, callbacks, progress, watch, ranks, follower)
        rolled_back = False
        while True:
            with suppress(RollBackError):
                return _train(config, world, given, rolled_back=rolled_back)
            rolled_back = True
            gc.collect()  # the model, whose memory the next one needs
            if world.device.type == "cuda":
                torch.cuda.empty_cache()


@contextmanager
def _rank_named(world: World) -> Iterator[None]:
    """Name this rank, one of several, in errors of connections and of its machine, such as a full disk."""
    try:
        with lost_ranks_named(world):
            yield
    except OSError as error:
        if world.world_size == 1:
            raise
        raise explain_os_error(error, rank_here(world.rank)) from error


@contextmanager
def _joined(config: RunConfig, world: World | None) -> Iterator[World]:
    if world is not None:
        yield world
        return
    place = find_placement(os.environ) or Placement()
    make_deterministic(config)
    try:
        mesh = mesh_of(config, place.world_size)
        yield join_world(mesh, placement=place, join_s=60 * config.run.join_minutes)
    finally:
        leave_world()


def _train(config: RunConfig, world: World, given: _Given, *, rolled_back: bool) -> TrainResult:
    """One start: open the data, find the checkpoint, plan, build the engine; then the steps.

    Raises:
        RollBackError: a spike sends the run back; the caller starts again.
    """
    progress = given.progress
    data = open_data(config, progress=progress)
    resume_point = found_by_all(config, world)
    config = together(
        world.groups["world"],
        lambda: (
            with_recorded_skip(config, data, newest=resume_point.folder, tell=progress.note)
            if world.is_main
            else config
        ),
        doing="reading data.json",
    )[0]
    start = find_start(config, data, point=resume_point)
    config, done, newest = start.config, start.done, start.folder
    plan = make_plan(config, world.world_size, facts=data.facts, done_steps=done.steps, done_samples=done.samples)
    check_agreed(start, world=world)
    unrecorded = unrecorded_step(newest, config, plan=plan, world=world) if newest else None
    if newest and (done.steps > plan.steps or (done.steps == plan.steps and unrecorded is None)):
        if world.is_main:
            prune_finished(config)
        return TrainResult(done.steps, None, {}, {}, newest)
    together(world.groups["world"], lambda: _check_folders(config, plan, done) if world.is_main else None)
    health_notes = () if rolled_back else check_health(config, world, data_id=data.train.data_id)
    start = replace(start, notes=(*start.notes, *health_notes))
    # Reading starts here, so that the first steps are ready when the engine is.
    batches = iter(
        training_batches(data, config, plan=plan, dp=world.groups["dp"], consumed=done.samples, progress=progress)
    )
    with explained(config, plan, rank=world.rank):
        of_pairs = config.data.kind == "pairs"
        fresh = newest is None or (of_pairs and needs_first_weights(config, data, world))
        engine = Engine(config, plan, world=world, fresh=fresh, first=start.first, loss=given.loss)
        if of_pairs:
            engine.references = references(config, data, engine=engine, is_first=fresh, progress=progress)
        if newest:
            engine.load(newest)
        if given.watch is not None:
            engine.executor.watch = given.watch
        return _go_on(start, unrecorded, given, data=data, batches=batches, engine=engine, rolled_back=rolled_back)


def _check_folders(config: RunConfig, plan: Plan, done: Done) -> None:
    """Look, before anything is written, whether this start may end like those before it."""
    check_restarts(config.run, done.steps)
    check_target(checkpoints_folder(config), checkpoint_bytes(config, plan))


def _go_on(
    start: Start,
    unrecorded: RunState | None,
    given: _Given,
    *,
    data: RunData,
    batches: Iterator[list[Batch]],
    engine: Engine,
    rolled_back: bool,
) -> TrainResult:
    """The steps that are left; on rank 0 with the files of the run folder, its log and its trackers."""
    config, done, newest, plan, world = start.config, start.done, start.folder, engine.plan, engine.world
    owner, progress, follower = given.owner, given.progress, given.follower
    held = {
        "rank": world.rank,
        **world.coordinates._asdict(),
        **held_parameters(engine.optimizer, engine.executor.stages),
    }
    held_by_rank = gather_objects(held, world.groups["world"])
    if not world.is_main:
        return _Loop(start, data, batches, engine, given, log=None).run(unrecorded)
    folder = write_run_files(config, plan, data=data, start=start, note=progress.note)
    write_ranks(folder, held_by_rank)
    for line in header(config, plan, start=start, device=device_text(world.device)):
        progress.note(line)
    tracks = bool(config.track.to)
    if tracks:
        try:
            run_id(folder, wanted=config.track.id, stored=_stored_id(newest))
        except DamageError as error:
            tracks = False
            progress.note(f"track: {error}\n  the run continues without trackers")
    resumed = done.steps if newest else None
    tally = _tally_so_far(config, tell=progress.note)
    writer = MetricsWriter(
        folder, resumed_step=resumed, tell=progress.note, tally=tally, check_owner=owner.check_folder
    )
    with writer as log, _rank_named(world):  # it records the error, so that has to be named here
        facts = {**start.facts(), **owner.facts(), "world_size": world.world_size, "device": str(world.device)}
        log.event("start", facts | ({"rolled_back": True} if rolled_back else {}))
        for text in start.notes:
            log.event("note", {"text": text})
        if log.put_aside:
            text = f"metrics of later steps were moved to {log.put_aside}"
            log.event("note", {"text": text})
            progress.note(text)
        if tracks:  # after the start is written
            follower.start(folder)
            log.after_line = follower.poll
        result = _Loop(start, data, batches, engine, given, log=log).run(unrecorded)
        log.event("finished" if result.step == plan.steps else "stopped", {"step": result.step})
        return result


def _stored_id(checkpoint: Location | None) -> bytes | None:
    """tracking.json of the checkpoint from which a run goes on, which may be all that is left of it."""
    if checkpoint is None:
        return None
    return read_extras(checkpoint, read_index(checkpoint), names=[TRACKING]).get(TRACKING)


def _tally_so_far(config: RunConfig, *, tell: Callable[[str], None]) -> Tally:
    """The time of the run's earlier starts; without those whose lines cannot be read."""
    length = config.train.sequence_length * config.data.rows_per_sample
    background = config.checkpoint.background
    try:
        return tally_of(Path(config.run.folder), length, background=background)
    except DamageError as error:
        tell(f"goodput counts this start only: {error}")
        return Tally(length, background=background)


class _Loop:
    """The steps of a run, one after another."""

    def __init__(
        self,
        start: Start,
        data: RunData,
        batches: Iterator[list[Batch]],
        engine: Engine,
        given: _Given,
        *,
        log: MetricsWriter | None,
    ) -> None:
        self.batches, self.data, self.engine, self.progress = batches, data, engine, given.progress
        self.config, self.done = start.config, start.done
        self.plan = engine.plan
        last = _last_step(self.done.steps, self.config, self.plan)
        self.after = AfterStep(
            self.config,
            engine,
            data=data,
            owner=given.owner,
            log=log,
            progress=given.progress,
            last=last,
            callbacks=given.callbacks,
            times=given.ranks,
            spikes=start.spikes,
        )
        # Whether the last step counts decides the learning rate of the next.
        self.skip = merged_ranges(skipped_ranges(self.config.data.skip))
        self.behind = reports_behind(engine.world.device) if self.config.optimizer.count_skipped else 0

    def run(self, unrecorded: RunState | None) -> TrainResult:
        """All steps that are left; before them, what was not recorded of the last one that is done."""
        after, progress, loss, losses = self.after, self.progress, None, dict[str, dict[str, float]]()
        progress.begin("train", self.plan.steps, unit="steps", done=self.done.steps)
        if unrecorded is not None:
            loss, losses = unrecorded.measured.get("loss"), after.record_missing(unrecorded)
        with StopRequests() as stops, after.saver:
            for now, report, is_newest in self._reports(stops):
                tokens = (now.samples - self.done.samples) * self.plan.sample_tokens
                try:
                    losses = after.settle(now, report, stops=stops, is_newest=is_newest, tokens=tokens)
                except RollBackError:
                    with stops.at_once():  # a request to stop, which the steps after this would have obeyed
                        raise
                loss = report.loss
        progress.end()
        newest = checkpoints_folder(self.config) / folder_name(after.last)
        goodput = after.log.tally.goodput() if after.log is not None and after.log.tally is not None else None
        return TrainResult(after.last, loss, losses.get("valid", {}), losses.get("test", {}), newest, goodput)

    def _reports(self, stops: StopRequests) -> Iterator[tuple[Done, StepReport, bool]]:
        """Of each step: (what is done with it, its report, whether no later step has begun).

        Time that the caller takes between two of them does not count as time of steps.

        On a GPU the report of a step is read while the next one runs, unless something is due after it.
        """
        plan, engine, after, rate = self.plan, self.engine, self.after, self.after.measuring.rate
        done, sizes, optimizer = self.done, batch_sizes(self.config.train), self.config.optimizer
        if done.steps == plan.steps:
            return
        running: deque[tuple[Done, int, PendingReport | ExcludedStep]] = deque()
        profiling = Profiling(self.config.run, engine.world)

        def waits() -> bool:
            return after.is_due_after([now.steps for now, *_ in running])

        while done.steps < after.last or running:
            with rate:
                if done.steps < after.last and not waits():
                    profiling.before(done.steps + 1)
                    read = rate.wait_for(self.batches)
                    size = sizes.at(done.samples)
                    at = done.scheduled(optimizer)
                    rate_of = rates(optimizer, plan.schedule, steps=at.steps, samples=at.samples, batch=size)
                    limits = after.spikes.limits(done, at)
                    pending: PendingReport | ExcludedStep
                    if self.skip and in_ranges(np.arange(done.samples, done.samples + size), self.skip).all():
                        of_step = rate_of.learning_rate, rate_of.weight_decay
                        pending = ExcludedStep(of_step, num_components=len(after.measuring.components))
                    else:
                        pending = engine.step(
                            [self._moved(batch) for batch in read],
                            rate_of.learning_rate,
                            embedding_rate=rate_of.embedding_learning_rate,
                            weight_decay=rate_of.weight_decay,
                            votes=lambda: after.votes(stops),
                            num_components=len(after.measuring.components),
                            measure=after.measures(done.steps + 1),
                            limits=limits,
                        )
                        rate.tokens += size * plan.sample_tokens
                        rate.steps += 1
                    done = done.after(size)
                    running.append((done, size, pending))
                    if len(running) <= self.behind and not waits():
                        continue
                now, size, pending = running.popleft()
                report = pending.read()
                rate.sync_s += pending.sync_s
                if report.votes.end:
                    after.end_after(done.steps)
                if not report.applied:
                    now, done = now.skipping(size), done.skipping(size)
                    running = deque((later.skipping(size), n, of_it) for later, n, of_it in running)
            yield now, report, not running
        profiling.end()

    def _moved(self, batch: Batch) -> Microbatch:
        """A batch on the device, with what the losses by component and data.skip need to know of its rows."""
        by_component = bool(self.after.measuring.components)
        return self.engine.microbatch(
            batch,
            components=self.data.train.locate(batch.samples)[0] if by_component else None,
            skipped=in_ranges(batch.samples, self.skip) if self.skip else None,
            dataset=self.data.train,
        )


def _last_step(done: int, config: RunConfig, plan: Plan) -> int:
    """After which this start of the run ends."""
    interval = config.train.exit_interval
    return min(plan.steps, (done // interval + 1) * interval) if interval else plan.steps
