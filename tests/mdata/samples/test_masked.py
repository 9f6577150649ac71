"""Samples of BERT and T5: slow twins over random corpora and options, golden samples, the native order's promises."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError, _core, open_corpus
from mdata._core import MaskRule
from mdata.array_cache.cache import Cache
from mdata.samples.bert import BertSamples
from mdata.samples.sample_options import T5, MaskingOptions
from mdata.samples.t5 import T5Samples
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples
from tests.helpers.masked import KINDS, expected, make_corpus, make_samples, make_vocabulary, sentences_of
from tests.reference import masking as twin

SIZES = st.one_of(st.integers(0, 3), st.integers(4, 25), st.just(513))
DOCUMENTS = st.lists(st.lists(SIZES, max_size=5), min_size=1, max_size=6)
MASKING = st.builds(
    MaskingOptions,
    probability=st.sampled_from([0.01, 0.15, 0.3, 0.5, 0.99]),
    max_ngram=st.sampled_from([1, 2, 3, 9, 10, 140]),
    whole_words=st.booleans(),
    longer_ngrams=st.booleans(),
    geometric=st.booleans(),
)
PADS = st.sampled_from([None, 0, 1, 2, 6, 17])
SEEDS = st.one_of(st.integers(0, 9), st.just(2**32 - 2))


@st.composite
def options_of(draw, kind):
    masking, short, seed = draw(MASKING), draw(st.sampled_from([0.0, 0.3, 1.0])), draw(SEEDS)
    shared = {"masking": masking, "short_probability": short, "seed": seed}
    if kind is BertSamples:
        return {"sequence_length": draw(st.integers(5, 60)), "head": draw(st.booleans()), **shared}
    return {"sequence_length": draw(st.integers(4, 60)), "decoder_length": draw(st.integers(3, 50)), **shared}


@examples(150)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["megatron", "native"])
@given(data=st.data(), documents=DOCUMENTS, pad=PADS, sentinels=st.sampled_from([1, 3, 30]))
def test_samples_are_the_twins(tmp_path_factory, kind, order, data, documents, pad, sentinels):
    documents = [*documents, [3, 1]]  # one at least can be used, and it is a corpus of sentences
    corpus = make_corpus(tmp_path_factory.mktemp("c"), documents)
    options = data.draw(options_of(kind))
    if order == "native" and kind is BertSamples and not options["masking"].geometric and data.draw(st.booleans()):
        masking = MaskingOptions(max_ngram=options["masking"].max_ngram, permutation=True)
        options = {"sequence_length": options["sequence_length"], "head": options["head"], "masking": masking}
    known = make_vocabulary(pad=pad, sentinels=sentinels)
    samples = make_samples(kind, corpus, (0, corpus.num_documents), vocabulary=known, order=order, **options)
    count = min(samples.num_samples or 6, 6)
    rows = samples.rows[samples._places(np.arange(count))]
    for k in range(count):
        wanted = expected(samples, k, rows[k].tolist())
        if wanted is None:
            with pytest.raises(UsageError, match=f"sample {k} of x does not fit"):
                samples.sample(k)
            continue
        made = samples.sample(k)
        assert list(made) == list(wanted)
        assert {name: array.tolist() for name, array in made.items()} == wanted


def usual(kind, corpus, **more):
    plain = {"sequence_length": 48, "vocabulary": make_vocabulary()} | (
        {"decoder_length": 32} if kind is T5Samples else {}
    )
    documents = more.pop("documents", (0, corpus.num_documents))
    return make_samples(kind, corpus, documents, **{**plain, **more})


def digest(samples, numbers) -> str:
    """Of all fields, by name."""
    found = hashlib.sha256()
    for k in numbers:
        for name, array in sorted(samples.sample(k).items()):
            found.update(name.encode() + array.astype("<i8").tobytes())
    return found.hexdigest()


# Made by megatron-core 0.16.1 from `corpus`, 40 samples each: (kind, options, padding id) -> SHA-256.
GOLDEN = {
    "bert": ({"sequence_length": 48}, 0, "c61eb4f1a8f09432d6ccf67eb8c9d9b438f33185ab9194c04a2b603228600e3f"),
    "bert without head, by tokens": (
        {"sequence_length": 64, "head": False, "seed": 7, "masking": MaskingOptions(max_ngram=1, whole_words=False)},
        0,
        "dd7b8037412a3ce8390e376c1deeb7b49ea91468cef3931194cd9132715c9057",
    ),
    "bert with longer n-grams, padding that is eos too": (
        {"sequence_length": 40, "seed": 3, "masking": MaskingOptions(probability=0.4, longer_ngrams=True)},
        6,
        "36393a52f7b03e8fe2ad63b926bb7e9df7b0909524fdf05c3266bbaa4985d130",
    ),
    "bert with padding that the text has": (
        {"sequence_length": 48, "seed": 5},
        17,
        "ea500d3a080b5108dff1c35734b9d427e9c6bedf6a5805963770b79bb949410c",
    ),
    "t5": (
        {"sequence_length": 48, "decoder_length": 32},
        0,
        "2d554582e427d9af6d56f72f7f68f3f97ff6bd1cc6bdde643d3924437370739f",
    ),
    "t5 with few words in a row": (
        {"sequence_length": 64, "decoder_length": 64, "seed": 9, "masking": MaskingOptions(probability=0.3)},
        6,
        "1b008bd8a6a18e4be9571ec2c3e4e488e7f3c68aca988e28b9abf33c8d305d8a",
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """By arithmetic alone."""
    documents = [[(7 * d + 5 * s * s) % 19 + 1 for s in range(d * 3 % 10)] for d in range(60)]
    places = np.arange(sum(map(sum, documents)))
    prefix = tmp_path_factory.mktemp("corpus") / "x_text_sentence"
    write_pair(prefix, documents, tokens=places * places * 7 // 3 % 59, code=8)
    return open_corpus(prefix)


@pytest.mark.parametrize("name", GOLDEN)
def test_samples_are_megatrons_without_the_oracle(corpus, name):
    options, pad, wanted = GOLDEN[name]
    kind = T5Samples if "decoder_length" in options else BertSamples
    made = make_samples(kind, corpus, (0, 60), vocabulary=make_vocabulary(pad=pad), order="megatron", **options)
    assert digest(made, range(40)) == wanted


@pytest.mark.parametrize("probability", [0.15, 0.5])
def test_permuted_samples_are_the_twins(corpus, probability):
    masking = MaskingOptions(probability=probability, permutation=True)
    samples = usual(BertSamples, corpus, sequence_length=60, masking=masking, order="file")
    moved = 0
    for k, row in enumerate(samples.rows.tolist()):
        made = {name: array.tolist() for name, array in samples.sample(k).items()}
        assert made == expected(samples, k, row)
        moved += sum(
            asked and text not in (4, label)
            for asked, text, label in zip(*(made[name] for name in ("loss_mask", "text", "labels")), strict=True)
        )
    assert moved > 50


@pytest.mark.parametrize("kind", KINDS)
def test_native_draws_depend_on_nothing_but_the_number(corpus, kind):
    samples = usual(kind, corpus)
    assert samples.num_samples is None
    numbers = [3, 1000, 3, 0, 10**12]
    together = samples.read(numbers)
    again = pickle.loads(pickle.dumps(samples))
    for place, k in reversed(list(enumerate(numbers))):
        for name, array in again.sample(k).items():
            assert array.dtype == np.int64
            assert (array == together[name][place]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_each_native_epoch_has_every_row_once_in_an_order_of_its_own(corpus, kind):
    samples = usual(kind, corpus)
    n = len(samples.rows)
    orders = [samples._places(np.arange(epoch * n, epoch * n + n)).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    # The same row is masked anew.
    first, second = (samples.sample(epoch * n + orders[epoch].index(5)) for epoch in range(2))
    assert any((first[name] != second[name]).any() for name in first)


@pytest.mark.parametrize(("kind", "order"), [(BertSamples, "native"), (T5Samples, "megatron")])
def test_a_mapping_is_kept_and_found_again(corpus, kind, order, tmp_path, monkeypatch):
    wanted = {"order": order} | ({"num_samples": 300} if order == "megatron" else {})
    built = usual(kind, corpus, **wanted)
    kept = [usual(kind, corpus, cache=cache, **wanted) for cache in (Cache(str(tmp_path)), Cache(str(tmp_path)))]
    assert len(list(tmp_path.glob(f"{built.kind}-mapping-*"))) == 1
    monkeypatch.setattr(kind, "_map", None)
    kept.append(pickle.loads(pickle.dumps(kept[0])))
    for samples in kept:
        assert samples.rows.tolist() == built.rows.tolist() and samples.rows.dtype == built.rows.dtype
        assert digest(samples, range(50)) == digest(built, range(50))


def test_what_decides_a_mapping_is_in_its_key(corpus, tmp_path):
    """In one folder nothing is taken for something else."""
    changes = [{}, {"seed": 5}, {"short_probability": 0.5}, {"head": False}, {"sequence_length": 40}]
    wanted = [*changes, {"documents": (0, 30)}, {"documents": (5, 30)}, {"order": "megatron"}]
    wanted += [{"order": "megatron", "num_samples": 500}]
    for chosen in wanted:
        kept = usual(BertSamples, corpus, cache=Cache(str(tmp_path)), **chosen)
        assert kept.rows.tolist() == usual(BertSamples, corpus, **chosen).rows.tolist()
    assert len(list(tmp_path.glob("bert-mapping-*"))) == len(wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_seed_and_corpus_decide_the_native_order_and_draws(corpus, kind, tmp_path):
    other = make_corpus(tmp_path, [[3, 4, 5]] * 40)
    made = [usual(kind, one, seed=seed) for one, seed in ((corpus, 1), (corpus, 2), (other, 1))]
    places = [tuple(samples._places(np.arange(30)).tolist()) for samples in made]
    assert len(set(places)) == 3
    assert digest(made[0], range(3)) != digest(made[1], range(3))


@pytest.mark.parametrize("kind", KINDS)
def test_without_shuffling_there_is_one_pass_in_the_order_of_the_file(corpus, kind):
    samples = usual(kind, corpus, order="file")
    assert samples.num_samples == len(samples.rows)
    assert samples._places(np.arange(9)).tolist() == list(range(9))
    firsts = samples.rows[:, 0].tolist()
    assert firsts == sorted(firsts)
    for wrong in (-1, samples.num_samples):
        with pytest.raises(IndexError, match=str(wrong)):
            samples.sample(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_another_split_does_not_cut_its_documents_otherwise(corpus, kind):
    whole = usual(kind, corpus).rows.tolist()
    part = usual(kind, corpus, documents=(20, 50)).rows.tolist()
    assert part == [row for row in whole if part[0][0] <= row[0] <= part[-1][0]]


def test_what_the_decoder_writes_completes_the_text_of_the_encoder(corpus):
    """Also where sentinels and decoder are too short for all spans: native samples always have room."""
    options = {"sequence_length": 40, "decoder_length": 9, "masking": MaskingOptions(probability=0.6, max_ngram=2)}
    vocabulary = make_vocabulary(sentinels=3)
    samples = make_samples(T5Samples, corpus, (0, 60), vocabulary=vocabulary, order="file", **options)
    num_spans = Counter()
    for k in range(samples.num_samples):
        sample = samples.sample(k)
        encoder = sample["text_enc"][sample["enc_mask"] == 1].tolist()
        labels = sample["labels"][sample["loss_mask"] == 1].tolist()
        decoder = sample["text_dec"][sample["dec_mask"] == 1].tolist()
        assert (decoder[0], labels[-1], decoder[1:]) == (vocabulary.bos, vocabulary.eos, labels[:-1])
        spans: dict[int, list[int]] = {}
        for id in labels[:-1]:
            if id in vocabulary.sentinels:
                current = spans.setdefault(id, [])
            else:
                current.append(id)
        rebuilt = [id for token in encoder for id in spans.get(token, [token])]
        row = samples.rows[k].tolist()
        assert Counter(rebuilt) <= Counter(twin.joined(sentences_of(corpus, row))[: row[2]])
        num_spans[len(spans)] += 1
    assert set(num_spans) <= {0, 1, 2, 3} and num_spans[3] > 10


def test_native_padding_is_known_by_its_place(corpus):
    """17 stands in texts too: Megatron's samples lose it, native ones keep it."""
    options = {"sequence_length": 48, "head": False}
    native = make_samples(BertSamples, corpus, (0, 60), vocabulary=make_vocabulary(pad=17), order="file", **options)
    seen = 0
    for k in range(native.num_samples):
        sample = native.sample(k)
        used = int(sample["padding_mask"].sum())
        assert sample["padding_mask"].tolist() == [1] * used + [0] * (48 - used)
        assert (sample["text"][used:] == 17).all() and (sample["types"][used:] == 0).all()
        seen += int((sample["text"][:used] == 17).sum())
    assert seen > 10
    megatron = make_samples(
        BertSamples, corpus, (0, 60), vocabulary=make_vocabulary(pad=17), order="megatron", **options
    )
    assert not (megatron.read(range(megatron.num_samples))["text"] == 17).any()


def test_samples_go_into_the_callers_arrays(corpus):
    samples = usual(BertSamples, corpus)
    out = samples.allocate(3)
    for array in out.values():
        array.fill(-7)
    assert samples.read([5, 6, 7], out) is out
    assert all((out[name] == array).all() for name, array in samples.read([5, 6, 7]).items())
    assert {name: array.shape for name, array in samples.read([]).items()}["text"] == (0, 48)
    for wrong in (
        {**out, "text": out["text"].astype(np.int32)},
        {**out, "text": out["text"][:2]},
        {**out, "text": np.empty((3, 96), np.int64)[:, ::2]},
        {name: array for name, array in out.items() if name != "text"},
    ):
        with pytest.raises(UsageError, match=r"out\['text'\] cannot take the samples"):
            samples.read([5, 6, 7], wrong)


def test_what_does_not_go_together_is_refused(corpus):
    for wrong, told in (
        ({"order": "random"}, "no order 'random'"),
        ({"num_samples": 5}, "num_samples applies only to Megatron"),
        ({"documents": (0, 0)}, "no document"),
    ):
        with pytest.raises(UsageError, match=told):
            usual(BertSamples, corpus, **wrong)
    for wrong, told in (
        (lambda: MaskingOptions(probability=0.0), "found: 0.0"),
        (lambda: MaskingOptions(probability=1.0), "found: 1.0"),
        (lambda: MaskingOptions(max_ngram=0), "max_ngram"),
        (lambda: MaskingOptions(geometric=True, permutation=True), "geometric"),
        (lambda: T5(decoder_length=2), "decoder"),
        (lambda: T5(decoder_length=9, masking=MaskingOptions(permutation=True)), "T5"),
        (lambda: usual(BertSamples, corpus, sequence_length=4), "sequence length"),
        (lambda: usual(T5Samples, corpus, sequence_length=3, decoder_length=9), "sequence length"),
    ):
        with pytest.raises(UsageError, match=told):
            wrong()


def test_lengths_of_ngrams_have_numpys_chances():
    for most in (*range(1, 20), 64, 127, 128, 129, 136, 200, 257, 1000):
        for longer in (False, True):
            chances = 1.0 / (np.arange(most, dtype=np.int64) + 1)
            chances = (chances / chances.sum(keepdims=True))[:: -1 if longer else 1]
            sums = np.cumsum(chances / chances.sum(keepdims=True))
            assert (MaskRule(0.1, most, True, longer, False, False).bounds() == sums / sums[-1]).all()


CORE_ROWS = ([0], [5], [2], [3, 1], [9, 9, 9, 9])


@pytest.mark.parametrize(
    "wrong",
    [
        ([0], [5, 5], [2], [3, 1], [9] * 4),
        ([0, 1], [5, 5], [2, 1], [3, 1], [9] * 4),
        ([0], [5], [1], [3, 1], [9] * 4),
        ([0], [5], [3], [3, 1], [9] * 4),
        ([0], [5], [2], [3, -1], [9] * 2),
        ([0], [5], [2], [3, 1], [9] * 5),
        ([0], [5], [2], [2**31 - 1, 2**31 - 1], [9] * 4),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_the_core(wrong):
    core_rows(CORE_ROWS)
    with pytest.raises(ValueError, match=r"row|sentence"):
        core_rows(wrong)


def core_rows(parts) -> _core.MaskedRows:
    numbers, targets, ends, sizes, tokens = parts
    return _core.MaskedRows(
        np.array(numbers), np.array(targets), np.array(ends), np.array(sizes, np.int32), np.array(tokens)
    )


def test_fields_that_do_not_fit_are_refused_by_the_core():
    vocabulary, rule = make_vocabulary().as_core(), MaskingOptions().as_core()
    form, draws = _core.BertForm(8, True, 0, False), _core.KeyedDraws(1, 2)
    fields = [np.empty(size, np.int64) for size in (8, 8, 8, 1, 8, 8, 1)]

    def run(rows=CORE_ROWS, arrays=fields, form=form):
        _core.bert_samples(form, vocabulary, rule, draws, core_rows(rows), arrays)

    run()
    for arrays in (fields[:6], [*fields, fields[0]], [fields[0][:7], *fields[1:]]):
        with pytest.raises(ValueError, match="field"):
            run(arrays=arrays)
    for arrays in (
        [fields[0].astype(np.int32), *fields[1:]],
        [None, *fields[1:]],
        [np.empty(16, np.int64)[::2], *fields[1:]],
    ):
        with pytest.raises(TypeError, match="int64"):
            run(arrays=arrays)
    for rows in (([0], [6], [2], [3, 1], [9] * 4), ([0], [-1], [2], [3, 1], [9] * 4), ([0], [5], [1], [4], [9] * 4)):
        with pytest.raises(ValueError, match=r"target|pair"):  # no room for a target, or only one sentence of a pair
            run(rows=rows)
    for wrong in (lambda: _core.BertForm(4, True, 0, False), lambda: _core.MaskRule(0.1, 0, True, False, False, False)):
        with pytest.raises(ValueError, match=r"a length|n-grams"):
            wrong()
    with pytest.raises(ValueError, match="lengths"):
        _core.T5Form(3, 9, 5, 6, np.array([60]), 0, False)
    with pytest.raises(ValueError, match="without ids"):
        _core.MaskVocabulary(2, 3, 4, np.zeros(0, np.uint8), np.zeros(0, np.int64))


# What native samples are must not change without a new version: 40 samples each.
NATIVE = {
    BertSamples: "810673a3070667d133dd0b78c9eeb9804223e44eff10053693d705178a510e11",
    T5Samples: "83f9d37cd36fbfaa1d32fdab1016a8de35433c9b24e5c1923bd4de2d16ac550e",
}


@pytest.mark.parametrize("kind", KINDS)
def test_native_samples_stay_what_they_are(corpus, kind, monkeypatch):
    monkeypatch.setattr(corpus, "id", "ab" * 32)
    assert digest(usual(kind, corpus), range(40)) == NATIVE[kind]


def test_shares_of_what_is_masked(tmp_path):
    """15 % of the tokens; of them 80 % become [MASK] and 10 % any of 60; 10 % stay as they are."""
    sentences = [[20] * 12 for _ in range(300)]
    corpus = make_corpus(tmp_path, sentences)
    options = {"sequence_length": 128, "masking": MaskingOptions(whole_words=False, max_ngram=1)}
    samples = make_samples(BertSamples, corpus, (0, 300), vocabulary=make_vocabulary(), **options)
    read = samples.read(range(2000))
    asked = read["loss_mask"] == 1
    text, labels = read["text"][asked], read["labels"][asked]
    assert abs(asked.sum() / read["padding_mask"].sum() - 0.15) < 0.01
    assert abs((text == 4).mean() - 0.8 - 0.1 / 60) < 0.01
    assert abs((text == labels).mean() - 0.1 - 0.1 / 60 - 0.8 / 57) < 0.015
    assert abs(read["is_random"].mean() - 0.5) < 0.04
