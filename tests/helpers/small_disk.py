"""A small file system of its own, to fill up: a tmpfs; mounting one needs root, without which tests are skipped."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILLER = "filler"
CLONE_NEWNS = 0x20000  # of unshare(2); os.unshare came with Python 3.12


def missing() -> str | None:
    """Why nothing can be mounted here; None: it can."""
    if os.getuid() or shutil.which("mount") is None:
        return "mounting a small file system needs root"
    done = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    return None if done.returncode == 0 else "this machine does not allow to mount a file system"


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """Mount one at a folder, which is made, during the block."""
    folder.mkdir(parents=True, exist_ok=True)
    mount_over(folder, kib)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mount_over(folder: Path, kib: int) -> None:
    """Mount one at a folder that exists."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(folder)], check=True)


def own_mounts() -> None:
    """Let no other process but its children see what this one mounts from now on."""
    assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def fill(folder: Path) -> None:
    """Write a file until no byte more fits."""
    with (folder / FILLER).open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
