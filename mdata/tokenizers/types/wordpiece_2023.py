"""The two BERT types as a fork of Megatron-LM of 2023 had them: `compat="megatron-2023"`.

Another tokenizer than today's: nothing stands around a text, special tokens spelled in a text are plain text,
words have 200 characters at most, and two ids follow the vocabulary ([BOS] and [EOS], which no text gives).
There is no end of document, because the fork failed there. Plain Python, exact, 1 to 2 MB/s. Stated in the
formats page: the above; found by the fork's own bytes: private use characters stay. Taken from BERT's first
code, which the bytes do not show: U+2B820 to U+2B91F are CJK. Characters are classed by the Unicode of this
Python, but for those newer than Unicode 14, which stay as unassigned ones do.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from blake3 import blake3

from mdata.errors import UsageError
from mdata.tokenizers.base.megatron_2023 import FORK, wants_fork
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TextRefused
from mdata.tokenizers.base.unicode14 import unassigned
from mdata.tokenizers.types.wordpiece_vocab import PREFIX, UNKNOWN, read_vocabulary

LONGEST_WORD_CHARS = 200
LONGEST_TEXT_CHARS = 16 << 20
_NEW = ("[BOS]", "[EOS]")
_OTHER_OPTIONS = ("special_tokens",)
_CJK = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip
_ASCII_MARKS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def is_2023(options: Mapping[str, Any]) -> bool:
    """Whether the fork's ids are asked for.

    Raises:
        UsageError: another `compat`, or an option that the fork did not have.
    """
    if not wants_fork(options):
        return False
    wrong = next((name for name in _OTHER_OPTIONS if options.get(name)), None)
    if wrong:
        raise UsageError(f"{FORK} has no {wrong} for BERT", fix="leave one of the two out")
    return True


class BertWordPiece2023:
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`.

    Args:
        name: BertWordPieceLowerCase or BertWordPieceCase.
        files: with the vocabulary, as a tokenizer has them.
        options: with `compat`.
        engine: "auto" or "mdata"; there is one.
    """

    def __init__(self, name: str, files: Mapping[str, bytes], *, options: Mapping[str, Any], engine: str) -> None:
        if engine not in ("auto", self.engine):
            raise UsageError(f"{name} of {FORK} has no engine {engine!r}", expected=f"auto or {self.engine}")
        self.name = name
        self.files = dict(files)
        self.options = {"compat": FORK}
        self.eod: int | None = None
        self.special_ids: Mapping[str, int] = {}
        self._vocabulary = read_vocabulary(*next((content, name) for name, content in files.items()))
        self.vocab_size = len(self._vocabulary) + sum(name not in self._vocabulary for name in _NEW)
        self._names = {id: entry for entry, id in self._vocabulary.items()}
        self._lower = name == "BertWordPieceLowerCase"
        self._clean, self._part = _Table(_cleaned), _Table(_without_marks if self._lower else _parted)

    engine = "mdata"
    notes: tuple[str, ...] = (f"the ids are those of {FORK}: nothing around texts, no end of document",)

    @cached_property
    def entries(self) -> Mapping[str, int]:
        """The text of every entry and its id; the fork's two follow the vocabulary."""
        ids = dict(self._vocabulary)
        for name in _NEW:
            ids.setdefault(name, max(ids.values()) + 1)
        return ids

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        import orjson

        content = {"type": self.name, "vocabulary": self._vocabulary, "compat": FORK}
        return blake3(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See the protocol."""
        arrays = [np.array(self._ids(index, text), dtype=np.int32) for index, text in enumerate(texts)]
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        return np.concatenate([np.empty(0, dtype=np.int32), *arrays]), lengths

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol."""
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol."""
        entries = [self._names.get(int(id), UNKNOWN) for id in ids]
        return " ".join(entries).replace(f" {PREFIX}", "")

    def _ids(self, index: int, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextRefused(index, f"a lone surrogate at character {error.start}") from error
        if len(text) > LONGEST_TEXT_CHARS:
            reason = f"the text has {len(text):,} characters; this tokenizer accepts at most {LONGEST_TEXT_CHARS:,}"
            raise TextRefused(index, reason)
        text = text.translate(self._clean)
        if self._lower:
            text = unicodedata.normalize("NFD", text.lower())
        return [id for word in text.translate(self._part).split() for id in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        """The longest entry that begins the word, then the longest that goes on, and so forth."""
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


class _Table(dict[int, str]):
    """What becomes of a character, worked out when it is first met."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, code: int) -> str:
        self[code] = found = self._rule(chr(code))
        return found


def _category(character: str) -> str:
    return "Cn" if unassigned()[ord(character)] else unicodedata.category(character)


def _cleaned(character: str) -> str:
    """Control characters go, each kind of blank becomes one, CJK gets blanks around."""
    code, category = ord(character), _category(character)
    if character in "\t\n\r" or category == "Zs":
        return " "
    if category in ("Cc", "Cf") or code == 0xFFFD:
        return ""
    return f" {character} " if any(first <= code <= last for first, last in _CJK) else character


def _without_marks(character: str) -> str:
    return "" if _category(character) == "Mn" else _parted(character)


def _parted(character: str) -> str:
    """Punctuation gets blanks around."""
    mark = character in _ASCII_MARKS or _category(character).startswith("P")
    return f" {character} " if mark else character
