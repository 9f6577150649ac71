"""The options of commands that read texts and write texts: clean and decontaminate."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from mdata.cleaning.text_job import TextJobOptions, TextJobResult
from mdata.errors import counted

from .console import SAME_COMMAND, Parser
from .preprocess_options import FORMATS, OnError, policy_of, size

_NAMES: tuple[str, ...] = (
    "input",
    "output",
    "json_key",
    "input_format",
    "text_documents",
    "where",
    "compression",
    "removed",
)
_NAMES += ("rows_only", "quarantine", "max_errors", "shard", "workers")


def add_text_job(parser: Parser) -> None:
    """What is read, where the result goes, and bad rows."""
    parser.resume = SAME_COMMAND
    add = parser.add_argument
    add("--input", required=True, nargs="+", metavar="PATH", help="files, folders or patterns, as for preprocess")
    add("--output", required=True, metavar="FOLDER", help="where the result is written, a file for each input file")
    add("--include", nargs="+", default=(), metavar="PATTERN", help="read only these files of folders")
    add("--exclude", nargs="+", default=(), metavar="PATTERN", help="do not read these files of folders")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--input-format", choices=FORMATS, default="auto", metavar="F", help=f"one of {' '.join(FORMATS)}")
    add("--text-documents", choices=("file", "paragraph"), default="file", help="what one document is in plain text")
    add("--where", metavar="FILTER", help="read only rows that match, such as \"lang = 'en' and n > 9\"")
    add("--compression", choices=("none", "gzip", "zstd"), default="none", help="of the output (default: none)")
    add("--removed", metavar="FILE", help="keep removed rows with their reasons, as lines of JSON")
    add("--rows-only", action="store_true", help="write only which rows are removed, for preprocess --skip-rows")
    add("--max-record-bytes", type=size, metavar="N", help="reject records of more bytes than this (default: 64M)")
    add_bad_rows(parser)
    add("--shard", metavar="K/N", help="do part K of N, in a folder of its own below the output")
    add("--workers", type=int, default=0, metavar="W", help="processes (default: all cores)")


def add_bad_rows(parser: Parser) -> None:
    """What happens to rows that cannot be read."""
    add = parser.add_argument
    add("--on-error", nargs="+", action=OnError, metavar="POLICY", help="stop (default), skip, or quarantine FILE")
    add("--quarantine", metavar="FILE", help="where --on-error quarantine writes bad rows")
    add("--max-errors", metavar="LIMIT", help="fail above this many bad rows: 100, or 0.5%%")


def text_job_of(arguments: argparse.Namespace) -> TextJobOptions:
    """The options that were given, of those that the command has."""
    options: dict[str, Any] = {name: getattr(arguments, name) for name in _NAMES if name in arguments}
    options["on_error"] = policy_of(arguments)
    if arguments.max_record_bytes is not None:
        options["max_record_bytes"] = arguments.max_record_bytes
    return TextJobOptions(**options, include=tuple(arguments.include), exclude=tuple(arguments.exclude))


def counts_of(result: TextJobResult) -> list[str]:
    """A line for each reason to remove rows, the most frequent first, and one for bad rows."""
    most_first = sorted(result.removed.items(), key=lambda pair: (-pair[1], pair[0]))
    lines = [f"  {count:,}  {reason}" for reason, count in most_first]
    return [*lines, f"bad rows: {result.bad:,}"] if result.bad else lines


def text_of(result: TextJobResult, *, rows_only: bool) -> str:
    """The result in words."""
    removed = sum(result.removed.values())
    share = 100 * removed / max(1, result.rows)
    changed = f", {result.changed:,} of them changed" if not rows_only else ""
    lines = [f"{result.kept:,} of {counted(result.rows, 'row')} kept{changed}; removed: {removed:,} ({share:.2f} %)"]
    lines += counts_of(result)
    if rows_only:
        lines.append(f"next: mdata preprocess --skip-rows {shlex.quote(str(result.folder))} ...")
    return "\n".join(lines)


def facts_of(result: TextJobResult) -> dict[str, Any]:
    """The result for programs."""
    names = ("rows", "kept", "changed", "removed", "bad", "filtered")
    return {"folder": str(result.folder), **{name: getattr(result, name) for name in names}}
