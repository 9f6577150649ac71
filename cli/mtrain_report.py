"""Write report.html for a run: loss curves with n-gram baselines, throughput, data read, and samples of text.

The run may still be active; the page shows what has been measured so far.

Examples:
  mtrain report runs/first
  mtrain report runs/first --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mdata.errors import UsageError

from .console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain report --help`."""
    parser.add_argument("run_folder", type=Path, help="a run folder written by mtrain train")


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Write the report; print its path, and the losses compared with the baselines."""
    from trainer.report.page import write_report

    folder = arguments.run_folder
    if folder.is_file() or folder.with_name(f"{folder.name}.idx").is_file():
        raise UsageError(f"{folder} is data, not a run folder", fix=f"mdata report {folder}")
    path, lines = write_report(arguments.run_folder)
    console.result("\n".join([*lines, str(path)]), {"report": str(path), "losses": lines})
    return 0
