"""CSV and TSV: the rows of Python's csv module however the file is packed and divided, filters, and bad rows."""

from __future__ import annotations

import csv
import io
import random

import pytest

from mdata.errors import UsageError
from mdata.sources.chunk import chunks
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec
from mdata.sources.row_filter import parse_filter
from mdata.sources.text_template import parse_template
from tests.mdata.sources.inputs import find_files, packed

PIECES = ["a", "b c", ",", "\t", '"', '""', "\n", "\r\n", "", "\u00e9", "\u2028"]


def read(path, *, chunk_bytes=1 << 20, **options):
    """(rows, texts of each key, bad rows as (row, kind)) of a file."""
    spec = ReadSpec(**options)
    (file,) = find_files([path])
    rows, texts, bad = 0, [[] for _ in spec.json_keys], []
    for chunk in chunks([file], chunk_bytes, spec=spec):
        batch = parse(file.format, chunk.data, spec=spec)
        for found, column in zip(texts, batch.columns, strict=True):
            found += column.sentences
        bad += [(rows + row.row, row.kind) for row in batch.bad_rows]
        rows += batch.rows
    return rows, texts, bad


def drawn(draw, count):
    return [["".join(draw.choices(PIECES, k=draw.randrange(6))) for _ in range(3)] for _ in range(count)]


@pytest.mark.parametrize(
    ("ending", "delimiter", "line_end"), [("csv", ",", "\r\n"), ("csv", ",", "\n"), ("tsv", "\t", "\n")]
)
def test_rows_are_those_of_the_csv_module(ending, delimiter, line_end, tmp_path):
    draw = random.Random(3)
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        rows = drawn(draw, 400)
        text = io.StringIO()
        csv.writer(text, delimiter=delimiter, lineterminator=line_end, quoting=quoting).writerows(
            [["a", "b", "c"], *rows]
        )
        for compression, name in (("none", ""), ("gzip", ".gz")):
            data = packed(text.getvalue().encode(), compression, cut=1000)
            (tmp_path / f"x.{ending}{name}").write_bytes(data)
            for chunk_bytes in (1, 1000, 1 << 20):
                found = read(tmp_path / f"x.{ending}{name}", chunk_bytes=chunk_bytes, json_keys=("a", "c"))
                assert found == (400, [[row[0] for row in rows], [row[2] for row in rows]], [])


def test_rows_longer_than_what_is_read_at_once(tmp_path):
    text = "x" * 70_000 + "\n" + "y" * 70_000
    (tmp_path / "x.csv").write_text(f'text\nshort\n"{text}"\nlast')
    assert read(tmp_path / "x.csv") == (3, [["short", text, "last"]], [])
    (tmp_path / "y.csv").write_text(f'text\nshort\n"{text}"\n{"z" * 50_000}\nlast\n')
    # The line in which a row becomes too long ends it.
    found = read(tmp_path / "y.csv", max_record_bytes=60_000)
    assert found == (5, [["short", "z" * 50_000, "last"]], [(2, "too-long"), (3, "too-long")])


@pytest.mark.parametrize(
    ("data", "texts", "bad"),
    [
        (b"", [], []),
        (b"text,n", [], []),
        (b"\xef\xbb\xbftext,n\r\na,1", ["a"], []),
        (b'text,n\na"b,1\n"c""d",2\n', ['a"b', 'c"d'], []),
        (b"text,n\na\nb,1\nc,1,2\n", ["b"], [(1, "not-csv"), (3, "not-csv")]),
        (b"text,n\n\na,1\n", ["a"], [(1, "blank")]),
        (b"text,n\n\n , \n", [" "], [(1, "blank")]),
        (b'text,n\na,1\n"b,2\nc,3\n', ["a"], [(2, "not-csv")]),
        (b'text,n\n"a"b,1\n"c" ,2\nd,3\n', ["d"], [(1, "not-csv"), (2, "not-csv")]),
        (b"text,n\na\rb,1\nc,2\n", ["c"], [(1, "not-csv")]),
        (b"text,n\n\xff,1\nc,2\n", ["c"], [(1, "not-utf8")]),
    ],
)
def test_bad_rows_spoil_no_others(data, texts, bad, tmp_path):
    (tmp_path / "x.csv").write_bytes(data)
    assert read(tmp_path / "x.csv")[1:] == ([texts], bad)


def test_templates_and_filters(tmp_path):
    (tmp_path / "x.tsv").write_text("text\tn\tgood\na\t3\ttrue\nb\t10\tFALSE\nc\t\t\nd\tx\ttrue\n")

    def kept(where, template=None):
        options = {"where": parse_filter(where), "template": template and parse_template(template)}
        return read(tmp_path / "x.tsv", **options)[1:]

    assert kept("n > 3") == ([["b"]], [(4, "bad-value")])
    assert kept("n is null") == ([["c"]], [])
    assert kept("good = true") == ([["a", "d"]], [])
    assert kept("good = ''", "{text}: {n}") == ([["c: "]], [])
    assert kept("text = 'a' or text = 'd'", "{n}-{m?}") == ([["3-", "x-"]], [])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("a,b\n", r"x.csv: no column 'text'\n  found: 'a', 'b'\n.*\n  try: .* --json-keys$"),
        ("text,text\n", "x.csv: 2 columns 'text'"),
        ('"text', "the first row has no names of columns\n  found: unexpected end of data"),
    ],
)
def test_a_file_without_the_column_is_refused(data, message, tmp_path):
    (tmp_path / "x.csv").write_text(data)
    with pytest.raises(UsageError, match=message):
        read(tmp_path / "x.csv")


def test_the_option_that_names_a_missing_column_is_named(tmp_path):
    (tmp_path / "x.csv").write_text("text\n")
    with pytest.raises(UsageError, match=r"no column 'no'(.|\n)* --text-template$"):
        read(tmp_path / "x.csv", template=parse_template("{no}"))
    with pytest.raises(UsageError, match=r"no column 'no'(.|\n)* --where$"):
        read(tmp_path / "x.csv", where=parse_filter("no = 1"))
