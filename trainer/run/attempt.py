"""One run, one writer: which start of a run may write to its folders.

    attempt.json    {"attempt": 7, "nonce": "5c1e...", "host": "gpu003", "process": 4711, "time_s": ..., "job": ...}

The file lock of a run folder comes first, but it is not reliable: object storage has none, a network file system may
lose it, and ranks may live on after their scheduler has moved the job to other machines. So each start claims the
folder by writing its own attempt.json, and rank 0 compares the file before each line of metrics.jsonl and events.jsonl
and before each checkpoint's index. The newest claim wins: an older attempt ends with a `SupersededError`.

A claim is atomic without locks: the file is replaced as a whole and only its nonce counts, so of two starts at the same
moment exactly one finds its own. Storage with conditional puts numbers them one after another as well.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mdata import ResourceError, UsageError
from mdata.errors import counted
from mdata.object_storage.reading import object_there, read_range
from mdata.object_storage.uploading import put_if_unchanged
from mdata.util import atomic_io
from trainer.checkpoint.location import Location, ObjectFolder
from trainer.config.sections import RunSection
from trainer.run.metrics import read_events

ATTEMPT = "attempt.json"
LOOKS = 20  # at an object that others replace at the same moment
_LONGEST = 4096


class SupersededError(ResourceError):
    """A newer attempt of the run has claimed its folder; this one must not write any more."""


class ReplacedError(SupersededError):
    """The same, if the newer attempt belongs to the same job, which continues."""


class TooManyRestartsError(ResourceError):
    """The run has started too often without progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of a run, as attempt.json names it.

    Args:
        attempt: counts the starts of the run from 1. nonce: distinguishes attempts with the same number.
        host, process: of rank 0. time_s: of the start, seconds since 1970.
        job: of the scheduler or launcher; None: unknown. restart: how often the scheduler has requeued that job.
    """

    attempt: int
    nonce: str
    host: str
    process: int
    time_s: float
    job: str | None = None
    restart: int = 0

    def __str__(self) -> str:
        return f"attempt {self.attempt} of process {self.process} on {self.host}" + (f" ({self.job})" * bool(self.job))

    def restarts(self, before: Attempt | None) -> bool:
        """Whether the launcher or scheduler started this attempt to replace an older one, which it considers dead."""
        if before is None or self.job is None or self.job != before.job:
            return False
        return self.restart > before.restart or self.job.startswith("torchrun ")

    def check(self, folder: Location) -> None:
        """Compare the claim of a folder with this one; a claim that was removed names no newer attempt.

        Raises:
            SupersededError: another attempt has claimed the folder since. OSError, MdataError: it cannot be read.
        """
        content, _ = _read(folder)
        now = _parsed(content)
        if content is None or (now is not None and now.nonce == self.nonce):
            return
        began = f", which began at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now.time_s))}" if now else ""
        kind = ReplacedError if now and now.job == self.job and self.job else SupersededError
        raise kind(
            f"a newer attempt of this run has taken over {folder}",
            found=f"{now or 'an unreadable attempt.json'}{began}",
            expected=f"{self}, which ends now and writes nothing more",
            fix="let the newer attempt continue; if it was started by mistake, end it and run the same command again",
        )


def this_attempt(env: Mapping[str, str]) -> Attempt:
    """This process's attempt, not yet numbered.

    Args:
        env: names the job: TORCHELASTIC_RUN_ID of a torchrun that was given --rdzv-id, or SLURM_JOB_ID.
    """
    job, restart, run_id = None, 0, env.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        job = f"torchrun {run_id}"
    elif "SLURM_JOB_ID" in env:
        count = env.get("SLURM_RESTART_COUNT", "0")
        job, restart = f"slurm {env['SLURM_JOB_ID']}", int(count) if count.isdecimal() else 0
    return Attempt(
        attempt=0,
        nonce=secrets.token_hex(8),
        host=os.uname().nodename,
        process=os.getpid(),
        time_s=round(time.time(), 3),
        job=job,
        restart=restart,
    )


def newest_attempt(folder: Location) -> Attempt | None:
    """The attempt that has claimed a folder last; None: none has, or its claim is unreadable."""
    return _parsed(_read(folder)[0])


def claim(folder: Location, attempt: Attempt) -> int:
    """Claim an existing folder; returns the attempt's number in it.

    Raises:
        OSError, MdataError: it cannot be written.
    """
    while True:
        content, etag = _read(folder)
        before = _parsed(content)
        if before is not None and before.nonce == attempt.nonce:  # a put whose response was lost
            return before.attempt
        number = before.attempt + 1 if before else 1
        facts = asdict(attempt) | {"attempt": number}
        if _replace(folder, (json.dumps(facts) + "\n").encode(), nonce=attempt.nonce, etag=etag):
            return number


def check_restarts(settings: RunSection, step: int) -> None:
    """Refuse another start if run.max_restarts starts in a row made no progress beyond this step.

    Raises:
        TooManyRestartsError: there were too many; a person has to look at the run.
    """
    if settings.max_restarts is None:
        return
    events = read_events(Path(settings.folder))
    starts = [event.get("step") for event in events if event["event"] == "start" and not event.get("rolled_back")]
    in_vain = len(list(itertools.takewhile(lambda start: start == step, reversed(starts))))
    if in_vain > settings.max_restarts:
        raise TooManyRestartsError(
            f"the run has started {counted(in_vain, 'time')} from step {step:,} without writing another checkpoint",
            expected=f"at most run.max_restarts={settings.max_restarts} restarts without progress",
            fix="look at the output of the last start for the cause, then raise run.max_restarts or leave it out",
        )


def _read(folder: Location) -> tuple[bytes | None, str | None]:
    """The content of attempt.json, and its version in storage; None: there is none."""
    if not isinstance(folder, ObjectFolder):
        with suppress(FileNotFoundError):
            return (folder / ATTEMPT).read_bytes()[:_LONGEST], None
        return None, None
    for look in range(1, LOOKS + 1):
        facts = object_there((folder / ATTEMPT).address, folder.store)
        if facts is None:
            break
        try:
            return read_range(facts, 0, stop=min(_LONGEST, facts.size_bytes), store=folder.store), facts.etag
        except UsageError:  # another attempt has put its own since we looked
            if look == LOOKS:
                raise
    return None, None


def _replace(folder: Location, content: bytes, *, nonce: str, etag: str | None) -> bool:
    """Write the file; False: another attempt wrote it since it was read, or at the same time."""
    if isinstance(folder, ObjectFolder):
        return put_if_unchanged(content, (folder / ATTEMPT).address, etag=etag, store=folder.store)
    own = folder / f".attempt-{nonce}"  # a name of its own: two starts at the same moment do not share a file
    try:
        atomic_io.atomic_write(own, content)
        atomic_io.rename(own, folder / ATTEMPT)
    except FileNotFoundError:  # another start took it for a leftover
        if not folder.is_dir():
            raise
        return False
    for leftover in (*folder.glob(".attempt-*"), *folder.glob("..attempt-*.partial")):  # of starts that were killed
        leftover.unlink(missing_ok=True)
    atomic_io.sync_folder(folder)
    return True


def _parsed(content: bytes | None) -> Attempt | None:
    try:
        facts = json.loads(content or b"")
        return Attempt(**{field.name: facts[field.name] for field in fields(Attempt)})
    except (ValueError, KeyError, TypeError):
        return None
