"""The numbers of a report as JSON types: what `mdata report --json` prints.

Pure. The drawings know no number that is not here; epochs over time are told of the components that are drawn alone.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mdata.reporting.curves import Curves
from mdata.reporting.report_data import Part, ReportData
from mdata.reporting.vocabulary_use import Usage


def facts_of(data: ReportData) -> dict[str, Any]:
    """Everything that the page shows, by name."""
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
            **_usage(vocabulary.whole),
        },
        "problem": data.problem,
        "notes": [*data.notes, *([vocabulary.problem] if vocabulary.problem else [])],
    }


def _component(part: Part, usage: Usage) -> dict[str, Any]:
    known = {name: getattr(part, name) for name in ("path", "id", "level", "cap", "records", "skipped")}
    lengths = {"documents": part.lengths.documents, "tokens": part.lengths.tokens}
    return {
        **asdict(part.row),
        **known,
        "special_in_text": part.special_in_text,
        "tokenizer": part.tokenizer,
        "verified": part.verified,
        "lengths": lengths,
        "vocabulary": _usage(usage),
    }


def _curves(curves: Curves) -> dict[str, Any]:
    """Shares of each band between the edges; epochs at the edges of those that are one component."""
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


def _usage(usage: Usage) -> dict[str, Any]:
    return {**asdict(usage), "coverage": [list(point) for point in usage.coverage]}
