"""The possible layouts of a run on a number of GPUs: how fast each would be, and why the others do not work.

For each mesh the fastest choice of microbatch, recomputation, schedule and stages that fits into memory is kept;
schedules other than 1f1b, and stages of equal work, are tried with the best choice of the rest. Speed and memory are
the estimates of step_time.py and memory.py; the rules are those of check.py. The bubble of a choice is simulated only
if the choice would be the fastest without one. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from mdata.progress import SILENT, Progress
from trainer.config.sections import MeshSection, RecomputeSection, RunConfig
from trainer.errors import size_text
from trainer.plan.check import DataFacts, check, layout_problems
from trainer.plan.devices import LAUNCH_S, Device
from trainer.plan.memory import USABLE, rank_bytes
from trainer.plan.plan import Plan, make_plan
from trainer.plan.step_time import NETWORK, Rates, StepTime, busy_time, step_time

RECOMPUTE = (RecomputeSection(), RecomputeSection(mode="selective"), RecomputeSection(mode="full"))
LARGEST_MICRO_BATCH = 16
SCHEDULES: tuple[Literal["1f1b", "interleaved", "zb_h1", "zb_v"], ...] = ("1f1b", "interleaved", "zb_h1", "zb_v")
BALANCES: tuple[Literal["layers", "flops"], ...] = ("layers", "flops")
SHARDINGS: tuple[Literal["none", "state", "gradients", "parameters"], ...] = (
    "none",
    "state",
    "gradients",
    "parameters",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines of a run.

    Args:
        gpus: in total. nodes: number of machines. device: kind of GPU.
        memory_bytes: of a GPU. network: bytes per second of a GPU to other machines.
        launch: seconds in which the host launches a kernel.
    """

    gpus: int
    nodes: int
    device: Device
    memory_bytes: int
    network: float = NETWORK
    launch: float = LAUNCH_S

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


class _Choice(NamedTuple):
    """A layout whose speed is not estimated yet."""

    config: RunConfig
    plan: Plan
    memory_bytes: int


def find_layouts(
    config: RunConfig, hardware: Hardware, *, facts: DataFacts | None, progress: Progress = SILENT
) -> list[Layout]:
    """Every mesh of these GPUs: those that work, the fastest first, then the others with their reasons."""
    meshes, layouts = list(_meshes(config, hardware)), []
    progress.begin("estimating layouts", len(meshes), unit="layouts")
    for mesh in meshes:
        layouts.append(_best(mesh, hardware, facts))
        progress.advance(1)
    progress.end()
    return sorted(layouts, key=lambda layout: (bool(layout.problem), -layout.tokens_per_s))


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
                yield dataclasses.replace(config, mesh=mesh, recompute=RecomputeSection())


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _best(config: RunConfig, hardware: Hardware, facts: DataFacts | None) -> Layout:
    """The fastest choice for one mesh that fits; the one with the least memory if none does."""
    choices = list(_choices(config, hardware, facts))
    if not choices:
        smallest = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch=1))
        return Layout(config=smallest, problem=check(smallest, hardware.gpus, facts=facts)[0])
    usable = USABLE * hardware.memory_bytes
    best = _fastest((choice for choice in choices if choice.memory_bytes <= usable), hardware)
    least = min(choices, key=lambda choice: choice.memory_bytes)
    others = list(_other_pipelines(best.config if best else least.config, hardware, facts))
    best = _fastest((choice for choice in others if choice.memory_bytes <= usable), hardware, best=best)
    if best is not None:
        return best
    least = min(least, *others, key=lambda choice: choice.memory_bytes) if others else least
    return Layout(config=least.config, memory_bytes=least.memory_bytes, problem=_too_large(least, usable))


def _fastest(choices: Iterable[_Choice], hardware: Hardware, *, best: Layout | None = None) -> Layout | None:
    """The fastest of some choices and of the best one so far."""
    rates = Rates(
        device=hardware.device, gpus_per_node=hardware.gpus_per_node, network=hardware.network, launch=hardware.launch
    )
    bounded = [(busy_time(choice.config, choice.plan, rates).total, choice) for choice in choices]
    for least, choice in sorted(bounded, key=lambda pair: pair[0]):
        if best is not None and choice.plan.tokens_per_step / least <= best.tokens_per_s:
            break  # all that follow are slower even without a bubble
        time = step_time(choice.config, choice.plan, rates)
        speed = choice.plan.tokens_per_step / time.total
        if best is None or speed > best.tokens_per_s:
            best = Layout(config=choice.config, memory_bytes=choice.memory_bytes, time=time, tokens_per_s=speed)
    return best


def _too_large(choice: _Choice, usable: float) -> str:
    """Why the choice with the least memory does not run, and what a higher optimizer.sharding would need."""
    settings, needs = choice.config.optimizer, []
    for sharding in SHARDINGS[SHARDINGS.index(settings.sharding) + 1 :]:
        optimizer = dataclasses.replace(settings, sharding=sharding)
        sharded = dataclasses.replace(choice.config, optimizer=optimizer)
        needed = max(rank.total for rank in rank_bytes(sharded, choice.plan))
        if needed < choice.memory_bytes:
            needs.append((needed, sharding))
    text = f"needs at least {size_text(choice.memory_bytes)} a GPU, {size_text(int(usable))} can be used"
    fits = [(needed, sharding) for needed, sharding in needs if needed <= usable]
    if needs:
        needed, sharding = fits[0] if fits else min(needs)
        text += f"; {size_text(needed)} with optimizer.sharding={sharding}" + ("" if fits else ", still too much")
    return text


def _other_pipelines(config: RunConfig, hardware: Hardware, facts: DataFacts | None) -> Iterator[_Choice]:
    """The same with each other schedule, and with stages of equal work."""
    if config.mesh.pp == 1:
        return
    for schedule in SCHEDULES:
        tried = set()
        for balance in BALANCES:
            mesh = dataclasses.replace(config.mesh, schedule=schedule, stage_balance=balance)
            other = dataclasses.replace(config, mesh=mesh)
            if check(other, hardware.gpus, facts=facts):
                break
            plan = make_plan(other, hardware.gpus, facts=facts)
            if mesh != config.mesh and plan.pipeline.layers_per_stage not in tried:
                yield _choice(other, plan)
            tried.add(plan.pipeline.layers_per_stage)


def _choices(config: RunConfig, hardware: Hardware, facts: DataFacts | None) -> Iterator[_Choice]:
    """Every microbatch and recomputation under 1f1b."""
    micro_batch = 1
    while micro_batch <= LARGEST_MICRO_BATCH:
        choice = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch=micro_batch))
        if check(choice, hardware.gpus, facts=facts):
            return  # a larger microbatch divides the batch less often
        plan = make_plan(choice, hardware.gpus, facts=facts)
        yield from (_choice(dataclasses.replace(choice, recompute=recompute), plan) for recompute in RECOMPUTE)
        micro_batch *= 2


def _choice(config: RunConfig, plan: Plan) -> _Choice:
    return _Choice(config, plan, max(rank.total for rank in rank_bytes(config, plan)))
