"""What the Python targets share: instrumentation, a folder in memory, and the way into libFuzzer.

A target imports what it tests inside `instrumented()`, so that the fuzzer sees which lines run, and ends with
`main(check)`. Without atheris a target can still be imported and its corpus replayed (`python -m fuzz.run --replay`).
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

Check = Callable[[bytes], None]


def instrumented() -> AbstractContextManager[object]:
    """Imports of our modules inside this context are instrumented, when atheris is there and this is its process."""
    if not sys.argv[0].endswith("run.py"):
        try:
            import atheris

            return atheris.instrument_imports(include=["mdata.indexed", "mdata.sources"])
        except ImportError:
            pass
    return nullcontext()


@functools.cache
def scratch() -> Path:
    """A folder for the files of one process, in memory where there is such a place; gone with the process."""
    memory = Path("/dev/shm")
    folder = tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)
    # The object lives as long as the cache of this function does, so until the interpreter ends.
    scratch.folder = folder  # type: ignore[attr-defined]
    return Path(folder.name)


def main(check: Check) -> None:
    """Fuzz with libFuzzer's options of the command line."""
    import atheris

    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
