"""The mesh: its groups partition the ranks, tp is fastest, impossible grids are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from trainer.parallel.mesh import AXES, Coordinates, Mesh


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    tp, cp, pp, edp, ep = (draw(st.integers(1, 4)) for _ in range(5))
    data = edp * ep
    while data % cp:
        cp -= 1
    divisors = [size for size in range(1, tp + 1) if tp % size == 0]
    kv, etp = draw(st.sampled_from(divisors)), draw(st.sampled_from([0, *divisors]))
    return Mesh(tp * pp * data, tp, cp=cp, pp=pp, ep=ep, etp=etp, kv=kv)


def by_hand(mesh: Mesh, axis: str, place: Coordinates) -> object:
    """What all ranks of one group have in common: all coordinates but those of the axis."""
    tp, cp, dp, pp = place
    data, etp = dp * mesh.cp + cp, mesh.etp or mesh.tp
    stage = data * mesh.tp + tp
    common = {
        "tp": (cp, dp, pp),
        "kv": (tp // mesh.kv, cp, dp, pp),
        "cp": (tp, dp, pp),
        "dp": (tp, cp, pp),
        "pp": (tp, cp, dp),
        "data": (tp, pp),
        "etp": (pp, stage // etp),
        "ep": (pp, stage % etp, stage // (etp * mesh.ep)),
        "experts": (pp, stage // (etp * mesh.ep)),
        "edp": (pp, stage % (etp * mesh.ep)),
        "stage": (pp,),
        "ends": (tp, cp, dp),
        "world": (),
    }
    return common[axis]


@given(meshes())
def test_groups_are_the_ranks_that_differ_in_the_axis_only(mesh):
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    for axis in AXES:
        expected: dict[object, list[int]] = {}
        for rank, place in enumerate(places):
            if axis != "ends" or place.pp in (0, mesh.pp - 1):
                expected.setdefault(by_hand(mesh, axis, place), []).append(rank)
        assert sorted(map(tuple, expected.values())) == list(mesh.groups(axis)), axis
        assert all(len(group) == mesh.size(axis) for group in mesh.groups(axis))
        for group in mesh.groups(axis):
            assert [mesh.index(axis, rank) for rank in group] == list(range(len(group)))


@given(meshes())
def test_ranks_are_laid_out_with_tp_fastest(mesh):
    for rank in range(mesh.world_size):
        tp, cp, dp, pp = mesh.coordinates(rank)
        assert rank == ((pp * mesh.dp + dp) * mesh.cp + cp) * mesh.tp + tp


def test_a_small_grid_by_hand():
    mesh = Mesh(8, 2, pp=2)
    assert mesh.dp == 2
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == mesh.groups("ends") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.coordinates(6) == Coordinates(tp=0, cp=0, dp=1, pp=1)


def test_a_grid_with_all_axes_by_hand():
    mesh = Mesh(48, 2, cp=2, pp=3, ep=2)
    assert mesh.dp == 4
    assert mesh.ranks_of("data", 17) == (17, 19, 21, 23, 25, 27, 29, 31)
    assert mesh.ranks_of("ep", 19) == (17, 19) and mesh.ranks_of("edp", 19) == (19, 23, 27, 31)
    assert mesh.ranks_of("etp", 19) == (18, 19) and mesh.ranks_of("experts", 19) == (16, 17, 18, 19)
    assert mesh.ranks_of("ends", 3) == (3, 35) and mesh.ranks_of("ends", 19) == ()


def test_experts_that_tp_ranks_do_not_share():
    mesh = Mesh(8, 2, ep=4, etp=1)
    assert mesh.groups("ep") == mesh.groups("experts") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("etp") == tuple((rank,) for rank in range(8)) and mesh.ranks_of("edp", 5) == (1, 5)


@pytest.mark.parametrize(("world", "tp", "pp"), [(3, 2, 1), (4, 2, 4), (0, 1, 1), (4, 0, 1)])
def test_impossible_grids_are_refused(world, tp, pp):
    with pytest.raises(UsageError, match=rf"{world} ranks cannot be divided into tp={tp} x cp=1 x pp={pp}"):
        Mesh(world, tp, pp=pp)


def test_experts_divide_the_ranks_of_a_stage():
    with pytest.raises(
        UsageError, match=r"the 8 ranks of a stage \(tp x cp x dp\) cannot be divided into etp=2 x ep=3"
    ):
        Mesh(8, 2, ep=3)
    with pytest.raises(UsageError, match="tp=2 cannot be divided into etp=3"):
        Mesh(8, 2, etp=3)
