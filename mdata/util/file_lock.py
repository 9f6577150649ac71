"""Locks on files that die with the process that holds them, and say who that is.

What is unusual: the same file system locks guard files in the making themselves (`open_locked`); the holder may take
its lock file away, so each lock looks whether the path still names the file; and where a file system knows no locks,
a run goes on by what the lock file says of its holder. docs/design/house.md says why this is no library.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from blake3 import blake3

from mdata.errors import DamageError, UsageError
from mdata.util import atomic_io

# What file systems without locks say; EBADF: NFS, of a file that is open for reading alone.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


class _HeldError(Exception):
    """Another process has locked the file."""


def open_locked(partial: Path, keep_bytes: int | None = 0) -> int:
    """Open a temporary file for this process alone, cut to its first bytes; what a killed process left is taken over.

    Args:
        partial: the file; made where it is not there.
        keep_bytes: how much of its content stays; None: all of it.

    Raises:
        UsageError: another process is writing it, or it is a link. OSError: what the file system said.
        DamageError: it holds less than what was to be kept.
    """
    try:
        fd = _locked(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except _HeldError as error:
        raise UsageError(
            f"another process is writing {partial}", fix="wait for it or end it, or give another output"
        ) from error
    try:
        if keep_bytes is not None:
            _cut(fd, partial, keep_bytes)
        return fd
    except BaseException:
        os.close(fd)
        raise


def _cut(fd: int, path: Path, keep_bytes: int) -> None:
    size = os.fstat(fd).st_size
    if size < keep_bytes:
        raise DamageError(f"{path} is shorter than it was", found=f"{size} bytes", expected=f"{keep_bytes} or more")
    with atomic_io.named_in_errors(path):
        os.ftruncate(fd, keep_bytes)
    os.lseek(fd, keep_bytes, os.SEEK_SET)


@contextmanager
def hold(path: Path, *, remove: bool = False) -> Iterator[None]:
    """Hold a lock file while the block runs; the lock dies with the process.

    The file says who holds it, and stays, empty, unless it is to be removed. Where the file system knows no
    locks, a holder that still lives on this host counts, and one on another host is believed to live.

    Raises:
        UsageError: another process holds it, by host and process id; or it is a link.
        OSError: what the file system said.
    """
    me = f"process {os.getpid()} on {os.uname().nodename}"
    try:
        fd = open_locked(path, keep_bytes=None)
    except UsageError as error:
        raise _held_by(path) from error
    try:
        if not _lock(fd, fcntl.LOCK_EX) and not _is_stale(path, me):
            raise _held_by(path)
        with atomic_io.named_in_errors(path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, me.encode(), 0)
        try:
            yield
        finally:
            # The lock dies with us, whether its file can be emptied and taken away or not.
            with suppress(OSError):
                os.ftruncate(fd, 0)
                if remove:
                    path.unlink(missing_ok=True)
    finally:
        os.close(fd)


@contextmanager
def wait_for(path: Path) -> Iterator[None]:
    """Alone among the processes (and threads) that ask for this lock file, which is gone when the block ends.

    Where the file system knows no locks (Lustre without `flock`), alone on this node, by a lock among its temporary
    files; where locks are each node's own, the same. A folder would be locked nowhere on NFS.
    """
    fd = _locked(path, fcntl.LOCK_EX, anyones=True)
    try:
        here = None if _lock(fd, fcntl.LOCK_EX) else _on_this_node(path)
        with nullcontext() if here is None or here.parent == path.parent else wait_for(here):
            yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(fd)


def _on_this_node(path: Path) -> Path | None:
    """The lock of this name among the node's temporary files; None where there can be none."""
    import tempfile  # random, too: what starts fast does without

    name = blake3(os.fsencode(path.absolute())).hexdigest(length=8)
    with suppress(FileNotFoundError):
        return Path(tempfile.gettempdir(), f"mdata-{os.getuid()}-{name}.lock")
    return None


def _locked(path: Path, how: int, *, anyones: bool = False) -> int:
    """The file, open and locked, made where it is not there; where the file system knows no locks it is open.

    `anyones`: nothing will be written, so one that another user made will do.
    """
    while True:
        try:
            fd = atomic_io.open_no_link(path, os.O_RDWR | os.O_CREAT)
        except PermissionError:
            if not anyones or not os.access(path.parent, os.W_OK):
                raise
            try:
                fd = atomic_io.open_no_link(path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # its owner took it away between our two calls
        try:
            _lock(fd, how)
            if atomic_io.is_same_file(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its owner finished between our open and our lock


def _lock(fd: int, how: int) -> bool:
    """Whether the file is locked now; false: its file system knows no locks.

    Raises:
        _HeldError: another process holds the lock, and `how` says not to wait. OSError: what the file system said.
    """
    try:
        fcntl.flock(fd, how)
    except OSError as error:
        if isinstance(error, BlockingIOError) and how & fcntl.LOCK_NB:
            raise _HeldError from error
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _held_by(path: Path) -> UsageError:
    holder = _holder(path) or "another process"
    return UsageError(
        f"{path} is held: another run is writing there",
        found=holder,
        fix="wait for it or end it, or give another output",
    )


def _holder(path: Path) -> str:
    """What a lock file says of who holds it."""
    with os.fdopen(atomic_io.open_no_link(path, os.O_RDONLY), errors="replace") as file:
        return file.read()


def _is_stale(path: Path, me: str) -> bool:
    """Whether the holder that the file names is known to be gone."""
    match = re.fullmatch(r"process (\d+) on (.*)", _holder(path))
    if match is None:
        return True
    if match[2] != os.uname().nodename:
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return match[0] == me
