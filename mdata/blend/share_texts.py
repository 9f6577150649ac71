"""The shares of a blend as they are shown to people: of its components and groups, phase by phase.

A share is shown as the user gave it. Where the user gave none of the weights of siblings (corpora count by
their tokens, or by a power of them), they are shown as parts of 1; long fractions and amounts are rounded. The manifest
keeps all of them exactly, and says who set each. A blend that was redistributed shows what it was made from, not the
samples that came out.
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

_LONGEST = 8  # characters of a share that people write
_DIGITS = 4  # as in the other columns of a table


def share_texts(blend: BlendManifest, tokens: Sequence[int]) -> tuple[list[str], dict[str, str | None]]:
    """The shares of components, and of groups; None for a group that is only a heading.

    Args:
        blend: its manifest. tokens: of each component.
    """
    headings = [name for name in dict.fromkeys(part.group for part in blend.components) if name is not None]
    phases = [_texts(_shares(blend, phase, tokens)) for phase in _phases(blend)]
    components = [_over_time(texts) for texts in zip(*(texts for texts, _ in phases), strict=True)]
    found = {name: [texts.get(name, "-") for _, texts in phases] for name in headings}
    return components, {name: None if set(texts) == {"-"} else _over_time(texts) for name, texts in found.items()}


def shown_wholes(blend: BlendManifest, tokens: Sequence[int]) -> list[Fraction | None]:
    """By what each phase in force divides its weights when they are shown: their sum; None where the user gave any.

    As exact as what is shown, so that the quotients stay short enough for a manifest.
    """
    wholes = [_shares(blend, phase, tokens).sums().get(None) for phase in phases_of(blend)]
    return [None if whole is None else Fraction(f"{float(whole):.{_DIGITS}g}") for whole in wholes]


def weights_set_by(blend: BlendManifest, tokens: Sequence[int]) -> list[SetBy]:
    """Who set the weights outside groups, of each phase in force: the user, where he gave any of them."""
    return [USER if whole is None else TOKENS for whole in shown_wholes(blend, tokens)]


def _phases(blend: BlendManifest) -> list[Phase]:
    """The phases as they were requested; the note of a blend that was changed since speaks of an earlier mixture."""
    note = blend.notes.get("redistributed")
    if isinstance(note, Mapping) and isinstance(blend.earlier, UnsetType):
        with suppress(msgspec.ValidationError, UsageError):  # notes are free: nothing relies on them
            if phases := read_phases(msgspec.convert(note.get("asked"), list[StoredPhase]), len(blend.components)):
                return phases
    return phases_of(blend)


@dataclass(frozen=True)
class _Shares:
    """The shares of a phase: of its components, then of its groups that have shares.

    Args:
        shares: all of them. sides: the group that each is in; None: in none.
        names: of the groups.
    """

    shares: list[Share]
    sides: list[str | None]
    names: list[str]

    def sums(self) -> dict[str | None, Fraction]:
        """Side -> the sum of its weights, for sides where the user gave none of them."""
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
    # A weight says something beside its neighbours alone: those in its group, or all outside of groups.
    sides = [*(group if group in groups else None for group in members), *[None] * len(groups)]
    shares = [*phase.shares, *groups.values()]
    old = _set_by_if_old(shares, sides, [*tokens, *of_groups.values()], alpha=blend.notes.get("alpha"))
    known = [replace(share, set_by=share.set_by or guess) for share, guess in zip(shares, old, strict=True)]
    return _Shares(known, sides, names=list(groups))


def _set_by_if_old(
    shares: Sequence[Share], sides: Sequence[str | None], tokens: Sequence[int], *, alpha: object
) -> list[SetBy]:
    """Who set shares of which an older manifest does not say it: the tokens, where all of a side are what they give."""
    triples = list(zip(shares, sides, tokens, strict=True))
    given = {
        side
        for share, side, number in triples
        if share.amount and share.text not in (str(number), _power(number, alpha))
    }
    return [USER if side in given else TOKENS for side in sides]


def _power(tokens: int, alpha: object) -> str | None:
    """tokens^alpha as a manifest has it; None where a note, which is free, names no such power."""
    try:
        return by_tokens(tokens, alpha) if isinstance(alpha, str) else None
    except ArithmeticError:
        return None


def _texts(phase: _Shares) -> tuple[list[str], dict[str, str]]:
    """The texts of one phase: of its components, and of the groups that have a share."""
    sums = phase.sums()
    texts = [_text(share, sums.get(side)) for share, side in zip(phase.shares, phase.sides, strict=True)]
    count = len(texts) - len(phase.names)
    return texts[:count], dict(zip(phase.names, texts[count:], strict=True))


def _text(share: Share, whole: Fraction | None) -> str:
    """An amount, or a weight: a part of a whole where that is known, else as it was given, long fractions rounded."""
    value = share.amount
    if share.unit == WEIGHT:
        given = whole is None and (len(share.text) <= _LONGEST or "/" not in share.text)
        return share.text if given else f"{float(value / (whole or 1)):.{_DIGITS}g}"
    if len(share.text) <= _LONGEST or value.denominator == 1:
        return str(share)
    return f"{round(value) if value >= 10**_DIGITS else format(float(value), f'.{_DIGITS}g')} {share.unit}"


def _over_time(texts: Sequence[str]) -> str:
    """One text where all are the same, else all of them; the middle of many is left out."""
    shown = [texts[0]] if len(set(texts)) == 1 else texts if len(texts) <= 4 else [texts[0], "...", texts[-1]]
    return " > ".join(shown)
