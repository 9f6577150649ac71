"""The mesh: which rank stands where, as arithmetic.

Ranks are laid out with tp fastest, then dp, then pp: rank = (pp_rank * dp + dp_rank) * tp + tp_rank. Ranks
that talk most (tp) are therefore neighbours, which on one machine are joined by the fastest links. A group
is the set of ranks that differ in one coordinate only. Nothing here knows torch; `world.py` turns groups
into process groups.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from mdata import UsageError

AXES = ("tp", "dp", "pp")


class Coordinates(NamedTuple):
    """A rank's place on each axis of the mesh."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of `world_size` ranks; dp is what tp and pp leave.

    Raises:
        UsageError: tp x pp does not divide the number of ranks.
    """

    world_size: int
    tp: int = 1
    _: KW_ONLY
    pp: int = 1

    def __post_init__(self) -> None:
        if min(self.world_size, self.tp, self.pp) < 1 or self.world_size % (self.tp * self.pp):
            raise UsageError(
                f"{self.world_size} ranks cannot be divided into tp={self.tp} x pp={self.pp}",
                expected="a number of ranks that is a multiple of tp x pp, both at least 1",
                fix=f"--nproc {max(1, self.tp * self.pp)}, or a smaller mesh.tp",
            )

    @property
    def dp(self) -> int:
        """Data-parallel ranks: copies of the model."""
        return self.world_size // (self.tp * self.pp)

    def size(self, axis: str) -> int:
        """Ranks along an axis ("tp", "dp" or "pp")."""
        return {"tp": self.tp, "dp": self.dp, "pp": self.pp}[axis]

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands; the inverse of `rank_of`."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a world of {self.world_size}"
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Coordinates(tp_rank, dp_rank, pp_rank)

    def rank_of(self, place: Coordinates) -> int:
        """The rank at a place."""
        return (place.pp * self.dp + place.dp) * self.tp + place.tp

    def ranks_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group along an axis, itself included, in the order of that axis."""
        place = self.coordinates(rank)
        return tuple(self.rank_of(place._replace(**{axis: i})) for i in range(self.size(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Every group along an axis, by its first rank: the same order on all ranks, as torch wants it."""
        return tuple(sorted({self.ranks_of(axis, rank) for rank in range(self.world_size)}))
