"""A page that draws a blend before it is trained on: shares over training, epochs, document lengths, use of ids.

One HTML file without scripts, links or images, for a browser without a network. report_data.py says what is true,
report_plots.py draws, report_page.py writes the page; here it is put on disk in one piece. A corpus and a bare pair are
reported too, as far as they are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdata.errors import UsageError, os_errors_named
from mdata.reporting.report_data import ReportData, read_report
from mdata.util import atomic_io

ENDINGS = (".html", ".htm")


@dataclass(frozen=True)
class Report:
    """A page that was written, and what it says.

    Args:
        path: the page. data: what it was made of.
    """

    path: Path
    data: ReportData

    @property
    def facts(self) -> dict[str, Any]:
        """The numbers of the page, as JSON types."""
        from mdata.reporting.report_json import facts_of

        return facts_of(self.data)


def report(
    path: str | Path,
    output: str | Path | None = None,
    *,
    full: bool = False,
    allow_outside: bool = False,
    **run: Any,
) -> Report:
    """Write the page of a blend, a corpus or a bare pair.

    Args:
        path: a manifest, or the prefix of a .bin/.idx pair.
        output: the page; default beside it, NAME.report.html.
        full: count every token's id, not a sample of 67 million.
        allow_outside: as for `open_corpus`.
        run: sequence_length, samples, tokens, split: the training, as for `preview_blend`. Without a length, one in
            which as much is read as the corpora have.

    Raises:
        UsageError: nothing there; a training that the blend cannot give; a page that does not end in .html.
        DamageError: something that is not what its manifest says.
    """
    from mdata.reporting.html_page import render

    target = Path(output) if output is not None else page_beside(Path(path))
    if target.suffix.lower() not in ENDINGS:
        raise UsageError(f"{target}: a page's name ends in .html", fix=f"-o {target}.html")
    data = read_report(path, full=full, allow_outside=allow_outside, **run)
    page = render(data).encode()
    with os_errors_named(f"writing {target}"):
        atomic_io.atomic_write(target, page)
    return Report(target, data)


def page_beside(path: Path) -> Path:
    """Where the page of a manifest or prefix lies by default."""
    name = path.name.removesuffix(".json").removesuffix(".bin").removesuffix(".idx")
    return path.with_name(f"{name}.report.html")
