"""Ranks that die, stop, or wait for each other are named soon; long computations are not interrupted."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.ranks import RankError, run_ranks, stop_ranks
from trainer.parallel.collectives import Group, Pending, all_reduce_
from trainer.parallel.world import shared_store
from trainer.pipeline.actions import Action
from trainer.run.watchdog import (
    SILENT_TICKS,
    STILL_TICKS,
    Sign,
    Watchdog,
    held_up_by,
    launch_without_the_lock,
    places,
    stands,
    verdict,
)

TICK_S = 0.1
_signs = st.builds(
    Sign,
    number=st.integers(1, 99),
    still=st.integers(0, 12),
    waits=st.booleans(),
    left=st.booleans(),
    where=st.just(""),
)


@given(st.lists(st.tuples(_signs, st.integers(0, 12)), min_size=1, max_size=6))
def test_a_verdict_is_passed_on_silence_or_when_nobody_can_move(ranks: list[tuple[Sign, int]]) -> None:
    signs, silent = [sign for sign, _ in ranks], [ticks for _, ticks in ranks]
    found = verdict(signs, silent)
    here = [(sign, ticks) for sign, ticks in ranks if not sign.left]
    lost = any(ticks >= SILENT_TICKS for _, ticks in here)
    stuck = bool(here) and all(sign.waits and sign.still >= STILL_TICKS for sign, _ in here)
    assert (found is not None) == (lost or stuck)
    if found is not None:
        assert ("does not respond" in found[0]) == lost


@given(st.lists(_signs, min_size=1, max_size=6))
def test_who_holds_up_the_others_does_not_wait_and_they_do(signs: list[Sign]) -> None:
    busy = held_up_by(signs)
    here = {rank for rank, sign in enumerate(signs) if not sign.left}
    for rank in here:
        assert signs[rank].waits == (rank not in busy) or not busy
        assert not busy or rank in busy or signs[rank].still >= STILL_TICKS
    if here and not busy:
        waiting = [signs[rank] for rank in here if signs[rank].waits]
        assert not waiting or len(waiting) == len(here) or min(sign.still for sign in waiting) < STILL_TICKS


def test_places_are_shown_once_and_the_rarest_first() -> None:
    signs = [Sign(where="in all_reduce_ over tp") for _ in range(9)]
    signs[5] = Sign(where="at 1F2, in Pending.wait")
    assert places(list(enumerate(signs))) == (
        "rank 5 at 1F2, in Pending.wait; ranks 0, 1, 2, 3 and 4 more in all_reduce_ over tp"
    )
    many = [Sign(where=f"in place {rank}") for rank in range(7)]
    assert places(list(enumerate(many))).endswith("rank 3 in place 3; and at 3 more places")


class _Frames:
    """A process group that looks where its caller stands."""

    def wait(self) -> None:
        import sys

        self.seen = stands(sys._getframe())


def test_a_thread_in_a_collective_waits_and_its_group_is_named() -> None:
    frames = _Frames()
    Pending(torch.zeros(1), frames).wait()
    assert frames.seen == (True, "Pending.wait")
    assert stands(None) == (False, "")


def _rank(context: Any, case: str, folder: str) -> list[str]:
    """What is told on this rank; an error ends the process, as in a run."""
    context.join()
    told: list[str] = []
    stopped = Path(folder, "pid")

    def end(error: Exception) -> None:
        Path(folder, f"rank-{context.rank}").write_text(str(error))
        if case == "stopped" and context.rank == 2:
            os.kill(int(stopped.read_text()), signal.SIGKILL)
        os._exit(5)

    own = {rank: Group(f"of {rank}", context.world, context.rank, _group(context)) for rank in range(2)}
    store = shared_store()
    with Watchdog(context.rank, context.world, store=store, end=end, tell=told.append, tick_s=TICK_S) as watchdog:
        watchdog.note(Action("F", context.rank, 7))
        if context.rank == 1 and case == "stopped":
            stopped.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if context.rank == 1 and case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if context.rank == 1 and case == "slow":
            time.sleep(2.5 * SILENT_TICKS * TICK_S)
        if context.rank == 1 and case == "left":
            return told
        if case in ("stopped", "killed", "left"):  # nobody to talk to
            time.sleep(60 if case != "left" else 3 * SILENT_TICKS * TICK_S)
            return told
        if case == "wrong list" and context.rank == 1:
            all_reduce_(torch.ones(1), own[1])  # of rank 0's two, the second
            watchdog.note(Action("B", 1, 7))
        all_reduce_(torch.ones(1), own[0])
    return told


def _group(context: Any) -> Any:
    import torch.distributed as dist

    return dist.new_group(list(range(context.world)))


@pytest.mark.parametrize("case", ["stopped", "killed"])
def test_a_rank_without_a_sign_is_named_on_the_others(case: str, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(_rank, 3, case, str(tmp_path), timeout_s=30)
    stop_ranks()
    found = sorted(tmp_path.glob("rank-*"))
    assert [path.name for path in found] == ["rank-0", "rank-2"]
    for path in found:
        told = path.read_text()
        assert told.startswith("rank 1 of 3 does not respond\n")
        assert "found: rank 1 was last" in told and "the same command continues" in told


def test_ranks_that_wait_for_each_other_are_named(tmp_path: Path) -> None:
    """Whoever is ended second may hear of it by its broken connection; it gives the same reason."""
    with pytest.raises(RankError, match=r"all ranks wait for each other|the process died"):
        run_ranks(_rank, 2, "wrong list", str(tmp_path), timeout_s=30)
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


def test_a_rank_that_is_slow_is_named_and_goes_on(tmp_path: Path) -> None:
    told = run_ranks(_rank, 2, "slow", str(tmp_path))
    assert told[1] == [] and 1 <= len(told[0]) <= 3
    assert told[0][0].startswith("the other ranks wait for rank 1: rank 1 at 1F7 of the schedule, in ")
    assert not list(tmp_path.iterdir())


def test_a_rank_that_left_in_order_is_not_missed(tmp_path: Path) -> None:
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


class _Event:
    """An event of a device that has come to it at once; keeps those that were made."""

    made: ClassVar[list[_Event]] = []

    def __init__(self) -> None:
        self.made.append(self)

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded


def test_events_of_passed_actions_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is destroyed: that would wait for the GPU, and the watchdog with it."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "made", [])
    store = _Store()
    with Watchdog(1, 2, store=store, end=lambda error: None, device="cuda", tick_s=0.001) as watchdog:
        for part in range(100):
            watchdog.note(Action("F", 0, part))
            while f"at 0F{part} of" not in store.get("mtrain/sign/1", ""):
                time.sleep(0.001)
    assert len(_Event.made) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_signs_go_on_while_a_launch_waits_for_the_gpu() -> None:
    """As on a rank whose peer is lost: its GPU does not move, and the queue of launches is full."""
    launch_without_the_lock()
    wave = torch.compile(lambda x: torch.sin(x) * 2 + 1)
    x, store = torch.ones(1000, device="cuda"), _Store()
    wave(x)
    second = torch.cuda.get_device_properties(0).clock_rate * 1000  # cycles
    with Watchdog(1, 2, store=store, end=lambda error: None, device="cuda", tick_s=0.05) as watchdog:
        for part in range(4):  # the watchdog sees each end while the launches below wait
            torch.cuda._sleep(second // 2)  # type: ignore[no-untyped-call]
            watchdog.note(Action("F", 0, part))
        began = json.loads(store["mtrain/sign/1"])["number"]
        for _ in range(3000):
            wave(x)
        signs = json.loads(store["mtrain/sign/1"])["number"] - began
    assert signs >= 20  # of about 40 in the two seconds
