"""Starts the ranks of a run on this machine, and reports their errors as one.

`launch` starts a command N times; each process finds its place in the environment (`placement.find_placement`), as it
would under torchrun. torchrun's launcher is not used: a signal raises an exception at any point of it, which may be
lost. What is unusual: a rank does not print its error but leaves a report in a folder, and `launch` raises the error
that came first in cause: when one rank fails, the others lose their connection and complain as well, and a user should
not have to read that. A rank dies with its parent, so that no orphan goes on writing checkpoints. Ctrl-C and SIGTERM
are passed on to the ranks, which write a checkpoint and end, in whatever time that takes. Nothing is restarted: run the
command again to continue.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from mdata import BadInputError, DamageError, MdataError, ResourceError, StoppedError, UsageError
from mdata.errors import explain_os_error
from mdata.progress import SILENT, Progress
from mdata.util import atomic_io
from trainer.checkpoint.location import check_destination, checkpoints_folder, location_of
from trainer.checkpoint.object_folder import try_to_write
from trainer.config.parse import AFTERWARDS, ReadConfig, problems_error
from trainer.config.sections import RunConfig
from trainer.errors import LostRankError
from trainer.plan.check import DataFacts, check, least_ranks, sample_problems, small_vocabulary
from trainer.plan.kernel_choice import missing_kernel_libraries
from trainer.plan.lengths import given_lengths
from trainer.plan.nearest_layout import nearest_layout, nearest_layout_text
from trainer.run.end_time import time_problems
from trainer.run.signals import HEARD, SAME_REQUEST_S
from trainer.tracking.trackers import address_problems, missing_libraries

if TYPE_CHECKING:
    from trainer.run.resume import Start

INTERRUPTED = 130
READER_GONE = 128 + signal.SIGPIPE  # a rank's exit code: the reader of its stdout (`| head`) has closed the pipe
POLL_S = 0.05
SMALLER = "smaller batches (in training train.micro_batch)"
LAUNCHER_PATIENCE_S = 30  # from the launcher's SIGTERM to its SIGKILL, once one rank has failed


class RankFault(RuntimeError):
    """A rank failed because of a bug; the message names it, and a note has its traceback."""


class SilentRanksError(ResourceError):
    """The run cannot continue, because ranks do not respond (`ranks`) or wait for each other."""

    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """How a rank failed.

    Args:
        exit_code: the documented one; negative: minus the signal that killed it.
        message: for the user. trace: for developers.
        time_s: on the machine's monotonic clock.
        lost: it ended because another rank was gone.
    """

    rank: int
    exit_code: int
    message: str
    trace: str = ""
    time_s: float = 0.0
    lost: bool = False


def default_nproc(config: RunConfig) -> int:
    """The default number of ranks: one for each visible GPU; without GPUs, as few as [mesh] needs."""
    import torch

    return torch.cuda.device_count() or least_ranks(config.mesh)


def preflight(
    read: ReadConfig, world_size: int, *, where: str, progress: Progress = SILENT, needs_libraries: bool = True
) -> None:
    """Find every problem of a run that can be found before a rank is started.

    Args:
        where: the configuration's name in the message.
        progress: receives notes on arrays that are built, which the ranks then find.
        needs_libraries: see `survey`.

    Raises:
        UsageError: all problems at once. MdataError: the same, if the data is damaged.
    """
    # Rank 0 compares every byte when the run starts.
    surveyed = survey(read, world_size, progress=progress, every_byte=False, needs_libraries=needs_libraries)
    if surveyed.problems:
        raise surveyed.error(where)


@dataclass(frozen=True, slots=True)
class Survey:
    """The findings on a run before it is started.

    Args:
        problems: all of them, one text each; none: the run can start.
        start: where and how it continues; None if its data or its checkpoint does not allow it.
        facts: of the data; None if it cannot be opened.
        nearest: the settings to change for the nearest layout that works, by section.key; {}: the layout works.
        here: problems of this machine (the run's folders, libraries of trackers and kernels), where the run is to be on
            others.
        unchecked: why solving these may reveal more problems; None: these are all.
        kind: of the error, from the worst problem.
    """

    problems: list[str]
    start: Start | None
    facts: DataFacts | None = None
    nearest: Mapping[str, Any] = field(default_factory=dict)
    here: Sequence[str] = ()
    unchecked: str | None = None
    kind: type[MdataError] = UsageError

    def error(self, where: str) -> MdataError:
        """All problems as one error; `where`: the configuration's name in the message."""
        fix = nearest_layout_text(self.nearest) or self.unchecked
        return problems_error(where, self.problems, fix=fix, kind=self.kind)


def survey(
    read: ReadConfig,
    world_size: int,
    *,
    progress: Progress = SILENT,
    every_byte: bool = True,
    elsewhere: bool = False,
    needs_libraries: bool = True,
) -> Survey:
    """All problems of a configuration with its mesh, its data, its folder and its checkpoints, in storage or not.

    Wrong keys and values do not hide other problems, except for those that depend on the same sections.

    Args:
        every_byte: whether checkpoint.load="latest-valid" compares every byte, or only what is fast to read.
        elsewhere: the run will be on other machines, whose disks and libraries this one need not have.
        needs_libraries: whether libraries of trackers and kernels must be installed here; a container may have them
            instead.

    Raises:
        MdataError: the data or the checkpoint is damaged, and nothing else is wrong.
    """
    from trainer.convert.first_state import ForeignTokenizer
    from trainer.run.data import open_data, problems_of_sets
    from trainer.run.resume import conflicts_without_data, find_start, found_by_one
    from trainer.run.run_folder import folder_problems

    config, wrong = read.config, read.wrong_sections
    addresses = list(_address_problems(config))
    folders = list(folder_problems(config)) if config.run.folder else []
    anywhere = list(folder_problems(config, anywhere=True)) if elsewhere else folders
    libraries = [f"track.to: {text}, or leave it out" for text in missing_libraries(config.track.to).values()]
    libraries += missing_kernel_libraries(config.kernels)
    needs_libraries = needs_libraries and not elsewhere
    config_problems = [
        *anywhere,
        *address_problems(config.track),
        *(libraries if needs_libraries else []),
        *addresses,
        *time_problems(config.run, time.time()),
    ]
    facts, start, errors = None, None, list[MdataError]()
    try:
        unread = {"data", "model", "run", "train"}.intersection(wrong) or sample_problems(config.data)
        data = None if unread else open_data(config, progress=progress)
    except (UsageError, DamageError) as error:
        data, errors = None, [error]
    if data is None and "data" not in wrong:
        errors += problems_of_sets(config)
    try:
        if data is not None:
            facts = data.facts
        if not (addresses or wrong):
            seen = found_by_one(config, every_byte=every_byte)
            # `check` reports a length that is given twice or not at all; the ends of schedules do not follow from it.
            if data is not None and len(given_lengths(config.train)) == 1:
                start = find_start(config, data, point=seen)
            else:
                errors += conflicts_without_data(config, seen)
            if not isinstance(root := checkpoints_folder(config), Path):
                try_to_write(root)
    except (UsageError, DamageError) as error:
        errors.append(error)
    continued = start.config if start else config
    layout_problems = list(filter(read.says_nothing_of, check(continued, world_size, facts=facts)))
    if facts and any(isinstance(error, ForeignTokenizer) for error in errors):
        # If the data does not belong to the weights, no model.vocab_size would help.
        layout_problems = [problem for problem in layout_problems if problem != small_vocabulary(config, facts)]
    nearest = {} if wrong else nearest_layout(continued, world_size, facts=facts)
    config_problems = [*filter(read.says_nothing_of, config_problems), *map(str, errors)]
    problems = [*read.problems, *dict.fromkeys([*layout_problems, *config_problems])]
    damage = [error for error in errors if isinstance(error, DamageError)]
    if damage and problems == [str(damage[0])]:
        raise damage[0]
    kind = DamageError if damage else UsageError
    here = [problem for problem in folders if problem not in anywhere] + ([] if needs_libraries else libraries)
    return Survey(problems, start, facts, nearest, here, unchecked=AFTERWARDS if wrong else None, kind=kind)


def _address_problems(config: RunConfig) -> Iterator[str]:
    """Addresses of checkpoints that cannot be read or written, as far as their text tells."""
    for key, check_text in (("folder", check_destination), ("init_from", location_of)):
        if (text := getattr(config.checkpoint, key)) is None:
            continue
        try:
            check_text(text)
        except UsageError as error:
            yield f"checkpoint.{key}: {error}"


def launch(command: Sequence[str], *, nproc: int, reports: Path) -> None:
    """Run a command on `nproc` ranks of this machine and wait for the end.

    Args:
        command: program and arguments, the same for every rank; it calls `die_with_parent` first. A rank that ends with
            READER_GONE ends all of them, without an error.
        reports: an empty folder, for the ranks' reports.

    Raises:
        MdataError: the error of the first failing rank. RankFault: the same, for a bug.
        KeyboardInterrupt: Ctrl-C; no rank is left. StoppedError: SIGTERM; no rank is left.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = list[subprocess.Popen[bytes]]()
    requests = _Requests(reports, nproc)
    try:
        with requests.heard():
            for rank in range(nproc):
                environment = rank_environment(rank, nproc, store.port)
                # Ctrl-C in a terminal reaches only the launcher, which passes it on.
                ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
            while not requests.end and None in (codes := [process.poll() for process in ranks]) and not any(codes):
                time.sleep(POLL_S)
            # Once more: a rank may be seen before the lost rank of which it complains. Ranks that end after this were
            # ended here, and explain nothing.
            codes = [process.poll() for process in ranks]
            ending_s = time.monotonic()
            _end(ranks, requests)
    finally:
        _signal(ranks, signal.SIGKILL)  # where a rank could not be started
    exit_codes = {rank: code for rank, code in enumerate(codes) if code}
    if number := requests.end or (requests.handed_on if exit_codes else None):
        _raise_stopped(reports, number)
    if exit_codes:
        told = read_reports(reports)
        # Those that were asked to stop here explain nothing; the cause may have left no report.
        cause = first_cause([r for r in told if r.time_s < ending_s or not _asked_to_stop(r)], exit_codes)
        if cause.exit_code != READER_GONE:
            _raise(cause)


def rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """A rank's environment variables, as torchrun sets them; the store of all ranks is in the launcher's process."""
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",  # a machine whose own name does not resolve can train too
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _end(ranks: Sequence[subprocess.Popen[bytes]], requests: _Requests) -> None:
    """Ask the ranks that still run to end; kill those that do not within LAUNCHER_PATIENCE_S, or at another Ctrl-C."""
    asked = requests.count
    _signal(ranks, requests.end or signal.SIGTERM)
    patient_until_s = time.monotonic() + LAUNCHER_PATIENCE_S
    while None in [process.poll() for process in ranks] and requests.count == asked:
        if time.monotonic() >= patient_until_s:
            break
        time.sleep(POLL_S)
    _signal(ranks, signal.SIGKILL)
    for process in ranks:
        with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, which nothing can end
            process.wait(LAUNCHER_PATIENCE_S)


def _signal(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Signal the ranks that have not ended, and what they started."""
    for process in ranks:
        if process.poll() is None:
            os.killpg(process.pid, number)


class _Requests:
    """Signals to the launcher. They are recorded and raise nothing: an exception at an arbitrary point may be lost.

    SIGTERM and Ctrl-C are passed on to the ranks once all of them listen. Before that, and at a second Ctrl-C, the
    launcher has to end the ranks; the same holds for SIGHUP and SIGQUIT.

    Attributes:
        handed_on: the first signal that was passed on.
        end: the signal to end the ranks with.
        count: of the signals that ask to end them.
    """

    def __init__(self, reports: Path, nproc: int) -> None:
        self.handed_on: signal.Signals | None = None
        self.end: signal.Signals | None = None
        self.count = 0
        self._reports, self._nproc, self._first_s = reports, nproc, 0.0

    @contextmanager
    def heard(self) -> Iterator[None]:
        """A context in which signals are recorded; those that the process ignores (nohup) stay ignored."""
        before = {}
        for number in (*HEARD, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now_s, name = time.monotonic(), signal.Signals(number)
        again = self.handed_on is not None and name == signal.SIGINT and now_s - self._first_s > SAME_REQUEST_S
        listening = [int(path.read_text()) for path in self._reports.glob("listens-*")]
        if again or name not in HEARD or len(listening) < self._nproc:
            self.end, self.count = self.end or name, self.count + (name == signal.SIGINT)
            return
        if self.handed_on is None:
            self.handed_on, self._first_s = name, now_s
        for pid in listening:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, number)


def listen(reports: Path, *, rank: int) -> None:
    """Called by a rank once its signal handlers are installed: from now on `launch` passes signals on."""
    atomic_io.atomic_write(reports / f"listens-{rank}", str(os.getpid()).encode())


def _raise_stopped(reports: Path, number: signal.Signals) -> NoReturn:
    """End as the signal requests, unless a rank failed for another reason meanwhile, such as a full disk."""
    rank_reports = read_reports(reports)
    if failed := [r for r in rank_reports if r.exit_code > 1 and not _asked_to_stop(r) and not r.lost]:
        _raise(min(failed, key=lambda report: report.time_s))
    if number == signal.SIGINT:
        raise KeyboardInterrupt from None
    stopped = [report for report in rank_reports if report.exit_code == StoppedError.exit_code]
    # The signal was for all, so the message of a single rank is not shown.
    if of_all := [report for report in stopped if not report.message.startswith("rank ")]:
        _raise(of_all[0])
    raise StoppedError(f"stopped by {number.name}", fix="run the same command again to continue") from None


def first_cause(reports: Sequence[RankReport], exit_codes: Mapping[int, int]) -> RankReport:
    """The report to show: the one that explains the other ranks' ends.

    A rank that was stopped before any other had ended was stopped from outside, and nothing else has to be explained.
    Otherwise errors with a documented exit code come first, then ranks killed by a signal, bugs, lost connections to
    other ranks, and ranks that were asked to stop; earlier before later.

    Args:
        exit_codes: by rank, of those that had ended badly before the launcher ended the others; negative: minus a
            signal.
    """
    reported = {report.rank for report in reports}
    silent = [
        RankReport(rank=rank, exit_code=code, message=_death(rank, code))
        for rank, code in exit_codes.items()
        if rank not in reported
    ]
    first = min(reports, key=lambda report: report.time_s, default=None)
    killed = [report for report in silent if report.exit_code < 0 and report.exit_code != -signal.SIGTERM]
    if first is not None and _asked_to_stop(first) and not killed:
        return first

    def order(report: RankReport) -> tuple[int, float]:
        if _asked_to_stop(report):
            return 4, report.time_s
        if report.lost:
            return 3, report.time_s
        return (0 if report.exit_code > 1 else 1 if report.exit_code < 0 else 2), report.time_s

    nobody = RankReport(rank=-1, exit_code=1, message="the launcher reports a failure, but no rank does")
    return min([*reports, *silent], key=order, default=nobody)


def _asked_to_stop(report: RankReport) -> bool:
    return report.exit_code in (INTERRUPTED, StoppedError.exit_code)


def explained_end(error: BaseException, *, rank: int) -> tuple[BaseException, int, str]:
    """A rank's error in a form for users, its exit code, and the message."""
    explained = explain_os_error(error) if isinstance(error, OSError) else error
    if isinstance(explained, MemoryError):
        explained = ResourceError("out of memory", fix=f"use {SMALLER}")
    if isinstance(explained, KeyboardInterrupt):
        return explained, INTERRUPTED, "interrupted"
    if isinstance(explained, MdataError | StoppedError) and explained.exit_code != 1:
        return explained, explained.exit_code, str(explained)
    return explained, 1, f"rank {rank}: {type(explained).__name__}: {explained}"


def write_report(folder: Path, error: BaseException, *, rank: int) -> int:
    """Write a rank's error for `launch`, kill other ranks that it names, and return the exit code."""
    explained, code, message = explained_end(error, rank=rank)
    report = RankReport(
        rank=rank,
        exit_code=code,
        message=message,
        trace="".join(traceback.format_exception(error)),
        time_s=time.monotonic(),
        lost=isinstance(explained, LostRankError),
    )
    leave_report(folder, report)
    for other in {*explained.ranks} - {rank} if isinstance(explained, SilentRanksError) else ():
        # A process that was stopped does not answer SIGTERM, and the launcher would wait for it.
        with suppress(OSError, ValueError):  # it never listened, or has ended; or this is not Linux
            pid = int((folder / f"listens-{other}").read_text())
            parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) == os.getppid():  # otherwise the number is another process's by now
                os.kill(pid, signal.SIGKILL)
    return code


def leave_report(folder: Path, report: RankReport) -> None:
    """Write a report for `launch`."""
    atomic_io.atomic_write(folder / f"rank-{report.rank}.json", json.dumps(asdict(report)).encode())


def read_reports(folder: Path) -> list[RankReport]:
    """The reports that ranks left, by rank."""
    rank_reports = [RankReport(**json.loads(path.read_bytes())) for path in folder.glob("rank-*.json")]
    return sorted(rank_reports, key=lambda report: report.rank)


def _raise(report: RankReport) -> NoReturn:
    if report.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    kinds = (UsageError, BadInputError, DamageError, ResourceError, StoppedError)
    kind = next((kind for kind in kinds if kind.exit_code == report.exit_code), None)
    error = kind(report.message) if kind else RankFault(report.message)
    if report.exit_code == -signal.SIGTERM:
        error = StoppedError(report.message, fix="run the same command again to continue")
    elif report.exit_code < 0:
        error = ResourceError(report.message, fix=_after_a_kill(-report.exit_code))
    if report.trace:
        error.add_note(f"rank {report.rank}:\n{report.trace}")
    raise error from None


def _death(rank: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} ended with exit code {code} without an error report"
    return f"rank {rank} was {'stopped' if code == -signal.SIGTERM else 'killed'} by {signal.Signals(-code).name}"


def _after_a_kill(number: int) -> str:
    """What to do after a signal that a process cannot answer, or did not survive."""
    if number == signal.SIGKILL:
        return f"the system kills processes when memory runs out: check its log, or use {SMALLER}"
    return "check the system's log for the cause, then run again"
