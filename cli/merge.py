"""Join the parts of a job that mdata preprocess --shard made.

PREFIX is the --output-prefix of the job. By default the manifest PREFIX_KEY_document.json names the pairs of the parts,
which stay in place. --copy writes one pair instead, identical to that of a single run of the whole job.

Examples:
  mdata merge parts
  mdata merge parts --copy --overwrite
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from mdata.errors import UsageError
from mdata.object_storage.address import is_address
from mdata.rewriting.merge import merge

from .console import Console, Parser
from .text import table


def add_arguments(parser: Parser) -> None:
    """The prefix and the options of this command."""
    add = parser.add_argument
    add("prefix", metavar="PREFIX", help="the --output-prefix of mdata preprocess")
    add("--copy", action="store_true", help="write one pair; the parts are no longer needed then")
    add("--parts", type=int, metavar="N", help="which parts, if the job was divided in several ways")
    add("--max-errors", metavar="LIMIT", help="fail above this many bad rows in all parts: 100, or 0.5%%")
    add("--overwrite", action="store_true", help="replace another corpus of this name")
    add(
        "--work-folder",
        type=Path,
        metavar="DIR",
        help="local folder for parts at s3://, gs:// or az://; --copy needs it",
    )


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `merge` and print what was written."""
    prefix, work_folder = arguments.prefix, arguments.work_folder
    merge_parts = partial(merge, prefix)
    if is_address(prefix):
        from mdata.rewriting.stored_merge import merge_stored

        merge_parts = partial(merge_stored, prefix, work_folder=work_folder)
    elif work_folder is not None:
        raise UsageError(f"--work-folder {work_folder} has no effect: parts at a path are merged beside them")
    with console.progress() as progress:
        merged = merge_parts(
            copy=arguments.copy,
            overwrite=arguments.overwrite,
            parts=arguments.parts,
            max_errors=arguments.max_errors,
            progress=progress,
        )
    rows = [
        {
            "manifest": str(corpus.path),
            "parts": corpus.num_parts,
            "documents": sum(shard.documents for shard in corpus.manifest.shards),
            "tokens": sum(shard.tokens for shard in corpus.manifest.shards),
            "id": corpus.manifest.id,
            "there_before": corpus.there_before,
        }
        for corpus in merged
    ]
    for corpus in merged:
        if corpus.there_before:
            console.note(f"mdata: {corpus.path} already exists and was made from these parts; nothing was done")
    names = ("manifest", "parts", "documents", "tokens")
    console.result(table(names, [tuple(row[name] for name in names) for row in rows]), {"corpora": rows})
