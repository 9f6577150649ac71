"""The first moments of a process: code that runs before anything heavy is imported.

Importing numpy or torch takes long enough for a Ctrl-C. Until that is done no file of ours is open, so the process ends
at once, with one line and exit code 130 (SIGTERM: 75), where Python would print a traceback of some import.
Unusual: this module imports only modules that the interpreter has loaded anyway (`signal` and `typing` alone take 20 ms
to import), so it uses `_signal` and no NamedTuple.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

USAGE = 2
INTERRUPTED = 130
STOPPED = 75
PACKAGES = ("mdata", "trainer")
DISTRIBUTION = "mdata-mtrain"  # also in the first lines of both packages; mdata/version.py may be out of reach here


class Command:
    """One subcommand: `module` has `add_arguments(parser)` and `main(arguments, console) -> int | None`.

    ".inspect" is a module of this package, whose name depends on where it is installed. `group`: the heading in --help.
    """

    def __init__(self, name: str, summary: str, *, module: str, group: str = "commands") -> None:
        self.name, self.summary, self.module, self.group = name, summary, module, group


class InterruptsEndAtOnce:
    """While the block runs, Ctrl-C and SIGTERM end the process; only for blocks that need no cleanup."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._before: list[tuple[int, Any]] = []

    def __enter__(self) -> None:
        ends = ((_signal.SIGINT, "interrupted", INTERRUPTED), (_signal.SIGTERM, "stopped by SIGTERM", STOPPED))
        try:
            for number, line, code in ends:
                if _signal.getsignal(number) == _signal.SIG_IGN:  # nohup: the caller wants this
                    continue
                handler = lambda *_, line=line, code=code: _end(f"{self._program}: {line}", code)  # noqa: E731
                self._before.append((number, _signal.signal(number, handler)))
        except ValueError:  # not the main thread: the main thread's owner handles its signals
            pass

    def __exit__(self, *_: object) -> None:
        for number, before in self._before:
            _signal.signal(number, before)


def start(program: str, commands: Sequence[Command], *, description: str, argv: Sequence[str] | None = None) -> int:
    """Import the rest and run one command line; see `run` of console.py."""
    keep_standard_streams()
    end = ProcessEnd() if argv is None else None  # argv: a call, not the command line of the process
    # Also around `run`, whose own handlers lie above: for the moments before them and after them.
    with InterruptsEndAtOnce(program):
        try:
            from .console import run
        except (ImportError, AttributeError, SyntaxError):
            if (text := foreign_package()) is None:
                raise
            _end(f"{program}: error: {text}", USAGE)

        code = run(program, commands, description=description, argv=argv)
    if end is not None:
        end.decide(code)
    return code


class ProcessEnd:
    """Ends this process with the decided code, after all threads and exit handlers of Python have ended.

    Create it before anything registers an exit handler: handlers run last in, first out, and this one ends the process.
    The interpreter is not shut down, because C++ threads may still run. A gloo thread frees its tensors after the
    collective that a rank has waited for, and needs the interpreter for that; Python ends a thread that requests the
    interpreter too late, and the C++ functions that this unwinds abort the process.
    """

    def __init__(self) -> None:
        import atexit

        self._code: int | None = None
        atexit.register(self._end)

    def decide(self, code: int) -> None:
        """Set the exit code when everything is printed; a signal from now on ends the process with this code."""
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
            with suppress(AttributeError, OSError, ValueError):  # there is none, its reader has gone, or it is closed
                stream.flush()
        os._exit(self._code)


def foreign_package() -> str | None:
    """The error if Python imports another project's package under a name of ours; both names are taken on the index."""
    from importlib.metadata import packages_distributions
    from importlib.util import find_spec
    from pathlib import Path

    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None:
            continue
        if spec.origin and DISTRIBUTION in Path(spec.origin).read_text("utf-8", errors="replace")[:2000]:
            continue
        others = [
            distribution for distribution in packages_distributions().get(name, ()) if distribution != DISTRIBUTION
        ]
        of = f", of the distribution {others[0]}" if others else ""
        remove = f"pip uninstall {others[0]}, and install {DISTRIBUTION} again" if others else "remove it from the path"
        return (
            f"the package {name} that Python imports is not that of {DISTRIBUTION}\n"
            f"  found: {spec.origin or list(spec.submodule_search_locations or ())}{of}\n"
            f"  try: {remove}; or use an environment of its own"
        )
    return None


def keep_standard_streams() -> None:
    """Redirect closed standard streams (`>&-`) to nowhere, so that no file gets their descriptors and output."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # Reading a closed stdin is an error; it is not an empty stdin.
            os.open(os.devnull, os.O_RDWR if fd else os.O_WRONLY)


def _end(line: str, code: int) -> NoReturn:
    try:
        os.write(2, f"{line}\n".encode())
    finally:
        os._exit(code)
