"""How merge, split, sample and shuffle write their results: those of one command in one transaction.

A command that was killed while it wrote starts over; one that was killed later is completed (placing.py). Repeated
after its end, it finds its results and does nothing. Files of other commands are named in an error and not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mdata.errors import MdataError, OtherResultsError, os_errors_named
from mdata.indexed.pair_format import bin_path, idx_path
from mdata.manifest.io import load_manifest
from mdata.manifest.sidecars import manifest_path
from mdata.manifest.types import CorpusManifest
from mdata.object_storage.address import refuse_output_address
from mdata.preprocessing.finished import first_damage
from mdata.preprocessing.journal import Journal
from mdata.preprocessing.placing import (
    Staged,
    beginning,
    complete_all,
    discard_others,
    discard_run,
    nothing_begins,
    place,
    remove_leftovers,
)
from mdata.progress import Progress
from mdata.util import file_lock


@dataclass(frozen=True)
class Rewriting:
    """What is common to these commands.

    Attributes:
        command: what is done to which corpus, in a few words; identical for identical results.
        called: the name of a result in messages.
        prefixes: of the results, all in one folder.
        make: writes a result and closes its writers; temporary files are left to this module.
        differs: how an existing corpus with a result's name differs from it; None: it does not.
        overwrite: replace other corpora with these names; None: the command has no such option.
        damage: what is wrong with the files of an existing result of this command; None: nothing.
    """

    command: str
    called: str
    prefixes: Sequence[Path]
    make: Callable[[Path], Staged]
    differs: Callable[[Path, CorpusManifest], str | None]
    overwrite: bool | None = None
    damage: Callable[[Path], str | None] = first_damage


@dataclass(frozen=True)
class WrittenCorpus:
    """A result; `there_before`: an earlier run of the same command wrote it."""

    manifest: CorpusManifest
    there_before: bool


def write_results(rewriting: Rewriting, progress: Progress) -> dict[Path, WrittenCorpus]:
    """Write all results, or find them written.

    Raises:
        UsageError: other files have these names, or another process is writing them. ResourceError: a file operation
            failed. Whatever else `make` raises.
    """
    first = rewriting.prefixes[0]
    for prefix in rewriting.prefixes:
        refuse_output_address(prefix)
    path = first.with_name(f".{first.name}.rewrite.journal")
    lock = path.with_suffix(".lock")
    # If nothing is left to do, nothing is written, not even a lock: the folder may be read-only.
    if not path.exists() and not lock.exists():
        there = _finished(rewriting)
        if len(there) == len(rewriting.prefixes):
            nothing_begins(path.parent)
            return there
    with os_errors_named(f"writing {first}"):
        first.parent.mkdir(parents=True, exist_ok=True)
        with beginning(first.parent), ExitStack() as stack:
            stack.enter_context(file_lock.hold(lock, remove=True))
            journal = Journal(path)
            stack.callback(lambda: journal.close(keep=journal.resumable))
            written = _begin(rewriting, journal, progress)
            running = stack.pop_all()
        with running:
            return _write_missing(rewriting, journal, written)


def _begin(rewriting: Rewriting, journal: Journal, progress: Progress) -> dict[Path, WrittenCorpus]:
    """Settle what earlier runs left, and enter the job into the journal; the results that are finished."""
    job = {"outputs": sorted(prefix.name for prefix in rewriting.prefixes), "command": rewriting.command}
    same = [record["job"] for record in journal.records[:1]] == [job]
    if complete_all(journal, job["outputs"], progress, may_replace=same):
        progress.note("an earlier run had written everything; its results were given their final names")
        discard_run(journal)
        journal.restart()
    written = _finished(rewriting)
    for prefix in rewriting.prefixes:
        if prefix not in written:
            _check_free(rewriting, prefix, progress)
    discard_others(journal, job["outputs"], progress)
    discard_run(journal)
    journal.restart()
    journal.append({"kind": "job", "job": job})
    return written


def _write_missing(
    rewriting: Rewriting, journal: Journal, written: dict[Path, WrittenCorpus]
) -> dict[Path, WrittenCorpus]:
    missing = [prefix for prefix in rewriting.prefixes if prefix not in written]
    if missing:
        try:
            staged = [rewriting.make(prefix) for prefix in missing]
            place(journal, staged)
        finally:
            if not journal.resumable:
                _clear(rewriting)
        written |= {result.prefix: WrittenCorpus(result.manifest, False) for result in staged}
    _clear(rewriting)
    journal.remove()
    journal.resumable = False
    return {prefix: written[prefix] for prefix in rewriting.prefixes}


def _clear(rewriting: Rewriting) -> None:
    for prefix in rewriting.prefixes:
        remove_leftovers(prefix)


def _finished(rewriting: Rewriting) -> dict[Path, WrittenCorpus]:
    """The results of this command that exist and are complete."""
    finished = {}
    for prefix in rewriting.prefixes:
        manifest = _manifest(prefix)
        if not isinstance(manifest, CorpusManifest) or rewriting.differs(prefix, manifest) is not None:
            continue
        if rewriting.damage(manifest_path(prefix)) is None:
            finished[prefix] = WrittenCorpus(manifest, True)
    return finished


def _manifest(prefix: Path) -> CorpusManifest | str | None:
    """The manifest of a result, or why it cannot be read; None if it does not exist."""
    path = manifest_path(prefix)
    if not path.exists():
        return None
    try:
        manifest = load_manifest(path)
    except MdataError as error:
        return str(error).splitlines()[0]
    return manifest if isinstance(manifest, CorpusManifest) else "it is the manifest of a blend"


def _check_free(rewriting: Rewriting, prefix: Path, progress: Progress) -> None:
    """Refuse a name that is taken, unless by a damaged result of this command.

    Raises:
        OtherResultsError: names the file.
    """
    path, manifest = manifest_path(prefix), _manifest(prefix)
    if isinstance(manifest, CorpusManifest):
        reason = rewriting.differs(prefix, manifest)
        if reason is None:
            progress.note(f"{path} will be written again: {rewriting.damage(path)}")
            return
    elif manifest is not None:
        reason = manifest
    else:
        pair = [file for file in (idx_path(prefix), bin_path(prefix)) if file.exists()]
        if not pair:
            return
        path, reason = pair[0], "it has no manifest"
    if not rewriting.overwrite:
        raise OtherResultsError(
            f"{path} already exists and is not {rewriting.called}",
            found=reason,
            fix="another output prefix"
            if rewriting.overwrite is None
            else "--overwrite (overwrite=True) to replace it",
        )
