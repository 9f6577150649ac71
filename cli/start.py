"""The first moments of a process: what runs before anything heavy is imported.

Importing numpy, or torch, takes long enough for a Ctrl-C. Until that is over nothing of ours is open, so the
process ends at once, with one line and exit code 130 (SIGTERM: 75), where Python would print a traceback of some
import.
Unusual: this module imports only what the interpreter has loaded anyway (`signal` and `typing` alone take 20 ms
to import), so `_signal`, and no NamedTuple.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

INTERRUPTED = 130
STOPPED = 75


class Command:
    """One subcommand: `module` has `add_arguments(parser)` and `main(arguments, console) -> int | None`."""

    def __init__(self, name: str, summary: str, *, module: str) -> None:
        self.name, self.summary, self.module = name, summary, module


class InterruptsEndAtOnce:
    """While the block runs, Ctrl-C and SIGTERM end the process; only for blocks that leave nothing behind.

    Args:
        program: begins the line.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._before: list[tuple[int, Any]] = []

    def __enter__(self) -> None:
        ends = ((_signal.SIGINT, "interrupted", INTERRUPTED), (_signal.SIGTERM, "stopped by SIGTERM", STOPPED))
        try:
            for number, line, code in ends:
                if _signal.getsignal(number) == _signal.SIG_IGN:  # nohup: whoever started us wants it so
                    continue
                handler = lambda *_, line=line, code=code: _end(f"{self._program}: {line}", code)  # noqa: E731
                self._before.append((number, _signal.signal(number, handler)))
        except ValueError:  # not the main thread: whoever owns that one owns its signals
            pass

    def __exit__(self, *_: object) -> None:
        for number, before in self._before:
            _signal.signal(number, before)


def start(program: str, commands: Sequence[Command], *, description: str, argv: Sequence[str] | None = None) -> int:
    """Import the rest and run one command line; see `cli.console.run`."""
    keep_standard_streams()
    end = ProcessEnd() if argv is None else None  # argv: a call, not the command line of the process
    # Also around `run`, whose own handlers lie above: for the moments before them and after them.
    with InterruptsEndAtOnce(program):
        from cli.console import run

        code = run(program, commands, description=description, argv=argv)
    if end is not None:
        end.decide(code)
    return code


class ProcessEnd:
    """How this process ends: with the code that was decided, once all threads and exit handlers of Python have ended.

    To be made before anything registers an exit handler: handlers run last in, first out, and this one ends the
    process. The interpreter is not taken down, because threads in C++ may still run. A thread of gloo drops its tensors
    after the collective that a rank has waited for, and needs the interpreter for that; Python ends a thread that asks
    for the interpreter too late, and the functions of C++ that this unwinds abort the process.
    """

    def __init__(self) -> None:
        import atexit

        self._code: int | None = None
        atexit.register(self._end)

    def decide(self, code: int) -> None:
        """Set the exit code: all is done and said. A signal from now on ends the process at once, with this code."""
        self._code = code
        try:
            for number in (_signal.SIGINT, _signal.SIGTERM):
                if _signal.getsignal(number) != _signal.SIG_IGN:
                    _signal.signal(number, lambda *_: os._exit(code))
        except ValueError:  # not the main thread, as above
            pass

    def _end(self) -> None:
        if self._code is None:
            return
        import sys
        from contextlib import suppress

        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # there is none, nobody reads it, it is closed
                stream.flush()
        os._exit(self._code)


def keep_standard_streams() -> None:
    """Lead closed standard streams (`>&-`) nowhere, so that no file of ours gets their numbers and their text."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # Who reads a closed stdin hears so; it is not an empty one.
            os.open(os.devnull, os.O_RDWR if fd else os.O_WRONLY)


def _end(line: str, code: int) -> NoReturn:
    try:
        os.write(2, f"{line}\n".encode())
    finally:
        os._exit(code)
