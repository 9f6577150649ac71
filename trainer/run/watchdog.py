"""Names the rank that all others wait for, long before a collective times out.

Every rank has a thread that sends a sign of life every few seconds: a number, the position of the main thread, and for
how many signs it has been there. Rank 0 reads them all, the others read rank 0's. A rank that sends no new signs has
died or was stopped; if all ranks wait and none moves, they wait for each other. Either is an error that ends all ranks,
with one message. A rank that does work of its own while the others wait is only named in a note: it may be compiling.

A store whose process is stopped never answers, so each exchange with it has a thread of its own, and its ticks are
counted. Silence is counted in ticks of the listener, not in seconds, so that a job that is suspended as a whole
continues. On a GPU device events show the progress, because the host runs ahead; a lost peer then stops the main thread
inside some launch, beside which this thread goes on (`launch_without_the_lock`). Nothing here delays a step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from mdata import ResourceError
from trainer.layers.base import Parallel
from trainer.optim.gathers import ParameterGathers
from trainer.optim.reducer import GradientReducer
from trainer.parallel.collectives import Group
from trainer.parallel.world import World, shared_store
from trainer.pipeline.actions import Action
from trainer.pipeline.messages import Messages
from trainer.run.launch import SilentRanksError

TICK_S = 4.0
SILENT_TICKS = 10  # without a new sign: the rank is lost
STILL_TICKS = 10  # in which no rank moves: they wait for each other
HEARD_TICKS = 1.5  # after which all ranks have read a verdict
_WAITING = frozenset(f"trainer.{name}" for name in ("parallel.collectives", "pipeline.messages", "run.step_report"))
_VERDICT = "mtrain/verdict"
_FRAMES, _SHOWN = 3, 4  # functions named of a rank; places named in a message


@dataclass(frozen=True, slots=True)
class Sign:
    """A rank's sign of life.

    Args:
        number: of its signs so far. still: how many signs, including the last, found it at the same position.
        waits: for other ranks, or for its device. left: it has ended normally.
        where, peers: for messages: its position, and the ranks of the group that it communicates in.
    """

    number: int = 0
    still: int = 0
    waits: bool = False
    where: str = "starting"
    peers: str = ""
    left: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why a run cannot continue.

    Args:
        what, found: for the message. lost: the ranks that do not respond. by: the rank that found it.
    """

    what: str
    found: str
    lost: Sequence[int] = ()
    by: int = 0

    def error(self) -> SilentRanksError:
        """As an error that ends the run."""
        fix = "check the machines of these ranks and their output; the same command continues"
        error = SilentRanksError(self.what, found=self.found, fix=fix)
        error.ranks = tuple(self.lost)
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The ranks of a run, from the view of one of them.

    Args:
        rank, world_size: of this rank, and how many there are.
        holder: the rank whose process holds the store; None: a launcher's does.
        members: the ranks of each group of this rank.
    """

    rank: int
    world_size: int
    holder: int | None = None
    members: Mapping[Group, Sequence[int]] = field(default_factory=dict)


def ranks_of(world: World, env: Mapping[str, str]) -> Ranks:
    """The ranks of a world. A pure function.

    Args:
        env: where torchrun says that its own process holds the store; otherwise rank 0's does.
    """
    mesh, rank = world.mesh, world.rank
    line = mesh.ranks_of("pp", rank)
    members: dict[Group, Sequence[int]] = {group: mesh.ranks_of(axis, rank) for axis, group in world.groups.items()}
    members |= {group: sorted(line[end] for end in link) for link, group in world.links.items()}
    holder = None if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    return Ranks(rank=rank, world_size=world.world_size, holder=holder, members=members)


def verdict(signs: Mapping[int, Sign], silent: Mapping[int, int], *, ranks: Ranks) -> Verdict | None:
    """Whether the run cannot continue, as far as some ranks' signs tell. A pure function.

    Args:
        signs: the last of each. silent: for how many ticks each has sent no new one. ranks: the view of the reader.
    """
    here = [rank for rank, sign in signs.items() if not sign.left]
    lost = [rank for rank in here if silent[rank] >= SILENT_TICKS]
    if lost:
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        what = f"rank {lost[0]} of {ranks.world_size} does not respond{more}"
        found = places([(rank, signs[rank]) for rank in lost], last=True)
        return Verdict(what=what, found=found, lost=lost, by=ranks.rank)
    are_all = len(signs) == ranks.world_size and here
    if are_all and all(signs[rank].waits and signs[rank].still >= STILL_TICKS for rank in here):
        found = places([(rank, signs[rank]) for rank in here])
        return Verdict(what="all ranks wait for each other", found=found, by=ranks.rank)
    return None


def without_store(ranks: Ranks, why: str, *, sign: Sign) -> Verdict:
    """The verdict of a rank that cannot reach the store. A pure function.

    Args:
        why: what the store does. sign: of this rank.
    """
    own = f"; {places([(ranks.rank, sign)])}"
    if ranks.holder is not None:
        what = f"rank {ranks.holder} of {ranks.world_size} does not respond"
        return Verdict(what=what, found=f"its process holds the store of all ranks, which {why}{own}", by=ranks.rank)
    what = f"rank {ranks.rank} of {ranks.world_size} cannot reach the store that all ranks share"
    return Verdict(what=what, found=f"the launcher on the first machine holds it, and it {why}{own}", by=ranks.rank)


def held_up_by(signs: Mapping[int, Sign]) -> list[int]:
    """The ranks that work on their own while all others have waited for a long time. A pure function."""
    here = [rank for rank, sign in signs.items() if not sign.left]
    busy = [rank for rank in here if not signs[rank].waits]
    waiting = [rank for rank in here if signs[rank].waits]
    return busy if waiting and all(signs[rank].still >= STILL_TICKS for rank in waiting) else []


def places(signs: Sequence[tuple[int, Sign]], *, last: bool = False) -> str:
    """Where ranks are, grouped by position; of many positions the rarest, which show the difference.

    Groups of ranks are named unless that makes too many positions.
    """
    ranks, named = dict[str, list[int]](), dict[str, list[int]]()
    for rank, sign in signs:
        ranks.setdefault(sign.where, []).append(rank)
        named.setdefault(f"{sign.where} ({sign.peers})" if sign.peers else sign.where, []).append(rank)
    rarest = sorted((named if len(named) <= _SHOWN else ranks).items(), key=lambda found: len(found[1]))
    texts = [f"{_numbers(found)} {'was last ' if last else ''}{where}" for where, found in rarest[:_SHOWN]]
    return "; ".join([*texts, *([f"and at {len(rarest) - _SHOWN} more places"] if len(rarest) > _SHOWN else [])])


def stands(frame: FrameType | None, members: Mapping[Group, Sequence[int]]) -> Sign:
    """A sign of where a thread is: whether it waits, and our functions on its stack, innermost first.

    Args:
        members: the ranks of groups.
    """
    names, waits, peers = list[str](), False, ""
    while frame is not None and len(names) < _FRAMES:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("trainer.", "mdata.")):
            waits |= not names and module in _WAITING
            group = _group_in(frame.f_locals)
            names.append(frame.f_code.co_qualname + (f" over {group.name}" if group else ""))
            if group is not None and group in members and not peers:
                peers = f"{group.name}: {_numbers(members[group])}"
        frame = frame.f_back
    return Sign(waits=waits, where=f"in {' < '.join(names)}", peers=peers if waits else "")


def _group_in(variables: Mapping[str, Any]) -> Group | None:
    """The group that one of our functions communicates in, as far as its variables tell."""
    owner, number = variables.get("self"), variables.get("number")
    group = variables.get("group", variables.get("link"))
    if isinstance(owner, Messages) and isinstance(action := variables.get("action"), Action):
        group = owner.links.get(owner.schedule.link(action))
    elif isinstance(owner, GradientReducer | ParameterGathers) and isinstance(number, int):
        group = owner.groups.get(owner.buffers.layout.buckets[number].shard)
    elif isinstance(parallel := getattr(variables.get("ctx"), "parallel", None), Parallel):
        group = parallel.tp
    return group if isinstance(group, Group) else None


@contextmanager
def watching(
    world: World, *, end: Callable[[ResourceError], None], tell: Callable[[str], None]
) -> Iterator[Callable[[Action | None], None] | None]:
    """Run a watchdog during the block; yields the function to call with each action of a step; None on one rank.

    Args:
        end: ends this process with an error; does not return. tell: prints a line for the user.
    """
    if world.world_size == 1:
        yield None
        return
    store, device = shared_store(), world.device.type
    if device == "cuda":
        launch_without_the_lock()
    with Watchdog(ranks_of(world, os.environ), store=store, end=end, tell=tell, device=device) as watchdog:
        yield watchdog.note


def launch_without_the_lock() -> None:
    """Have torch.compile's kernels launched without Python's global lock; call before the first is compiled.

    A launch waits while about 1,000 others are pending. PyTorch's own launcher keeps the lock meanwhile, so that no
    thread names a lost rank. Triton's launcher releases the lock; a launch takes 32 us in place of 30.
    """
    import torch._inductor.config

    torch._inductor.config.use_static_cuda_launcher = False


class Watchdog:
    """The thread of a rank that sends signs and reads those of others.

    Args:
        ranks: this one and the others.
        store: shared by all ranks; used only by this object, because its calls block each other, and may not return.
        end: ends this process with an error; it does not return.
        tell: a line for people; of a verdict, only on the rank that found it first.
        device: on which the main thread works.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        store: Store,
        end: Callable[[ResourceError], None],
        tell: Callable[[str], None] = lambda text: None,
        device: str = "cpu",
        tick_s: float = TICK_S,
    ) -> None:
        self.ranks, self.store, self.tick_s = ranks, store, tick_s
        self.end, self.tell, self.on_gpu = end, tell, device == "cuda"
        self._main, self._left, self._wake = threading.get_ident(), threading.Event(), threading.Event()
        self._begun = False  # the first action of a step
        self._action, self._actions = "", 0  # that the main thread is at, and its number
        self._events: deque[tuple[Any, str]] = deque()  # of actions that the device has not come to
        self._unused: list[Any] = []  # events that it has passed: destroying one may wait for the device
        self._sign = Sign()
        self._stood: tuple[Any, ...] = ()
        self._signs = {rank: Sign() for rank in (range(ranks.world_size) if ranks.rank == 0 else [0])}  # last read
        self._silent = dict.fromkeys(self._signs, 0)
        self._told = 0  # ticks since a note
        self._unanswered = self._failures = 0  # ticks without an answer of the store, and with an error
        self._found: Verdict | None = None
        self._grace_s = 0.0  # from the verdict to the end of this process
        self._exchange = threading.Thread(target=self._exchange_signs)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.store.set(self._key(self.ranks.rank), json.dumps(asdict(self._sign)))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._left.set()
        self._wake.set()
        self._thread.join(2 * self.tick_s)  # a store that does not answer does not keep the process
        if error is not None and self._found is not None:  # a rank that ended for it was this one's peer
            raise self._found.error() from error

    @staticmethod
    def _key(rank: int) -> str:
        return f"mtrain/sign/{rank}"

    def note(self, action: Action | None) -> None:
        """Note that the main thread begins an action of a step; None: the step's last action is done."""
        text = "" if action is None else f"at {action} of the schedule, "
        if self.on_gpu:
            event = self._unused.pop() if self._unused else torch.cuda.Event()
            event.record()
            self._events.append((event, text))
        else:
            self._action, self._actions = text, self._actions + 1
        if not self._begun:  # a rank that is lost soon was not last starting
            self._begun = True
            self._wake.set()

    def _watch(self) -> None:
        while not self._rest():
            self._look()
            if not self._exchange.is_alive():
                self._unanswered = 0
                self._exchange = threading.Thread(target=self._exchange_signs, name="signs", daemon=True)
                self._exchange.start()
                self._exchange.join(self.tick_s / 2)
            else:
                self._unanswered += 1
            # A rank that moves goes on without the store: its holder may be a launcher that a user has stopped.
            if self._unanswered >= SILENT_TICKS and self._sign.still >= STILL_TICKS:
                why = f"has not answered for {self._unanswered * self.tick_s:.0f} s"
                self._found = without_store(self.ranks, why, sign=self._sign)
            if self._found is not None and not self._left.wait(self._grace_s):
                self.end(self._found.error())
        if self._exchange.is_alive():
            self._exchange.join(self.tick_s)
        with suppress(RuntimeError):  # rank 0 may have ended, and the store with it
            self._hear()
            self._look(left=True)
            self._give()

    def _rest(self) -> bool:
        """Wait for the next tick, or for the first action; returns whether this rank has left."""
        self._wake.wait(self.tick_s)
        self._wake.clear()
        return self._left.is_set()

    def _exchange_signs(self) -> None:
        """Give this rank's sign, read others, and hear a verdict; in a thread of its own, because it may not return."""
        try:
            self._give()
            if (found := self._read()) is not None:
                text = json.dumps(asdict(found))
                if self.store.compare_set(_VERDICT, "", text).decode() == text:
                    self.tell(f"{found.what} ({found.found}); all ranks are stopped")  # a launcher may wait for it
                    self._grace_s = HEARD_TICKS * self.tick_s  # the store may be in this process
            self._hear()
            self._failures = 0
        except RuntimeError as error:  # of the store
            self._failures += 1
            if self._failures >= SILENT_TICKS:
                self._found = without_store(self.ranks, f"fails: {str(error).splitlines()[0]}", sign=self._sign)

    def _hear(self) -> None:
        if self.store.check([_VERDICT]):
            self._found = Verdict(**json.loads(self.store.multi_get([_VERDICT])[0]))

    def _look(self, *, left: bool = False) -> None:
        while self._events and self._events[0][0].query():
            event, self._action = self._events.popleft()
            self._actions += 1
            self._unused.append(event)
        frame = sys._current_frames().get(self._main)
        stood = (self._actions, *_fingerprint(frame))
        still = self._sign.still + 1 if stood == self._stood else 0
        self._stood = stood
        now = stands(frame, self.ranks.members)
        self._sign = replace(now, number=self._sign.number + 1, still=still, where=self._action + now.where, left=left)

    def _give(self) -> None:
        self.store.set(self._key(self.ranks.rank), json.dumps(asdict(self._sign)))

    def _read(self) -> Verdict | None:
        """Read the signs of all ranks, or of rank 0; a rank without any is as silent as one that gives no more."""
        came = {rank: self._key(rank) for rank in self._signs}
        if not self.store.check(list(came.values())):
            came = {rank: key for rank, key in came.items() if self.store.check([key])}
        texts = self.store.multi_get(list(came.values())) if came else []
        signs = self._signs | {rank: Sign(**json.loads(text)) for rank, text in zip(came, texts, strict=True)}
        for rank, now in signs.items():
            self._silent[rank] = self._silent[rank] + 1 if now.number == self._signs[rank].number else 0
        self._signs = signs
        if self.ranks.rank == 0:
            self._tell_who_holds_up()
        return verdict(signs, self._silent, ranks=self.ranks)

    def _tell_who_holds_up(self) -> None:
        self._told = self._told + 1 if (busy := held_up_by(self._signs)) else 0
        if self._told % STILL_TICKS == 1:
            where = places([(rank, self._signs[rank]) for rank in busy[:_SHOWN]])
            self.tell(f"the other ranks wait for {_numbers(busy)}: {where}")


def _fingerprint(frame: FrameType | None) -> Iterator[tuple[int, int]]:
    """A value that changes when a thread moves: its frames and the positions in them."""
    while frame is not None:
        yield id(frame), frame.f_lasti
        frame = frame.f_back


def _numbers(ranks: Sequence[int]) -> str:
    if len(ranks) > _SHOWN and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
