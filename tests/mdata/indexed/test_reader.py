from __future__ import annotations

import itertools
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mdata.errors import DamageError, UsageError
from mdata.indexed.index_tables import IndexTables, read_tables
from mdata.indexed.reader import IndexedReader
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples
from tests.reference.indexed import read_pair

# What the message about each pair of the hostile table says: which file, which field.
DAMAGED = {
    "bin_cut_half": r"\.idx: bad pointer of sequence 2",
    "bin_cut_half_token": r"\.idx: bad pointer of sequence 3",
    "bin_empty": r"\.idx: bad pointer of sequence 0",
    "bin_longer": r"\.bin: its size.*\n.*490 bytes\n.*480 bytes",
    "idx_big_endian": r"\.idx: bad version",
    "idx_count_huge": r"\.idx: bad size",
    "idx_count_plus_one": r"\.idx: bad size(.|\n)*134 bytes for 5 sequences",
    "idx_cut_in_counts": r"\.idx: bad size(.|\n)*header",
    "idx_cut_in_documents": r"\.idx: bad size",
    "idx_cut_in_lengths": r"\.idx: bad size",
    "idx_cut_in_magic": r"\.idx: bad magic",
    "idx_cut_in_pointers": r"\.idx: bad size",
    "idx_doc_count_huge": r"\.idx: bad size",
    "idx_doc_count_zero": r"\.idx: bad boundary count",
    "idx_docs_decreasing": r"\.idx: bad document boundary 2",
    "idx_docs_last_short": r"\.idx: bad last document boundary",
    "idx_docs_out_of_range": r"\.idx: bad document boundary 1",
    "idx_docs_start_1": r"\.idx: bad document boundary 0",
    "idx_dtype_0": r"\.idx: bad dtype code",
    "idx_dtype_99": r"\.idx: bad dtype code",
    "idx_dtype_int32_over_uint16": r"\.idx: bad pointer of sequence 1",
    "idx_empty": r"\.idx: bad magic",
    "idx_length_negative": r"\.idx: bad length of sequence 1",
    "idx_length_too_long": r"\.idx: bad pointer of sequence 3",
    "idx_length_zero": r"\.idx: bad pointer of sequence 2(.|\n)*gap",
    "idx_magic_flipped": r"\.idx: bad magic",
    "idx_magic_tntidx": r"\.idx: bad magic(.|\n)*TNTIDX",
    "idx_pointer_back": r"\.idx: bad pointer of sequence 2(.|\n)*overlaps",
    "idx_pointer_far": r"\.idx: bad pointer of sequence 1",
    "idx_pointer_negative": r"\.idx: bad pointer of sequence 1",
    "idx_pointer_odd": r"\.idx: bad pointer of sequence 1",
    "idx_trailing_bytes": r"\.idx: bad size(.|\n)*125 bytes",
    "idx_version_2": r"\.idx: bad version",
}
MISSING = ("bin_missing", "idx_missing")


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_pairs_are_refused_by_file_and_field(oracles, name):
    with pytest.raises(DamageError, match=name + DAMAGED[name]) as caught:
        IndexedReader(oracles / "hostile/binidx" / name)
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_file_is_named(oracles, name):
    missing = f"{name}.{name[:3]}"
    with pytest.raises(UsageError, match=re.escape(missing)):
        IndexedReader(oracles / "hostile/binidx" / name)


def test_the_hostile_table_has_no_other_pairs(oracles):
    there = {path.stem for path in (oracles / "hostile/binidx").iterdir()}
    assert there == {*DAMAGED, *MISSING, "good"}
    assert IndexedReader(oracles / "hostile/binidx/good").lengths.tolist() == [51, 40, 65, 84]


def test_oracle_pairs_are_read_as_the_twin_reads_them(oracles):
    pairs = [path.with_suffix("") for path in (oracles / "oracle/preprocess/files").glob("*/*.idx")]
    assert len(pairs) > 10
    for prefix in pairs:
        assert_equal_to_twin(prefix)


def assert_equal_to_twin(prefix: Path) -> None:
    """The same tokens and boundaries, or both refuse."""
    expected = read_pair(prefix)
    if expected is None:
        with pytest.raises(DamageError, match=r"\.idx"):
            IndexedReader(prefix)
        return
    reader = IndexedReader(prefix)
    assert [tuple(reader.sequence(i).tolist()) for i in range(reader.num_sequences)] == expected[0]
    assert reader.boundaries.tolist() == expected[1]
    assert reader.num_tokens == sum(map(len, expected[0]))


@examples(300)
@given(seed=st.integers(0, 10**9), documents=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4))
def test_any_change_of_the_index_is_judged_as_by_the_twin(tmp_path_factory, seed, documents):
    """Flipped, replaced, cut and added bytes: both refuse, or both read the same."""
    rng = random.Random(seed)
    prefix = tmp_path_factory.mktemp("r") / "x"
    write_pair(prefix, documents, code=rng.choice((4, 8)))
    path = prefix.with_name("x.idx")
    index = bytearray(path.read_bytes())
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(index))
        index[at] = rng.choice((index[at] ^ 1, index[at] ^ 2, rng.randrange(256)))
    if rng.random() < 0.2:
        index = index[: rng.randrange(len(index))]
    if rng.random() < 0.2:
        index += bytes(rng.randrange(1, 20))
    path.write_bytes(index)
    assert_equal_to_twin(prefix)


def moved_pair(prefix, lengths, pointers, *, size):
    """A uint16 pair with pointers of our choice; token = position."""
    table = struct.pack(f"<{len(lengths)}i{len(lengths)}q2q", *lengths, *pointers, 0, len(lengths))
    Path(f"{prefix}.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), 2) + table)
    Path(f"{prefix}.bin").write_bytes(np.arange(size, dtype="<u2").tobytes())


@pytest.mark.parametrize("empty", [0, 1])
def test_sequences_in_another_order_are_read_but_are_no_stream(tmp_path, empty):
    """An empty sequence may stand at another one's place, whichever of the two comes first."""
    lengths = [0, 2, 3, 1] if empty == 0 else [2, 0, 3, 1]
    moved_pair(tmp_path / "x", lengths, [8, 8, 2, 0], size=6)
    reader = IndexedReader(tmp_path / "x")
    assert not reader.contiguous
    found = [reader.sequence(i).tolist() for i in range(4)]
    assert found[empty] == []
    assert found[1 - empty] == [4, 5]
    assert found[2:] == [[1, 2, 3], [0]]
    with pytest.raises(AssertionError, match="do not follow"):
        reader.tokens(0, 1)
    assert_equal_to_twin(tmp_path / "x")


@pytest.mark.parametrize(
    "lengths, pointers, size, found",
    [
        ([2, 2], [0, 2], 3, "overlaps"),
        ([2, 2], [0, 0], 2, "overlaps"),
        ([2, 2], [0, 6], 5, "gap"),
        ([2], [2], 3, "gap"),
        ([3, 0, 1], [2, 4, 0], 4, "overlaps"),
        ([2], [0], 3, "its size"),
    ],
)
def test_every_byte_belongs_to_one_sequence(tmp_path, lengths, pointers, size, found):
    moved_pair(tmp_path / "x", lengths, pointers, size=size)
    assert read_pair(tmp_path / "x") is None
    with pytest.raises(DamageError, match=found):
        IndexedReader(tmp_path / "x")


def test_a_multimodal_file_is_called_one(tmp_path):
    write_pair(tmp_path / "x", [[3], [4]])
    with (tmp_path / "x.idx").open("ab") as file:
        file.write(bytes(2))
    with pytest.raises(DamageError, match="one mode for each sequence"):
        IndexedReader(tmp_path / "x")


def test_faults_past_the_first_block_name_their_entry(tmp_path):
    """Lengths and boundaries are checked in blocks of 2^18."""
    count = (1 << 18) + 10
    tokens = write_pair(tmp_path / "x", [[1]] * count)
    reader = IndexedReader(tmp_path / "x")
    assert reader.contiguous
    assert (reader.tokens(0, count) == tokens).all()
    path = tmp_path / "x.idx"
    good = path.read_bytes()
    entry = (1 << 18) + 3
    for at, found in ((34 + 4 * entry, "length of sequence"), (34 + 12 * count + 8 * entry, "document boundary")):
        path.write_bytes(good[:at] + b"\xff" * 4 + good[at + 4 :])
        with pytest.raises(DamageError, match=f"{found} {entry}"):
            IndexedReader(tmp_path / "x")


def test_empty_pairs_are_read(tmp_path):
    for documents in ([], [[]], [[0], []]):
        write_pair(tmp_path / "x", documents)
        reader = IndexedReader(tmp_path / "x")
        assert (reader.num_documents, reader.num_tokens) == (len(documents), 0)
        assert reader.contiguous
        assert reader.tokens(0, 0).size == 0


def test_views_outlive_the_reader_and_cannot_be_written(tmp_path):
    write_pair(tmp_path / "x", [[3], [4]])
    view = IndexedReader(tmp_path / "x").sequence(1)
    assert view.tolist() == [3, 4, 5, 6]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


@pytest.mark.parametrize("start, count", [(-1, 1), (0, 8), (7, 1), (3, -1)])
def test_tokens_outside_are_a_fault_of_the_caller(tmp_path, start, count):
    write_pair(tmp_path / "x", [[3, 4]])
    with pytest.raises(AssertionError, match="of 7"):
        IndexedReader(tmp_path / "x").tokens(start, count)


@examples(200)
@given(
    documents=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6),
    seed=st.integers(0, 10**6),
    span=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    in_order=st.booleans(),
)
def test_documents_of_bytes(tmp_path_factory, documents, seed, span, in_order):
    """The documents that have a byte in a span of .bin, whether the sequences stand in order there or not."""
    prefix = tmp_path_factory.mktemp("d") / "x"
    write_pair(prefix, documents, code=8)
    tables = read_tables(prefix.with_name("x.idx"))
    lengths = tables.lengths.tolist()
    places = list(range(len(lengths)))
    if not in_order:
        random.Random(seed).shuffle(places)
    pointers = np.zeros(len(lengths), np.int64)
    for before, after in zip([None, *places], places, strict=False):
        pointers[after] = 0 if before is None else pointers[before] + 2 * lengths[before]
    tables = IndexTables(tables.dtype, tables.lengths, pointers=pointers, boundaries=tables.boundaries)
    owner = [number for number, document in enumerate(documents) for _ in document]
    size = 2 * sum(lengths)
    start, stop = int(span[0] * size), max(int(span[1] * size), int(span[0] * size) + 1)
    assume(stop <= size)
    expected = {
        owner[i]
        for i in range(len(lengths))
        if any(start <= b < stop for b in range(pointers[i], pointers[i] + 2 * lengths[i]))
    }
    runs = tables.documents_touching(start, stop, contiguous=in_order)
    found = [number for first, last in runs for number in range(first, last + 1)]
    if in_order:  # one run; a document without tokens may stand inside it
        assert found == list(range(min(expected), max(expected) + 1)) if expected else not found
    else:
        assert found == sorted(expected)
        assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(runs))
