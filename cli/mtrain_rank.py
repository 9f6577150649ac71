"""One rank of `mtrain train`, as `mtrain train` starts it; not a command for people.

It gets a folder with the resolved configuration, finds its place in the environment, and leaves its error
there as a report, which the command that started it turns into one message (trainer/run/launch.py).
"""

from __future__ import annotations

import signal

# First of all: until everything is imported Ctrl-C ends this process at once and without a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)

import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from types import FrameType  # noqa: E402

from cli.start import ProcessEnd  # noqa: E402
from mdata.errors import StoppedError  # noqa: E402
from mdata.util.stop_signals import stop_requests  # noqa: E402


def main(argv: Sequence[str]) -> int:
    """Train as this rank and return the exit code."""
    from cli.console import Console
    from cli.mtrain_train import train_here
    from trainer.config.parse import load_config
    from trainer.run.launch import listen, rank_process, write_report

    rank_process()
    folder, rank = Path(argv[0]), int(os.environ["RANK"])
    try:
        # How this rank ends is decided when the block ends; the launcher, which ends all once one has failed, shall not
        # change it: what is restored then does nothing.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _decided)
        with stop_requests(_stopped):
            listen(folder, rank=rank)
            train_here(
                load_config(folder / "config.toml"),
                Console("mtrain", json="--json" in argv),
                end=lambda error: os._exit(write_report(folder, error, rank=rank)),
            )
    # Whatever it is, the parent has to hear of it.
    except BaseException as error:
        return write_report(folder, error, rank=rank)
    return 0


def _stopped() -> StoppedError:
    return StoppedError(
        f"rank {os.environ['RANK']} was stopped by SIGTERM", fix="run the same command again to continue"
    )


def _decided(number: int, frame: FrameType | None) -> None:
    """Hear a signal that changes nothing any more."""


if __name__ == "__main__":
    end = ProcessEnd()
    code = main(sys.argv[1:])
    end.decide(code)
    sys.exit(code)
