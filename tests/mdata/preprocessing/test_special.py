"""Special tokens that occur in texts: ids by default, as in Megatron's tool, and counted; plain text on request."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata.preprocessing.encode import EncodeSpec, encode_documents
from mdata.sources.record_batch import Column, ReadSpec
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.examples import examples
from tests.mdata.preprocessing.test_preprocess import GOLDEN, options

MARK = "<|endoftext|>"
MODEL = str(GOLDEN / "tokenizer")
SPECIAL, PLAIN = (
    load_tokenizer(TokenizerSpec(type="HuggingFaceTokenizer", model=MODEL, options=(("special_in_text", how),)))
    for how in ("special", "plain")
)
PARTS = st.lists(st.sampled_from([MARK, "a", " b", "<|", "endoftext|>", "\u00e9"]), max_size=6)


@examples(100)
@given(documents=st.lists(st.lists(PARTS.map("".join), max_size=3), max_size=5), with_eod=st.booleans())
def test_each_one_is_counted_and_the_ends_we_put_in_are_not(documents, with_eod):
    sentences = [text for document in documents for text in document]
    ends = [sum(map(len, documents[: k + 1])) for k in range(len(documents))]
    spec = EncodeSpec(ReadSpec(), SPECIAL.eod if with_eod else None, "uint16")
    found = encode_documents(Column(sentences, ends), SPECIAL, spec=spec)
    spelled = sum(text.count(MARK) for text in sentences)
    assert found.special_in_text == spelled
    added = sum(any(document) for document in documents) if with_eod else 0
    assert (found.tokens == SPECIAL.eod).sum() == spelled + added
    plain = encode_documents(Column(sentences, ends), PLAIN, spec=spec)
    assert plain.special_in_text == 0 and (plain.tokens == SPECIAL.eod).sum() == added


@pytest.mark.parametrize("how", ["special", "plain"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_manifest_says_how_many(tmp_path, how, workers):
    texts = [f"{MARK} one {MARK}", "none", MARK, "cut <|endof" + "text|> too"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    result = mdata.preprocess(
        options(
            tmp_path,
            input=(str(tmp_path / "x.jsonl"),),
            tokenizer_options=(("special_in_text", how),),
            append_eod=True,
            workers=workers,
            chunk_bytes=30,
            partitions=2,
        )
    )
    corpus = mdata.open_corpus(result.paths["text"])
    tokens = corpus.read(0, result.manifests["text"].shards[0].tokens).tolist()
    spelled = 4 if how == "special" else 0
    # The counts of a run stand alike in all its results.
    assert {manifest.provenance.special_in_text for manifest in result.manifests.values()} == {spelled}
    assert tokens.count(SPECIAL.eod) == spelled + len(texts)
    shown = corpus.load_tokenizer().decode(tokens)
    assert shown.count(MARK) == 4 + len(texts)


def test_the_way_is_part_of_the_tokenizers_identity(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "plain words"}\n')
    ids = set()
    for how in ("special", "plain"):
        changes = {"input": (str(tmp_path / "x.jsonl"),), "tokenizer_options": (("special_in_text", how),)}
        ids.add(mdata.preprocess(options(tmp_path / how, **changes)).manifests["text"].id)
    assert len(ids) == 2
