"""From a spec to the manifest of a blend: finds and opens the corpora, and records their shares as given.

A corpus has the share of its entry. If one entry names many (a folder, a pattern, a blend), they are a group with the
entry's share, divided by their tokens or, for a blend, by its own shares: shares of nested blends multiply. The
manifest is self-contained: it contains no nested blends or patterns. All problems are reported in one error. Nothing is
written here.

Below a folder or among the matches of a pattern, every corpus manifest and every .idx counts, except pairs that a
manifest there lists; hidden names, blends and other JSON files are skipped. Links are followed, and a folder that
several names lead to is read once. Results are sorted by name, so every machine finds the same order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from mdata.blend.blend import OpenBlend, name_in, relative_path
from mdata.blend.data_path import BlendEntry, is_many
from mdata.blend.duplicates import PlannedComponent, first_alike, merge_same
from mdata.blend.overlap import ALLOW, check_apart, shared_documents, to_train_on
from mdata.blend.same_tokenizer import OK, REFUSE, check_one_tokenizer, may_be_unknown
from mdata.blend.share_texts import weights_set_by
from mdata.blend.spec import BlendSpec, SpecLike, read_spec
from mdata.corpus.corpus import Corpus
from mdata.corpus.open_part import beside, open_part
from mdata.corpus.paths import prefix_of
from mdata.errors import MdataError, UsageError, counted, errors_wanted_by, explain_os_error
from mdata.indexed.reader import Mode
from mdata.manifest.blend_schedule import schedules_of, stored_groups, stored_phase, stored_share
from mdata.manifest.ids import sealed
from mdata.manifest.io import load_manifest
from mdata.manifest.types import FORMAT, VERSION, BlendComponent, BlendManifest, CorpusManifest, NamedSet, ShareText
from mdata.mixing.schedule import Phase, blend_error, phase_problems
from mdata.mixing.shares import NOTHING, TEXT_LIMITS, TOKENS, WEIGHT, Share, as_text, by_tokens, integer_weights
from mdata.util.option_synonyms import nearest

if TYPE_CHECKING:
    from mdata.block_cache.cache_room import CachePlace


Opener = Callable[[str], Corpus]


@dataclass
class EntryCorpora:
    """An entry and its corpora; `many`: they are a group by themselves. `left_out`: path -> why, of a folder."""

    entry: BlendEntry
    parts: list[PlannedComponent]
    many: bool
    nested: bool
    left_out: Mapping[str, str] = field(default_factory=dict)


def plan_blend(
    spec: SpecLike,
    folder: Path,
    *,
    mode: Mode = "mmap",
    checked: bool = True,
    tokenizer_unknown: str = REFUSE,
    allow_outside: bool = False,
    cache: CachePlace = (None, None),
) -> OpenBlend:
    """The blend that `make_blend` would write into a folder; `mode` and later arguments as in `open_part`.

    Raises:
        UsageError, DamageError: as `make_blend`.
    """
    read = allowing(read_spec(spec), tokenizer_unknown)
    if read.redistribute:
        raise UsageError(
            "redistribute is resolved when a manifest is written, for one training",
            fix="mdata blend SPEC -o mix.json --redistribute --sequence-length S --samples N",
        )
    open_one = partial(open_part, mode=mode, checked=checked, allow_outside=allow_outside, cache=cache)
    manifest, corpora = compose(read, folder, open_one=open_one)
    check_one_tokenizer(corpora, unknown=read.tokenizer_unknown == OK)
    if problems := phase_problems(schedules_of(manifest)):
        raise blend_error(problems)
    return OpenBlend(manifest, corpora, folder)


def allowing(spec: BlendSpec, tokenizer_unknown: str) -> BlendSpec:
    """The spec, with unknown tokenizers allowed where the spec or the caller allows them."""
    allowed = may_be_unknown(spec.tokenizer_unknown, tokenizer_unknown)
    return replace(spec, tokenizer_unknown=OK if allowed else REFUSE)


def compose(spec: BlendSpec, folder: Path, *, open_one: Opener) -> tuple[BlendManifest, tuple[Corpus, ...]]:
    """The manifest that a spec describes, with paths relative to `folder`, and its open corpora.

    Raises:
        UsageError: lists every problem of the spec, its corpora and their shares.
        DamageError: a corpus does not match its manifest.
    """
    problems: list[str] = []
    matches = [match for entry in spec.entries if (match := _find(entry, spec, open_one, problems=problems))]
    if problems:
        raise blend_error(problems)
    if spec.per_split and len(matches) == 1 and not matches[0].many:
        matches[0].entry = replace(matches[0].entry, share=None)  # as in Megatron, which ignores it
    parts = [part for match in matches for part in match.parts]
    _name_all(matches)
    if not spec.merge_same:
        _check_distinct(parts)
    if not spec.allow_overlap:
        _check_overlap(parts)
    groups = _share_out(matches, spec)
    merged: dict[str, str] = {}
    if spec.merge_same:
        parts, merged = merge_same(parts, groups, spec=spec, problems=problems)
        if problems:
            raise blend_error(problems)
    _check_texts(parts, groups)
    left_out = {relative_path(Path(path), folder): why for match in matches for path, why in match.left_out.items()}
    components = [_component(part, folder) for part in parts]
    only_phase = Phase(samples=spec.samples, tokens=spec.tokens)
    wanted = spec.phases or ((only_phase,) if only_phase != Phase() else ())
    phases = [_phase(phase, parts, groups=groups, problems=problems, where=i + 1) for i, phase in enumerate(wanted)]
    if problems:
        raise blend_error(problems)
    blend = BlendManifest(
        format=FORMAT,
        version=VERSION,
        id="",
        checksum="",
        algorithm="native",
        components=components,
        phases=[stored_phase(phase) for phase in phases],
        parent=None,
        groups=stored_groups(groups),
        valid=_sets(spec.valid, folder, open_one, problems=problems) or UNSET,
        test=_sets(spec.test, folder, open_one, problems=problems) or UNSET,
        tokenizer_unknown="ok" if spec.tokenizer_unknown == OK else UNSET,
        notes={key: note for key, note in (("alpha", spec.alpha), ("merged", merged), ("left_out", left_out)) if note},
    )
    if problems:
        raise blend_error(problems)
    if not spec.allow_overlap:
        check_apart([part.corpus for part in parts], corpora_of_sets(blend, folder, open_one=open_one))
    return sealed(blend), tuple(part.corpus for part in parts)


def _find(entry: BlendEntry, spec: BlendSpec, open_one: Opener, *, problems: list[str]) -> EntryCorpora | None:
    """Open the corpora that an entry names; None, and a problem, if that fails."""
    try:
        blend = blend_at(entry.path)
        if blend is not None:
            return EntryCorpora(entry, list(_nested(entry, blend, open_one)), many=True, nested=True)
        many = is_many(entry.path)
        paths = corpora_at(entry.path) if many else [entry.path]
        corpora = [open_one(path) for path in paths]
        left_out: Mapping[str, str] = {}
        if many and not spec.allow_overlap:
            corpora, left_out = to_train_on(entry.path, corpora)
        if many:  # an empty one among many is no loss
            corpora = [corpus for corpus in corpora if corpus.num_tokens] or corpora[:1]
        parts = [
            PlannedComponent(corpus, by_tokens(corpus.num_tokens, spec.alpha), entry.max_epochs) for corpus in corpora
        ]
        return EntryCorpora(entry, parts, many=many, nested=False, left_out=left_out)
    except UsageError as error:
        problems.append(str(error))
        return None


def _nested(entry: BlendEntry, blend: BlendManifest, open_one: Opener) -> Iterator[PlannedComponent]:
    (*earlier, schedule) = schedules_of(blend)
    phase = schedule.phases[0]
    if earlier or blend.phases or any(share.unit != WEIGHT for share in phase.shares):
        raise UsageError(
            f"{entry.path} cannot be part of another blend",
            found="phases, or amounts of tokens, samples or epochs",
            expected="a blend of weights",
            fix="name its corpora one by one",
        )
    corpora = []
    for part in blend.components:
        with errors_wanted_by(f"{entry.path}: component {part.name}"):
            corpora.append(open_one(str(beside(Path(entry.path).parent, part.path))))
    (weight_by,) = weights_set_by(blend, [corpus.num_tokens for corpus in corpora])
    for part, share, corpus in zip(blend.components, phase.shares, corpora, strict=True):
        if corpus.id != part.id:
            raise UsageError(f"{entry.path}: component {part.name} is not the corpus that was blended")
        yield PlannedComponent(
            corpus, str(share.amount), entry.max_epochs or part.cap, weight_by=weight_by, name=part.name
        )


def _name_all(matches: Sequence[EntryCorpora]) -> None:
    """Name components: by the entry's name, otherwise by short names if these are unique, otherwise by paths."""
    for match in matches:
        for part in match.parts:
            own = match.entry.name if not match.many else None
            part.name = own or part.name or part.corpus.name
    parts = [part for match in matches for part in match.parts]
    times = Counter(name for name, _ in {(part.name, part.corpus.id) for part in parts})
    for part in parts:
        if times[part.name] > 1:
            part.name = part.corpus.place


def _check_distinct(parts: Sequence[PlannedComponent]) -> None:
    problems, bare = [], False
    for part, alike in zip(parts, first_alike([part.corpus for part in parts]), strict=True):
        other = parts[alike]
        if other is not part:
            both = f"{part.corpus.place} and {other.corpus.place}"
            one_id = part.corpus.id == other.corpus.id
            why = f"id {part.corpus.id[:16]}" if one_id else "the same .idx, and a .bin of the same size"
            problems.append(f"{both} are the same corpus ({why})")
            unread = not (part.corpus.manifest.verified and other.corpus.manifest.verified)
            bare |= unread and part.corpus.path != other.corpus.path
    if problems:
        fix = "name it once, with the sum of its shares; merge_same = true (mdata blend --merge-same) does that"
        if bare:  # documents of one length each make such files
            fix += "\n  where only the .idx are alike, and no .bin was read: mdata adopt --full each pair first"
        raise blend_error(problems, fix=fix)


def _check_overlap(parts: Sequence[PlannedComponent]) -> None:
    if problems := shared_documents([part.corpus for part in parts]):
        fix = f"name either the whole or its parts, and remove leftovers of earlier runs; to use both, set {ALLOW}"
        raise blend_error(problems, fix=fix)


def corpora_of_sets(blend: BlendManifest, folder: Path, *, open_one: Opener) -> dict[str, list[Corpus]]:
    """The corpora of each validation and test set; of a set that is a blend, its corpora."""
    corpora: dict[str, list[Corpus]] = {}
    for named_set in (*(blend.valid or ()), *(blend.test or ())):
        place = beside(folder, named_set.path)
        inner = blend_at(str(place))
        paths = [place] if inner is None else [beside(place.parent, part.path) for part in inner.components]
        corpora.setdefault(named_set.name, []).extend(open_one(str(path)) for path in paths)
    return corpora


def _share_out(matches: Sequence[EntryCorpora], spec: BlendSpec) -> dict[str, Share]:
    """Give every part its share and group; returns the groups that have shares."""
    _check_shares(matches, spec)
    groups = dict(spec.groups)
    for match in matches:
        entry = match.entry
        share = Share("1", "epochs") if spec.exhaustive else entry.share
        by_itself = share is None and not match.nested
        if not match.many or by_itself or (share is not None and share.unit == "epochs"):
            for part in match.parts:
                part.group = entry.group or (_group_name(match) if match.many else None)
                part.share = share or Share(part.weight, set_by=TOKENS)
            continue
        entry_share = share or Share(str(sum(part.corpus.num_tokens for part in match.parts)), set_by=TOKENS)
        total = sum((Fraction(part.weight) for part in match.parts), Fraction(0))
        name = entry.group or _group_name(match)
        if entry.group is None:
            if name in groups:
                raise UsageError(f"two groups are called {name}", fix="a name for each entry")
            groups[name] = entry_share
        for part in match.parts:
            part.group = name
            divided = entry_share.amount * (Fraction(part.weight) / total if total else 1)
            part.share = Share(part.weight, set_by=part.weight_by)
            if entry.group is not None:
                part.share = Share(as_text(divided), entry_share.unit, entry_share.set_by)
    return groups


def _group_name(match: EntryCorpora) -> str:
    return (
        match.entry.name
        or Path(match.entry.path).stem.strip("*")
        or Path(match.entry.path).parent.name
        or match.entry.path
    )


def _check_shares(matches: Sequence[EntryCorpora], spec: BlendSpec) -> None:
    """Refuse shares for only some siblings, or shares together with `exhaustive`."""
    if spec.exhaustive and (spec.groups or spec.phases or spec.alpha or any(match.entry.share for match in matches)):
        raise UsageError("exhaustive reads every corpus once", expected="no shares, groups, phases or alpha with it")
    if spec.alpha is not None and not any(_by_tokens(match) for match in matches):
        raise UsageError(
            "alpha has nothing to divide: every entry has a share of its own",
            found=f"alpha {spec.alpha}",
            expected="entries without a share, or folders of several corpora",
            fix="leave alpha out, or leave the shares out",
        )
    unused = [name for name in spec.groups if not any(match.entry.group == name for match in matches)]
    if unused:
        raise UsageError(
            f"the group {unused[0]} has a share but no members", fix=f'group = "{unused[0]}" at a component'
        )
    sides: dict[str | None, list[EntryCorpora]] = {None: []}
    for match in matches:
        sides.setdefault(match.entry.group if match.entry.group in spec.groups else None, []).append(match)
    for group, side in sides.items():
        without = [match.entry.path for match in side if match.entry.share is None]
        if without and (len(without) < len(side) or (group is None and spec.groups)) and not spec.exhaustive:
            raise UsageError(
                f"{without[0]} has no share, but other entries have one",
                expected="a share for each, or for none (they then count by their tokens)",
            )


def _by_tokens(match: EntryCorpora) -> bool:
    """Whether tokens decide the shares of corpora of an entry."""
    if match.nested or not match.entry.share:
        return not match.nested
    return len(match.parts) > 1 and match.entry.share.unit != "epochs"


def _check_texts(parts: Sequence[PlannedComponent], groups: Mapping[str, Share]) -> None:
    """Refuse shares that are not numbers above 0, or that a manifest cannot hold as text."""
    problems = [f"{part.name} has no tokens; leave it out" for part in parts if not part.corpus.num_tokens]
    named = [(part.name, part.share) for part in parts if part.corpus.num_tokens]
    named += [(f"group {name}", share) for name, share in groups.items()]
    named += [(f"max_epochs of {part.name}", Share(part.cap)) for part in parts if part.cap is not None]
    for name, share in named:
        try:
            integer_weights([share.text], [name])
            msgspec.convert(share.text, ShareText)
        except UsageError as error:
            problems.append(str(error))
        except msgspec.ValidationError:
            problems.append(f"the share of {name} cannot be stored exactly: {share.text[:60]!r}; write {TEXT_LIMITS}")
    if problems:
        raise blend_error(problems)


def _component(part: PlannedComponent, folder: Path) -> BlendComponent:
    return BlendComponent(
        path=name_in(folder, part.corpus),
        id=part.corpus.id,
        name=part.name,
        group=part.group,
        cap=part.cap,
        **stored_share(part.share),
    )


def _phase(
    phase: Phase, parts: Sequence[PlannedComponent], *, groups: Mapping[str, Share], problems: list[str], where: int
) -> Phase:
    """A phase with a share for every component and group: its own, or those of the entries."""
    shares = {part.name: part.share for part in parts}
    of_groups = dict(groups)
    if phase.by_name is not None:
        inside = {part.name for part in parts if part.group in groups}
        names = [name for name in shares if name not in inside] + list(groups)
        for name in phase.by_name:
            if names.count(name) > 1:
                problems.append(
                    f"phase {where} gives {name} a share, but {name} is both a component and a group; rename one"
                )
            if name not in names:
                close = nearest(name, names)
                hint = f"; did you mean {close}?" if close else ""
                problems.append(
                    f"phase {where} gives {name} a share, but the blend has no such component or group{hint}"
                )
        shares = {name: s if name in inside else phase.by_name.get(name, NOTHING) for name, s in shares.items()}
        of_groups = {name: phase.by_name.get(name, NOTHING) for name in groups}
    return replace(phase, shares=tuple(shares.values()), by_name=of_groups)


def _sets(sets: Mapping[str, str], folder: Path, open_one: Opener, *, problems: list[str]) -> list[NamedSet]:
    """Named sets; a name with many corpora becomes one set for each."""
    made: dict[str, NamedSet] = {}
    for name, path in sets.items():
        try:
            blend = blend_at(path)
            paths = corpora_at(path) if is_many(path) else [path]
            for set_path in paths:
                corpus = None if blend else open_one(set_path)
                id = blend.id if blend else corpus.id if corpus else ""
                called = name if name != path and len(paths) == 1 else corpus.name if corpus else Path(set_path).stem
                called = called if called not in made else corpus.place if corpus else set_path
                named = name_in(folder, corpus) if corpus else relative_path(Path(set_path), folder)
                made[called] = NamedSet(name=called, path=named, id=id)
        except MdataError as error:
            problems.append(str(error))
    return list(made.values())


_MARK = FORMAT.encode()


def blend_at(path: str) -> BlendManifest | None:
    """The blend if the path is a blend manifest; None for any other file."""
    if not path.endswith(".json") or not Path(path).is_file():
        return None
    content = load_manifest(Path(path))
    return content if isinstance(content, BlendManifest) else None


def corpora_at(path: str) -> list[str]:
    """Manifests and prefixes below a folder, or among the matches of a pattern; sorted.

    Raises:
        UsageError: there are none. DamageError: an incomplete manifest.
    """
    if not path:
        raise UsageError("'' is not a corpus", expected="a manifest, a prefix, a folder or a pattern")
    by_path: dict[Path, Path] = {}
    try:
        roots = [Path(path)] if Path(path).is_dir() else [Path(match) for match in glob(path, recursive=True)]  # noqa: PTH207
        files = _below(roots)
        spoken_for: set[Path] = set()
        for file in files:
            if file.suffix == ".json" and (shards := _shards(file)) is not None:
                by_path[file] = file
                spoken_for.update(shards)
    except OSError as error:
        raise explain_os_error(error, "looking for corpora") from error
    for file in files:
        if file.suffix == ".idx" and _real(prefix_of(file)) not in spoken_for:
            by_path[file] = prefix_of(file)
    if not by_path:
        count = counted(len(files), "file") if roots else "nothing"
        raise UsageError(f"{path}: no corpus was found", found=count, expected="manifests or .idx files")
    return [str(by_path[file]) for file in sorted(by_path)]


def _below(roots: Iterable[Path]) -> list[Path]:
    """Every file once, under the first of its paths; sorted."""
    files: dict[Path, Path] = {}
    visited: set[Path] = set()
    for root in sorted(roots):
        for file in _files(root, visited):
            files.setdefault(_real(file), file)
    return sorted(files.values())


def _files(root: Path, visited: set[Path]) -> Iterable[Path]:
    """The files below a folder; `visited` collects visited folders, because a link may lead back to one."""
    if not root.is_dir():
        yield root
        return

    def refuse(error: OSError) -> None:  # otherwise corpora in the folder would be left out without a word
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        real = Path(folder).resolve()
        # In this order a folder's own name comes before a link to it in the same folder.
        folders[:] = sorted(
            (name for name in folders if real not in visited and not name.startswith(".")),
            key=lambda name: (Path(folder, name).is_symlink(), name),
        )
        if real in visited:
            continue
        visited.add(real)
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _shards(path: Path) -> list[Path] | None:
    """The prefixes that a corpus manifest lists; None for any other file."""
    if not path.is_file() or _MARK not in path.read_bytes():
        return None
    content = load_manifest(path)
    if not isinstance(content, CorpusManifest):
        return None
    return [_real(path.parent / shard.path) for shard in content.shards]


def _real(path: Path) -> Path:
    return path.parent.resolve() / path.name
