"""The options of a preprocess run, by the names of Megatron's tool.

Nothing here reads a file. `check_options` refuses invalid values, and `content_options` selects the options that decide
what is written (others, such as workers, may change when a run is continued). Options without effect are found in
mdata/preprocessing/plan.py; options of Megatron that mdata ignores are in cli/preprocess_options.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from mdata.corpus.paths import check_prefix
from mdata.errors import UsageError, counted
from mdata.indexed.pair_format import BLOCK_BYTES
from mdata.object_storage.address import address_of, is_address, neither, refuse_output_address
from mdata.preprocessing.bad_rows import check_bad_row_options
from mdata.sources.chat_schema import SCHEMA_KEYS, ChatSchema
from mdata.sources.conversation import TRAIN_ON
from mdata.sources.row_filter import RowFilter, parse_filter
from mdata.sources.text_template import TextTemplate, parse_template
from mdata.util.machine_limits import usable_cores

_MOST_PARTITIONS = 10_000
_DECIMAL = re.compile(r"[0-9]{0,30}\.?[0-9]{1,30}")


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Options of `preprocess`, by the names of Megatron's tool.

    Args:
        input: files, folders or patterns of jsonl, parquet, Arrow, WARC or plain text, compressed or not, or one of
            them; "-" is stdin.
        include, exclude: patterns for files in folders; see mdata/sources/folder_files.py.
        output_prefix: results are named `{output_prefix}_{key}_{level}.*`.
        tokenizer_type: Megatron's name of the tokenizer.
        tokenizer_model: its file or folder, for types that have one.
        vocab_file: the vocabulary, for types that have one.
        merge_file: the merges of a byte-level BPE.
        tokenizer_options: further options of the type, as (name, value) pairs.
        engine: the library that tokenizes; "auto": the fastest one that gives the exact ids.
        json_keys: the values of each key are tokenized into a corpus of their own.
        input_format: "auto" decides by name and content.
        text_documents: a document of plain text is a file, or a paragraph (separated by blank lines).
        text_template: builds the text of a record from several columns; the one key then only names the result.
        where: a filter over the columns of a record; rows that do not match are left out, and counted.
        skip_rows: a folder that `dedup` wrote: the rows that it names are left out, and counted as filtered.
        skip, limit: number of rows to leave out at the beginning of all inputs, and to read after them; None: all.
        min_tokens, max_tokens: documents of fewer or more tokens, without the end-of-document id, are left out.
        append_eod: write the end-of-document id after each document that is not empty.
        workers: number of processes that tokenize; 1: this process does. The result is the same.
        tokens: values are lists of token ids of this tokenizer; they are checked, and not tokenized.
        chat: records are conversations; the sequences of a document are context, trained, context, trained ...
        chat_schema: which fields of a record hold its conversation: see mdata/sources/chat_schema.py.
        chat_template: "tokenizer", "chatml", "plain" or a file of jinja; None: the tokenizer's own, else ChatML.
        chat_date: YYYY-MM-DD, for templates that write today's date; None: they have none.
        chat_train_on: the turns that are trained on: the assistant's, its last one, or all.
        split_sentences: split each text into sentences, each of which becomes a sequence.
        lang: the language whose Punkt tables are used.
        keep_newlines: white space between sentences is kept, at the end of the sentence before it.
        nltk_data: a folder with NLTK's data, searched before NLTK_DATA and NLTK's default folders.
        partitions: also write P partitions, `{output_prefix}_{i}_{key}_{level}.*`; the result is all of them merged.
        keep_sequential_samples: partitions are runs of rows instead of every P-th row.
        shard: "3/64": make the third of 64 parts of the job, `{output_prefix}-00003-of-00064_{key}_{level}.*`.
        shard_inputs: set by `preprocess` itself: all inputs of the job that the part belongs to.
        holdout: this share of the documents, chosen by a hash of their text, goes to
            `{output_prefix}_holdout_{key}_{level}.*` instead; a decimal number of at most 1.
        on_error: stop at the first bad row, skip bad rows, or skip them and write them to a file.
        quarantine: that file (lines of JSON).
        max_errors: stop when more rows than this are bad: "100", or "0.5%" of all rows.
        max_record_bytes: longer lines and documents are bad rows.
        overwrite: replace results of this prefix that were made from other input or with other options.
        verify_input: hash the inputs again before continuing, even if size and modification time agree.
        work_folder: if output_prefix is an address (s3://, gs://, az://): results are written here, then uploaded.
        chunk_bytes: how much text a worker gets at once. It does not change the tokens.
        checkpoint_s: seconds between journal records.
    """

    input: str | Path | Sequence[str | Path]
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
    input_format: Literal["auto", "jsonl", "csv", "tsv", "parquet", "arrow", "warc", "tar", "text"] = "auto"
    text_documents: Literal["file", "paragraph"] = "file"
    text_template: str | None = None
    where: str | None = None
    skip_rows: str | Path | None = None
    skip: int = 0
    limit: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    append_eod: bool = False
    workers: int = field(default_factory=usable_cores)
    tokens: bool = False
    chat: bool = False
    chat_schema: ChatSchema = "messages"
    chat_template: str | None = None
    chat_date: str | None = None
    chat_train_on: Literal["assistant", "all", "last"] = "assistant"
    split_sentences: bool = False
    lang: str = "english"
    keep_newlines: bool = False
    nltk_data: str | None = None
    partitions: int = 1
    keep_sequential_samples: bool = False
    shard: str | None = None
    shard_inputs: str | None = None
    holdout: str = "0"
    on_error: Literal["stop", "skip", "quarantine"] = "stop"
    quarantine: str | None = None
    max_errors: str | None = None
    max_record_bytes: int = 64 << 20
    verify_input: bool = False
    overwrite: bool = False
    work_folder: str | None = None
    chunk_bytes: int = BLOCK_BYTES
    checkpoint_s: float = 5.0

    @property
    def inputs(self) -> tuple[str, ...]:
        """`input` as texts."""
        return (str(self.input),) if isinstance(self.input, str | Path) else tuple(map(str, self.input))

    @property
    def level(self) -> Literal["document", "sentence", "chat", "pairs"]:
        """The last part of the results' names."""
        if self.chat and self.chat_schema == "pairs":
            return "pairs"
        return "chat" if self.chat else "sentence" if self.split_sentences else "document"


def check_options(options: PreprocessOptions) -> None:
    """Refuse wrong values before anything is read.

    Raises:
        UsageError: names the option and its value.
    """
    _check_numbers(options)
    _check_choices(options)
    _check_names(options)


def _check_numbers(options: PreprocessOptions) -> None:
    for name in ("workers", "partitions", "chunk_bytes", "max_record_bytes"):
        value = getattr(options, name)
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}={value!r}", expected="an integer, at least 1")
    for name in ("skip", "limit", "min_tokens", "max_tokens"):
        value = getattr(options, name)
        if not (value is None and name in ("limit", "max_tokens")) and (type(value) is not int or value < 0):
            raise UsageError(f"{name}={value!r}", expected="an integer, at least 0")
    if options.max_tokens is not None and options.max_tokens < options.min_tokens:
        raise UsageError(f"max_tokens={options.max_tokens} is below min_tokens={options.min_tokens}")
    for name in ("shard", "keep_sequential_samples", "skip_rows"):
        if (options.skip or options.limit is not None) and getattr(options, name):
            raise UsageError(
                f"skip and limit count rows over all inputs, and cannot be combined with {name}",
                fix="leave one of them out",
            )
    if options.partitions > _MOST_PARTITIONS:
        raise UsageError(
            f"partitions={options.partitions}",
            expected=f"at most {_MOST_PARTITIONS:,}, as each is a corpus with five files of its own",
            fix="fewer partitions",
        )
    for name in ("output_prefix", "holdout", "max_errors"):
        value = getattr(options, name)
        if not isinstance(value, str) and (name, value) != ("max_errors", None):
            raise UsageError(f"{name}={value!r}", expected="text (for numbers too, such as '0.01')")
    if not isinstance(options.input, str | Path | Sequence) or isinstance(options.input, bytes):
        raise UsageError(f"input={options.input!r}", expected="a text or a Path, or a sequence of them")
    if isinstance(options.json_keys, str):
        raise UsageError(f"json_keys={options.json_keys!r}", expected="a sequence of texts, not a single text")
    if options.text_documents not in ("file", "paragraph"):
        raise UsageError(f"text_documents={options.text_documents!r}", expected="file or paragraph")
    if not _DECIMAL.fullmatch(options.holdout) or Fraction(options.holdout) > 1:
        raise UsageError(
            f"holdout={options.holdout[:60]}",
            expected="a share of the documents from 0 to 1, such as 0.01, with at most 30 digits after the point",
        )


def _check_choices(options: PreprocessOptions) -> None:
    check_bad_row_options(options)
    if options.chat_train_on not in TRAIN_ON:
        raise UsageError(f"chat_train_on={options.chat_train_on}", expected=", ".join(TRAIN_ON))
    if options.chat_schema not in SCHEMA_KEYS:
        raise UsageError(f"chat_schema={options.chat_schema}", expected=", ".join(SCHEMA_KEYS))
    if options.chat and options.split_sentences:
        raise UsageError("conversations are not split into sentences", fix="leave split_sentences out")
    for name in ("chat", "split_sentences", "text_template"):
        if options.tokens and getattr(options, name):
            raise UsageError(f"{name} needs text, but lists of token ids are read", fix=f"leave {name} out")
    if options.text_template is not None and options.chat:
        raise UsageError("conversations are not made by a template of columns", fix="leave text_template out")
    if options.text_template is not None and len(options.json_keys) != 1:
        raise UsageError(
            f"text_template makes one text, and json_keys names {counted(len(options.json_keys), 'result')}",
            fix="one key, which names the result",
        )
    template_and_filter(options)
    if options.keep_sequential_samples and options.inputs == ("-",) and options.partitions > 1:
        raise UsageError("keep_sequential_samples must count the rows first, but stdin can be read only once")


def _check_names(options: PreprocessOptions) -> None:
    if not options.json_keys:
        raise UsageError("json_keys is empty", expected="at least one key")
    if len(set(options.json_keys)) < len(options.json_keys):
        raise UsageError(f"json_keys names a key twice: {' '.join(options.json_keys)}")
    for key in options.json_keys:
        if "/" in key or "\0" in key:
            raise UsageError(f"key {key!r} cannot be part of a file name", fix="rename it in the input")
    check_prefix(options.output_prefix)
    if options.work_folder is not None and not is_address(options.output_prefix):
        raise UsageError(
            f"work_folder={options.work_folder} has no effect: results at a path are made beside it",
            fix="leave it out, or give an output prefix at s3://, gs:// or az://",
        )
    if options.work_folder is not None:
        refuse_output_address(options.work_folder)
    address = address_of(options.output_prefix)
    if address and not is_address(options.output_prefix):
        raise neither(f"output prefix {options.output_prefix}", address)
    for name, text in (("output prefix", options.output_prefix), *(("key", key) for key in options.json_keys)):
        if not text.isprintable():
            raise UsageError(f"{name} {text!r} has characters that cannot be printed", fix="rename it")


def template_and_filter(options: PreprocessOptions) -> tuple[TextTemplate | None, RowFilter | None]:
    """Parse text_template and where.

    Raises:
        UsageError: one of them cannot be parsed; names the position.
    """
    template, where = options.text_template, options.where
    return None if template is None else parse_template(template), None if where is None else parse_filter(where)


def content_options(options: PreprocessOptions) -> dict[str, Any]:
    """The options that, besides input and tokenizer, decide what is written; recorded in journals and manifests."""
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
    )
    names += tuple(name for name in ("text_template", "where") if getattr(options, name) is not None)
    names += tuple(name for name in ("skip", "min_tokens", "tokens") if getattr(options, name))
    names += tuple(name for name in ("limit", "max_tokens") if getattr(options, name) is not None)
    if options.split_sentences:
        names += ("split_sentences", "lang", "keep_newlines")
    if options.chat:
        names += ("chat", "chat_train_on", *(("chat_schema",) if options.chat_schema != "messages" else ()))
        names += ("chat_date",) if options.chat_date is not None else ()
    if options.shard:
        names += ("shard", "shard_inputs")
    recorded = {name: getattr(options, name) for name in names}
    return {
        **recorded,
        "json_keys": list(options.json_keys),
        "tokenizer_type": options.tokenizer_type,
        "piece_bytes": options.chunk_bytes,  # its name in manifests of version 1
    }
