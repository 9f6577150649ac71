"""Access to the bytes of a pair's files: maps that hold no descriptor, and a pool that keeps few files open.

A file is identified by device, inode, size and time of change when it is first seen. If a loader worker, or a pool that
had closed the file, opens the path again and finds another file, a DamageError is raised. Mapped and open files stay
the same file. The meaning of the bytes and the hashes of blocks are handled elsewhere.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mdata import _core
from mdata.errors import DamageError, MdataError, ResourceError, explain_os_error
from mdata.util.regular_files import regular_file

_HASHED_AT_ONCE = 1 << 20  # larger reads are no faster, and this fits the caches

POOL = _core.FilePool()
"""Of this process, as the limit of descriptors is: at most a quarter of them."""


class Identity(NamedTuple):
    """Tells whether a file is still the same one."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int


def identity_of(facts: os.stat_result) -> Identity:
    """Of the file with these facts; a time that does not fit 64 bits wraps, as in mdata_cpp/file_identity.hpp."""
    modified_ns = (facts.st_mtime_ns + (1 << 63)) % (1 << 64) - (1 << 63)
    return Identity(facts.st_dev, facts.st_ino, facts.st_size, modified_ns)


def look_at(path: Path) -> Identity:
    """The identity of the file at this path now.

    Raises:
        UsageError: it is missing or cannot be inspected.
    """
    try:
        return identity_of(regular_file(path).stat())
    except OSError as error:
        raise explain_os_error(error, "reading") from error


def lies_at(path: Path, identity: Identity) -> bool:
    """Whether the file at this path is still the same one.

    Raises:
        UsageError, ResourceError: it may be there, but cannot be inspected.
    """
    try:
        return identity_of(path.stat()) == identity
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise explain_os_error(error, "reading") from error


def map_bytes(path: Path, identity: Identity | None = None) -> NDArray[np.uint8]:
    """The bytes of a file as a read-only map, which holds no descriptor.

    Raises:
        DamageError: another file is at this path. UsageError, ResourceError: it cannot be mapped.
    """
    try:
        return _core.map_file(os.fsencode(path), identity)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise explain(error, path) from error
        raise ResourceError(
            f"reading: {path}: no more maps, or no more address space",
            fix='mode "pread", a larger vm.max_map_count, or corpora merged into fewer shards',
        ) from error


def hash_file(path: Path, identity: Identity | None = None) -> str:
    """BLAKE3 of a whole file, in hex, in bounded memory and without the GIL.

    Raises:
        OSError: from the file system; ESTALE: another file is at this path.
    """
    hasher = blake3()
    with path.open("rb", buffering=0) as file:
        facts = os.fstat(file.fileno())
        if identity is not None and identity_of(facts) != identity:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        buffer = memoryview(bytearray(min(facts.st_size + 1, _HASHED_AT_ONCE)))
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()


def read_bytes(path: Path, identity: Identity | None = None) -> NDArray[np.uint8]:
    """The bytes of a file, in memory.

    Raises:
        DamageError: another file is at this path. UsageError, ResourceError: it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            if identity is not None and identity_of(os.fstat(file.fileno())) != identity:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return np.fromfile(file, np.uint8)
    except OSError as error:
        raise explain(error, path) from error


def pooled(path: Path, identity: Identity) -> _core.PooledFile:
    """A file in the pool of this process, opened when it is read."""
    return _core.PooledFile(POOL, os.fsencode(path), identity)


def explain(error: OSError, path: Path) -> MdataError:
    """Translate the system's error about a file that was requested by its identity."""
    if error.errno != errno.ESTALE:
        return explain_os_error(OSError(error.errno, os.strerror(error.errno or 0), str(path)), "reading")
    return DamageError(
        f"{path} was replaced or changed while it was in use",
        found="another file, size or time of change than when it was opened",
        fix="put the file back as it was, or open the corpus again",
    )
