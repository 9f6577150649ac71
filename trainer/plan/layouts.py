"""The possible layouts of a run on a number of GPUs: how fast each would be, and why the others do not work.

For each mesh the fastest choice of microbatch, recomputation and schedule that fits into memory is kept; schedules
other than 1f1b are tried with the best choice of the rest. Speed and memory are the estimates of step_time.py and
memory.py; the rules are those of check.py. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trainer.config.sections import MeshSection, RecomputeSection, RunConfig
from trainer.plan.check import DataFacts, check, layout_problems
from trainer.plan.devices import GIB, Device
from trainer.plan.memory import USABLE, rank_bytes
from trainer.plan.plan import make_plan
from trainer.plan.step_time import NETWORK, StepTime, step_time

RECOMPUTE = (RecomputeSection(), RecomputeSection(mode="selective"), RecomputeSection(mode="full"))
LARGEST_MICRO_BATCH = 16
SCHEDULES = ("interleaved", "zb_h1", "zb_v")  # beside 1f1b


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines of a run.

    Args:
        gpus: in total. nodes: number of machines. device: kind of GPU.
        memory_bytes: of a GPU. network: bytes per second of a GPU to other machines.
    """

    gpus: int
    nodes: int
    device: Device
    memory_bytes: int
    network: float = NETWORK

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one machine."""
        return -(-self.gpus // self.nodes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One mesh with its best microbatch, recomputation and schedule.

    Args:
        config: of the run with this layout.
        memory_bytes: of a rank, estimated. time: of a step, estimated; None if it cannot run.
        tokens_per_s: of all GPUs; 0 if it cannot run.
        problem: why it cannot run; "": it can.
    """

    config: RunConfig
    memory_bytes: int = 0
    time: StepTime | None = None
    tokens_per_s: float = 0.0
    problem: str = ""


def find_layouts(config: RunConfig, hardware: Hardware, *, facts: DataFacts | None) -> list[Layout]:
    """Every mesh of these GPUs: those that work, the fastest first, then the others with their reasons."""
    found = [_best(mesh, hardware, facts) for mesh in _meshes(config, hardware)]
    return sorted(found, key=lambda layout: (bool(layout.problem), -layout.tokens_per_s))


def problems_of_every_layout(config: RunConfig, hardware: Hardware, *, facts: DataFacts | None) -> list[str]:
    """The problems that no layout solves: those that remain without parallelism and do not concern the ranks."""
    alone = dataclasses.replace(config, mesh=MeshSection())
    of_layout = layout_problems(alone, hardware.gpus)
    return [problem for problem in check(alone, hardware.gpus, facts=facts) if problem not in of_layout]


def _meshes(config: RunConfig, hardware: Hardware) -> Iterator[RunConfig]:
    """The run on each mesh of these GPUs; tp ranks share a machine."""
    for tp in _divisors(hardware.gpus_per_node):
        for cp in _divisors(hardware.gpus // tp):
            for pp in _divisors(hardware.gpus // (tp * cp)):
                mesh = MeshSection(tp=tp, cp=cp, pp=pp, sequence_parallel=tp > 1)
                yield dataclasses.replace(config, mesh=mesh)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _best(config: RunConfig, hardware: Hardware, facts: DataFacts | None) -> Layout:
    """The fastest choice for one mesh that fits; the one with the least memory if none does."""
    choices = list(_choices(config, hardware, facts))
    runs = [layout for layout in choices if layout.time is not None]
    if not runs:
        return choices[0]
    fits = [layout for layout in runs if layout.memory_bytes <= USABLE * hardware.memory_bytes]
    if fits:
        best = max(fits, key=lambda layout: layout.tokens_per_s)
        others = _other_schedules(best.config, hardware, facts)
        return max([best, *others], key=lambda layout: layout.tokens_per_s)
    least = min(runs, key=lambda layout: layout.memory_bytes)
    needs, has = least.memory_bytes / GIB, USABLE * hardware.memory_bytes / GIB
    problem = f"needs at least {needs:.1f} GiB a GPU, {has:.1f} can be used"
    return dataclasses.replace(least, tokens_per_s=0.0, time=None, problem=problem)


def _other_schedules(config: RunConfig, hardware: Hardware, facts: DataFacts | None) -> Iterator[Layout]:
    """The same with each other schedule that fits."""
    for name in SCHEDULES if config.mesh.pp > 1 else ():
        mesh = dataclasses.replace(config.mesh, schedule=name)  # type: ignore[arg-type]
        choice = dataclasses.replace(config, mesh=mesh)
        if not check(choice, hardware.gpus, facts=facts):
            layout = _estimated(choice, hardware, facts)
            if layout.memory_bytes <= USABLE * hardware.memory_bytes:
                yield layout


def _choices(config: RunConfig, hardware: Hardware, facts: DataFacts | None) -> Iterator[Layout]:
    micro_batch = 1
    while micro_batch <= LARGEST_MICRO_BATCH:
        train = dataclasses.replace(config.train, micro_batch=micro_batch)
        for recompute in RECOMPUTE:
            choice = dataclasses.replace(config, train=train, recompute=recompute)
            problems = check(choice, hardware.gpus, facts=facts)
            if problems:
                if micro_batch == 1:
                    yield Layout(config=choice, problem=problems[0])
                return  # a larger microbatch divides the batch less often
            yield _estimated(choice, hardware, facts)
        micro_batch *= 2


def _estimated(config: RunConfig, hardware: Hardware, facts: DataFacts | None) -> Layout:
    plan = make_plan(config, hardware.gpus, facts=facts)
    time = step_time(
        config, plan, device=hardware.device, gpus_per_node=hardware.gpus_per_node, network=hardware.network
    )
    return Layout(
        config=config,
        memory_bytes=max(rank.total for rank in rank_bytes(config, plan)),
        time=time,
        tokens_per_s=plan.tokens_per_step / time.total,
    )
