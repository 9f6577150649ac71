"""Names the rank that all others wait for, long before a collective times out.

Every rank has a thread that sends a heartbeat every few seconds: a number, the position of the main thread, and how
often it was found there. Rank 0 reads them all, the others read rank 0's. A rank that sends no new ones has died or was
stopped; if all ranks wait and none moves, they wait for each other (heartbeats.py). Either is an error that ends all
ranks, with one message. A rank that works on its own while the others wait is only named in a note: it may be
compiling. So is one that has not started, for run.join_minutes: the watchdog begins before the ranks join.

A store whose process is stopped never answers, so each exchange with it has a thread of its own, and the ticks without
an answer are counted. Silence is counted in ticks of the listener, not in seconds, so that a job that is suspended as a
whole continues. On a GPU device events show the progress, because the host runs ahead; a lost peer then stops the main
thread inside some launch, beside which this thread goes on (`launch_without_the_lock`). Nothing here delays a step.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from types import FrameType
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from mdata import StoppedError
from trainer.errors import host_name
from trainer.parallel.placement import Placement
from trainer.parallel.world import JOIN_S, World, another_connection
from trainer.pipeline.actions import Action
from trainer.run.heartbeats import (
    SHOWN,
    SILENT_TICKS,
    START_TICKS,
    STILL_TICKS,
    Heartbeat,
    Verdict,
    WatchedRanks,
    held_up_by,
    members_of,
    not_started,
    numbers,
    on_hosts,
    places,
    ranks_of,
    stands,
    verdict,
    without_store,
)
from trainer.run.rank_times import RankTime, RankTimes, StepTimes
from trainer.run.signals import ArrivedSignals

TICK_S = 4.0
HEARD_TICKS = 1.5  # after which all ranks have read a verdict
_VERDICT = "mtrain/verdict"


@contextmanager
def watching(
    place: Placement,
    store: Store,
    *,
    end: Callable[[BaseException], None],
    tell: Callable[[str], None],
    join_s: float = JOIN_S,
    times: RankTimes | None = None,
) -> Iterator[Watchdog]:
    """Run a watchdog during the block, in which the ranks join and train.

    Args:
        store: of all ranks. end: ends this process with an error; does not return. tell: prints a line for the user.
        join_s: how long the ranks wait for one that has not started.
        times: of this rank, which are sent, and on rank 0 of all ranks, which are received.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        launch_without_the_lock()
    ranks = ranks_of(place, os.environ)
    start_ticks = math.ceil(join_s / TICK_S)
    own = another_connection(store)
    with (
        ArrivedSignals() as signals,
        Watchdog(
            ranks,
            store=own,
            end=end,
            tell=tell,
            device=device,
            start_ticks=start_ticks,
            asked=signals.newest,
            times=times,
        ) as watchdog,
    ):
        yield watchdog


def launch_without_the_lock() -> None:
    """Have torch.compile's kernels launched without Python's global lock; call before the first is compiled.

    A launch waits while about 1,000 others are pending. PyTorch's own launcher keeps the lock meanwhile, so that no
    thread names a lost rank. Triton's launcher releases the lock; a launch takes 32 us in place of 30.
    """
    import torch._inductor.config

    torch._inductor.config.use_static_cuda_launcher = False


class Watchdog:
    """The thread of a rank that sends heartbeats and reads those of others.

    Args:
        ranks: this one and the others.
        store: shared by all ranks; used only by this object, because its calls block each other, and may not return.
        end: ends this process with an error; it does not return.
        tell: prints a line; a verdict is printed only by the rank that found it first.
        device: on which the main thread works.
        start_ticks: for how many a rank may be silent before its first heartbeat.
        asked: the number of a signal to stop that has arrived; None: none has. Before the first action of a step it
            ends a rank whose main thread does not handle it, because it waits for a rank that never comes.
    """

    def __init__(
        self,
        ranks: WatchedRanks,
        *,
        store: Store,
        end: Callable[[BaseException], None],
        tell: Callable[[str], None] = lambda text: None,
        device: str = "cpu",
        tick_s: float = TICK_S,
        start_ticks: int = START_TICKS,
        asked: Callable[[], int | None] = lambda: None,
        times: RankTimes | None = None,
    ) -> None:
        self._times, self._host = times or RankTimes(), host_name()
        self.ranks, self.store, self.tick_s, self.start_ticks = ranks, store, tick_s, start_ticks
        self.end, self.tell, self.on_gpu = end, tell, device == "cuda"
        self._main, self._left, self._wake = threading.get_ident(), threading.Event(), threading.Event()
        self._begun = False  # whether a first action was noted
        self._asked = asked
        self._stop: int | None = None  # a signal that the main thread has to handle
        self._action, self._actions = "", 0  # that the main thread is at, and its number
        self._events: deque[tuple[Any, str]] = deque()  # of actions that the device has not come to
        self._unused: list[Any] = []  # events that it has passed: destroying one may wait for the device
        self._heartbeat = Heartbeat(number=1)
        self._stood: tuple[Any, ...] = ()
        read = range(ranks.world_size) if ranks.rank == 0 else [0]
        # The last of each.
        self._heartbeats = {rank: Heartbeat(host=ranks.hosts[rank] if ranks.hosts else "") for rank in read}
        self._silent = dict.fromkeys(self._heartbeats, 0)
        self._told = 0  # ticks since a note
        self._unanswered = self._failures = 0  # ticks without an answer of the store, and with an error
        self._failure = ""  # the last error of the store
        self._verdict: Verdict | None = None
        self._grace_s = 0.0  # from the verdict to the end of this process
        self._exchange: threading.Thread | None = None  # with the store; the last one that was begun
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.store.set(self._key(self.ranks.rank), json.dumps(asdict(self._heartbeat)))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._left.set()
        self._wake.set()
        self._thread.join(2 * self.tick_s)  # a store that does not answer does not keep the process
        if error is not None and self._verdict is not None:  # a rank that ended for it was this one's peer
            raise self._verdict.error() from error

    @staticmethod
    def _key(rank: int) -> str:
        return f"mtrain/heartbeat/{rank}"

    def joined(self, world: World) -> None:
        """Name the groups of this rank in messages from now on."""
        self.ranks = replace(self.ranks, members=members_of(world))

    def note(self, action: Action | None) -> None:
        """Note that the main thread begins an action of a step; None: the step's last action is done."""
        text = "" if action is None else f"at {action} of the schedule, "
        if self.on_gpu:
            event = self._unused.pop() if self._unused else torch.cuda.Event()
            event.record()
            self._events.append((event, text))
        else:
            self._action, self._actions = text, self._actions + 1
        if not self._begun:  # sent at once: a rank that is lost soon after is no longer "starting"
            self._begun = True
            self._wake.set()

    def _watch(self) -> None:
        while not self._rest():
            self._look()
            self._end_if_asked()
            if self._exchange is None or not self._exchange.is_alive():
                self._unanswered = 0
                self._exchange = threading.Thread(target=self._exchange_heartbeats, name="heartbeats", daemon=True)
                self._exchange.start()
                self._exchange.join(self.tick_s / 2)
            else:
                self._unanswered += 1
            # A rank that moves goes on without the store: its holder may be a launcher that a user has stopped.
            if max(self._unanswered, self._failures) >= SILENT_TICKS and self._heartbeat.still >= STILL_TICKS:
                silent = f"has not answered for {self._unanswered * self.tick_s:.0f} s"
                why = silent if self._unanswered >= self._failures else f"fails: {self._failure}"
                self._verdict = without_store(
                    self.ranks, why, heartbeat=self._heartbeat, holder=self._heartbeats.get(self.ranks.holder or 0)
                )
            if self._verdict is not None and not self._left.wait(self._grace_s):
                self.end(self._verdict.error())
        if self._exchange is not None:
            self._exchange.join(self.tick_s)
        with suppress(RuntimeError):  # rank 0 may have ended, and the store with it
            self._hear()
            self._look(left=True)
            self._give()

    def _end_if_asked(self) -> None:
        """End this rank if it was asked to while it joins, and its main thread stands where it stood at two looks."""
        self._stop = self._asked() or self._stop
        if self._stop is None or self._begun or self._heartbeat.still < 1:
            return
        if self._stop == signal.SIGINT:
            self.end(KeyboardInterrupt())
        text = f"rank {self.ranks.rank} was stopped by SIGTERM before all ranks had joined"
        self.end(StoppedError(text, fix="run the same command again"))

    def _rest(self) -> bool:
        """Wait for the next tick, or for the first action; returns whether this rank has left."""
        self._wake.wait(self.tick_s)
        self._wake.clear()
        return self._left.is_set()

    def _exchange_heartbeats(self) -> None:
        """Send this rank's heartbeat, read others and a verdict; in a thread of its own, because it may not return."""
        try:
            self._give()
            if (new_verdict := self._read()) is not None:
                text = json.dumps(asdict(new_verdict))
                if self.store.compare_set(_VERDICT, "", text).decode() == text:
                    self._grace_s = HEARD_TICKS * self.tick_s  # the store may be in this process
                    # Before the line, for which a launcher may wait: where it cannot be printed, this process ends too.
                    self._verdict = new_verdict
                    self.tell(f"{new_verdict.problem} ({new_verdict.found}); all ranks are stopped")
            self._hear()
            self._failures = 0
        except RuntimeError as error:  # of the store
            self._failure = str(error).partition("\n")[0]
            self._failures += 1

    def _hear(self) -> None:
        if self.store.check([_VERDICT]):
            self._verdict = Verdict(**json.loads(self.store.multi_get([_VERDICT])[0]))

    def _look(self, *, left: bool = False) -> None:
        while self._events and self._events[0][0].query():
            event, self._action = self._events.popleft()
            self._actions += 1
            self._unused.append(event)
        frame = sys._current_frames().get(self._main)
        stood = (self._actions, *fingerprint(frame))
        still = self._heartbeat.still + 1 if stood == self._stood else 0
        self._stood = stood
        now = stands(frame, self.ranks.members, still=still)
        self._heartbeat = replace(
            now,
            number=self._heartbeat.number + 1,
            still=still,
            where=self._action + now.where,
            left=left,
            host=self._host,
            times=self._times.mine or (),
        )

    def _give(self) -> None:
        self.store.set(self._key(self.ranks.rank), json.dumps(asdict(self._heartbeat)))

    def _read(self) -> Verdict | None:
        """Read the heartbeats of all ranks, or of rank 0."""
        came = {rank: self._key(rank) for rank in self._heartbeats}
        if not self.store.check(list(came.values())):
            came = {rank: key for rank, key in came.items() if self.store.check([key])}
        texts = self.store.multi_get(list(came.values())) if came else []
        heartbeats = self._heartbeats | {
            rank: Heartbeat(**json.loads(text)) for rank, text in zip(came, texts, strict=True)
        }
        for rank, now in heartbeats.items():
            self._silent[rank] = self._silent[rank] + 1 if now.number == self._heartbeats[rank].number else 0
        self._heartbeats = heartbeats
        if self.ranks.rank == 0:
            self._times.ranks = {
                rank: RankTime(heartbeat.host, StepTimes(*heartbeat.times))
                for rank, heartbeat in heartbeats.items()
                if heartbeat.times
            }
            self._tell_who_holds_up()
        return verdict(heartbeats, self._silent, ranks=self.ranks, start_ticks=self.start_ticks)

    def _tell_who_holds_up(self) -> None:
        late = not_started(self._heartbeats, self._silent, ticks=STILL_TICKS)
        busy = late or held_up_by(self._heartbeats)
        self._told = self._told + 1 if busy else 0
        if self._told % STILL_TICKS == 1:
            places_text = "" if late else f": {places([(rank, self._heartbeats[rank]) for rank in busy[:SHOWN]])}"
            named = numbers(busy) + on_hosts([self._heartbeats[rank] for rank in busy])
            late_text = f", which {'have' if len(late) > 1 else 'has'} not reported yet"
            self.tell(f"the other ranks wait for {named}{places_text or late_text}")


def fingerprint(frame: FrameType | None) -> Iterator[tuple[int, int]]:
    """A value that changes when a thread moves: its frames and the positions in them."""
    while frame is not None:
        yield id(frame), frame.f_lasti
        frame = frame.f_back
