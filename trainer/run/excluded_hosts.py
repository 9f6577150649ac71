"""exclude_hosts.txt of a run folder: hosts, one a line, on which the job must not start again.

Separate from health.py, which writes it, so that `mtrain launch` can read it without torch.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

EXCLUDED = "exclude_hosts.txt"


def excluded_hosts(run_folder: Path) -> list[str]:
    """The hosts that the run found unfit; none if the file cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return (run_folder / EXCLUDED).read_text(encoding="utf-8").split()
    return []
