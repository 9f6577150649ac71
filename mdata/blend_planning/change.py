"""Changes a blend for the rest of a run: samples before N stay the same, and corpora continue where they were.

The new manifest names the old one as its parent and lists the old phases, ended at N, before its own. Components keep
their numbers and new ones are added after them, so samples before N do not change; a corpus that is no longer read
keeps its number with a share of 0. Amounts of the new phases count from N; caps count from the beginning of the run.
Pure except for opening the added corpora. `change_table` shows the effect on each component.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from mdata.blend.blend import OpenBlend, name_in, relative_path
from mdata.blend.compose import corpora_of_sets, plan_blend
from mdata.blend.duplicates import first_alike
from mdata.blend.overlap import check_added
from mdata.blend.same_tokenizer import OK, REFUSE, check_one_tokenizer, may_be_unknown
from mdata.blend.share_texts import shown_wholes
from mdata.blend.spec import BlendSpec, SpecLike, read_spec
from mdata.blend_planning.preview import samples_per_epoch, sizes_of
from mdata.corpus.corpus import Corpus
from mdata.corpus.open_part import is_stored, open_part
from mdata.errors import UsageError, few
from mdata.manifest.blend_schedule import phases_of, schedules_of, stored_phase, stored_share
from mdata.manifest.ids import sealed
from mdata.manifest.types import BlendComponent, BlendManifest, EarlierPhases, NamedSet, ShareText
from mdata.mixing.resolve import Sizes, phase_starts
from mdata.mixing.schedule import BlendSchedule, Phase, blend_error
from mdata.mixing.shares import NOTHING, TEXT_LIMITS, TOKENS, USER, WEIGHT, SetBy, Share, as_text, exact
from mdata.util.option_synonyms import nearest


@dataclass(frozen=True)
class BlendEdits:
    """Edits of the current blend.

    Args:
        shares: component -> its new weight. add: (weight, corpus). remove: components.
        replace: component -> the corpus that takes its share. tokenizer_unknown, allow_overlap: as in `BlendSpec`.
    """

    shares: Mapping[str, str] = field(default_factory=dict)
    add: Sequence[tuple[str, str]] = ()
    remove: Sequence[str] = ()
    replace: Mapping[str, str] = field(default_factory=dict)
    tokenizer_unknown: str = REFUSE
    allow_overlap: bool = False


def change_blend(
    old: OpenBlend,
    at_sample: int,
    *,
    folder: Path,
    sequence_length: int,
    spec: SpecLike | None = None,
    edits: BlendEdits | None = None,
    split: str = "100,0,0",
) -> OpenBlend:
    """The blend with other shares from sample `at_sample` on; `save_blend` writes it.

    Args:
        old: the blend of the run. at_sample: number of samples read before the change.
        folder: of the new manifest.
        sequence_length, split: of the run.
        spec: the complete new blend; or edits: of the current one.

    Raises:
        UsageError: an impossible sample number, unknown names, neither or both of spec and edits.
    """
    if (spec is None) == (edits is None):
        raise UsageError(
            "a change is either a new blend or edits of the old one",
            expected="the corpora and weights of the new blend (spec); or --set, --add, --remove, --replace (edits)",
        )
    sizes = sizes_of(old, sequence_length, split=split)
    schedules = schedules_of(old.manifest)
    _check_sample(old, schedules, sizes, at=at_sample)
    union = _Union(old, folder)
    wanted = (edits or BlendEdits()) if spec is None else read_spec(spec)
    unknown = may_be_unknown(old.tokenizer_unknown, wanted.tokenizer_unknown)
    if isinstance(wanted, BlendSpec):
        allowed = OK if unknown else REFUSE
        phases = union.taken(plan_blend(wanted, folder, tokenizer_unknown=allowed, allow_outside=old.allow_outside))
    else:
        wholes = shown_wholes(old.manifest, [corpus.num_tokens for corpus in old.corpora])
        rest = _rest(schedules, old, sizes, at=at_sample, wholes=wholes)
        set_by = [USER if total is None else TOKENS for total in wholes[-len(rest) :]]
        phases = union.edited(rest, wanted, set_by=set_by)
    check_one_tokenizer(union.corpora, unknown=unknown)
    if not wanted.allow_overlap:
        sets = corpora_of_sets(old.manifest, old.folder, open_one=open_part)
        check_added(union.corpora, len(old.corpora), sets=sets)
    changed = msgspec.structs.replace(
        old.manifest,
        components=union.with_shares(phases[-1].shares),
        phases=[stored_phase(phase) for phase in phases],
        groups=UNSET,
        earlier=[
            union.earlier(schedule, at_sample, blend=blend)
            for schedule, blend in zip(schedules, _blends(old.manifest), strict=True)
        ],
        parent=old.manifest.id,
        valid=_moved(old.manifest.valid, old.folder, folder),
        test=_moved(old.manifest.test, old.folder, folder),
        tokenizer_unknown="ok" if unknown else UNSET,
    )
    return OpenBlend(sealed(changed), tuple(union.corpora), folder)


def _blends(manifest: BlendManifest) -> list[str | UnsetType]:
    """The id of the blend whose last schedule each of a blend's schedules was; unknown in some older manifests."""
    earlier = [] if isinstance(manifest.earlier, UnsetType) else manifest.earlier
    return [*(part.id for part in earlier), manifest.id]


def _check_sample(old: OpenBlend, schedules: Sequence[BlendSchedule], sizes: Sizes, *, at: int) -> None:
    first = schedules[-2].until or 0 if len(schedules) > 1 else 0
    end = old.phased(sizes.samples_per_epoch, sizes.sequence_length).num_samples
    if at <= first or (end is not None and at >= end):
        last = "its end" if end is None else f"{end - 1:,}"
        raise UsageError(
            f"the blend cannot be changed at sample {at:,}",
            expected=f"a sample from {first + 1:,} to {last}" + (" (it was changed there before)" if first else ""),
        )


def _rest(
    schedules: Sequence[BlendSchedule], old: OpenBlend, sizes: Sizes, *, at: int, wholes: Sequence[Fraction | None]
) -> list[Phase]:
    """The rest of the phases in force, from sample `at` on; weights as given, or as parts of `wholes`."""
    phases = tuple(_divided(phase, total or 1) for phase, total in zip(schedules[-1].phases, wholes, strict=True))
    begin = schedules[-2].until or 0 if len(schedules) > 1 else 0
    starts = [begin + start for start in phase_starts([BlendSchedule(phases)], sizes)]
    number = max(i for i, start in enumerate(starts) if start <= at)
    phase = phases[number]
    if phase.ramp:
        raise UsageError(
            f"sample {at:,} is inside the ramp of phase {number + 1}, where shares are not constant",
            fix="the sample at which the ramp ends, or a complete new blend",
        )
    if phase.endless or starts[number] == at:
        return list(phases[number:])
    phased = old.phased(sizes.samples_per_epoch, sizes.sequence_length)
    stop = starts[number + 1] if number + 1 < len(phases) else phased.num_samples
    assert stop is not None, "a bounded phase has an end"
    left = [b - a for a, b in zip(phased.counts(at), phased.counts(stop), strict=True)]
    shares = tuple(
        share if share.unit == WEIGHT else Share(str(rest), "samples")
        for share, rest in zip(phase.shares, left, strict=True)
    )
    return [replace(phase, shares=shares, samples=stop - at, tokens=None), *phases[number + 1 :]]


def _divided(phase: Phase, total: Fraction | int) -> Phase:
    shares = [Share(as_text(share.amount / total)) if share.unit == WEIGHT else share for share in phase.shares]
    return replace(phase, shares=tuple(shares))


class _Union:
    """The components of the old blend, followed by those that a change adds."""

    def __init__(self, old: OpenBlend, folder: Path) -> None:
        self.folder, self.allow_outside = folder, old.allow_outside
        self.corpora = list(old.corpora)
        self.components = [
            msgspec.structs.replace(part, path=name_in(folder, corpus))
            for part, corpus in zip(old.manifest.components, old.corpora, strict=True)
        ]

    def with_shares(self, shares: Sequence[Share]) -> list[BlendComponent]:
        """The components with these shares, for display."""
        pairs = zip(self.components, shares, strict=True)
        return [msgspec.structs.replace(part, **stored_share(share)) for part, share in pairs]

    def earlier(self, schedule: BlendSchedule, at_sample: int, *, blend: str | UnsetType) -> EarlierPhases:
        """The earlier schedules; the current one ends at the sample of the change. `blend`: that had it last."""
        phases = [stored_phase(_over(phase, len(self.components))) for phase in schedule.phases]
        return EarlierPhases(until=schedule.until or at_sample, phases=phases, id=blend)

    def taken(self, new: OpenBlend) -> list[Phase]:
        """The phases of a complete new blend, with a share for every component."""
        places = [self._place(part, corpus) for part, corpus in zip(new.manifest.components, new.corpora, strict=True)]
        for place, part in zip(places, new.manifest.components, strict=True):
            cap = part.cap or self.components[place].cap
            self.components[place] = msgspec.structs.replace(self.components[place], group=part.group, cap=cap)
        return [_spread(phase, places, len(self.corpora)) for phase in phases_of(new.manifest)]

    def edited(self, phases: Sequence[Phase], edits: BlendEdits, *, set_by: Sequence[SetBy]) -> list[Phase]:
        """The phases with edits applied; components are named as in the table. `set_by`: of the weights of each phase.

        Raises:
            UsageError: lists all unknown names and all shares that are not numbers.
        """
        problems: list[str] = []
        named = [*edits.shares, *edits.remove, *edits.replace]
        problems += [f"{name} is changed twice" for name in dict.fromkeys(named) if named.count(name) > 1]
        weights = {number: share for name, share in edits.shares.items() for number in self._one(name, problems)}
        gone = {number for name in edits.remove for number in self._members(name, problems)}
        new_weights = {
            number: _weight(share, self.components[number].name, problems) for number, share in weights.items()
        }
        swaps = {number: path for name, path in edits.replace.items() for number in self._one(name, problems)}
        more = [(_weight(share, path, problems), path) for share, path in edits.add]
        if TOKENS in set_by:  # shown as parts of 1: a number of tokens would leave the others almost nothing
            large = [
                as_text(weight) for weight in (*new_weights.values(), *(weight for weight, _ in more)) if weight > 1
            ]
            problems += [
                f"the weight {text} is above 1, but the shares of this blend are fractions of 1, as `mdata blend` shows"
                for text in large
            ]
        if problems:
            raise blend_error(problems)
        read = {i for i in range(len(self.components)) if any(phase.shares[i].amount for phase in phases)}
        read |= new_weights.keys()
        for weight, path in more:
            new_weights[self._newly(path, read, "--add", fix="--set {}=WEIGHT changes its weight")] = weight
        fix = "--remove takes a corpus out, and --set {}=WEIGHT changes the weight of this one"
        moved = {number: self._newly(path, read, "--replace", fix=fix) for number, path in swaps.items()}
        count = len(self.corpora)
        edited = []
        for phase, by in zip(phases, set_by, strict=True):
            edited_phase = _over(_edited(phase, new_weights, gone=gone, moved=moved, count=count), count)
            of = [
                replace(share, set_by=USER if i in new_weights else by) for i, share in enumerate(edited_phase.shares)
            ]
            edited.append(replace(edited_phase, shares=tuple(of)))
        return edited

    def _one(self, name: str, problems: list[str]) -> list[int]:
        """The component with this name, as a list; if there is none, an empty list, and a problem."""
        numbers = [i for i, part in enumerate(self.components) if part.name == name]
        if not numbers:
            names = [part.name for part in self.components]
            close = nearest(name, names)
            instead = f"did you mean {close}?" if close else f"there are {few(names)}"
            problems.append(f"no component is called {name}; {instead}")
        return numbers

    def _members(self, name: str, problems: list[str]) -> list[int]:
        """The members of a group, or the component with this name."""
        return [i for i, part in enumerate(self.components) if part.group == name] or self._one(name, problems)

    def _added(self, path: str) -> int:
        blend = plan_blend({"component": [{"path": path}]}, self.folder, allow_outside=self.allow_outside)
        if len(blend.corpora) != 1:
            raise UsageError(f"{path} names {len(blend.corpora)} corpora", expected="one", fix="a complete new blend")
        return self._place(blend.manifest.components[0], blend.corpora[0])

    def _newly(self, path: str, read: set[int], option: str, *, fix: str) -> int:
        """The number of a corpus not read yet (a second weight for it would be lost); adds it to `read`."""
        number = self._added(path)
        if number in read:
            name = self.components[number].name
            problem = f"{option} {path}: that corpus is in the blend already, as {name}"
            raise UsageError(problem, expected="a corpus that is not read", fix=fix.format(name))
        read.add(number)
        return number

    def _place(self, part: BlendComponent, corpus: Corpus) -> int:
        """The number of a corpus; a new one is added.

        Raises:
            UsageError: it may be a corpus of the blend under another id, and would be read again from its beginning.
        """
        for number, existing in enumerate(self.components):
            if existing.id == part.id:
                return number
        near = [number for number, existing in enumerate(self.corpora) if existing.num_tokens == corpus.num_tokens]
        alike = first_alike([*(self.corpora[number] for number in near), corpus])[-1]
        if alike < len(near):
            name, path = self.components[near[alike]].name, self.corpora[near[alike]].place
            raise UsageError(
                f"{corpus.place} has the same .idx and size of .bin as {name} of the blend, but another id",
                found="no hashes of the tokens for one of them",
                fix=f"{path}, as the blend names it; if their tokens differ, run mdata adopt --full on each",
            )
        if part.name in [existing.name for existing in self.components]:
            part = msgspec.structs.replace(part, name=corpus.place)
        self.components.append(part)
        self.corpora.append(corpus)
        return len(self.corpora) - 1


def _weight(share: str, name: str, problems: list[str]) -> Fraction:
    weight = _number(share)
    if weight is None and _number(name) is not None:
        problems.append(f"write each weight before its corpus; found {share} {name}; did you mean {name} {share}?")
    elif weight is None or weight < 0:
        problems.append(f"the share of {name} is {share[:60]!r}; expected a number of at least 0, with {TEXT_LIMITS}")
    return weight or Fraction(0)


def _number(text: str) -> Fraction | None:
    try:
        return exact(text)
    except UsageError:
        return None


def _edited(
    phase: Phase, new: Mapping[int, Fraction], *, gone: set[int], moved: Mapping[int, int], count: int
) -> Phase:
    shares = [*phase.shares, *[NOTHING] * (count - len(phase.shares))]
    for number, weight in new.items():
        shares[number] = Share(as_text(weight))
    for number, place in moved.items():
        shares[place] = shares[number]
    for number in (*gone, *moved):
        shares[number] = NOTHING
    return replace(phase, shares=tuple(shares))


def _over(phase: Phase, count: int) -> Phase:
    """A phase extended by a share of 0 for later components; `set_by` is left out."""
    shares = [*phase.shares, *[NOTHING] * (count - len(phase.shares))]
    return replace(phase, shares=tuple(Share(_storable(share.amount), share.unit, None) for share in shares))


def _storable(amount: Fraction) -> str:
    """The text of a share, checked to fit a manifest."""
    try:
        return msgspec.convert(as_text(amount), ShareText)
    except msgspec.ValidationError as error:
        problem = "a share of the changed blend cannot be stored exactly"
        raise UsageError(problem, found=as_text(amount), fix="shorter numbers") from error


def _spread(phase: Phase, places: Sequence[int], count: int) -> Phase:
    """A phase over some components, extended to all."""
    shares = [NOTHING] * count
    for share, place in zip(phase.shares, places, strict=True):
        shares[place] = share
    return replace(phase, shares=tuple(shares))


def _moved(sets: list[NamedSet] | UnsetType, before: Path | None, folder: Path) -> list[NamedSet] | UnsetType:
    """Named sets with paths relative to another folder."""
    if isinstance(sets, UnsetType) or before is None:
        return sets
    return [
        named_set
        if is_stored(named_set.path)
        else msgspec.structs.replace(named_set, path=relative_path(before / named_set.path, folder))
        for named_set in sets
    ]


@dataclass(frozen=True)
class ChangeRow:
    """The effect of a change on one component.

    Args:
        samples, epochs: read before it. part_before, part_after: its part of the samples, just before and after.
        unread: samples of its current epoch that are never read, if it is no longer read; otherwise 0.
        again_at: sample of the blend from which text is repeated that was read before; None: never, or unknown.
    """

    name: str
    samples: int
    epochs: float
    part_before: float
    part_after: float
    unread: int
    again_at: int | None


def change_table(
    old: OpenBlend, new: OpenBlend, *, sequence_length: int, split: str, run: int | None
) -> list[ChangeRow]:
    """The effect of a change on every component.

    Args:
        old, new: before and after. sequence_length, split: of the run. run: its number of samples, if known.
    """
    assert not isinstance(new.manifest.earlier, UnsetType), "not a changed blend"
    at = new.manifest.earlier[-1].until
    sizes = samples_per_epoch(new, sequence_length, split=split)
    phased = new.phased(sizes, sequence_length)
    segments = int(np.searchsorted(phased.starts[1:-1], at, side="right"))
    after = phased.segments[segments].weights
    before = old.phased(sizes[: len(old.corpora)], sequence_length)
    last = before.segments[int(np.searchsorted(before.starts[1:-1], max(at - 1, 0), side="right"))].weights
    rows = []
    for i, (name, size, num_read) in enumerate(zip(new.names, sizes, phased.counts(at), strict=True)):
        goes_on = any(part.weights[i] for part in phased.segments[segments:])
        again = phased.sample_of(i, max(num_read, size)) if goes_on else None
        rows.append(
            ChangeRow(
                name=name,
                samples=num_read,
                epochs=num_read / size,
                part_before=float(last[i] / last.sum()) if i < len(last) else 0.0,
                part_after=float(after[i] / after.sum()),
                unread=0 if goes_on else -num_read % size,
                again_at=again if again is not None and (run is None or again < run) else None,
            )
        )
    return rows
