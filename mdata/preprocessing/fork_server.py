"""The fork server: a process that imports modules and builds the tokenizer once, then forks the workers.

It is spawned, so it inherits no thread and no lock, and it has one thread when it forks: that makes forking safe here,
unlike in the caller's process. Workers share the memory of what it imported and built, until one of them changes it.
Afterwards it waits: it returns the exit code of a worker on request, and kills all workers when its pipe ends, that is,
when its owner ends. Ctrl-C is blocked in all of them. It is a module of its own because that process imports it: the
pool stays out of it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any, Protocol

from mdata.preprocessing.encode import EncodeSpec, encode_chunk
from mdata.preprocessing.shared_buffers import PickledResult, SentDescriptor, read_text, write_arrays
from mdata.sources.chunk import Chunk
from mdata.tokenizers.base.tokenizer import TextRefused, Tokenizer, TokenizerConfig
from mdata.tokenizers.registry import build_tokenizer

_GRACE_S = 5.0

# Tokenizers build tables when they encode their first text; forks then share them. The second text has a character for
# which a fast engine may fall back to the exact one (mdata/tokenizers/engines/exact_fallback.py).
_FIRST_TEXTS = ("text", "\U0001fae8")


@dataclass(frozen=True)
class WorkerSetup:
    """The tokenizer that workers use, and their work."""

    recipe: TokenizerConfig
    spec: EncodeSpec


class ChunkWork(Protocol):
    """Other work on chunks, which is pickled for the workers. Its results may hold arrays."""

    def prepare(self) -> None:
        """Load what it needs, once, before the workers are forked."""

    def __call__(self, chunk: Chunk) -> Any:
        """The result of a chunk."""


class ForkServer:
    """The parent's end. The process starts at once, and forks when `start_workers` is called.

    Args:
        pipes: for each worker, its end of a pipe; it receives (number, buffer, chunk, size of the text in the buffer or
            None) and sends (number, buffer, result).
        buffers: for each worker, the buffers that it reads texts from and writes results to.
    """

    def __init__(self, pipes: Sequence[Connection], buffers: Sequence[Sequence[SentDescriptor]]) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_run_server, args=(theirs, pipes, buffers), daemon=True)
        with _sigint_blocked(), environment(**_ONE_THREAD), _without_main_module():
            self.process.start()
        theirs.close()
        # The process may not be reading yet, and a vocabulary is larger than a pipe's buffer.
        self._sender = ThreadPoolExecutor(1, "fork server")

    def preload(self, recipe: TokenizerConfig) -> None:
        """Build this tokenizer in advance: `start_workers` will probably use it."""
        self._sender.submit(self._send, recipe)

    def start_workers(self, setup: WorkerSetup | ChunkWork) -> None:
        """Fork the workers; if one cannot start, its pipe ends."""
        self._sender.submit(self._send, setup)

    def _send(self, message: object) -> None:
        with suppress(OSError):
            self._connection.send(message)

    def exit_code(self, number: int) -> int | None:
        """The exit code of a worker whose pipe ended, negative for a signal; None if unknown."""
        self._sender.submit(self._send, number).result()
        with suppress(EOFError, OSError):
            if self._connection.poll(_GRACE_S):
                code: int = self._connection.recv()
                return code
        # No answer: the fork server itself has ended.
        self.process.join(_GRACE_S)
        return self.process.exitcode

    def close(self) -> None:
        """End all processes."""
        self._sender.submit(self._connection.close)  # not while something is being sent
        self.process.join(_GRACE_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self._sender.shutdown()
        self.process.close()


def _run_server(connection: Connection, pipes: list[Connection], buffers: list[list[SentDescriptor]]) -> None:
    """The main function of the fork server; returns when the pipe ends."""
    children: dict[int, int] = {}
    try:
        work = _prepared(connection)
        # The garbage collector ignores objects that exist now, so their pages stay shared.
        gc.collect()
        gc.freeze()
        for number, (pipe, own) in enumerate(zip(pipes, buffers, strict=True)):
            others = [other for other in (*pipes, connection) if other is not pipe]
            children[number] = _fork(partial(_run_worker, pipe, own, work), without=others)
        for pipe in pipes:
            pipe.close()
        while True:
            number = _receive(connection)
            # The process id of a child that was waited for may be reused, so it is dropped.
            connection.send(os.waitstatus_to_exitcode(os.waitpid(children.pop(number), 0)[1]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for child in children.values():
            os.kill(child, signal.SIGKILL)
        # After a wait, their CPU time counts as this process's.
        for child in children.values():
            os.waitpid(child, 0)


def _prepared(connection: Connection) -> Callable[[Chunk], Any]:
    """The work on a chunk. A config to preload may come first; it is built while the sender verifies it."""
    preloaded, tokenizer = None, None
    message = _receive(connection)
    if isinstance(message, TokenizerConfig):
        preloaded = message
        with suppress(Exception):  # the sender gets the same error, and chooses another engine
            tokenizer = _built(preloaded)
        message = _receive(connection)
    if not isinstance(message, WorkerSetup):
        work: ChunkWork = message
        work.prepare()
        return work
    if tokenizer is None or message.recipe != preloaded:
        tokenizer = _built(message.recipe)
    return partial(encode_chunk, tokenizer=tokenizer, spec=message.spec)


def _built(recipe: TokenizerConfig) -> Tokenizer:
    tokenizer = build_tokenizer(recipe.name, recipe.files, engine=recipe.engine, options=recipe.options)
    for text in _FIRST_TEXTS:
        with suppress(TextRefused):
            tokenizer.encode_batch([text])
    return tokenizer


def _fork(work: Callable[[], None], *, without: Sequence[Connection]) -> int:
    """Do the work in a child process, which closes these pipes so that their other ends notice when the owners end."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for pipe in without:
            pipe.close()
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)


def _run_worker(connection: Connection, buffers: Sequence[SentDescriptor], work: Callable[[Chunk], Any]) -> None:
    """The main function of a worker; returns when the pipe ends."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number, buffer, chunk, size = _receive(connection)
            if size is not None:
                chunk = replace(chunk, data=read_text(buffers[buffer].fd, size))
            connection.send((number, buffer, _attempt(chunk, work, buffers[buffer].fd)))


def _receive(connection: Connection) -> Any:
    """The next message. A message that a killed sender did not finish counts as the end of the pipe.

    Raises:
        EOFError: the pipe ended.
    """
    try:
        return connection.recv()
    except OSError as error:
        if error.errno is None:  # "got end of file during message"
            raise EOFError from error
        raise


def _attempt(chunk: Chunk, work: Callable[[Chunk], Any], buffer: int) -> PickledResult | Exception:
    """The result, or the exception for the parent to raise, with the worker's traceback as a note."""
    try:
        return write_arrays(buffer, work(chunk))
    except Exception as error:
        error.add_note("in a worker process:\n" + traceback.format_exc())
        return error


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Ctrl-C waits while a process starts; the child inherits the mask and never receives it."""
    # The tracker's start unblocks the signal, so it must not happen inside.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main_module() -> Iterator[None]:
    """The new process does not import the caller's main module, which need not be importable."""
    main = sys.modules["__main__"]
    before: dict[str, Any] = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    vars(main).pop("__file__", None)
    vars(main)["__spec__"] = None
    try:
        yield
    finally:
        vars(main).update(before)


# Each worker uses one thread, its libraries too. Some read this when they are imported: numpy's BLAS otherwise starts
# a thread for each core, and a process with threads must not be forked.
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
def environment(**wanted: str) -> Iterator[None]:
    """Set environment variables while the block runs."""
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
