"""The sentence mapping: Megatron's arrays by sha256, a slow twin, and the properties of the native form."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError, _core
from mdata.samples.sentence_mapping import MappingOptions, megatron_mapping
from mdata.util.random_keys import derive_key
from tests.conftest import oracle_folder
from tests.helpers.examples import examples
from tests.helpers.masked import native_mapping
from tests.reference.mapping import keyed_words, one_epoch, shuffled, words32, words64

FOLDER = oracle_folder() / "oracle/bert_t5"
KEY = derive_key("test")

# Made by megatron-core 0.16.1's build_mapping of `golden_corpus`: (least sentences, share of short, request) -> sha256.
GOLDEN = {
    (1, 0.1, 1): "686c023cbca7a9e04194435131367fe5e7d258817ed26af6a96ac5a6b0c501f1",
    (2, 0.1, 1000): "f3e1d0b7543dce614788199b1eabf642f5729e42aabdd1fd14eeced59cfa451e",
    (1, 0.5, 300): "5de03045893a21951297aa9b22ace9755fe9c26e429bda243351e1ed8f3364a3",
    (2, 0.0, 1): "24381773bd9c21aca17584f6de9b2053d20187911c7077abb32e2e9c2b22127a",
    (3, 1.0, 77): "c209294081d3a957da251196179c8001afb5d1a38093737ff82ae54b74177d22",
}


def cases() -> list[dict]:
    return json.loads((FOLDER / "cases.json").read_text())["mappings"] if FOLDER.is_dir() else []


def from_case(case: dict) -> MappingOptions:
    return MappingOptions(
        longest=case["max_seq_length"],
        least_sentences=case["min_num_sent"],
        short_probability=case["short_seq_prob"],
    )


@pytest.fixture(scope="module")
def arrays():
    with np.load(FOLDER / "arrays.npz") as stored:
        return {name: stored[name] for name in stored.files}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_the_rows_are_megatrons(oracles, arrays, case):
    first, stop = case["documents"]
    boundaries = arrays[f"{case['corpus']}_docs"][first : stop + 1]
    sizes = arrays[f"{case['corpus']}_sizes"]
    request = {"seed": case["seed"], "num_samples": case["max_num_samples"], "epochs": case["num_epochs"]}
    request["num_samples"] = min(request["num_samples"], 1 << 40)
    wanted = case["mapping"]
    if wanted["shape"][0] == 0:
        with pytest.raises(UsageError, match="no document can be made into samples"):
            megatron_mapping(boundaries, sizes, options=from_case(case), **request)
        return
    rows = megatron_mapping(boundaries, sizes, options=from_case(case), **request)
    assert (str(rows.dtype), list(rows.shape)) == (wanted["dtype"], wanted["shape"])
    assert hashlib.sha256(rows.tobytes()).hexdigest() == wanted["sha256"]


def test_the_oracle_has_all_cases(oracles):
    assert len(cases()) == 40


SIZES = st.one_of(st.integers(0, 12), st.integers(509, 516))
DOCUMENTS = st.lists(st.lists(SIZES, max_size=6), min_size=1, max_size=8)
OPTIONS = st.builds(
    MappingOptions,
    longest=st.integers(2, 30),
    least_sentences=st.integers(1, 3),
    short_probability=st.sampled_from([0.0, 0.1, 0.3, 0.4, 0.5, 0.7, 1.0]),
)


def flat(documents: list[list[int]], *, before: int = 0) -> tuple[np.ndarray, np.ndarray]:
    boundaries = np.cumsum([before, *map(len, documents)])
    return boundaries, np.array([7] * before + [size for sizes in documents for size in sizes], np.int32)


def with_firsts(documents: list[list[int]], *, before: int = 0) -> list[tuple[int, list[int]]]:
    return list(zip(np.cumsum([before, *map(len, documents)]).tolist(), documents, strict=False))


def rules(options: MappingOptions) -> dict:
    return {
        "longest": options.longest,
        "short_probability": options.short_probability,
        "least_sentences": options.least_sentences,
    }


@examples(400)
@given(
    documents=DOCUMENTS,
    options=OPTIONS,
    seed=st.integers(0, 2**32 - 2),
    num_samples=st.none() | st.integers(0, 60),
    before=st.integers(0, 3),
)
def test_megatrons_rows_are_the_twins(documents, options, seed, num_samples, before):
    boundaries, sizes = flat(documents, before=before)
    words, expected = words32(seed), []
    while num_samples is None or len(expected) < num_samples:
        more = one_epoch(with_firsts(documents, before=before), **rules(options), words_of=lambda _: words)
        expected += more
        if num_samples is None or not more:
            break
    if not expected and num_samples != 0:
        with pytest.raises(UsageError, match="no document"):
            megatron_mapping(boundaries, sizes, options=options, seed=seed, num_samples=num_samples)
        return
    rows = megatron_mapping(boundaries, sizes, options=options, seed=seed, num_samples=num_samples)
    assert list(map(tuple, rows.tolist())) == shuffled(expected, seed)


@examples(200)
@given(documents=DOCUMENTS, options=OPTIONS, seed=st.integers(0, 9), number=st.integers(0, 2**40))
def test_native_rows_are_the_twins_and_can_be_made_in_parts(documents, options, seed, number):
    key = derive_key("test", seed)
    boundaries, sizes = flat(documents)
    expected = one_epoch(
        with_firsts(documents),
        **rules(options),
        words_of=lambda d: keyed_words((key.low, key.high), number + d),
    )
    rule = (options.longest, options.short_ratio, options.least_sentences)
    parts = [
        _core.keyed_mapping(boundaries[d : d + 2], sizes, *rule, key.low, key.high, number + d).tolist()
        for d in range(len(documents))
    ]
    assert [tuple(row) for part in parts for row in part] == expected
    if expected:
        rows = native_mapping(boundaries, sizes, options=options, key=key, first_document=number)
        assert list(map(tuple, rows.tolist())) == expected


@examples(200)
@given(documents=DOCUMENTS, options=OPTIONS)
def test_each_sentence_of_a_usable_document_stands_in_one_row(documents, options):
    boundaries, sizes = flat(documents)
    usable = [
        set(range(first, first + len(sizes)))
        for first, sizes in with_firsts(documents)
        if len(sizes) >= options.least_sentences and (len(sizes) == 1 or max(sizes) <= 512)
    ]
    if not usable:
        return
    rows = native_mapping(boundaries, sizes, options=options, key=KEY).tolist()
    seen = [sentence for first, stop, _ in rows for sentence in range(first, stop)]
    assert seen == sorted(set().union(*usable))
    # Two sentences at least are left for the last row, so that rows of three can end with one of two.
    assert all(stop - first >= min(options.least_sentences, 2) for first, stop, _ in rows)
    assert all(2 <= target <= options.longest for _, _, target in rows)


def golden_corpus() -> tuple[np.ndarray, np.ndarray]:
    """Documents of 0 to 9 sentences, by arithmetic alone; one has a long sentence."""
    documents = [[(7 * d + 5 * s * s) % 41 + 1 for s in range(d * 3 % 10)] for d in range(40)]
    documents[11][1] = 600
    documents[0] = [700]
    return flat(documents)


@pytest.mark.parametrize(("asked", "expected"), GOLDEN.items())
def test_the_rows_are_megatrons_without_the_oracle(asked, expected):
    least, probability, num_samples = asked
    options = MappingOptions(longest=61, least_sentences=least, short_probability=probability)
    rows = megatron_mapping(*golden_corpus(), options=options, seed=1234, num_samples=num_samples)
    assert hashlib.sha256(rows.astype("<u4").tobytes()).hexdigest() == expected


def test_the_generator_of_the_twin_is_the_standard_one():
    words = words64(5489)
    assert [next(words) for _ in range(10000)][-1] == 9981545732273789042  # the C++ standard's own check


@pytest.mark.parametrize(("probability", "ratio"), [(0.0, 0), (1.0, 1), (0.4, 3), (0.7, 1), (0.15, 7), (1e-300, 2**32)])
def test_a_share_becomes_one_in_so_many(probability, ratio):
    assert MappingOptions(longest=9, short_probability=probability).short_ratio == ratio


def test_tables_of_an_idx_need_no_alignment():
    boundaries, sizes = golden_corpus()
    aligned = megatron_mapping(boundaries, sizes, options=MappingOptions(longest=61), seed=1, num_samples=None)
    loose = [np.frombuffer(b"xx" + array.tobytes(), np.uint8)[2:].view(array.dtype) for array in (boundaries, sizes)]
    assert not loose[0].flags.aligned
    assert (megatron_mapping(*loose, options=MappingOptions(longest=61), seed=1, num_samples=None) == aligned).all()


def test_what_makes_no_sense_is_refused():
    boundaries, sizes = golden_corpus()
    for wrong, found in (
        ({"longest": 1}, 1),
        ({"longest": 2**31}, 2**31),
        ({"longest": 9, "short_probability": 1.5}, 1.5),
    ):
        with pytest.raises(UsageError, match=f"found: {found:,}"):
            MappingOptions(**wrong)
    for wrong in ({"seed": -1}, {"seed": 2**32 - 1}, {"num_samples": -1}, {"num_samples": 2**41}):
        with pytest.raises(UsageError, match=f"found: {next(iter(wrong.values()))}"):
            megatron_mapping(
                boundaries, sizes, options=MappingOptions(longest=9), **{"seed": 1, "num_samples": 1, **wrong}
            )
    assert megatron_mapping(boundaries, sizes, options=MappingOptions(longest=9), seed=1, num_samples=0).shape == (0, 3)
    hopeless = MappingOptions(longest=9, least_sentences=20)
    with pytest.raises(UsageError, match="40 documents, 0 of them with at least 20 sentences"):
        native_mapping(boundaries, sizes, options=hopeless, key=KEY)
    with pytest.raises(UsageError, match="40 documents, 0 of them with at least 20 sentences"):
        megatron_mapping(boundaries, sizes, options=hopeless, seed=1, num_samples=5)


@pytest.mark.parametrize("boundaries", [[0, 3], [-1, 1], [2, 1], [0, 2, 1]])
def test_documents_outside_of_the_sentences_are_refused_by_the_core(boundaries):
    with pytest.raises(IndexError, match="document"):
        _core.megatron_mapping(np.array(boundaries), np.array([1, 2], np.int32), 9, 0, 1, 1, 10, 1)


def test_a_rule_without_sense_is_refused_by_the_core():
    arrays = np.array([0, 1]), np.array([1], np.int32)
    for longest, least in ((1, 1), (2**31, 1), (9, 0)):
        with pytest.raises(ValueError, match="target"):
            _core.megatron_mapping(*arrays, longest, 0, least, 1, 10, 1)
