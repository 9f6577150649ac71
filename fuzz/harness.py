"""What the Python targets share: a folder in memory, and the way into libFuzzer.

    python -m fuzz.harness TARGET LAUNCHER [libFuzzer's options] FOLDER ...

imports fuzz/TARGET.py with our readers and their twins instrumented, so that the fuzzer sees which lines run, and
feeds its `check`.
LAUNCHER is a program that does the same; libFuzzer starts it when it merges corpora. fuzz/run.py writes one. A target
itself knows nothing of atheris, so that its corpus can be replayed without.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

WATCHED = [
    "mdata.indexed",
    "mdata.sources",
    "mdata.sentences",
    "mdata.tokenizers",
    "mdata.manifest",
    "mdata.blend",
]
WATCHED += [
    "mdata.corpus.origins",
    "mdata.preprocessing.journal",
    "trainer.config.sections",
    "trainer.checkpoint.format",
    "trainer.convert",
    "tests.reference",
    "fuzz",
]


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


def scratch() -> Path:
    """A folder for the files of one process, in memory where there is such a place; gone with the process."""
    return Path(_scratch().name)


def main() -> None:
    """Fuzz one target."""
    import atheris

    _, target, launcher, *options = sys.argv
    with redirect_stderr(io.StringIO()), atheris.instrument_imports(include=WATCHED):
        check = importlib.import_module(f"fuzz.{target}").check
    atheris.Setup([launcher, *options], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
