"""What is asked of a blend, exactly: phases, and what each component gets in each of them.

A share has one of four units: a weight divides what a phase has left; tokens, samples and epochs are amounts. A
group's share is divided among its members by their weights, so that everything below knows components alone. A
changed blend has several schedules: each but the last was left at a sample number, whatever it had planned after it,
and is resolved by itself, so that a change alters nothing before it. Exact fractions throughout; no manifests, no
sizes of corpora (those are for `mdata.mixing.resolve`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal, NamedTuple

from mdata.errors import UsageError

Unit = Literal["weight", "tokens", "samples", "epochs"]
WEIGHT: Unit = "weight"
# Who set a share: the user, or the sizes of corpora to which nobody gave one.
SetBy = Literal["user", "tokens"]
USER: SetBy = "user"
TOKENS: SetBy = "tokens"
_SHORT = 20  # characters of a decimal that people still read
NO_LENGTH = "weights beside amounts, or before another phase, need the length of the phase in samples or tokens"
NO_ROOM = "nothing is left for the weights"
NO_REST = "no weight takes the rest"
# How a problem of lengths ends -> what to do.
_WAYS_OUT = {
    NO_LENGTH: "samples = N or tokens = N in a .toml file, of the blend or of the phase (a .csv file has no place for "
    "it, and --samples and --tokens are of the training that the table is for)",
    NO_ROOM: "a longer phase, or smaller amounts; for a change of a run the whole new mixture in place of edits",
    NO_REST: "a shorter phase, or a weight for one component (of a change --set NAME=1), which then gives the rest",
}


class Ask(NamedTuple):
    """What one component is to get in a phase: a weight, or an amount; 0 is nothing."""

    unit: Unit
    amount: Fraction


def exact(share: str) -> Fraction:
    """A share's text as a number.

    Raises:
        UsageError: it is none.
    """
    try:
        return Fraction(share)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError("a share is not a number", found=repr(share), expected='0.7, 3, 1e9 or "1/3"') from error


def as_text(share: Fraction) -> str:
    """A share as a manifest has it: a decimal where it is a short one, else a fraction."""
    decimal = format(Decimal(share.numerator) / Decimal(share.denominator), "f")
    return decimal if len(decimal) <= _SHORT and Fraction(decimal) == share else str(share)


NOTHING = Ask(WEIGHT, Fraction(0))


@dataclass(frozen=True, slots=True)
class AskedPhase:
    """A span of training, one ask a component.

    Args:
        asks: of the components, groups already divided.
        samples, tokens: its length, at most one of them; neither: as long as the amounts, or without end.
        ramp: the weights go in a straight line from those of the phase before to these.
    """

    asks: tuple[Ask, ...]
    samples: int | None = None
    tokens: int | None = None
    ramp: bool = False

    @property
    def endless(self) -> bool:
        """Weights alone, and no length."""
        return self.samples is None and self.tokens is None and not any(ask.unit != WEIGHT for ask in self.asks)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Phases one after another; `until` is the sample of the blend at which it was left for the next schedule."""

    phases: tuple[AskedPhase, ...]
    until: int | None = None


def divide_groups(
    asks: Sequence[Ask],
    members: Sequence[str | None],
    *,
    shares: Mapping[str, Ask],
    names: Sequence[str],
) -> tuple[Ask, ...]:
    """Asks of components alone: a group's share times the member's part of the group's weights.

    Args:
        asks: of the components, those of members being weights inside their group.
        members: the group of each component, if any.
        shares: group -> what all of it gets; a group that is not named here is only a heading.
        names: of the components, for messages.

    Raises:
        UsageError: a member with an amount of its own, a group without weights, or a group counted in epochs.
    """
    sums: dict[str, Fraction] = dict.fromkeys(shares, Fraction(0))
    for ask, group, name in zip(asks, members, names, strict=True):
        if group in sums:
            if ask.unit != WEIGHT:
                raise UsageError(
                    f"{name} has a share in {ask.unit}, and its group {group} has a share of its own",
                    expected="weights inside a group that has a share",
                    fix=f"a weight for {name}, or no share for the group {group}",
                )
            sums[group] += ask.amount
    for group, whole in sums.items():
        if shares[group].unit == "epochs" or (whole == 0 and shares[group].amount > 0):
            raise UsageError(
                f"the group {group} cannot be given its share",
                found=f"{shares[group].amount} {shares[group].unit}" if whole else "no weights inside it",
                expected="a group's weight, tokens or samples, and a weight inside it",
                fix="epochs stand at the components",
            )
    return tuple(
        Ask(shares[group].unit, shares[group].amount * ask.amount / sums[group] if ask.amount else Fraction(0))
        if group in sums
        else ask
        for ask, group in zip(asks, members, strict=True)
    )


def canonical(phase: AskedPhase) -> list[object]:
    """What the id of a blend hashes of a phase: weights as parts of 1, so that 7 : 3 is 0.7 : 0.3."""
    whole = sum((ask.amount for ask in phase.asks if ask.unit == WEIGHT), Fraction(0))
    asks = []
    for ask in phase.asks:
        amount = ask.amount / whole if ask.unit == WEIGHT and whole else ask.amount
        asks.append([ask.unit if amount else WEIGHT, str(amount)])
    return [phase.samples, phase.tokens, phase.ramp, asks]


def missing_lengths(schedules: Sequence[Schedule]) -> list[str]:
    """Phases that have weights and must have a length but have none: a problem whatever the sizes are."""
    phases = schedules[-1].phases
    return [
        where_in(number, len(phases)) + NO_LENGTH
        for number, phase in enumerate(phases)
        if phase.samples is None and phase.tokens is None and any(a.unit == WEIGHT and a.amount for a in phase.asks)
        if not phase.endless or number < len(phases) - 1
    ]


def where_in(number: int, num_phases: int) -> str:
    """How a problem of a phase begins; nothing where there is one phase."""
    return f"phase {number + 1}: " if num_phases > 1 else ""


def blend_error(problems: Sequence[str], *, fix: str | None = None) -> UsageError:
    """One error for all problems of a blend; what to do is known of some."""
    fix = fix or "\n  ".join(way for end, way in _WAYS_OUT.items() if any(p.endswith(end) for p in problems)) or None
    if len(problems) == 1:
        return UsageError(problems[0], fix=fix)
    shown = [*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])]
    lines = "".join(f"\n  - {problem}" for problem in shown)
    return UsageError(f"the blend has {len(problems)} problems:{lines}", fix=fix)
