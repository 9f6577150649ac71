"""spikes/step-N.html: one self-contained file on what the step of a spike read, and how it differs from others.

It has loss and norm of the surrounding steps, the loss of each corpus next to its usual value, the gradient norm by
parameter group, and quotes of the step's documents, those of the most unusual corpora first. It is written from the
open data and the end of metrics.jsonl, so its cost does not grow with the run. Imported only if there is a spike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mdata import Dataset, MegatronOrder, Tracer
from mdata.dataset.mock_data import MOCK
from mdata.errors import counted
from mdata.reporting import svg
from mdata.reporting.html_tables import Cell, percent, table
from mdata.reporting.report_style import page
from mdata.reporting.svg import escape
from mdata.tracing.run_steps import Steps, StepSpan
from mdata.tracing.tracer import TracedPart, TracedSample
from mdata.util import atomic_io
from trainer.config.sections import RunConfig
from trainer.plan.lengths import batch_sizes
from trainer.run.metrics import last_metrics
from trainer.run.spike_detector import NEIGHBOURS, Spike, SpikeStep

MOST_ROWS = 48  # rows of the step that are quoted
MOST_PARTS = 3  # documents of a row that are quoted
SHOWN_TOKENS, SHOWN_CHARS = 120, 360  # of a document
SHOWN_STEPS = 100  # before the spike, in the drawings
_WIDTH, _HEIGHT = 620, 220

_STYLE = """
.row > * { flex: 1 1 24rem; } td.quote { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
td.place { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
.scroll.long { max-height: 60rem; }
@media (max-width: 600px) { body { margin: 1rem auto; padding: 0 .7rem; } svg text { font-size: 19px; } }
"""


def write_page(path: Path, config: RunConfig, dataset: Dataset, *, step: SpikeStep) -> None:
    """Write the page of a spike of the run whose folder is two levels up.

    Raises:
        OSError: from the file system. MdataError: metrics.jsonl, or a corpus, is damaged.
    """
    lines = [line for line in last_metrics(path.parents[1]) if line.get("loss") is not None]
    path.parent.mkdir(exist_ok=True)
    atomic_io.atomic_write(path, render(config, dataset, step=step, lines=lines).encode())


def render(config: RunConfig, dataset: Dataset, *, step: SpikeStep, lines: Sequence[Mapping[str, Any]]) -> str:
    """The whole page; `lines` are the last ones of metrics.jsonl."""
    number = step.spike.step
    title = f"Spike at step {number:,} of {Path(config.run.folder).resolve().name}"
    near = [line for line in lines if number - SHOWN_STEPS <= line["step"] <= number + NEIGHBOURS]
    corpora = _corpora(dataset, step, near)
    parts = [
        f"<h1>{escape(title)}</h1>{_lead(step)}",
        f'<div class="row">{_curve(near, step.spike, "loss")}{_curve(near, step.spike, "grad_norm")}</div>',
        f'<div class="row">{_by_corpus(corpora)}{_by_group(step)}</div>',
        _documents(config, dataset, step, corpora),
        _neighbours([line for line in near if line["step"] >= number - NEIGHBOURS], number),
    ]
    return page(title, parts, style=_STYLE)


_DONE = {
    "report": "Only reported: the update was applied.",
    "skip": "The update was skipped: weights and optimizer state are those of the step before.",
    "roll_back": "The run returns to the newest checkpoint before it and skips its samples.",
}


def _lead(step: SpikeStep) -> str:
    spike, last = step.spike, step.first_sample + step.num_samples - 1
    texts = [
        _stands_out("loss", spike.loss, spike.limits.loss, spike.loss_z),
        _stands_out("gradient norm", spike.grad_norm, spike.limits.grad_norm, spike.norm_z),
        f"samples {step.first_sample:,} to {last:,}",
    ]
    return f'<p class="lead">{escape("; ".join(texts))}. {escape(_DONE[step.action])}</p>'


def _stands_out(name: str, value: float, limit: float, score: float | None) -> str:
    deviations = "" if score is None else f", {score:.1f} deviations above the median"
    return f"{name} {value:.4g} (limit {limit:.4g}{deviations})"


def _curve(lines: Sequence[Mapping[str, Any]], spike: Spike, key: str) -> str:
    """One value over the steps around the spike, with its limit."""
    name = "loss, nats per token" if key == "loss" else "gradient norm"
    value, limit = getattr(spike, key), getattr(spike.limits, key)
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    shown = [y for y in (*(y for _, y in points), limit, value) if abs(y) < float("inf")]
    if not points or not shown:
        return ""
    low, high = min(shown), max(shown)
    margin = 0.08 * (high - low) or 0.5
    steps = [x for x, _ in points] + [spike.step]
    frame = svg.Frame(_WIDTH, _HEIGHT, (min(steps) - 0.5, max(steps) + 0.5), (low - margin, high + margin), left=84)
    x_ticks = [(x, f"{x:,.0f}") for x in svg.nice_ticks(frame.x[1], low=frame.x[0]) if x == round(x)]
    y_ticks = [(y, svg.short(y)) for y in svg.nice_ticks(frame.y[1], 5, low=frame.y[0])]
    parts = [svg.axes(frame, x_ticks=x_ticks, y_ticks=y_ticks), svg.titles(frame, x="step", y=name)]
    parts.append(svg.line([(frame.px(x), frame.py(y)) for x, y in points], kind="stroke-whole", hint=name))
    if limit < float("inf"):
        parts.append(svg.rule(frame.left, frame.py(limit), to=(frame.width - frame.right, frame.py(limit))))
    if abs(value) < float("inf"):
        x, y = frame.px(spike.step), frame.py(value)
        parts.append(svg.bar(x - 4, y - 4, width=8, height=8, kind="c1", hint=f"step {spike.step:,}: {value:.4g}"))
    drawing = svg.drawing(_WIDTH, _HEIGHT, label=name, description=counted(len(points), "step"), parts=parts)
    legend = svg.legend([("whole", "steps"), ("c1", f"step {spike.step:,}")])
    return f'<div>{drawing}{legend}<p class="lead">Dashed: the limit at step {spike.step:,}.</p></div>'


class _Corpus(NamedTuple):
    """A corpus in the step: its number of samples, its loss, and its usual loss; None: unknown."""

    name: str
    samples: int
    loss: float | None
    usual: float | None

    @property
    def excess(self) -> float | None:
        return None if self.loss is None or self.usual is None else self.loss - self.usual


def _corpora(dataset: Dataset, step: SpikeStep, lines: Iterable[Mapping[str, Any]]) -> list[_Corpus]:
    """The corpora of the step's samples, those with the most unusual loss first; none for mock data."""
    if not dataset.components:
        return []
    earlier = [line for line in lines if line["step"] < step.spike.step]
    counts = Tracer(dataset).counts(range(step.first_sample, step.first_sample + step.num_samples))
    corpora = []
    for name, samples in counts.items():
        loss = step.losses.get(name) if step.losses else step.spike.loss
        values = [(line.get("train") or {}).get(name) if step.losses else line["loss"] for line in earlier]
        measured = [value for value in values if value is not None]
        corpora.append(_Corpus(name, samples, loss, statistics.median(measured) if measured else None))
    return sorted(corpora, key=lambda of: float("-inf") if of.excess is None else of.excess, reverse=True)


def _by_corpus(corpora: Sequence[_Corpus]) -> str:
    rows = []
    for corpus in corpora:
        numbers = ((corpus.loss, ".4f"), (corpus.usual, ".4f"), (corpus.excess, "+.4f"))
        cells = [Cell(None) if x is None else Cell(f"{x:{form}}", "number") for x, form in numbers]
        rows.append([Cell(corpus.name), Cell(corpus.samples), *cells])
    if not rows:
        return ""
    header = ["corpus", "samples", "loss", "usual loss", "difference"]
    note = '<p class="lead">Usual: the median of the steps shown above.</p>'
    return f"<div><h2>Loss by corpus</h2>{note}{table(header, rows)}</div>"


def _by_group(step: SpikeStep) -> str:
    total = sum(norm * norm for norm in step.norms.values())
    if not total > 0 or total == float("inf"):
        return ""
    rows = [
        [Cell(name), Cell(f"{norm:.4g}", "number"), Cell(percent(norm * norm / total))]
        for name, norm in sorted(step.norms.items(), key=lambda item: -item[1])
    ]
    header = ["parameters, over all layers", "gradient norm", "share of squared norm"]
    return f"<div><h2>Gradient norm by group</h2>{table(header, rows)}</div>"


def _neighbours(lines: Sequence[Mapping[str, Any]], number: int) -> str:
    keys = ("loss", "grad_norm", "lr")
    rows = [
        [
            Cell(f"{line['step']:,}" + (" (spike)" if line["step"] == number else "")),
            *(Cell(None if line.get(key) is None else f"{line[key]:.4g}", "number") for key in keys),
        ]
        for line in lines
    ]
    if not rows:
        return ""
    return f"<h2>Surrounding steps</h2>{table(['step', 'loss', 'gradient norm', 'learning rate'], rows)}"


def _documents(config: RunConfig, dataset: Dataset, step: SpikeStep, corpora: Iterable[_Corpus]) -> str:
    if config.data.blend == MOCK:
        return "<h2>Documents</h2><p>The run uses mock data: random tokens without documents.</p>"
    number = step.spike.step
    span = StepSpan(sizes=batch_sizes(config.train), steps_before=number - 1, samples_before=step.first_sample)
    in_order = isinstance(dataset.options.order, MegatronOrder)
    tracer = Tracer(dataset, Steps([span], seed=config.run.seed, in_order=in_order))
    rows_of: dict[str, list[TracedSample]] = {corpus.name: [] for corpus in corpora}
    most = max(MOST_PARTS, -(-MOST_ROWS // max(1, len(rows_of))))
    components, _ = dataset.locate(tracer.step(number))
    for row, component in enumerate(components.tolist()):
        shown = rows_of[dataset.components[component].name]
        if len(shown) < most:
            shown.append(tracer.row(number, row))
    samples = [sample for shown in rows_of.values() for sample in shown][:MOST_ROWS]
    cells = [cell for sample in samples for cell in _sample_rows(tracer, sample)]
    header = ["corpus", "text", "file and row", "row, sample", "document", "tokens"]
    text = (
        f"{len(samples)} of {step.num_samples:,} rows, the first {MOST_PARTS} documents of each, quoted from where "
        f"the row starts. All of them: mdata trace {config.run.folder} --step {number} --text --rows {step.num_samples}"
    )
    return f'<h2>Documents</h2><p class="lead">{escape(text)}</p>{table(header, cells)}'


def _sample_rows(tracer: Tracer, sample: TracedSample) -> Iterable[list[Cell]]:
    assert sample.place is not None, "it is a row of the step"
    for part in sample.parts[:MOST_PARTS]:
        origin = f"{part.origin.path}:{part.origin.row}" if part.origin else "unknown"
        yield [
            Cell(sample.name),
            Cell(_quoted(tracer, sample.component, part), "quote"),
            Cell(origin, "place"),
            Cell(f"{sample.place.row}, {sample.sample:,}", "number"),
            Cell(part.document),
            Cell(part.count),
        ]


def _quoted(tracer: Tracer, component: int, part: TracedPart) -> str:
    """The beginning of a part's text; its ids if the tokenizer is unknown."""
    pieces, left = [], SHOWN_TOKENS
    for piece in part.pieces:
        if left > 0:
            pieces.append(piece._replace(length=min(left, piece.length)))
            left -= piece.length
    cut = replace(part, pieces=tuple(pieces))
    text = tracer.text(component, cut)
    if text is None:
        text = "ids " + " ".join(map(str, tracer.tokens(component, cut).tolist()))
    more = part.count > SHOWN_TOKENS or len(text) > SHOWN_CHARS
    return text[:SHOWN_CHARS] + (" ..." if more else "")
