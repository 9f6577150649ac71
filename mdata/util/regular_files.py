"""Files whose paths come from a user or from a foreign folder: only regular ones are opened.

A pipe without a writer would wait for ever, /dev/zero would take all memory, and a device may act when it is opened.
Inputs of `mdata preprocess`, of which standard input is one, have their own look (mdata/sources/input_files.py).
"""

from __future__ import annotations

import stat
from pathlib import Path

from mdata.errors import UsageError


def regular_file(path: str | Path) -> Path:
    """The same path, once it is known to lead to a regular file.

    Raises:
        UsageError: it leads to a folder, a pipe, a socket or a device. OSError: from the file system.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a regular file", found=_kind(mode), fix="give the path of a regular file")
    return Path(path)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
