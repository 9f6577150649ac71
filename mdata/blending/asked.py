"""What a blend was asked for, as people read it: the shares of its components and groups, phase by phase.

A share is shown as its user wrote it. Where nobody wrote it (a corpus that counts by its tokens or a power of them, a
part of a group's tokens, fractions of an edited mixture), weights are parts of 1 among those they stand beside, and
amounts are rounded; the manifest keeps all of them exactly. A blend that was redistributed shows what it was made from,
not the samples that came out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import msgspec
from msgspec import UnsetType

from mdata import manifest as manifests
from mdata.blend.schedule import WEIGHT, exact
from mdata.blend.spec import Amount
from mdata.manifest import BlendManifest, Phase

_LONGEST = 8  # characters of a share that people write
_DIGITS = 4  # as in the other columns of a table


def share_texts(blend: BlendManifest, tokens: Sequence[int]) -> tuple[list[str], dict[str, str | None]]:
    """The shares of components, and of groups; None for a group that is only a heading.

    Args:
        blend: its manifest. tokens: of each component.
    """
    headings = [name for name in dict.fromkeys(part.group for part in blend.components) if name is not None]
    phases = [_texts(_asked(blend, phase, tokens)) for phase in _phases(blend)]
    components = [_over_time(texts) for texts in zip(*(texts for texts, _ in phases), strict=True)]
    found = {name: [texts.get(name, "-") for _, texts in phases] for name in headings}
    return components, {name: None if set(texts) == {"-"} else _over_time(texts) for name, texts in found.items()}


def shown_wholes(blend: BlendManifest, tokens: Sequence[int]) -> list[Fraction]:
    """By what each phase in force divides its weights when they are shown: their sum if nobody wrote them, else 1.

    As exact as what is shown, so that the quotients stay short enough to be kept.
    """
    wholes = [_asked(blend, phase, tokens).sums().get(None) for phase in manifests.phases_of(blend)]
    return [Fraction(f"{float(whole):.{_DIGITS}g}") if whole else Fraction(1) for whole in wholes]


def _phases(blend: BlendManifest) -> list[Phase]:
    """The phases that were asked for; the note of a blend that was changed since speaks of an earlier mixture."""
    note = blend.notes.get("redistributed")
    if isinstance(note, Mapping) and isinstance(blend.earlier, UnsetType):
        try:
            phases = msgspec.convert(note.get("asked"), list[Phase])
        except msgspec.ValidationError:  # notes are free: nothing relies on them
            phases = []
        if phases and all(len(phase.shares) == len(blend.components) for phase in phases):
            return phases
    return manifests.phases_of(blend)


@dataclass(frozen=True)
class _Asked:
    """What a phase asks of its components, then of its groups that have shares.

    Args:
        amounts: as given. sides: the group inside of which each stands; None: side by side with groups.
        tokens: of each. names: of the groups.
    """

    amounts: list[Amount]
    sides: list[str | None]
    tokens: list[int]
    names: list[str]

    def sums(self) -> dict[str | None, Fraction]:
        """Side -> the sum of its weights, for sides whose weights nobody wrote."""
        weights: dict[str | None, list[tuple[str, int]]] = {}
        for amount, tokens, side in zip(self.amounts, self.tokens, self.sides, strict=True):
            if amount.unit == WEIGHT and exact(amount.share):
                weights.setdefault(side, []).append((amount.share, tokens))
        return {
            side: sum((exact(share) for share, _ in pairs), Fraction(0))
            for side, pairs in weights.items()
            if not _written(pairs)
        }


def _asked(blend: BlendManifest, phase: Phase, tokens: Sequence[int]) -> _Asked:
    members = [part.group for part in blend.components]
    groups = {} if isinstance(phase.groups, UnsetType) else phase.groups
    units = [WEIGHT] * len(phase.shares) if isinstance(phase.units, UnsetType) else phase.units
    of_groups = dict.fromkeys(groups, 0)
    for group, number in zip(members, tokens, strict=True):
        if group in of_groups:
            of_groups[group] += number
    return _Asked(
        amounts=[Amount(share, unit) for share, unit in zip(phase.shares, units, strict=True)]
        + [Amount(group.share, manifests.unit_of(group.unit)) for group in groups.values()],
        # A weight says something beside its neighbours alone: those in its group, or all that stand outside of one.
        sides=[*(group if group in groups else None for group in members), *[None] * len(groups)],
        tokens=[*tokens, *of_groups.values()],
        names=list(groups),
    )


def _texts(asked: _Asked) -> tuple[list[str], dict[str, str]]:
    """The texts of one phase: of its components, and of the groups that have a share."""
    sums = asked.sums()
    texts = [_text(amount, sums.get(side)) for amount, side in zip(asked.amounts, asked.sides, strict=True)]
    count = len(texts) - len(asked.names)
    return texts[:count], dict(zip(asked.names, texts[count:], strict=True))


def _written(weights: Sequence[tuple[str, int]]) -> bool:
    """Whether a user may have written weights, given with tokens: short or whole ones, and not just all the tokens."""
    short = all(len(share) <= _LONGEST or share.isdecimal() for share, _ in weights)
    return short and any(share != str(n) for share, n in weights)


def _text(amount: Amount, whole: Fraction | None) -> str:
    """An amount, or a weight as a part of a whole, where that is known."""
    if amount.unit == WEIGHT:
        return amount.share if not whole else f"{float(exact(amount.share) / whole):.{_DIGITS}g}"
    value = exact(amount.share)
    if len(amount.share) <= _LONGEST or value.denominator == 1:
        return str(amount)
    return f"{round(value) if value >= 10**_DIGITS else format(float(value), f'.{_DIGITS}g')} {amount.unit}"


def _over_time(texts: Sequence[str]) -> str:
    """One text where all are the same, else all of them; the middle of many is left out."""
    shown = [texts[0]] if len(set(texts)) == 1 else texts if len(texts) <= 4 else [texts[0], "...", texts[-1]]
    return " > ".join(shown)
