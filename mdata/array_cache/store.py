"""A folder of cached arrays: found by their key, complete or absent, built once on each node.

An entry is a folder named by the hash of its key, with one .npy for each array and `arrays.json`: the key, and size and
hash of every file. All of it is compared at opening, so an opened array is the one that was built; an entry that
differs is built again. An entry is written under a temporary name and renamed as a whole. Other processes wait while it
is built; nodes whose file system shares no locks each build it, and the first is used. Nodes do not communicate.
"""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata.errors import os_errors_named
from mdata.progress import SILENT, Progress
from mdata.util import atomic_io, file_lock
from mdata.util.canonical_json import hash_of

FORMAT, VERSION = "mdata-arrays", 1
FACTS = "arrays.json"
_DEAD_AFTER_S = 86_400.0
# More than enough for the header of an array of numbers.
_HEAD_BYTES = 4096

Arrays = dict[str, npt.NDArray[Any]]
Make = Callable[[], Iterable[Arrays]]
"""Parts of the same arrays, to be concatenated; at least one part."""


def cached(
    folder: Path, key: Mapping[str, Any], *, make: Make, progress: Progress = SILENT, mapped: bool = True
) -> Arrays:
    """The arrays of a key, read-only, from the folder; built first if missing.

    Args:
        folder: holds the entries; created if it does not exist.
        key: everything that decides the arrays, as JSON types; its `name` begins the entry's name.
        make: builds them if there is no entry.
        progress: receives a note on why an entry is built again.
        mapped: false: they are read into memory.

    Raises:
        ResourceError, UsageError: the disk is full, or the folder cannot be written.
    """
    arrays = find(folder, key, progress=progress, mapped=mapped)
    if arrays is not None:
        return arrays
    with os_errors_named(f"caching arrays in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        entry = entry_path(folder, key)
        with _build_lock(entry):
            # Another process may have built it while this one waited.
            arrays = _opened(entry, key, mapped=mapped) if entry.is_dir() else None
            if arrays is None:
                arrays = _build(entry, key, parts=make(), mapped=mapped)
    return arrays


def find(folder: Path, key: Mapping[str, Any], *, progress: Progress = SILENT, mapped: bool = True) -> Arrays | None:
    """The arrays of a key if the folder has a complete entry; nothing is written.

    A lock that a builder left, killed just before its end, is removed.
    """
    entry = entry_path(folder, key)
    arrays = _opened(entry, key, progress=progress, mapped=mapped) if entry.is_dir() else None
    if arrays is not None:
        file_lock.remove_left(_lock_path(entry))
    return arrays


def entry_path(folder: Path, key: Mapping[str, Any]) -> Path:
    """The folder of an entry."""
    return folder / f"{key['name']}-{hash_of(dict(key))[:32]}"


def _opened(entry: Path, key: Mapping[str, Any], *, progress: Progress = SILENT, mapped: bool) -> Arrays | None:
    """The arrays of an entry, if it is complete and has this key."""
    try:
        facts = json.loads((entry / FACTS).read_bytes())
        reason = _difference(entry, facts, key=key)
        if reason is None:
            return _loaded(entry, facts["files"], mapped=mapped)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error)
    progress.note(f"{entry} is built again: {reason}")
    return None


def _loaded(entry: Path, names: Iterable[str], *, mapped: bool) -> Arrays:
    arrays: Arrays = {}
    for name in names:
        array = _array(entry / f"{name}.npy")
        arrays[name] = array if mapped else array.copy()
        arrays[name].flags.writeable = False
    return arrays


def _array(path: Path) -> npt.NDArray[Any]:
    """Map a file of `_write_parts`, and refuse any other: `np.load` would accept archives of arrays too.

    Raises:
        OSError: it cannot be mapped. ValueError, TypeError: not such a file.
    """
    content = np.memmap(path, np.uint8, mode="r")
    head = io.BytesIO(content[:_HEAD_BYTES].tobytes())
    if np.lib.format.read_magic(head) != (1, 0):
        raise ValueError(f"{path.name} is not in version 1.0 of its format")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(head)
    if by_columns or dtype.hasobject:  # object arrays would use addresses from the file
        raise ValueError(f"{path.name} holds {dtype}{' by columns' if by_columns else ''}")
    # A plain ndarray: a memmap is slow to index.
    return np.ndarray(shape, dtype, buffer=content, offset=head.tell())


def _difference(entry: Path, facts: dict[str, Any], *, key: Mapping[str, Any]) -> str | None:
    if (facts["format"], facts["version"], facts["key"]) != (FORMAT, VERSION, dict(key)):
        return "it has another key or version"
    for name, expected in facts["files"].items():
        path = entry / f"{name}.npy"
        if path.stat().st_size != expected["bytes"]:
            return f"{path.name} has {path.stat().st_size} bytes, not {expected['bytes']}"
        if blake3().update_mmap(path).hexdigest() != expected["hash"]:
            return f"{path.name} was changed"
    return None


def _build(entry: Path, key: Mapping[str, Any], *, parts: Iterable[Arrays], mapped: bool) -> Arrays:
    """Write the entry under a temporary name, then rename it, unless another node was faster."""
    import shutil  # imports compression libraries

    making = _temporary(entry)
    making.mkdir()
    try:
        names = _write_parts(making, parts)
        files = {name: _file_facts(making / f"{name}.npy") for name in names}
        facts = {"format": FORMAT, "version": VERSION, "key": dict(key), "files": files}
        atomic_io.atomic_write(making / FACTS, json.dumps(facts, indent=1, sort_keys=True).encode() + b"\n")
        arrays = _loaded(making, files, mapped=mapped)  # the renamed folder may be removed at once
        return _rename_or_use(making, entry, key, mapped=mapped) or arrays
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _rename_or_use(making: Path, entry: Path, key: Mapping[str, Any], *, mapped: bool) -> Arrays | None:
    """Rename a new entry; an existing complete entry stays, and is returned."""
    import shutil

    while True:
        try:
            atomic_io.rename(making, entry)
            atomic_io.sync_folder(entry.parent)
            return None
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        theirs = _opened(entry, key, mapped=mapped)
        if theirs is not None:
            return theirs
        damaged = _temporary(entry)
        with suppress(FileNotFoundError):
            atomic_io.rename(entry, damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _write_parts(folder: Path, parts: Iterable[Arrays]) -> list[str]:
    """Write a file for each array; its header once more at the end, when its length is known."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, np.dtype[Any]] = {}
    files: dict[str, int] = {}
    with ExitStack() as stack:
        for part in parts:
            for name, array in part.items():
                if name not in files:
                    files[name] = stack.enter_context(atomic_io.atomic_file(folder / f"{name}.npy"))
                    shapes[name], dtypes[name] = (0, *array.shape[1:]), array.dtype
                    atomic_io.write_all(files[name], _header(shapes[name], dtypes[name]))
                assert (array.shape[1:], array.dtype) == (shapes[name][1:], dtypes[name]), f"parts of {name} differ"
                shapes[name] = (shapes[name][0] + len(array), *array.shape[1:])
                atomic_io.write_all(files[name], np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        for name, fd in files.items():
            os.lseek(fd, 0, os.SEEK_SET)
            atomic_io.write_all(fd, _header(shapes[name], dtypes[name]))
    return list(files)


def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The header of a .npy; numpy leaves room in it for a growing first dimension."""
    header = io.BytesIO()
    facts = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
    np.lib.format.write_array_header_1_0(header, facts)
    return header.getvalue()


def _file_facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "hash": blake3().update_mmap(path).hexdigest()}


@contextmanager
def _build_lock(entry: Path) -> Iterator[None]:
    """Lock for one builder of an entry on this node, or on all that share locks; removes files of killed ones."""
    import shutil

    with file_lock.wait_for(_lock_path(entry)):
        for left in entry.parent.glob(f".{entry.name}.*-*-*"):
            if _is_dead(left):
                shutil.rmtree(left, ignore_errors=True)
        yield


def _lock_path(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}.building")


def _temporary(entry: Path) -> Path:
    """A temporary name that no other process uses; it names the owning process."""
    return entry.with_name(f".{entry.name}.{_machine()}-{os.getpid()}-{os.urandom(4).hex()}")


def _is_dead(left: Path) -> bool:
    """Whether the builder of a folder is dead: its process has ended, or it has written nothing for a day."""
    machine, process, *_ = left.name.rpartition(".")[2].split("-")
    if machine == _machine() and not Path(f"/proc/{process}").exists():
        return True
    with suppress(OSError):  # removed by its owner meanwhile
        return max(path.stat().st_mtime for path in (left, *left.iterdir())) < time.time() - _DEAD_AFTER_S
    return False


@cache
def _machine() -> str:
    """Equal for processes whose ids can be compared: same boot of the same host, same container."""
    facts = [os.uname().nodename]
    with suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return blake3(" ".join(facts).encode()).hexdigest(length=4)
