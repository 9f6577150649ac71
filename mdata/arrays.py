"""Arrays that take long to build, kept in a folder: found by what they are, whole or not there, built once a node.

An entry is a folder named by the hash of its key, with one .npy for each array and `arrays.json`: the key, and
size and hash of every file. All of it is compared when it is opened, so an array that is opened is the one that
was built; what does not agree is built anew. An entry is made under another name and renamed as a whole. Whoever
comes while it is being built waits; where a file system knows no locks both build, and the first one's stays.
Nothing here speaks to other nodes.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata import durable
from mdata.errors import os_errors_named
from mdata.manifest import hash_of
from mdata.progress import SILENT, Progress

FORMAT, VERSION = "mdata-arrays", 1
FACTS = "arrays.json"

Arrays = dict[str, npt.NDArray[Any]]


def kept(
    folder: Path, key: Mapping[str, Any], *, make: Callable[[], Arrays], progress: Progress = SILENT
) -> Mapping[str, npt.NDArray[Any]]:
    """The arrays of a key: mapped from the folder, after they were built if need be.

    Args:
        folder: where entries are kept; made where it is not there.
        key: all that decides the arrays, as JSON types; `name` in it begins the entry's name.
        make: builds them, when there is no such entry.
        progress: hears why an entry is built anew.

    Raises:
        ResourceError, UsageError: the disk is full, or the folder cannot be written.
    """
    with os_errors_named(f"keeping arrays in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        entry = entry_path(folder, key)
        if entry.is_dir() and (found := _opened(entry, key, progress=progress)) is not None:
            return found
        with _alone(entry):
            # Somebody else may have built it while we waited.
            found = _opened(entry, key, progress=SILENT) if entry.is_dir() else None
            if found is None:
                _write(entry, key, arrays=make())
                found = _opened(entry, key, progress=progress)
    assert found is not None, f"{entry} was just written"
    return found


def entry_path(folder: Path, key: Mapping[str, Any]) -> Path:
    """The folder of an entry."""
    return folder / f"{key['name']}-{hash_of(dict(key))[:32]}"


def _opened(entry: Path, key: Mapping[str, Any], *, progress: Progress) -> Arrays | None:
    """The arrays of an entry, if it is whole and of this key."""
    try:
        facts = json.loads((entry / FACTS).read_bytes())
        reason = _difference(entry, facts, key=key)
        if reason is None:
            return {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in facts["files"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error)
    progress.note(f"{entry} is built anew: {reason}")
    return None


def _difference(entry: Path, facts: dict[str, Any], *, key: Mapping[str, Any]) -> str | None:
    if (facts["format"], facts["version"], facts["key"]) != (FORMAT, VERSION, dict(key)):
        return "it is of another key or version"
    for name, known in facts["files"].items():
        path = entry / f"{name}.npy"
        if path.stat().st_size != known["bytes"]:
            return f"{path.name} has {path.stat().st_size} bytes, not {known['bytes']}"
        if blake3().update_mmap(path).hexdigest() != known["hash"]:
            return f"{path.name} is not what was written"
    return None


def _write(entry: Path, key: Mapping[str, Any], *, arrays: Arrays) -> None:
    """Make the entry under another name, then give it its own."""
    making = entry.with_name(f".{entry.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    try:
        files = {name: _write_array(making / f"{name}.npy", array) for name, array in arrays.items()}
        facts = {"format": FORMAT, "version": VERSION, "key": dict(key), "files": files}
        durable.atomic_write(making / FACTS, json.dumps(facts, indent=1, sort_keys=True).encode() + b"\n")
        if entry.is_dir():
            # What stood there was looked at and is damaged.
            shutil.rmtree(entry)
        durable.rename(making, entry)
        durable.sync_folder(entry.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _write_array(path: Path, array: npt.NDArray[Any]) -> dict[str, Any]:
    header = io.BytesIO()
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    content = array.reshape(-1).view(np.uint8).data
    with durable.atomic_file(path) as fd:
        durable.write_all(fd, header.getvalue())
        durable.write_all(fd, content)
    hasher = blake3(header.getvalue())
    hasher.update(content)
    return {"bytes": header.getbuffer().nbytes + array.nbytes, "hash": hasher.hexdigest()}


@contextmanager
def _alone(entry: Path) -> Iterator[None]:
    """One builder of an entry; what killed ones left is cleared away."""
    lock = entry.with_name(f".{entry.name}.lock")
    lock.mkdir(exist_ok=True)
    with durable.waited_for(lock):
        for left in entry.parent.glob(f".{entry.name}.[0-9]*"):
            if not Path(f"/proc/{left.suffix[1:]}").exists():
                shutil.rmtree(left, ignore_errors=True)
        yield
