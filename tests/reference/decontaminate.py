"""Slow twins of mdata_cpp/ngram_match.hpp: n-grams of words by Python's strings (of Unicode 14 in Python 3.11)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from scripts.text_classes import ALPHA, WORD
from tests.reference.text_rules import has


def words_of(text: str) -> list[tuple[str, int, int]]:
    """(word, where it begins and ends)."""
    words: list[tuple[str, int, int]] = []
    at = 0
    while at < len(text):
        begin, word = at, ""
        while at < len(text):
            if has(text[at], WORD):
                word += text[at].lower().replace("\u03c2", "\u03c3")
            elif not (word and at + 1 < len(text) and _is_apostrophe(text[at - 1], text[at], text[at + 1])):
                break
            at += 1
        if word:
            words.append((word, begin, at))
        else:
            at += 1
    return words


def _is_apostrophe(before: str, character: str, after: str) -> bool:
    return character in "'\u2019" and has(before, ALPHA) and has(after, ALPHA)


def grams_of(item: str, most: int, least: int) -> set[tuple[str, ...]]:
    words = [word for word, _, _ in words_of(item)]
    if len(words) < least:
        return set()
    n = min(len(words), most)
    return {tuple(words[first : first + n]) for first in range(len(words) - n + 1)}


def match(text: str, items: Sequence[str], most: int, least: int) -> tuple[list[tuple[int, int]], list[int]]:
    """(merged spans, items that are there)."""
    words = words_of(text)
    of_items = [grams_of(item, most, least) for item in items]
    covered = [False] * (len(text) + 1)
    found = set()
    for n in range(least, most + 1):
        for first in range(len(words) - n + 1):
            part = words[first : first + n]
            gram = tuple(word for word, _, _ in part)
            if here := {number for number, grams in enumerate(of_items) if gram in grams}:
                found |= here
                for at in range(part[0][1], part[-1][2]):
                    covered[at] = True
    spans, at = [], 0
    while at < len(text):
        if covered[at]:
            end = covered.index(False, at)
            spans.append((at, end))
            at = end
        else:
            at += 1
    return spans, sorted(found)


def openwebtext_words(text: str) -> tuple[list[str], list[int]]:
    matches = list(re.finditer(r"\w+", text.lower()))
    return [match[0] for match in matches], [match.start() for match in matches]
