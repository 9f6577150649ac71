"""Runs training in a separate process, because the libraries ignore Ctrl-C for minutes and may use all memory.

The process gets the texts over a pipe, so reading, sampling and errors of the input stay here. It ends when the caller
stops for any reason. Its memory is limited only by the size of the sample.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from mdata.errors import MdataError, ResourceError, UsageError, os_errors_named
from mdata.progress import SILENT, Progress
from mdata.tokenizer_training.trainers import Task, received


def train_in_process(task: Task, texts: Iterator[str], *, progress: Progress = SILENT) -> dict[str, bytes]:
    """Train in a process; returns the files of the tokenizer.

    Raises:
        UsageError: the library cannot train on these texts, with its reason.
        ResourceError: the process died.
        MdataError: an error from reading the texts.
    """
    words = [sys.executable, "-m", "mdata.tokenizer_training.trainers"]
    # The child must find the same mdata, however this process found it, and must not get our Ctrl-C.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    with tempfile.TemporaryFile() as errors:
        with os_errors_named("starting the training process"):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            child = subprocess.Popen(words, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]
        try:
            with suppress(BrokenPipeError):  # it ended early and sent the reason
                _feed(child.stdin, task, texts)
            progress.begin("training", None, unit="s")
            answer = next(received(child.stdout), None)
            child.wait()
            progress.end()
        finally:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                with suppress(BrokenPipeError):
                    stream.close()
        if answer is None:
            raise _death(child.returncode, errors)
    if isinstance(answer, str):
        raise refusal(answer)
    return dict(answer)


def refusal(reason: str) -> UsageError:
    """The error for a reason that sentencepiece gives."""
    return UsageError(
        "sentencepiece cannot train on these texts",
        found=reason.strip().splitlines()[0][:300],
        fix="more text, another vocab_size, or a smaller character_coverage",
    )


def _feed(stream: BinaryIO, task: Task, texts: Iterator[str]) -> None:
    for message in chain([task], texts):
        pickle.dump(message, stream)
    stream.close()


def _death(code: int, errors: BinaryIO) -> MdataError:
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()
    found = f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if said:
        found += f": {said[-1][:300]}"
    return ResourceError("the training process died", found=found, fix="a smaller sample, or more memory")
