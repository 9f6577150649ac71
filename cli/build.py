"""Build in advance the arrays that a run would build at its start.

Builds the arrays of Megatron's order and blends, the rows of packed samples, the mappings of BERT and T5, for each
split that has a share; existing arrays are checked and listed. They are kept beside the corpus (or in --cache), where
runs with the same data and options find them. Another seed, length or number of samples needs other arrays.

Examples:
  mdata build mix.json --sequence-length 4096 --order megatron --train-samples 100000
  mdata build web_text_document.json --sequence-length 4096 --kind packed --split-shares 98,1,1
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import mdata
from mdata.order.data_split import parse_split

from .console import Console
from .text import add_allow_outside, add_tokenizer_unknown, table

if TYPE_CHECKING:
    from mdata.dataset.prebuild import BuildResult

_SPLITS = ("train", "valid", "test")
_ALL_TRAINING = "100,0,0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Megatron's names are accepted too."""
    add = parser.add_argument
    add("words", nargs="*", metavar="CORPUS", help="a corpus or blend manifest, a prefix, or 0.7 a 0.3 b")
    add("--data-path", nargs="+", default=[], metavar="WORD", help="the same, in Megatron's syntax")
    add("-S", "--sequence-length", "--seq-length", type=int, required=True, metavar="S", help="tokens per sample")
    add("--order", choices=["native", "megatron"], default="native", help="order of samples (default: native)")
    add(
        "--kind",
        choices=["gpt", "document", "packed", "chat", "pairs", "bert", "t5"],
        default="gpt",
        help="sample type (default: gpt)",
    )
    add(
        "--split-shares",
        "--split",
        default=_ALL_TRAINING,
        metavar="SHARES",
        help="shares of training, validation and test (default: 100,0,0)",
    )
    add("--whole", action="store_true", help="build all data as one set, as for a corpus of data.valid")
    add("--seed", type=int, default=1234, metavar="N", help="random seed (default: 1234)")
    add_tokenizer_unknown(parser)
    add_allow_outside(parser)
    add("--cache", "--data-cache-path", metavar="FOLDER", help="folder for the arrays (default: next to the corpus)")
    add("--threads", type=int, default=1, metavar="N", help="threads that fill Megatron's index (default: 1)")
    add = parser.add_argument_group("Megatron's order").add_argument
    for split in _SPLITS:
        add(f"--{split}-samples", type=int, metavar="N", help="samples to build for (default: one epoch)")
    add(
        "--blend-surplus",
        "--mid-level-dataset-surplus",
        type=float,
        default=0.005,
        metavar="X",
        help="extra samples to build for each corpus of a blend, as a fraction (default: 0.005)",
    )
    add("--keep-partial", action="store_true", help="keep the last partial sample of validation and of --whole")
    add = parser.add_argument_group("kinds of samples").add_argument
    add("--no-extra-token", action="store_true", help="rows of S tokens, not S + 1")
    add("--longer", choices=["cut", "drop"], default="cut", help="packed: what to do with documents longer than a row")
    add("--decoder-length", "--decoder-seq-length", type=int, metavar="S", help="t5: tokens of the decoder's sequence")
    add("--no-head", action="store_true", help="bert: one text per sample, without next-sentence prediction")
    add(
        "--short-probability",
        "--short-seq-prob",
        type=float,
        default=0.1,
        metavar="P",
        help="bert, t5: share of samples made shorter than S (default: 0.1)",
    )


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `mdata.dataset.prebuild.build` and show the result."""
    words = [*arguments.words, *arguments.data_path]
    if not words:
        raise mdata.UsageError("no data is given", expected="a manifest, a prefix, or pairs of weight and prefix")
    if arguments.whole and arguments.split_shares != _ALL_TRAINING:
        raise mdata.UsageError(
            "--whole reads all of it as one set", found=f"--split-shares {arguments.split_shares}", fix="one of them"
        )
    asked = {split: getattr(arguments, f"{split}_samples") for split in _SPLITS}
    num_samples = {split: count for split, count in asked.items() if count is not None}
    if num_samples and arguments.order != "megatron":
        first = next(iter(num_samples))
        raise mdata.UsageError(f"the native order has no --{first}-samples", fix="leave it out, or --order megatron")
    shares = dict(zip(_SPLITS, parse_split(arguments.split_shares), strict=True))
    unread = [split for split in num_samples if arguments.whole or not shares[split]]
    if unread:
        raise mdata.UsageError(
            f"--{unread[0]}-samples is for a split that is not built",
            found="--whole" if arguments.whole else f"--split-shares {arguments.split_shares}",
            fix="leave it out, or give the split a share",
        )
    from mdata.dataset.prebuild import build

    with console.progress() as progress:
        result = build(
            words[0] if len(words) == 1 else words, _options(arguments), num_samples=num_samples, progress=progress
        )
    console.result(_told(result), _facts(result))


def _options(arguments: argparse.Namespace) -> mdata.DatasetOptions:
    keys = {
        "sequence_length": arguments.sequence_length,
        "seed": arguments.seed,
        "split": "whole" if arguments.whole else "train",
        "split_shares": arguments.split_shares,
        "order": arguments.order,
        "kind": arguments.kind,
        "extra_token": not arguments.no_extra_token,
        "keep_partial": arguments.keep_partial,
        "blend_surplus": arguments.blend_surplus,
        "longer": arguments.longer,
        "decoder_length": arguments.decoder_length,
        "head": not arguments.no_head,
        "short_probability": arguments.short_probability,
        "tokenizer_unknown": arguments.tokenizer_unknown,
        "allow_outside": arguments.allow_outside,
        "cache": arguments.cache,
        "threads": arguments.threads,
    }
    return mdata.DatasetOptions.from_keys(keys)


def _told(result: BuildResult) -> str:
    samples = ", ".join(f"{split} {'without end' if n is None else f'{n:,}'}" for split, n in result.samples.items())
    last = f"samples: {samples}; {result.peak_bytes / 2**20:,.0f} MiB of memory at peak"
    if not result.arrays:
        return f"nothing to build: this order needs no arrays\n{last}"
    header = ["split", "what", "of", "entries", "bytes", "seconds", "", "where"]
    rows = [
        [a.split, a.name, a.component, a.rows, a.num_bytes, a.seconds, "built" if a.built else "found", a.path]
        for a in result.arrays
    ]
    return f"{table(header, rows)}\n{last}"


def _facts(result: BuildResult) -> dict[str, object]:
    arrays = [
        {
            "split": a.split,
            "what": a.name,
            "component": a.component,
            "path": str(a.path),
            "rows": a.rows,
            "bytes": a.num_bytes,
            "seconds": a.seconds,
            "built": a.built,
        }
        for a in result.arrays
    ]
    return {"samples": dict(result.samples), "arrays": arrays, "peak_bytes": result.peak_bytes}
