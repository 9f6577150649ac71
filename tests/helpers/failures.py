"""Failure injection: all writes, syncs and renames go through mdata.util.atomic_io; each can be made to fail."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mdata
from mdata.corpus.paths import unfinished_file
from mdata.util import atomic_io


class Calls:
    """The durable calls seen so far, as (name, file), and the one that fails."""

    def __init__(self, fail_at: int | None, code: int) -> None:
        self.seen: list[tuple[str, str]] = []
        self._fail_at = fail_at
        self._code = code

    def through(self, name: str, real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            number = len(self.seen)
            self.seen.append((name, _what(arguments)))
            if number == self._fail_at:
                raise OSError(self._code, os.strerror(self._code))
            return real(*arguments)

        return call


@contextmanager
def durable_calls(
    monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None, *, code: int = errno.ENOSPC
) -> Iterator[Calls]:
    """Record the calls of write, sync and rename; call number `fail_at` (from 0) fails with `code`.

    To try every failure: run once without one, then once for each of `len(calls.seen)`.
    """
    calls = Calls(fail_at, code)
    with monkeypatch.context() as patch:
        for name in ("write", "sync", "rename"):
            patch.setattr(atomic_io, name, calls.through(name, getattr(atomic_io, name)))
        yield calls


@contextmanager
def removals(
    monkeypatch: pytest.MonkeyPatch, folder: Path, fail_at: int | None = None, *, code: int = errno.EIO
) -> Iterator[Calls]:
    """As `durable_calls`, for files below a folder that are deleted or truncated: `os.unlink` and `os.ftruncate`."""
    calls = Calls(fail_at, code)

    def watched(name: str, real: Any) -> Any:
        counted = calls.through(name, real)

        def call(target: Any, *more: Any, **options: Any) -> Any:
            path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(os.fsdecode(target))
            # A file that is not there fails by itself.
            ours = path.is_absolute() and path.is_relative_to(folder) and path.exists()
            return counted(target, *more) if ours else real(target, *more, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("unlink", "ftruncate"):
            patch.setattr(os, name, watched(name, getattr(os, name)))
        yield calls


def crash_at(
    n: int,
    work: Callable[[], object],
    *,
    calls: Sequence[str] = ("write", "sync", "rename"),
    removals: bool = False,
) -> bool:
    """Run `work` in a child that ends, with no handler run, before its n-th of these calls.

    `removals`: every other call of Python that changes a folder or cuts a file counts too. Returns whether it came that
    far; an error of the work itself is one here.
    """
    child = os.fork()
    if child == 0:
        code = _FAILED
        try:
            with pytest.MonkeyPatch.context() as patch:
                counted = itertools.count()
                for name in calls:
                    patch.setattr(atomic_io, name, _dying(getattr(atomic_io, name), counted, n))
                for name in _CHANGING if removals else ():
                    patch.setattr(os, name, _dying(getattr(os, name), counted, n))
                work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, _CRASHED), f"the work failed before it was cut off (exit {code})"
    return code == _CRASHED


def assert_what_is_visible_is_true(
    folder: Path, *, full: bool = True, named: str = "[!.]*", bare: Collection[str] = ()
) -> None:
    """Every manifest is true or its corpus refused as unfinished; every pair that can be opened has its manifest.

    Args:
        named: a pattern of the manifests to look at. bare: pairs that other programs wrote, without one.
    """
    for path in folder.glob(f"{named}.json"):
        problems = mdata.verify(path, full=full).problems
        assert not problems or (unfinished_file(path.with_suffix("")) and "is not finished" in str(problems)), problems
    for path in folder.glob("[!.]*.idx"):
        assert path.stem in bare or path.with_suffix(".json").exists(), f"{path.name} can be opened and has no manifest"


class Killed(BaseException):
    """Stands for the end of the process; see `killed_at`."""


def killed_at(n: int, work: Callable[[], object], *, also: Sequence[tuple[Any, str]] = ()) -> bool:
    """As `crash_at`, in this process, for work whose threads do not survive a fork: whether it came to its n-th call.

    That call and all later ones raise, so that no handler changes the disk any more. `also`: functions, as (module,
    name), that count too, such as one that writes to storage.
    """
    counted, lock = itertools.count(), threading.Lock()

    def dying(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with lock:
                number = next(counted)
            if number >= n:
                raise Killed
            return real(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (*((atomic_io, name) for name in _DURABLE), *((os, name) for name in _CHANGING), *also):
            patch.setattr(module, name, dying(getattr(module, name)))
        try:
            work()
        except Killed:
            return True
    assert next(counted) <= n, "the work went on after its end"
    return False


_CRASHED, _FAILED = 9, 1
_DURABLE = ("write", "sync", "rename")
_CHANGING = ("unlink", "ftruncate", "mkdir", "rmdir", "pwrite", "symlink", "link")


def _dying(real: Any, counted: Iterator[int], n: int) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        if next(counted) == n:
            os._exit(_CRASHED)
        return real(*arguments, **options)

    return call


def _what(arguments: tuple[Any, ...]) -> str:
    first = arguments[0]
    if isinstance(first, str):
        return Path(first).name
    if isinstance(first, Path):
        return " -> ".join(Path(argument).name for argument in arguments if isinstance(argument, Path))
    return Path(f"/proc/self/fd/{first}").readlink().name  # a file or, for a folder's sync, the folder
