"""Twin of mdata_cpp/masking.hpp and masked_samples.hpp: masks and samples of BERT and T5 on lists of Python integers.

`draws` is numpy's RandomState (Megatron's order), or `KeyedDraws`: the same methods, from the words of a key.
`by_value`: Megatron's padding, recognized by its value, so that a text's own tokens of that value count as padding too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from mdata.samples.sample_options import T5, Bert, MaskingOptions
from mdata.samples.special_tokens import MaskedVocabulary
from tests.reference.mapping import keyed_words

Replace = Callable[[int], int]


class KeyedDraws:
    """RandomState's methods over other words."""

    def __init__(self, key: tuple[int, int], number: int) -> None:
        self._words: Iterator[int] = keyed_words(key, number)

    def random_sample(self) -> float:
        """53 bits of two words."""
        high, low = next(self._words) >> 5, next(self._words) >> 6
        return (high * 2**26 + low) / 2**53

    def randint(self, low: int, high: int) -> int:
        """Words are masked; those that are too large are rejected."""
        most = high - 1 - low
        while most:
            found = next(self._words) & ((1 << most.bit_length()) - 1)
            if found <= most:
                return low + found
        return low

    def shuffle(self, values: list[Any]) -> None:
        """From the end."""
        for i in range(len(values) - 1, 0, -1):
            j = self.randint(0, i + 1)
            values[i], values[j] = values[j], values[i]

    def choice(self, n: int, p: Any) -> int:
        """By the running sums."""
        sums = np.cumsum(p)
        return int(np.searchsorted(sums / sums[-1], self.random_sample(), side="right"))

    def geometric(self, p: float) -> int:
        """Trials until the first success."""
        return math.ceil(math.log1p(-self.random_sample()) / math.log(1 - p))


@dataclass
class Masked:
    """The result of masking: the text, the spans (positions of each, ascending), the permuted positions."""

    ids: list[int]
    spans: list[list[int]]
    exchanged: list[int]


def candidates(ids: Sequence[int], vocabulary: MaskedVocabulary, *, whole_words: bool) -> list[list[int]]:
    """Positions that are masked together."""
    found: list[list[int]] = []
    for place, id in enumerate(ids):
        if id in (vocabulary.cls, vocabulary.sep):
            continue
        if whole_words and found and id in vocabulary.continuations:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def draw_ngrams(ids: Sequence[int], vocabulary: MaskedVocabulary, *, rule: MaskingOptions, draws: Any) -> Iterator[Any]:
    """The candidates, shuffled, each with a function that draws which n-grams it may become, longest first."""
    found = candidates(ids, vocabulary, whole_words=rule.whole_words)
    chances = 1.0 / np.arange(1, rule.max_ngram + 1)
    chances = chances / chances.sum()
    if rule.longer_ngrams:
        chances = chances[::-1]

    def ngrams(number: int) -> list[list[int]]:
        if rule.geometric:
            most = min(draws.geometric(0.2), rule.max_ngram)
        else:
            most = 1 + draws.choice(rule.max_ngram, p=chances / chances.sum())
        return [joined(found[number : number + n]) for n in range(most, 0, -1)]

    order = list(range(len(found)))
    while True:
        draws.shuffle(order)
        yield [(lambda number=number: ngrams(number)) for number in order]


def mask(
    ids: Sequence[int],
    target: int,
    *,
    vocabulary: MaskedVocabulary,
    rule: MaskingOptions,
    draws: Any,
    put: Replace,
    room: tuple[float, float] = (math.inf, math.inf),
) -> Masked:
    """Choose and replace; `room`: spans, and cells, of which a span of n tokens takes n + 1."""
    budget = min(rule.probability * target, max(1, round(len(ids) * rule.probability)))
    rounds = draw_ngrams(ids, vocabulary, rule=rule, draws=draws)
    result = Masked(list(ids), [], [])
    done: set[int] = set()
    for ngrams in next(rounds):
        if len(done) >= budget:
            break
        places = next((places for places in ngrams() if len(done) + len(places) <= budget), None)
        if places is None or done & set(places):
            continue
        if len(result.spans) + 1 > room[0] or len(done) + len(result.spans) + len(places) + 1 > room[1]:
            continue
        for place in places:
            result.ids[place] = put(ids[place])
        done |= set(places)
        result.spans.append(places)
    result.spans.sort()
    if rule.permutation:
        _exchange(result, done, ngrams=next(rounds), budget=budget, draws=draws)
    return result


def _exchange(result: Masked, done: set[int], *, ngrams: list[Any], budget: float, draws: Any) -> None:
    for draw in ngrams:
        if len(result.exchanged) >= budget:
            break
        places = next((places for places in draw() if len(result.exchanged) + len(places) <= budget), None)
        if places is not None and not set(places) & (done | set(result.exchanged)):
            result.exchanged += places
    result.exchanged.sort()
    others = list(result.exchanged)
    draws.shuffle(others)
    before = list(result.ids)
    for place, other in zip(result.exchanged, others, strict=True):
        result.ids[place] = before[other]


def bert(
    sentences: list[list[int]],
    target: int,
    *,
    options: Bert,
    sequence_length: int,
    vocabulary: MaskedVocabulary,
    draws: Any,
    by_value: bool,
) -> dict[str, Any]:
    """One sample: field -> number, or list of numbers."""
    pivot = len(sentences)
    is_random = False
    if options.head:
        pivot = draws.randint(1, len(sentences)) if len(sentences) > 2 else 1
        is_random = draws.random_sample() < 0.5
    parts = [joined(sentences[:pivot]), joined(sentences[pivot:])]
    if is_random:
        parts.reverse()
    truncated = sum(map(len, parts)) > target
    while sum(map(len, parts)) > target:
        part = parts[0] if len(parts[0]) > len(parts[1]) else parts[1]
        part.pop(0 if draws.random_sample() < 0.5 else -1)
    first = [int(vocabulary.cls or 0), *parts[0], int(vocabulary.sep or 0)]
    second = [*parts[1], int(vocabulary.sep or 0)] if parts[1] else []

    def replace(id: int) -> int:
        if draws.random_sample() < 0.8:
            return int(vocabulary.mask or 0)
        return id if draws.random_sample() < 0.5 else vocabulary.ids[draws.randint(0, len(vocabulary.ids))]

    ids = [*first, *second]
    found = mask(ids, target, vocabulary=vocabulary, rule=options.masking, draws=draws, put=replace)
    asked = {*joined(found.spans), *found.exchanged}
    length, pad = sequence_length, padding(vocabulary, by_value=by_value)
    text = padded(found.ids, length, pad=pad)
    outside = pad if by_value else 0
    return {
        "text": cleaned(text, pad, by_value=by_value),
        "types": padded([0] * len(first) + [1] * len(second), length, pad=outside),
        "labels": cleaned(
            padded([id if i in asked else -1 for i, id in enumerate(ids)], length, pad=-1), pad, by_value=by_value
        ),
        "is_random": int(is_random),
        "padding_mask": [outside if is_pad else 1 for is_pad in pads(text, len(ids), pad=pad, by_value=by_value)],
        "loss_mask": [int(i in asked) for i in range(length)],
        "truncated": int(truncated),
    }


def t5(
    sentences: list[list[int]],
    target: int,
    *,
    options: T5,
    sequence_length: int,
    vocabulary: MaskedVocabulary,
    draws: Any,
    by_value: bool,
) -> dict[str, Any] | None:
    """One sample; None if it does not fit, which cannot happen if padding is known by position."""
    text = joined(sentences)
    ids = text[:target]
    room = (math.inf, math.inf) if by_value else (len(vocabulary.sentinels), options.decoder_length - 1)
    found = mask(ids, target, vocabulary=vocabulary, rule=options.masking, draws=draws, put=lambda _: -1, room=room)
    if len(found.spans) > len(vocabulary.sentinels):
        return None
    encoder, written, done = [], [], 0
    for sentinel, places in zip(vocabulary.sentinels, found.spans, strict=False):
        encoder += [*ids[done : places[0]], sentinel]
        written += [sentinel, *(ids[place] for place in places)]
        done = places[-1] + 1
    encoder += ids[done:]
    decoder = [int(vocabulary.bos or 0), *written]
    pad, wide, long = padding(vocabulary, by_value=by_value), sequence_length, options.decoder_length
    if len(decoder) > long:
        return None
    text_enc, text_dec = padded(encoder, wide, pad=pad), padded(decoder, long, pad=pad)
    labels = padded([*written, int(vocabulary.eos or 0)], long, pad=-1)
    return {
        "text_enc": cleaned(text_enc, pad, by_value=by_value),
        "text_dec": cleaned(text_dec, pad, by_value=by_value),
        "labels": cleaned(labels, pad, by_value=by_value),
        "loss_mask": padded([1] * len(decoder), long, pad=0),
        "truncated": int(len(text) > target),
        "enc_mask": [int(not is_pad) for is_pad in pads(text_enc, len(encoder), pad=pad, by_value=by_value)],
        "dec_mask": [int(not is_pad) for is_pad in pads(text_dec, len(decoder), pad=pad, by_value=by_value)],
    }


def joined(lists: Sequence[Sequence[int]]) -> list[int]:
    """One list of several."""
    return list(chain.from_iterable(lists))


def padding(vocabulary: MaskedVocabulary, *, by_value: bool) -> int:
    """The padding of a sample."""
    return vocabulary.megatron_pad if by_value else vocabulary.pad or 0


def padded(cells: list[int], length: int, *, pad: int) -> list[int]:
    """Padded to a length."""
    return cells + [pad] * (length - len(cells))


def pads(cells: list[int], used: int, *, pad: int, by_value: bool) -> list[bool]:
    """Which cells count as padding."""
    return [cell == pad if by_value else place >= used for place, cell in enumerate(cells)]


def cleaned(cells: list[int], pad: int, *, by_value: bool) -> list[int]:
    """Padding that is recognized by its value becomes 0."""
    return [0 if by_value and cell == pad else cell for cell in cells]
