"""Inputs divided into parts: every unit in exactly one part and in its order, as the slow twin divides them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import BadInputError
from mdata.sources.chunk import chunks, read_chunk
from mdata.sources.input_files import SourceFile, find_inputs
from mdata.sources.record_batch import ReadSpec
from mdata.sources.sections import PartNumber, files_of_part
from tests.helpers.examples import examples
from tests.reference.sections import part_of_units

SPEC = ReadSpec(json_keys=("text",))
FILES = st.lists(st.tuples(st.integers(0, 70), st.sampled_from(["plain", "packed", "text"])), max_size=6)


def source(number, size, kind):
    return SourceFile(
        Path(f"{number}"),
        size,
        0,
        "text" if kind == "text" else "jsonl",
        compression="gzip" if kind == "packed" else "none",
    )


def units(files, found, chunk_bytes):
    """(file, unit) of what a part reads."""
    taken = []
    for one in found:
        number = int(one.path.name)
        whole = files[number][1] != "plain"
        begin, end = one.section[:2] if one.section else (0, one.size_bytes)
        assert one.disk_bytes == end - begin
        first, last = begin // chunk_bytes, -(-end // chunk_bytes)
        taken += [(number, 0)] if whole or not one.size_bytes else [(number, unit) for unit in range(first, last)]
    return taken


@examples(300)
@given(files=FILES, count=st.integers(1, 12), chunk_bytes=st.integers(1, 30))
def test_parts_are_those_of_the_twin(files, count, chunk_bytes):
    sources = [source(number, *one) for number, one in enumerate(files)]
    sizes = [size for size, _ in files]
    starts = [list(range(0, size, chunk_bytes)) or [0] if kind == "plain" else [0] for size, kind in files]
    everything = []
    for number in range(1, count + 1):
        found = files_of_part(sources, PartNumber(number, count), chunk_bytes=chunk_bytes, text_is_whole=True)
        taken = units(files, found, chunk_bytes)
        assert taken == part_of_units(sizes, starts, number=number, count=count)
        everything += taken
    assert everything == [(number, unit) for number, begins in enumerate(starts) for unit in range(len(begins))]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_row_groups_of_parquet_are_divided_and_read_once(tmp_path, count):
    for name, rows in (("a", 53), ("b", 0), ("c", 10)):
        table = pa.table(
            {"text": [f"{name} {row} " + "x" * (row % 9) for row in range(rows)]}, pa.schema([("text", pa.string())])
        )
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=5)
    files = find_inputs([tmp_path]).files
    texts = []
    for number in range(1, count + 1):
        found = files_of_part(files, PartNumber(number, count), chunk_bytes=64, text_is_whole=True)
        assert sum(one.disk_bytes for one in found) == sum(
            chunk.file_bytes for chunk in chunks(found, 64, spec=SPEC)
        ) or any(one.path.name == "b.parquet" for one in found)
        for chunk in chunks(found, 64, spec=SPEC):
            batch = pa.ipc.open_stream(read_chunk(chunk, SPEC)).read_next_batch()
            texts += [value.decode() for value in batch.column(0).to_pylist()]
    assert texts == [f"{name} {row} " + "x" * (row % 9) for name, rows in (("a", 53), ("c", 10)) for row in range(rows)]


def test_a_parquet_file_without_an_end_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + b"x" * 100)
    files = find_inputs([tmp_path / "a.parquet"]).files
    with pytest.raises(BadInputError, match=r"a\.parquet: the end of this parquet file cannot be read"):
        files_of_part(files, PartNumber(1, 2), chunk_bytes=64, text_is_whole=True)
