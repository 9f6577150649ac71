"""The first moments of a process: what runs before anything heavy is imported.

Importing numpy, or torch, takes long enough for a Ctrl-C. Until that is over nothing of ours is open, so the
process ends at once, with one line and exit code 130, where Python would print a traceback of some import.
This module imports only what the interpreter has loaded anyway.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

INTERRUPTED = 130


class Command(NamedTuple):
    """One subcommand: `module` has `add_arguments(parser)` and `main(arguments, console) -> int | None`."""

    name: str
    summary: str
    module: str


def start(program: str, commands: Sequence[Command], *, description: str, argv: Sequence[str] | None = None) -> int:
    """Import the rest and run one command line; see `cli.console.run`."""
    keep_standard_streams()
    try:
        with interrupts_end_at_once(program):
            from cli.console import run
        return run(program, commands, description=description, argv=argv)
    except KeyboardInterrupt:  # between the two lines above
        _end(program)


@contextmanager
def interrupts_end_at_once(program: str) -> Iterator[None]:
    """While the block runs, Ctrl-C ends the process; only for blocks that leave nothing behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: _end(program))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def keep_standard_streams() -> None:
    """Lead closed standard streams (`>&-`) nowhere, so that no file of ours gets their numbers and their text."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _end(program: str) -> NoReturn:
    try:
        os.write(2, f"{program}: interrupted\n".encode())
    finally:
        os._exit(INTERRUPTED)
