"""Generators of schedules: which rank computes what, in which order, without communication.

gpipe (Huang et al. 2019), 1f1b (Narayanan et al. 2019, PipeDream-Flush), interleaved (Narayanan et al. 2021), and two
that split backward so that weights' gradients fill the bubble: zb_h1 (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism"), zb_v (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"). All accept any number of ranks
and microbatches that `impossible` does not refuse. Microbatches pass through each stage in order, forward and backward,
so that gradients are summed in the same order in every schedule. Pure, no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import cast

from trainer.pipeline.actions import Action, Kind, Schedule, looped, v_shaped

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v")


def default_chunks(name: str) -> int:
    """The default number of stages of a rank."""
    return 2 if name in ("interleaved", "zb_v") else 1


def placement(name: str, num_ranks: int, *, chunks: int) -> tuple[int, ...]:
    """The rank of each stage of a schedule."""
    return v_shaped(num_ranks) if name == "zb_v" and num_ranks > 1 else looped(num_ranks, chunks)


def impossible(name: str, *, num_ranks: int, chunks: int, num_microbatches: int) -> str:
    """Why there is no such schedule, as a formula with its numbers; empty: there is one."""
    if name in ("1f1b", "gpipe", "zb_h1") and chunks != 1:
        return f"{name} has 1 stage per rank, not {chunks}"
    if name == "zb_v" and chunks != 2:
        return f"zb_v has 2 stages per rank, not {chunks}"
    if name in ("interleaved", "zb_v") and num_ranks < 2:
        return f"{name} needs at least 2 pipeline ranks, not {num_ranks}"
    if name == "interleaved" and chunks < 2:
        return f"interleaved needs at least 2 stages per rank, not {chunks}"
    if name == "interleaved" and num_microbatches % num_ranks:
        return (
            f"interleaved needs microbatches in a multiple of the pipeline ranks, and {num_microbatches} mod "
            f"{num_ranks} = {num_microbatches % num_ranks}"
        )
    return "" if num_microbatches > 0 else "a step needs at least 1 microbatch"


def make_schedule(name: str, *, num_ranks: int, num_microbatches: int, chunks: int = 0, ahead: int = 0) -> Schedule:
    """A schedule of computations.

    Args:
        name: one of SCHEDULES. chunks: stages of a rank; 0: the schedule's default.
        ahead: of 1f1b: forward passes that each rank has done in addition, before a backward pass.

    Raises:
        ValueError: there is no such schedule; the message is that of `impossible`.
    """
    chunks = chunks or default_chunks(name)
    if problem := impossible(name, num_ranks=num_ranks, chunks=chunks, num_microbatches=num_microbatches):
        raise ValueError(problem)
    assert name == "1f1b" or not ahead, f"{name} has no ahead={ahead}"
    generate = functools.partial(_one_f_one_b, ahead=ahead) if ahead else _GENERATORS[name]
    lists = (tuple(generate(rank, num_ranks, num_microbatches, chunks)) for rank in range(num_ranks))
    return Schedule(
        name=name,
        stage_ranks=placement(name, num_ranks, chunks=chunks),
        num_microbatches=num_microbatches,
        actions=tuple(lists),
    )


def forward_only(stage_ranks: tuple[int, ...], num_microbatches: int) -> Schedule:
    """The schedule of an evaluation: microbatches in order, each through all stages of a rank."""
    lists = tuple(
        tuple(Action("F", s, m) for m in range(num_microbatches) for s, at in enumerate(stage_ranks) if at == rank)
        for rank in range(max(stage_ranks) + 1)
    )
    return Schedule(name="forward", stage_ranks=stage_ranks, num_microbatches=num_microbatches, actions=lists)


def _gpipe(rank: int, _ranks: int, microbatches: int, _chunks: int) -> Iterator[Action]:
    yield from (Action("F", rank, m) for m in range(microbatches))
    yield from (Action("B", rank, m) for m in range(microbatches))


def _one_f_one_b(rank: int, ranks: int, microbatches: int, _chunks: int, ahead: int = 0) -> Iterator[Action]:
    order = [(rank, m) for m in range(microbatches)]
    yield from _alternating(order, order, ranks - rank - 1 + ahead)


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Groups of as many microbatches as ranks go through all stages of a rank before the next group."""
    groups = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    forward = [(rank + c * ranks, m) for group in groups for c in range(chunks) for m in group]
    backward = [(rank + c * ranks, m) for group in groups for c in reversed(range(chunks)) for m in group]
    yield from _alternating(forward, backward, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)


def _alternating(forward: list[tuple[int, int]], backward: list[tuple[int, int]], warmup: int) -> Iterator[Action]:
    """Some forward passes, then one forward and one backward in turn, then the remaining backward passes."""
    warmup = min(warmup, len(forward))
    yield from (Action("F", *at) for at in forward[:warmup])
    for ahead, behind in zip(forward[warmup:], backward, strict=False):
        yield Action("F", *ahead)
        yield Action("B", *behind)
    yield from (Action("B", *at) for at in backward[len(forward) - warmup :])


def _zb_h1(rank: int, ranks: int, microbatches: int, _chunks: int) -> Iterator[Action]:
    """1F1B, where W of rank r stays r microbatches behind I until forward is done; then W fills the gaps."""
    weights = 0
    for action in _one_f_one_b(rank, ranks, microbatches, 1):
        kind, _, microbatch = action
        yield action if kind == "F" else Action("I", rank, microbatch)
        if kind == "B" and microbatch - weights >= rank:
            yield Action("W", rank, weights)
            weights += 1
    yield from (Action("W", rank, m) for m in range(weights, microbatches))


def _zb_v(rank: int, ranks: int, microbatches: int, _chunks: int) -> Iterator[Action]:
    """The hand-made order of the paper's figure, for at least 2 ranks - 1 microbatches; surplus ones are left out.

    Below, d is the stage on the way down and u the one on the way up.
    """
    down, up, total = rank, 2 * ranks - 1 - rank, max(2 * ranks - 1, microbatches)
    done: dict[tuple[Kind, int], int] = {}

    def each(text: str, times: int = 1) -> Iterator[Action]:
        for word in text.split() * times:
            kind, stage = cast(Kind, word[0]), down if word[1] == "d" else up
            number = done.get((kind, stage), 0)
            done[kind, stage] = number + 1
            if number < microbatches:
                yield Action(kind, stage, number)

    yield from each("Fd", 2 * (ranks - rank) - 1)
    yield from each("Fu Fd", rank)
    yield from each("Fu Iu Wu", ranks - rank)
    while done["F", down] < total or done["F", up] < total:
        yield from each("Fd" if done["F", down] < total else "")
        yield from each("Id Wd Fu Iu Wu")
    yield from each("Id Iu", rank)
    yield from each("Id Wd", ranks - rank)
    for word, stage in (("Wu", up), ("Wd", down)):
        yield from each(word, total - done.get(("W", stage), 0))


_GENERATORS: Mapping[str, Callable[[int, int, int, int], Iterator[Action]]] = MappingProxyType(
    {"1f1b": _one_f_one_b, "gpipe": _gpipe, "interleaved": _interleaved, "zb_h1": _zb_h1, "zb_v": _zb_v}
)
