"""Damage is found at load and named, and the newest whole checkpoint is offered; saves that fail or die leave it.

The checkpoint is tiny, of two ranks; `-m soak` tries every byte of all of its files.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3

import mdata
from tests.helpers.failures import crash_at, durable_calls
from tests.trainer.checkpoint.test_power_loss import SMALL, resumed, save, shard
from trainer.checkpoint import load as load_module
from trainer.checkpoint.folder import find_checkpoint, read_index, whole_checkpoints
from trainer.checkpoint.format import HashedFile, RunState, dump_index
from trainer.checkpoint.load import find_valid, load_state, verify_checkpoint
from trainer.checkpoint.location import Location
from trainer.checkpoint.rank_file import OwnedState
from trainer.checkpoint.save import Target, check_target, commit, write_part
from trainer.models.gpt.params import parameter_table
from trainer.models.gpt.shape import GPTShape
from trainer.optim.layout import make_layout
from trainer.optim.ownership import everything, owned_by
from trainer.parallel.params import Place


def tiny_save(
    root: Path, step: int, *, shape: GPTShape = SMALL
) -> tuple[Target, list[tuple[OwnedState, dict[str, torch.Tensor]]]]:
    """Where a checkpoint of two ranks with a file of a tokenizer goes, and what each rank stores."""
    run = RunState(step=step, consumed_samples=step, data_id="", data={}, optimizer_steps=step, config="")
    layout = make_layout(parameter_table(shape, Place()), {"data": 2, "edp": 2})
    parts = []
    for rank in (0, 1):
        part = OwnedState({"weight": owned_by(layout, {"data": rank, "edp": rank})}, {"tp": 0})
        parts.append((part, {"weight": torch.arange(part.owned["weight"].size) + 0.5 + step}))
    total = sum(4 * math.prod(one.size) for part, _ in parts for _, one, _ in part.owned["weight"].slices())
    return Target(root, run, "x", {"tokenizer/vocab.json": b"{}"}, total), parts


def save_tiny(root: Path, step: int) -> Path:
    """Such a checkpoint."""
    target, parts = tiny_save(root, step)
    for rank, (part, state) in enumerate(parts):
        write_part(target, rank, shard=part, state=state)
    commit(target, 2)
    return target.root / target.name


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The second of two checkpoints."""
    save_tiny(tmp_path, 2)
    return save_tiny(tmp_path, 4)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def check_found(folder: Location, path: Location) -> None:
    """Loading, comparing and looking for a valid one all see it, and say which file it is and what to do."""
    for look in (lambda: load_state(folder, shard().owned, dtype=torch.float32), lambda: verify_checkpoint(folder)):
        with pytest.raises(mdata.DamageError, match=rf"{path.name} is damaged") as caught:
            look()
        assert re.search("write step-2 into .*checkpoint.load=latest-valid", str(caught.value))
        assert len(str(caught.value).splitlines()) <= 4
    found = find_valid(folder.parent)
    assert found.folder == folder.parent / "step-2" and path.name in (found.warning or "")


@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.soak)])
def test_every_flipped_byte_of_every_file_is_found_and_named(stride, tiny):
    verify_checkpoint(tiny)
    count = 0
    for path in files_of(tiny):
        whole = path.read_bytes()
        for place in sorted({0, *range(path.stat().st_size % stride, len(whole), stride), len(whole) - 1}):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            check_found(tiny, path)
            count += 1
        path.write_bytes(whole)
    verify_checkpoint(tiny)
    print(f"{count} bytes of {len(files_of(tiny))} files")


@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.soak)])
def test_a_file_of_any_other_length_or_none_is_found_and_named(stride, tiny):
    for path in files_of(tiny):
        whole = path.read_bytes()
        for other in (*(whole[:length] for length in range(0, len(whole), stride)), whole[:-1], whole + b"\0"):
            path.write_bytes(other)
            check_found(tiny, path)
        path.unlink()
        if path.name == "index.json":  # then it is no checkpoint, as while it is written
            assert next(whole_checkpoints(tiny.parent)) == tiny.with_name("step-2")
        check_found(tiny, path)
        path.write_bytes(whole)
    verify_checkpoint(tiny)


@pytest.mark.parametrize("name", ["rank-00007.safetensors", "rank-00007.json", "tokenizer/other.json", "index.json.1"])
def test_a_file_of_another_checkpoint_is_found(name, tiny):
    (tiny / "notes.txt").write_text("mine")
    verify_checkpoint(tiny)
    (tiny / name).write_bytes(b"x")
    check_found(tiny, tiny / name)
    with pytest.raises(mdata.DamageError, match="found: a file that the index does not list"):
        read_index(tiny)


@pytest.mark.parametrize("name", ["rank-00001.json", "rank-00001.safetensors", "tokenizer/vocab.json"])
def test_a_file_of_another_save_or_rank_is_found(name, tiny):
    """Of the same size and names as far as can be, with other values."""
    path = tiny / name
    whole = path.read_bytes()
    for other in (tiny.with_name("step-2") / name, tiny / name.replace("00001", "00000")):
        if other.read_bytes() != whole:
            path.write_bytes(other.read_bytes())
            check_found(tiny, path)
    path.write_bytes(whole[::-1])
    check_found(tiny, path)


@pytest.mark.parametrize("every_byte", [True, False])
def test_a_storage_that_fails_is_not_taken_for_damage(every_byte, tiny, monkeypatch):
    def fails(folder: Location) -> None:
        raise mdata.ResourceError("the storage does not answer")

    monkeypatch.setattr(load_module, "verify_checkpoint", fails)
    monkeypatch.setattr(load_module, "read_index", fails)
    with pytest.raises(mdata.ResourceError, match="the storage does not answer"):
        find_valid(tiny.parent, every_byte=every_byte)


def test_a_folder_inside_that_is_a_link_is_not_followed(tiny):
    shutil.move(tiny / "tokenizer", tiny.parent / "elsewhere")
    (tiny / "tokenizer").symlink_to(tiny.parent / "elsewhere")
    check_found(tiny, tiny / "tokenizer" / "vocab.json")
    with pytest.raises(mdata.DamageError, match="found: a file in a folder that is a link"):
        read_index(tiny)


def test_a_file_that_lost_bytes_before_the_commit_makes_no_checkpoint(tmp_path):
    for name in ("rank-00001.safetensors", "rank-00000.safetensors"):
        target, parts = tiny_save(tmp_path / name, 2)
        for rank, (part, state) in enumerate(parts):
            write_part(target, rank, shard=part, state=state)
        path = target.root / target.partial_name / name
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(mdata.DamageError, match=f"a checkpoint was not written: .*{name}"):
            commit(target, 2)
        assert not (target.root / "step-2").exists() and not (target.root / "latest").exists()


def test_an_index_of_another_save_is_found_by_the_first_file_that_it_does_not_name(tiny):
    (tiny / "index.json").write_bytes((tiny.with_name("step-2") / "index.json").read_bytes())
    check_found(tiny, tiny / "rank-00000.json")


def test_whatever_latest_says_the_run_goes_on_from_a_whole_checkpoint(tiny):
    """Another name in it is what a user writes there to go back: any whole one of the run is right. Else it is told."""
    pointer = tiny.with_name("latest")
    whole = pointer.read_bytes()
    flipped = [
        whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :] for i, bit in itertools.product(range(6), range(8))
    ]
    for other in (*flipped, *(whole[:length] for length in range(len(whole)))):
        pointer.write_bytes(other)
        found = find_checkpoint(tiny.parent)
        assert found.folder is not None
        verify_checkpoint(found.folder)
        assert found.folder.name == other.decode(errors="replace").strip() or str(pointer) in (found.warning or "")


SAVES = [(2, 2.0), (4, 4.0), (6, 6.0), (6, 6.5)]


def saves(root: Path) -> Iterator[tuple[int, float]]:
    """A run that saves and cleans up, and then does a step again from an older checkpoint."""
    for step, value in SAVES:
        save(root, step, value=value)
        yield step, value


def check_left(root: Path, done: list[tuple[int, float]]) -> None:
    """The run goes on from what was saved last, or from what was being saved; where that is done again, from before."""
    before = [SAVES[1]] if len(done) == 3 else [] if done else [None]
    assert resumed(root) in {*done[-1:], *SAVES[len(done) :][:1], *before}, done
    for folder in whole_checkpoints(root):
        verify_checkpoint(folder)
    save(root, 10, value=10.0)
    assert resumed(root) == (10, 10.0)
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.soak)])
def test_a_failure_at_any_write_sync_or_rename_leaves_the_newest(code, tmp_path, monkeypatch):
    tried = 0
    for number in itertools.count():
        root, done = tmp_path / str(number), list[tuple[int, float]]()
        root.mkdir()
        with durable_calls(monkeypatch, number, code=code) as calls:
            try:
                done.extend(saves(root))
            except mdata.MdataError as error:
                assert os.strerror(code) in str(error) and len(str(error).splitlines()) <= 4
                tried += 1
        check_left(root, done)
        if len(calls.seen) <= number:
            break
    assert tried > 60
    print(f"{tried} failures of {os.strerror(code)}")


def test_files_that_cannot_be_removed_fail_no_save(tmp_path, monkeypatch):
    def failing(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, failing)
        done = list(saves(tmp_path))
    assert done == SAVES and resumed(tmp_path) == (6, 6.5)
    check_left(tmp_path, done)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_a_kill_at_any_call_leaves_the_newest(stride, tmp_path):
    for number in itertools.count(0, stride):
        root = tmp_path / str(number)
        root.mkdir()
        said = root.with_name(f"{number}.said")

        def work(root: Path = root, said: Path = said) -> None:
            for step, value in saves(root):
                with said.open("a") as file:
                    file.write(f"{step} {value}\n")

        killed = crash_at(number, work, removals=True)
        lines = said.read_text().splitlines() if said.exists() else []
        check_left(root, [(int(line.split()[0]), float(line.split()[1])) for line in lines])
        if not killed:
            break
    assert number > 80
    print(f"{number // stride} kills")


Change = Callable[[dict[str, Any]], object]


def forge(folder: Path, *, header: Change, part: Change) -> None:
    """Change what the first rank's file and its side index say, and every hash and size on the way to index.json."""
    file, side = folder / "rank-00000.safetensors", folder / "rank-00000.json"
    index, content = read_index(folder), file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    table, listed = json.loads(content[8:end]), json.loads(side.read_bytes())
    header(table)
    text = json.dumps(table).encode()
    written = len(text).to_bytes(8, "little") + text
    file.write_bytes(written + content[end:])
    listed |= {"bytes": len(written + content[end:]), "header": blake3(written).hexdigest()}
    part(listed)
    side.write_bytes(json.dumps(listed).encode())
    parts = {**index.parts, side.name: HashedFile(side.stat().st_size, blake3(side.read_bytes()).hexdigest())}
    (folder / "index.json").write_bytes(dump_index(index.run, parts, extras=index.extras))


def _nothing(table: dict[str, Any]) -> None:
    pass


def _moved(by: float) -> Change:
    def change(table: dict[str, Any]) -> None:
        first = next(iter(table.values()))
        first["data_offsets"] = [offset + by for offset in first["data_offsets"]]

    return change


def _listed_as_f64(table: dict[str, Any]) -> None:
    table["tensors"]["weight/final_norm.weight"]["dtype"] = "F64"


@pytest.mark.parametrize(
    ("header", "part", "told"),
    [
        (_nothing, _listed_as_f64, r"F32\n  expected: F64"),
        (_moved(4), _nothing, "begins at byte|lies at"),
        (_moved(0.5), _nothing, "is {"),
        (lambda table: next(iter(table.values())).update(shape=[1 << 62, 1 << 62]), _nothing, "lies at"),
        (lambda table: next(iter(table.values())).update(dtype=["F32"]), _nothing, "is {"),
        (lambda table: table.popitem(), _nothing, "no such tensor|end at byte|begins at byte"),
        (lambda table: table.update(x=7), _nothing, "x is 7"),
        (
            lambda table: table.update(x={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
            _nothing,
            "tensors that the index does not list: x",
        ),
    ],
    ids=["type", "moved", "fraction", "size", "kind", "fewer", "number", "more"],
)
def test_an_index_and_files_that_agree_in_their_hashes_only_are_found(header, part, told, tiny):
    """Nobody's accident: every hash is right. Not even the type of a tensor may be another one than the index says."""
    forge(tiny, header=_nothing, part=_nothing)
    verify_checkpoint(tiny)
    forge(tiny, header=header, part=part)
    with pytest.raises(mdata.DamageError, match=told) as caught:
        verify_checkpoint(tiny)
    assert "rank-00000.safetensors is damaged" in str(caught.value)


def test_a_model_of_another_shape_is_told_with_its_tensors(tiny):
    wide = make_layout(parameter_table(replace(SMALL, ffn_hidden_size=12), Place()), {"data": 1, "edp": 1})
    with pytest.raises(mdata.UsageError) as caught:
        load_state(tiny, {"weight": everything(wide)}, dtype=torch.float32)
    message = str(caught.value)
    assert "does not fit this model at blocks." in message and "shape [" in message
    with pytest.raises(mdata.UsageError, match="momentum"):
        load_state(tiny, {"momentum": shard().owned["weight"]}, dtype=torch.float32)


class _Disk:
    """A file system with a capacity in bytes, used by the files in one folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.capacity = folder, 0
        monkeypatch.setattr(
            "shutil.disk_usage", lambda path: SimpleNamespace(total=self.capacity, free=self.capacity - self.used())
        )

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def test_what_other_ranks_have_written_is_part_of_the_checkpoint_that_has_to_fit(tmp_path, monkeypatch):
    disk = _Disk(tmp_path, monkeypatch)
    shape = replace(SMALL, vocab_size=1 << 20, padded_vocab_size=1 << 20)
    for spare, fits in ((1 << 20, True), ((1 << 20) - 1, False), (0, False)):
        target, parts = tiny_save(root := tmp_path / str(spare), 2, shape=shape)
        disk.capacity = 1 << 40
        write_part(target, 1, shard=parts[1][0], state=parts[1][1])
        disk.capacity = target.total_bytes + target.total_bytes // 1024 + len(b"{}") + spare
        if not fits:
            with pytest.raises(mdata.ResourceError, match="a checkpoint does not fit into"):
                write_part(target, 0, shard=parts[0][0], state=parts[0][1])
            shutil.rmtree(root)
            continue
        write_part(target, 0, shard=parts[0][0], state=parts[0][1])
        commit(target, 2)
        verify_checkpoint(root / "step-2")
        assert target.total_bytes < disk.used() < disk.capacity
        shutil.rmtree(root)


def test_only_what_is_there_is_advised_to_be_removed(tiny, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=9, free=9))
    with pytest.raises(mdata.ResourceError, match="9 bytes free") as none:
        check_target(tiny.parent / "run" / "checkpoints", 10)
    assert "\n  try: free some disk space, or set checkpoint.folder to another file system" in str(none.value)
    with pytest.raises(mdata.ResourceError, match=r"try: remove an old checkpoint such as step-2, free some disk "):
        check_target(tiny.parent, 10)


def test_a_file_system_that_does_not_say_its_size_is_tried(tmp_path, monkeypatch):
    """Some FUSE mounts report no blocks at all; a disk without a free one has some."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=0, free=0))
    check_target(tmp_path, 1 << 40)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=9, free=0))
    with pytest.raises(mdata.ResourceError, match="0 bytes free"):
        check_target(tmp_path, 1 << 40)
