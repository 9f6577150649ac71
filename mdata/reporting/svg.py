"""SVG by hand: frames with axes, areas, lines and bars, as text that is also well-formed XML.

Colours are classes (c0 to c11, "others"), so that the page's style sheet decides what they are on a light and on a
dark background. Numbers are rounded to a tenth of a unit: a page with hundreds of curves stays small. Nothing here
knows what is drawn.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Characters that XML cannot hold, and those that would reorder the surrounding text.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff\ud800-\udfff]")

Points = Iterable[tuple[float, float]]


def escape(text: str) -> str:
    """Any text escaped for a page: marked up for HTML, control characters as Python writes them."""
    return html.escape(_CONTROLS.sub(_picture, text), quote=True)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return {9: "\\t", 10: "\\n", 13: "\\r"}.get(code) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


@dataclass(frozen=True)
class Frame:
    """A drawing's area and its scales.

    Args:
        width, height: of the drawing. left, right, top, bottom: margins around the area.
        x, y: (first value, last value) of the axes.
        log_x: whether x is logarithmic.
    """

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    left: int = 56
    right: int = 24
    top: int = 26
    bottom: int = 44
    log_x: bool = False

    def px(self, x: float) -> float:
        """The x coordinate of a value, in pixels from the left."""
        low, high = self.x
        if self.log_x:
            low, high, x = math.log10(low), math.log10(high), math.log10(x)
        return self.left + (self.width - self.left - self.right) * (x - low) / ((high - low) or 1)

    def py(self, y: float) -> float:
        """The y coordinate of a value, in pixels from the top."""
        low, high = self.y
        return self.height - self.bottom - (self.height - self.top - self.bottom) * (y - low) / ((high - low) or 1)


def drawing(width: int, height: int, *, label: str, description: str, parts: Iterable[str]) -> str:
    """One <svg> with a title and a description for screen readers."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}. {escape(description)}">'
        f"<desc>{escape(description)}</desc>" + "".join(parts) + "</svg>"
    )


def axes(frame: Frame, *, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]) -> str:
    """Grid lines behind the drawing, and the numbers beside it."""
    left, right, bottom = frame.left, frame.width - frame.right, frame.height - frame.bottom
    parts = [f'<g class="grid">{"".join(_h(frame.py(y), left, right) for y, _ in y_ticks)}</g>']
    parts += [text((left - 7, frame.py(y) + 4.5), label, anchor="end") for y, label in y_ticks]
    parts += [text((frame.px(x), bottom + 18), label, anchor="middle") for x, label in x_ticks]
    parts.append(f'<g class="axis">{_h(bottom, left, right)}</g>')
    return "".join(parts)


def titles(frame: Frame, *, x: str = "", y: str = "") -> str:
    """Titles of the axes: x below the numbers, y above the area."""
    middle = (frame.left + frame.width - frame.right) / 2
    below = text((middle, frame.height - 6), x, anchor="middle", kind="quiet") if x else ""
    return below + (text((4, 14), y, kind="quiet") if y else "")


def text(at: tuple[float, float], content: str, *, anchor: str = "start", kind: str = "") -> str:
    """A piece of text."""
    style = f' class="{kind}"' if kind else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{n(at[0])}" y="{n(at[1])}"{where}{style}>{escape(content)}</text>'


def area(points: Points, *, kind: str, strength: float = 1.0, hint: str = "") -> str:
    """A filled shape; `hint` is shown when the pointer rests on it."""
    fill = f' fill-opacity="{strength:.2f}"' if strength < 1 else ""
    return f'<path class="area {kind}"{fill} d="{_path(points)}Z"><title>{escape(hint)}</title></path>'


def line(points: Points, *, kind: str, strength: float = 1.0, hint: str = "") -> str:
    """A curve."""
    faint = f' stroke-opacity="{strength:.2f}"' if strength < 1 else ""
    return f'<path class="line {kind}"{faint} d="{_path(points)}"><title>{escape(hint)}</title></path>'


def bar(x: float, y: float, *, width: float, height: float, kind: str, strength: float = 1.0, hint: str = "") -> str:
    """A rectangle."""
    fill = f' fill-opacity="{strength:.2f}"' if strength < 1 else ""
    box = f'x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(max(height, 0))}"'
    return f'<rect class="area {kind}"{fill} {box}><title>{escape(hint)}</title></rect>'


def rule(x: float, y: float, *, to: tuple[float, float], kind: str = "mark") -> str:
    """A straight line from one point to another."""
    return f'<path class="{kind}" d="M{n(x)} {n(y)}L{n(to[0])} {n(to[1])}"/>'


def legend(items: Iterable[tuple[str, str]]) -> str:
    """The legend as HTML beside a drawing, from (class of the colour, name) pairs."""
    names = "".join(f'<li><i class="swatch b{kind}"></i>{escape(name)}</li>' for kind, name in items)
    return f'<ul class="legend">{names}</ul>'


def nice_ticks(high: float, most: int = 6, *, low: float = 0.0) -> list[float]:
    """Round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """1,500,000 as 1.5M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def n(value: float) -> str:
    """A coordinate."""
    rounded = f"{value:.1f}"
    return rounded.removesuffix(".0")


def _h(y: float, left: float, right: float) -> str:
    return f'<path d="M{n(left)} {n(y)}H{n(right)}"/>'


def _path(points: Points) -> str:
    return "M" + "L".join(f"{n(x)} {n(y)}" for x, y in points)
