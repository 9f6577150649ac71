"""Samples of BERT and T5 compared with Megatron's own, field by field."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise

import numpy as np
import pytest

from mdata import UsageError, open_corpus
from mdata.samples.bert import BertSamples
from mdata.samples.sample_options import Bert, MaskingOptions
from mdata.samples.special_tokens import MaskedVocabulary
from mdata.samples.t5 import T5Samples
from tests.conftest import oracle_folder
from tests.helpers.corpora import write_pair
from tests.helpers.masked import make_samples
from tests.reference import masking as twin

FOLDER = oracle_folder() / "oracle/bert_t5"


def cases(*, permuted: bool = False) -> list[dict]:
    found = json.loads((FOLDER / "cases.json").read_text())["samples"] if FOLDER.is_dir() else []
    return [case for case in found if case["masking_do_permutation"] == permuted]


@pytest.fixture(scope="module")
def arrays():
    """Nothing without oracle data: `oracles` skips the tests, but is set up after this one, whose scope is wider."""
    if not FOLDER.is_dir():
        return {}
    with np.load(FOLDER / "arrays.npz") as stored:
        return {name: stored[name] for name in stored.files}


@pytest.fixture(scope="module")
def corpora(arrays, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    opened = {}
    for name in ("small", "medium") if arrays else ():
        docs, sizes = arrays[f"{name}_docs"], arrays[f"{name}_sizes"]
        documents = [sizes[a:b].tolist() for a, b in pairwise(docs)]
        prefix = folder / f"{name}_text_sentence"
        write_pair(prefix, documents, tokens=arrays[f"{name}_tokens"], code=8)
        opened[name] = open_corpus(prefix)
    return opened


def vocabulary(arrays, case) -> MaskedVocabulary:
    known = json.loads((FOLDER / "cases.json").read_text())["tokenizer"]
    return MaskedVocabulary(
        ids=tuple(arrays["vocabulary_ids"].tolist()),
        continuations=tuple(arrays["continuation_ids"].tolist()),
        **{name: known[name] for name in ("cls", "sep", "mask", "bos", "eos")},
        pad=known["eos"] if case["effective_pad"] == -1 else known["pad"],
        sentinels=tuple(range(*known["sentinels"])),
    )


def masking(case: dict) -> MaskingOptions:
    return MaskingOptions(
        probability=case["masking_probability"],
        max_ngram=case["masking_max_ngram"],
        whole_words=case["masking_do_full_word"],
        longer_ngrams=case["masking_use_longer_ngrams"],
        geometric=case["masking_use_geometric_distribution"],
        permutation=case["masking_do_permutation"],
    )


def samples(case: dict, corpus, known: MaskedVocabulary) -> BertSamples | T5Samples:
    shared = {
        "seed": case["random_seed"],
        "short_probability": case["short_sequence_probability"],
        "masking": masking(case),
    }
    shared |= {"sequence_length": case["sequence_length"], "vocabulary": known}
    shared |= {"order": "megatron", "num_samples": case["num_samples"]}
    documents = tuple(case.get("documents", (0, corpus.num_documents)))
    if case["kind"] == "BERT":
        return make_samples(BertSamples, corpus, documents, head=case["classification_head"], **shared)
    return make_samples(T5Samples, corpus, documents, decoder_length=case["sequence_length_decoder"], **shared)


@pytest.mark.parametrize("case", [case for case in cases() if "raises" not in case], ids=lambda case: case["id"])
def test_the_samples_are_megatrons(oracles, arrays, corpora, case):
    made = samples(case, corpora[case["corpus"]], vocabulary(arrays, case))
    assert made.num_samples == case["length"]
    assert hashlib.sha256(made.rows.tobytes()).hexdigest() == case["sample_index"]["sha256"]
    together = made.read(case["indices"])
    assert list(together) == case["fields"]
    for name in case["fields"]:
        assert (together[name] == arrays[f"{case['id']}_{name}"]).all(), name
        assert together[name].dtype == case[name]["dtype"]
    for place, index in enumerate(case["indices"]):
        for name, array in made.sample(index).items():
            assert (array == together[name][place]).all(), name


def test_no_request_is_one_epoch_where_the_original_fails(oracles, arrays, corpora):
    (case,) = [case for case in cases() if "raises" in case]
    made = samples(case | {"effective_pad": 0}, corpora[case["corpus"]], vocabulary(arrays, {"effective_pad": 0}))
    (other,) = [one for one in cases() if one["id"] == "bert05"]
    assert made.num_samples == other["length"]  # which asked for less than an epoch gives
    assert hashlib.sha256(made.rows.tobytes()).hexdigest() == other["sample_index"]["sha256"]


def test_the_permutation_that_the_original_does_not_seed_is_refused(oracles, arrays, corpora):
    (case,) = cases(permuted=True)
    with pytest.raises(UsageError, match="without a seed"):
        samples(case, corpora[case["corpus"]], vocabulary(arrays, case))


class HalfSeeded(np.random.RandomState):
    """After its second shuffle lengths are drawn from a generator of their own: how the oracle ran the original."""

    shuffles = 0

    def shuffle(self, values):
        self.shuffles += 1
        self.other = np.random.RandomState(0)
        super().shuffle(values)

    def choice(self, *arguments, **named):
        return (self.other if self.shuffles == 2 else super()).choice(*arguments, **named)


def test_the_twins_permutation_is_the_originals_once_that_is_seeded(oracles, arrays, corpora):
    """Native samples draw all of it from one stream; test_masked.py holds them to this twin."""
    (case,) = cases(permuted=True)
    for place, index in enumerate(case["indices"]):
        first, stop, target = arrays[f"{case['id']}_sample_index"][index].tolist()
        sample = twin.bert(
            [corpora[case["corpus"]].readers[0].sequence(i).tolist() for i in range(first, stop)],
            target,
            options=Bert(masking=masking(case)),
            sequence_length=case["sequence_length"],
            vocabulary=vocabulary(arrays, case),
            draws=HalfSeeded((case["random_seed"] + index) % 2**32),
            by_value=True,
        )
        for name in case["fields"]:
            assert sample[name] == arrays[f"{case['id']}_{name}"][place].tolist(), name


def test_the_oracle_has_all_cases(oracles):
    assert (len(cases()), len(cases(permuted=True))) == (11, 1)
