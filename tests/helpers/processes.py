"""Waiting for what other threads and processes do, and whether a process is still alive."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Return once it is true; the limit is for machines on which all other tests run too."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, f"it did not happen within {seconds} s"
        time.sleep(0.01)


def process_state(pid: int) -> str:
    """A letter of proc(5), such as R, S, T for stopped, or Z for one that has ended; no process has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and waits for its parent does not."""
    return process_state(pid) != "Z"


def children_of(pid: int) -> list[int]:
    """The processes that its first thread started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
