"""The work after a step: measuring, recording, saving and evaluating if due, and ending the run if requested.

Checkpoints are written by all ranks, before a step is evaluated: a missed evaluation is done when the run resumes. A
step whose gradient norm is not finite changes nothing and is recorded; no checkpoint is written after it until a step
is finite again, and ten of them in a row end the run. A step without loss tokens changes nothing either, but the state
stays valid.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from mdata.errors import counted
from mdata.progress import Progress
from trainer.checkpoint.folder import folder_name, run_state
from trainer.checkpoint.format import RunState
from trainer.checkpoint.location import Location
from trainer.config.parse import dump_config
from trainer.config.sections import EvaluateSection, RunConfig, TrainSection
from trainer.parallel.collectives import gather_objects
from trainer.parallel.world import World
from trainer.plan.plan import Plan
from trainer.run.data import RunData
from trainer.run.end_time import ENDS, EndTime, deadlines
from trainer.run.engine import Engine
from trainer.run.evaluating import RunScorer, classify_sets, evaluate_sets
from trainer.run.measuring import Measuring
from trainer.run.metrics import MetricsWriter, plain, read_metrics
from trainer.run.rank_times import RankTimes
from trainer.run.resume import Done
from trainer.run.run_folder import Owner, record_file, tokenizer_files, versions
from trainer.run.saving import Saver, SaveSchedule, ranked_by
from trainer.run.signals import StopRequests, StopVotes, stop
from trainer.run.spikes import Spikes
from trainer.run.step_report import FinishedStep, SkippedSteps, StepReport, Votes, diverged
from trainer.tasks.in_training import score_tasks
from trainer.tracking.files import tracking_file

PREDICTIONS = "predictions"  # of classifiers, in the run's folder
Callback = Callable[[FinishedStep], bool | None]


class AfterStep:
    """The work of all ranks between two steps.

    Args:
        log: of rank 0; None on the others.
        last: the step after which this start of the run ends; later if no checkpoint can be written there.
        callbacks: see `train`. times: of all ranks. spikes: the state of the spike detector, from a checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        *,
        data: RunData,
        owner: Owner,
        log: MetricsWriter | None,
        progress: Progress,
        last: int,
        callbacks: Sequence[Callback] = (),
        times: RankTimes | None = None,
        spikes: Mapping[str, Any],
    ) -> None:
        self.config, self.plan, self.data, self.engine = config, engine.plan, data, engine
        self.log, self.progress, self.last = log, progress, last
        self.callbacks, self.end_asked = callbacks, False
        batch = f"{counted(self.plan.global_batch, 'sample')} a step, of data.kind={config.data.kind}"
        smallest = config.precision.min_loss_scale
        self.skipped = SkippedSteps(engine.most_overflows, smallest_scale=smallest, batch=batch)
        began_s = owner.attempt.time_s if owner.attempt else time.time()
        self.end_time = EndTime(deadlines(config.run, os.environ, began_s=began_s))
        self.asked, self.time_up = StopVotes(), 0.0  # requests to stop, not handled yet
        names = [component.name for component in data.train.components]
        self.measuring = Measuring(self.plan, engine, dtype=config.precision.dtype, components=names, ranks=times)
        self.schedule = SaveSchedule(config.checkpoint, keeps_time=engine.world.is_main)
        # Rank 0 writes them.
        folder = Path(config.run.folder)
        extras = {} if log is None else tokenizer_files(data) | record_file(folder) | tracking_file(folder)
        self.saver = Saver(config, engine, extras=extras, tell=self._tell, check_owner=owner.check_checkpoints)
        self.spikes = Spikes(
            config,
            engine,
            data=data,
            saver=self.saver,
            components=self.measuring.components,
            log=log,
            tell=progress.note,
            state=spikes,
        )

    def votes(self, stops: StopRequests) -> Sequence[float]:
        """This rank's `Votes`; `settle` is given the sums."""
        save = self.schedule.vote()
        if self.engine.world.is_main:
            save = max(save, self.end_time.vote(self.saver.longest_s))
        votes = Votes(save, *stops.votes(), self.saver.vote(), float(self.end_asked))
        # The rounding of sums over ranks depends on how many there are: a run without callbacks keeps its four.
        return votes if self.callbacks else votes[:-1]

    def records(self, step: int) -> bool:
        """Whether a step has a line."""
        return evaluates(step, self.config, last=self.plan.steps) or is_due(step, self.config.run.log_interval)

    def measures(self, step: int) -> bool:
        """Whether a step's line needs numbers that only the step itself can measure."""
        run = self.config.run
        return (run.log_params_norm or run.log_num_zeros) and self.records(step)

    def end_after(self, step: int) -> None:
        """A callback ends the run; this step has begun."""
        if step < self.last:
            self.last = step
            if self.log is not None:
                self.log.event("ended by a callback", {"step": step})

    @property
    def is_stopping(self) -> bool:
        """Whether the run ends after the step that is settled, by a signal or by the clock."""
        return any(self.asked) or self.time_up > 0

    def is_due_after(self, steps: Sequence[int]) -> bool:
        """Whether these steps, which have begun, have to end before the next begins."""
        if self.is_stopping or self.schedule.pending:
            return bool(steps)
        if self.last in steps:
            return True
        return any(self.schedule.is_step(step) or evaluates(step, self.config, last=self.plan.steps) for step in steps)

    def settle(
        self, now: Done, report: StepReport, *, stops: StopRequests, is_newest: bool, tokens: int
    ) -> dict[str, dict[str, float]]:
        """Do everything that follows a step; returns the losses of its evaluation.

        Args:
            is_newest: the state is that of this step; otherwise a later step has begun; requests then apply after it.
            tokens: read since the run was started, for the progress display.

        Raises:
            RollBackError: the run starts again from a checkpoint before this step.
        """
        step = now.steps
        self.saver.poll()  # the checkpoint of an earlier step, before any line of this one
        if self.config.mesh.expert_buffer and not math.isfinite(report.grad_norm):
            self.engine.check_expert_buffers(step)
        spike = self.spikes.add(step, report)
        self.skipped.add(step, report)
        evaluated = evaluates(step, self.config, last=self.plan.steps)
        records = self.records(step)
        measured = self.measuring.line(now.samples, report) if records else {}
        # Before the lines of its checkpoint and evaluation, so that the log is in the order of steps.
        self.progress.advance(1, **self.measuring.shown(step, report), tokens=tokens)
        if records:
            place = {"step": step, "steps": self.plan.steps, "device": self.engine.world.device.type}
            self.progress.measured(plain(place | measured))
        elif self.log is not None:
            self.log.alive()
        if records and not evaluated:
            self._record(step, measured, {})
        self.spikes.write_pages(step)
        if spike is not None and report.applied and self.config.spikes.action == "roll_back":
            self.spikes.roll_back(spike, until=now.samples)
        votes = report.votes
        self.schedule.add_votes((votes.save, votes.sigterm, votes.ctrl_c))
        if votes.save_failed:
            self.saver.finish()
        self.asked = StopVotes(self.asked.sigterm + votes.sigterm, self.asked.ctrl_c + votes.ctrl_c)
        if votes.save >= ENDS:
            self.time_up = self.time_up or votes.save
        saved = is_newest and self._save_if_due(now, report, measured)
        ends = self.is_stopping or step == self.last
        if saved and (ends or not self.config.checkpoint.background):
            self.saver.finish(needed=ends)
        if is_newest and self.is_stopping:
            self._call_back(FinishedStep(step, now.samples, report))
            self._stop(step, saved)
        losses: dict[str, dict[str, float]] = {}
        if evaluated:
            with stops.at_once() if saved else nullcontext():
                began_s = time.monotonic()
                losses = self._evaluate(step)
                timed = _timed(losses, began_s)
                answers = self._answers(step)
                self.saver.poll()  # an earlier save may have ended in the meantime
                self._record(step, measured | timed | answers, losses)
        if step == self.last and not saved:
            if step == self.plan.steps:
                raise diverged(f"no checkpoint was written for the last step, {step}", report)
            self.last += 1  # train.exit_interval: the run ends after the next sound step
        self._keep_the_best(step)
        self._call_back(FinishedStep(step, now.samples, report, losses))
        return losses

    def _call_back(self, finished: FinishedStep) -> None:
        for callback in self.callbacks:
            self.end_asked |= callback(finished) is True

    def record_missing(self, run: RunState) -> dict[str, dict[str, float]]:
        """Evaluate and record a step that was saved, but whose run ended before it was recorded."""
        began_s = time.monotonic()
        losses = self._evaluate(run.step)
        self._record(run.step, {**run.measured, **_timed(losses, began_s), **self._answers(run.step)}, losses)
        self._keep_the_best(run.step)
        return losses

    def _keep_the_best(self, step: int) -> None:
        """Keep the checkpoints with the lowest losses, after an evaluation."""
        if step == self.plan.steps and self.log is not None and self.config.checkpoint.keep_best:
            self.saver.prune()

    def _evaluate(self, step: int) -> dict[str, dict[str, float]]:
        """Mean loss of each set that this step is evaluated on, nats per token, by split; and the scores of "tasks"."""
        config, last, losses = self.config, self.plan.steps, dict[str, dict[str, float]]()
        if reads_sets(step, config.train, last=last):
            sets = {"valid": self.data.valid, "test": self.data.test if step == last else {}}
            limit, progress = config.train.eval_samples, self.progress
            if config.data.kind == "classify":
                main = self.log is not None
                folder = Path(config.run.folder) / PREDICTIONS / folder_name(step) if main else None
                losses |= classify_sets(self.engine, sets, limit=limit, folder=folder, progress=progress)
            else:
                losses |= evaluate_sets(self.engine, sets, limit=limit, progress=progress)
        if self.data.tasks and scores_tasks(step, config.evaluate, last=last):
            losses["tasks"] = score_tasks(self.data.tasks, self._scorer)
        return losses

    def _answers(self, step: int) -> dict[str, Any]:
        """The prompts of the configuration with the model's answers after this step, if they are due."""
        settings, prompts = self.config.evaluate, self.data.prompts
        if not (prompts and scores_tasks(step, settings, last=self.plan.steps)):
            return {}
        texts = self._scorer.answers(prompts, most=settings.answer_tokens)
        return {"answers": [{"prompt": p.text, "answer": text} for p, text in zip(prompts, texts, strict=True)]}

    @property
    def _scorer(self) -> RunScorer:
        return RunScorer(engine=self.engine, tokenizer=self.data.tokenizer, name=Path(self.config.run.folder).name)

    def _record(self, step: int, measured: Mapping[str, Any], losses: Mapping[str, dict[str, float]]) -> None:
        if ranked := ranked_by(losses):
            self.saver.evaluated(step, ranked)
        if self.log is not None:
            self.log.step(step, {**measured, **{split: of_split for split, of_split in losses.items() if of_split}})

    def _save_if_due(self, now: Done, report: StepReport, measured: dict[str, Any]) -> bool:
        """Write a checkpoint if one is due and the state is sound; the same on every rank."""
        if not self.schedule.due(now.steps, last=now.steps == self.last):
            return False
        loss = report.loss if report.num_tokens else 0.0
        if not (self.skipped.leaves_sound(report) and self.engine.is_finite(loss)):
            text = f"no checkpoint is written at step {now.steps}: the step was skipped, or its state is not finite"
            if self.log is not None and self.schedule.first_refusal():
                self.log.event("not saved", {"step": now.steps, "loss": report.loss, "grad_norm": report.grad_norm})
                self.progress.note(text)
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
            schedule_steps=now.schedule_steps,
            schedule_samples=now.schedule_samples,
            moment_steps=now.moment_steps,
            spikes=self.spikes.to_numbers(),
        )
        if self.log is not None:
            self.log.sync()  # a curve never ends before the checkpoint that continues it
        self.saver.begin(run)

    def _tell(self, kind: str, facts: dict[str, Any], text: str) -> None:
        if self.log is not None:
            self.log.event(kind, facts)
            if text:
                self.progress.note(text)

    def _stop(self, step: int, saved: bool) -> NoReturn:
        """End the run on every rank as requested."""
        if self.log is not None:
            self.log.event("stopped", {"step": step, "saved": saved})
        gather_objects(None, self.engine.everyone)  # a rank that leaves earlier would look like one that crashed
        why = "it was skipped or its state is not finite"
        done = "and its checkpoint" if saved else f"without a checkpoint, because {why}"
        stop(self.asked, where=f"after step {step} {done}", deadline=self.end_time.named(self.time_up))


def _timed(losses: Mapping[str, Mapping[str, float]], began_s: float) -> dict[str, float]:
    """The entry for the duration of an evaluation; empty if there was nothing to evaluate."""
    return {"eval_s": round(time.monotonic() - began_s, 3)} if any(losses.values()) else {}


def unrecorded_step(newest: Location, config: RunConfig, *, plan: Plan, world: World) -> RunState | None:
    """The newest checkpoint where metrics.jsonl lacks its step (the run ended in its evaluation); as rank 0 sees it."""
    run = run_state(newest)
    due = evaluates(run.step, config, last=plan.steps) or is_due(run.step, config.run.log_interval)
    lacks = False
    if world.is_main and due and run.measured:
        lacks = all(line["step"] != run.step for line in read_metrics(Path(config.run.folder)))
    return run if gather_objects(lacks, world.groups["world"])[0] else None


def evaluates(step: int, config: RunConfig, *, last: int) -> bool:
    """Whether a step is evaluated, by sets or tasks; `last` is that of the run."""
    return reads_sets(step, config.train, last=last) or scores_tasks(step, config.evaluate, last=last)


def reads_sets(step: int, train: TrainSection, *, last: int) -> bool:
    """Whether the losses of the evaluation sets are computed after this step."""
    return step == last or (train.evaluate and is_due(step, train.eval_interval))


def scores_tasks(step: int, evaluate: EvaluateSection, *, last: int) -> bool:
    """Whether tasks or prompts, if there are any, are given to the model after this step."""
    return bool(evaluate.tasks or evaluate.prompts) and (step == last or is_due(step, evaluate.interval))


def is_due(step: int, interval: int | None) -> bool:
    """Whether something done every `interval` steps (None: never) is due after this one."""
    return interval is not None and step % interval == 0
