"""Finetuning beside other trainers: transformers' Trainer, trl's SFTTrainer and DPOTrainer, and a peft adapter in them.

tests/golden/trl/losses.json has their losses with the same model, rows, schedule and rule, dropout off. They average a
step's loss over all its trained tokens, as we do; trl calls that `num_items_in_batch`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import mdata
from mdata.loader.loader import BatchPlan
from tests.helpers.runs import WORDS, make_chat
from tests.trainer.engines import draw_adapters
from tests.trainer.run.one_rank import alone, curve
from trainer.config.sections import (
    CheckpointSection,
    DataSection,
    LoRASection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.convert.convert import ConvertOptions, convert
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.plan import make_plan
from trainer.run.data import open_data
from trainer.run.engine import Engine

GOLDEN = Path(__file__).parents[2] / "golden/trl/losses.json"
STEPS, WARMUP, LENGTH, BETA = 20, 4, 160, 0.5
LORA = LoRASection(rank=4, alpha=6.0)
MODEL = ModelSection(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, init_std=0.2)

Case = Literal["full", "packed", "lora", "dpo"]
RATES: dict[Case, float] = {"full": 1e-2, "packed": 1e-2, "lora": 1e-2, "dpo": 1e-3}


@dataclasses.dataclass(frozen=True)
class Starts:
    """What every run begins with: corpora by kind, the model as a Hugging Face folder, an adapter of peft for it."""

    corpora: dict[str, Path]
    model: Path
    adapter: Path


def make_starts(folder: Path) -> Starts:
    """Texts, conversations and pairs by bytes; a drawn model, and adapters for it that are not zero."""
    corpora = {"document": _texts(folder), "chat": make_chat(folder), "pairs": _pairs(folder)}
    base = _config(folder / "base", corpora["chat"], "chat", model=MODEL)
    _engine(base).save(str(folder / "base/checkpoints"), step=1, consumed_samples=1)
    convert(folder / "base", folder / "model", options=ConvertOptions(to="hf"))
    first = CheckpointSection(init_from=str(folder / "model"))
    adapters = _engine(replace(base, model=replace(MODEL, lora=LORA), checkpoint=first))
    draw_adapters(adapters)
    adapters.save(str(folder / "drawn/checkpoints"), step=1, consumed_samples=1)
    convert(folder / "drawn", folder / "adapter", options=ConvertOptions(to="peft"))
    return Starts(corpora, folder / "model", folder / "adapter")


def config_of(case: Case, starts: Starts, folder: Path) -> RunConfig:
    """A run of 20 steps that begins with the model, or with the adapter."""
    kind = {"full": "document", "packed": "chat", "lora": "chat", "dpo": "pairs"}[case]
    model = replace(MODEL, lora=LORA if case == "lora" else None)
    first = CheckpointSection(init_from=str(starts.adapter if case == "lora" else starts.model))
    config = _config(folder, starts.corpora[kind], kind, model=model, checkpoint=first)
    dpo = {"dpo_beta": BETA} if case == "dpo" else {}
    return replace(config, optimizer=replace(config.optimizer, lr=RATES[case]), train=replace(config.train, **dpo))


def rows_of(config: RunConfig) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """All rows of the run in the order of its steps: text int64[S + 1], is trained bool[S + 1], lengths of texts."""
    sizes = BatchPlan(
        global_batch=config.train.global_batch, micro_batch=config.train.micro_batch, seed=config.run.seed
    )
    steps = mdata.Loader(open_data(config).train, sizes, consumed=0)
    rows = []
    for batch in itertools.chain.from_iterable(itertools.islice(steps, STEPS)):
        for place in range(len(batch.samples)):
            text = batch.rows.text[place].astype(np.int64)
            trained = np.concatenate([[False], batch.loss_mask[place] > 0])
            lengths = np.array([len(text)])
            if (bounds := batch.rows.cu_seqlens) is not None:
                inside = bounds[(bounds > place * LENGTH) & (bounds < (place + 1) * LENGTH)] - place * LENGTH
                lengths = np.diff([0, *inside, len(text)])
            rows.append((text, trained, lengths))
    return rows


def rows_hash(config: RunConfig) -> str:
    """SHA-256 of all rows."""
    digest = hashlib.sha256()
    for array in itertools.chain.from_iterable(rows_of(config)):
        digest.update(array.tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return make_starts(tmp_path_factory.mktemp("starts"))


@pytest.mark.parametrize("case", RATES)
def test_losses_are_those_of_the_other_trainer(case, starts, tmp_path):
    golden = json.loads(GOLDEN.read_text())["cases"][case]
    config = config_of(case, starts, tmp_path)
    assert rows_hash(config) == golden["rows"], "made with other rows"
    alone(config)
    losses = [loss for _, loss, _ in curve(config)]
    np.testing.assert_allclose(losses, golden["losses"], rtol=0, atol=1e-4)
    assert losses[0] - losses[-1] > 0.05, "it learns"


def _config(folder: Path, corpus: Path, kind: Any, **sections: Any) -> RunConfig:
    return RunConfig(
        run=RunSection(folder=str(folder), seed=7),
        data=DataSection(blend=str(corpus), kind=kind, cache=str(folder / "cache")),
        train=TrainSection(sequence_length=LENGTH, global_batch=4, micro_batch=2, steps=STEPS),
        optimizer=OptimizerSection(lr=1e-2, warmup_steps=WARMUP, warmup_count="before", beta2=0.999),
        **sections,
    )


def _engine(config: RunConfig) -> Engine:
    world = join_world(Mesh(1), placement=Placement())
    return Engine(config, make_plan(config, 1, facts=open_data(config).facts), world=world)


def _sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def _texts(folder: Path) -> Path:
    """Texts of which some are longer than a row."""
    draw = random.Random(8)
    lines = [json.dumps({"text": _sentence(draw, draw.randint(5, 40))}) + "\n" for _ in range(40)]
    (folder / "t.jsonl").write_text("".join(lines))
    _tokenize(folder / "t.jsonl", "text", append_eod=True)
    return folder / "t_text_document.json"


def _pairs(folder: Path) -> Path:
    """Pairs of which one fills more than half of a row, so that trl's batch of 4 pairs is our 4 rows."""
    draw, lines = random.Random(6), []
    while len(lines) < 40:
        prompt, *answers = (_sentence(draw, words) for words in (5, 2, 2))
        if 30 <= len(prompt) <= 35 and answers[0] != answers[1]:
            chats = [
                [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}] for answer in answers
            ]
            lines.append(json.dumps(dict(zip(("chosen", "rejected"), chats, strict=True))) + "\n")
    (folder / "p.jsonl").write_text("".join(lines))
    _tokenize(folder / "p.jsonl", "chosen", chat=True, chat_schema="pairs", chat_template="plain")
    return folder / "p_chosen_pairs.json"


def _tokenize(path: Path, key: str, **options: Any) -> None:
    options |= {"output_prefix": str(path.with_suffix("")), "tokenizer_type": "ByteTokenizer", "json_keys": (key,)}
    mdata.preprocess(mdata.PreprocessOptions(input=(str(path),), **options))
