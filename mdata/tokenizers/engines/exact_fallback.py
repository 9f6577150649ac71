"""A fast engine that passes texts to the exact one if the two might give different ids.

Such texts are rare: those with characters newer than every Unicode edition in use (mdata/tokenizers/base/unicode14.py),
those with an added token that has rules of its own (`tokens_left_to_exact`), and, if the tokenizer composes texts
(NFC), those that are not composed already. So the fast engine needs none of these rules. The exact engine takes a
hundred times as long, so a long text is split at places that change no id (mdata/tokenizers/engines/long_text.py), and
the exact engine gets only the parts that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unicodedata import is_normalized

import numpy as np

from mdata.tokenizers.base.token_matching import pattern_of_any
from mdata.tokenizers.base.tokenizer import indices_in_batch
from mdata.tokenizers.base.tokenizer_json import Definition, is_nfc_or_none, tokens_left_to_exact
from mdata.tokenizers.base.unicode14 import texts_with_newer_characters
from mdata.tokenizers.engines.libraries import LIBRARIES, Ids, TokenizerEngine
from mdata.tokenizers.engines.long_text import word_splitter

_PART_CHARS = 1 << 10


class FallbackEngine:
    """See `mdata.tokenizers.engines.libraries.TokenizerEngine`.

    Args:
        name: of the fast engine.
        definition: a tokenizer.json of a family that the engine supports.
        plain: special tokens that occur in a text are ordinary text.
        exact: builds the exact engine when the first text needs it.
    """

    def __init__(self, name: str, definition: Definition, *, plain: bool, exact: Callable[[], TokenizerEngine]) -> None:
        self.name = name
        nfc_or_none = is_nfc_or_none(definition)
        self._fast: TokenizerEngine = LIBRARIES[name](
            {**definition, "normalizer": None} if nfc_or_none else definition, plain=plain
        )
        self._exact = exact
        self._left_to_exact = pattern_of_any(tokens_left_to_exact(definition, plain=plain))
        self._split = word_splitter(definition)
        self._composes = nfc_or_none and definition.get("normalizer") is not None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See `TokenizerEngine`."""
        for_exact = set(texts_with_newer_characters(texts))
        for_exact.update(index for index, text in enumerate(texts) if self._left_to_exact.search(text))
        if self._composes:
            for_exact.update(index for index, text in enumerate(texts) if not is_normalized("NFC", text))
        if not for_exact:
            return self._encode_fast(texts)
        long = {index: parts for index in for_exact if len(parts := self._parts(texts[index])) > 1}
        ids_by_index = {index: self._encode_parts(index, parts) for index, parts in sorted(long.items())}
        for encode, indices in (
            (self._exact().encode, sorted(for_exact - long.keys())),
            (self._encode_fast, [index for index in range(len(texts)) if index not in for_exact]),
        ):
            with indices_in_batch(indices):
                ids_by_index.update(zip(indices, encode([texts[index] for index in indices]), strict=True))
        return [ids_by_index[index] for index in range(len(texts))]

    def _parts(self, text: str) -> list[str]:
        return list(self._split(text, _PART_CHARS)) if self._split else [text]

    def _encode_parts(self, index: int, parts: Sequence[str]) -> Ids:
        """Most parts go to the fast engine; one that cannot be split further goes to the exact one."""
        with indices_in_batch([index] * len(parts)):
            return np.concatenate(self.encode(parts))

    def _encode_fast(self, texts: Sequence[str]) -> list[Ids]:
        try:
            return self._fast.encode(texts)
        except ValueError:
            if len(texts) > 1:
                return [ids for index in range(len(texts)) for ids in self._encode_one(texts, index)]
            # tiktoken fails on a million blanks before a word.
            return self._exact().encode(texts)

    def _encode_one(self, texts: Sequence[str], index: int) -> list[Ids]:
        with indices_in_batch([index]):
            return self._encode_fast([texts[index]])
