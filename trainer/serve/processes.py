"""The processes of a server: starts one per rank, and notices when one has ended.

The ranks are started as those of a run (trainer/run/launch.py): they find each other in a store of this process, leave
their errors as reports in a folder, and die with this process. In addition rank 0 has a pipe to this process, and one
to each other rank.
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
from trainer.run.launch import RankFault, first_cause, rank_environment, read_reports
from trainer.serve.rank import SETTINGS
from trainer.serve.service import hang_up

POLL_S, PATIENCE_S = 0.1, 5.0  # PATIENCE_S: for ranks to end once their pipes are closed


class Ranks:
    """The ranks of a server.

    Args:
        command: starts a rank; gets the folder and "--serve" as its last words.
        folder: an empty one, for settings and reports.
        settings: see `serve_here`.

    Attributes:
        connection: to rank 0.
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
        atomic_io.atomic_write(folder / SETTINGS, json.dumps({**settings, "pipes": pipes}).encode())
        try:
            for rank in range(nproc):
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(folder), "--serve"],
                        env=rank_environment(rank, nproc, self._store.port),
                        pass_fds=[fd for fd in pipes[rank] if fd is not None],
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

    async def ended(self) -> None:
        """Wait until a rank has ended."""
        while all(process.poll() is None for process in self._processes):
            await asyncio.sleep(POLL_S)

    def error(self) -> MdataError | RankFault:
        """Why the ranks ended, once one of them has."""
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
        """End all ranks: they leave when their pipes are closed; those that do not are killed."""
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
