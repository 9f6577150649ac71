"""The special tokens that samples need, read from a tokenizer or given."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import mdata
from mdata import UsageError, open_corpus
from mdata.samples.bert import BertSamples
from mdata.samples.sample_options import T5, Bert
from mdata.samples.special_tokens import MaskedVocabulary, vocabulary_from, vocabulary_of
from mdata.samples.t5 import T5Samples
from mdata.tokenizers.base.tokenizer import TextRefused

ENTRIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue", "##s", "##ish", "green", "sky", "."]


def preprocessed(tmp_path, name: str, **more):
    (tmp_path / "vocab.txt").write_text("".join(f"{entry}\n" for entry in ENTRIES))
    records = [{"text": ["reds blueish .", "sky green .", f"blues {'sky ' * n}."]} for n in range(9)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = mdata.PreprocessOptions(
        input=(str(tmp_path / "x.jsonl"),),
        output_prefix=str(tmp_path / "x"),
        tokenizer_type=name,
        vocab_file=str(tmp_path / "vocab.txt"),
        **more,
    )
    mdata.preprocess(options)
    return open_corpus(tmp_path / "x_text_document.json")


def test_a_wordpiece_tokenizer_says_it_all(tmp_path):
    corpus = preprocessed(tmp_path, "BertWordPieceCase")
    found = vocabulary_of(corpus)
    assert (found.pad, found.cls, found.sep, found.mask) == (0, 2, 3, 4)
    assert (found.bos, found.eos) == (2, 3)
    assert found.continuations == (7, 8)
    assert found.sentinels == tuple(range(12, 112))
    assert found.ids == tuple(range(112))
    bert = BertSamples(corpus, (0, 9), options=Bert(), sequence_length=20)
    assert set(bert.sample(0)["text"].tolist()) <= set(found.ids)
    t5 = T5Samples(corpus, (0, 9), options=T5(decoder_length=12), sequence_length=20)
    assert t5.sample(0)["text_dec"][0] == 2


def test_without_sentinels_there_is_no_t5(tmp_path):
    corpus = preprocessed(tmp_path, "BertWordPieceLowerCase")
    assert vocabulary_of(corpus).sentinels == ()
    BertSamples(corpus, (0, 9), options=Bert(), sequence_length=20)
    with pytest.raises(UsageError, match=r"lacks sentinels(.|\n)*<extra_id_0>(.|\n)*\(sentinels=...\)"):
        T5Samples(corpus, (0, 9), options=T5(decoder_length=12), sequence_length=20)


def test_the_fork_of_2023_has_ends_of_its_own(tmp_path):
    corpus = preprocessed(tmp_path, "BertWordPieceCase", tokenizer_options=(("compat", "megatron-2023"),))
    found = vocabulary_of(corpus)
    assert (found.bos, found.eos, found.cls, found.sep) == (12, 13, 2, 3)
    assert found.ids == tuple(range(14))


def test_names_decide():
    found = vocabulary_from({"a": 0, "##b": 1, "[MASK]": 2, "<extra_id_0>": 4, "<extra_id_1>": 3, "<extra_id_3>": 5})
    assert found.sentinels == (4, 3)
    assert (found.cls, found.bos, found.pad, found.mask) == (None, None, None, 2)
    with pytest.raises(UsageError, match=r"lacks cls, sep\n  expected: \[CLS\] or <s>, \[SEP\] or </s> among"):
        found.require("cls", "sep", "mask")


def test_names_of_published_t5_and_roberta_are_known():
    """The decoder of a T5 begins with the padding, and sentinels are the last ids, downwards."""
    t5 = vocabulary_from({"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "<extra_id_1>": 4, "<extra_id_0>": 5})
    assert (t5.bos, t5.eos, t5.pad, t5.sentinels, t5.mask) == (0, 1, 0, (5, 4), None)
    roberta = vocabulary_from({"<s>": 0, "<pad>": 1, "</s>": 2, "a": 3, "<mask>": 4})
    assert (roberta.cls, roberta.sep, roberta.mask, roberta.pad) == (0, 2, 4, 1)
    both = vocabulary_from({"<s>": 0, "[CLS]": 1, "<mask>": 2, "[MASK]": 3, "</s>": 4, "[SEP]": 5})
    assert (both.cls, both.mask, both.sep, both.bos, both.eos) == (1, 3, 5, 1, 5)


def test_a_tokenizer_without_a_list_of_entries_is_asked_for_the_names():
    ids = {"<pad>": 0, "</s>": 1, "<extra_id_0>": 8, "<extra_id_1>": 7}

    def encode_batch(texts):
        raise TextRefused(0, "no text")

    tokenizer = SimpleNamespace(special_ids=ids, vocab_size=9, encode_batch=encode_batch)
    found = vocabulary_of(SimpleNamespace(name="x", load_tokenizer=lambda: tokenizer))
    assert (found.bos, found.eos, found.sentinels, found.ids) == (0, 1, (8, 7), tuple(range(9)))


def test_a_tokenizer_without_such_names_is_told(tmp_path):
    write = tmp_path / "x.jsonl"
    write.write_text('{"text": ["ab", "c"]}\n')
    options = {"input": (str(write),), "output_prefix": str(tmp_path / "x"), "tokenizer_type": "ByteTokenizer"}
    mdata.preprocess(mdata.PreprocessOptions(**options))
    corpus = open_corpus(tmp_path / "x_text_document.json")
    with pytest.raises(UsageError, match=r"does not say(.|\n)*ByteTokenizer(.|\n)*--tokenizer-type BertWordPiece"):
        vocabulary_of(corpus)


@pytest.mark.parametrize(("pad", "megatron"), [(None, -1), (0, 0), (6, -1), (2, -1), (9, -1), (7, 7)])
def test_megatron_pads_with_an_id_that_means_nothing_else(pad, megatron):
    known = MaskedVocabulary(ids=tuple(range(9)), cls=2, sep=3, mask=4, bos=5, eos=6, sentinels=(9,), pad=pad)
    assert known.megatron_pad == megatron


@pytest.mark.parametrize("wrong", [{"ids": ()}, {"ids": (2, 1)}, {"ids": (1, 1)}, {"ids": (-1, 1)}, {"pad": 1 << 31}])
def test_ids_that_are_none_are_refused(wrong):
    with pytest.raises(UsageError, match=r"ascending|ids from 0"):
        MaskedVocabulary(**{"ids": (0, 1), **wrong})


def test_the_fingerprint_knows_everything():
    known = {"ids": (0, 1, 2), "cls": 1}
    others = [{"ids": (0, 1)}, {"cls": 2}, {"sep": 1}, {"continuations": (2,)}, {"sentinels": (2,)}]
    prints = {MaskedVocabulary(**{**known, **other}).fingerprint for other in ({}, *others)}
    assert len(prints) == 6
