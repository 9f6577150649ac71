"""A fast engine that leaves to the exact one the texts on which the two may differ.

Such texts are rare: those with characters newer than what every edition of Unicode in use knows
(mdata/tokenizers/base/unicode14.py), with an added token that counts as a whole word only, or, where the tokenizer
composes texts (NFC), those that are not composed already. So the fast engine needs none of these rules. The exact
engine takes a hundred times as long, so of a long text it gets no more than the part that is odd, where texts may be
cut (mdata/tokenizers/engines/long_text.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unicodedata import is_normalized

import numpy as np

from mdata.tokenizers.base.token_matching import any_of
from mdata.tokenizers.base.tokenizer import numbered
from mdata.tokenizers.base.tokenizer_json import Definition, added_tokens, is_composed_only, split_pattern
from mdata.tokenizers.base.unicode14 import newer_texts
from mdata.tokenizers.engines.libraries import WORDPIECE, Engine, Ids, make_engine
from mdata.tokenizers.engines.long_text import can_cut, cut
from mdata.tokenizers.wordpiece.wordpiece_engine import WordPieceEngine

_PART_CHARS = 1 << 10


def routed(name: str, definition: Definition, *, plain: bool, exact: Callable[[], Engine]) -> Engine:
    """The engine of that name, which leaves what it may not do exactly to the exact one; arguments as below."""
    if name == WORDPIECE:
        return WordPieceEngine(definition, plain=plain, exact=exact)
    return RoutedEngine(name, definition, plain=plain, exact=exact)


class RoutedEngine:
    """See `mdata.tokenizers.engines.libraries.Engine`.

    Args:
        name: of the fast engine.
        definition: a tokenizer.json of a form that the engine knows.
        plain: see `make_engine`.
        exact: gives the exact engine, when the first text needs it.
    """

    def __init__(self, name: str, definition: Definition, *, plain: bool, exact: Callable[[], Engine]) -> None:
        self.name = name
        composing = is_composed_only(definition)
        self._fast = make_engine(name, {**definition, "normalizer": None} if composing else definition, plain=plain)
        self._exact = exact
        added = added_tokens(definition)
        self._awkward = any_of(token.content for token in added if token.single_word)
        self._cuttable = composing and split_pattern(definition) is not None and can_cut(added)
        self._composes = composing and definition.get("normalizer") is not None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See Engine."""
        odd = set(newer_texts(texts))
        odd.update(number for number, text in enumerate(texts) if self._awkward.search(text))
        if self._composes:
            odd.update(number for number, text in enumerate(texts) if not is_normalized("NFC", text))
        if not odd:
            return self._encode_fast(texts)
        long = {number: parts for number in odd if len(parts := self._parts(texts[number])) > 1}
        found = {number: self._encode_parts(number, parts) for number, parts in sorted(long.items())}
        for encode, numbers in (
            (self._exact().encode, sorted(odd - long.keys())),
            (self._encode_fast, [number for number in range(len(texts)) if number not in odd]),
        ):
            with numbered(numbers):
                found.update(zip(numbers, encode([texts[number] for number in numbers]), strict=True))
        return [found[number] for number in range(len(texts))]

    def _parts(self, text: str) -> list[str]:
        return list(cut(text, _PART_CHARS)) if self._cuttable else [text]

    def _encode_parts(self, number: int, parts: Sequence[str]) -> Ids:
        """Most parts are not odd; one that cannot be cut any more is the exact engine's."""
        with numbered([number] * len(parts)):
            return np.concatenate(self.encode(parts))

    def _encode_fast(self, texts: Sequence[str]) -> list[Ids]:
        try:
            return self._fast.encode(texts)
        except ValueError:
            if len(texts) > 1:
                return [ids for number in range(len(texts)) for ids in self._encode_one(texts, number)]
            # tiktoken gives up on a million blanks before a word.
            return self._exact().encode(texts)

    def _encode_one(self, texts: Sequence[str], number: int) -> list[Ids]:
        with numbered([number]):
            return self._encode_fast([texts[number]])
