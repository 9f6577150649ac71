"""Slow twins of mdata_cpp/text_rules.hpp: rules on web text, by Python's own strings (of Unicode 14 in Python 3.11)."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import regex

from scripts.text_classes import ALPHA, DIGIT, STOP, SYMBOL, WORD, classes_of

CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
EDITION = unicodedata.unidata_version


def has(character: str, classes: int) -> bool:
    return bool(classes_of(ord(character)) & classes)


def words_of(text: str) -> list[str]:
    """Runs of word characters with joints, and runs of one other character that is no blank."""
    words: list[str] = []
    at = 0
    while at < len(text):
        begin = at
        if text[at].isspace():
            at += 1
            continue
        if not has(text[at], WORD):
            while at < len(text) and text[at] == text[begin]:
                at += 1
        else:
            while at < len(text) and (has(text[at], WORD) or _is_joint(text, at)):
                at += 1
        words.append(text[begin:at])
    return words


def _is_joint(text: str, at: int) -> bool:
    both = ALPHA if text[at] in "'\u2019" else DIGIT if text[at] in ".," else 0
    return at + 1 < len(text) and has(text[at - 1], both) and has(text[at + 1], both)


def is_symbol(word: str) -> bool:
    return all(has(character, SYMBOL) for character in word)


def gopher(text: str, words: Sequence[str], stop_words: Sequence[str]) -> list[float]:
    real = [word for word in words if not is_symbol(word)]
    lines = text.splitlines()
    bullets = sum(line.lstrip().startswith(("\u2022", "-")) for line in lines)
    ellipses = sum(line.rstrip().endswith(("...", "\u2026")) for line in lines)
    alpha = sum(any(has(character, ALPHA) for character in word) for word in words)
    return [
        len(real),
        share(sum(map(len, real)), len(real)),
        share(text.count("#"), len(words)),
        share(text.count("...") + text.count("\u2026"), len(words)),
        share(bullets, len(lines)),
        share(ellipses, len(lines)),
        share(alpha, len(words)),
        len(set(stop_words) & set(words)),
    ]


def repetition(text: str, words: Sequence[str]) -> list[float]:
    measures: list[float] = []
    for parts in (re.split("\n{2,}", text.strip()), re.split("\n+", text)):
        repeats = repeated(parts)
        measures += [share(len(repeats), len(parts)), share(sum(map(len, repeats)), len(text))]
    for n in (2, 3, 4):
        counts = Counter(" ".join(words[at : at + n]) for at in range(len(words) - n + 1))
        gram, count = max(counts.items(), key=lambda pair: pair[1], default=("", 0))
        measures.append(share(len(gram) * count, len(text)))
    for n in range(5, 11):
        seen, at, characters = set[str](), 0, 0
        while at + n <= len(words):
            gram = "".join(words[at : at + n])
            if gram in seen:
                characters, at = characters + len(gram), at + n
            else:
                seen.add(gram)
                at += 1
        measures.append(share(characters, len(text)))
    return measures


def fineweb(text: str, words: Sequence[str], short_line: int) -> list[float]:
    lines = [line for line in text.split("\n") if line.strip()]
    return [
        len(lines),
        share(sum(has(line[-1], STOP) for line in lines), len(lines)),
        share(sum(len(line) <= short_line for line in lines), len(lines)),
        share(sum(map(len, repeated(lines))), len(text.replace("\n", ""))),
        share(text.count("\n"), len(words)),
    ]


def sentences(line: str) -> int:
    words, count, ended = words_of(line), 0, True
    for word in words:
        stop = len(word) == 1 and has(word, STOP)
        if not count:
            count, ended = 1, stop
        else:
            if ended and not stop and not is_symbol(word):
                count, ended = count + 1, False
            ended = ended or stop
    return count


def c4(text: str, min_sentences: int) -> tuple[str, str]:
    """(the reason, the lines that stay) with C4's other defaults."""
    kept: list[str] = []
    for line in text.splitlines():
        words = line.split()
        line = CITATION.sub("", line.strip()) if all(len(word) <= 1000 for word in words) else ""
        small = line.lower()
        if not line.endswith((".", "?", "!", '"', "'")) or line.endswith("...") or len(words) < 3:
            continue
        if "lorem ipsum" in small:
            return "c4-lorem-ipsum", ""
        if "javascript" in small:
            continue
        if "{" in line:
            return "c4-curly-bracket", ""
        if not any(phrase in small for phrase in POLICY):
            kept.append(line)
    few = sum(map(sentences, kept)) < min_sentences
    return "c4-min-sentences" if few else "", "\n".join(kept).strip()


def third_longest(text: str) -> int:
    lengths = sorted(map(len, text.split("\n")))
    return lengths[-3] if len(lengths) >= 3 else 0


def collapsed(text: str) -> str:
    return re.sub(r"  +|\b\n+ |\b\n+", " ", text)


def doubtful(text: str) -> list[bool]:
    """For each line, whether ftfy might change it."""
    clean = regex.compile(r"[\t\x20-\x25\x27-\x7e]*+")
    return [not clean.fullmatch(line) for line in text.split("\n")]


def repeated(parts: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return [part for part in parts if part in seen or seen.add(part)]  # type: ignore[func-returns-value]


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
