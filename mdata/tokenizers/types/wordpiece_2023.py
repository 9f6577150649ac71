"""The two BERT types as in a fork of Megatron-LM of 2023: `compat="megatron-2023"`.

It differs from today's tokenizer: nothing is added around a text, special tokens in a text are plain text, words have
at most 200 characters, and two ids follow the vocabulary ([BOS] and [EOS], which no text produces). There is no end of
document, because the fork failed there. Plain Python, exact, 1 to 2 MB/s. The formats page states the above; the fork's
own output shows that private use characters stay. Taken from BERT's first code, because the output does not show it:
U+2B820 to U+2B91F are CJK. Characters have the Unicode classes of this Python, except those newer than Unicode 14,
which stay like unassigned ones.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mdata.errors import UsageError
from mdata.tokenizers.base.helpers import (
    MEGATRON_2023,
    check_engine_name,
    concatenate,
    hash_content,
    is_megatron_2023,
    refuse_surrogates,
)
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray
from mdata.tokenizers.base.unicode14 import unassigned
from mdata.tokenizers.engines.long_text import refuse_long
from mdata.tokenizers.types.wordpiece_vocab import PREFIX, UNKNOWN, read_vocabulary

LONGEST_WORD_CHARS = 200
_NEW = ("[BOS]", "[EOS]")
_CJK = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip
_ASCII_MARKS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def is_2023(options: Mapping[str, Any]) -> bool:
    """Whether the fork's ids are requested.

    Raises:
        UsageError: another `compat`, or an option that the fork did not have.
    """
    if not is_megatron_2023(options):
        return False
    if options.get("special_tokens"):
        raise UsageError(f"{MEGATRON_2023} has no special_tokens for BERT", fix="leave out one of the two options")
    return True


class BertWordPiece2023:
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`.

    Args:
        name: BertWordPieceLowerCase or BertWordPieceCase.
        files: those of a tokenizer, with the vocabulary.
        options: with `compat`.
        engine: "auto" or "mdata"; there is only one.
    """

    def __init__(self, name: str, files: Mapping[str, bytes], *, options: Mapping[str, Any], engine: str) -> None:
        check_engine_name(engine, [self.engine], used_for=f"{name} of {MEGATRON_2023}")
        self.name = name
        self.files = dict(files)
        self.options = {"compat": MEGATRON_2023}
        self.eod: int | None = None
        self.bos: int | None = None
        self.special_ids: Mapping[str, int] = {}
        self._vocabulary = read_vocabulary(*next((content, name) for name, content in files.items()))
        self.vocab_size = len(self._vocabulary) + sum(name not in self._vocabulary for name in _NEW)
        self._names = {id: entry for entry, id in self._vocabulary.items()}
        self._lower = name == "BertWordPieceLowerCase"
        self._clean, self._part = _Replacements(_cleaned), _Replacements(_without_marks if self._lower else _parted)

    engine = "mdata"
    notes: tuple[str, ...] = (f"the ids are those of {MEGATRON_2023}: nothing around texts, no end of document",)

    @cached_property
    def entries(self) -> Mapping[str, int]:
        """The text of every entry and its id; the fork's two extra ids follow the vocabulary."""
        ids = dict(self._vocabulary)
        for name in _NEW:
            ids.setdefault(name, max(ids.values()) + 1)
        return ids

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        return hash_content({"type": self.name, "vocabulary": self._vocabulary, "compat": MEGATRON_2023})

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See the protocol."""
        refuse_surrogates(texts)
        refuse_long(texts)
        return concatenate([np.array(self._ids(text), dtype=np.int32) for text in texts])

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol."""
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol."""
        entries = [self._names.get(int(id), UNKNOWN) for id in ids]
        return " ".join(entries).replace(f" {PREFIX}", "")

    def _ids(self, text: str) -> list[int]:
        text = text.translate(self._clean)
        if self._lower:
            text = unicodedata.normalize("NFD", text.lower())
        return [id for word in text.translate(self._part).split() for id in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        """The longest entry that starts the word, then the longest that continues it, and so on."""
        unknown = [self._vocabulary[UNKNOWN]]
        if len(word) > LONGEST_WORD_CHARS:
            return unknown
        ids: list[int] = []
        start, prefix = 0, ""
        while start < len(word):
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self._vocabulary), None)
            if end is None:
                return unknown
            ids.append(self._vocabulary[prefix + word[start:end]])
            start, prefix = end, PREFIX
        return ids


class _Replacements(dict[int, str]):
    """The replacement of each character, computed when it first occurs."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, code: int) -> str:
        self[code] = replacement = self._rule(chr(code))
        return replacement


def _category(character: str) -> str:
    return "Cn" if unassigned()[ord(character)] else unicodedata.category(character)


def _cleaned(character: str) -> str:
    """Control characters are removed, every kind of blank becomes a space, CJK characters get spaces around them."""
    code, category = ord(character), _category(character)
    if character in "\t\n\r" or category == "Zs":
        return " "
    if category in ("Cc", "Cf") or code == 0xFFFD:
        return ""
    return f" {character} " if any(first <= code <= last for first, last in _CJK) else character


def _without_marks(character: str) -> str:
    return "" if _category(character) == "Mn" else _parted(character)


def _parted(character: str) -> str:
    """Punctuation gets spaces around it."""
    mark = character in _ASCII_MARKS or _category(character).startswith("P")
    return f" {character} " if mark else character
