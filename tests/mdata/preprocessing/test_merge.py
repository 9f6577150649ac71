"""Merged partitions: the same bytes as writing all documents at once, with windows of any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.corpus.origins import OriginsWriter, open_origins
from mdata.errors import DamageError, UsageError
from mdata.indexed.reader import IndexedReader
from mdata.indexed.writer import IndexedWriter
from mdata.manifest.types import Statistics
from mdata.preprocessing import joining
from mdata.preprocessing.corpus_writer import CorpusWriter, origins_path
from mdata.preprocessing.joining import add_statistics, document_runs, merge_partitions
from tests.helpers.examples import examples
from tests.reference.indexed import read_pair

# Documents are lists of sequences; an empty document has none.
PARTS = st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8), min_size=1, max_size=4)


def sequences_of(documents, first):
    """Each length as that many ids that say where they are from."""
    return [[first + k for k in range(length)] for document in documents for length in document]


def write_part(prefix, documents, *, file=0):
    sequences = sequences_of(documents, file * 1000)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.append(
            np.array([id for ids in sequences for id in ids], np.int64),
            np.array([len(ids) for ids in sequences], np.int64),
            document_ends=np.cumsum([len(document) for document in documents], dtype=np.int64),
        )
        writer.commit()
    origins = OriginsWriter(origins_path(prefix), 1)
    origins.append(file, np.arange(1, 2 * len(documents), 2))
    origins.commit()
    origins.discard()


@examples(40)
@given(parts=PARTS, documents_at_once=st.integers(1, 9), tokens_at_once=st.integers(1, 40))
def test_the_merged_pair_is_the_documents_of_all_parts(tmp_path_factory, parts, documents_at_once, tokens_at_once):
    folder = tmp_path_factory.mktemp("m")
    prefixes = [folder / f"part{number}" for number in range(len(parts))]
    for number, documents in enumerate(parts):
        write_part(prefixes[number], documents, file=number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "_DOCUMENTS_AT_ONCE", documents_at_once)
        patch.setattr(joining, "_TOKENS_AT_ONCE", tokens_at_once)
        writer = CorpusWriter(folder / "all", "uint16", step=1)
        merge_partitions(prefixes, writer)
        writer.pair.commit()
        writer.origins.commit()
        writer.close(keep=False)
    sequences = [tuple(ids) for number, part in enumerate(parts) for ids in sequences_of(part, number * 1000)]
    boundaries = np.cumsum([0, *(len(document) for part in parts for document in part)]).tolist()
    assert read_pair(folder / "all") == (sequences, boundaries)
    whole = b"".join(prefix.with_name(prefix.name + ".bin").read_bytes() for prefix in prefixes)
    assert (folder / "all.bin").read_bytes() == whole
    places = [(number, 2 * k + 1) for number, part in enumerate(parts) for k in range(len(part))]
    found = open_origins(origins_path(folder / "all"))
    assert [found.of_document(number) for number in range(len(places))] == places


def test_runs_are_bounded_and_a_document_is_never_cut(tmp_path, monkeypatch):
    write_part(tmp_path / "x", [[3], [4], [20], [], [2, 2], [1]])
    reader = IndexedReader(tmp_path / "x")
    monkeypatch.setattr(joining, "_TOKENS_AT_ONCE", 7)
    runs = [(len(tokens), ends.tolist()) for tokens, _, ends in document_runs(tmp_path / "x", reader)]
    assert runs == [(7, [1, 2]), (20, [1]), (5, [0, 2, 3])]
    monkeypatch.setattr(joining, "_DOCUMENTS_AT_ONCE", 1)
    assert [len(tokens) for tokens, _, _ in document_runs(tmp_path / "x", reader)] == [3, 4, 20, 0, 4, 1]


def test_counts_of_parts_add_up_empty_ones_included():
    some = Statistics(document_lengths=[1, 0, 5], text_bytes=70)
    none = Statistics(document_lengths=[], text_bytes=0)
    assert add_statistics([none, some, none, some]) == Statistics(document_lengths=[2, 0, 10], text_bytes=140)
    assert add_statistics([none, none]) == none


def test_a_damaged_part_is_refused(tmp_path):
    write_part(tmp_path / "x", [[3], [4]])
    path = tmp_path / "x.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DamageError, match=r"x\.idx"):
        merge_into(tmp_path)
    write_part(tmp_path / "x", [[3], [4]])
    origins_path(tmp_path / "x").unlink()
    with pytest.raises(UsageError, match="origins"):
        merge_into(tmp_path)


def merge_into(folder):
    writer = CorpusWriter(folder / "all", "uint16", step=1)
    try:
        merge_partitions([folder / "x"], writer)
    finally:
        writer.close(keep=False)
