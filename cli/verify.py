"""Check token files against their manifest: structure and indexes, or with --full every byte.

Every problem is told, not just the first; the exit code is 4 if there is any.
"""

from __future__ import annotations

import argparse

import mdata
from cli.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Few flags."""
    parser.add_argument("path", metavar="PATH", help="a corpus or blend manifest, or a prefix")
    parser.add_argument("--full", action="store_true", help="read every .bin and name damaged blocks")


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Run `mdata.verify`; exit code 4 if anything is damaged."""
    with console.progress() as progress:
        found = mdata.verify(arguments.path, full=arguments.full, progress=progress)
    for problem in found.problems:
        console.error(str(problem))
    facts = {
        "checked": list(found.checked),
        "bin_bytes_read": found.bin_bytes,
        "problems": [str(problem) for problem in found.problems],
    }
    depth = f"every byte of .bin ({found.bin_bytes:,})" if arguments.full else "structure and indexes"
    number = len(found.problems)
    verdict = f"{number} problem{'s'[: number > 1]}" if number else "no damage"
    console.result("\n".join([*found.checked, f"{verdict}; checked {depth}"]), facts)
    return mdata.DamageError.exit_code if found.problems else 0
