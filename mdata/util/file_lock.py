"""File locks that end with the process that holds them, and that name that process.

What is unusual: the same locks also protect unfinished files (`open_locked`); a holder may remove its lock file, so
after locking it is checked that the path still names the file; and on a file system without locks, a run relies on what
the lock file says about its holder. docs/design/house.md says why no library is used.
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

# Errors of file systems without locks; EBADF: NFS, for a file that is open only for reading.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
_LONGEST_HOLDER = 4096


class _HeldError(Exception):
    """Another process has locked the file."""


def open_locked(partial: Path, keep_bytes: int | None = 0) -> int:
    """Open a temporary file exclusively, truncated to `keep_bytes`; takes over the file of a killed process.

    Args:
        partial: the file; created if missing.
        keep_bytes: how much of its content to keep; None: all of it.

    Raises:
        UsageError: another process is writing it, or it is a link. OSError: what the file system said.
        DamageError: the file is shorter than `keep_bytes`.
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
def hold(path: Path, *, remove: bool = False, held: tuple[str, str] | None = None) -> Iterator[None]:
    """Hold a lock file while the block runs; the lock ends with the process.

    The file names its holder, and stays, empty, unless it is to be removed. On a file system without locks, a holder
    counts if it is alive on this host; one on another host is assumed to be alive. `held`: the error's text and
    advice if another process holds the lock.

    Raises:
        UsageError: another process holds it, by host and process id; or it is a link.
        OSError: what the file system said.
    """
    me = f"process {os.getpid()} on {os.uname().nodename}"
    try:
        fd = open_locked(path, keep_bytes=None)
    except UsageError as error:
        raise _held_by(path, held) from error
    try:
        if not _lock(fd, fcntl.LOCK_EX) and not _is_stale(holder(path), me):
            raise _held_by(path, held)
        with atomic_io.named_in_errors(path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, me.encode(), 0)
        try:
            yield
        finally:
            # The lock ends with this process, even if its file cannot be emptied or removed.
            with suppress(OSError):
                os.ftruncate(fd, 0)
                if remove:
                    path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def held_by(path: Path) -> str | None:
    """Who holds a lock file, by the rules of `hold`; None: nobody, or it cannot be read. Nothing is written."""
    try:
        fd = atomic_io.open_no_link(path, os.O_RDONLY)
    except (OSError, UsageError):
        return None
    try:
        # Of the open file: its holder may remove it at any moment. An empty one has no holder, and is not even tried: a
        # run that starts at this moment would find it locked.
        named = os.pread(fd, _LONGEST_HOLDER, 0).decode(errors="replace")
        if named and not _lock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB) and not _is_stale(named, ""):
            return named
    except _HeldError:
        return named
    except OSError:  # such as a folder of this name
        return None
    finally:
        os.close(fd)
    return None


@contextmanager
def wait_for(path: Path) -> Iterator[None]:
    """Wait for exclusive use of this lock file, among processes and threads; it is removed when the block ends.

    On a file system without locks (Lustre without `flock`), or with locks per node, exclusive on this node only, by a
    lock among the node's temporary files. Locking a folder would not work on NFS.
    """
    fd = _locked(path, fcntl.LOCK_EX, anyones=True)
    try:
        here = None if _lock(fd, fcntl.LOCK_EX) else _on_this_node(path)
        with nullcontext() if here is None or here.parent == path.parent else wait_for(here):
            yield
    finally:
        try:
            with suppress(OSError):
                path.unlink()
        finally:
            os.close(fd)  # after Ctrl-C too: this process would wait for itself


def share(path: Path) -> int:
    """Open a lock file (created if missing) that many may use at once; closing it ends this use, as does the process.

    Callers hold a lock of their own while they open, ask and close. On a file system without locks, `is_last` is false.
    """
    return _locked(path, fcntl.LOCK_SH)


def is_last(fd: int) -> bool:
    """Whether nobody else uses the file that `share` opened."""
    try:
        return _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except _HeldError:
        return False


def remove_left(path: Path) -> None:
    """Remove the lock file of a process that was killed in `wait_for`, for callers who need no lock themselves."""
    if path.exists():
        with suppress(OSError, UsageError), wait_for(path):  # a folder that cannot be written keeps it
            pass


def _on_this_node(path: Path) -> Path | None:
    """The lock with this name among the node's temporary files; None if that is impossible."""
    import tempfile  # also imports random, which slows down the start

    name = blake3(os.fsencode(path.absolute())).hexdigest(length=8)
    with suppress(FileNotFoundError):
        return Path(tempfile.gettempdir(), f"mdata-{os.getuid()}-{name}.lock")
    return None


def _locked(path: Path, how: int, *, anyones: bool = False) -> int:
    """The file, opened (created if missing) and locked; only opened if the file system has no locks.

    `anyones`: nothing will be written, so a file of another user is accepted.
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
                continue  # its owner removed it between our two calls
        try:
            _lock(fd, how)
            if atomic_io.is_same_file(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its owner finished between our open and our lock


def _lock(fd: int, how: int) -> bool:
    """Lock the file; false: its file system has no locks.

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


def _held_by(path: Path, held: tuple[str, str] | None) -> UsageError:
    problem, fix = held or (
        f"{path} is held: another run is writing there",
        "wait for it or end it, or give another output",
    )
    return UsageError(problem, found=holder(path) or "another process", fix=fix)


def holder(path: Path) -> str:
    """The holder named in a lock file; empty: nobody."""
    with os.fdopen(atomic_io.open_no_link(path, os.O_RDONLY), errors="replace") as file:
        return file.read()


def _is_stale(named: str, me: str) -> bool:
    """Whether the holder that a lock file names is known to have ended."""
    match = re.fullmatch(r"process (\d+) on (.*)", named)
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
