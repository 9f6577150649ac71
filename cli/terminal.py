"""The one door to the terminal: everything that a command prints goes through `say`.

Names, messages and texts come from strangers, and a terminal obeys what is hidden in them: an escape can rewrite what
stands above it, a bidirectional override can turn a name around. Such characters are shown as `\\u001b`, which is also
how JSON writes them, so JSON stays the same JSON. A text that is wanted byte for byte passes as it is to a pipe or a
file, and is quoted on a terminal only.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

# C0 but tab and newline, DEL, C1, bidirectional overrides and isolates, and halves of surrogate pairs, by which Python
# stands for the bytes of a name that is not UTF-8.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def quoted(text: str) -> str:
    """The text with every control character but tab and newline as an escape."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(text: str, to: TextIO | None, *, raw: bool = False) -> None:
    """Print a text, quoted; characters that the stream's encoding lacks as escapes.

    Args:
        text: with its newline.
        to: the stream; None: closed by whoever started us, and nobody wants to hear it.
        raw: as it is, unless the stream is a terminal.

    Raises:
        OSError: what the system said, BrokenPipeError where the reader is gone.
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


def standard_output() -> TextIO | None:
    """Where results go, as it is now."""
    return sys.stdout


def standard_error() -> TextIO | None:
    """Where all else goes, as it is now."""
    return sys.stderr


def forget_standard_output() -> None:
    """Lead stdout nowhere, so that what is left in its buffer makes no complaint at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
