"""Slow twin of mdata/dedup: all pairs of documents, words from the `tokenizers` library, hashes from numpy."""

from __future__ import annotations

import hashlib
import unicodedata
from fractions import Fraction

import numpy as np
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from mdata import _core
from mdata.dedup.plan import permutations

PRIME = (1 << 61) - 1
HASHES = {
    "xxhash64": _core.xxh64,
    "sha1-64": lambda data: int.from_bytes(hashlib.sha1(data).digest()[:8], "little"),
    "sha1-32": lambda data: int.from_bytes(hashlib.sha1(data).digest()[:4], "little"),
}
_normalizer = BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=True, lowercase=True)
_splitter = BertPreTokenizer()


def words_of(text: str) -> list[str]:
    """The words of a text's normal form."""
    words = [word for word, _ in _splitter.pre_tokenize_str(_normalizer.normalize_str(text))]
    return [word for word in words if not _is_punctuation(word)]


def ngrams(text: str, *, ngram: int, unit: str) -> list[str]:
    """The n-grams of a text's normal form."""
    units = (text.split(" ") if text else []) if unit == "given" else words_of(text)
    joint = "" if unit == "characters" else " "
    units = list(" ".join(units)) if unit == "characters" else units
    return [joint.join(units[first : first + ngram]) for first in range(len(units) - ngram + 1)]


def signature(
    text: str, *, bands: int, rows: int, ngram: int, unit: str = "words", hash: str = "xxhash64"
) -> list[tuple[int, ...]]:
    """The bands of a signature; none if there are too few units."""
    grams = ngrams(text, ngram=ngram, unit=unit)
    if not grams or not bands:
        return []
    hashes = np.array([HASHES[hash](gram.encode()) for gram in grams], np.uint64)
    a, b = permutations(bands * rows)
    with np.errstate(over="ignore"):
        values = (hashes[:, None] * a + b) % np.uint64(PRIME)
    minima = (values & np.uint64(0xFFFFFFFF) if hash == "sha1-32" else values).min(axis=0)
    return [tuple(part.tolist()) for part in np.split(minima, bands)]


def first_of_groups(
    texts: list[str],
    *,
    bands: int,
    rows: int,
    ngram: int,
    unit: str = "words",
    hash: str = "xxhash64",
    verify: float = 0,
    jaccard: str = "union",
) -> list[int]:
    """For each text, the first of its group."""
    shape = {"ngram": ngram, "unit": unit}
    signatures = [signature(text, bands=bands, rows=rows, hash=hash, **shape) for text in texts]
    sets = [set(ngrams(text, **shape)) for text in texts]
    words = [text.split(" ") if unit == "given" else words_of(text) for text in texts]
    forms = [(" ".join(part), "" if part else text) for part, text in zip(words, texts, strict=True)]

    def are_near(earlier: int, later: int) -> bool:
        if not verify:
            return True
        one, other = sets[earlier], sets[later]
        of = {"union": len(one | other), "min": min(len(one), len(other)), "max": max(len(one), len(other))}[jaccard]
        return len(one & other) >= Fraction(str(verify)) * of

    groups = list(range(len(texts)))
    for keys in (forms, *([part[band] if part else None for part in signatures] for band in range(bands))):
        for later in range(len(texts)):
            with_key = [number for number in range(later) if keys[number] == keys[later] and keys[later] is not None]
            for earlier in {with_key[0], with_key[-1]} if with_key else ():
                if keys is forms or are_near(earlier, later):
                    old, new = sorted((groups[earlier], groups[later]), reverse=True)
                    groups = [new if group == old else group for group in groups]
    return groups


def _is_punctuation(word: str) -> bool:
    if len(word) != 1:
        return False
    is_ascii_symbol = word.isascii() and not word.isalnum()
    return is_ascii_symbol or unicodedata.category(word).startswith("P")
