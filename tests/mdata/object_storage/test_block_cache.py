"""Corpora in storage read through the node's cache: the samples of the disk, whatever is evicted, killed or damaged."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mdata
from cli.mdata import main
from mdata import DamageError, ResourceError, UsageError
from mdata.block_cache import block_table, cache_room, corpus_blocks
from mdata.block_cache.block_layout import layout_of
from mdata.block_cache.block_table import ABSENT, PRESENT, STALE, BlockTable
from mdata.block_cache.cached_reads import CachedGatherer, CachedReader
from mdata.dataset.eval_sets import evaluation_sets
from mdata.dataset.staging import blocks_read, stage
from mdata.loader.loader import BatchPlan, Loader
from mdata.loader.look_ahead import looked_ahead
from mdata.manifest.io import load_manifest
from mdata.object_storage import reading
from mdata.object_storage.address import parse_address
from mdata.object_storage.uploading import put_file
from tests.helpers.examples import SOAK
from tests.helpers.failures import crash_at
from tests.helpers.house_rules import ROOT
from tests.mdata.object_storage.stored_corpora import KINDS, S, check_same, make_corpus
from tests.mdata.object_storage.test_preprocess_objects import put_folder
from tests.reference.block_cache import SlowBlockCache

BLOCK = 4 << 20
BUCKET = "s3://blockcache"


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    """The manifest on a disk."""
    return make_corpus(tmp_path_factory.mktemp("near"))


@pytest.fixture(scope="module")
def uploaded(server, near):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("AWS_ENDPOINT_URL", server.url), ("AWS_ACCESS_KEY_ID", "a")):
            patch.setenv(name, value)
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        patch.setenv("AWS_REGION", "us-east-1")
        import urllib.request

        urllib.request.urlopen(urllib.request.Request(f"{server.url}/blockcache", method="PUT")).close()
        put_folder(near.parent, f"{BUCKET}/c")


@pytest.fixture
def far(bucket, uploaded):
    """The manifest in storage."""
    return f"{BUCKET}/c/whole.json"


def opened(far, near, cache, *, size=None, **options):
    """The dataset in storage, and that of the disk."""
    given = {"sequence_length": S, **options}
    return mdata.open_dataset(far, cache=str(cache), cache_size=size, **given), mdata.open_dataset(near, **given)


def some(dataset, count, seed=1):
    """Sample numbers."""
    end = dataset.num_samples or 2 * dataset.components[0].samples.samples_per_epoch
    return np.random.default_rng(seed).integers(0, end, count)


def blocks_of(dataset):
    return dataset.components[0].corpus.blocks


@pytest.mark.scaled
@pytest.mark.parametrize("name", KINDS)
def test_samples_are_those_of_the_disk(far, near, server, tmp_path, name):
    server.share = 0.1
    here, there = opened(far, near, tmp_path, size="16 MiB", **KINDS[name])
    assert here.data_id == there.data_id and here.components[0].name == there.components[0].name
    numbers = some(there, 40 if SOAK > 1 else 20)
    wanted = blocks_read(here, numbers[:5])
    assert wanted and blocks_of(here).table.states().max() == ABSENT, "looking ahead read blocks"
    check_same(here, there, numbers[:5])
    present = np.flatnonzero(blocks_of(here).table.states() == PRESENT)
    assert set(present) == set(wanted[0].blocks) or len(wanted[0].blocks) > 4
    check_same(here, there, numbers)
    for field, array in there[int(numbers[0])].items():
        np.testing.assert_array_equal(here[int(numbers[0])][field], array)
    assert np.count_nonzero(blocks_of(here).table.states()) <= 4


def test_documents_and_tokens_are_those_of_the_disk(far, near, tmp_path):
    here, there = (one.components[0].corpus for one in opened(far, near, tmp_path, size="16 MiB"))
    for number in (0, 1, there.num_documents // 2, there.num_documents - 1):
        np.testing.assert_array_equal(here.document(number), there.document(number))
    assert np.array_equal(here.read(0, there.num_tokens), there.read(0, there.num_tokens))


def test_blends_at_addresses_and_of_addresses(far, near, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(near.parent, "c")
    assert main(["blend", "0.7", "c/a.json", "0.3", "c/b.json", "--allow-overlap", "-o", "c/mix.json"]) == 0
    put_file(tmp_path / "c/mix.json", parse_address(f"{BUCKET}/c/mix.json"), file_hash=None)
    manifest = json.loads((tmp_path / "c/mix.json").read_text())
    local = mdata.open_dataset("c/mix.json", sequence_length=S)
    numbers = some(local, 50)
    check_same(mdata.open_dataset(f"{BUCKET}/c/mix.json", sequence_length=S, cache="cache"), local, numbers)
    words = mdata.open_dataset(f"0.7 {BUCKET}/c/a.json 0.3 {BUCKET}/c/b", sequence_length=S, cache="cache")
    check_same(words, local, numbers)
    for part in manifest["components"]:
        part["path"] = f"{BUCKET}/c/{part['path']}"
    import msgspec

    from mdata.manifest.io import save_manifest
    from mdata.manifest.types import BlendManifest

    save_manifest(msgspec.convert(manifest, BlendManifest), tmp_path / "named.json")
    named = mdata.open_dataset("named.json", sequence_length=S, cache="cache")
    check_same(named, local, numbers)
    assert named.data_id == local.data_id == words.data_id
    monkeypatch.setenv("MDATA_CACHE", "cache")
    words = ["0.7", f"{BUCKET}/c/a.json", "0.3", f"{BUCKET}/c/b.json"]
    assert main(["blend", *words, "--allow-overlap", "-o", "made.json"]) == 0
    made = json.loads((tmp_path / "made.json").read_text())
    assert [part["path"] for part in made["components"]] == words[1::2] and made["id"] == manifest["id"]


def test_manifests_of_blends_name_storage_and_never_the_cache(far, near, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MDATA_CACHE", "cache")
    a, b = f"{BUCKET}/c/a.json", f"{BUCKET}/c/b.json"
    Path("sub").mkdir()
    Path("sub/spec.toml").write_text(f'[[component]]\npath = "{a}"\n[valid]\nheld = "{b}"\n')
    assert main(["blend", "sub/spec.toml", "--allow-overlap", "-o", "sub/old.json"]) == 0
    change = ["--at-sample", "10", "--sequence-length", str(S), "--add", "0.5", b, "--allow-overlap"]
    assert main(["blend", "--from", "sub/old.json", *change, "-o", "changed.json"]) == 0
    assert main(["blend", "--allow-overlap", "sub/old.json", "-o", "outer.json"]) == 0
    for name, corpora in (("sub/old.json", [a]), ("changed.json", [a, b]), ("outer.json", [a])):
        manifest = load_manifest(Path(name))
        assert [part.path for part in manifest.components] == corpora
        assert [part.path for part in manifest.valid or ()] == ([] if name == "outer.json" else [b])
        mdata.open_dataset(name, sequence_length=S).read([0, 20])
    held = evaluation_sets(mdata.open_dataset("changed.json", sequence_length=S), "valid", allow_overlap=True)["held"]
    held.read([0])
    capsys.readouterr()
    assert main(["blend", "--from", "sub/old.json", *change[:-1], "-o", "refused.json"]) == 2
    refusal = capsys.readouterr().err
    assert f"held: {b} is also training data: {b}" in refusal and "/corpus-" not in refusal
    assert main(["verify", "changed.json"]) == 2
    assert f"{a} is in object storage, but only a corpus on a disk can be read here" in capsys.readouterr().err


def test_a_folder_in_storage_stands_for_its_only_manifest(far, near, bucket, tmp_path, monkeypatch, capsys):
    local = mdata.open_dataset(near, sequence_length=S)
    folder = f"{bucket}/alone/"
    for file in near.parent.iterdir():
        if file.is_file() and (file.suffix != ".json" or file == near):
            put_file(file, parse_address(folder + file.name), file_hash=None)
        elif file.is_dir():
            put_folder(file, folder + file.name)
    alone = mdata.open_dataset(folder, sequence_length=S, cache=str(tmp_path))
    assert alone.components[0].corpus.address == f"{folder}{near.name}"
    assert alone.data_id == local.data_id
    check_same(alone, local, some(local, 5))
    monkeypatch.setenv("MDATA_CACHE", str(tmp_path))
    assert main(["blend", "1", folder, "-o", str(tmp_path / "one.json")]) == 0
    assert json.loads((tmp_path / "one.json").read_text())["components"][0]["path"] == f"{folder}{near.name}"
    stage = ["--sequence-length", str(S), "--samples", "0:4"]
    assert main(["stage", folder, *stage]) == 0
    capsys.readouterr()
    several = f"{BUCKET}/c/"
    assert main(["stage", several, *stage]) == 2
    assert f"{several} does not name one corpus" in capsys.readouterr().err


def test_an_address_is_never_a_pattern(near, bucket, tmp_path):
    put_folder(near.parent, f"{bucket}/c[1]")
    here, there = opened(f"1 {bucket}/c[1]/a.json 1 {bucket}/c[1]/b", near, tmp_path)
    assert len(here.components) == 2 and here.read([0]).text.shape == there.read([0]).text.shape


def test_without_a_cache_the_message_names_both_ways(far, tmp_path, monkeypatch):
    monkeypatch.delenv("MDATA_CACHE", raising=False)
    with pytest.raises(UsageError, match=r"data.cache of a run(.|\n)*mdata fetch s3://blockcache/c/whole.json"):
        mdata.open_dataset(far, sequence_length=S)
    with pytest.raises(UsageError, match="mdata fetch"):
        mdata.open_corpus(far)


@pytest.mark.parametrize("size", ["much", "1 MiB", "0"])
def test_a_size_that_is_none_is_refused(far, tmp_path, size):
    with pytest.raises(UsageError, match="cache_size"):
        mdata.open_dataset(far, sequence_length=S, cache=str(tmp_path), cache_size=size)


READING = """
import sys, numpy as np, mdata
far, near, cache, size, seed = sys.argv[1:]
here = mdata.open_dataset(far, sequence_length=512, cache=cache, cache_size=size)
there = mdata.open_dataset(near, sequence_length=512)
random = np.random.default_rng(int(seed))
for _ in range(10):
    numbers = random.integers(0, 9000, random.choice([1, 4, 12]))
    assert (here.read(numbers).text == there.read(numbers).text).all()
"""


def run_reading(far, near, cache, *, size, seed):
    words = [sys.executable, "-c", READING, far, str(near), str(cache), size, str(seed)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_processes_share_a_cache_that_is_too_small_for_them(far, near, tmp_path):
    """Three processes, a forked one and its parent: every row is right, and the limit holds all the time."""
    here, there = opened(far, near, tmp_path, size="16 MiB")
    running = [run_reading(far, near, tmp_path, size="16 MiB", seed=seed) for seed in range(3)]
    context = multiprocessing.get_context("fork")
    check_same(here, there, some(there, 3))  # the library's threads are there when it is forked
    forked = context.Process(target=lambda: [check_same(here, there, some(there, 6, seed)) for seed in range(4)])
    forked.start()
    most = 0
    while any(one.poll() is None for one in running):
        check_same(here, there, some(there, 4, seed=most))
        most = max(most, np.count_nonzero(blocks_of(here).table.states()))
    forked.join(60)
    assert forked.exitcode == 0
    for one in running:
        assert one.wait(60) == 0, one.stderr.read()
    assert most <= 4
    assert (tmp_path / "blocks").stat().st_size < 10 * BLOCK


def test_one_fetch_for_threads_that_want_the_same(far, near, server, tmp_path):
    here, _ = opened(far, near, tmp_path)
    before = server.requests
    threads = [threading.Thread(target=lambda: here.read([7])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    blocks = len(blocks_read(here, np.array([7]))[0].blocks)
    assert server.requests - before <= 2 * blocks  # one look at the object, and the block


def test_memory_is_bounded_by_the_fetches_at_a_time(far, near, tmp_path, monkeypatch):
    here, there = opened(far, near, tmp_path)
    active, most, lock, read = [0], [0], threading.Lock(), reading.read_range

    def counted(*words, **options):
        with lock:
            active[0] += 1
            most[0] = max(most[0], active[0])
        try:
            return read(*words, **options)
        finally:
            with lock:
                active[0] -= 1

    monkeypatch.setattr(reading, "read_range", counted)
    monkeypatch.setattr(corpus_blocks, "THREADS", 2)
    check_same(here, there, some(there, 200))
    assert most[0] == 2


def test_what_is_evicted_while_it_is_copied_is_read_again(far, near, tmp_path, monkeypatch):
    """The evictor wins every race of the first three attempts: rows of zeros are never returned."""
    here, there = opened(far, near, tmp_path)
    blocks, numbers, evicted = blocks_of(here), some(there, 3), []
    compare = BlockTable.touch

    def evict(table, which):
        compare(table, which)
        if len(evicted) < 3 and not isinstance(which, int):
            evicted.append(which)
            with table.claim(int(which[0])) as ours:
                assert ours
                table.drop(int(which[0]))

    monkeypatch.setattr(BlockTable, "touch", evict)
    check_same(here, there, numbers)
    assert len(evicted) == 3 and blocks.table.state(int(evicted[0][0])) == PRESENT


def kill_at(call, here):
    """Fork a process that reads, and is killed at so many calls of what changes the cache; whether it was."""
    pid = os.fork()
    if pid:
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    calls, write = [0], os.pwrite

    def counted(function):
        def counting(*words, **options):
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*words, **options)

        return counting

    os.pwrite = counted(lambda fd, data, at: write(fd, data[: len(data) // 2 or 1], at))
    for of, names in (
        (BlockTable, ("set", "claim", "touch")),
        (cache_room.CacheRoom, ("_alone", "_evict")),
        (block_table, ("punch_hole",)),
        (block_table.atomic_io, ("sync",)),
    ):
        for name in names:
            setattr(of, name, counted(getattr(of, name)))
    blocks, random = blocks_of(here), np.random.default_rng(call)
    blocks._made_in = os.getpid()
    blocks.__dict__.pop("_pool", None)
    corpus = here.components[0].corpus
    for _ in range(60):
        corpus.read(int(random.integers(0, corpus.num_tokens - 10)), 10)
    os._exit(0)


@pytest.mark.scaled
def test_kills_leave_a_cache_that_is_right(far, near, tmp_path, monkeypatch):
    truth = [near.with_name(f"{name}.bin").read_bytes() for name in "ab"]

    def from_truth(blocks, block):
        shard, start, stop = blocks.layout.place(block)
        return truth[shard][start:stop]

    monkeypatch.setattr(corpus_blocks.CorpusBlocks, "_from_storage", from_truth)
    here, there = opened(far, near, tmp_path, size="16 MiB")
    for call in range(1, 200, 13 if SOAK > 1 else 37):
        here.read([1, 2])
        assert kill_at(call, here), call
        _check_whole(here, there, truth)  # beside others that use it
        if call % 4 == 1:
            del here
            here, _ = opened(far, near, tmp_path, size="16 MiB")
            _check_whole(here, there, truth)  # and after all of them


def _check_whole(here, there, truth):
    """All tokens, and every block that counts."""
    corpora = [one.components[0].corpus for one in (here, there)]
    found, expected = (corpus.read(0, corpus.num_tokens) for corpus in corpora)
    assert np.array_equal(found, expected)
    table, layout = blocks_of(here).table, blocks_of(here).layout
    for block in np.flatnonzero(table.states() == PRESENT).tolist():
        shard, start, stop = layout.place(block)
        assert table.read(block, stop - start) == truth[shard][start:stop]
    assert np.count_nonzero(table.states()) <= 4


def test_a_damaged_block_in_the_cache_is_fetched_again(far, near, server, tmp_path):
    here, there = opened(far, near, tmp_path)
    numbers = some(there, 100)
    check_same(here, there, numbers)
    path = next(tmp_path.rglob("blocks.bin"))
    del here
    with path.open("r+b") as file:
        file.seek(BLOCK + 1000)
        file.write(b"wrong")
    here, _ = opened(far, near, tmp_path)
    table, before = blocks_of(here).table, server.requests
    assert set(table.states().tolist()) == {STALE}
    check_same(here, there, numbers)
    assert server.requests - before == 2  # one look, one block: all others were right
    check_same(here, there, np.arange(0, 4000, 7))


@pytest.mark.parametrize("ending", ["idx", "blake3"])
def test_a_damaged_small_file_in_the_cache_is_fetched_again(far, near, tmp_path, ending):
    here, there = opened(far, near, tmp_path)
    del here
    path = next(tmp_path.rglob(f"a.{ending}"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    here, _ = opened(far, near, tmp_path, kind=mdata.Gpt(document_masks=True))
    there = mdata.open_dataset(near, sequence_length=S, kind=mdata.Gpt(document_masks=True))
    check_same(here, there, some(there, 20))


def test_a_damaged_block_in_storage_is_named(bucket, near, tmp_path):
    put_folder(near.parent, f"{bucket}/d")
    data = bytearray(near.with_name("a.bin").read_bytes())
    data[2 * BLOCK + 5] ^= 1
    (tmp_path / "other").write_bytes(data)
    put_file(tmp_path / "other", parse_address(f"{bucket}/d/a.bin"), file_hash=None)
    here, there = opened(f"{bucket}/d/whole", near, tmp_path / "cache")
    corpus = here.components[0].corpus
    with pytest.raises(DamageError, match=r"d/a.bin does not match the manifest\n.*block 2"):
        corpus.read(0, corpus.num_tokens)
    first = here.components[0].corpus.read(0, BLOCK // 2)
    np.testing.assert_array_equal(first, there.components[0].corpus.read(0, BLOCK // 2))


def test_an_object_that_changes_is_named(bucket, near, tmp_path):
    put_folder(near.parent, f"{bucket}/d")
    here, _ = opened(f"{bucket}/d/whole", near, tmp_path / "cache")
    corpus = here.components[0].corpus
    corpus.read(0, 100)
    (tmp_path / "other").write_bytes(bytes(near.with_name("a.bin").stat().st_size))
    put_file(tmp_path / "other", parse_address(f"{bucket}/d/a.bin"), file_hash=None)
    with pytest.raises(UsageError, match=r"d/a.bin changed while it was read"):
        corpus.read(BLOCK, 100)
    assert corpus.read(0, 100).any()


def test_on_a_full_disk_others_go_and_then_an_error_says_what_to_do(far, near, tmp_path, monkeypatch):
    here, there = opened(far, near, tmp_path)
    table, write = blocks_of(here).table, os.pwrite

    def full(fd, data, at):
        if np.count_nonzero(table.states()) > room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, at)

    room = [3]
    monkeypatch.setattr(block_table.os, "pwrite", full)
    monkeypatch.setattr(cache_room, "_PAUSE_S", 0.005)
    corpora = [one.components[0].corpus for one in (here, there)]
    assert np.array_equal(*(corpus.read(0, corpus.num_tokens) for corpus in corpora))
    room[0] = 0
    with pytest.raises(
        ResourceError, match=r"no room for another block(.|\n)*found: (.|\n)*expected: (.|\n)*free some"
    ):
        corpora[0].read(0, corpora[0].num_tokens)
    room[0] = 99
    assert np.array_equal(*(corpus.read(0, corpus.num_tokens) for corpus in corpora))


def test_the_least_recently_read_go_first(far, near, tmp_path):
    here, _ = opened(far, near, tmp_path, size="16 MiB")
    corpus, table = here.components[0].corpus, blocks_of(here).table
    for block in (0, 1, 2, 3, 0, 1, 4, 0, 5):
        corpus.read(block * BLOCK // 2, 10)
    assert set(np.flatnonzero(table.states() == PRESENT)) == {0, 1, 4, 5}


def test_two_corpora_share_the_room(far, near, tmp_path):
    first = mdata.open_dataset(f"{BUCKET}/c/a", sequence_length=S, cache=str(tmp_path), cache_size="16 MiB")
    second = mdata.open_dataset(f"{BUCKET}/c/b", sequence_length=S, cache=str(tmp_path), cache_size="16 MiB")
    for one in (first, second, first):
        corpus = one.components[0].corpus
        corpus.read(0, corpus.num_tokens)
        there = sum(int(np.count_nonzero(blocks_of(each).table.states())) for each in (first, second))
        assert there <= 4


def test_a_loader_gives_the_batches_of_the_disk(far, near, tmp_path):
    plan = BatchPlan(8, 2, dp_rank=1, dp_size=2)
    steps = [iter(Loader(dataset, plan, consumed=16)) for dataset in opened(far, near, tmp_path)]
    for _ in range(20):
        found, expected = (next(step) for step in steps)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one.samples, other.samples)
            np.testing.assert_array_equal(one.rows.text, other.rows.text)


@pytest.mark.parametrize("size", [None, "16 MiB"])
def test_blocks_of_later_steps_are_asked_for(far, near, tmp_path, monkeypatch, size):
    here, there = opened(far, near, tmp_path, size=size)
    numbers, asked, most = some(there, 60).reshape(30, 1, 2), [], 0
    monkeypatch.setattr(blocks_of(here), "ask_for", lambda blocks: asked.append(blocks.tolist()))
    expected = [one.blocks.tolist() for step in numbers for one in blocks_read(here, step.reshape(-1))]
    for number, step in enumerate(looked_ahead([[one] for one in numbers], here)):
        np.testing.assert_array_equal(step[0], numbers[number])
        assert asked == expected[: len(asked)] and len(asked) > number
        most = max(most, len(asked) - number - 1)
        assert sum(map(len, asked[number:-1])) <= blocks_of(here).at_once
    assert (most > 2) == (size is None)


def test_pickled_to_another_process_it_reads_the_same(far, near, tmp_path):
    here, there = opened(far, near, tmp_path)
    again = pickle.loads(pickle.dumps(here))
    assert again.data_id == here.data_id
    check_same(again, there, some(there, 20))  # by a process of its own, as a worker's parent may have been forked


def test_stage_fetches_what_the_ranks_of_a_node_read(far, near, server, tmp_path, capsys):
    words = [
        far,
        "--cache",
        str(tmp_path),
        "--sequence-length",
        str(S),
        "--global-batch",
        "4",
        "--micro-batch",
        "1",
        "--dp",
        "4",
    ]
    words += ["--steps", "3:5", "--dp-ranks", "0:1", "--json"]
    assert main(["stage", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    here, there = opened(far, near, tmp_path)
    steps = iter(Loader(there, BatchPlan(4, 1, dp_rank=0, dp_size=4), consumed=8))
    numbers = np.concatenate([batch.samples for _ in range(2) for batch in next(steps)])
    assert told["samples"] == 2 and told["fetched_bytes"] > 0
    assert told["blocks"] == len(blocks_read(here, numbers)[0].blocks) < 7
    server.cut_at = 0  # from now on nothing answers
    check_same(here, there, numbers)
    server.cut_at = None
    assert main(["stage", *words]) == 0
    assert json.loads(capsys.readouterr().out) == told | {"fetched_bytes": 0}


def stage_killed(words, cache, step, ended):
    """Kill `mdata stage` before its n-th call and give it again; in a process that has not used storage before a fork.

    Two commands with one cache that is too small for both come one after the other, so that blocks are evicted.
    """

    def staged():
        for samples in ("0:3", "50:53"):
            assert main(["stage", *words, "--cache", str(cache), "--cache-size", "20 MiB", "--samples", samples]) == 0

    def contents():
        files = {str(path.relative_to(cache)): path for path in sorted(cache.rglob("*")) if path.is_file()}
        small = {name: path.read_bytes() for name, path in files.items() if "blocks." not in name}
        return [*files], {name: data for name, data in small.items() if name != "room.count"}

    assert not crash_at(1 << 30, staged)
    expected = contents()
    for number, start in enumerate(itertools.count(0, step)):
        n = start + number % step
        shutil.rmtree(cache)
        killed = crash_at(n, staged, removals=True)
        assert not killed or not crash_at(1 << 30, staged)
        assert contents() == expected, n
        if not killed:
            ended.put(n)
            return


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
def test_stage_killed_before_any_call_is_completed_by_itself(far, tmp_path, step):
    spawn = multiprocessing.get_context("spawn")
    ended, words = spawn.SimpleQueue(), [far, "--sequence-length", str(S)]
    process = spawn.Process(target=stage_killed, args=(words, tmp_path / "cache", step, ended))
    process.start()
    process.join()
    assert process.exitcode == 0 and ended.get() > 20


def test_stage_refuses_what_the_disk_cannot_hold(far, near, tmp_path, monkeypatch):
    here, _ = opened(far, near, tmp_path)
    room = blocks_of(here)._room
    monkeypatch.setattr(cache_room.CacheRoom, "_free_bytes", lambda room: 6 * BLOCK - 1)
    monkeypatch.setattr(cache_room.CacheRoom, "_spare_bytes", lambda room: BLOCK)
    assert room.capacity() == 4
    wanted = [np.arange(0, 9000, 100)]
    with pytest.raises(UsageError, match=r"cache is too small(.|\n)*room for 4 blocks(.|\n)*room for 7 blocks, 28 MiB"):
        stage(here, wanted)
    here.components[0].corpus.read(0, BLOCK)
    assert room.capacity() == 4 + np.count_nonzero(blocks_of(here).table.states()) == 6
    monkeypatch.setattr(cache_room.CacheRoom, "_free_bytes", lambda room: 9 * BLOCK)
    assert stage(here, wanted).blocks == 7


def test_stage_tells_of_blocks_that_others_evicted(far, near, tmp_path, monkeypatch):
    here, _ = opened(far, near, tmp_path)
    blocks, bring = blocks_of(here), corpus_blocks.CorpusBlocks.bring

    def bring_and_lose(self, wanted):
        fetched = bring(self, wanted)
        with self.table.claim(int(wanted[0])):
            self.table.drop(int(wanted[0]))
        return fetched

    monkeypatch.setattr(corpus_blocks.CorpusBlocks, "bring", bring_and_lose)
    with pytest.raises(ResourceError, match=r"evicted again(.|\n)*found: 1 of 7"):
        stage(here, [np.arange(0, 9000, 100)])
    assert np.count_nonzero(blocks.table.states()) == 6


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["FAR", "--samples", "0:9"], "needs a cache folder"),
        (["FAR", "--cache", "C"], "either --steps or --samples"),
        (["FAR", "--cache", "C", "--samples", "9:3"], "--samples 9:3"),
        (["FAR", "--cache", "C", "--samples", "0:9", "--dp-ranks", "0:2"], "--dp-ranks has no effect without --steps"),
        (["FAR", "--cache", "C", "--steps", "1:9"], "--global-batch"),
        (["FAR", "--cache", "C", "--cache-size", "16 MiB", "--samples", "0:999"], "too small for all blocks"),
        (["NEAR", "--cache", "C", "--samples", "0:9"], "none of these corpora is in object storage"),
    ],
)
def test_what_stage_refuses(far, near, tmp_path, capsys, monkeypatch, words, text):
    monkeypatch.chdir(tmp_path)
    named = {"FAR": far, "NEAR": str(near)}
    assert main(["stage", *(named.get(word, word) for word in words), "--sequence-length", str(S)]) == 2
    said = capsys.readouterr().err
    assert re.search(text, said) and said.count("\n") <= 4, said


def test_no_secret_is_in_the_cache(far, near, tmp_path):
    here, there = opened(far, near, tmp_path)
    check_same(here, there, some(there, 3))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"AKIDTOBEHIDDEN" not in data and b"secrettobehidden" not in data


def test_a_manifest_of_a_stranger_writes_nothing_outside(bucket, near, tmp_path):
    from msgspec.structs import replace

    from mdata.manifest.io import load_manifest, save_manifest

    manifest = load_manifest(near)
    save_manifest(replace(manifest, shards=[replace(manifest.shards[0], path="../../../out/x")]), tmp_path / "m.json")
    put_file(tmp_path / "m.json", parse_address(f"{bucket}/m.json"), file_hash=None)
    with pytest.raises(UsageError, match="lies outside"):
        mdata.open_dataset(f"{bucket}/m.json", sequence_length=S, cache=str(tmp_path / "cache"))
    assert not (tmp_path / "out").exists()


def test_layout_of_shards_without_tokens():
    layout = layout_of(2, [0, BLOCK + 2, 0, 10])
    assert layout.num_blocks == 3
    assert layout.of_runs(np.array([0, BLOCK // 2]), np.array([1, 3])).tolist() == [0, 1, 2]
    assert layout.place(1) == (1, BLOCK, BLOCK + 2) and layout.place(2) == (3, 0, 10)
    assert [layout.num_bytes(np.array(blocks, np.int64)) for blocks in ([0], [1, 2], [])] == [BLOCK, 12, 0]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_slow_twin_reads_and_keeps_the_same(near, data):
    """Any reads of few tokens, at the edges of blocks and shards above all."""
    shards = [np.fromfile(near.with_name(f"{name}.bin"), np.uint16) for name in "ab"]
    sizes, in_block, total = [len(shard) for shard in shards], BLOCK // 2, sum(map(len, shards))
    layout = layout_of(2, [2 * size for size in sizes])

    def content(block):
        return shards[block[0]][block[1] * in_block : (block[1] + 1) * in_block]

    twin = SlowBlockCache(sizes, in_block=in_block, most=4, fetched=content)
    edges = [*range(0, sizes[0], in_block), *range(sizes[0], total, in_block), total]
    start = st.builds(lambda edge, by: min(max(edge + by, 0), total), st.sampled_from(edges), st.integers(-9, 9))
    reads = data.draw(st.lists(st.tuples(start, st.integers(1, 12)), min_size=1, max_size=12))
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        inside = Path(folder, "corpus")
        inside.mkdir()
        block_table.make_table(inside, layout.num_blocks)
        blocks = corpus_blocks.CorpusBlocks(inside, corpus_blocks.BlockSource(layout, [], []), most=4)
        places = [(shard, start // BLOCK) for shard, start, _ in map(layout.place, range(layout.num_blocks))]
        patch.setattr(blocks, "_from_storage", lambda block: content(places[block]).tobytes())
        prefixes = [near.with_name(name) for name in "ab"]
        facts = [mdata.open_corpus(prefix).readers[0].facts for prefix in prefixes]
        readers = [
            CachedReader(prefix, blocks, shard=number, mode="mmap", described=None, known_facts=known)
            for number, (prefix, known) in enumerate(zip(prefixes, facts, strict=True))
        ]
        gatherer = CachedGatherer(readers, blocks)
        for first, count in reads:
            taken = min(count, total - first)
            if not taken:
                continue
            out = np.empty((1, taken), np.int64)
            gatherer.gather(np.array([first]), np.array([taken]), out=out)
            assert out[0].tolist() == twin.read(first, taken)
            there = {places[block] for block in np.flatnonzero(blocks.table.states() == PRESENT)}
            assert there == set(twin.there)
