"""A job in parts: its folder `PREFIX.job` and the files in it.

`job.json` is the job: the words of the command, the folder in which they were given, and the number of parts. A job has
phases: the tasks of a phase run at the same time, once all tasks of the phase before are done. Each task has a number
in the job, a log, and a state file that is rewritten when it starts or ends. A part is done when the manifests of its
results exist, whatever the state file says, so losing the folder loses only logs.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mdata.dedup.plan import WORK, done_name, finished_job, text_path
from mdata.errors import DamageError, UsageError, os_errors_named
from mdata.object_storage.address import is_address, parse_address
from mdata.preprocessing.parts import part_folder, part_name, part_prefix
from mdata.progress import SILENT, Progress
from mdata.sources.sections import PartNumber
from mdata.util import atomic_io, file_lock
from mdata.util.commands import command_line

MERGE = 0
"""The number under which the merge has a state and a log, beside the parts from 1."""
SINGLE_TASKS = ("merge", "group", "report")
"""Phases that always have one task."""
TEXT_JOBS = ("clean", "extract", "decontaminate")
"""Commands that read texts or pages and write texts, each part into a folder of its own."""
MergeHow = Literal["reference", "copy", "none"]


@dataclass(frozen=True)
class JobPhase:
    """Tasks that run side by side.

    Attributes:
        name: of its tasks, in logs and messages: "part", "merge".
        numbers: of its tasks in the job.
        words: the command line of a task, by its place in the phase, from 1.
        done: returns the numbers of the tasks that are done.
    """

    name: str
    numbers: range
    words: Callable[[int], list[str]]
    done: Callable[[], frozenset[int]]

    def called(self, number: int) -> str:
        """The name of a task, as used in file names."""
        place = number - self.numbers.start + 1
        return self.name if self.name in SINGLE_TASKS else f"{self.name}-{place:05}"

    @property
    def tasks(self) -> str:
        """The plural of the tasks' name."""
        return "parts" if self.name == "part" else f"tasks of {self.name}"

    def describe(self, numbers: Sequence[int]) -> str:
        """Tasks of the phase for messages: their number, and the first ones by name."""
        if self.name in SINGLE_TASKS:
            return f"the {self.name}"
        count = len(self.numbers)
        named = [part_name(PartNumber(number - self.numbers.start + 1, count)) for number in numbers[:3]]
        more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
        return f"{len(numbers)} of {count} {self.tasks} ({', '.join(named)}{more})"

    @contextmanager
    def reported(self, progress: Progress, count: int) -> Iterator[Progress]:
        """Report the tasks that end within the block; a single task has nothing to count."""
        if self.name in SINGLE_TASKS:
            yield SILENT
            return
        progress.begin(f"running {self.tasks}", count, unit="parts" if self.name == "part" else "tasks")
        yield progress
        progress.end()


@dataclass(frozen=True)
class DedupStages:
    """The phases of a `dedup` job.

    Attributes:
        job: the hash of its options and inputs. stages: in order. ranges: tasks of `match`.
    """

    job: str
    stages: tuple[str, ...]
    ranges: int


@dataclass(frozen=True)
class Job:
    """A command divided into parts.

    Attributes:
        words: of the command line, from "preprocess" or "clean" on, without --shard.
        cwd: the folder in which they were given; relative paths start there.
        num_parts: how many parts.
        merge: how the parts are joined.
        output_prefix: of the whole job.
        results: the endings of a part's manifest names, such as "text_document".
        input_bytes: of all inputs on disk, when the job was launched.
        work_folder: if results go to object storage, parts write them here first, each in its own folder.
        dedup: of a job of `dedup`.
    """

    words: tuple[str, ...]
    cwd: str
    num_parts: int
    merge: MergeHow
    output_prefix: str
    results: tuple[str, ...]
    input_bytes: int
    work_folder: str | None = None
    dedup: DedupStages | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the results are in object storage."""
        return is_address(self.output_prefix)

    @property
    def folder(self) -> Path:
        """The folder of state and logs: beside the results, or in `cwd` if these are in object storage."""
        prefix = parse_address(self.output_prefix).name if self.is_stored else self.output_prefix
        return Path(self.cwd, f"{prefix}.job")

    @property
    def phases(self) -> tuple[JobPhase, ...]:
        """The phases, in order."""
        if self.dedup is not None:
            return tuple(self._dedup_phases(self.dedup))
        last, count = self.num_parts, ["--parts", str(self.num_parts)]
        numbers = range(1, last + 1)
        parts = JobPhase("part", numbers, lambda part: [*self.words, "--shard", f"{part}/{last}"], self.done_parts)
        if self.words[0] == "decontaminate":
            numbers = range(last + 1, last + 2)
            return parts, JobPhase("report", numbers, lambda _: [*self.words, *count], self._done_report)
        if self.merge == "none":
            return (parts,)
        words = ["merge", self.output_prefix, *count, *["--copy"] * (self.merge == "copy")]
        merged = lambda: frozenset([MERGE] if self.is_merged() else ())  # noqa: E731
        return parts, JobPhase("merge", range(MERGE, MERGE + 1), lambda _: words, merged)

    def _dedup_phases(self, dedup: DedupStages) -> Iterator[JobPhase]:
        counts = {"match": dedup.ranges, "group": 1}
        number = 1
        for stage in dedup.stages:
            count = counts.get(stage, self.num_parts)
            numbers = range(number, number + count)
            words = partial(self._words_of_stage, dedup, stage, count)
            yield JobPhase(stage, numbers, words, partial(self._done_of_stage, dedup, stage, numbers))
            number += count

    def _words_of_stage(self, dedup: DedupStages, stage: str, count: int, place: int) -> list[str]:
        counts = ["--parts", str(self.num_parts), "--ranges", str(dedup.ranges), "--shard", f"{place}/{count}"]
        return ["dedup", stage, *self.words[1:], *counts]

    def _done_of_stage(self, dedup: DedupStages, stage: str, numbers: range) -> frozenset[int]:
        output = Path(self.cwd, self.output_prefix)
        tasks = {number: PartNumber(place, len(numbers)) for place, number in enumerate(numbers, 1)}
        if stage in ("drop", "substring"):
            return frozenset(number for number, task in tasks.items() if text_path(output, task).exists())
        if finished_job(output) == dedup.job:
            return frozenset(numbers)
        work = output / WORK / dedup.job
        return frozenset(number for number, task in tasks.items() if (work / done_name(stage, task)).exists())

    def phase_of(self, number: int) -> JobPhase:
        """The phase of a task."""
        return next(phase for phase in self.phases if number in phase.numbers)

    def to_run(self) -> list[tuple[JobPhase, list[int]]]:
        """The tasks to start, by phase: those not done; all of a phase if an earlier one has any to start."""
        steps: list[tuple[JobPhase, list[int]]] = []
        for phase in self.phases:
            done = frozenset[int]() if steps else phase.done()
            if numbers := [number for number in phase.numbers if number not in done]:
                steps.append((phase, numbers))
        return steps

    def words_of(self, number: int) -> list[str]:
        """The command line of a task."""
        phase = self.phase_of(number)
        own_folder = ["--work-folder", str(Path(self.work_folder, phase.called(number)))] if self.work_folder else []
        return [*phase.words(number - phase.numbers.start + 1), *own_folder]

    def _done_report(self) -> frozenset[int]:
        done = self._is_file(f"{self.output_prefix}/decontaminate.report")
        return frozenset([self.num_parts + 1] if done else ())

    def _called(self, number: int) -> str:
        return "merge" if number == MERGE else self.phase_of(number).called(number)

    def log(self, number: int) -> Path:
        """The log of a task."""
        return self.folder / "logs" / f"{self._called(number)}.log"

    def state_path(self, number: int) -> Path:
        """The state file of a task."""
        return self.folder / "state" / f"{self._called(number)}.json"

    def done_parts(self) -> frozenset[int]:
        """The parts that are done.

        A part of a text job is done when it has a report; others when all their results and pairs are complete.

        Raises:
            UsageError, ResourceError: storage denies access to the results, or does not answer.
        """
        numbers = range(1, self.num_parts + 1)
        if self.words[0] in TEXT_JOBS:
            folders = {n: part_folder(self.output_prefix, PartNumber(n, self.num_parts)) for n in numbers}
            return frozenset(n for n in numbers if self._is_file(f"{folders[n]}/{self.words[0]}.report"))
        is_there = self._stored_names().__contains__ if self.is_stored else self._is_file
        return frozenset(n for n in numbers if all(map(is_there, self._names_of(n))))

    def _names_of(self, number: int) -> list[str]:
        output_prefix = str(parse_address(self.output_prefix)) if self.is_stored else self.output_prefix
        prefix = part_prefix(output_prefix, PartNumber(number, self.num_parts))
        return [f"{prefix}_{result}{ending}" for result in self.results for ending in (".json", ".idx", ".bin")]

    def _is_file(self, name: str) -> bool:
        return Path(self.cwd, name).is_file()

    def _stored_names(self) -> set[str]:
        from mdata.object_storage.reading import list_objects

        return {str(entry.address) for entry in list_objects(parse_address(self.output_prefix))}

    def is_merged(self) -> bool:
        """Whether the merge succeeded after the last part ended; without a merge: whether there is nothing to merge."""
        return self.merge == "none" or (read_state(self, MERGE) or PartState("waiting")).code == 0

    def missing(self) -> list[int]:
        """The tasks that are not done, except the merge."""
        phases = [phase for phase in self.phases if phase.name != "merge"]
        return [number for phase in phases for number in sorted(set(phase.numbers) - phase.done())]


@dataclass(frozen=True)
class PartState:
    """What the process of a part wrote when it started or ended: where and when, and with which exit code."""

    event: Literal["waiting", "started", "ended"]
    host: str = ""
    pid: int = 0
    at_s: float = 0.0
    attempt: int = 0
    code: int | None = None


LAUNCHED_ALREADY = (
    "this job is being launched already, and that launch also merges its parts",
    "see `mdata status`; once it has ended, the same command starts what is missing",
)


@contextmanager
def launching(folder: Path, *, held: tuple[str, str] = LAUNCHED_ALREADY) -> Iterator[None]:
    """Lock a job's folder, so that nobody else launches the job within the block.

    Args:
        folder: of the job.
        held: the error's text, after the folder, if another launcher holds the lock; and its advice.

    Raises:
        UsageError: another launcher holds it; names the process.
    """
    path = folder.with_name(f".{folder.name}.lock")
    with os_errors_named("making the job's folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock.hold(path, remove=True, held=(f"{folder}: {held[0]}", held[1])):
        yield


def save_job(job: Job) -> None:
    """Write `job.json` and make the folder, unless the same job is there already.

    Raises:
        UsageError: another job is there; names what differs.
    """
    path = job.folder / "job.json"
    with os_errors_named("making the job's folder"):
        for name in ("logs", "state"):
            (job.folder / name).mkdir(parents=True, exist_ok=True)
        if path.exists():
            refuse_other_job(
                path.parent,
                load_job(job.folder),
                job,
                names=("words", "cwd", "num_parts", "dedup"),
                fix="give the same command as before, another --output-prefix, or remove that folder",
            )
        facts = asdict(job)
        if job.dedup is None:
            del facts["dedup"]  # as before there were other jobs
        atomic_io.atomic_write(path, json.dumps(facts, indent=1).encode() + b"\n")


def refuse_other_job(folder: Path, stored_job: object, job: object, *, names: Sequence[str], fix: str) -> None:
    """Compare the job of a folder with the one to launch.

    Args:
        names: of the attributes that must be equal.
        fix: what to do otherwise.

    Raises:
        UsageError: one of them differs; names it with both values.
    """
    for name in names:
        was, now = getattr(stored_job, name), getattr(job, name)
        if was != now:
            shown = [" ".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in (was, now)]
            raise UsageError(
                f"{folder} is the folder of another job",
                found=f"{name}: {shown[1]}",
                expected=f"{name}: {shown[0]}",
                fix=fix,
            )


def discard_unstarted(job: Job) -> None:
    """Remove the job's folder if no part was ever started or submitted to Slurm."""
    if not [file for name in ("logs", "state", "slurm") for file in job.folder.glob(f"{name}/*")]:
        shutil.rmtree(job.folder, ignore_errors=True)


def load_job(path: Path) -> Job:
    """Read the job of a folder, or of an output prefix.

    Raises:
        UsageError: there is none. DamageError: its description is damaged.
    """
    folders = [path, path.with_name(f"{path.name}.job")]
    description = next((folder / "job.json" for folder in folders if (folder / "job.json").is_file()), None)
    if description is None:
        raise UsageError(f"{path} is not a job", expected="the folder PREFIX.job that mdata launch made, or PREFIX")
    try:
        value = json.loads(description.read_bytes())
        if dedup := value.pop("dedup", None):
            value["dedup"] = DedupStages(**{**dedup, "stages": tuple(dedup["stages"])})
        return Job(**{**value, "words": tuple(value["words"]), "results": tuple(value["results"])})
    except (ValueError, TypeError, KeyError) as error:
        raise DamageError(f"{description} is damaged", found=str(error), fix="remove it and launch again") from error


def read_state(job: Job, number: int) -> PartState | None:
    """The last state that a part's process wrote; None: it never started, or the file cannot be read."""
    try:
        return PartState(**json.loads(job.state_path(number).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def write_started(job: Job, number: int) -> PartState:
    """Record that this process, that of the part, has begun."""
    before = read_state(job, number)
    state = PartState("started", os.uname().nodename, os.getpid(), time.time(), (before.attempt if before else 0) + 1)
    return _write(job, number, state)


def write_ended(job: Job, number: int, *, started: PartState, code: int) -> None:
    """Record that the part's process ends."""
    state = PartState("ended", started.host, started.pid, time.time(), started.attempt, code)
    _write(job, number, state)


def _write(job: Job, number: int, state: PartState) -> PartState:
    with os_errors_named("writing the state of a part"):
        atomic_io.atomic_write(job.state_path(number), json.dumps(asdict(state)).encode())
    return state


def part_command(job: Job, *, cpus: int, dies_with_parent: bool) -> list[str]:
    """The command that runs a part (cli/launch_part.py), without its last word, the part's number."""
    words = [*command_line("launch_part"), "--cpus", str(cpus)]
    return [*words, *["--dies-with-parent"] * dies_with_parent, str(job.folder)]
