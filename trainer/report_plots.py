"""The drawings of a report as SVG text, made by matplotlib, which is imported when the first one is drawn.

What is unusual: colours are written as placeholders that become CSS variables, so that one page reads well
on a light and on a dark background, and text stays text in the reader's own font. Each function takes plain
numbers and returns one <svg> element.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from trainer.report_data import CorpusRead

# matplotlib gets these, the page's style sheet says what they look like.
TEXT, GRID, QUIET = "#010101", "#020202", "#030303"
SERIES = ("#040404", "#050505", "#060606", "#070707", "#080808", "#090909")
_VARIABLES = {TEXT: "text", GRID: "grid", QUIET: "quiet", **{c: f"series-{i}" for i, c in enumerate(SERIES)}}
_LABEL_GAP = 0.06  # of the height of a panel: the least distance between two labels
_MOST_NAME_CHARS = 60
_MOST_POINTS = 600  # of a curve; more would not be seen

Curve = Sequence[tuple[float, float]]


def loss_panel(name: str, train: Curve, *, valid: Curve, lines: Sequence[tuple[str, float]]) -> str:
    """Training and validation loss over tokens, with baselines as labelled horizontal lines.

    Args:
        name: of the validation corpus. train, valid: (million tokens, nats per token).
        lines: (label, nats per token).
    """
    figure, axes = _figure(6.2, 3.9)
    axes.plot(*_columns(_thinned(train)), color=QUIET, linewidth=1, label="training (all corpora)")
    if valid:
        axes.plot(*_columns(valid), color=SERIES[0], linewidth=2, marker="o", markersize=4, label="validation")
    values = [y for _, y in [*train, *valid]] + [y for _, y in lines]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.5
    axes.set_ylim(low - margin, high + margin)
    last = max([x for x, _ in [*train, *valid]] or [1.0])
    axes.set_xlim(0, last * 1.02)
    for (label, y), place in zip(lines, _spread([y for _, y in lines], (low - margin, high + margin)), strict=True):
        axes.axhline(y, color=SERIES[1], linewidth=1, linestyle=(0, (4, 3)))
        axes.text(last * 1.04, place, f"{_shown(label)} {y:.2f}", color=SERIES[1], va="center", fontsize=9)
    axes.set_xlabel("million tokens trained on")
    axes.set_ylabel("nats per token")
    _legend_above(axes)
    return _svg(figure, f"loss {name}")


def throughput(rates: Curve) -> str:
    """Tokens per second over tokens; (million tokens, tokens per second)."""
    figure, axes = _figure(6.2, 2.6)
    axes.plot(*_columns(_thinned(rates)), color=SERIES[0], linewidth=1.5)
    axes.set_ylim(0, max([y for _, y in rates] or [1.0]) * 1.1)
    axes.set_xlim(left=0)
    axes.set_xlabel("million tokens trained on")
    axes.set_ylabel("tokens per second")
    return _svg(figure, "throughput")


def document_lengths(corpora: Sequence[CorpusRead]) -> str:
    """For each corpus the share of its documents by length, in powers of two."""
    figure, axes = _figure(6.2, 2.9)
    used = [k for corpus in corpora for k, count in enumerate(corpus.lengths) if count]
    first, last = min(used, default=0), max(used, default=0)
    width = 0.8 / max(len(corpora), 1)
    for i, corpus in enumerate(corpora):
        total = sum(corpus.lengths) or 1
        bins = range(first, last + 1)
        shares = [100 * corpus.lengths[k] / total if k < len(corpus.lengths) else 0.0 for k in bins]
        places = [k - 0.4 + (i + 0.5) * width for k in bins]
        axes.bar(places, shares, width * 0.92, color=SERIES[i % len(SERIES)], label=_shown(corpus.name))
    ticks = list(range(first, last + 1, 1 + (last - first) // 10))
    axes.set_xticks(ticks, [_bin_label(k) for k in ticks])
    axes.set_xlabel("tokens in a document, up to")
    axes.set_ylabel("% of documents")
    _legend_above(axes)
    return _svg(figure, "document lengths")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of its own (no pyplot, so no global state) with one panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(QUIET)
    axes.tick_params(colors=TEXT, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(TEXT)
        label.set_fontsize(9)
    return figure, axes


def _legend_above(axes: Axes) -> None:
    """The names of the curves over the panel, where they hide nothing."""
    place = (0.0, 1.0)
    axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=place, ncols=3, borderaxespad=0.2)


def _svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element whose colours are CSS variables."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    name = _shown(name)
    for artist in figure.findobj(Text):
        artist.set_parse_math(False)  # a name may hold dollars
    for axes in figure.axes:
        legend = axes.get_legend()
        for label in legend.get_texts() if legend else ():
            label.set_color(TEXT)
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", text, count=1)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"([^>]*?)height="[^"]*"', r"<svg \1\2", text, count=1)
    text = re.sub(r"(font(?:-family)?: *[^;\"]*?)'[^;\"]*sans-serif[^;\"]*", r"\1sans-serif", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)}" ', 1)


def _shown(name: str) -> str:
    """A name as a drawing can show it: what is no character on a page as an escape."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    shown = shown if len(shown) <= _MOST_NAME_CHARS else f"{shown[: _MOST_NAME_CHARS - 3]}..."
    return f"\u200b{shown}" if shown.startswith("_") else shown  # matplotlib leaves such names out of legends


def _spread(values: Sequence[float], limits: tuple[float, float]) -> list[float]:
    """Places for labels at `values`, moved up just as far as they need to stand clear of each other."""
    gap = _LABEL_GAP * (limits[1] - limits[0])
    places = list(values)
    below = float("-inf")
    for i in sorted(range(len(values)), key=lambda i: values[i]):
        places[i] = below = max(values[i], below + gap)
    return places


def _columns(curve: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in curve], [y for _, y in curve]


def _thinned(curve: Curve) -> list[tuple[float, float]]:
    """Means of runs of neighbours, so that a long curve stays light and readable."""
    step = -(-len(curve) // _MOST_POINTS)
    if step <= 1:
        return list(curve)
    runs = [curve[i : i + step] for i in range(0, len(curve), step)]
    return [(run[-1][0], sum(y for _, y in run) / len(run)) for run in runs]


def _bin_label(k: int) -> str:
    """The largest length in bin k (see mdata's manifest), short."""
    most = (1 << k) - 1 if k else 0
    return f"{(most + 1) // 1024}k" if most >= 1023 else str(most)
