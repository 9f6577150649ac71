"""A page that draws a blend before it is trained on: shares over training, epochs, document lengths, use of ids.

One HTML file without scripts, links or images, for a browser without a network. report_data.py collects the data,
plots.py draws, html_page.py renders the page; this module writes the file and gives its numbers as JSON. A corpus and a
bare pair can be reported too, as far as their facts are known.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mdata.corpus.paths import prefix_of
from mdata.errors import UsageError, os_errors_named
from mdata.order.data_split import split_edges
from mdata.reporting.curves import Curves
from mdata.reporting.report_data import ComponentFacts, ReportData, TrainingLength, read_report
from mdata.reporting.vocabulary_use import VocabularyUse
from mdata.util import atomic_io

ENDINGS = (".html", ".htm")


@dataclass(frozen=True)
class Report:
    """A written page, and its data."""

    path: Path
    data: ReportData

    @property
    def facts(self) -> dict[str, Any]:
        """The numbers of the page as JSON types; epochs over time only for components with their own curve."""
        return _facts(self.data)


def report(
    path: str | Path,
    output: str | Path | None = None,
    *,
    full: bool = False,
    allow_outside: bool = False,
    sequence_length: int | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    split: str = "100,0,0",
) -> Report:
    """Write the page of a blend, a corpus or a bare pair.

    Args:
        path: a manifest, or the prefix of a .bin/.idx pair.
        output: the page; default beside it, NAME.report.html.
        full: count every token's id, not a sample of 67 million.
        allow_outside: as for `open_corpus`.
        sequence_length, samples, tokens, split: the training, as for `preview_blend`. Without a length: one that reads
            as much as the corpora have.

    Raises:
        UsageError: nothing at the path; a training run that the blend cannot provide; an output that does not end in
            .html.
        DamageError: a file that does not match its manifest.
    """
    from mdata.reporting.html_page import render

    target = Path(output) if output is not None else page_beside(Path(path))
    if target.suffix.lower() not in ENDINGS:
        raise UsageError(f"{target} does not end in .html", fix=f"-o {target}.html")
    split_edges(split)  # also where nothing is computed from it
    training = TrainingLength(sequence_length, samples, tokens, split)
    data = read_report(path, full=full, allow_outside=allow_outside, training=training)
    page = render(data).encode()
    with os_errors_named(f"writing {target}"):
        atomic_io.atomic_write(target, page)
    return Report(target, data)


def page_beside(path: Path) -> Path:
    """The default path of the page for a manifest or prefix."""
    prefix = path.with_suffix("") if path.suffix == ".json" else prefix_of(path)
    return path.with_name(f"{prefix.name}.report.html")


def _facts(data: ReportData) -> dict[str, Any]:
    preview, vocabulary = data.preview, data.vocabulary
    parts = zip(data.parts, vocabulary.parts, strict=True)
    return {
        "title": data.title,
        "kind": data.kind,
        "id": data.id,
        "components": [_component(part, usage) for part, usage in parts],
        "groups": [asdict(row) for row in preview.groups] if preview else [],
        "sequence_length": preview.sequence_length if preview else None,
        "num_samples": preview.num_samples if preview else None,
        "ends": preview.blend.num_samples if preview else None,
        "length_assumed": data.assumed_length,
        "phase_starts": list(preview.starts) if preview else [],
        "runs_out_first": data.first_out.name if data.first_out else None,
        "curves": _curves(data.curves) if data.curves else None,
        "vocabulary": {
            "size": vocabulary.size,
            "every_token_counted": vocabulary.full,
            "unused": vocabulary.unused,
            "unused_runs": [list(run) for run in vocabulary.unused_runs],
            **_usage(vocabulary.mixture),
        },
        "problem": data.problem,
        "notes": [*data.notes, *([vocabulary.problem] if vocabulary.problem else [])],
    }


def _component(part: ComponentFacts, usage: VocabularyUse) -> dict[str, Any]:
    facts = asdict(part)
    return {**facts.pop("row"), **facts, "vocabulary": _usage(usage)}


def _curves(curves: Curves) -> dict[str, Any]:
    """Shares of each band between the edges; epochs at the edges for bands of a single component."""
    bands = [
        {
            "name": band.name,
            "group": band.group,
            "components": list(band.members),
            "shares": shares,
            "epochs": curves.epochs[band.members[0]].tolist() if len(band.members) == 1 else None,
        }
        for band, shares in zip(curves.bands, curves.shares.tolist(), strict=True)
    ]
    return {"edges": list(curves.edges), "ramps": [ramp for _, ramp in curves.phases], "bands": bands}


def _usage(usage: VocabularyUse) -> dict[str, Any]:
    return {**asdict(usage), "coverage": [list(point) for point in usage.coverage]}
