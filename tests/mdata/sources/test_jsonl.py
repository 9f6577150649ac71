"""Lines of JSON: the fast path equals the twin for any line, and reasons are given."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import BadInputError
from mdata.sources.jsonl import DEEPEST_OUTSIDE_ORJSON
from mdata.sources.parse import parse
from mdata.sources.record_batch import BadRow, Column, ReadSpec
from tests.helpers.examples import examples
from tests.mdata.sources import inputs
from tests.mdata.sources.inputs import batch, find_files, packed, read_records, write
from tests.reference import records as twin

KEYS = ("text", "meta.text", "b")
NAMES = st.sampled_from(["text", "meta", "meta.text", "b", "Text", "", "\ud800", "text\u0000"])
STRINGS = st.text(st.characters(), max_size=6) | st.sampled_from(
    ["\ud83d", "\udc00\ud83d", "\u2028\u0085", "\x01", "\ufeff"]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**30), 1 << 64, float("inf"), float("nan")])
SCALARS = st.none() | st.booleans() | NUMBERS | STRINGS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
TEXT_VALUES = STRINGS | st.lists(STRINGS, max_size=3)
OBJECTS = st.fixed_dictionaries(
    {"text": TEXT_VALUES, "b": TEXT_VALUES, "meta": st.fixed_dictionaries({"text": TEXT_VALUES})},
    optional={"x": VALUES, "meta.text": VALUES},
)
CHUNKS = st.sampled_from(
    [b"{", b"}", b"[", b"]", b",", b":", b'"', b'"text"', b'"text": "a"', b'"b":1', b"\\", b"\\u", b"d800", b"\\udc00",
     b"NaN", b"-Infinity", b"1e999", b"1" * 5000, b"01", b"-", b" ", b"\t", b"\x0c", b"\xc2\xa0", b"\x00", b"\x1f",
     b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\x80", b"\xff", b"true", b"nul", b"//", b"'", b"\x7f"]
)  # fmt: skip


@st.composite
def lines(draw):
    """A line of JSON in one of its spellings, then perhaps damaged; never with a line end inside."""
    text = json.dumps(draw(OBJECTS | VALUES), ensure_ascii=draw(st.booleans()))
    line = text.encode("utf-8", errors=draw(st.sampled_from(["surrogatepass", "replace"])))
    line = line.replace(b'"b"', b'"text"') if draw(st.booleans()) else line
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(line)))
        line = line[:place] + draw(CHUNKS) + line[place + draw(st.integers(0, 3)) :]
    return line.replace(b"\n", b" ").replace(b"\r", b" ")


def by_row(found):
    """A batch as the twin tells it: for each row the values, or the kind of fault."""
    rows = {bad_row.row: bad_row.kind for bad_row in found.bad_rows}
    for number, row in enumerate(range(1, found.rows + 1) if found.kept is None else found.kept):
        values = []
        for column in found.columns:
            if column.ends is None:
                values.append([column.sentences[number]])
            else:
                values.append(column.sentences[column.ends[number - 1] if number else 0 : column.ends[number]])
        assert row not in rows
        rows[row] = values
    return [rows[row] for row in range(1, found.rows + 1)]


def as_lists(record):
    return record if isinstance(record, str) else [v if isinstance(v, list) else [v] for v in record]


@examples(600)
@given(st.lists(lines(), max_size=4), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans())
def test_lines_parse_as_the_twin_says(given_lines, end, last_ends):
    data = end.join(given_lines) + (end if last_ends and given_lines else b"")
    expected = [as_lists(twin.record(line, KEYS)) for line in data.splitlines()]
    found = batch(data, json_keys=KEYS)
    assert found.rows == len(expected)
    assert by_row(found) == expected
    one = batch(data)
    assert by_row(one) == [as_lists(twin.record(line, ("text",))) for line in data.splitlines()]
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("line", "kind", "reason"),
    [
        (b"", "blank", "blank line"),
        (b"  \t", "blank", "blank line"),
        (b"{", "not-json", "not JSON: Expecting property name enclosed in double quotes at column 2 (a record must be"),
        (b'{"text": "a"} {}', "not-json", "not JSON: Extra data at column 15"),
        (b'\xef\xbb\xbf{"text": "a"}', "not-json", "not JSON: Unexpected UTF-8 BOM"),
        (b'{"text": "a\x01"}', "not-json", "not JSON: Invalid control character at column 12"),
        (b'{"text": "\xff"}', "not-utf8", "not UTF-8: byte 0xff at byte 11"),
        (b'\xff\xfe{\0"\0', "not-utf8", "not UTF-8: byte 0xff at byte 1 (this looks like UTF-16)"),
        (b'{"text": "\xed\xa0\x80"}', "not-utf8", "not UTF-8: byte 0xed at byte 11"),
        (b"[1]", "not-object", "not a JSON object but a list"),
        (b'"text"', "not-object", "not a JSON object but a string"),
        (b"12", "not-object", "not a JSON object but a number"),
        (b"1" * 5000, "not-object", "not a JSON object but a number"),
        (b'{"Text": "a", "b": 1}', "no-key", "no key 'text' (keys: 'Text', 'b')"),
        (b"{}", "no-key", "no key 'text' (keys: none)"),
        (b'{"text": null}', "bad-value", "key 'text' holds null, not a string or a list of strings"),
        (b'{"text": true}', "bad-value", "key 'text' holds a boolean"),
        (b'{"text": 1.5}', "bad-value", "key 'text' holds a number"),
        (b'{"text": ' + b"1" * 5000 + b"}", "bad-value", "key 'text' holds a number"),
        (b'{"text": {"a": 1}}', "bad-value", "key 'text' holds an object"),
        (b'{"text": ["a", null]}', "bad-value", "key 'text' holds a list with null"),
        (b'{"text": [["a"]]}', "bad-value", "key 'text' holds a list with a list"),
        (b'{"text": "\\ud800"}', "surrogate", "key 'text' holds a lone surrogate"),
        (b'{"text": ["a", "\\udc00\\ud800"]}', "surrogate", "key 'text' holds a lone surrogate"),
        (b'{"x": ' + b"[" * 20000 + b"]" * 20000 + b', "text": "a"}', "too-deep", "JSON nested deeper than 500 levels"),
        (b'{"text": "' + b"a" * 300 + b'"}', "too-long", "longer than 300 bytes (max_record_bytes)"),
    ],
)  # fmt: skip
def test_each_bad_line_has_its_row_kind_and_reason(tmp_path, line, kind, reason):
    data = b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n'
    spec = ReadSpec(max_record_bytes=300 if kind == "too-long" else 64 << 20, keep_bad_lines=True)
    found = parse("jsonl", data, spec=spec)
    (bad_row,) = found.bad_rows
    assert (bad_row.row, bad_row.kind, bad_row.line) == (2, kind, line)
    assert bad_row.reason.startswith(reason)
    assert (found.rows, found.kept, found.columns) == (3, [1, 3], (Column(["good", "good"], None),))
    (tmp_path / "x.jsonl").write_bytes(data)
    (file,) = find_files([tmp_path / "x.jsonl"])
    seen = []
    with pytest.raises(BadInputError) as caught:
        seen.extend(row for row, _ in read_records(file, ["text"], spec=spec))
    assert str(caught.value).startswith(f"{tmp_path}/x.jsonl:2: {reason}")
    assert len(str(caught.value)) < 400 and len(str(caught.value).splitlines()) <= 4


def test_nesting_is_refused_by_depth_alone():
    """500 levels always pass and 1,025 never; between them Python's own spellings decide."""

    def kinds(depth, value):
        line = b'{"text": "[\\"[", "x": ' + b"[" * (depth - 1) + value + b"]" * (depth - 1) + b"}"
        return [bad_row.kind for bad_row in batch(line).bad_rows]

    assert DEEPEST_OUTSIDE_ORJSON == 500
    assert kinds(500, b"NaN") == kinds(500, b"1") == kinds(1023, b"1") == []
    assert kinds(501, b"NaN") == kinds(1026, b"1") == ["too-deep"]


def test_a_damaged_line_of_many_brackets_and_quotes_is_quick():
    for part in (b"[", b'"', b'\\"', b"[]", b'["a\\",'):
        line = b'{"x": NaN, "y": "' + part * (3_000_000 // len(part))
        assert batch(line).bad_rows[0].kind in ("not-json", "too-deep")


def test_rows_are_the_files_own_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "READ_BYTES", 7)
    rows = [json.dumps({"text": f"line {i}"}) for i in range(40)]
    for compression in ("none", "gzip"):
        file = write(tmp_path, "\r\n".join([*rows[:30], "bad", *rows[30:]]).encode(), compression)
        seen = []
        with pytest.raises(BadInputError, match=r"x\.jsonl(\.gz)?:31: not JSON"):
            seen.extend(row for row, _ in read_records(file, ["text"]))
        assert seen == list(range(1, 31))
        file = write(tmp_path, "\r\n".join(rows).encode(), compression)
        records = list(read_records(file, ["text"]))
        assert [row for row, _ in records] == list(range(1, 41))
        assert [texts for _, texts in records] == [([f"line {i}"],) for i in range(40)]


def test_the_dialect_is_pythons():
    line = b'{"text": "a", "n": NaN, "i": -Infinity, "b": 1e999, "\\ud800": 1, "text": "last \xe2\x80\xa8 \xc2\x85"}'
    assert batch(line).columns == (Column(["last \u2028 \u0085"], None),)


def test_several_keys_and_lists_of_sentences():
    found = batch(b'{"a": ["x", ""], "b": "y", "c": []}\n{"a": "z", "b": "u", "c": ["v"]}', json_keys=("b", "a", "c"))
    assert found.kept is None and found.bad_rows == []
    assert found.columns == (Column(["y", "u"], None), Column(["x", "", "z"], [2, 3]), Column(["v"], [0, 1]))


def test_a_dotted_key_is_looked_up_at_the_top_first():
    lines_ = b'{"meta": {"text": "below"}}\n{"meta.text": "top", "meta": {"text": "below"}}\n{"meta": "no object"}'
    found = batch(lines_, json_keys=("meta.text",))
    assert found.columns == (Column(["below", "top"], None),)
    assert [(bad_row.row, bad_row.kind) for bad_row in found.bad_rows] == [(3, "no-key")]


def test_an_excerpt_shows_the_line_and_bytes_are_kept_only_where_asked_for():
    (bad_row,) = batch(b'{"text": ""}\n' + b"z" * 1000).bad_rows
    assert (bad_row.row, bad_row.excerpt, bad_row.line) == (2, repr("z" * 80), None)


def test_texts_of_all_files_and_keys(tmp_path):
    files = [
        write(tmp_path, b'{"a": ["x", "y"], "b": "z"}\n{"a": "u", "b": []}\n', "zstd"),
        write(tmp_path, b'{"a": "v", "b": "w"}', name="y.jsonl"),
    ]
    found = [texts for file in files for _, columns in read_records(file, ("b", "a")) for texts in columns]
    assert found == [["z"], ["x", "y"], [], ["u"], ["w"], ["v"]]
    with pytest.raises(BadInputError, match=r"y\.jsonl:1: no key 'c'"):
        list(read_records(files[1], ("c",)))


@given(st.binary(max_size=40) | st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"\xff"])).map(b"".join))
def test_plain_text_is_taken_as_it_stands(data):
    found = batch(data, format="text")
    try:
        assert found.columns == (Column([data.decode()], None),) and found.bad_rows == []
    except UnicodeDecodeError:
        assert [(bad_row.row, bad_row.kind) for bad_row in found.bad_rows] == [(1, "not-utf8")]
        assert (found.rows, found.kept, found.columns) == (1, [], (Column([], None),))


def test_paragraphs_end_at_empty_lines():
    found = batch(b"one\n two \r\n\r\n\xff\n\n \nthree\n", format="text", text_documents="paragraph")
    assert found.columns == (Column(["one\n two ", " \nthree"], None),)
    assert (found.rows, found.kept, found.bad_rows[0].kind) == (3, [1, 3], "not-utf8")


def test_packed_helper_makes_two_members():
    assert packed(b"ab", "gzip", 1).count(b"\x1f\x8b") == 2


@pytest.mark.parametrize("kind", ["no-key", "not-json"])
def test_the_error_of_a_row_without_the_key_names_the_option(kind):
    error = str(BadRow(3, kind, "why", "{}").as_error("x.jsonl", key_option="--key"))
    assert error.startswith("x.jsonl:3: why\n") and ("another key (--key); or " in error) is (kind == "no-key")


@pytest.mark.parametrize(
    ("name", "data", "fix"),
    [
        (
            "x.jsonl",
            b'\xef\xbb\xbf{"text": "a"}\n',
            "sed -i '1s/^\\xEF\\xBB\\xBF//' FILE removes the byte order mark",
        ),
        ("x.json", b'[{"text": "a"}, {"text": "b"}]\n', "jq -c '.[]' FILE > NEW.jsonl turns a JSON array into lines"),
        ("x.json", b'[\n{"text": "a"}\n]\n', "jq -c '.[]' FILE > NEW.jsonl turns a JSON array into lines"),
        ("x.jsonl", b'{"text": "' + b"a" * 100 + b'"}\n', "a larger --max-record-bytes, such as 1G"),
        ("x.jsonl", b'{"body": "a"}\n', "another key (--json-keys); or "),
        ("x.jsonl", b"{'text': 1}\n", "try: correct or remove this record"),
    ],
)
def test_the_fix_is_the_real_one(tmp_path, name, data, fix):
    (tmp_path / name).write_bytes(data)
    (file,) = find_files([tmp_path / name])
    with pytest.raises(BadInputError) as caught:
        list(read_records(file, ["text"], spec=ReadSpec(max_record_bytes=90)))
    assert fix in str(caught.value)
