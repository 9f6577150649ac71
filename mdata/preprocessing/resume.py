"""Taking up what an earlier run of the same job left, or saying why it begins anew.

The journal's first record must be of this very job (options that decide content, tokenizer, names of the
results). The inputs that were taken must be the same, in the same order: one whose size and time of change
agree is trusted, another is read again and compared piece by piece. What comes after the part that was taken
may have changed: a corpus whose bad line was mended, or that has grown, is continued.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from mdata.indexed.append_file import Kept
from mdata.manifest.sidecars import manifest_path
from mdata.preprocessing.journal import Journal, first_record
from mdata.preprocessing.placement import Placing, placing_of, remove_partials
from mdata.preprocessing.plan import Job, printable_path
from mdata.preprocessing.run_state import InputState, Ledger
from mdata.sources.chunk import piece_digest, pieces, read_piece
from mdata.sources.input_files import SourceFile
from mdata.util import atomic_io, file_lock


@dataclass(frozen=True)
class TakenUp:
    """Where a run begins.

    Attributes:
        ledger: what was taken already.
        sinks: state of each sink, by its prefix; empty: from the start.
        quarantine: how much of the quarantine file counts.
        placing: the files that had begun to get their final names.
    """

    ledger: Ledger
    sinks: dict[str, dict[str, Any]]
    quarantine: Kept | None
    placing: Placing

    @property
    def resumed(self) -> bool:
        """Whether an earlier run is continued."""
        return bool(self.sinks)


@dataclass(frozen=True)
class Earlier:
    """What a journal tells of the run before.

    Attributes:
        ledger: what it took, if it can be continued.
        why_not: in what it differs from this job.
        placing: the files that had begun to get their final names.
    """

    ledger: Ledger | None
    why_not: str | None
    placing: Placing

    @property
    def may_place(self) -> bool:
        """Whether a run of this very job had begun to give final names: it was allowed to replace what is there."""
        return self.ledger is not None and bool(self.placing.files)


def look_back(job: Job, journal: Journal) -> Earlier:
    """What the journal says of an earlier run; nothing is changed yet."""
    ledger, why_not = _continuable(job, journal)
    return Earlier(ledger, why_not, placing_of(journal.records))


def take_up(job: Job, journal: Journal, *, earlier: Earlier) -> TakenUp:
    """Continue an earlier run of this job, or begin anew and remove what it left.

    Raises:
        UsageError: a run that writes some of the same files is at work.
    """
    _give_up_others(job, journal)
    if earlier.ledger is not None:
        return _continued(job, journal, ledger=earlier.ledger, placing=earlier.placing)
    if reason := earlier.why_not:
        job.progress.note(f"an earlier, unfinished run is not continued: {reason}; starting from the beginning")
    return begin_anew(job, journal)


def _continuable(job: Job, journal: Journal) -> tuple[Ledger | None, str | None]:
    # A run that continues under another policy for bad rows says so in a record of its own.
    known = [record["job"] for record in journal.records if record["kind"] == "job"]
    states = [record for record in journal.records if record["kind"] == "state"]
    given_up = any(record["kind"] == "given up" for record in journal.records)
    if not known or not states or given_up:
        return None, None
    ledger = Ledger(job.num_keys)
    for record in states:
        ledger.replay(record)
    if reason := _other_job(known[-1], job.words(), bad=ledger.bad) or _changed_input(job, ledger):
        return None, reason
    return ledger, None


def _continued(job: Job, journal: Journal, *, ledger: Ledger, placing: Placing) -> TakenUp:
    """Where that run was left."""
    known = [record["job"] for record in journal.records if record["kind"] == "job"]
    last = next(record for record in reversed(journal.records) if record["kind"] == "state")
    quarantine = last["quarantine"]
    if known[-1] != job.words():
        # Another policy, and so far no bad row: the quarantine file was empty.
        _forget_quarantine(known[-1], placing)
        quarantine = None
        journal.append({"kind": "job", "job": job.words()})
    job.progress.note(_what_is_done(job, ledger))
    return TakenUp(ledger, last["sinks"], quarantine and Kept(*quarantine), placing)


def begin_anew(job: Job, journal: Journal) -> TakenUp:
    """Forget what an earlier run left, its files in the making included."""
    give_up(journal)
    journal.restart()
    journal.append({"kind": "job", "job": job.words()})
    return TakenUp(Ledger(job.num_keys), {}, None, Placing())


def give_up(journal: Journal) -> None:
    """Remove what the run of a journal left unfinished; what has its manifest is finished and stays.

    The journal says so before the first file goes: from what is removed in part nothing must be continued.
    """
    if not journal.records:
        return
    journal.append({"kind": "given up"})
    placing = placing_of(journal.records)
    prefixes = [journal.path.parent / name for name in journal.records[0]["job"]["outputs"]]
    unfinished = [prefix for prefix in prefixes if not manifest_path(prefix).exists()]
    for prefix in unfinished:
        placing.take_back(prefix)
    for prefix in prefixes:
        remove_partials(prefix)
    for record in journal.records:
        if record["kind"] == "job":
            _forget_quarantine(record["job"], placing if unfinished else Placing())


def _forget_quarantine(words: dict[str, Any], placing: Placing) -> None:
    kept = words.get("policy", {}).get("quarantine")
    if kept is not None:
        placing.take_back_quarantine(Path(kept))
        atomic_io.partial_path(Path(kept)).unlink(missing_ok=True)


def _give_up_others(job: Job, journal: Journal) -> None:
    """Unfinished runs of other keys or prefixes that would write the same files: ours takes those over, theirs end.

    Raises:
        UsageError: such a run is at work.
    """
    ours = {prefix.name for prefix in job.prefixes().values()}
    folder = journal.path.parent
    for path in sorted(folder.glob(f".*{journal.path.suffix}")):
        first = None if path == journal.path else first_record(path)
        if first is None or not ours & set(first["job"]["outputs"]):
            continue
        with file_lock.hold(path.with_suffix(job.beside("lock").suffix), remove=True):
            other = Journal(path)
            try:
                give_up(other)
                other.remove()
            finally:
                other.close()
        keys = " ".join(first["job"]["options"]["json_keys"])
        job.progress.note(f"an earlier, unfinished run of the keys {keys} onto these files is given up")


def _other_job(old: dict[str, Any], new: dict[str, Any], *, bad: int) -> str | None:
    """The first thing in which they differ so that one cannot continue the other; None: it can."""
    policies = old.get("policy"), new["policy"]
    reason = difference({**old, "policy": None}, {**new, "policy": None})
    if reason is None and bad and policies[0] != policies[1]:
        return f"{bad:,} bad rows were met under {_plain(policies[0])}, now it is {_plain(policies[1])}"
    return reason


def _plain(policy: dict[str, Any] | None) -> str:
    words = policy or {}
    return " ".join(["on_error", *(str(word) for word in words.values() if word is not None)])


def difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The first thing in which two jobs differ, for a person; None if they are the same."""
    flat_old, flat_new = ({**words.pop("options"), **words} for words in (dict(old), dict(new)))
    for name in sorted(flat_old.keys() | flat_new.keys()):
        if flat_old.get(name) != flat_new.get(name):
            return f"{name} was {_short(flat_old.get(name))}, is {_short(flat_new.get(name))}"
    return None


def _short(value: object) -> str:
    """Enough of a value to tell it from another; a fingerprint has 64 digits."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def input_changed(job: Job, file: SourceFile, *, known: InputState) -> str | None:
    """Whether the part of a file that was taken has changed; says how."""
    name = printable_path(file.path)
    if name != known.path:
        return f"the input was {known.path}, is {name}"
    same = (file.size_bytes, file.modified_ns) == (known.size_bytes, known.modified_ns)
    # Standard input has neither; it is compared while it is read again.
    if (same and not job.options.verify_input) or name == "-":
        return None
    digests = []
    # An open file is compared as far as it was taken, a closed one to its end.
    wanted = None if known.hash else len(known.digests)
    job.progress.note(f"reading {name} again to see whether it changed")
    for piece in pieces([file], job.options.piece_bytes, spec=job.spec.read):
        if wanted is not None and piece.number >= wanted:
            break
        digests.append(piece_digest(read_piece(piece, job.spec.read)))
    agrees = blake3(b"".join(digests)).hexdigest() == known.hash if known.hash else digests == known.digests
    return None if agrees else f"{name} has changed since"


def _changed_input(job: Job, ledger: Ledger) -> str | None:
    if len(ledger.inputs) > len(job.files):
        return f"{len(ledger.inputs)} inputs were read, {len(job.files)} are given"
    for file, known in zip(job.files, ledger.inputs, strict=False):
        if reason := input_changed(job, file, known=known):
            return reason
        # What was compared by content counts as it is now.
        known.size_bytes, known.modified_ns = file.size_bytes, file.modified_ns
    return None


def _what_is_done(job: Job, ledger: Ledger) -> str:
    file, piece = ledger.next_piece
    line = f"continuing an earlier run: {ledger.rows:,} rows of {file} whole inputs and {piece} pieces are done"
    if piece and job.files[file].streamed:
        line += f"; {printable_path(job.files[file].path)} is read again from its start"
    return line
