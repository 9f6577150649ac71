"""data.kind: every kind of samples trains, resumes, is evaluated and traced, with the tokens of mdata's samples."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
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
from tests.helpers.runs import WORDS, make_corpora, write_jsonl
from tests.trainer.run.one_rank import alone, curve
from trainer.config.sections import (
    CheckpointSection,
    DataKind,
    DataSection,
    FimSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
    T5Section,
    TrainSection,
)
from trainer.models import family as families
from trainer.models.gpt import FAMILY as GPT
from trainer.models.stage import NO_PAIR
from trainer.run.data import open_data, to_device

KINDS: tuple[DataKind, ...] = get_args(DataKind)
FAMILY = dataclasses.replace(GPT, data_kinds=KINDS)  # takes rows of every kind as a text to be continued
NAMES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
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


def write_sentences(path: Path, *, documents: int = 40, sentences: int = 8) -> None:
    """Documents of 1 to 8 sentences of 2 to 9 words."""
    draw = random.Random(3)
    texts = []
    for _ in range(documents):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(draw.randint(1, sentences))]
        texts.append(" ".join(f"{line.capitalize()}." for line in lines))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def make_sentences(folder: Path, *, sentinels: int = 30, **options: int) -> Path:
    """A corpus of sentences, by a WordPiece vocabulary."""
    tables = folder / "nltk/tokenizers/punkt_tab/english"
    tables.mkdir(parents=True)
    for name in ("abbrev_types.txt", "sent_starters.txt", "collocations.tab", "ortho_context.tab"):
        (tables / name).write_text("")
    entries = [*NAMES, *WORDS, ".", *(f"<extra_id_{number}>" for number in range(sentinels))]
    (folder / "vocab.txt").write_text("\n".join(entries) + "\n")
    write_sentences(folder / "s.jsonl", **options)
    mdata.preprocess(
        mdata.PreprocessOptions(
            input=(str(folder / "s.jsonl"),),
            output_prefix=str(folder / "s"),
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=str(folder / "vocab.txt"),
            split_sentences=True,
            nltk_data=str(folder / "nltk"),
        )
    )
    return folder / "s_text_sentence.json"


def make_chat(folder: Path) -> Path:
    draw = random.Random(5)
    lines = []
    for _ in range(40):
        turns = [
            {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))}
            for _ in range(draw.randint(1, 2))
            for role in ("user", "assistant")
        ]
        lines.append(json.dumps({"messages": turns}) + "\n")
    (folder / "c.jsonl").write_text("".join(lines))
    mdata.preprocess(
        mdata.PreprocessOptions(
            input=(str(folder / "c.jsonl"),),
            output_prefix=str(folder / "c"),
            tokenizer_type="ByteTokenizer",
            json_keys=("messages",),
            chat=True,
            chat_template="plain",
        )
    )
    return folder / "c_messages_chat.json"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """kind -> a corpus for it."""
    folder = tmp_path_factory.mktemp("corpora")
    text = make_corpora(folder, {"web": write_jsonl(folder / "web.jsonl", 1)})["web"]
    sentences, chat = make_sentences(folder), make_chat(folder)
    own = {"bert": sentences, "t5": sentences, "chat": chat}
    return {kind: own.get(kind, text) for kind in KINDS}


def config_of(corpora, folder, kind, *, steps=2, tokens=(5, 6, 7), **data) -> RunConfig:
    own = {"fim": FimSection(tokens=tokens, rate=0.9, level="token"), "t5": T5Section(decoder_length=DECODER)}
    options = {kind: own[kind]} if kind in own else {}
    length = 128 if kind == "chat" else LENGTH
    return RunConfig(
        run=RunSection(folder=str(folder), seed=7),
        model=ModelSection(family="gpt_neox", num_layers=1, hidden_size=16, num_heads=2),
        data=DataSection(
            blend=str(corpora[kind]), split="80,20", cache=str(folder / "cache"), kind=kind, **{**options, **data}
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


@pytest.mark.parametrize("kind", [*NEW, *(pytest.param(kind, marks=pytest.mark.soak) for kind in {*KINDS} - {*NEW})])
def test_each_kind_trains_resumes_and_is_traced(corpora, tmp_path, kind):
    config = config_of(corpora, tmp_path / "run", kind)
    first = replace(config, train=replace(config.train, exit_interval=1))
    alone(first)
    assert len(curve(config)) == 1
    alone(config)
    whole = config_of(corpora, tmp_path / "whole", kind)
    alone(whole)
    assert curve(config) == curve(whole) and len(curve(whole)) == 2
    assert all(np.isfinite(numbers).all() for numbers in curve(whole))
    mine = open_by_keys(corpora[kind], **keys_of(config))
    assert open_data(config).train.data_id == mine.data_id
    tracer = mdata.trace_run(config.run.folder)
    assert tracer.dataset.data_id == mine.data_id
    traced = tracer.row(2, 1)
    assert traced.parts and traced.place.step == 2


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
    assert int(microbatch.labels_BS.min()) >= 0 and microbatch.lengths_B.dtype == torch.int32
    assert 0 < int(microbatch.lengths_B.min()) < int(microbatch.lengths_B.max())
    with pytest.raises(mdata.UsageError, match=r"outside the model's vocabulary \(samples \[0, 1"):
        to_device(batch, torch.device("cpu"), vocab_size=10)


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
