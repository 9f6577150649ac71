"""Train a tokenizer on text and write its files for preprocess.

Kinds: byte-bpe (GPT2BPETokenizer, HuggingFaceTokenizer), wordpiece (BertWordPieceCase; with --lower-case
BertWordPieceLowerCase), sentencepiece-bpe and sentencepiece-unigram (SentencePieceTokenizer; --preset llama2 for
Llama2Tokenizer). Input is as for preprocess; large input is sampled at random. The same input and options give the same
files. At the end the options for preprocess are printed.

Examples:
  mdata train-tokenizer --input web.jsonl code.jsonl --vocab-size 32000 --output tok
  mdata train-tokenizer --input web.jsonl --kind sentencepiece-unigram --vocab-size 32000 --output pieces
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import fields

from mdata.errors import counted
from mdata.tokenizer_training.train import train_tokenizer
from mdata.tokenizer_training.train_options import TrainOptions
from mdata.tokenizers.base.tokenizer import TokenizerSpec

from .console import Console
from .preprocess_options import FORMATS, add_filter, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, folders or quoted patterns; - is stdin")
    add("--output", required=True, metavar="FOLDER", help="folder for the tokenizer's files")
    add("--vocab-size", type=int, required=True, metavar="N", help="entries, including special tokens and bytes")
    kinds = ("byte-bpe", "wordpiece", "sentencepiece-bpe", "sentencepiece-unigram")
    add("--kind", choices=kinds, default="byte-bpe", help="kind of tokenizer (default: byte-bpe)")
    add("--overwrite", action="store_true", help="replace another tokenizer of this kind in the folder")
    _add_reading(parser.add_argument_group("reading, as in preprocess"))
    _add_training(parser.add_argument_group("training"))


def _add_reading(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--json-keys", "--json-key", nargs="+", default=("text",), metavar="KEY", help="key of the text (default: text)"
    )
    add("--input-format", choices=FORMATS, default="auto", help="format of the input (default: auto)")
    add("--text-documents", choices=("file", "paragraph"), default="file", help="what one document is in plain text")
    add_filter(group)
    add("--max-record-bytes", type=size, default=64 << 20, metavar="SIZE", help="reject longer records (default: 64M)")
    add("--on-error", choices=("stop", "skip"), default="stop", help="what to do at a bad row (default: stop)")
    more = "default: 1G; sentencepiece-bpe 256M, sentencepiece-unigram 64M"
    add("--sample-bytes", type=size, metavar="SIZE", help=f"maximum bytes of decompressed input to train on; {more}")
    add("--seed", type=int, default=1234, metavar="N", help="random seed of the sample (default: 1234)")


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--special-tokens",
        nargs="+",
        default=(),
        metavar="TOKEN",
        help="further special tokens, after those of the kind",
    )
    add("--lower-case", action="store_true", help="wordpiece: lower-case the text, for BertWordPieceLowerCase")
    add(
        "--character-coverage",
        type=float,
        metavar="SHARE",
        help="wordpiece, sentencepiece: share of characters covered (default: 0.9995)",
    )
    add(
        "--preset",
        choices=("llama2",),
        help="sentencepiece: byte fallback, single digits, no normalization, blanks kept",
    )
    add("--byte-fallback", action="store_true", help="sentencepiece: spell unknown characters as bytes")
    add("--split-digits", action="store_true", help="sentencepiece: every digit is a piece")
    add("--pad", action="store_true", help="sentencepiece: <pad>, id 3; <unk> <s> </s> are 0 to 2")
    add("--user-symbols", nargs="+", default=(), metavar="TEXT", help="sentencepiece: pieces that are never split")
    rules = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")
    add("--normalization", choices=rules, help="sentencepiece: normalization rule (default: nmt_nfkc)")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `mdata.train_tokenizer` and print the result."""
    values = {field.name: getattr(arguments, field.name) for field in fields(TrainOptions)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    with console.progress() as progress:
        made = train_tokenizer(
            arguments.input,
            arguments.output,
            kind=arguments.kind,
            vocab_size=arguments.vocab_size,
            options=TrainOptions(**values),
            progress=progress,
        )
    if made.entries < arguments.vocab_size:
        console.note(
            f"mdata: the text yields only {counted(made.entries, 'entry', 'entries')}, fewer than --vocab-size"
        )
    words = [preprocess_words(spec) for spec in made.specs]
    there = " (the same tokenizer already existed)" if made.there_before else ""
    lines = [
        f"{arguments.output}: {counted(made.entries, 'entry', 'entries')}, end of document {made.tokenizer.eod}{there}"
    ]
    lines += [f"{'next: mdata preprocess' if not i else '  or: mdata preprocess'} {w}" for i, w in enumerate(words)]
    facts = {
        "folder": arguments.output,
        "kind": arguments.kind,
        "vocab_size": made.entries,
        "eod": made.tokenizer.eod,
        "fingerprint": made.tokenizer.fingerprint,
        "sampled_bytes": made.sampled_bytes,
        "input_bytes": made.input_bytes,
        "there_before": made.there_before,
        "preprocess_options": words,
    }
    console.result("\n".join(lines), facts)


def preprocess_words(spec: TokenizerSpec) -> str:
    """The options of preprocess that name a tokenizer."""
    words = ["--tokenizer-type", spec.type]
    for option, value in (
        ("--tokenizer-model", spec.model),
        ("--vocab-file", spec.vocab_file),
        ("--merge-file", spec.merge_file),
    ):
        words += [option, value] if value else []
    tokens = dict(spec.options).get("special_tokens", [])
    return shlex.join([*words, *(["--tokenizer-special-tokens", *tokens] if tokens else [])])
