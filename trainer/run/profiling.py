"""PyTorch's profiler for some steps of some ranks: run.profile and run.profile_ranks.

Each rank writes `profile/steps-10-12-rank-0.json.gz` in the run folder, a trace for Perfetto or chrome://tracing. The
profiler runs during these steps only; they are slower, and so is the next step, which waits for the file.
"""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.config.sections import RunSection
from trainer.parallel.world import World


class Profiling:
    """The profiler of one rank; does nothing if run.profile is not set."""

    def __init__(self, run: RunSection, world: World) -> None:
        on = bool(run.profile) and world.rank in run.profile_ranks
        self._steps = range(run.profile[0], run.profile[-1] + 1) if on else range(0)
        self._path = Path(run.folder, "profile", f"steps-{'-'.join(map(str, run.profile))}-rank-{world.rank}.json.gz")
        self._device = world.device
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Called before each step."""
        if step in self._steps and self._profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the step before is not in the trace
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        elif step not in self._steps:
            self.end()

    def end(self) -> None:
        """Stop recording, if it runs, and write the trace."""
        if self._profiler is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
