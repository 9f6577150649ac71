"""Runs the tasks of a job on an existing Ray cluster, which places them by CPUs and retries when a worker or node dies.

A Ray task only starts the process of a part and waits for it; documents stay on the shared file system. The process
dies with its worker, so a part never runs twice at a time. When the launcher dies, Ray ends its tasks, and the same
command continues the job. mdata must be installed under the same path on every node.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mdata.errors import ResourceError, UsageError
from mdata.launching.job_folder import Job, JobPhase, part_command
from mdata.launching.on_processes import MOST_ATTEMPTS, check_failed, worth_another
from mdata.progress import Progress

_ANSWER_S = 10.0


def run_on_ray(
    job: Job, steps: Sequence[tuple[JobPhase, Sequence[int]]], *, address: str, cpus: int, progress: Progress
) -> None:
    """Run tasks, phase by phase; see `Job.to_run`.

    Args:
        job: its folder exists.
        steps: the tasks to run.
        address: of the cluster; "auto": that of this node.
        cpus: of each task; a merge has one.
        progress: receives the tasks that ended.

    Raises:
        ResourceError: no cluster answers. MdataError: tasks failed; of the kind of the first.
    """
    with connected(address) as ray:
        command = part_command(job, cpus=cpus, dies_with_parent=True)
        for phase, numbers in steps:
            commands = [(number, [*command, str(number)]) for number in numbers]
            with phase.reported(progress, len(numbers)) as reported:
                failed = _run_all(ray, commands, 1 if phase.name == "merge" else cpus, progress=reported)
            check_failed(job, failed)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module ray, connected to a cluster during the block.

    Raises:
        UsageError: Ray is not installed. ResourceError: no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        fix = 'pip install "mdata-mtrain[ray]" on every node'
        raise UsageError("Ray is not installed here", fix=fix) from error
    try:
        _knock(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        raise ResourceError(
            f"no Ray cluster at {address}", found=str(error).splitlines()[0], fix="ray start --head, or --address"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Check that an address answers: otherwise Ray would wait for a minute and then end this process.

    Raises:
        OSError: nothing answers.
    """
    if match := re.fullmatch(r"(?:ray://)?(.+):([0-9]{1,5})", address):
        socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=_ANSWER_S).close()


def _run_all(ray: Any, commands: Sequence[tuple[int, list[str]]], cpus: int, *, progress: Progress) -> dict[int, int]:
    """Run all tasks; returns the exit codes of those that failed, by task."""
    task = ray.remote(num_cpus=cpus, max_retries=-1, scheduling_strategy="SPREAD")(_process_of())
    by_number = dict(commands)
    attempts = dict.fromkeys(by_number, 1)
    waiting = {task.remote(command): number for number, command in commands}
    failed = {}
    while waiting:
        (ended,), _ = ray.wait(list(waiting), num_returns=1)
        number = waiting.pop(ended)
        code = ray.get(ended)
        if worth_another(code) and attempts[number] < MOST_ATTEMPTS:
            attempts[number] += 1
            waiting[task.remote(by_number[number])] = number
            continue
        if code:
            failed[number] = code
        progress.advance(1)
    return failed


def _process_of() -> Any:
    """The Ray task. As a nested function it is sent as code, so a worker need not import this module."""

    def run(command: list[str]) -> int:
        import subprocess

        return subprocess.run(command, stdin=subprocess.DEVNULL).returncode

    return run
