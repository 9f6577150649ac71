"""Corpora and vocabularies for BERT and T5 samples, and the samples of their slow twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from mdata import Corpus, open_corpus
from mdata.samples.bert import BertSamples
from mdata.samples.masked import SentenceOrder
from mdata.samples.sample_options import T5, Bert
from mdata.samples.sentence_mapping import native_parts
from mdata.samples.special_tokens import MaskedVocabulary
from mdata.samples.t5 import T5Samples
from mdata.util.random_keys import derive_key
from tests.helpers.corpora import write_pair
from tests.reference import masking as twin
from tests.reference.mapping import Row, keyed_words, one_epoch, shuffled, words32
from tests.reference.permutation import entry

KINDS = (BertSamples, T5Samples)
TWINS = {BertSamples: twin.bert, T5Samples: twin.t5}


def make_vocabulary(*, pad: int | None = 0, sentinels: int = 30) -> MaskedVocabulary:
    """Ids 0 to 59; every third continues a word; 60 on are sentinels."""
    return MaskedVocabulary(
        ids=tuple(range(60)),
        continuations=tuple(range(9, 60, 3)),
        cls=2,
        sep=3,
        mask=4,
        bos=5,
        eos=6,
        pad=pad,
        sentinels=tuple(range(60, 60 + sentinels)),
    )


def make_corpus(folder: Path, documents: Sequence[Sequence[int]], *, seed: int = 0) -> Corpus:
    """A corpus of random ids (sometimes special ones); documents are given by the sizes of their sentences."""
    lengths = [size for document in documents for size in document]
    tokens = np.random.default_rng(seed).integers(0, 60, sum(lengths))
    prefix = folder / "x_text_sentence"
    write_pair(prefix, documents, tokens=tokens, code=8)
    return open_corpus(prefix)


def make_samples(kind, corpus: Corpus, documents: tuple[int, int], **options):
    """Samples of BERT or T5; options of the kind are passed beside those of the samples."""
    of_kind = {BertSamples: Bert, T5Samples: T5}[kind]
    own = {field.name: options.pop(field.name) for field in fields(of_kind) if field.name in options}
    order = {name: options.pop(name) for name in ("seed", "num_samples") if name in options}
    order = SentenceOrder(name=options.pop("order", "native"), **order)
    return kind(corpus, documents, options=of_kind(**own), order=order, **options)


def native_mapping(boundaries, sizes, **how):
    """The parts of an epoch together; see `native_parts`."""
    return np.concatenate(list(native_parts(boundaries, sizes, **how)))


def sentences_of(corpus: Corpus, row: Sequence[int]) -> list[list[int]]:
    """The text of a row of a mapping."""
    return [corpus.readers[0].sequence(i).tolist() for i in range(row[0], row[1])]


def rows_of(documents: Sequence[Sequence[int]], samples) -> list[Row]:
    """All rows of all documents, given by the sizes of their sentences; num_samples of Megatron's order is None."""
    kind, options, seed = samples.kind, samples.options, samples.seed
    firsts = list(zip(np.cumsum([0, *map(len, documents)]).tolist(), documents, strict=False))
    head = kind == "bert" and options.head
    rule = {
        "longest": samples.sequence_length - (3 if kind == "bert" else 2),
        "short_probability": options.short_probability,
        "least_sentences": 2 if head else 1,
    }
    if samples.order == "megatron":
        words = words32(seed)
        return shuffled(one_epoch(firsts, **rule, words_of=lambda _: words), seed)
    key = derive_key(f"{kind} mapping v1", seed, samples.corpus.id)
    return one_epoch(firsts, **rule, words_of=lambda d: keyed_words((key.low, key.high), d))


def row_of(rows: list[Row], k: int, samples) -> Row:
    """The row of sample k of these rows: k itself, or by the permutation of its epoch."""
    if samples.order != "native":
        return rows[k]
    epoch, place = divmod(k, len(rows))
    key = derive_key(f"{samples.kind} order v1", samples.seed, samples.corpus.id, epoch)
    return rows[entry(place, len(rows), key=(key.low, key.high))]


def draws_of(samples, k: int):
    """The generator from which the twin draws sample k."""
    if samples.order == "megatron":
        return np.random.RandomState((samples.seed + k) % 2**32)
    key = derive_key(f"{samples.kind} sample v1", samples.seed, samples.corpus.id)
    return twin.KeyedDraws((key.low, key.high), k)


def expected(samples, k: int, row: Sequence[int]) -> dict | None:
    """The twin's sample k, made from its row; None if it does not fit."""
    return TWINS[type(samples)](
        sentences_of(samples.corpus, row),
        int(row[2]),
        options=samples.options,
        sequence_length=samples.sequence_length,
        vocabulary=samples.vocabulary,
        draws=draws_of(samples, k),
        by_value=samples.order == "megatron",
    )
