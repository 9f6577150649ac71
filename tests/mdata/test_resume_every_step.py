"""A run resumed at every step, with other ranks each time, reads the same samples in the same order.

The toy run has a mixture that changes midway, a batch that grows, and many passes over its corpora. It is stopped after
each step, its state goes through JSON, and everything is opened again with another number of data-parallel ranks;
through torch's DataLoader at some of the steps, with 0 to 8 workers. 100 steps here, 1,000 in `make soak`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

import mdata
from mdata import Loader
from mdata.loader.batch_sizes import BatchSizes, by_steps, ramp_up
from mdata.loader.loader import BatchPlan
from tests.helpers.corpora import write_pair

pytestmark = pytest.mark.slow  # it opens its data some hundred times
RANKS = (1, 2, 3, 8)
SIZES = ramp_up(24, 24, samples=2000, size=96)
LENGTH, SEED = 8, 7
LONG = pytest.param(1000, marks=pytest.mark.soak)
Step = tuple[list[int], bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    for number, name in enumerate(["a", "b", "c"]):
        write_pair(folder / name, [[9 + number]] * 40, tokens=np.arange(40 * (9 + number)) + 1000 * number)
    spec = {
        "component": [
            {"path": str(folder / name), "weight": weight} for name, weight in (("a", 5), ("b", 3), ("c", 2))
        ],
        "phase": [{"samples": 1501}, {"samples": 777, "ramp": True, "shares": {"a": 1, "c": 4}}, {}],
    }
    mdata.make_blend(spec, folder / "mix.json")
    return folder


def opened(folder: Path) -> mdata.Dataset:
    return mdata.open_dataset(folder / "mix.json", sequence_length=LENGTH, seed=SEED, num_samples=200_000)


def plan(rank: int, ranks: int, sizes: BatchSizes = SIZES) -> BatchPlan:
    return BatchPlan(96, 1, dp_rank=rank, dp_size=ranks, seed=SEED, sizes=sizes)


def joined(parts: list[list[tuple[list[int], bytes]]]) -> Step:
    """What all ranks read in a step, as one rank alone would have read it."""
    in_order = [part for parts_of_all in zip(*parts, strict=True) for part in parts_of_all]
    return [number for numbers, _ in in_order for number in numbers], b"".join(text for _, text in in_order)


def uninterrupted(folder: Path, steps: int) -> list[Step]:
    found = []
    batches = iter(Loader(opened(folder), plan(0, 1)))
    for _ in range(steps):
        found.append(joined([[(batch.samples.tolist(), batch.rows.text.tobytes()) for batch in next(batches)]]))
    batches.close()
    return found


def one_step(folder: Path, state: dict, ranks: int) -> tuple[Step, dict]:
    """A run that starts from a state, makes one step and leaves the next state."""
    data, parts, states = opened(folder), [], []
    for rank in range(ranks):
        sampler = plan(rank, ranks).sampler(data, 0).restored(state)
        batches = iter(Loader(data, plan(rank, ranks), consumed=sampler.consumed, prefetch=1))
        parts.append([(batch.samples.tolist(), batch.rows.text.tobytes()) for batch in next(batches)])
        batches.close()
        states.append(sampler.state(1))
    assert all(other == states[0] for other in states)
    return joined(parts), json.loads(json.dumps(states[0]))


@pytest.mark.parametrize("steps", [50, LONG])
def test_resumed_at_every_step_on_other_ranks(folder, steps):
    expected = uninterrupted(folder, steps)
    assert len({text for _, text in expected}) == steps
    numbers = sorted(number for step, _ in expected for number in step)
    assert numbers == list(range(len(numbers)))  # nothing twice, nothing left out
    draw, state, used = random.Random(steps), plan(0, 1).sampler(opened(folder), 0).state(), set()
    for number, step in enumerate(expected):
        ranks = draw.choice(RANKS)
        used.add(ranks)
        found, state = one_step(folder, state, ranks)
        assert found == step, f"step {number} on {ranks} ranks"
    assert used == set(RANKS)
    assert state["consumed_samples"] == len(numbers)


def from_workers(folder: Path, state: dict, *, ranks: int, workers: int, steps: int) -> list[Step]:
    """The same through torch's DataLoader: its workers read, the sampler's numbers decide."""
    from torch.utils.data import DataLoader

    data, parts = opened(folder), []
    for rank in range(ranks):
        sampler = plan(rank, ranks).sampler(data, 0).restored(state)
        ahead = iter(sampler)
        numbers = [next(ahead).tolist() for _ in range(steps)]
        loader = DataLoader(data, batch_sampler=[rows for step in numbers for rows in step], num_workers=workers)
        batches = iter(loader)
        mine = []
        for step in numbers:
            read = [next(batches) for _ in step]
            texts = [np.concatenate([b["tokens"].numpy(), b["labels"].numpy()[:, -1:]], axis=1) for b in read]
            mine.append([(rows, text.tobytes()) for rows, text in zip(step, texts, strict=True)])
        parts.append(mine)
    return [joined([mine[i] for mine in parts]) for i in range(steps)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("steps", [100, LONG])
def test_any_number_of_loader_workers_reads_the_same(folder, steps):
    pytest.importorskip("torch")
    expected = uninterrupted(folder, steps)
    sampler, draw = plan(0, 1).sampler(opened(folder), 0), random.Random(steps)
    # Quick: 0, 4 and 8 workers once, resumed somewhere on one rank; long: at every tenth step, numbers in turn.
    quick = steps == 100
    at = [draw.randrange(steps - 3) for _ in range(3)] if quick else range(0, steps - 3, 10)
    for turn, number in enumerate(at):
        ranks, workers = (1, 4 * turn) if quick else (draw.choice((1, 2, 3)), turn % 9)
        found = from_workers(folder, sampler.state(number), ranks=ranks, workers=workers, steps=1 + turn % 3)
        assert found == expected[number : number + len(found)], f"step {number} with {workers} workers"


@pytest.mark.parametrize("sizes", [by_steps("0:192"), by_steps("0:192 1920:384 5760:576"), SIZES])
def test_one_global_order_for_any_number_of_ranks(folder, sizes):
    data, steps = opened(folder), 40
    orders = {}
    for ranks in (1, 2, 3, 8, 64):
        if any(size % ranks for size in sizes.sizes):
            with pytest.raises(mdata.UsageError, match=f"is not a multiple of microbatch 1 x {ranks} ranks"):
                plan(0, ranks, sizes).sampler(data, 0)
            continue
        samplers = [iter(plan(rank, ranks, sizes).sampler(data, 0)) for rank in range(ranks)]
        orders[ranks] = [
            [n for rows in zip(*(next(s).tolist() for s in samplers), strict=True) for row in rows for n in row]
            for _ in range(steps)
        ]
    assert len(orders) >= 4
    assert all(order == orders[1] for order in orders.values())


@pytest.mark.parametrize("field", ["data_id", "seed", "consumed_samples"])
def test_the_state_of_another_stream_is_refused_by_field(folder, field):
    sampler = plan(0, 1).sampler(opened(folder), 0)
    state = sampler.state(5)
    assert len(state) == 3
    assert sampler.restored(state).consumed == state["consumed_samples"]
    with pytest.raises(mdata.UsageError, match=field):
        sampler.restored({**state, field: "another"})
