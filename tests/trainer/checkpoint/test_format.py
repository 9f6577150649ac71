"""An index is what its writer wrote, or it is refused by name: every byte, every type, every size, every rectangle."""

from __future__ import annotations

import itertools
import json
import math
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.format import (
    Index,
    IndexFault,
    RunState,
    SavedFile,
    SavedSlice,
    SavedTensor,
    dump_index,
    parse_index,
    slice_key,
    tiles_exactly,
)

HASH = "0" * 64
FILES = {f"rank-0000{rank}.safetensors": SavedFile(1000, HASH) for rank in (0, 1)}


def small_index() -> Index:
    """Two tensors over two files: a matrix in four parts, a vector whole."""
    first, second = FILES
    parts = [((0, 0), (1, 4)), ((1, 0), (2, 3)), ((1, 3), (2, 1)), ((3, 0), (2, 4))]
    name = "weight/a.weight"
    slices = [
        SavedSlice(file, slice_key(name, start), start, size, HASH)
        for file, (start, size) in zip((first, first, second, second), parts, strict=True)
    ]
    vector = SavedSlice(first, "weight/norm@0", (0,), (4,), HASH)
    run = RunState(7, 28, "id", {"seed": 1}, 6, "x = 1\n", {"loss": 2.5})
    tensors = {name: SavedTensor((5, 4), tuple(slices)), "weight/norm": SavedTensor((4,), (vector,))}
    return Index(run, FILES, tensors, hashed=True)


def unhashed(index: bytes) -> dict[str, Any]:
    """The same as an older version wrote it: no checksum, no hashes, no measured values."""
    value = json.loads(index)
    del value["checksum"], value["headers"], value["run"]["measured"], value["run"]["scaler"]
    for tensor in value["tensors"].values():
        for piece in tensor["slices"]:
            del piece["hash"]
    return value


def test_what_is_written_is_read() -> None:
    assert parse_index(dump_index(small_index())) == small_index()


def test_an_index_of_an_older_version_is_read_without_hashes() -> None:
    found = parse_index(json.dumps(unhashed(dump_index(small_index()))).encode())
    assert not found.hashed and found.run.measured == {}
    assert found.files == {name: SavedFile(1000) for name in FILES}
    assert [piece.hash for tensor in found.tensors.values() for piece in tensor.slices] == [None] * 5


def test_every_byte_counts() -> None:
    """One flipped bit anywhere, white space included; and every shorter file."""
    whole = dump_index(small_index())
    for place in range(len(whole)):
        with pytest.raises(IndexFault):
            parse_index(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(IndexFault):
            parse_index(whole[:place])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value, but for what a run says of its own data and measurements, which may be anything."""
    if path[:2] in (("run", "data"), ("run", "measured")) and len(path) > 2:
        return []
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in below for place in places(item, (*path, key)))]


OLD = unhashed(dump_index(small_index()))
OTHERS = [
    None,
    True,
    -1,
    0,
    1,
    3,
    1 << 63,
    1 << 64,
    1.5,
    math.nan,
    "",
    "x",
    "../x",
    "/etc/passwd",
    [],
    [[]],
    {},
    {"x": 1},
]
DELETED, TWICE = object(), object()


def changed(path: tuple[Any, ...], other: Any) -> Any:
    """The small index of an older version with another value, or none, at one place; a list's item may stand twice."""
    if not path:
        return other
    value = deepcopy(OLD)
    *way, last = path
    inside = value
    for key in way:
        inside = inside[key]
    if other is DELETED:
        del inside[last]
    elif other is TWICE:
        inside.insert(last, inside[last])
    else:
        inside[last] = other
    return value


MAY_VARY = {("run", key) for key in ("step", "consumed_samples", "optimizer_steps", "data_id", "config", "data")}


@pytest.mark.parametrize("path", places(OLD), ids=lambda path: "/".join(map(str, path)) or "all")
def test_whatever_is_changed_is_refused_or_means_something(path: tuple[Any, ...]) -> None:
    """There is no checksum: the rules alone decide. What is taken is a whole checkpoint all the same."""
    others = [*OTHERS, *([DELETED] if path else []), *([TWICE] if path and isinstance(path[-1], int) else [])]
    for other in others:
        value = changed(path, other)
        try:
            index = parse_index(json.dumps(value).encode())
        except IndexFault as fault:
            assert fault.shown.isascii() and len(fault.shown) <= 120
            continue
        if value == OLD:
            continue
        # Without a checksum counters and free text may have other values, a file another size, and a tensor may be
        # gone, which whoever loads it misses; nothing else.
        free = path[:2] in MAY_VARY or path[0] == "files" or (path[0] == "tensors" and len(path) < 3)
        assert free, path
        run = index.run
        assert 1 <= run.step <= run.consumed_samples < 1 << 63 and 0 <= run.optimizer_steps <= run.step
        assert all(8 <= file.bytes < 1 << 63 for file in index.files.values())


@pytest.mark.parametrize(
    "name", ["../rank-00000.safetensors", "/rank-00000.safetensors", "rank-1.safetensors", "", "."]
)
def test_a_file_has_a_name_of_ours(name: str) -> None:
    value = deepcopy(OLD)
    value["files"][name] = 1000
    with pytest.raises(IndexFault, match="files"):
        parse_index(json.dumps(value).encode())


def test_a_slice_in_a_file_that_the_index_does_not_list_is_refused() -> None:
    """A name of ours, and maybe a file that is there: of another checkpoint, and of no known size."""
    value = deepcopy(OLD)
    value["tensors"]["weight/norm"]["slices"][0]["file"] = "rank-00002.safetensors"
    with pytest.raises(IndexFault) as caught:
        parse_index(json.dumps(value).encode())
    assert caught.value.expected == "one of the files that the index lists"


@pytest.mark.parametrize("start", [1, 3, 4, 1 << 62])
def test_a_slice_beyond_its_tensor_is_refused(start: int) -> None:
    """As many elements as there should be, under the key that belongs to the place."""
    value = deepcopy(OLD)
    value["tensors"]["weight/norm"]["slices"][0] |= {"start": [start], "key": f"weight/norm@{start}"}
    with pytest.raises(IndexFault) as caught:
        parse_index(json.dumps(value).encode())
    assert caught.value.expected == "a part of shape [4]"


@pytest.mark.parametrize("step", [0, -1])
def test_a_run_without_a_step_has_no_checkpoint(step: int) -> None:
    value = deepcopy(OLD)
    value["run"] |= {"step": step, "consumed_samples": 0, "optimizer_steps": 0}
    with pytest.raises(IndexFault) as caught:
        parse_index(json.dumps(value).encode())
    assert caught.value.place == "run/step"


def test_a_slice_that_stands_in_two_places_is_refused() -> None:
    """A second rectangle in the place of its neighbour: as many elements as there should be, but not the same ones."""
    value = deepcopy(OLD)
    slices = value["tensors"]["weight/a.weight"]["slices"]
    slices[3] |= {"start": [2, 0], "key": "weight/a.weight@2,0"}
    with pytest.raises(IndexFault, match="exactly once"):
        parse_index(json.dumps(value).encode())


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 30_000, "a = " + "{a=" * 2000 + "1" + "}" * 2000, "a = " + "9" * 5000, "x"]
)
def test_a_configuration_that_is_none_is_named(text: str) -> None:
    with pytest.raises(IndexFault) as caught:
        parse_index(json.dumps(changed(("run", "config"), text)).encode())
    assert (caught.value.place, caught.value.expected) == ("run/config", "TOML")


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"{}", b"[]", b"\xff\xfe", b"", b"1" * 5000, b'{"format": "other"}'])
def test_what_is_no_index_at_all_is_refused(raw: bytes) -> None:
    with pytest.raises(IndexFault, match=r"JSON|mtrain-checkpoint version 1"):
        parse_index(raw)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape and rectangles that cover it exactly once: cut again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(1, max(1, size[dim] - 1)))
        low = tuple(cut if d == dim else n for d, n in enumerate(size))
        rest = tuple(n - cut if d == dim else n for d, n in enumerate(size))
        boxes += [(start, low)]
        if rest[dim]:
            boxes += [(tuple(a + cut if d == dim else a for d, a in enumerate(start)), rest)]
    return shape, boxes


@given(tilings(), st.data())
def test_tiles_exactly_equals_its_twin(tiling: Any, data: st.DataObject) -> None:
    """Twin: count how often every element is covered. Exact tilings, and some with one rectangle moved or resized."""
    shape, boxes = tiling
    assert tiles_exactly(shape, data.draw(st.permutations(boxes)))
    number = data.draw(st.integers(0, len(boxes) - 1))
    size = tuple(data.draw(st.integers(1, n)) for n in shape)
    start = tuple(data.draw(st.integers(0, n - m)) for n, m in zip(shape, size, strict=True))
    others = [*boxes[:number], (start, size), *boxes[number + 1 :]]
    covered: dict[tuple[int, ...], int] = {}
    for low, extent in others:
        for place in itertools.product(*(range(a, a + n) for a, n in zip(low, extent, strict=True))):
            covered[place] = covered.get(place, 0) + 1
    once = len(covered) == math.prod(shape) and set(covered.values()) == {1}
    assert tiles_exactly(shape, others) == once


@pytest.mark.parametrize(
    "scaler", [{"scale": 1.0}, {"scale": "x", "good_steps": 0.0, "hysteresis": 2.0}, {"scale": 1.0, "other": 2.0}]
)
def test_a_loss_scale_has_all_its_numbers(scaler: dict[str, Any]) -> None:
    value = deepcopy(OLD)
    value["run"]["scaler"] = scaler
    with pytest.raises(IndexFault, match="run/scaler"):
        parse_index(json.dumps(value).encode())
    value["run"]["scaler"] = {"scale": 8.0, "good_steps": 3.0, "hysteresis": 1.0}
    assert parse_index(json.dumps(value).encode()).run.scaler["scale"] == 8.0
