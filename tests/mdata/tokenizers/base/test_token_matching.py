"""One pattern for many tokens gives the same matches as trying each, and its work does not grow with their number."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mdata.tokenizers.base.token_matching import first_listed, pattern_of_any, prefix_of_another

TOKENS = st.lists(st.text("ab]-^\\.\n\u4e2d\U0001f600", min_size=1, max_size=6), max_size=30)
TEXTS = st.text("ab]-^\\.\n\u4e2d\U0001f600", max_size=60)


@given(TOKENS, TEXTS)
@example(["a" * n for n in range(1, 600)], "a" * 700)
@example([chr(0x4E00 + n) * (1 + n % 3) for n in range(60)], "".join(chr(0x4E00 + n) * 2 for n in range(70)))
def test_the_earliest_and_there_the_longest(tokens, text):
    plain = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
    assert [m.span() for m in pattern_of_any(tokens).finditer(text)] == [m.span() for m in plain.finditer(text)]


@given(TOKENS, TEXTS)
def test_the_one_that_is_listed_first(tokens, text):
    plain = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
    assert [m[0] for m in pattern_of_any(first_listed(tokens)).finditer(text)] == [m[0] for m in plain.finditer(text)]


@given(TOKENS)
def test_beginnings(tokens):
    known = set(tokens)
    expected = any(a != b and b.startswith(a) for a in known for b in known)
    assert (prefix_of_another(tokens) is not None) == expected


def steps_of(pattern: str) -> int:
    """The most branches that stand beside each other anywhere in a pattern, which is what one character may cost."""
    depth, most, branches = 0, 1, [1]
    for part in re.findall(r"\\.|\[[^\]]*\]|[()|]|[^\\()|\[]+", pattern, re.DOTALL):
        if part == "(":
            branches.append(1)
        elif part == ")":
            most = max(most, branches.pop())
        elif part == "|":
            branches[-1] += 1
        depth = max(depth, len(branches))
    return max(most, *branches) * depth


@pytest.mark.parametrize("name", ["<tok_{}>", "{}", "\u4e00{}"])
def test_a_character_costs_the_same_for_any_number_of_tokens(name):
    small, large = (
        steps_of(pattern_of_any([name.format(chr(0x3400 + n) if name == "{}" else n) for n in range(count)]).pattern)
        for count in (1000, 16_000)
    )
    assert large <= 2 * small < 400
    assert steps_of("|".join(name.format(n) for n in range(1000))) >= 1000  # the measure can fail
