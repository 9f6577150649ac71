"""Names the rank that all others wait for, long before a collective times out.

Every rank has a thread that sends a sign of life every few seconds: a number, the position of the main thread, and for
how many signs it has been there. Rank 0 reads them all. A rank that sends no new signs has died or was stopped; if all
ranks wait and none moves, they wait for each other. Either is an error that ends all ranks, with one message. A rank
that does work of its own while the others wait is only named in a note: it may be compiling, or reading.

Silence is counted in ticks of the listener, not in seconds, so that a job that is suspended as a whole continues. On a
GPU device events show the progress, because the host runs ahead; a lost peer then stops the main thread inside some
launch, and this thread has to go on beside it (`launch_without_the_lock`). Nothing here delays a step.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Protocol

import torch

from mdata import ResourceError
from trainer.parallel.collectives import Group
from trainer.parallel.world import World, shared_store
from trainer.pipeline.actions import Action

TICK_S = 5.0
SILENT_TICKS = 8  # without a new sign: the rank is lost
STILL_TICKS = 8  # in which no rank moves: they wait for each other
_WAITING = frozenset(f"trainer.{name}" for name in ("parallel.collectives", "pipeline.messages", "run.step_report"))
_VERDICT = "mtrain/verdict"
_FRAMES, _SHOWN = 3, 4  # functions named of a rank; places named in a message


class Store(Protocol):
    """The methods used of torch.distributed's stores."""

    def set(self, key: str, value: str, /) -> Any:
        """Set a key."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of existing keys."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A rank's sign of life.

    Args:
        number: of its signs so far. still: how many signs, including the last, found it at the same position.
        waits: for other ranks, or for its device. where: for messages. left: it has ended normally.
    """

    number: int = 0
    still: int = 0
    waits: bool = False
    where: str = "starting"
    left: bool = False


def verdict(signs: Sequence[Sign], silent: Sequence[int]) -> tuple[str, str] | None:
    """(problem, details) if the run cannot continue; None: it can. A pure function.

    Args:
        signs: the last of each rank. silent: for how many ticks each has sent no new one.
    """
    here = [rank for rank, sign in enumerate(signs) if not sign.left]
    lost = [rank for rank in here if silent[rank] >= SILENT_TICKS]
    if lost:
        what = f"rank {lost[0]} of {len(signs)} does not respond" + _and_others(lost)
        return what, places([(rank, signs[rank]) for rank in lost], last=True)
    if here and all(signs[rank].waits and signs[rank].still >= STILL_TICKS for rank in here):
        return "all ranks wait for each other", places([(rank, signs[rank]) for rank in here])
    return None


def held_up_by(signs: Sequence[Sign]) -> list[int]:
    """The ranks that work on their own while all others have waited for a long time. A pure function."""
    here = [rank for rank, sign in enumerate(signs) if not sign.left]
    busy = [rank for rank in here if not signs[rank].waits]
    waiting = [rank for rank in here if signs[rank].waits]
    return busy if waiting and all(signs[rank].still >= STILL_TICKS for rank in waiting) else []


def places(signs: Sequence[tuple[int, Sign]], *, last: bool = False) -> str:
    """Where ranks are, grouped by position; of many positions the rarest, which show the difference."""
    ranks: dict[str, list[int]] = {}
    for rank, sign in signs:
        ranks.setdefault(sign.where, []).append(rank)
    rarest = sorted(ranks.items(), key=lambda found: len(found[1]))
    texts = [f"{_numbers(found)} {'was last ' if last else ''}{where}" for where, found in rarest[:_SHOWN]]
    return "; ".join([*texts, *([f"and at {len(rarest) - _SHOWN} more places"] if len(rarest) > _SHOWN else [])])


def stands(frame: FrameType | None) -> tuple[bool, str]:
    """(whether a thread waits, our functions on its stack, innermost first)."""
    names, waits = list[str](), False
    while frame is not None and len(names) < _FRAMES:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("trainer.", "mdata.")):
            waits |= not names and module in _WAITING
            group = frame.f_locals.get("group")
            over = f" over {group.name}" if isinstance(group, Group) else ""
            names.append(frame.f_code.co_qualname + over)
        frame = frame.f_back
    return waits, " < ".join(names)


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
    with Watchdog(world.rank, world.world_size, store=store, end=end, tell=tell, device=device) as watchdog:
        yield watchdog.note


def launch_without_the_lock() -> None:
    """Have torch.compile's kernels launched without Python's global lock; call before the first is compiled.

    A launch waits while about 1,000 others are pending. PyTorch's own launcher keeps the lock meanwhile, so that no
    thread names a lost rank. Triton's launcher releases the lock; a launch takes 32 us in place of 30.
    """
    import torch._inductor.config

    torch._inductor.config.use_static_cuda_launcher = False


class Watchdog:
    """The thread of a rank that sends signs; on rank 0 it also reads them.

    Args:
        rank, world_size: of this rank, and how many there are.
        store: shared by all ranks; used only by this object, because its calls block each other.
        end: ends this process with an error; it does not return.
        tell: a line for people, on rank 0.
        device: on which the main thread works.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        store: Store,
        end: Callable[[ResourceError], None],
        tell: Callable[[str], None] = lambda text: None,
        device: str = "cpu",
        tick_s: float = TICK_S,
    ) -> None:
        self.rank, self.world_size, self.store, self.tick_s = rank, world_size, store, tick_s
        self.end, self.tell, self.on_gpu = end, tell, device == "cuda"
        self._main, self._left = threading.get_ident(), threading.Event()
        self._action, self._actions = "", 0  # that the main thread is at, and its number
        self._events: deque[tuple[Any, str]] = deque()  # of actions that the device has not come to
        self._unused: list[Any] = []  # events that it has passed: destroying one may wait for the device
        self._sign = Sign()
        self._stood: tuple[Any, ...] = ()
        self._signs = [Sign() for _ in range(world_size)]
        self._silent = [0] * world_size
        self._told = 0  # ticks since a note
        self._found: tuple[str, str] | None = None  # the verdict
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.store.set(self._key(self.rank), json.dumps(asdict(self._sign)))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._left.set()
        self._thread.join(2 * self.tick_s)  # a store that does not answer does not keep the process
        if error is not None and self._found is not None:  # a rank that ended for it was this one's peer
            raise _error(*self._found) from error

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
            return
        self._action, self._actions = text, self._actions + 1

    def _watch(self) -> None:
        failures = 0
        while not self._left.wait(self.tick_s):
            try:
                self._give(left=False)
                if self.rank == 0 and (found := self._read()) is not None:
                    self.store.set(_VERDICT, json.dumps(found))
                    self.tell(f"{found[0]} ({found[1]}); all ranks are stopped")  # a launcher may wait for it
                    self._left.wait(2 * self.tick_s)  # the store may be in this process, and others have to read it
                self._hear()
                failures = 0
            except RuntimeError as error:  # of the store
                failures += 1
                if failures >= SILENT_TICKS:
                    what = f"rank {self.rank} cannot reach the store that all ranks share"
                    self._found = what, str(error).splitlines()[0]
            if self._found is not None and not self._left.is_set():
                self.end(_error(*self._found))
        with _store_may_be_gone():
            self._hear()
            self._give(left=True)

    def _hear(self) -> None:
        if self.store.check([_VERDICT]):
            what, found = json.loads(self.store.multi_get([_VERDICT])[0])
            self._found = what, found

    def _give(self, *, left: bool) -> None:
        while self._events and self._events[0][0].query():
            event, self._action = self._events.popleft()
            self._actions += 1
            self._unused.append(event)
        frame = sys._current_frames().get(self._main)
        waits, where = stands(frame)
        stood = (self._actions, *_fingerprint(frame))
        still = self._sign.still + 1 if stood == self._stood else 0
        self._stood = stood
        self._sign = Sign(self._sign.number + 1, still, waits, f"{self._action}in {where}", left)
        self.store.set(self._key(self.rank), json.dumps(asdict(self._sign)))

    def _read(self) -> tuple[str, str] | None:
        keys = [self._key(rank) for rank in range(self.world_size)]
        if not self.store.check(keys):
            return None  # not all have come yet
        signs = [Sign(**json.loads(text)) for text in self.store.multi_get(keys)]
        for rank, (before, now) in enumerate(zip(self._signs, signs, strict=True)):
            self._silent[rank] = self._silent[rank] + 1 if now.number == before.number else 0
        self._signs = signs
        self._told = self._told + 1 if (busy := held_up_by(signs)) else 0
        if self._told % STILL_TICKS == 1:
            self.tell(f"the other ranks wait for {_numbers(busy)}: {places([(r, signs[r]) for r in busy[:_SHOWN]])}")
        return verdict(signs, self._silent)


@contextmanager
def _store_may_be_gone() -> Iterator[None]:
    """Ignore errors of the store: rank 0 may have ended, and the store with it."""
    try:
        yield
    except RuntimeError:
        return


def _error(what: str, found: str) -> ResourceError:
    return ResourceError(
        what, found=found, fix="check the machines of these ranks and their output; the same command continues"
    )


def _fingerprint(frame: FrameType | None) -> Iterator[tuple[int, int]]:
    """A value that changes when a thread moves: its frames and the positions in them."""
    while frame is not None:
        yield id(frame), frame.f_lasti
        frame = frame.f_back


def _numbers(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _and_others(lost: Sequence[int]) -> str:
    return f", and {len(lost) - 1} more" if len(lost) > 1 else ""
