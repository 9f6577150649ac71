"""DPO in whole runs: losses, rewards and gradients of a twin by autograd, in every layout; the reference is kept."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from mdata import DamageError, UsageError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_pairs
from trainer.config.sections import (
    DataSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.models.stage import Microbatch
from trainer.parallel.mesh import Mesh, mesh_of
from trainer.plan.check import check
from trainer.plan.plan import make_plan
from trainer.report.page import write_report
from trainer.run.data import open_data, training_batches
from trainer.run.engine import Engine
from trainer.run.metrics import read_metrics
from trainer.run.references import FILE
from trainer.run.train import train

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH, BETA, STEPS = 160, 0.5, 4
NAMES = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return make_pairs(tmp_path_factory.mktemp("corpora"))


def config_of(corpus, folder, *, mesh=None, optimizer=None, model=None, **train) -> RunConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "init_std": 0.2}
    given = {"sequence_length": LENGTH, "global_batch": 4, "micro_batch": 2, "steps": STEPS, "dpo_beta": BETA}
    given |= {"eval_interval": 2, "eval_samples": 3}
    return RunConfig(
        run=RunSection(folder=str(folder), seed=7),
        model=ModelSection(**{**sizes, **(model or {})}),
        data=DataSection(blend=str(corpus), split="80,20", cache=str(folder / "cache"), kind="pairs"),
        mesh=MeshSection(**(mesh or {})),
        train=TrainSection(**{**given, **train}),
        optimizer=OptimizerSection(name="sgd", lr=1e-3, schedule="constant", **(optimizer or {})),
        precision=PrecisionSection(dtype="fp64"),
    )


def _train(context, config):
    train(config, context.join(mesh_of(config, context.world)))


def _lines(config, ranks):
    train(config) if ranks == 1 else run_ranks(_train, ranks, config)
    return [
        (
            line["loss"],
            line["grad_norm"],
            *(line["named_losses"][name] for name in NAMES),
            *line.get("valid", {}).values(),
        )
        for line in read_metrics(Path(config.run.folder))
    ]


def _log_p(engine, text, mask):
    """log p of the labels with loss of one conversation alone."""
    row = torch.from_numpy(text)[None]
    alone = Microbatch(tokens_BS=row[:, :-1], labels_BS=row[:, 1:], loss_mask_BS=torch.from_numpy(mask)[None, :-1])
    log_p_SV = engine.whole_logits(alone)[0].log_softmax(1)
    return (log_p_SV.gather(1, row[0, 1:, None])[:, 0] * alone.loss_mask_BS[0]).sum()


def _twin(context, config, skipped=frozenset()):
    """Steps of the formula, by autograd: each conversation a row of its own, and an older copy of the model."""
    data = open_data(config)
    plan, world = make_plan(config, 1, facts=data.facts), context.join(Mesh(1, 1))
    engine, older = (Engine(config, plan, world=world, fresh=True) for _ in range(2))
    lines = []
    steps = training_batches(data, config, plan=plan, dp=engine.dp, consumed=0)
    for batches in itertools.islice(steps, config.train.steps):
        found = []
        for batch in batches:
            bounds = batch.rows.cu_seqlens.tolist()
            text, mask = batch.tokens.flatten(), batch.loss_mask.flatten()
            counted = [(a, b) for a, b in itertools.pairwise(bounds) if batch.samples[a // LENGTH] not in skipped]
            parts = [(text[a:b].copy(), mask[a:b].copy()) for a, b in counted]
            for chosen, rejected in zip(parts[::2], parts[1::2], strict=True):
                with torch.no_grad():
                    before = [_log_p(older, *part) for part in (chosen, rejected)]
                now = [_log_p(engine, *part) for part in (chosen, rejected)]
                rewards = [BETA * (new - old) for new, old in zip(now, before, strict=True)]
                margin = rewards[0] - rewards[1]
                loss = -logsigmoid(margin)
                loss.backward()
                found.append([x.item() for x in (loss, *rewards, margin, (margin > 0).double())])
        sums = torch.tensor(found, dtype=torch.float64).sum(0)
        result = engine.optimizer.step(1e-3, torch.tensor([len(found), sums[0]], dtype=torch.float64))
        loss, *rewards = (sums / len(found)).tolist()
        lines.append((loss, result.grad_norm.item(), *rewards))
    return lines


def _check_same(lines, expected):
    """Accuracies of the first step are of margins that are 0 up to rounding."""
    for step, (line, wanted) in enumerate(zip(lines, expected, strict=True)):
        places = [place for place in range(len(wanted)) if step or place != len(NAMES) + 1]
        assert [line[i] for i in places] == pytest.approx([wanted[i] for i in places], rel=1e-9, abs=1e-12), step


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """A run on one rank: its folder, its lines."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    return folder, _lines(config_of(corpus, folder), 1)


def test_a_run_is_the_twin(corpus, alone, tmp_path):
    _, lines = alone
    (twin,) = run_ranks(_twin, 1, config_of(corpus, tmp_path))
    assert lines[0][0] == pytest.approx(np.log(2), rel=1e-12)
    _check_same([line[:6] for line in lines], twin)
    assert lines[-1][4] > 0 and len(lines[1]) == 7  # with a validation


LAYOUTS = {
    "cp": {"mesh": {"cp": 2}},
    "sp": {"mesh": {"tp": 2, "sequence_parallel": True}},
    "pp": {"mesh": {"pp": 2}, "micro_batch": 1},
    "dp": {"optimizer": {"sharding": "parameters"}},
    "tp": {"mesh": {"tp": 2}, "model": {"tie_embeddings": True, "logit_softcap": 9.0}},
}


@pytest.mark.parametrize("name", ["cp", *(pytest.param(name, marks=pytest.mark.soak) for name in [*LAYOUTS][1:])])
def test_a_layout_changes_nothing(corpus, alone, tmp_path, name):
    folder, expected = alone
    if "model" in LAYOUTS[name]:
        folder = tmp_path / "other"
        expected = _lines(config_of(corpus, folder, model=LAYOUTS[name]["model"]), 1)
    _check_same(_lines(config_of(corpus, tmp_path / name, **LAYOUTS[name]), 2), expected)
    # The hash of the weights does not depend on the layout.
    facts = [np.load(path / FILE)["facts"].tobytes() for path in (folder, tmp_path / name)]
    assert facts[0] == facts[1]


def test_the_reference_is_computed_once(corpus, alone, tmp_path):
    """A run that continues has the losses of one without a stop, also where the file is lost; damage is named."""
    folder, whole = alone
    stops, path = config_of(corpus, tmp_path / "parts", exit_interval=2), tmp_path / "parts" / FILE
    _lines(stops, 1)
    first = path.stat().st_mtime_ns
    assert path.read_bytes() == (folder / FILE).read_bytes()
    path.write_bytes(b"PK")
    with pytest.raises(DamageError, match=r"reference.npz is damaged\n.*\n.*delete it"):
        train(stops)
    path.unlink()
    _check_same(_lines(stops, 1), whole)
    assert path.read_bytes() == (folder / FILE).read_bytes() and path.stat().st_mtime_ns != first


def test_a_reference_of_other_weights_is_computed_again(corpus, alone, tmp_path):
    folder, _ = alone
    config = config_of(corpus, tmp_path / "run", steps=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).write_bytes((folder / FILE).read_bytes())
    (line,) = _lines(replace(config, run=replace(config.run, seed=8)), 1)
    assert line[0] == pytest.approx(np.log(2), rel=1e-12)
    assert (tmp_path / "run" / FILE).read_bytes() != (folder / FILE).read_bytes()


def test_the_report_shows_rewards_and_no_perplexity(alone):
    folder, _ = alone
    path, lines = write_report(folder)
    page = path.read_text()
    assert lines == [f"valid: {read_metrics(folder)[-1]['valid']['valid']:.3f} nats per pair"]
    assert "<h2>Preferences</h2>" in page and "The loss of pairs is not one of tokens" in page
    assert "perplexity" not in page and "nats per token" not in page


def test_skipped_samples_do_not_count(corpus, tmp_path):
    config = config_of(corpus, tmp_path, steps=2)
    config = replace(config, data=replace(config.data, skip=("1-2", "5-5")))
    (twin,) = run_ranks(_twin, 1, config, {1, 2, 5})
    _check_same([line[:6] for line in _lines(config, 1)], twin)


def test_what_pairs_cannot_be_used_with_is_said(corpus, tmp_path):
    config = config_of(corpus, tmp_path)
    chat = replace(config, data=replace(config.data, kind="chat"))
    assert any("train.dpo_beta=0.5 applies only to data.kind" in problem for problem in check(chat, 1, facts=None))
    masked = replace(config, data=replace(config.data, document_masks=True))
    assert any("where conversations are always kept apart" in problem for problem in check(masked, 1, facts=None))
    with pytest.raises(UsageError, match="mock data has no pairs"):
        train(
            replace(config, data=DataSection(blend="mock", kind="pairs"), model=replace(config.model, vocab_size=300))
        )
