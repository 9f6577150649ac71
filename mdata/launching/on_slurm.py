"""Runs the tasks of a job as Slurm array jobs; each phase, and the merge, waits for the phase before.

One array has at most as many tasks as the site allows (MaxArraySize), so a job may need several. Tasks that are queued
or running are not submitted again, so the same command submits what is missing. Scripts, job ids and Slurm's own output
are in the folders `slurm` and `logs` of the job. A task that is preempted, or whose node fails, is requeued by Slurm;
one that nears its time limit stops and asks to be requeued (cli/launch_part.py).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mdata.launching.job_folder import MERGE, Job, JobPhase, part_command
from mdata.launching.slurm_commands import batch_script, run_slurm, sbatch, squeue, write_script
from mdata.rewriting.found_parts import as_ranges

_BEFORE_LIMIT_S = 120
_DEFAULT_ARRAY = 1001


@dataclass(frozen=True)
class Array:
    """One array job, whose task t is task `offset` + t of the job."""

    offset: int
    tasks: tuple[int, ...]


@dataclass(frozen=True)
class Submitted:
    """The submitted Slurm jobs.

    Attributes:
        arrays: offset by id of each array job.
        merge: id of the merge job.
    """

    arrays: dict[str, int] = field(default_factory=dict)
    merge: str | None = None


def arrays_of(parts: Sequence[int], max_array: int) -> list[Array]:
    """Ascending task numbers as arrays with task ids from 1 to `max_array` - 1, Slurm's limit."""
    each = max(1, max_array - 1)
    tasks_by_offset: dict[int, list[int]] = {}
    for part in parts:
        tasks_by_offset.setdefault((part - 1) // each * each, []).append(part - (part - 1) // each * each)
    return [Array(offset, tuple(tasks)) for offset, tasks in tasks_by_offset.items()]


def submit(
    job: Job,
    steps: Sequence[tuple[JobPhase, Sequence[int]]],
    *,
    cpus: int,
    at_once: int | None,
    options: Sequence[str] = (),
) -> Submitted:
    """Submit the tasks that are not queued yet, and a merge that depends on all parts.

    Queued tasks that depend on a phase with newly submitted tasks are cancelled and submitted again.

    Args:
        job: its folder exists.
        steps: the tasks to run, see `Job.to_run`.
        cpus: of each task.
        at_once: the most tasks of an array that run together; None: as many as Slurm starts.
        options: of the site, for sbatch: ["--partition=long"].

    Raises:
        UsageError: Slurm is not here, or refuses the options. ResourceError: Slurm does not answer.
    """
    before = _read(job)
    queued = _queued(before)
    made = {array_id: offset for array_id, offset in before.arrays.items() if array_id in {name for name, _ in queued}}
    merge = before.merge if any(name == before.merge for name, _ in queued) else None
    after: list[str] = []
    has_new = False
    for phase, numbers in steps:
        if phase.name == "merge":
            if merge is not None and has_new:
                run_slurm(["scancel", merge])
                merge = None
            if merge is None:
                script = job.folder / "slurm" / "merge.sh"
                write_script(script, merge_script(job, after))
                merge = sbatch(options, script)
            break
        there = {made[name] + task: name for name, task in queued if name in made and task is not None}
        there = {number: name for number, name in there.items() if number in phase.numbers}
        if has_new and there:
            stale = sorted(set(there.values()))
            run_slurm(["scancel", *stale])
            made = {name: offset for name, offset in made.items() if name not in stale}
            there = {}
        new = arrays_of([number for number in numbers if number not in there], _max_array_size())
        ids = sorted(set(there.values()))
        for array in new:
            script = job.folder / "slurm" / f"{phase.name}s-{array.offset + array.tasks[0]}.sh"
            if phase.name == "part":
                script = script.with_name(f"parts-{array.offset + 1}.sh")
            text = array_script(job, array, cpus=cpus, at_once=at_once, phase=phase.name, after=after)
            write_script(script, text)
            ids.append(sbatch(options, script))
            made[ids[-1]] = array.offset
            # After each one, so that no submitted job is forgotten.
            _save(job, Submitted(made, merge))
        after, has_new = ids, has_new or bool(new)
    submitted = Submitted(made, merge)
    _save(job, submitted)
    return submitted


def array_script(
    job: Job,
    array: Array,
    *,
    cpus: int,
    at_once: int | None,
    phase: str = "part",
    after: Sequence[str] = (),
) -> str:
    """The batch script of an array job, which waits until the jobs `after` have succeeded."""
    command = shlex.join(part_command(job, cpus=cpus, dies_with_parent=False))
    return _script(
        job,
        f"{Path(job.output_prefix).name}-{'parts' if phase == 'part' else phase}",
        [
            *_waits_for(after),
            f"--array={as_ranges(array.tasks)}{f'%{at_once}' if at_once else ''}",
            f"--cpus-per-task={cpus}",
            f"--output={job.folder}/logs/slurm-%A_%a.log",
            f"--signal=B:USR1@{_BEFORE_LIMIT_S}",
        ],
        f"exec {command} $(({array.offset} + SLURM_ARRAY_TASK_ID))",
    )


def merge_script(job: Job, after: Sequence[str]) -> str:
    """The batch script of the merge, which waits until these jobs have succeeded."""
    command = shlex.join([*part_command(job, cpus=1, dies_with_parent=False), str(MERGE)])
    name = f"{Path(job.output_prefix).name}-merge"
    return _script(job, name, [*_waits_for(after), f"--output={job.folder}/logs/slurm-%j.log"], f"exec {command}")


def _waits_for(ids: Sequence[str]) -> list[str]:
    return [f"--dependency=afterok:{':'.join(ids)}", "--kill-on-invalid-dep=yes"] if ids else []


def _script(job: Job, name: str, options: Sequence[str], command: str) -> str:
    head = [f"--job-name={name}", f"--chdir={job.cwd}", "--requeue", "--open-mode=append", "--ntasks=1"]
    return batch_script([*head, *options], command)


def _queued(submitted: Submitted) -> list[tuple[str, int | None]]:
    """(job id, task or None) of those of these jobs that Slurm still knows."""
    wanted = {*submitted.arrays, *([submitted.merge] if submitted.merge else [])}
    if not wanted:
        return []
    rows = squeue("--array", fields=("%F", "%K"))  # %K: N/A for a job without tasks
    return [(job_id, int(task) if task.isdecimal() else None) for job_id, task in rows if job_id in wanted]


def _max_array_size() -> int:
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_slurm(["scontrol", "show", "config"]), re.MULTILINE)
    return int(match[1]) if match else _DEFAULT_ARRAY


def _read(job: Job) -> Submitted:
    try:
        return Submitted(**json.loads((job.folder / "slurm" / "submitted.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return Submitted()


def _save(job: Job, submitted: Submitted) -> None:
    text = json.dumps({"arrays": submitted.arrays, "merge": submitted.merge}, indent=1)
    write_script(job.folder / "slurm" / "submitted.json", text + "\n")
