"""Punkt by its definition: candidates, the tokens around each, and whether one of them ends a sentence.

The twin of mdata_cpp/punkt.hpp, and the statement of the rules: those of NLTK 3.10. White space, letters and digits
are those of the `regex` library, because NLTK uses it: U+001C to U+001F are not white space in patterns, but `strip`
removes them. Slow: its time may be quadratic in the length of the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import regex

from mdata.sentences.punkt_tables import INSIDE_UPPER, LOWER, START_LOWER, UPPER, Tables

_QUOTES = "\u2018\u2019\u201c\u201d\xab\xbb"
_NON_WORD = rf"""[)";}}\]*:@'({{\[?!{_QUOTES}]"""
_MARK = r"(?:--+|\.\.+|(?:\.\s){2,}\.)"
_WORD_END = rf"(?:\s|$|{_NON_WORD}|{_MARK})"
_TOKEN = regex.compile(rf"{_MARK}|(?![(\"`{{\[:;&#*@)}}\]\-,])\S+?(?={_WORD_END}|,{_WORD_END})|\S")
_CANDIDATE = regex.compile(rf"[.?!](?=(?P<after>{_NON_WORD}|\s+(?P<next>\S+)))")
_CANDIDATE_KEEPING = regex.compile(rf"\S*[.?!]\s*(?=(?P<after>{_NON_WORD}|(?P<next>\S+)))")
_CLOSING = regex.compile(rf"([\"')\]}}{_QUOTES}]+?)(?:\s+|(?=--)|$)")
_NUMBER = regex.compile(r"-?[.,]?\d[\d,.-]*\.?")
_INITIAL = regex.compile(r"[^\W\d]\.")


def split(text: str, tables: Tables, *, keep_newlines: bool) -> list[str]:
    """The sentences of a text."""
    starts, stops = [0], []
    for match, context in _candidates(text, keep_newlines):
        if _ends_sentence(context, tables):
            stops.append(match.end())
            starts.append(match.start("next") if match["next"] else match.end())
    stops.append(len(text.rstrip()))
    for number in range(1, len(starts)):
        if closing := _CLOSING.match(text[starts[number] : stops[number]]):
            stops[number - 1] = starts[number] + closing.end(1)
            starts[number] += closing.end()
    return [text[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop]


def _candidates(text: str, keep_newlines: bool) -> Iterator[tuple[regex.Match[str], str]]:
    """Each position where a sentence may end, with the words around it."""
    last, last_word = None, 0
    for match in (_CANDIDATE_KEEPING if keep_newlines else _CANDIDATE).finditer(text):
        before = last.start() if last else 0
        blank = max(text.rfind(character, before, match.start()) for character in " \t\n\r\x0b\x0c")
        word = blank + 1 if blank > before else last_word
        if last and before <= word:
            yield last, text[last_word : last.end()] + last["after"]
        last, last_word = match, word
    if last:
        yield last, text[last_word : last.end()] + last["after"]


@dataclass
class _Token:
    text: str
    breaks: bool = False
    abbreviates: bool = False

    def type(self, *, without_period: bool) -> str:
        lower = "##number##" if _NUMBER.fullmatch(self.text.lower()) else self.text.lower()
        return lower[:-1] if without_period and len(lower) > 1 and lower[-1] == "." else lower


def _ends_sentence(context: str, tables: Tables) -> bool:
    lines = [line for line in context.split("\n") if line.strip()]
    tokens = [_first_pass(text, tables) for line in lines for text in _TOKEN.findall(line)]
    return any(_second_pass(token, after, tables) for token, after in pairwise(tokens))


def _first_pass(text: str, tables: Tables) -> _Token:
    if text in (".", "?", "!"):
        return _Token(text, breaks=True)
    if text.startswith("..") and not text.strip("."):
        return _Token(text, abbreviates=True)
    if not text.endswith(".") or text.endswith(".."):
        return _Token(text)
    lower = text[:-1].lower()
    is_abbreviation = not tables.abbreviations.isdisjoint((lower, lower.rpartition("-")[2]))
    return _Token(text, breaks=not is_abbreviation, abbreviates=is_abbreviation)


def _second_pass(token: _Token, after: _Token, tables: Tables) -> bool:
    """Whether the token ends a sentence."""
    if not token.text.endswith("."):
        return token.breaks
    type, after_type = token.type(without_period=True), after.type(without_period=after.breaks)
    if (type, after_type) in tables.collocations:
        return False
    bits, upper = tables.contexts.get(after_type, 0), after.text[0].isupper()
    starts = _starts_sentence(after.text, bits)
    initial = _INITIAL.fullmatch(token.text) is not None
    if token.abbreviates and not initial and (starts or (upper and after_type in tables.starters)):
        return True
    never_lower = initial and upper and not bits & LOWER
    if (initial or type == "##number##") and (starts is False or (starts is None and never_lower)):
        return False
    return token.breaks


def _starts_sentence(text: str, bits: int) -> bool | None:
    """Whether a token begins a sentence, judged by its spelling."""
    if text in (";", ":", ",", ".", "!", "?"):
        return False
    if text[0].isupper() and bits & LOWER and not bits & INSIDE_UPPER:
        return True
    if text[0].islower() and (bits & UPPER or not bits & START_LOWER):
        return False
    return None
