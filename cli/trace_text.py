"""The output of `mdata trace` for a sample, a step, or the readers of a document: JSON types, or tables.

Origins are `file:row`. Text is shown as a Python string literal, so that line ends and unusual characters are visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import mdata
from mdata.errors import counted, few
from mdata.tracing.cyclic_steps import CyclicSteps
from mdata.tracing.run_record import in_ranges
from mdata.tracing.run_steps import Steps
from mdata.tracing.tracer import TracedPart, TracedSample

from .text import table


@dataclass(frozen=True)
class Shown:
    """Whether to show texts and ids, and how much of each; None: all."""

    text: bool
    tokens: bool
    length: int | None


def sample_facts(tracer: mdata.Tracer, traced: TracedSample, *, shown: Shown) -> dict[str, Any]:
    """A sample as JSON types."""
    parts = [_part_facts(tracer, traced.component, part, shown=shown) for part in traced.parts]
    return {**_head_facts(traced), "parts": parts}


def sample_text(tracer: mdata.Tracer, traced: TracedSample, *, shown: Shown, place: int | None = None) -> str:
    """A sample as text; with a position: only the token there."""
    parts, lines = traced.parts, [_sentence(tracer, traced)]
    if place is not None:
        part = traced.part_at(place)
        if part is None:
            return f"{lines[0]}\nplace {place} of the sample is padding\n"
        parts = (part,)
        id = int(tracer.tokens(traced.component, part)[place - part.first])
        where = f"token {part.in_document + place - part.first:,} of document {part.document:,}"
        lines.append(f"place {place:,} of the sample: {where}, id {id}")
    if not tracer.exact:
        lines.append("what it reads, before any of it is rearranged, masked or cut:")
    header = ["in the sample", "document", "its tokens", "sequences", "shard", "origin"]
    lines.append(table(header, [_part_row(part) for part in parts]) if parts else "it reads no token")
    for part in parts:
        lines += _content(tracer, traced.component, part, shown=shown)
    return "\n".join(lines) + "\n"


def step_table(
    tracer: mdata.Tracer,
    step: int,
    *,
    samples: npt.NDArray[np.int64],
    counts: Mapping[str, int],
    traced: Sequence[TracedSample],
    rank: int | None,
) -> str:
    """A step as text: the number of samples of each component, then the first rows."""
    steps = tracer.steps
    assert steps is not None, "a step was found"
    whose = "" if rank is None else f"; {len(samples):,} of them are rank {rank}'s"
    if isinstance(steps, Steps) and steps.consecutive:
        first, size = steps.bounds(step)
        samples_text = f"samples {first:,} to {first + size - 1:,}"
    else:
        samples_text = counted(len(steps.rows(step)), "sample")
    skipped = int(in_ranges(samples, tracer.skip).sum())
    recorded = f"; {skipped:,} of them are recorded as skipped" if skipped else ""
    lines = [f"{steps.verb} {step:,}: {samples_text}{whose}{recorded}"]
    lines.append(table(["component", "samples", "share"], [[n, c, c / len(samples)] for n, c in counts.items()]))
    if traced:
        header = ["row", "sample", "rank", "microbatch", "component", "its sample", "epoch", "documents", "origin"]
        lines += ["", table(header, [_step_row(sample) for sample in traced])]
    if len(traced) < len(samples):
        lines.append(f"and {len(samples) - len(traced):,} more (--rows)")
    return "\n".join(lines) + "\n"


def reader_table(
    tracer: mdata.Tracer,
    component: int,
    *,
    document: int,
    readers: Sequence[TracedSample],
    more: bool,
    bounded: bool,
    shown: Shown,
) -> str:
    """The readers of a document as text."""
    part = tracer.dataset.components[component]
    origin = tracer.documents(component).origin(document)
    size = sum(map(part.corpus.length_of, range(*part.corpus.sequences_of(document))))
    place = f", {origin.path}:{origin.row}" if origin else ""
    whose, further = ("", "step") if isinstance(tracer.steps, CyclicSteps) else (" of its component", "sample")
    far = "" if bounded else f", in the first 3 epochs{whose} (--until-{further} searches further)"
    lines = [f"document {document:,} of {part.name}{place}: {counted(size, 'token')}{far}"]
    header = ["step", "sample", "rank", "microbatch", "its sample", "epoch", "tokens of it", "in the sample"]
    rows = [_reader_row(sample) for sample in readers]
    where = " before the search ends (with the run, --until-step or --until-sample)" if bounded else " there"
    lines.append(table(header, rows) if rows else f"no sample reads it{where}")
    lines += ["and more (--rows)"] if more else []
    for sample in readers if shown.text or shown.tokens else ():
        lines.append(f"sample {sample.sample:,}:")
        for some in sample.parts:
            lines += _content(tracer, component, some, shown=shown)
    return "\n".join(lines) + "\n"


def _head_facts(traced: TracedSample) -> dict[str, Any]:
    place = traced.place
    return {
        "sample": traced.sample,
        "step": place.step if place else None,
        "row": place.row if place else None,
        "rank": place.dp_rank if place else None,
        "microbatch": place.microbatch if place else None,
        "again": [p.step for p in traced.again],
        "component": traced.name,
        "inside": traced.inside,
        "epoch": traced.epoch,
        "skipped": traced.skipped,
    }


def _part_facts(tracer: mdata.Tracer, component: int, part: TracedPart, *, shown: Shown) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "first": part.first,
        "tokens": part.count,
        "document": part.document,
        "in_document": [part.in_document, part.in_document + part.count],
        "sequences": list(part.sequences),
        "shard": str(part.shard),
        "file": part.origin.path if part.origin else None,
        "row": part.origin.row if part.origin else None,
    }
    if shown.tokens:
        facts["ids"] = tracer.tokens(component, part)[: shown.length].tolist()
    if shown.text:
        text = tracer.text(component, part)
        facts["text"] = text[: shown.length] if text is not None else None
    return facts


def _sentence(tracer: mdata.Tracer, traced: TracedSample) -> str:
    place, steps = traced.place, tracer.steps
    words = [f"sample {traced.sample:,}: sample {traced.inside:,} of {traced.name}"]
    words += [f"epoch {traced.epoch:,}"] if traced.epoch is not None else []
    words += [f"{steps.verb} {place.step:,}, row {place.row:,} of {steps.batch_text}"] if place and steps else []
    if place and place.dp_rank is not None:
        words.append(f"rank {place.dp_rank}, microbatch {place.microbatch}")
    if steps and not place:
        shuffled = isinstance(steps, CyclicSteps)
        words.append("not read in the epochs that were searched" if shuffled else "no evaluation reads it")
    if traced.again:
        words.append(f"again {steps.verb if steps else ''} {few([f'{place.step:,}' for place in traced.again])}")
    if traced.skipped:
        words.append("recorded as skipped")
    return ", ".join(words)


def _part_row(part: TracedPart) -> list[object]:
    first, last = part.sequences
    return [
        _range(part.first, part.count),
        part.document,
        _range(part.in_document, part.count),
        f"{first:,}" if first == last else f"{first:,}-{last:,}",
        part.shard.name,
        f"{part.origin.path}:{part.origin.row}" if part.origin else None,
    ]


def _step_row(traced: TracedSample) -> list[object]:
    place, first = traced.place, traced.parts[0] if traced.parts else None
    assert place is not None, "a step was found"
    numbers = [f"{part.document:,}" for part in traced.parts]
    return [
        place.row,
        traced.sample,
        place.dp_rank,
        place.microbatch,
        traced.name,
        traced.inside,
        traced.epoch,
        few(numbers, 3),
        f"{first.origin.path}:{first.origin.row}" if first and first.origin else None,
    ]


def _reader_row(traced: TracedSample) -> list[object]:
    place = traced.place
    return [
        place.step if place else None,
        traced.sample,
        place.dp_rank if place else None,
        place.microbatch if place else None,
        traced.inside,
        traced.epoch,
        " ".join(_range(part.in_document, part.count) for part in traced.parts),
        " ".join(_range(part.first, part.count) for part in traced.parts),
    ]


def _content(tracer: mdata.Tracer, component: int, part: TracedPart, *, shown: Shown) -> list[str]:
    lines = []
    if shown.tokens:
        ids = tracer.tokens(component, part).tolist()
        more = "" if shown.length is None or len(ids) <= shown.length else f" and {len(ids) - shown.length:,} more"
        lines.append(f"document {part.document:,}: {' '.join(map(str, ids[: shown.length]))}{more}")
    if shown.text:
        text = tracer.text(component, part)
        if text is None:
            raise mdata.UsageError("the tokenizer of the corpus is not known", fix="--tokens, or `mdata adopt` with it")
        more = "" if shown.length is None or len(text) <= shown.length else f" and {len(text) - shown.length:,} more"
        lines.append(f"document {part.document:,}: {text[: shown.length]!r}{more}")
    return lines


def _range(first: int, count: int) -> str:
    """First and last: "0-31"."""
    return f"{first:,}-{first + count - 1:,}" if count > 1 else f"{first:,}"
