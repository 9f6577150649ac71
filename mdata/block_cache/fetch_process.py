"""A process that fetches blocks for one that was forked, such as a worker of torch's DataLoader.

The library that speaks to storage has threads of its own, which a forked process lacks: it would wait for them for
ever. So such a process starts a new interpreter, which opens the same cache and is told by a pipe which blocks to
bring. It ends when the pipe is closed, so also when the process that started it is killed.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from typing import Protocol

import numpy as np

from mdata.errors import MdataError, ResourceError
from mdata.util.arrays import Int64s


class Bringing(Protocol):
    """What fetches blocks: `CorpusBlocks`."""

    def bring(self, blocks: Int64s) -> int:
        """See there."""


class FetchProcess:
    """The other process; for any number of threads, one after another.

    Args:
        blocks: what it is to open.
    """

    def __init__(self, blocks: Bringing) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes were asked for"
        self._to, self._from = self._process.stdin, self._process.stdout
        weakref.finalize(self, self._to.close)
        self._send(blocks)

    def bring(self, blocks: list[int]) -> int:
        """As `CorpusBlocks.bring`.

        Raises:
            as there. ResourceError: the process has ended.
        """
        with self._lock:
            try:
                self._send(blocks)
                answer: int | MdataError = pickle.load(self._from)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                raise ResourceError(
                    "the process that fetches blocks from storage has ended",
                    found=f"exit code {self._process.poll()}",
                    fix="run again; its own messages are above",
                ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _send(self, what: object) -> None:
        pickle.dump(what, self._to, pickle.HIGHEST_PROTOCOL)
        self._to.flush()


def main() -> None:
    """Bring what is asked for until the pipe ends."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is no answer
    blocks: Bringing = pickle.load(asked)
    while True:
        try:
            numbers = pickle.load(asked)
        except EOFError:
            return
        try:
            answer: int | MdataError = blocks.bring(np.array(numbers, np.int64))
        except MdataError as error:
            answer = error
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
