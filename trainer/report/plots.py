"""The drawings of a run's report: plain numbers in, HTML out, drawn by mdata/reporting/svg.py.

Each function returns a drawing with its legend. A curve with many points is drawn through the means of neighbouring
points. It changes with the drawings of svg.py, the page with its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mdata.reporting import svg
from mdata.reporting.curves import COLOURS
from mdata.reporting.plots import largest

if TYPE_CHECKING:
    from trainer.report.data import CorpusRead

_WIDTH = 620
_LABEL_GAP = 0.06  # fraction of the axis range: the smallest distance between two labels
_MOST_NAME_CHARS = 60
_MOST_POINTS = 600  # points of a curve; more would not be visible
_TOKENS = "million tokens trained on"

Curve = Sequence[tuple[float, float]]


def loss_panel(name: str, train: Curve, *, valid: Curve, lines: Sequence[tuple[str, float]]) -> str:
    """Training and validation loss over tokens, with baselines as labelled horizontal lines.

    Args:
        name: of the validation corpus. train, valid: (million tokens, nats per token).
        lines: (label, nats per token).
    """
    values = [y for _, y in [*train, *valid]] + [y for _, y in lines]
    margin = 0.06 * (max(values) - min(values)) or 0.5
    limits = min(values) - margin, max(values) + margin
    frame = _frame(390, [*train, *valid], limits, right=190 if lines else 24)
    parts = [_axes(frame, "nats per token"), _line(frame, _thinned(train), "stroke-others", "training")]
    parts.append(_line(frame, valid, "stroke-c0", "validation"))
    parts += [
        svg.bar(frame.px(x) - 3, frame.py(y) - 3, width=6, height=6, kind="c0", hint=f"{y:.4g}") for x, y in valid
    ]
    right = frame.width - frame.right
    for (label, y), place in zip(lines, _spread([y for _, y in lines], limits), strict=True):
        parts.append(svg.rule(frame.left, frame.py(y), to=(right, frame.py(y))))
        parts.append(svg.text((right + 8, frame.py(place) + 4.5), f"{shown(label)} {y:.2f}", kind="quiet"))
    drawing = svg.drawing(
        _WIDTH, 390, label=f"Loss of {shown(name)}", description=f"{len(train):,} steps of training", parts=parts
    )
    return drawing + svg.legend([("others", "training (all corpora)"), *([("c0", "validation")] if valid else [])])


def over_tokens(label: str, curve: Curve, *, quantity: str) -> str:
    """One value over tokens; the axis begins at 0.

    Args:
        label: of the drawing. curve: (million tokens, value). quantity: the value's name.
    """
    frame = _frame(260, curve, (0.0, max([y for _, y in curve] or [1.0]) * 1.1 or 1.0))
    parts = [_axes(frame, quantity), _line(frame, _thinned(curve), "stroke-c0", quantity)]
    return svg.drawing(_WIDTH, 260, label=label, description=f"{len(curve):,} measurements", parts=parts)


def component_losses(curves: Sequence[tuple[str, Curve]]) -> str:
    """Training loss over tokens, a line for each component of the blend.

    Args:
        curves: (name, (million tokens, nats per token)); each has a point.
    """
    points = [point for _, curve in curves for point in _thinned(curve)]
    values = [y for _, y in points]
    margin = 0.06 * (max(values) - min(values)) or 0.5
    frame = _frame(390, points, (min(values) - margin, max(values) + margin))
    lines = [
        _line(frame, _thinned(curve), f"stroke-{_colour(number)}", shown(name))
        for number, (name, curve) in enumerate(curves)
    ]
    measured = f"{sum(len(curve) for _, curve in curves):,} measurements of {len(curves)} corpora"
    drawing = svg.drawing(
        _WIDTH,
        390,
        label="Training loss by corpus",
        description=measured,
        parts=[_axes(frame, "nats per token"), *lines],
    )
    return drawing + svg.legend([(_colour(number), shown(name)) for number, (name, _) in enumerate(curves)])


def document_lengths(corpora: Sequence[CorpusRead]) -> str:
    """For each corpus the fraction of its documents by length, in powers of two."""
    used = [k for corpus in corpora for k, count in enumerate(corpus.lengths) if count]
    classes = range(min(used, default=0), max(used, default=0) + 1)
    totals = [sum(corpus.lengths) or 1 for corpus in corpora]
    high = max((max(corpus.lengths) / total for corpus, total in zip(corpora, totals, strict=True)), default=0) or 1
    frame = svg.Frame(_WIDTH, 290, (0, len(classes)), (0, high * 1.05))
    ticks = [(t, f"{100 * t:.3g} %") for t in svg.nice_ticks(high * 1.05, 5)]
    step = 1 + (len(classes) - 1) // 10
    parts = [
        svg.axes(frame, x_ticks=[(i + 0.5, largest(k)) for i, k in list(enumerate(classes))[::step]], y_ticks=ticks)
    ]
    width = 0.8 / max(len(corpora), 1)
    for number, (corpus, total) in enumerate(zip(corpora, totals, strict=True)):
        for i, k in enumerate(classes):
            if k < len(corpus.lengths) and corpus.lengths[k]:
                x, top = frame.px(i + 0.1 + number * width), frame.py(corpus.lengths[k] / total)
                bar_width, bar_height = frame.px(width) - frame.px(0), frame.height - frame.bottom - top
                hint = f"{shown(corpus.name)}: {corpus.lengths[k]:,} documents"
                parts.append(svg.bar(x, top, width=bar_width, height=bar_height, kind=_colour(number), hint=hint))
    parts.append(svg.titles(frame, x="tokens in a document, up to", y="fraction of the documents"))
    drawing = svg.drawing(_WIDTH, 290, label="Document lengths", description=f"{sum(totals):,} documents", parts=parts)
    return drawing + svg.legend([(_colour(i), shown(corpus.name)) for i, corpus in enumerate(corpora)])


def _colour(number: int) -> str:
    return f"c{number % COLOURS}"


def _frame(height: int, curve: Curve, limits: tuple[float, float], *, right: int = 24) -> svg.Frame:
    last = max((x for x, _ in curve), default=1.0) * 1.02
    return svg.Frame(_WIDTH, height, (0, last), limits, right=right)


def _axes(frame: svg.Frame, quantity: str) -> str:
    x_ticks = [(x, f"{x:.4g}") for x in svg.nice_ticks(frame.x[1])]
    y_ticks = [(y, svg.short(y)) for y in svg.nice_ticks(frame.y[1], low=frame.y[0])]
    return svg.axes(frame, x_ticks=x_ticks, y_ticks=y_ticks) + svg.titles(frame, x=_TOKENS, y=quantity)


def _line(frame: svg.Frame, curve: Curve, kind: str, hint: str) -> str:
    return svg.line([(frame.px(x), frame.py(y)) for x, y in curve], kind=kind, hint=hint) if curve else ""


def shown(name: str) -> str:
    """A name, cut to a length that fits a drawing."""
    return name if len(name) <= _MOST_NAME_CHARS else f"{name[: _MOST_NAME_CHARS - 3]}..."


def _spread(values: Sequence[float], limits: tuple[float, float]) -> list[float]:
    """Positions for labels at `values`, moved up just enough to avoid overlaps."""
    gap = _LABEL_GAP * (limits[1] - limits[0])
    places = list(values)
    below = float("-inf")
    for i in sorted(range(len(values)), key=lambda i: values[i]):
        places[i] = below = max(values[i], below + gap)
    return places


def _thinned(curve: Curve) -> list[tuple[float, float]]:
    """Means of runs of neighbours, so that a long curve stays light and readable."""
    step = -(-len(curve) // _MOST_POINTS)
    if step <= 1:
        return list(curve)
    runs = [curve[i : i + step] for i in range(0, len(curve), step)]
    return [(run[-1][0], sum(y for _, y in run) / len(run)) for run in runs]
