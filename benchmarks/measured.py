"""Measures one run of a program: wall time, processor seconds and memory of its whole process tree.

Processor seconds are the kernel's own sum for the process and every child that was waited for. Memory is sampled from
/proc about 20 times a second over the tree, so a peak shorter than 50 ms can be missed. RSS counts pages that two
processes share once for each of them; PSS divides them, so that its sum is what the tree really holds, but reading it
walks the page tables and slows the program: ask for it in runs whose time does not count. Linux only.
"""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Measured:
    """What one run took.

    Attributes:
        wall_s: from before the process was started to its end.
        cpu_s: user and system, children included.
        rss_bytes: the largest sum of RSS over the tree.
        pss_bytes: the largest sum of PSS, 0 where it was not sampled.
        others_s: processor seconds that the rest of the machine used meanwhile; near 0 on a quiet machine.
        code: the exit code.
        output: the end of its standard output and error.
    """

    wall_s: float
    cpu_s: float
    rss_bytes: int
    pss_bytes: int
    others_s: float
    code: int
    output: str


def measure(
    command: Sequence[str], folder: Path, *, variables: Mapping[str, str] | None = None, pss_hz: float = 0
) -> Measured:
    """Run a command in a folder; with `pss_hz` its PSS is sampled that often too."""
    os.sync()  # what the run before it left unwritten is not this one's to pay
    log = folder / "measured.log"
    with log.open("wb") as out:
        start, busy = time.perf_counter(), busy_s()
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=subprocess.STDOUT)
        sampler = Sampler(process.pid, pss_hz)
        sampler.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        busy = busy_s() - busy
        process.returncode = os.waitstatus_to_exitcode(status)
    sampler.stop()
    tail = log.read_bytes()[-2000:].decode(errors="replace")
    cpu = usage.ru_utime + usage.ru_stime
    others = max(0.0, busy - cpu - sampler.cpu_s)
    return Measured(wall, cpu, sampler.rss_bytes, sampler.pss_bytes, others, process.returncode, tail)


class Sampler(threading.Thread):
    """Looks at the tree under one process until told to stop."""

    PERIOD_S = 0.05

    def __init__(self, pid: int, pss_hz: float) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._pss_period = 1 / pss_hz if pss_hz else float("inf")
        self._done = threading.Event()
        self.rss_bytes = self.pss_bytes = 0
        self.cpu_s = 0.0

    def run(self) -> None:
        """Sample RSS every period, and PSS when it is due."""
        due = 0.0 if self._pss_period < float("inf") else float("inf")
        while not self._done.wait(self.PERIOD_S):
            tree = processes(self._pid)
            self.rss_bytes = max(self.rss_bytes, sum(map(rss_of, tree)))
            if time.perf_counter() >= due:
                self.pss_bytes = max(self.pss_bytes, sum(map(pss_of, tree)))
                due = time.perf_counter() + self._pss_period
            self.cpu_s = time.thread_time()

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self.join()


def processes(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def rss_of(pid: int) -> int:
    """Resident bytes of one process, 0 if it is gone."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def pss_of(pid: int) -> int:
    """Proportional bytes of one process, 0 if it is gone."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("\nPss:")[1].split()[0]) * 1024
    return 0


def busy_s() -> float:
    """Processor seconds that the machine has used since it started."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq = map(int, words[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    with suppress(OSError, IndexError):
        model = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].split("\n")[0]
        return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    return {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
