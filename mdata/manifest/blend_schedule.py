"""Converts the shares and phases of a blend manifest to the types of `mdata.mixing`, and back. Pure.

A blend without phases is one phase without a length, with the shares of its components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from msgspec import UNSET, UnsetType

from mdata.errors import UsageError
from mdata.manifest.types import BlendManifest, StoredPhase, StoredShare
from mdata.mixing.schedule import BlendSchedule, Phase, divide_groups
from mdata.mixing.shares import WEIGHT, Share, exact


def schedules_of(blend: BlendManifest) -> tuple[BlendSchedule, ...]:
    """All schedules of a blend, the earlier ones first; groups are divided among their members.

    Raises:
        UsageError: a group that cannot be divided, or a phase that does not fit the components.
    """
    names, members = [part.name for part in blend.components], [part.group for part in blend.components]

    def divided(phases: Sequence[Phase]) -> tuple[Phase, ...]:
        return tuple(divide_groups(phase, members, names=names) for phase in phases)

    earlier = [] if isinstance(blend.earlier, UnsetType) else blend.earlier
    before = [BlendSchedule(divided(read_phases(part.phases, len(names))), until=part.until) for part in earlier]
    return (*before, BlendSchedule(divided(phases_of(blend))))


def phases_of(blend: BlendManifest) -> list[Phase]:
    """The phases in force; a blend without phases has one, with the shares of its components.

    Raises:
        UsageError: a phase that does not fit the components.
    """
    if blend.phases:
        return read_phases(blend.phases, len(blend.components))
    return [Phase(tuple(map(_share, blend.components)), _groups(blend.groups))]


def read_phases(stored: Sequence[StoredPhase], num_components: int) -> list[Phase]:
    """Phases from their form in a manifest.

    Raises:
        UsageError: a list without an entry for each component, or two lengths.
    """
    phases = []
    for number, phase in enumerate(stored):
        units = [WEIGHT] * num_components if isinstance(phase.units, UnsetType) else phase.units
        set_by = [None] * num_components if isinstance(phase.set_by, UnsetType) else phase.set_by
        tokens = None if isinstance(phase.tokens, UnsetType) else phase.tokens
        counts = len(phase.shares), len(units), len(set_by)
        if set(counts) != {num_components} or (tokens is not None and phase.samples is not None):
            raise UsageError(
                f"phase {number + 1} does not fit the blend",
                found="{} shares, {} units and {} set_by, ".format(*counts)
                + f"samples {phase.samples}, tokens {tokens}",
                expected=f"{num_components} of each, and either samples or tokens",
            )
        shares, ramp = tuple(map(Share, phase.shares, units, set_by)), phase.ramp is True
        phases.append(Phase(shares, _groups(phase.groups), samples=phase.samples, tokens=tokens, ramp=ramp))
    return phases


def stored_phase(phase: Phase) -> StoredPhase:
    """A phase in its form for a manifest; unused fields are left out."""
    units = [share.unit for share in phase.shares]
    set_by = [share.set_by for share in phase.shares if share.set_by is not None]
    return StoredPhase(
        samples=phase.samples,
        shares=[share.text for share in phase.shares],
        tokens=UNSET if phase.tokens is None else phase.tokens,
        units=UNSET if all(unit == WEIGHT for unit in units) else units,
        groups=stored_groups(phase.by_name or {}),
        ramp=phase.ramp or UNSET,
        set_by=set_by if len(set_by) == len(units) else UNSET,
    )


def stored_share(share: Share) -> dict[str, Any]:
    """A share as fields of a `StoredShare` or `BlendComponent`."""
    unit = UNSET if share.unit == WEIGHT else share.unit
    return {"share": share.text, "unit": unit, "set_by": UNSET if share.set_by is None else share.set_by}


def stored_groups(groups: Mapping[str, Share]) -> dict[str, StoredShare] | UnsetType:
    """Shares of groups in their form for a manifest; left out if there are none."""
    return {name: StoredShare(**stored_share(share)) for name, share in groups.items()} or UNSET


def caps_of(blend: BlendManifest) -> tuple[Fraction | None, ...]:
    """The cap (maximum number of epochs) of each component."""
    return tuple(exact(part.cap) if part.cap is not None else None for part in blend.components)


def _share(stored: StoredShare) -> Share:
    unit = WEIGHT if isinstance(stored.unit, UnsetType) else stored.unit
    return Share(stored.share, unit, None if isinstance(stored.set_by, UnsetType) else stored.set_by)


def _groups(stored: Mapping[str, StoredShare] | UnsetType) -> dict[str, Share]:
    return {} if isinstance(stored, UnsetType) else {name: _share(group) for name, group in stored.items()}
