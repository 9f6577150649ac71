"""GPT2BPETokenizer: byte-level BPE from a vocabulary and a file of merges, as GPT-2 published them.

Only the two files that the user names are read. The first line of the merges is skipped only if it begins with
#version. A vocabulary without <|endoftext|> gets it as a new last id; further special tokens follow in the order given,
and existing entries keep their id. All are matched in the raw text, the longest first. A byte that has no entry in the
vocabulary is dropped. `compat` (the fork of 2023): special tokens in a text are ordinary text, and files that the fork
read differently, or failed on, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from mdata.errors import UsageError, few
from mdata.tokenizers.base.byte_level import ALPHABET, END_OF_TEXT
from mdata.tokenizers.base.helpers import (
    LARGEST_ID,
    MEGATRON_2023,
    decode_text,
    hash_content,
    is_megatron_2023,
    read_file,
)
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.base.tokenizer_json import merge_parts
from mdata.tokenizers.engines.libraries import EXACT
from mdata.tokenizers.types.json_backed import JsonTokenizer, errors_name

NAME = "GPT2BPETokenizer"
VOCAB_FILE, MERGE_FILE = "vocab.json", "merges.txt"

# The vocabulary and the merges.
Parts = tuple[dict[str, int], list[str]]


def check_vocabulary(content: bytes, name: str) -> dict[str, int]:
    """The entries of a vocabulary file.

    Raises:
        UsageError: it is not a JSON object of integers; names the line or the entry.
    """
    import orjson

    try:
        vocabulary = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{name}:{error.lineno}: not a JSON vocabulary", found=str(error)) from error
    if not isinstance(vocabulary, dict):
        expected = "one JSON object of entries and their ids"
        raise UsageError(f"{name}: not a vocabulary", found=f"a {type(vocabulary).__name__}", expected=expected)
    for entry, id in vocabulary.items():
        if type(id) is not int or not 0 <= id <= LARGEST_ID:
            line = content.count(b"\n", 0, max(content.find(orjson.dumps(entry)), 0)) + 1
            raise UsageError(
                f"{name}:{line}: the entry {entry[:60]!r} has no usable id",
                found=repr(id)[:80],
                expected=f"an integer from 0 to {LARGEST_ID}",
            )
    return vocabulary


def check_merges(content: bytes, vocabulary: Mapping[str, int], *, name: str) -> list[str]:
    """The merges of a file, as "left right".

    Raises:
        UsageError: a line is not a merge of two entries into a third; names the line.
    """
    merges = _merge_lines(decode_text(content, name))
    lefts, rights = merge_parts(merges)
    entries = vocabulary.keys()
    right_form = list(map(" ".join, zip(lefts, rights, strict=False))) == merges
    if not right_form or not entries >= {*lefts, *rights} or not entries >= set(map(str.__add__, lefts, rights)):
        _refuse_merges(merges, vocabulary, name=name, first=2 if content.startswith(b"#version") else 1)
    return merges


def _refuse_merges(merges: list[str], vocabulary: Mapping[str, int], *, name: str, first: int) -> None:
    """Raise UsageError for the first wrong line; the caller has already found, in a faster way, that there is one."""
    for number, line in enumerate(merges, first):
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            expected = "two entries of the vocabulary with one blank between"
            raise UsageError(f"{name}:{number}: not a merge", found=repr(line[:80]), expected=expected)
        missing = next((entry for entry in (left, right, left + right) if entry not in vocabulary), None)
        if missing is not None:
            pair = f"{left[:60]!r} and {right[:60]!r}"
            raise UsageError(
                f"{name}:{number}: a merge of {pair} needs an entry that the vocabulary does not have",
                found=repr(missing[:60]),
                fix="take the two files from one place",
            )


def _check_2023(
    merges: bytes, vocabulary: Mapping[str, int], *, spec: TokenizerSpec, options: Mapping[str, Any]
) -> None:
    """Refuse options and files that the fork of 2023 did not have, failed on, or read differently."""
    missing = next((entry for entry in (END_OF_TEXT, *ALPHABET) if entry not in vocabulary), None)
    if missing is not None:
        problem = f"{spec.vocab_file}: no entry {missing!r}, without which {MEGATRON_2023} fails"
        raise UsageError(problem, fix="leave out --compat")
    if not merges.startswith(b"#version") or not merges.endswith(b"\n"):
        raise UsageError(
            f"{spec.merge_file}: {MEGATRON_2023} drops the first line in any case, and a last line without an end",
            expected="a first line that begins with #version, and a line end at the end",
        )
    if "special_tokens" in options:
        raise UsageError(f"{MEGATRON_2023} takes no further special tokens", fix="leave out one of the two options")


class GPT2BPETokenizer(JsonTokenizer):
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`."""

    name = NAME
    OPTIONS = ("special_tokens", "special_in_text", "compat")

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Self:
        """See TokenizerType."""
        if spec.vocab_file is None or spec.merge_file is None:
            raise UsageError(f"{NAME} needs two files", fix="--vocab-file vocab.json --merge-file merges.txt")
        files = {VOCAB_FILE: read_file(spec.vocab_file, NAME), MERGE_FILE: read_file(spec.merge_file, NAME)}
        vocabulary = check_vocabulary(files[VOCAB_FILE], spec.vocab_file)
        merges = check_merges(files[MERGE_FILE], vocabulary, name=spec.merge_file)
        if is_megatron_2023(options):
            _check_2023(files[MERGE_FILE], vocabulary, spec=spec, options=options)
        with errors_name(spec.vocab_file):
            return cls(files, options, engine=EXACT, parts=(vocabulary, merges))

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Self:
        """See TokenizerType; options: `special_tokens`, `special_in_text`, `compat`, as in TokenizerSpec."""
        return cls(files, options, engine=engine)

    def __init__(
        self, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str, parts: Parts | None = None
    ) -> None:
        import orjson

        parts = parts or (orjson.loads(files[VOCAB_FILE]), _merge_lines(files[MERGE_FILE].decode()))
        self._vocabulary, self._merges = parts
        # <|endoftext|> comes before the special tokens that the user names.
        in_definition = {**options, "special_tokens": [END_OF_TEXT, *options.get("special_tokens", ())]}
        if is_megatron_2023(options):
            in_definition["special_in_text"] = "plain"
        super().__init__(files, _definition(self._vocabulary, self._merges), options=in_definition, engine=engine)
        self.options = dict(options)
        self.eod, self.bos = self.special_ids[END_OF_TEXT], None

    def _file_notes(self) -> list[str]:
        dropped = [repr(bytes([byte])) for byte, symbol in enumerate(ALPHABET) if symbol not in self._vocabulary]
        note = "bytes without an entry are dropped from every text, as in Megatron"
        return [f"{note}: {few(dropped)}"] if dropped else []

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        content: dict[str, Any] = {
            "type": NAME,
            "vocabulary": self._vocabulary,
            "merges": self._merges,
            "special": self.special_ids,
        }
        if self._plain:
            content["special_in_text"] = "plain"
        return hash_content(content)


def _merge_lines(text: str) -> list[str]:
    lines = text.split("\n")
    if lines[0].startswith("#version"):
        del lines[0]
    if lines and not lines[-1]:
        del lines[-1]
    return [line[:-1] if line.endswith("\r") else line for line in lines] if "\r" in text else lines


def _definition(vocabulary: Mapping[str, int], merges: list[str]) -> dict[str, Any]:
    """The same tokenizer as a tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
