"""The cores and the memory that this process may use, by its affinity, control groups (version 2 or 1) and limits.

Memory is checked before work of known size begins, so that it is refused at the start, not halfway.
Cached file pages count as free, since the system reclaims them. If the system reports nothing about memory the answer
is None, and nothing is refused.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_MACHINE_MEMORY = Path("/proc/meminfo")
_OWN_MEMORY = Path("/proc/self/statm")
# Names of the limit, the usage, and the fields of reclaimable pages: control groups version 2, then version 1.
_MEMORY_NAMES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def usable_cores() -> int:
    """Cores by affinity, fewer if a control group (version 2 or 1) grants less time; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, *(_quota(folder) or allowed for folder in _group_folders("cpu"))))


def _group_folders(controller: str) -> list[Path]:
    """The folders of the control groups that hold this process, from the root down, of "cpu" or "memory"."""
    try:
        lines = _OWN_GROUP.read_text(errors="replace").split("\n")
    except OSError:
        return [_GROUPS]
    folders = [_GROUPS, _GROUPS / controller]
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        root = _GROUPS / controller if controller in controllers.split(",") else _GROUPS
        parts = [part for part in path.split("/") if part]
        folders += [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _quota(folder: Path) -> int | None:
    """Whole cores of CPU time that a group grants; None if it sets no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        # "max" is not a number; version 1 writes -1 instead.
        return max(1, -(-int(quota) // int(period))) if int(quota) >= 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def available_bytes() -> int | None:
    """Available memory in bytes, the smallest of all limits; None if unknown."""
    limits = [_of_machine(), _of_process(), *(_of_group(folder) for folder in _group_folders("memory"))]
    return min((max(0, limit) for limit in limits if limit is not None), default=None)


def _of_machine() -> int | None:
    facts = _numbers(_MACHINE_MEMORY)
    return (facts["MemAvailable"] + facts.get("SwapFree", 0)) * 1024 if "MemAvailable" in facts else None


def _of_process() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit - _own_bytes(0)


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 if the system does not report it."""
    return _own_bytes(1)


def _own_bytes(column: int) -> int:
    try:
        return int(_OWN_MEMORY.read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _of_group(folder: Path) -> int | None:
    for limit, use, pages in _MEMORY_NAMES:
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
    return {fields[0].rstrip(":"): int(fields[1]) for fields in words if len(fields) > 1 and fields[1].isdecimal()}
