"""Draws a timed schedule: as text, and as SVG for the report.

A row is a rank, a column a unit of time; numbers are microbatches. Messages are not drawn. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.pipeline.simulate import Timeline

COLORS = {"F": "#4e79a7", "B": "#59a14f", "I": "#76b7b2", "W": "#edc948"}
ROW, CELL = 28, 22  # pixels of a row, and of a unit of time


def render_text(timeline: Timeline, *, num_stages: int) -> str:
    """A grid: `F3` with one stage per rank, `2F3` with several; a dot is a unit without work.

    Start times are rounded to whole units; an action is written where it begins.
    """
    several = num_stages > len(timeline.spans)
    rows = []
    for rank, spans in enumerate(timeline.spans):
        cells = ["."] * round(timeline.step)
        for action, start, stop in spans:
            name = str(action) if several else str(action)[len(str(action.stage)) :]
            cells[round(start) : round(stop)] = [name, *("-" for _ in range(round(stop) - round(start) - 1))]
        rows.append((f"rank {rank}", cells))
    width = max((len(cell) for _, cells in rows for cell in cells), default=0)
    label = max((len(name) for name, _ in rows), default=0)
    lines = (f"{name.ljust(label)} | {' '.join(cell.ljust(width) for cell in cells)}".rstrip() for name, cells in rows)
    return "\n".join(lines)


def render_svg(timeline: Timeline) -> str:
    """The grid as an SVG element of an HTML page, with a title on each action; a unit of time is CELL pixels wide."""
    width, height = round(timeline.step * CELL) + 70, ROW * len(timeline.spans) + 8
    body = "".join(_row(timeline, rank) for rank in range(len(timeline.spans)))
    label = f"Pipeline schedule of {len(timeline.spans)} ranks, bubble {timeline.bubble:.1%}"
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}" font-family="sans-serif" font-size="10">{body}</svg>'
    )


def _row(timeline: Timeline, rank: int) -> str:
    top = ROW * rank + 4

    def parts() -> Iterator[str]:
        yield f'<text x="0" y="{top + 16}" fill="currentColor">rank {rank}</text>'
        for action, start, stop in timeline.spans[rank]:
            left, wide = 60 + start * CELL, (stop - start) * CELL
            yield (
                f'<g><title>{action}: {start:g} to {stop:g}</title><rect x="{left:.1f}" y="{top}" width="{wide:.1f}" '
                f'height="{ROW - 6}" fill="{COLORS[action.kind]}" stroke="#fff" stroke-width="0.5"/>'
                f'<text x="{left + wide / 2:.1f}" y="{top + 15}" text-anchor="middle">{action.microbatch}</text></g>'
            )

    return "".join(parts())
