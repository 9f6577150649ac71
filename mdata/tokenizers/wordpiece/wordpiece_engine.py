"""Our own engine for WordPiece like BERT's (mdata_cpp/wordpiece.hpp); the slow twin is tests/reference/wordpiece.py.

Texts on which it might not be exact go to the exact engine one by one: those with characters that Unicode editions in
use treat differently (the C++ code reports them while encoding, at no cost), and those with an added token that has
further rules (whole words only, blanks beside it). `compare_words` compares the words for all characters at the borders
of character classes with the library's, so that no vocabulary can hide a difference.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from mdata.tokenizers.base.self_check_texts import wordpiece_texts
from mdata.tokenizers.base.token_matching import pattern_of_any
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, indices_in_batch
from mdata.tokenizers.base.tokenizer_json import Definition, added_tokens, model_vocabulary
from mdata.tokenizers.engines.libraries import EngineFamily, ExactEngine, Ids, TokenizerEngine
from mdata.tokenizers.engines.long_text import whitespace_splitter, word_splitter
from mdata.tokenizers.wordpiece.wordpiece_support import wordpiece_settings, wordpiece_unsupported

_AS_TEXT = -1
_CODES_AT_ONCE = 64


class WordPieceEngine:
    """See `mdata.tokenizers.engines.libraries.FlatEngine`.

    Args:
        definition: a supported tokenizer.json.
        plain: special tokens that occur in a text are ordinary text.
        exact: builds the exact engine when the first text needs it.
    """

    name = "mdata"

    def __init__(self, definition: Definition, *, plain: bool, exact: Callable[[], TokenizerEngine]) -> None:
        from mdata._core import WordPiece

        settings = wordpiece_settings(definition)
        tokens = added_tokens(definition)
        added = {token.content: _AS_TEXT if plain and token.special else token.id for token in tokens}
        with_rules = [token for token in tokens if token.single_word or token.lstrip or token.rstrip]
        self._with_rules = pattern_of_any(token.content for token in with_rules if added[token.content] != _AS_TEXT)
        self._exact = exact
        self._core = WordPiece(
            model_vocabulary(definition),
            added=added,
            unknown=settings.unknown,
            prefix=settings.prefix,
            most_chars=settings.max_chars,
            treatment=settings.normalization,
        )

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See `TokenizerEngine`."""
        ids, lengths = self.encode_flat(texts, before=(), after=())
        return np.split(ids.view(np.uint32), np.cumsum(lengths)[:-1]) if len(lengths) else []

    def encode_flat(
        self, texts: Sequence[str], *, before: Sequence[int], after: Sequence[int]
    ) -> tuple[IdArray, LengthArray]:
        """See FlatEngine."""
        ids, lengths, unsettled = self._core.encode(list(texts), before=list(before), after=list(after))
        for_exact = set(unsettled.tolist())
        for_exact.update(index for index, text in enumerate(texts) if self._with_rules.search(text))
        if not for_exact:
            return ids, lengths
        indices = sorted(for_exact)
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        with indices_in_batch(indices):
            exact_ids = self._exact().encode([texts[index] for index in indices])
        for index, exact in zip(indices, exact_ids, strict=True):
            parts[index] = np.array([*before, *exact.tolist(), *after], dtype=np.int32)
            lengths[index] = len(parts[index])
        return np.concatenate(parts), lengths

    def compare_words(self, exact: ExactEngine) -> str | None:
        """The first text that the exact engine normalizes or splits into words differently."""
        library = exact.library
        for text in _borders(self._core.classes()):
            words = [word for word, _ in library.pre_tokenizer.pre_tokenize_str(library.normalizer.normalize_str(text))]
            if self._core.words(text) not in (words, None):
                return text
        return None


def _borders(classes: dict[str, list[tuple[int, int]]]) -> Iterator[str]:
    """Texts with the characters at the borders of all classes, without those that go to the exact engine."""
    ranges = [pair for pairs in classes.values() for pair in pairs]
    codes = {code for first, last in ranges for code in (first - 1, first, last, last + 1)}
    starts = [first for first, _ in classes["unsettled"]]

    def settled(code: int) -> bool:
        place = bisect_right(starts, code) - 1
        return place < 0 or code > classes["unsettled"][place][1]

    settled_codes = sorted(
        code for code in codes if 0 <= code < 0x110000 and not 0xD800 <= code < 0xE000 and settled(code)
    )
    for start in range(0, len(settled_codes), _CODES_AT_ONCE):
        some = map(chr, settled_codes[start : start + _CODES_AT_ONCE])
        yield " ".join(f"x{c}Y{c}{c} e\u0323{c}\u0301\u302e" for c in some)


def _is_wordpiece(definition: Definition) -> bool:
    model = definition.get("model")
    return isinstance(model, Mapping) and model.get("type") == "WordPiece"


def _splitter(definition: Definition) -> Callable[..., Iterator[str]] | None:
    supported = wordpiece_unsupported(definition) is None
    return whitespace_splitter(definition) if supported else word_splitter(definition)


WORDPIECE = EngineFamily(
    matches=_is_wordpiece,
    unsupported=wordpiece_unsupported,
    engines=MappingProxyType({WordPieceEngine.name: WordPieceEngine}),
    self_check_texts=wordpiece_texts,
    text_splitter=_splitter,
    compare_words=WordPieceEngine.compare_words,
)
