"""The processes of a server: starts one per rank, and notices when one has ended or hangs.

The ranks are started as those of a run (trainer/run/launch.py): they find each other in a store of this process, leave
their errors as reports in a folder, and die with this process. In addition rank 0 has a pipe to this process and one to
each other rank, and each rank sends heartbeats through a pipe to this process. Silence is counted in polls, so a
suspended machine can go on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mdata import BadInputError, DamageError, MdataError, ResourceError, UsageError
from mdata.util import atomic_io
from trainer.run.heartbeats import Heartbeat, numbers, places
from trainer.run.launch import RankFault, first_cause, rank_environment, read_reports
from trainer.serve.rank import SETTINGS
from trainer.serve.service import Service, hang_up

POLL_S, PATIENCE_S = 0.1, 5.0  # PATIENCE_S: for ranks to end once their pipes are closed
SILENT_S = 8.0  # without a beat: the process was stopped, or hangs in the kernel
STILL_S = 60.0  # in which no rank moves though sequences are open: they wait for each other, or for a device


class Beats:
    """Watches the heartbeats of the ranks, to notice one that hangs."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.last, self.problem = dict.fromkeys(range(len(connections)), Heartbeat()), ""
        self._connections = connections
        self._looks_silent, self._looks_still = [0] * len(connections), 0

    def look(self, *, busy: bool) -> str:
        """Read the beats that have arrived and return `problem`; call it every POLL_S seconds.

        Args:
            busy: whether sequences are open, so that ranks must make progress.
        """
        for rank, connection in enumerate(self._connections):
            self._looks_silent[rank] += 1
            with suppress(EOFError, ConnectionResetError):  # the rank has ended
                while connection.poll():
                    self.last[rank], self._looks_silent[rank] = connection.recv(), 0
        still = busy and all(beat.still for beat in self.last.values())
        self._looks_still = self._looks_still + 1 if still else 0
        if silent := [rank for rank, looks in enumerate(self._looks_silent) if looks * POLL_S >= SILENT_S]:
            where = places([(rank, self.last[rank]) for rank in silent], last=True)
            self.problem = f"{numbers(silent)} did not respond for {SILENT_S:.0f} s; {where}"
        elif self._looks_still * POLL_S >= STILL_S:
            self.problem = f"no rank moved for {STILL_S:.0f} s; {places(list(self.last.items()))}"
        return self.problem


class Ranks:
    """The ranks of a server.

    Args:
        command: starts a rank; the folder and "--serve" are appended.
        folder: an empty one, for settings and reports.
        settings: see `serve_here`.
    """

    def __init__(self, command: Sequence[str], folder: Path, settings: Mapping[str, Any], *, nproc: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        here, there = socket.socketpair()
        self.connection = Connection(here.detach())
        pairs = [os.pipe() for _ in range(nproc - 1)]
        to_others = [write for _, write in pairs]
        pipes: list[list[int | None]] = [[there.fileno(), *to_others], *([None, read] for read, _ in pairs)]
        beats = [os.pipe() for _ in range(nproc)]
        self.beats = Beats([Connection(read, writable=False) for read, _ in beats])
        ends = {"pipes": pipes, "beats": [write for _, write in beats]}
        atomic_io.atomic_write(folder / SETTINGS, json.dumps({**settings, **ends}).encode())
        try:
            for rank in range(nproc):
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(folder), "--serve"],
                        env=rank_environment(rank, nproc, self._store.port),
                        pass_fds=[fd for fd in (*pipes[rank], beats[rank][1]) if fd is not None],
                        start_new_session=True,  # Ctrl-C in a terminal reaches this process alone
                    )
                )
        except OSError:
            self.end()
            raise
        finally:
            there.close()
            for pair in pairs:
                for fd in pair:
                    os.close(fd)
            for _, write in beats:
                os.close(write)

    async def ended(self, service: Service) -> None:
        """Wait until a rank has ended, or was killed because it hung."""
        while all(process.poll() is None for process in self._processes):
            await asyncio.sleep(POLL_S)
            if service.ready.is_set() and self.beats.look(busy=service.running_rows > 0):
                for process in self._processes:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)

    def error(self) -> MdataError | RankFault:
        """The reason why the ranks ended, once one of them has."""
        if self.beats.problem:
            return ResourceError(self.beats.problem, fix="check this machine and its log, then start the server again")
        time.sleep(2 * POLL_S)  # the rank that explains the others' ends may be noticed after them
        codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
        report = first_cause(read_reports(self._folder), {rank: code for rank, code in codes.items() if code})
        kinds = (UsageError, BadInputError, DamageError, ResourceError)
        kind = next((kind for kind in kinds if kind.exit_code == report.exit_code), None)
        if report.exit_code < 0:
            kind = ResourceError
        fix = "check the system's log for the cause, then start the server again" if report.exit_code < 0 else None
        error = kind(report.message, fix=fix) if kind else RankFault(report.message)
        if report.trace:
            error.add_note(f"rank {report.rank}:\n{report.trace}")
        return error

    def end(self) -> None:
        """End all ranks by closing their pipes; those that do not leave are killed."""
        hang_up(self.connection)
        until_s = time.monotonic() + PATIENCE_S
        failed = any(process.poll() for process in self._processes)  # the others may wait for it for minutes
        while not failed and time.monotonic() < until_s and None in [process.poll() for process in self._processes]:
            time.sleep(POLL_S)
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, which nothing can end
                process.wait(PATIENCE_S)
