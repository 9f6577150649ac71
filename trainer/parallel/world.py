"""Joins the other ranks: this process's device, its group on each axis.

The only file that creates or destroys process groups (`collectives.py` is the only one that uses them). A process that
no launcher started is alone: a world of one rank creates no group and runs the same code.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from mdata import MdataError, ResourceError, StoppedError, UsageError
from mdata.util import atomic_io
from trainer.errors import LostRankError
from trainer.parallel.collectives import Channel, Group, all_reduce_, start_receive_, start_send
from trainer.parallel.mesh import AXES, IN_PASSES, Coordinates, Mesh
from trainer.parallel.placement import Placement, find_placement, launcher_holds_store

T = TypeVar("T")
# For the other ranks to join, and for a single collective. The waits below end earlier: their messages name the ranks.
JOIN_TIMEOUT = timedelta(minutes=10)
CONNECT_TIMEOUT = timedelta(seconds=20)  # to a store that listens
JOIN_S = 300.0  # run.join_minutes: as long as torch waits for a store; a node that loads a container takes minutes
LEAVE_S = 20.0  # for communicators to close
TOLD_S = 40.0  # between notes that name the missing rank
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "was aborted")
_ENDED = "mtrain/ended"  # a launcher's key for all attempts of its job


class CommunicatorUser(Protocol):
    """An object that keeps a communicator in use while no collective runs, such as a CUDA graph."""

    def reset(self) -> None:
        """Stop using it for good."""


_USERS: WeakSet[CommunicatorUser] = WeakSet()


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """All ranks, from the view of this one.

    Args:
        mesh: their layout; coordinates: of this rank in it.
        device: where its tensors live.
        groups: axis -> the ranks along it, for each axis of the mesh that this rank is on.
        links: (sending pipeline rank, receiving one) -> the group of those two, for the links of this rank.
        channel: chooses between the communicators of groups that have two.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    mesh: Mesh
    coordinates: Coordinates
    device: torch.device
    groups: Mapping[str, Group]
    links: Mapping[tuple[int, int], Group] = field(default_factory=dict)
    channel: Channel = field(default_factory=Channel)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that logs and writes the files of the run."""
        return self.rank == 0


def open_store(place: Placement, *, join_s: float = JOIN_S, tell: Callable[[str], None] = lambda text: None) -> Store:
    """Connect to the key-value store of all ranks, which the launcher's or rank 0's process holds.

    Waits only for rank 0: for its process if that holds the store, otherwise for the name of this attempt.

    Raises:
        ResourceError: the store cannot be reached, or rank 0 did not start.
    """
    method, env = place.init_method, os.environ
    with _joining(place):
        if not method.startswith(("env://", "tcp://")):
            return next(rendezvous(method, place.rank, place.world_size, timeout=JOIN_TIMEOUT))[0]
        if method == "env://":
            method = f"tcp://{_given(env, 'MASTER_ADDR')}:{_given(env, 'MASTER_PORT')}"
        host, _, port = method.removeprefix("tcp://").rpartition(":")
        waiting = _WaitingForFirst(place, join_s, tell)
        if place.rank == 0:
            # torch's own rendezvous would have rank 0 wait for all others here.
            store: Store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                int(port),
                is_master=not launcher_holds_store(env),
                timeout=JOIN_TIMEOUT,
                wait_for_workers=False,
            )
        else:
            store = waiting.until(lambda: _connection(host, int(port)), f"nothing answers at {host}:{port}")
        return _of_this_attempt(store, place, waiting) if launcher_holds_store(env) else store


class _WaitingForFirst:
    """Waits for rank 0, without which a rank cannot join: prints notes, then raises an error; both name rank 0."""

    def __init__(self, place: Placement, join_s: float, tell: Callable[[str], None]) -> None:
        self._place, self._join_s, self._tell = place, join_s, tell
        self._began_s, self._told = time.monotonic(), 0

    def until(self, attempt: Callable[[], T | None], problem: str) -> T:
        """Repeat an attempt until it returns something; `problem` is the cause that notes and error state.

        Raises:
            ResourceError: it did not succeed within the time.
        """
        pause_s = 0.01
        while not (result := attempt()):
            waited_s = time.monotonic() - self._began_s
            if waited_s >= self._join_s:
                raise ResourceError(
                    f"rank 0 of {self._place.world_size} did not start",
                    found=f"{problem}, for {waited_s:.0f} s",
                    expected="the process of rank 0, which the other ranks join",
                    fix="check rank 0's machine, its output and the network; a larger run.join_minutes waits longer",
                )
            if waited_s >= (self._told + 1) * TOLD_S:
                self._told += 1
                # Two lines are enough: rank 1 may be on the machine that is missing, with rank 0.
                if self._place.rank in (1, self._place.world_size - 1):
                    self._tell(f"the other ranks wait for rank 0: {problem}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
        return result


def _connection(host: str, port: int) -> Store | None:
    """The store at an address; None if nothing answers, or the name does not resolve yet.

    The process that holds it may end between our attempt and torch's, which would retry for as long as a collective may
    take.
    """
    try:
        socket.create_connection((host, port), timeout=5).close()
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=CONNECT_TIMEOUT, wait_for_workers=False
        )
    except (OSError, dist.DistError):
        return None
    store.set_timeout(JOIN_TIMEOUT)
    return store


def _of_this_attempt(store: Store, place: Placement, waiting: _WaitingForFirst) -> Store:
    """The part of a launcher's store that is used by the ranks of this attempt only.

    A launcher that starts ranks again (torchrun --max-restarts) keeps its store, with the keys of ranks that are gone,
    and the launchers of several machines count attempts differently. So rank 0 names the attempt: each other rank asks
    under a new random name, so the answer cannot be an old one.
    """
    if place.rank == 0:
        name = f"attempt-{uuid.uuid4().hex}"
        threading.Thread(target=_answer, args=(another_connection(store), name, place), daemon=True).start()
    else:
        own = uuid.uuid4().hex
        store.set(f"mtrain/asks/{place.rank}", own)
        waiting.until(lambda: store.check([f"mtrain/attempt-of/{own}"]), "it has not named the attempt")
        name = store.get(f"mtrain/attempt-of/{own}").decode()
        store.set(f"{name}/mtrain/here/{place.rank}", "")
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _answer(store: Store, name: str, place: Placement) -> None:
    """Tell every other rank the name of the attempt, until all have read it; in a thread of rank 0."""
    waited_for, answered = {*range(1, place.world_size)}, dict[int, bytes]()
    with suppress(RuntimeError):  # the store may be gone: this process ends, too, or the watchdog says so
        while waited_for:
            for rank in sorted(waited_for):
                if store.check([f"{name}/mtrain/here/{rank}"]):
                    waited_for.remove(rank)
                elif store.check([f"mtrain/asks/{rank}"]):
                    asks = store.get(f"mtrain/asks/{rank}")
                    if answered.get(rank) != asks:  # the first may be that of a rank that is gone
                        answered[rank] = asks
                        store.set(f"mtrain/attempt-of/{asks.decode()}", name)
            time.sleep(0.05)


def end_for_good(env: Mapping[str, str], error: MdataError | StoppedError) -> None:
    """Tell the launcher's next attempt why the job must not train on; called before this rank ends.

    torchrun starts ranks again after any exit code but 0, including that of a run that ended on purpose (75). Its store
    lives as long as its job, whatever the number of restarts and of machines. Where it keeps its store to itself, so
    that machines may join (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), the reason goes into its temporary folder on each.
    """
    reason = json.dumps([error.exit_code, str(error)])
    if launcher_holds_store(env):
        with suppress(RuntimeError):  # the launcher has ended, and starts nothing again
            _launchers_store(env).set(_ENDED, reason)
    elif path := _launchers_file(env):
        with suppress(OSError):  # another rank of this machine puts its own there, or the disk is full
            atomic_io.atomic_write(path, reason.encode())


def check_not_ended(env: Mapping[str, str]) -> None:
    """Raise the error that an earlier attempt of the launcher's job passed to `end_for_good`, if one did.

    Raises:
        StoppedError, MdataError: why that attempt ended; its exit code.
    """
    if launcher_holds_store(env):
        with _joining(find_placement(env) or Placement()):
            store = _launchers_store(env)
            reason = store.get(_ENDED) if store.check([_ENDED]) else b""
    else:
        path = _launchers_file(env)
        reason = path.read_bytes() if path and path.exists() else b""
    if not reason:
        return
    code, text = json.loads(reason)
    kinds = (StoppedError, UsageError, ResourceError)
    kind = next((kind for kind in kinds if kind.exit_code == code), ResourceError)
    raise kind(f"not started again in this job of torchrun: {text}")


def _launchers_file(env: Mapping[str, str]) -> Path | None:
    """A file in torchrun's folder for all attempts; None: not started by torchrun."""
    path = env.get("TORCHELASTIC_ERROR_FILE")  # FOLDER/attempt_0/RANK/error.json
    return Path(path).parents[2] / "mtrain-ended.json" if path else None


def _launchers_store(env: Mapping[str, str]) -> Store:
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        _given(env, "MASTER_ADDR"), int(_given(env, "MASTER_PORT")), is_master=False, timeout=JOIN_TIMEOUT
    )
    return store


def another_connection(store: Store) -> Store:
    """The same store over a new connection: calls over one connection block each other."""
    return store.clone() if hasattr(store, "clone") else store


def join_world(
    mesh: Mesh,
    *,
    placement: Placement | None = None,
    device_type: str | None = None,
    store: Store | None = None,
    join_s: float = JOIN_S,
    overlap_passes: bool = False,
) -> World:
    """Join the other ranks and create this rank's groups on each axis.

    Args:
        mesh: the layout; the same on all ranks.
        placement: of this process; default: from the environment, otherwise alone.
        device_type: "cuda" or "cpu"; default: cuda if available. Decides between nccl and gloo.
        store: see `open_store`, which is called otherwise.
        join_s: how long to wait for the other ranks at least.
        overlap_passes: create second communicators for the groups that passes of a microbatch use.

    Raises:
        UsageError: the environment is inconsistent, or there are fewer GPUs than ranks.
        ResourceError: the other ranks did not join in time.
    """
    place = placement or find_placement(os.environ) or Placement()
    assert mesh.world_size == place.world_size, f"mesh of {mesh.world_size} in a world of {place.world_size}"
    device = _device(place, device_type or ("cuda" if torch.cuda.is_available() else "cpu"))
    # cuBLAS may otherwise round partial sums; for long sums this is visible in the loss.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if device.type == "cpu" and place.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world_size))
    if place.world_size > 1:
        with _joining(place):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store or open_store(place, join_s=join_s),
                rank=place.rank,
                world_size=place.world_size,
                timeout=max(JOIN_TIMEOUT, timedelta(seconds=2 * join_s)),
                device_id=device if device.type == "cuda" else None,
            )
    links = _links(mesh, place.rank)  # before the groups: only some ranks have a group on "ends"
    channel = Channel()
    groups = _groups(mesh, place.rank, channel if overlap_passes else None)
    # No rank continues (and perhaps leaves at once) before all have joined: gloo mistakes a rank that left for one that
    # crashed.
    all_reduce_(torch.zeros(1, device=device), groups["world"])
    _open_links(links, mesh.index("pp", place.rank), device=device)
    return World(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        mesh=mesh,
        coordinates=mesh.coordinates(place.rank),
        device=device,
        groups=groups,
        links=links,
        channel=channel,
    )


@contextmanager
def lost_ranks_named(world: World) -> Iterator[None]:
    """Turn a connection that broke in the block into an error that says so.

    Raises:
        LostRankError: another rank has ended.
    """
    try:
        yield
    except RuntimeError as error:  # gloo raises a plain one, nccl a DistError
        if world.world_size == 1 or not any(words in str(error) for words in LOST):
            raise
        raise LostRankError(
            f"rank {world.rank} of {world.world_size} lost its connection to another rank",
            found=str(error).splitlines()[0][:200].encode("ascii", "ignore").decode().strip(),
            fix="check the output of the other ranks: one of them ended, and printed why if it was not killed",
        ) from error


def reset_before_leaving(user: CommunicatorUser) -> None:
    """Let `leave_world` reset `user` first, if it still exists then.

    NCCL does not close a communicator while a CUDA graph exists that recorded one of its collectives: it waits without
    a limit, in commDestroySync.
    """
    _USERS.add(user)


def leave_world() -> bool:
    """Destroy every process group of this process; does nothing if there is none.

    Returns:
        Whether they are gone. NCCL can wait without a limit, for a graph of a user's loss for example; a caller whose
        work is done then ends its process.
    """
    for user in list(_USERS):
        user.reset()
    if dist.is_initialized():
        if dist.get_backend() == "gloo":
            dist.destroy_process_group()
        elif not ended_within(LEAVE_S, dist.destroy_process_group):
            return False
        # Groups that reference cycles keep alive have threads that need Python; at the end of the process, when it is
        # gone, they would abort it ("terminate called without an active exception").
        atexit.unregister(gc.collect)
        atexit.register(gc.collect)
    return True


def ended_within(seconds: float, call: Callable[[], object]) -> bool:
    """Run a call in a new thread; whether it returned in time. An exception of the call is raised here."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    if not wait([future], timeout=seconds).done:
        return False
    future.result()
    return True


def leave_at_the_end(tell: Callable[[str], None]) -> None:
    """`leave_world` for a process whose work is done; ends the process, successfully, if communicators stay open."""
    if leave_world():
        return
    tell(f"communicators did not close within {LEAVE_S:.0f} s; all work is done, so the process ends without them")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _given(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        raise ValueError(f"the environment variable {name} is not set")
    return env[name]


def _device(place: Placement, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    index = 0 if place.own_device and visible == 1 else place.local_rank
    if index >= visible:
        raise UsageError(
            f"local rank {place.local_rank} has no GPU of its own",
            found=f"{visible} visible GPUs",
            fix=f"--nproc {visible}, or CUDA_VISIBLE_DEVICES= to train on the CPU",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def _joining(place: Placement) -> Iterator[None]:
    try:
        yield
    except (dist.DistError, ValueError) as error:
        raise ResourceError(
            f"rank {place.rank} of {place.world_size} cannot join the others",
            found=str(error).splitlines()[0],
            fix="check that every rank was started and that MASTER_ADDR and MASTER_PORT can be reached",
        ) from error


def _groups(mesh: Mesh, rank: int, channel: Channel | None) -> dict[str, Group]:
    """The groups of each axis; with a channel, those in passes of a microbatch have second communicators."""
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    groups = {}
    for axis in AXES:
        if ranks := mesh.ranks_of(axis, rank):
            if ranks not in made:
                made[ranks] = _process_group(ranks, mesh)
            groups[axis] = Group(axis, len(ranks), ranks.index(rank), made[ranks])
    for axis in IN_PASSES if channel else ():
        if axis in groups and groups[axis].size > 1:
            second = dist.new_group(list(mesh.ranks_of(axis, rank)), use_local_synchronization=True)
            groups[axis] = dataclasses.replace(groups[axis], second=second, channel=channel)
    return groups


def _process_group(ranks: tuple[int, ...], mesh: Mesh) -> dist.ProcessGroup | None:
    """The group of these ranks, created by its members only, each in the order of AXES."""
    if len(ranks) == 1:
        return None
    if ranks == tuple(range(mesh.world_size)):
        return dist.group.WORLD
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _links(mesh: Mesh, rank: int) -> dict[tuple[int, int], Group]:
    """A group for each directed link of a rank, in the order of creation.

    torch names a group by how many groups its members have created so far: a rank without a link in a round creates
    groups of only itself, so that all ranks keep the same count.
    """
    links = {}
    line, own = mesh.ranks_of("pp", rank), mesh.index("pp", rank)
    for pairs in mesh.link_rounds():
        pair = next((pair for pair in pairs if own in pair), None)
        for way in (pair, pair and pair[::-1]):
            members = [rank] if way is None else [line[way[0]], line[way[1]]]
            group = dist.new_group(members, use_local_synchronization=True)
            if way is not None:
                links[way] = Group("pp", 2, sorted(way).index(own), group)
    return links


def _open_links(links: Mapping[tuple[int, int], Group], own: int, *, device: torch.device) -> None:
    """Send a first message on each link, so that all connections exist before the first step."""
    for (sender, _), link in links.items():
        first = torch.zeros(1, device=device)
        (start_send if sender == own else start_receive_)(first, link).wait()
