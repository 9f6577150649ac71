"""Resuming: continue an interrupted run of the same job, or discard its files and say why.

The journal's first record must describe the same job (options that decide content, tokenizer, names of the results).
Inputs that were read must be the same, in the same order: one whose size and modification time agree is trusted,
another is read again and compared chunk by chunk. The unread rest may have changed: a run continues with a file whose
bad row was corrected, or that has grown.

A run that had begun to give its files their final names is completed before anything else (placing.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from mdata.errors import counted
from mdata.indexed.append_file import SyncPoint
from mdata.preprocessing.journal import Journal
from mdata.preprocessing.placing import discard_others, discard_run
from mdata.preprocessing.plan import JobPlan, input_name
from mdata.preprocessing.run_state import InputState, JobState
from mdata.sources.chunk import chunk_digest, chunks, read_chunk
from mdata.sources.input_files import SourceFile
from mdata.tokenizers.base.helpers import AUTO
from mdata.util import atomic_io


@dataclass(frozen=True)
class StartPoint:
    """Where a run begins.

    Attributes:
        state: the work that is done.
        writers: the state of each corpus writer, by the result's name; empty: from the start.
        quarantine: state from which to continue the quarantine file.
        placed: everything that the earlier run wrote has its final name.
    """

    state: JobState
    writers: dict[str, dict[str, Any]] = field(default_factory=dict)
    quarantine: SyncPoint | None = None
    placed: bool = False

    @property
    def resumed(self) -> bool:
        """Whether an earlier run is continued."""
        return bool(self.writers)


@dataclass(frozen=True)
class EarlierRun:
    """The state of an earlier run of this job according to its journal, or why it cannot be continued.

    `placed`: everything that it wrote has its final name.
    """

    state: JobState | None
    why_not: str | None = None
    placed: bool = False


def read_earlier_run(job: JobPlan, journal: Journal) -> EarlierRun:
    """Read from the journal what an earlier run did; nothing is changed yet."""
    # A run that continues under another policy for bad rows adds a job record.
    jobs = [record["job"] for record in journal.records if record["kind"] == "job"]
    states = [record for record in journal.records if record["kind"] == "state"]
    given_up = any(record["kind"] == "given up" for record in journal.records)
    if not jobs or not states or given_up:
        return EarlierRun(None)
    state = JobState(len(job.options.json_keys))
    for record in states:
        state.replay(record)
    engines = [record.get("engine") for record in journal.records if record["kind"] == "job"]
    why_not = next(filter(None, (other_engine(job, engine) for engine in engines)), None)
    why_not = why_not or _other_job(jobs[-1], job.description(), bad=state.bad) or _changed_input(job, state)
    return EarlierRun(None if why_not else state, why_not)


def resume_or_restart(job: JobPlan, journal: Journal, *, earlier: EarlierRun) -> StartPoint:
    """Continue an earlier run of this job, or discard it and start over.

    Raises:
        UsageError: an active run writes some of the same files.
    """
    discard_others(journal, job.description()["outputs"], job.progress)
    if earlier.state is None:
        if earlier.why_not:
            reason = earlier.why_not
            job.progress.note(f"an earlier, unfinished run is not continued: {reason}; starting from the beginning")
        return start_over(job, journal)
    last_record = [record for record in journal.records if record["kind"] == "job"][-1]
    last_job = last_record["job"]
    last = next(record for record in reversed(journal.records) if record["kind"] == "state")
    quarantine = last["quarantine"]
    if last_job != job.description():
        # The policy changed and there was no bad row so far, so the quarantine file was empty.
        if old := last_job["policy"]["quarantine"]:
            atomic_io.partial_path(Path(old)).unlink(missing_ok=True)
        quarantine = None
    if last_record != _job_record(job):
        journal.append(_job_record(job))
    job.progress.note(_progress_so_far(job, earlier.state))
    return StartPoint(earlier.state, last["sinks"], quarantine and SyncPoint(*quarantine), earlier.placed)


def start_over(job: JobPlan, journal: Journal) -> StartPoint:
    """Discard the files of an earlier run, including temporary files."""
    discard_run(journal)
    journal.restart()
    journal.append(_job_record(job))
    return StartPoint(JobState(len(job.options.json_keys)))


def _job_record(job: JobPlan) -> dict[str, Any]:
    return {"kind": "job", "job": job.description(), "engine": job.tokenizer.engine}


def other_engine(job: JobPlan, made_by: str | None) -> str | None:
    """Engines give the same ids, so another engine matters only if the user asks for it by name."""
    if not job.options.overwrite or job.options.engine == AUTO or made_by == job.tokenizer.engine:
        return None
    return f"engine was {made_by or 'not recorded'}, is {job.tokenizer.engine}"


def _other_job(old: dict[str, Any], new: dict[str, Any], *, bad: int) -> str | None:
    """The first difference that prevents continuing the other job; None: it can be continued."""
    policies = old.get("policy"), new["policy"]
    reason = difference({**old, "policy": None}, {**new, "policy": None})
    if reason is None and bad and policies[0] != policies[1]:
        there = counted(bad, "bad row was", "bad rows were")
        return f"{there} found under {_policy(policies[0])}, now it is {_policy(policies[1])}"
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


def input_changed(job: JobPlan, file: SourceFile, *, recorded: InputState) -> str | None:
    """How the part of a file that was read has changed; None if it has not."""
    name = input_name(file)
    if name != recorded.path:
        return f"the input was {recorded.path}, is {name}"
    same = (file.size_bytes, file.modified_ns) == (recorded.size_bytes, recorded.modified_ns)
    # Standard input has no size or modification time; it is compared while it is read again.
    if (same and not job.options.verify_input) or name == "-":
        return None
    digests = []
    # An open file is compared as far as it was read, a closed one to its end.
    wanted = None if recorded.hash else len(recorded.digests)
    job.progress.note(f"reading {name} again to see whether it changed")
    for chunk in chunks([file], job.options.chunk_bytes, spec=job.spec.read):
        if wanted is not None and chunk.number >= wanted:
            break
        digests.append(chunk_digest(read_chunk(chunk, job.spec.read)))
    agrees = blake3(b"".join(digests)).hexdigest() == recorded.hash if recorded.hash else digests == recorded.digests
    return None if agrees else f"{name} has changed since"


def _changed_input(job: JobPlan, state: JobState) -> str | None:
    if len(state.inputs) > len(job.files):
        return f"{counted(len(state.inputs), 'input was', 'inputs were')} read, {len(job.files)} are given"
    for file, recorded in zip(job.files, state.inputs, strict=False):
        if reason := input_changed(job, file, recorded=recorded):
            return reason
        # If the content is the same, the input is recorded with its present size and time.
        recorded.size_bytes, recorded.modified_ns = file.size_bytes, file.modified_ns
    return None


def _progress_so_far(job: JobPlan, state: JobState) -> str:
    file, chunk = state.next_chunk
    inputs, chunks = counted(file, "input"), counted(chunk, "chunk")
    done = counted(state.rows, "row is", "rows are")
    line = f"continuing an earlier run: {done} done ({inputs}, and {chunks} of the next)"
    if chunk and job.files[file].streamed:
        line += f"; {input_name(job.files[file])} is read again from its start"
    return line
