"""data.kind: every kind of samples trains, resumes, is evaluated and traced, with the tokens of mdata's samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import numpy as np
import pytest
import torch

import mdata
from mdata.loader.loader import collate
from mdata.samples.special_tokens import vocabulary_from
from tests.helpers.open_by_keys import open_by_keys
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_chat, make_corpora, make_pairs, make_sentences, write_jsonl
from tests.trainer.engines import small_config
from tests.trainer.run.one_rank import alone, curve
from trainer.config.parse import ReadConfig
from trainer.config.sections import (
    BertSamplesSection,
    CheckpointSection,
    DataKind,
    DataSection,
    EvaluateSection,
    FimSection,
    KernelsSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
    T5SamplesSection,
    T5Section,
    TrainSection,
)
from trainer.models import family as families
from trainer.models.gpt import FAMILY as GPT
from trainer.models.stage import NO_PAIR, Microbatch
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.check import check, why_not_recorded
from trainer.plan.plan import make_plan
from trainer.report.data import read_corpora, read_run
from trainer.run.data import open_data, predicted_tokens, to_device
from trainer.run.engine import Engine
from trainer.run.launch import survey
from trainer.run.metrics import read_metrics
from trainer.run.rehearsal import rehearse
from trainer.run.resume import find_start
from trainer.run.train import train

KINDS: tuple[DataKind, ...] = tuple(kind for kind in get_args(DataKind) if kind != "classify")  # test_classifying.py
FAMILY = dataclasses.replace(GPT, data_kinds=KINDS)  # takes rows of every kind as a text to be continued
LENGTH, DECODER = 32, 24


@pytest.fixture(scope="module", autouse=True)
def of_any_kind() -> Iterator[None]:
    """A family that trains on every kind, in this process."""
    before = families.FAMILIES
    families.FAMILIES = MappingProxyType({**before, "gpt_neox": __name__})
    families.family_named.cache_clear()
    yield
    families.FAMILIES = before
    families.family_named.cache_clear()


def refused(corpus, folder, kind, **data) -> str:
    with pytest.raises(mdata.UsageError) as raised:
        open_data(config_of({kind: corpus}, folder, kind, **data))
    return str(raised.value)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """The corpus of each kind."""
    folder = tmp_path_factory.mktemp("corpora")
    text = make_corpora(folder, {"web": write_jsonl(folder / "web.jsonl", 1)})["web"]
    sentences, chat = make_sentences(folder), make_chat(folder)
    own = {"bert": sentences, "t5": sentences, "chat": chat, "pairs": make_pairs(folder)}
    return {kind: own.get(kind, text) for kind in KINDS}


def config_of(corpora, folder, kind, *, steps=2, tokens=(5, 6, 7), **data) -> RunConfig:
    own = {"fim": FimSection(tokens=tokens, rate=0.9, level="token"), "t5": T5SamplesSection(decoder_length=DECODER)}
    options = {kind: own[kind]} if kind in own else {}
    length = 128 if kind in ("chat", "pairs") else LENGTH
    return RunConfig(
        run=RunSection(folder=str(folder), seed=7),
        model=ModelSection(family="gpt_neox", num_layers=1, hidden_size=16, num_heads=2),
        data=DataSection(
            blend=str(corpora[kind]), kind=kind, **{"split": "80,20", "cache": f"{folder}/cache", **options, **data}
        ),
        train=TrainSection(
            sequence_length=length, global_batch=4, micro_batch=2, steps=steps, eval_interval=2, eval_samples=6
        ),
        checkpoint=CheckpointSection(interval=1),
        optimizer=OptimizerSection(lr=1e-2),
    )


def keys_of(config: RunConfig) -> dict[str, object]:
    """The run's samples, written by hand as mdata takes them."""
    kind, length = config.data.kind, config.train.sequence_length
    keys = {"sequence_length": length, "seed": 7, "split_shares": "80,20", "kind": kind}
    if kind == "fim":
        keys |= {"kind": "gpt", "fim_rate": 0.9, "fim_level": "token", "fim_tokens": config.data.fim.tokens}
    return keys | ({"decoder_length": DECODER} if kind == "t5" else {})


NEW = ("chat", "fim", "bert", "t5")  # test_data.py and test_document_masks.py train the others
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        *((kind, "native") for kind in NEW),
        *(pytest.param(kind, "native", marks=SOAK) for kind in KINDS if kind not in NEW),
        ("bert", "megatron"),
        *(pytest.param(kind, "megatron", marks=SOAK) for kind in ("gpt", "fim", "t5")),
    ],
)
def test_each_kind_trains_resumes_and_is_traced(corpora, tmp_path, kind, order):
    """With the samples that mdata has for its options; in Megatron's order those of its datasets."""
    config = config_of(corpora, tmp_path / "run", kind, order=order)
    first = replace(config, train=replace(config.train, exit_interval=1))
    alone(first)
    assert len(curve(config)) == 1
    alone(config)
    whole = config_of(corpora, tmp_path / "whole", kind, order=order)
    alone(whole)
    assert curve(config) == curve(whole) and len(curve(whole)) == 2
    assert all(np.isfinite(numbers).all() for numbers in curve(whole))
    mine = open_by_keys(corpora[kind], **keys_of(config), order=order, num_samples=8 if order == "megatron" else None)
    assert open_data(config).train.data_id == mine.data_id
    tracer = mdata.trace_run(config.run.folder)
    assert tracer.dataset.data_id == mine.data_id
    traced = tracer.row(2, 1)
    assert traced.parts and traced.place.step == 2 and (order == "native" or traced.sample == 5)


def moved(dataset, numbers, **options):
    batch = collate(dataset, numbers)
    return batch, to_device(batch, torch.device("cpu"), vocab_size=dataset.vocab_size, **options)


@pytest.mark.parametrize("order", ["native", "megatron"])
@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_a_device_gets_the_fields_of_masked_samples(corpora, kind, order):
    options = {"kind": kind, "order": order, "num_samples": 40 if order == "megatron" else None}
    dataset = open_by_keys(
        corpora[kind], sequence_length=LENGTH, **options, **({"decoder_length": DECODER} if kind == "t5" else {})
    )
    numbers = np.arange(12)
    skipped = numbers % 5 == 1
    batch, microbatch = moved(dataset, numbers, numbered=True, skipped=skipped, components=np.zeros(12, np.int64))
    assert microbatch.samples_B.tolist() == numbers.tolist() and microbatch.components_B.tolist() == [0] * 12
    for row, number in enumerate(numbers.tolist()):
        sample = {name: value.tolist() for name, value in dataset[number].items()}
        own = "text" if kind == "bert" else "text_dec"
        mask = [] if skipped[row] else sample["loss_mask"]
        assert microbatch.tokens_BS[row].tolist() == sample[own]
        assert microbatch.loss_mask_BS[row].tolist() == (mask or [0] * len(sample["loss_mask"]))
        predicted = [label for label, counts in zip(sample["labels"], sample["loss_mask"], strict=True) if counts]
        assert microbatch.labels_BS[row][batch.loss_mask[row] > 0].tolist() == predicted
        real = sample["padding_mask" if kind == "bert" else "dec_mask"]
        assert microbatch.lengths_B[row] == sum(real) and real == sorted(real, reverse=True)
        if kind == "bert":
            assert microbatch.types_BS[row].tolist() == sample["types"]
            assert microbatch.swapped_B[row] == (NO_PAIR if skipped[row] else sample["is_random"])
        else:
            assert microbatch.encoder.tokens_BS[row].tolist() == sample["text_enc"]
            assert microbatch.encoder.lengths_B[row] == sum(sample["enc_mask"])
    told = None if kind == "t5" else np.flatnonzero(batch.loss_mask).tolist()
    assert (None if microbatch.predicted_M is None else microbatch.predicted_M.tolist()) == told
    packed = to_device(batch, torch.device("cpu"), vocab_size=dataset.vocab_size, multiple=4)
    assert microbatch.real is None and np.diff(packed.real.bounds).tolist()[:12] == microbatch.lengths_B.tolist()
    assert torch.equal(packed.of_real_tokens().tokens_BS[0], microbatch.tokens_BS.flatten()[packed.real.flat_M])
    if kind == "t5":
        assert np.diff(packed.encoder.real.bounds).tolist()[:12] == microbatch.encoder.lengths_B.tolist()
        assert microbatch.encoder.real is None
    assert int(microbatch.labels_BS.min()) >= 0 and microbatch.lengths_B.dtype == torch.int32
    assert 0 < int(microbatch.lengths_B.min()) < int(microbatch.lengths_B.max())
    with pytest.raises(mdata.UsageError, match=r"outside the model's vocabulary \(samples \[0, 1"):
        to_device(batch, torch.device("cpu"), vocab_size=10)


@pytest.mark.parametrize(("masked", "size"), [(0, 0), (3, 4), (4, 4), (15, 16)])
def test_the_head_gets_a_multiple_of_tokens_on_a_gpu(masked, size):
    loss = np.zeros((2, 8), np.float32)
    loss.flat[np.random.default_rng(masked).permutation(16)[:masked]] = 1
    told = predicted_tokens(loss, 4)
    assert told.dtype == np.int64 and len(told) == size == len(set(told.tolist())) and (np.diff(told) > 0).all()
    assert set(np.flatnonzero(loss)) <= set(told.tolist()) and len(predicted_tokens(loss, 1)) == masked
    assert len(predicted_tokens(np.ones((3, 1), np.float32), 4)) == 3, "there are no more tokens"


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_graphs_get_rows_without_padding_in_few_sizes(corpora, kind):
    options = {"decoder_length": DECODER} if kind == "t5" else {}
    dataset = open_by_keys(corpora[kind], sequence_length=LENGTH, kind=kind, **options)
    exact, few = (moved(dataset, np.arange(32), multiple=2, few_sizes=few)[1] for few in (False, True))
    stacks = [(exact.real, few.real, exact.tokens_BS.shape[1])]
    if kind == "t5":
        stacks.append((exact.encoder.real, few.encoder.real, LENGTH))
    else:
        assert len(few.predicted_M) % (LENGTH // 2) == 0 <= len(few.predicted_M) - len(exact.predicted_M) < LENGTH // 2
    for least, rounded, length in stacks:  # of 32 rows: a 32nd of all tokens is one row
        assert len(rounded.flat_M) % length == 0 <= len(rounded.flat_M) - len(least.flat_M) < length
        assert torch.equal(rounded.bounds[:-2], least.bounds[:-2]) and rounded.longest == length


def test_full_rows_have_no_lengths_where_padding_is_left_out(corpora):
    dataset = open_by_keys(corpora["bert"], sequence_length=8, kind="bert", head=False, full_rows=True)
    batch = collate(dataset, np.arange(3))
    batch.rows.fields["padding_mask"][:] = 1
    told = [to_device(batch, torch.device("cpu"), vocab_size=dataset.vocab_size, multiple=n) for n in (0, 4)]
    assert told[0].lengths_B.tolist() == [8] * 3 and told[1].lengths_B is None and told[1].real is None


def test_rows_of_one_text_have_no_types_and_no_pairs(corpora):
    dataset = open_by_keys(corpora["bert"], sequence_length=LENGTH, kind="bert", head=False)
    _, microbatch = moved(dataset, np.arange(4))
    assert microbatch.types_BS is None and microbatch.swapped_B is None and microbatch.lengths_B is not None


@pytest.mark.parametrize("pad", [0, 5, None])
def test_padding_that_megatron_knows_by_value_is_no_text(corpora, pad):
    """Its padding mask and types hold the padding's id, and in place of a real token that equals it, too."""
    entries = {line: id for id, line in enumerate((corpora["bert"].parent / "vocab.txt").read_text().split())}
    known = vocabulary_from({name: id for name, id in entries.items() if name != "[PAD]"})
    vocabulary = dataclasses.replace(known, pad=pad)
    options = {"kind": "bert", "order": "megatron", "num_samples": 40, "vocabulary": vocabulary}
    batch, microbatch = moved(open_by_keys(corpora["bert"], sequence_length=LENGTH, **options), np.arange(30))
    longest = [np.flatnonzero(row == entries["[SEP]"])[-1] + 1 for row in batch.rows["text"]]
    assert microbatch.lengths_B.tolist() == longest
    assert set(microbatch.types_BS.flatten().tolist()) == {0, 1}


def test_a_mixture_is_evaluated_reported_and_has_losses_by_component(corpora, tmp_path):
    """With a set of its own; the report's baselines count the masked tokens, and it shows rows without padding."""
    folder = tmp_path / "corpora"
    folder.mkdir()
    held = make_sentences(folder, name="held", documents=12, seed=4)
    mdata.make_blend(["0.7", str(corpora["bert"]), "0.3", str(held)], tmp_path / "mix.json")
    for kind in ("bert", "t5"):
        config = config_of(
            {kind: tmp_path / "mix.json"},
            tmp_path / kind,
            kind,
            split="100,0,0",
            valid=(str(held),),
            allow_overlap=True,
        )
        alone(config)
        lines = list(read_metrics(tmp_path / kind))
        assert {*lines[0]["train"], *lines[1]["train"]} == {"s", "held"} and {*lines[1]["valid"]} == {"held"}
        found = read_corpora(read_run(tmp_path / kind))
        (valid,) = found.valid
        masked = mdata.open_dataset(held, sequence_length=LENGTH, seed=7, split="whole", kind=config_kind(config))
        rows = masked.read(np.arange(6) * len(masked) // 6)
        assert valid.baselines.valid_tokens == rows.loss_mask.sum() and valid.bits_per_byte is None
        assert found.rows and not any("[PAD]" in row for row in found.rows)
        assert found.special and not found.notes


@pytest.mark.parametrize("kind", ["document", "packed", "chat", "bert", "t5"])
def test_mock_data_has_every_kind(tmp_path, kind):
    config = config_of({kind: "mock"}, tmp_path / "run", kind, split="100,0,0", cache=None)
    data = replace(config.data, document_masks=kind == "packed")
    config = replace(config, model=replace(config.model, vocab_size=80), data=data)
    assert bool(open_data(config).facts.document_lengths) == (kind in ("packed", "chat"))
    alone(config)
    assert len(curve(config)) == 2 and np.isfinite(curve(config)).all()
    small = replace(config, model=replace(config.model, vocab_size=12))
    problems = check(small, 1, facts=None)
    assert len(problems) == (kind in ("bert", "t5")) and all("is too small for data.kind" in text for text in problems)


def config_kind(config: RunConfig) -> mdata.Bert | mdata.T5:
    return mdata.Bert() if config.data.kind == "bert" else mdata.T5(decoder_length=DECODER)


def _counts(context):
    """The counts that a step's microbatches have on a rank; rank 0 has a row without a pair."""
    config = small_config("gpt2", data=DataSection(blend="unused", kind="bert"))
    train = replace(config.train, sequence_length=LENGTH, micro_batch=2)
    config = replace(config, model=replace(config.model, family="bert"), train=train)
    engine = Engine(config, make_plan(config, 2), world=context.join(Mesh(2)))
    run, seen = engine.executor.run, []
    engine.executor.run = lambda schedule, batches, **options: seen.extend(batches) or run(schedule, batches, **options)
    tokens = torch.ones(2, LENGTH, dtype=torch.int64)
    mask = torch.zeros(2, LENGTH)
    mask[:, : 3 + context.rank] = 1
    swapped = torch.tensor([context.rank, NO_PAIR if context.rank == 0 else 0])
    batch = Microbatch(tokens_BS=tokens, labels_BS=tokens, loss_mask_BS=mask, swapped_B=swapped)
    engine.step([batch], 1e-3)
    engine.evaluate([batch])
    engine.step([replace(batch, swapped_B=None)], 1e-3)
    sums = [batch.of_step for batch in seen]
    return [None if of_step is None else (of_step.tokens.item(), of_step.weights["sop"].item()) for of_step in sums]


def test_a_step_of_pairs_knows_its_tokens_and_rows_on_all_ranks():
    assert run_ranks(_counts, 2) == [[(14, 3), None, None]] * 2


@pytest.mark.parametrize("kind", ["bert", "t5", "chat"])
def test_a_step_of_each_kind_is_rehearsed(corpora, tmp_path, kind):
    config = config_of(corpora, tmp_path, kind)
    plan = make_plan(config, 2, facts=open_data(config).facts)
    matched = rehearse(config, plan).matched
    text = replace(config, data=replace(config.data, kind="gpt", t5=None))
    expected = rehearse(text, make_plan(text, 2, facts=open_data(text).facts)).matched
    assert matched.collectives == expected.collectives


def test_data_of_another_kind_is_named(corpora, tmp_path):
    """Before anything starts, with what to do."""
    plain = make_sentences(tmp_path, sentinels=0, sentences=1)
    words = make_sentences(tmp_path, name="words", split_sentences=False)
    said = {
        "documents": refused(words, tmp_path, "bert"),
        "one sentence": refused(plain, tmp_path, "bert"),
        "no sentinels": refused(plain, tmp_path, "t5"),
        "no chat": refused(words, tmp_path, "chat"),
        "no tokens": refused(corpora["gpt"], tmp_path, "fim", fim=FimSection()),
        "short decoder": refused(corpora["t5"], tmp_path, "t5", t5=T5SamplesSection(decoder_length=4)),
    }
    assert "words is not divided into sentences" in said["documents"] and "--split-sentences" in said["documents"]
    assert "0 of them with at least 2 sentences" in said["one sentence"] and "head = false" in said["one sentence"]
    assert "lacks sentinels" in said["no sentinels"] and "<extra_id_0>" in said["no sentinels"]
    assert "does not hold conversations" in said["no chat"] and "--chat" in said["no chat"]
    assert "no token for the prefix of fim_tokens" in said["no tokens"]
    assert "decoder_length=4 is the limit" in said["short decoder"] and "about 15.0%" in said["short decoder"]
    assert all(text.count("\n") <= 3 for text in said.values())
    open_data(config_of({"bert": plain}, tmp_path, "bert", bert=BertSamplesSection(head=False)))


@pytest.mark.parametrize("kind", ["bert", "t5", "full rows"])
@pytest.mark.parametrize("with_ends", [True, False])
def test_texts_that_were_encoded_with_their_ends_are_told(tmp_path, kind, with_ends):
    """Once, where the run starts and in its check."""
    options = {"bert": BertSamplesSection(head=False, full_rows=True)} if kind == "full rows" else {}
    name = "bert" if kind == "full rows" else kind
    corpus = make_sentences(tmp_path, with_ends=with_ends)
    config = config_of({name: corpus}, tmp_path / "run", name, **options)
    data = open_data(config)
    added = "the token that ends a text" if kind == "t5" else "[CLS] or [SEP]"
    assert sum(f"of the rows hold {added} in their sentences" in line for line in data.notes) == with_ends
    assert find_start(config, data).notes == tuple(data.notes)


def test_a_decoder_that_would_begin_with_another_token_is_named(corpora, tmp_path):
    config = config_of(corpora, tmp_path, "t5")
    first = int(open_data(config).train.read([0]).fields["text_dec"][0, 0])
    for token, is_wrong in ((first, False), (5000, True)):
        model = replace(config.model, family="t5", t5=T5Section(start_token=token))
        with (
            pytest.raises(mdata.UsageError, match=f"start_token=5000(.|\n)*{first}, which")
            if is_wrong
            else nullcontext()
        ):
            open_data(replace(config, model=model))


def test_too_few_sentinels_are_named(tmp_path):
    """In Megatron's order the first row of some that does not fit; in native order rows that mask much less."""
    few = make_sentences(tmp_path, sentinels=2)
    assert "3 spans" in refused(few, tmp_path, "t5", order="megatron")
    many = T5SamplesSection(decoder_length=DECODER, mask_probability=0.5, geometric=False, max_ngram=1)
    said = refused(few, tmp_path, "t5", t5=many)
    assert "2 sentinels is the limit" in said and "more sentinels (<extra_id_0> ...)" in said


@pytest.mark.parametrize(
    ("kind", "data", "problem"),
    [
        (
            "gpt",
            {"bert": BertSamplesSection()},
            '[data.bert] is for data.kind="bert", not "gpt"; set that kind, or leave',
        ),
        ("bert", {"t5": T5SamplesSection()}, '[data.t5] is for data.kind="t5", not "bert"'),
        ("bert", {"longer": "drop"}, 'data.longer="drop" applies only to data.kind "document", "packed", "chat"'),
        ("bert", {"document_masks": True}, 'data.document_masks=true does not apply to data.kind="bert"'),
        ("chat", {"document_masks": True}, 'data.document_masks=true changes nothing with data.kind="chat"'),
        ("chat", {"order": "megatron"}, 'data.kind="chat" needs data.order="native"'),
        ("t5", {"blend_surplus": 0.5, "order": "native"}, 'data.blend_surplus=0.5 applies only to data.order="meg'),
        ("document", {"shuffle_block": 4, "order": "native"}, "data.shuffle_block=4 applies only to data.order"),
        ("bert", {"bert": BertSamplesSection(full_rows=True)}, "data.bert.full_rows=true needs data.bert.head=false"),
        (
            "bert",
            {"bert": BertSamplesSection(permutation=True), "order": "megatron"},
            "data.bert.permutation=true cannot be",
        ),
        ("fim", {"fim": FimSection(split_sample="x")}, "data.fim.split_sample and data.fim.fragment_rate go together"),
        ("fim", {"fim": FimSection(tokens=("a", "b"))}, "data.fim.tokens=['a', 'b'] has 2 tokens"),
    ],
)
def test_what_does_not_go_together_is_told_once(corpora, tmp_path, kind, data, problem):
    """Also with the data: mdata would refuse the same options in its own words."""
    config = config_of(corpora, tmp_path, kind, **data)
    (told,) = survey(ReadConfig(config, []), 1).problems
    assert told.startswith(problem)
    if "order" not in data:
        mock = replace(config.data, blend="mock", split="100,0,0", cache=None)
        config = replace(config, data=mock, model=replace(config.model, vocab_size=300))
        (told,) = survey(ReadConfig(config, []), 1).problems
        assert told.startswith(problem)


def test_tasks_are_for_models_that_continue_a_text(corpora, tmp_path):
    config = replace(config_of(corpora, tmp_path, "bert"), evaluate=EvaluateSection(tasks=("lambada=x.jsonl",)))
    (problem,) = check(config, 1, facts=None)
    assert problem.startswith("evaluate.tasks=['lambada=x.jsonl'] score how a model continues a text")


@pytest.mark.parametrize(
    ("kind", "changed", "named"),
    [
        ("bert", {"bert": BertSamplesSection(mask_probability=0.2)}, r"data\.bert\.mask_probability=0\.2\n"),
        ("fim", {"fim": FimSection(tokens=(5, 6, 8), rate=0.9, level="token")}, r"data\.fim\.tokens=\(5, 6, 8\)\n"),
        ("packed", {"longer": "drop"}, r"data\.longer='drop'\n"),
        ("t5", {"kind": "bert", "t5": None}, r"data\.kind='bert'\n"),
        ("bert", {"kind": "gpt"}, r"data\.kind='gpt'\n"),
    ],
)
def test_a_run_does_not_continue_with_other_samples(corpora, tmp_path, kind, changed, named):
    config = config_of(corpora, tmp_path / "run", kind, steps=1)
    alone(config)
    other = replace(config, data=replace(config.data, **changed), train=replace(config.train, steps=2))
    with pytest.raises(mdata.UsageError, match=rf"trained on different data(.|\n)*found: .*{named}") as caught:
        alone(other)
    assert "extra_token" not in str(caught.value), "data.kind decides it"


def test_passes_of_rows_that_differ_are_not_recorded(corpora, tmp_path):
    graphs = KernelsSection(cuda_graphs="on")
    (problem,) = check(replace(config_of(corpora, tmp_path, "pairs"), kernels=graphs), 1, facts=None)
    assert problem.startswith('kernels.cuda_graphs="on" cannot be used') and "the number of pairs" in problem
    for kind in ("bert", "t5", "chat", "packed"):  # each size of rows without padding, or of documents, has recordings
        config = replace(config_of(corpora, tmp_path, kind), kernels=graphs)
        assert not list(check(config, 1, facts=None))
    classes = replace(config, data=replace(config.data, kind="classify"))
    assert "have padding, whose length differs" in why_not_recorded(classes, sharing=1)


def test_a_family_is_told_which_kinds_it_trains_on(corpora, tmp_path):
    config = config_of(corpora, tmp_path, "t5")
    config = replace(config, model=replace(config.model, family="gpt"))
    (problem,) = check(config, 1, facts=None)
    assert problem.startswith('data.kind="t5" is not what model.family="gpt" trains on; set data.kind="gpt" or "docu')
    assert 'or model.family="' in problem


def test_a_loss_of_ones_own_gets_the_fields_of_the_kind(corpora, tmp_path):
    for kind in ("bert", "t5"):
        config, seen = config_of(corpora, tmp_path / kind, kind), []

        def loss(logits_BSV, batch, seen=seen):
            seen.append(batch)
            return (logits_BSV.square().mean(2) * batch.loss_mask_BS).sum()

        train(config, join_world(Mesh(1), placement=Placement()), loss=loss)
        assert len(seen) > 4 and all(batch.lengths_B is not None for batch in seen)
        if kind == "bert":
            assert all(batch.types_BS.shape == batch.tokens_BS.shape for batch in seen)
            assert all(set(batch.swapped_B.tolist()) <= {0, 1} for batch in seen)
        else:
            assert all(batch.encoder.tokens_BS.shape[1] == LENGTH > batch.tokens_BS.shape[1] for batch in seen)
