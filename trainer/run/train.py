"""The loop: read a global batch, step, measure, validate, save; the same on one rank and on many.

`train` is called by every rank. It continues from the run folder's newest checkpoint if there is one: the counter of
consumed samples says where the data stream goes on, so the rest of the run is what it would have been. Only rank 0
writes the folder's files; checkpoints are written by all, before a step is evaluated: an evaluation that a run did not
come to is done when it goes on. A step whose gradient norm is not finite changes nothing and is recorded; no checkpoint
is written behind it until a step was sound again, and ten of them in a row stop the run. A step in which no token has
loss changes nothing either, but there is nothing wrong with the state then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mdata import Batch
from mdata.progress import SILENT, Progress
from trainer.checkpoint.folder import folder_name, run_state
from trainer.checkpoint.format import RunState
from trainer.checkpoint.save import check_room, together
from trainer.config.parse import dump_config
from trainer.config.sections import RunConfig
from trainer.models.stage import Microbatch
from trainer.optim.schedules import rates
from trainer.parallel.collectives import gather_objects
from trainer.parallel.world import World, lost_ranks_named
from trainer.pipeline.actions import Action
from trainer.plan.lengths import batch_sizes
from trainer.plan.memory import explained
from trainer.plan.plan import Plan, make_plan
from trainer.run.data import RunData, open_data, to_device, training_batches
from trainer.run.engine import Engine
from trainer.run.evaluating import evaluate_sets
from trainer.run.log_text import device_text, header
from trainer.run.measuring import Measuring
from trainer.run.metrics import MetricsWriter, held_parameters, read_metrics, write_ranks
from trainer.run.resume import Done, Start, check_agreed, checkpoints_folder, find_start, found_by_all
from trainer.run.run_folder import locked_folder, tokenizer_files, versions, write_run_files
from trainer.run.saving import Saver, SaveSchedule, checkpoint_bytes
from trainer.run.signals import StopRequests, stop
from trainer.run.skipped_steps import SkippedSteps, diverged
from trainer.run.step_report import PendingReport, StepReport, reports_behind


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run stands when `train` returns.

    Args:
        step: finished steps. loss: of the last one; None if none was left to do. valid, test: losses by corpus at the
            end. checkpoint: the newest.
    """

    step: int
    loss: float | None
    valid: dict[str, float]
    test: dict[str, float]
    checkpoint: Path


def train(
    config: RunConfig,
    world: World,
    *,
    progress: Progress = SILENT,
    watch: Callable[[Action | None], None] | None = None,
) -> TrainResult:
    """Train until the length of config.train is done, from the newest checkpoint in the run folder or from the start.

    Args:
        watch: is called with each action of a step before it is done, and with None behind the last (watchdog.py).

    Raises:
        UsageError: the configuration does not fit the ranks, the data or the checkpoint; or the run has diverged.
        DamageError: the checkpoint to go on from is damaged.
        ResourceError: a checkpoint could not be written; the older one is whole. Or memory ran out, or another rank
            has ended.
        StoppedError, KeyboardInterrupt: SIGTERM or Ctrl-C; a checkpoint of the last step was written before.
    """
    with locked_folder(config, world), lost_ranks_named(world):
        return _train(config, world, progress, watch)


def _train(
    config: RunConfig, world: World, progress: Progress, watch: Callable[[Action | None], None] | None
) -> TrainResult:
    data = open_data(config, progress=progress)
    start = find_start(config, data, found=found_by_all(config, world))
    config, done, newest = start.config, start.done, start.folder
    plan = make_plan(config, world.world_size, facts=data.facts, done_steps=done.steps, done_samples=done.samples)
    check_agreed(done, config, world=world)
    owed = _owed(config, plan, newest, world) if newest else None
    if newest and (done.steps > plan.steps or (done.steps == plan.steps and owed is None)):
        return TrainResult(done.steps, None, {}, {}, newest)
    together(
        world.groups["world"],
        lambda: check_room(checkpoints_folder(config), checkpoint_bytes(config, plan)) if world.is_main else None,
    )
    with explained(config, plan, rank=world.rank):
        engine = Engine(config, plan, world=world, fresh=newest is None)
        if newest:
            engine.load(newest)
        if watch is not None:
            engine.executor.watch = watch
        return _go_on(start, owed, data=data, engine=engine, progress=progress)


def _go_on(start: Start, owed: RunState | None, *, data: RunData, engine: Engine, progress: Progress) -> TrainResult:
    config, done, newest, plan, world = start.config, start.done, start.folder, engine.plan, engine.world
    held = {
        "rank": world.rank,
        **world.coordinates._asdict(),
        **held_parameters(engine.optimizer, engine.executor.stages),
    }
    ranks = gather_objects(held, world.groups["world"])
    if not world.is_main:
        return _Loop(config, plan, data, engine, None).run(done, progress, owed=owed)
    folder = write_run_files(config, plan, data=data)
    write_ranks(folder, ranks)
    for line in header(config, plan, start=start, device=device_text(world.device)):
        progress.note(line)
    with MetricsWriter(folder, resumed_step=done.steps if newest else None, tell=progress.note) as log:
        log.event("start", {**start.facts(), "world_size": world.world_size, "device": str(world.device)})
        for text in start.notes:
            log.event("note", {"text": text})
        if log.put_aside:
            text = f"metrics of later steps were moved to {log.put_aside}"
            log.event("note", {"text": text})
            progress.note(text)
        return _Loop(config, plan, data, engine, log).run(done, progress, owed=owed)


def _owed(config: RunConfig, plan: Plan, newest: Path, world: World) -> RunState | None:
    """The newest checkpoint where metrics.jsonl lacks its step (the run ended in its evaluation); as rank 0 sees it."""
    run = run_state(newest)
    due = _evaluates(run.step, config, plan) or _due(run.step, config.train.log_interval)
    lacks = False
    if world.is_main and due and run.measured:
        lacks = all(line["step"] != run.step for line in read_metrics(Path(config.run.folder)))
    return run if gather_objects(lacks, world.groups["world"])[0] else None


class _Loop:
    """The constants of a run, and what happens around each step."""

    def __init__(self, config: RunConfig, plan: Plan, data: RunData, engine: Engine, log: MetricsWriter | None) -> None:
        self.config, self.plan, self.data, self.engine, self.log = config, plan, data, engine, log
        batch = f"{plan.global_batch} samples a step, of data.kind={config.data.kind}"
        self.skipped = SkippedSteps(engine.most_overflows, batch=batch)
        self.asked = (0.0, 0.0)  # requests to stop that no step was ended for yet
        # Whether the last step counts decides the learning rate of the next.
        self.behind = reports_behind(engine.world.device) if config.optimizer.count_skipped else 0
        names = [component.name for component in data.train.components]
        self.measuring = Measuring(plan, engine, dtype=config.precision.dtype, components=names)
        self.last = plan.steps
        self.schedule = SaveSchedule(config.checkpoint, keeps_time=engine.world.is_main)

    def run(self, done: Done, progress: Progress, *, owed: RunState | None) -> TrainResult:
        """The steps after those that are done; before them, what is owed to the last of those."""
        total, loss, losses = self.plan.steps, None, dict[str, dict[str, float]]()
        progress.begin("train", total, unit="steps", done=done.steps)
        first, self.last = done.samples, _last_step(done.steps, self.config, self.plan)
        self.saver = self._saver(progress)
        if owed is not None:
            loss, losses = owed.measured.get("loss"), self._evaluate(owed.step, progress)
            self._record(owed.step, owed.measured, losses)
        with StopRequests() as stops, self.saver:
            for now, report, settled in self._reports(done, stops, progress):
                loss, losses = report.loss, self._after(now, report, stops, progress, settled=settled)
                shown = self.measuring.shown(now.steps, report)
                progress.advance(1, **shown, tokens=(now.samples - first) * self.plan.sequence_length)
        progress.end()
        newest = checkpoints_folder(self.config) / folder_name(self.last)
        return TrainResult(self.last, loss, losses.get("valid", {}), losses.get("test", {}), newest)

    def _saver(self, progress: Progress) -> Saver:
        def tell(kind: str, facts: dict[str, Any], text: str) -> None:
            if self.log is not None:
                self.log.event(kind, facts)
                if text:
                    progress.note(text)

        return Saver(self.config, self.engine, extras=tokenizer_files(self.data), tell=tell)

    def _after(
        self, now: Done, report: StepReport, stops: StopRequests, progress: Progress, *, settled: bool
    ) -> dict[str, dict[str, float]]:
        """All that follows a step; returns the losses of its evaluation.

        Args:
            settled: the state is that of this step; else a later step has begun, which then ends what was asked for.
        """
        step = now.steps
        if self.log is not None and not report.applied:
            numbers = {"loss": report.loss, "grad_norm": report.grad_norm, "loss_tokens": report.num_tokens}
            self.log.event("skipped", {"step": step, **numbers})
        self.skipped.add(step, report)
        evaluates = _evaluates(step, self.config, self.plan)
        records = evaluates or _due(step, self.config.train.log_interval)
        measured = self.measuring.line(now.samples, report) if records else {}
        if records and not evaluates:
            self._record(step, measured, {})
        self.schedule.add_votes(report.votes[:3])
        self.saver.poll()
        if report.votes[3]:
            self.saver.finish()
        self.asked = (self.asked[0] + report.votes[1], self.asked[1] + report.votes[2])
        saved = settled and self._save_if_due(now, report, measured, progress)
        ends = any(self.asked) or step == self.last
        if saved and (ends or not self.config.checkpoint.background):
            self.saver.finish(needed=ends)
        if settled and any(self.asked):
            self._stop(step, saved)
        losses: dict[str, dict[str, float]] = {}
        if evaluates:
            with stops.at_once() if saved else nullcontext():
                losses = self._evaluate(step, progress)
                self._record(step, measured, losses)
        if step == self.last and not saved:
            raise diverged(f"no checkpoint was written for the last step, {step}", report)
        return losses

    def _reports(self, done: Done, stops: StopRequests, progress: Progress) -> Iterator[tuple[Done, StepReport, bool]]:
        """(what is done, what its last step did, whether no later step has begun); the time between is the consumer's.

        On a GPU the report of a step is read while the next one runs, unless something is due after it.
        """
        plan, engine, rate = self.plan, self.engine, self.measuring.rate
        if done.steps == plan.steps:
            return
        sizes, optimizer = batch_sizes(self.config), self.config.optimizer
        batches = iter(
            training_batches(self.data, self.config, plan=plan, dp=engine.dp, consumed=done.samples, progress=progress)
        )
        running: deque[tuple[Done, int, PendingReport]] = deque()
        while done.steps < self.last or running:
            with rate:
                if done.steps < self.last and not self._something_is_due(running):
                    read = rate.wait_for(batches)
                    microbatches = [self._moved(batch) for batch in read]
                    size = sizes.at(done.samples)
                    at = done.scheduled(optimizer)
                    lr, decay = rates(optimizer, plan.schedule, **at, batch=size).as_pair()
                    pending = engine.step(
                        microbatches,
                        lr,
                        weight_decay=decay,
                        votes=lambda: (self.schedule.vote(), *stops.votes(), self.saver.vote()),
                        num_components=len(self.measuring.components),
                    )
                    rate.tokens += size * plan.sequence_length
                    done = done.after(size)
                    running.append((done, size, pending))
                    if len(running) <= self.behind and not self._something_is_due(running):
                        continue
                now, size, pending = running.popleft()
                report = pending.read()
                if not report.applied:
                    now, done = now.skipping(size), done.skipping(size)
                    running = deque((later.skipping(size), n, of_it) for later, n, of_it in running)
            yield now, report, not running

    def _moved(self, batch: Batch) -> Microbatch:
        """A batch on the device, with what dropout and the losses by component need to know of its rows."""
        numbered = bool(self.config.model.hidden_dropout or self.config.model.attention_dropout)
        found = self.data.train.locate(batch.samples)[0] if self.measuring.components else None
        engine, vocab_size = self.engine, self.plan.vocab_size
        device, cp = engine.world.device, engine.cp
        return to_device(batch, device, vocab_size=vocab_size, numbered=numbered, cp=cp, components=found)

    def _something_is_due(self, running: Sequence[tuple[Done, *tuple[Any, ...]]]) -> bool:
        """Whether the steps that were started have to end before the next begins."""
        if any(self.asked) or self.schedule.pending:
            return bool(running)
        steps = [now.steps for now, *_ in running]
        if self.last in steps:
            return True
        return any(self.schedule.is_step(step) or _evaluates(step, self.config, self.plan) for step in steps)

    def _evaluate(self, step: int, progress: Progress) -> dict[str, dict[str, float]]:
        """Mean loss of each set that this step is evaluated on, nats per token, by split."""
        if not _evaluates(step, self.config, self.plan):
            return {}
        sets = {"valid": self.data.valid, "test": self.data.test if step == self.plan.steps else {}}
        return evaluate_sets(self.engine, sets, limit=self.config.train.eval_samples, progress=progress)

    def _record(self, step: int, measured: Mapping[str, Any], losses: Mapping[str, dict[str, float]]) -> None:
        if losses.get("valid"):
            self.saver.evaluated(step, losses["valid"])
        if self.log is not None:
            self.log.step(step, {**measured, **{split: found for split, found in losses.items() if found}})

    def _save_if_due(self, now: Done, report: StepReport, measured: dict[str, Any], progress: Progress) -> bool:
        """Write a checkpoint if one is due and the state is sound; the same on every rank."""
        if not self.schedule.due(now.steps, last=now.steps == self.last):
            return False
        loss = report.loss if report.num_tokens else 0.0
        if not (self.skipped.leaves_sound(report) and self.engine.is_finite(loss)):
            text = f"no checkpoint is written at step {now.steps}: the step was skipped, or its state is not finite"
            if self.log is not None and self.schedule.first_refusal():
                self.log.event("not saved", {"step": now.steps, "loss": report.loss, "grad_norm": report.grad_norm})
                progress.note(text)
            return False
        self._save(now, measured)
        self.schedule.saved()
        return True

    def _save(self, now: Done, measured: dict[str, Any]) -> None:
        run = RunState(
            step=now.steps,
            consumed_samples=now.samples,
            data_id=self.data.train.data_id,
            data=self.data.train.identity,
            optimizer_steps=self.engine.optimizer.steps,
            config=dump_config(self.config),
            measured=measured,
            versions=versions(self.engine.world),
            skipped_samples=now.skipped_samples,
        )
        if self.log is not None:
            self.log.sync()  # a curve never ends before the checkpoint that continues it
        self.saver.begin(run)

    def _stop(self, step: int, saved: bool) -> NoReturn:
        """End the run on every rank as it was asked to."""
        if self.log is not None:
            self.log.event("stopped", {"step": step, "saved": saved})
        gather_objects(None, self.engine.everyone)  # a rank that leaves earlier looks like one that crashed
        why = "it was skipped or its state is not finite"
        done = "and its checkpoint" if saved else f"without a checkpoint, because {why}"
        stop(self.asked, where=f"after step {step} {done}")


def _last_step(done: int, config: RunConfig, plan: Plan) -> int:
    """After which this start of the run ends."""
    interval = config.train.exit_interval
    return min(plan.steps, (done // interval + 1) * interval) if interval else plan.steps


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _evaluates(step: int, config: RunConfig, plan: Plan) -> bool:
    return step == plan.steps or _due(step, config.train.eval_interval)
