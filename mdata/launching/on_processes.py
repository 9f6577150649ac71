"""Runs tasks as processes of this machine, a limited number at a time; they die with the launcher.

A task that was killed or ran out of a resource is restarted a few times and continues from its journal. One that failed
for another reason is left to the user, and the others go on.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack

from mdata.errors import BadInputError, DamageError, MdataError, ResourceError, UsageError, os_errors_named
from mdata.launching.job_folder import Job, JobPhase, part_command
from mdata.progress import Progress

MOST_ATTEMPTS = 3
_KINDS: Mapping[int, type[MdataError]] = {2: UsageError, 3: BadInputError, 4: DamageError}
_RESOURCES = 5


def worth_another(code: int) -> bool:
    """Whether a restart may succeed after this exit code: the process was killed, or ran out of a resource."""
    return code < 0 or code == _RESOURCES


def run_here(
    job: Job, steps: Sequence[tuple[JobPhase, Sequence[int]]], *, at_once: int, cpus: int, progress: Progress
) -> None:
    """Run tasks, phase by phase; see `Job.to_run`.

    Raises:
        MdataError: tasks failed; of the kind of the first.
    """
    for phase, numbers in steps:
        failed: dict[int, int] = {}
        processes = _Processes(job, cpus)
        with phase.reported(progress, len(numbers)) as reported, ExitStack() as stack:
            threads = stack.enter_context(ThreadPoolExecutor(at_once))
            stack.callback(processes.stop)
            waiting = {threads.submit(processes.run, number): number for number in numbers}
            stack.callback(lambda: [future.cancel() for future in waiting])  # noqa: B023
            for future in as_completed(waiting):
                if code := future.result():
                    failed[waiting[future]] = code
                reported.advance(1)
        check_failed(job, failed)


def check_failed(job: Job, failed: Mapping[int, int]) -> None:
    """Raise an error that names the tasks that failed, and their logs.

    Args:
        job: of the tasks.
        failed: exit code by task; negative: the signal that killed it.

    Raises:
        MdataError: there are some; of the kind of the first.
    """
    if not failed:
        return
    from mdata.launching.job_status import last_lines

    numbers = sorted(failed)
    said = [line for line in last_lines(job.log(numbers[0]), 1 << 14) if line.startswith("mdata: error:")]
    raise _KINDS.get(failed[numbers[0]], ResourceError)(
        f"{job.phase_of(numbers[0]).describe(numbers)} failed",
        found=said[-1].removeprefix("mdata: error: ") if said else f"exit code {failed[numbers[0]]}",
        fix=f"see {job.log(numbers[0])}; the same command starts what is missing",
    )


class _Processes:
    """The processes of running tasks."""

    def __init__(self, job: Job, cpus: int) -> None:
        self._job, self._cpus = job, cpus
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped = False

    def run(self, number: int) -> int:
        """Run a task to its end; returns its exit code."""
        command = [*part_command(self._job, cpus=self._cpus, dies_with_parent=True), str(number)]
        code = 0
        for _ in range(MOST_ATTEMPTS):
            with os_errors_named("starting a part"):
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            self._running[number] = process
            if self._stopped:
                process.terminate()
            code = process.wait()
            del self._running[number]
            if self._stopped or not worth_another(code):
                break
        return code

    def stop(self) -> None:
        """Ask all running processes to stop; they record their progress."""
        self._stopped = True
        for process in list(self._running.values()):
            process.terminate()
