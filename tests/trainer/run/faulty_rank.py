"""One rank of a run in which something goes wrong; test_faults.py starts it through `trainer.run.launch.launch`.

    python -m tests.trainer.run.faulty_rank FOLDER KIND RANK STEP TICK_S

Everything else is as in `mtrain train --nproc`, but each rank takes itself for the only one of its host. The faulty
rank writes the time of its fault to FOLDER/fault. A slow link is one between this rank and the next, of three. A slow
rank computes at a third of its speed from the start, and ends the run some time after the step; one that pauses, once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers.small_disk import fill, mount_over, own_mounts

CLOCK_S, DELAY_S = 90.0, 0.2
SLOW_TICKS, SLOW_LINES = 12, 8  # before a run with a slow rank ends; lines have the times of ranks
SAVES = 7  # steps between checkpoints


def main(argv: list[str]) -> int:
    """Train as this rank, with a fault if it is the faulty one."""
    folder, kind, faulty, step, tick_s = Path(argv[0]), argv[1], int(argv[2]), int(argv[3]), float(argv[4])
    from cli import mtrain_rank
    from trainer.run import train as train_module
    from trainer.run import watchdog as watchdog_module

    watchdog_module.Watchdog = partial(watchdog_module.Watchdog, tick_s=tick_s)  # type: ignore[assignment,misc]
    watchdog_module.TICK_S = tick_s
    os.environ["SLURMD_NODENAME"] = f"node{os.environ['RANK']}"
    if kind == "own disk":
        step = step // SAVES * SAVES + SAVES - 1  # right before a save, when the one before it is done
    fault = Fault(folder, kind, is_here=int(os.environ["RANK"]) == faulty, step=step, tick_s=tick_s)
    if kind == "never" and fault.is_here:
        fault.mark()
        time.sleep(600)
    if kind == "clock" and fault.is_here:
        fault.mark()
        real = time.time
        time.time = lambda: real() + CLOCK_S
    if kind == "link":
        _measure_links({faulty, (faulty + 1) % int(os.environ["WORLD_SIZE"])}, fault)
    if kind == "slow":
        _measure_rates()
        if fault.is_here:
            _slow_down()
    if kind == "own disk" and fault.is_here:
        own_mounts()
    train_module.train = partial(train_module.train, callbacks=[fault])
    return mtrain_rank.main([str(folder)])


class Fault:
    """A callback of `train`, called on each rank after each step; returns whether the run ends."""

    def __init__(self, folder: Path, kind: str, *, is_here: bool, step: int, tick_s: float) -> None:
        self.folder, self.kind, self.is_here, self.step, self.tick_s = folder, kind, is_here, step, tick_s
        self._group: Any = None
        self._end_s = math.inf  # of the run with a slow rank

    def mark(self) -> None:
        (self.folder / "fault").write_text(str(time.time()))

    def __call__(self, finished: Any) -> bool:
        import torch
        import torch.distributed as dist

        from trainer.parallel.collectives import Group, all_reduce_

        if self.kind == "hang" and finished.step == 1:
            self._group = Group("other", dist.get_world_size(), dist.get_rank(), dist.new_group())
        checkpoints = self.folder.parent / "run" / "checkpoints"
        if self.kind == "own disk" and self.step == finished.step and list(checkpoints.glob(".*.partial")):
            self.step += SAVES  # the files of the last one are below
        if not self.is_here or finished.step != self.step:
            return time.monotonic() > self._end_s and self._lines() >= SLOW_LINES
        self.mark()
        if self.kind in ("kill", "stop"):  # somewhere in the next steps
            number = signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP
            threading.Timer(finished.step % 7 / 100, os.kill, (os.getpid(), number)).start()
        elif self.kind == "hang":
            all_reduce_(torch.ones(1), self._group)
        elif self.kind == "pause":
            time.sleep(14 * self.tick_s)
        elif self.kind == "slow":
            self._end_s = time.monotonic() + SLOW_TICKS * self.tick_s
        elif self.kind == "disk":
            fill(self.folder.parent / "run")
        elif self.kind == "own disk":
            mount_over(checkpoints, 4)
        return False

    def _lines(self) -> int:
        """How many lines of metrics.jsonl have the times of ranks: beside other work the first ones come late."""
        return (self.folder.parent / "run" / "metrics.jsonl").read_text().count('"ranks":')


def _measure_rates() -> None:
    """Have the CPUs measure their rates, as GPUs do."""
    from trainer.run import health

    measure = health.measure

    def measured(config: Any, world: Any, *, data_id: str) -> health.RankHealth:
        rates = health._rates(world)
        return replace(measure(config, world, data_id=data_id), figures={"matrix_tflops": rates["matrix_tflops"]})

    health.measure, health._SIDE, health._BYTES = measured, 128, 1 << 16


def _slow_down() -> None:
    """Have this rank take three times as long for its products."""
    from trainer.run import engine, health

    seconds, add_gradients = health._seconds, engine.Engine.add_gradients

    def three_times(work: Callable[..., Any]) -> Callable[..., Any]:
        def slower(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = work(*arguments, **options)
            time.sleep(2 * (time.perf_counter() - began))
            return result

        return slower

    health._seconds = lambda work, device: seconds(three_times(work), device)
    engine.Engine.add_gradients = three_times(add_gradients)  # type: ignore[method-assign]


def _measure_links(slow: set[int], fault: Fault) -> None:
    """Have the CPUs measure their links, as GPUs do, while messages between two ranks take longer."""
    from trainer.run import health

    exchange, measure = health.exchange, health.measure

    def delayed(x: Any, *, peer: int, group: Any) -> Any:
        if {group.rank, peer} == slow:
            time.sleep(DELAY_S)
        return exchange(x, peer=peer, group=group)

    def measured(config: Any, world: Any, *, data_id: str) -> health.RankHealth:
        rank = measure(config, world, data_id=data_id)
        if fault.is_here:
            fault.mark()
        hosts = [f"node{number}" for number in range(world.world_size)]
        return replace(rank, links=health.measure_links(world, hosts))

    health.exchange, health.measure, health.LINK_BYTES = delayed, measured, 1 << 16


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
