"""Resuming: continue an interrupted run of the same job, or discard its files and say why.

The journal's first record must describe the same job (options that decide content, tokenizer, names of the results).
Inputs that were read must be the same, in the same order: one whose size and modification time agree is trusted,
another is read again and compared chunk by chunk. The unread rest may have changed: a run continues with a file whose
bad row was corrected, or that has grown.

A name proves nothing, because an older result may have it. Before a run renames its first file the journal lists its
files by inode and size; only such files are rolled back to their temporary names, and their content is compared if they
are kept (mdata/indexed/append_file.py). Device numbers are left out: a restart may change them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from mdata.errors import os_errors_named
from mdata.indexed.append_file import SyncPoint, remove_synced
from mdata.indexed.pair_format import bin_path, idx_path
from mdata.manifest.sidecars import hashes_path, manifest_path
from mdata.preprocessing.corpus_writer import origins_path
from mdata.preprocessing.journal import Journal, first_record
from mdata.preprocessing.plan import Job, input_name
from mdata.preprocessing.run_state import InputState, RunState
from mdata.sources.chunk import chunk_digest, chunks, read_chunk
from mdata.sources.input_files import SourceFile
from mdata.util import atomic_io, file_lock

_ENDINGS = (".bin", ".idx", ".lengths", ".boundaries", ".hashes", ".origins", ".bin.blake3", ".json")
_FileMark = list[int]  # inode and size: JSON types


@dataclass(frozen=True)
class PendingCommit:
    """The files that a run was about to rename, by their final names; empty if it had not reached that point."""

    files: dict[str, _FileMark] = field(default_factory=dict)
    quarantine: _FileMark | None = None

    def has(self, path: Path) -> bool:
        """Whether the file of this final name is one of them."""
        return path.name in self.files and _mark(path) == self.files[path.name]

    def has_quarantine(self, path: Path) -> bool:
        """Whether this is the run's quarantine file, which may be in any folder."""
        return self.quarantine is not None and _mark(path) == self.quarantine

    def roll_back(self, prefix: Path) -> None:
        """Rename the run's files of a result back to temporary names, after removing those that describe the .bin."""
        with os_errors_named(f"rolling back {prefix}"):
            if self.has(bin_path(prefix)):
                for path in (manifest_path(prefix), idx_path(prefix)):
                    remove_synced(path)
                hashes_path(prefix).unlink(missing_ok=True)
                _rename_back(bin_path(prefix))
            if self.has(origins_path(prefix)):
                _rename_back(origins_path(prefix))

    def roll_back_quarantine(self, path: Path) -> None:
        """The same for the run's quarantine file."""
        if self.has_quarantine(path):
            with os_errors_named(f"rolling back {path}"):
                _rename_back(path)


def commit_record(prefixes: Iterable[Path], quarantine: str | None) -> dict[str, Any]:
    """The journal's record before the first rename; all files must be synced."""
    finals = [path for prefix in prefixes for path in (bin_path(prefix), origins_path(prefix))]
    return {
        "kind": "placing",
        "files": {path.name: mark for path in finals if (mark := _mark(atomic_io.partial_path(path)))},
        "quarantine": (quarantine and _mark(atomic_io.partial_path(Path(quarantine)))) or None,
    }


def pending_commit(records: Sequence[dict[str, Any]]) -> PendingCommit:
    """The commit that a journal's last records describe; an empty one if a state came after it."""
    last = next((record for record in reversed(records) if record["kind"] in ("state", "placing")), None)
    if last is None or last["kind"] == "state":
        return PendingCommit()
    return PendingCommit(last["files"], last["quarantine"])


def remove_partials(prefix: Path) -> None:
    """Remove the temporary files of a result."""
    for ending in _ENDINGS:
        atomic_io.partial_path(prefix.with_name(prefix.name + ending)).unlink(missing_ok=True)


def _rename_back(path: Path) -> None:
    """Rename back to the temporary name; a file that already has it cannot be this one."""
    atomic_io.rename(path, atomic_io.partial_path(path))
    atomic_io.sync_folder(path.parent)


def _mark(path: Path) -> _FileMark | None:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return [facts.st_ino, facts.st_size]


@dataclass(frozen=True)
class StartPoint:
    """Where a run begins.

    Attributes:
        state: the work that is done.
        writers: the state of each corpus writer, by the result's name; empty: from the start.
        quarantine: state from which to continue the quarantine file.
        pending: the commit that had begun.
    """

    state: RunState
    writers: dict[str, dict[str, Any]] = field(default_factory=dict)
    quarantine: SyncPoint | None = None
    pending: PendingCommit = field(default_factory=PendingCommit)

    @property
    def resumed(self) -> bool:
        """Whether an earlier run is continued."""
        return bool(self.writers)


@dataclass(frozen=True)
class EarlierRun:
    """What a journal says about an earlier run: its state, or why it cannot be continued; a commit it had begun."""

    state: RunState | None
    why_not: str | None
    pending: PendingCommit

    @property
    def was_committing(self) -> bool:
        """Whether a run of this same job had begun to commit: it was allowed to replace the existing files."""
        return self.state is not None and bool(self.pending.files)


def read_earlier_run(job: Job, journal: Journal) -> EarlierRun:
    """Read from the journal what an earlier run did; nothing is changed yet."""
    # A run that continues under another policy for bad rows adds a job record.
    jobs = [record["job"] for record in journal.records if record["kind"] == "job"]
    states = [record for record in journal.records if record["kind"] == "state"]
    given_up = any(record["kind"] == "given up" for record in journal.records)
    pending = pending_commit(journal.records)
    if not jobs or not states or given_up:
        return EarlierRun(None, None, pending)
    state = RunState(len(job.options.json_keys))
    for record in states:
        state.replay(record)
    why_not = _other_job(jobs[-1], job.description(), bad=state.bad) or _changed_input(job, state)
    return EarlierRun(None if why_not else state, why_not, pending)


def resume_or_restart(job: Job, journal: Journal, *, earlier: EarlierRun) -> StartPoint:
    """Continue an earlier run of this job, or discard it and start over.

    Raises:
        UsageError: an active run writes some of the same files.
    """
    _discard_conflicting_runs(job, journal)
    if earlier.state is None:
        if earlier.why_not:
            reason = earlier.why_not
            job.progress.note(f"an earlier, unfinished run is not continued: {reason}; starting from the beginning")
        return start_over(job, journal)
    last_job = [record["job"] for record in journal.records if record["kind"] == "job"][-1]
    last = next(record for record in reversed(journal.records) if record["kind"] == "state")
    quarantine = last["quarantine"]
    if last_job != job.description():
        # The policy changed and there was no bad row so far, so the quarantine file was empty.
        _remove_quarantine(last_job, earlier.pending)
        quarantine = None
        journal.append({"kind": "job", "job": job.description()})
    job.progress.note(_progress_so_far(job, earlier.state))
    return StartPoint(earlier.state, last["sinks"], quarantine and SyncPoint(*quarantine), earlier.pending)


def start_over(job: Job, journal: Journal) -> StartPoint:
    """Discard the files of an earlier run, including temporary files."""
    discard_run(journal)
    journal.restart()
    journal.append({"kind": "job", "job": job.description()})
    return StartPoint(RunState(len(job.options.json_keys)))


def discard_run(journal: Journal) -> None:
    """Remove the unfinished files of a journal's run; results with a manifest are finished and stay.

    The journal records this before the first file is removed: a partly removed run must not be continued.
    """
    if not journal.records:
        return
    journal.append({"kind": "given up"})
    pending = pending_commit(journal.records)
    prefixes = [journal.path.parent / name for name in journal.records[0]["job"]["outputs"]]
    unfinished = [prefix for prefix in prefixes if not manifest_path(prefix).exists()]
    for prefix in unfinished:
        pending.roll_back(prefix)
    for prefix in prefixes:
        remove_partials(prefix)
    for record in journal.records:
        if record["kind"] == "job":
            _remove_quarantine(record["job"], pending if unfinished else PendingCommit())


def _remove_quarantine(description: dict[str, Any], pending: PendingCommit) -> None:
    quarantine = description.get("policy", {}).get("quarantine")
    if quarantine is not None:
        pending.roll_back_quarantine(Path(quarantine))
        atomic_io.partial_path(Path(quarantine)).unlink(missing_ok=True)


def _discard_conflicting_runs(job: Job, journal: Journal) -> None:
    """Discard unfinished runs of other keys or prefixes that would write the same files.

    Raises:
        UsageError: such a run is active.
    """
    names = {prefix.name for prefix in job.prefixes().values()}
    for path in sorted(journal.path.parent.glob(f".*{journal.path.suffix}")):
        first = None if path == journal.path else first_record(path)
        if first is None or not names & set(first["job"]["outputs"]):
            continue
        with file_lock.hold(path.with_suffix(job.beside("lock").suffix), remove=True):
            other = Journal(path)
            try:
                discard_run(other)
                other.remove()
            finally:
                other.close()
        keys = " ".join(first["job"]["options"]["json_keys"])
        job.progress.note(f"an earlier, unfinished run of the keys {keys} with the same files is discarded")


def _other_job(old: dict[str, Any], new: dict[str, Any], *, bad: int) -> str | None:
    """The first difference that prevents continuing the other job; None: it can be continued."""
    policies = old.get("policy"), new["policy"]
    reason = difference({**old, "policy": None}, {**new, "policy": None})
    if reason is None and bad and policies[0] != policies[1]:
        return f"{bad:,} bad rows were found under {_policy(policies[0])}, now it is {_policy(policies[1])}"
    return reason


def _policy(policy: dict[str, Any] | None) -> str:
    return " ".join(["on_error", *(str(value) for value in (policy or {}).values() if value is not None)])


# Messages use the option names that users know.
_NAMES = MappingProxyType({"piece_bytes": "chunk_bytes", "shard_inputs": "the list of inputs"})


def difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The first difference of two job descriptions, as text; None if they are equal."""
    flat_old, flat_new = ({**job.pop("options"), **job} for job in (dict(old), dict(new)))
    for name in sorted(flat_old.keys() | flat_new.keys()):
        if flat_old.get(name) != flat_new.get(name):
            return f"{_NAMES.get(name, name)} was {_short(flat_old.get(name))}, is {_short(flat_new.get(name))}"
    return None


def _short(value: object) -> str:
    """A value shortened, but distinguishable; a fingerprint has 64 digits."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def input_changed(job: Job, file: SourceFile, *, known: InputState) -> str | None:
    """How the part of a file that was read has changed; None if it has not."""
    name = input_name(file)
    if name != known.path:
        return f"the input was {known.path}, is {name}"
    same = (file.size_bytes, file.modified_ns) == (known.size_bytes, known.modified_ns)
    # Standard input has no size or modification time; it is compared while it is read again.
    if (same and not job.options.verify_input) or name == "-":
        return None
    digests = []
    # An open file is compared as far as it was read, a closed one to its end.
    wanted = None if known.hash else len(known.digests)
    job.progress.note(f"reading {name} again to see whether it changed")
    for chunk in chunks([file], job.options.chunk_bytes, spec=job.spec.read):
        if wanted is not None and chunk.number >= wanted:
            break
        digests.append(chunk_digest(read_chunk(chunk, job.spec.read)))
    agrees = blake3(b"".join(digests)).hexdigest() == known.hash if known.hash else digests == known.digests
    return None if agrees else f"{name} has changed since"


def _changed_input(job: Job, state: RunState) -> str | None:
    if len(state.inputs) > len(job.files):
        return f"{len(state.inputs)} inputs were read, {len(job.files)} are given"
    for file, known in zip(job.files, state.inputs, strict=False):
        if reason := input_changed(job, file, known=known):
            return reason
        # If the content is the same, the input is recorded with its present size and time.
        known.size_bytes, known.modified_ns = file.size_bytes, file.modified_ns
    return None


def _progress_so_far(job: Job, state: RunState) -> str:
    file, chunk = state.next_chunk
    line = f"continuing an earlier run: {state.rows:,} rows are done ({file} inputs, and {chunk} chunks of the next)"
    if chunk and job.files[file].streamed:
        line += f"; {input_name(job.files[file])} is read again from its start"
    return line
