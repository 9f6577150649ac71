"""The schedule of a blend: its phases, and the share of each component in each of them.

A group's share is divided among its members by their weights, so later code knows only components. A changed blend has
several schedules: each but the last is cut off at a sample number, and each is resolved separately, so that a change
does not affect earlier samples. Fractions are exact throughout; manifests and sizes of corpora are not used here
(sizes: `mdata.mixing.resolve`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from mdata.errors import UsageError, counted
from mdata.mixing.shares import WEIGHT, Share, as_text, integer_weights

NO_LENGTH = "weights beside amounts, or before another phase, need the length of the phase in samples or tokens"
NO_SHARE = "no component has a share"
RAMP_LENGTH = "a ramp needs a length"
RAMP_AMOUNTS = "a ramp goes from the weights of the phase before to its own; neither may have amounts"
NO_ROOM = "nothing is left for the weights"
NO_REST = "no weight takes the rest"
# End of a message about lengths -> what to do.
_WAYS_OUT = {
    NO_LENGTH: "samples = N or tokens = N in a .toml file, of the blend or of the phase (a .csv file cannot say "
    "it, and --samples and --tokens give the length of the training that the table describes)",
    NO_ROOM: "a longer phase, or smaller amounts; to change a run, give a complete new blend instead of edits",
    NO_REST: "a shorter phase, or a weight for one component (in a change: --set NAME=1), which then fills the rest",
}


@dataclass(frozen=True, slots=True)
class Phase:
    """A span of training.

    Args:
        shares: one for each component; empty in a `BlendSpec`, which refers to components by name.
        by_name: shares of groups, whose members' own shares are then weights inside them. In a `BlendSpec` also shares
            of components; None there: the phase has the shares of the entries.
        samples, tokens: its length, at most one of them; neither: as long as its amounts, or endless.
        ramp: the weights change linearly from those of the previous phase to these.
    """

    shares: tuple[Share, ...] = ()
    by_name: Mapping[str, Share] | None = None
    samples: int | None = None
    tokens: int | None = None
    ramp: bool = False

    @property
    def endless(self) -> bool:
        """Whether it has only weights and no length."""
        return self.samples is None and self.tokens is None and all(share.unit == WEIGHT for share in self.shares)


@dataclass(frozen=True, slots=True)
class BlendSchedule:
    """Phases one after another; `until` is the sample at which the next schedule takes over."""

    phases: tuple[Phase, ...]
    until: int | None = None


def divide_groups(phase: Phase, members: Sequence[str | None], *, names: Sequence[str]) -> Phase:
    """A phase with shares of components only: a group's share times the member's part of the group's weights.

    Args:
        phase: with shares of groups.
        members: the group of each component, if any; a group without a share in the phase is only a heading.
        names: of the components, for messages.

    Raises:
        UsageError: a share that is not a number, a member with its own amount, a group without weights, or a group
            counted in epochs.
    """
    groups = phase.by_name or {}
    amounts = [share.amount for share in phase.shares]
    sums = dict.fromkeys(groups, Fraction(0))
    for share, amount, group, name in zip(phase.shares, amounts, members, names, strict=True):
        if group in sums:
            if share.unit != WEIGHT:
                raise UsageError(
                    f"{name} has a share in {share.unit}, and its group {group} has a share of its own",
                    expected="weights inside a group that has a share",
                    fix=f"a weight for {name}, or no share for the group {group}",
                )
            sums[group] += amount
    for group, total in sums.items():
        if groups[group].unit == "epochs" or (total == 0 and groups[group].amount > 0):
            raise UsageError(
                f"the group {group} cannot be given its share",
                found=f"{groups[group].amount} {groups[group].unit}" if total else "no weights inside it",
                expected="a group's weight, tokens or samples, and a weight inside it",
                fix="give epochs to the components instead",
            )
    shares = tuple(
        Share(as_text(groups[group].amount * amount / sums[group]) if amount else "0", groups[group].unit)
        if group in sums
        else share
        for share, amount, group in zip(phase.shares, amounts, members, strict=True)
    )
    return replace(phase, shares=shares, by_name=None)


def phase_weights(phase: Phase, names: Sequence[str]) -> tuple[int, ...]:
    """The weights of a phase as exact integers; 0 for components with an amount and those that are not read."""
    used = [i for i, share in enumerate(phase.shares) if share.unit == WEIGHT and share.amount]
    weights = [0] * len(phase.shares)
    if used:
        exact = integer_weights([phase.shares[i].amount for i in used], [names[i] for i in used])
        for i, weight in zip(used, exact, strict=True):
            weights[i] = weight
    return tuple(weights)


def canonical(phase: Phase) -> list[object]:
    """A phase in the form that the blend id hashes: weights as parts of 1, so that 7 : 3 equals 0.7 : 0.3."""
    weight_sum = sum((share.amount for share in phase.shares if share.unit == WEIGHT), Fraction(0))
    shares = []
    for share in phase.shares:
        amount = share.amount / weight_sum if share.unit == WEIGHT and weight_sum else share.amount
        shares.append([share.unit if amount else WEIGHT, str(amount)])
    return [phase.samples, phase.tokens, phase.ramp, shares]


def phase_problems(schedules: Sequence[BlendSchedule]) -> list[str]:
    """What is wrong with the newest phases whatever the sizes of the corpora are."""
    phases = schedules[-1].phases
    found = (
        (number, _phase_problem(phase, phases[number - 1] if number else None, is_last=number == len(phases) - 1))
        for number, phase in enumerate(phases)
    )
    return [where_in(number, len(phases)) + problem for number, problem in found if problem]


def _phase_problem(phase: Phase, before: Phase | None, *, is_last: bool) -> str | None:
    if not any(share.amount for share in phase.shares):
        return NO_SHARE
    endless, has_weights = phase.endless and is_last, any(s.unit == WEIGHT and s.amount for s in phase.shares)
    if phase.samples is None and phase.tokens is None and has_weights and not endless:
        return NO_LENGTH
    if not phase.ramp:
        return None
    if endless:
        return RAMP_LENGTH
    shares = () if before is None else (*before.shares, *phase.shares)
    return None if shares and all(share.unit == WEIGHT or not share.amount for share in shares) else RAMP_AMOUNTS


def where_in(number: int, num_phases: int) -> str:
    """Start of a message about a phase; empty if there is only one phase."""
    return f"phase {number + 1}: " if num_phases > 1 else ""


def blend_error(problems: Sequence[str], *, fix: str | None = None) -> UsageError:
    """One error for all problems of a blend, with the remedy if it is known."""
    fix = fix or "\n  ".join(way for end, way in _WAYS_OUT.items() if any(p.endswith(end) for p in problems)) or None
    if len(problems) == 1:
        return UsageError(problems[0], fix=fix)
    shown = [*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])]
    lines = "".join("\n  - " + problem.replace("\n", "\n    ") for problem in shown)
    return UsageError(f"the blend has {counted(len(problems), 'problem')}:{lines}", fix=fix)
