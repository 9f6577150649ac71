"""The style sheet of reports, of a blend and of a run (trainer/report/page.py), and the frame of a page around it.

Twelve colours that remain distinct on both; no external font, image or style sheet.
"""

from __future__ import annotations

from collections.abc import Iterable

from mdata.reporting.curves import COLOURS
from mdata.reporting.svg import escape

_LIGHT = "#1f66d1 #c2491d #20875a #8a4bbf #b08400 #0d8a99 #c23a7c #5f7f16 #7b5a3c #4b56c9 #d0762b #3f7187"
_DARK = "#6ea8fe #f08a5d #5cc596 #c493f0 #dfc05a #5ccbd8 #f186b8 #a9cb5c #c9a582 #98a2f7 #f5ae6b #8fbdd1"


def _variables(colours: str) -> str:
    return " ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours.split()))


_KINDS = (*(f"c{i}" for i in range(COLOURS)), "others", "whole")
_CLASSES = "\n".join(
    f".{kind} {{ fill: var(--{kind}); }} .stroke-{kind} {{ stroke: var(--{kind}); }}"
    f" .b{kind} {{ background: var(--{kind}); }}"
    for kind in _KINDS
)

STYLE = f"""
:root {{ --text: #1d2330; --quiet: #626b7b; --grid: #dfe3e9; --page: #ffffff; --card: #f5f6f8; --others: #8a93a3;
  --whole: #1d2330; {_variables(_LIGHT)} color-scheme: light dark; }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: #e4e7ec; --quiet: #9aa3b3; --grid: #333a46; --page: #14171c;
  --card: #1d2128; --others: #7a8599; --whole: #e4e7ec; {_variables(_DARK)} }} }}
body {{ background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 72rem; padding: 0 1.5rem; }}
h1 {{ font-size: 1.6rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2.4rem 0 .6rem; }}
h3 {{ font-size: 1rem; margin: 1.2rem 0 .3rem; overflow-wrap: anywhere; }}
p.lead {{ color: var(--quiet); margin: 0 0 .8rem; }}
svg {{ width: 100%; max-width: 60rem; height: auto; display: block; }}
svg text {{ font: 14px system-ui, sans-serif; fill: var(--text); }} svg text.quiet {{ fill: var(--quiet); }}
.grid path {{ stroke: var(--grid); }} .axis path {{ stroke: var(--quiet); }}
.area {{ stroke: var(--page); stroke-width: .7; }} .line {{ fill: none; stroke-width: 1.8; }}
.line.stroke-others {{ stroke-width: 1.4; }} .line.whole {{ fill: none; stroke: var(--whole); stroke-width: 3; }}
.mark {{ stroke: var(--text); stroke-dasharray: 4 4; stroke-opacity: .7; fill: none; }}
{_CLASSES}
.line {{ fill: none; }}
.legend, .notes {{ list-style: none; margin: .5rem 0 1rem; padding: 0; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .15rem 1.2rem; max-width: 60rem; font-size: 14px; }}
.legend li {{ overflow-wrap: anywhere; }} .legend small {{ color: var(--quiet); }}
.swatch {{ display: inline-block; width: .8em; height: .8em; margin-right: .45em; border-radius: 2px; }}
.notes li {{ background: var(--card); padding: .4rem .8rem; margin-bottom: .3rem; border-radius: 6px;
  overflow-wrap: anywhere; }}
.panels {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: .2rem 1.5rem; }}
.row {{ display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, max(22rem, 34%)), 1fr)); }}
.row > * {{ min-width: 0; }} .row > :only-child {{ grid-column: 1 / -1; }}
.scroll {{ overflow: auto; max-height: 35rem; margin: .6rem 0; }}
.long {{ border: 1px solid var(--grid); border-radius: 6px; padding: 0 .6rem;
  width: fit-content; max-width: 100%; box-sizing: border-box; }}
table {{ border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid var(--grid);
  white-space: nowrap; background: var(--page); font-weight: 400; vertical-align: top; }}
thead th {{ color: var(--quiet); position: sticky; top: 0; z-index: 1; white-space: normal; vertical-align: bottom; }}
th:first-child {{ position: sticky; left: 0; max-width: 22rem; overflow: hidden; text-overflow: ellipsis; }}
thead th:first-child {{ z-index: 2; }}
thead th:not(:first-child):not(.text), td.number, td.good, td.bad {{ text-align: right; }}
td.good {{ color: var(--c2); }} td.bad {{ color: var(--c1); }}
th.group {{ font-weight: 600; }} th.member {{ padding-left: 1.1rem; }}
code {{ background: var(--card); padding: .05rem .3rem; border-radius: 4px; font-size: 13px; margin-right: .25rem; }}
@media (max-width: 40rem) {{ body {{ padding: 0 .8rem; }} table {{ font-size: 12px; }}
  th, td {{ padding-right: .5rem; }} }}
details summary {{ cursor: pointer; color: var(--quiet); }}
"""


def page(title: str, parts: Iterable[str], *, style: str = "") -> str:
    """A whole page, also well-formed XML; `style` is added to the style sheet."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<style>{STYLE}{style}</style></head><body>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"
    )
