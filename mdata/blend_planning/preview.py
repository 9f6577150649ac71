"""Previews a blend before anything is built: share and samples of each component, and which runs out first.

Without a sequence length a sample is a token, so that shares, tokens and epochs are known for any blend that does not
count in samples. With one, corpora are opened as in training (native order), and numbers of samples are exact. Nothing
is written and no text is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mdata.blend.blend import OpenBlend
from mdata.blend.share_texts import share_texts
from mdata.errors import UsageError, counted
from mdata.manifest.blend_schedule import caps_of, schedules_of
from mdata.mixing.phased_blend import PhasedBlend
from mdata.mixing.resolve import Sizes, phase_starts
from mdata.mixing.schedule import BlendSchedule, blend_error
from mdata.order.data_split import split_edges


@dataclass(frozen=True)
class BlendRow:
    """The preview of one component, or of a group.

    Args:
        name, group: as given. achieved: its part of all samples.
        share: for display (mdata/blend/share_texts.py); None for a group that is only a heading.
        tokens, documents: of the corpus. epochs: over the run; None if no length was given.
        samples, read_tokens: over the run. samples_per_epoch: None without a sequence length.
        once_at: samples of the blend after which the corpus has been read once; None: not in this run.
        phases: its part of the samples of each phase.
    """

    name: str
    share: str | None
    achieved: float
    tokens: int
    documents: int
    epochs: float | None
    group: str | None = None
    samples: int | None = None
    read_tokens: int | None = None
    samples_per_epoch: int | None = None
    once_at: int | None = None
    phases: tuple[float, ...] = ()


@dataclass(frozen=True)
class BlendPreview:
    """Rows of components and of groups, and the run that they describe.

    Args:
        num_samples: of the run; None: no length was given and the blend is endless. sequence_length: None: not given.
        starts: first sample of each phase. blend: the selection map.
    """

    rows: tuple[BlendRow, ...]
    groups: tuple[BlendRow, ...]
    num_samples: int | None
    sequence_length: int | None
    starts: tuple[int, ...]
    blend: PhasedBlend


def preview_blend(
    blend: OpenBlend,
    *,
    sequence_length: int | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    split: str = "100,0,0",
) -> BlendPreview:
    """How much a training run of `samples` or `tokens` reads of each corpus.

    Args:
        blend: an open blend.
        sequence_length: tokens of a sample. samples, tokens: length of the training; at most one of them.
        split: Megatron's split string; training reads its first part.

    Raises:
        UsageError: shares, lengths or caps that cannot be met, or a run longer than the blend; gives all numbers.
    """
    schedules = schedules_of(blend.manifest)
    if sequence_length is None and _counts_samples(schedules, samples):
        raise UsageError("the blend counts in samples", fix="give --sequence-length, the tokens of a sample")
    length = sequence_length or 1
    sizes = sizes_of(blend, sequence_length, split=split)
    phased = blend.phased(sizes.samples_per_epoch, length)
    wanted = samples if samples is not None else -(-tokens // length) if tokens is not None else None
    if wanted is not None and wanted < 0:
        raise UsageError(f"a training of {wanted:,} samples", expected="0 or more")
    run = _run_length(wanted, phased, sizes)
    starts = tuple(start for start in phase_starts(schedules, sizes) if run is None or start < run)
    shares, of_groups = share_texts(blend.manifest, [corpus.num_tokens for corpus in blend.corpora])
    in_samples = sequence_length is not None
    rows = _rows(blend, phased, sizes, run=run, starts=starts, shares=shares, in_samples=in_samples)
    groups = tuple(_group_row(name, rows, share) for name, share in of_groups.items())
    return BlendPreview(rows, groups, run, sequence_length, starts, phased)


def blend_table(blend: OpenBlend) -> list[BlendRow]:
    """The rows of `preview_blend` in tokens; if these depend on a run, the shares of the last phase."""
    try:
        return list(preview_blend(blend).rows)
    except UsageError:
        weights = blend.weights
        texts, _ = share_texts(blend.manifest, [corpus.num_tokens for corpus in blend.corpora])
        parts = zip(blend.manifest.components, blend.corpora, strict=True)
        return [
            BlendRow(part.name, text, weight / (sum(weights) or 1), c.num_tokens, c.num_documents, None, part.group)
            for (part, c), weight, text in zip(parts, weights, texts, strict=True)
        ]


def sizes_of(blend: OpenBlend, sequence_length: int | None, *, split: str) -> Sizes:
    """The `Sizes` with which a blend is resolved; without a sequence length a sample is a token."""
    if sequence_length is None:
        epochs = tuple(max(1, corpus.num_tokens) for corpus in blend.corpora)
    else:
        epochs = samples_per_epoch(blend, sequence_length, split=split)
    return Sizes(blend.names, epochs, sequence_length or 1, caps_of(blend.manifest))


def samples_per_epoch(blend: OpenBlend, sequence_length: int, *, split: str) -> tuple[int, ...]:
    """Samples of one pass over the training part of each corpus.

    Raises:
        UsageError: lists all corpora that are too short.
    """
    from mdata.array_cache.cache import Cache
    from mdata.dataset.dataset_options import DatasetOptions
    from mdata.dataset.open_samples import bounds_of, open_samples

    split_edges(split)  # an error in the split is reported once, not for each corpus
    options = DatasetOptions(sequence_length=sequence_length, split="train", split_shares=split)
    rows, cache = options.row_options(0), Cache(options.cache, mapped=True)
    problems, counts = [], []
    for corpus in blend.corpora:
        try:
            kind = open_samples(corpus, bounds_of(corpus, options), options=options, rows=rows, cache=cache)
            counts.append(kind.samples_per_epoch if kind else 0)
        except UsageError as error:
            problems.append("; ".join(line.strip() for line in str(error).split("\n  try:")[0].splitlines()))
    if problems:
        raise blend_error(problems, fix="a shorter sequence length, or leave these out")
    return tuple(counts)


def _counts_samples(schedules: Sequence[BlendSchedule], samples: int | None) -> bool:
    phases = [phase for schedule in schedules for phase in schedule.phases]
    lengths = any(phase.samples is not None or any(s.unit == "samples" for s in phase.shares) for phase in phases)
    return lengths or samples is not None or any(schedule.until is not None for schedule in schedules)


def _run_length(wanted: int | None, phased: PhasedBlend, sizes: Sizes) -> int | None:
    """Samples of the run: as requested, otherwise those of a finite blend.

    Raises:
        UsageError: the blend ends before the run does.
    """
    end = phased.num_samples
    if wanted is None or end is None or wanted <= end:
        return end if wanted is None else wanted
    counts = phased.counts(end)
    spent = [
        f"{name} is at {count / size:.4g} of {cap} epochs"
        for name, count, size, cap in zip(sizes.names, counts, sizes.samples_per_epoch, sizes.caps, strict=True)
        if cap is not None and count >= int(cap * size)
    ]
    raise UsageError(
        "the blend ends before the training",
        found=f"{counted(end, 'sample')} ({counted(end * sizes.sequence_length, 'token')})"
        + (f"; {', '.join(spent[:5])}" if spent else ""),
        expected=f"{counted(wanted, 'sample')} ({counted(wanted * sizes.sequence_length, 'token')})",
        fix="a shorter training, larger shares or caps, or a last phase without a length",
    )


def _rows(
    blend: OpenBlend,
    phased: PhasedBlend,
    sizes: Sizes,
    *,
    run: int | None,
    starts: Sequence[int],
    shares: Sequence[str],
    in_samples: bool,
) -> tuple[BlendRow, ...]:
    last = phased.segments[-1].weights
    counts = phased.counts(run) if run is not None else None
    parts_of_run = [n / (run or 1) for n in counts] if counts else (last / last.sum()).tolist()
    phases = _phase_shares(phased, starts, run)
    rows = []
    for i, (part, corpus) in enumerate(zip(blend.manifest.components, blend.corpora, strict=True)):
        size, num_samples = sizes.samples_per_epoch[i], counts[i] if counts else None
        rows.append(
            BlendRow(
                name=part.name,
                share=shares[i],
                achieved=parts_of_run[i],
                tokens=corpus.num_tokens,
                documents=corpus.num_documents,
                epochs=num_samples / size if num_samples is not None and size else None,
                group=part.group,
                samples=num_samples if in_samples else None,
                read_tokens=num_samples * sizes.sequence_length if num_samples is not None else None,
                samples_per_epoch=size if in_samples else None,
                once_at=_once_at(phased, i, size, run=run),
                phases=tuple(phase[i] for phase in phases),
            )
        )
    return tuple(rows)


def _phase_shares(phased: PhasedBlend, starts: Sequence[int], run: int | None) -> list[list[float]]:
    """Each component's part of each phase that the run reaches; for an endless phase, its shares."""
    shares = []
    for start, stop in zip(starts, [*starts[1:], run], strict=True):
        if stop is None:
            weights = phased.segments[-1].weights
            shares.append((weights / weights.sum()).tolist())
            continue
        pairs = zip(phased.counts(start), phased.counts(stop), strict=True)
        shares.append([(after - before) / max(stop - start, 1) for before, after in pairs])
    return shares


def _once_at(phased: PhasedBlend, component: int, size: int, *, run: int | None) -> int | None:
    """Samples of the blend after which a component has given all of its samples once; None: not in this run."""
    last = phased.sample_of(component, size - 1) if size else None
    return None if last is None or (run is not None and last >= run) else last + 1


def _group_row(name: str, rows: Sequence[BlendRow], share: str | None) -> BlendRow:
    """The sum of a group's members."""
    members = [row for row in rows if row.group == name]
    tokens = sum(row.tokens for row in members)
    read = [row.read_tokens for row in members if row.read_tokens is not None]
    samples = [row.samples for row in members if row.samples is not None]
    total = sum(row.samples_per_epoch or 0 for row in members) if samples else tokens
    return BlendRow(
        name=name,
        share=share,
        achieved=float(sum(Fraction(row.achieved) for row in members)),
        tokens=tokens,
        documents=sum(row.documents for row in members),
        epochs=sum(samples or read) / total if read and total else None,
        samples=sum(samples) if samples else None,
        read_tokens=sum(read) if read else None,
        phases=tuple(sum(parts) for parts in zip(*(row.phases for row in members), strict=True)),
    )
