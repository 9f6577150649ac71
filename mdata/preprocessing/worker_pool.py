"""A pool of worker processes that encode chunks, or do other work on them; results come in the order of the chunks.

The number of chunks in progress is limited, so memory does not grow with the input. Workers are forked from the fork
server (mdata/preprocessing/fork_server.py); each is connected by one pipe, and a worker's death is noticed at once
because its pipe ends. Workers ignore Ctrl-C and end when their pipe does, so only the parent handles it. With one
worker there is no other process: the same function runs in this one.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Generic, NamedTuple, Self, TypeVar

from mdata.errors import MdataError, ResourceError, os_errors_named
from mdata.preprocessing.encode import EncodedChunk, EncodeSpec, encode_chunk
from mdata.preprocessing.fork_server import ChunkWork, ForkServer, WorkerSetup, environment
from mdata.preprocessing.shared_buffers import SentDescriptor, SharedBuffer
from mdata.sources.chunk import Chunk
from mdata.tokenizers.base.tokenizer import Tokenizer, TokenizerConfig
from mdata.tokenizers.registry import config_of
from mdata.util.stop_signals import raise_pending_stop

# Results of a worker that may wait for an earlier chunk or for the writer: enough that a chunk which takes several
# times as long as others does not stall the other workers. Each is an open file; a process may have 1024.
_BUFFERS_PER_WORKER, _LEAST_BUFFERS, _MOST_BUFFERS = 8, 4, 512
# The chunk that a worker encodes, and the next one, so that it need not wait for the parent.
_TASKS_PER_WORKER = 2


T = TypeVar("T")


class Result(NamedTuple, Generic[T]):
    """The result of one chunk; call `release` when its arrays are no longer used."""

    chunk: Chunk
    encoded: T
    release: Callable[[], None]


class WorkerPool:
    """Encodes chunks with `num_workers` processes or, for one, in this process.

    The fork server starts at once, so that it imports while the caller loads a tokenizer. A context manager: leaving it
    ends all processes.

    Raises:
        ResourceError: a process could not be started.
    """

    def __init__(self, num_workers: int) -> None:
        self._workers: list[_Worker] = []
        self._fork_server: ForkServer | None = None
        # A daemonic process (of multiprocessing.Pool or torch's DataLoader) may not start children.
        if num_workers < 2 or multiprocessing.current_process().daemon:
            return
        try:
            with os_errors_named("starting worker processes"):
                for _ in range(num_workers):
                    self._workers.append(_Worker(_buffers_per_worker(num_workers)))
                theirs = [worker.theirs for worker in self._workers]
                buffers = [[SentDescriptor(buffer.fd) for buffer in worker.buffers] for worker in self._workers]
                self._fork_server = ForkServer(theirs, buffers)
            for pipe in theirs:
                pipe.close()
        except BaseException:
            self.close()
            raise

    def preload(self, recipe: TokenizerConfig) -> None:
        """Build this tokenizer in advance: `encode` will probably be called with it."""
        if self._fork_server is not None:
            self._fork_server.preload(recipe)

    @property
    def num_processes(self) -> int:
        """Number of worker processes."""
        return len(self._workers)

    def encode(
        self, chunks: Iterable[Chunk], tokenizer: Tokenizer, *, spec: EncodeSpec
    ) -> Iterator[Result[EncodedChunk]]:
        """Encode the chunks; results come in the order of the chunks.

        The caller may hold at most two results per worker without releasing them.

        Raises:
            ResourceError: a worker died.
            MdataError: reading a chunk failed.
        """
        if self._fork_server is None:
            yield from _in_this_process(chunks, partial(encode_chunk, tokenizer=tokenizer, spec=spec))
        else:
            yield from self._by_workers(chunks, self._fork_server, WorkerSetup(config_of(tokenizer), spec))

    def run(self, chunks: Iterable[Chunk], work: ChunkWork) -> Iterator[Result[Any]]:
        """Other work on the chunks, as `encode` does its own."""
        if self._fork_server is None:
            work.prepare()
            yield from _in_this_process(chunks, work)
        else:
            yield from self._by_workers(chunks, self._fork_server, work)

    def _by_workers(
        self, chunks: Iterable[Chunk], fork_server: ForkServer, setup: WorkerSetup | ChunkWork
    ) -> Iterator[Result[Any]]:
        fork_server.start_workers(setup)
        try:
            yield from self._in_order(chunks)
        except _PipeEndedError as ended:
            number = self._workers.index(ended.worker)
            raise _died(next(iter(ended.worker.tasks), None), fork_server.exit_code(number)) from ended

    def _in_order(self, chunks: Iterable[Chunk]) -> Iterator[Result[Any]]:
        """Results and errors in the order of the chunks, so that timing does not decide which error is raised."""
        source = _deferred_errors(chunks)
        out: dict[int, Chunk] = {}
        done: dict[int, tuple[Any, Callable[[], None]]] = {}
        wanted = number = 0
        following = next(source)
        while True:
            # Every worker gets one chunk before any gets two.
            for num_tasks in range(_TASKS_PER_WORKER):
                for worker in self._workers:
                    if isinstance(following, Chunk) and worker.can_take(num_tasks):
                        worker.send(number, following)
                        # Its data, if any, is not needed here any more.
                        out[number] = replace(following, data=None)
                        number, following = number + 1, next(source)
            if not out and isinstance(following, Exception):
                raise following
            if not out:
                assert following is None, "the caller holds results without releasing them"
                return
            if wanted in done:
                encoded, release = done.pop(wanted)
                if isinstance(encoded, Exception):
                    raise encoded
                yield Result(out.pop(wanted), encoded, release)
                wanted += 1
                continue
            for worker in _ready([worker for worker in self._workers if worker.tasks]):
                finished, encoded, release = worker.receive()
                done[finished] = (encoded, release)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None
        for worker in self._workers:
            worker.close()
        self._workers.clear()


class _Worker:
    """The parent's end of one worker's pipe, and the shared buffers for its arrays.

    Attributes:
        tasks: the chunk it encodes, then its next one.
        theirs: its end of the pipe, closed here once the worker has it.
    """

    def __init__(self, num_buffers: int) -> None:
        self.connection, self.theirs = multiprocessing.Pipe()
        self.tasks: deque[tuple[int, Chunk]] = deque()
        self.buffers = [SharedBuffer() for _ in range(num_buffers)]
        # Buffers are released by the thread that used a result last. The most recently released one is reused first, so
        # that as little memory as possible is touched.
        self._free = deque(range(num_buffers))

    def can_take(self, num_tasks: int) -> bool:
        """Whether it has this number of tasks and a buffer for another one."""
        return len(self.tasks) == num_tasks and bool(self._free)

    def send(self, number: int, chunk: Chunk) -> None:
        # The text goes through the buffer, so that the message is small: one that is sent in advance stays in the pipe.
        buffer, small = self._free.pop(), replace(chunk, data=None)
        size = None if chunk.data is None else len(chunk.data)
        if chunk.data is not None:
            with os_errors_named("passing text to a worker process"):
                self.buffers[buffer].write(chunk.data)
        self.tasks.append((number, small))
        try:
            self.connection.send((number, buffer, small, size))
        except OSError as error:
            raise _PipeEndedError(self) from error

    def receive(self) -> tuple[int, Any, Callable[[], None]]:
        try:
            number, buffer, reply = self.connection.recv()
        except (EOFError, OSError) as error:
            raise _PipeEndedError(self) from error
        self.tasks.popleft()
        result = reply if isinstance(reply, Exception) else self.buffers[buffer].read(reply)
        return number, result, partial(self._free.append, buffer)

    def close(self) -> None:
        for pipe in (self.connection, self.theirs):
            pipe.close()
        for buffer in self.buffers:
            buffer.close()


def _in_this_process(chunks: Iterable[Chunk], work: Callable[[Chunk], T]) -> Iterator[Result[T]]:
    for chunk in chunks:
        with environment(TOKENIZERS_PARALLELISM="false"):
            result = work(chunk)
        raise_pending_stop()  # not every call of a library checks for signals
        yield Result(chunk, result, lambda: None)


class _PipeEndedError(Exception):
    """A worker's pipe has ended, because the worker died."""

    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self.worker = worker


def _buffers_per_worker(num_workers: int) -> int:
    return max(_LEAST_BUFFERS, min(_BUFFERS_PER_WORKER, _MOST_BUFFERS // num_workers))


def _died(task: tuple[int, Chunk] | None, code: int | None) -> ResourceError:
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    doing = "before its first chunk"
    if task is not None:
        chunk = task[1]
        doing = f"while it read {chunk.source.path}, chunk {chunk.number} ({chunk.start} to {chunk.stop})"
    return ResourceError(
        f"a worker process died {doing}",
        found=f"{how}{' (the system kills processes like this when memory is short)' if code == -9 else ''}",
        fix="run again, with fewer workers, to continue",
    )


def _deferred_errors(chunks: Iterable[Chunk]) -> Iterator[Chunk | Exception | None]:
    """The chunks, then the error of reading the next one if there is one, then None forever."""
    try:
        yield from chunks
    # The caller raises it after the results of all earlier chunks.
    except MdataError as error:
        yield error
    while True:
        yield None


def _ready(busy: list[_Worker]) -> list[_Worker]:
    """Wait until workers have sent results, or have died."""
    readable = wait([worker.connection for worker in busy])
    return [worker for worker in busy if worker.connection in readable]
