"""What a preprocess run is asked to do, and where its results go.

Options carry the names of Megatron's tool. Nothing here reads a file: `check_options` refuses what can be
refused by looking at the words alone, and `content_options` says which of them decide what is written; the
others (workers, sizes, policies of speed) may differ between two runs that continue each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from mdata.errors import UsageError
from mdata.indexed.pair_format import BLOCK_BYTES
from mdata.sources.conversation import TRAIN_ON
from mdata.sources.folder_files import Filter
from mdata.util.cpu_limit import usable_cores

DECIMAL = re.compile(r"[0-9]*\.?[0-9]+")


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Options of `preprocess`, by the names of Megatron's tool.

    Args:
        input: files, folders or patterns of jsonl, parquet or plain text, compressed or not; "-" is stdin.
        include, exclude: patterns for the files of folders, from the folder; see mdata/sources/folder_files.py.
        output_prefix: results are named `{output_prefix}_{key}_{level}.*`.
        tokenizer_type: Megatron's name of the tokenizer.
        tokenizer_model: its file or folder, for the types that have one.
        vocab_file: the vocabulary, for the types that have one.
        merge_file: the merges of a byte-level BPE.
        tokenizer_options: what the type takes besides, as (name, value) pairs.
        engine: the library that tokenizes; "auto" takes the fastest that gives the exact ids here.
        json_keys: whose values are tokenized, each into a corpus of its own.
        input_format: "auto" decides by name and content.
        text_documents: what a document of plain text is: a file, or a paragraph (blank lines separate).
        append_eod: put the end-of-document id after each document that has any id.
        workers: processes that tokenize; 1 works in this process. The result is the same.
        chat: records hold conversations; each becomes a document whose sequences are context and trained, by turns.
        chat_template: "tokenizer", "chatml", "plain" or a file of jinja; None: the tokenizer's own, else ChatML.
        chat_train_on: whose turns are trained on: the assistant's, its last one, or all.
        split_sentences: cut each text into sentences, each of which becomes a sequence.
        lang: the language whose tables decide where a sentence ends.
        keep_newlines: the white space between sentences stays with the one before it.
        nltk_data: folder of NLTK's data, searched before NLTK_DATA and NLTK's usual ones.
        partitions: also write P parts, `{output_prefix}_{i}_{key}_{level}.*`, merged in their order.
        keep_sequential_samples: parts are runs of rows instead of every P-th row.
        holdout: this share of the documents, chosen by a hash of their text, goes to
            `{output_prefix}_holdout_{key}_{level}.*` instead; a decimal number of at most 1.
        on_error: what a row that cannot be taken does: stop the run, be skipped, or be skipped and kept in a file.
        quarantine: that file, lines of JSON.
        max_errors: stop when more rows than this are bad: "100", or "0.5%" of all rows.
        max_record_bytes: a longer line or document counts as bad.
        overwrite: replace results of this prefix that were made of other input or with other options.
        verify_input: hash the inputs again before continuing, even where size and time of change agree.
        piece_bytes: how much text is handed out at once. The tokens are the same.
        checkpoint_s: seconds between journal records.
    """

    input: tuple[str, ...]
    output_prefix: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_options: tuple[tuple[str, Any], ...] = ()
    engine: str = "auto"
    json_keys: tuple[str, ...] = ("text",)
    input_format: Literal["auto", "jsonl", "parquet", "text"] = "auto"
    text_documents: Literal["file", "paragraph"] = "file"
    append_eod: bool = False
    workers: int = field(default_factory=usable_cores)
    chat: bool = False
    chat_template: str | None = None
    chat_train_on: Literal["assistant", "all", "last"] = "assistant"
    split_sentences: bool = False
    lang: str = "english"
    keep_newlines: bool = False
    nltk_data: str | None = None
    partitions: int = 1
    keep_sequential_samples: bool = False
    holdout: str = "0"
    on_error: Literal["stop", "skip", "quarantine"] = "stop"
    quarantine: str | None = None
    max_errors: str | None = None
    max_record_bytes: int = 64 << 20
    verify_input: bool = False
    overwrite: bool = False
    piece_bytes: int = BLOCK_BYTES
    checkpoint_s: float = 5.0

    @property
    def level(self) -> Literal["document", "sentence", "chat"]:
        """What the names of results tell: whether texts were split into sentences, or are conversations."""
        return "chat" if self.chat else "sentence" if self.split_sentences else "document"


def input_filter(options: PreprocessOptions) -> Filter:
    """Which files of folders are wanted.

    Raises:
        UsageError: what is no pattern.
    """
    return Filter(options.include, options.exclude)


def check_options(options: PreprocessOptions) -> None:
    """Refuse what no run could do, before anything is read.

    Raises:
        UsageError: names the option and its value.
    """
    _check_numbers(options)
    _check_choices(options)
    _check_names(options)


def _check_numbers(options: PreprocessOptions) -> None:
    for name in ("workers", "partitions", "piece_bytes", "max_record_bytes"):
        value = getattr(options, name)
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}={value!r}", expected="a whole number, at least 1")
    for name in ("output_prefix", "holdout", "max_errors"):
        value = getattr(options, name)
        if not isinstance(value, str) and (name, value) != ("max_errors", None):
            raise UsageError(f"{name}={value!r}", expected="text (numbers too, as they are written: '0.01')")
    for name in ("input", "json_keys"):
        if isinstance(getattr(options, name), str):
            raise UsageError(f"{name}={getattr(options, name)!r}", expected="a sequence of texts, not one")
    if options.text_documents not in ("file", "paragraph"):
        raise UsageError(f"text_documents={options.text_documents!r}", expected="file or paragraph")
    if not DECIMAL.fullmatch(options.holdout) or Fraction(options.holdout) > 1:
        raise UsageError(f"holdout={options.holdout}", expected="a share of the documents from 0 to 1, such as 0.01")
    if options.max_errors is not None and not DECIMAL.fullmatch(options.max_errors.removesuffix("%")):
        raise UsageError(f"max_errors={options.max_errors}", expected='a number of rows, or a share such as "0.5%"')


def _check_choices(options: PreprocessOptions) -> None:
    if options.on_error not in ("stop", "skip", "quarantine"):
        raise UsageError(f"on_error={options.on_error}", expected="stop, skip or quarantine")
    if (options.on_error == "quarantine") != (options.quarantine is not None):
        raise UsageError(
            f"on_error={options.on_error} with quarantine={options.quarantine}",
            expected="on_error=quarantine together with the file that keeps the bad rows",
        )
    if options.max_errors is not None and options.on_error == "stop":
        raise UsageError("max_errors has no meaning with on_error=stop", fix="on_error=skip or quarantine")
    if options.chat_train_on not in TRAIN_ON:
        raise UsageError(f"chat_train_on={options.chat_train_on}", expected=", ".join(TRAIN_ON))
    if options.chat and options.split_sentences:
        raise UsageError("conversations are not split into sentences", fix="leave split_sentences out")
    if options.keep_sequential_samples and options.input == ("-",) and options.partitions > 1:
        raise UsageError("keep_sequential_samples must count the rows first, and stdin is read once only")


def _check_names(options: PreprocessOptions) -> None:
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


def content_options(options: PreprocessOptions) -> dict[str, Any]:
    """What decides, beside input and tokenizer, the content of the results: recorded with them."""
    names: tuple[str, ...] = (
        "append_eod",
        "holdout",
        "input_format",
        "keep_sequential_samples",
        "max_errors",
        "max_record_bytes",
        "on_error",
        "partitions",
        "text_documents",
        "piece_bytes",
    )
    if options.split_sentences:
        names += ("split_sentences", "lang", "keep_newlines")
    if options.chat:
        names += ("chat", "chat_train_on")
    recorded = {name: getattr(options, name) for name in names}
    return {**recorded, "json_keys": list(options.json_keys), "tokenizer_type": options.tokenizer_type}
