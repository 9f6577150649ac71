"""--where: SQLite is the twin, for the language is a subset of SQL; and every mistake is named with its position."""

from __future__ import annotations

import pickle
import sqlite3

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import UsageError
from mdata.sources.row_filter import WrongType, parse_filter
from tests.helpers.examples import examples
from tests.mdata.sources.inputs import batch

TEXTS = st.text("ab'\"\u00e9\U0001f600 %", max_size=3)
NUMBERS = st.integers(-(2**62), 2**62) | st.floats(-3, 3) | st.integers(-2, 2)
COLUMNS = {"t": TEXTS, "u-x": TEXTS, "n": NUMBERS, "m.k": NUMBERS}
ROWS = st.lists(st.fixed_dictionaries({name: values | st.none() for name, values in COLUMNS.items()}), max_size=6)


def literal(value):
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def named(name):
    return f"`{name}`" if not name.isidentifier() else name


@st.composite
def comparisons(draw):
    name = draw(st.sampled_from(list(COLUMNS)))
    values = COLUMNS[name].map(literal)
    kind = draw(st.sampled_from(["sign", "in", "null"]))
    turned = draw(st.booleans()) * "not "
    if kind == "null":
        return f"{named(name)} is {turned}null"
    if kind == "in":
        return f"{named(name)} {turned}in ({', '.join(draw(st.lists(values, min_size=1, max_size=3)))})"
    return f"{named(name)} {draw(st.sampled_from(['=', '!=', '<>', '<', '<=', '>', '>=']))} {draw(values)}"


def joined(inner):
    several = st.lists(inner, min_size=2, max_size=3)
    return (
        several.map(" and ".join) | several.map(" or ".join)
        | inner.map("not ({})".format) | inner.map("({})".format)
    )  # fmt: skip


FILTERS = st.recursive(comparisons(), joined, max_leaves=6)


@examples(300)
@given(text=FILTERS, rows=ROWS)
def test_rows_are_kept_as_sqlite_keeps_them(text, rows):
    database = sqlite3.connect(":memory:")
    database.execute(f"create table rows ({', '.join(map(named, COLUMNS))})")
    database.executemany("insert into rows values (?, ?, ?, ?)", [[row[name] for name in COLUMNS] for row in rows])
    kept = [number for (number,) in database.execute(f"select rowid from rows where {text} order by rowid")]
    database.close()
    where = pickle.loads(pickle.dumps(parse_filter(text)))
    assert [number for number, row in enumerate(rows, 1) if where.keeps(row.__getitem__)] == kept
    # Null and a column that a record does not have are the same.
    short = [{name: value for name, value in row.items() if value is not None} for row in rows]
    assert [number for number, row in enumerate(short, 1) if where.keeps(row.__getitem__)] == kept


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [("", 1, "the name of a column"), ("a =", 4, "text in quotes, a number, true or false"),
     ("a = 1 and", 10, "the name of a column"), ("(a = 1", 7, "')'"), ("a = 1)", 6, "'and', 'or' or the end"),
     ("a ~ 1", 3, "a word, a number, text in quotes, or a sign"), ("a = 'x", 5, "a word"),
     ("a 1", 3, "one of = != <> < <= > >="), ("a in 1", 6, "'(' after in"), ("a in (1 2)", 9, "',' or ')'"),
     ("a not = 1", 7, "in"), ("a is 1", 6, "null"), ("a < true", 5, "= or != before true and false"),
     ("a = 1 or a = 'x'", 14, "a number, with which 'a' is compared before"), ("null = 1", 1, "the name of a column"),
     ("a = 1.2.3", 5, "a word"), ("(" * 200 + "a = 1", 51, "at most 50 levels")],
)  # fmt: skip
def test_a_mistake_is_named_with_its_position(text, position, expected):
    with pytest.raises(UsageError) as caught:
        parse_filter(text)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"--where cannot be understood at character {position}" and len(lines) == 4
    assert f"expected: {expected}" in lines[2]


def where(text, lines):
    found = batch(b"\n".join(lines), where=parse_filter(text))
    rows = list(range(1, found.rows + 1)) if found.kept is None else found.kept
    return rows, [(bad.row, bad.kind) for bad in found.bad_rows]


def test_a_value_of_another_type_is_a_bad_row_and_what_is_filtered_out_is_none():
    lines = [
        b'{"text": "a", "n": 1}',
        b'{"text": "b", "n": "1"}',
        b'{"n": 0}',
        b'{"n": 2}',
        b'{"text": "c", "n": true}',
    ]
    lines += [b'{"text": "d", "n": [1]}', b'{"text": "e", "n": NaN}', b'{"text": "f"}', b"no"]
    found = [(2, "bad-value"), (4, "no-key"), (5, "bad-value"), (6, "bad-value"), (9, "not-json")]
    assert where("n >= 1", lines) == ([1], found)
    # From the left until the answer is known: what stands behind is not looked at.
    assert where("text = 'a' and n >= 1", lines) == ([1], [(9, "not-json")])
    assert where("n is not null", lines[:2]) == ([1, 2], [])


@pytest.mark.parametrize(
    "text",
    [
        f"n in ({', '.join(map(str, range(2000)))})",
        f"n not in ({', '.join(map(str, range(2000)))})",
        " or ".join(f"n = {number}" for number in range(2000)),
        " and ".join(f"n <> {number}.0" for number in range(2000)),
    ],
    ids=["in", "not in", "or", "and"],
)
def test_a_value_is_looked_up_in_a_long_list_without_going_through_it(text):
    class Counted(int):
        compared = 0
        __hash__ = int.__hash__

        def __eq__(self, other):
            type(self).compared += 1
            return int(self) == other

        def __ne__(self, other):
            return not self == other

    where = parse_filter(text)
    turned = " and " in text or "not" in text
    assert where.keeps({"n": Counted(1999)}.__getitem__) is not turned
    assert where.keeps({"n": Counted(2000)}.__getitem__) is turned
    assert Counted.compared < 20
    assert not where.keeps({"n": None}.__getitem__)
    with pytest.raises(WrongType):
        where.keeps({"n": True}.__getitem__)


def test_long_lists_hold_values_as_sql_compares_them():
    number = parse_filter("n in (1, 2.0, 9007199254740993, -0.0)")
    for value, kept in ((1.0, True), (2, True), (0, True), (9007199254740992.0, False), (float("nan"), False)):
        assert number.keeps({"n": value}.__getitem__) is kept, value
        assert parse_filter(f"not ({number.text})").keeps({"n": value}.__getitem__) is not kept
    # Not merged over another condition, which may refuse the row before.
    mixed = parse_filter("n = 1 or t = 'a' or n = 2")
    with pytest.raises(WrongType, match="'t' is a number"):
        mixed.keeps({"n": 2, "t": 5}.__getitem__)
    assert mixed.keeps({"n": 2, "t": None}.__getitem__)


@pytest.mark.parametrize("number", [2**63 - 1, 2**64 - 1, -(2**63), 2**70, 10**40, 9007199254740993])
def test_a_number_is_the_same_whichever_library_reads_the_line(number):
    """orjson refuses NaN, so the standard library reads the second line."""
    fast, slow = f'{{"text": "a", "n": {number}}}', f'{{"text": "a", "n": {number}, "x": NaN}}'
    value = orjson.loads(fast)["n"]
    for text in (f"n = {number}", f"n < {number}", f"n >= {value!r}"):
        rows, bad = where(text, [fast.encode(), slow.encode()])
        assert rows in ([], [1, 2]) and not bad


def test_words_of_the_language_in_any_case_and_columns_in_backquotes():
    assert where("`and` = 1 AND NOT x In (2, 3)", [b'{"text": "a", "and": 1, "x": 1}']) == ([1], [])
    assert where('meta.lang = "it\'s"', [b'{"text": "a", "meta": {"lang": "it\'s"}}']) == ([1], [])
    assert where("x = 'it''s'", [b'{"text": "a", "x": "it\'s"}', b'{"text": "a", "x": "its"}']) == ([1], [])
