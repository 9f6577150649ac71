"""Files, units and records: what Python's text files and json.loads do is the reference."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import BadInputError, MdataError, UsageError
from mdata.sources import RowError, blocks, find_files, parse_block, plan_units, read_records

LINE_PIECES = st.lists(st.sampled_from([b"a", b"\xc3\xa9", b"\n", b"\r", b"\r\n", b"\x0c", b"\xe2\x80\xa8"]))


def lines_of(file, unit_bytes):
    return [
        line
        for unit in plan_units([file], unit_bytes)
        for block in blocks(unit, unit_bytes)
        for line in block.data.splitlines()
    ]


@given(pieces=LINE_PIECES, unit_bytes=st.integers(1, 12))
def test_units_give_the_lines_of_a_python_text_file(tmp_path_factory, pieces, unit_bytes):
    data = b"".join(pieces)
    expected = [line.rstrip("\n") for line in io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")]
    folder = tmp_path_factory.mktemp("units")
    (folder / "plain.jsonl").write_bytes(data)
    half = len(data) // 2
    packed = gzip.compress(data[:half]) + gzip.compress(b"") + gzip.compress(data[half:])
    (folder / "packed.jsonl.gz").write_bytes(packed)
    for name in ("plain.jsonl", "packed.jsonl.gz"):
        (file,) = find_files([folder / name])
        assert [line.decode() for line in lines_of(file, unit_bytes)] == expected


@given(st.integers(0, 3000), st.integers(1, 700))
def test_plan_covers_each_byte_once(tmp_path_factory, size, unit_bytes):
    path = tmp_path_factory.mktemp("plan") / "x.jsonl"
    path.write_bytes(b"x" * size)
    units = plan_units(find_files([path]), unit_bytes)
    assert [unit.start for unit in units] == [0, *(unit.stop for unit in units)][: len(units)]
    assert all(0 < unit.stop - unit.start <= unit_bytes for unit in units)
    assert (units[-1].stop if units else 0) == size


def test_order_is_sorted_and_endings_are_known(tmp_path):
    for name in ["b.jsonl", "a.json", "sub/c.jsonl.gz", "note.txt", ".d.jsonl.partial"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")

    def names(*inputs):
        return [str(file.path.relative_to(tmp_path)) for file in find_files(inputs)]

    assert names(tmp_path) == ["a.json", "b.jsonl", "sub/c.jsonl.gz"]
    assert names(tmp_path / "b.jsonl", str(tmp_path / "*.json")) == ["b.jsonl", "a.json"]
    assert names(str(tmp_path / "**" / "*.gz")) == ["sub/c.jsonl.gz"]
    assert names(tmp_path / "note.txt") == ["note.txt"]


def test_a_file_whose_name_holds_a_star_is_itself(tmp_path):
    (tmp_path / "a*.jsonl").write_text("{}\n")
    (tmp_path / "ab.jsonl").write_text("{}\n")
    assert [f.path.name for f in find_files([tmp_path / "a*.jsonl"])] == ["a*.jsonl"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none.jsonl", "none.jsonl: No such file or directory"),
        ("*.parquet", "no file fits this pattern"),
        ("empty", "no input in this folder"),
        ("pipe", "is not a regular file"),
        ("x.zst", "holds zstd data, which this version does not read"),
        ("twice", "is named twice"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, text):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x.zst").write_bytes(b"\x28\xb5\x2f\xfd....")
    (tmp_path / "twice").write_text("{}\n")
    inputs = [tmp_path / name] * (2 if name == "twice" else 1)
    with pytest.raises(UsageError, match=text):
        find_files(inputs)


def test_no_input_is_usage():
    with pytest.raises(UsageError, match="no input is named"):
        find_files([])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "blank line"),
        (b"  \t", "blank line"),
        (b"{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b'{"text": "a"} {}', "not JSON: Extra data at column 15"),
        (b'\xef\xbb\xbf{"text": "a"}', "not JSON: Unexpected UTF-8 BOM"),
        (b'{"text": "a\x01"}', "not JSON: Invalid control character at at column 12"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at byte 11"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8: byte 0xed at byte 11"),
        (b"[1]", "not a JSON object but a list"),
        (b"12", "not a JSON object but a number"),
        (b'{"Text": "a", "b": 1}', "no key 'text' (keys: 'Text', 'b')"),
        (b"{}", "no key 'text' (keys: none)"),
        (b'{"text": null}', "key 'text' holds null, not a string or a list of strings"),
        (b'{"text": true}', "key 'text' holds a boolean"),
        (b'{"text": 1.5}', "key 'text' holds a number"),
        (b'{"text": {"a": 1}}', "key 'text' holds an object"),
        (b'{"text": ["a", null]}', "key 'text' holds a list with null"),
        (b'{"text": [["a"]]}', "key 'text' holds a list with a list"),
        (b'{"text": "\\ud800"}', "key 'text' holds a lone surrogate"),
        (b'{"text": "\\udc00\\ud800"}', "key 'text' holds a lone surrogate"),
        (b'{"x": ' + b"[" * 20000 + b"]" * 20000 + b', "text": "a"}', "JSON that cannot be read"),
        (b'{"x": ' + b"1" * 5000 + b', "text": "a"}', "JSON that cannot be read"),
    ],
)
def test_each_bad_line_has_its_row_and_reason(tmp_path, line, reason):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    (file,) = find_files([tmp_path / "x.jsonl"])
    with pytest.raises(BadInputError) as caught:
        list(read_records(file, ["text"]))
    assert str(caught.value).startswith(f"{tmp_path}/x.jsonl:2: {reason}")
    assert len(str(caught.value)) < 400


def test_rows_are_the_files_own_across_reads(tmp_path, monkeypatch):
    monkeypatch.setattr("mdata.sources.records._READ_BYTES", 7)
    rows = [json.dumps({"text": f"line {i}"}) for i in range(40)]
    (tmp_path / "x.jsonl").write_text("\r\n".join([*rows[:30], "bad", *rows[30:]]))
    (file,) = find_files([tmp_path / "x.jsonl"])
    seen = []
    with pytest.raises(BadInputError, match=r"x\.jsonl:31: not JSON"):
        seen.extend(record.row for record in iter(read_records(file, ["text"])))
    (tmp_path / "y.jsonl").write_text("\r\n".join(rows))
    (file,) = find_files([tmp_path / "y.jsonl"])
    records = list(read_records(file, ["text"]))
    assert [record.row for record in records] == list(range(1, 41))
    assert [record.texts for record in records] == [([f"line {i}"],) for i in range(40)]


def test_the_dialect_is_pythons():
    line = b'{"text": "a", "n": NaN, "i": -Infinity, "b": 1e999, "text": "last \xe2\x80\xa8 \xc2\x85"}'
    (record,) = parse_block(line, ["text"])
    assert record.texts == (["last \u2028 \u0085"],)


def test_several_keys_and_lists_of_sentences():
    (record,) = parse_block(b'{"a": ["x", ""], "b": "y", "c": []}', ["b", "a", "c"])
    assert record.texts == (["y"], ["x", ""], [])


def test_an_excerpt_shows_the_line():
    with pytest.raises(RowError) as caught:
        list(parse_block(b"{}\n" + b"z" * 1000, []))
    problem = caught.value.problem
    assert (problem.row, problem.excerpt) == (2, repr("z" * 80))


@pytest.mark.parametrize("damage", ["cut", "flipped", "tail"])
def test_damaged_gzip_is_bad_input(tmp_path, damage):
    data = gzip.compress(b'{"text": "a"}\n' * 500)
    data = {"cut": data[:-12], "flipped": data[:-6] + b"\0" + data[-5:], "tail": data + b"garbage"}[damage]
    (tmp_path / "x.gz").write_bytes(data)
    (file,) = find_files([tmp_path / "x.gz"])
    with pytest.raises(BadInputError, match=r"x\.gz: the gzip data is damaged after \d+ bytes of text"):
        list(read_records(file, ["text"]))


def test_a_file_that_changes_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    (file,) = find_files([tmp_path / "x.jsonl"])
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' * 2)
    with pytest.raises(MdataError, match="was changed while it was read"):
        list(read_records(file, ["text"]))


def test_a_folder_inside_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    for name in ("open", "shut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text('{"text": "x"}\n')
    real = os.scandir

    def scandir(folder):
        if str(folder).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UsageError, match="shut: Permission denied"):
        find_files([tmp_path])
