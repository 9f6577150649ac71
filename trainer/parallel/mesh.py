"""The mesh: the coordinates of each rank, as arithmetic.

Ranks are laid out with tp fastest, then cp, dp and pp: rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank.
Ranks that communicate most (tp) are therefore neighbours, connected by the fastest links of a machine. An axis is a
tuple of factors (size, stride) of the rank's number; besides these four there are derived axes:

    kv     the fastest part of tp: ranks with copies of one key-value head, where there are fewer heads than tp ranks
    data   cp x dp: gradients are summed over it, and the optimizer's state is divided over it
    stage  all ranks of one pipeline stage: tp x cp x dp
    etp    the fastest part of stage: ranks that share each expert, by default those of tp
    ep     the next part of it: ranks that have different experts; edp is the rest
    experts  etp x ep: ranks that have all experts together
    ends   the first and the last pipeline stage, which share a tied embedding; other stages are not on it
    world  all ranks

Imports no torch; `world.py` turns groups into process groups.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from mdata import UsageError
from trainer.config.sections import RunConfig

AXES = ("tp", "kv", "cp", "dp", "pp", "data", "etp", "ep", "experts", "edp", "stage", "ends", "world")
IN_PASSES = ("tp", "cp", "ep", "experts")  # along which a pass of a microbatch through a stage communicates


class Coordinates(NamedTuple):
    """A rank's position on each base axis of the mesh."""

    tp: int
    cp: int
    dp: int
    pp: int


class AxisFactor(NamedTuple):
    """`size` ranks whose numbers differ by multiples of `stride`."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of `world_size` ranks; dp = world_size / (tp cp pp).

    Args:
        kv: ranks with copies of one key-value head. ring: the last pipeline rank has a link to the first.
        etp: ranks that share each expert; 0: those of tp.

    Raises:
        UsageError: tp x cp x pp does not divide the number of ranks, or etp x ep those of a stage.
    """

    world_size: int
    tp: int = 1
    _: KW_ONLY
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 0
    kv: int = 1
    ring: bool = False

    def __post_init__(self) -> None:
        model = self.tp * self.cp * self.pp
        if min(self.world_size, self.tp, self.cp, self.pp, self.ep) < 1 or self.world_size % model:
            sizes = " x ".join(f"{axis}={getattr(self, axis)}" for axis in ("tp", "cp", "pp"))
            raise UsageError(
                f"{self.world_size} ranks cannot be divided into {sizes}",
                expected="a number of ranks that is a multiple of tp x cp x pp, all at least 1",
                fix=f"{max(1, model)} ranks, or a smaller mesh.tp or mesh.pp",
            )
        if self.tp % self.kv:
            raise UsageError(f"tp={self.tp} cannot be divided into kv={self.kv}", expected="a divisor of tp")
        if self.tp % self.expert_tp:
            raise UsageError(f"tp={self.tp} cannot be divided into etp={self.etp}", expected="a divisor of tp")
        if self.size("stage") % (self.expert_tp * self.ep):
            raise UsageError(
                f"the {self.size('stage')} ranks of a stage (tp x cp x dp) cannot be divided into etp={self.expert_tp} "
                f"x ep={self.ep}",
                expected="a product that divides them",
            )

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert."""
        return self.etp or self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks that read different samples."""
        return self.world_size // (self.tp * self.cp * self.pp)

    def factors(self, axis: str) -> tuple[AxisFactor, ...]:
        """The factors of an axis, the fastest first."""
        cp, dp = AxisFactor(self.cp, self.tp), AxisFactor(self.dp, self.tp * self.cp)
        stage = self.tp * self.cp * self.dp  # ranks of one pipeline stage
        experts = self.expert_tp * self.ep
        of_axis = {
            "tp": (AxisFactor(self.tp, 1),),
            "kv": (AxisFactor(self.kv, 1),),
            "cp": (cp,),
            "dp": (dp,),
            "pp": (AxisFactor(self.pp, stage),),
            "data": (cp, dp),
            "etp": (AxisFactor(self.expert_tp, 1),),
            "ep": (AxisFactor(self.ep, self.expert_tp),),
            "experts": (AxisFactor(experts, 1),),
            "edp": (AxisFactor(stage // experts, experts),),
            "stage": (AxisFactor(stage, 1),),
            "ends": (AxisFactor(min(self.pp, 2), stage * max(1, self.pp - 1)),),
            "world": (AxisFactor(self.world_size, 1),),
        }
        return of_axis[axis]

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        size = 1
        for factor in self.factors(axis):
            size *= factor.size
        return size

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a world of {self.world_size}"
        return Coordinates(*(self.index(axis, rank) for axis in Coordinates._fields))

    def has(self, axis: str, rank: int) -> bool:
        """Whether a rank is on an axis: always, except for "ends"."""
        return axis != "ends" or self.index("pp", rank) in (0, self.pp - 1)

    def index(self, axis: str, rank: int) -> int:
        """A rank's position on an axis that it is on."""
        index, below = 0, 1
        for size, stride in self.factors(axis):
            index += rank // stride % size * below
            below *= size
        return index

    def ranks_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group along an axis, with itself, in the order of the axis; empty if not on it."""
        if not self.has(axis, rank):
            return ()
        ranks = [rank]
        for size, stride in reversed(self.factors(axis)):
            base = rank // stride % size * stride
            ranks = [other - base + i * stride for other in ranks for i in range(size)]
        return tuple(ranks)

    def link_rounds(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Neighbours on the pipeline, (rank, next rank), in rounds in which each rank has at most one of them.

        Each pair has two directed links. With two ranks, both neighbours of a rank are the same rank.
        """
        pairs = [(rank, rank + 1) for rank in range(self.pp - 1)]
        rounds = [tuple(pair for pair in pairs if pair[0] % 2 == color) for color in (0, 1)]
        if self.ring and self.pp > 2:
            rounds.append(((self.pp - 1, 0),))
        return tuple(each for each in rounds if each)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Every group along an axis, by its first rank."""
        return tuple(sorted({ranks for rank in range(self.world_size) if (ranks := self.ranks_of(axis, rank))}))


def mesh_of(config: RunConfig, world_size: int) -> Mesh:
    """The mesh of a configuration."""
    mesh, kv_heads = config.mesh, config.model.num_kv_heads or config.model.num_heads
    kv = mesh.tp // kv_heads if kv_heads < mesh.tp and mesh.tp % kv_heads == 0 else 1
    ring = mesh.schedule == "interleaved"
    return Mesh(world_size, mesh.tp, cp=mesh.cp, pp=mesh.pp, ep=mesh.ep, etp=mesh.etp or 0, kv=kv, ring=ring)
