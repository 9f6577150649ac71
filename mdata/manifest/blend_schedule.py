"""What a blend manifest asks for, as `mdata.mixing.schedule` knows it: exact fractions, groups divided. Pure.

A blend without phases is one phase without a length, with the shares of its components. Shares stay text in the
manifest; here they become numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from msgspec import UNSET, UnsetType

from mdata.errors import UsageError
from mdata.manifest.types import BlendManifest, GroupShare, Phase, Unit
from mdata.mixing.schedule import WEIGHT, Ask, AskedPhase, Schedule, divide_groups, exact


def schedules_of(blend: BlendManifest) -> tuple[Schedule, ...]:
    """All schedules of a blend, the earlier ones first.

    Raises:
        UsageError: groups that cannot be divided, or a phase that does not fit the components.
    """
    earlier = [] if isinstance(blend.earlier, UnsetType) else blend.earlier
    left = [Schedule(_asked(blend, part.phases), until=part.until) for part in earlier]
    return (*left, Schedule(_asked(blend, phases_of(blend))))


def phases_of(blend: BlendManifest) -> list[Phase]:
    """The phases in force; where there are none, the one that the components' shares make."""
    if blend.phases:
        return blend.phases
    units = [unit_of(part.unit) for part in blend.components]
    plain = all(unit == WEIGHT for unit in units)
    shares = [part.share for part in blend.components]
    known = [part.set_by for part in blend.components if part.set_by is not UNSET]
    set_by = known if len(known) == len(shares) else UNSET
    return [Phase(samples=None, shares=shares, units=UNSET if plain else units, groups=blend.groups, set_by=set_by)]


def is_plain(blend: BlendManifest) -> bool:
    """Whether there are weights of components and nothing else, as in the first manifests."""
    later = (blend.groups, blend.earlier, *(part.unit for part in blend.components))
    return not blend.phases and all(isinstance(value, UnsetType) for value in later)


def caps_of(blend: BlendManifest) -> tuple[Fraction | None, ...]:
    """The most epochs of each component."""
    return tuple(exact(part.cap) if part.cap is not None else None for part in blend.components)


def unit_of(unit: Unit | UnsetType) -> Unit:
    """The unit of a share; a weight where none is named."""
    return WEIGHT if isinstance(unit, UnsetType) else unit


def fits(phase: Phase, num_components: int) -> bool:
    """Whether every list of a phase has an entry for each component."""
    lists = (phase.shares, phase.units, phase.set_by)
    return all(isinstance(one, UnsetType) or len(one) == num_components for one in lists)


def _asked(blend: BlendManifest, phases: Sequence[Phase]) -> tuple[AskedPhase, ...]:
    names = [part.name for part in blend.components]
    members = [part.group for part in blend.components]
    return tuple(_asked_phase(phase, members, names=names, where=i + 1) for i, phase in enumerate(phases))


def _asked_phase(phase: Phase, members: Sequence[str | None], *, names: Sequence[str], where: int) -> AskedPhase:
    units: Sequence[Unit] = [WEIGHT] * len(names) if isinstance(phase.units, UnsetType) else phase.units
    tokens = None if isinstance(phase.tokens, UnsetType) else phase.tokens
    if not fits(phase, len(names)) or (tokens is not None and phase.samples is not None):
        set_by = [] if isinstance(phase.set_by, UnsetType) else phase.set_by
        raise UsageError(
            f"phase {where} does not fit the blend",
            found=f"{len(phase.shares)} shares, {len(units)} units and {len(set_by)} set_by, samples {phase.samples}, "
            f"tokens {tokens}",
            expected=f"{len(names)} of each, and either samples or tokens",
        )
    asks = [Ask(unit, exact(share)) for unit, share in zip(units, phase.shares, strict=True)]
    groups: Mapping[str, GroupShare] = {} if isinstance(phase.groups, UnsetType) else phase.groups
    shares = {name: Ask(unit_of(group.unit), exact(group.share)) for name, group in groups.items()}
    divided = divide_groups(asks, members, shares=shares, names=names)
    return AskedPhase(divided, samples=phase.samples, tokens=tokens, ramp=phase.ramp is True)
