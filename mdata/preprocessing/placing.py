"""Gives complete files their final names in one transaction; every command that writes corpora ends this way. The
journal tells its state:

1. Writing: no "placing" record. Everything new has a hidden temporary name; visible files are unchanged. After a kill
   the run continues or starts over, and nothing has to be undone.
2. Placing: the record was synced after all files, manifests included, and names each by inode and size. From here on
   the transaction only goes forward: the next run on these results, by any command, repeats the steps, and a completed
   step changes nothing. An error in a live process undoes the renames, so that no partial result is visible.
3. Placed: every file has its name. The journal is removed.

The steps: old .idx files are removed; then old manifests; then files that the new results do not have. Then files are
renamed, then manifests, then .idx files. Each step is on disk before the next. So an .idx describes the .bin beside it,
and a pair that can be opened has its manifest: every reader, Megatron's too, needs the .idx. A manifest without it is
visible between these steps only; readers refuse it (`refuse_unfinished` of mdata/corpus/paths.py).

A name proves nothing, because an older result may have it: only a file with the recorded inode and size is ours. Device
numbers are left out: a restart may change them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdata.errors import DamageError, os_errors_named
from mdata.manifest.sidecars import HASHES_ENDINGS
from mdata.manifest.types import CorpusManifest
from mdata.preprocessing.journal import Journal, first_record
from mdata.progress import Progress
from mdata.util import atomic_io, file_lock

RESULT_ENDINGS = (".bin", ".idx", ".json", ".origins", *HASHES_ENDINGS)
_LAST = (".idx", ".json")  # which file of a pair, or of a corpus that refers to other pairs, gets its name last
_SPOOLS = (".lengths", ".boundaries", ".hashes")  # of mdata/indexed/writer.py
_BEGINNING = ".mdata-runs.lock"
_FileMark = list[int]  # inode and size: JSON types


@dataclass(frozen=True)
class Staged:
    """A result that is complete under temporary names: its prefix, its manifest, and the final names of its files."""

    prefix: Path
    manifest: CorpusManifest
    files: tuple[Path, ...]


@dataclass(frozen=True)
class _Placement:
    """What a "placing" record says.

    Attributes:
        folder: of the journal and of all results.
        prefixes: names of the results; a result without new files is only removed.
        files: name in the folder, or full path -> the file's mark.
    """

    folder: Path
    prefixes: Sequence[str]
    files: dict[str, _FileMark]

    def carry_out(self) -> None:
        """Do the remaining steps; after an error, undo the renames."""
        renamed: list[Path] = []
        folders = sorted({(self.folder / name).parent for name in self.files} | {self.folder})
        try:
            for names, do in self._steps():
                for name in names:
                    path = self.folder / name
                    if do == "remove":
                        if not self._has(name):
                            path.unlink(missing_ok=True)
                    elif _mark(atomic_io.partial_path(path)) == self.files[name]:
                        atomic_io.rename(atomic_io.partial_path(path), path)
                        renamed.append(path)
                for folder in folders:
                    atomic_io.sync_folder(folder)
        except BaseException:
            with suppress(OSError):  # the first error is reported
                for path in reversed(renamed):
                    atomic_io.rename(path, atomic_io.partial_path(path))
            raise

    def _steps(self) -> Iterator[tuple[list[str], str]]:
        ended = {name: "" if Path(name).is_absolute() else Path(name).suffix for name in self.files}
        old = [f"{prefix}{ending}" for ending in RESULT_ENDINGS for prefix in self.prefixes]
        yield [name for name in old if name.endswith(".idx")], "remove"
        yield [name for name in old if name.endswith(".json")], "remove"
        yield [name for name in old if name not in self.files], "remove"
        yield [name for name, ending in ended.items() if ending not in (".idx", ".json")], "rename"
        yield [name for name, ending in ended.items() if ending == ".json"], "rename"
        yield [name for name, ending in ended.items() if ending == ".idx"], "rename"

    def _has(self, name: str) -> bool:
        """Whether the file with this name is the one that the record lists for it."""
        return name in self.files and _mark(self.folder / name) == self.files[name]

    def replaces(self) -> bool:
        """Whether files outside this transaction have names of its results."""
        names = {f"{prefix}{ending}" for prefix in self.prefixes for ending in RESULT_ENDINGS} | self.files.keys()
        return any((self.folder / name).exists() and not self._has(name) for name in names)

    def lost(self) -> Path | None:
        """A file that exists under neither name; None: all exist."""
        unnamed = {atomic_io.partial_path(self.folder / name): name for name in self.files if not self._has(name)}
        return next((partial for partial, name in unnamed.items() if _mark(partial) != self.files[name]), None)

    def take_away(self) -> None:
        """Remove the files of results whose last file has no name yet; those that describe others go first."""
        ours: set[str] = set()
        for prefix in self.prefixes:
            last = next((name for ending in _LAST if (name := f"{prefix}{ending}") in self.files), None)
            if last is not None and not self._has(last):
                ours |= {f"{prefix}{ending}" for ending in RESULT_ENDINGS}
        ours |= {name for name in self.files if Path(name).is_absolute()} if ours else set()
        for name in sorted(ours, key=lambda name: (*_LAST, Path(name).suffix).index(Path(name).suffix)):
            if self._has(name):
                (self.folder / name).unlink()
                atomic_io.sync_folder((self.folder / name).parent)


def place(
    journal: Journal, results: Sequence[Staged], *, replaced: Sequence[Path] = (), also: Sequence[Path] = ()
) -> None:
    """Give results their final names.

    Args:
        journal: in the folder of all results.
        results: complete and synced.
        replaced: prefixes of results to remove, because later ones replace them.
        also: final names of other complete files, in any folder.

    Raises:
        ResourceError, UsageError: a file operation failed; the next run completes the transaction.
        DamageError: a temporary file was removed.
    """
    finals = {path.name: path for result in results for path in result.files}
    finals |= {str(path.absolute()): path for path in also}
    files = {}
    # The temporary names must be on disk before the journal refers to them.
    for folder in sorted({path.parent for path in finals.values()}):
        atomic_io.sync_folder(folder)
    for name, path in finals.items():
        mark = _mark(atomic_io.partial_path(path))
        if mark is None:
            raise DamageError(f"{atomic_io.partial_path(path)} was removed while it was being written", fix="run again")
        files[name] = mark
    prefixes = [result.prefix.name for result in results] + [prefix.name for prefix in replaced]
    journal.append({"kind": "placing", "prefixes": prefixes, "files": files})
    journal.resumable = True
    with os_errors_named(f"finishing {results[0].prefix if len(results) == 1 else journal.path.parent}"):
        _Placement(journal.path.parent, prefixes, files).carry_out()


def complete(journal: Journal, progress: Progress, *, may_replace: bool) -> bool:
    """Complete the transaction that a run began; returns whether it is complete now.

    Args:
        journal: of that run. If one of its files is lost, the run is discarded.
        progress: receives a note if so.
        may_replace: whether it may replace older files; only the same command may.
    """
    placement = _placement(journal)
    if placement is None or any(record["kind"] == "given up" for record in journal.records):
        return False
    if not may_replace and placement.replaces():
        return False
    if lost := placement.lost():
        progress.note(f"an earlier run had written everything, but {lost} was removed since; the run is discarded")
        discard_run(journal)
        journal.restart()
        return False
    with os_errors_named(f"finishing what {journal.path} describes"):
        placement.carry_out()
    return True


def discard_run(journal: Journal) -> None:
    """Remove the unfinished files of a journal's run; results that have all their names stay.

    The journal records this before the first file is removed: a partly removed run must not be continued.
    """
    if not journal.records:
        return
    journal.append({"kind": "given up"})
    if placement := _placement(journal):
        placement.take_away()
    for name in journal.records[0]["job"]["outputs"]:
        remove_leftovers(journal.path.parent / name)
    for record in journal.records:
        if record["kind"] == "job" and (quarantine := record["job"].get("policy", {}).get("quarantine")):
            atomic_io.partial_path(Path(quarantine)).unlink(missing_ok=True)


def remove_leftovers(prefix: Path) -> None:
    """Remove the temporary files of a result."""
    for ending in (*_SPOOLS, *RESULT_ENDINGS):
        atomic_io.partial_path(prefix.with_name(prefix.name + ending)).unlink(missing_ok=True)
    shutil.rmtree(buckets_folder(prefix), ignore_errors=True)


def buckets_folder(prefix: Path) -> Path:
    """The hidden folder beside a result in which `shuffle` keeps its buckets."""
    return prefix.with_name(f".{prefix.name}.buckets")


@contextmanager
def beginning(folder: Path) -> Iterator[None]:
    """Serializes the start of runs in a folder: cleaning up after others, and recording the own job in a journal.

    Otherwise two runs that start at the same time and share a result could both miss the other's job, or both see it.
    """
    with file_lock.wait_for(folder / _BEGINNING):
        yield


def nothing_begins(folder: Path) -> None:
    """Remove a leftover lock of `beginning`, for runs that find their results finished."""
    file_lock.remove_left(folder / _BEGINNING)


def other_runs(journal: Journal, outputs: Iterable[str]) -> Iterator[tuple[Journal, dict[str, Any]]]:
    """The journals (locked) of unfinished runs of other commands that would write some of the same files.

    Raises:
        UsageError: such a run is active.
    """
    names = set(outputs)
    for path in sorted(journal.path.parent.glob(f".*{journal.path.suffix}")):
        first = None if path == journal.path else first_record(path)
        if first is None or not names & set(first["job"]["outputs"]):
            continue
        with file_lock.hold(path.with_suffix(".lock"), remove=True):
            other = Journal(path)
            try:
                yield other, first["job"]
            finally:
                other.close(keep=bool(other.records))


def complete_all(journal: Journal, outputs: Iterable[str], progress: Progress, *, may_replace: bool) -> bool:
    """Complete any transaction that was begun on these results; returns whether it was this journal's.

    `may_replace`: this journal's transaction may replace older files, since it belongs to the same command.
    """
    for other, job in other_runs(journal, outputs):
        if complete(other, progress, may_replace=False):
            progress.note(f"{described(job)} had written everything; its results were given their final names")
    return complete(journal, progress, may_replace=may_replace)


def discard_others(journal: Journal, outputs: Iterable[str], progress: Progress) -> None:
    """Discard the files that other unfinished runs left under the names of these results."""
    for other, job in other_runs(journal, outputs):
        discard_run(other)
        other.remove()
        progress.note(f"{described(job)} with the same files is discarded")


def described(job: dict[str, Any]) -> str:
    """Describes an unfinished run by its journal's first record."""
    run_text = job.get("command") or f"run of the keys {' '.join(job['options']['json_keys'])}"
    return f"an earlier, unfinished {run_text}"


def _placement(journal: Journal) -> _Placement | None:
    last = next((record for record in reversed(journal.records) if record["kind"] in ("state", "placing")), None)
    if last is None or last["kind"] == "state" or "prefixes" not in last:
        return None
    return _Placement(journal.path.parent, last["prefixes"], last["files"])


def _mark(path: Path) -> _FileMark | None:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return [facts.st_ino, facts.st_size]
