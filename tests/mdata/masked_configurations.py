"""Random mappings of sentences and samples of BERT and T5 against the slow twins; see configurations.py."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np

from mdata.samples.bert import BertSamples
from mdata.samples.sample_options import MaskingOptions
from mdata.samples.sentence_mapping import MappingOptions, megatron_mapping
from mdata.samples.t5 import T5Samples
from mdata.util.random_keys import derive_key
from tests.helpers.masked import expected, make_corpus, make_samples, make_vocabulary, native_mapping, row_of, rows_of
from tests.mdata import layouts
from tests.mdata.layouts import Refused
from tests.reference.mapping import Row, keyed_words, one_epoch, shuffled, words32


def mapping(random: Random, _folder: Path) -> set[str]:
    """Rows of sentences, in both orders."""
    documents, before = layouts.draw_documents(random), random.randint(0, 3)
    options = MappingOptions(
        longest=random.randint(2, 30),
        least_sentences=random.choice((1, 1, 2, 2, 3)),
        short_probability=random.choice((0.0, 0.1, 0.3, 0.4, 0.5, 0.7, 1.0)),
    )
    boundaries = np.cumsum([before, *map(len, documents)])
    sizes = np.array([7] * before + [size for one in documents for size in one], np.int32)
    firsts = list(zip(boundaries.tolist(), documents, strict=False))
    rule = {"longest": options.longest, "short_probability": options.short_probability}
    rule["least_sentences"] = options.least_sentences
    seed, asked = (
        random.choice((0, 2**32 - 2, random.getrandbits(31))),
        random.choice((None, 0, 1, random.randint(0, 60))),
    )
    words = words32(seed)
    rows = whole_epochs(lambda: one_epoch(firsts, **rule, words_of=lambda _: words), asked)
    with Refused(not rows and asked != 0):
        made = megatron_mapping(boundaries, sizes, options=options, seed=seed, num_samples=asked)
        assert list(map(tuple, made.tolist())) == shuffled(rows, seed)
    key, number = derive_key("test", seed), random.choice((0, 2**32, 2**40))
    native = one_epoch(firsts, **rule, words_of=lambda d: keyed_words((key.low, key.high), number + d))
    with Refused(not native):
        made = native_mapping(boundaries, sizes, options=options, key=key, first_document=number)
        assert list(map(tuple, made.tolist())) == native
    return {f"least {options.least_sentences}", "asked" if asked else "not asked", "rows" if native else "refused"}


def whole_epochs(epoch, asked: int | None) -> list[Row]:
    """Rows of so many epochs that there are as many as asked for."""
    rows: list[Row] = []
    while asked is None or len(rows) < asked:
        more = epoch()
        rows += more
        if asked is None or not more:
            break
    return rows


def masked(random: Random, folder: Path) -> set[str]:
    """Samples of BERT and T5, in both orders."""
    documents = [*layouts.draw_documents(random), [3, 1]]
    order, kind = random.choice(("native", "megatron", "file")), random.choice((BertSamples, T5Samples))
    masking = {
        "probability": random.choice((0.01, 0.15, 0.15, 0.5, 0.99)),
        "max_ngram": random.choice((1, 2, 3, 9, 10, 140)),
        "whole_words": random.random() < 0.5,
        "longer_ngrams": random.random() < 0.3,
        "geometric": random.random() < 0.3,
    }
    masking["permutation"] = (
        kind is BertSamples and order != "megatron" and not masking["geometric"] and random.random() < 0.4
    )
    shared = {"masking": MaskingOptions(**masking), "short_probability": random.choice((0.0, 0.3, 1.0))}
    seed = random.choice((1, 1234, 2**32 - 2))
    if kind is BertSamples:
        length, more = random.randint(5, 60), {"head": random.random() < 0.5}
    else:
        length, more = random.randint(4, 60), {"decoder_length": random.randint(3, 50)}
    vocabulary = make_vocabulary(pad=random.choice((None, 0, 1, 2, 6, 17)), sentinels=random.choice((1, 3, 30)))
    shared |= {"sequence_length": length, "seed": seed, "order": order, "vocabulary": vocabulary}
    corpus = make_corpus(folder, documents, seed=random.getrandbits(30))
    made = make_samples(kind, corpus, (0, corpus.num_documents), **shared, **more)
    rows = rows_of(documents, made)
    assert made.num_samples == (None if order == "native" else len(rows))
    met = {f"{kind.kind} {order}"}
    for k in random.sample(range(3 * len(rows) if order == "native" else len(rows)), min(3, len(rows))):
        wanted = expected(made, k, row_of(rows, k, made))
        with Refused(wanted is None):
            assert {name: array.tolist() for name, array in made.sample(k).items()} == wanted
        met |= {"no room"} if wanted is None else set()
    return met
