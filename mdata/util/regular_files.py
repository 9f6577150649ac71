"""Files whose paths come from a user or from a foreign folder: only regular ones are opened.

A pipe without a writer would block for ever, /dev/zero would fill memory, and a device may act when it is opened.
Inputs of `mdata preprocess`, including standard input, have their own check (mdata/sources/input_files.py).
"""

from __future__ import annotations

import stat
from pathlib import Path

from mdata.errors import UsageError


def regular_file(path: str | Path) -> Path:
    """The same path, unless it leads to a pipe, a socket or a device. A folder is not refused here; opening it fails.

    Raises:
        UsageError: it leads to one of these. OSError: from the file system.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise UsageError(f"{path} is not a regular file", found=kind, fix="write it to a file first")
    return Path(path)
