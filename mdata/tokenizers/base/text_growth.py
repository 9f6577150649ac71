"""How much longer the rules of a tokenizer.json can make a text.

A chain of rules, each of which doubles what the one before it wrote, turns one character into billions, and the library
does it in one call that nobody can bound. So the growth is worked out from the rules alone, from the last one back: a
character becomes at most what the rules behind make of it, or its share of what it is replaced by. Only what rules in
the file write is counted; what Unicode's own forms make of a text (once, at most 18 characters of one) is not.

A tokenizer that can make more than MOST_GROWTH of a character is refused; for others
mdata/tokenizers/engines/long_text.py bounds the texts by it.
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

# Most tokenizers make one, or three (an ellipsis as three dots).
MOST_GROWTH = 16
_MOST_BEFORE = 1000
_MOST_RULES = 1000
_MOST_NAMED = 1000
_UNICODE_GROWTH = 18
_MAY_MATCH_NOTHING = re.compile(r"\(\?[^:]|\\[bBAzZGKyYX]|[\^$]")
_PROPERTY = re.compile(r"\\[pP]\{[^{}]*\}|\\[hHRNO]|\[\[:\^?\w+:\]")


def refuse_growth(definition: Definition) -> None:
    """Refuse rules by which a short text becomes a very long one.

    Raises:
        UsageError: says of which part, and by how much.
    """
    decoders = [rule for rule in components(definition.get("decoder"), "decoders") if rule.get("type") == "Replace"]
    for part, rules in (("normalizer", _normalizers(definition)), ("decoder", decoders)):
        if len(rules) > _MOST_RULES or len(_named(rules)) > _MOST_NAMED:
            found = f"{len(rules):,} rules with {len(_named(rules)):,} different characters"
            raise UsageError(
                f"tokenizer.json: its {part} is too large", found=found, expected=f"at most {_MOST_RULES:,} of each"
            )
        times, before = growth(rules)
        _refuse_more(f"its {part} can turn one character into {{}}", times, MOST_GROWTH)
        _refuse_more(f"its {part} puts up to {{}} characters before every text", before, _MOST_BEFORE)
    _refuse_more("its pre_tokenizer can turn one character into {}", _by_bytes(_words(definition)), MOST_GROWTH)


def growth_of(definition: Definition) -> float:
    """The most characters that normalizing and cutting into words may make of one; at least 1."""
    return growth(_normalizers(definition))[0] * _by_bytes(_words(definition))


def growth(rules: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The most characters that rules, one after another, may make of one (at least 1), and put before every text."""
    of, other, before = dict.fromkeys(_named(rules), 1.0), 1.0, 0.0
    for rule in reversed(rules):
        if rule.get("type") == "Replace":
            of, other = _replaced(rule, of, other)
        elif rule.get("type") == "Prepend":
            before += _sum(str(rule.get("prepend")), of, other)
        elif rule.get("type") != "Strip":  # inside a text it leaves what it takes away at the ends
            of, other = _transformed(rule, of, other)
    return max(1.0, other, *of.values()) * _by_bytes(rules), before


def _refuse_more(what: str, found: float, most: int) -> None:
    if found > most:
        shown = f"{found:,.0f}" if found < 1e12 else f"{found:.1e}"
        raise UsageError(
            f"tokenizer.json: {what.format(shown)}",
            expected=f"at most {most:,}",
            fix="remove rules that lengthen the output of the rules before them",
        )


def _normalizers(definition: Definition) -> list[Mapping[str, Any]]:
    return components(definition.get("normalizer"), "normalizers")


def _words(definition: Definition) -> list[Mapping[str, Any]]:
    return components(definition.get("pre_tokenizer"), "pretokenizers")


def _named(rules: Sequence[Mapping[str, Any]]) -> set[str]:
    """The characters that rules write or look for by name."""
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
    """Before a Replace: of a plain text, whose characters share what is made of it, or of a pattern's matches."""
    made = _sum(str(rule.get("content")), of, other)
    plain = _plain_pattern(rule)
    if plain is not None:
        return {**of, **{c: max(of[c], made / len(plain)) for c in set(plain)}}, other
    pattern = rule.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    between = made if may_match_nothing(str(regex)) else 0.0
    return {c: max(value, made) + between for c, value in of.items()}, max(other, made) + between


def _transformed(rule: Mapping[str, Any], of: Mapping[str, float], other: float) -> tuple[dict[str, float], float]:
    """Before a rule of Unicode or a table: named characters as it takes them, others may become any that is named."""
    result = {c: _sum(made, of, other) for c, made in _applied(rule, of).items()}
    for whole, value in of.items():
        # It may be composed of others, which then share what becomes of it.
        parts = unicodedata.normalize("NFD", whole)
        for part in parts if len(parts) > 1 else "":
            result[part] = max(result.get(part, 0.0), value / len(parts))
    most = max(other, *of.values(), other)
    return result, most * max(1.0, _longest_replacement(rule.get("precompiled_charsmap")) / _UNICODE_GROWTH)


def _applied(rule: Mapping[str, Any], characters: Iterable[str]) -> dict[str, str]:
    """What the library makes of each character by a rule.

    Raises:
        UsageError: it does not know the rule, or fails on it.
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
    """Whether a match of a pattern may be empty; true where that is not plain to see."""
    simple = _PROPERTY.sub("x", pattern)
    if _MAY_MATCH_NOTHING.search(simple):
        return True
    try:
        return re.compile(simple).fullmatch("") is not None
    except (re.error, RecursionError, OverflowError):
        return True


def _by_bytes(rules: Sequence[Mapping[str, Any]]) -> float:
    """Bytes written as characters, of which the next such rule makes two each."""
    return float(2 ** max(0, sum(rule.get("type") == "ByteLevel" for rule in rules) - 1))


def _longest_replacement(charsmap: object) -> int:
    """Characters of the longest text in a SentencePiece table of replacements; 0: it is none."""
    try:
        data = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
    except (binascii.Error, ValueError):
        return 0
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max((len(text.decode(errors="replace")) for text in texts.split(b"\0")), default=0)
