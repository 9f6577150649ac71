"""Handles a spike: reports it, writes its page, and with spikes.action = "roll_back" returns to a step before it.

The detector decides (spike_detector.py), identically on all ranks. With "skip" the device has already skipped the
update. To roll back, all ranks finish a save in flight; rank 0 points `latest` to the newest checkpoint before the
samples to skip and records them in data.json; and each rank raises a RollBackError. The run then restarts there as
after a crash, exactly as if a user had put these ranges into data.skip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mdata import MdataError
from mdata.errors import counted, explain_os_error
from trainer.checkpoint.folder import find_checkpoint, point_to, run_state, step_of, whole_checkpoints
from trainer.checkpoint.location import checkpoints_folder
from trainer.checkpoint.save import together
from trainer.config.sections import RunConfig
from trainer.plan.lengths import batch_sizes
from trainer.run.data import RunData
from trainer.run.engine import Engine
from trainer.run.metrics import MetricsWriter, read_events
from trainer.run.resume import Counted, Done
from trainer.run.run_folder import record_skip
from trainer.run.saving import Saver
from trainer.run.spike_detector import MIXTURE_CHANGE, NEIGHBOURS, Spike, SpikeDetector, SpikeStep
from trainer.run.step_report import DivergedError, SpikeLimits, StepReport


class RollBackError(Exception):
    """The run starts again from an older checkpoint, in this process."""


class Spikes:
    """The spikes of a run on one rank; every rank has one and calls it at the same steps.

    Args:
        config: of the run. engine, data, saver: of the run. components: names of those whose losses are measured.
        log: of rank 0; None on the others. tell: a note for the user.
        state: of the detector, from a checkpoint; empty: none.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        *,
        data: RunData,
        saver: Saver,
        components: Sequence[str],
        log: MetricsWriter | None,
        tell: Callable[[str], None],
        state: Mapping[str, Any],
    ) -> None:
        self._config, self._engine, self._data, self._saver = config, engine, data, saver
        self._components, self._log, self._tell = components, log, tell
        self._sizes, self._firsts = batch_sizes(config.train), dict[int, int]()
        self._pages: deque[SpikeStep] = deque()
        self._detector = SpikeDetector(config.spikes, data.train.mixture_changes(MIXTURE_CHANGE))
        if state:
            self._detector.load(state)

    def limits(self, done: Done, counted: Counted) -> SpikeLimits:
        """The limits of the next step, which the schedules count as `counted`."""
        lengths, first_steps = self._engine.plan.schedule, self._config.spikes.warmup_steps
        before = counted.steps if lengths.counter == "steps" else counted.samples
        warmup = before < lengths.warmup if first_steps is None else done.steps < first_steps
        self._firsts[done.steps + 1] = done.samples
        return self._detector.limits(done.steps + 1, done.samples, warmup=warmup)

    def to_numbers(self) -> dict[str, Any]:
        """The state for a checkpoint; empty if spikes are not detected."""
        return {} if self._config.spikes.action == "off" else self._detector.to_numbers()

    def add(self, step: int, report: StepReport) -> Spike | None:
        """Add a report; returns the spike if it is one."""
        first = self._firsts.pop(step)
        size = self._sizes.at(first)
        spike = self._detector.add(step, first, report)
        if self._log is not None and not report.applied:
            self._say_skipped(step, report, samples=[first, first + size - 1])
        if spike is None or not spike.begins:
            return None
        norms = self._engine.norms_by_group(report.group_squares)
        if self._log is not None:
            named = zip(self._components, report.component_losses, strict=True)
            losses = {name: loss for name, loss in named if loss == loss}
            action = self._config.spikes.action
            facts = {**spike.facts(), "action": action, "samples": [first, first + size - 1]}
            self._log.event("spike", {**facts, "losses": losses, "norms": norms, "page": _page_name(step)})
            self._pages.append(
                SpikeStep(
                    spike=spike,
                    first_sample=first,
                    num_samples=size,
                    losses=losses,
                    norms=norms,
                    action=action,
                )
            )
        return spike

    def write_pages(self, step: int) -> None:
        """Write the page of a spike at this step, and rewrite those whose following steps are now known."""
        if self._log is None:
            return
        for page in self._pages:
            if page.spike.step in (step, step - NEIGHBOURS):
                self._write(page)
        while self._pages and self._pages[0].spike.step <= step - NEIGHBOURS:
            self._pages.popleft()

    def roll_back(self, spike: Spike, *, until: int) -> None:
        """Return to before a spike; only reports it if there is no checkpoint before it.

        Args:
            until: one past the last sample of the spike's step.

        Raises:
            RollBackError: the run starts again from the checkpoint.
            DivergedError: it has returned to that checkpoint spikes.max_rollbacks times already.
        """
        self._saver.finish()
        main = self._engine.world.is_main
        back = together(
            self._engine.everyone, lambda: self._prepare(spike, until) if main else None, doing="rolling back"
        )[0]
        if back:
            raise RollBackError

    def _prepare(self, spike: Spike, until: int) -> bool:
        """On rank 0: choose the checkpoint, record the samples, and point `latest` to it."""
        assert self._log is not None, "rank 0 writes the log"
        root, settings = checkpoints_folder(self._config), self._config.spikes
        newest = find_checkpoint(root).folder
        last = min(spike.step - 1, step_of(newest) if newest else 0)
        earlier = [folder for folder in whole_checkpoints(root) if step_of(folder) <= last]
        if not earlier:
            text = f"step {spike.step:,}: no checkpoint before the spike to return to; the run continues"
            self._log.event("note", {"text": text})
            self._tell(text)
            return False
        first_skipped = spike.step - settings.skip_before
        folder = next((folder for folder in earlier if step_of(folder) < first_skipped), earlier[-1])
        events = [event for event in read_events(Path(self._config.run.folder)) if event["event"] == "rollback"]
        before = sum(event.get("checkpoint") == folder.name for event in events)
        if before >= settings.max_rollbacks:
            raise DivergedError(
                f"step {spike.step:,} is a spike, and the rollbacks to {folder.name} are used up",
                found=f"loss {spike.loss:.4f}, gradient norm {spike.grad_norm:.4g}; {counted(before, 'rollback')}",
                expected=f"at most {settings.max_rollbacks} (spikes.max_rollbacks)",
                fix=f"look at {_page_name(spike.step)}; then raise spikes.skip_after, use mtrain skip, or lower "
                "optimizer.lr",
            )
        trained = run_state(folder).consumed_samples  # on these, whatever is recorded
        first = max(trained, until - self._sizes.last_steps(settings.skip_before + 1, end=until))
        last_sample = self._sizes.after(settings.skip_after, consumed=until) - 1
        # In this order: a run killed in between would else go on from a checkpoint trained on samples to skip.
        point_to(folder)
        record_skip(Path(self._config.run.folder), [(first, last_sample)])
        self._log.event("rollback", {"step": spike.step, "checkpoint": folder.name, "samples": [first, last_sample]})
        return True

    def _say_skipped(self, step: int, report: StepReport, *, samples: list[int]) -> None:
        """The event of a step that changed nothing; on rank 0."""
        assert self._log is not None, "rank 0 writes the log"
        numbers = {"loss": report.loss, "grad_norm": report.grad_norm, "loss_tokens": report.num_tokens}
        if report.excluded:
            self._log.event("skip", {"step": step, "samples": samples, "why": "data.skip"})
        elif report.above_limits and report.grad_norm < float("inf"):
            self._log.event("skip", {"step": step, "samples": samples, "why": "spike", **numbers})
        else:
            self._log.event("skipped", {"step": step, **numbers})

    def _write(self, page: SpikeStep) -> None:
        from trainer.run.spike_page import write_page  # only for a spike

        folder = Path(self._config.run.folder)
        try:
            write_page(folder / _page_name(page.spike.step), self._config, self._data.train, step=page)
        except (MdataError, OSError) as error:
            shown = error if isinstance(error, MdataError) else explain_os_error(error, "writing the page of a spike")
            self._tell(f"step {page.spike.step:,}: could not write the spike page: {str(shown).splitlines()[0]}")


def _page_name(step: int) -> str:
    return f"spikes/step-{step}.html"
