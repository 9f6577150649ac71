"""The heartbeat that a rank sends to the others, and the conclusions for the run.

Pure: watchdog.py sends and reads the heartbeats. A rank that sends no new ones is lost; if all wait and none moves,
they wait for each other; a rank that works while all others wait is only named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from mdata.errors import counted
from trainer.layers.base import Parallel
from trainer.optim.data_parallel import GradientReducer, ParameterGathers
from trainer.parallel.collectives import Group
from trainer.parallel.placement import Placement, launcher_holds_store, planned_hosts
from trainer.parallel.world import World
from trainer.pipeline.actions import Action
from trainer.pipeline.messages import Messages
from trainer.run.launch import SilentRanksError

SILENT_TICKS = 10  # without a new heartbeat: the rank is lost
START_TICKS = 75  # the same before its first one, as machines start at different times; of run.join_minutes
STILL_TICKS = 10  # in which no rank moves: they wait for each other
SHOWN = 4  # places or ranks that are named in a message
_FRAMES = 3  # functions named of a rank
_WAITING = frozenset(f"trainer.{name}" for name in ("parallel.collectives", "pipeline.messages", "run.step_report"))


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The report that a rank sends to the others every few seconds.

    Args:
        number: of its heartbeats so far; 0: none has arrived yet.
        still: how many of them, including the last, found it at the same position.
        waits: for other ranks, or for its device. left: it has ended normally.
        where, peers: for messages: its position, and the ranks of the group that it communicates in.
        host, times: where it runs, and the fields of its `StepTimes`; (): none yet.
    """

    number: int = 0
    still: int = 0
    waits: bool = False
    where: str = "starting"
    peers: str = ""
    left: bool = False
    host: str = ""
    times: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why a run cannot continue.

    Args:
        problem, found: for the message. lost: the ranks that do not respond. by: the rank that found it.
    """

    problem: str
    found: str
    lost: Sequence[int] = ()
    by: int = 0

    def error(self) -> SilentRanksError:
        """As an error that ends the run."""
        fix = "check the machines of these ranks and their output; the same command continues"
        error = SilentRanksError(self.problem, found=self.found, fix=fix)
        error.ranks = tuple(self.lost)
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedRanks:
    """The ranks of a run, as one of them sees them.

    Args:
        rank, world_size: of this rank, and how many there are.
        holder: the rank whose process holds the store; None: the launcher's process holds it.
        members: the ranks of each group of this rank; none before it has joined the others.
        hosts: of each rank, as the scheduler places them; (): not known before their first heartbeats.
    """

    rank: int
    world_size: int
    holder: int | None = None
    members: Mapping[Group, Sequence[int]] = field(default_factory=dict)
    hosts: Sequence[str] = ()


def ranks_of(place: Placement, env: Mapping[str, str]) -> WatchedRanks:
    """The ranks of a run, before they have joined. A pure function.

    Args:
        env: in which torchrun says that its own process holds the store, otherwise rank 0's process does; and Slurm
            says on which hosts the ranks are.
    """
    holder, hosts = None if launcher_holds_store(env) else 0, planned_hosts(env)
    are_slurms = len(hosts) == place.world_size  # torchrun in a job of Slurm has ranks of its own
    return WatchedRanks(
        rank=place.rank, world_size=place.world_size, holder=holder, hosts=tuple(hosts) if are_slurms else ()
    )


def members_of(world: World) -> dict[Group, Sequence[int]]:
    """The ranks of each group of this rank. A pure function."""
    mesh, rank = world.mesh, world.rank
    line = mesh.ranks_of("pp", rank)
    members: dict[Group, Sequence[int]] = {group: mesh.ranks_of(axis, rank) for axis, group in world.groups.items()}
    return members | {group: sorted(line[end] for end in link) for link, group in world.links.items()}


def verdict(
    heartbeats: Mapping[int, Heartbeat],
    silent: Mapping[int, int],
    *,
    ranks: WatchedRanks,
    start_ticks: int = START_TICKS,
) -> Verdict | None:
    """Whether the run cannot continue, judged by some ranks' heartbeats. A pure function.

    Args:
        heartbeats: the last of each. silent: for how many ticks each has sent no new one.
        ranks: as the reader sees them.
        start_ticks: for how many a rank may be silent before its first heartbeat.
    """
    here = [rank for rank, heartbeat in heartbeats.items() if not heartbeat.left]
    lost = [rank for rank in here if silent[rank] >= SILENT_TICKS and heartbeats[rank].number]
    late = not_started(heartbeats, silent, ticks=start_ticks)
    if missing := late or lost:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        named = f"rank {missing[0]} of {ranks.world_size}{on_hosts([heartbeats[missing[0]]])}"
        problem = f"{named} {'did not start' if late else 'does not respond'}{more}"
        last_places = places([(rank, heartbeats[rank]) for rank in lost], last=True)
        text = f"nothing was heard of {numbers(late)}" if late else last_places
        return Verdict(problem=problem, found=text, lost=missing, by=ranks.rank)
    are_all = len(heartbeats) == ranks.world_size and here
    if are_all and all(heartbeats[rank].waits and heartbeats[rank].still >= STILL_TICKS for rank in here):
        places_text = places([(rank, heartbeats[rank]) for rank in here])
        return Verdict(problem="all ranks wait for each other", found=places_text, by=ranks.rank)
    return None


def without_store(ranks: WatchedRanks, why: str, *, heartbeat: Heartbeat, holder: Heartbeat | None = None) -> Verdict:
    """The verdict of a rank that cannot reach the store. A pure function.

    Args:
        why: how the store fails, for the message. heartbeat: of this rank. holder: the last one of ranks.holder.
    """
    own = f"; {places([(ranks.rank, heartbeat)])}"
    if ranks.holder is not None:
        host = on_hosts([holder] if holder else [])
        problem = f"rank {ranks.holder} of {ranks.world_size}{host} does not respond"
        return Verdict(
            problem=problem, found=f"its process holds the store of all ranks, which {why}{own}", by=ranks.rank
        )
    problem = f"rank {ranks.rank} of {ranks.world_size} cannot reach the store that all ranks share"
    return Verdict(
        problem=problem, found=f"the launcher on the first machine holds it, and it {why}{own}", by=ranks.rank
    )


def not_started(heartbeats: Mapping[int, Heartbeat], silent: Mapping[int, int], *, ticks: int) -> list[int]:
    """The ranks without a first heartbeat in this many ticks. A pure function."""
    return [rank for rank, heartbeat in heartbeats.items() if not heartbeat.number and silent[rank] >= ticks]


def held_up_by(heartbeats: Mapping[int, Heartbeat]) -> list[int]:
    """The ranks that still work while all others have waited for a long time. A pure function."""
    here = [rank for rank, heartbeat in heartbeats.items() if not heartbeat.left]
    busy = [rank for rank in here if not heartbeats[rank].waits]
    waiting = [rank for rank in here if heartbeats[rank].waits]
    return busy if waiting and all(heartbeats[rank].still >= STILL_TICKS for rank in waiting) else []


def places(heartbeats: Sequence[tuple[int, Heartbeat]], *, last: bool = False) -> str:
    """Positions of ranks, grouped; of many positions the rarest, which show the difference.

    Groups of ranks are named unless that makes too many positions, and hosts if there are several.
    """
    ranks, named, of = dict[str, list[int]](), dict[str, list[int]](), dict(heartbeats)
    several = len({heartbeat.host for heartbeat in of.values()}) > 1
    for rank, heartbeat in heartbeats:
        ranks.setdefault(heartbeat.where, []).append(rank)
        peers = f" ({heartbeat.peers})" if heartbeat.peers else ""
        named.setdefault(heartbeat.where + peers, []).append(rank)
    rarest = sorted((named if len(named) <= SHOWN else ranks).items(), key=lambda ranks_there: len(ranks_there[1]))
    texts = []
    for where, ranks_there in rarest[:SHOWN]:
        hosts = on_hosts([of[rank] for rank in ranks_there]) if several else ""
        texts.append(f"{numbers(ranks_there)}{hosts} {'was last ' if last else ''}{where}")
    return "; ".join(
        [*texts, *([f"and at {counted(len(rarest) - SHOWN, 'more place')}"] if len(rarest) > SHOWN else [])]
    )


def stands(frame: FrameType | None, members: Mapping[Group, Sequence[int]], *, still: int = 1) -> Heartbeat:
    """A heartbeat of where a thread is: whether it waits, and our functions on its stack, innermost first.

    Args:
        members: the ranks of groups.
        still: how often it was found there before; 0: no group is named, because that reads the variables of frames.
            Until Python 3.13 a copy of them stays in the frame, and keeps the tensors that a moving thread deletes.
    """
    names, waits, peers = list[str](), False, ""
    while frame is not None and len(names) < _FRAMES:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("trainer.", "mdata.")):
            waits |= not names and module in _WAITING
            group = _group_in(frame.f_locals) if still else None
            names.append(frame.f_code.co_qualname + (f" over {group.name}" if group else ""))
            if group is not None and group in members and not peers:
                peers = f"{group.name}: {numbers(members[group])}"
        frame = frame.f_back
    return Heartbeat(waits=waits, where=f"in {' < '.join(names)}", peers=peers if waits else "")


def numbers(ranks: Sequence[int]) -> str:
    """Ranks for a message: "rank 3", "ranks 0, 1", "ranks 0 to 7"."""
    if len(ranks) > SHOWN and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def on_hosts(heartbeats: Sequence[Heartbeat]) -> str:
    """The hosts of ranks, to follow their numbers: " on gpu017"; "" if unknown, or too many."""
    hosts = list(dict.fromkeys(heartbeat.host for heartbeat in heartbeats))
    return f" on {', '.join(hosts)}" if all(hosts) and len(hosts) <= SHOWN else ""


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
