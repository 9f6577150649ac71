"""Send the metrics and alerts of a run to trackers: whatever they do not have yet, each step once.

A run with track.to does this while it trains. Use this command afterwards, from a machine with network access, or with
--follow next to a run without trackers. Settings come from [track] in the run's config.toml.

Examples:
  mtrain track runs/first --to wandb
  mtrain track runs/first --to prometheus --follow
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
from pathlib import Path

from mdata import ResourceError, UsageError
from mdata.util import file_lock

from .console import Console, Parser


def add_arguments(parser: Parser) -> None:
    """See `mtrain track --help`."""
    from trainer.tracking.trackers import TRACKERS

    add = parser.add_argument
    add("run", metavar="RUN", help="the run folder")
    names = ", ".join(TRACKERS)
    add(
        "--to",
        nargs="+",
        choices=tuple(TRACKERS),
        metavar="TRACKER",
        help=f"one or more of {names} (default: track.to)",
    )
    add("--follow", action="store_true", help="keep sending until the run ends")
    add("--parent", type=int, help=argparse.SUPPRESS)  # of the follower that a run starts: the process of rank 0


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Send, and report what could not be sent."""
    from trainer.tracking.follower import SAID, send, tracked_run
    from trainer.tracking.trackers import missing_libraries, webhook_address

    folder = Path(arguments.run)
    if not (folder / "config.toml").is_file():
        raise UsageError(
            f"{folder} is not a run folder",
            found=None if folder.exists() else "nothing of that name",
            expected="a folder written by mtrain train",
        )
    run = tracked_run(folder)
    names = tuple(dict.fromkeys(arguments.to or run.settings.to))
    if not names:
        raise UsageError("no tracker given", fix="give --to TRACKER, or set track.to in the run's configuration")
    missing = missing_libraries(names)
    if missing and arguments.parent is None:
        raise UsageError("; ".join(missing.values()))
    if "webhook" in names and arguments.parent is None:
        webhook_address(run.settings)
    for text in missing.values():
        console.tell(f"{SAID}{text}; the run continues without this tracker")
    if arguments.parent is not None:
        _stay()
    lacks = send(
        run,
        [name for name in names if name not in missing],
        alive=lambda: os.getppid() == arguments.parent if arguments.parent else _is_held(folder),
        tell=lambda text: console.tell(f"{SAID}{text}"),
        follow=arguments.follow,
    )
    if arguments.parent is not None:
        if lacks:
            names = tuple(text.partition(":")[0] for text in lacks)
            console.tell(f"{SAID}some data was not sent; mtrain track {folder} --to {' '.join(names)} sends the rest")
        os._exit(ResourceError.exit_code if lacks else 0)  # a library that hangs would keep this process
    if lacks:
        raise ResourceError("some data was not sent", found="; ".join(lacks), fix="run the same command again")
    console.result(f"{folder}: sent to {', '.join(names)} as {run.id.id}", {**dataclasses.asdict(run.id), "to": names})


def _is_held(folder: Path) -> bool:
    return file_lock.held_by(folder / ".lock") is not None


def _stay() -> None:
    """Ignore the signals that end the ranks (this process ends by itself), and yield the CPU to them."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
