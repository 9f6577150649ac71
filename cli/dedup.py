"""Find documents that repeat earlier ones, exactly or nearly, without copying any text.

Near-duplicates share words: with the default 14 bands of 8 values, documents that have 80 % of their 5-grams in common
are found with a probability of 92 %. The first document of each group stays. The folder names the rows of the others,
which mdata preprocess --skip-rows leaves out. An interrupted command continues.

STAGE runs one stage of the work, in tasks of --shard K/N that may run anywhere: sign (N parts of the input), match (N
ranges of keys), with --verify also sets and verify (by part), then group (one task), with --write-text also drop (by
part). mdata launch runs all of them.

Examples:
  mdata dedup --input web.jsonl --output web-repeats
  mdata dedup --input code.jsonl --against web.jsonl --bands 20 --rows 5 --verify 0.7 --output code-repeats
"""

from __future__ import annotations

import argparse
import shlex
from typing import get_args

from mdata import UsageError
from mdata.dedup.dedup import DedupResult, dedup, run_stage
from mdata.dedup.plan import ALL, COMPATIBLE, DedupOptions, Hash, Jaccard, Stage, parse_ngram
from mdata.errors import counted
from mdata.preprocessing.parts import parse_shard

from .console import SAME_COMMAND, Console, Parser


def add_arguments(parser: Parser) -> None:
    """Input, output and how similar documents are found."""
    parser.resume = SAME_COMMAND
    add = parser.add_argument
    add(
        "stage",
        nargs="?",
        choices=get_args(Stage),
        metavar="STAGE",
        help=", ".join(get_args(Stage)) + " (default: all)",
    )
    add("--input", required=True, nargs="+", metavar="PATH", help="files, folders or patterns, as for preprocess")
    add("--output", required=True, metavar="FOLDER", help="where the rows to leave out are written")
    kept = "texts to keep, or earlier results with their signatures; what repeats them is left out"
    add("--against", nargs="+", default=(), metavar="PATH", help=kept)
    add("--include", nargs="+", default=(), metavar="PATTERN", help="read only these files of folders")
    add("--exclude", nargs="+", default=(), metavar="PATTERN", help="skip these files of folders")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--exact", action="store_true", help="find exact duplicates only (same words, ignoring case and accents)")
    add("--bands", type=int, metavar="B", help="bands per signature; more find less similar documents (default: 14)")
    add("--rows", type=int, metavar="R", help="values per band; more find fewer documents (default: 8)")
    add("--ngram", metavar="N", help="words of an n-gram, or characters:N (default: 5)")
    add("--hash", choices=get_args(Hash)[:3], help="hash of an n-gram (default: xxhash64)")
    add("--verify", type=float, metavar="J", help="compare near-duplicates: keep those that share less")
    add("--jaccard", default="union", choices=get_args(Jaccard), help="--verify: a share of what (default: union)")
    add("--compat", choices=COMPATIBLE, help="find what datatrove's minhash, or Megatron-LM's tools/openwebtext finds")
    add("--substring", type=int, default=0, metavar="N", help="only cut out what repeats N bytes of earlier text")
    add("--write-text", action="store_true", help="also write the rows that stay, to FOLDER/text/*.jsonl.zst")
    add("--keep-signatures", action="store_true", help="keep signatures in FOLDER, for --against of later commands")
    add("--workers", type=int, default=0, metavar="W", help="threads (default: all cores)")
    add("--shard", metavar="K/N", help="of a stage: task K of N (default: 1/1)")
    add("--parts", type=int, default=0, metavar="N", help="tasks that sign had (default: those that are there)")
    add("--ranges", type=int, default=0, metavar="N", help="tasks that match had (default: those that are there)")


def options_of(arguments: argparse.Namespace) -> DedupOptions:
    """The options that the arguments mean."""
    if arguments.exact and arguments.bands is not None:
        raise UsageError("--bands has no effect with --exact", fix="leave --exact or --bands out")
    if arguments.exact and arguments.verify:
        raise UsageError("--exact has nothing to verify", fix="leave --exact or --verify out")
    for name in ("parts", "ranges"):
        if getattr(arguments, name) and not arguments.stage:
            raise UsageError(
                f"--{name} {getattr(arguments, name)} without a stage", fix="mdata dedup STAGE ..., or leave it out"
            )
    if arguments.shard is not None and not arguments.stage and not arguments.substring:
        raise UsageError(
            f"--shard {arguments.shard} without a stage", fix="mdata dedup sign --shard ..., or mdata launch"
        )
    given = {name: getattr(arguments, name) for name in ("bands", "rows", "hash", "verify")}
    if arguments.ngram is not None:
        given["unit"], given["ngram"] = parse_ngram(arguments.ngram)
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.exact:
        given["bands"] = 0
    compatible = COMPATIBLE.get(arguments.compat, {})
    if arguments.compat == "megatron" and (wrong := sorted({"unit", "hash"} & set(given))):
        raise UsageError(
            f"--compat megatron decides --{wrong[0].replace('unit', 'ngram')}", fix="leave one of them out"
        )
    names = (
        "input",
        "output",
        "against",
        "json_key",
        "jaccard",
        "substring",
        "write_text",
        "keep_signatures",
        "workers",
    )
    return DedupOptions(
        **{name: getattr(arguments, name) for name in (*names, "parts", "ranges")},
        **{**compatible, **given},
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        shard=ALL if arguments.shard is None else parse_shard(arguments.shard),
    )


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `dedup`, or one of its stages, and print what was found."""
    options = options_of(arguments)
    with console.progress(continues=True) as progress:
        stage: Stage | None = arguments.stage or ("substring" if options.substring else None)
        if stage:
            result = run_stage(options, stage, progress)
        else:
            result = dedup(options, progress)
    if result is None:
        task = f"{options.shard.number}/{options.shard.count}"
        console.result(f"{stage} {task} is done", {"stage": stage, "shard": task})
        return
    _print(result, console)


def _print(result: DedupResult, console: Console) -> None:
    share, folder = 100 * result.removed / max(1, result.rows), shlex.quote(str(result.folder))
    text = (
        f"{result.removed:,} of {counted(result.rows, 'row')} ({share:.2f} %) repeat earlier ones, {result.exact:,} of "
        f"them exactly; groups: {result.clusters:,}\nexamples: mdata report {folder}\n"
        f"next: mdata preprocess --skip-rows {folder} ..."
    )
    facts = {name: getattr(result, name) for name in ("rows", "removed", "exact", "clusters")}
    console.result(text, {"folder": str(result.folder), **facts})
