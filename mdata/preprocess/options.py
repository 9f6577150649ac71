"""What a preprocess run is asked to do, and where its results go.

Options carry the names of Megatron's tool. Nothing here reads a file: `check_options` refuses what can be
refused by looking at the words alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdata.errors import UsageError

LEVEL = "document"
# Large enough that handing out work costs nothing, small enough that a window of results stays small.
UNIT_BYTES = 1 << 20


def usable_cores() -> int:
    """The cores that this process may use, not those that the machine has."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Options of `preprocess`, by the names of Megatron's tool.

    Args:
        input: files, folders or patterns of jsonl, plain or gzip.
        output_prefix: results are named `{output_prefix}_{key}_document.*`.
        tokenizer_type: Megatron's name of the tokenizer.
        tokenizer_model: its file or folder.
        tokenizer_options: what the type takes besides.
        json_keys: whose values are tokenized, each into a corpus of its own.
        append_eod: put the end-of-document id after each document that has any id.
        workers: processes that tokenize; 1 works in this process. The result is the same.
        unit_bytes: how much text is handed out at once. The result is the same.
    """

    input: tuple[str, ...]
    output_prefix: str
    tokenizer_type: str
    tokenizer_model: str
    tokenizer_options: tuple[tuple[str, Any], ...] = ()
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    unit_bytes: int = UNIT_BYTES


def check_options(options: PreprocessOptions) -> None:
    """Refuse what no run could do, before anything is read.

    Raises:
        UsageError: names the option and its value.
    """
    if options.workers < 1:
        raise UsageError(f"workers={options.workers}", expected="at least 1")
    if options.unit_bytes < 1:
        raise UsageError(f"unit_bytes={options.unit_bytes}", expected="at least 1")
    if not options.json_keys:
        raise UsageError("json_keys names no key", expected="at least one key")
    if len(set(options.json_keys)) < len(options.json_keys):
        raise UsageError(f"json_keys names a key twice: {' '.join(options.json_keys)}")
    for key in options.json_keys:
        if "/" in key or "\0" in key:
            raise UsageError(f"key {key!r} cannot be part of a file name", fix="rename it in the input")
    if options.output_prefix.endswith("/") or not Path(options.output_prefix).name:
        raise UsageError(f"output prefix {options.output_prefix!r} has no name after its folder")
    if not all(text.isprintable() for text in (options.output_prefix, *options.json_keys)):
        raise UsageError(f"output prefix {options.output_prefix!r} is not plain UTF-8")


def result_prefix(options: PreprocessOptions, key: str) -> Path:
    """Where the results of one key go, without their endings."""
    return Path(f"{options.output_prefix}_{key}_{LEVEL}")
