"""The page of a blend's report: one HTML document, also well-formed XML, without scripts, links or images.

Every part has a drawing and a table with its numbers; long tables scroll, and are cut off after 1,000 components with a
note. What is unusual: names and texts come from users and from corpora, so all of them go through `escape`, and the
texts of ids are inside <bdi>, because a token may be half of a right-to-left line. Imported only when a page is
written: the numbers as JSON need none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mdata.blend_planning.preview import BlendRow
from mdata.errors import counted
from mdata.reporting import plots as report_plots
from mdata.reporting.curves import Band, bands_of
from mdata.reporting.html_tables import Cell, percent, table
from mdata.reporting.report_data import ComponentFacts, ReportData
from mdata.reporting.report_style import page
from mdata.reporting.svg import escape, legend
from mdata.reporting.vocabulary_use import Vocabulary, VocabularyUse

MOST_ROWS = 1000
_PANELS = 12
_PHASES = 8


def render(data: ReportData) -> str:
    """The whole page."""
    bands = bands_of([part.row for part in data.parts])
    sections = [_head(data), _mixture(data), _over_training(data), _lengths(data, bands)]
    sections += [_vocabulary(data, bands), _records(data.parts)]
    return page(f"{data.title}: report", sections)


def _head(data: ReportData) -> str:
    tokens, documents = (sum(getattr(part.row, name) for part in data.parts) for name in ("tokens", "documents"))
    kind = {"blend": "blend", "corpus": "corpus", "pair": "token files without a manifest"}[data.kind]
    facts = [
        f"{kind} {data.id[:16]}",
        counted(len(data.parts), "component") if data.kind == "blend" else "",
        f"{counted(tokens, 'token')} in {counted(documents, 'document')}",
        _training(data),
    ]
    notes = [*data.notes, *([data.vocabulary.problem] if data.vocabulary.problem else [])]
    if data.problem:
        notes.insert(0, f"What a training reads is not known: {data.problem}")
    lines = "".join(f"<li>{escape(' '.join(note.split()))}</li>" for note in notes)
    shown = f'<ul class="notes">{lines}</ul>' if notes else ""
    lead = "; ".join(fact for fact in facts if fact)
    return f'<h1>{escape(data.title)}</h1><p class="lead">{escape(lead)}</p>{shown}'


def _training(data: ReportData) -> str:
    """The length of training to which the numbers apply."""
    preview = data.preview
    if preview is None or preview.num_samples is None:
        return ""
    tokens = counted(preview.num_samples * (preview.sequence_length or 1), "token")
    length = tokens
    if preview.sequence_length is not None:
        length = f"{counted(preview.num_samples, 'sample')} of {preview.sequence_length:,} tokens ({tokens})"
    assumed = " (assumed: the tokens of all corpora; set another length with --tokens or --samples)"
    ends = " (its end)" if preview.blend.num_samples == preview.num_samples else ""
    return f"for a training of {length}" + (assumed if data.assumed_length else ends)


def _mixture(data: ReportData) -> str:
    """The table of `mdata blend`, with the columns that it leaves out for lack of space."""
    parts = data.parts
    phases = len(data.preview.starts) if data.preview else 0
    shown = range(phases) if 1 < phases <= _PHASES else range(0)
    unit = "samples" if data.in_samples else "tokens"
    columns = ["component", *(["target share", "achieved"] if data.kind == "blend" else []), "tokens", "documents"]
    columns += ["samples"] if data.in_samples else []
    columns += ["tokens read", "epochs", f"read once after ({unit})"] if data.preview else []
    columns += ["max epochs"] if data.kind == "blend" else []
    columns += [f"phase {i + 1}" for i in shown]
    groups = {row.name: row for row in data.preview.groups} if data.preview else {}
    rows: list[list[Cell]] = []
    listed: set[str | None] = {None}
    for part in _by_group(parts)[:MOST_ROWS]:
        if part.row.group not in listed and part.row.group in groups:
            rows.append([Cell(part.row.group, kind="group"), *_cells(groups[part.row.group], None, data, shown=shown)])
        listed.add(part.row.group)
        name = Cell(part.row.name, kind="member" if part.row.group else "", hint=part.path)
        rows.append([name, *_cells(part.row, part.cap, data, shown=shown)])
    first = data.first_out if len(parts) > 1 else None
    lead = ""
    if first is not None:
        note = f"{first.name} runs out first: read once after {first.once_at:,} {unit} of the training."
        lead = f'<p class="lead">{escape(note)}</p>'
    return f"<h2>{'Mixture' if data.kind == 'blend' else 'Corpus'}</h2>{lead}{table(columns, rows)}{_cut(parts)}"


def _by_group(parts: Sequence[ComponentFacts]) -> list[ComponentFacts]:
    """Rows with the members of a group together, at the position of the first."""
    groups: dict[str | int, list[ComponentFacts]] = {}
    for number, part in enumerate(parts):
        groups.setdefault(part.row.group or number, []).append(part)
    return [part for members in groups.values() for part in members]


def _cells(row: BlendRow, cap: str | None, data: ReportData, *, shown: range) -> list[Cell]:
    cells = [Cell(row.share or "", kind="number"), Cell(percent(row.achieved))] if data.kind == "blend" else []
    cells += [Cell(row.tokens), Cell(row.documents)]
    cells += [Cell(row.samples)] if data.in_samples else []
    cells += [Cell(row.read_tokens), Cell(row.epochs), Cell(row.once_at)] if data.preview else []
    cells += [Cell(cap, kind="number")] if data.kind == "blend" else []
    return [*cells, *(Cell(percent(row.phases[i]) if row.phases[i] else "") for i in shown)]


def _cut(parts: Sequence[object]) -> str:
    if len(parts) <= MOST_ROWS:
        return ""
    return f'<p class="lead">The first {MOST_ROWS:,} of {len(parts):,}; --json lists all.</p>'


def _over_training(data: ReportData) -> str:
    curves = data.curves
    if curves is None:
        return ""
    unit = "samples" if data.in_samples else "tokens"
    names = [part.row.name for part in data.parts]
    parts = []
    if len(data.parts) > 1:
        drawing = report_plots.shares_over_training(curves, unit)
        parts.append(f"<h2>Shares over training</h2>{drawing}{_legend(curves.bands)}")
    legend = _legend(curves.bands) if len(data.parts) > 1 and len(curves.bands) < len(data.parts) else ""
    faint = '<p class="lead">Faint lines: the components that are not drawn alone above.</p>' if legend else ""
    parts.append(f"<h2>Epochs over training</h2>{faint}{report_plots.epochs_over_training(curves, unit, names=names)}")
    if len(data.parts) > 1:
        drawing = report_plots.epochs_at_end(curves, names, caps=[part.cap for part in data.parts])
        more = (
            f" (the {report_plots.MOST_BARS} that are read most often)" if len(names) > report_plots.MOST_BARS else ""
        )
        parts.append(f"<h3>At the end{more}</h3>{drawing}")
    return "".join(parts)


def _legend(bands: Sequence[Band]) -> str:
    items = []
    for band in reversed(bands):
        strength = f' style="opacity:{band.strength:.2f}"' if band.strength < 1 else ""
        kind = report_plots.kind_of(band)
        group = f" <small>{escape(band.group)}</small>" if band.group and not band.name.startswith(band.group) else ""
        items.append(f'<li><i class="swatch b{kind}"{strength}></i>{escape(band.name)}{group}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _lengths(data: ReportData, bands: Sequence[Band]) -> str:
    """A panel for each of the largest components, and a table for all."""
    used = [k for part in data.parts for k, count in enumerate(part.lengths.documents) if count]
    if not used:
        return '<h2>Document lengths</h2><p class="lead">There is no document.</p>'
    classes = range(min(used), max(used) + 1)
    shown = [band.members[0] for band in bands if len(band.members) == 1][:_PANELS]
    panels = []
    for part in (data.parts[i] for i in shown):
        drawing = report_plots.document_lengths(part.row.name, part.lengths, classes=classes)
        panels.append(f'<div><h3 title="{escape(part.path)}">{escape(part.row.name)}</h3>{drawing}</div>')
    names = legend([("c0", "fraction of the documents"), ("c1", "fraction of the tokens")])
    header = ["component", *(f"\u2264 {report_plots.largest(k)}" for k in classes)]
    rows = [_lengths_row(part, classes) for part in data.parts[:MOST_ROWS]]
    numbers = f"<details><summary>Fraction of the tokens by length, as numbers</summary>{table(header, rows)}</details>"
    return f'<h2>Document lengths</h2>{names}<div class="panels">{"".join(panels)}</div>{numbers}{_cut(data.parts)}'


def _lengths_row(part: ComponentFacts, classes: range) -> list[Cell]:
    tokens, total = part.lengths.tokens, sum(part.lengths.tokens) or 1
    shares = [tokens[k] / total if k < len(tokens) else 0.0 for k in classes]
    return [Cell(part.row.name), *(Cell(percent(value) if value else "") for value in shares)]


def _vocabulary(data: ReportData, bands: Sequence[Band]) -> str:
    words = data.vocabulary
    if not words.mixture.distinct:
        return '<h2>Vocabulary</h2><p class="lead">No id occurs.</p>'
    usages = zip(data.parts, words.parts, strict=True)
    many = len(data.parts) > 1
    drawn = [
        (data.parts[band.members[0]].row.name, band, words.parts[band.members[0]])
        for band in bands
        if len(band.members) == 1 and many
    ]
    legend = ""
    if many:
        legend = _legend([band for _, band, _ in drawn]).replace(
            "</ul>", '<li><i class="swatch bwhole"></i>all components, weighted by what is read</li></ul>'
        )
    header = ["component", "tokens counted", "ids that occur", "of the vocabulary", "largest id", "ids outside"]
    header += ["in its 100 most frequent ids", "in its 1,000", "the most frequent ids"]
    rows = [_usage_row(part, usage, words) for part, usage in list(usages)[:MOST_ROWS]]
    return (
        f'<h2>Vocabulary</h2><p class="lead">{escape(_words(words))}</p>'
        f"{report_plots.coverage(words.mixture, drawn)}{legend}{table(header, rows)}{_cut(data.parts)}"
        f'<div class="row"><div>{_frequent(words)}</div><div>{_unused(words)}</div></div>'
    )


def _words(words: Vocabulary) -> str:
    met = "occur" if words.full else "were found"
    used = f"{words.mixture.distinct:,} ids {met}"
    if words.size is not None and words.unused is not None:
        used += f"; {words.unused:,} of the tokenizer's {words.size:,} " + ("do not" if words.full else "were not")
    if words.full:
        return f"{used}. Every token was counted."
    return (
        f"{used}. Counted in {counted(words.mixture.counted, 'token')}, drawn in blocks from all of each component "
        "with its id as the seed; --full counts them all."
    )


def _usage_row(part: ComponentFacts, usage: VocabularyUse, words: Vocabulary) -> list[Cell]:
    top = " ".join(_shown(token.id, token.text) for token in usage.frequent)
    return [
        Cell(part.row.name),
        Cell(usage.counted),
        Cell(usage.distinct),
        Cell(percent(usage.distinct / words.size) if words.size else None),
        Cell(usage.largest),
        Cell(usage.outside, kind="bad" if usage.outside and words.size else ""),
        *(Cell(percent(covered(usage, k)) if usage.distinct else None) for k in (100, 1000)),
        Cell(top, kind="raw"),
    ]


def covered(usage: VocabularyUse, most: int) -> float:
    """The fraction of tokens whose id is among the `most` most frequent."""
    return max((part for rank, part in usage.coverage if rank <= most), default=0.0)


def _frequent(words: Vocabulary) -> str:
    rows = [
        [_text_cell(token.id, token.text), Cell(token.id), Cell(percent(token.share))]
        for token in words.mixture.frequent
    ]
    return f"<h3>The most frequent ids</h3>{table(['text', 'id', 'of the tokens'], rows)}"


def _unused(words: Vocabulary) -> str:
    if not words.unused:
        return ""
    title = "Ids that do not occur" if words.full else "Ids not found in the sample"
    rows = [
        [Cell(f"{first:,}" if first == last else f"{first:,} to {last:,}"), _text_cell(first, text)]
        for first, last, text in words.unused_runs
    ]
    listed = sum(last - first + 1 for first, last, _ in words.unused_runs)
    rest = f'<p class="lead">and {words.unused - listed:,} more</p>' if words.unused > listed else ""
    return f"<h3>{title}</h3>{table(['ids', 'text of the first'], rows)}{rest}"


def _text_cell(number: int, text: str | None) -> Cell:
    return Cell(None) if text is None else Cell(_shown(number, text), kind="raw")


def _shown(number: int, text: str | None) -> str:
    """An id's text with visible blanks; the id itself if it has no text."""
    if text is None:
        return f"<code>{number}</code>"
    short = text if len(text) <= 40 else f"{text[:39]}\u2026"
    return f'<code title="{number}"><bdi>{escape(short.replace(" ", chr(0x2423)))}</bdi></code>'


def _records(parts: Sequence[ComponentFacts]) -> str:
    """Rows that were left out when the corpora were made."""
    counted = [part for part in parts if part.records is not None]
    if not counted:
        return '<h2>Records left out</h2><p class="lead">Not known: no manifest says how the tokens were made.</p>'
    reasons = sorted({reason for part in counted for reason, count in (part.skipped or {}).items() if count})
    header = ["component", "records taken", "left out", *reasons, "special tokens in texts"]
    rows = []
    for part in parts[:MOST_ROWS]:
        skipped = part.skipped
        counts = [skipped.get(reason, 0) if skipped is not None else None for reason in reasons]
        total = sum(skipped.values()) if skipped is not None else None
        cells: Iterable[int | None] = (part.records, total, *counts, part.special_in_text)
        rows.append([Cell(part.row.name), *map(Cell, cells)])
    return f"<h2>Records left out</h2>{table(header, rows)}{_cut(parts)}"
