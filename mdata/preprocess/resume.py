"""Taking up what an earlier run of the same job left, or saying why it begins anew.

The journal's first record must be of this very job (options that decide content, tokenizer, names of the
results). The inputs that were taken must be the same, in the same order: one whose size and time of change
agree is trusted, another is read again and compared piece by piece. What comes after the part that was taken
may have changed: a corpus whose bad line was mended, or that has grown, is continued.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from mdata import durable
from mdata.preprocess.job import Job, printable_path
from mdata.preprocess.journal import Journal, read_records
from mdata.preprocess.ledger import InputState, Ledger
from mdata.sources import SourceFile, piece_digest, pieces, read_piece

_ENDINGS = (".bin", ".idx", ".lengths", ".boundaries", ".hashes", ".origins")


@dataclass(frozen=True)
class TakenUp:
    """Where a run begins.

    Attributes:
        ledger: what was taken already.
        sinks: state of each sink, by its prefix; empty: from the start.
        quarantine_bytes: of the quarantine file that count.
        merged: keys whose parts are merged.
    """

    ledger: Ledger
    sinks: dict[str, dict[str, Any]]
    quarantine_bytes: int
    merged: frozenset[str]

    @property
    def resumed(self) -> bool:
        """Whether an earlier run is continued."""
        return bool(self.sinks)


def take_up(job: Job, journal: Journal) -> TakenUp:
    """What the journal says of an earlier run of this job; a journal of another job is begun anew."""
    _give_up_others(job, journal)
    # A run that continues under another policy for bad rows says so in a record of its own.
    known = [record["job"] for record in journal.records if record["kind"] == "job"]
    states = [record for record in journal.records if record["kind"] == "state"]
    if not known or not states:
        return begin_anew(job, journal)
    ledger = Ledger(job.num_keys)
    for record in states:
        ledger.replay(record)
    if reason := _other_job(known[-1], job.words(), bad=ledger.bad) or _changed_input(job, ledger):
        job.progress.note(f"an earlier, unfinished run is not continued: {reason}; starting from the beginning")
        return begin_anew(job, journal)
    if known[-1] != job.words():
        _forget_quarantine(known[-1])
        journal.append({"kind": "job", "job": job.words()})
    job.progress.note(_what_is_done(job, ledger))
    merged = frozenset(record["key"] for record in journal.records if record["kind"] == "merged")
    return TakenUp(ledger, states[-1]["sinks"], states[-1]["quarantine_bytes"], merged)


def begin_anew(job: Job, journal: Journal) -> TakenUp:
    """Forget what an earlier run left, its files in the making included."""
    if journal.records:
        forget_leftovers(journal.records[0]["job"], journal.path.parent)
    for record in journal.records:
        if record["kind"] == "job":
            _forget_quarantine(record["job"])
    journal.restart()
    journal.append({"kind": "job", "job": job.words()})
    return TakenUp(Ledger(job.num_keys), {}, 0, frozenset())


def forget_leftovers(words: dict[str, Any], folder: Path) -> None:
    """Remove the temporary files of a job whose results lie in this folder."""
    for name in words["outputs"]:
        for ending in _ENDINGS:
            durable.partial_path(folder / (name + ending)).unlink(missing_ok=True)


def _forget_quarantine(words: dict[str, Any]) -> None:
    kept = words.get("policy", {}).get("quarantine")
    if kept is not None:
        durable.partial_path(Path(kept)).unlink(missing_ok=True)


def _give_up_others(job: Job, journal: Journal) -> None:
    """Unfinished runs of other keys that would write the same files: ours takes those over, so theirs end here.

    Raises:
        UsageError: such a run is at work.
    """
    ours = {prefix.name for prefix in job.prefixes().values()}
    folder = journal.path.parent
    for path in sorted(folder.glob(f".{glob.escape(Path(job.options.output_prefix).name)}_*{journal.path.suffix}")):
        records = [] if path == journal.path else read_records(path)
        if not records or not ours & set(records[0]["job"]["outputs"]):
            continue
        with durable.held(path.with_suffix(job.beside("lock").suffix), remove=True):
            forget_leftovers(records[0]["job"], folder)
            path.unlink(missing_ok=True)
        keys = " ".join(records[0]["job"]["options"]["json_keys"])
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
