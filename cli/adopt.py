r"""Write a manifest for a .bin/.idx pair of another program, so that it can be blended, verified and trained on.

The pair is not changed. It does not record its tokenizer: name it with the options of preprocess. --full reads every
token: it refuses ids that the tokenizer does not have, and records the hashes for mdata verify --full. An existing
manifest is completed.

Pairs of older formats (TNTIDX, fairseq's) must be converted with --convert NEWPREFIX.

Examples:
  mdata adopt other_text_document --full
  mdata adopt gpt2_text_document --tokenizer-type GPT2BPETokenizer \
      --vocab-file vocab.json --merge-file merges.txt
"""

from __future__ import annotations

import argparse

import mdata
from mdata.corpus.adopt import Adopted
from mdata.corpus.convert import convert
from mdata.errors import counted
from mdata.progress import Progress

from .console import Console, Parser
from .tokenizer_options import add_tokenizer, add_variants, given_options, tokenizer_of


def add_arguments(parser: Parser) -> None:
    """The tokenizer's options and those of this command."""
    add = parser.add_argument
    add("prefix", metavar="PREFIX", help="the pair, without .bin and .idx")
    add("--full", action="store_true", help="read every token: hashes, largest id, check against the vocabulary")
    add("--convert", metavar="NEWPREFIX", help="rewrite a pair of an older format under this prefix; implies --full")
    add(
        "--fairseq-ids-plus-one",
        action="store_true",
        help="with --convert: subtract the 1 that fairseq's TNTIDX builder added to every id",
    )
    add(
        "--level",
        choices=("document", "sentence", "chat", "pairs"),
        help="what one sequence is (default: inferred from the name of PREFIX)",
    )
    add("--threads", type=int, metavar="N", help="reading threads (default: all available cores)")
    group = parser.add_argument_group("the tokenizer of these ids, if known")
    add_tokenizer(group, required=False)
    add_variants(group)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `mdata.adopt` and print what was written."""
    tokenizer: mdata.Tokenizer | None = None
    unused: tuple[str, ...] = ()
    if arguments.tokenizer_type is not None:
        tokenizer, unused = tokenizer_of(arguments)
    elif used_options := given_options(arguments):
        raise mdata.UsageError(
            f"{' and '.join(used_options)} given without a tokenizer type", fix="add --tokenizer-type"
        )
    if unused:
        console.note(f"mdata: ignored for {arguments.tokenizer_type}: {', '.join(unused)}")
    if arguments.threads is not None and (arguments.convert is not None or not arguments.full):
        console.note("mdata: ignored: --threads (it needs --full and does not apply to --convert)")
    with console.progress() as progress:
        made = _made(arguments, tokenizer, progress)
    (shard,) = made.manifest.shards
    facts = {
        "manifest": str(made.path),
        "id": made.manifest.id,
        "there_before": made.there_before,
        "verified": made.manifest.verified,
        "documents": shard.documents,
        "sequences": shard.sequences,
        "tokens": shard.tokens,
        "largest_id": shard.largest_id,
        "dtype": made.manifest.dtype,
    }
    verb = "already exists with the same content" if made.there_before else "written"
    documents, sequences = counted(shard.documents, "document"), counted(shard.sequences, "sequence")
    counts = f"{documents}, {sequences}, {counted(shard.tokens, 'token')}"
    console.result(f"{made.path}: {verb}\n{counts}, {made.manifest.dtype}", facts)


def _made(arguments: argparse.Namespace, tokenizer: mdata.Tokenizer | None, progress: Progress) -> Adopted:
    if arguments.convert is None and arguments.fairseq_ids_plus_one:
        raise mdata.UsageError("--fairseq-ids-plus-one needs --convert", fix="add --convert NEWPREFIX")
    if arguments.convert is not None:
        return convert(
            arguments.prefix,
            arguments.convert,
            tokenizer=tokenizer,
            level=arguments.level,
            fairseq_ids_plus_one=arguments.fairseq_ids_plus_one,
            progress=progress,
        )
    return mdata.adopt(
        arguments.prefix,
        tokenizer,
        level=arguments.level,
        full=arguments.full,
        threads=arguments.threads,
        progress=progress,
    )
