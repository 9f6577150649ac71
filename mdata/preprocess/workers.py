"""Processes that encode pieces, and results that come back in the order in which the work was handed out.

At most a window of pieces is out at once, so memory is bounded by the window, not by the input. Each worker
is spawned (no state is inherited), builds the tokenizer once, and speaks with us over one pipe; a worker
that dies is noticed at once because its pipe ends. Workers ignore Ctrl-C and end when their pipe does, so
the parent alone decides. One worker means no process: the same function runs here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

from mdata.errors import ResourceError, os_errors_named
from mdata.preprocess.encode import EncodedPiece, EncodeSpec, encode_piece
from mdata.sources import Piece
from mdata.tokenizers import Tokenizer, build_tokenizer

# Results that may wait for an earlier one, per worker: enough that a long block does not idle the others.
_WINDOW_PER_WORKER = 4
_GRACE_S = 5.0


@dataclass(frozen=True)
class WorkerSetup:
    """What every worker builds before its first task."""

    tokenizer_type: str
    tokenizer_files: Mapping[str, bytes]
    tokenizer_options: Mapping[str, Any]
    engine: str
    spec: EncodeSpec


class Pool:
    """Encodes pieces, by `num_workers` processes or, for one, in this process.

    Processes start at once, so that they import while their owner loads a tokenizer. A context manager:
    leaving it ends them.

    Args:
        num_workers: how many encode at the same time.

    Raises:
        ResourceError: a process could not be started.
    """

    def __init__(self, num_workers: int) -> None:
        self._workers: list[_Worker] = []
        if num_workers < 2:
            return
        try:
            with os_errors_named("starting worker processes"):
                for _ in range(num_workers):
                    self._workers.append(_Worker())
        except BaseException:
            self.close()
            raise

    def encode(
        self, pieces: Iterable[Piece], tokenizer: Tokenizer, *, spec: EncodeSpec
    ) -> Iterator[tuple[Piece, EncodedPiece]]:
        """Encode the pieces; results come in the order of the pieces.

        Raises:
            ResourceError: a worker died.
            MdataError: what reading a piece raised.
        """
        if not self._workers:
            for piece in pieces:
                yield piece, encode_piece(piece, tokenizer, spec=spec)
            return
        setup = WorkerSetup(tokenizer.name, tokenizer.files, tokenizer.options, tokenizer.engine, spec)
        for worker in self._workers:
            worker.prepare(setup)
        yield from self._in_order(pieces)

    def _in_order(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, EncodedPiece]]:
        source = enumerate(pieces)
        free = list(self._workers)
        out: dict[int, Piece] = {}
        done: dict[int, EncodedPiece] = {}
        wanted = 0
        while True:
            while free and len(out) < len(self._workers) * _WINDOW_PER_WORKER:
                numbered = next(source, None)
                if numbered is None:
                    break
                free.pop().give(*numbered)
                # Its text, if it carried any, is the worker's now.
                out[numbered[0]] = replace(numbered[1], data=None)
            if not out:
                return
            if wanted not in done:
                busy = [worker for worker in self._workers if worker.task is not None]
                for worker in _ready(busy):
                    number, result = worker.take()
                    done[number] = result
                    free.append(worker)
                continue
            yield out.pop(wanted), done.pop(wanted)
            wanted += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()


class _Worker:
    """One process and our end of its pipe."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.task: tuple[int, Piece] | None = None
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        with _interrupts_held_back(), _one_thread_each():
            self.process.start()
        theirs.close()

    def prepare(self, setup: WorkerSetup) -> None:
        self.connection.send(setup)

    def give(self, number: int, piece: Piece) -> None:
        self.task = (number, piece)
        try:
            self.connection.send((number, piece))
        except OSError as error:
            raise self._died() from error

    def take(self) -> tuple[int, EncodedPiece]:
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
        piece = self.task[1]
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return ResourceError(
            f"a worker process died while it read {piece.source.path}, "
            f"block {piece.number} ({piece.start} to {piece.stop})",
            found=f"{how}{' (the system ends processes this way when memory is short)' if code == -9 else ''}",
            fix="run again, with fewer workers, to continue",
        )


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


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """A process that starts here keeps to one thread: the processes are the parallelism.

    Read by libraries when they are imported, so it must be set before: numpy's, on many cores, otherwise starts
    a thread for each of them, and 16 processes spent 2 s of processor time each on nothing else.
    """
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection) -> None:
    """The life of a worker: until the pipe ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        setup = connection.recv()
        tokenizer = build_tokenizer(
            setup.tokenizer_type, setup.tokenizer_files, engine=setup.engine, options=setup.tokenizer_options
        )
        while True:
            number, piece = connection.recv()
            connection.send((number, _attempt(piece, tokenizer, setup.spec)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _attempt(piece: Piece, tokenizer: Tokenizer, spec: EncodeSpec) -> EncodedPiece | Exception:
    """The result, or what was raised, for the parent to raise; a fault of ours carries its traceback along."""
    try:
        return encode_piece(piece, tokenizer, spec=spec)
    except Exception as error:
        error.add_note("in a worker process:\n" + traceback.format_exc())
        return error
