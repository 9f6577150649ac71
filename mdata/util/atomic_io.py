"""Writing files so that nothing looks finished before it is.

Every write, fsync and rename that we do to a file a user keeps goes through the four small functions at the
top; tests inject failures by replacing them (tests/helpers/failures.py), so they must stay the only door.
What is unusual: `write_all` loops over short writes, and a rename is followed by an fsync of the folder,
because on most file systems the new name is otherwise not on disk when the call returns.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from blake3 import blake3

from mdata.errors import DamageError, UsageError

Buffer = bytes | bytearray | memoryview
# What file systems without locks say; EBADF: NFS, of a file that is open for reading alone.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


class _HeldError(Exception):
    """Another process has locked the file."""


def write(fd: int, data: Buffer) -> int:
    """One `os.write`; returns the bytes taken, which may be fewer than given."""
    return os.write(fd, data)


def sync(fd: int) -> None:
    """Wait until the file's content is on the device."""
    os.fsync(fd)


def sync_soon(fd: int, start: int, *, count: int) -> None:
    """Let the system begin to put these bytes on the device, so that a later `sync` has less to wait for.

    A hint: what comes of it, only `sync` says. Without it Linux keeps up to a tenth of the memory unwritten.
    """
    offset, length, begin_only = ctypes.c_longlong(start), ctypes.c_longlong(count), 2  # SYNC_FILE_RANGE_WRITE
    ctypes.CDLL(None).sync_file_range(fd, offset, length, begin_only)


def rename(source: Path, target: Path) -> None:
    """Give a finished file or folder its final name, replacing an older file of that name."""
    source.replace(target)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the device."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(fd)
    finally:
        os.close(fd)


class Descriptor:
    """An open file that is closed once, whoever closes it again: its number may be another file's by then.

    Attributes:
        fd: its number; -1 when it is closed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close it; does nothing the second time, even where the first one failed or was interrupted."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def write_all(fd: int, data: Buffer) -> None:
    """Write every byte, whatever the number of short writes it takes."""
    left = memoryview(data).cast("B")
    while left:
        left = left[write(fd, left) :]


def partial_path(path: Path) -> Path:
    """The temporary name beside a final one: hidden, so that globs for results do not find it."""
    return path.with_name(f".{path.name}.partial")


def open_own(path: Path, flags: int) -> int:
    """`os.open` of a hidden name of ours, made with the usual permissions; a link that stands there is not followed.

    Nobody but us gives these names. A link among them was put there so that we write over the file that it leads to.

    Raises:
        UsageError: a link. OSError: what the file system said.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
        raise UsageError(
            f"{path} is a link, where a file of ours is to be",
            found=f"a link to {path.readlink()}",
            expected="no file, or one that an earlier run left",
            fix="remove the link, and ask who made it; what it leads to was not touched",
        ) from error


def open_alone(partial: Path, keep_bytes: int | None = 0) -> int:
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
    with _of(path):
        os.ftruncate(fd, keep_bytes)
    os.lseek(fd, keep_bytes, os.SEEK_SET)


@contextmanager
def held(path: Path, *, remove: bool = False) -> Iterator[None]:
    """Hold a lock file while the block runs; the lock dies with the process.

    The file says who holds it, and stays, empty, unless it is to be removed. Where the file system knows no
    locks, a holder that still lives on this host counts, and one on another host is believed to live.

    Raises:
        UsageError: another process holds it, by host and process id; or it is a link.
        OSError: what the file system said.
    """
    me = f"process {os.getpid()} on {os.uname().nodename}"
    try:
        fd = open_alone(path, keep_bytes=None)
    except UsageError as error:
        raise _held_by(path) from error
    try:
        if not _lock(fd, fcntl.LOCK_EX) and not _is_stale(path, me):
            raise _held_by(path)
        with _of(path):
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
def waited_for(path: Path) -> Iterator[None]:
    """Alone among the processes (and threads) that ask for this lock file, which is gone when the block ends.

    Where the file system knows no locks (Lustre without `flock`), alone on this node, by a lock among its temporary
    files; where locks are each node's own, the same. A folder would be locked nowhere on NFS.
    """
    fd = _locked(path, fcntl.LOCK_EX, anyones=True)
    try:
        here = None if _lock(fd, fcntl.LOCK_EX) else _on_this_node(path)
        with nullcontext() if here is None or here.parent == path.parent else waited_for(here):
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
            fd = open_own(path, os.O_RDWR | os.O_CREAT)
        except PermissionError:
            if not anyones or not os.access(path.parent, os.W_OK):
                raise
            try:
                fd = open_own(path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # its owner took it away between our two calls
        try:
            _lock(fd, how)
            if is_still(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its owner finished between our open and our lock


def _lock(fd: int, how: int) -> bool:
    """Whether the file is locked now; false: its file system knows no locks.

    Raises:
        _HeldError: it is by another, and we asked not to wait. OSError: what the file system said.
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


@contextmanager
def _of(path: Path) -> Iterator[None]:
    """Name the file in errors of calls that know a descriptor only."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _held_by(path: Path) -> UsageError:
    holder = _holder(path) or "another process"
    return UsageError(
        f"{path} is held: another run is writing there",
        found=holder,
        fix="wait for it or end it, or give another output",
    )


def _holder(path: Path) -> str:
    """What a lock file says of who holds it."""
    with os.fdopen(open_own(path, os.O_RDONLY), errors="replace") as file:
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


def is_still(fd: int, path: Path) -> bool:
    """Whether the path names the open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


@contextmanager
def atomic_file(path: Path) -> Iterator[int]:
    """Yield a file descriptor whose content becomes `path` when the block ends without an error.

    On an error the temporary file is removed and an older `path` stays as it was.

    Raises:
        UsageError: a link stands under the temporary name. OSError: what the file system said, with the file's name.
    """
    partial = partial_path(path)
    try:
        fd = open_own(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with _of(path):
            try:
                yield fd
                sync(fd)
            finally:
                os.close(fd)
            rename(partial, path)
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # what went wrong first is what is told
            if not partial.is_symlink():  # not ours, and evidence
                partial.unlink(missing_ok=True)
        raise


def atomic_write(path: Path, data: Buffer) -> None:
    """Write a whole file: it has its old content or the new one, never a part of either."""
    with atomic_file(path) as fd:
        write_all(fd, data)


def atomic_writes(files: Mapping[Path, Buffer]) -> None:
    """Write files of one folder that belong together: at no time does an old one stand beside a new one.

    All are complete under temporary names before the first old one is removed, in reverse order; then the new ones get
    their names, in order. A process that is killed between leaves some of the files missing, never a mixture.
    A single file is replaced at once. On an error the temporary files are removed.

    Raises:
        OSError: what the file system said, with the file's name.
    """
    partials = {path: partial_path(path) for path in files}
    made: list[Path] = []  # a link under such a name is not ours, and stays
    try:
        for path, data in files.items():
            fd = open_own(partials[path], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            made.append(partials[path])
            with _of(path):
                try:
                    write_all(fd, data)
                    sync(fd)
                finally:
                    os.close(fd)
        folders = {path.parent for path in files}
        if len(files) > 1:
            for path in reversed(partials):
                path.unlink(missing_ok=True)
            for folder in folders:
                sync_folder(folder)
        for path, partial in partials.items():
            rename(partial, path)
        for folder in folders:
            sync_folder(folder)
    except BaseException:
        with suppress(OSError):  # what went wrong first is what is told
            for partial in made:
                partial.unlink(missing_ok=True)
        raise
