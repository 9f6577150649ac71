"""Rollbacks in drawn layouts, killed at drawn steps: those of one rank that nothing stopped.

The fault: some rows have a token whose loss counts a hundredfold. Only `make soak` runs these.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import mdata
from mdata.tracing.run_record import read_record
from tests.helpers.examples import SOAK
from tests.helpers.ranks import RankError, run_ranks, stop_ranks
from tests.trainer.run.one_rank import curve, events
from tests.trainer.run.test_spikes import BATCH, LENGTH, mixed, texts
from trainer.config.parse import parse_config
from trainer.config.sections import MeshSection, RunConfig
from trainer.parallel.mesh import mesh_of
from trainer.run.data import open_data
from trainer.run.train import train

MARK = "\x01"  # by the tokenizer of bytes, id 1
LAYOUTS = (
    (MeshSection(tp=2), "none"),
    (MeshSection(tp=2, sequence_parallel=True), "state"),
    (MeshSection(pp=2), "state"),
    (MeshSection(cp=2), "state"),
    (MeshSection(), "gradients"),
    (MeshSection(), "parameters"),
)


def loss(logits_BSV, batch):
    """Cross entropy, a hundred times that of marks."""
    labels_N = batch.labels_BS.flatten()
    losses_N = cross_entropy(logits_BSV.flatten(0, 1), labels_N, reduction="none")
    losses_N = losses_N * torch.where(labels_N == ord(MARK), 100.0, 1.0).to(losses_N.dtype)
    return (losses_N * batch.loss_mask_BS.flatten()).sum().double()


def _train(context, config, kill):
    """Train; `kill` is (rank, after so many steps of this start, seconds later)."""
    seen = []

    def die(step):
        seen.append(step)
        if kill and (context.rank, len(seen)) == kill[:2]:
            threading.Timer(kill[2], os.kill, (os.getpid(), signal.SIGKILL)).start()

    train(config, context.join(mesh_of(config, context.world)), loss=loss, callbacks=[die])


def _run(chance: random.Random, folder: Path) -> RunConfig:
    steps = chance.choice((30, 40))
    tables = {
        "run": {"folder": str(folder / "one"), "seed": 7},
        "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "tie_embeddings": False, "vocab_size": 257},
        "data": {"blend": str(folder / "faulty" / "mix.json"), "order": "megatron"},
        "train": {"sequence_length": LENGTH, "global_batch": BATCH, "micro_batch": 4, "steps": steps},
        "optimizer": {"lr": 1e-2, "warmup_steps": 4},
        "precision": {"dtype": "fp64"},
        "checkpoint": {"interval": chance.choice((3, 5, 7, 12)), "keep": chance.choice((1, 2, 9))},
        "spikes": {
            "action": "roll_back",
            "window": 16,
            "skip_before": chance.choice((0, 1, 4)),
            "skip_after": chance.choice((0, 1, 3)),
            "max_rollbacks": 9,
        },
    }
    config, problems = parse_config(tables)
    assert config is not None, problems
    return config


def _plant(chance: random.Random, config: RunConfig, folder: Path) -> None:
    """Mark the rows of one to three steps, and perhaps those of a later one."""
    steps, width = config.train.steps, LENGTH - 1  # with its end-of-document token a text fills a row
    first = chance.randrange(14, steps - 4)
    faulty = {*range(first, first + chance.randint(1, 3)), first + chance.randint(1, 9)}
    rows = {name: texts(seed, steps * BATCH, width=width) for seed, name in ((1, "good"), (2, "bad"))}
    sound = replace(config, data=replace(config.data, blend=str(mixed(folder / "sound", rows))))
    tracer = mdata.Tracer(open_data(sound).train)
    for step in (step for step in faulty if step <= steps):
        for sample in range((step - 1) * BATCH, step * BATCH):
            traced = tracer.sample(sample)
            text, document = rows[traced.name], traced.parts[0].document
            text[document] = f"{text[document][:3]}{MARK}{text[document][4:]}"
    mixed(folder / "faulty", rows)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SOAK))
def test_it_is_the_rollback_of_one_rank(seed, tmp_path):
    chance = random.Random(seed)
    one = _run(chance, tmp_path)
    _plant(chance, one, tmp_path)
    run_ranks(_train, 1, one, None)
    mesh, sharding = chance.choice(LAYOUTS)
    two = replace(one, run=replace(one.run, folder=str(tmp_path / "two")), mesh=mesh)
    two = replace(two, optimizer=replace(two.optimizer, sharding=sharding))
    for _ in range(chance.randint(0, 3)):
        kill = chance.randrange(2), chance.randint(1, 40), chance.choice((0, chance.uniform(0, 0.2)))
        print(mesh, sharding, kill)  # shown where it fails
        try:
            run_ranks(_train, 2, two, kill)
            time.sleep(kill[2])  # a rank that ended before it was killed is a process of the pool
        except RankError as error:
            assert "the process died" in str(error) or "failed after it" in str(error)
        finally:
            stop_ranks()
    run_ranks(_train, 2, two, None)
    rollbacks = [[(e["step"], e["checkpoint"], e["samples"]) for e in events(c, "rollback")] for c in (one, two)]
    assert rollbacks[0] == rollbacks[1] and rollbacks[0]
    assert read_record(Path(one.run.folder)).skip == read_record(Path(two.run.folder)).skip
    for expected, found in zip(curve(one), curve(two), strict=True):
        if None in expected:  # a step whose samples are skipped
            assert found == expected
        else:
            assert found == pytest.approx(expected, rel=1e-7), expected[0]
