"""Files whose paths come from a user or from a foreign folder: only regular ones are opened, and no text in UTF-16.

A pipe without a writer would block for ever, /dev/zero would fill memory, and a device may act when it is opened.
Inputs of `mdata preprocess`, including standard input, have their own check (mdata/sources/input_files.py).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mdata.errors import UsageError

# Byte order marks; that of UTF-32 begins like one of UTF-16.
_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
# Without a mark: where the NUL bytes of a text of ASCII characters are.
_PATTERNS = {
    b"10": "UTF-16LE",
    b"01": "UTF-16BE",
    b"1000": "UTF-32LE",
    b"0001": "UTF-32BE",
}


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


def modified_ns(facts: os.stat_result) -> int:
    """The time of a file's last change in ns, as 63 bits, which manifests hold.

    A time before 1970 or after 2262, as file systems without a clock give it (1601 on NTFS), is counted modulo 2^63.
    """
    return facts.st_mtime_ns % (1 << 63)


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, as iconv names it, if the data begins like text in it: with a byte order mark, or with letters
    of ASCII and the NUL bytes between them."""
    if marked := next((name for mark, name in _MARKS.items() if head.startswith(mark)), None):
        return marked
    nuls = head[:8].translate(b"0" + b"1" * 255)
    patterns = _PATTERNS.items() if len(nuls) >= 4 else ()
    return next((name for pattern, name in patterns if (pattern * 4).startswith(nuls)), None)


def refuse_wide_encoding(path: object, head: bytes) -> None:
    """Refuse text in UTF-16 or UTF-32.

    Raises:
        UsageError: the data begins like it.
    """
    if name := wide_encoding(head):
        raise UsageError(f"{path} is {name} text", expected="UTF-8", fix=f"iconv -f {name} -t UTF-8 FILE > NEW")
