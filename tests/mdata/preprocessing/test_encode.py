"""From a chunk to arrays: choosing documents, widths of ids, records that one key's tokenizer refuses."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import UsageError
from mdata.preprocessing.encode import Encoded, EncodeSpec, divide, encode_chunk, encode_documents, encode_records
from mdata.sources.chunk import chunks
from mdata.sources.record_batch import Column, ReadSpec, RecordBatch
from mdata.tokenizers.base.tokenizer import TextRefused, TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.examples import examples
from tests.mdata.preprocessing.test_preprocess import TOKENIZER, options
from tests.mdata.sources.inputs import find_files

NUMBERS = load_tokenizer(TokenizerSpec(type="NullTokenizer", options=(("vocab_size", 100),)))
DOCUMENTS = st.lists(st.lists(st.integers(1, 4), max_size=3), max_size=9)


def encoded_of(documents: list[list[int]]) -> Encoded:
    """Lengths of sequences; ids count up, and a text has as many bytes as its document's number."""
    lengths = [length for document in documents for length in document]
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    arrays = np.arange(sum(lengths), dtype=np.uint16), np.array(lengths, np.int64), ends
    return Encoded(*arrays, np.arange(len(documents)), 7)


def as_lists(encoded: Encoded) -> list[tuple[list[list[int]], int]]:
    ends = [0, *np.cumsum(encoded.lengths).tolist()]
    sequences = [encoded.tokens[a:b].tolist() for a, b in itertools.pairwise(ends)]
    bounds = itertools.pairwise([0, *encoded.document_ends.tolist()])
    documents = [sequences[a:b] for a, b in bounds]
    return list(zip(documents, encoded.text_bytes.tolist(), strict=True))


@examples(200)
@given(documents=DOCUMENTS, data=st.data())
def test_divide_takes_whole_documents(documents, data):
    numbers = data.draw(st.lists(st.integers(0, 3), min_size=len(documents), max_size=len(documents)))
    encoded = encoded_of(documents)
    found = {number: (chosen, part) for number, chosen, part in divide(encoded, np.array(numbers, np.int64))}
    assert sorted(found) == sorted(set(numbers))
    for number, (chosen, part) in found.items():
        assert chosen.tolist() == [place for place, one in enumerate(numbers) if one == number]
        assert as_lists(part) == [as_lists(encoded)[place] for place in chosen]
        assert part.special_in_text == 0 and part.tokens.dtype == encoded.tokens.dtype
        assert int(part.lengths.sum()) == len(part.tokens)


def spec(*, dtype="uint16", eod=None, keys=("text",)) -> EncodeSpec:
    return EncodeSpec(ReadSpec(json_keys=keys), eod, dtype)


@examples(100)
@given(ids=st.lists(st.lists(st.sampled_from([0, 1, 65535, 65536, -1, 2**31 - 1, -(2**31)]), min_size=1, max_size=4)))
def test_an_id_that_does_not_fit_is_refused_by_its_text(ids):
    column = Column([" ".join(map(str, some)) for some in ids], None)
    wrong = [number for number, some in enumerate(ids) if any(not 0 <= id <= 65535 for id in some)]
    if wrong:
        with pytest.raises(TextRefused, match="does not fit uint16") as caught:
            encode_documents(column, NUMBERS, spec=spec())
        assert caught.value.index == wrong[0]
    else:
        assert encode_documents(column, NUMBERS, spec=spec()).tokens.tolist() == [id for some in ids for id in some]
    assert encode_documents(column, NUMBERS, spec=spec(dtype="int32")).tokens.tolist() == [i for s in ids for i in s]


WORDS = st.one_of(st.just("1 2"), st.just("x"), st.just(""), st.just("70000"), st.just("5"))


@examples(150)
@given(
    rows=st.lists(st.tuples(st.lists(WORDS, max_size=2), WORDS, st.booleans()), max_size=8),
    eod=st.sampled_from([None, 99]),
)
def test_a_record_is_taken_under_all_keys_or_under_none(rows, eod):
    """Rows of two keys, the third value: whether parsing left the row out already."""
    kept = [row for row, (_, _, bad) in enumerate(rows, 1) if not bad]
    taken = [rows[row - 1] for row in kept]
    ends = np.cumsum([len(first) for first, _, _ in taken], dtype=int).tolist()
    columns = (
        Column([text for first, _, _ in taken for text in first], ends),
        Column([two for _, two, _ in taken], None),
    )
    batch, parts = encode_records(RecordBatch(len(rows), kept, columns, []), NUMBERS, spec=spec(eod=eod))
    good = [row for row in kept if all(word in ("1 2", "5") for word in [*rows[row - 1][0], rows[row - 1][1]])]
    assert (len(rows) if batch.kept is None else batch.rows) == len(rows)
    assert (batch.kept if batch.kept is not None else kept) == good
    assert [bad_row.row for bad_row in batch.bad_rows] == [row for row in kept if row not in good]
    assert {bad_row.kind for bad_row in batch.bad_rows} <= {"bad-text"}
    expected = [[ids_of([*rows[row - 1][0]], eod) for row in good], [ids_of([rows[row - 1][1]], eod) for row in good]]
    assert [[document for document, _ in as_lists(part)] for part in parts] == expected


def ids_of(sentences: list[str], eod: int | None) -> list[list[int]]:
    sequences = [[int(word) for word in sentence.split()] for sentence in sentences]
    if sequences and eod is not None:
        sequences[-1].append(eod)
    return sequences


def test_a_chunk_knows_its_rows_and_its_hash(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "1"}\n{"text": "x"}\n\n{"text": "2 3"}\n')
    (chunk,) = chunks(find_files([str(tmp_path / "x.jsonl")]), 1000, spec=ReadSpec())
    found = encode_chunk(chunk, NUMBERS, spec=spec())
    assert (found.rows, found.kept.tolist(), found.held) == (4, [1, 4], None)
    assert [(bad_row.row, bad_row.kind) for bad_row in found.bad_rows] == [(2, "bad-text"), (3, "blank")]
    assert found.by_key[0].tokens.tolist() == [1, 2, 3] and found.by_key[0].tokens.dtype == np.uint16


@pytest.mark.parametrize("workers", [1, 2])
def test_what_one_keys_tokenizer_refuses_is_left_out_of_all(tmp_path, workers):
    rows = [("1 2", "3"), ("x", "4"), ("5", "70000"), ("6", "7"), ("8", ""), ("9", "10")]
    text = "".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in rows)
    (tmp_path / "x.jsonl").write_text(text)
    result = mdata.preprocess(
        options(
            tmp_path,
            input=(str(tmp_path / "x.jsonl"),),
            json_keys=("a", "b"),
            tokenizer_type="NullTokenizer",
            tokenizer_model=None,
            tokenizer_options=(("vocab_size", 100),),
            on_error="quarantine",
            quarantine=str(tmp_path / "bad.jsonl"),
            workers=workers,
            chunk_bytes=50,
        )
    )
    found = {
        key: mdata.open_corpus(path).read(0, 4 if key == "a" else 3).tolist() for key, path in result.paths.items()
    }
    assert found == {"a": [1, 2, 6, 9], "b": [3, 7, 10]}
    for manifest in result.manifests.values():
        assert manifest.provenance.skipped == {"bad-text": 3} and manifest.shards[0].documents == 3
    entries = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [(entry["row"], entry["kind"]) for entry in entries] == [(2, "bad-text"), (3, "bad-text"), (5, "bad-text")]


def test_an_end_of_document_that_does_not_fit_is_refused(tmp_path):
    changes = {"tokenizer_type": "NullTokenizer", "tokenizer_model": None, "append_eod": True}
    wide = options(tmp_path, tokenizer_options=(("vocab_size", 100), ("eod_id", 65536)), **changes)
    with pytest.raises(UsageError, match=r"does not fit uint16(.|\n)*id 65536, 100 entries"):
        mdata.preprocess(wide)
    (tmp_path / "x.jsonl").write_text('{"text": "1"}\n')
    last = {"input": (str(tmp_path / "x.jsonl"),), "tokenizer_options": (("vocab_size", 100), ("eod_id", 65535))}
    result = mdata.preprocess(options(tmp_path / "out", **last, **changes))
    assert mdata.open_corpus(result.paths["text"]).read(0, 2).tolist() == [1, 65535]


def test_no_documents_at_all():
    found = encode_documents(Column([], None), TOKENIZER, spec=spec(eod=1))
    assert (len(found.tokens), len(found.lengths), len(found.document_ends), len(found.text_bytes)) == (0, 0, 0, 0)
