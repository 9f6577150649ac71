"""Computes how much longer the rules of a tokenizer.json can make a text.

A chain of rules, each of which doubles the output of the previous one, turns one character into billions, and the
library does it in one call that cannot be limited. So the growth is computed from the rules alone, from the last to the
first: a character becomes at most what the later rules make of it, or its share of its replacement. Only text that
rules in the file write is counted; the expansion by Unicode normalization (once, at most 18 characters for one) is not.

A tokenizer that can make more than MOST_GROWTH characters of one is refused; for others,
mdata/tokenizers/engines/long_text.py limits the length of texts accordingly.
"""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from mdata.errors import UsageError
from mdata.tokenizers.base.tokenizer_json import Definition, components

# Most tokenizers make one character of one, or three (an ellipsis as three dots).
MOST_GROWTH = 16
_MOST_BEFORE = 1000
_MOST_RULES = 1000
_MOST_NAMED = 1000
_UNICODE_GROWTH = 18
_MAY_MATCH_NOTHING = re.compile(r"\(\?[^:]|\\[bBAzZGKyYX]|[\^$]")
_PROPERTY = re.compile(r"\\[pP]\{[^{}]*\}|\\[hHRNO]|\[\[:\^?\w+:\]")


def refuse_growth(definition: Definition) -> None:
    """Refuse rules that make a very long text of a short one.

    Raises:
        UsageError: names the rule's part, and the growth.
    """
    decoders = [rule for rule in components(definition.get("decoder"), "decoders") if rule.get("type") == "Replace"]
    for part, rules in (("normalizer", _normalizers(definition)), ("decoder", decoders)):
        if len(rules) > _MOST_RULES or len(_named(rules)) > _MOST_NAMED:
            counts = f"{len(rules):,} rules with {len(_named(rules)):,} different characters"
            raise UsageError(
                f"tokenizer.json: its {part} is too large", found=counts, expected=f"at most {_MOST_RULES:,} of each"
            )
        times, before = growth(rules)
        _refuse_more(f"its {part} can turn one character into {{}}", times, MOST_GROWTH)
        _refuse_more(f"its {part} puts up to {{}} characters before every text", before, _MOST_BEFORE)
    _refuse_more("its pre_tokenizer can turn one character into {}", _by_bytes(_words(definition)), MOST_GROWTH)


def growth_of(definition: Definition) -> float:
    """The most characters that normalizing and splitting into words may make of one; at least 1."""
    return growth(_normalizers(definition))[0] * _by_bytes(_words(definition))


def growth(rules: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The most characters that a sequence of rules may make of one (at least 1), and may put before every text."""
    of, other, before = dict.fromkeys(_named(rules), 1.0), 1.0, 0.0
    for rule in reversed(rules):
        if rule.get("type") == "Replace":
            of, other = _replaced(rule, of, other)
        elif rule.get("type") == "Prepend":
            before += _sum(str(rule.get("prepend")), of, other)
        elif rule.get("type") != "Strip":  # it removes characters at the ends of a text only, not inside
            of, other = _transformed(rule, of, other)
    return max(1.0, other, *of.values()) * _by_bytes(rules), before


def _refuse_more(problem: str, actual: float, most: int) -> None:
    if actual > most:
        shown = f"{actual:,.0f}" if actual < 1e12 else f"{actual:.1e}"
        raise UsageError(
            f"tokenizer.json: {problem.format(shown)}",
            expected=f"at most {most:,}",
            fix="remove rules that lengthen the output of earlier rules",
        )


def _normalizers(definition: Definition) -> list[Mapping[str, Any]]:
    return components(definition.get("normalizer"), "normalizers")


def _words(definition: Definition) -> list[Mapping[str, Any]]:
    return components(definition.get("pre_tokenizer"), "pretokenizers")


def _named(rules: Sequence[Mapping[str, Any]]) -> set[str]:
    """The characters that rules write or match explicitly."""
    return {
        character
        for rule in rules
        for text in (rule.get("content"), rule.get("prepend"), _plain_pattern(rule))
        if isinstance(text, str)
        for character in text
    }


def _plain_pattern(rule: Mapping[str, Any]) -> str | None:
    pattern = rule.get("pattern")
    plain = pattern.get("String") if isinstance(pattern, Mapping) else None
    return plain if isinstance(plain, str) else None


def _sum(text: str, of: Mapping[str, float], other: float) -> float:
    return sum(of.get(character, other) for character in text)


def _replaced(rule: Mapping[str, Any], of: Mapping[str, float], other: float) -> tuple[dict[str, float], float]:
    """Before a Replace of a fixed text (its characters share the growth), or of a pattern's matches."""
    made = _sum(str(rule.get("content")), of, other)
    plain = _plain_pattern(rule)
    if plain is not None:
        return {**of, **{c: max(of[c], made / len(plain)) for c in set(plain)}}, other
    pattern = rule.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    between = made if may_match_nothing(str(regex)) else 0.0
    return {c: max(value, made) + between for c, value in of.items()}, max(other, made) + between


def _transformed(rule: Mapping[str, Any], of: Mapping[str, float], other: float) -> tuple[dict[str, float], float]:
    """Before a Unicode rule or a table: named characters as it maps them; any other may become any named one."""
    result = {c: _sum(made, of, other) for c, made in _applied(rule, of).items()}
    for composed, value in of.items():
        # It may be composed from other characters, which then share its growth.
        parts = unicodedata.normalize("NFD", composed)
        for part in parts if len(parts) > 1 else "":
            result[part] = max(result.get(part, 0.0), value / len(parts))
    most = max(other, *of.values(), other)
    return result, most * max(1.0, _longest_replacement(rule.get("precompiled_charsmap")) / _UNICODE_GROWTH)


def _applied(rule: Mapping[str, Any], characters: Iterable[str]) -> dict[str, str]:
    """The library's output of a rule for each character.

    Raises:
        UsageError: the library does not know the rule, or fails on it.
    """
    import orjson
    from tokenizers import Tokenizer as Library

    from mdata.util.stop_signals import LibraryError, library_errors

    model = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"}
    text = orjson.dumps({"version": "1.0", "added_tokens": [], "normalizer": dict(rule), "model": model})
    try:
        with library_errors(chars=300):
            normalizer = Library.from_buffer(text).normalizer
            return {character: normalizer.normalize_str(character) for character in characters}
    except LibraryError as error:
        raise UsageError("tokenizer.json is not a tokenizer", found=str(error)) from error


@cache
def may_match_nothing(pattern: str) -> bool:
    """Whether a match of a pattern may be empty; true if that is not obvious."""
    simple = _PROPERTY.sub("x", pattern)
    if _MAY_MATCH_NOTHING.search(simple):
        return True
    try:
        return re.compile(simple).fullmatch("") is not None
    except (re.error, RecursionError, OverflowError):
        return True


def _by_bytes(rules: Sequence[Mapping[str, Any]]) -> float:
    """Byte-level rules: bytes written as characters, each of which the next such rule turns into two."""
    return float(2 ** max(0, sum(rule.get("type") == "ByteLevel" for rule in rules) - 1))


def _longest_replacement(charsmap: object) -> int:
    """Length of the longest replacement in a SentencePiece table, in characters; 0: not such a table."""
    try:
        data = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
    except (binascii.Error, ValueError):
        return 0
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max((len(text.decode(errors="replace")) for text in texts.split(b"\0")), default=0)
