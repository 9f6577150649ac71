"""The parameter table: every element of every logical tensor is held, and once per copy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.shapes import GPT2, SHAPES
from trainer.models.gpt.model import build_gpt
from trainer.models.gpt.params import num_parameters, parameter_table
from trainer.parallel import init
from trainer.parallel.collectives import Group
from trainer.parallel.params import ParamSpec, Piece, Place, slices, vocabulary_range


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_ranks_together_hold_every_logical_element(name, tp):
    shape = replace(SHAPES[name], num_kv_heads=4, padded_vocab_size=512)
    held: dict[str, np.ndarray] = {}
    for rank in range(tp):
        for spec in parameter_table(shape, Place(tp_size=tp, tp_rank=rank)):
            for piece in spec.pieces:
                count = held.setdefault(piece.name, np.zeros(piece.shape, int))
                count[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))] += 1
    copied = {p.name for s in parameter_table(shape, Place(tp_size=tp)) if "tp" in s.copies for p in s.pieces}
    for logical, count in held.items():
        assert (count == (tp if logical in copied else 1)).all(), logical
    assert sum(c.size for c in held.values()) == num_parameters(shape)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_the_model_has_exactly_the_tables_parameters(name, tp):
    model = build_gpt(
        SHAPES[name],
        Place(tp_size=tp, tp_rank=tp - 1),
        groups={"tp": Group("tp", tp, tp - 1)},
        dtype=torch.float32,
        device=torch.device("meta"),
    )
    table = parameter_table(SHAPES[name], Place(tp_size=tp, tp_rank=tp - 1))
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {s.name: s.shape for s in table}


def test_number_of_parameters_by_hand():
    # GPT-2's form with a feed-forward of 2 D. A block: four D x D and two D x 2D matrices; biases of 3 D + D and
    # 2 D + D; two norms of 2 D. Beside the blocks: tied embedding, positions, the last norm.
    d = GPT2.hidden_size
    block = 4 * d * d + 2 * d * 2 * d + 4 * d + 3 * d + 2 * 2 * d
    assert num_parameters(GPT2) == 250 * d + 16 * d + GPT2.num_layers * block + 2 * d


def test_padding_rows_belong_to_nobody():
    assert [vocabulary_range(120, 512, tp_size=4, tp_rank=r) for r in range(4)] == [(0, 120)] + [(120, 120)] * 3


@st.composite
def _spec_and_range(draw):
    """Rectangles of one to three dims, one after the other, then padding; and a range of the flat parameter."""
    pieces, offset = [], 0
    for i in range(draw(st.integers(1, 3))):
        size = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
        start = tuple(draw(st.integers(0, 2)) for _ in size)
        shape = tuple(a + n + draw(st.integers(0, 2)) for a, n in zip(start, size, strict=True))
        pieces.append(Piece(name=f"t{i}", shape=shape, start=start, size=size, offset=offset))
        offset += math.prod(size)
    shape = (offset + draw(st.integers(0, 5)),)
    spec = ParamSpec(name="p", shape=shape, pieces=tuple(pieces), std=0.5, decay=False, block=0)
    stop = draw(st.integers(0, spec.numel))
    return spec, draw(st.integers(0, stop)), stop


@given(_spec_and_range())
def test_slices_cover_a_flat_range_element_by_element(case):
    """Twin: walk every element and ask which logical element it is."""
    spec, first, stop = case
    expected = {}
    for piece in spec.pieces:
        for flat, index in enumerate(np.ndindex(*piece.size), start=piece.offset):
            if first <= flat < stop:
                expected[flat] = (piece.name, tuple(a + b for a, b in zip(piece.start, index, strict=True)))
    got = {}
    for part in slices(spec, first=first, stop=stop):
        for flat, index in enumerate(np.ndindex(*part.size), start=part.flat):
            assert flat not in got
            got[flat] = (part.name, tuple(a + b for a, b in zip(part.start, index, strict=True)))
    assert got == expected


@given(_spec_and_range(), st.integers(1, 3))
def test_first_values_of_a_range_are_those_of_the_whole_tensors(case, threads):
    spec, first, stop = case
    target = torch.full((stop - first,), torch.nan, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "_CHUNK_ELEMENTS", 3)
        init.initialize_([init.ElementRange(spec, first, stop, target)], seed=4, threads=threads)
    expected = torch.zeros(spec.numel, dtype=torch.float64)
    for piece in spec.pieces:
        whole = init.normal(4, piece.name, first=0, count=math.prod(piece.shape)).view(piece.shape)
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
        expected[piece.offset : piece.offset + math.prod(piece.size)] = whole[box].reshape(-1) * spec.std
    assert torch.equal(target, expected[first:stop])


@given(st.integers(1, 200), st.integers(1, 40))
def test_stages_share_the_blocks_in_order_and_evenly(layers, stages):
    stages = min(layers, stages)
    blocks = [Place(stage=i, num_stages=stages).blocks(layers) for i in range(stages)]
    assert [block for part in blocks for block in part] == list(range(layers))
    counts = [len(part) for part in blocks]
    assert max(counts) - min(counts) <= 1 and counts[-1] == min(counts)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_the_stages_of_a_model_are_the_whole_model(name, stages):
    """Parameters of uneven stages add up to the model's: of a tied embedding both ends hold a copy."""
    shape = replace(SHAPES[name], num_layers=7)
    whole = {spec.name: spec for spec in parameter_table(shape, Place())}
    held: dict[str, int] = {}
    for stage in range(stages):
        place = Place(stage=stage, num_stages=stages)
        model = build_gpt(
            shape, place, groups={"tp": Group.single("tp")}, dtype=torch.float32, device=torch.device("meta")
        )
        table = parameter_table(shape, place)
        assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {s.name: s.shape for s in table}
        for spec in table:
            held[spec.name] = held.get(spec.name, 0) + 1
            one = whole[spec.name]
            assert replace(spec, copies=one.copies, partial=(), block=one.block, again=one.again) == one
            assert spec.partial == (("ends",) if "ends" in spec.copies else ())
    tied = shape.tie_embeddings and stages > 1
    assert held == {name: 2 if tied and name == "embedding.weight" else 1 for name in whole}
