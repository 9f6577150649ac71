"""A conversation in a terminal, with streamed answers; shared by `mtrain chat` and `mtrain client`.

Ctrl-C during an answer stops only that answer; its text so far stays in the conversation. Not a command.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from mdata.errors import MdataError

from .console import Console
from .terminal import standard_input

Turn = tuple[str, str]  # role, content
HELP = "Ctrl-C stops an answer, Ctrl-D quits, /clear starts a new conversation"


class Stop:
    """Whether Ctrl-C was pressed; pressing it calls `at_once`."""

    def __init__(self) -> None:
        self.asked = False
        self.at_once: Callable[[], None] = lambda: None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """A signal handler, which raises nothing: an exception in the middle of anything may be lost."""
        self.asked = True
        self.at_once()


@contextmanager
def stop_asked() -> Iterator[Stop]:
    """Inside the block Ctrl-C only sets a flag."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def converse(
    console: Console,
    answer: Callable[[Sequence[Turn], Stop], Iterator[str]],
    *,
    system: str = "",
    keeps: bool = True,
) -> None:
    """Read lines and write answers until the end of the input.

    Args:
        answer: yields the pieces of an answer to a conversation; ends soon after a stop is asked for.
        system: system message. keeps: keep earlier turns; otherwise each line stands alone.
    """
    begin: list[Turn] = [("system", system)] if system else []
    turns, spoken = list(begin), list[Turn]()
    interactive = standard_input().isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 - input() then edits lines
        console.note(HELP)
    try:
        while (line := _line(console, interactive)) is not None:
            if line.strip() == "/clear":
                turns = list(begin)
                continue
            if not line.strip():
                continue
            try:
                said = _write_answer(console, answer, [*turns, ("user", line)])
            except MdataError as error:
                if not interactive:
                    raise
                console.error(str(error))
                continue
            spoken += [("user", line), ("assistant", said)]
            turns = [*turns, *spoken[-2:]] if keeps else turns
    finally:  # a line that is refused loses no earlier answers
        if console.json:
            messages = [{"role": role, "content": text} for role, text in (*begin, *spoken)]
            console.result("", {"messages": messages})
    if interactive and not console.json:
        console.write("\n")


def _write_answer(
    console: Console, answer: Callable[[Sequence[Turn], Stop], Iterator[str]], turns: Sequence[Turn]
) -> str:
    """Write the pieces of an answer as they come, and return all of it; Ctrl-C ends it early."""
    said = ""
    with stop_asked() as stop:
        for piece in answer(turns, stop):
            said += piece
            if not console.json:
                console.write(piece)
                console.flush()
    if not console.json:
        console.write("\n")
    if stop.asked:
        console.note("(stopped)")
    return said


def _line(console: Console, interactive: bool) -> str | None:
    """The next line of the user; None at the end of the input."""
    if not interactive:
        line = standard_input().readline()
        return line.rstrip("\r\n") if line else None
    console.flush()
    try:
        return input("> ")
    except EOFError:
        return None
