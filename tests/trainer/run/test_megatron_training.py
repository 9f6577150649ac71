"""Twenty steps as Megatron trained them: its loss averages, its warmup, its AdamW, from its weights and batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import microbatch
from tests.trainer.models import megatron
from trainer.config.sections import (
    DataSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.optim.schedules import rates
from trainer.parallel.mesh import Mesh
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine


def their_config(folder: Path, *, loss_average: str, micro_batch: int) -> RunConfig:
    told = json.loads((folder / "case.json").read_text())
    model, train = told["model"], told["train"]
    return RunConfig(
        run=RunSection(folder="unused"),
        model=ModelSection(
            num_layers=model["num_layers"],
            hidden_size=model["hidden_size"],
            num_heads=model["num_attention_heads"],
            ffn_hidden_size=model["ffn_hidden_size"],
            vocab_size=model["vocab_size"],
            max_position=model["max_position_embeddings"],
            position="learned",
            norm="layernorm",
            activation="gelu_erf",
            bias=True,
            tie_embeddings=model["tie_embeddings"],
        ),
        data=DataSection(blend="unused"),
        train=TrainSection(
            sequence_length=train["seq"],
            global_batch=train["global_batch"],
            micro_batch=micro_batch,
            steps=train["steps"],
            loss_average=loss_average,
        ),
        optimizer=OptimizerSection(
            lr=train["lr"],
            min_lr=train["min_lr"],
            init_lr=train["init_lr"],
            warmup_steps=train["warmup_iters"],
            warmup_count="before",
            decay_steps=train["decay_iters"],
            weight_decay=train["weight_decay"],
            beta1=train["betas"][0],
            beta2=train["betas"][1],
            epsilon=train["eps"],
            clip_norm=train["clip_grad"],
        ),
    )


def with_their_weights(context, folder: Path, config: RunConfig) -> Engine:
    from safetensors.torch import load_file

    plan = make_plan(config, context.world, facts=None)
    engine = Engine(config, plan, world=context.join(Mesh(context.world, 1)))
    megatron.fill(engine.model, load_file(folder / "weights.safetensors"))
    for start, stop, first, _ in engine.optimizer.owned.runs:
        engine.optimizer.state["weight"][first : first + stop - start].copy_(engine.buffers.parameters[start:stop])
    return engine


def trained(context, folder: Path, config: RunConfig) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, learning rate) of each step."""
    from safetensors.torch import load_file

    engine = with_their_weights(context, folder, config)
    plan, data, curve = engine.plan, load_file(folder / "train_data.safetensors"), []
    for step in range(plan.steps):
        batch = [data[name][step].split(config.train.micro_batch) for name in ("tokens", "labels", "loss_mask")]
        mine = list(zip(*batch, strict=True))[engine.dp.rank :: engine.dp.size]
        size = plan.global_batch
        now = rates(config.optimizer, plan.schedule, steps=step, samples=step * size, batch=size)
        rows = [microbatch(tokens.long(), labels.long(), mask.float()) for tokens, labels, mask in mine]
        report = engine.step(rows, now.learning_rate, weight_decay=now.weight_decay).read()
        curve.append((report.loss, report.grad_norm, report.learning_rate))
    return curve


@pytest.mark.parametrize(
    ("curve", "loss_average", "micro_batch", "ranks"),
    [
        ("train_micro1", "token", 8, 1),
        ("train_micro1", "megatron", 8, 1),
        ("train_micro4_per_token", "token", 2, 1),
        ("train_micro4", "megatron", 2, 1),
        ("train_micro4", "megatron", 2, 2),
    ],
)
def test_twenty_steps_are_megatrons(oracles, curve, loss_average, micro_batch, ranks):
    folder = oracles / "oracle" / "model" / "case_gpt2"
    expected = json.loads((folder / f"{curve}.json").read_text())["steps"]
    config = their_config(folder, loss_average=loss_average, micro_batch=micro_batch)
    for found in run_ranks(trained, ranks, folder, config):
        assert [rate for _, _, rate in found] == pytest.approx([step["lr_used"] for step in expected], rel=1e-12)
        assert [loss for loss, _, _ in found] == pytest.approx([s["loss_token_weighted"] for s in expected], rel=1e-4)
        # Norms of different averages differ by about 1e-2: this is what tells the two apart.
        assert [norm for _, norm, _ in found] == pytest.approx([step["grad_norm"] for step in expected], rel=1e-4)


def _half(context, folder: Path, row: dict) -> list:
    """Reports of the steps of one row of mixed_precision.json, which goes round four batches."""
    from safetensors.torch import load_file

    precision = PrecisionSection(dtype=row["precision"])
    if row["precision"] == "fp16":
        names = {"initial_loss_scale": "initial_loss_scale", "loss_scale_window": "loss_scale_window"}
        values = {ours: row[theirs] for ours, theirs in names.items()}
        precision = replace(precision, loss_scale_hysteresis=row["hysteresis"], **values)
    config = replace(their_config(folder, loss_average="megatron", micro_batch=8), precision=precision)
    engine, data = with_their_weights(context, folder, config), load_file(folder / "train_data.safetensors")
    reports = []
    for number, step in enumerate(row["steps"]):
        tokens, labels, mask = (data[name][number % 4] for name in ("tokens", "labels", "loss_mask"))
        batch = microbatch(tokens.long(), labels.long(), mask.float())
        reports.append(engine.step([batch], step["lr_used"]).read())
    return reports


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_megatrons(oracles, precision):
    """Theirs overflows down to 2^18: its gradients of weights are fp16 too. Ours are fp32, and fit from 2^21 on."""
    folder = oracles / "oracle" / "model"
    rows = json.loads((folder / "mixed_precision.json").read_text())
    row = next(row for row in rows if (row["case"], row["precision"]) == ("case_gpt2", precision))
    (reports,) = run_ranks(_half, 1, folder / "case_gpt2", row)
    alike = row["steps"] if precision == "bf16" else row["steps"][:4]
    for report, step in zip(reports, alike, strict=False):
        assert report.loss == pytest.approx(step["loss"], rel=2e-4)
        assert (report.applied, report.loss_scale) == (step["updated"], step["loss_scale_used"])
        if step["updated"]:
            assert report.grad_norm == pytest.approx(step["grad_norm"], rel=3e-3)
    if precision == "fp16":
        assert [report.loss_scale for report in reports[4:8]] == [2.0**21] * 4, "the scale after the last overflow"
