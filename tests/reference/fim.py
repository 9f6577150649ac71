"""Twin of mdata/samples/fim.py and mdata_cpp/fim.hpp: fill-in-the-middle on lists, rule by rule.

`parts` says how documents are split: by tokens `Tokens()`, by characters `Characters(tokenizer)`. `draws` has `real()`
and `up_to(most)`; the rules fix the order of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mdata.tokenizers.base.tokenizer import Tokenizer

Ids = list[int]


class Tokens:
    """Splits between tokens."""

    around: frozenset[int] = frozenset()

    def text_of(self, ids: Ids) -> Ids:
        """What is taken apart."""
        return ids

    def ids_of(self, part: Ids) -> Ids:
        """A part as ids."""
        return part


@dataclass
class Characters:
    """Splits between characters: the text without its special tokens is divided, and each part tokenized again.

    `around`: ids that the tokenizer puts around every text.
    """

    tokenizer: Tokenizer
    dropped: set[int]
    around: frozenset[int] = frozenset()

    def text_of(self, ids: Ids) -> str:
        """What is taken apart."""
        return self.tokenizer.decode([id for id in ids if id not in self.dropped])

    def ids_of(self, part: str) -> Ids:
        """A part as ids."""
        return [id for id in self.tokenizer.encode_batch([part])[0].tolist() if id not in self.dropped]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Ids, rates, and `untouched`: a text that begins with this is not rearranged."""

    prefix: int
    middle: int
    suffix: int
    eod: int
    split: int | None = None
    untouched: Any = None
    rate: float = 0.5
    spm_rate: float = 0.5
    fragment_rate: float = 0.5


def row(text: Sequence[int], rule: Rule, *, parts: Any, draws: Any) -> Ids:
    """The text rearranged document by document, of any length."""
    *ended, last = split_at(list(text), rule.eod)
    out: Ids = []
    for stretch in ended:
        out += [*rearranged(stretch, rule, parts=parts, draws=draws), rule.eod] if stretch else []
    return out + rearranged(last, rule, parts=parts, draws=draws)


def rearranged(stretch: Ids, rule: Rule, *, parts: Any, draws: Any) -> Ids:
    """A rearranged document: by its fragments, if it has several."""
    if rule.split is None or rule.split not in stretch:
        return permuted(stretch, rule.rate, rule=rule, parts=parts, draws=draws)
    if draws.real() >= rule.rate:
        return stretch
    *ended, last = split_at(stretch, rule.split)
    out: Ids = []
    for fragment in ended:
        if fragment:
            out += [*permuted(fragment, rule.fragment_rate, rule=rule, parts=parts, draws=draws), rule.split]
    return out + permuted(last, rule.fragment_rate, rule=rule, parts=parts, draws=draws)


def permuted(ids: Ids, rate: float, *, rule: Rule, parts: Any, draws: Any) -> Ids:
    """Prefix, suffix, middle, or suffix, prefix, middle; or unchanged."""
    if draws.real() >= rate:
        return ids
    start = 0
    while start < len(ids) and ids[start] in parts.around:
        start += 1
    stop = len(ids)
    while stop > start and ids[stop - 1] in parts.around:
        stop -= 1
    before, after = ids[:start], ids[stop:]
    text = parts.text_of(ids[start:stop])
    if rule.untouched and text[: len(rule.untouched)] == rule.untouched:
        return ids
    first, second = sorted((draws.up_to(len(text)), draws.up_to(len(text))))
    prefix, middle, suffix = (parts.ids_of(part) for part in (text[:first], text[first:second], text[second:]))
    if draws.real() < rule.spm_rate:
        return [*before, rule.prefix, rule.suffix, *suffix, rule.middle, *prefix, *middle, *after]
    return [*before, rule.prefix, *prefix, rule.suffix, *suffix, rule.middle, *middle, *after]


def split_at(ids: Ids, mark: int) -> list[Ids]:
    """The parts between the marks: one more than there are marks."""
    found: list[Ids] = [[]]
    for id in ids:
        if id == mark:
            found.append([])
        else:
            found[-1].append(id)
    return found
