"""The mesh: its groups partition the ranks, tp is fastest, impossible grids are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from trainer.parallel.mesh import AXES, Coordinates, Mesh


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    tp, pp, dp = (draw(st.integers(1, 5)) for _ in range(3))
    return Mesh(tp * pp * dp, tp, pp=pp)


@given(meshes())
def test_groups_partition_the_world(mesh: Mesh) -> None:
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert all(len(group) == mesh.size(axis) for group in groups)
        assert list(groups) == sorted(groups)


@given(meshes())
def test_coordinates_and_ranks_are_inverses(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert len(set(places)) == mesh.world_size
    assert [mesh.rank_of(place) for place in places] == list(range(mesh.world_size))


@given(meshes(), st.data())
def test_a_group_differs_in_its_axis_only(mesh: Mesh, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    axis = data.draw(st.sampled_from(AXES))
    ranks = mesh.ranks_of(axis, rank)
    place = mesh.coordinates(rank)
    assert ranks[getattr(place, axis)] == rank
    assert [mesh.coordinates(other)._replace(**{axis: 0}) for other in ranks] == [place._replace(**{axis: 0})] * len(
        ranks
    )


def test_a_small_grid_by_hand() -> None:
    mesh = Mesh(8, 2, pp=2)
    assert mesh.dp == 2
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.coordinates(6) == Coordinates(tp=0, dp=1, pp=1)


@pytest.mark.parametrize(("world", "tp", "pp"), [(3, 2, 1), (4, 2, 4), (0, 1, 1), (4, 0, 1)])
def test_impossible_grids_are_refused(world: int, tp: int, pp: int) -> None:
    with pytest.raises(UsageError, match=rf"{world} ranks cannot be divided into tp={tp} x pp={pp}"):
        Mesh(world, tp, pp=pp)
