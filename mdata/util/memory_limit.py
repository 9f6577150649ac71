"""How much memory this process may still take: what the machine has left, and what its control groups and its own limit
allow.

For work whose size is known before it is begun, so that it is refused then, not when half of it is done. Pages of files
count as free, since the system gives them up. Where nobody says anything the answer is None, and nothing is refused.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from mdata.util.cpu_limit import group_folders

_MACHINE = Path("/proc/meminfo")
_OWN = Path("/proc/self/statm")
# Names of the limit, the use and the pages of files: of control groups of version 2, and of version 1.
_NAMES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def available_bytes() -> int | None:
    """The least that any of them leaves; None where it is not known."""
    known = [_of_machine(), _of_process(), *(_of_group(folder) for folder in group_folders("memory"))]
    return min((max(0, one) for one in known if one is not None), default=None)


def _of_machine() -> int | None:
    facts = _numbers(_MACHINE)
    return (facts["MemAvailable"] + facts.get("SwapFree", 0)) * 1024 if "MemAvailable" in facts else None


def _of_process() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        taken = int(_OWN.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        taken = 0
    return None if limit == resource.RLIM_INFINITY else limit - taken


def _of_group(folder: Path) -> int | None:
    for limit, use, pages in _NAMES:
        try:
            left = int((folder / limit).read_text()) - int((folder / use).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        facts = _numbers(folder / "memory.stat")
        return left + sum(facts.get(name, 0) for name in pages)
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Lines such as "MemAvailable:   23493296 kB" or "active_file 8192": name -> number."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {found[0].rstrip(":"): int(found[1]) for found in words if len(found) > 1 and found[1].isdecimal()}
