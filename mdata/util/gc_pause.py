"""Pauses the garbage collector while many long-lived objects are created.

Otherwise it runs again and again and finds nothing: for a blend of ten thousand corpora that takes longer than opening
them. The pause applies to all threads of the process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """No collection of cyclic garbage while the block runs."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
