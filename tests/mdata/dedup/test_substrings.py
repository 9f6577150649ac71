"""Substrings that repeat: the suffix array, the ranges by brute force, and the rows that are written."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cli.mdata import main
from mdata import UsageError, _core
from mdata.dedup import substrings
from mdata.dedup.dedup import dedup, run_stage
from mdata.dedup.plan import DedupOptions
from tests.helpers.examples import examples

REPEAT = "a sentence that stands in many pages of the web"


@examples(300)
@given(st.binary(max_size=60) | st.text("ab", max_size=80).map(str.encode))
def test_suffixes_are_sorted(text):
    assert _core.suffix_array(text).tolist() == sorted(range(len(text)), key=lambda place: text[place:])


@examples(200)
@given(st.lists(st.text("ab", max_size=20).map(str.encode), max_size=6), st.integers(1, 6))
def test_ranges_are_those_of_all_pairs(documents, length):
    text, ends = b"".join(documents), np.cumsum([0, *map(len, documents)])
    seen, inside = dict[bytes, int](), set[int]()
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        for place in range(begin, end - length + 1):
            window = text[place : place + length]
            first = seen.setdefault(window, place)
            inside |= set(range(max(place, first + length), place + length)) if first < place else set()
    found = _core.repeated_ranges(text, ends[1:], length).tolist()
    assert {place for begin, end in found for place in range(begin, end)} == inside
    assert all(one[1] < other[0] for one, other in pairwise(found))


def test_hostile_arguments_are_refused():
    for ends, length in (([5], 1), ([2, 1], 1), ([-1], 1), ([3], 0)):
        with pytest.raises(ValueError, match=r"."):
            _core.repeated_ranges(b"abc", np.array(ends), length)
    assert _core.repeated_ranges(b"", np.array([], np.int64), 3).tolist() == []
    for length in (4, 2**31, 2**63 - 1, 2**63 + 5, 2**64 - 1):
        assert _core.repeated_ranges(b"aaa", np.array([3]), length).tolist() == []


def _written(folder: Path) -> list[dict[str, str]]:
    (path,) = (folder / "text").glob("*.zst")
    data = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read()
    return [json.loads(line) for line in data.splitlines()]


def test_later_copies_are_cut_out_and_the_rest_stays(tmp_path, capsys):
    rows = [
        {"id": 1, "text": f"One: {REPEAT}."},
        {"id": 2, "text": f"{REPEAT} is here; {REPEAT}, too"},
        {"id": 3, "text": REPEAT},
        {"id": 4, "text": "\u4e2d\u6587" * 10},
        {"id": 5, "text": "x" + "\u4e2d\u6587" * 10 + "\u4e2d"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{bad\n")
    words = ["dedup", "--input", str(path), "--output", str(tmp_path / "out"), "--substring", "20"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "substring 1/1 is done" in printed.out and "bytes of text repeat earlier ones" in printed.err
    made = _written(tmp_path / "out")
    assert [row["id"] for row in made] == [1, 2, 4, 5]  # nothing is left of the third; the last is bad
    assert made[0] == rows[0] and made[1]["text"].replace(" ", "") == "ishere;,too"
    # A text that repeats itself every six bytes: the first 20, up to a whole character, stay.
    assert made[2]["text"] == "\u4e2d\u6587" * 3 + "\u4e2d" and made[3]["text"] == "x"


def test_other_fields_of_a_row_that_is_cut_keep_their_exact_values(tmp_path):
    """orjson, with which they were written, rounds the first two and refuses the others, as a bug of mdata."""
    fields = '"id": 123456789012345678901234567890, "n": 18446744073709551617, "x": 1e400, "y": NaN, "s": "\\ud800"'
    lines = [f'{{"text": "{REPEAT}."}}', f'{{"text": "here: {REPEAT}!", {fields}}}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    run_stage(DedupOptions(input=tmp_path / "a.jsonl", output=tmp_path / "out", substring=20), "substring")
    _, cut = _written(tmp_path / "out")
    assert repr(cut) == repr(json.loads(f'{{"text": "here: !", {fields}}}'))


def test_a_result_of_other_options_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo and three\n\n")
    options = DedupOptions(input=path, output=tmp_path / "out", substring=20)
    assert run_stage(options, "substring") is None and run_stage(options, "substring") is None
    for other in (replace(options, substring=30), replace(options, substring=0)):
        with pytest.raises(UsageError, match=r"holds the text of another mdata dedup --substring"):
            run_stage(other, other.stages[0])
    made = replace(options, substring=0, output=tmp_path / "groups")
    dedup(made)
    with pytest.raises(UsageError, match="different substring"):
        run_stage(replace(made, substring=20), "substring")


def test_text_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo and three\n\n")
    monkeypatch.setattr(substrings, "MOST_BYTES", 10)
    with pytest.raises(UsageError, match="part 1 of 1 has too much text for --substring"):
        run_stage(DedupOptions(input=path, output=tmp_path / "out", substring=20), "substring")
    with pytest.raises(UsageError, match="substring is 3"):
        DedupOptions(input=path, output=tmp_path / "out", substring=3)
