"""A rank that is lost while ranks join each other is named, as later; one that comes late is waited for."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mdata import StoppedError
from tests.helpers.ranks import RankError, run_ranks, stop_ranks
from trainer.errors import host_name
from trainer.parallel import world as world_module
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world, leave_world, open_store
from trainer.run import watchdog as watchdog_module
from trainer.run.heartbeats import SILENT_TICKS, STILL_TICKS
from trainer.run.watchdog import Watchdog, watching

TICK_S = 0.1


def _stop(number: int, frame: Any) -> None:
    raise StoppedError("in the main thread")


def _join(context: Any, case: str, folder: str, method: str = "") -> list[str]:
    """What is told on this rank until all have joined; an error ends the process, as in a run."""
    place = Placement(rank=context.rank, world_size=context.world, init_method=method or context.init_method)
    told: list[str] = []

    def end(error: BaseException) -> None:
        Path(folder, f"rank-{context.rank}").write_text(str(error))
        os._exit(5)

    def stop(mesh: Mesh, rank: int, channel: Any) -> None:
        time.sleep(5 * TICK_S)  # until a heartbeat from here was sent
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog_module, "Watchdog", partial(Watchdog, tick_s=TICK_S))
        if context.rank == 1 and case == "late":
            time.sleep(2.5 * STILL_TICKS * TICK_S)
        if context.rank == 1 and case in ("never", "asked to stop"):
            return told
        if case == "asked to stop":
            signal.signal(signal.SIGTERM, _stop)
            threading.Timer(10 * TICK_S, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if context.rank == 1 and case == "stopped":
            patch.setattr(world_module, "_groups", stop)
        store = open_store(place)
        join_s = (15 if case == "never" else 75) * watchdog_module.TICK_S
        with watching(place, store, end=end, tell=told.append, join_s=join_s) as watchdog:
            world = join_world(Mesh(context.world), placement=place, store=store, device_type="cpu")
            watchdog.joined(world)
            assert watchdog.ranks.members[world.groups["world"]] == tuple(range(context.world))
    leave_world()
    return told


def test_a_rank_that_stops_while_it_joins_is_named(tmp_path):
    """It was silent for ten ticks, in place of the ten minutes that torch waits for it."""
    began = time.monotonic()
    with pytest.raises(RankError):
        run_ranks(_join, 3, "stopped", str(tmp_path), timeout_s=60)
    stop_ranks()
    assert time.monotonic() - began >= SILENT_TICKS * TICK_S
    found = sorted(tmp_path.glob("rank-*"))
    assert [path.name for path in found] == ["rank-0", "rank-2"]
    for path in found:
        lost = f"rank 1 of 3 on {host_name()} does not respond"
        assert path.read_text().startswith(f"{lost}\n  found: rank 1 was last in join_world")


def test_a_rank_that_never_comes_ends_the_others_after_the_time_of_the_run(tmp_path):
    with pytest.raises(RankError):
        run_ranks(_join, 3, "never", str(tmp_path), timeout_s=60)
    stop_ranks()
    found = sorted(tmp_path.glob("rank-*"))
    assert found and {path.name for path in found} <= {"rank-0", "rank-2"}
    for path in found:
        assert path.read_text().startswith("rank 1 of 3 did not start\n  found: nothing was heard of rank 1")


def test_a_signal_ends_ranks_that_wait_inside_a_library_for_one_that_never_comes(tmp_path):
    """The handler of the main thread would be called once torch gives up."""
    began = time.monotonic()
    with pytest.raises(RankError):
        run_ranks(_join, 3, "asked to stop", str(tmp_path), timeout_s=60)
    stop_ranks()
    assert time.monotonic() - began < 60
    found = sorted(tmp_path.glob("rank-*"))
    assert found and {path.name for path in found} <= {"rank-0", "rank-2"}
    for path in found:
        rank = path.name.removeprefix("rank-")
        assert path.read_text().startswith(f"rank {rank} was stopped by SIGTERM before all ranks had joined\n")


@pytest.mark.parametrize("method", [pytest.param("file", marks=pytest.mark.soak), "tcp"])
def test_a_rank_that_comes_late_is_named_and_waited_for(method, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"tcp://127.0.0.1:{free.getsockname()[1]}" if method == "tcp" else ""
    told = run_ranks(_join, 3, "late", str(tmp_path), where)
    assert told[1:] == [[], []]
    assert told[0] and set(told[0]) == {"the other ranks wait for rank 1, which has not reported yet"}
    assert not list(tmp_path.iterdir())
