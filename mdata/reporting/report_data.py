"""Collects the data of a report on a blend, a corpus or a bare pair: everything that is read, nothing that is drawn.

Shares, samples and epochs come from `mdata.blend_planning.preview`, which `mdata blend` prints too. Without a given
length, training is assumed to read as much as the corpora of the last phase have, and the report says so. For a single
corpus, training is described only if its length is given. Facts that a bare pair does not record are None here, with a
line in `notes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mdata.blend.blend import OpenBlend
from mdata.blend.open_blend import open_blend
from mdata.blend_planning.preview import BlendPreview, BlendRow, blend_table, preview_blend
from mdata.corpus.corpus import Corpus, open_corpus
from mdata.errors import UsageError, counted, few
from mdata.manifest.io import load_manifest
from mdata.manifest.types import BlendManifest
from mdata.reporting.curves import Curves, curves_of
from mdata.reporting.token_counts import Lengths, count_lengths
from mdata.reporting.vocabulary_use import Vocabulary, vocabulary_use


@dataclass(frozen=True, kw_only=True)
class ComponentFacts:
    """One component.

    Args:
        path, id, level: of the corpus. row: its part in the blend. cap: maximum epochs, as given.
        lengths: of its documents. records: used by the run that wrote it; skipped: bad rows, by reason; each None if
            unknown. special_in_text: special tokens that occurred in texts.
        verified: false: its tokens were never read, only its .idx.
    """

    path: str
    id: str
    level: str
    row: BlendRow
    cap: str | None
    lengths: Lengths
    records: int | None
    skipped: dict[str, int] | None
    special_in_text: int | None
    tokenizer: str | None
    verified: bool


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """The data of a page.

    Args:
        title: the name of the blend, corpus or pair. kind: "blend", "corpus" or "pair". id: its id.
        parts: at least one. preview, curves: None if no training is described; `problem` says why.
        assumed_length: whether the training's length was not given.
        notes: unknown facts.
    """

    title: str
    kind: str
    id: str
    parts: tuple[ComponentFacts, ...]
    preview: BlendPreview | None
    curves: Curves | None
    problem: str | None
    assumed_length: bool
    vocabulary: Vocabulary
    notes: tuple[str, ...]

    @property
    def in_samples(self) -> bool:
        """Whether training is counted in samples; otherwise in tokens."""
        return self.preview is not None and self.preview.sequence_length is not None

    @property
    def first_out(self) -> BlendRow | None:
        """The component that is read completely first."""
        once = [(part.row.once_at, i) for i, part in enumerate(self.parts) if part.row.once_at is not None]
        return self.parts[min(once)[1]].row if once else None


class TrainingLength(NamedTuple):
    """The training that a report is about, as for `preview_blend`; without samples and tokens: as long as the data."""

    sequence_length: int | None = None
    samples: int | None = None
    tokens: int | None = None
    split: str = "100,0,0"


def read_report(
    path: str | Path,
    *,
    full: bool = False,
    allow_outside: bool = False,
    training: TrainingLength = TrainingLength(),  # noqa: B008 - a tuple
) -> ReportData:
    """Collect all data of a report.

    Args:
        path: a manifest of a blend or corpus, or a bare prefix.
        full: count all ids, not a sample of them.
        allow_outside: as for `open_corpus`.
        training: its length and split.

    Raises:
        UsageError: nothing at the path; or the blend cannot provide the requested training.
        DamageError: something that is not what its manifest says.
    """
    path = Path(path)
    content = load_manifest(path) if path.suffix == ".json" else None
    blend = None
    preview, problem, assumed = None, None, False
    if isinstance(content, BlendManifest):
        blend = open_blend(path, tokenizer_unknown="ok", allow_outside=allow_outside)  # it is only looked at
        kind, identity, title = "blend", blend.manifest.id, path.stem
    else:
        corpus = open_corpus(path, allow_outside=allow_outside)
        kind, identity, title = ("corpus" if corpus.path.suffix == ".json" else "pair"), corpus.id, corpus.name
        if corpus.num_tokens:
            blend = open_blend(path, allow_outside=allow_outside)
    corpora: tuple[Corpus, ...]
    caps: list[str | None]
    if blend is None:
        corpora, caps = (corpus,), [None]
        rows = [BlendRow(corpus.name, None, 1.0, 0, corpus.num_documents, None)]
        problem = "it has no tokens, so nothing can be trained on it"
    else:
        corpora, caps = blend.corpora, [part.cap for part in blend.manifest.components]
        if kind == "blend" or training.tokens is not None or training.samples is not None:
            preview, problem, assumed = _preview(blend, training)
        rows = list(preview.rows) if preview else _plain_rows(blend)
    return ReportData(
        title=title,
        kind=kind,
        id=identity,
        parts=tuple(_part(*each) for each in zip(corpora, rows, caps, strict=True)),
        preview=preview,
        curves=curves_of(preview) if preview and preview.num_samples else None,
        problem=problem,
        assumed_length=assumed,
        vocabulary=vocabulary_use(corpora, [row.achieved for row in rows], full=full),
        notes=_notes(corpora),
    )


def _preview(blend: OpenBlend, training: TrainingLength) -> tuple[BlendPreview | None, str | None, bool]:
    """(preview or None, why it is missing, whether its length is assumed)."""
    try:
        preview = preview_blend(blend, **training._asdict())
        if preview.num_samples is not None:
            return preview, None, False
        length = preview.sequence_length or 1
        read = [row for row in preview.rows if row.phases and row.phases[-1]]
        sizes = [row.tokens if row.samples_per_epoch is None else row.samples_per_epoch for row in read]
        tokens = (preview.starts[-1] + sum(sizes)) * length
        return preview_blend(blend, **training._replace(tokens=tokens)._asdict()), None, True
    except UsageError as error:
        if training[:3] != (None, None, None):
            raise
        return None, str(error), False


def _plain_rows(blend: OpenBlend) -> list[BlendRow]:
    """Rows without training: only shares, or not even these."""
    try:
        return blend_table(blend)
    except UsageError:
        total = sum(corpus.num_tokens for corpus in blend.corpora) or 1
        parts = zip(blend.manifest.components, blend.corpora, strict=True)
        return [
            BlendRow(p.name, p.share, c.num_tokens / total, c.num_tokens, c.num_documents, None, p.group)
            for p, c in parts
        ]


def _part(corpus: Corpus, row: BlendRow, cap: str | None) -> ComponentFacts:
    provenance = corpus.manifest.provenance
    return ComponentFacts(
        path=str(corpus.path),
        id=corpus.id,
        level=corpus.manifest.level,
        row=row,
        cap=cap,
        lengths=count_lengths(corpus),
        records=provenance.records if provenance else None,
        skipped=dict(provenance.skipped) if provenance else None,
        special_in_text=provenance.special_in_text if provenance else None,
        tokenizer=corpus.tokenizer.type if corpus.tokenizer else None,
        verified=corpus.manifest.verified,
    )


def _notes(corpora: tuple[Corpus, ...]) -> tuple[str, ...]:
    """Notes on unknown facts, with the corpora concerned."""
    fields = (
        ("tokenizer is not known, so neither are the texts of ids and the size of the vocabulary", "tokenizer"),
        ("origin is not known: neither its inputs nor the records that were left out", "provenance"),
    )
    notes = []
    for name, field in fields:
        names = [corpus.name for corpus in corpora if getattr(corpus.manifest, field) is None]
        if names:
            all_of = f"all {counted(len(corpora), 'component')}" if len(names) == len(corpora) else few(names, 5)
            whose = "its" if len(corpora) == 1 else f"of {all_of} the"
            notes.append(f"{whose} {name}")
    odd = [corpus.name for corpus in corpora if not corpus.contiguous]
    if odd:
        notes.append(f"sequences are not contiguous on disk: {few(odd, 5)}")
    return tuple(note[0].upper() + note[1:] + "." for note in notes)
