"""Which checkpoint a run goes on from, which ones it removes, and that what is not ours is left alone."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from blake3 import blake3

import mdata
from mdata import DamageError
from tests.trainer.plan.test_plan import config
from trainer.checkpoint.folder import (
    find_checkpoint,
    latest_checkpoint,
    make_room,
    point_to,
    read_index,
    remove_leftovers,
    remove_old,
)
from trainer.checkpoint.format import HashedFile, Part, RunState, SavedFile, dump_index, dump_part
from trainer.checkpoint.location import check_destination, location_of
from trainer.config.sections import CheckpointSection, RunSection
from trainer.run.run_folder import folder_problems

FOREIGN = ["step-old", "step-4 (copy)", "step-", "step-04", "step-0", "step--1", "step-4.bak", "notes"]


def write(root: Path, *steps: int) -> None:
    """Whole checkpoints without tensors."""
    for step in steps:
        folder = root / f"step-{step}"
        folder.mkdir()
        run = RunState(step, step, "id", {}, step, "")
        part = dump_part(Part(SavedFile(8, "0" * 64), {}))
        (folder / "rank-00000.safetensors").write_bytes(b"12345678")
        (folder / "rank-00000.json").write_bytes(part)
        parts = {"rank-00000.json": HashedFile(len(part), blake3(part).hexdigest())}
        (folder / "index.json").write_bytes(dump_index(run, parts, extras={}))


def damage(root: Path, step: int) -> None:
    (root / f"step-{step}" / "rank-00000.safetensors").write_bytes(b"1234")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_one_that_latest_names_is_taken(tmp_path):
    assert find_checkpoint(tmp_path / "none").folder is None and find_checkpoint(tmp_path).folder is None
    write(tmp_path, 3, 20)
    (tmp_path / "latest").write_text("step-3\n")
    assert (find_checkpoint(tmp_path).folder, find_checkpoint(tmp_path).warning) == (tmp_path / "step-3", None)


@pytest.mark.parametrize(
    "said", [None, b"", b"\n", b"step-9", b"nonsense", b"../elsewhere", b"step-3 \x00", b"\xff" * 500]
)
def test_without_a_name_in_latest_the_newest_whole_one_is_taken_and_it_is_said(said, tmp_path):
    write(tmp_path, 3, 20, 100)
    damage(tmp_path, 100)
    for name in FOREIGN:
        (tmp_path / name).mkdir()
    if said is not None:
        (tmp_path / "latest").write_bytes(said)
    found = find_checkpoint(tmp_path)
    assert found.folder == tmp_path / "step-20"
    assert found.warning is not None and found.warning.endswith("using the newest intact checkpoint, step-20")
    assert str(tmp_path / "latest") in found.warning and found.warning.isprintable()


def test_latest_may_be_a_folder(tmp_path):
    write(tmp_path, 3)
    (tmp_path / "latest").mkdir()
    assert find_checkpoint(tmp_path).folder == tmp_path / "step-3"


def test_a_damaged_one_that_latest_names_is_not_passed_over(tmp_path):
    write(tmp_path, 3, 20)
    damage(tmp_path, 20)
    (tmp_path / "latest").write_text("step-20")
    assert find_checkpoint(tmp_path).folder == tmp_path / "step-20"
    with pytest.raises(DamageError, match=r"found: 4 bytes(.|\n)*write step-3 into"):
        read_index(tmp_path / "step-20")


def test_a_run_does_not_begin_again_where_checkpoints_are_damaged_or_gone(tmp_path):
    (tmp_path / "latest").write_text("step-20")
    with pytest.raises(DamageError, match=r"names no checkpoint of its folder(.|\n)*to begin at step 1"):
        find_checkpoint(tmp_path)
    (tmp_path / "latest").unlink()
    write(tmp_path, 20)
    damage(tmp_path, 20)
    with pytest.raises(DamageError, match=r"latest is missing\n  found: step-20, and none is intact"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_copy_of_a_checkpoint_under_another_name_is_nobodys(name, tmp_path):
    """It is whole, and it may be of a later step: it is neither taken, nor counted, nor removed, nor named in a fix."""
    write(tmp_path, 90)
    (tmp_path / "step-90").rename(tmp_path / name)
    assert find_checkpoint(tmp_path).folder is None
    write(tmp_path, 3, 20)
    assert find_checkpoint(tmp_path).folder == tmp_path / "step-20"
    (tmp_path / "latest").write_text(name)
    assert find_checkpoint(tmp_path).folder == tmp_path / "step-20"
    remove_old(tmp_path, 1)
    assert names(tmp_path) == sorted(["latest", "step-20", name])
    damage(tmp_path, 20)
    with pytest.raises(DamageError, match="there is no other intact checkpoint"):
        read_index(tmp_path / "step-20")


def test_folders_of_other_names_alone_are_no_checkpoints(tmp_path):
    for name in [*FOREIGN, "step-7"]:  # the last has a name of ours, but no index
        (tmp_path / name).mkdir()
    assert find_checkpoint(tmp_path).folder is None


def test_remove_old_keeps_the_newest_and_clears_what_a_crash_left(tmp_path):
    write(tmp_path, 2, 10, 9)
    (tmp_path / ".step-11.partial").mkdir()
    remove_old(tmp_path, 2)
    assert names(tmp_path) == ["step-10", "step-9"]


def test_remove_old_leaves_what_is_not_ours(tmp_path):
    write(tmp_path, 1, 2, 30)
    theirs = [*FOREIGN, "step-5", ".step-x.partial", "step-30 (copy)"]
    for name in theirs:
        (tmp_path / name).mkdir()
    (tmp_path / "step-6").write_text("a file")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(elsewhere, 7)
    (tmp_path / "step-7").symlink_to(elsewhere / "step-7")
    remove_old(tmp_path, 1)
    assert names(tmp_path) == sorted(["step-30", "step-6", "step-7", "elsewhere", *theirs])
    assert names(elsewhere) == ["step-7"]


def test_a_step_that_is_a_link_is_read_and_takes_no_place(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(elsewhere, 3, 5)
    root = tmp_path / "checkpoints"
    root.mkdir()
    write(root, 1, 2)
    for step in (3, 5):
        (root / f"step-{step}").symlink_to(elsewhere / f"step-{step}")
    assert find_checkpoint(root).folder == root / "step-5"
    assert read_index(root / "step-5").run.step == 5
    remove_old(root, 1)
    assert names(root) == ["step-2", "step-3", "step-5"]
    make_room(root / "step-5")
    assert names(root) == ["step-2", "step-3", "step-5.not-ours-1"]
    assert names(elsewhere) == ["step-3", "step-5"]
    damage(elsewhere, 3)
    (root / "step-5.not-ours-1").unlink()
    assert find_checkpoint(root).folder == root / "step-2"


def test_no_save_is_written_through_a_link_in_the_place_of_a_partial_one(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("mine")
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / ".step-2.partial").symlink_to(elsewhere)
    remove_leftovers(root)
    assert names(root) == [] and (elsewhere / "thesis.txt").read_text() == "mine"


def test_a_damaged_checkpoint_takes_no_whole_ones_place(tmp_path):
    write(tmp_path, 1, 2, 3, 4)
    damage(tmp_path, 3)
    (tmp_path / "step-4" / "index.json").write_text("{")
    remove_old(tmp_path, 1)
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]


def test_remove_old_never_deletes_what_latest_names(tmp_path):
    """Step 100 was gone back to by hand, and 150 saved from there; 200 is of the branch that was left."""
    write(tmp_path, 100, 150, 200)
    (tmp_path / "latest").write_text("step-150")
    remove_old(tmp_path, 1)
    assert names(tmp_path) == ["latest", "step-150", "step-200"]


def test_room_is_made_without_deleting_what_is_not_ours(tmp_path):
    make_room(tmp_path / "step-3")
    write(tmp_path, 3)
    make_room(tmp_path / "step-3")
    assert names(tmp_path) == []
    for _ in range(2):
        (tmp_path / "step-3").mkdir()
        (tmp_path / "step-3" / "thesis.txt").write_text("mine")
        make_room(tmp_path / "step-3")
    assert names(tmp_path) == ["step-3.not-ours-1", "step-3.not-ours-2"]
    assert (tmp_path / "step-3.not-ours-2" / "thesis.txt").read_text() == "mine"


def test_a_checkpoint_under_the_name_of_another_step_is_neither_read_nor_replaced(tmp_path):
    write(tmp_path, 2, 4)
    shutil.copytree(tmp_path / "step-2", tmp_path / "step-9")
    (tmp_path / "step-11").symlink_to(tmp_path / "step-2")
    assert find_checkpoint(tmp_path).folder == tmp_path / "step-4"
    with pytest.raises(DamageError, match=r"(?s)run/step.*found: 2.*expected: 9.*step-4"):
        read_index(tmp_path / "step-9")
    make_room(tmp_path / "step-9")
    remove_old(tmp_path, 1)
    assert names(tmp_path) == ["step-11", "step-4", "step-9.not-ours-1"]


def test_after_going_back_the_later_checkpoints_take_no_place_of_new_ones(tmp_path):
    write(tmp_path, 2, 4, 6, 18, 20)
    (tmp_path / "latest").write_text("step-6")
    remove_old(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-18", "step-20", "step-4", "step-6"]
    damage(tmp_path, 6)
    with pytest.raises(DamageError, match="write step-4 into"):
        read_index(tmp_path / "step-6")
    damage(tmp_path, 4)
    with pytest.raises(DamageError, match="write step-20 into"):
        read_index(tmp_path / "step-4")


@pytest.mark.parametrize("pointer", ["a folder", "a link to a folder"])
def test_latest_is_written_where_a_folder_stands(tmp_path, pointer):
    write(tmp_path, 2)
    if pointer == "a folder":
        (tmp_path / "latest").mkdir()
    else:
        (tmp_path / "latest").symlink_to("step-2")
    point_to(tmp_path / "step-2")
    assert (tmp_path / "latest").read_text() == "step-2"
    assert find_checkpoint(tmp_path).warning is None


def test_an_address_with_one_slash_is_not_a_folder(tmp_path, monkeypatch):
    """Checkpoints would go to a folder "s3:" on a disk that the machine loses."""
    monkeypatch.chdir(tmp_path)
    for text in ("s3:/bucket/run", Path("gs://bucket/run")):
        with pytest.raises(mdata.UsageError, match=r"neither a path nor an address\n  try: write (s3|gs)://bucket/run"):
            location_of(text)


def test_what_begins_like_an_address_is_one_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, words in {
        "s3:bucket/run": "try: write s3://bucket/run",
        "GCS:/bucket": "try: write gs://bucket/",
        "s3:": "s3:// has no bucket",
        "https:/host/run": "does not write to https://",
        "https:host/run": "does not write to https://",
        "abfs:/x": "does not write to abfs://",
        "file:/x/y": "try: /x/y",
    }.items():
        with pytest.raises(mdata.UsageError, match=words):
            check_destination(text)
        sections = {"run": RunSection(folder=text), "checkpoint": CheckpointSection(folder="run")}
        (problem,) = folder_problems(dataclasses.replace(config(), **sections))
        assert "is an address" in problem
    (tmp_path / "s3:old").mkdir()
    assert location_of("s3:old") == Path("s3:old") and location_of("c:x") == Path("c:x")
