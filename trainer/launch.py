"""Starting the ranks of a run on this machine, and bringing their errors back as one.

`launch` runs a command N times through torch.distributed's elastic launcher; each process finds its place
in the environment (`world.find_placement`), as it would under torchrun. What is unusual: a rank does not
print its error but leaves a report in a folder, and `launch` raises the error that came first in cause:
when one rank fails, the others lose their connection and complain as well, and a user should not have to
read that. A rank dies with its parent, so that no orphan goes on writing checkpoints. Ctrl-C and SIGTERM are handed on
to the ranks, which write a checkpoint and end; there is no limit to the time that this takes. Nothing is restarted: run
the command again to continue.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mdata import (
    SILENT,
    BadInputError,
    DamageError,
    MdataError,
    Progress,
    ResourceError,
    StoppedError,
    UsageError,
    durable,
    explain_os_error,
)
from trainer.config import RunConfig, problems_error
from trainer.plan import check
from trainer.stopping import HEARD, SAME_REQUEST_S

PR_SET_PDEATHSIG = 1  # linux/prctl.h
INTERRUPTED = 130


class RankFault(RuntimeError):
    """A rank failed by a fault of ours; the message names it, a note holds its traceback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """How one rank ended badly.

    Args:
        exit_code: the documented one; negative: minus the signal that killed it.
        message: for the user. trace: for us.
        time_s: on the machine's monotonic clock.
    """

    rank: int
    exit_code: int
    message: str
    trace: str = ""
    time_s: float = 0.0


def default_nproc(config: RunConfig) -> int:
    """Ranks where the user names no number: one for each visible GPU; without any, as many as mesh.tp."""
    import torch

    return torch.cuda.device_count() or config.mesh.tp


def preflight(config: RunConfig, world_size: int, *, where: str, progress: Progress = SILENT) -> None:
    """Find every problem of a run that can be known before a rank is started.

    Args:
        where: the configuration's name in the message.
        progress: hears of arrays that are built; the ranks find them.

    Raises:
        UsageError: all problems at once. MdataError: the data is damaged.
    """
    problems = run_problems(config, world_size, progress=progress)
    if problems:
        raise problems_error(where, problems)


def run_problems(config: RunConfig, world_size: int, *, progress: Progress = SILENT) -> list[str]:
    """All problems of a configuration with its mesh, its data and the place of its folder, one text each."""
    from trainer.data import open_data

    folder = list(_folder_problems(config.run.folder))
    try:
        facts = open_data(config, progress=progress).facts
    except UsageError as error:
        return [*check(config, world_size, facts=None), *folder, str(error)]
    return [*check(config, world_size, facts=facts), *folder]


def _folder_problems(folder: str) -> Iterator[str]:
    """Why a run folder cannot be made or written, if that can be seen; nothing is made."""
    place = Path(folder).absolute()
    there = next(path for path in (place, *place.parents) if path.exists())
    if not there.is_dir():
        yield f"run.folder={folder!r} cannot be made: {there} is a file; name another folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"run.folder={folder!r} cannot be written: no permission for {there}; name another folder"


def launch(command: Sequence[str], *, nproc: int, reports: Path) -> None:
    """Run a command on `nproc` ranks of this machine and wait for the end.

    Args:
        command: program and arguments, the same for every rank; it calls `rank_process` first.
        reports: an empty folder, for the ranks' reports.

    Raises:
        MdataError: what the first failing rank reported. RankFault: the same, for a fault of ours.
        KeyboardInterrupt: Ctrl-C; no rank is left. StoppedError: SIGTERM; no rank is left.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"mtrain-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",  # a machine whose own name does not resolve can train too
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(reports / "agent")),
        signals_to_handle="SIGHUP,SIGQUIT",  # the others are ours
    )
    handing_on = _HandingOn(reports, nproc)
    try:
        with _own_signals(), _quiet_agent():
            for number in HEARD:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, handing_on)
            elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if handing_on.number is not None:
            _raise_stopped(reports, handing_on.number)
        _raise(first_cause(read_reports(reports), codes))
    except SignalException as error:
        _raise_stopped(reports, error.sigval)


class _HandingOn:
    """Hands a signal on to the ranks once all of them listen; before that, and at a second Ctrl-C, it ends them.

    Attributes:
        number: of the signal that was handed on first.
    """

    def __init__(self, reports: Path, nproc: int) -> None:
        self.number: signal.Signals | None = None
        self._reports, self._nproc, self._first_s = reports, nproc, 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        now, name = time.monotonic(), signal.Signals(number)
        again = self.number is not None and name == signal.SIGINT and now - self._first_s > SAME_REQUEST_S
        ranks = [int(path.read_text()) for path in self._reports.glob("listens-*")]
        if again or len(ranks) < self._nproc:
            raise SignalException(f"got {name.name}", sigval=name)
        if self.number is None:
            self.number, self._first_s = name, now
        for rank in ranks:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(rank, number)


def listen(reports: Path, *, rank: int) -> None:
    """To be called by a rank when its handlers of signals are in place: `launch` hands them on from now on."""
    durable.atomic_write(reports / f"listens-{rank}", str(os.getpid()).encode())


def _raise_stopped(reports: Path, number: signal.Signals) -> NoReturn:
    """End as a signal asks for, unless a rank failed at something else meanwhile, such as saving to a full disk."""
    found = read_reports(reports)
    stops = (INTERRUPTED, StoppedError.exit_code)
    if failed := [report for report in found if report.exit_code > 1 and report.exit_code not in stops]:
        _raise(min(failed, key=lambda report: report.time_s))
    if number == signal.SIGINT:
        raise KeyboardInterrupt from None
    if stopped := [report for report in found if report.exit_code == StoppedError.exit_code]:
        _raise(stopped[0])
    raise StoppedError(f"stopped by {number.name}", fix="run the same command again") from None


def first_cause(reports: Sequence[RankReport], exit_codes: Mapping[int, int]) -> RankReport:
    """The report to show: what explains the other ranks' ends.

    Errors with a documented exit code come first, then ranks that were killed without a word, then faults
    of ours (a lost connection looks like one), then ranks that stopped because they were asked to; earlier
    before later.
    """
    told = {report.rank for report in reports}
    silent = [
        RankReport(rank=rank, exit_code=code, message=_death(rank, code))
        for rank, code in exit_codes.items()
        if rank not in told and code != -signal.SIGTERM  # that is how the launcher ends the others
    ]
    killed_by_launcher = RankReport(rank=-1, exit_code=1, message="every rank was stopped, and none said why")

    def order(report: RankReport) -> tuple[int, float]:
        if report.exit_code in (INTERRUPTED, StoppedError.exit_code):
            return 3, report.time_s
        return (0 if report.exit_code > 1 else 1 if report.exit_code < 0 else 2), report.time_s

    return min([*reports, *silent], key=order, default=killed_by_launcher)


def rank_process() -> None:
    """To be called first by a process that `launch` started: it shall die with its parent (Linux only)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def write_report(folder: Path, error: BaseException, *, rank: int) -> int:
    """Leave a rank's error for `launch` and return the exit code that belongs to it."""
    known = explain_os_error(error) if isinstance(error, OSError) else error
    if isinstance(known, MemoryError):
        known = ResourceError("out of memory", fix="use a smaller train.micro_batch")
    if isinstance(known, KeyboardInterrupt):
        code, message = INTERRUPTED, "interrupted"
    elif isinstance(known, MdataError) and known.exit_code != 1:
        code, message = known.exit_code, str(known)
    else:
        code, message = 1, f"rank {rank}: {type(known).__name__}: {known}"
    trace = "".join(traceback.format_exception(error))
    report = RankReport(rank=rank, exit_code=code, message=message, trace=trace, time_s=time.monotonic())
    durable.atomic_write(folder / f"rank-{rank}.json", json.dumps(asdict(report)).encode())
    return code


def read_reports(folder: Path) -> list[RankReport]:
    """The reports that ranks left, by rank."""
    found = [RankReport(**json.loads(path.read_bytes())) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda report: report.rank)


def _raise(report: RankReport) -> NoReturn:
    if report.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    kinds = (UsageError, BadInputError, DamageError, ResourceError, StoppedError)
    kind = next((kind for kind in kinds if kind.exit_code == report.exit_code), None)
    error = kind(report.message) if kind else RankFault(report.message)
    if report.exit_code < 0:
        error = ResourceError(report.message, fix="look for its cause in the system's log, then run again")
    if report.trace:
        error.add_note(f"rank {report.rank}:\n{report.trace}")
    raise error from None


def _death(rank: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} ended with exit code {code} and without a word"
    return f"rank {rank} was killed by {signal.Signals(-code).name}"


@contextmanager
def _own_signals() -> Iterator[None]:
    """The launcher installs handlers and leaves them; put ours back afterwards."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """No log lines of the launcher's: what they report, we raise."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
