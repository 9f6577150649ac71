"""Finds corpora that several entries name; with merge_same, each becomes one component with all their shares.

Two components of one corpus would read the same texts at the same pace, since the order inside a corpus depends only on
the corpus: each text would be read twice in every pass. One component has one cursor, so no text repeats before all
have been read; random access, inverse and the bound of a share work as for any component. Only shares in the same unit
are added. If a member of a group with a share is also named outside the group, it leaves the group with its part of
that share; the shares of the other members do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from mdata.blend.spec import BlendSpec
from mdata.corpus.corpus import Corpus
from mdata.mixing.shares import NOTHING, TOKENS, USER, SetBy, Share, as_text


@dataclass
class PlannedComponent:
    """A corpus of a blend that is being composed; `weight`, set by `weight_by`, divides the share of its entry."""

    corpus: Corpus
    weight: str
    cap: str | None
    weight_by: SetBy = TOKENS
    name: str = ""
    group: str | None = None
    share: Share = NOTHING


def first_alike(corpora: Sequence[Corpus]) -> list[int]:
    """For each corpus the number of the first one that is, or may be, the same; otherwise its own number.

    A pair whose .bin was never read is identified by its .idx and the size of its .bin: any pair with the same may be
    equal.
    """
    by_id: dict[str, int] = {}
    by_files: dict[object, int] = {}
    unread: dict[object, int] = {}
    firsts = []
    for number, corpus in enumerate(corpora):
        key, verified = files_of(corpus), corpus.manifest.verified
        alike = by_id.get(corpus.id, (unread if verified else by_files).get(key, number))
        firsts.append(alike)
        by_id.setdefault(corpus.id, number)
        by_files.setdefault(key, number)
        if not verified:
            unread.setdefault(key, number)
    return firsts


def files_of(corpus: Corpus) -> tuple[tuple[str, int], ...]:
    """The facts that every manifest has about files: the hash of each .idx and the size of its .bin."""
    return tuple((shard.idx_hash, shard.bytes) for shard in corpus.manifest.shards)


def merge_same(
    parts: Sequence[PlannedComponent], groups: dict[str, Share], *, spec: BlendSpec, problems: list[str]
) -> tuple[list[PlannedComponent], dict[str, str]]:
    """The parts with every corpus once, under its first name; members that leave a group reduce its share in `groups`.

    Returns:
        The parts, and for each merged one its shares as text.
    """
    of_corpus: dict[int, list[PlannedComponent]] = {}
    roots: list[int] = []
    for number, alike in enumerate(first_alike([part.corpus for part in parts])):
        roots.append(number if alike == number else roots[alike])
        of_corpus.setdefault(roots[number], []).append(parts[number])
    merged_shares = {}
    for same in of_corpus.values():
        if len(same) > 1:
            unread = not all(part.corpus.manifest.verified for part in same)
            if unread and len({tuple(r.bin_path.resolve() for r in part.corpus.readers) for part in same}) > 1:
                both = " and ".join(part.corpus.place for part in same[:2])
                problems.append(
                    f"{both}: their .idx are equal, but their tokens may differ; run mdata adopt --full on each"
                )
            merged_shares[same[0].name] = _merge(same, parts, groups, spec=spec, problems=problems)
    merged = [same[0] for same in of_corpus.values()]
    for name in groups.keys() - {part.group for part in merged}:
        del groups[name]
    return merged, merged_shares


def _merge(
    same: list[PlannedComponent],
    parts: Sequence[PlannedComponent],
    groups: dict[str, Share],
    *,
    spec: BlendSpec,
    problems: list[str],
) -> str:
    """Merge these parts into the first; returns their shares as text."""
    first = same[0]
    caps = [part.cap for part in same if part.cap is not None]
    first.cap = min(caps, key=Fraction) if caps else None
    if spec.exhaustive:
        return "once, as every corpus"
    if len({part.group if part.group in groups else None for part in same}) > 1:
        if any(phase.by_name is not None for phase in spec.phases):
            problem = f"{first.name} is named both inside a group and outside it"
            problems.append(f"{problem}; where phases have shares, name each corpus once")
            return ""
        for part in same:
            if part.group in groups:
                _leave_group(part, parts, groups)
    units = {part.share.unit for part in same}
    if len(units) > 1:
        problems.append(
            f"{first.name} has shares in {' and in '.join(sorted(units))}; only shares in one unit can be merged"
        )
        return ""
    shares = [part.share for part in same]
    set_by = USER if any(share.set_by == USER for share in shares) else TOKENS
    first.share = Share(as_text(sum((share.amount for share in shares), Fraction(0))), units.pop(), set_by)
    for part in same[1:]:
        part.share = NOTHING
    return " + ".join(map(str, shares))


def _leave_group(part: PlannedComponent, parts: Sequence[PlannedComponent], groups: dict[str, Share]) -> None:
    """Take a member out of its group, with its part of the group's share."""
    assert part.group is not None, "no member"
    group_share = groups[part.group]
    weights = sum(other.share.amount for other in parts if other.group == part.group)
    taken = group_share.amount * part.share.amount / weights
    groups[part.group] = replace(group_share, text=as_text(group_share.amount - taken))
    part.group, part.share = None, replace(group_share, text=as_text(taken))
