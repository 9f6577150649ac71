"""The bytes of a pair's files: maps without a descriptor, and files of which only some are open at once.

A file is known by its identity (device, inode, size, time of change), as it was when it was first looked at. Whoever
opens it again, a loader worker or a pool that had closed it, is refused another file of the same name by a DamageError.
What is mapped or open stays the file that it was. Not done here: what the bytes mean, and hashes of single blocks.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mdata import _core
from mdata.errors import DamageError, MdataError, ResourceError, explain_os_error

Identity = tuple[int, int, int, int]

_HASHED_AT_ONCE = 1 << 20  # as fast as more, and stays in the caches

POOL = _core.FilePool()
"""Of this process, as the limit of descriptors is: at most a quarter of them."""


def identity_of(facts: os.stat_result) -> Identity:
    """(device, inode, size, time of change in ns)."""
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def look_at(path: Path) -> Identity:
    """The identity of what lies there now.

    Raises:
        UsageError: nothing does, or it cannot be looked at.
    """
    try:
        return identity_of(path.stat())
    except OSError as error:
        raise explain_os_error(error, "reading") from error


def lies_at(path: Path, identity: Identity) -> bool:
    """Whether this very file lies there now."""
    try:
        return identity_of(path.stat()) == identity
    except OSError:
        return False


def map_bytes(path: Path, identity: Identity | None = None) -> NDArray[np.uint8]:
    """The bytes of a file as a read-only map, which holds no descriptor.

    Raises:
        DamageError: another file lies there. UsageError, ResourceError: it cannot be mapped.
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
        OSError: what the file system said; ESTALE: another file lies there.
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
        DamageError: another file lies there. UsageError, ResourceError: it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            if identity is not None and identity_of(os.fstat(file.fileno())) != identity:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return np.fromfile(file, np.uint8)
    except OSError as error:
        raise explain(error, path) from error


def pooled(path: Path, identity: Identity) -> _core.PooledFile:
    """A file that is opened when it is read, by the pool of this process."""
    return _core.PooledFile(POOL, os.fsencode(path), identity)


def explain(error: OSError, path: Path) -> MdataError:
    """What the system said of a file that was asked for by its identity."""
    if error.errno != errno.ESTALE:
        return explain_os_error(OSError(error.errno, os.strerror(error.errno or 0), str(path)), "reading")
    return DamageError(
        f"{path} was replaced or changed while it was in use",
        found="another file, size or time of change than when it was opened",
        fix="put the file back as it was, or open the corpus again",
    )
