"""Runs one part of a job; started by the launchers, not by users.

It gets the job's folder and the number of the part (0: the merge), records in the part's state file that it runs, and
runs the command with its output in the part's log. Slurm sends SIGUSR1 before a time limit: the part stops, records its
progress, and requests to be queued again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mdata.launching.job_folder import MERGE, Job, load_job, write_ended, write_started
from mdata.util import atomic_io
from mdata.util.commands import die_with_parent

_STOPPED = 75


def main(argv: Sequence[str]) -> int:
    """Run a part and return the exit code."""
    parser = argparse.ArgumentParser(prog="launch_part", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--dies-with-parent", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.dies_with_parent:
        die_with_parent()
    job, number = load_job(arguments.folder), arguments.number
    log = atomic_io.open_no_link(job.log(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.chdir(job.cwd)
    near_limit = _stop_on_usr1()
    started = write_started(job, number)
    from .mdata import main as mdata

    code = mdata(_words(job, number, arguments.cpus))
    write_ended(job, number, started=started, code=code)
    if code == _STOPPED and near_limit:
        subprocess.run(["scontrol", "requeue", _task_of_slurm()], check=False)
    return code


def _words(job: Job, number: int, cpus: int) -> list[str]:
    """The command line, with one worker per cpu of the part unless the user gave a number."""
    words = job.words_of(number)
    has_workers = number == MERGE or any(word.split("=")[0] == "--workers" for word in words)
    return words if has_workers else [*words, "--workers", str(cpus)]


def _stop_on_usr1() -> list[int]:
    """Turn SIGUSR1 into SIGTERM; the list, empty until then, records that it arrived."""
    came: list[int] = []

    def stop(number: int, _: object) -> None:
        came.append(number)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR1, stop)
    return came


def _task_of_slurm() -> str:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
