"""Checkpoints in object storage: written and read in any layout, whole or not there, found damaged, and removed."""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from typing import Any

import pytest
import torch

import mdata
from mdata.object_storage import reading, stores, uploading
from mdata.object_storage.address import Address, parse_address
from mdata.object_storage.uploading import remove_objects
from tests.helpers.examples import SOAK
from tests.trainer.checkpoint import layouts
from tests.trainer.checkpoint.layouts import Layout
from tests.trainer.checkpoint.test_damage import check_found
from tests.trainer.checkpoint.test_power_loss import SMALL, resumed
from tests.trainer.engines import held_state
from trainer.checkpoint import load as load_module
from trainer.checkpoint import object_folder, rank_file, stored_files
from trainer.checkpoint.folder import find_checkpoint, read_index, remove_leftovers, remove_old, whole_checkpoints
from trainer.checkpoint.format import RunState
from trainer.checkpoint.load import find_valid, load_state, verify_checkpoint
from trainer.checkpoint.location import ObjectFolder, location_of
from trainer.checkpoint.object_folder import put, put_all, remove_folder
from trainer.checkpoint.rank_file import OwnedState
from trainer.checkpoint.save import Target, check_target, clear_place, commit, discard, missing_parts, write_part
from trainer.checkpoint.stored_files import INDEX, ObjectFiles, files_of, listed
from trainer.models.gpt.params import parameter_table
from trainer.optim.layout import make_layout
from trainer.optim.ownership import everything, owned_by
from trainer.parallel.params import Place


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a server on loopback."""
    monkeypatch.setattr(stores, "TIMEOUT_S", 1)
    monkeypatch.setattr(stores, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(reading, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def root(bucket: str) -> ObjectFolder:
    found = location_of(f"{bucket}/runs//first/")
    assert isinstance(found, ObjectFolder) and str(found) == f"{bucket}/runs/first"
    return found


def save(root: ObjectFolder, step: int, *, ranks: int = 2, value: float | None = None) -> ObjectFolder:
    """As a run does it: every rank's part, then the commit."""
    run = RunState(step=step, consumed_samples=step, data_id="", data={}, optimizer_steps=step, config="")
    target = Target(root, run, f"a{ranks}-{step}", {"tokenizer/vocab.json": b"{}"})
    layout = make_layout(parameter_table(SMALL, Place()), {"data": ranks, "edp": ranks})
    clear_place(target)
    for rank in reversed(range(ranks)):
        assert missing_parts(target, ranks) == list(range(rank + 1))
        part = OwnedState({"weight": owned_by(layout, {"data": rank, "edp": rank})}, {"tp": 0})
        state = {"weight": torch.full((part.owned["weight"].size,), float(step) if value is None else value)}
        write_part(target, rank, shard=part, state=state)
    commit(target, ranks)
    return root / target.name


def contents(root: ObjectFolder) -> dict[str, bytes]:
    files = ObjectFiles(root)
    return {name: files.read(name) for name in files.names()}


def steps(root: ObjectFolder) -> list[str]:
    return [folder.name for folder in whole_checkpoints(root)]


@pytest.mark.parametrize(
    ("writer", "reader"), [(Layout(2, 1, 1, "none"), Layout(1, 1, 2, "parameters")), (Layout(), Layout(1, 4, 1))]
)
def test_any_layout_reads_any_other_bit_for_bit(server, root, tmp_path, monkeypatch, writer, reader):
    """In parts of objects, several on their way, while the network fails; the objects are a disk's files."""
    monkeypatch.setattr(rank_file, "MAX_SLICE_BYTES", 3000)
    monkeypatch.setattr(load_module, "BLOCK_BYTES", 1000)
    server.share = 0.02
    folder = layouts.save(root, writer)
    local = layouts.save(tmp_path, writer)
    for engine in layouts.engines(reader):
        found = load_state(folder, engine.optimizer.holds, dtype=torch.float32)
        assert found.keys() == engine.optimizer.state.keys()
        for name, expected in held_state(engine).items():
            assert torch.equal(found[name], expected)
    server.share = 0.0
    names = {path.relative_to(local).as_posix(): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    assert contents(folder) == names
    remove_old(root, 1)
    assert contents(root).keys() == {f"step-2/{name}" for name in names} | {"latest"}


def test_blocks_of_an_object_are_read_together_and_no_more_than_there_are_threads(root, monkeypatch):
    """Each thread has one block, so that is what a load holds beside the tensors."""
    folder = layouts.save(root, Layout())
    monkeypatch.setattr(load_module, "BLOCK_BYTES", 256)
    waiting, most, lock = [0], [0], threading.Lock()
    real = stored_files.read_range

    def read_range(facts: Any, start: int, *, stop: int, store: Any) -> bytes:
        with lock:
            waiting[0] += 1
            most[0] = max(most[0], waiting[0])
        try:
            time.sleep(0.001)
            return real(facts, start, stop=stop, store=store)
        finally:
            with lock:
                waiting[0] -= 1

    index = read_index(folder)
    monkeypatch.setattr(stored_files, "read_range", read_range)
    (name, *_) = index.files
    pieces = [piece for tensor in index.tensors.values() for piece in tensor.slices if piece.file == name][:24]
    load_module.SliceReader(folder, index).read(name, {piece: [] for piece in pieces})
    assert 1 < most[0] <= stored_files.ObjectBlocks.threads


def test_bytes_behind_the_end_of_an_object_are_not_asked_for(root):
    put(root / "x", bytes(range(250)))
    block = bytearray(2)
    with files_of(root).open("x") as file:
        file.read_into(memoryview(block), 248)
        assert bytes(block) == bytes([248, 249])
        with pytest.raises(EOFError):
            file.read_into(memoryview(block), 249)


@pytest.mark.scaled
@pytest.mark.parametrize("parts", [False, True])
def test_a_save_that_is_killed_anywhere_leaves_the_older_checkpoint_or_both(server, bucket, monkeypatch, parts):
    """And its remains neither look like a checkpoint nor stay."""
    monkeypatch.setattr(stores, "RETRIES", 0)
    monkeypatch.setattr(uploading, "TRIES", 1)
    monkeypatch.setattr(object_folder, "AHEAD", 1)
    if parts:
        monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        monkeypatch.setattr(uploading, "part_bytes", lambda size: 512)
        monkeypatch.setattr(uploading, "PARTS_AT_ONCE", 1)
    measured = ObjectFolder(parse_address(f"{bucket}/measured"))
    save(measured, 2)
    server.received = 0
    save(measured, 4)
    sent = server.received
    remove_old(measured, 1)
    whole, outcomes = contents(measured), set()
    for share in (0.0, 0.2, 0.4, 0.8, 0.99, 1.0) if SOAK > 1 else (0.2, 0.99, 1.0):
        root = ObjectFolder(parse_address(f"{bucket}/{share}"))
        save(root, 2)
        server.received, server.cut_at = 0, round(share * (sent - 1))
        with pytest.raises(mdata.ResourceError):
            save(root, 4)
        server.cut_at = None
        found = find_valid(root).folder
        assert found is not None and resumed(root) == (int(found.name[5:]), float(found.name[5:]))
        outcomes.add(found.name)
        remove_leftovers(root)
        assert {name.partition("/")[0] for name in listed(root)} == {*steps(root), "latest"}
        save(root, 4)
        remove_old(root, 1)
        assert contents(root) == whole
    assert "step-2" in outcomes


def test_what_a_killed_save_left_is_not_taken_for_one_of_a_later_save(root):
    """Objects of more ranks, and side indexes of another attempt."""
    save(root, 2)
    folder = save(root, 4, ranks=4, value=7.0)
    left = {name: data for name, data in contents(folder).items() if name != INDEX}
    remove_folder(folder)
    put_all(folder, left)
    put(root / ".step-4.dead.partial" / "rank-00001.json", left["rank-00001.json"])
    assert resumed(root) == (2, 2.0)
    save(root, 4)
    verify_checkpoint(folder)
    remove_old(root, 2)
    assert resumed(root) == (4, 4.0) and not any("rank-00003" in name for name in listed(root))


def test_a_failed_save_leaves_nothing(server, root, monkeypatch):
    save(root, 2)
    remove_old(root, 2)
    before = contents(root)
    run = RunState(step=4, consumed_samples=4, data_id="", data={}, optimizer_steps=4, config="")
    target = Target(root, run, "x")
    layout = make_layout(parameter_table(SMALL, Place()), {"data": 1, "edp": 1})
    shard = OwnedState({"weight": everything(layout)}, {"tp": 0})
    write_part(target, 0, shard=shard, state={"weight": torch.ones(shard.owned["weight"].size)})
    assert contents(root) != before
    discard(target, 1)  # of another rank, which does nothing
    assert contents(root) != before
    discard(target, 0)
    assert contents(root) == before


def test_all_damage_is_found_and_named_and_the_newest_valid_one_is_offered(root):
    save(root, 2)
    folder = save(root, 4)
    chance = random.Random(3)
    for number, (name, data) in enumerate(contents(folder).items()):
        place = chance.randrange(len(data))
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        put(folder / name, (flipped, data[:-1], data + b" ")[number % 3])
        check_found(folder, folder / name)
        put(folder / name, data)
    for name in ("rank-00001.safetensors", "rank-00000.json", "tokenizer/vocab.json"):
        data = contents(folder)[name]
        remove_objects([(folder / name).address])
        check_found(folder, folder / name)
        put(folder / name, data)
    put(folder / "rank-00002.safetensors", b"other")
    check_found(folder, folder / "rank-00002.safetensors")


def test_without_its_index_there_is_no_checkpoint(root):
    save(root, 2)
    folder = save(root, 4)
    remove_objects([(folder / INDEX).address])
    found = find_checkpoint(root)
    assert found.folder == root / "step-2" and "latest names no checkpoint" in (found.warning or "")
    with pytest.raises(mdata.UsageError, match=r"there is no checkpoint at s3://.*/step-4"):
        verify_checkpoint(folder)
    remove_leftovers(root)
    assert any(name.startswith("step-4/") for name in listed(root)), "latest names it: somebody may bring it back"


def test_old_ones_go_index_first_and_what_is_not_ours_stays(root, monkeypatch):
    put_all(root, {"step-9/notes.txt": b"", "step-old/index.json": b"", "readme": b"mine"})
    for step in (2, 4, 6, 8):
        save(root, step)
    remove_leftovers(root)
    gone: list[str] = []

    def watched(addresses: list[Any], store: Any) -> None:
        gone.extend(one.key.removeprefix("runs/first/") for one in addresses)
        remove_objects(addresses, store)

    monkeypatch.setattr(object_folder, "remove_objects", watched)
    remove_old(root, 1, every=4, best=[2])
    assert steps(root) == ["step-8", "step-4", "step-2"]
    assert gone[0] == f"step-6/{INDEX}" and all(name.startswith("step-6/") for name in gone) and len(gone) == 6
    assert {"step-9/notes.txt", "step-old/index.json", "readme"} <= listed(root).keys()


def test_a_copy_under_the_name_of_another_step_is_not_overwritten(root):
    copied = contents(save(root, 4))
    put_all(root / "step-6", copied)
    with pytest.raises(mdata.UsageError, match=r"step-6 is a checkpoint of another step"):
        save(root, 6)
    assert contents(root / "step-6") == copied


def test_a_step_is_done_again_in_the_place_of_the_older_one(root):
    for step, ranks in ((2, 2), (4, 2), (2, 1)):
        folder = save(root, step, ranks=ranks, value=step + ranks / 4)
    assert resumed(root) == (2, 2.25) and verify_checkpoint(folder).files.keys() == {"rank-00000.safetensors"}


def test_a_web_server_is_read_and_not_written(server, root):
    request = urllib.request.Request(f"{server.url}/public{root.address.place}", method="PUT")
    request.add_header("x-amz-acl", "public-read")
    urllib.request.urlopen(request).close()
    root = ObjectFolder(Address("s3", f"public{root.address.place}", "runs/first"))
    save(root, 2)
    save(root, 4)
    web = location_of(f"{server.url}/{root.address.place}/runs/first")
    found = find_checkpoint(web)
    assert found.folder == web / "step-4" and found.warning is None
    verify_checkpoint(web / "step-4")
    assert resumed(web) == (4, 4.0)
    with pytest.raises(mdata.UsageError, match="does not write to http://"):
        check_target(web, 1)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("bucket", "there is no bucket nosuchbucket"),
        ("credentials", "no credentials for s3://.* were found"),
        ("PUT", "refuses these credentials"),
        ("DELETE", "refuses these credentials"),
        ("library", r'pip install "\.\[objects\]"'),
    ],
)
def test_a_destination_that_cannot_be_written_is_told(server, root, monkeypatch, trouble, message):
    monkeypatch.setattr(stores, "RETRIES", 0)
    place = location_of("s3://nosuchbucket/run") if trouble == "bucket" else root
    if trouble == "credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    elif trouble == "library":
        monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    elif trouble != "bucket":
        server.denied = {trouble, "POST"} if trouble == "DELETE" else {trouble}
    with pytest.raises(mdata.UsageError, match=message) as caught:
        check_target(place, 1)
    assert len(str(caught.value).splitlines()) <= 4 and "secrettobehidden" not in str(caught.value)
    server.denied = set()


def test_a_destination_that_can_be_written_keeps_nothing_of_the_test(root):
    check_target(root, 1 << 60)
    assert listed(root) == {}
