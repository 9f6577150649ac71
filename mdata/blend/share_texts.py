"""The shares of a blend as shown to users: of its components and groups, phase by phase.

A share is shown as the user gave it. If the user gave no weight among siblings (corpora count by their tokens, or by a
power of them), weights are shown as parts of 1; long fractions and amounts are rounded. The manifest keeps all of them
exactly, with who set each. A redistributed blend shows the shares that it was made from, not the resulting samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction

import msgspec
from msgspec import UnsetType

from mdata.errors import UsageError
from mdata.manifest.blend_schedule import phases_of, read_phases
from mdata.manifest.types import BlendManifest, StoredPhase
from mdata.mixing.schedule import Phase
from mdata.mixing.shares import TOKENS, USER, WEIGHT, SetBy, Share, by_tokens

_LONGEST = 8  # longest share that is shown as written
_DIGITS = 4  # the same in all columns of a table


def share_texts(blend: BlendManifest, tokens: Sequence[int]) -> tuple[list[str], dict[str, str | None]]:
    """The shares of components, and of groups; None for a group that is only a heading."""
    headings = [name for name in dict.fromkeys(part.group for part in blend.components) if name is not None]
    phases = [_texts(_shares(blend, phase, tokens)) for phase in _phases(blend)]
    components = [_over_time(texts) for texts in zip(*(texts for texts, _ in phases), strict=True)]
    rows = {name: [texts.get(name, "-") for _, texts in phases] for name in headings}
    return components, {name: None if set(texts) == {"-"} else _over_time(texts) for name, texts in rows.items()}


def shown_wholes(blend: BlendManifest, tokens: Sequence[int]) -> list[Fraction | None]:
    """The sum by which each phase in force divides its weights for display; None if the user gave any weight.

    Rounded like the displayed values, so that the quotients stay short enough for a manifest.
    """
    wholes = [_shares(blend, phase, tokens).sums().get(None) for phase in phases_of(blend)]
    return [None if total is None else Fraction(f"{float(total):.{_DIGITS}g}") for total in wholes]


def weights_set_by(blend: BlendManifest, tokens: Sequence[int]) -> list[SetBy]:
    """Who set the weights outside groups in each phase in force: the user, if they gave any of them."""
    return [USER if total is None else TOKENS for total in shown_wholes(blend, tokens)]


def _phases(blend: BlendManifest) -> list[Phase]:
    """The phases as requested; in a blend that was changed since, the note describes an earlier blend."""
    note = blend.notes.get("redistributed")
    if isinstance(note, Mapping) and isinstance(blend.earlier, UnsetType):
        with suppress(msgspec.ValidationError, UsageError):  # notes are free text: code must not rely on them
            if phases := read_phases(msgspec.convert(note.get("asked"), list[StoredPhase]), len(blend.components)):
                return phases
    return phases_of(blend)


@dataclass(frozen=True)
class _Shares:
    """The shares of a phase: of its components, then of its groups that have shares.

    Args:
        shares: all of them. sides: the group of each; None: not in a group.
        names: of the groups.
    """

    shares: list[Share]
    sides: list[str | None]
    names: list[str]

    def sums(self) -> dict[str | None, Fraction]:
        """Side -> the sum of its weights, for sides whose weights were not given by the user."""
        weights: dict[str | None, list[Share]] = {}
        for share, side in zip(self.shares, self.sides, strict=True):
            if share.unit == WEIGHT and share.amount:
                weights.setdefault(side, []).append(share)
        return {
            side: sum((share.amount for share in shares), Fraction(0))
            for side, shares in weights.items()
            if all(share.set_by == TOKENS for share in shares)
        }


def _shares(blend: BlendManifest, phase: Phase, tokens: Sequence[int]) -> _Shares:
    members, groups = [part.group for part in blend.components], phase.by_name or {}
    of_groups = dict.fromkeys(groups, 0)
    for group, number in zip(members, tokens, strict=True):
        if group in of_groups:
            of_groups[group] += number
    # A weight has a meaning only relative to its siblings: those in its group, or all outside of groups.
    sides = [*(group if group in groups else None for group in members), *[None] * len(groups)]
    shares = [*phase.shares, *groups.values()]
    old = _set_by_if_old(shares, sides, [*tokens, *of_groups.values()], alpha=blend.notes.get("alpha"))
    completed = [replace(share, set_by=share.set_by or guess) for share, guess in zip(shares, old, strict=True)]
    return _Shares(completed, sides, names=list(groups))


def _set_by_if_old(
    shares: Sequence[Share], sides: Sequence[str | None], tokens: Sequence[int], *, alpha: object
) -> list[SetBy]:
    """Who set the shares in a manifest older than `set_by`: the tokens, if all shares of a side follow from them."""
    triples = list(zip(shares, sides, tokens, strict=True))
    set_by_user = {
        side
        for share, side, number in triples
        if share.amount and share.text not in (str(number), _power(number, alpha))
    }
    return [USER if side in set_by_user else TOKENS for side in sides]


def _power(tokens: int, alpha: object) -> str | None:
    """tokens^alpha as stored in a manifest; None if the note, which is free text, names no such power."""
    try:
        return by_tokens(tokens, alpha) if isinstance(alpha, str) else None
    except (ArithmeticError, UsageError):
        return None


def _texts(phase: _Shares) -> tuple[list[str], dict[str, str]]:
    """The texts of one phase: of its components, and of the groups that have a share."""
    sums = phase.sums()
    texts = [_text(share, sums.get(side)) for share, side in zip(phase.shares, phase.sides, strict=True)]
    count = len(texts) - len(phase.names)
    return texts[:count], dict(zip(phase.names, texts[count:], strict=True))


def _text(share: Share, total: Fraction | None) -> str:
    """An amount or a weight as text: a part of the whole if known, otherwise as given; long fractions rounded."""
    value = share.amount
    if share.unit == WEIGHT:
        as_given = total is None and (len(share.text) <= _LONGEST or "/" not in share.text)
        return share.text if as_given else f"{float(value / (total or 1)):.{_DIGITS}g}"
    if len(share.text) <= _LONGEST or value.denominator == 1:
        return str(share)
    return f"{round(value) if value >= 10**_DIGITS else format(float(value), f'.{_DIGITS}g')} {share.unit}"


def _over_time(texts: Sequence[str]) -> str:
    """One text if all are the same, otherwise all of them; the middle of a long list is left out."""
    shown = [texts[0]] if len(set(texts)) == 1 else texts if len(texts) <= 4 else [texts[0], "...", texts[-1]]
    return " > ".join(shown)
