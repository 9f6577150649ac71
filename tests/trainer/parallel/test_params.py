"""The parameter table: every element of every logical tensor is held, and once per copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.shapes import GPT2, LLAMA, SHAPES
from trainer.models.gpt import build_gpt
from trainer.models.gpt_params import num_parameters, parameter_table, vocabulary_range
from trainer.parallel.collectives import Axis
from trainer.parallel.params import ParamSpec, Piece, slices


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_ranks_together_hold_every_logical_element(name, tp):
    shape = replace(SHAPES[name], num_kv_heads=4, padded_vocab_size=512)
    held: dict[str, np.ndarray] = {}
    for rank in range(tp):
        for spec in parameter_table(shape, tp_size=tp, tp_rank=rank):
            for piece in spec.pieces:
                count = held.setdefault(piece.name, np.zeros(piece.shape, int))
                count[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))] += 1
    copied = {p.name for s in parameter_table(shape, tp_size=tp, tp_rank=0) if s.over_tp != "split" for p in s.pieces}
    for logical, count in held.items():
        assert (count == (tp if logical in copied else 1)).all(), logical
    assert sum(c.size for c in held.values()) == num_parameters(shape)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_the_model_has_exactly_the_tables_parameters(name, tp):
    model = build_gpt(
        SHAPES[name],
        Axis("tp", tp, tp - 1),
        sequence_parallel=False,
        dtype=torch.float32,
        device=torch.device("meta"),
    )
    table = parameter_table(SHAPES[name], tp_size=tp, tp_rank=tp - 1)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {s.name: s.shape for s in table}


def test_number_of_parameters_by_hand():
    # GPT-2's form with a feed-forward of 2 D. A block: four D x D and two D x 2D matrices; biases of 3 D + D and
    # 2 D + D; two norms of 2 D. Beside the blocks: tied embedding, positions, the last norm.
    d = GPT2.hidden_size
    block = 4 * d * d + 2 * d * 2 * d + 4 * d + 3 * d + 2 * 2 * d
    assert num_parameters(GPT2) == 250 * d + 16 * d + GPT2.num_layers * block + 2 * d


def test_padding_rows_belong_to_nobody():
    shape = replace(LLAMA, vocab_size=120, padded_vocab_size=512)
    assert [vocabulary_range(shape, tp_size=4, tp_rank=r) for r in range(4)] == [(0, 120)] + [(120, 120)] * 3


@st.composite
def _spec_and_range(draw):
    width = draw(st.integers(1, 5))
    pieces, row = [], 0
    for i in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(0, 4))
        shape = (rows + draw(st.integers(0, 2)), width + 3)
        start = (shape[0] - rows, draw(st.integers(0, 3)))
        pieces.append(Piece(name=f"t{i}", shape=shape, start=start, size=(rows, width), row=row))
        row += rows
    spec = ParamSpec(
        name="p",
        shape=(row + draw(st.integers(0, 2)), width),
        pieces=tuple(pieces),
        std=0.0,
        fill=0.0,
        decay=False,
        over_tp="split",
    )
    stop = draw(st.integers(0, spec.numel))
    return spec, draw(st.integers(0, stop)), stop


@given(_spec_and_range())
def test_slices_cover_a_flat_range_element_by_element(case):
    """Twin: walk every element and ask which logical element it is."""
    spec, first, stop = case
    width = spec.shape[1]
    expected = {}
    for flat in range(first, stop):
        row, column = divmod(flat, width)
        for piece in spec.pieces:
            if piece.row <= row < piece.row + piece.size[0]:
                expected[flat] = (piece.name, piece.start[0] + row - piece.row, piece.start[1] + column)
    got = {}
    for part in slices(spec, first=first, stop=stop):
        assert part.size[0] == 1 or part.size[1] == width, "a slice is contiguous in the local parameter"
        for i in range(part.size[0]):
            for j in range(part.size[1]):
                flat = part.flat + i * part.size[1] + j
                assert flat not in got
                got[flat] = (part.name, part.start[0] + i, part.start[1] + j)
    assert got == expected
