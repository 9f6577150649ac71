"""Runs one step of any number of ranks in one process, without a GPU and without memory for the model.

An engine is built on the device "meta", where tensors have shapes but no data, and runs a step through the code that
trains: forward and backward passes, messages and collectives, which parallel/recorded.py records. Ranks that do the
same are run once: those of a pipeline rank whose parts of the optimizer have equal rules. Of the microbatches only the
first two and the last are run; those in between repeat the second. Then the records of all ranks are matched against
each other (parallel/matching.py), and their parameters are counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from trainer.config.sections import (
    BertSamplesSection,
    ClassifySamplesSection,
    KernelsSection,
    ModelSection,
    RunConfig,
    T5SamplesSection,
)
from trainer.models.family import family_of
from trainer.models.stage import EncoderTokens, Microbatch
from trainer.optim.layout import make_layout
from trainer.optim.muon import parts_of
from trainer.optim.ownership import owned_by
from trainer.parallel.matching import Entry, Group, Matched, match
from trainer.parallel.mesh import AXES, Mesh, mesh_of
from trainer.parallel.params import SHARD_AXES, ParamSpec
from trainer.parallel.recorded import Event, Record, recorded_world
from trainer.pipeline.actions import Action, Schedule
from trainer.plan.plan import Plan
from trainer.plan.stages import rank_parameters
from trainer.run.engine import Engine

RUN = 3  # microbatches that are run: the first, one for all between, the last
UPDATE = "update"  # after a rank's last action
COUNT = ""  # before its first action: it counts the tokens of the step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The result of a rehearsed step of all ranks.

    Args:
        num_runs: ranks that were run; each represents all ranks that do the same.
        matched: collectives and messages.
        parameters: for each pipeline rank, the most that one of its tp ranks holds, with padding.
        kept_bytes: for each pipeline rank, the largest total of the buffers and the optimizer state that one rank holds
            from step to step; plan/memory.py adds what a step needs beside them.
    """

    num_runs: int
    matched: Matched
    parameters: tuple[int, ...]
    kept_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """One rank's communication in a step, and the bytes that it holds from step to step."""

    entries: tuple[Entry, ...]
    kept_bytes: int


def rehearse(config: RunConfig, plan: Plan) -> Rehearsal:
    """Run a step of every rank of a plan.

    Raises:
        Mismatch: ranks would deadlock, or exchange data that does not match.
        AssertionError: the parameters of all ranks do not make up the model.
    """
    mesh = mesh_of(config, plan.world_size)
    tables = _tables(config, plan)
    count_parameters(plan, tables)
    programs: dict[Hashable, _Program] = {}
    of_rank, schedule = [], plan.pipeline.lowered(plan.num_microbatches)
    keys = _keys(plan, mesh, tables)
    for rank in range(plan.world_size):
        key = keys[_place(mesh, rank)]
        if key not in programs:
            programs[key] = run_rank(config, plan, rank=rank, schedule=schedule)
        of_rank.append(programs[key])
    matched = match([program.entries for program in of_rank], members(mesh))
    by_stage: dict[int, int] = {}
    for rank, program in enumerate(of_rank):
        at = mesh.index("pp", rank)
        by_stage[at] = max(by_stage.get(at, 0), program.kept_bytes)
    return Rehearsal(
        num_runs=len(programs),
        matched=matched,
        parameters=tuple(
            max(sum(spec.numel for spec in table) for place, table in tables.items() if place[0] == pp)
            for pp in range(plan.pp)
        ),
        kept_bytes=tuple(by_stage[pp] for pp in range(plan.pp)),
    )


def run_rank(config: RunConfig, plan: Plan, *, rank: int, schedule: Schedule) -> _Program:
    """A step of one rank, on tensors without data."""
    mesh = mesh_of(config, plan.world_size)
    record = Record(lambda axis, value: _answers(config, plan, mesh, rank))
    plain = dataclasses.replace(config, kernels=KernelsSection())  # those of a GPU want one
    engine = Engine(plain, plan, world=recorded_world(mesh, rank, record=record), fresh=False)
    flats = (engine.buffers.parameters.values, engine.buffers.gradients.values)
    held = (*flats, *engine.optimizer.outside_buffers)
    record.events.clear()  # of building it
    few, numbers = shortened(schedule)
    engine._training = lambda count: few  # type: ignore[assignment]

    def watch(action: Action | None) -> None:
        record.action = str(action) if action is not None else UPDATE

    engine.executor.watch = watch
    engine.step([_microbatch(config.model, plan, engine) for _ in numbers], 1e-3)
    entries = _entries(record.events, schedule, rank=mesh.index("pp", rank))
    return _Program(tuple(entries), sum(tensor.numel() * tensor.itemsize for tensor in held))


def shortened(schedule: Schedule) -> tuple[Schedule, tuple[int, ...]]:
    """The schedule of the first two microbatches and the last, in the same order, and their numbers in the full one."""
    count = schedule.num_microbatches
    numbers = tuple(sorted({*range(min(RUN - 1, count)), count - 1}))
    lists = (
        tuple(a._replace(microbatch=numbers.index(a.microbatch)) for a in actions if a.microbatch in numbers)
        for actions in schedule.actions
    )
    return dataclasses.replace(schedule, num_microbatches=len(numbers), actions=tuple(lists)), numbers


Tables = dict[tuple[int, int, int], tuple[ParamSpec, ...]]


def count_parameters(plan: Plan, tables: Tables) -> int:
    """Elements of the model, after checking that the pieces of all ranks, copies once, fill each tensor exactly."""
    boxes: dict[str, dict[tuple[Any, Any], int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for table in tables.values():
        for spec in table:
            for piece in spec.pieces:
                shapes[piece.name] = piece.shape
                boxes.setdefault(piece.name, {})[piece.start, piece.size] = math.prod(piece.size)
    for name, shape in shapes.items():
        held = sum(boxes[name].values())
        assert held == math.prod(shape), f"the ranks hold {held} elements of {name}, which has {math.prod(shape)}"
    total = sum(math.prod(shape) for shape in shapes.values())
    assert total == plan.num_parameters, f"the ranks hold {total} parameters, the model has {plan.num_parameters}"
    return total


def _tables(config: RunConfig, plan: Plan) -> Tables:
    """(pipeline rank, tp rank, ep rank) -> its parameters."""
    sequence, family = config.mesh.sequence_parallel, family_of(config)
    return {
        (pp, tp, ep): rank_parameters(
            family,
            plan.shape,
            places=plan.pipeline.places(pp, plan.place(tp_rank=tp, ep_rank=ep, sequence_parallel=sequence)),
        )
        for pp, tp, ep in itertools.product(range(plan.pp), range(plan.tp), range(plan.ep))
    }


def _place(mesh: Mesh, rank: int) -> tuple[int, int, int]:
    return mesh.index("pp", rank), mesh.index("data", rank), mesh.index("edp", rank)


def _keys(plan: Plan, mesh: Mesh, tables: Tables) -> dict[tuple[int, int, int], Hashable]:
    """(pipeline rank, position on data, position on edp) -> a key that is equal for ranks that do the same.

    The tp and ep ranks of a stage hold tensors of equal shapes. Ranks along data, and along edp, own different runs of
    the buffers, and their sums over other axes depend on the parameters in these runs.
    """
    keys: dict[tuple[int, int, int], Hashable] = {}
    sizes = {axis: mesh.size(axis) for axis in SHARD_AXES}
    layouts = [make_layout(tables[pp, 0, 0], sizes) for pp in range(plan.pp)]
    for pp, data, edp in dict.fromkeys(_place(mesh, rank) for rank in range(mesh.world_size)):
        owned = owned_by(layouts[pp], {"data": data, "edp": edp})
        sums = [
            sum(s.stop - s.start for _, s in owned.segments() if axis in s.rules.partial)
            for axis in ("tp", "kv", "etp", "ends")
        ]
        keys[pp, data, edp] = (pp, *sums)
    return keys


def _microbatch(model: ModelSection, plan: Plan, engine: Engine) -> Microbatch:
    data = engine.config.data

    def ids(length: int) -> torch.Tensor:
        return torch.zeros(plan.micro_batch * plan.rows_per_sample, length, dtype=torch.int64, device="meta")

    options, length = data.of_kind, plan.sequence_length
    inputs = ids(options.decoder_length if isinstance(options, T5SamplesSection) else length)
    numbered = model.hidden_dropout or model.attention_dropout
    batch = Microbatch(
        tokens_BS=inputs,
        labels_BS=inputs,
        loss_mask_BS=torch.ones(inputs.shape, device="meta"),
        samples_B=inputs[:, 0] if numbered else None,
    )
    if isinstance(options, ClassifySamplesSection):
        batch = dataclasses.replace(batch, types_BS=inputs, lengths_B=inputs[:, 0].int(), choices=options.choices)
    if isinstance(options, T5SamplesSection | BertSamplesSection):
        batch = dataclasses.replace(batch, lengths_B=inputs[:, 0].int())
    if isinstance(options, T5SamplesSection):
        batch = dataclasses.replace(batch, encoder=EncoderTokens(ids(length), inputs[:, 0].int()))
    if isinstance(options, BertSamplesSection) and options.head:
        batch = dataclasses.replace(batch, types_BS=inputs, swapped_B=inputs[:, 0])
    return batch.on_context_rank(engine.cp)


def members(mesh: Mesh) -> list[dict[Hashable, Group]]:
    """For each rank: axis -> the ranks of its group, link -> sender and receiver; one shared object per group."""
    groups_of_rank: list[dict[Hashable, Group]] = [{} for _ in range(mesh.world_size)]
    for axis in AXES:
        for rank in range(mesh.world_size):
            if axis not in groups_of_rank[rank] and (group := mesh.ranks_of(axis, rank)):
                for other in group:
                    groups_of_rank[other][axis] = group
    pairs = [way for ways in mesh.link_rounds() for pair in ways for way in (pair, pair[::-1])]
    for line in {groups["pp"] for groups in groups_of_rank}:
        for sender, receiver in pairs:
            link = (line[sender], line[receiver])
            for rank in link:
                groups_of_rank[rank][sender, receiver] = link
    return groups_of_rank


def _entries(events: list[Event], schedule: Schedule, *, rank: int) -> Iterator[Entry]:
    """Expand the record of a few microbatches to all microbatches."""
    _, numbers = shortened(schedule)
    by_action: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_action[event.action].append(event)
    for event in by_action[COUNT]:
        yield Entry("join", event.axis, _what(event), COUNT)
    for action in schedule.actions[rank]:
        few = numbers.index(action.microbatch) if action.microbatch in numbers else 1
        done = by_action[str(action._replace(microbatch=few))]
        for event in done:
            if not isinstance(event.axis, str):
                yield _message(schedule, action, event)
        joins = [event for event in done if isinstance(event.axis, str)]
        for axis in dict.fromkeys(event.axis for event in joins):  # one entry for all: they repeat the checked one
            collectives = tuple(_what(event) for event in joins)
            yield Entry(
                "join", axis, (str(action), collectives), str(action), sum(event.axis == axis for event in joins)
            )
    for event in by_action[UPDATE]:
        yield Entry("join", event.axis, _what(event), UPDATE)


def _message(schedule: Schedule, action: Action, event: Event) -> Entry:
    if event.operation == "wait":
        needed = schedule.input_message(action)
        assert needed is not None, f"{action} waits for a message that it does not need"
        return Entry("wait", event.axis, (str(schedule.partner(needed)), event.tensors), str(action))
    if action.kind.startswith("SEND"):
        return Entry("send", event.axis, (str(action), event.tensors), str(action))
    return Entry("receive", event.axis, (str(schedule.partner(action)), event.tensors), str(action))


def _what(event: Event) -> Hashable:
    """The part of an operation that must be equal on all members of a group; over "stage" sizes differ."""
    tensors = tuple(dtype for dtype, _ in event.tensors) if event.axis == "stage" else event.tensors
    return event.operation, tensors


def _answers(config: RunConfig, plan: Plan, mesh: Mesh, rank: int) -> list[Any]:
    """The parts of matrices that every rank of a pipeline stage reports."""
    sizes, pp = {axis: mesh.size(axis) for axis in SHARD_AXES}, mesh.index("pp", rank)
    tables = _tables(config, plan)
    layouts = {place[1:]: make_layout(table, sizes) for place, table in tables.items() if place[0] == pp}
    parts = []
    for other in mesh.ranks_of("stage", rank):
        owned = owned_by(
            layouts[mesh.index("tp", other), mesh.index("ep", other)], {axis: mesh.index(axis, other) for axis in sizes}
        ).only(matrix=True)
        index = {axis: mesh.index(axis, other) for axis in AXES if mesh.has(axis, other)}
        parts.append(parts_of(owned, index.__getitem__))
    return parts
