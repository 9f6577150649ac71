"""Atomic file writes: a file under its final name is complete.

Every write, fsync and rename of a file that a user keeps goes through the four small functions at the top; tests inject
failures by replacing them (tests/helpers/failures.py), so no other code may call the system directly. What is unusual:
`write_all` loops over short writes, and a rename is followed by an fsync of the folder, because on most file systems
the new name is otherwise not on disk when the call returns.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mdata.errors import UsageError

Buffer = bytes | bytearray | memoryview


def write(fd: int, data: Buffer) -> int:
    """One `os.write`; returns the number of bytes written, which may be fewer than given."""
    return os.write(fd, data)


def sync(fd: int) -> None:
    """Wait until the file's content is on disk."""
    os.fsync(fd)


def sync_soon(fd: int, start: int, *, count: int) -> None:
    """Tell the system to start writing these bytes to disk, so that a later `sync` waits less.

    Only a hint: errors show up in `sync`. Without it Linux keeps up to a tenth of the memory unwritten.
    """
    offset, length, begin_only = ctypes.c_longlong(start), ctypes.c_longlong(count), 2  # SYNC_FILE_RANGE_WRITE
    ctypes.CDLL(None).sync_file_range(fd, offset, length, begin_only)


def rename(source: Path, target: Path) -> None:
    """Give a finished file or folder its final name, replacing an older file of that name.

    Raises:
        UsageError: the name leads to a device, a pipe or a socket, such as /dev/null, which root would replace, too.
    """
    with suppress(FileNotFoundError):
        mode = target.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UsageError(f"{target} is not a regular file and is not replaced", fix="name a new file")
    source.replace(target)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    with _synced(folder):
        pass


@contextmanager
def _synced(folder: Path) -> Iterator[None]:
    """Wait, once the block has ended without an error, until the names in a folder are on disk.

    The folder is opened before the block: another process that waits for a name given there may then rename it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield
        sync(fd)
    finally:
        os.close(fd)


class Descriptor:
    """An open file that is closed only once: on a second close its number might belong to another file.

    Attributes:
        fd: its number; -1 when it is closed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close it; does nothing the second time, even if the first one failed or was interrupted."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def write_all(fd: int, data: Buffer) -> None:
    """Write all bytes, repeating short writes."""
    view = memoryview(data)
    left = view.cast("B") if view.nbytes else memoryview(b"")  # an array without entries cannot be cast
    while left:
        left = left[write(fd, left) :]


def partial_path(path: Path) -> Path:
    """The temporary name beside a final one: hidden, so that globs for results do not find it."""
    return path.with_name(f".{path.name}.partial")


def open_no_link(path: Path, flags: int) -> int:
    """`os.open` of a hidden temporary name, with the usual permissions; a link with that name is not followed.

    Only mdata uses these names. A link with such a name could make mdata overwrite the file that it points to.

    Raises:
        UsageError: a link. OSError: what the file system said.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
        raise UsageError(
            f"{path} is a symbolic link, where mdata writes a file of its own",
            found=f"a link to {path.readlink()}",
            expected="no file, or one that an earlier run left",
            fix="remove the link, and find out who made it; its target was not touched",
        ) from error


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to errors of calls that only have its descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def is_same_file(fd: int, path: Path) -> bool:
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
        UsageError: the temporary name is a link. OSError: what the file system said, with the file's name.
    """
    partial = partial_path(path)
    try:
        fd = open_no_link(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with named_in_errors(path):
            try:
                yield fd
                sync(fd)
            finally:
                os.close(fd)
            with _synced(path.parent):
                rename(partial, path)
    except BaseException:
        with suppress(OSError):  # the first error is reported
            if not partial.is_symlink():  # not ours, and evidence
                partial.unlink(missing_ok=True)
        raise


def atomic_write(path: Path, data: Buffer) -> None:
    """Write a whole file: it has its old content or the new one, never a part of either."""
    with atomic_file(path) as fd:
        write_all(fd, data)


def write_partial(path: Path, data: Buffer) -> None:
    """Write and sync a whole file under its temporary name.

    Raises:
        UsageError: that name is a link. OSError: what the file system said, with the file's name.
    """
    fd = open_no_link(partial_path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with named_in_errors(path):
        try:
            write_all(fd, data)
            sync(fd)
        finally:
            os.close(fd)


def atomic_writes(files: Mapping[Path, Buffer]) -> None:
    """Write files of one folder that belong together: an old one and a new one never exist together.

    All are complete under temporary names before the old ones are removed, in reverse order; then the new ones are
    renamed, in order. A process that is killed in between leaves some files missing, never a mixture. A single file is
    replaced atomically. On an error the temporary files are removed.

    Raises:
        OSError: what the file system said, with the file's name.
    """
    partials = {path: partial_path(path) for path in files}
    try:
        for path, data in files.items():
            write_partial(path, data)
        folders = {path.parent for path in files}
        if len(files) > 1:
            for path in reversed(partials):
                path.unlink(missing_ok=True)
            for folder in folders:
                sync_folder(folder)
        with ExitStack() as renamed:
            for folder in folders:
                renamed.enter_context(_synced(folder))
            for path, partial in partials.items():
                rename(partial, path)
    except BaseException:
        with suppress(OSError):  # the first error is reported
            for partial in partials.values():
                if not partial.is_symlink():  # not ours, and evidence
                    partial.unlink(missing_ok=True)
        raise
