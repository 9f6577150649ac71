"""Buffer layouts: no overlaps, one rule per segment, and the ranks of any mesh own every element once."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.trainer.shapes import SHAPES
from trainer.models.gpt.params import parameter_table
from trainer.optim.layout import ALIGNMENT, make_layout
from trainer.optim.ownership import owned_by
from trainer.parallel import buckets
from trainer.parallel.mesh import Mesh
from trainer.parallel.params import ParamSpec, Piece, Place, is_first_copy


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "MIN_BUCKET", 4096)


@pytest.mark.parametrize("data", [1, 2, 3, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_buckets_slots_and_segments_fit_together(name, data):
    specs = parameter_table(SHAPES[name], Place(tp_size=2, tp_rank=1, sequence_parallel=True))
    layout = make_layout(specs, {"data": data, "edp": 1})
    assert sorted(slot.spec.name for slot in layout.slots) == sorted(spec.name for spec in specs)
    assert len(layout.buckets) > 2
    end = 0
    for bucket in layout.buckets:
        assert bucket.start == end and (bucket.stop - bucket.start) % (data * ALIGNMENT) == 0
        assert [s.start for s in bucket.segments] + [bucket.stop] == [end] + [s.stop for s in bucket.segments]
        for slot in bucket.slots:
            assert slot.start >= end and slot.start % ALIGNMENT == 0
            end = slot.start + slot.spec.numel
            (segment,) = (s for s in bucket.segments if s.start <= slot.start < s.stop)
            assert end <= segment.stop
            assert segment.rules == (slot.spec.decay, slot.spec.copies, slot.spec.partial, slot.spec.matrix)
        end = bucket.stop
        runs = [bucket.run(rank) for rank in range(data)]
        assert [a for a, _ in runs] + [bucket.stop] == [bucket.start] + [b for _, b in runs]
    assert end == layout.size


def test_buckets_are_cut_between_blocks_and_the_last_used_come_first():
    specs = parameter_table(replace(SHAPES["llama"], num_layers=6), Place())
    blocks = [[slot.spec.block for slot in b.slots] for b in make_layout(specs, {"data": 2, "edp": 1}).buckets]
    assert all(min(a) > max(b) for a, b in itertools.pairwise(blocks))
    assert [max(b) for b in blocks] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_what_the_ends_of_a_pipeline_share_stands_alone():
    specs = parameter_table(SHAPES["gpt2"], Place(stage=0, num_stages=2))
    *_, last = make_layout(specs, {"data": 2, "edp": 1}).buckets
    assert [slot.spec.name for slot in last.slots] == ["embedding.weight"]


def test_small_blocks_share_a_bucket(monkeypatch):
    monkeypatch.setattr(buckets, "MIN_BUCKET", 1 << 30)
    assert len(make_layout(parameter_table(SHAPES["gpt2"], Place()), {"data": 1, "edp": 1}).buckets) == 1


@st.composite
def _meshes(draw, most=4096):
    """Meshes of up to `most` ranks, or of dp 1; pp of at most 5, for a model of 5 blocks."""
    tp, cp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 5))
    dp = draw(st.integers(1, max(1, min(205, most // (tp * cp * pp)))))
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if (cp * dp) % n == 0]))
    return Mesh(tp * cp * pp * dp, tp, cp=cp, pp=pp, ep=ep)


def _experts(mesh: Mesh, rank: int) -> ParamSpec:
    """A weight of four dims on the first stage: 4 experts, divided over ep, their second dim over tp."""
    ep, tp = mesh.index("ep", rank), mesh.index("tp", rank)
    size = (4 // mesh.ep, 8 // mesh.tp, 3, 5)
    start = (ep * size[0], tp * size[1], 0, 0)
    piece = Piece(name="experts", shape=(4, 8, 3, 5), start=start, size=size)
    return ParamSpec(name="experts", shape=size, pieces=(piece,), std=0.1, decay=True, block=1, shard="edp")


def _specs(mesh: Mesh, rank: int, shape) -> tuple[ParamSpec, ...]:
    at = mesh.coordinates(rank)
    place = Place(tp_rank=at.tp, tp_size=mesh.tp, stage=at.pp, num_stages=mesh.pp, sequence_parallel=True)
    return (*parameter_table(shape, place), *([_experts(mesh, rank)] if at.pp == 0 else []))


@given(_meshes(), st.sampled_from(["gpt2", "llama"]))
@examples(15)
def test_the_runs_of_all_ranks_tile_every_logical_tensor_once(mesh, name):
    """Every element of a tensor has one owner that counts and stores it; and its sums are those of a brute force.

    A gradient is complete when it was summed over all ranks that saw a part: all that hold the element. So the ranks
    that its owner hears (the shard axis, then the axes of partial copies) have to be exactly those, but for copies
    along an axis on which gradients are equal, of which it hears one.
    """
    shape = replace(SHAPES[name], num_layers=5, num_kv_heads=4, padded_vocab_size=512)
    sizes = {axis: mesh.size(axis) for axis in ("data", "edp")}
    counted: dict[str, np.ndarray] = {}
    layouts_of: dict[tuple[int, ...], object] = {}
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        key = (at.tp, at.pp, mesh.index("ep", rank) if at.pp == 0 else 0)
        if key not in layouts_of:
            layouts_of[key] = make_layout(_specs(mesh, rank, shape), sizes)
        owned = owned_by(layouts_of[key], {axis: mesh.index(axis, rank) for axis in sizes})
        last = 0
        for spec, part, first in owned.slices():
            assert first >= last, "runs lie in the state one after the other"
            last = first + math.prod(part.size)
            if is_first_copy(spec.copies, lambda axis, rank=rank: mesh.index(axis, rank)):
                count = counted.setdefault(part.name, np.zeros(part.shape, np.int8))
                count[tuple(slice(a, a + n) for a, n in zip(part.start, part.size, strict=True))] += 1
        assert last <= owned.size
    for tensor, count in counted.items():
        assert (count == 1).all(), tensor
    whole = {piece.name for spec in parameter_table(shape, Place()) for piece in spec.pieces} | {"experts"}
    assert counted.keys() == whole


@given(_meshes(most=64), st.booleans())
@examples(25)
def test_gradients_are_summed_over_all_ranks_that_see_a_part(mesh, sequence_parallel):
    shape = replace(SHAPES["gpt2"], num_layers=5, padded_vocab_size=512)
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, ParamSpec]]] = {}
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        place = Place(
            tp_rank=at.tp, tp_size=mesh.tp, stage=at.pp, num_stages=mesh.pp, sequence_parallel=sequence_parallel
        )
        experts = [_experts(mesh, rank)] if at.pp == 0 else []
        for spec in (*parameter_table(shape, place), *experts):
            for piece in spec.pieces:
                if math.prod(piece.size):  # a rank of padding alone holds none
                    holders.setdefault((piece.name, piece.start), []).append((rank, spec))
    for (name, _), found in holders.items():
        rank, spec = found[0]
        heard = set(mesh.ranks_of(spec.shard, rank))
        for axis in spec.partial:
            heard = {other for one in heard for other in mesh.ranks_of(axis, one)}
        # Brute force: all that hold it see different tokens, but for the ranks of tp without sequence parallelism.
        equal = "tp" in spec.copies and not (sequence_parallel and mesh.tp > 1)
        seen = {other for other, _ in found if not equal or mesh.index("tp", other) == mesh.index("tp", rank)}
        assert heard == seen, name


def test_brute_force_and_layout_disagree_where_a_sum_is_missing():
    """The rule can fail: without `partial` a norm under sequence parallelism hears its own tokens only."""
    mesh = Mesh(2, 2)
    spec = next(s for s in parameter_table(SHAPES["gpt2"], Place(tp_size=2, sequence_parallel=True)) if s.partial)
    assert spec.partial == ("tp",) and len(mesh.ranks_of(spec.shard, 0)) == 1 and len(mesh.ranks_of("tp", 0)) == 2


def test_segments_are_cut_to_the_runs():
    layout = make_layout(parameter_table(SHAPES["gpt2"], Place()), {"data": 3, "edp": 1})
    owners = [owned_by(layout, {"data": rank, "edp": 0}) for rank in range(3)]
    assert len({owned.size for owned in owners}) == 1
    covered = Counter()
    for owned in owners:
        for run, segment in owned.segments():
            assert run.start <= segment.start < segment.stop <= run.stop
            covered[segment.rules] += segment.stop - segment.start
    total = Counter()
    for bucket in layout.buckets:
        for segment in bucket.segments:
            total[segment.rules] += segment.stop - segment.start
    assert covered == total
