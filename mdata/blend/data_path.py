"""Parses Megatron's --data-path: `0.7 a 0.3 b`, or prefixes alone.

An odd number of words: all are prefixes. An even number: if words 0, 2, 4 ... are all numbers (as Python's float reads
them, or 1/3) they are the weights of the words that follow; if none is, all are prefixes. What differs from Megatron: a
mix of both is always refused (Megatron accepts some as prefixes), even if a weight or its prefix was forgotten and the
number of words is odd, or if every weight follows its prefix. Weights stay the text that was given, so that `shares`
can convert them exactly. Words from Python or JSON may be numbers: a float becomes its shortest text, 0.7.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import has_magic
from numbers import Real
from pathlib import Path

from mdata.errors import UsageError, counted
from mdata.mixing.shares import Share
from mdata.object_storage.address import address_of

_FRACTION = re.compile(r"[0-9]+/[0-9]+")

WordLike = str | float | Real | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendEntry:
    """Corpora with one share.

    Args:
        path: a manifest, prefix, folder, pattern or blend manifest.
        share: of all its corpora together (epochs: of each); None: by tokens.
        name: used in phases and tables. group: a heading, or a group with a share.
        max_epochs: of each corpus, over the whole training.
    """

    path: str
    share: Share | None = None
    name: str | None = None
    group: str | None = None
    max_epochs: str | None = None


def as_words(words: object, name: str = "the blend") -> list[str]:
    """Split into words as a shell would.

    Args:
        words: one string, or a list of texts, numbers and paths.
        name: of the words, for messages.

    Raises:
        UsageError: anything else.
    """
    if isinstance(words, str):
        return words.split()
    if not isinstance(words, Sequence) or isinstance(words, bytes):
        expected = 'a list such as ["0.7", "a", "0.3", "b"]'
        raise UsageError(f"{name} is not a list of words", found=repr(words), expected=expected)
    texts = []
    for number, word in enumerate(words):
        if not isinstance(word, str | Real | os.PathLike) or isinstance(word, bool):
            problem = f"word {number + 1} of {name} is neither a weight nor a corpus"
            raise UsageError(problem, found=repr(word), expected="a number or a text")
        texts.append(str(word))
    return texts


def words_of_path(path: str | Path) -> list[str]:
    """The words of a --data-path in one string; a path that exists is one word, even with blanks."""
    text = str(path)
    return [text] if isinstance(path, Path) or _is_there(text) else text.split() or [text]


def is_many(path: str) -> bool:
    """Whether a path is a folder or a pattern; the name of a corpus, or an address, may have brackets in it, too."""
    # os.path, because Path.is_dir raises for a name that is too long; "" is this folder, as for Path.
    return os.path.isdir(path or ".") or (has_magic(path) and address_of(path) is None and not _is_there(path))  # noqa: PTH112


def _is_there(path: str) -> bool:
    # os.path, because Path.exists raises for a string longer than a file name may be, as with many corpora.
    return any(os.path.exists(path + end) for end in ("", ".json", ".idx"))  # noqa: PTH110


def parse_data_path(words: Sequence[str]) -> tuple[BlendEntry, ...]:
    """Read the words of Megatron's --data-path.

    Args:
        words: as the shell gives them; prefixes are stripped of blanks.

    Raises:
        UsageError: no words, or numbers where prefixes belong.
    """
    if not words:
        raise UsageError("no data is given", expected="a prefix, or pairs of weight and prefix")
    firsts = words[::2]
    numbers = [word for word in firsts if is_weight(word)]
    if not numbers and len(words) % 2 == 0 and all(map(is_weight, words[1::2])):
        raise UsageError(
            "write each weight before its prefix",
            found=" ".join(words[:2]),
            expected="WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes alone",
            fix=f"{words[1]} {words[0]} (or write ./{words[1]} if that is a prefix)",
        )
    if not numbers or (len(words) % 2 and all(map(is_weight, words))):
        return tuple(BlendEntry(path=word.strip()) for word in words)
    if len(words) % 2 or len(numbers) < len(firsts):
        other = next(word for word in (*firsts, *words) if not is_weight(word))
        raise UsageError(
            "weights and prefixes are mixed",
            found=f"{numbers[0]!r} is a number and {other!r} is not"
            + (
                f"; {counted(len(words), 'word does', 'words do')} not make pairs"
                if len(words) % 2
                else ", both where a weight belongs"
            ),
            expected="WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes alone",
            fix=f"give a weight for every prefix (or write ./{numbers[0]} if that is a prefix)",
        )
    pairs = zip(firsts, words[1::2], strict=True)
    return tuple(BlendEntry(path=prefix.strip(), share=Share(_kept(share))) for share, prefix in pairs)


def _kept(share: str) -> str:
    """A weight without what Python accepts but a manifest does not: blanks, a plus, underscores between digits."""
    return share.strip().removeprefix("+").replace("_", "")


def is_weight(word: str) -> bool:
    """Whether a word of --data-path is a number."""
    if _FRACTION.fullmatch(word):
        return True
    try:
        float(word)
    except ValueError:
        return False
    return True
