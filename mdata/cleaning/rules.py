"""The rules of `clean`: the thresholds of each step, and the reasons for which it removes texts.

A step measures all texts of a chunk in C++ (mdata_cpp/text_rules.hpp) and compares the numbers with its thresholds, in
a fixed order; the reason of a removed row is the name of the first threshold that it misses, such as
"gopher-min-words". The arithmetic is that of datatrove. A negative threshold is off. Character classes are those of
Unicode 14 under every Python. Slow twins: tests/reference/text_rules.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.errors import UsageError

Measures = npt.NDArray[np.float64]
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


class _Limit(NamedTuple):
    column: int  # of the measures
    name: str  # of the threshold; one that begins with min_ is a lower bound


@dataclass(frozen=True, kw_only=True)
class LengthRules:
    """Lengths of texts; a symbol alone is not a word.

    Args:
        min_characters, max_characters: of a text.
        min_words, max_words: of a text.
    """

    min_characters: int = -1
    max_characters: int = -1
    min_words: int = -1
    max_words: int = -1


@dataclass(frozen=True, kw_only=True)
class GopherRules:
    """Gopher's rules on quality (Rae et al. 2021).

    Args:
        min_words, max_words: of a text, symbols not counted.
        min_mean_length, max_mean_length: characters of these words.
        max_hashes, max_ellipses: for each word.
        max_bullet_lines: share of lines that begin with a bullet or hyphen.
        max_ellipsis_lines: share of lines that end with an ellipsis.
        min_alpha: share of words with a letter.
        min_stop_words: how many of `stop_words` occur.
        stop_words: frequent words of the language.
    """

    min_words: float = 50
    max_words: float = 100_000
    min_mean_length: float = 3
    max_mean_length: float = 10
    max_hashes: float = 0.1
    max_ellipses: float = 0.1
    max_bullet_lines: float = 0.9
    max_ellipsis_lines: float = 0.3
    min_alpha: float = 0.8
    min_stop_words: float = 2
    stop_words: tuple[str, ...] = STOP_WORDS


@dataclass(frozen=True, kw_only=True)
class RepetitionRules:
    """Gopher's rules on repetition.

    Args:
        max_paragraphs, max_paragraph_characters: shares of repeated paragraphs, and of their characters.
        max_lines, max_line_characters: the same of lines.
        max_top_2, max_top_3, max_top_4: share of characters in the most frequent n-gram of words.
        max_all_5 to max_all_10: share of characters in repeated n-grams.
    """

    max_paragraphs: float = 0.3
    max_paragraph_characters: float = 0.2
    max_lines: float = 0.3
    max_line_characters: float = 0.2
    max_top_2: float = 0.2
    max_top_3: float = 0.18
    max_top_4: float = 0.16
    max_all_5: float = 0.15
    max_all_6: float = 0.14
    max_all_7: float = 0.13
    max_all_8: float = 0.12
    max_all_9: float = 0.11
    max_all_10: float = 0.1


@dataclass(frozen=True, kw_only=True)
class C4Rules:
    """C4's rules on lines and texts (Raffel et al. 2020); lines that violate them are cut out.

    Args:
        min_sentences: of what remains of a text; fewer remove it.
        min_line_words: of a line, between blanks. max_word_characters: of any word of a line.
        stop_mark: a line ends in one of . ? ! " ' and not in an ellipsis.
        citations: cut marks such as [12], [edit] and [citation needed].
        javascript: cut lines that name it. policy: cut lines on cookies, terms of use and privacy.
        lorem_ipsum, curly_bracket: remove a text with the words, with an opening bracket.
    """

    min_sentences: int = 5
    min_line_words: int = 3
    max_word_characters: int = 1000
    stop_mark: bool = True
    citations: bool = True
    javascript: bool = True
    policy: bool = True
    lorem_ipsum: bool = True
    curly_bracket: bool = True


@dataclass(frozen=True, kw_only=True)
class ParagraphRules:
    """mC4's rule: at least three lines of this length.

    Args:
        min_characters: of the third longest line.
    """

    min_characters: int = 200


@dataclass(frozen=True, kw_only=True)
class FineWebRules:
    """FineWeb's rules (Penedo et al. 2024). Blank lines do not count.

    Args:
        min_stopped_lines: share of lines that end in a stop mark.
        max_short_lines: share of lines of at most `short_line` characters.
        max_repeated: share of characters in repeated lines.
        max_newlines: for each word.
        short_line: characters.
    """

    min_stopped_lines: float = 0.12
    max_short_lines: float = 0.67
    max_repeated: float = 0.01
    max_newlines: float = 0.3
    short_line: int = 30


_LENGTH = [
    _Limit(0, "min_characters"),
    _Limit(0, "max_characters"),
    _Limit(1, "min_words"),
    _Limit(1, "max_words"),
]
_GOPHER_COLUMNS = (0, 0, 1, 1, 2, 3, 4, 5, 6, 7)
_GOPHER = [_Limit(column, field.name) for column, field in zip(_GOPHER_COLUMNS, fields(GopherRules)[:-1], strict=True)]
_REPETITION = [_Limit(column, field.name) for column, field in enumerate(fields(RepetitionRules))]
_FINEWEB = [_Limit(column, field.name) for column, field in enumerate(fields(FineWebRules)[:-1], start=1)]
_C4_REASONS = ("", "c4-lorem-ipsum", "c4-curly-bracket", "c4-min-sentences")


def length_reasons(texts: list[str], rules: LengthRules) -> list[str]:
    """Why each text is removed; "": it stays."""
    words = np.zeros(len(texts)) if rules.min_words < 0 and rules.max_words < 0 else _core.word_counts(texts)
    measures = np.column_stack(([len(text) for text in texts], words)) if texts else np.zeros((0, 2))
    return _reasons("length", measures, _LENGTH, rules)


def gopher_reasons(texts: list[str], rules: GopherRules, words: list[npt.NDArray[np.int64]] | None = None) -> list[str]:
    """The same; `words`: from another splitter, as [begin, end) in bytes of each text."""
    return _reasons("gopher", _core.gopher_measures(texts, list(rules.stop_words), words), _GOPHER, rules)


def repetition_reasons(
    texts: list[str], rules: RepetitionRules, words: list[npt.NDArray[np.int64]] | None = None
) -> list[str]:
    """The same; an empty text is removed."""
    reasons = _reasons("gopher-repetition", _core.repetition_measures(texts, words), _REPETITION, rules)
    return [reason if text else "gopher-repetition-empty" for text, reason in zip(texts, reasons, strict=True)]


def fineweb_reasons(
    texts: list[str], rules: FineWebRules, words: list[npt.NDArray[np.int64]] | None = None
) -> list[str]:
    """The same; a text without a line is removed."""
    measures = _core.fineweb_measures(texts, rules.short_line, words)
    reasons = _reasons("fineweb", measures, _FINEWEB, rules)
    return [reason if lines else "fineweb-empty" for lines, reason in zip(measures[:, 0], reasons, strict=True)]


def c4_texts(texts: list[str], rules: C4Rules) -> tuple[list[str], list[str]]:
    """(texts without the lines that are cut, why each text is removed)."""
    options = {field.name: getattr(rules, field.name) for field in fields(rules)}
    verdicts, kept = _core.c4_lines(texts, **options)
    return kept, [_C4_REASONS[verdict] for verdict in verdicts.tolist()]


def paragraph_reasons(texts: list[str], rules: ParagraphRules) -> list[str]:
    """Why each text is removed."""
    lengths = _core.third_longest_lines(texts)
    return ["paragraphs-min-characters" if length < rules.min_characters else "" for length in lengths.tolist()]


def _reasons(step: str, measures: Measures, limits: Sequence[_Limit], rules: Any) -> list[str]:
    """For each row, the first limit that it misses."""
    reasons = np.full(len(measures), "", object)
    for limit in reversed(limits):
        bound = getattr(rules, limit.name)
        if bound >= 0:
            values = measures[:, limit.column]
            missed = values < bound if limit.name.startswith("min_") else values > bound
            reasons[missed] = _option(step, limit.name)
    result: list[str] = reasons.tolist()
    return result


def check_rules(step: str, rules: Any) -> None:
    """Refuse thresholds that are not numbers or that no text can meet, a negative short_line, and no threshold at all.

    Raises:
        UsageError: names the option.
    """
    values = {field.name: getattr(rules, field.name) for field in fields(rules)}
    for name, value in values.items():
        if isinstance(value, float) and not np.isfinite(value):
            raise UsageError(f"--{_option(step, name)} is {value}", expected="a number, or -1 to switch the rule off")
        highest = values.get(name.replace("min_", "max_", 1)) if name.startswith("min_") else None
        if highest is not None and 0 <= highest < value:
            problem = f"--{_option(step, name)} is {value:g}, above --{_option(step, name.replace('min', 'max', 1))}"
            raise UsageError(problem, found=f"{highest:g}", fix="exchange them, or switch one off with -1")
    if isinstance(rules, FineWebRules) and rules.short_line < 0:
        fix = f"--{_option(step, 'max_short_lines')} -1 switches the rule off"
        raise UsageError(f"--{_option(step, 'short_line')} is {rules.short_line}", expected="0 or more", fix=fix)
    if isinstance(rules, LengthRules) and max(values.values()) < 0:
        options = " or ".join(f"--{_option(step, name)}" for name in ("min_words", "max_characters"))
        raise UsageError(f"step {step} has no limit", fix=f"give one, such as {options}")


def _option(step: str, name: str) -> str:
    return f"{step}-{name.replace('_', '-')}"
