"""Arrow files and streams: the rows that pyarrow wrote, in chunks that depend only on the rows."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import BadInputError, UsageError
from mdata.sources import arrow_columns
from mdata.sources.arrow_columns import parse_rows
from mdata.sources.arrow_files import batch_starts
from mdata.sources.chunk import chunks
from mdata.sources.record_batch import ReadSpec
from mdata.sources.row_filter import parse_filter
from mdata.sources.sections import PartNumber, files_of_part
from mdata.sources.text_template import parse_template
from tests.helpers.examples import examples
from tests.mdata.sources.inputs import chunk_data, find_files, texts
from tests.mdata.sources.test_parquet import LIST_TYPES, LISTS, SENTENCES, TYPES, wanted

MORE_LISTS = [pa.list_view(pa.string()), pa.large_list_view(pa.string()), pa.list_(pa.string_view())]


def save(folder, table, *, name="x.arrow", rows=None, stream=False, compression=None):
    """The table in record batches of so many rows."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    maker = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(folder / name), "wb") as sink, maker(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    (file,) = find_files([folder / name])
    assert file.format == "arrow" and file.streamed
    return file


@examples(80)
@given(
    values=st.lists(SENTENCES, max_size=12) | st.lists(LISTS, min_size=1, max_size=12),
    chunk_bytes=st.integers(1, 60),
    rows=st.integers(1, 5),
    choice=st.integers(0, 20),
    nested=st.booleans(),
    stream=st.booleans(),
    compression=st.sampled_from([None, "zstd", "lz4"]),
)
def test_rows_come_in_order_whatever_the_form(
    tmp_path_factory, values, chunk_bytes, rows, choice, nested, stream, compression
):
    lists = any(isinstance(value, list) for value in values)
    kinds = [*LIST_TYPES, *MORE_LISTS] if lists else TYPES
    kind = kinds[choice % len(kinds)]
    column = pa.array(values, kind) if lists else pa.array(values, pa.string()).cast(kind)
    if nested:
        column = pa.StructArray.from_arrays([column, column], ["text", "other"])
    folder = tmp_path_factory.mktemp("rows")
    table = pa.table({"other": pa.array(range(len(values))), "meta": column})
    file = save(folder, table, rows=rows, stream=stream, compression=compression)
    spec = ReadSpec(json_keys=("meta.text" if nested else "meta",))
    assert texts(file, chunk_bytes, spec) == wanted(values)
    assert chunk_data(file, chunk_bytes, spec) == chunk_data(file, chunk_bytes, spec)
    found = list(chunks([file], chunk_bytes, spec=spec))
    assert sum(chunk.file_bytes for chunk in found) == (file.size_bytes if values else 0)
    other = chunks([save(folder, table, name="y.arrow", stream=not stream)], chunk_bytes, spec=spec)
    assert [(chunk.start, chunk.stop) for chunk in other] == [(chunk.start, chunk.stop) for chunk in found]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_record_batches_are_divided_and_read_once(tmp_path, stream, count):
    values = [f"row {row} " + "x" * (row % 40) for row in range(100)]
    first = save(tmp_path, pa.table({"text": values[:70]}), name="a.arrow", rows=7, stream=stream)
    empty = save(tmp_path, pa.table({"text": pa.array([], pa.string())}), name="b.arrow", stream=stream)
    last = save(tmp_path, pa.table({"text": values[70:]}), name="c.arrow", rows=30, stream=stream)
    assert len(batch_starts(first)) == 10 and len(batch_starts(last)) == 1
    found, read = [], 0
    for number in range(1, count + 1):
        part = PartNumber(number, count)
        for file in files_of_part([first, empty, last], part, chunk_bytes=64, text_is_whole=True):
            found += texts(file, 64)[0]
            read += file.disk_bytes
            assert sum(chunk.file_bytes for chunk in chunks([file], 64, spec=ReadSpec())) in (file.disk_bytes, 0)
    assert found == values and read == sum(file.size_bytes for file in (first, empty, last))


def test_the_library_agrees_on_where_record_batches_begin(tmp_path):
    """A stream that is cut at each of these places, but the first, has as many batches."""
    file = save(tmp_path, pa.table({"text": ["a", "bc"] * 6}), rows=5, stream=True)
    data = file.path.read_bytes()
    for number, start in enumerate(batch_starts(file)[1:], 1):
        assert len(list(pa.ipc.open_stream(data[:start] + b"\xff\xff\xff\xff\0\0\0\0"))) == number


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_record_batches_are_found_in_the_footer_of_a_file(tmp_path, rows, compression):
    """As Polars writes it: what follows the magic number is no stream."""
    values = [f"row {row} " + "x" * (row % 40) for row in range(50)]
    file = save(tmp_path, pa.table({"text": values}), rows=rows, compression=compression)
    starts = batch_starts(file)
    data = bytearray(file.path.read_bytes())
    data[8:16] = b"\4\0\0\0\xf2\xff\xff\xff"
    file.path.write_bytes(data)
    (file,) = find_files([file.path])
    assert (
        pa.ipc.open_file(file.path).num_record_batches == len(starts) == len(batch_starts(file)) == (8 if rows else 1)
    )
    assert batch_starts(file) == starts
    assert texts(file, 100) == wanted(values)
    parts = [files_of_part([file], PartNumber(n, 3), chunk_bytes=64, text_is_whole=True) for n in (1, 2, 3)]
    assert [text for part in parts for section in part for text in texts(section, 100)[0]] == values


def test_where_batches_begin_is_the_same_in_footer_and_messages(tmp_path):
    """Dictionaries stand between the batches, a file may have none, and its footer other fields."""
    words = pa.array(["a", "b", "a", None]).dictionary_encode()
    for number, table in enumerate((pa.table({"text": ["a", "bc"] * 6}), pa.table({"text": words, "n": [1, 2, 3, 4]}),
                                    pa.table({"text": pa.array([], pa.string())}))):  # fmt: skip
        file = save(tmp_path, table.replace_schema_metadata({"k": "v"}), name=f"{number}.arrow", rows=2)
        with pa.memory_map(str(file.path)) as mapped:
            mapped.seek(8)
            begins, wanted_starts = 8, []
            for message in pa.ipc.MessageReader.open_stream(mapped):
                wanted_starts += [begins] * (message.type == "record batch")
                begins = mapped.tell()
        assert batch_starts(file) == [0, *wanted_starts[1:]]


@pytest.mark.parametrize("begin", [1 << 40, 0, -8])
def test_a_footer_that_names_batches_outside_the_file_is_damage(tmp_path, begin):
    file = save(tmp_path, pa.table({"text": ["a", "bc"] * 6}), rows=5)
    data = file.path.read_bytes()
    before, footer = data[:-200], data[-200:]
    name = batch_starts(file)[1].to_bytes(8, "little")
    assert footer.count(name) == 1
    file.path.write_bytes(before + footer.replace(name, begin.to_bytes(8, "little", signed=True)))
    with pytest.raises(BadInputError, match=r"damaged after 0 rows\n  found: its footer names 3 record batches"):
        batch_starts(file)


def test_categories_of_text_views_are_text(tmp_path):
    views = pa.array(["a", "long enough to stand outside of a view"], pa.string_view())
    codes = pa.array([0, 1, None, 0], pa.uint32())
    column = pa.DictionaryArray.from_arrays(codes, views)
    file = save(tmp_path, pa.table({"text": column}))
    (chunk,) = chunks([file], 1000, spec=ReadSpec())
    batch = parse_rows(chunk.data, ReadSpec())
    assert batch.columns[0].sentences == ["a", "long enough to stand outside of a view", "a"]
    assert [bad_row.row for bad_row in batch.bad_rows] == [3]


def views_of_one_text(count: int, size: int) -> pa.Array:
    views = np.zeros((count, 4), np.int32)
    views[:, 0], views[:, 1] = size, int.from_bytes(b"xxxx", "little")
    buffers = [None, pa.py_buffer(views.tobytes()), pa.py_buffer(b"x" * size)]
    return pa.Array.from_buffers(pa.string_view(), count, buffers)


@pytest.mark.parametrize("form", ["views", "list views", "list of views", "list views of entries"])
def test_what_views_show_is_copied_in_small_batches(tmp_path, monkeypatch, form):
    """Rows that show the same bytes: files of 1 MB stood for 20 GB, which were copied at once."""
    monkeypatch.setattr(arrow_columns, "DECODED_BYTES", 5000)
    monkeypatch.setattr(arrow_columns, "_ITEMS", 50)
    decoded, copied, kept, as_lists = [], [], arrow_columns._decoded, arrow_columns._without_views
    monkeypatch.setattr(
        arrow_columns, "_decoded", lambda array, place: decoded.append(kept(array, place)) or decoded[-1]
    )
    monkeypatch.setattr(arrow_columns, "_without_views", lambda array: copied.append(as_lists(array)) or copied[-1])
    all_rows, every_ten = pa.array(np.zeros(300, np.int32)), pa.array(np.full(300, 10, np.int32))
    if form == "views":
        column, row = views_of_one_text(300, 100), "x" * 100
    elif form == "list of views":
        ends = pa.array(range(0, 3001, 10), pa.int32())
        column, row = pa.ListArray.from_arrays(ends, views_of_one_text(3000, 30)), ["x" * 30] * 10
    elif form == "list views":
        column, row = pa.ListViewArray.from_arrays(all_rows, every_ten, pa.array(["x" * 30] * 10)), ["x" * 30] * 10
    else:
        entries = pa.DictionaryArray.from_arrays(pa.array([0] * 10, pa.int32()), pa.array(["x" * 30]))
        column, row = pa.ListViewArray.from_arrays(all_rows, every_ten, entries), ["x" * 30] * 10
    file = save(tmp_path, pa.table({"text": column}))
    assert texts(file, 1000)[0] == [row] * 300
    assert len(decoded) >= 5 and max(array.nbytes for array in decoded) < 8000
    if form.startswith("list views"):
        assert max(len(array.flatten()) for array in copied) <= 50
    spec = ReadSpec(max_record_bytes=50)
    chunk, *_ = chunks([file], 1000, spec=spec)
    assert {bad_row.kind for bad_row in parse_rows(chunk.data, spec).bad_rows} == {"too-long"}


@pytest.mark.parametrize("stride", [151, pytest.param(7, marks=pytest.mark.soak)])
@pytest.mark.parametrize("stream", [False, True])
def test_damage_is_named_and_offsets_are_never_trusted(tmp_path, stream, stride):
    file = save(tmp_path, pa.table({"text": [f"some text {row}" for row in range(500)]}), rows=100, stream=stream)
    whole = file.path.read_bytes()
    refused = 0
    for cut in (7, 100, len(whole) // 2, len(whole) - 9):
        file.path.write_bytes(whole[:cut])
        (shorter,) = find_files([file.path])
        if stream and cut == len(whole) - 9:
            continue  # a stream need not have an end
        with pytest.raises(BadInputError, match=r"x\.arrow: the Arrow data is damaged after [\d,]+ rows"):
            texts(shorter, 100)
    for place in range(0, len(whole), stride):
        file.path.write_bytes(whole[:place] + b"\xf7\xff\xff" + whole[place + 3 :])
        try:
            texts(*find_files([file.path]), 100)
        except (BadInputError, UsageError) as error:
            assert str(file.path) in str(error)
            refused += 1
    assert refused > 10


def test_a_file_that_became_shorter_is_not_touched(tmp_path):
    """The system would end a process that reads a map behind the end of its file."""
    file = save(tmp_path, pa.table({"text": ["x" * 5000] * 40}), rows=10)
    found = chunks([file], 100, spec=ReadSpec())
    os.truncate(file.path, 500)
    with pytest.raises((UsageError, BadInputError), match=r"x\.arrow"):
        list(found)
    (again,) = find_files([file.path])
    assert again.size_bytes == 500


def test_columns_for_filters_and_templates(tmp_path):
    table = pa.table(
        {
            "title": ["a", None, "c", "d", "e"],
            "body": pa.array(["x", "y", "z", None, "w"]).dictionary_encode(),
            "n": pa.array([1, 2, None, 3, 200], pa.uint8()),
            "f": pa.array([0.5, None, 1, 2, 3], pa.float32()),
            "ok": [True, False, None, True, True],
            "tags": [["p"], None, ["q"], [], []],
        }
    )
    for file in (save(tmp_path, table, rows=2), save(tmp_path, table, name="y.arrow", stream=True)):
        template = parse_template("{title?}: {body}")
        assert texts(file, 9, ReadSpec(template=template)) == (["a: x", ": y", "c: z", "e: w"], [(4, "bad-value")], 5)
        for text, kept in (
            ("n >= 2", ["y", "w"]), ("ok = true and f < 3", ["x"]), ("tags is null", ["y"]),
            ("title != 'a'", ["z", "w"]), ("n is null or n = 1", ["x", "z"]), ("not body in ('x', 'y')", ["z", "w"]),
        ):  # fmt: skip
            spec = ReadSpec(json_keys=("body",), where=parse_filter(f"({text}) and body is not null"))
            assert texts(file, 9, spec) == (kept, [], 5), text
        assert texts(file, 9, ReadSpec(template=parse_template("{no?}{title?}")))[0] == ["a", "", "c", "d", "e"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"where": "n = 'x'"}, "column 'n' holds int64, and --where compares it with text"),
     ({"where": "text = 1"}, "column 'text' is text"), ({"where": "l = 'a'"}, "column 'l' holds list"),
     ({"where": "no = 1"}, "no column 'no'"), ({"template": "{no}"}, "no column 'no'"),
     ({"template": "{l}"}, "column 'l' holds list"), ({"template": "{no?}"}, "has none of the columns no")],
)  # fmt: skip
def test_a_column_of_another_type_is_usage(tmp_path, options, reason):
    file = save(tmp_path, pa.table({"text": ["a"], "n": [1], "l": [["a"]]}))
    spec = ReadSpec(
        template=parse_template(options["template"]) if "template" in options else None,
        where=parse_filter(options["where"]) if "where" in options else None,
    )
    with pytest.raises(UsageError, match=rf"x\.arrow:? {reason}"):
        texts(file, 9, spec)


def test_what_a_dictionary_expands_to_is_decoded_in_small_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_columns, "DECODED_BYTES", 5000)
    decoded, kept = [], arrow_columns._decoded
    monkeypatch.setattr(
        arrow_columns, "_decoded", lambda array, place: decoded.append(kept(array, place)) or decoded[-1]
    )
    places = pa.array([0, 1] * 1000, pa.int32())
    entries = pa.DictionaryArray.from_arrays(places, pa.array(["a" * 1000, "b"]))
    file = save(tmp_path, pa.table({"text": entries}))
    assert texts(file, 20_000)[0] == ["a" * 1000, "b"] * 1000
    assert len(decoded) > 100 and max(array.nbytes for array in decoded) < 20_000


@pytest.mark.parametrize(
    ("data", "reason"), [(b"FEA1abcd", "a Feather file of version 1"), (b"", "the Arrow data is damaged")]
)
def test_what_is_no_arrow_is_said(tmp_path, data, reason):
    (tmp_path / "x.feather").write_bytes(data)
    with pytest.raises((UsageError, BadInputError), match=rf"x\.feather(:| is) {reason}"):
        texts(*find_files([tmp_path / "x.feather"]))
