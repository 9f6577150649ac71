"""A part of a job: `--shard 3/64` makes the third of 64 parts, as an ordinary run with its own results.

Only this module deals with parts: the run gets the files and sections of files that make up the part, and its results
get the names `PREFIX-00003-of-00064_KEY_LEVEL.*`. Rows of a section count from its beginning, since the number of lines
before it is unknown; `mdata merge` adds them up. Options that need all rows are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mdata.errors import UsageError
from mdata.manifest.lineage import inputs_digest
from mdata.preprocessing.plan import printable_path
from mdata.preprocessing.preprocess_options import PreprocessOptions
from mdata.sources.input_files import STDIN, SourceFile
from mdata.sources.sections import PartNumber, files_of_part

MOST_PARTS = 99_999
_SHARD = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


def part_of_job(
    options: PreprocessOptions, files: Sequence[SourceFile]
) -> tuple[PreprocessOptions, tuple[SourceFile, ...]]:
    """The options and inputs of the part that `options.shard` names.

    Raises:
        UsageError: no such part, or options or inputs that cannot be divided.
        BadInputError: a parquet file without a readable end.
    """
    assert options.shard is not None, "the job is not divided"
    part = parse_shard(options.shard)
    check_divisible(options, files)
    chosen = files_of_part(files, part, chunk_bytes=options.chunk_bytes, text_is_whole=options.text_documents == "file")
    quarantine = options.quarantine and Path(options.quarantine)
    of_part = replace(
        options,
        shard=f"{part.number}/{part.count}",
        shard_inputs=inputs_digest([(printable_path(file.path), file.size_bytes) for file in files]),
        output_prefix=part_prefix(options.output_prefix, part),
        quarantine=f"{quarantine.with_suffix('')}-{part_name(part)}{quarantine.suffix}" if quarantine else None,
    )
    return of_part, chosen


def parse_shard(text: str) -> PartNumber:
    """The part that "3/64" names.

    Raises:
        UsageError: not of the form K/N.
    """
    match = _SHARD.fullmatch(text) if isinstance(text, str) else None
    part = PartNumber(int(match[1]), int(match[2])) if match else PartNumber(0, 0)
    if not 1 <= part.number <= part.count <= MOST_PARTS:
        raise UsageError(
            f"shard={text}", expected=f"K/N, part K of N, such as 3/64: 1 <= K <= N, and N at most {MOST_PARTS}"
        )
    return part


def part_name(part: PartNumber) -> str:
    """The text in the file names of a part, such as "00003-of-00064"."""
    return f"{part.number:05}-of-{part.count:05}"


def part_prefix(output_prefix: str, part: PartNumber) -> str:
    """The output prefix of a part."""
    return f"{output_prefix}-{part_name(part)}"


def part_folder(output: str | Path, part: PartNumber) -> Path:
    """The folder of a part of a job on texts, below that of the job."""
    return Path(output) / f"part-{part_name(part)}"


def check_divisible(options: PreprocessOptions, files: Sequence[SourceFile] = ()) -> None:
    """Refuse options that do not work with parts.

    Raises:
        UsageError: names the option and says why.
    """
    if options.partitions > 1:
        raise UsageError(
            "--shard cannot be combined with --partitions",
            found=f"--shard {options.shard} --partitions {options.partitions}",
            expected="one of the two: a document's partition is decided by the number of all rows before it",
            fix="merge the parts, then mdata split",
        )
    if options.max_errors is not None and options.max_errors.endswith("%"):
        raise UsageError(
            f"--shard cannot be combined with --max-errors {options.max_errors}, which is a share of all rows",
            expected="a number of rows, which is compared in each part and again when they are merged",
            fix=f"mdata merge --max-errors {options.max_errors}",
        )
    if any(file.path == STDIN for file in files):
        raise UsageError(
            "--shard: standard input cannot be divided, because it can be read only once", fix="name files"
        )
