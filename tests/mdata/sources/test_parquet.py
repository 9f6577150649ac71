"""Parquet: the rows that pyarrow reads, in chunks that depend only on the rows."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import BadInputError, UsageError
from mdata.sources import arrow_columns
from mdata.sources.chunk import chunks
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec
from tests.helpers.examples import examples
from tests.mdata.sources.inputs import chunk_data, find_files, read_records, texts

SENTENCES = st.text(max_size=5) | st.none()
LISTS = st.lists(SENTENCES, max_size=3) | st.none()
TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()]
TYPES += [pa.dictionary(pa.int32(), pa.string())]
LIST_TYPES = [pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(pa.binary())]


def save(folder, name="x.parquet", *, row_group_size=None, **columns):
    pq.write_table(pa.table(columns), folder / name, row_group_size=row_group_size)
    (file,) = find_files([folder / name])
    return file


def wanted(values):
    """What is good in a column, and the rows that are not."""
    good, bad = [], []
    for row, value in enumerate(values, start=1):
        if value is None or (isinstance(value, list) and None in value):
            bad.append((row, "bad-value"))
        else:
            good.append(value)
    return good, bad, len(values)


@examples(60)
@given(
    values=st.lists(SENTENCES, max_size=12) | st.lists(LISTS, min_size=1, max_size=12),
    chunk_bytes=st.integers(1, 60),
    group=st.integers(1, 5),
    most=st.integers(1, 5),
    choice=st.integers(0, 20),
    nested=st.booleans(),
)
def test_rows_come_in_order_whatever_the_chunks(tmp_path_factory, values, chunk_bytes, group, most, choice, nested):
    lists = any(isinstance(value, list) for value in values)
    # The library cannot write views inside structs.
    kinds = LIST_TYPES if lists else [kind for kind in TYPES if not nested or "view" not in str(kind)]
    column = pa.array(values, pa.list_(pa.string()) if lists else pa.string()).cast(kinds[choice % len(kinds)])
    folder = tmp_path_factory.mktemp("rows")
    if nested:
        column = pa.StructArray.from_arrays([column, column], ["text", "other"])
    file = save(folder, row_group_size=group, meta=column, other=pa.array(range(len(values))))
    spec = ReadSpec(json_keys=("meta.text" if nested else "meta",))
    with pytest.MonkeyPatch.context() as patch:
        whole = chunk_data(file, chunk_bytes, spec)
        patch.setattr("mdata.sources.parquet._MOST_ROWS", most)
        assert chunk_data(file, chunk_bytes, spec) == whole
        assert texts(file, chunk_bytes, spec) == wanted(values)
        found = list(chunks([file], chunk_bytes, spec=spec))
    assert [(p.start, p.stop) for p in found] == list(pairwise([0, *(p.stop for p in found)]))
    assert sum(chunk.file_bytes for chunk in found) == (file.size_bytes if values else 0)
    assert pickle.loads(pickle.dumps(found)) == found
    rows = list(range(len(values)))
    sizes = [
        8 + sum(len((s or "").encode()) for s in (v if isinstance(v, list) else [v]))
        for v in map(values.__getitem__, rows)
    ]
    for chunk in found:
        inside = sizes[chunk.start : chunk.stop]
        assert sum(inside[:-1]) < chunk_bytes and (sum(inside) >= chunk_bytes or chunk is found[-1])


def test_a_null_object_on_the_way_is_null(tmp_path):
    meta = pa.array([{"text": "a"}, None, {"text": None}, {"text": "b"}], pa.struct([("text", pa.string())]))
    file = save(tmp_path, meta=meta)
    spec = ReadSpec(json_keys=("meta.text",))
    assert texts(file, 99, spec) == (["a", "b"], [(2, "bad-value"), (3, "bad-value")], 4)
    dotted = save(tmp_path, "y.parquet", **{"meta.text": ["top"] * 4, "meta": meta})
    assert texts(dotted, 99, spec)[0] == ["top"] * 4


def test_bytes_that_are_no_text_and_values_too_long_are_problems(tmp_path):
    file = save(tmp_path, text=pa.array([b"a", b"\xff", b"long" * 9, b"b"]), n=[["x"], ["long" * 9], ["y"], ["z"]])
    assert texts(file, 1 << 20, ReadSpec(max_record_bytes=20)) == (["a", "b"], [(2, "not-utf8"), (3, "too-long")], 4)
    data = chunk_data(file, 1 << 20, ReadSpec(max_record_bytes=20))
    assert b"long" * 9 not in data[0] and b"long" * 5 + b"l" in data[0]
    assert texts(file, 9, ReadSpec(json_keys=("n",), max_record_bytes=20))[1] == [(2, "too-long")]
    found = parse("parquet", data[0], spec=ReadSpec(keep_bad_lines=True))
    assert [bad_row.line for bad_row in found.bad_rows] == [b'{"text":"\\\\xff"}']


def test_several_columns_keep_their_rows_together(tmp_path):
    file = save(tmp_path, a=["x", None, "z"], b=[["1", "2"], ["3"], []])
    (data,) = chunk_data(file, 1 << 20, ReadSpec(json_keys=("b", "a")))
    found = parse("parquet", data, spec=ReadSpec(json_keys=("b", "a")))
    assert [(column.sentences, column.ends) for column in found.columns] == [(["1", "2"], [2, 2]), (["x", "z"], None)]
    assert (found.kept, found.bad_rows[0].reason) == ([1, 3], "key 'a' holds null, not a string or a list of strings")
    with pytest.raises(BadInputError, match=r"x\.parquet:2: key 'a' holds null"):
        list(read_records(file, ["a"]))


@pytest.mark.parametrize(
    ("key", "reason"),
    [("no", "no column 'no'"), ("n", "column 'n' holds int64"), ("meta", "column 'meta' holds struct"),
     ("meta.no", "no column 'meta.no'"), ("n.a", "no column 'n.a'"), ("deep", "column 'deep' holds list")],
)  # fmt: skip
def test_a_column_that_is_no_text_is_usage(tmp_path, key, reason):
    file = save(tmp_path, n=[1], meta=[{"text": "a"}], deep=[[["a"]]])
    with pytest.raises(UsageError, match=rf"x\.parquet: {reason}"):
        chunk_data(file, 9, ReadSpec(json_keys=(key,)))


@pytest.mark.parametrize("damage", ["cut", "flipped", "head"])
def test_damage_is_named(tmp_path, damage):
    file = save(tmp_path, text=[f"some text {i}" for i in range(5000)], row_group_size=1000)
    data = file.path.read_bytes()
    place = len(data) // 2
    data = {"cut": data[:-30], "head": data[:8], "flipped": data[:place] + b"\xaa" * 4000 + data[place + 4000 :]}[
        damage
    ]
    file.path.write_bytes(data)
    with pytest.raises(BadInputError, match=r"x\.parquet: the parquet data is damaged after [\d,]+ rows"):
        chunk_data(file, 100)


def test_sizes_that_do_not_fit_a_column_end_no_process(tmp_path):
    """A list that may be null becomes one that must not, so its histogram of levels is too long."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a"], "many": [["b", "c"]]}), path, use_dictionary=False)
    optional, required, name = b"\x35\x02", b"\x35\x00", b"\x18\x04many"
    data = path.read_bytes()
    assert data.count(optional + name) == 1
    path.write_bytes(data.replace(optional + name, required + name))
    (file,) = find_files([path])
    assert texts(file, 100) == (["a"], [], 1)
    with pytest.raises(BadInputError, match=r"x\.parquet: the parquet data is damaged after 0 rows(.|\n)*histogram"):
        chunk_data(file, 100, ReadSpec(json_keys=("many",)))


def test_whatever_the_library_says_names_the_file(tmp_path, monkeypatch):
    """A column's name that is no text, and other kinds of errors that pyarrow raises over damaged data."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a"], "qqqq": ["b"]}), path)
    path.write_bytes(path.read_bytes().replace(b"qqqq", b"\xff\xfe\xff\xfe"))
    with pytest.raises(BadInputError, match=r"x\.parquet: the parquet data is damaged after 0 rows(.|\n)*utf-8"):
        list(chunks(find_files([path]), 100, spec=ReadSpec()))
    for error in (MemoryError("malloc\x1b[0m failed"), IndexError(), OverflowError("large"), RuntimeError("no")):
        with monkeypatch.context() as patch:

            def refuse(*_: object, error: Exception = error, **__: object) -> None:
                raise error

            patch.setattr(pq, "ParquetFile", refuse)
            with pytest.raises(BadInputError, match=r"x\.parquet: the parquet data is damaged") as caught:
                list(chunks(find_files([path]), 100, spec=ReadSpec()))
        assert "\x1b" not in str(caught.value)
        assert ("more memory than there is" in str(caught.value)) == isinstance(error, MemoryError)


def test_a_closing_that_fails_takes_nothing_from_what_was_read(tmp_path, monkeypatch):
    """Arrow tells no number of it, as it tells none of damage."""
    file = save(tmp_path, text=["a", "b", "c"])
    expected, closed = list(chunks([file], 1, spec=ReadSpec())), []

    def refuse(opened, force=False):
        closed.append(opened)
        raise OSError("error closing file")

    monkeypatch.setattr(pq.ParquetFile, "close", refuse)
    assert list(chunks([file], 1, spec=ReadSpec())) == expected and closed


def of_entries(rows: int, sizes: list[int], *, lists: int = 0) -> pa.Array:
    """Rows, or rows of so many sentences, that name one of a few entries of a dictionary."""
    count = rows * max(lists, 1)
    places = pa.array([number % len(sizes) for number in range(count)], pa.int32())
    entries = pa.DictionaryArray.from_arrays(
        places, pa.array([str(number) * size for number, size in enumerate(sizes)])
    )
    return pa.ListArray.from_arrays(pa.array(range(0, count + 1, lists), pa.int32()), entries) if lists else entries


@pytest.mark.parametrize("lists", [0, 3])
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_no_more_is_decoded_at_once_than_fits(tmp_path, monkeypatch, lists, stored, nested):
    """A file of 42 kB whose 8 entries stand for 2.7 GB made the process take 3.8 GB; now 0.23 GB."""
    monkeypatch.setattr(arrow_columns, "DECODED_BYTES", 5000)
    decoded, kept = [], arrow_columns._decoded
    monkeypatch.setattr(
        arrow_columns, "_decoded", lambda array, place: decoded.append(kept(array, place)) or decoded[-1]
    )
    read, divided = [], arrow_columns._divided

    def seen(arrays, sizes, most):
        # What the library has decoded already; what is still encoded comes to no more than its entries.
        read.extend(array.nbytes for array in arrays)
        return divided(arrays, sizes, most)

    monkeypatch.setattr(arrow_columns, "_divided", seen)
    column = of_entries(2000, [300, 7, 1000], lists=lists)
    given = pa.StructArray.from_arrays([column], ["t"]) if nested else column
    pq.write_table(pa.table({"x": given}), tmp_path / "x.parquet", store_schema=stored, row_group_size=1500)
    (file,) = find_files([tmp_path / "x.parquet"])
    spec = ReadSpec(json_keys=("x.t" if nested else "x",))
    assert texts(file, 20_000, spec) == (column.to_pylist(), [], 2000)
    assert len(decoded) > 100
    assert max(read) < (30_000 if lists else 6000)
    assert max(array.nbytes for array in decoded) < 5000 + 3 * 1000 + 8 * 700


def test_a_row_of_sentences_that_is_too_long_is_never_decoded(tmp_path):
    places = [0, 1, *[0] * 5000, 1, None]
    entries = pa.DictionaryArray.from_arrays(pa.array(places, pa.int32()), pa.array(["a" * 100, "b"]))
    column = pa.ListArray.from_arrays(pa.array([0, 2, 5002, 5002, 5004], pa.int32()), entries)
    pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet", store_schema=False)
    (file,) = find_files([tmp_path / "x.parquet"])
    spec = ReadSpec(max_record_bytes=1000)
    (chunk,) = chunks([file], 1 << 20, spec=spec)
    assert len(chunk.data) < 5000
    batch = parse("parquet", chunk.data, spec=spec)
    assert [(bad_row.row, bad_row.kind) for bad_row in batch.bad_rows] == [(2, "too-long"), (4, "bad-value")]
    assert batch.kept == [1, 3] and batch.columns[0].sentences == ["a" * 100, "b"]
