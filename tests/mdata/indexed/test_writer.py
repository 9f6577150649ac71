from __future__ import annotations

import errno
import time

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import BadInputError, DamageError, ResourceError, UsageError
from mdata.indexed.pair_format import BLOCK_BYTES, smallest_dtype
from mdata.indexed.reader import IndexedReader
from mdata.indexed.writer import IndexedWriter
from tests.helpers.examples import examples
from tests.helpers.failures import durable_calls
from tests.reference.indexed import read_pair

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), max_size=6)


def write(prefix, documents, *, vocab_size=100, cuts=1):
    """Write documents (lists of sequences of ids) in `cuts` calls."""
    with IndexedWriter(prefix, smallest_dtype(vocab_size)) as writer:
        for part in np.array_split(np.arange(len(documents)), cuts):
            append(writer, [documents[i] for i in part])
        return writer.commit()


def append(writer, documents):
    sequences = [sequence for document in documents for sequence in document]
    writer.append(
        np.array([token for sequence in sequences for token in sequence], np.int32),
        np.array([len(sequence) for sequence in sequences], np.int64),
        document_ends=np.cumsum([len(document) for document in documents], dtype=np.int64),
    )


@examples(50)
@given(documents=DOCUMENTS, vocab_size=st.sampled_from([10, 65499, 65500, 10**6]), cuts=st.integers(1, 4))
def test_reader_and_twin_give_back_what_was_written(tmp_path_factory, documents, vocab_size, cuts):
    prefix = tmp_path_factory.mktemp("w") / "a.b_text_document"
    facts = write(prefix, documents, vocab_size=vocab_size, cuts=cuts)
    sequences = [tuple(sequence) for document in documents for sequence in document]
    boundaries = np.cumsum([0, *map(len, documents)]).tolist()
    tokens = [token for sequence in sequences for token in sequence]
    assert read_pair(prefix) == (sequences, boundaries)
    reader = IndexedReader(prefix)
    assert [tuple(reader.sequence(i).tolist()) for i in range(reader.num_sequences)] == sequences
    assert reader.boundaries.tolist() == boundaries
    assert reader.contiguous
    assert reader.tokens(0, len(tokens)).tolist() == tokens
    data = prefix.with_name("a.b_text_document.bin").read_bytes()
    index = prefix.with_name("a.b_text_document.idx").read_bytes()
    assert facts.dtype == ("uint16" if vocab_size < 65500 else "int32") == reader.dtype.name
    assert (facts.documents, facts.sequences, facts.tokens) == (len(documents), len(sequences), len(tokens))
    assert facts.bin_bytes == len(data)
    assert facts.largest_id == max(tokens, default=None)
    assert facts.idx_hash == blake3.blake3(index).hexdigest()
    assert facts.block_hashes == ((blake3.blake3(data).digest(),) if data else ())


def test_blocks_are_hashed_whatever_the_pieces(tmp_path):
    tokens = np.arange(BLOCK_BYTES // 2 * 2 + 77) % 60000
    for pieces in (1, 5):
        with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            for part in np.array_split(tokens, pieces):
                writer.append(part, np.array([len(part)]), document_ends=np.array([1]))
            facts = writer.commit()
        data = (tmp_path / "x.bin").read_bytes()
        blocks = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
        assert facts.block_hashes == tuple(blake3.blake3(block).digest() for block in blocks)
        assert len(blocks) == 3


def test_a_large_append_that_fails_is_over_when_it_returns(tmp_path, monkeypatch):
    """Bytes are hashed while they are written; the caller may reuse their memory, also after an error."""
    tokens, looked = np.ones(1 << 20, "<u2"), []
    with IndexedWriter(tmp_path / "x", tokens.dtype) as writer:
        real = writer._scan
        monkeypatch.setattr(writer, "_scan", lambda data: (time.sleep(0.05), real(data), looked.append(len(data))))
        with durable_calls(monkeypatch, 0), pytest.raises(ResourceError, match="No space left"):
            writer.append(tokens, np.array([len(tokens)]), document_ends=np.array([1]))
        assert looked == [len(tokens)]
    assert list(tmp_path.iterdir()) == []


def test_many_sequences_take_several_blocks_of_the_index(tmp_path):
    count = (1 << 18) + 5
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.append(np.arange(count) % 1000, np.ones(count, int), document_ends=np.arange(1, count + 1))
        writer.commit()
    reader = IndexedReader(tmp_path / "x")
    assert (reader.pointers == np.arange(count) * 2).all()
    assert (reader.boundaries == np.arange(count + 1)).all()


def test_oracle_pairs_are_written_again_byte_for_byte(tmp_path, oracles):
    pairs = sorted((oracles / "oracle/preprocess/files").glob("*/*.idx"))
    assert len(pairs) > 10
    for path in pairs:
        source = IndexedReader(path.with_suffix(""))
        with IndexedWriter(tmp_path / "x", source.dtype) as writer:
            writer.append(
                source.tokens(0, source.num_tokens),
                np.array(source.lengths),
                document_ends=np.array(source.boundaries[1:]),
            )
            writer.commit()
        assert (tmp_path / "x.idx").read_bytes() == path.read_bytes(), path
        assert (tmp_path / "x.bin").read_bytes() == path.with_suffix(".bin").read_bytes(), path


def test_position_counts_what_was_taken(tmp_path):
    with IndexedWriter(tmp_path / "x", np.dtype("<i4")) as writer:
        assert writer.state == (0, 0, 0, None, ())
        append(writer, [[[1, 2], [3]], []])
        assert writer.state[:3] == (12, 2, 2)


@pytest.mark.parametrize(
    "dtype, ids, found",
    [("<u2", [1, 65536], "id 65536"), ("<i4", [5, 2**31], "id 2147483648"), ("<u2", [-1, 5], "id -1")],
)
def test_an_id_that_does_not_fit_is_refused_by_name(tmp_path, dtype, ids, found):
    with IndexedWriter(tmp_path / "x", np.dtype(dtype)) as writer:
        append(writer, [[[7]]])
        with pytest.raises(BadInputError, match=f"does not fit(.|\n)*{found} after 1 document"):
            writer.append(np.array(ids), np.array([2]), document_ends=np.array([1]))
    assert list(tmp_path.iterdir()) == []


def test_a_sequence_too_long_for_the_format_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("mdata.indexed.writer.LARGEST_LENGTH", 3)
    with (
        IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer,
        pytest.raises(BadInputError, match=r"sequence 1 is too long(.|\n)*4 tokens(.|\n)*at most 3"),
    ):
        append(writer, [[[1], [1, 2, 3, 4]]])


@pytest.mark.parametrize(
    ("tokens", "lengths", "ends", "told"),
    [
        ([1, 1], [1], [1], "1 for 2 tokens"),
        ([1], [1], [0], "0 of 1 sequences"),
        ([1, 1], [1, 1], [2, 1, 2], "document_ends"),
    ],
)
def test_arrays_that_do_not_fit_together_are_a_fault_of_the_caller(tmp_path, tokens, lengths, ends, told):
    with (
        IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer,
        pytest.raises(AssertionError, match=told),
    ):
        writer.append(np.array(tokens), np.array(lengths), document_ends=np.array(ends))


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<u4", "<u8", "bool"])
def test_types_that_hold_no_ids_are_refused(tmp_path, dtype):
    with pytest.raises(UsageError, match="cannot be written"):
        IndexedWriter(tmp_path / "x", np.dtype(dtype))


def test_a_missing_folder_is_the_users_mistake(tmp_path):
    with pytest.raises(UsageError, match=r"creating .*nowhere"):
        IndexedWriter(tmp_path / "nowhere" / "x", np.dtype("<u2"))


def test_leaving_without_finish_leaves_nothing(tmp_path):
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        append(writer, [[[1]]])
        assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_final_names_appear_in_order_and_the_old_index_goes_first(tmp_path, monkeypatch):
    write(tmp_path / "x", [[[1, 2, 3]]])
    with durable_calls(monkeypatch) as calls:
        write(tmp_path / "x", [[[4]]])
    order = [call for call in calls.seen if call[0] != "write"]
    folder = ("sync", tmp_path.name)
    assert order == [
        ("sync", ".x.bin.partial"),
        ("sync", ".x.idx.partial"),
        folder,
        ("rename", ".x.bin.partial -> x.bin"),
        folder,
        ("rename", ".x.idx.partial -> x.idx"),
        folder,
    ]
    assert IndexedReader(tmp_path / "x").tokens(0, 1) == [4]


@pytest.mark.parametrize("old", [False, True])
def test_any_failure_leaves_the_old_pair_or_nothing(tmp_path, monkeypatch, old):
    """Whatever write, sync or rename fails: no partial file, and no pair that is not whole."""
    with durable_calls(monkeypatch) as calls:
        write(tmp_path / "first", [[[1, 2]], [[3]]], cuts=2)
    for number in range(len(calls.seen)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if old:
            write(folder / "x", [[[9]]])
        before = sorted(folder.iterdir())
        with (
            durable_calls(monkeypatch, number) as failing,
            pytest.raises(ResourceError, match="No space left"),
        ):
            write(folder / "x", [[[1, 2]], [[3]]], cuts=2)
        assert len(failing.seen) > number
        left = sorted(folder.iterdir())
        if before and left == before:
            assert IndexedReader(folder / "x").tokens(0, 1) == [9]
        else:
            assert not (folder / "x.idx").exists()
            assert [path for path in left if path.name.startswith(".")] == []
            assert left in ([], [folder / "x.bin"] if old else [])


def test_short_writes_are_continued(tmp_path, monkeypatch):
    from mdata.util import atomic_io

    real = atomic_io.write
    monkeypatch.setattr(atomic_io, "write", lambda fd, data: real(fd, data[:3]))
    write(tmp_path / "x", [[[1, 2, 3], [4]], [[5, 6]]])
    assert read_pair(tmp_path / "x") == ([(1, 2, 3), (4,), (5, 6)], [0, 2, 3])


def test_an_io_error_is_named(tmp_path, monkeypatch):
    with (
        durable_calls(monkeypatch, 2, code=errno.EIO),
        pytest.raises(ResourceError, match=r"writing .*x.*: Input/output error"),
    ):
        write(tmp_path / "x", [[[1, 2]]])


def test_a_second_writer_of_one_prefix_is_refused_and_the_first_goes_on(tmp_path):
    with IndexedWriter(tmp_path / "x", smallest_dtype(100)) as first:
        append(first, [[[1, 2]]])
        with pytest.raises(UsageError, match="another process is writing"):
            IndexedWriter(tmp_path / "x", smallest_dtype(100))
        append(first, [[[3]]])
        first.commit()
    assert IndexedReader(tmp_path / "x").tokens(0, 3).tolist() == [1, 2, 3]


def test_what_a_killed_writer_left_is_taken_over(tmp_path):
    (tmp_path / ".x.bin.partial").write_bytes(b"older and longer")
    write(tmp_path / "x", [[[7]]])
    assert IndexedReader(tmp_path / "x").tokens(0, 1).tolist() == [7]


EVENTS = st.lists(st.one_of(DOCUMENTS, st.sampled_from(["checkpoint", "leave", "killed", "placed"])), max_size=12)


@examples(60)
@given(events=EVENTS, dtype=st.sampled_from(["<u2", "<i4"]))
def test_a_writer_continues_where_the_last_checkpoint_was(tmp_path_factory, events, dtype):
    """Left, killed, or placed and put back: the pair is that of one writer that was never stopped."""
    folder = tmp_path_factory.mktemp("w")
    writer, written, kept = IndexedWriter(folder / "x", np.dtype(dtype)), [], None
    for event in events:
        if isinstance(event, list):
            append(writer, event)
            written += event
        elif event == "checkpoint":
            kept = (writer.checkpoint(), list(written))
            assert kept[0]._replace(sync_points=()) == writer.state and kept[0].documents == len(written)
        elif kept is not None:
            if event == "placed":
                writer.commit()
                writer.roll_back()
            writer.close()
            writer = IndexedWriter(folder / "x", np.dtype(dtype), resume=kept[0])
            written = list(kept[1])
            assert writer.state == kept[0]._replace(sync_points=())
            assert not (folder / "x.idx").exists() and not (folder / "x.bin").exists()
    facts = writer.commit()
    writer.discard()
    with IndexedWriter(folder / "whole", np.dtype(dtype)) as whole:
        append(whole, written)
        assert whole.commit() == facts
    for ending in (".bin", ".idx"):
        assert (folder / f"x{ending}").read_bytes() == (folder / f"whole{ending}").read_bytes()
    assert len(list(folder.iterdir())) == 4


def test_blocks_are_hashed_across_a_cut(tmp_path):
    tokens = np.arange(BLOCK_BYTES // 2 * 2 + 999) % 60000
    one = np.array([1])
    writer = IndexedWriter(tmp_path / "x", np.dtype("<u2"))
    for size in (BLOCK_BYTES // 2 + 77, 5):
        part, tokens = tokens[:size], tokens[size:]
        writer.append(part, np.array([len(part)]), document_ends=one)
        state = writer.checkpoint()
    writer.append(tokens, np.array([len(tokens)]), document_ends=one)
    writer.close()
    writer = IndexedWriter(tmp_path / "x", np.dtype("<u2"), resume=state)
    writer.append(tokens, np.array([len(tokens)]), document_ends=one)
    facts = writer.commit()
    writer.discard()
    data = (tmp_path / "x.bin").read_bytes()
    blocks = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
    assert facts.block_hashes == tuple(blake3.blake3(block).digest() for block in blocks) and len(blocks) == 3
    assert facts.largest_id == 59999


def test_a_placed_pair_is_taken_back(tmp_path):
    writer = IndexedWriter(tmp_path / "x", np.dtype("<u2"))
    append(writer, [[[1, 2]]])
    writer.checkpoint()
    first = writer.commit()
    writer.roll_back()
    assert not (tmp_path / "x.idx").exists() and not (tmp_path / "x.bin").exists()
    append(writer, [[[3]]])
    assert writer.commit().tokens == first.tokens + 1
    writer.discard()
    assert read_pair(tmp_path / "x") == ([(1, 2), (3,)], [0, 1, 2])


def test_a_finished_pair_is_never_continued_nor_taken_back(tmp_path):
    """The file in the making was lost: by name alone the older result would do."""
    write(tmp_path / "x", [[[7, 7, 7, 7]]])
    writer = IndexedWriter(tmp_path / "x", smallest_dtype(100))
    append(writer, [[[1, 2]]])
    state = writer.checkpoint()
    (tmp_path / ".x.bin.partial").unlink()
    with pytest.raises(DamageError, match="was removed while it was being written"):
        writer.commit()
    writer.roll_back()
    writer.close()
    with pytest.raises(DamageError, match=r"\.x\.bin\.partial is shorter"):
        IndexedWriter(tmp_path / "x", smallest_dtype(100), resume=state)
    assert (tmp_path / "x.bin").read_bytes() == np.full(4, 7, "<u2").tobytes()


def test_what_was_lost_of_a_writer_is_damage(tmp_path):
    for ending in (".bin", ".lengths", ".boundaries", ".hashes"):
        writer = IndexedWriter(tmp_path / "x", np.dtype("<u2"))
        size = BLOCK_BYTES // 2 + 1
        writer.append(np.ones(size, int), np.array([size]), document_ends=np.array([1]))
        state = writer.checkpoint()
        writer.close()
        lost = tmp_path / f".x{ending}.partial"
        lost.write_bytes(lost.read_bytes()[:-1])
        with pytest.raises(DamageError, match=rf"x{ending}\.partial is shorter than it was"):
            IndexedWriter(tmp_path / "x", np.dtype("<u2"), resume=state)
        assert lost.exists()  # somebody may still want to look


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_placing_that_fails_leaves_all_to_continue(tmp_path, monkeypatch, code):
    number = 0
    while True:
        folder = tmp_path / str(number)
        folder.mkdir()
        writer = IndexedWriter(folder / "x", np.dtype("<u2"))
        append(writer, [[[1, 2]], [[3]]])
        state = writer.checkpoint()
        with durable_calls(monkeypatch, number, code=code) as calls:
            try:
                writer.commit()
            except ResourceError:
                pass
            else:
                break
        assert not (folder / "x.idx").exists() and not (folder / "x.bin").exists()
        writer.close()
        with IndexedWriter(folder / "x", np.dtype("<u2"), resume=state) as again:
            again.commit()
        assert read_pair(folder / "x") == ([(1, 2), (3,)], [0, 1, 2])
        number += 1
    assert number == len(calls.seen) > 5
    writer.discard()
