"""Starts our commands in separate processes: ranks, parts of a job, whole runs.

The commands are the folder cli/ of a checkout, which is installed as the package mdata_mtrain.cli. A process gets the
path of this file, so that it runs the code beside it, regardless of the user's folder and of how mdata is installed.
As a program this file imports nothing of ours before the command, which handles Ctrl-C first.
"""

from __future__ import annotations

import os
import sys


def command_line(module: str) -> list[str]:
    """The command line that starts a module of the commands; its own arguments follow."""
    # -P: ignore modules in the user's folder.
    return [sys.executable, "-P", os.path.abspath(__file__), module]  # noqa: PTH100 - pathlib takes time to import


def command_package() -> str:
    """The package that holds the commands; makes it importable."""
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))  # noqa: PTH100, PTH118, PTH120
    if not os.path.exists(os.path.join(root, "pyproject.toml")):  # noqa: PTH110, PTH118
        return "mdata_mtrain.cli"
    if root not in sys.path:
        sys.path.insert(0, root)
    return "cli"


def die_with_parent() -> None:
    """End this process when its parent ends, which may be killed without a chance to end it; only on Linux."""
    import ctypes
    import signal

    parent, prctl = os.getppid(), getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h
        if os.getppid() != parent:  # it ended meanwhile
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    import runpy

    del sys.argv[0]
    runpy.run_module(f"{command_package()}.{sys.argv[0]}", run_name="__main__", alter_sys=True)
