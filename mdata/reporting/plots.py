"""The drawings of a blend's report: plain numbers in, <svg> text out.

One drawing for values that change over training, small ones side by side for each component. The page's tables hold the
numbers; every area, line and bar has a hint with its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mdata.errors import counted
from mdata.reporting import svg
from mdata.reporting.curves import Band, Curves
from mdata.reporting.token_counts import Lengths
from mdata.reporting.vocabulary_use import VocabularyUse

WIDTH = 900
MARKS = (1, 4)  # epochs to mark: everything was read once; repetition begins to hurt
_FAINT_LINES = 200
MOST_BARS = 30
_NAME = 26  # characters of a name beside a bar


def shares_over_training(curves: Curves, unit: str) -> str:
    """Stacked shares, with phase borders as dashed lines."""
    frame = svg.Frame(WIDTH, 340, (0, curves.edges[-1]), (0, 1), top=40)
    parts = [_x_axis(frame, unit, [(k / 4, f"{25 * k} %") for k in range(5)])]
    below = [0.0] * (len(curves.edges) - 1)
    for band, shares in zip(curves.bands, curves.shares.tolist(), strict=True):
        above = [low + share for low, share in zip(below, shares, strict=True)]
        outline = [*_stairs(frame, curves.edges, above), *reversed(list(_stairs(frame, curves.edges, below)))]
        hint = f"{band.name}: {_range(shares)} of the samples"
        parts.append(svg.area(outline, kind=kind_of(band), strength=band.strength, hint=hint))
        below = above
    parts += [_phases(frame, curves), svg.titles(frame, y="share")]
    areas, phases = counted(len(curves.bands), "area"), counted(len(curves.phases), "phase")
    description = f"{areas} over {curves.edges[-1]:,} {unit} in {phases}"
    return svg.drawing(WIDTH, 340, label="Shares over training", description=description, parts=parts)


def epochs_over_training(curves: Curves, unit: str, *, names: Sequence[str]) -> str:
    """How often each component has been read, with marks at 1 and 4."""
    last = curves.epochs[:, -1]
    high = max(float(last.max()), 1.0) * 1.06
    frame = svg.Frame(WIDTH, 320, (0, curves.edges[-1]), (0, high), top=40, right=112)
    parts = [_x_axis(frame, unit, [(tick, f"{tick:.4g}") for tick in svg.nice_ticks(high)])]
    alone = {band.members[0]: band for band in curves.bands if len(band.members) == 1 and band.colour is not None}
    others = [i for i in sorted(range(len(names)), key=lambda i: -last[i]) if i not in alone][:_FAINT_LINES]
    for i in [*reversed(others), *alone]:
        band = alone.get(i)
        values = zip(curves.edges, curves.epochs[i].tolist(), strict=True)
        points = _bends([(frame.px(x), frame.py(y)) for x, y in values])
        kind = f"stroke-{kind_of(band)}" if band else "stroke-others"
        hint = f"{names[i]}: {last[i]:.4g} epochs"
        parts.append(svg.line(points, kind=kind, strength=band.strength if band else 0.55, hint=hint))
    marks = [mark for mark in MARKS if mark < high]
    right, places = frame.width - frame.right, [frame.py(mark) for mark in marks]
    parts += [svg.rule(frame.left, y, to=(right, y)) for y in places]
    parts += [svg.text((right + 6, y + 4.5), label, kind="quiet") for y, label in _mark_labels(marks, places, 16)]
    parts += [_phases(frame, curves), svg.titles(frame, y="epochs")]
    description = f"{counted(len(names), 'curve')}; at the end between {last.min():.4g} and {last.max():.4g} epochs"
    return svg.drawing(WIDTH, 320, label="Epochs over training", description=description, parts=parts)


def epochs_at_end(curves: Curves, names: Sequence[str], *, caps: Sequence[str | None]) -> str:
    """The components with the most epochs, as bars."""
    last = curves.epochs[:, -1].tolist()
    shown = sorted(range(len(names)), key=lambda i: -last[i])[:MOST_BARS]
    high = max(*(last[i] for i in shown), 1.0) * 1.02
    height = 22 * len(shown) + 40
    frame = svg.Frame(WIDTH, height, (0, high), (0, 1), left=236, right=130, top=20, bottom=20)
    colours = {band.members[0]: band for band in curves.bands if len(band.members) == 1}
    parts = []
    marks = [mark for mark in MARKS if mark < high]
    places = [frame.px(mark) for mark in marks]
    parts += [svg.rule(x, 20, to=(x, height - 18)) for x in places]
    labels = _mark_labels(marks, places, 80)
    parts += [svg.text((x, 14), label, anchor="middle", kind="quiet") for x, label in labels]
    for place, i in enumerate(shown):
        y = 24 + 22 * place
        band = colours.get(i)
        kind, strength = (kind_of(band), band.strength) if band else ("others", 1.0)
        value = f"{last[i]:.4g}" + (f" of at most {caps[i]}" if caps[i] else "")
        wide = frame.px(last[i]) - frame.left
        parts.append(svg.text((frame.left - 8, y + 13), _shortened(names[i]), anchor="end"))
        hint = f"{names[i]}: {value} epochs"
        parts.append(svg.bar(frame.left, y, width=wide, height=16, kind=kind, strength=strength, hint=hint))
        parts.append(svg.text((frame.left + wide + 6, y + 13), value))
    description = f"{counted(len(shown), 'bar')}, from {last[shown[0]]:.4g} down to {last[shown[-1]]:.4g} epochs"
    return svg.drawing(WIDTH, height, label="Epochs at the end", description=description, parts=parts)


def document_lengths(name: str, lengths: Lengths, *, classes: range) -> str:
    """Two bars per length class: the fraction of documents, and the fraction of tokens."""
    documents, tokens = _parts(lengths.documents, classes), _parts(lengths.tokens, classes)
    high = max(*documents, *tokens, 0.05)
    frame = svg.Frame(420, 190, (0, len(classes)), (0, high * 1.05), left=48, top=10)
    ticks = [(t, f"{100 * t:.3g} %") for t in svg.nice_ticks(high * 1.05, 4)]
    step = 1 + (len(classes) - 1) // 9
    x_ticks = [(i + 0.5, largest(k)) for i, k in enumerate(classes) if i % step == 0]
    parts = [svg.axes(frame, x_ticks=x_ticks, y_ticks=ticks)]
    for i, k in enumerate(classes):
        for values, kind, place in ((documents, "c0", 0.08), (tokens, "c1", 0.5)):
            left, right = frame.px(i + place), frame.px(i + place + 0.42)
            top, unit = frame.py(values[i]), "documents" if kind == "c0" else "tokens"
            hint = f"{_range_of(k)}: {100 * values[i]:.3g} % of the {unit}"
            height = frame.height - frame.bottom - top
            if values[i]:
                parts.append(svg.bar(left, top, width=right - left, height=height, kind=kind, hint=hint))
    parts.append(svg.titles(frame, x="tokens in a document, up to"))
    description = f"{counted(sum(lengths.documents), 'document')}, {counted(sum(lengths.tokens), 'token')}"
    return svg.drawing(420, 190, label=f"Document lengths of {name}", description=description, parts=parts)


def coverage(overall: VocabularyUse, drawn: Sequence[tuple[str, Band | None, VocabularyUse]]) -> str:
    """The fraction of all tokens covered by the k most frequent ids, for the whole and for single components."""
    most = max([usage.coverage[-1][0] for _, _, usage in drawn if usage.coverage] + [overall.coverage[-1][0], 10])
    frame = svg.Frame(WIDTH, 320, (1, most), (0, 1), top=26, log_x=True)
    x_ticks = [(10.0**k, svg.short(10.0**k)) for k in range(9) if 10**k <= most]
    parts = [svg.axes(frame, x_ticks=x_ticks, y_ticks=[(k / 4, f"{25 * k} %") for k in range(5)])]
    for name, band, usage in [*drawn, ("all", None, overall)]:
        if not usage.coverage:
            continue
        kind = "whole" if usage is overall else f"stroke-{kind_of(band)}" if band else "stroke-others"
        points = [(frame.px(rank), frame.py(part)) for rank, part in usage.coverage]
        hint = f"{name}: {usage.distinct:,} ids"
        parts.append(svg.line(points, kind=kind, strength=band.strength if band else 1.0, hint=hint))
    parts.append(svg.titles(frame, x="the k most frequent ids", y="fraction of the tokens"))
    half = next((rank for rank, part in overall.coverage if part >= 0.5), most)
    description = f"half of the tokens are among the {half:,} most frequent of {overall.distinct:,} ids"
    return svg.drawing(WIDTH, 320, label="Use of the vocabulary", description=description, parts=parts)


def kind_of(band: Band) -> str:
    """The class of a band's colour."""
    return "others" if band.colour is None else f"c{band.colour}"


def _x_axis(frame: svg.Frame, unit: str, y_ticks: Sequence[tuple[float, str]]) -> str:
    ticks = [(x, svg.short(x)) for x in svg.nice_ticks(frame.x[1], 8)]
    return svg.axes(frame, x_ticks=ticks, y_ticks=y_ticks) + svg.titles(frame, x=f"{unit} of the training")


def _stairs(frame: svg.Frame, edges: Sequence[int], values: Sequence[float]) -> Iterator[tuple[float, float]]:
    """The outline of values that are constant between edges."""
    for i, value in enumerate(values):
        if i == 0 or value != values[i - 1]:
            yield frame.px(edges[i]), frame.py(values[i - 1] if i else value)
            yield frame.px(edges[i]), frame.py(value)
    yield frame.px(edges[-1]), frame.py(values[-1])


def _bends(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A curve without points at which it hardly bends; in drawing units."""
    bends: list[tuple[float, float]] = []
    for x, y in points:
        if len(bends) > 1:
            (x0, y0), (x1, y1) = bends[-2:]
            if abs((y1 - y0) * (x - x1) - (y - y1) * (x1 - x0)) <= 2e-3 * (x1 - x0) * (x - x1):
                bends.pop()
        bends.append((x, y))
    return bends


def _phases(frame: svg.Frame, curves: Curves) -> str:
    """Borders of phases, with names where there is space."""
    if len(curves.phases) < 2:
        return ""
    ends = [start for start, _ in curves.phases[1:]] + [curves.edges[-1]]
    parts = []
    for number, ((start, is_ramp), stop) in enumerate(zip(curves.phases, ends, strict=True)):
        x, width = frame.px(start), frame.px(stop) - frame.px(start)
        if number:
            parts.append(svg.rule(x, frame.top - 12, to=(x, frame.height - frame.bottom)))
        for name in (f"phase {number + 1}" + (" (ramp)" if is_ramp else ""), str(number + 1)):
            if 7.5 * len(name) < width:
                parts.append(svg.text((x + width / 2, frame.top - 6), name, anchor="middle", kind="quiet"))
                break
    return "".join(parts)


def _mark_labels(marks: Sequence[int], places: Sequence[float], gap: float) -> list[tuple[float, str]]:
    """The labels of the marks; one common label if the marks are too close to each other."""
    if len(marks) > 1 and abs(places[0] - places[-1]) < gap:
        return [(sum(places) / len(places), f"{' and '.join(map(str, marks))} epochs")]
    return [(at, counted(mark, "epoch")) for mark, at in zip(marks, places, strict=True)]


def _parts(counts: Sequence[int], classes: range) -> list[float]:
    total = sum(counts) or 1
    return [counts[k] / total if k < len(counts) else 0.0 for k in classes]


def largest(k: int) -> str:
    """The largest length of a class, short."""
    if k < 10:
        return str(2**k - 1)
    return f"{2 ** (k - 10)}k" if k < 20 else f"{2 ** (k - 20)}M" if k < 30 else f"{2 ** (k - 30)}G"


def _range_of(k: int) -> str:
    return "no token" if k == 0 else f"{2 ** (k - 1):,} to {counted(2**k - 1, 'token')}"


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{100 * low:.3g} %" if high - low < 5e-4 else f"{100 * low:.3g} to {100 * high:.3g} %"


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME // 2 - 1]}\u2026{name[-(_NAME // 2) :]}"
