"""TOML and JSON with nesting or numbers that later code could not handle: one kind of error, with a one-line reason."""

from __future__ import annotations

import tomllib
import tracemalloc

import pytest

from mdata.util.config_text import MOST_LEVELS, load_toml, parse_json, parse_toml

LARGEST, SMALLEST = (1 << 63) - 1, -(1 << 63)
TOO_DEEP, TOO_LARGE = f"nested more than {MOST_LEVELS} levels deep", "an integer beyond 64 bits"


def lists(levels: int, inside: str = "") -> str:
    return "[" * levels + inside + "]" * levels


def tables(levels: int, inside: str = "") -> str:
    return '{"a": ' * levels + (inside or "{}") + "}" * levels


@pytest.mark.parametrize("nested", [lists(MOST_LEVELS), tables(MOST_LEVELS - 1), lists(MOST_LEVELS - 1, "1")])
def test_as_many_levels_as_are_allowed_are_read(nested):
    assert parse_json(nested)


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 500, 30_000])
def test_more_levels_are_refused_whether_python_can_read_them_or_not(levels):
    for text in (lists(levels), tables(levels), tables(levels, "1"), '[{"a": ' + lists(levels) + "}]"):
        with pytest.raises(ValueError, match=TOO_DEEP):
            parse_json(text)
    with pytest.raises(ValueError, match=TOO_DEEP):
        parse_toml(f"a = {lists(levels)}")


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_json, text) for text in ("{}", "[{}]", '{{"a": {}}}', lists(MOST_LEVELS - 1, "0, {}"))),
        *((parse_toml, text) for text in ("a = {}", "a = [1, {}]", "[[a]]\nb = {}")),
    ],
    ids=lambda value: str(value)[:16] if isinstance(value, str) else value.__name__,
)
@pytest.mark.parametrize("number", [SMALLEST - 1, LARGEST + 1, 10**30, "9" * 5000], ids=lambda number: str(number)[:9])
def test_numbers_of_more_than_64_bits_are_refused_wherever_they_stand(number, parse, text):
    with pytest.raises(ValueError) as caught:
        parse(text.format(number))
    assert str(caught.value) == TOO_LARGE


def test_what_is_sound_is_what_pythons_parsers_give():
    assert parse_json(f'{{"a": [{SMALLEST}, {LARGEST}, 1e30, true, null, "x"]}}') == {
        "a": [SMALLEST, LARGEST, 1e30, True, None, "x"]
    }
    assert parse_toml(f"a = [{SMALLEST}, {LARGEST}]\nb = 0.10", parse_float=str) == {
        "a": [SMALLEST, LARGEST],
        "b": "0.10",
    }


@pytest.mark.parametrize("given", ['{"a": 1}', b'{"a": 1}'], ids=["text", "bytes"])
def test_a_byte_order_mark_is_no_part_of_the_text(given):
    mark = "\ufeff" if isinstance(given, str) else "\ufeff".encode()
    assert parse_json(mark + given) == {"a": 1}
    assert load_toml("\ufeffa = 1\n") == parse_toml("\ufeffa = 1\n") == {"a": 1}
    with pytest.raises(ValueError, match="line 2"):
        parse_toml("a = 1\n\ufeffb = 2\n")


def test_what_is_neither_keeps_the_parsers_own_words():
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json("[1,")
    with pytest.raises(tomllib.TOMLDecodeError, match="Invalid value"):
        parse_toml("a =")


LONG_KEYS = {
    "a key": "a" + ".a" * 50_000 + " = 1",
    "a table": "[a" + ".a" * 50_000 + "]",
    "a table of an array": "[[ a" + " . a" * 50_000 + " ]]",
    "in quotes": "\"a=\\\"b\"" + ".'c = d'" * 50_000 + " = 1",
    "an inline table": "x = [{a" + ".a" * 50_000 + " = 1}]",
    "as many parts as a level more than there are": "a" + ".a" * MOST_LEVELS + " = 1",
}  # fmt: skip


@pytest.mark.parametrize("name", LONG_KEYS)
def test_keys_of_many_parts_are_refused_before_they_are_read(name):
    """tomllib takes 3 GB for 100 kB of one key."""
    tracemalloc.start()
    try:
        for load in (load_toml, parse_toml):
            with pytest.raises(ValueError, match=f"a key of more than {MOST_LEVELS} parts"):
                load(LONG_KEYS[name])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_keys_of_fewer_parts_are_read():
    key = "a" + ".a" * (MOST_LEVELS - 1)
    assert load_toml(f"{key} = 1\n[b]\n{key} = 2").keys() == {"a", "b"}
    # None of these has a long key, however many dots, quotes and words it has.
    texts = ["x" * 100_000 + " = 1", "x = '" + "a. b, " * 20_000 + "'", "# " + "." * 100_000]
    texts += ['""= "' + "\\\\" * 50_000 + '"', 'x = "' + '\\"' * 50_000 + '"', "x = [" + "0.5, " * 50_000 + "]"]
    for text in texts:
        assert isinstance(load_toml(text), dict)


@pytest.mark.parametrize("text", ["a = " + "[" * 5000 + "]" * 5000, "a = " + "{a = " * 5000 + "1" + "}" * 5000])
def test_nesting_that_tomllib_cannot_read_is_one_kind_of_error(text):
    with pytest.raises(ValueError, match=TOO_DEEP):
        load_toml(text)
