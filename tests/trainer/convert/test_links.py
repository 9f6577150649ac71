"""Links read in both directions, any rectangle, against their slow twin: whole tensors, reshaped and transposed."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.trainer.convert.coverage import covers_exactly
from trainer.convert.links import Linked, TensorInfo, link
from trainer.convert.model_folder import boxes
from trainer.convert.safetensors_stream import split_by_size


class Held:
    """A source of tensors in memory."""

    def __init__(self, tensors):
        self.held = tensors
        self.tensors = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def read(self, name, box):
        return self.held[name][tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]


def twin(one, theirs):
    """Our whole tensor from their whole tensors, 0 where the link says nothing."""
    out = torch.zeros([f.extent for dim in one.ours.dims for f in dim], dtype=torch.int64)
    found = theirs[one.theirs.tensor].reshape([f.extent for dim in one.theirs.dims for f in dim])
    found = found[tuple(slice(f.first, f.first + f.length) for dim in one.theirs.dims for f in dim)]
    ours, names = one.ours.axes(), one.theirs.axes()
    extra = [axis for axis in names if axis not in ours]
    found = found.permute([names.index(axis) for axis in ours if axis in names] + [names.index(a) for a in extra])
    found = found.reshape([f.length for dim in one.ours.dims for f in dim])
    out[tuple(slice(f.first, f.first + f.length) for dim in one.ours.dims for f in dim)] = found
    return out.reshape(one.ours.shape)


@st.composite
def links(draw):
    """A link of random axes in random order on both sides, and an axis of one side only on each."""
    axes = draw(st.lists(st.sampled_from("abcd"), unique=True, min_size=1, max_size=4))
    lengths = {axis: draw(st.integers(1, 3)) for axis in axes}

    def notation(alone):
        order = draw(st.permutations([*axes, alone]))
        words, rest = [], list(order)
        while rest:
            count = draw(st.integers(1, len(rest)))
            words.append("(" + " ".join(rest[:count]) + ")" if count > 1 else rest[0])
            rest = rest[count:]
        inside = {}
        for axis in order:
            before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
            inside[axis] = (before, before + lengths.get(axis, 1) + after)
        return " ".join(words), inside

    (ours, ours_in), (theirs, theirs_in) = notation("x"), notation("y")
    return link(("ours", ours), ("theirs", theirs), lengths=lengths, ours_in=ours_in, theirs_in=theirs_in)


@st.composite
def rectangles_of(draw, shape):
    box = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple(a for a, _ in box), tuple(b - a for a, b in box)


@examples(300)
@given(st.data())
def test_every_rectangle_is_that_of_the_whole_tensor(data):
    one = data.draw(links())
    theirs = torch.arange(1, 1 + math.prod(one.theirs.shape)).reshape(one.theirs.shape)
    expected = twin(one, {"theirs": theirs})
    start, size = data.draw(rectangles_of(one.ours.shape))
    found = Linked(Held({"theirs": theirs}), [one]).read("ours", (start, size))
    assert torch.equal(found, expected[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))])


@examples(100)
@given(links())
def test_there_and_back_is_the_identity_inside_the_box(one):
    ours = torch.arange(1, 1 + math.prod(one.ours.shape)).reshape(one.ours.shape)
    there = Linked(Held({"ours": ours}), [one.flipped()])
    whole = (tuple(0 for _ in one.theirs.shape), one.theirs.shape)
    back = Linked(Held({"theirs": there.read("theirs", whole)}), [one])
    found = back.read("ours", (tuple(0 for _ in one.ours.shape), one.ours.shape))
    assert torch.equal(found, torch.where(found > 0, ours, 0))
    assert int((found > 0).sum()) == math.prod(f.length for dim in one.ours.dims for f in dim)


def test_a_table_that_leaves_a_row_out_or_names_one_twice_is_seen():
    halves = [
        link(("w", "(half row)"), (name, "row"), lengths={"row": 3}, ours_in={"half": (i, 2)})
        for i, name in enumerate("ab")
    ]
    assert covers_exactly(halves)
    assert not covers_exactly(halves[:1])
    assert not covers_exactly([*halves, halves[0]])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 200))
def test_pieces_of_a_tensor_are_whole_rows_in_order_within_the_limit(shape, limit):
    row = 4 * math.prod(shape[1:])
    at = 0
    for start, size in boxes(TensorInfo(tuple(shape), torch.float32), torch.float32, limit=limit):
        assert start == (at, *(0 for _ in shape[1:])) and size[1:] == tuple(shape[1:])
        assert size[0] * row <= max(limit, row)
        at += size[0]
    assert at == shape[0]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 400))
def test_files_keep_the_order_and_the_limit(sizes, limit):
    entries = {f"t{i}": TensorInfo((size,), torch.float32) for i, size in enumerate(sizes)}
    files = split_by_size(entries, limit)
    assert [name for file in files for name in file] == list(entries)
    assert all(len(file) == 1 or sum(4 * info.shape[0] for info in file.values()) <= limit for file in files)
