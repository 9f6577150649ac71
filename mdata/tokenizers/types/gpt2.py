"""GPT2BPETokenizer: byte-level BPE from a vocabulary and a file of merges, as GPT-2 published them.

The two files that were given are always the ones that count. Of the merges the first line is left out only
if it begins with #version. A vocabulary without <|endoftext|> gets it as a new last id; further special
tokens follow in the order given, and ones that are entries already keep their id. All are matched in the
raw text, the longest first. A byte that has no entry in the vocabulary is dropped. `compat` (the fork of 2023):
special tokens in a text are ordinary text, and files that the fork read otherwise, or failed on, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from blake3 import blake3

from mdata.errors import UsageError, explain_os_error, few
from mdata.tokenizers.base.byte_alphabet import ALPHABET, END_OF_TEXT
from mdata.tokenizers.base.megatron_2023 import FORK, wants_fork
from mdata.tokenizers.base.tokenizer import Announce, TokenizerSpec
from mdata.tokenizers.base.tokenizer_json import merge_parts
from mdata.tokenizers.engines.libraries import EXACT
from mdata.tokenizers.types.json_backed import DefinedTokenizer

NAME = "GPT2BPETokenizer"
VOCAB_FILE, MERGE_FILE = "vocab.json", "merges.txt"
_LARGEST_ID = 2**31 - 1

# The vocabulary and the merges.
Parts = tuple[dict[str, int], list[str]]


def check_vocabulary(content: bytes, name: str) -> dict[str, int]:
    """The entries of a vocabulary file.

    Raises:
        UsageError: it is not a JSON object of whole numbers; names the line or the entry.
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
        if type(id) is not int or not 0 <= id <= _LARGEST_ID:
            line = content.count(b"\n", 0, max(content.find(orjson.dumps(entry)), 0)) + 1
            raise UsageError(
                f"{name}:{line}: the entry {entry[:60]!r} has no usable id",
                found=repr(id)[:80],
                expected=f"a whole number from 0 to {_LARGEST_ID}",
            )
    return vocabulary


def check_merges(content: bytes, vocabulary: Mapping[str, int], *, name: str) -> list[str]:
    """The merges of a file, as "left right".

    Raises:
        UsageError: a line is not a merge of two entries into a third; names the line.
    """
    try:
        merges = _merge_lines(content)
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}:{number}: not UTF-8 text", found=f"byte {content[error.start]:#04x}") from error
    lefts, rights = merge_parts(merges)
    entries = vocabulary.keys()
    right_form = list(map(" ".join, zip(lefts, rights, strict=False))) == merges
    if not right_form or not entries >= {*lefts, *rights} or not entries >= set(map(str.__add__, lefts, rights)):
        _refuse_merges(merges, vocabulary, name=name, first=2 if content.startswith(b"#version") else 1)
    return merges


def _refuse_merges(merges: list[str], vocabulary: Mapping[str, int], *, name: str, first: int) -> None:
    """Raise UsageError for the first line that is wrong; the check above is the fast way to know that one is."""
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


def _check_fork(
    merges: bytes, vocabulary: Mapping[str, int], *, spec: TokenizerSpec, options: Mapping[str, Any]
) -> None:
    """Refuse what the fork of 2023 did not have, failed on, or read otherwise than everybody else."""
    missing = next((entry for entry in (END_OF_TEXT, *ALPHABET) if entry not in vocabulary), None)
    if missing is not None:
        what = f"{spec.vocab_file}: no entry {missing!r}, without which {FORK} fails"
        raise UsageError(what, fix="leave out --compat")
    if not merges.startswith(b"#version") or not merges.endswith(b"\n"):
        raise UsageError(
            f"{spec.merge_file}: {FORK} leaves out the first line, whatever it is, and a last one without an end",
            expected="a first line that begins with #version, and a line end at the end",
        )
    if "special_tokens" in options:
        raise UsageError(f"{FORK} has no further special tokens", fix="leave out one of the two options")


class GPT2BPETokenizer(DefinedTokenizer):
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`."""

    name = NAME
    OPTIONS = ("special_tokens", "special_in_text", "compat")

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Self:
        """The tokenizer of two files, with its best engine.

        Raises:
            UsageError: a file was not named or cannot be read, or its content is not what it should be.
        """
        if spec.vocab_file is None or spec.merge_file is None:
            raise UsageError(f"{NAME} needs two files", fix="--vocab-file vocab.json --merge-file merges.txt")
        try:
            files = {VOCAB_FILE: Path(spec.vocab_file).read_bytes(), MERGE_FILE: Path(spec.merge_file).read_bytes()}
        except OSError as error:
            raise explain_os_error(error, f"loading a {NAME}") from error
        vocabulary = check_vocabulary(files[VOCAB_FILE], spec.vocab_file)
        merges = check_merges(files[MERGE_FILE], vocabulary, name=spec.merge_file)
        if wants_fork(options):
            _check_fork(files[MERGE_FILE], vocabulary, spec=spec, options=options)
        try:
            return cls(files, options, engine=EXACT, parts=(vocabulary, merges)).checked(spec.engine, spec.announce)
        except UsageError as error:
            raise UsageError(f"{spec.vocab_file}: {error}") from error

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Self:
        """A tokenizer from the content of its files, which `load` has checked once.

        Args:
            files: as a tokenizer has them.
            options: `special_tokens`: more of them; `special_in_text`, `compat`: see TokenizerSpec.
            engine: the library that gives the ids; not compared with the exact one here.
        """
        return cls(files, options, engine=engine)

    def __init__(
        self, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str, parts: Parts | None = None
    ) -> None:
        import orjson

        parts = parts or (orjson.loads(files[VOCAB_FILE]), _merge_lines(files[MERGE_FILE]))
        self._vocabulary, self._merges = parts
        # What was asked for, and what is asked of the definition: the end of text comes first.
        wanted = {**options, "special_tokens": [END_OF_TEXT, *options.get("special_tokens", ())]}
        if wants_fork(options):
            wanted["special_in_text"] = "plain"
        super().__init__(files, _definition(self._vocabulary, self._merges), options=wanted, engine=engine)
        self.options = dict(options)
        self.eod = self.special_ids[END_OF_TEXT]

    def checked(self, wanted: str, announce: Announce | None = None) -> Self:
        """See DefinedTokenizer."""
        super().checked(wanted, announce)
        dropped = [bytes([byte]) for byte, symbol in enumerate(ALPHABET) if symbol not in self._vocabulary]
        if dropped:
            shown = few([repr(byte) for byte in dropped])
            self.notes += (f"bytes without an entry are dropped from every text, as in Megatron: {shown}",)
        return self

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        import orjson

        content: dict[str, Any] = {
            "type": NAME,
            "vocabulary": self._vocabulary,
            "merges": self._merges,
            "special": self.special_ids,
        }
        if self._plain:
            content["special_in_text"] = "plain"
        return blake3(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _merge_lines(content: bytes) -> list[str]:
    lines = content.decode().split("\n")
    if lines[0].startswith("#version"):
        del lines[0]
    if lines and not lines[-1]:
        del lines[-1]
    return [line[:-1] if line.endswith("\r") else line for line in lines] if b"\r" in content else lines


def _definition(vocabulary: Mapping[str, int], merges: list[str]) -> dict[str, Any]:
    """The same as a tokenizer.json."""
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
