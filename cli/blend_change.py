"""The part of `mdata blend` that changes the blend of a run: --from old.json --at-sample N.

The new blend is given completely (words, or a .toml or .csv file), or as edits of the old one. Besides the table, the
output shows where every corpus continues, how much of it will never be read, and when text is repeated.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mdata
from mdata.blend.blend import OpenBlend
from mdata.blend.spec import BlendSpec
from mdata.blend_planning.change import BlendEdits, ChangeRow, change_blend, change_table

from .text import table


def add_change_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a change: which blend, from which sample, and how."""
    change = parser.add_argument_group(
        "change the rest of a run", "Give the run's --sequence-length and --split-shares as well."
    )
    add = change.add_argument
    add("--from", dest="from_blend", metavar="OLD.json", help="the run's blend")
    add("--at-sample", type=int, metavar="N", help="number of samples read before the change")
    add("--set", action="append", default=[], metavar="NAME=WEIGHT", help="change the weight of a component")
    add("--add", action="append", default=[], nargs=2, metavar=("WEIGHT", "CORPUS"), help="add a corpus")
    add("--remove", action="append", default=[], metavar="NAME", help="stop reading a component")
    add("--replace", action="append", default=[], metavar="NAME=CORPUS", help="replace a corpus by another")


def refuse_without_from(arguments: argparse.Namespace) -> None:
    """Refuse options of a change without --from."""
    options = ("--at-sample", "--set", "--add", "--remove", "--replace")
    used = [option for option in options if getattr(arguments, _dest(option)) not in (None, [])]
    if used:
        raise mdata.UsageError(f"{' and '.join(used)} without --from", expected="--from OLD.json, the run's blend")


def changed(
    arguments: argparse.Namespace, folder: Path, *, spec: BlendSpec | None
) -> tuple[OpenBlend, list[str], dict[str, Any]]:
    """(the changed blend, lines that describe the change, the same as JSON)."""
    missing = [name for name in ("--at-sample", "--sequence-length") if getattr(arguments, _dest(name)) is None]
    if missing:
        raise mdata.UsageError(f"--from needs {' and '.join(missing)}", fix="those of the run")
    edits = BlendEdits(
        shares=_pairs(arguments.set, "--set"),
        add=[(weight, path) for weight, path in arguments.add],
        remove=arguments.remove,
        replace=_pairs(arguments.replace, "--replace"),
        tokenizer_unknown=arguments.tokenizer_unknown,
    )
    length = _samples(arguments)
    if length is not None and arguments.at_sample >= length:
        raise mdata.UsageError(
            "the change comes after the end of the training and would have no effect",
            found=f"--at-sample {arguments.at_sample:,} of {length:,} samples",
            expected=f"a sample before {length:,}",
            fix="give the length of the whole training in --samples or --tokens",
        )
    unknown, outside = arguments.tokenizer_unknown, arguments.allow_outside
    old = mdata.open_blend(arguments.from_blend, tokenizer_unknown=unknown, allow_outside=outside)
    sequence_length, split = arguments.sequence_length, arguments.split_shares
    edited = any((edits.shares, edits.add, edits.remove, edits.replace))
    requested = replace(edits, allow_overlap=arguments.allow_overlap) if edited else None
    blend = change_blend(
        old,
        arguments.at_sample,
        folder=folder,
        sequence_length=sequence_length,
        spec=spec,
        edits=requested,
        split=split,
    )
    rows = change_table(old, blend, sequence_length=sequence_length, split=split, run=length)
    lines = [
        f"\nthe change at sample {arguments.at_sample:,} of blend {old.manifest.id[:16]}, in samples:",
        _table(rows),
        "the change repeats no sample: each corpus continues where it stopped",
    ]
    return (
        blend,
        lines,
        {"parent": old.manifest.id, "at_sample": arguments.at_sample, "change": [asdict(r) for r in rows]},
    )


def _table(rows: list[ChangeRow]) -> str:
    """The effect on each component; without the last column if nothing is read again."""
    header = ["component", "read before", "epochs", "part before", "part after", "never read", "read again from"]
    cells = [
        [row.name, row.samples, row.epochs, row.part_before, row.part_after, row.unread, row.again_at] for row in rows
    ]
    if any(row.again_at is not None for row in rows):
        return table(header, cells)
    return table(header[:-1], [line[:-1] for line in cells])


def _dest(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _pairs(words: list[str], option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        name, equals, value = word.rpartition("=")
        if not equals or not name or not value:
            raise mdata.UsageError(f"{option} {word}: not NAME=VALUE", expected=f"{option} NAME=VALUE")
        if name in pairs:
            raise mdata.UsageError(f"{option} names {name} twice")
        pairs[name] = value
    return pairs


def _samples(arguments: argparse.Namespace) -> int | None:
    if arguments.samples is not None:
        return int(arguments.samples)
    return None if arguments.tokens is None else -(-arguments.tokens // arguments.sequence_length)
