"""Send the curves and events of a run to trackers: what they lack, each step once.

A run that has track.to does this while it trains; this command sends afterwards, from a machine with a network, or
beside a run that has no trackers (--follow). The settings are those of [track] in the run's config.toml.

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
    """The run, where to, and whether to go on."""
    from trainer.tracking.trackers import TRACKERS

    add = parser.add_argument
    add("run", metavar="RUN", help="the run folder")
    names = ", ".join(TRACKERS)
    add("--to", nargs="+", choices=tuple(TRACKERS), metavar="TRACKER", help=f"of {names} (default: track.to)")
    add("--follow", action="store_true", help="go on until the run ends")
    add("--parent", type=int, help=argparse.SUPPRESS)  # of the follower that a run starts: the process of rank 0


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Send, and say what could not be sent."""
    from trainer.tracking.follower import SAID, send, tracked_run
    from trainer.tracking.trackers import missing_libraries

    folder = Path(arguments.run)
    if not (folder / "config.toml").is_file():
        raise UsageError(f"{folder} is not a run folder", expected="a folder that mtrain train made")
    run = tracked_run(folder)
    names = tuple(dict.fromkeys(arguments.to or run.settings.to))
    if not names:
        raise UsageError("no tracker is named", fix="--to TRACKER, or track.to in the run's configuration")
    missing = missing_libraries(names)
    if missing and arguments.parent is None:
        raise UsageError("; ".join(missing.values()))
    for text in missing.values():
        console.tell(f"{SAID}{text}; the run goes on without it")
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
            console.tell(f"{SAID}not everything was sent; mtrain track {folder} --to {' '.join(names)} sends the rest")
        os._exit(ResourceError.exit_code if lacks else 0)  # a library that hangs would keep this process
    if lacks:
        raise ResourceError("not everything was sent", found="; ".join(lacks), fix="run the same command again")
    console.result(f"{folder}: sent to {', '.join(names)} as {run.id.id}", {**dataclasses.asdict(run.id), "to": names})
    return 0


def _is_held(folder: Path) -> bool:
    return file_lock.held_by(folder / ".lock") is not None


def _stay() -> None:
    """What ends the ranks does not end this process, which ends by itself; and it takes no time from them."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
