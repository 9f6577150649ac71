"""Handles a start with fewer ranks than the one before, because a node was lost: run.on_lost_node.

A running job never shrinks: the remaining ranks have ended (watchdog.py), and the launcher or scheduler has restarted
the job with the nodes that it has, as `torchrun --nnodes=MIN:MAX` and `sbatch --nodes=MIN-MAX` do. `after_lost_node` is
called by every rank before the ranks join, with the same configuration and run folder, so that all decide alike. A
start of another job, for example by hand, does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from mdata import StoppedError, UsageError
from trainer.config.sections import RunConfig
from trainer.plan.check import layout_problems
from trainer.plan.nearest_layout import nearest_layout, nearest_layout_text, with_changes
from trainer.run.attempt import newest_attempt, this_attempt
from trainer.run.end_time import deadlines
from trainer.run.metrics import read_events

TOLD_S = 60.0  # between notes of a start that waits


class LostNodeError(StoppedError):
    """A node is lost and the run stops; its launcher must not restart it in this job."""


class NodesAwaitedError(StoppedError):
    """A node is lost, and the next start must have as many ranks as before.

    Attributes:
        world_size: of that start.
    """

    world_size = 0


def lost_ranks(config: RunConfig, world_size: int, *, env: Mapping[str, str]) -> int:
    """How many ranks this start lacks, compared with the largest one of the same job; 0 also for another job."""
    folder = Path(config.run.folder)
    attempt = this_attempt(env)
    if not folder.is_dir() or not attempt.restarts(newest_attempt(folder)):
        return 0
    starts = [event for event in read_events(folder) if event["event"] == "start" and event.get("job") == attempt.job]
    return max(0, max((int(start["world_size"]) for start in starts), default=0) - world_size)


def after_lost_node(
    config: RunConfig,
    world_size: int,
    *,
    tell: Callable[[str], None],
    env: Mapping[str, str],
    planned: int = 0,
    pause: Callable[[float], None] = time.sleep,
) -> RunConfig:
    """The configuration to continue with.

    Args:
        world_size: of this start. tell: prints a line for the user. pause: waits for some seconds.
        planned: the most ranks that the job asked for; a first start may already have fewer.

    Raises:
        LostNodeError: run.on_lost_node="stop". NodesAwaitedError: "wait", and it is the launcher's script that waits.
        StoppedError: "wait", until a known end.
        UsageError: "shrink", and no layout of the ranks that are left keeps the global batch.
    """
    policy = config.run.on_lost_node
    lost = lost_ranks(config, world_size, env=env) if policy else 0
    if policy == "shrink":
        lost = max(lost, planned - world_size)
    if not lost:
        return config
    left = f"{world_size} of {world_size + lost} ranks are left"
    if policy == "stop":
        raise LostNodeError(f'{left}, and run.on_lost_node="stop"', fix="run the same command again with all nodes")
    if policy == "wait":
        wait_for_nodes(config, left, world_size + lost, env=env, tell=tell, pause=pause)
    shrunk, changes = shrunk_to(config, world_size, left)
    tell(f"{left}: the run goes on with them, with the same global batch and order; {changes}")
    return shrunk


def shrunk_to(config: RunConfig, world_size: int, left: str) -> tuple[RunConfig, str]:
    """The configuration with the nearest layout for fewer ranks, and what it changes, as text.

    Raises:
        UsageError: none keeps the global batch.
    """
    changes = nearest_layout(config, world_size, facts=None)
    shrunk = with_changes(config, changes)
    if "train.global_batch" in changes or (not changes and layout_problems(config, world_size)):
        raise UsageError(
            f'{left}, and run.on_lost_node="shrink" finds no layout for them that keeps train.global_batch',
            found=f"train.global_batch={config.train.global_batch}",
            fix=f"a number of nodes that divides it; {nearest_layout_text(changes) or 'none works'}",
        )
    return shrunk, nearest_layout_text(changes) or "the layout stays"


def wait_for_nodes(
    config: RunConfig,
    left: str,
    world_size: int,
    *,
    env: Mapping[str, str],
    tell: Callable[[str], None],
    pause: Callable[[float], None],
) -> NoReturn:
    """Wait until torchrun ends this rank to restart all ranks when a node joins; otherwise end with exit code 75."""
    fix = "the same command continues once all nodes are there"
    if "TORCHELASTIC_RUN_ID" not in env:
        error = NodesAwaitedError(f'{left}, and run.on_lost_node="wait"', fix=fix)
        error.world_size = world_size
        raise error
    ends = [deadline.at_s for deadline in deadlines(config.run, env, began_s=time.time())]
    while time.time() < min(ends, default=float("inf")):
        tell(f"{left}: waiting for torchrun to have the others, too")
        pause(TOLD_S)
    raise StoppedError(f"{left}, and the time to wait is over", fix=fix)
