"""Our own engine for WordPiece like BERT's (mdata_cpp/wordpiece.hpp); the slow twin is tests/reference/wordpiece.py.

Texts on which it might not be exact go to the exact engine one by one: those with characters that Unicode editions in
use treat differently (the C++ code reports them while encoding, at no cost), and those with an added token that has
further rules (whole words only, blanks beside it). `compare_words` compares the words for all characters at the borders
of character classes with the library's, so that no vocabulary can hide a difference.

Supported: BertNormalizer with any of its flags, BertPreTokenizer, a WordPiece model with any name for unknown words,
any prefix and any longest word, and a post-processor that puts fixed ids around a text. Added tokens must be matched in
the raw text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from mdata.tokenizers.base.self_check_texts import wordpiece_texts
from mdata.tokenizers.base.token_matching import pattern_of_any
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, indices_in_batch
from mdata.tokenizers.base.tokenizer_json import (
    Definition,
    added_tokens,
    added_tokens_renumbered,
    components,
    model_vocabulary,
    surrounding_ids,
    unknown_id,
)
from mdata.tokenizers.engines.libraries import EngineFamily, ExactEngine, Ids, TokenizerEngine
from mdata.tokenizers.engines.long_text import whitespace_splitter, word_splitter

_AS_TEXT = -1
_CODES_AT_ONCE = 64
_FLAGS = ("clean_text", "handle_chinese_chars", "lowercase")


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


class BertNormalization(NamedTuple):
    """What happens to texts before they are split, in the order of `_core.WordPiece`."""

    clean_text: bool
    separate_cjk: bool
    strip_accents: bool
    lowercase: bool


@dataclass(frozen=True)
class WordPieceSettings:
    """The settings on which ids depend besides the vocabulary and the added tokens.

    Args:
        prefix: of entries that continue a word.
        max_chars: of a word; longer words are unknown.
        unknown: the id of words that entries cannot cover.
    """

    prefix: str
    max_chars: int
    unknown: int
    normalization: BertNormalization


def wordpiece_settings(definition: Definition) -> WordPieceSettings:
    """The settings of a supported definition."""
    model = definition["model"]
    normalizer = components(definition["normalizer"], "normalizers")[0]
    clean, cjk, lower = (bool(normalizer[name]) for name in _FLAGS)
    strip = normalizer.get("strip_accents")
    unknown = unknown_id(definition)
    assert unknown is not None, "a definition that is not supported"
    return WordPieceSettings(
        prefix=model.get("continuing_subword_prefix", "##"),
        max_chars=model.get("max_input_chars_per_word", 100),
        unknown=unknown,
        normalization=BertNormalization(clean, cjk, lower if strip is None else bool(strip), lower),
    )


def wordpiece_unsupported(definition: Definition) -> str | None:
    """Why this is not WordPiece like BERT's; None: it is."""
    model = definition.get("model") or {}
    if model.get("type") != "WordPiece":
        return f"its model is {model.get('type', 'BPE')}, not WordPiece"
    normalizers = components(definition.get("normalizer"), "normalizers")
    words = [part.get("type") for part in components(definition.get("pre_tokenizer"), "pretokenizers")]
    tests = (
        ([part.get("type") for part in normalizers] != ["BertNormalizer"], "it normalizes texts in a way of its own"),
        (words != ["BertPreTokenizer"], "it splits words in a way of its own"),
        (not _has_valid_values(model, normalizers), "a field of its file is missing or of another type"),
        (unknown_id(definition) is None, "its vocabulary has no entry for unknown words"),
        (surrounding_ids(definition) is None, "its post-processor is not a simple template"),
        (not all(0 <= id < 2**31 for id in model_vocabulary(definition).values()), "an id does not fit into 31 bits"),
    )
    if reason := next((reason for holds, reason in tests if holds), None):
        return reason
    if any(token.normalized for token in added_tokens(definition)):
        return "an added token is matched in the normalized text"
    return added_tokens_renumbered(definition)


def _has_valid_values(model: Mapping[str, object], normalizers: list[Mapping[str, object]]) -> bool:
    values = [normalizers[0].get(name) for name in _FLAGS] if normalizers else []
    strip = normalizers[0].get("strip_accents") if normalizers else None
    most = model.get("max_input_chars_per_word", 100)
    return (
        all(isinstance(value, bool) for value in values)
        and (strip is None or isinstance(strip, bool))
        and isinstance(model.get("continuing_subword_prefix", "##"), str)
        and isinstance(most, int)
        and 0 <= most < 2**32
    )


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
