"""Is the bubble of a pipeline on real ranks the simulated one? Stages that sleep, run by the trainer's executor.

    python benchmarks/pipeline_bubble.py [--ranks 4] [--microbatches 8] [--unit-ms 30]

Every schedule runs on CPU ranks that exchange messages by gloo; F, I and W of a stage take one unit each, in which the
rank sleeps, so two cores are enough. Prints idle over busy time of each schedule beside the simulated value. What it
does not show: GPUs, on which computation and messages compete.

tests/trainer/pipeline/test_executor_times.py runs the same stages with clocks that are only counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.layers.block_hooks import BlockHooks
from trainer.models.stage import Microbatch, Tensors
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import World
from trainer.pipeline.actions import Action, Schedule, stages_of
from trainer.pipeline.executor import Executor
from trainer.pipeline.generators import SCHEDULES, make_schedule
from trainer.pipeline.lower import lower
from trainer.pipeline.simulate import ActionSpan, Costs, simulate


@dataclass(slots=True)
class Clock:
    """The time on a rank, and what it computed when.

    Args:
        sleep: waits for a time; None: time is only counted, and messages bring the time of their sender.
    """

    sleep: Callable[[float], Any] | None = None
    now: float = 0.0
    action: Action | None = None
    spans: list[ActionSpan] = field(default_factory=list)

    def spend(self, cost: float, *, not_before: float = 0.0) -> float:
        """Compute for a time, from when the input is there; returns the time after it."""
        if self.sleep is not None:
            start = time.perf_counter()
            self.sleep(cost)
            stop = time.perf_counter()
        else:
            start = max(self.now, not_before)
            stop = self.now = start + cost
        if self.action is not None:
            self.spans.append(ActionSpan(self.action, start, stop))
        return stop


class TimedStage(nn.Module):
    """A stage that computes nothing but takes time; what it sends is the time at which it was sent."""

    def __init__(self, number: int, *, costs: Costs, clock: Clock) -> None:
        super().__init__()
        self.number, self.costs, self.clock = number, costs, clock
        self.last = number + 1 == len(costs.forward)
        self.first_input = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.hooks, self.hooked, self.kernels = BlockHooks(), range(2), None

    def forward(self, received: Tensors, batch: Microbatch) -> Tensors:
        """The time at which the output is there, float64[1]."""
        return (_Pass.apply(received[0] if received else self.first_input, self),)

    def received(self, batch: Microbatch) -> Tensors:
        """Room for a time."""
        return (torch.empty(1, dtype=torch.float64),)

    given = received

    def backward(self, sent: float) -> float:
        """The input's gradient, and the weights' now or later; returns the time at which the former is there."""
        costs, number, clock, later = self.costs, self.number, self.clock, self.hooks.later
        sent = 0.0 if self.last else sent  # the gradient of the loss is no time
        if later is None:
            return clock.spend(costs.inputs[number] + costs.weights[number], not_before=sent)
        later.append(lambda: clock.spend(costs.weights[number]))
        return clock.spend(costs.inputs[number], not_before=sent)


class _Pass(torch.autograd.Function):
    """Time passes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, stage: TimedStage) -> Tensor:
        ctx.stage = stage
        return torch.full_like(sent, stage.clock.spend(stage.costs.forward[stage.number], not_before=sent.item()))

    @staticmethod
    def backward(ctx: Any, sent: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(sent, ctx.stage.backward(sent.item())), None


def run_timed(world: World, schedule: Schedule, costs: Costs, *, clock: Clock) -> list[ActionSpan]:
    """What this rank computed when in one step of a lowered schedule."""
    rank = world.groups["pp"].rank
    stages = {s: TimedStage(s, costs=costs, clock=clock) for s in stages_of(schedule.stage_ranks, rank)}
    executor = Executor(stages, rank, links=world.links)

    def watch(action: Action | None) -> None:
        clock.action = action

    executor.watch = watch
    nothing = torch.zeros(1, 1)
    batch = Microbatch(tokens_BS=nothing.long(), labels_BS=nothing.long(), loss_mask_BS=nothing)
    executor.run(schedule, [batch] * schedule.num_microbatches)
    return clock.spans


def measure(ranks: int, microbatches: int, unit_s: float) -> None:
    """One rank of the measurement; the first prints."""
    from trainer.parallel.collectives import gather_objects
    from trainer.parallel.world import join_world

    world = join_world(Mesh(ranks, 1, pp=ranks, ring=True), device_type="cpu")
    for name in SCHEDULES:
        schedule = lower(make_schedule(name, num_ranks=ranks, num_microbatches=microbatches))
        units = (unit_s,) * schedule.num_stages
        costs = Costs(forward=units, inputs=units, weights=units)
        run_timed(world, schedule, costs, clock=Clock(sleep=lambda _: None))  # messages connect ranks when first sent
        every = gather_objects(run_timed(world, schedule, costs, clock=Clock(sleep=time.sleep)), world.groups["pp"])
        step = max(s.stop for spans in every for s in spans) - min(s.start for spans in every for s in spans)
        busy = max(sum(span.stop - span.start for span in spans) for spans in every)
        if world.is_main:
            print(f"{name:<12} measured {step / busy - 1:.3f}  simulated {simulate(schedule, costs).bubble:.3f}")


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=30.0)
    parser.add_argument("--rank", action="store_true", help="be a rank; started by torchrun")
    given = parser.parse_args()
    if given.rank:
        measure(given.ranks, given.microbatches, given.unit_ms / 1000)
        return
    from torch.distributed.run import main as torchrun

    torchrun(["--standalone", f"--nproc-per-node={given.ranks}", __file__, *sys.argv[1:], "--rank"])


if __name__ == "__main__":
    main()
