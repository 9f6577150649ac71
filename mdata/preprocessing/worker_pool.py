"""Processes that encode pieces, and results that come back in the order in which the work was handed out.

At most a window of pieces is out at once, so memory is bounded by the window, not by the input. Workers are
forked from one process that is spawned and builds the tokenizer (mdata/preprocessing/fork_server.py); each speaks with
us over one pipe, and one that dies is noticed at once because its pipe ends. Workers ignore Ctrl-C and end when
their pipe does, so the parent alone decides. One worker means no process: the same function runs here.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import NamedTuple, Self

from mdata.errors import MdataError, ResourceError, os_errors_named
from mdata.preprocessing.encode import EncodedPiece, EncodeSpec, encode_piece
from mdata.preprocessing.fork_server import Nursery, WorkerSetup, environment
from mdata.preprocessing.shared_buffers import Sent, Slot
from mdata.sources.chunk import Piece
from mdata.tokenizers.base.tokenizer import Recipe, Tokenizer
from mdata.util.stop_signals import raise_pending_stop

# Results of a worker that may wait for an earlier one, or for the writer: enough that a piece which takes several times
# as long as others does not idle the other workers. Each is an open file, of which a process may have 1024.
_SLOTS_PER_WORKER, _LEAST_SLOTS, _SLOTS = 8, 4, 512
# What a worker does and what it does next, so that it need not wait for us, who may be busy with others' results.
_TASKS_PER_WORKER = 2


class Result(NamedTuple):
    """What one piece gave; `release` must be called when its arrays are no longer looked at."""

    piece: Piece
    encoded: EncodedPiece
    release: Callable[[], None]


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
        self._nursery: Nursery | None = None
        # A daemonic process (of multiprocessing.Pool, of torch's DataLoader) may not start any; the files are the same.
        if num_workers < 2 or multiprocessing.current_process().daemon:
            return
        try:
            with os_errors_named("starting worker processes"):
                for _ in range(num_workers):
                    self._workers.append(_Worker(_slots_of_each(num_workers)))
                theirs = [worker.theirs for worker in self._workers]
                slots = [[Sent(slot.fd) for slot in worker.slots] for worker in self._workers]
                self._nursery = Nursery(theirs, slots)
            for pipe in theirs:
                pipe.close()
        except BaseException:
            self.close()
            raise

    def expect(self, recipe: Recipe) -> None:
        """Let the processes be made with this tokenizer, which `encode` is likely to be given."""
        if self._nursery is not None:
            self._nursery.expect(recipe)

    @property
    def num_processes(self) -> int:
        """How many work beside this process."""
        return len(self._workers)

    def encode(self, pieces: Iterable[Piece], tokenizer: Tokenizer, *, spec: EncodeSpec) -> Iterator[Result]:
        """Encode the pieces; results come in the order of the pieces.

        At most two results per worker may be held without being released.

        Raises:
            ResourceError: a worker died.
            MdataError: what reading a piece raised.
        """
        if self._nursery is None:
            for piece in pieces:
                with environment(TOKENIZERS_PARALLELISM="false"):
                    encoded = encode_piece(piece, tokenizer, spec=spec)
                raise_pending_stop()  # not every call of a library is looked after
                yield Result(piece, encoded, _nothing)
            return
        recipe = Recipe(tokenizer.name, dict(tokenizer.files), dict(tokenizer.options), tokenizer.engine)
        self._nursery.prepare(WorkerSetup(recipe, spec))
        try:
            yield from self._in_order(pieces)
        except _PipeEndedError as ended:
            number = self._workers.index(ended.worker)
            raise _died(next(iter(ended.worker.tasks), None), self._nursery.how_it_ended(number)) from ended

    def _in_order(self, pieces: Iterable[Piece]) -> Iterator[Result]:
        """What an error stops, and which, does not depend on who is faster: each waits for its turn."""
        source = _held_back(pieces)
        out: dict[int, Piece] = {}
        done: dict[int, tuple[EncodedPiece | Exception, Callable[[], None]]] = {}
        wanted = number = 0
        following = next(source)
        while True:
            # All have something to do before any has more.
            for before in range(_TASKS_PER_WORKER):
                for worker in self._workers:
                    if isinstance(following, Piece) and worker.takes(following, before=before):
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
            for worker in _ready([worker for worker in self._workers if worker.tasks]):
                finished, encoded, release = worker.take()
                done[finished] = (encoded, release)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process."""
        if self._nursery is not None:
            self._nursery.end()
            self._nursery = None
        for worker in self._workers:
            worker.close()
        self._workers.clear()


class _Worker:
    """Our end of one worker's pipe, and the slots through which its arrays come.

    Attributes:
        tasks: what it is doing, then what it does next.
        theirs: its end of the pipe, to be closed here when the worker has it.
    """

    def __init__(self, num_slots: int) -> None:
        self.connection, self.theirs = multiprocessing.Pipe()
        self.tasks: deque[tuple[int, Piece]] = deque()
        self.slots = [Slot() for _ in range(num_slots)]
        # Taken here, given back by whoever was the last to look at a result, in its own thread. The last one back is
        # taken first, so that memory is touched only when it is needed.
        self._free = deque(range(num_slots))

    def takes(self, piece: Piece, *, before: int) -> bool:
        """Whether it can be given a piece now, when it has that many.

        What is given in advance lies in the pipe, so it must be small: to send a text there would wait for the worker.
        """
        return len(self.tasks) == before and bool(self._free) and (before == 0 or piece.data is None)

    def give(self, number: int, piece: Piece) -> None:
        self.tasks.append((number, piece))
        try:
            self.connection.send((number, self._free.pop(), piece))
        except OSError as error:
            raise _PipeEndedError(self) from error

    def take(self) -> tuple[int, EncodedPiece | Exception, Callable[[], None]]:
        try:
            number, slot, packed = self.connection.recv()
        except (EOFError, OSError) as error:
            raise _PipeEndedError(self) from error
        self.tasks.popleft()
        result = packed if isinstance(packed, Exception) else self.slots[slot].unpack(packed)
        return number, result, partial(self._free.append, slot)

    def close(self) -> None:
        for pipe in (self.connection, self.theirs):
            pipe.close()
        for slot in self.slots:
            slot.close()


class _PipeEndedError(Exception):
    """A worker's pipe has ended, because the worker has."""

    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self.worker = worker


def _slots_of_each(num_workers: int) -> int:
    return max(_LEAST_SLOTS, min(_SLOTS_PER_WORKER, _SLOTS // num_workers))


def _died(task: tuple[int, Piece] | None, code: int | None) -> ResourceError:
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    doing = "before its first piece"
    if task is not None:
        piece = task[1]
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


def _nothing() -> None:
    """A result that was made here needs no release."""
