"""A process that fetches blocks for a forked one, such as a worker of torch's DataLoader.

The storage library has threads of its own, which do not survive a fork: a forked process would wait for them for ever.
So it starts a new interpreter, which opens the same cache and receives the blocks to fetch through a pipe. That process
ends when the pipe is closed, also if its parent was killed.
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
    """The other process; threads use it one after another.

    Args:
        blocks: the cache that it opens.
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
                    fix="run again; the messages of that process are above",
                ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _send(self, what: object) -> None:
        pickle.dump(what, self._to, pickle.HIGHEST_PROTOCOL)
        self._to.flush()


def main() -> None:
    """Answer requests until the pipe is closed."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print, which must not become an answer
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
