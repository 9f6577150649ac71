"""A training run that was launched as one job: the files in `RUN/job`, a local process, and how attempts ended.

Unlike a job of `mdata launch` it has no parts: its ranks start together, and progress is in the checkpoints. What is
unusual: the first rank to end records how, in a file named by the batch script (`END_FILE`). The scheduler only knows
the highest exit code, often that of a rank that was ended because another failed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from mdata.errors import DamageError, UsageError, os_errors_named
from mdata.launching.job_folder import refuse_other_job
from mdata.util import atomic_io

END_FILE = "MTRAIN_END_FILE"
"""The environment variable that names the file in which the first rank says how it ended."""
PLANNED_RANKS = "MTRAIN_PLANNED_RANKS"
"""The environment variable that says for how many ranks the job asked at most."""
FINAL = "-final"  # a file of that name with this at its end: the job must not be started again
RANKS = "-ranks"  # the same: for how many ranks the next start waits
JOB = "job"
Engine = Literal["local", "slurm", "ray"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunJob:
    """A run that was launched.

    Args:
        words: of `mtrain train`, as given: run.toml, overrides, --nproc.
        cwd: the folder in which they were given; relative paths start there.
        run_folder: absolute.
        nodes: least and most. ranks_per_node: on each.
        launches: how often the run was launched with `mtrain launch`.
        id: Slurm's; otherwise the number of a process on the host, which trains (local) or waits for the nodes (ray).
        host, started_ticks: of that process; the start time distinguishes it from a later process with the same number.
    """

    engine: Engine
    words: tuple[str, ...]
    cwd: str
    run_folder: str
    nodes: tuple[int, int]
    ranks_per_node: int
    launches: int = 1
    id: str = ""
    host: str = ""
    started_ticks: int = 0

    @property
    def folder(self) -> Path:
        """The job's folder, inside the run folder."""
        return Path(self.run_folder, JOB)

    @property
    def config(self) -> Path:
        """The configuration as it was launched."""
        return self.folder / "run.toml"

    @property
    def log(self) -> Path:
        """The output of the ranks of all attempts."""
        return self.folder / "log.txt"

    @property
    def stop_mark(self) -> Path:
        """A file that exists once `mtrain stop` was called: Slurm must not start the job again."""
        return self.folder / "stop"

    def is_same_process(self) -> bool:
        """Whether the local process is alive; False on other hosts."""
        here = self.host == os.uname().nodename
        known = here and self.id.isdecimal() and self.started_ticks > 0  # 0: it had ended before its start was read
        return known and _started_ticks(int(self.id)) == self.started_ticks

    def refuse_other(self, job: RunJob) -> None:
        """Refuse to launch another command while this one is queued or running.

        Raises:
            UsageError: something differs; named with both values.
        """
        names = ("words", "cwd", "engine", "nodes", "ranks_per_node")
        fix = f"mtrain stop {self.run_folder}, and launch again when it has ended; or choose another run.folder"
        refuse_other_job(self.folder, self, job, names=names, fix=fix)


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended, according to the first rank that ended.

    Args:
        code: the exit code. who: rank and host. message: the error; empty if the run was finished. at_s: seconds since
            1970.
    """

    code: int
    who: str
    message: str
    at_s: float


def prepare(job: RunJob, config_text: str) -> None:
    """Make the job's folder, with the configuration that the ranks will read."""
    with os_errors_named("making the job's folder"):
        job.folder.mkdir(parents=True, exist_ok=True)
        job.stop_mark.unlink(missing_ok=True)
        atomic_io.atomic_write(job.config, config_text.encode())


def save_job(job: RunJob) -> None:
    """Write `job.json`."""
    with os_errors_named("writing the job's record"):
        atomic_io.atomic_write(job.folder / "job.json", json.dumps(asdict(job), indent=1).encode() + b"\n")


def discard(job: RunJob) -> None:
    """Remove the folder of a job that was not started, and the run folder if it is then empty."""
    shutil.rmtree(job.folder, ignore_errors=True)
    with suppress(OSError):
        job.folder.parent.rmdir()


def load_job(run_folder: Path) -> RunJob | None:
    """The job of a run folder; None: it was not launched with `mtrain launch`.

    Raises:
        UsageError: it belongs to a run in another folder. DamageError: the record cannot be read.
    """
    path = run_folder / JOB / "job.json"
    try:
        value = json.loads(path.read_bytes())
        job = RunJob(**{**value, "words": tuple(value["words"]), "nodes": tuple(value["nodes"])})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise DamageError(f"{path} is damaged", found=str(error), fix="remove it and launch again") from error
    if Path(job.run_folder).resolve() != run_folder.resolve():
        raise UsageError(
            f"{path.parent} is the job folder of another run",
            found=f"a job of {job.run_folder}",
            expected=f"one of {run_folder.resolve()}",
            fix=f"remove {path.parent}; it holds no results",
        )
    return job


def start_here(job: RunJob, command: Sequence[str]) -> RunJob:
    """Start a command as a background process; returns the job with that process.

    Args:
        job: prepared. command: trains, or waits for the nodes that do.
    """
    end = job.folder / f"end-local-{job.launches}"
    environment = {**os.environ, END_FILE: str(end)}
    with os_errors_named("starting the run"):
        end.unlink(missing_ok=True)
        log = atomic_io.open_no_link(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            process = subprocess.Popen(
                command,
                cwd=job.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
    ticks = _started_ticks(process.pid)
    return replace(job, id=str(process.pid), host=os.uname().nodename, started_ticks=ticks)


def record_end(env: Mapping[str, str], *, code: int, who: str, message: str = "") -> None:
    """Record how this rank ended, if the launcher asks for it and no rank has done so."""
    _say_first(env, "", f"{code} {who}\n{message}\n")


def refuse_restart(env: Mapping[str, str]) -> None:
    """Keep the launcher's script from starting the job again if it would end in the same way."""
    if path := env.get(END_FILE):
        with suppress(OSError):  # the script also counts restarts without progress
            Path(f"{path}{FINAL}").touch()


def wait_for_ranks(env: Mapping[str, str], world_size: int) -> None:
    """Make the launcher's script start the job again with this number of ranks, not with fewer."""
    _say_first(env, RANKS, f"{world_size}\n")


def _say_first(env: Mapping[str, str], ending: str, text: str) -> None:
    """Write a file of this attempt, if the launcher asks for it and no rank has written it."""
    if not (path := env.get(END_FILE)):
        return
    with suppress(OSError, UsageError):  # the run has ended anyway, perhaps because of the disk
        fd = atomic_io.open_no_link(Path(f"{path}{ending}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            atomic_io.write_all(fd, text.encode())
        finally:
            os.close(fd)


def ends(job: RunJob) -> list[End]:
    """How the attempts since the last launch ended, oldest first; killed attempts leave no record."""
    key = f"local-{job.launches}" if job.engine != "slurm" else f"{job.id}-*[0-9]"
    ended = []
    for path in job.folder.glob(f"end-{key}"):
        with suppress(OSError, ValueError, IndexError):
            first, _, message = path.read_text(encoding="utf-8").partition("\n")
            code, _, who = first.partition(" ")
            ended.append(End(int(code), who, message.strip(), path.stat().st_mtime))
    return sorted(ended, key=lambda end: end.at_s)


def _started_ticks(pid: int) -> int:
    """When a process started, in the kernel's ticks; 0: it does not exist, or is a zombie."""
    with suppress(OSError, ValueError, IndexError):
        state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if state in (b"Z", b"X") else int(rest[18])
    return 0
