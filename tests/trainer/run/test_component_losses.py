"""A step's loss by component of the blend equals the sums of its rows, in every layout, order and kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_config, make_mix
from tests.trainer.engines import GLOBAL_BATCH, layouts, microbatches, small_config
from trainer.config.sections import MeshSection
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.plan import make_plan
from trainer.run.data import evaluation_batches, open_data, to_device
from trainer.run.engine import Engine
from trainer.run.metrics import read_metrics
from trainer.run.train import train

COMPONENTS = (2, 0, 2, 3)  # of the rows of a global batch; 1 has none


def _step(context, config, own):
    """(loss of the step, losses of 5 components, tokens of each row and their sums of losses)"""
    engine = layouts(context, config)
    batches = [replace(batch, components_B=_components(batch)) for batch in microbatches(engine, 3)]
    with torch.no_grad():
        rows = [_rows(engine, batch) for batch in batches]
    if own:
        engine.model.loss_function = own
    report = engine.step(batches, 0.0, num_components=5).read()
    return report.loss, report.component_losses, [row for found in rows for row in found]


def _components(batch):
    return torch.tensor(COMPONENTS)[batch.samples_B % GLOBAL_BATCH]


def _rows(engine, batch):
    losses = _own_by_token(engine.model.whole_logits(batch), batch)
    for row, number in enumerate(batch.samples_B % GLOBAL_BATCH):
        yield COMPONENTS[number], losses[row].sum().item(), batch.loss_mask_BS[row].sum().item()


def _own_by_token(logits_BSV, batch):
    log_softmax = torch.log_softmax(logits_BSV.double(), dim=-1)
    return -log_softmax.gather(-1, batch.labels_BS[..., None])[..., 0] * batch.loss_mask_BS


def _own_sum(logits_BSV, batch):
    return _own_by_token(logits_BSV, batch).sum()


@pytest.mark.parametrize(
    ("ranks", "mesh", "micro_batch", "average", "own"),
    [
        (1, MeshSection(), 4, "token", None),
        (1, MeshSection(), 2, "megatron", None),
        (2, MeshSection(tp=2), 1, "token", None),
        (2, MeshSection(cp=2), 2, "megatron", None),
        (4, MeshSection(tp=2, sequence_parallel=True), 1, "megatron", _own_by_token),
    ],
)
def test_losses_by_component_are_the_means_of_their_rows(ranks, mesh, micro_batch, average, own):
    config = small_config("llama", mesh=mesh)
    config = replace(config, train=replace(config.train, micro_batch=micro_batch, loss_average=average))
    results = run_ranks(_step, ranks, config, own)
    rows = {row for _, _, found in results for row in {(c, round(s, 9), t) for c, s, t in found}}
    assert len(rows) == GLOBAL_BATCH * mesh.cp  # of each row a part on each rank that shares it
    expected = [
        sum(s for c, s, _ in rows if c == k) / (sum(t for c, _, t in rows if c == k) or np.nan) for k in range(5)
    ]
    for loss, losses, _ in results:
        assert loss == pytest.approx(sum(s for _, s, _ in rows) / sum(t for _, _, t in rows), rel=1e-9)
        np.testing.assert_allclose(losses, expected, rtol=1e-9)  # NaN where there is no row


def test_a_users_loss_that_is_a_sum_says_nothing_of_components():
    ((loss, losses, _),) = run_ranks(_step, 1, small_config("llama"), _own_sum)
    assert np.isfinite(loss) and np.isnan(losses).all()


def test_fp16_losses_are_not_those_of_the_scale():
    config = small_config("llama", dtype="fp16")
    ((loss, losses, _),) = run_ranks(_step, 1, config, None)
    assert all(abs(x - loss) < 1 for x in np.array(losses)[[0, 2, 3]])


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    make_mix(folder, ["first", "second"])
    return folder


def _config(corpora, folder, *, blend="mix.json", data=None, **train):
    config = make_config(folder, blend=corpora / blend, valid=[], steps=3, **train)
    return replace(config, mesh=MeshSection(), data=replace(config.data, **(data or {})))


@pytest.mark.parametrize("data", [{}, {"order": "megatron"}, {"kind": "document"}, {"kind": "packed"}])
def test_the_first_steps_losses_are_evaluations_of_its_rows(data, corpora, tmp_path):
    """The weights are still the initial ones, so that an engine of its own gives the same losses."""
    config = _config(corpora, tmp_path / "run", data=data, global_batch=8)
    world = join_world(Mesh(1), placement=Placement())
    train(config, world)
    first, *later = read_metrics(tmp_path / "run")
    assert all(line["train"] for line in later)
    found = open_data(config)
    plan = make_plan(config, 1, facts=found.facts)
    engine = Engine(config, plan, world=world)
    components, _ = found.train.locate(np.arange(8))
    for number, part in enumerate(found.train.components):
        rows = evaluation_batches(found.train, np.flatnonzero(components == number), micro_batch=2, dp=engine.dp)
        expected = engine.evaluate(to_device(b, world.device, vocab_size=plan.vocab_size) for b in rows)
        if np.isnan(expected):
            assert part.name not in first["train"]
        else:
            assert first["train"][part.name] == pytest.approx(expected, rel=1e-5)


def test_one_corpus_alone_has_no_losses_beside_the_steps(corpora, tmp_path):
    config = _config(corpora, tmp_path / "run", blend="first_text_document.json")
    train(config, join_world(Mesh(1), placement=Placement()))
    assert all("train" not in line for line in read_metrics(tmp_path / "run"))
