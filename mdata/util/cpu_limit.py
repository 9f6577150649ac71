"""How many cores this process may use: what its affinity and its control group allow, not what the machine
has.
"""

from __future__ import annotations

import os
from pathlib import Path

_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores by affinity, fewer where a control group (version 2 or 1) grants less time; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, *(_quota(folder) or allowed for folder in group_folders("cpu"))))


def group_folders(controller: str) -> list[Path]:
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
    """Whole cores of time that a group grants, None where it sets no limit."""
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
