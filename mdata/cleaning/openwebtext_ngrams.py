"""What Megatron-LM's tools/openwebtext/filter_ngrams.py did, byte for byte, for `--compat openwebtext`.

Words are the matches of \\w+ in the text in lower case. Its quirks are kept: a passage is taken to be as long as its
words joined by blanks, positions in the text in lower case are used in the text itself, and at each place the longest
n-gram is tried first and then all lengths from the shortest on; shorter ones in the last words of a text are tried only
if the text has more words than the longest n-gram.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, Self

from mdata import _core

_STOPS = ".!?"
_WINDOW = 1024  # characters that are looked at first behind a match


class Pieces(NamedTuple):
    """How texts are cut: characters on each side of an n-gram, and the length up to which a piece is removed."""

    margin: int
    min_characters: int


def words_of(text: str) -> tuple[list[str], list[int]]:
    """(words, where each begins)."""
    words, begins = _core.openwebtext_words(text)
    return (words.split("\n") if len(begins) else []), begins.tolist()


@dataclass(frozen=True)
class OpenWebTextNgrams:
    """N-grams, as words joined by blanks.

    Args:
        keys: the n-grams. most: words of the longest.
    """

    keys: frozenset[str]
    most: int

    @classmethod
    def of_items(cls, items: Iterable[str], *, most: int, least: int) -> Self:
        """The n-grams of test items."""
        keys = set()
        for item in items:
            words, _ = words_of(item)
            if len(words) >= least:
                size = min(len(words), most)
                keys |= {" ".join(words[first : first + size]) for first in range(len(words) - size + 1)}
        return cls(frozenset(keys), most)

    def without(self, keys: Iterable[str]) -> Self:
        """The same set without some, each named "ngram KEY"."""
        return type(self)(self.keys - {key.removeprefix("ngram ") for key in keys}, self.most)

    @cached_property
    def lengths(self) -> list[int]:
        """The numbers of words of its n-grams, in order."""
        return sorted({key.count(" ") + 1 for key in self.keys})

    @cached_property
    def _begins(self) -> frozenset[tuple[str, ...]]:
        """The first two words of each n-gram; of one word, that word."""
        return frozenset(tuple(key.split(" ", 2)[:2]) for key in self.keys)

    def occurring(self, text: str) -> set[str]:
        """The n-grams of a text; the search continues after each."""
        keys, start = set[str](), 0
        while start < len(text) and (match := self._first_match(text, start)):
            begin, key = match
            keys.add(key)
            start += begin + len(key) + 1
        return keys

    def free_pieces(self, text: str, limits: Pieces) -> list[str]:
        """The text cut around its n-grams."""
        pieces, start = list[str](), 0
        while match := self._first_match(text, start):
            before, start = _around(text, start, *match, margin=limits.margin)
            if len(before) > limits.min_characters:
                pieces.append(before)
            if len(text) - start <= limits.min_characters:
                return pieces
        return [*pieces, text[start:]]

    def _first_match(self, text: str, start: int) -> tuple[int, str] | None:
        """(where it begins behind `start`, the n-gram) of the first in the rest of a text.

        Most texts have none, so a whole one is read at once. Behind a match windows that end behind a blank are looked
        at, so that the rest is not read for each: the words of a window are the first ones of the rest.
        """
        size = _WINDOW if start else len(text)
        while (end := start + size) < len(text):
            end = max(text.rfind(" ", start, end), text.rfind("\n", start, end)) + 1
            if end and (match := self._match(text[start:end], is_rest=False)):
                return match
            size *= 2
        return self._match(text[start:], is_rest=True)

    def _match(self, text: str, *, is_rest: bool) -> tuple[int, str] | None:
        """The same in a rest, or in its first words; of these, if n-grams of all lengths can follow."""
        words, begins = words_of(text)
        single = bool(self.lengths) and self.lengths[0] == 1
        pairs = enumerate(zip_longest(words, words[1:]))
        # Where an n-gram can begin.
        places = [at for at, pair in pairs if pair in self._begins or (single and pair[:1] in self._begins)]
        last = len(words) - self.most
        for first, size in self._tried(places, last=last, count=len(words), is_rest=is_rest):
            key = " ".join(words[first : first + size])
            if key in self.keys:
                return begins[first], key
        return None

    def _tried(self, places: Sequence[int], *, last: int, count: int, is_rest: bool) -> Iterator[tuple[int, int]]:
        """(first word, number of words) in the order in which they are looked up."""
        for first in places:
            if first <= last:
                yield first, self.most
                for size in self.lengths:
                    yield first, size
        if last > 0 and is_rest:
            for size in self.lengths:
                if size < self.most:
                    for first in places:
                        if last <= first <= count - size:
                            yield first, size


def _around(text: str, start: int, begin: int, key: str, *, margin: int) -> tuple[str, int]:
    """What stays of the rest of a text before an n-gram, and where the rest behind it starts."""
    left = min(begin - margin, len(text) - start - 1)  # lower case may be longer than the text
    while left > 0 and text[start + left] not in _STOPS:
        left -= 1
    right = start + begin + len(key) + margin
    while right < len(text) and text[right] not in _STOPS:
        right += 1
    return text[start : start + left + 1] if left > 0 else "", right + 1


def dumped(record: Mapping[str, Any], key: str, pieces: Sequence[str], name: str) -> list[bytes]:
    """The lines of a record's pieces, numbered behind an older number."""
    prefix = f"{record['split_id']}-" if "split_id" in record else ""
    lines = []
    for number, piece in enumerate(pieces):
        line = {**record, key: piece, "split_id": f"{prefix}{name}-{number:04d}"}
        lines.append(json.dumps(line, ensure_ascii=False).encode())
    return lines
