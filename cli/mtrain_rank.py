"""One rank of `mtrain train` or `mtrain serve`, or of another command with --nproc; started by these, not by users.

It gets a folder with the resolved configuration, or with a command line, finds its rank in the environment, and writes
an error to that folder as a report, which the command that started it turns into one message (trainer/run/launch.py).
"""

from __future__ import annotations

import signal

# First of all: until everything is imported, Ctrl-C ends this process at once and without a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from types import FrameType  # noqa: E402

from mdata.errors import ResourceError, StoppedError  # noqa: E402
from mdata.util.commands import die_with_parent  # noqa: E402
from mdata.util.stop_signals import stop_requests  # noqa: E402

from .start import ProcessEnd  # noqa: E402


def main(argv: Sequence[str]) -> int:
    """Train, serve or run a command as this rank and return the exit code."""
    from trainer.config.parse import load_config
    from trainer.run.launch import READER_GONE, listen

    from .console import Console, ReaderGone, dispatch
    from .mtrain import COMMANDS
    from .mtrain_model import WORDS
    from .mtrain_train import train_here
    from .terminal import forget_standard_output

    die_with_parent()
    folder, rank = Path(argv[0]), int(os.environ["RANK"])
    try:
        # The exit of this rank is decided when the block ends; the launcher, which ends all ranks once one has failed,
        # must not change it: the restored handlers do nothing.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _decided)
        with stop_requests(_stopped):
            if "--serve" in argv:
                from trainer.serve.rank import serve_here

                serve_here(folder, rank=rank)
                return 0
            listen(folder, rank=rank)
            if "--command" in argv:
                words = json.loads((folder / WORDS).read_text(encoding="utf-8"))
                console = Console("mtrain")
                console.report = partial(_leave_report_of_others, folder, rank)
                return dispatch(console, "", COMMANDS, words)
            train_here(
                load_config(folder / "config.toml"),
                Console("mtrain", json="--json" in argv, quiet="--quiet" in argv, verbose="--verbose" in argv),
                end=partial(_end, folder, rank=rank),
            )
    except ReaderGone:
        forget_standard_output()
        return READER_GONE
    # Report any error to the parent.
    except BaseException as error:
        return _report(folder, error, rank=rank)
    return 0


def _leave_report_of_others(folder: Path, rank: int, code: int, message: str) -> None:
    """Leave an error of another rank, which that rank reports better if it can."""
    from trainer.run.launch import RankReport, leave_report

    leave_report(folder, RankReport(rank=rank, exit_code=code, message=message, time_s=time.monotonic(), lost=True))


def _report(folder: Path, error: BaseException, *, rank: int) -> int:
    """Leave an error for the parent, or print it where the folder has no space; returns the exit code."""
    from trainer.run.launch import explained_end, write_report

    from .console import Console

    try:
        return write_report(folder, error, rank=rank)
    except OSError:
        _, code, message = explained_end(error, rank=rank)
        Console("mtrain").error(message)
        return code


def _end(folder: Path, error: BaseException, *, rank: int) -> None:
    """End this process at once, from a thread, with an error of the watchdog; also where no report can be written."""
    code = ResourceError.exit_code
    try:
        code = _report(folder, error, rank=rank)
    finally:
        os._exit(code)


def _stopped() -> StoppedError:
    return StoppedError(
        f"rank {os.environ['RANK']} was stopped by SIGTERM", fix="run the same command again to continue"
    )


def _decided(number: int, frame: FrameType | None) -> None:
    """Ignore a signal after the exit is decided."""


if __name__ == "__main__":
    end = ProcessEnd()
    code = main(sys.argv[1:])
    end.decide(code)
    sys.exit(code)
