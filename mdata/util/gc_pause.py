"""Making many objects that all stay, without the interpreter's search for cyclic garbage among them.

The search runs again and again while objects are made and finds nothing; for a blend of ten thousand corpora it takes
more time than opening them. It is put off, for all threads of the process, and then as it was before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_left() -> Iterator[None]:
    """No search for cyclic garbage in the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
