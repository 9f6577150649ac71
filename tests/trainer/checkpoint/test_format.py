"""An index is what its writer wrote, or it is refused by name: every byte, every type, every size, every rectangle."""

from __future__ import annotations

import itertools
import json
import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.checkpoint.version_1 import dump_1, parse_1, unhashed_1
from trainer.checkpoint.format import (
    HashedFile,
    Index,
    Part,
    RunState,
    SavedFile,
    SavedSlice,
    SavedTensor,
    dump_index,
    dump_part,
    parse_index,
    parse_part,
    slice_key,
)
from trainer.checkpoint.index_fields import IndexFault
from trainer.checkpoint.tiling import cut, tiles_exactly

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
    return Index(run, FILES, tensors, hashed=True, version=1)


def test_what_is_written_is_read():
    assert parse_1(dump_1(small_index())) == small_index()


def test_an_index_of_an_older_version_is_read_without_hashes():
    found = parse_1(json.dumps(unhashed_1(dump_1(small_index()))).encode())
    assert not found.hashed and found.run.measured == {}
    assert found.files == {name: SavedFile(1000) for name in FILES}
    assert [piece.hash for tensor in found.tensors.values() for piece in tensor.slices] == [None] * 5


def test_every_byte_counts():
    """One flipped bit anywhere, white space included; and every shorter file."""
    whole = dump_1(small_index())
    for place in range(len(whole)):
        with pytest.raises(IndexFault):
            parse_1(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(IndexFault):
            parse_1(whole[:place])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value, but for what a run says of its own data and measurements, which may be anything."""
    if path[:2] in (("run", "data"), ("run", "measured")) and len(path) > 2:
        return []
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in below for place in places(item, (*path, key)))]


OLD = unhashed_1(dump_1(small_index()))
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


COUNTERS = ("step", "consumed_samples", "skipped_samples", "optimizer_steps")
BEFORE = ("schedule_steps", "schedule_samples", "moment_steps")  # of checkpoint.init_from
MAY_VARY = {("run", key) for key in (*COUNTERS, *BEFORE, "data_id", "config", "data", "float8", "spikes", "base")}


@pytest.mark.parametrize("path", places(OLD), ids=lambda path: "/".join(map(str, path)) or "all")
def test_whatever_is_changed_is_refused_or_means_something(path):
    """There is no checksum: the rules alone decide. What is taken is a whole checkpoint all the same."""
    others = [*OTHERS, *([DELETED] if path else []), *([TWICE] if path and isinstance(path[-1], int) else [])]
    for other in others:
        value = changed(path, other)
        try:
            index = parse_1(json.dumps(value).encode())
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
        assert 1 <= run.step <= run.consumed_samples < 1 << 63
        assert 0 <= run.optimizer_steps - run.moment_steps <= run.step and run.optimizer_steps >= 0
        assert run.step + run.schedule_steps >= 0 and run.consumed_samples + run.schedule_samples >= 0
        assert 0 <= run.skipped_samples <= run.consumed_samples
        assert all(8 <= file.bytes < 1 << 63 for file in index.files.values())


@pytest.mark.parametrize(
    "name", ["../rank-00000.safetensors", "/rank-00000.safetensors", "rank-1.safetensors", "", "."]
)
def test_a_file_has_a_name_of_ours(name):
    value = deepcopy(OLD)
    value["files"][name] = 1000
    with pytest.raises(IndexFault, match="files"):
        parse_1(json.dumps(value).encode())


def test_a_slice_in_a_file_that_the_index_does_not_list_is_refused():
    """A name of ours, and maybe a file that is there: of another checkpoint, and of no known size."""
    value = deepcopy(OLD)
    value["tensors"]["weight/norm"]["slices"][0]["file"] = "rank-00002.safetensors"
    with pytest.raises(IndexFault) as caught:
        parse_1(json.dumps(value).encode())
    assert caught.value.expected == "one of the files that the index lists"


@pytest.mark.parametrize("start", [1, 3, 4, 1 << 62])
def test_a_slice_beyond_its_tensor_is_refused(start):
    """As many elements as there should be, under the key that belongs to the place."""
    value = deepcopy(OLD)
    value["tensors"]["weight/norm"]["slices"][0] |= {"start": [start], "key": f"weight/norm@{start}"}
    with pytest.raises(IndexFault) as caught:
        parse_1(json.dumps(value).encode())
    assert caught.value.expected == "a part of shape [4]"


@pytest.mark.parametrize("step", [0, -1])
def test_a_run_without_a_step_has_no_checkpoint(step):
    value = deepcopy(OLD)
    value["run"] |= {"step": step, "consumed_samples": 0, "optimizer_steps": 0}
    with pytest.raises(IndexFault) as caught:
        parse_1(json.dumps(value).encode())
    assert caught.value.place == "run/step"


def test_a_slice_that_stands_in_two_places_is_refused():
    """A second rectangle in the place of its neighbour: as many elements as there should be, but not the same ones."""
    value = deepcopy(OLD)
    slices = value["tensors"]["weight/a.weight"]["slices"]
    slices[3] |= {"start": [2, 0], "key": "weight/a.weight@2,0"}
    with pytest.raises(IndexFault, match="exactly once"):
        parse_1(json.dumps(value).encode())


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 30_000, "a = " + "{a=" * 2000 + "1" + "}" * 2000, "a = " + "9" * 5000, "x"]
)
def test_a_configuration_that_is_none_is_named(text):
    with pytest.raises(IndexFault) as caught:
        parse_1(json.dumps(changed(("run", "config"), text)).encode())
    assert (caught.value.place, caught.value.expected) == ("run/config", "TOML")


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"{}", b"[]", b"\xff\xfe", b"", b"1" * 5000, b'{"format": "other"}'])
def test_what_is_no_index_at_all_is_refused(raw):
    with pytest.raises(IndexFault, match=r"JSON|mtrain-checkpoint version 2"):
        parse_1(raw)


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
def test_tiles_exactly_equals_its_twin(tiling, data):
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


def test_slices_along_many_dims_do_not_take_work_for_each_corner():
    """2^32 corners for a tensor that a file says has 32 dims."""
    for dims, expected in ((3, True), (9, False), (32, False)):
        halves = [((0,) * dims, (1,) + (2,) * (dims - 1)), ((1,) + (0,) * (dims - 1), (1,) + (2,) * (dims - 1))]
        corner = ((0,) * dims, (1,) * dims)
        assert tiles_exactly((2,) * dims, halves)
        assert not tiles_exactly((2,) * dims, [corner, corner])
        units = [(start, (1,) * dims) for start in itertools.product((0, 1), repeat=dims)] if dims < 10 else [corner]
        assert tiles_exactly((2,) * dims, units) == expected


def test_many_slices_side_by_side_and_one_above_the_other_are_compared_in_one_pass():
    """A comb: a check that looks at all teeth for each step would take minutes."""
    teeth = 50_000
    boxes = [((0, tooth), (teeth, 1)) for tooth in range(teeth)] + [((step, teeth), (1, 1)) for step in range(teeth)]
    assert tiles_exactly((teeth, teeth + 1), boxes)
    assert not tiles_exactly((teeth, teeth + 1), [*boxes[:-1], ((0, teeth), (1, 1))])


@pytest.mark.parametrize(
    "scaler", [{"scale": 1.0}, {"scale": "x", "good_steps": 0.0, "hysteresis": 2.0}, {"scale": 1.0, "other": 2.0}]
)
def test_a_loss_scale_has_all_its_numbers(scaler):
    value = deepcopy(OLD)
    value["run"]["scaler"] = scaler
    with pytest.raises(IndexFault, match="run/scaler"):
        parse_1(json.dumps(value).encode())
    value["run"]["scaler"] = {"scale": 8.0, "good_steps": 3.0, "hysteresis": 1.0}
    assert parse_1(json.dumps(value).encode()).run.scaler["scale"] == 8.0


def small_parts() -> dict[str, Part]:
    """The same two tensors as two ranks store them in version 2."""
    tensors: dict[str, dict[str, SavedTensor]] = {name: {} for name in FILES}
    for name, tensor in small_index().tensors.items():
        for piece in tensor.slices:
            before = tensors[piece.file].get(name, SavedTensor(tensor.shape, (), "F32"))
            tensors[piece.file][name] = SavedTensor(tensor.shape, (*before.slices, piece), "F32")
    return {file.replace(".safetensors", ".json"): Part(SavedFile(1000, HASH), part) for file, part in tensors.items()}


def written(parts: dict[str, bytes]) -> bytes:
    files = {name: HashedFile(len(content), blake3(content).hexdigest()) for name, content in parts.items()}
    return dump_index(small_index().run, files, extras={"tokenizer/vocab.json": HashedFile(3, HASH)})


def test_an_index_and_its_parts_are_read():
    parts = {name: dump_part(part) for name, part in small_parts().items()}
    index = parse_index(written(parts), parts.__getitem__)
    assert index.run == small_index().run and index.files == FILES and index.version == 2
    assert list(index.parts) == list(parts) and list(index.extras) == ["tokenizer/vocab.json"]
    for name, tensor in small_index().tensors.items():
        assert index.tensors[name] == SavedTensor(tensor.shape, tensor.slices, "F32")


def test_every_byte_of_an_index_and_of_its_parts_counts():
    parts = {name: dump_part(part) for name, part in small_parts().items()}
    whole = written(parts)
    for place in range(len(whole)):
        for other in (whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :], whole[:place]):
            with pytest.raises(IndexFault):
                parse_index(other, parts.__getitem__)
    for name, content in parts.items():
        for place in range(len(content)):
            flipped = content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
            with pytest.raises(IndexFault) as caught:
                parse_index(whole, {**parts, name: flipped}.__getitem__)
            assert caught.value.place == name


PART = "rank-00000.json"


@pytest.mark.parametrize("path", places(json.loads(dump_part(small_parts()[PART]))), ids=str)
def test_whatever_is_changed_in_a_part_is_refused_or_means_something(path):
    """As if its hash had been made to fit: the rules alone decide."""
    for other in [*OTHERS, DELETED]:
        if other is DELETED and not path:
            continue
        value = json.loads(dump_part(small_parts()[PART]))
        inside: Any = {"": value}
        *way, last = ("", *path)
        for key in way:
            inside = inside[key]
        if other is DELETED:
            del inside[last]
        else:
            inside[last] = other
        if path == ():
            value = other
        if isinstance(value, dict) and value == json.loads(dump_part(small_parts()[PART])):
            continue
        parts = {name: dump_part(part) for name, part in small_parts().items()} | {PART: json.dumps(value).encode()}
        try:
            index = parse_index(written(parts), parts.__getitem__)
        except IndexFault as fault:
            assert fault.shown.isascii()
            continue
        assert path[0] == "bytes" or path[0] == "tensors", path
        assert all(8 <= file.bytes < 1 << 63 for file in index.files.values())


@pytest.mark.parametrize("name", ["../x", "/x", "tokenizer/../x", "tokenizer/.x", ".hidden", "tokenizer/a/b", ""])
def test_names_stay_inside_the_folder(name):
    for parts, extras in (({name: HashedFile(1, HASH)}, {}), ({}, {name: HashedFile(1, HASH)})):
        with pytest.raises(IndexFault, match=r"parts|extras"):
            parse_index(dump_index(small_index().run, parts, extras=extras), lambda name: b"")


def test_parts_of_another_shape_or_type_do_not_go_together():
    for other in ({"shape": (6, 4)}, {"dtype": "F16"}):
        parts = small_parts()
        name = "weight/a.weight"
        second = parts["rank-00001.json"]
        changed_tensor = replace(second.tensors[name], **other)
        parts["rank-00001.json"] = replace(second, tensors={name: changed_tensor})
        raw = {key: dump_part(part) for key, part in parts.items()}
        with pytest.raises(IndexFault) as caught:
            parse_index(written(raw), raw.__getitem__)
        assert "as in another part" in caught.value.expected


def test_a_part_says_what_it_is():
    with pytest.raises(IndexFault, match="its keys"):
        parse_part(b"{}", PART)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 40))
def test_a_cut_rectangle_is_covered_in_order(size, most):
    """Each part is contiguous in memory behind the one before it."""
    start = tuple(range(len(size)))
    boxes = list(cut((start, tuple(size)), most))
    places_of = [
        place
        for low, extent in boxes
        for place in itertools.product(*(range(a, a + n) for a, n in zip(low, extent, strict=True)))
    ]
    assert places_of == list(itertools.product(*(range(a, a + n) for a, n in zip(start, size, strict=True))))
    row = math.prod(next((tuple(size[d + 1 :]) for d, n in enumerate(size) if n > 1), ()))
    assert all(math.prod(extent) <= max(most, row) for _, extent in boxes)


@pytest.mark.parametrize("rows", [1.0, [1.0], [[1.0, 2.0]], [[1.0, 2.0, 3]], [[1.0, 2.0, -1.0]], {"a": []}])
def test_the_history_of_fp8_has_three_numbers_a_step(rows):
    value = json.loads(json.dumps(OLD))
    value["run"]["float8"] = {"0.mlp.up": [[1.0, 0.0, 2.0]], "0.mlp.down": rows}
    with pytest.raises(IndexFault, match=r"run/float8/0\.mlp\.down"):
        parse_1(json.dumps(value).encode())
    value["run"]["float8"]["0.mlp.down"] = []
    assert parse_1(json.dumps(value).encode()).run.float8["0.mlp.up"] == [[1.0, 0.0, 2.0]]


SPIKES = {"window": [[2.5, 1]], "waiting": [[7, 2.5, 1.0, False, 0]], "mixture": 0, "in_a_row": 1, "last_above": -16}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("window", [[2.5]]), ("window", [[2.5, None]]), ("waiting", [[7, 2.5]]), ("waiting", 1), ("mixture", 0.5)],
)
def test_the_state_of_the_spike_detector_is_what_it_writes(name, wrong):
    value = json.loads(json.dumps(OLD))
    value["run"]["spikes"] = SPIKES
    assert parse_1(json.dumps(value).encode()).run.spikes == SPIKES
    value["run"]["spikes"] = SPIKES | {name: wrong}
    with pytest.raises(IndexFault, match=f"run/spikes/{name}"):
        parse_1(json.dumps(value).encode())
