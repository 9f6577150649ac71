"""A job: everything that is known before the first record is tokenized.

The inputs as they are now, the tokenizer, how records are read and where documents go; and the words by which
a journal tells whether an earlier run was of this same job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mdata.chat.templates import choose_template
from mdata.errors import UsageError
from mdata.indexed.pair_format import smallest_dtype
from mdata.preprocessing.encode import HOLDOUT_BITS, EncodeSpec
from mdata.preprocessing.encode_chat import ChatSpec
from mdata.preprocessing.partitions import Routes, merged_prefix
from mdata.preprocessing.preprocess_options import PreprocessOptions, content_options
from mdata.preprocessing.unused_options import idle_options
from mdata.progress import Progress
from mdata.sentences.splitter import Splitter, load_splitter
from mdata.sources.chunk import pieces, read_piece
from mdata.sources.input_files import STDIN, SourceFile
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec
from mdata.tokenizers.base.tokenizer import Announce, TextRefused, Tokenizer, TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer

# Where a user can name an end-of-document token.
_EOD_PLACES = MappingProxyType(
    {
        "HuggingFaceTokenizer": "an eos_token (or sep_token) in tokenizer_config.json",
        "SentencePieceTokenizer": "a model with an eos piece, and not --tokenizer-sentencepiece-legacy",
    }
)
_RESULT_ENDINGS = (".bin", ".idx", ".json", ".origins", ".bin.blake3")


@dataclass(frozen=True)
class Job:
    """See `plan_job`."""

    options: PreprocessOptions
    files: Sequence[SourceFile]
    tokenizer: Tokenizer
    spec: EncodeSpec
    routes: Routes
    progress: Progress
    # What comparing an input with the one of an earlier result gave; it may have to be read for that.
    compared: dict[tuple[int, str, str], str | None] = field(default_factory=dict, compare=False)

    @property
    def num_keys(self) -> int:
        """Keys, each of which gives corpora of its own."""
        return len(self.options.json_keys)

    @property
    def input_bytes(self) -> int:
        """Size of all inputs as they lie on disk."""
        return sum(file.size_bytes for file in self.files)

    def prefixes(self) -> dict[str, Path]:
        """Name of each result -> prefix of its files; merged corpora come last."""
        options = self.options
        found = {
            self.routes.name(key, route): self.routes.prefix(options, key, route=route)
            for route in range(self.routes.num_routes)
            for key in options.json_keys
        }
        if self.routes.partitions > 1:
            found |= {key: merged_prefix(options, key) for key in options.json_keys}
        return found

    def words(self) -> dict[str, Any]:
        """What makes it this job and no other, inputs aside: JSON types.

        What becomes of bad rows is told apart, because it may change as long as there was none.
        """
        options = content_options(self.options)
        chat = {} if self.spec.chat is None else {"chat_template": self.spec.chat.template.fingerprint}
        return {
            **chat,
            "journal": 2,
            "options": {name: value for name, value in options.items() if name not in ("on_error", "max_errors")},
            "outputs": sorted(prefix.name for prefix in self.prefixes().values()),
            "tokenizer": self.tokenizer.fingerprint,
            "sentence_tables": self.spec.splitter and self.spec.splitter.fingerprint,
            "policy": {"on_error": self.options.on_error, "quarantine": self.options.quarantine},
        }

    def beside(self, ending: str) -> Path:
        """A hidden file of this job in the output's folder."""
        prefix = Path(self.options.output_prefix)
        # Jobs with other keys, or of the other level, may run at the same time; a name has at most 255 bytes.
        keys = "+".join(self.options.json_keys)[:80]
        level = "" if self.options.level == "document" else f"_{self.options.level}"
        return prefix.with_name(f".{prefix.name}_{keys}{level}.{ending}")


def useful_workers(options: PreprocessOptions, files: Sequence[SourceFile]) -> int:
    """Workers that would find something to do: no more than there are pieces, if those can be counted."""
    if any(file.streamed for file in files):
        return options.workers
    return min(options.workers, -(-sum(file.size_bytes for file in files) // options.piece_bytes))


def plan_job(
    options: PreprocessOptions,
    files: Sequence[SourceFile],
    *,
    progress: Progress,
    announce: Announce | None = None,
) -> Job:
    """Load the tokenizer, decide the routes.

    Args:
        options: what is asked for.
        files: the inputs.
        progress: hears what is to be told of the tokenizer.
        announce: see `TokenizerSpec`.

    Raises:
        UsageError: options or a tokenizer that cannot be used.
    """
    tokenizer = load_tokenizer(replace(tokenizer_spec(options), announce=announce))
    for note in tokenizer.notes:
        progress.note(note)
    if idle := idle_options(options, files):
        progress.note(f"without effect here: {', '.join(idle)}")
    read = ReadSpec(
        json_keys=options.json_keys,
        text_documents=options.text_documents,
        max_record_bytes=options.max_record_bytes,
        keep_bad_lines=options.on_error == "quarantine",
        sentence_lists=not options.split_sentences,
        chat=options.chat_train_on if options.chat else None,
    )
    holdout = Fraction(options.holdout)
    spec = EncodeSpec(
        read,
        _eod_to_append(options, tokenizer),
        smallest_dtype(tokenizer.vocab_size).name,
        int(holdout * 2**HOLDOUT_BITS),
        _splitter(options, progress),
        _chat(options, files, tokenizer),
    )
    routes = Routes(options.partitions, _rows_per_part(options, files, read), holdout > 0)
    job = Job(options, files, tokenizer, spec, routes, progress)
    _check_names(job)
    return job


def _splitter(options: PreprocessOptions, progress: Progress) -> Splitter | None:
    if not options.split_sentences:
        return None
    splitter = load_splitter(options.lang, keep_newlines=options.keep_newlines, nltk_data=options.nltk_data)
    for note in splitter.notes:
        progress.note(note)
    return splitter


def _chat(options: PreprocessOptions, files: Sequence[SourceFile], tokenizer: Tokenizer) -> ChatSpec | None:
    """How conversations are written.

    Raises:
        UsageError: a template or tokenizer that cannot write them, or input of another format.
    """
    if not options.chat:
        return None
    other = next((file for file in files if file.format != "jsonl"), None)
    if other is not None:
        raise UsageError(f"{printable_path(other.path)} is {other.format}", expected="jsonl, for conversations")
    template = choose_template(options.chat_template, tokenizer, model=options.tokenizer_model)
    try:
        around = tokenizer.encode_batch([""])[0]
    except TextRefused as refused:
        raise UsageError(
            f"the {tokenizer.name} cannot tokenize parts of a conversation", found=refused.reason
        ) from None
    if len(around):
        raise UsageError(
            f"the {tokenizer.name} puts tokens around every text, and a conversation has many",
            fix="--tokenizer-hf-no-include-special-tokens; the chat template puts what a conversation begins with",
        )
    spelled = [text for text in tokenizer.special_ids if text]
    if template.spells_tokens and spelled and len(tokenizer.encode_batch(spelled[:1])[0]) > 1:
        raise UsageError(
            f"the chat template {template.name} spells its control tokens, and this tokenizer leaves them text",
            fix="--special-tokens-in-text special, or --chat-template chatml, which gives them as ids",
        )
    return ChatSpec(template, options.chat_train_on)


def tokenizer_spec(options: PreprocessOptions) -> TokenizerSpec:
    """The tokenizer that the options ask for."""
    return TokenizerSpec(
        type=options.tokenizer_type,
        model=options.tokenizer_model,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        options=options.tokenizer_options,
        engine=options.engine,
    )


def printable_path(path: Path) -> str:
    """A path as text, with the bytes that are not UTF-8 written as \\x.."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _check_names(job: Job) -> None:
    """Refuse results that would overwrite each other or the input."""
    seen: dict[Path, str] = {}
    for name, prefix in job.prefixes().items():
        if prefix in seen:
            raise UsageError(
                f"the results {seen[prefix]} and {name} would both be {prefix}.*", fix="rename one of the keys"
            )
        seen[prefix] = name
    inputs = {file.path.resolve() for file in job.files}
    results = {prefix.with_name(prefix.name + ending).resolve() for prefix in seen for ending in _RESULT_ENDINGS}
    if both := sorted(inputs & results):
        raise UsageError(
            f"{printable_path(both[0])} is an input and would be overwritten by a result",
            fix="another output prefix, best in a folder of its own",
        )
    kept = job.options.quarantine
    if kept is None:
        return
    place = Path(kept)
    if place.resolve() in inputs:
        raise UsageError(f"quarantine={kept} is one of the inputs", fix="another file for the bad rows")
    if place.resolve() in results:
        raise UsageError(f"quarantine={kept} is one of the results", fix="another file for the bad rows")
    if place.exists() and not place.is_file():
        raise UsageError(f"quarantine={kept} is not a regular file", fix="a file, or --on-error skip to keep none")


def _eod_to_append(options: PreprocessOptions, tokenizer: Tokenizer) -> int | None:
    if not options.append_eod:
        return None
    if tokenizer.eod is None:
        place = _EOD_PLACES.get(tokenizer.name)
        raise UsageError(
            f"append_eod: the {tokenizer.name} {options.tokenizer_model or ''} has no end-of-document token",
            expected=place,
            fix="name one there, or leave append_eod out" if place else "leave append_eod out",
        )
    dtype = smallest_dtype(tokenizer.vocab_size)
    if tokenizer.eod > np.iinfo(dtype.name).max:
        raise UsageError(
            f"append_eod: the end-of-document id does not fit {dtype.name}, the type for a vocabulary of this size",
            found=f"id {tokenizer.eod}, {tokenizer.vocab_size} entries",
            fix="an end-of-document token inside the vocabulary",
        )
    return tokenizer.eod


def _rows_per_part(options: PreprocessOptions, files: Sequence[SourceFile], read: ReadSpec) -> int | None:
    """ceil(rows / P) where parts are runs of rows: needs a pass over the input that only counts."""
    if options.partitions == 1 or not options.keep_sequential_samples:
        return None
    if any(file.path == STDIN for file in files):
        raise UsageError("keep_sequential_samples must count the rows first, and stdin is read once only")
    rows = 0
    with closing(pieces(files, options.piece_bytes, spec=read)) as found:
        for piece in found:
            rows += parse(piece.source.format, read_piece(piece, read), spec=read).rows
    return max(1, -(-rows // options.partitions))
