"""The held-out share: decided by a document's text alone, so a grown corpus keeps what was held out."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata.indexed.reader import IndexedReader
from mdata.preprocessing.encode import HOLDOUT_BITS, held_out
from mdata.sources.record_batch import Column
from tests.helpers.examples import examples
from tests.mdata.preprocessing.test_preprocess import options
from tests.reference.preprocess import is_held_out

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def below(share: str) -> int:
    return int(float(share) * 2**HOLDOUT_BITS)


def column(documents: list[list[str]]) -> Column:
    ends = [sum(map(len, documents[: k + 1])) for k in range(len(documents))]
    return Column([text for document in documents for text in document], ends)


@examples(100)
@given(
    documents=st.lists(st.tuples(st.lists(TEXT, max_size=3), st.lists(TEXT, max_size=3)), max_size=8),
    share=st.sampled_from(["0", "0.25", "0.5", "0.875", "1"]),
)
def test_the_twin_agrees_over_all_keys(documents, share):
    columns = (column([first for first, _ in documents]), column([second for _, second in documents]))
    found = held_out(columns, below(share)).tolist()
    assert found == [is_held_out([*first, *second], share) for first, second in documents]


@examples(50)
@given(texts=st.lists(TEXT, max_size=8), data=st.data())
def test_neither_the_place_nor_the_form_of_a_document_matters(texts, data):
    """Strings, lists of one sentence, another order, other documents between: the same side."""
    sides = dict(zip(texts, held_out((Column(texts, None),), below("0.5")).tolist(), strict=True))
    assert held_out((column([[text] for text in texts]),), below("0.5")).tolist() == [sides[text] for text in texts]
    shuffled = data.draw(st.permutations([*texts, *data.draw(st.lists(TEXT, max_size=4))]))
    found = held_out((Column(shuffled, None),), below("0.5")).tolist()
    assert all(sides[text] == side for text, side in zip(shuffled, found, strict=True) if text in sides)


@pytest.mark.parametrize("share", ["0.001", "0.01", "0.1", "0.5", "0.9"])
def test_the_share_is_close_to_what_was_asked(share):
    """Within 4.5 standard deviations over 10,000 texts, which are fixed: it holds or it does not."""
    count, p = 10_000, float(share)
    texts = [f"document number {number}" for number in range(count)]
    held = int(held_out((Column(texts, None),), below(share)).sum())
    assert abs(held - count * p) <= 4.5 * (count * p * (1 - p)) ** 0.5
    assert held == held_out((Column(texts[::-1], None),), below(share)).sum()


def test_more_is_held_out_of_what_was_held_out_before():
    """A larger share holds out all that a smaller one did."""
    texts = [str(number) for number in range(1000)]
    sides = [held_out((Column(texts, None),), below(share)) for share in ("0", "0.1", "0.4", "1")]
    assert not sides[0].any() and sides[3].all()
    assert (sides[1] <= sides[2]).all() and 0 < sides[1].sum() < sides[2].sum()


def texts_of(manifest_path) -> set[str]:
    return {bytes(b).decode() for b in documents_of(manifest_path)}


def documents_of(path):
    corpus = mdata.open_corpus(path)
    reader = IndexedReader(path.with_suffix(""))
    ends = reader.lengths.cumsum()
    tokens = corpus.read(0, reader.num_tokens).tolist()
    return [tokens[end - length : end] for end, length in zip(ends.tolist(), reader.lengths.tolist(), strict=True)]


def test_a_grown_corpus_keeps_its_held_out_part(tmp_path):
    generator = random.Random(5)
    texts = [f"document {number} {generator.random()}" for number in range(200)]
    found = []
    for size in (80, 200):
        some = texts[:size]
        generator.shuffle(some)
        (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
        folder = tmp_path / str(size)
        given_options = options(
            folder, input=(str(tmp_path / "x.jsonl"),), tokenizer_type="ByteTokenizer", holdout="0.2", chunk_bytes=999
        )
        paths = mdata.preprocess(given_options).paths
        found.append({name: texts_of(path) for name, path in paths.items()})
    before, after = found
    assert before["text/holdout"] == after["text/holdout"] & set(texts[:80])
    assert before["text"] == after["text"] & set(texts[:80])
    assert after["text"] | after["text/holdout"] == set(texts) and not after["text"] & after["text/holdout"]
    assert 5 < len(before["text/holdout"]) < 30


@pytest.mark.parametrize("share", ["0", "0.0", "1", "1.0"])
def test_nothing_and_everything_are_exact(tmp_path, share):
    given_options = options(tmp_path, holdout=share)
    counts = {
        name: manifest.shards[0].documents for name, manifest in mdata.preprocess(given_options).manifests.items()
    }
    assert counts == ({"text": 10} if float(share) == 0 else {"text": 0, "text/holdout": 10})
