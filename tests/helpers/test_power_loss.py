"""The model of a power loss: a case for each rule, and real calls."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mdata.util import atomic_io
from tests.helpers.power_loss import Cut, Disk, Event, Named, Synced, Tree, Wrote, recorded, states

ROOT, A, B, FOLDER = 1, 2, 3, 4
MADE_A, WROTE_A = Named(ROOT, (("a", A),)), Wrote(A, 0, b"12345678")


def after(*events: Event, disk: Disk | None = None) -> set[Tree]:
    disk = disk or Disk(ROOT)
    for event in events:
        disk.take(event)
    return set(disk.crashes())


def contents(trees: set[Tree]) -> set[tuple[tuple[str, bytes | None], ...]]:
    return {tuple((path, content) for path, _, content in tree) for tree in trees}


def test_bytes_that_were_not_synced_may_be_there_or_not_or_in_part_or_zeros():
    found = contents(after(MADE_A, Synced(ROOT), WROTE_A))
    assert found == {(("a", content),) for content in (b"", b"1234", b"12345678", bytes(8))}
    assert contents(after(MADE_A, Synced(ROOT), WROTE_A, Synced(A))) == {(("a", b"12345678"),)}
    found = contents(after(MADE_A, Synced(ROOT), WROTE_A, Synced(A), Wrote(A, 8, b"9abc")))
    assert found == {(("a", b"12345678" + end),) for end in (b"", b"9a", b"9abc", bytes(4))}


def test_a_name_is_lasting_when_its_folder_was_synced():
    assert contents(after(MADE_A, WROTE_A, Synced(A))) == {(), (("a", b"12345678"),)}
    assert contents(after(MADE_A, WROTE_A, Synced(A), Synced(ROOT))) == {(("a", b"12345678"),)}


def test_a_cut_may_be_lost():
    whole = (MADE_A, WROTE_A, Synced(A), Synced(ROOT))
    assert contents(after(*whole, Cut(A, 2))) == {(("a", b"12345678"),), (("a", b"12"),)}
    assert contents(after(*whole, Cut(A, 2), Synced(A))) == {(("a", b"12"),)}


def test_a_file_may_replace_another_before_its_bytes_are_there():
    disk = Disk(ROOT, {A: b"old"}, {ROOT: {"a": A}})
    moved = Named(ROOT, (("b", None), ("a", B)))
    found = contents(after(Named(ROOT, (("b", B),)), Synced(ROOT), Wrote(B, 0, b"new"), moved, disk=disk))
    assert {(("a", b""),), (("a", b"new"),), (("a", bytes(3)),), (("a", b"old"), ("b", b"new"))} <= found


def test_of_several_changes_each_may_be_the_only_one_that_is_kept_or_lost():
    disk = Disk(ROOT, {A: b"a", B: b"b", FOLDER: b"c"}, {ROOT: {"a": A, "b": B, "c": FOLDER}})
    found = contents(after(*(Named(ROOT, ((name, None),)) for name in "abc"), disk=disk))
    assert {"".join(path for path, _ in tree) for tree in found} == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_folders_have_names_of_their_own():
    made = (Named(ROOT, (("x", FOLDER),), made_folder=True), Named(FOLDER, (("a", A),)), WROTE_A, Synced(A))
    whole, empty = (("x", None), ("x/a", b"12345678")), (("x", None),)
    assert contents(after(*made)) == {(), empty, whole}
    assert contents(after(*made, Synced(FOLDER))) == {(), whole}
    moved = Named(ROOT, (("x", None), ("y", FOLDER)))
    found = contents(after(*made, Synced(FOLDER), Synced(ROOT), moved))
    assert found == {whole, (("y", None), ("y/a", b"12345678"))}


def test_real_calls_are_seen_and_trees_can_be_put_back(tmp_path):
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "old").write_bytes(b"old")
    with recorded(root, tmp_path / "beside") as kept:
        atomic_io.atomic_write(root / "new", b"content")
        atomic_io.atomic_write(root / "old", b"other")
        (root / "made").mkdir()
        atomic_io.atomic_write(root / "made" / "x", b"x")
        shutil.rmtree(root / "made")
        (root / "sub").rmdir()
        fd = os.open(root / "new", os.O_RDWR | os.O_TRUNC)
        os.pwrite(fd, b"!", 2)
        os.ftruncate(fd, 2)
        os.close(fd)
        (tmp_path / "elsewhere").mkdir()
    numbers = {path.name: path.stat().st_ino for path in root.iterdir()}
    disk = kept.disk()
    for event in kept.events:
        disk.take(event)
    trees = list(disk.crashes())
    seen = trees[0]
    assert {path: content for path, _, content in seen} == {"new": b"\0\0", "old": b"other"}
    every = [tree for _, tree in states(kept)]
    assert len(every) == len(set(every)) > 30
    kept.restore(every[0])
    assert sorted(path.name for path in root.iterdir()) == ["old", "sub"]
    kept.restore(seen)
    assert (root / "old").read_bytes() == b"other"
    assert {path.name: path.stat().st_ino for path in root.iterdir()} == numbers
    assert atomic_io.atomic_write(root / "old", b"newest") is None
    kept.restore(seen)
    assert (root / "old").read_bytes() == b"other"


def test_what_was_promised_is_told(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    with recorded(root, tmp_path / "beside") as kept:
        atomic_io.atomic_write(root / "x", b"1")
        kept.promise()
        atomic_io.atomic_write(root / "x", b"2")
        kept.promise()
    found = {(made, content) for made, tree in states(kept) for name, _, content in tree if name == "x"}
    assert found == {(0, b"1"), (1, b"1"), (1, b"2"), (2, b"2")}
    assert (0, ()) in set(states(kept)) and (1, ()) not in set(states(kept))


def test_atomic_write_never_shows_a_part(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "x").write_bytes(b"old")
    with recorded(root, tmp_path / "beside") as kept:
        atomic_io.atomic_write(root / "x", b"newer content")
    found = {path: {content for _, tree in states(kept) for name, _, content in tree if name == path} for path in ["x"]}
    assert found == {"x": {b"old", b"newer content"}}


def careless_write(path: Path, data: bytes) -> None:
    """What `atomic_write` would be without its sync."""
    fd = os.open(atomic_io.partial_path(path), os.O_WRONLY | os.O_CREAT)
    atomic_io.write_all(fd, data)
    os.close(fd)
    atomic_io.rename(atomic_io.partial_path(path), path)
    atomic_io.sync_folder(path.parent)


def test_a_missing_sync_is_found(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    with recorded(root, tmp_path / "beside") as kept:
        careless_write(root / "x", b"content")
    assert b"" in {content for _, tree in states(kept) for name, _, content in tree if name == "x"}
