"""The drawings of a run's report: plain numbers in, HTML out, drawn by mdata/reporting/svg.py.

Each function returns a drawing with its legend. A curve with many points is drawn through the means of neighbouring
points. The colours c0, c1, ... stand for corpora, or on a page of several runs for runs, and for nothing else; what a
page has only one of is drawn in the colour of the text.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mdata.errors import counted
from mdata.reporting import svg
from mdata.reporting.curves import COLOURS
from mdata.reporting.plots import largest

if TYPE_CHECKING:
    from trainer.report.data import CorpusRead

_WIDTH = 620
_LABEL_GAP = 0.06  # fraction of the axis range: the smallest distance between two labels
_MOST_NAME_CHARS = 60
_MOST_POINTS = 600  # points of a curve; more would not be visible
_MOST_MARKS = 40  # of a drawing
_PERPLEXITY = 52  # pixels for its axis
_TOKENS = "million tokens trained on"

Curve = Sequence[tuple[float, float]]
MARKS = {"R": "resumed", "L": "layout changed", "M": "mixture changed", "S": "spike", "B": "rolled back"}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The axis of tokens, with the steps below it.

    Args:
        steps: (million tokens, step), ascending. marks: (million tokens, one of MARKS, what it was).
    """

    steps: Sequence[tuple[float, int]] = ()
    marks: Sequence[tuple[float, str, str]] = ()

    def step_at(self, tokens: float) -> int | None:
        """The step that ends with this many million tokens, interpolated between known ones; None: unknown."""
        place = bisect.bisect_left(self.steps, (tokens, 0))
        if not self.steps or place == len(self.steps):
            return None
        (x0, s0), (x1, s1) = self.steps[place - 1] if place else (0.0, 0), self.steps[place]
        return s1 if x1 == x0 else round(s0 + (s1 - s0) * (tokens - x0) / (x1 - x0))


_PLAIN = Axis()
OF_TOKENS = "nats per token"


def loss_panel(
    name: str,
    train: Curve,
    *,
    valid: Curve,
    lines: Sequence[tuple[str, float]],
    axis: Axis = _PLAIN,
    quantity: str = OF_TOKENS,
) -> str:
    """Training and validation loss over tokens and perplexity, with baselines as labelled horizontal lines.

    Args:
        name: of the validation corpus. train, valid: (million tokens, nats per token).
        lines: (label, nats per token). quantity: unit of the losses; others than those of tokens have no perplexity.
    """
    of_tokens = quantity == OF_TOKENS
    values = [y for _, y in [*train, *valid]] + [y for _, y in lines]
    margin = 0.06 * (max(values) - min(values)) or 0.5
    limits = min(values) - margin, max(values) + margin
    frame = _frame(390, [*train, *valid], limits, right=_PERPLEXITY if of_tokens else 24)
    parts = [_axes(frame, quantity, axis, perplexity=of_tokens)]
    parts.append(_line(frame, _thinned(train), "stroke-others", "training"))
    valid = _thinned(valid)
    parts.append(_line(frame, valid, "stroke-whole", "validation"))
    parts += [
        svg.bar(frame.px(x) - 3, frame.py(y) - 3, width=6, height=6, kind="whole", hint=f"{y:.4g}") for x, y in valid
    ]
    right = frame.width - frame.right
    for (label, y), place in zip(lines, _spread([y for _, y in lines], limits), strict=True):
        parts.append(svg.rule(frame.left, frame.py(y), to=(right, frame.py(y))))
        label_at = right - 4, frame.py(place) - 4
        parts.append(svg.text(label_at, f"{shown(label)} {y:.2f}", anchor="end", kind="quiet over"))
    drawing = svg.drawing(
        _WIDTH,
        390,
        label=f"Loss of {shown(name)}",
        description=f"{counted(len(train), 'step')} of training",
        parts=parts,
    )
    return drawing + svg.legend([("others", "training (all corpora)"), *([("whole", "validation")] if valid else [])])


def over_tokens(label: str, curve: Curve, *, quantity: str, axis: Axis = _PLAIN) -> str:
    """One value over tokens; the axis begins at 0.

    Args:
        label: of the drawing. curve: (million tokens, value). quantity: the value's name.
    """
    frame = _frame(260, curve, (0.0, max([y for _, y in curve] or [1.0]) * 1.1 or 1.0))
    parts = [_axes(frame, quantity, axis), _line(frame, _thinned(curve), "stroke-whole", quantity)]
    return svg.drawing(_WIDTH, 260, label=label, description=counted(len(curve), "measurement"), parts=parts)


def several(
    label: str,
    curves: Sequence[tuple[str, Curve, int]],
    *,
    quantity: str,
    axis: Axis = _PLAIN,
    description: str = "",
    perplexity: bool = True,
) -> str:
    """Curves over tokens, each in a colour.

    Args:
        curves: (name, points, number of the colour); each has a point. perplexity: the values are losses.
    """
    thinned = [(name, _thinned(curve), number) for name, curve, number in curves]
    values = [y for _, curve, _ in thinned for _, y in curve]
    margin = 0.06 * (max(values) - min(values)) or 0.5
    points = [point for _, curve, _ in thinned for point in curve]
    frame = _frame(390, points, (min(values) - margin, max(values) + margin), right=_PERPLEXITY if perplexity else 24)
    lines = [_line(frame, curve, f"stroke-{_colour(number)}", shown(name)) for name, curve, number in thinned]
    parts = [_axes(frame, quantity, axis, perplexity=perplexity), *lines]
    drawing = svg.drawing(
        _WIDTH, 390, label=label, description=description or counted(len(curves), "curve"), parts=parts
    )
    return drawing + svg.legend([(_colour(number), shown(name)) for name, _, number in curves])


def document_lengths(corpora: Sequence[CorpusRead]) -> str:
    """For each corpus the fraction of its documents by length, in powers of two."""
    used = [k for corpus in corpora for k, count in enumerate(corpus.lengths) if count]
    classes = range(min(used, default=0), max(used, default=0) + 1)
    totals = [sum(corpus.lengths) or 1 for corpus in corpora]
    high = max((max(corpus.lengths) / total for corpus, total in zip(corpora, totals, strict=True)), default=0) or 1
    frame = svg.Frame(_WIDTH, 290, (0, len(classes)), (0, high * 1.05), left=84)
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
                hint = f"{shown(corpus.name)}: {counted(corpus.lengths[k], 'document')}"
                parts.append(svg.bar(x, top, width=bar_width, height=bar_height, kind=_colour(number), hint=hint))
    parts.append(svg.titles(frame, x="tokens in a document, up to", y="fraction of the documents"))
    drawing = svg.drawing(
        _WIDTH, 290, label="Document lengths", description=counted(sum(totals), "document"), parts=parts
    )
    return drawing + svg.legend([(_colour(i), shown(corpus.name)) for i, corpus in enumerate(corpora)])


def _colour(number: int) -> str:
    return f"c{number % COLOURS}"


def _frame(height: int, curve: Curve, limits: tuple[float, float], *, right: int = 24) -> svg.Frame:
    last = max((x for x, _ in curve), default=1.0) * 1.02
    return svg.Frame(_WIDTH, height, (0, last), limits, left=84, right=right, top=40, bottom=66)


def _axes(frame: svg.Frame, quantity: str, axis: Axis, *, perplexity: bool = False) -> str:
    """Grid, numbers, titles and marks; with `perplexity` the values are losses, and its axis is on the right."""
    x_values, y_values = svg.nice_ticks(frame.x[1], 5), svg.nice_ticks(frame.y[1], low=frame.y[0])
    y_ticks = [(y, svg.short(y)) for y in y_values]
    parts = [svg.axes(frame, x_ticks=[(x, f"{x:.4g}") for x in x_values], y_ticks=y_ticks)]
    steps = [(x, step) for x in x_values if (step := axis.step_at(x)) is not None]
    below = frame.height - frame.bottom + 35
    parts += [svg.text((frame.px(x), below), svg.short(step), anchor="middle", kind="quiet") for x, step in steps]
    parts.append(svg.titles(frame, x=f"{_TOKENS}; below: steps" if steps else _TOKENS, y=quantity))
    if perplexity:
        right = frame.width - frame.right
        parts.append(svg.text((right + 30, 14), "perplexity", anchor="end", kind="quiet"))
        parts += [svg.text((right + 7, frame.py(y) + 4.5), _perplexity(y), kind="quiet") for y in y_values]
    return "".join(parts) + _marks(frame, axis.marks)


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.3g}" if loss < 6.9 else svg.short(round(math.exp(min(loss, 60.0)), -1))


def _marks(frame: svg.Frame, marks: Sequence[tuple[float, str, str]]) -> str:
    """Vertical lines with letters above; of many, evenly chosen ones."""
    every, parts, last = -(-len(marks) // _MOST_MARKS) or 1, [], -math.inf
    for x, letter, hint in marks[::every]:
        left = frame.px(min(x, frame.x[1]))
        parts.append(svg.rule(left, frame.top, to=(left, frame.height - frame.bottom)))
        at = max(left, last + 13)  # letters stand beside each other
        last = at
        parts.append(
            f"<g><title>{svg.escape(hint)}</title>{svg.text((at, frame.top - 5), letter, anchor='middle')}</g>"
        )
    return "".join(parts)


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
