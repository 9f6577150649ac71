"""The plan of a run: everything that is decided before the first record is tokenized.

A `JobPlan` has the state of the inputs, the tokenizer, how records are read and where documents go; and the description
that a journal uses to tell whether an earlier run was the same job.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mdata.dedup.row_set import FileRows, RowSet
from mdata.errors import UsageError, counted
from mdata.indexed.pair_format import smallest_dtype
from mdata.manifest.sidecars import manifest_path
from mdata.manifest.types import section_name
from mdata.preprocessing.encode import HOLDOUT_BITS, EncodeSpec
from mdata.preprocessing.partitions import Partitions
from mdata.preprocessing.placing import RESULT_ENDINGS
from mdata.preprocessing.preprocess_options import PreprocessOptions, content_options, template_and_filter
from mdata.progress import Progress
from mdata.sources.chunk import chunks, read_chunk
from mdata.sources.folder_files import PathFilter, would_be_read
from mdata.sources.input_files import STDIN, SourceFile, endings_of
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec
from mdata.tokenizers.base.tokenizer import TextRefused, Tokenizer, TokenizerConfig, TokenizerSpec
from mdata.tokenizers.registry import FILES_OF, WITHOUT_FILES, load_tokenizer

if TYPE_CHECKING:
    from mdata.preprocessing.encode_chat import ChatSpec
    from mdata.sentences.splitter import Splitter


# How a user can choose an end-of-document token.
_EOD_SETTINGS = MappingProxyType(
    {
        "HuggingFaceTokenizer": "an eos_token (or sep_token) in tokenizer_config.json",
        "TikTokenizer": "</s>, <|endoftext|> or <|end_of_text|> among its special tokens",
        "SentencePieceTokenizer": "a model with an eos piece, and not --tokenizer-sentencepiece-legacy",
    }
)

# Formats whose values may be more than texts.
_WITH_LISTS = ("jsonl", "tar", "parquet", "arrow")


@dataclass(frozen=True)
class JobPlan:
    """See `plan_job`."""

    options: PreprocessOptions
    files: Sequence[SourceFile]
    tokenizer: Tokenizer
    spec: EncodeSpec
    partitions: Partitions
    progress: Progress
    # Rows to leave out, of all files and of each input.
    skipped: tuple[RowSet, tuple[FileRows, ...]] | None = None
    # Whether and how an input differs from that of an earlier result. It may have to be read for this, so it is cached.
    compared: dict[tuple[int, str, str], str | None] = field(default_factory=dict, compare=False)

    @property
    def input_bytes(self) -> int:
        """Size of all inputs on disk."""
        return sum(file.disk_bytes for file in self.files)

    @cached_property
    def prefixes(self) -> dict[str, Path]:
        """The name of each result -> the path of its files without endings; merged corpora come last."""
        return self.partitions.prefixes(self.options)

    @property
    def manifests(self) -> dict[str, Path]:
        """The name of each result -> its manifest."""
        return {name: manifest_path(prefix) for name, prefix in self.prefixes.items()}

    def description(self) -> dict[str, Any]:
        """What distinguishes this job from others, except its inputs: JSON types.

        The policy for bad rows is separate, because it may change as long as there were no bad rows.
        """
        options = content_options(self.options)
        chat = {} if self.spec.chat is None else {"chat_template": self.spec.chat.template.fingerprint}
        return {
            **chat,
            **self._skipped_rows,
            "journal": 2,
            "options": {name: value for name, value in options.items() if name not in ("on_error", "max_errors")},
            "outputs": sorted(prefix.name for prefix in self.prefixes.values()),
            "tokenizer": self.tokenizer.fingerprint,
            "sentence_tables": self.spec.splitter and self.spec.splitter.fingerprint,
            "policy": {"on_error": self.options.on_error, "quarantine": self.options.quarantine},
        }

    @property
    def _skipped_rows(self) -> dict[str, Any]:
        return {} if self.skipped is None else {"skip_rows": self.skipped[0].fingerprint}

    def recorded_options(self, name: str) -> dict[str, Any]:
        """The options that the manifest of a result records."""
        recorded = {**content_options(self.options), **self._skipped_rows, "result": name}
        if self.spec.splitter is not None:
            recorded["sentence_tables"] = self.spec.splitter.fingerprint
        if self.spec.chat is not None:
            from mdata.chat.templates import TEMPLATE_SOURCE, source_to_record

            template = self.spec.chat.template
            recorded["chat_template"] = {"name": template.name, "fingerprint": template.fingerprint}
            if (source := source_to_record(template, self.tokenizer)) is not None:
                recorded[TEMPLATE_SOURCE] = source
        return recorded

    def beside(self, ending: str) -> Path:
        """A hidden file of this job in the output folder."""
        prefix = Path(self.options.output_prefix)
        # Jobs with other keys, or of another level, may run at the same time; a name has at most 255 bytes.
        keys = "+".join(self.options.json_keys)[:80]
        level = "" if self.options.level == "document" else f"_{self.options.level}"
        return prefix.with_name(f".{prefix.name}_{keys}{level}.{ending}")


def useful_workers(options: PreprocessOptions, files: Sequence[SourceFile]) -> int:
    """Number of workers, at most one per chunk if chunks can be counted."""
    if any(file.streamed for file in files):
        return options.workers
    return min(options.workers, -(-sum(file.disk_bytes for file in files) // options.chunk_bytes))


def plan_job(
    options: PreprocessOptions,
    files: Sequence[SourceFile],
    *,
    progress: Progress,
    on_files_read: Callable[[TokenizerConfig], None] | None = None,
) -> JobPlan:
    """Load the tokenizer, and count rows if partitions need it.

    Raises:
        UsageError: options or a tokenizer that cannot be used.
    """
    tokenizer = load_tokenizer(_tokenizer_spec(options), on_files_read=on_files_read)
    for note in tokenizer.notes:
        progress.note(note)
    if unused := unused_options(options, files):
        progress.note(f"options without effect here: {', '.join(unused)}")
    template, where = template_and_filter(options)
    chat = _chat(options, files, tokenizer)
    if options.tokens:
        _refuse_without_lists(files, "lists of token ids")
    read = ReadSpec(
        json_keys=options.json_keys,
        text_documents=options.text_documents,
        max_record_bytes=options.max_record_bytes,
        keep_bad_lines=options.on_error == "quarantine",
        sentence_lists=not options.split_sentences,
        chat=chat.train_on if chat else None,
        chat_template=chat.template if chat else None,
        chat_schema=options.chat_schema,
        template=template,
        where=where,
        tokens=options.tokens,
        key_option="--tokens-column" if options.tokens else "--json-keys",
    )
    holdout = Fraction(options.holdout)
    spec = EncodeSpec(
        read,
        _eod_to_append(options, tokenizer),
        smallest_dtype(tokenizer.vocab_size).name,
        int(holdout * 2**HOLDOUT_BITS),
        _splitter(options, progress),
        chat,
        options.min_tokens,
        options.max_tokens,
    )
    partitions = Partitions(options.partitions, _rows_per_partition(options, files, read), holdout > 0)
    job = JobPlan(options, files, tokenizer, spec, partitions, progress, _skipped(options, files))
    _check_names(job)
    return job


def _skipped(options: PreprocessOptions, files: Sequence[SourceFile]) -> tuple[RowSet, tuple[FileRows, ...]] | None:
    """The rows that options.skip_rows names.

    Raises:
        UsageError: files that it does not know, or cannot be compared with. DamageError: its files are damaged.
    """
    if options.skip_rows is None:
        return None
    rows = RowSet.open(options.skip_rows)
    if options.chunk_bytes != rows.chunk_bytes:
        sizes = f"chunk_bytes={options.chunk_bytes}", f"{rows.chunk_bytes}, as mdata dedup has"
        raise UsageError("skip_rows compares files by the hashes of their chunks", found=sizes[0], expected=sizes[1])
    return rows, tuple(map(rows.rows_of, files))


def _splitter(options: PreprocessOptions, progress: Progress) -> Splitter | None:
    if not options.split_sentences:
        return None
    from mdata.sentences.splitter import load_splitter

    splitter = load_splitter(options.lang, keep_newlines=options.keep_newlines, nltk_data=options.nltk_data)
    for note in splitter.notes:
        progress.note(note)
    return splitter


def _chat(options: PreprocessOptions, files: Sequence[SourceFile], tokenizer: Tokenizer) -> ChatSpec | None:
    """How conversations are tokenized.

    Raises:
        UsageError: the template or the tokenizer cannot be used for conversations, or an input cannot contain them.
    """
    if not options.chat:
        return None
    from mdata.chat.templates import check_spelling, choose_template
    from mdata.preprocessing.encode_chat import ChatSpec

    _refuse_without_lists(files, "conversations")
    template = choose_template(options.chat_template, tokenizer, model=options.tokenizer_model, date=options.chat_date)
    try:
        around = tokenizer.encode_batch([""])[0]
        if not len(around):
            check_spelling(template, tokenizer)
    except TextRefused as refused:
        raise UsageError(
            f"the {tokenizer.name} cannot tokenize parts of a conversation",
            found=refused.reason,
            fix="another tokenizer",
        ) from None
    if len(around):
        raise UsageError(
            f"the {tokenizer.name} adds tokens around every text, and a conversation has many texts",
            fix="leave --compat out"
            if "compat" in tokenizer.options
            else "--tokenizer-hf-no-include-special-tokens; the chat template adds what a conversation begins with",
        )
    return ChatSpec(template, options.chat_train_on, pairs=options.level == "pairs")


def _refuse_without_lists(files: Sequence[SourceFile], wanted: str) -> None:
    if other := next((file for file in files if file.format not in _WITH_LISTS), None):
        expected = f"jsonl, parquet or Arrow, for {wanted}"
        raise UsageError(f"{printable_path(other.path)} is {other.format}", expected=expected)


def _tokenizer_spec(options: PreprocessOptions) -> TokenizerSpec:
    return TokenizerSpec(
        type=options.tokenizer_type,
        model=options.tokenizer_model,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        options=options.tokenizer_options,
        engine=options.engine,
    )


def printable_path(path: str | os.PathLike[str]) -> str:
    """A path, or an address, as text; bytes that are not UTF-8 become \\x.."""
    return os.fsencode(path).decode(errors="backslashreplace")


def input_name(file: SourceFile) -> str:
    """An input as text, with the section that is read."""
    path = printable_path(file.path)
    return section_name(path, file.section.start, file.section.stop) if file.section else path


def _check_names(job: JobPlan) -> None:
    """Refuse results that would overwrite each other or the input."""
    name_of_prefix: dict[Path, str] = {}
    for name, prefix in job.prefixes.items():
        if prefix in name_of_prefix:
            raise UsageError(
                f"the results {name_of_prefix[prefix]} and {name} would both be {prefix}.*",
                fix="rename one of the keys",
            )
        name_of_prefix[prefix] = name
    inputs = {file.path.resolve() for file in job.files}
    results = {
        prefix.with_name(prefix.name + ending).resolve() for prefix in name_of_prefix for ending in RESULT_ENDINGS
    }
    if both := sorted(inputs & results):
        raise UsageError(
            f"{printable_path(both[0])} is an input and would be overwritten by a result",
            fix="another output prefix, best in a folder of its own",
        )
    quarantine = job.options.quarantine
    if quarantine is None:
        return
    path = Path(quarantine)
    if path.resolve() in inputs:
        raise UsageError(f"quarantine={quarantine} is one of the inputs", fix="another file for the bad rows")
    chosen, endings = PathFilter(job.options.include, job.options.exclude), endings_of(job.options.input_format)[1]
    for name in job.options.inputs:
        if would_be_read(path, name, endings=endings, filter=chosen):
            problem = f"quarantine={quarantine} would be an input of the next run"
            raise UsageError(problem, found=f"--input {name}", fix="a file in another folder")
    if path.resolve() in results:
        raise UsageError(f"quarantine={quarantine} is one of the results", fix="another file for the bad rows")
    if path.resolve().is_symlink():  # a loop of links, which resolve itself refuses before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if path.exists() and not path.is_file():
        raise UsageError(f"quarantine={quarantine} is not a regular file", fix="a file, or --on-error skip")


def _eod_to_append(options: PreprocessOptions, tokenizer: Tokenizer) -> int | None:
    if not options.append_eod:
        return None
    if tokenizer.eod is None:
        setting = _EOD_SETTINGS.get(tokenizer.name)
        raise UsageError(
            f"append_eod: the {tokenizer.name} {options.tokenizer_model or ''} has no end-of-document token",
            expected=setting,
            fix="name one there, or leave append_eod out" if setting else "leave append_eod out",
        )
    dtype = smallest_dtype(tokenizer.vocab_size)
    if tokenizer.eod > np.iinfo(dtype.name).max:
        raise UsageError(
            f"append_eod: the end-of-document id does not fit {dtype.name}, the token type for this vocabulary size",
            found=f"id {tokenizer.eod}, {counted(tokenizer.vocab_size, 'entry', 'entries')}",
            fix="an end-of-document token inside the vocabulary",
        )
    return tokenizer.eod


def _rows_per_partition(options: PreprocessOptions, files: Sequence[SourceFile], read: ReadSpec) -> int | None:
    """ceil(rows / P) if partitions are runs of rows; reads the input once to count them."""
    if options.partitions == 1 or not options.keep_sequential_samples:
        return None
    if any(file.path == STDIN for file in files):
        raise UsageError("keep_sequential_samples must count the rows first, but stdin can be read only once")
    rows = 0
    with closing(chunks(files, options.chunk_bytes, spec=read)) as input_chunks:
        for chunk in input_chunks:
            rows += parse(chunk.source.format, read_chunk(chunk, read), spec=read).rows
    return max(1, -(-rows // options.partitions))


@dataclass(frozen=True)
class Need:
    """The condition under which an option has an effect, as text and as a test."""

    text: str
    is_met: Callable[[PreprocessOptions, Sequence[SourceFile]], bool]


def _tokenizer_file(field: str) -> Need:
    def is_met(options: PreprocessOptions, files: Sequence[SourceFile]) -> bool:
        # An unknown type is not judged here; the loader refuses it by name.
        return field in FILES_OF.get(options.tokenizer_type, (field,))

    return Need(f"a tokenizer type that reads it: {', '.join(t for t in FILES_OF if field in FILES_OF[t])}", is_met)


_SENTENCES = Need("--split-sentences", lambda options, files: options.split_sentences)
_CHAT = Need("--chat", lambda options, files: options.chat)
_TEXT = Need("plain text in the input", lambda options, files: any(file.format == "text" for file in files))
_FILES = Need("a tokenizer read from files", lambda options, files: options.tokenizer_type not in WITHOUT_FILES)
NEEDS: Mapping[str, Need] = MappingProxyType(
    {
        "lang": _SENTENCES,
        "keep_newlines": _SENTENCES,
        "nltk_data": _SENTENCES,
        "chat_template": _CHAT,
        "chat_date": _CHAT,
        "chat_train_on": _CHAT,
        "chat_schema": _CHAT,
        "keep_sequential_samples": Need("--partitions above 1", lambda options, files: options.partitions > 1),
        "text_documents": _TEXT,
        "engine": _FILES,
        **{field: _tokenizer_file(field) for field in ("tokenizer_model", "vocab_file", "merge_file")},
    }
)


def unused_options(options: PreprocessOptions, files: Sequence[SourceFile]) -> list[str]:
    """The options that differ from their defaults and have no effect on this input, with what they need."""
    defaults = {field.name: field.default for field in fields(options)}
    return [
        f"--{name.replace('_', '-')} (needs {need.text})"
        for name, need in NEEDS.items()
        if getattr(options, name) != defaults[name] and not need.is_met(options, files)
    ]
