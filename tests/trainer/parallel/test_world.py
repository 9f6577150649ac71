"""Joining the other ranks, and errors that name who is missing."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mdata import ResourceError, StoppedError, UsageError
from tests.helpers.ranks import RankContext, run_ranks
from trainer.parallel import world as worlds
from trainer.parallel.collectives import Channel, Group, start_receive_, start_send
from trainer.parallel.mesh import Coordinates, Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import (
    another_connection,
    check_not_ended,
    end_for_good,
    ended_within,
    join_world,
    leave_world,
    open_store,
    reset_before_leaving,
)


def test_without_a_launcher_one_rank_is_all():
    world = join_world(Mesh(1), placement=Placement(), device_type="cpu")
    assert (world.rank, world.world_size, world.is_main) == (0, 1, True)
    assert world.coordinates == Coordinates(0, 0, 0, 0)
    assert {axis.size for axis in world.groups.values()} == {1}
    assert not torch.distributed.is_initialized()


def test_products_of_half_precision_are_summed_in_fp32():
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    join_world(Mesh(1), placement=Placement(), device_type="cpu")
    assert matmul.allow_bf16_reduced_precision_reduction is matmul.allow_fp16_reduced_precision_reduction is False


def test_a_mesh_of_another_size_is_our_fault():
    with pytest.raises(AssertionError, match="mesh of 2 in a world of 1"):
        join_world(Mesh(2), placement=Placement(), device_type="cpu")


def test_a_meeting_place_that_cannot_be_had_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Placement(world_size=2, init_method=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ResourceError, match=r"rank 0 of 2 cannot join the others\n  found: .*address"):
            join_world(Mesh(2), placement=place, device_type="cpu")


@pytest.mark.parametrize("launcher", ["torchrun", "others"])
def test_the_store_is_there_before_the_other_ranks_and_new_for_each_attempt(launcher, monkeypatch):
    """Of torchrun it outlives the ranks; otherwise rank 0 holds it, and waits for nobody."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = Placement(world_size=2, local_world_size=2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    if launcher == "torchrun":
        agents = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first = open_store(place)
    first.set("key", "old")
    other = open_store(replace(place, rank=1)) if launcher == "others" else another_connection(first)
    assert other.get("key") == b"old"
    if launcher == "torchrun":
        assert not open_store(place).check(["key"])
        assert not agents.check(["key"])


def test_rank_0_that_does_not_start_is_named(monkeypatch):
    """Under Slurm its process holds the store; torch's own message comes after ten minutes and does not name it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(worlds, "TOLD_S", 1e-6)  # at the first look: a busy machine may have no time for a second one
    place, told = Placement(rank=1, world_size=4, init_method=f"tcp://127.0.0.1:{port}"), list[str]()
    with pytest.raises(ResourceError) as caught:
        open_store(place, join_s=0.5, tell=told.append)
    assert str(caught.value).startswith(
        f"rank 0 of 4 did not start\n  found: nothing answers at 127.0.0.1:{port}, for "
    )
    assert set(told) == {f"the other ranks wait for rank 0: nothing answers at 127.0.0.1:{port}"}


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_rank_0_that_ends_between_two_looks_is_named_also_by_another_machine(rank, monkeypatch):
    """Something listens and is no store any more; rank 1 may be on the machine that is gone, too."""
    monkeypatch.setattr(worlds, "TOLD_S", 0.2)

    def gone(*given: Any, **more: Any) -> None:
        assert more["timeout"] < timedelta(minutes=1)
        raise torch.distributed.DistNetworkError("the client socket has failed to connect")

    monkeypatch.setattr(socket, "create_connection", lambda *given, **more: socket.socket())
    monkeypatch.setattr(torch.distributed, "TCPStore", gone)
    place, told = Placement(rank=rank, world_size=8, init_method="tcp://127.0.0.1:9"), list[str]()
    with pytest.raises(
        ResourceError, match=r"rank 0 of 8 did not start\n  found: nothing answers at 127\.0\.0\.1:9, for"
    ):
        open_store(place, join_s=0.5, tell=told.append)
    assert bool(told) == (rank != 2)


def test_a_job_of_a_launcher_that_ended_on_purpose_does_not_start_again(monkeypatch):
    """Whatever the number of its restarts; another job, and ranks without such a launcher, do."""
    for job in ("first", "second"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        agents = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
        end_for_good(env, StoppedError("not a launcher's"))
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        check_not_ended(env)
        if job == "first":
            end_for_good(env, StoppedError("stopped at its time"))
            with pytest.raises(StoppedError, match="not started again in this job of torchrun: stopped at its time"):
                check_not_ended(env | {"TORCHELASTIC_RESTART_COUNT": "3"})
            end_for_good(env, UsageError("wrong"))
            with pytest.raises(UsageError, match="wrong"):
                check_not_ended(env)
        del agents


def test_a_launcher_that_keeps_its_store_to_itself_does_not_start_such_a_job_again_either(tmp_path):
    """Its temporary folder lives as long as it; another launcher has another."""
    errors = [str(tmp_path / launcher / "attempt_0/1/error.json") for launcher in ("one", "other")]
    for path in errors:
        Path(path).parent.mkdir(parents=True)
    one, other = ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_ERROR_FILE": path} for path in errors)
    check_not_ended(one)
    end_for_good(one, StoppedError("stopped at its time"))
    with pytest.raises(StoppedError, match="not started again in this job of torchrun: stopped at its time"):
        check_not_ended(one | {"TORCHELASTIC_ERROR_FILE": errors[0].replace("attempt_0", "attempt_1")})
    check_not_ended(other)
    end_for_good({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "gone/a/0/error.json")}, StoppedError("no folder"))


@pytest.mark.parametrize("rank_0_first", [True, False])
def test_a_launcher_that_starts_ranks_again_has_them_join_anew(rank_0_first, monkeypatch):
    """Its store keeps the keys of ranks that are gone, also of those that asked and never came."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for name, value in (("ADDR", "127.0.0.1"), ("PORT", str(port))):
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agents.set("mtrain/asks/1", "somebody who is gone")
    for count in (0, 0, 2):  # the launchers of two machines count differently
        stores = {}
        with ThreadPoolExecutor() as pool:
            for rank in (0, 1) if rank_0_first else (1, 0):
                monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count * rank))
                place = Placement(rank=rank, world_size=2, local_world_size=1)
                stores[rank] = pool.submit(open_store, place)
                time.sleep(0.1)
        first, other = stores[0].result(), stores[1].result()
        assert not other.check(["key"])
        first.set("key", "new")
        assert other.get("key") == b"new"
    assert not agents.check(["key"])


def test_a_variable_that_names_no_store_is_told(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ResourceError, match=r"cannot join the others\n  found: the environment variable MASTER_ADDR"):
        open_store(Placement(world_size=2))


def places_body(context: RankContext) -> tuple[int, tuple[int, int, int], dict[str, tuple[int, int]]]:
    world = context.join(Mesh(4, 2))
    return world.rank, tuple(world.coordinates), {n: (a.size, a.rank) for n, a in world.groups.items()}


def late_body(context: RankContext, folder: Path) -> bool:
    """Rank 0 comes late; whether it had come when this rank was done with joining."""
    there = folder / "there"
    make_axes = worlds._groups

    def late(mesh: Mesh, rank: int, channel: Channel | None) -> dict[str, Group]:
        time.sleep(0.5)
        there.touch()
        return make_axes(mesh, rank, channel)

    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 0:
            patch.setattr(worlds, "_groups", late)
        context.join()
    return there.exists()


def test_nobody_goes_on_before_all_have_come(tmp_path):
    assert run_ranks(late_body, 2, tmp_path) == [True, True]


def test_each_rank_knows_its_axes():
    for rank, (tp, cp, dp, pp), axes in run_ranks(places_body, 4):
        assert (tp, cp, dp, pp) == (rank % 2, 0, rank // 2, 0)
        shared = dict.fromkeys(("dp", "data", "edp"), (2, dp))
        alone = dict.fromkeys(("kv", "cp", "pp", "ep", "ends"), (1, 0))
        of_tp = dict.fromkeys(("tp", "etp", "experts"), (2, tp))
        assert axes == {**of_tp, **shared, **alone, "stage": (4, rank), "world": (4, rank)}


def links_body(context: RankContext, ring: bool) -> dict[tuple[int, int], tuple[float, float]]:
    """What this rank was sent on each link: two numbers, in their order."""
    world = context.join(Mesh(context.world, pp=context.world, ring=ring))
    sent, found = [], {}
    for (sender, receiver), link in world.links.items():
        if sender == world.rank:
            sent += [start_send(torch.tensor([10.0 * sender + receiver + part]), link) for part in (0.0, 0.5)]
    for (sender, receiver), link in world.links.items():
        if receiver == world.rank:
            coming = [start_receive_(torch.zeros(1), link) for _ in range(2)]
            found[sender, receiver] = tuple(one.wait().item() for one in coming)
    for one in sent:
        one.wait()
    return found


@pytest.mark.parametrize(("ranks", "ring"), [(2, True), (3, True), (4, False), (5, True)])
def test_each_directed_link_has_its_own_messages(ranks, ring):
    """An odd ring takes three rounds of making groups, and torch names them by how many a rank has made."""
    found = {link: got for each in run_ranks(links_body, ranks, ring) for link, got in each.items()}
    line = {(i, i + 1) for i in range(ranks - 1)} | ({(ranks - 1, 0)} if ring and ranks > 2 else set())
    assert set(found) == line | {(b, a) for a, b in line}
    for (sender, receiver), got in found.items():
        assert got == (10.0 * sender + receiver, 10.0 * sender + receiver + 0.5)


def test_a_call_that_does_not_return_is_left_alone():
    held = threading.Event()
    assert not ended_within(0.01, partial(held.wait, 60))
    held.set()
    assert ended_within(60, lambda: None)
    with pytest.raises(ZeroDivisionError):
        ended_within(60, lambda: print(1 / 0))


class _Graph:
    """Notes whether the process groups were there when it was reset."""

    def __init__(self) -> None:
        self.groups_were_there: list[bool] = []
        reset_before_leaving(self)

    def reset(self) -> None:
        self.groups_were_there.append(torch.distributed.is_initialized())


def _left(context: RankContext) -> tuple[list[bool], bool]:
    context.join()
    graph = _Graph()
    _Graph()  # gone at once
    leave_world()
    return graph.groups_were_there, torch.distributed.is_initialized()


def test_graphs_are_destroyed_before_the_communicators_that_they_recorded():
    """NCCL asks for this order."""
    assert run_ranks(_left, 2) == [([True], False)] * 2
