"""Ranks that die, stop, or wait for each other are named soon; long computations are not interrupted."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import soaked
from tests.helpers.ranks import RankError, run_ranks, stop_ranks
from trainer.errors import host_name
from trainer.layers.base import Parallel
from trainer.optim.data_parallel import GradientReducer
from trainer.parallel.collectives import Group, Pending, all_reduce_
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import World, another_connection
from trainer.pipeline import executor
from trainer.pipeline.actions import Action
from trainer.pipeline.generators import make_schedule
from trainer.pipeline.lower import lower
from trainer.pipeline.messages import Messages
from trainer.run import heartbeats as heartbeats_module
from trainer.run import watchdog as watchdog_module
from trainer.run.heartbeats import (
    SILENT_TICKS,
    START_TICKS,
    STILL_TICKS,
    Heartbeat,
    WatchedRanks,
    held_up_by,
    members_of,
    places,
    ranks_of,
    stands,
    verdict,
)
from trainer.run.launch import SilentRanksError
from trainer.run.watchdog import HEARD_TICKS, Watchdog, launch_without_the_lock

HOST = host_name()

TICK_S = 0.1
_heartbeats = st.builds(
    Heartbeat,
    number=st.integers(0, 99),
    still=st.integers(0, 12),
    waits=st.booleans(),
    left=st.booleans(),
    where=st.just(""),
)


def test_a_rank_is_named_within_a_minute():
    """The run also ends in that time; a rank that works for long without releasing Python's lock is not taken for lost.

    Ticks: up to one from the event to the next heartbeat, then those counted, one until rank 0 reads the last, and one
    until others hear the verdict.
    """
    tick_s = watchdog_module.TICK_S
    named_s, ends_s = (1 + max(SILENT_TICKS, STILL_TICKS) + 1) * tick_s, HEARD_TICKS * tick_s
    assert named_s <= 50 and named_s + ends_s <= 55
    assert SILENT_TICKS * tick_s >= 30 and STILL_TICKS * tick_s >= 30 and HEARD_TICKS > 1
    assert named_s <= executor.WAIT_S <= 60  # a message that does not come, on CPUs: the watchdog says more of it


@given(st.lists(st.tuples(_heartbeats, st.integers(0, 12) | st.integers(130, 150)), min_size=1, max_size=6))
def test_a_verdict_is_passed_on_silence_or_when_nobody_can_move(ranks):
    heartbeats = {rank: heartbeat for rank, (heartbeat, _) in enumerate(ranks)}
    silent = {rank: ticks for rank, (_, ticks) in enumerate(ranks)}
    found = verdict(heartbeats, silent, ranks=WatchedRanks(rank=0, world_size=len(ranks)))
    here = [(heartbeat, ticks) for heartbeat, ticks in ranks if not heartbeat.left]
    lost = [
        rank
        for rank, (heartbeat, ticks) in enumerate(ranks)
        if ticks >= SILENT_TICKS and not heartbeat.left and heartbeat.number
    ]
    late = [rank for rank, (heartbeat, ticks) in enumerate(ranks) if ticks >= START_TICKS and not heartbeat.number]
    stuck = bool(here) and all(heartbeat.waits and heartbeat.still >= STILL_TICKS for heartbeat, _ in here)
    assert (found is not None) == (bool(lost) or bool(late) or stuck)
    if found is not None:
        assert ("did not start" in found.problem) == bool(late)
        assert ("does not respond" in found.problem) == (bool(lost) and not late)
        assert list(found.lost) == (late or lost) and found.error().ranks == tuple(late or lost)


def test_who_reads_one_sign_judges_that_rank_alone():
    deputy = WatchedRanks(rank=3, world_size=4)
    heartbeat = Heartbeat(number=1, waits=True, still=99, where="at 0F1, in all_reduce_")
    assert verdict({0: heartbeat}, {0: SILENT_TICKS - 1}, ranks=deputy) is None
    found = verdict({0: heartbeat}, {0: SILENT_TICKS}, ranks=deputy)
    assert found is not None and found.problem == "rank 0 of 4 does not respond" and found.by == 3
    assert found.found == "rank 0 was last at 0F1, in all_reduce_"


@given(st.lists(_heartbeats, min_size=1, max_size=6))
def test_who_holds_up_the_others_does_not_wait_and_they_do(heartbeats):
    busy = held_up_by(dict(enumerate(heartbeats)))
    here = {rank for rank, heartbeat in enumerate(heartbeats) if not heartbeat.left}
    for rank in here:
        assert heartbeats[rank].waits == (rank not in busy) or not busy
        assert not busy or rank in busy or heartbeats[rank].still >= STILL_TICKS
    if here and not busy:
        waiting = [heartbeats[rank] for rank in here if heartbeats[rank].waits]
        assert not waiting or len(waiting) == len(here) or min(heartbeat.still for heartbeat in waiting) < STILL_TICKS


def test_places_are_shown_once_and_the_rarest_first():
    heartbeats = [Heartbeat(where="in all_reduce_ over tp") for _ in range(9)]
    heartbeats[5] = Heartbeat(where="at 1F2, in Pending.wait")
    assert places(list(enumerate(heartbeats))) == (
        "rank 5 at 1F2, in Pending.wait; ranks 0, 1, 2, 3 and 4 more in all_reduce_ over tp"
    )
    many = [Heartbeat(where=f"in place {rank}") for rank in range(7)]
    assert places(list(enumerate(many))).endswith("rank 3 in place 3; and at 3 more places")


def test_hosts_are_named_where_there_are_several():
    heartbeats = [Heartbeat(number=1, where="in f", host=f"gpu{rank // 2}") for rank in range(6)]
    heartbeats[3] = replace(heartbeats[3], where="in g")
    assert places(list(enumerate(heartbeats[:2]))) == "ranks 0, 1 in f"
    assert places(list(enumerate(heartbeats[:4]))) == "rank 3 on gpu1 in g; ranks 0, 1, 2 on gpu0, gpu1 in f"
    found = verdict(
        dict(enumerate(heartbeats)), {**dict.fromkeys(range(6), 0), 5: 99}, ranks=WatchedRanks(rank=0, world_size=6)
    )
    assert found is not None and found.problem == "rank 5 of 6 on gpu2 does not respond"
    many = [replace(heartbeats[0], host=f"gpu{rank}") for rank in range(9)]
    assert places(list(enumerate(many))) == "ranks 0 to 8 in f"


def test_the_ranks_of_groups_are_named_where_that_is_short():
    heartbeats = [
        Heartbeat(where="in f over tp", peers=f"tp: ranks {rank // 2 * 2}, {rank // 2 * 2 + 1}") for rank in range(12)
    ]
    assert places(list(enumerate(heartbeats[:4]))) == (
        "ranks 0, 1 in f over tp (tp: ranks 0, 1); ranks 2, 3 in f over tp (tp: ranks 2, 3)"
    )
    assert places(list(enumerate(heartbeats))) == "ranks 0 to 11 in f over tp"


class _Frames:
    """An operation that looks where its caller stands, and does not end."""

    def __init__(self, members: dict[Group, list[int]]) -> None:
        self.members = members

    def wait(self, timeout: timedelta | None = None) -> None:
        self.seen = stands(sys._getframe(), self.members)
        raise TimeoutError


def test_a_thread_in_a_collective_waits_and_its_group_is_named(monkeypatch):
    tp = Group("tp", 2, 0)
    frames = _Frames({tp: [4, 5], Group("dp", 2, 0): [0, 4]})
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: frames.wait())
    with pytest.raises(TimeoutError):
        all_reduce_(torch.zeros(1), tp)
    assert frames.seen == Heartbeat(waits=True, where="in all_reduce_ over tp", peers="tp: ranks 4, 5")
    with pytest.raises(TimeoutError):
        Pending(torch.zeros(1), frames).wait()
    assert frames.seen == Heartbeat(waits=True, where="in Pending.wait")
    assert stands(None, {}) == Heartbeat(where="in ")


def test_a_wait_for_what_was_started_earlier_names_its_group_too():
    link, data = Group("pp", 2, 1), Group("data", 4, 1)
    frames = _Frames({link: [2, 3], data: list(range(8, 16))})
    messages = Messages(
        lower(make_schedule("1f1b", num_ranks=2, num_microbatches=2)), 1, links={(0, 1): link}, wait_s=1
    )
    with pytest.raises(TimeoutError):
        messages._wait(Action("RECV_F", 1, 0), Pending(torch.zeros(1), frames))
    assert frames.seen.where == "in Pending.wait_at_most < Messages._wait over pp"
    assert frames.seen.peers == "pp: ranks 2, 3"
    reducer = object.__new__(GradientReducer)
    reducer.groups, reducer._pending = {"data": data}, {0: Pending(torch.zeros(1), frames)}
    reducer.buffers = SimpleNamespace(layout=SimpleNamespace(buckets=[SimpleNamespace(shard="data")]))
    with pytest.raises(TimeoutError):
        reducer._wait(0)
    assert frames.seen.where == "in Pending.wait < GradientReducer._wait over data"
    assert frames.seen.peers == "data: ranks 8 to 15"
    ctx = SimpleNamespace(parallel=Parallel(data, sequence_parallel=False))
    assert heartbeats_module._group_in({"ctx": ctx}) is data


def test_the_ranks_of_each_group_and_the_holder_of_the_store_follow_from_the_world():
    mesh = Mesh(8, 2, pp=4)
    groups = {axis: Group(axis, mesh.size(axis), 0, object()) for axis in ("tp", "pp", "world")}  # type: ignore[arg-type]
    links = {(1, 2): Group("pp", 2, 1, object()), (3, 2): Group("pp", 2, 0, object())}  # type: ignore[arg-type]
    world = World(
        rank=5,
        world_size=8,
        local_rank=5,
        local_world_size=8,
        mesh=mesh,
        coordinates=mesh.coordinates(5),
        device=torch.device("cpu"),
        groups=groups,
        links=links,
    )
    members = members_of(world)
    assert {group.name: list(members[group]) for group in groups.values()} == {
        "tp": [4, 5],
        "pp": [1, 3, 5, 7],
        "world": list(range(8)),
    }
    assert [list(members[group]) for group in links.values()] == [[3, 5], [5, 7]]
    place = Placement(rank=5, world_size=8)
    assert ranks_of(place, {}) == WatchedRanks(rank=5, world_size=8, holder=0)
    assert ranks_of(place, {"TORCHELASTIC_USE_AGENT_STORE": "True"}).holder is None
    slurm = {"SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    assert ranks_of(place, slurm).hosts == ("gpu1",) * 4 + ("gpu2",) * 4
    torchrun_in_slurm = slurm | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert ranks_of(place, torchrun_in_slurm).hosts == ()


def _rank(context: Any, case: str, folder: str, lost: int = 1) -> list[str]:
    """What is told on this rank; an error ends the process, as in a run. `lost`: the rank that is stopped, or ends."""
    context.join()
    told: list[str] = []
    stopped = Path(folder, "pid")

    def end(error: Exception) -> None:
        Path(folder, f"rank-{context.rank}").write_text(str(error))
        if case.startswith("stopped") and context.rank == 2:
            os.kill(int(stopped.read_text()), signal.SIGKILL)
        # The pool ends all ranks when the first one has ended: give the other one time to name the lost rank, too.
        for _ in range(100):
            if len(list(Path(folder).glob("rank-*"))) == 2:
                break
            time.sleep(0.05)
        os._exit(5)

    own = {rank: Group(f"of {rank}", context.world, context.rank, _group(context)) for rank in range(2)}
    ours = torch.distributed.distributed_c10d._get_default_store()
    store = _store_of_rank_0(context, folder) if case == "stopped with the store" else another_connection(ours)
    ranks = WatchedRanks(rank=context.rank, world_size=context.world, holder=0 if "with" in case else None)
    with Watchdog(ranks, store=store, end=end, tell=told.append, tick_s=TICK_S) as watchdog:
        watchdog.note(Action("F", context.rank, 7))
        if context.rank == lost and case.startswith("stopped"):
            stopped.write_text(str(os.getpid()))
            time.sleep(3 * TICK_S)
            # An exchange may hold a lock of the store, which is a file here.
            while watchdog._exchange is None or watchdog._exchange.is_alive():
                time.sleep(TICK_S / 100)
            os.kill(os.getpid(), signal.SIGSTOP)
        if context.rank == lost and case == "killed":
            time.sleep(3 * TICK_S)  # until the others have heard of it: one that was never heard of is waited for
            os.kill(os.getpid(), signal.SIGKILL)
        if context.rank == lost and case == "slow":
            time.sleep(2.5 * SILENT_TICKS * TICK_S)
        if context.rank == lost and case == "left":
            return told
        if case.startswith("stopped") or case in ("killed", "left"):  # there is no rank to communicate with
            time.sleep(60 if case != "left" else 3 * SILENT_TICKS * TICK_S)
            return told
        if case == "wrong list" and context.rank == 1:
            all_reduce_(torch.ones(1), own[1])  # of rank 0's two, the second
            watchdog.note(Action("B", 1, 7))
        all_reduce_(torch.ones(1), own[0])
    return told


def _store_of_rank_0(context: Any, folder: str) -> Any:
    """A store in rank 0's process, as under Slurm."""
    from torch.distributed import TCPStore

    port = Path(folder, "port")
    if context.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.write_text(str(store.port))
    all_reduce_(torch.ones(1), Group("world", context.world, context.rank, _group(context)))
    return store if context.rank == 0 else TCPStore("127.0.0.1", int(port.read_text()), is_master=False)


def _group(context: Any) -> Any:
    import torch.distributed as dist

    return dist.new_group(list(range(context.world)))


@pytest.mark.parametrize(
    ("case", "lost"), soaked([("stopped", 1), ("killed", 1), ("stopped", 0)], but=[("killed", 1), ("stopped", 0)])
)
def test_a_rank_without_a_sign_is_named_on_the_others(case, lost, tmp_path):
    with pytest.raises(RankError):
        run_ranks(_rank, 3, case, str(tmp_path), lost, timeout_s=120)
    stop_ranks()
    found = sorted(tmp_path.glob("rank-*"))
    assert [path.name for path in found] == [f"rank-{rank}" for rank in range(3) if rank != lost]
    for path in found:
        told = path.read_text()
        assert told.startswith(f"rank {lost} of 3 on {HOST} does not respond\n")
        assert f"found: rank {lost} was last" in told and "the same command continues" in told


def test_rank_0_is_named_if_it_holds_the_store_and_is_stopped(tmp_path):
    """Calls of the store then do not return."""
    with pytest.raises(RankError):
        run_ranks(_rank, 3, "stopped with the store", str(tmp_path), 0, timeout_s=120)
    stop_ranks()
    found = sorted(tmp_path.glob("rank-*"))
    assert found and {path.name for path in found} <= {"rank-1", "rank-2"}
    for path in found:
        told = path.read_text()
        assert told.startswith(f"rank 0 of 3 on {HOST} does not respond\n")
        assert "holds the store of all ranks, which has not answered for " in told


def test_ranks_that_wait_for_each_other_are_named(tmp_path):
    """Whoever is ended second may hear of it by its broken connection; it gives the same reason."""
    with pytest.raises(RankError, match=r"all ranks wait for each other|the process died"):
        run_ranks(_rank, 2, "wrong list", str(tmp_path), timeout_s=120)
    stop_ranks()
    found = list(tmp_path.glob("rank-*"))
    assert found
    for path in found:
        told = path.read_text()
        assert told.startswith("all ranks wait for each other\n")
        assert (
            "at 0F7 of the schedule, in all_reduce_ over of 0" in told
            and "at 1F7 of the schedule, in all_reduce_ over of 1" in told
        )


def test_a_rank_that_is_slow_is_named_and_goes_on(tmp_path):
    told = run_ranks(_rank, 2, "slow", str(tmp_path))
    assert told[1] == [] and 1 <= len(told[0]) <= 3
    assert told[0][0].startswith(f"the other ranks wait for rank 1 on {HOST}: rank 1 at 1F7 of the schedule, in ")
    assert not list(tmp_path.iterdir())


def test_a_rank_that_left_in_order_is_not_missed(tmp_path):
    assert run_ranks(_rank, 2, "left", str(tmp_path)) == [[], []]
    assert not list(tmp_path.iterdir())


class _Store(dict[str, Any]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key].encode() for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        if self.get(key, "") == expected:
            self[key] = value
        return self[key].encode()


class _StoppedStore(_Store):
    """A store whose process was stopped: after the first calls none returns."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait(60)
        return False


class _BrokenStore(_Store):
    """A store whose process has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer\nframe #0: of C++")


@pytest.mark.parametrize(
    ("store", "why"),
    [(_StoppedStore(), "has not answered for "), (_BrokenStore(), "fails: Connection reset by peer;")],
)
@pytest.mark.parametrize(
    ("holder", "what"), [(0, "rank 0 of 2 does not"), (None, "rank 1 of 2 cannot reach the store")]
)
def test_a_store_that_does_not_answer_ends_a_rank_that_cannot_move(holder, what, store, why):
    ended, errors = threading.Event(), list[SilentRanksError]()

    def end(error: SilentRanksError) -> None:
        errors.append(error)
        ended.set()

    ranks = WatchedRanks(rank=1, world_size=2, holder=holder)
    with Watchdog(ranks, store=store, end=end, tick_s=0.01) as watchdog:  # type: ignore[arg-type]
        for part in range(300):  # a launcher that was stopped by Ctrl-Z does not end ranks that move
            watchdog.note(Action("F", 0, part))
            time.sleep(0.002)
        assert not errors
        assert ended.wait(30)
    assert str(errors[0]).startswith(what) and why in str(errors[0])
    assert "rank 1 at 0F299 of the schedule" in str(errors[0])


def test_a_first_action_is_told_at_once():
    """A rank that is lost in its first seconds of training was not last starting."""
    store = _Store()
    with Watchdog(WatchedRanks(rank=1, world_size=2), store=store, end=lambda error: None, tick_s=60) as watchdog:
        assert '"starting"' in store["mtrain/heartbeat/1"]
        watchdog.note(Action("F", 0, 7))
        for _ in range(500):
            if "at 0F7 of the schedule" in store["mtrain/heartbeat/1"]:
                break
            time.sleep(0.01)
        assert "at 0F7 of the schedule" in store["mtrain/heartbeat/1"]


def test_a_rank_that_does_not_start_is_named_and_then_ends_the_others():
    ended, errors, told = threading.Event(), list[Exception](), list[str]()

    def end(error: Exception) -> None:
        errors.append(error)
        ended.set()

    ranks = WatchedRanks(rank=0, world_size=2, hosts=("n1", "n2"))
    with Watchdog(ranks, store=_Store(), end=end, tell=told.append, tick_s=0.01):
        assert ended.wait(30)
    assert str(errors[0]).startswith("rank 1 of 2 on n2 did not start\n  found: nothing was heard of rank 1\n")
    *notes, last = told
    assert set(notes) == {"the other ranks wait for rank 1 on n2, which has not reported yet"}
    assert len(notes) == START_TICKS // STILL_TICKS
    assert last == "rank 1 of 2 on n2 did not start (nothing was heard of rank 1); all ranks are stopped"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_whose_line_cannot_be_printed_ends_too():
    """It found the verdict; its terminal may be gone. The others get the usual time to hear of it."""
    ended = threading.Event()

    def tell(text: str) -> None:
        raise BrokenPipeError

    ranks = WatchedRanks(rank=0, world_size=2)
    with Watchdog(ranks, store=_Store(), end=lambda error: ended.set(), tell=tell, tick_s=0.01) as watchdog:
        assert ended.wait(10)
    assert watchdog._grace_s == HEARD_TICKS * watchdog.tick_s


def test_a_look_at_a_rank_that_moves_keeps_no_tensor():
    """Until Python 3.13, reading the variables of a frame leaves a copy of them in it."""
    watchdog = Watchdog(WatchedRanks(rank=1, world_size=2), store=_Store(), end=lambda error: None)  # type: ignore[arg-type]
    kept = list[bool]()

    def parts() -> None:
        for part in range(3):
            logits = torch.zeros(8)
            there = weakref.ref(logits)
            watchdog.note(Action("F", 0, part))
            watchdog._look()
            del logits
            kept.append(there() is not None)

    FunctionType(parts.__code__, globals() | {"__name__": "trainer.layers.head"}, closure=parts.__closure__)()
    assert " < test_a_look_at_a_rank_that_moves_keeps_no_tensor.<locals>.parts" in watchdog._heartbeat.where
    assert kept == [False] * 3


class _Event:
    """An event of a device that has come to it at once; keeps those that were made."""

    made: ClassVar[list[_Event]] = []

    def __init__(self) -> None:
        self.made.append(self)

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded


def test_events_of_passed_actions_are_used_again(monkeypatch):
    """None is destroyed: that would wait for the GPU, and the watchdog with it."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "made", [])
    store = _Store()
    with Watchdog(
        WatchedRanks(rank=1, world_size=2), store=store, end=lambda error: None, device="cuda", tick_s=0.001
    ) as watchdog:
        for part in range(100):
            watchdog.note(Action("F", 0, part))
            while f"at 0F{part} of" not in store.get("mtrain/heartbeat/1", ""):
                time.sleep(0.001)
    assert len(_Event.made) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_signs_go_on_while_a_launch_waits_for_the_gpu():
    """As on a rank whose peer is lost: its GPU does not move, and the queue of launches is full."""
    launch_without_the_lock()
    wave = torch.compile(lambda x: torch.sin(x) * 2 + 1)
    x, store = torch.ones(1000, device="cuda"), _Store()
    wave(x)
    second = torch.cuda.get_device_properties(0).clock_rate * 1000  # cycles
    with Watchdog(
        WatchedRanks(rank=1, world_size=2), store=store, end=lambda error: None, device="cuda", tick_s=0.05
    ) as watchdog:
        for part in range(4):  # the watchdog sees each end while the launches below wait
            torch.cuda._sleep(second // 2)  # type: ignore[no-untyped-call]
            watchdog.note(Action("F", 0, part))
        began = json.loads(store["mtrain/heartbeat/1"])["number"]
        for _ in range(3000):
            wave(x)
        heartbeats = json.loads(store["mtrain/heartbeat/1"])["number"] - began
    assert heartbeats >= 20  # of about 40 in the two seconds
