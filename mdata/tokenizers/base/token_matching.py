"""Builds one pattern for many tokens, so that searching for any of thousands costs about as much as for one.

Python tries the branches of `a|b|c` one after another at every character, so thousands of tokens would cost thousands
of steps there. `pattern_of_any` writes the tokens as a tree of their prefixes instead; nodes with many branches are
halved by ranges of characters. At each position the longest token matches. Tokens that need more levels than Python's
regex compiler allows are written as plain branches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise, takewhile

# Python's regex compiler recurses for every level.
_MOST_LEVELS = 40
_FEW = 4


def pattern_of_any(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the earliest of these tokens, and the longest at a position; without tokens, nothing."""
    listed = sorted(set(tokens) - {""})
    return re.compile(_tree(listed, 0) if listed else r"(?!)")


def first_listed(tokens: Iterable[str]) -> list[str]:
    """The tokens without those that can never match because an earlier one in the list is a prefix of them."""
    order = {token: number for number, token in reversed(list(enumerate(tokens)))}
    matchable = []
    # In this order the prefixes of a token come right before it, each a prefix of the next.
    inside: list[str] = []
    for token in sorted(order):
        while inside and not token.startswith(inside[-1]):
            inside.pop()
        if not inside or order[token] < order[inside[-1]]:
            matchable.append(token)
            inside.append(token)
    return sorted(matchable, key=order.__getitem__)


def prefix_of_another(tokens: Iterable[str]) -> str | None:
    """A token that is a prefix of another, if there is one."""
    return next((a for a, b in pairwise(sorted(set(tokens))) if b.startswith(a)), None)


def _tree(tokens: Sequence[str], level: int) -> str:
    """A pattern for tokens in sorted order; the empty token may be among them and is tried last."""
    if level >= _MOST_LEVELS:
        return "|".join(map(re.escape, reversed(tokens)))
    if not tokens[0]:
        return f"(?:{_tree(tokens[1:], level)})?" if len(tokens) > 1 else ""
    # Common to all, because they are sorted.
    shared = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens[0], tokens[-1], strict=False)))
    if shared:
        return re.escape(shared) + _grouped(_tree([token[len(shared) :] for token in tokens], level + 1))
    groups = [list(group) for _, group in groupby(tokens, key=lambda token: token[0])]
    return _halved(groups, level)


def _halved(groups: Sequence[Sequence[str]], level: int) -> str:
    """A pattern for groups of tokens with different first characters, in order."""
    if len(groups) <= _FEW:
        return "|".join(_tree(group, level) for group in groups)
    half = len(groups) // 2
    ends = re.escape(groups[0][0][0]), re.escape(groups[half - 1][0][0])
    parts = (_halved(groups[:half], level + 1), _halved(groups[half:], level + 1))
    return f"(?=[{ends[0]}-{ends[1]}])(?:{parts[0]})|{parts[1]}"


def _grouped(pattern: str) -> str:
    return f"(?:{pattern})" if pattern else ""
