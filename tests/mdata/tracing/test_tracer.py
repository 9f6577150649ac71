"""Tracing both ways, by brute force: every sample forward, every document backward, in every kind and order."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import UsageError
from mdata.dataset.component import Component
from mdata.loader.batch_sizes import by_steps, constant, ramp_up
from mdata.loader.loader import BatchPlan
from mdata.loader.sampler import global_batch, rank_rows
from mdata.tracing.run_steps import Steps, StepSpan
from mdata.tracing.tracer import Tracer
from tests.helpers.corpora import write_pair
from tests.helpers.examples import SOAK, examples
from tests.helpers.manifests import corpus_of_pairs
from tests.helpers.masked import make_vocabulary
from tests.helpers.open_by_keys import open_by_keys

S = 8
SAMPLES = 90
KINDS = {
    "gpt": {},
    "gpt without the extra token": {"extra_token": False},
    "gpt blocks": {"shuffle_block": 4},
    "gpt validation": {"split": "valid", "split_shares": "40,60,0"},
    "gpt split": {"split_shares": "70,30,0"},
    "document": {"kind": "document"},
    "document drop": {"kind": "document", "longer": "drop"},
    "document validation": {"kind": "document", "split": "valid", "split_shares": "30,70,0"},
    "packed": {"kind": "packed"},
    "packed drop": {"kind": "packed", "longer": "drop", "split_shares": "80,20,0"},
    "packed without the extra token": {"kind": "packed", "extra_token": False},
    "megatron": {"order": "megatron", "num_samples": SAMPLES},
    "megatron of S tokens": {"order": "megatron", "num_samples": 40, "extra_token": False, "split_shares": "70,30,0"},
    "megatron validation": {
        "order": "megatron",
        "split": "valid",
        "split_shares": "40,60,0",
        "keep_partial": True,
        "num_samples": 20,
    },
}
MASKED = {
    "bert": {"kind": "bert"},
    "bert without head": {"kind": "bert", "head": False},
    "bert validation": {"kind": "bert", "split": "valid", "split_shares": "40,60,0"},
    "t5": {"kind": "t5", "decoder_length": 24},
    "bert megatron": {"kind": "bert", "order": "megatron", "num_samples": 60},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Corpus a in two pairs, b in one; with empty documents and sequences; every token says where it is from."""
    folder = tmp_path_factory.mktemp("traced")
    draw = np.random.default_rng(3)
    begin = 0
    for name, count in {"a0": 9, "a1": 14, "b": 12}.items():
        documents = [draw.integers(0, 9, draw.integers(0, 4)).tolist() for _ in range(count)]
        documents += [[], [23], [1], [0, 6, 0]]
        size = sum(map(sum, documents))
        write_pair(folder / name, documents, tokens=np.arange(begin, begin + size))
        begin += size
    corpus_of_pairs(folder / "a.json", ["a0", "a1"])
    mdata.make_blend(["0.7", str(folder / "a.json"), "0.3", str(folder / "b")], folder / "mix.json")
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentences")
    for name, count in {"c": 20, "d": 12}.items():
        documents = [[(7 * d + 5 * s) % 9 for s in range(d % 6)] for d in range(count)]
        tokens = np.arange(sum(map(sum, documents))) * 7 % 52 + 7
        write_pair(folder / f"{name}_text_sentence", documents, tokens=tokens)
    words = ["0.6", str(folder / "c_text_sentence"), "0.4", str(folder / "d_text_sentence")]
    mdata.make_blend(words, folder / "mix.json")
    return folder


def scanned(tracer: Tracer, count: int) -> dict[tuple[int, int], dict[int, int]]:
    """(component, document) -> {sample: tokens read of it}, from forward traces alone."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    for k in range(count):
        traced = tracer.sample(k)
        for part in traced.parts:
            samples = found.setdefault((traced.component, part.document), {})
            samples[k] = samples.get(k, 0) + part.count
    return found


def check_sequences(component: Component, count: int) -> None:
    """`samples_of` of a kind is the scan of its `pieces`, in any window."""
    kind, found = component.samples, {}
    for k in range(count):
        for sequence, first, length in kind.pieces(k):
            assert 0 <= first < first + length <= component.corpus.length_of(sequence)
            found.setdefault(sequence, set()).add(k)
    for sequence in range(component.corpus.num_sequences):
        for first, stop in ((0, count), (count // 3, count // 2)):
            try:
                samples = kind.samples_of(sequence, first=first, stop=stop)
            except IndexError:
                assert sequence not in found
            else:
                assert samples == [k for k in sorted(found.get(sequence, ())) if first <= k < stop]


def check_backward(tracer: Tracer, count: int) -> None:
    found = scanned(tracer, count)
    for number, component in enumerate(tracer.dataset.components):
        check_sequences(component, tracer.dataset.selection.counts(count)[number])
        for document in range(component.corpus.num_documents):
            wanted = found.get((number, document), {})
            try:
                readers = list(tracer.readers(number, document, until=count))
            except UsageError:  # outside of the split
                assert not wanted
                continue
            assert {one.sample: sum(part.count for part in one.parts) for one in readers} == wanted
            assert [one.sample for one in readers] == sorted(wanted)
    assert found


@pytest.mark.parametrize("path", ["mix.json", "b"])
@pytest.mark.parametrize("case", KINDS)
def test_tokens_of_a_trace_are_the_sample_and_documents_find_their_samples(folder, case, path):
    options = dict(KINDS[case])
    dataset = open_by_keys(folder / path, sequence_length=S, **options)
    tracer = Tracer(dataset)
    count = min(SAMPLES, dataset.num_samples or SAMPLES)
    text = dataset.read(np.arange(count)).text
    for k in range(count):
        traced = tracer.sample(k)
        assert traced.sample == k and traced.name == dataset.components[traced.component].name
        parts = [tracer.tokens(traced.component, part) for part in traced.parts]
        tokens = np.concatenate([np.empty(0, np.int64), *parts])
        width = S + int(options.get("extra_token", True))
        assert text[k, : len(tokens)].tolist() == tokens.tolist()
        assert len(tokens) == width or not text[k, len(tokens) : width].any() or "megatron" in case
        assert [part.first for part in traced.parts] == np.cumsum([0, *map(len, parts)])[:-1].tolist()
        corpus = dataset.components[traced.component].corpus
        for part, ids in zip(traced.parts, parts, strict=True):
            whole = corpus.document(part.document)
            assert whole[part.in_document : part.in_document + part.count].tolist() == ids.tolist()
            assert part.shard.name[0] == traced.name[0] and part.count == len(ids) > 0
    check_backward(tracer, count)


@pytest.mark.parametrize("path", ["mix.json", "d_text_sentence"])
@pytest.mark.parametrize("case", MASKED)
def test_sentences_of_masked_samples(sentences, case, path):
    vocabulary = make_vocabulary()
    dataset = open_by_keys(sentences / path, sequence_length=32, vocabulary=vocabulary, **MASKED[case])
    tracer = Tracer(dataset)
    assert not tracer.exact
    count = min(60, dataset.num_samples or 60)
    name = "text_enc" if MASKED[case]["kind"] == "t5" else "text"
    special = {vocabulary.cls, vocabulary.sep, vocabulary.mask, vocabulary.pad, *vocabulary.sentinels}
    for k in range(count):
        traced = tracer.sample(k)
        sample = dataset[k]
        (document,) = {part.document for part in traced.parts}
        ids = np.concatenate([tracer.tokens(traced.component, part) for part in traced.parts])
        if "labels" in sample and name == "text":
            kept = sample[name][(sample["labels"] == -1) & (sample["padding_mask"] == 1)]
        else:
            kept = sample[name][sample["enc_mask"] == 1]
        text = [int(id) for id in kept if int(id) not in special]
        assert all(text.count(id) <= ids.tolist().count(id) for id in text)
        corpus = dataset.components[traced.component].corpus
        assert set(ids.tolist()) <= set(corpus.document(document).tolist())
    check_backward(tracer, count)


def test_tokens_of_conversations_lead_back_to_their_documents(tmp_path):
    turns = [[("user", "a" * (k % 5)), ("assistant", "b" * (k % 13)), ("user", "c")] for k in range(20)]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in one]}) for one in turns]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    facts = {"tokenizer_type": "ByteTokenizer", "json_keys": ("messages",), "chat_template": "plain", "workers": 1}
    facts |= {"input": (str(tmp_path / "x.jsonl"),), "output_prefix": str(tmp_path / "x"), "chat": True}
    mdata.preprocess(mdata.PreprocessOptions(**facts))
    tracer = Tracer(mdata.open_dataset(tmp_path / "x_messages_chat.json", sequence_length=50, kind=mdata.Chat()))
    text = tracer.dataset.read(np.arange(30)).text
    for k in range(30):
        parts = tracer.sample(k).parts
        ids = np.concatenate([tracer.tokens(0, part) for part in parts])
        assert text[k, : len(ids)].tolist() == ids.tolist() and not text[k, len(ids) :].any()
        for part in parts:
            assert part.origin.row == part.document + 1
    assert any(part.sequences[0] < part.sequences[1] for k in range(9) for part in tracer.sample(k).parts)
    check_backward(tracer, 30)


def test_fill_in_the_middle_reads_what_its_samples_read(folder):
    ids = {"fim_tokens": (901, 902, 903, 904), "fim_level": "token", "eod": 900}
    dataset = open_by_keys(folder / "b", sequence_length=S, fim_rate=1.0, **ids)
    plain = Tracer(mdata.open_dataset(folder / "b", sequence_length=S))
    tracer = Tracer(dataset)
    assert not tracer.exact and plain.exact
    assert [tracer.sample(k).parts for k in range(40)] == [plain.sample(k).parts for k in range(40)]
    check_backward(tracer, 40)


def test_a_token_of_the_training(folder):
    tracer = Tracer(mdata.open_dataset(folder / "mix.json", sequence_length=S))
    for number in (0, 7, 8, 401):
        traced, place = tracer.token(number)
        part = traced.part_at(place)
        ids = tracer.tokens(traced.component, part)
        assert ids[place - part.first] == tracer.dataset[number // S]["tokens"][number % S]
    with pytest.raises(UsageError, match="no token -1"):
        tracer.token(-1)


def test_readers_without_an_end_are_those_of_three_epochs(folder):
    tracer = Tracer(mdata.open_dataset(folder / "b", sequence_length=S))
    end = 3 * tracer.dataset.components[0].samples.samples_per_epoch
    assert {one.epoch for one in tracer.readers(0, 13)} == {0, 1, 2}
    assert [one.sample for one in tracer.readers(0, 13)] == [one.sample for one in tracer.readers(0, 13, until=end)]


def test_what_is_not_there_is_said(folder):
    tracer = Tracer(mdata.open_dataset(folder / "mix.json", sequence_length=S, split_shares="50,50,0"))
    with pytest.raises(UsageError, match="the dataset has no sample -1"):
        tracer.sample(-1)
    with pytest.raises(UsageError, match="b has no document 99"):
        list(tracer.readers(1, 99))
    with pytest.raises(UsageError, match=r"document 15 of b is not read\n.*split 'train'"):
        list(tracer.readers(1, 15))
    with pytest.raises(UsageError, match="there are several\n  expected: a, b\n"):
        tracer.component(None)
    with pytest.raises(UsageError, match="there is no component c"):
        tracer.component("c")
    with pytest.raises(UsageError, match="steps are not known"):
        tracer.step(1)
    assert tracer.component("b") == 1


RAMP = ramp_up(2, 2, samples=40, size=10)


@pytest.mark.parametrize("sizes", [constant(6), RAMP, by_steps("0:4 12:8 40:2")])
@pytest.mark.parametrize("in_order", [False, True])
def test_places_in_steps(sizes, in_order):
    steps = Steps([StepSpan(sizes=sizes, micro_batch=1, dp_size=2)], seed=7, in_order=in_order, total=30)
    first = 0
    for step in range(1, 31):
        size = sizes.at(first)
        assert steps.bounds(step) == (first, size)
        rows = steps.rows(step)
        expected = np.arange(first, first + size) if in_order else global_batch(first, size, seed=7)
        assert rows.tolist() == expected.tolist()
        for rank in range(2):
            mine = rank_rows(rows, dp_rank=rank, dp_size=2, micro_batch=1)
            for microbatch, row in enumerate(mine):
                place = steps.place(int(row[0]))
                assert (place.step, place.dp_rank, place.microbatch) == (step, rank, microbatch)
                assert rows[place.row] == row[0]
        first += size
    assert steps.num_samples == first
    for step in (0, 31):
        with pytest.raises(UsageError, match=f"the run has no step {step}\n"):
            steps.bounds(step)


@given(st.data())
@examples(60)
def test_spans_of_several_starts(data):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    lengths = [data.draw(st.integers(1, 7)) for _ in sizes]
    spans, starts = [], []
    for size, length in zip(sizes, lengths, strict=True):
        spans.append(
            StepSpan(sizes=constant(size), steps_before=len(starts), samples_before=starts[-1][1] if starts else 0)
        )
        for _ in range(length):
            begun = starts[-1][1] if starts else 0
            starts.append((begun, begun + size))
    steps = Steps(spans, seed=1, total=len(starts))
    for number, (begin, end) in enumerate(starts, 1):
        assert steps.bounds(number) == (begin, end - begin)
        assert {steps.step_of(sample) for sample in range(begin, end)} == {number}


def test_a_step_of_one_rank(folder):
    dataset = mdata.open_dataset(folder / "mix.json", sequence_length=S)
    tracer = Tracer(dataset, Steps([StepSpan(sizes=constant(8), micro_batch=2, dp_size=2)], seed=1234, total=9))
    for rank in range(2):
        plan = BatchPlan(global_batch=8, micro_batch=2, dp_rank=rank, dp_size=2)
        batches = next(iter(mdata.Loader(dataset, plan, consumed=16)))
        assert tracer.step(3, dp_rank=rank).tolist() == [k for batch in batches for k in batch.samples.tolist()]
    assert tracer.num_samples == 72
    assert sum(tracer.counts(tracer.step(3)).values()) == 8
    with pytest.raises(UsageError, match="no rank 2 has rows of step 3"):
        tracer.step(3, dp_rank=2)
    with pytest.raises(UsageError, match="the run has no sample 72\n  found: 72 samples"):
        tracer.sample(72)


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(8 * SOAK))
def test_every_row_of_a_random_run_is_traced_to_its_documents(folder, tmp_path, seed):
    """A run of any mixture and kind, which goes on with other ranks and microbatches after every few steps."""
    random, size, steps = Random(seed), 4, 0
    while not steps:
        case, shares = random.choice(list(KINDS)), random.choices(("0.1", "1", "2.5"), k=2)
        words = [
            word for share, name in zip(shares, ("a.json", "b"), strict=True) for word in (share, str(folder / name))
        ]
        mdata.make_blend(words, tmp_path / "mix.json")
        options = {"sequence_length": random.choice((4, S, 16)), "seed": random.choice((7, 1234)), **KINDS[case]}
        dataset = open_by_keys(tmp_path / "mix.json", **options)
        steps = min(SAMPLES, dataset.num_samples or SAMPLES) // size
    spans, read, done = [], {}, 0
    while done < steps:
        dp_size, until = random.choice((1, 2, 4)), random.randint(done + 1, steps)
        micro_batch = random.choice([rows for rows in (1, 2, 4) if size % (rows * dp_size) == 0])
        shape = {"micro_batch": micro_batch, "dp_size": dp_size}
        spans.append(StepSpan(sizes=constant(size), steps_before=done, samples_before=done * size, **shape))
        for rank in range(dp_size):
            plan = BatchPlan(size, dp_rank=rank, seed=options["seed"], **shape)
            batches = iter(mdata.Loader(dataset, plan, consumed=done * size))
            for step in range(done, until):
                for number, batch in enumerate(next(batches)):
                    for sample, row in zip(batch.samples.tolist(), batch.rows.text.tolist(), strict=True):
                        assert sample not in read
                        read[sample] = (step + 1, rank, number), row
            batches.close()
        done = until
    tracer = Tracer(dataset, Steps(spans, seed=options["seed"], in_order="megatron" in case, total=steps))
    assert sorted(read) == list(range(steps * size))
    for sample, (place, row) in read.items():
        traced = tracer.sample(sample)
        assert (traced.place.step, traced.place.dp_rank, traced.place.microbatch) == place
        corpus, end = dataset.components[traced.component].corpus, 0
        for part in traced.parts:
            assert part.first == end
            end += part.count
            document = corpus.document(part.document).tolist()
            assert row[part.first : end] == document[part.in_document : part.in_document + part.count]
        assert end >= 1 or "document" in case
        assert not any(row[end : len(row) - (not options.get("extra_token", True))]) or "megatron" in case
