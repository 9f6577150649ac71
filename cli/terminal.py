"""All terminal output of commands: everything that a command prints goes through `say`.

Names, messages and texts may come from strangers, and a terminal executes control sequences in them: an escape can
rewrite the lines above it, a bidirectional override can reverse a name. Such characters are shown as `\u001b`, as JSON
writes them, so JSON stays the same JSON. A text that must stay byte for byte goes unchanged to a pipe or a file, and is
quoted only on a terminal.
"""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TextIO

# C0 except tab and newline, DEL, C1, bidirectional overrides and isolates, and surrogates, with which Python represents
# the bytes of a name that is not UTF-8.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def quoted(text: str) -> str:
    """The text with every control character except tab and newline escaped."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def say(text: str, to: TextIO | None, *, raw: bool = False) -> None:
    """Print a text, quoted; characters that the stream's encoding lacks as escapes.

    Args:
        text: with its newline.
        to: the stream; None: closed by the caller, so nothing is printed.
        raw: print unchanged, unless the stream is a terminal.

    Raises:
        OSError: from the system; BrokenPipeError if the reader has gone.
    """
    if to is None:
        return
    if not raw or to.isatty():
        text = quoted(text)
    try:
        to.write(text)
    except UnicodeEncodeError:
        encoding = to.encoding
        to.write(text.encode(encoding, "backslashreplace").decode(encoding))


def standard_input() -> TextIO:
    """The current input; an empty one if the caller closed it."""
    return sys.stdin or io.StringIO()


def standard_output() -> TextIO | None:
    """The current stream for results."""
    return sys.stdout


def standard_error() -> TextIO | None:
    """The current stream for everything else."""
    return sys.stderr


def forget_standard_output() -> None:
    """Redirect stdout to nowhere, so that its remaining buffer causes no error at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
