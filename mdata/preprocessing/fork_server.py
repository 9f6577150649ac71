"""The process that workers come from: it imports and builds the tokenizer once, then forks them.

It is spawned, so it inherits no thread and no lock, and has one thread itself when it forks: that is what
makes forking safe here and not in the process of the caller. What it read, imported and built is shared by
all workers until one of them changes it. Afterwards it only waits: it says how a worker ended when asked, and
ends them all when its pipe ends, that is, with the process that owns it. Ctrl-C is blocked in all of them.
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
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any

from mdata.preprocessing.encode import EncodeSpec, encode_piece
from mdata.preprocessing.shared_buffers import Packed, Sent, pack
from mdata.sources.chunk import Piece
from mdata.tokenizers.base.tokenizer import Recipe, TextRefused, Tokenizer
from mdata.tokenizers.registry import build_tokenizer

_GRACE_S = 5.0

# Forks share what a first text makes a tokenizer build: the second has a character that only the exact engine may
# take (mdata/tokenizers/types/engine_fallback.py).
_FIRST_TEXTS = ("text", "\U0001fae8")


@dataclass(frozen=True)
class WorkerSetup:
    """What is built before the first task, and what is done then."""

    recipe: Recipe
    spec: EncodeSpec


class Nursery:
    """Our end: the process starts at once, and forks when it is told what for.

    Args:
        pipes: for each worker its end of a pipe; it takes (number, slot, piece) and gives (number, slot, result).
        slots: for each worker the slots that it writes to.
    """

    def __init__(self, pipes: Sequence[Connection], slots: Sequence[Sequence[Sent]]) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_live, args=(theirs, pipes, slots), daemon=True)
        with _interrupts_held_back(), environment(**_ONE_THREAD), _main_left_out():
            self.process.start()
        theirs.close()
        # The process may not listen yet, and a vocabulary is more than a pipe holds.
        self._sender = ThreadPoolExecutor(1, "nursery")

    def expect(self, recipe: Recipe) -> None:
        """Let it build this tokenizer, which is likely the one of `prepare`."""
        self._sender.submit(self._send, recipe)

    def prepare(self, setup: WorkerSetup) -> None:
        """Let the workers begin; one that cannot is noticed by its pipe."""
        self._sender.submit(self._send, setup)

    def _send(self, message: object) -> None:
        with suppress(OSError):
            self._connection.send(message)

    def how_it_ended(self, number: int) -> int | None:
        """The exit code of a worker whose pipe ended, a negative one for a signal; None if it is not known."""
        self._sender.submit(self._send, number).result()
        with suppress(EOFError, OSError):
            if self._connection.poll(_GRACE_S):
                code: int = self._connection.recv()
                return code
        # Nobody knows of the worker, because the nursery itself has ended.
        self.process.join(_GRACE_S)
        return self.process.exitcode

    def end(self) -> None:
        """End every process."""
        self._sender.submit(self._connection.close)  # not while something is being sent
        self.process.join(_GRACE_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self._sender.shutdown()
        self.process.close()


def _live(connection: Connection, pipes: list[Connection], slots: list[list[Sent]]) -> None:
    """The life of the nursery: until the pipe ends."""
    children: dict[int, int] = {}
    try:
        tokenizer, spec = _prepared(connection)
        # What is there now is not looked at again, so that its pages stay shared.
        gc.collect()
        gc.freeze()
        for number, (pipe, own) in enumerate(zip(pipes, slots, strict=True)):
            others = [other for other in (*pipes, connection) if other is not pipe]
            children[number] = _fork(partial(_serve, pipe, own, tokenizer, spec), without=others)
        for pipe in pipes:
            pipe.close()
        while True:
            number = _receive(connection)
            # Once waited for, its number may become another process'.
            connection.send(os.waitstatus_to_exitcode(os.waitpid(children.pop(number), 0)[1]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for child in children.values():
            os.kill(child, signal.SIGKILL)
        # Waited for, their processor time counts as ours.
        for child in children.values():
            os.waitpid(child, 0)


def _prepared(connection: Connection) -> tuple[Tokenizer, EncodeSpec]:
    """What workers need. A recipe that comes first is likely the one, so it is built while its sender compares."""
    likely, tokenizer = None, None
    message = _receive(connection)
    if isinstance(message, Recipe):
        likely = message
        with suppress(Exception):  # its sender meets the same, and takes another engine
            tokenizer = _built(likely)
        message = _receive(connection)
    if tokenizer is None or message.recipe != likely:
        tokenizer = _built(message.recipe)
    return tokenizer, message.spec


def _built(recipe: Recipe) -> Tokenizer:
    tokenizer = build_tokenizer(recipe.name, recipe.files, engine=recipe.engine, options=recipe.options)
    for text in _FIRST_TEXTS:
        with suppress(TextRefused):
            tokenizer.encode_batch([text])
    return tokenizer


def _fork(work: Callable[[], None], *, without: Sequence[Connection]) -> int:
    """A child that does the work and has none of these pipes, whose other ends must see when their owners end."""
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


def _serve(connection: Connection, slots: Sequence[Sent], tokenizer: Tokenizer, spec: EncodeSpec) -> None:
    """The life of a worker: until the pipe ends."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number, slot, piece = _receive(connection)
            connection.send((number, slot, _attempt(piece, tokenizer, spec, slots[slot].fd)))


def _receive(connection: Connection) -> Any:
    """The next message; one that its sender, killed, could not finish is an end like one between two.

    Raises:
        EOFError: the pipe ended.
    """
    try:
        return connection.recv()
    except OSError as error:
        if error.errno is None:  # "got end of file during message"
            raise EOFError from error
        raise


def _attempt(piece: Piece, tokenizer: Tokenizer, spec: EncodeSpec, slot: int) -> Packed | Exception:
    """The result, or what was raised, for the parent to raise; a fault of ours carries its traceback along."""
    try:
        return pack(slot, encode_piece(piece, tokenizer, spec=spec))
    except Exception as error:
        error.add_note("in a worker process:\n" + traceback.format_exc())
        return error


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
# on many cores, otherwise starts a thread for each of them, and a process with threads must not be forked.
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
