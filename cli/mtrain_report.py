"""Write report.html for a run: loss curves with n-gram baselines, throughput, data read, and samples of text.

The run may still be active; the page shows what has been measured so far. Several runs are plotted together, in
compare.html in the current folder.

Examples:
  mtrain report runs/first
  mtrain report runs/first runs/second --output both.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mdata.corpus.paths import prefix_of
from mdata.errors import UsageError

from .console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain report --help`."""
    parser.add_argument("run_folders", type=Path, nargs="+", metavar="RUN", help="run folders written by mtrain train")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page of several runs")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Write the report; print its path, and of one run the losses compared with the baselines."""
    from trainer.launching.run_status import METRICS
    from trainer.report.page import write_comparison, write_report

    folders: list[Path] = arguments.run_folders
    for path in folders:
        is_pair = path.with_name(f"{path.name}.idx").is_file()
        if not (is_pair or path.is_file()):
            continue
        fix = "give the folder of a run, which run.folder names"
        if (path.parent / METRICS).is_file():
            fix = f"mtrain report {path.parent}"
        elif is_pair or path.suffix in (".json", ".idx", ".bin"):
            fix = f"if it is a corpus or blend, mdata report {prefix_of(path)}"
        form = "a pair of files" if is_pair else "a file"
        raise UsageError(f"{path} is {form}, not a run folder", fix=fix)
    if len(folders) > 1:
        path = arguments.output or Path("compare.html")
        write_comparison(folders, path)
        console.result(str(path), {"report": str(path), "runs": list(map(str, folders))})
        return
    if arguments.output is not None:
        raise UsageError("--output is for several runs", expected="the page of one run is report.html in its folder")
    path, lines = write_report(folders[0])
    console.result("\n".join([*lines, str(path)]), {"report": str(path), "losses": lines})
