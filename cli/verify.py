"""Check token files against their manifest: structure, indexes and sidecars, or with --full every byte.

Reports every problem, with the damaged blocks and their documents. The exit code is 4 if anything is damaged, and 2 or
5 if a file is missing or cannot be read.

Examples:
  mdata verify web_text_document.json
  mdata verify mix.json --full
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import mdata

from .console import Console
from .text import add_allow_outside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("path", metavar="PATH", help="a corpus or blend manifest, or a prefix")
    parser.add_argument("--full", action="store_true", help="read every .bin and report damaged blocks")
    parser.add_argument("--threads", type=int, metavar="N", help="reading threads (default: all available cores)")
    add_allow_outside(parser)


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Run `mdata.verify`; the exit code is that of the worst problem."""
    if arguments.threads is not None and arguments.threads < 1:
        raise mdata.UsageError(f"--threads {arguments.threads}", expected="at least 1")
    with console.progress() as progress:
        verified = mdata.verify(
            arguments.path,
            full=arguments.full,
            threads=arguments.threads,
            allow_outside=arguments.allow_outside,
            progress=progress,
        )
    for problem in verified.problems:
        console.error(str(problem))
    if arguments.full and verified.unhashed:
        names = ", ".join(verified.unhashed)
        console.note(f"mdata: no block hashes are recorded for {names}; mdata adopt --full records them")
    facts = {
        "checked": list(verified.checked),
        "bin_bytes_read": verified.bin_bytes,
        "problems": [str(problem) for problem in verified.problems],
        "damaged_blocks": [asdict(blocks) for blocks in verified.damaged],
        "without_block_hashes": list(verified.unhashed),
    }
    # Damage may prevent comparing a .bin at all.
    every_byte = arguments.full and not verified.unhashed and (verified.bin_bytes or not verified.problems)
    depth = f"every byte of .bin ({verified.bin_bytes:,})" if every_byte else "structure, indexes and sidecars"
    number = len(verified.problems)
    verdict = f"{number} problem{'s'[: number > 1]}" if number else "no damage"
    console.result("\n".join([*verified.checked, f"{verdict}; checked {depth}"]), facts)
    if any(isinstance(problem, mdata.DamageError) for problem in verified.problems):
        return mdata.DamageError.exit_code
    return verified.problems[0].exit_code if verified.problems else 0
