"""Processes that encode blocks, and results that come back in the order in which the work was handed out.

At most a window of tasks is out at once, so memory is bounded by the window, not by the input. Each worker
is spawned (no state is inherited), builds the tokenizer once, and speaks with us over one pipe; a worker
that dies is noticed at once because its pipe ends. Workers ignore Ctrl-C and end when their pipe does, so
the parent alone decides. One worker means no process: the same function runs here.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from mdata.errors import ResourceError, os_errors_named
from mdata.preprocess.encode import EncodedBlock, EncodeSpec, encode_block
from mdata.sources import Unit, read_range
from mdata.tokenizers import Tokenizer, build_tokenizer

# Results that may wait for an earlier one, per worker: enough that a long block does not idle the others.
_WINDOW_PER_WORKER = 4
_GRACE_S = 5.0


@dataclass(frozen=True)
class Task:
    """Work for one worker: a range of a plain file, or text that was unpacked already."""

    unit: Unit
    data: bytes | None
    file_bytes: int

    def text(self) -> bytes:
        """The lines to encode."""
        return read_range(self.unit) if self.data is None else self.data


@dataclass(frozen=True)
class WorkerSetup:
    """What every worker builds before its first task."""

    tokenizer_type: str
    tokenizer_files: Mapping[str, bytes]
    tokenizer_options: Mapping[str, Any]
    spec: EncodeSpec


def encode_here(
    tasks: Iterable[Task], tokenizer: Tokenizer, *, spec: EncodeSpec
) -> Iterator[tuple[Task, EncodedBlock]]:
    """Encode the tasks in this process, one after another."""
    for task in tasks:
        yield task, encode_block(task.text(), tokenizer, spec=spec)


def encode_in_workers(
    tasks: Iterable[Task], setup: WorkerSetup, *, num_workers: int
) -> Iterator[tuple[Task, EncodedBlock]]:
    """Encode the tasks in processes; results come in the order of the tasks.

    Raises:
        ResourceError: a worker died or could not be started.
        MdataError: what reading a task raised.
    """
    with _pool(setup, num_workers) as workers:
        source = enumerate(tasks)
        free = list(workers)
        out: dict[int, Task] = {}
        done: dict[int, EncodedBlock] = {}
        wanted = 0
        while True:
            while free and len(out) < num_workers * _WINDOW_PER_WORKER:
                numbered = next(source, None)
                if numbered is None:
                    break
                free.pop().give(*numbered)
                out[numbered[0]] = numbered[1]
            if not out:
                return
            if wanted not in done:
                busy = [worker for worker in workers if worker.task is not None]
                for worker in _ready(busy):
                    number, block = worker.take()
                    done[number] = block
                    free.append(worker)
                continue
            yield out.pop(wanted), done.pop(wanted)
            wanted += 1


class _Worker:
    """One process and our end of its pipe."""

    def __init__(self, setup: WorkerSetup) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.task: tuple[int, Task] | None = None
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, setup), daemon=True)
        with _interrupts_held_back():
            self.process.start()
        theirs.close()

    def give(self, number: int, task: Task) -> None:
        self.task = (number, task)
        try:
            self.connection.send((number, task))
        except OSError as error:
            raise self._died() from error

    def take(self) -> tuple[int, EncodedBlock]:
        try:
            number, result = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(result, Exception):
            raise result
        self.task = None
        return number, result

    def end(self) -> None:
        self.process.terminate()
        self.process.join(_GRACE_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.connection.close()
        self.process.close()

    def _died(self) -> ResourceError:
        self.process.join(_GRACE_S)
        code = self.process.exitcode
        assert self.task is not None, "a worker without a task is not listened to"
        unit = self.task[1].unit
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return ResourceError(
            f"a worker process died while it read {unit.file.path}, bytes {unit.start} to {unit.stop}",
            found=f"{how}{' (the system ends processes this way when memory is short)' if code == -9 else ''}",
            fix="run again with fewer workers",
        )


@contextmanager
def _pool(setup: WorkerSetup, num_workers: int) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        with os_errors_named("starting worker processes"):
            for _ in range(num_workers):
                workers.append(_Worker(setup))
        yield workers
    finally:
        for worker in workers:
            worker.end()


def _ready(busy: list[_Worker]) -> list[_Worker]:
    """Wait until workers have something to say, or have died."""
    readable = wait([worker.connection for worker in busy])
    return [worker for worker in busy if worker.connection in readable]


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C waits while a process starts; the child inherits this and never hears it."""
    # Its first start unblocks the signal, so it must not happen inside.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, setup: WorkerSetup) -> None:
    """The life of a worker: until the pipe ends."""
    import os

    # One thread each: the processes are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer(setup.tokenizer_type, setup.tokenizer_files, **setup.tokenizer_options)
    try:
        while True:
            number, task = connection.recv()
            connection.send((number, _attempt(task, tokenizer, setup.spec)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _attempt(task: Task, tokenizer: Tokenizer, spec: EncodeSpec) -> EncodedBlock | Exception:
    """The result, or what was raised, for the parent to raise; a fault of ours carries its traceback along."""
    try:
        return encode_block(task.text(), tokenizer, spec=spec)
    except Exception as error:
        error.add_note("in a worker process:\n" + traceback.format_exc())
        return error
