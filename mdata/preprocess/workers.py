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
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from mdata.errors import MdataError, ResourceError, os_errors_named
from mdata.preprocess.encode import EncodedPiece, EncodeSpec, encode_piece
from mdata.preprocess.slots import Packed, Sent, Slot, pack
from mdata.sources import Piece
from mdata.tokenizers import Tokenizer, build_tokenizer

# Results of a worker that may wait for an earlier one, or for the writer: enough that a long piece does not idle
# the other workers.
_SLOTS_PER_WORKER = 4
_GRACE_S = 5.0


class Result(NamedTuple):
    """What one piece gave; `release` must be called when its arrays are no longer looked at."""

    piece: Piece
    encoded: EncodedPiece
    release: Callable[[], None]


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
        # A daemonic process (of multiprocessing.Pool, of torch's DataLoader) may not start any; the files are the same.
        if num_workers < 2 or multiprocessing.current_process().daemon:
            return
        try:
            with os_errors_named("starting worker processes"):
                for _ in range(num_workers):
                    self._workers.append(_Worker())
        except BaseException:
            self.close()
            raise

    def encode(self, pieces: Iterable[Piece], tokenizer: Tokenizer, *, spec: EncodeSpec) -> Iterator[Result]:
        """Encode the pieces; results come in the order of the pieces.

        At most two results per worker may be held without being released.

        Raises:
            ResourceError: a worker died.
            MdataError: what reading a piece raised.
        """
        if not self._workers:
            for piece in pieces:
                with _environment(TOKENIZERS_PARALLELISM="false"):
                    encoded = encode_piece(piece, tokenizer, spec=spec)
                yield Result(piece, encoded, _nothing)
            return
        setup = WorkerSetup(tokenizer.name, tokenizer.files, tokenizer.options, tokenizer.engine, spec)
        for worker in self._workers:
            worker.prepare(setup)
        yield from self._in_order(pieces)

    def _in_order(self, pieces: Iterable[Piece]) -> Iterator[Result]:
        """What an error stops, and which, does not depend on who is faster: each waits for its turn."""
        source = _held_back(pieces)
        out: dict[int, Piece] = {}
        done: dict[int, tuple[EncodedPiece | Exception, Callable[[], None]]] = {}
        wanted = number = 0
        following = next(source)
        while True:
            for worker in self._workers:
                if worker.is_free and isinstance(following, Piece):
                    worker.give(number, following)
                    # Its text, if it carried any, is the worker's now.
                    out[number] = replace(following, data=None)
                    number, following = number + 1, next(source)
            if not out and isinstance(following, Exception):
                raise following
            if not out:
                assert following is None, "results are held and not released"
                return
            if wanted in done:
                encoded, release = done.pop(wanted)
                if isinstance(encoded, Exception):
                    raise encoded
                yield Result(out.pop(wanted), encoded, release)
                wanted += 1
                continue
            for worker in _ready([worker for worker in self._workers if worker.task is not None]):
                finished, encoded, release = worker.take()
                done[finished] = (encoded, release)

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
    """One process, our end of its pipe, and the slots through which its arrays come."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.task: tuple[int, Piece] | None = None
        self._slots = [Slot() for _ in range(_SLOTS_PER_WORKER)]
        # Taken here, given back by whoever was the last to look at a result, in its own thread.
        self._free = deque(range(_SLOTS_PER_WORKER))
        sent = [Sent(slot.fd) for slot in self._slots]
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, sent), daemon=True)
        with _interrupts_held_back(), _environment(**_ONE_THREAD), _main_left_out():
            self.process.start()
        theirs.close()

    @property
    def is_free(self) -> bool:
        """Whether it can take a piece now."""
        return self.task is None and bool(self._free)

    def prepare(self, setup: WorkerSetup) -> None:
        try:
            self.connection.send(setup)
        except OSError as error:
            raise self._died() from error

    def give(self, number: int, piece: Piece) -> None:
        self.task = (number, piece)
        try:
            self.connection.send((number, self._free.popleft(), piece))
        except OSError as error:
            raise self._died() from error

    def take(self) -> tuple[int, EncodedPiece | Exception, Callable[[], None]]:
        try:
            number, slot, packed = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        self.task = None
        result = packed if isinstance(packed, Exception) else self._slots[slot].unpack(packed)
        return number, result, partial(self._free.append, slot)

    def end(self) -> None:
        self.process.terminate()
        self.process.join(_GRACE_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.connection.close()
        self.process.close()
        for slot in self._slots:
            slot.close()

    def _died(self) -> ResourceError:
        self.process.join(_GRACE_S)
        code = self.process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        doing = "before its first piece"
        if self.task is not None:
            piece = self.task[1]
            doing = f"while it read {piece.source.path}, piece {piece.number} ({piece.start} to {piece.stop})"
        return ResourceError(
            f"a worker process died {doing}",
            found=f"{how}{' (the system ends processes this way when memory is short)' if code == -9 else ''}",
            fix="run again, with fewer workers, to continue",
        )


def _held_back(pieces: Iterable[Piece]) -> Iterator[Piece | Exception | None]:
    """The pieces, then what finding the next one raised if it did, then None for ever."""
    try:
        yield from pieces
    # It is raised when all before it were taken.
    except MdataError as error:
        yield error
    while True:
        yield None


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
def _main_left_out() -> Iterator[None]:
    """A worker needs nothing of the caller's main module; so it is not imported there, and need not be importable."""
    main = sys.modules["__main__"]
    before: dict[str, Any] = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    vars(main).pop("__file__", None)
    vars(main)["__spec__"] = None
    try:
        yield
    finally:
        vars(main).update(before)


# Workers are the parallelism; their libraries keep to one thread. Some read this when they are imported: numpy's BLAS,
# on many cores, otherwise starts a thread for each of them, and 16 processes spent 2 s of processor time each on that.
_ONE_THREAD = MappingProxyType(
    {
        "MKL_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
)


@contextmanager
def _environment(**wanted: str) -> Iterator[None]:
    """Variables that hold while the block runs, for what is called or started in it."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, slots: list[Sent]) -> None:
    """The life of a worker: until the pipe ends."""
    try:
        setup = connection.recv()
        tokenizer = build_tokenizer(
            setup.tokenizer_type, setup.tokenizer_files, engine=setup.engine, options=setup.tokenizer_options
        )
        while True:
            number, slot, piece = connection.recv()
            connection.send((number, slot, _attempt(piece, tokenizer, setup.spec, slots[slot].fd)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _attempt(piece: Piece, tokenizer: Tokenizer, spec: EncodeSpec, slot: int) -> Packed | Exception:
    """The result, or what was raised, for the parent to raise; a fault of ours carries its traceback along."""
    try:
        return pack(slot, encode_piece(piece, tokenizer, spec=spec))
    except Exception as error:
        error.add_note("in a worker process:\n" + traceback.format_exc())
        return error


def _nothing() -> None:
    """A result that was made here needs no release."""
