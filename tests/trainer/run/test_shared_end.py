"""All ranks end when one fails or is lost, with its name; ranks are threads that share a store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mdata import UsageError
from mdata.util.commands import command_line
from tests.trainer.convert.hf_models import save
from trainer.errors import LostRankError
from trainer.run import shared_end
from trainer.run.shared_end import ended_together

TICK_S = 0.02
ENDED_S = 10.0  # within which all ranks have ended


class Rank:
    """A rank in a thread, which waits in its block like one in a collective, or raises."""

    def __init__(self, store: HashStore, rank: int, error: BaseException | None = None) -> None:
        self.ended, self.raised = list[tuple[int, str]](), list[BaseException]()
        self.waits = threading.Event()
        self._store, self._rank, self._error = store, rank, error
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        def end(code: int, text: str) -> None:
            self.ended.append((code, text))
            self.waits.set()

        try:
            with ended_together(
                self._store, rank=self._rank, world_size=2, end=end, success=BrokenPipeError, tick_s=TICK_S
            ):
                if self._error is not None:
                    raise self._error
                self.waits.wait(60)
        except BaseException as error:
            self.raised.append(error)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_ends_the_other_rank(failing):
    store = HashStore()
    waiting = Rank(store, 1 - failing)
    failed = Rank(store, failing, UsageError("no such file", found="x"))
    for rank in (failed, waiting):
        rank.join()
    assert waiting.ended == [(2, f"rank {failing} of 2 failed: no such file\n  found: x")] and not failed.ended


def test_a_rank_whose_error_is_no_failure_ends_the_other_with_success():
    store = HashStore()
    waiting, done = Rank(store, 1), Rank(store, 0, BrokenPipeError())
    for rank in (done, waiting):
        rank.join()
    assert waiting.ended == [(0, "")] and not done.ended and isinstance(done.raised[0], BrokenPipeError)


def test_a_rank_that_is_silent_is_named_by_the_one_that_lost_it():
    store = HashStore()
    store.set("mtrain/alive/1", "7")  # and no more
    rank = Rank(store, 0, LostRankError("connection closed"))
    rank.join()
    ((code, text),) = rank.ended
    assert code == 5 and text.startswith("rank 1 of 2 failed: it has not responded for")


def test_ranks_that_leave_or_have_not_started_are_not_lost():
    store = HashStore()
    first = Rank(store, 0)
    time.sleep(2 * shared_end.SILENT_TICKS * TICK_S)
    second = Rank(store, 1)
    second.waits.set()
    second.join()
    time.sleep(2 * shared_end.SILENT_TICKS * TICK_S)
    first.waits.set()
    first.join()
    assert not first.ended and not second.ended


@contextmanager
def started(model: str, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks of `mtrain generate`, as Slurm starts them: the store is in the process of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [*command_line("mtrain"), "generate", model, "--prompt", "the", *words]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("transformers")
    return str(save("llama2", tmp_path_factory.mktemp("hf") / "tiny"))


def test_samples_that_rank_0_cannot_write_end_all_ranks(model, tmp_path):
    output = tmp_path / "samples.jsonl"
    output.write_text(json.dumps({"job": "another"}) + "\n")
    with started(model, "--output", str(output)) as ranks:
        first, second = (rank.communicate(timeout=120)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "mtrain: error: " in first and "has lines of another model" in first
    assert "mtrain: error: rank 0 of 2 failed: " in second and "has lines of another model" in second


@pytest.mark.soak
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_all(model, tmp_path, killed):
    output = tmp_path / "samples.jsonl"
    with started(model, "--num-samples", "20000", "--max-tokens", "40", "--output", str(output)) as ranks:
        while not output.exists() or output.stat().st_size < 2000:
            time.sleep(0.05)
            assert ranks[0].poll() is None, ranks[0].communicate()
        began_s = time.monotonic()
        os.kill(ranks[killed].pid, signal.SIGKILL)
        said = ranks[1 - killed].communicate(timeout=120)[1]
        assert time.monotonic() - began_s < ENDED_S and ranks[1 - killed].returncode == 5
    assert ("rank 1 of 2 failed: it has not responded" if killed else "the output of rank 0") in said
