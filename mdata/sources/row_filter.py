"""Simple filters over the columns of a record: the small language of --where, parsed and evaluated.

It is a subset of SQL with the same meaning: `language = 'en' and (score >= 0.8 or source in ('a', 'b'))`, with `=`,
`!=`, `<>`, `<`, `<=`, `>`, `>=`, `in`, `not in`, `is null`, `is not null`, `and`, `or`, `not` and parentheses. A
comparison with null, or with a missing column, is unknown, and a record is kept only if the filter is true. Unlike in
SQL, a value whose type differs from the literal's is an error. Not supported: arithmetic, functions, patterns.

Twin: SQLite (tests/mdata/sources/test_row_filter.py).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from mdata.errors import UsageError

LookUp = Callable[[str], Any]
Kind = Literal["text", "a number", "a boolean"]
_Value = str | int | float | bool
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = MappingProxyType(
    {
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
    }
)
_SIGNS = ("=", "!=", "<>", *_COMPARE)
_WORDS = ("and", "or", "not", "in", "is", "null", "true", "false")
_TOKEN = re.compile(
    r"""(?P<space>\s+)
    | (?P<text>'(?:[^']|'')*' | "(?:[^"]|"")*")
    | (?P<number>[-+]?(?:[0-9]{1,300}(?:\.[0-9]{0,300})?|\.[0-9]{1,300})(?:[eE][-+]?[0-9]{1,3})?(?![\w.]))
    | (?P<sign><=|>=|!=|<>|[=<>(),])
    | `(?P<quoted>[^`]+)`
    | (?P<name>[^\W\d][\w.-]*)""",
    re.VERBOSE,
)
_DEEPEST = 50


class WrongType(Exception):
    """A value that a filter compares with a literal of another type; the message names the column."""


@dataclass(frozen=True)
class Comparison:
    """A column compared with a literal.

    Attributes:
        sign: "=": one of the values; "!=": none of them (any number of values); or one of `_COMPARE`.
        values: of the same kind. In Python's sets 1 and 1.0 are equal, as in SQL.
    """

    column: str
    sign: str
    values: frozenset[_Value]
    kind: Kind | None

    def of(self, look_up: LookUp) -> bool | None:
        """True, false, or None: unknown."""
        value = _value(look_up, self.column)
        if value is None:
            return None
        if kind_of(value) != self.kind:
            actual_kind = kind_of(value) or "neither text nor a number nor a boolean"
            raise WrongType(f"{self.column!r} is {actual_kind}, and --where compares it with {self.kind}")
        if self.sign in ("=", "!="):
            return (value in self.values) == (self.sign == "=")
        (other,) = self.values
        return _COMPARE[self.sign](value, other)


@dataclass(frozen=True)
class IsNull:
    """A column that is null or missing."""

    column: str

    def of(self, look_up: LookUp) -> bool | None:
        """True or false."""
        return _value(look_up, self.column) is None


@dataclass(frozen=True)
class Not:
    """Negation; unknown stays unknown."""

    inner: Condition

    def of(self, look_up: LookUp) -> bool | None:
        """True, false, or None: unknown."""
        inner = self.inner.of(look_up)
        return None if inner is None else not inner


@dataclass(frozen=True)
class Joined:
    """Conditions joined by `and` or `or`, evaluated from the left until the result is known."""

    parts: tuple[Condition, ...]
    is_or: bool

    def of(self, look_up: LookUp) -> bool | None:
        """True, false, or None: unknown."""
        answer: bool | None = not self.is_or
        for part in self.parts:
            value = part.of(look_up)
            if value is self.is_or:
                return value
            answer = None if value is None else answer
        return answer


Condition = Comparison | IsNull | Not | Joined


@dataclass(frozen=True)
class RowFilter:
    """A filter: its text and its condition.

    Attributes:
        text: as the user wrote it.
        condition: parsed.
        columns: their names, each with the type that it is compared with; None: only with null.
    """

    text: str
    condition: Condition
    columns: tuple[tuple[str, Kind | None], ...]

    def keeps(self, look_up: LookUp) -> bool:
        """Whether a record passes; `look_up` raises LookupError for a column that it does not have.

        Raises:
            WrongType: a value is not of the type that it is compared with.
        """
        return self.condition.of(look_up) is True


def parse_filter(text: str) -> RowFilter:
    """Parse a filter.

    Raises:
        UsageError: names the position (from 1) of the error.
    """
    parser = _Parser(text)
    condition = parser.joined("or")
    if parser.kind != "end":
        parser.refuse("'and', 'or' or the end")
    return RowFilter(text, condition, tuple(parser.kinds.items()))


def kind_of(value: object) -> Kind | None:
    """The type of a value, as named in messages; None: a type that cannot be compared."""
    if isinstance(value, bool):
        return "a boolean"
    return "text" if isinstance(value, str) else "a number" if isinstance(value, int | float) else None


def _merged(parts: list[Condition], sign: str) -> list[Condition]:
    """Merge adjacent comparisons of one column by "=" (joined by `or`) or "!=" (by `and`) into one lookup."""
    merged: list[Condition] = []
    for (column, of_sign), run in groupby(
        parts, key=lambda part: (part.column, part.sign) if isinstance(part, Comparison) else (None, None)
    ):
        same = list(run)
        if column is None or of_sign != sign:
            merged += same
            continue
        comparisons = [part for part in same if isinstance(part, Comparison)]
        values = frozenset(value for part in comparisons for value in part.values)
        merged.append(Comparison(column, sign, values, comparisons[0].kind))
    return merged


def _value(look_up: LookUp, column: str) -> Any:
    try:
        return look_up(column)
    except LookupError:
        return None


class _Parser:
    """Recursive descent over the words of a filter; `word` is the current one."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words = self._split()
        self._depth = 0
        self.kinds: dict[str, Kind | None] = {}
        self._next()

    def _split(self) -> Iterator[tuple[str, str, int]]:
        at = 0
        while at < len(self._text):
            token = _TOKEN.match(self._text, at)
            if token is None:
                self._complain("a word, a number, text in quotes, or a sign", at)
            kind = str(token.lastgroup)
            if kind == "name" and token["name"].lower() in _WORDS:
                yield "word", token["name"].lower(), at
            elif kind != "space":
                yield ("name" if kind == "quoted" else kind), token[kind], at
            at = token.end()
        while True:
            yield "end", "", at

    def _next(self) -> None:
        self.kind, self.word, self.at = next(self._words)

    def _complain(self, expected: str, at: int) -> NoReturn:
        here = f"{self._text[at : at + 20]!r}" if at < len(self._text) else "the end"
        raise UsageError(
            f"--where cannot be understood at character {at + 1}",
            found=f"{here} in {self._text[:200]}",
            expected=expected,
            fix="docs/reference/input.md has the grammar; such as language = 'en' and score >= 0.8",
        )

    def refuse(self, expected: str) -> NoReturn:
        """Raise an error with the position of the current word."""
        self._complain(expected, self.at)

    def _take(self, word: str, kind: str = "word") -> bool:
        if (self.kind, self.word) != (kind, word):
            return False
        self._next()
        return True

    def joined(self, word: Literal["or", "and"]) -> Condition:
        """Conditions joined by this word; `and` binds closer than `or`."""
        self._depth += 1
        if self._depth > 2 * _DEEPEST:
            self.refuse(f"at most {_DEEPEST} levels of parentheses")
        parts = [self._one(word)]
        while self._take(word):
            parts.append(self._one(word))
        parts = _merged(parts, "=" if word == "or" else "!=")
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Joined(tuple(parts), word == "or")

    def _one(self, word: Literal["or", "and"]) -> Condition:
        if word == "or":
            return self.joined("and")
        turned = False
        while self._take("not"):
            turned = not turned
        if self._take("(", "sign"):
            inner = self.joined("or")
            if not self._take(")", "sign"):
                self.refuse("')'")
        else:
            inner = self._comparison()
        return Not(inner) if turned else inner

    def _comparison(self) -> Condition:
        if self.kind != "name":
            self.refuse("the name of a column (`in backquotes` if it is no plain word)")
        column = self.word
        self._next()
        self.kinds.setdefault(column, None)
        if self._take("is"):
            turned = self._take("not")
            if not self._take("null"):
                self.refuse("null")
            return Not(IsNull(column)) if turned else IsNull(column)
        if (turned := self._take("not")) and (self.kind, self.word) != ("word", "in"):
            self.refuse("in")
        if self._take("in"):
            return self._in(column, turned)
        if self.kind != "sign" or self.word not in _SIGNS:
            self.refuse(f"one of {' '.join(_SIGNS)}, or in, not in, is null, is not null")
        sign = self.word
        self._next()
        if self.kind == "word" and self.word in ("true", "false") and sign not in ("=", "!=", "<>"):
            self.refuse("= or != before true and false")
        return Comparison(
            column, "!=" if sign == "<>" else sign, frozenset([self._literal(column)]), self.kinds[column]
        )

    def _in(self, column: str, turned: bool) -> Condition:
        if not self._take("(", "sign"):
            self.refuse("'(' after in")
        values = [self._literal(column)]
        while self._take(",", "sign"):
            values.append(self._literal(column))
        if not self._take(")", "sign"):
            self.refuse("',' or ')'")
        return Comparison(column, "!=" if turned else "=", frozenset(values), self.kinds[column])

    def _literal(self, column: str) -> _Value:
        value: _Value
        if self.kind == "text":
            quote = self.word[0]
            value = self.word[1:-1].replace(quote * 2, quote)
        elif self.kind == "number":
            value = int(self.word) if self.word.lstrip("+-").isdecimal() else float(self.word)
        elif self.kind == "word" and self.word in ("true", "false"):
            value = self.word == "true"
        else:
            self.refuse("text in quotes, a number, true or false")
        kind, earlier_kind = kind_of(value), self.kinds[column]
        if earlier_kind is not None and kind != earlier_kind:
            self.refuse(f"{earlier_kind}, with which {column!r} is compared before")
        self.kinds[column] = kind
        self._next()
        return value
