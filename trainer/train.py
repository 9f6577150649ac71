"""The loop: read a global batch, step, measure, validate, save; the same on one rank and on many.

`train` is called by every rank. It continues from the run folder's newest checkpoint if there is one: the counter of
consumed samples says where the data stream goes on, so the rest of the run is what it would have been. Only rank 0
writes the folder's files; checkpoints are written by all. A step whose gradient norm is not finite changes nothing
and is recorded; ten of them in a row stop the run.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mdata
from mdata import SILENT, Progress, UsageError, durable
from trainer import checkpoint
from trainer.collectives import gather_objects
from trainer.config import RunConfig, dump_config
from trainer.data import (
    RunData,
    evaluation_batches,
    open_data,
    to_device,
    training_batches,
)
from trainer.engine import Engine, StepReport, held_parameters
from trainer.log_text import device_text, header
from trainer.memory import explained
from trainer.metrics import MetricsWriter, write_ranks
from trainer.plan import Plan, batch_sizes, learning_rate, make_plan
from trainer.resume import Done, Start, checkpoints_folder, find_start
from trainer.world import World, lost_ranks_named

MAX_SKIPPED = 10  # steps without a finite gradient norm, one after another


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


def train(config: RunConfig, world: World, *, progress: Progress = SILENT) -> TrainResult:
    """Train until config.train.steps are done, from the newest checkpoint in the run folder or from the start.

    Raises:
        UsageError: the configuration does not fit the ranks, the data or the checkpoint.
        ResourceError: a checkpoint could not be written; the older one is whole. Or memory ran out, or another rank
            has ended.
    """
    with _alone(config, world), lost_ranks_named(world):
        return _train(config, world, progress)


def _train(config: RunConfig, world: World, progress: Progress) -> TrainResult:
    data = open_data(config, progress=progress)
    start = find_start(config, data)
    config, done, newest = start.config, start.done, start.folder
    plan = make_plan(config, world.world_size, facts=data.facts)
    _check_agreed(done, config, world)
    if newest and done.steps >= plan.steps:
        return TrainResult(done.steps, None, {}, {}, newest)
    with explained(config, plan, rank=world.rank):
        return _go_on(start, plan, data, world=world, progress=progress)


def _go_on(start: Start, plan: Plan, data: RunData, *, world: World, progress: Progress) -> TrainResult:
    config, done, newest = start.config, start.done, start.folder
    engine = Engine(config, plan, world=world, fresh=newest is None)
    if newest:
        engine.load(newest)
    held = {"rank": world.rank, **world.coordinates._asdict(), **held_parameters(engine.layout)}
    ranks = gather_objects(held, world.axes["world"])
    if not world.is_main:
        return _Loop(config, plan, data, engine, None).run(done, progress)
    folder = _prepare_folder(config, plan, data)
    write_ranks(folder, ranks)
    for line in header(config, plan, start=start, device=device_text(world.device)):
        progress.note(line)
    with MetricsWriter(folder, resumed_step=done.steps if newest else None, tell=progress.note) as log:
        log.event("start", _start_facts(start, world))
        return _Loop(config, plan, data, engine, log).run(done, progress)


@contextmanager
def _alone(config: RunConfig, world: World) -> Iterator[None]:
    """Rank 0 keeps other runs out of the folder: two would write each other's metrics and checkpoints."""
    if not world.is_main:
        yield
        return
    folder = Path(config.run.folder)
    with mdata.os_errors_named("making the run folder"):
        folder.mkdir(parents=True, exist_ok=True)
    with durable.held(folder / ".lock"):
        yield


class _Loop:
    """The constants of a run, and what happens around each step."""

    def __init__(self, config: RunConfig, plan: Plan, data: RunData, engine: Engine, log: MetricsWriter | None) -> None:
        self.config, self.plan, self.data, self.engine, self.log = config, plan, data, engine, log

    def run(self, done: Done, progress: Progress) -> TrainResult:
        """The steps after those that are done."""
        settings, total = self.config.train, self.plan.steps
        progress.begin("train", total, unit="steps", done=done.steps)
        first = done.samples
        rate, skipped, valid, test = _Rate(), 0, dict[str, float](), dict[str, float]()
        for now, report in self._reports(done, rate, progress):
            step = now.steps
            skipped = 0 if report.applied else skipped + 1
            self._check_skipped(step, report, skipped)
            last = step == total
            valid = self._evaluate(self.data.valid) if last or _due(step, settings.eval_interval) else {}
            test = self._evaluate(self.data.test) if last else {}
            if last or valid or _due(step, settings.log_interval):
                self._record(now, report, rate, {"valid": valid, "test": test})
            if last or _due(step, self.config.checkpoint.interval):
                self._save(now)
            progress.advance(1, **self._shown(now, report), tokens=(now.samples - first) * self.plan.sequence_length)
        progress.end()
        return TrainResult(
            total, report.loss, valid, test, checkpoints_folder(self.config) / checkpoint.folder_name(total)
        )

    def _reports(self, done: Done, rate: _Rate, progress: Progress) -> Iterator[tuple[Done, StepReport]]:
        """(what is done, what the last step did); the time between them is the consumer's."""
        plan, engine = self.plan, self.engine
        sizes = batch_sizes(self.config)
        batches = iter(
            training_batches(self.data, self.config, plan=plan, dp=engine.dp, consumed=done.samples, progress=progress)
        )
        while done.steps < plan.steps:
            with rate:
                read = rate.wait_for(batches)
                microbatches = [to_device(batch, engine.world.device, vocab_size=plan.vocab_size) for batch in read]
                lr = learning_rate(done.steps, self.config.optimizer, steps=plan.steps)
                report = engine.step(microbatches, lr)
            size = sizes.at(done.samples)
            rate.tokens += size * plan.sequence_length
            done = Done(done.steps + 1, done.samples + size)
            yield done, report

    def _evaluate(self, sets: Mapping[str, mdata.Dataset]) -> dict[str, float]:
        """Mean loss of each set, nats per token."""
        plan, engine = self.plan, self.engine
        losses = {}
        for name, dataset in sets.items():
            samples = mdata.evaluated_samples(dataset, self.config.train.eval_samples)
            batches = evaluation_batches(dataset, samples, micro_batch=plan.micro_batch, dp=engine.dp)
            losses[name] = engine.evaluate(
                to_device(batch, engine.world.device, vocab_size=plan.vocab_size) for batch in batches
            )
        return losses

    def _record(self, now: Done, report: StepReport, rate: _Rate, losses: Mapping[str, dict[str, float]]) -> None:
        if self.log is None:
            return
        tokens_per_s, data_wait = rate.take()
        values: dict[str, Any] = {
            "consumed_samples": now.samples,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": learning_rate(now.steps - 1, self.config.optimizer, steps=self.plan.steps),
            "tokens_per_s": tokens_per_s,
            "data_wait": data_wait,
            "time_s": time.time(),
        }
        self.log.step(now.steps, values | {name: found for name, found in losses.items() if found})

    def _shown(self, now: Done, report: StepReport) -> dict[str, float]:
        """What a step's progress shows beside tokens per second."""
        lr = learning_rate(now.steps - 1, self.config.optimizer, steps=self.plan.steps)
        return {"step": now.steps, "loss": report.loss, "lr": lr, "grad_norm": report.grad_norm}

    def _save(self, now: Done) -> None:
        run = checkpoint.RunState(
            step=now.steps,
            consumed_samples=now.samples,
            data_id=self.data.train.data_id,
            data=self.data.train.identity,
            optimizer_steps=self.engine.optimizer.steps,
            config=dump_config(self.config),
        )
        if self.log is not None:
            self.log.sync()  # a curve never ends before the checkpoint that continues it
        began = time.perf_counter()
        folder = self.engine.save(checkpoints_folder(self.config), run)
        if self.log is not None:
            checkpoint.remove_old(checkpoints_folder(self.config), self.config.checkpoint.keep)
            seconds = round(time.perf_counter() - began, 3)
            self.log.event("saved", {"step": now.steps, "checkpoint": folder.name, "seconds": seconds})

    def _check_skipped(self, step: int, report: StepReport, skipped: int) -> None:
        if self.log is not None and not report.applied:
            self.log.event("skipped", {"step": step, "loss": report.loss, "grad_norm": report.grad_norm})
        if skipped >= MAX_SKIPPED:
            raise UsageError(
                f"the gradient was not finite in {skipped} steps in a row, the last of them step {step}",
                found=f"loss {report.loss}, gradient norm {report.grad_norm}",
                fix="lower optimizer.lr, or go on from an older checkpoint",
            )


class _Rate:
    """Tokens per second, and the share of the time that went into waiting for data, over the steps since it was last
    asked; what lies between steps does not count.
    """

    def __init__(self) -> None:
        self.tokens, self._seconds, self._waited, self._began = 0, 0.0, 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._began

    def wait_for(self, batches: Iterator[list[mdata.Batch]]) -> list[mdata.Batch]:
        """The next of them."""
        began = time.perf_counter()
        batch = next(batches)
        self._waited += time.perf_counter() - began
        return batch

    def take(self) -> tuple[float, float]:
        """(tokens per second, share of waiting); counting starts anew."""
        found = (self.tokens / self._seconds, self._waited / self._seconds) if self._seconds else (0.0, 0.0)
        self.tokens, self._seconds, self._waited = 0, 0.0, 0.0
        return found


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _prepare_folder(config: RunConfig, plan: Plan, data: RunData) -> Path:
    """Make the run folder and write what does not change during a run: config.toml, plan.json, tokenizer."""
    folder = Path(config.run.folder)
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    durable.atomic_write(folder / "config.toml", dump_config(config).encode())
    _write_json(folder / "plan.json", {**dataclasses.asdict(plan), "data_id": data.train.data_id})
    for name, content in data.train.tokenizer_files.items():
        durable.atomic_write(folder / "tokenizer" / name, content)
    if known := data.train.tokenizer:
        # With the files above all that decides ids, so that `generate` needs no corpus.
        facts = {"type": known.type, "options": known.options, "fingerprint": known.fingerprint}
        _write_json(folder / "tokenizer_facts.json", facts)
    return folder


def _start_facts(start: Start, world: World) -> dict[str, Any]:
    """What events.jsonl says of a start: where, and which settings are no longer those of the checkpoint."""
    return {
        "step": start.done.steps,
        "world_size": world.world_size,
        "device": str(world.device),
        "checkpoint": start.folder.name if start.folder else None,
        "changed": {name: {"before": before, "now": now} for name, (before, now) in start.changes.items()},
    }


def _write_json(path: Path, value: Any) -> None:
    durable.atomic_write(path, (json.dumps(value, indent=1) + "\n").encode())


def _check_agreed(done: Done, config: RunConfig, world: World) -> None:
    """Refuse to start where ranks found different checkpoints: their collectives would not fit.

    Raises:
        UsageError: run.folder is not the same folder for all of them.
    """
    everyone = gather_objects(done, world.axes["world"])
    if set(everyone) != {done}:
        raise UsageError(
            f"the ranks do not see the same checkpoints in {config.run.folder}",
            found="steps " + ", ".join(str(other.steps) for other in everyone),
            expected="one folder that all machines share",
        )
