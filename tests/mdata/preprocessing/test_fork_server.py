"""The fork server: one thread, nothing left when its owner dies, and every worker's exit code is known."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata.preprocessing.encode import EncodeSpec
from mdata.preprocessing.fork_server import WorkerSetup, _run_server, _run_worker
from mdata.preprocessing.shared_buffers import SharedBuffer, read_text, write_arrays
from mdata.preprocessing.worker_pool import WorkerPool, _buffers_per_worker, _Worker
from mdata.sources.chunk import chunks
from mdata.sources.record_batch import ReadSpec
from mdata.tokenizers.base.tokenizer import TokenizerConfig, TokenizerSpec
from mdata.tokenizers.registry import config_of, load_tokenizer
from tests.helpers.processes import children_of, is_alive, wait_until
from tests.mdata.preprocessing.test_preprocess import GOLDEN, options
from tests.mdata.sources.inputs import find_files

SPEC = EncodeSpec(ReadSpec(), None, "uint16")
FORK_SERVER = import_module("mdata.preprocessing.fork_server")  # mdata.preprocess is the function, too


def work(chunk_bytes: int = 100):
    return chunks(find_files((str(GOLDEN / "corpus.jsonl"),)), chunk_bytes, spec=ReadSpec())


def workers_of(fork_server: int, count: int) -> list[int]:
    """The first may give a result before the last is forked."""
    while len(found := children_of(fork_server)) < count:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("engine", ["gigatoken", "tiktoken", "tokenizers"])
def test_it_has_one_thread_when_it_forks(engine):
    """Else a lock that another thread held would stay locked in every worker."""
    spec = TokenizerSpec(type="HuggingFaceTokenizer", model=str(GOLDEN / "tokenizer"), engine=engine)
    with WorkerPool(2) as pool:
        for result in pool.encode(work(), load_tokenizer(spec), spec=SPEC):
            assert len(list(Path(f"/proc/{pool._fork_server.process.pid}/task").iterdir())) == 1
            result.release()


class Messages:
    """A connection through which these come."""

    def __init__(self, *messages: object) -> None:
        self._messages = list(messages)

    def recv(self) -> object:
        return self._messages.pop(0)


BYTES = TokenizerConfig("ByteTokenizer", {}, {}, "byte")
NO_TOKENIZER = TokenizerConfig("HuggingFaceTokenizer", {}, {}, "gigatoken")


@pytest.mark.parametrize(("expected", "built"), [([], 1), ("the same", 1), ([BYTES], 2), ([NO_TOKENIZER], 2)], ids=str)
def test_a_tokenizer_that_was_expected_is_built_once_and_any_other_is_left(monkeypatch, expected, built):
    tokenizer = load_tokenizer("HuggingFaceTokenizer", GOLDEN / "tokenizer")
    setup = WorkerSetup(config_of(tokenizer), SPEC)
    made = []
    real = FORK_SERVER.build_tokenizer
    monkeypatch.setattr(
        FORK_SERVER, "build_tokenizer", lambda name, *w, **k: (made.append(name), real(name, *w, **k))[1]
    )
    work = FORK_SERVER._prepared(Messages(*([setup.recipe] if expected == "the same" else expected), setup))
    found, spec = work.keywords["tokenizer"], work.keywords["spec"]
    assert (len(made), spec) == (built, SPEC)
    assert config_of(found) == setup.recipe


@pytest.mark.parametrize("kind", ["gpt2", "huggingface", "huggingface, tiktoken"])
def test_what_is_announced_is_what_is_taken(tmp_path, kind):
    announced: list[TokenizerConfig] = []
    if kind == "gpt2":
        model = json.loads((GOLDEN / "tokenizer" / "tokenizer.json").read_text())["model"]
        (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
        vocabulary, merges = str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
        spec = TokenizerSpec(type="GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges)
    else:
        folder, engine = str(GOLDEN / "tokenizer"), kind.partition(", ")[2] or "auto"
        spec = TokenizerSpec(type="HuggingFaceTokenizer", model=folder, engine=engine)
    taken = config_of(load_tokenizer(spec, on_files_read=announced.append))
    assert announced == [taken]


def test_who_leaves_while_a_vocabulary_is_sent_leaves_nothing_behind(monkeypatch):
    """The pipe is not closed under the thread that sends through it."""
    before = set(multiprocessing.active_children())  # other tests' ranks live on
    sent, send = [], FORK_SERVER.ForkServer._send
    monkeypatch.setattr(
        FORK_SERVER.ForkServer, "_send", lambda self, message: (send(self, message), sent.append(message))
    )
    with WorkerPool(2) as pool:
        pool.preload(BYTES._replace(files={"large": bytes(64 << 20)}))
    assert len(sent) == 1
    assert set(multiprocessing.active_children()) <= before
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("fork server")]


def test_a_wrong_expectation_changes_nothing():
    tokenizer = load_tokenizer("HuggingFaceTokenizer", GOLDEN / "tokenizer")

    def ids(*expected: TokenizerConfig) -> list[list[int]]:
        found = []
        with WorkerPool(2) as pool:
            for recipe in expected:
                pool.preload(recipe)
            for result in pool.encode(work(), tokenizer, spec=SPEC):
                found.append(result.encoded.by_key[0].tokens.tolist())
                result.release()
        return found

    assert ids() == ids(config_of(tokenizer)) == ids(BYTES) == ids(NO_TOKENIZER)


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_workers_have_their_next_chunk_while_they_work(tmp_path, monkeypatch, name):
    """All have something before any has more, also where chunks carry their text."""
    (tmp_path / "corpus.jsonl").write_bytes(b'{"text": "ab"}\n' * 100)
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(b'{"text": "ab"}\n' * 100))
    found = chunks(find_files((str(tmp_path / name),)), 100, spec=ReadSpec())
    tokenizer = load_tokenizer(TokenizerSpec(type="ByteTokenizer"))
    had, give = [], _Worker.send
    monkeypatch.setattr(_Worker, "send", lambda self, *words: (had.append(len(self.tasks)), give(self, *words)))
    with WorkerPool(3) as pool:
        for result in pool.encode(found, tokenizer, spec=SPEC):
            result.release()
    assert had[:6] == [0, 0, 0, 1, 1, 1]


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(1, 100))
def test_a_text_and_then_a_result_go_through_one_buffer(texts, most):
    """However few bytes each call of the system takes; a longer text does not shine through a shorter one."""
    buffer = SharedBuffer()
    with pytest.MonkeyPatch.context() as patch:
        real = os.pwrite, os.pread
        patch.setattr(os, "pwrite", lambda fd, data, at: real[0](fd, data[:most], at))
        patch.setattr(os, "pread", lambda fd, size, at: real[1](fd, min(size, most), at))
        for text in texts:
            buffer.write(text)
            assert read_text(buffer.fd, len(text)) == text
            array = np.frombuffer(text, np.uint8).copy()
            assert buffer.read(write_arrays(buffer.fd, {"ids": array}))["ids"].tobytes() == text
    buffer.close()


def test_memory_that_is_out_while_a_text_is_passed_is_an_error_of_a_resource(tmp_path, monkeypatch):
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(b'{"text": "ab"}\n' * 100))
    found = chunks(find_files((str(tmp_path / "corpus.jsonl.gz"),)), 100, spec=ReadSpec())
    tokenizer = load_tokenizer(TokenizerSpec(type="ByteTokenizer"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with WorkerPool(2) as pool, pytest.raises(mdata.ResourceError, match="passing text to a worker process"):
        monkeypatch.setattr(SharedBuffer, "write", full)
        list(pool.encode(found, tokenizer, spec=SPEC))


def test_buffers_are_many_where_workers_are_few():
    assert [_buffers_per_worker(workers) for workers in (2, 64, 100, 500)] == [8, 8, 5, 4]


def test_the_buffer_that_came_back_last_is_used_first():
    (chunk, *_) = work()
    worker = _Worker(8)
    used = set()
    for number in range(20):
        worker.send(number, chunk)
        _, buffer, *_ = worker.theirs.recv()
        used.add(buffer)
        worker.theirs.send((number, buffer, ValueError("no arrays")))
        worker.receive()[2]()
    assert len(used) == 1
    worker.close()


@pytest.mark.parametrize(("workers", "ahead"), [(1, 2), (3, 3)])
def test_as_many_results_wait_for_the_writer_as_there_are_workers(tmp_path, monkeypatch, workers, ahead):
    loop = import_module("mdata.preprocessing.run")
    seen = []
    real = loop.BackgroundWorker
    monkeypatch.setattr(
        loop, "BackgroundWorker", lambda work, **given: (seen.append(given["limit"]), real(work, **given))[1]
    )
    mdata.preprocess(options(tmp_path, workers=workers, chunk_bytes=100))
    assert seen == [ahead]


def test_a_worker_ends_at_once_when_the_pool_is_left():
    with WorkerPool(3) as pool:
        results = pool.encode(work(), load_tokenizer(TokenizerSpec(type="ByteTokenizer")), spec=SPEC)
        next(results)
        workers = workers_of(pool._fork_server.process.pid, 3)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.parametrize("code", [signal.SIGKILL, signal.SIGTERM])
def test_how_a_worker_ended_is_known(code):
    with WorkerPool(2) as pool:
        results = pool.encode(work(), load_tokenizer(TokenizerSpec(type="ByteTokenizer")), spec=SPEC)
        next(results)
        os.kill(workers_of(pool._fork_server.process.pid, 2)[1], code)
        assert pool._fork_server.exit_code(1) == -code


OWNER = """
import sys, multiprocessing
from tests.mdata.preprocessing.test_fork_server import *
with WorkerPool(2) as pool:
    results = pool.encode(work(), load_tokenizer(TokenizerSpec(type="ByteTokenizer")), spec=SPEC)
    next(results)
    (fork_server,) = multiprocessing.active_children()
    print(fork_server.pid, *workers_of(fork_server.pid, 2), flush=True)
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
    wait_until(lambda: not any(map(is_alive, pids)))
    assert said == ""


@pytest.mark.parametrize("life", ["fork server", "worker"])
def test_a_message_that_its_killed_owner_could_not_finish_is_the_end(life):
    """A vocabulary, or a chunk with its text, is longer than what a pipe holds."""
    ours, theirs = multiprocessing.Pipe()
    os.write(ours.fileno(), (100).to_bytes(4, "big") + b"the first of 100 bytes")
    ours.close()
    if life == "fork server":
        _run_server(theirs, [], [])
    else:
        _run_worker(theirs, [], _Counting())
    with pytest.raises(EOFError):
        theirs.recv()


def test_no_process_is_left_over():
    before = set(multiprocessing.active_children())
    with WorkerPool(2):
        pass
    assert set(multiprocessing.active_children()) <= before


class _Counting:
    """Other work than encoding."""

    prepared = 0

    def prepare(self):
        self.prepared += 1

    def __call__(self, chunk):
        return chunk


def test_other_work_is_prepared_once():
    work = _Counting()
    assert FORK_SERVER._prepared(Messages(work)) is work and work.prepared == 1
