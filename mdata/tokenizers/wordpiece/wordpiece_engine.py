"""Our own engine for WordPiece in BERT's form: mdata_cpp/wordpiece.hpp; the twin is wordpiece_reference.py.

Texts on which it might not be exact go to the exact engine one by one: those with characters that editions of
Unicode in use treat differently (the C++ code names them while it works, at no cost), and those with an added
token that asks for more than to be found (whole words only, blanks beside it). `first_other_words` compares
the words of all characters at the borders of classes with the library's: no vocabulary can hide a difference.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mdata.tokenizers.base.token_matching import any_of
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, numbered
from mdata.tokenizers.base.tokenizer_json import Definition, added_tokens, model_vocabulary
from mdata.tokenizers.engines.libraries import WORDPIECE, Engine, Ids
from mdata.tokenizers.wordpiece.wordpiece_support import wordpiece_form

_AS_TEXT = -1
_CODES_AT_ONCE = 64


class WordPieceEngine:
    """See `mdata.tokenizers.engines.libraries.FlatEngine`.

    Args:
        definition: a tokenizer.json of BERT's form.
        plain: special tokens spelled in a text are ordinary text.
        exact: gives the exact engine, when the first text needs it.
    """

    name = WORDPIECE

    def __init__(self, definition: Definition, *, plain: bool, exact: Callable[[], Engine]) -> None:
        from mdata._core import WordPiece

        form = wordpiece_form(definition)
        tokens = added_tokens(definition)
        added = {token.content: _AS_TEXT if plain and token.special else token.id for token in tokens}
        awkward = [token for token in tokens if token.single_word or token.lstrip or token.rstrip]
        self._awkward = any_of(token.content for token in awkward if added[token.content] != _AS_TEXT)
        self._exact = exact
        self._core = WordPiece(
            model_vocabulary(definition),
            added=added,
            unknown=form.unknown,
            prefix=form.prefix,
            most_chars=form.most_chars,
            treatment=form.treatment,
        )

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See Engine."""
        ids, lengths = self.encode_flat(texts, before=(), after=())
        return np.split(ids.view(np.uint32), np.cumsum(lengths)[:-1]) if len(lengths) else []

    def encode_flat(
        self, texts: Sequence[str], *, before: Sequence[int], after: Sequence[int]
    ) -> tuple[IdArray, LengthArray]:
        """See FlatEngine."""
        ids, lengths, left = self._core.encode(list(texts), before=list(before), after=list(after))
        odd = set(left.tolist())
        odd.update(number for number, text in enumerate(texts) if self._awkward.search(text))
        if not odd:
            return ids, lengths
        numbers = sorted(odd)
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        with numbered(numbers):
            found = self._exact().encode([texts[number] for number in numbers])
        for number, exact in zip(numbers, found, strict=True):
            parts[number] = np.array([*before, *exact.tolist(), *after], dtype=np.int32)
            lengths[number] = len(parts[number])
        return np.concatenate(parts), lengths

    def first_other_words(self, library: Any) -> str | None:
        """The first text that the library normalizes or cuts into words in another way."""
        for text in _borders(self._core.classes()):
            words = [word for word, _ in library.pre_tokenizer.pre_tokenize_str(library.normalizer.normalize_str(text))]
            if self._core.words(text) not in (words, None):
                return text
        return None


def _borders(classes: dict[str, list[tuple[int, int]]]) -> Iterator[str]:
    """The characters at the borders of all classes, in company; without those that are left to the exact engine."""
    ranges = [pair for pairs in classes.values() for pair in pairs]
    codes = {code for first, last in ranges for code in (first - 1, first, last, last + 1)}
    starts = [first for first, _ in classes["unsettled"]]

    def settled(code: int) -> bool:
        place = bisect_right(starts, code) - 1
        return place < 0 or code > classes["unsettled"][place][1]

    known = sorted(code for code in codes if 0 <= code < 0x110000 and not 0xD800 <= code < 0xE000 and settled(code))
    for start in range(0, len(known), _CODES_AT_ONCE):
        some = map(chr, known[start : start + _CODES_AT_ONCE])
        yield " ".join(f"x{c}Y{c}{c} e\u0323{c}\u0301\u302e" for c in some)
