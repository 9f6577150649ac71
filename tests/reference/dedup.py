"""Slow twin of mdata/dedup: all pairs of documents, words from the `tokenizers` library, hashes from numpy."""

from __future__ import annotations

import unicodedata

import numpy as np
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from mdata import _core
from mdata.dedup.dedup import permutations

PRIME = (1 << 61) - 1
_normalizer = BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=True, lowercase=True)
_splitter = BertPreTokenizer()


def words_of(text: str) -> list[str]:
    """The words of a text's normal form."""
    words = [word for word, _ in _splitter.pre_tokenize_str(_normalizer.normalize_str(text))]
    return [word for word in words if not _is_punctuation(word)]


def signature(words: list[str], *, bands: int, rows: int, ngram: int) -> list[tuple[int, ...]]:
    """The bands of a signature; none if there are too few words."""
    grams = [" ".join(words[first : first + ngram]) for first in range(len(words) - ngram + 1)]
    if not grams:
        return []
    hashes = np.array([_core.xxh64(gram.encode()) for gram in grams], np.uint64)
    a, b = permutations(bands * rows)
    with np.errstate(over="ignore"):
        minima = ((hashes[:, None] * a + b) % np.uint64(PRIME)).min(axis=0)
    return [tuple(part.tolist()) for part in np.split(minima, bands)]


def first_of_groups(texts: list[str], *, bands: int, rows: int, ngram: int) -> list[int]:
    """For each text, the first of its group."""
    words = [words_of(text) for text in texts]
    forms = [(" ".join(part), "" if part else text) for part, text in zip(words, texts, strict=True)]
    signatures = [signature(part, bands=bands, rows=rows, ngram=ngram) if bands else [] for part in words]
    groups = list(range(len(texts)))
    for later in range(len(texts)):
        for earlier in range(later):
            near = any(x == y for x, y in zip(signatures[earlier], signatures[later], strict=False))
            if near or forms[earlier] == forms[later]:
                old, new = sorted((groups[earlier], groups[later]), reverse=True)
                groups = [new if group == old else group for group in groups]
    return groups


def _is_punctuation(word: str) -> bool:
    if len(word) != 1:
        return False
    is_ascii_symbol = word.isascii() and not word.isalnum()
    return is_ascii_symbol or unicodedata.category(word).startswith("P")
