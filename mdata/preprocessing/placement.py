"""Final names that a run gave before it died: whose they are, and taking them back under their hidden names.

A name proves nothing, because an older result may have it. Before a run gives the first final name its journal lists
the files in the making by inode and size; a later run takes back what it finds under these marks, and nothing else.
What it keeps of them is compared by content besides (mdata/indexed/append_file.py). A device's number is no part of a
mark: after a restart it may be another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mdata.errors import os_errors_named
from mdata.indexed.pair_format import bin_path, idx_path
from mdata.manifest.sidecars import hashes_path, manifest_path
from mdata.preprocessing.corpus_writer import origins_path
from mdata.util import atomic_io

_ENDINGS = (".bin", ".idx", ".lengths", ".boundaries", ".hashes", ".origins", ".bin.blake3", ".json")
_Mark = list[int]  # inode and size: JSON types


@dataclass(frozen=True)
class Placing:
    """The files to which a run was about to give final names, by these names; none: it had not come so far."""

    files: dict[str, _Mark] = field(default_factory=dict)
    quarantine: _Mark | None = None

    def names(self, path: Path) -> bool:
        """Whether the file that has this final name is one of them."""
        return path.name in self.files and _mark(path) == self.files[path.name]

    def names_quarantine(self, path: Path) -> bool:
        """The same of the quarantine file, which may lie anywhere."""
        return self.quarantine is not None and _mark(path) == self.quarantine

    def take_back(self, prefix: Path) -> None:
        """The run's own files of a result become temporary again; what speaks of its .bin goes first."""
        with os_errors_named(f"taking back {prefix}"):
            if self.names(bin_path(prefix)):
                for path in (manifest_path(prefix), idx_path(prefix)):
                    remove_lasting(path)
                hashes_path(prefix).unlink(missing_ok=True)
                _hide(bin_path(prefix))
            if self.names(origins_path(prefix)):
                _hide(origins_path(prefix))

    def take_back_quarantine(self, path: Path) -> None:
        """The run's own quarantine file becomes temporary again."""
        if self.names_quarantine(path):
            with os_errors_named(f"taking back {path}"):
                _hide(path)


def placing_record(prefixes: Iterable[Path], quarantine: str | None) -> dict[str, Any]:
    """What a journal keeps before the first final name is given; everything must be synced."""
    finals = [path for prefix in prefixes for path in (bin_path(prefix), origins_path(prefix))]
    kept = quarantine and _mark(atomic_io.partial_path(Path(quarantine)))
    return {
        "kind": "placing",
        "files": {path.name: mark for path in finals if (mark := _mark(atomic_io.partial_path(path)))},
        "quarantine": kept or None,
    }


def placing_of(records: Sequence[dict[str, Any]]) -> Placing:
    """What the records of a journal say; nothing, where something was written after the last such record."""
    last = next((record for record in reversed(records) if record["kind"] in ("state", "placing")), None)
    if last is None or last["kind"] == "state":
        return Placing()
    return Placing(last["files"], last["quarantine"])


def remove_partials(prefix: Path) -> None:
    """Remove the temporary files of a result."""
    for ending in _ENDINGS:
        atomic_io.partial_path(prefix.with_name(prefix.name + ending)).unlink(missing_ok=True)


def remove_lasting(path: Path) -> None:
    """Remove a file, and wait until its absence is on the device."""
    if path.exists():
        path.unlink()
        atomic_io.sync_folder(path.parent)


def _hide(path: Path) -> None:
    """Back to the hidden name; a file that stands there cannot be this one."""
    atomic_io.rename(path, atomic_io.partial_path(path))
    atomic_io.sync_folder(path.parent)


def _mark(path: Path) -> _Mark | None:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return [facts.st_ino, facts.st_size]
