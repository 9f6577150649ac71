"""The command line of `mdata preprocess`: every option of Megatron's preprocess_data.py, of current and older versions,
and our own. docs/reference/megatron_preprocess.md lists them; a test compares the two.

An option of Megatron's is accepted, ignored with one line because it does not change the output, or refused by name
because it would.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NoReturn, cast

import mdata

from .console import SAME_COMMAND, Parser
from .tokenizer_options import add_tokenizer, add_variants

Policy = Literal["stop", "skip", "quarantine"]

# The output does not depend on them. Values: how many words follow.
IGNORED: Mapping[str, int | str] = MappingProxyType(
    {
        "--log-interval": 1,
        "--find-optimal-num-workers": 0,
        "--workers-to-check": "+",
        "--max-documents": 1,
        "--padded-vocab-size": 1,
        "--no-pad-vocab-size": 0,
        "--disable-pad-vocab-size": 0,
        "--vocab-extra-ids": 1,
        "--null-tokenizer-pad-id": 1,
        "--tokenizer-hf-no-use-fast": 0,
        "--trust-remote-code": 0,
        "--use-gigatoken": 0,
        "--chunk-size": 1,
    }
)
# They change the output and are not supported in this version.
REFUSED = ("--tokenizer-metadata",)
FORMATS = ("auto", "jsonl", "csv", "tsv", "parquet", "arrow", "warc", "tar", "text")
TURNS = ("assistant", "all", "last")
SCHEMAS = ("messages", "alpaca", "dolly", "pairs")
_SIZES = MappingProxyType({"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30})


def add_arguments(parser: Parser) -> None:
    """All options, Megatron's first."""
    parser.usage = f"{parser.prog} --input PATH ... --output-prefix PREFIX --tokenizer-type TYPE [options]"
    parser.set_defaults(ignored=())
    parser.resume = SAME_COMMAND
    _add_megatron(parser.add_argument_group("options of preprocess_data.py"))
    _add_input(parser.add_argument_group("options that only mdata has: input"))
    _add_work(parser.add_argument_group("options that only mdata has: output and work"))
    parser.epilog = f"Accepted but ignored (docs/reference/megatron_preprocess.md says why): {' '.join(IGNORED)}"
    for name, nargs in IGNORED.items():
        parser.add_argument(name, action=_Ignore, nargs=nargs)
    for name in REFUSED:
        parser.add_argument(name, action=_Refuse)


def _add_megatron(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, folders, quoted patterns, or - for stdin")
    add("--output-prefix", required=True, metavar="PREFIX", help="results are PREFIX_KEY_document.* (or _sentence.*)")
    add(
        "--json-keys",
        "--json-key",
        nargs="+",
        metavar="KEY",
        help="keys to tokenize (default: text; --chat: messages)",
    )
    add("--chat-template", metavar="T", help="with --chat: tokenizer, chatml, plain, or a Jinja file")
    add_tokenizer(group, required=True)
    add("--split-sentences", action="store_true", help="split texts into sentences")
    add("--lang", default="english", metavar="NAME", help="language of the sentences (default: english)")
    add("--keep-newlines", action="store_true", help="--split-sentences: keep white space between them")
    add("--append-eod", action="store_true", help="append the end-of-document id to each document")
    add("--workers", type=int, metavar="N", help="worker processes (default: all cores)")
    add("--partitions", type=int, default=1, metavar="P", help="also write the results in P partitions (default: 1)")
    add("--keep-sequential-samples", action="store_true", help="partitions are contiguous, not every P-th record")
    add("--dataset-impl", action=_Implementation, help="only mmap, the format that mdata writes")


def _add_input(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--input-format", choices=FORMATS, default="auto", metavar="F", help=f"one of {' '.join(FORMATS)}")
    add_filter(group)
    documents = ("file", "paragraph")
    add("--text-documents", choices=documents, default="file", metavar="D", help="of plain text: file or paragraph")
    add("--text-template", metavar="T", help="text of several columns: '{title}\\n{body}'")
    add("--where", metavar="FILTER", help="only records that match: \"lang = 'en' and n > 9\"")
    add("--skip-rows", metavar="FOLDER", help="skip rows that dedup or clean --rows-only listed")
    add("--tokens-column", metavar="KEY", help="lists of token ids, which are not tokenized")
    add("--skip", type=int, default=0, metavar="N", help="leave out the first N rows of the input")
    add("--limit", type=int, metavar="N", help="read only N rows, after those of --skip")
    add("--min-tokens", type=int, default=0, metavar="N", help="leave out documents of fewer tokens")
    add("--max-tokens", type=int, metavar="N", help="leave out documents of more tokens")
    add_variants(group)
    add("--chat", action="store_true", help="records are conversations")
    add(
        "--chat-schema",
        choices=SCHEMAS,
        default="messages",
        metavar="S",
        help="fields: messages (default), alpaca, dolly or pairs",
    )
    add("--chat-date", metavar="DAY", help="YYYY-MM-DD, for a Jinja template that writes today's date")
    add("--chat-train-on", choices=TURNS, default=TURNS[0], metavar="T", help="turns to train on")
    add("--nltk-data", metavar="FOLDER", help="folder with tokenizers/punkt_tab (--split-sentences)")
    add("--max-record-bytes", type=size, metavar="N", help="reject records of more bytes than this (default: 64M)")
    add("--on-error", nargs="+", action=OnError, metavar="POLICY", help="stop (default), skip, or quarantine FILE")
    add("--quarantine", metavar="FILE", help="where --on-error quarantine writes bad rows")
    add("--max-errors", metavar="LIMIT", help="fail above this many bad rows: 100, or 0.5%%")
    add("--verify-input", action="store_true", help="on resume, hash inputs again; ignore file times")


def _add_work(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    engines = ("auto", "gigatoken", "tiktoken", "tokenizers", "sentencepiece", "mdata")
    add("--engine", choices=engines, default="auto", help="library that tokenizes (default: the fastest exact one)")
    add("--holdout", default="0", metavar="FRACTION", help="hold out this share, as PREFIX_holdout_KEY_*")
    add("--shard", metavar="K/N", help="make part K of N; join them with mdata merge")
    add("--work-folder", metavar="FOLDER", help="local folder for results at s3://, gs:// or az://")
    add("--overwrite", action="store_true", help="replace results made from other input or options")
    add("--dry-run", action="store_true", help="predict size and time from a sample; write nothing")


def add_filter(group: argparse._ArgumentGroup) -> None:
    """Which files of folders are read."""
    add = group.add_argument
    add("--include", nargs="+", default=(), metavar="P", help="read only these files of folders (.gitignore patterns)")
    add("--exclude", nargs="+", default=(), metavar="P", help="skip these files and subfolders of folders")


def size(text: str) -> int:
    """ "64M" as bytes; also plain digits, K and G."""
    digits = text.rstrip("KMG")
    if not digits.isdecimal() or text.removeprefix(digits) not in _SIZES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64M")
    return int(digits) * _SIZES[text.removeprefix(digits)]


class _Ignore(argparse.Action):
    """An option without effect: its name is kept for the line that says so."""

    def __init__(self, option_strings: list[str], dest: str, nargs: int | str) -> None:
        super().__init__(option_strings, dest, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Remember the name."""
        namespace.ignored = (*namespace.ignored, self.option_strings[0])


class _Refuse(argparse.Action):
    """A known option of Megatron's that is not supported here."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> NoReturn:
        """Refuse, by name."""
        raise mdata.UsageError(f"{self.option_strings[0]} is not in this version of mdata", fix="leave it out")


class _Implementation(argparse.Action):
    """--dataset-impl of the old versions: only mmap is supported, which all readers understand."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, metavar="mmap", help=help)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Accept only mmap."""
        if values != "mmap":
            raise mdata.UsageError(
                f"--dataset-impl {values} is a format that mdata does not write",
                expected="mmap, which every version of Megatron-LM since 2020 reads",
                fix="leave it out, and leave Megatron-LM's --data-impl out in training",
            )


class OnError(argparse.Action):
    """stop, skip, quarantine, or quarantine FILE."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option: str | None = None,
    ) -> None:
        """Accept the policy and, after quarantine, the file."""
        policy, *file = list(values or ())
        if policy not in ("stop", "skip", "quarantine") or len(file) > (policy == "quarantine"):
            words = " ".join([policy, *file])
            raise mdata.UsageError(f"--on-error {words}", expected="stop, skip, or quarantine FILE")
        namespace.on_error = policy
        if file:
            namespace.quarantine = file[0]


def policy_of(arguments: argparse.Namespace) -> Policy:
    """--quarantine FILE alone means --on-error quarantine."""
    policy = arguments.on_error or ("stop" if arguments.quarantine is None else "quarantine")
    if policy == "quarantine" and arguments.quarantine is None:
        raise mdata.UsageError("--on-error quarantine needs a file", fix="--on-error quarantine FILE")
    if policy != "quarantine" and arguments.quarantine is not None:
        raise mdata.UsageError(f"--quarantine needs --on-error quarantine, not --on-error {policy}")
    return cast(Policy, policy)
