"""The process that workers are forked from: one thread, nothing left when its owner dies, the end of each known."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

import mdata
from mdata.preprocess.encode import EncodeSpec
from mdata.preprocess.nursery import _live, _serve
from mdata.preprocess.workers import Pool, _slots_of_each, _Worker
from mdata.sources import ReadSpec, find_files, pieces
from mdata.tokenizers import TokenizerSpec, load_tokenizer
from tests.mdata.preprocess.test_preprocess import GOLDEN, children_of, options

SPEC = EncodeSpec(ReadSpec(), None, "uint16")


def work(piece_bytes: int = 100):
    return pieces(find_files((str(GOLDEN / "corpus.jsonl"),)), piece_bytes, spec=ReadSpec())


def workers_of(nursery: int, count: int) -> list[int]:
    """The first may give a result before the last is forked."""
    while len(found := children_of(nursery)) < count:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("engine", ["gigatoken", "tiktoken", "tokenizers"])
def test_it_has_one_thread_when_it_forks(engine):
    """Else a lock that another thread held would stay locked in every worker."""
    spec = TokenizerSpec(type="HuggingFaceTokenizer", model=str(GOLDEN / "tokenizer"), engine=engine)
    with Pool(2) as pool:
        for result in pool.encode(work(), load_tokenizer(spec), spec=SPEC):
            assert len(list(Path(f"/proc/{pool._nursery.process.pid}/task").iterdir())) == 1
            result.release()


@pytest.mark.parametrize(("name", "each"), [("corpus.jsonl", 2), ("corpus.jsonl.gz", 1)])
def test_workers_have_their_next_piece_while_they_work(tmp_path, name, each):
    """Not one that carries its text, for which there is no room in a pipe."""
    (tmp_path / "corpus.jsonl").write_bytes(b'{"text": "ab"}\n' * 100)
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(b'{"text": "ab"}\n' * 100))
    found = pieces(find_files((str(tmp_path / name),)), 100, spec=ReadSpec())
    tokenizer = load_tokenizer(TokenizerSpec(type="ByteTokenizer"))
    with Pool(3) as pool:
        for count, result in enumerate(pool.encode(found, tokenizer, spec=SPEC)):
            if count == 0:
                assert [len(worker.tasks) for worker in pool._workers] == [each] * 3
            result.release()
    assert count == 14


def test_slots_are_many_where_workers_are_few():
    assert [_slots_of_each(workers) for workers in (2, 64, 100, 500)] == [8, 8, 5, 4]


def test_the_slot_that_came_back_last_is_used_first():
    (piece, *_) = work()
    worker = _Worker(8)
    used = set()
    for number in range(20):
        worker.give(number, piece)
        _, slot, _ = worker.theirs.recv()
        used.add(slot)
        worker.theirs.send((number, slot, ValueError("no arrays")))
        worker.take()[2]()
    assert len(used) == 1
    worker.close()


@pytest.mark.parametrize(("workers", "ahead"), [(1, 2), (3, 3)])
def test_as_many_results_wait_for_the_writer_as_there_are_workers(tmp_path, monkeypatch, workers, ahead):
    filling = import_module("mdata.preprocess.filling")
    seen = []
    real = filling.Behind
    monkeypatch.setattr(filling, "Behind", lambda work, *, ahead: (seen.append(ahead), real(work, ahead=ahead))[1])
    mdata.preprocess(options(tmp_path, workers=workers, piece_bytes=100))
    assert seen == [ahead]


def test_a_worker_ends_at_once_when_the_pool_is_left():
    with Pool(3) as pool:
        results = pool.encode(work(), load_tokenizer(TokenizerSpec(type="ByteTokenizer")), spec=SPEC)
        next(results)
        workers = workers_of(pool._nursery.process.pid, 3)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.parametrize("code", [signal.SIGKILL, signal.SIGTERM])
def test_how_a_worker_ended_is_known(code):
    with Pool(2) as pool:
        results = pool.encode(work(), load_tokenizer(TokenizerSpec(type="ByteTokenizer")), spec=SPEC)
        next(results)
        os.kill(workers_of(pool._nursery.process.pid, 2)[1], code)
        assert pool._nursery.how_it_ended(1) == -code


OWNER = """
import sys, multiprocessing
from tests.mdata.preprocess.test_nursery import *
with Pool(2) as pool:
    results = pool.encode(work(), load_tokenizer(TokenizerSpec(type="ByteTokenizer")), spec=SPEC)
    next(results)
    (nursery,) = multiprocessing.active_children()
    print(nursery.pid, *workers_of(nursery.pid, 2), flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_when_the_owner_is_killed():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=GOLDEN.parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    owner.kill()
    said = owner.communicate(timeout=60)[1]
    end = time.monotonic() + 30
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_alive, pids)) and said == ""


@pytest.mark.parametrize("life", ["nursery", "worker"])
def test_a_message_that_its_killed_owner_could_not_finish_is_the_end(life):
    """A vocabulary, or a piece with its text, is longer than what a pipe holds."""
    ours, theirs = multiprocessing.Pipe()
    os.write(ours.fileno(), (100).to_bytes(4, "big") + b"the first of 100 bytes")
    ours.close()
    if life == "nursery":
        _live(theirs, [], [])
    else:
        _serve(theirs, [], load_tokenizer(TokenizerSpec(type="ByteTokenizer")), SPEC)
    with pytest.raises(EOFError):
        theirs.recv()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_process_is_left_over():
    before = multiprocessing.active_children()
    with Pool(2):
        pass
    assert multiprocessing.active_children() == before
