"""Documents by number and by origin, with helpful errors."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata.corpus.documents import DocumentReader, select
from mdata.corpus.origins import OriginsWriter
from mdata.manifest.types import Origins
from tests.helpers.corpora import write_pair
from tests.helpers.manifests import corpus_of_pairs, some_corpus

INPUTS = ["data/a/x.jsonl", "data/b/x.jsonl", "y.jsonl"]


@pytest.fixture
def documents(tmp_path) -> DocumentReader:
    """Five documents: rows 1 and 3 of the first input, 2 and 3 of the second, 7 of the third; one is empty."""
    write_pair(tmp_path / "x", [[2, 1], [], [1], [3], [4]])
    writer = OriginsWriter(tmp_path / "x.origins", step=1)
    for file, rows in ((0, [1, 3]), (1, [2, 3]), (2, [7])):
        writer.append(file, np.array(rows))
    origins = Origins(path="x.origins", hash=writer.commit())
    writer.close()
    provenance = some_corpus().provenance
    (file,) = provenance.inputs
    inputs = [msgspec.structs.replace(file, path=path) for path in INPUTS]
    provenance = msgspec.structs.replace(provenance, inputs=inputs, origins=origins)
    corpus_of_pairs(tmp_path / "x.json", ["x"], provenance=provenance)
    return DocumentReader(mdata.open_corpus(tmp_path / "x"))


def test_a_document_gives_its_sequences(documents):
    found = [[ids.tolist() for ids in documents.corpus.document_sequences(n)] for n in range(5)]
    assert found == [[[0, 1], [2]], [], [[3]], [[4, 5, 6]], [[7, 8, 9, 10]]]


def test_shards_are_one_row_of_documents(tmp_path):
    write_pair(tmp_path / "a", [[1], [2]])
    write_pair(tmp_path / "b", [[3], [1, 1]])
    corpus_of_pairs(tmp_path / "both.json", ["a", "b"])
    both = DocumentReader(mdata.open_corpus(tmp_path / "both.json"))
    assert [[len(ids) for ids in both.corpus.document_sequences(n)] for n in range(4)] == [[1], [2], [3], [1, 1]]
    assert both.origins is None and both.origin(0) is None


def test_origins_both_ways(documents):
    found = [documents.origin(n) for n in range(5)]
    assert found == [(INPUTS[0], 1), (INPUTS[0], 3), (INPUTS[1], 2), (INPUTS[1], 3), (INPUTS[2], 7)]
    assert [documents.from_origin(f"{path}:{row}") for path, row in found] == [[n] for n in range(5)]
    assert documents.from_origin("y.jsonl:7") == documents.from_origin("./y.jsonl:7") == [4]
    assert documents.from_origin("b/x.jsonl:2") == [2]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("y.jsonl", "expected: FILE:ROW"),
        ("y.jsonl:0", "expected: FILE:ROW"),
        ("y.jsonl:x", "expected: FILE:ROW"),
        pytest.param("y.jsonl:" + "1" * 5000, "expected: FILE:ROW", id="more digits than Python reads"),
        ("x.jsonl:1", "matches the paths of 2 inputs\n  found: data/a/x.jsonl, data/b/x.jsonl"),
        ("z.jsonl:1", "z.jsonl is not an input of x"),
        ("yy.jsonl:1", "try: y.jsonl?"),
        ("y.jsonl:8", "y.jsonl:8 is not the origin of any document in x"),
        ("data/a/x.jsonl:2", "data/a/x.jsonl:2 is not the origin of any document in x"),
    ],
)
def test_an_origin_that_gave_no_document_is_refused(documents, place, text):
    with pytest.raises(mdata.UsageError) as caught:
        documents.from_origin(place)
    assert text in str(caught.value)


def test_a_lost_sidecar_is_told(documents):
    (documents.corpus.path.parent / "x.origins").unlink()
    again = DocumentReader(documents.corpus)
    assert again.origin(0) is None and again.missing == documents.corpus.path.parent / "x.origins"
    with pytest.raises(mdata.UsageError, match=r"x.origins is missing"):
        again.from_origin("y.jsonl:7")


@given(st.integers(1, 30), st.lists(st.tuples(st.none() | st.integers(-40, 40), st.none() | st.integers(-40, 40))))
def test_ranges_are_pythons(total, parts):
    text = ",".join(f"{'' if a is None else a}:{'' if b is None else b}" for a, b in parts) or ":"
    expected = [n for a, b in parts or [(None, None)] for n in range(total)[a:b]]
    assert list(select(text, total)) == expected


def test_numbers_and_ranges_come_in_the_order_they_are_given_in():
    assert list(select("3, 0,-1, 2:4", 5)) == [3, 0, 4, 2, 3]


@pytest.mark.parametrize("text", ["5", "-6", "x", "1:x", "", "1,,2", "1:2:3"])
def test_a_selection_of_documents_that_are_not_there_or_of_no_numbers_is_refused(text):
    with pytest.raises(mdata.UsageError, match="document"):
        select(text, 5)
