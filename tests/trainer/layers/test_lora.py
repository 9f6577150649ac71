"""Adapters: every layout computes the gradients of one rank, and one rank those of a model with merged weights.

Frozen weights have no gradient, no main weight and no moment on any rank.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    assemble,
    check_same_gradients,
    draw_adapters,
    layouts,
    logical,
    microbatches,
    reduced,
    small_config,
)
from trainer.config.sections import (
    CheckpointSection,
    DataSection,
    LoRASection,
    MeshSection,
    MoESection,
    OptimizerSection,
    RecomputeSection,
    RunConfig,
)
from trainer.parallel.collectives import all_reduce_
from trainer.plan.check import check
from trainer.plan.memory import in_use_bytes, kept_bytes, tables
from trainer.plan.plan import make_plan
from trainer.run.metrics import held_parameters

ALL = LoRASection(rank=4, alpha=6.0)
SOME = LoRASection(rank=4, targets=("q", "v", "up"))
ENDS = LoRASection(rank=4, targets=("q", "v"), modules_to_save=("embedding", "head"))
TIED = LoRASection(rank=4, targets=("q", "v"), modules_to_save=("embedding",))


def _config(shape: str = "llama", *, lora: LoRASection | None = ALL, dtype: str = "fp64", **sections: Any) -> RunConfig:
    config = small_config(shape, dtype=dtype, **{"data": DataSection(blend="mock"), **sections})
    return replace(config, model=replace(config.model, lora=lora))


def _gradients(context: Any, config: RunConfig) -> Any:
    engine = layouts(context, config)
    draw_adapters(engine)
    totals = engine.add_gradients(microbatches(engine, 0))
    for axis in ("pp", "data"):
        all_reduce_(totals, engine.world.groups[axis])
    assert all(parameter.grad is None for parameter in engine.model.parameters()), "a gradient outside the buffers"
    weights = logical(engine.optimizer.owned, engine.optimizer.state["weight"])
    return totals.tolist(), reduced(engine, totals[1]), weights


def _whole(config: RunConfig, ranks: int) -> Any:
    results = run_ranks(_gradients, ranks, config)
    (totals,) = {tuple(totals) for totals, *_ in results}
    return totals, assemble([part for _, parts, _ in results for part in parts])


LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp 2 sp": (2, "llama", {"mesh": MeshSection(tp=2, sequence_parallel=True)}),
    "pp 2, tied": (2, "gpt2", {"mesh": MeshSection(pp=2)}),
    "pp 2, tied and saved": (2, "gpt2", {"mesh": MeshSection(pp=2), "lora": TIED}),
    "tp 2 sp, saved": (2, "llama", {"mesh": MeshSection(tp=2, sequence_parallel=True), "lora": ENDS}),
    "parameters, saved": (
        2,
        "llama",
        {"optimizer": OptimizerSection(lr=1e-2, sharding="parameters", bucket_size=1), "lora": ENDS},
    ),
    "gradients, some targets": (
        2,
        "llama",
        {"optimizer": OptimizerSection(lr=1e-2, sharding="gradients"), "lora": SOME},
    ),
    "parameters": (2, "llama", {"optimizer": OptimizerSection(lr=1e-2, sharding="parameters", bucket_size=1)}),
    "none": (2, "llama", {"optimizer": OptimizerSection(lr=1e-2, sharding="none")}),
    "state, norms recomputed": (2, "llama", {"recompute": RecomputeSection(mode="selective")}),
    "zb_h1": (2, "llama", {"mesh": MeshSection(pp=2, schedule="zb_h1")}),
    "cp 2, recomputed": (2, "llama", {"mesh": MeshSection(cp=2), "recompute": RecomputeSection(mode="full")}),
    "tp 2, biases": (2, "gpt2", {"mesh": MeshSection(tp=2)}),
    "tp 4, copies of heads, some targets": (4, "llama", {"mesh": MeshSection(tp=4), "lora": SOME}),
    "tp 2 sp, dp 2, parameters": (
        4,
        "llama",
        {
            "mesh": MeshSection(tp=2, sequence_parallel=True),
            "optimizer": OptimizerSection(lr=1e-2, sharding="parameters", bucket_size=1),
        },
    ),
}
SHORT = tuple(LAYOUTS)[:6]


@pytest.mark.parametrize(
    "case", [case if case in SHORT else pytest.param(case, marks=pytest.mark.soak) for case in LAYOUTS]
)
def test_gradients_equal_those_of_one_rank(case):
    ranks, shape, sections = LAYOUTS[case]
    expected_totals, expected = _whole(_config(shape, lora=sections.get("lora", ALL)), 1)
    totals, got = _whole(_config(shape, **sections), ranks)
    np.testing.assert_allclose(totals, expected_totals, rtol=1e-12)
    check_same_gradients(got, expected)


def _merged_gradients(context: Any, config: RunConfig) -> Any:
    """The gradients of all weights of the model whose weights are merged with adapters, and these adapters."""
    adapted = layouts(context, config)
    draw_adapters(adapted)
    lora = config.model.lora
    assert lora is not None
    adapters = {name: values for name, _, values in logical(adapted.optimizer.owned, adapted.optimizer.state["weight"])}
    plain = layouts(context, replace(config, model=replace(config.model, lora=None)))
    weight = plain.optimizer.state["weight"]
    for _, part, first in plain.optimizer.owned.slices():
        layer = part.name.removesuffix(".weight")
        if f"{layer}.lora_a" in adapters:
            more = lora.scale * adapters[f"{layer}.lora_b"] @ adapters[f"{layer}.lora_a"]
            weight[first : first + more.size] += weight.new_tensor(more).flatten()
    plain.optimizer.publish()
    totals = plain.add_gradients(microbatches(plain, 0))
    return totals.tolist(), reduced(plain, totals[1]), adapters


@pytest.mark.parametrize("lora", [ALL, SOME, ENDS])
def test_gradients_are_those_of_the_merged_weights(lora):
    """dA = scale B^T dW and dB = scale dW A^T, where W' = W + scale B A."""
    config = _config(lora=lora)
    ((merged_totals, merged, adapters),) = run_ranks(_merged_gradients, 1, config)
    of_weights = assemble(merged)
    totals, got = _whole(config, 1)
    np.testing.assert_allclose(totals, merged_totals, rtol=1e-12)
    assert {f"{layer}.weight" for layer in lora.modules_to_save} == {name for name in adapters if ".lora_" not in name}
    expected = {}
    for name in adapters:
        layer, _, kind = name.rpartition(".")
        if kind == "weight":
            expected[name] = of_weights[name]
            continue
        other = adapters[f"{layer}.lora_{'b' if kind == 'lora_a' else 'a'}"]
        gradient = of_weights[f"{layer}.weight"]
        expected[name] = lora.scale * (other.T @ gradient if kind == "lora_a" else gradient @ other.T)
    check_same_gradients(got, expected)


def _trained(context: Any, config: RunConfig, root: Path, load: bool) -> Any:
    """Weights and moments after two steps, or after the second one from the checkpoint of the first."""
    engine = layouts(context, config, fresh=not load)
    if load:
        engine.load(root / "step-1")
    else:
        draw_adapters(engine)
        engine.step(microbatches(engine, 1), 1e-2)
        engine.save(str(root), step=1, consumed_samples=4)
    engine.step(microbatches(engine, 2), 1e-2)
    engine.optimizer.gathers.release()
    return {name: logical(engine.optimizer.owns[name], values) for name, values in engine.optimizer.state.items()}


@pytest.mark.soak
@pytest.mark.parametrize("to", ["tp 2 sp", "pp 2", "parameters"])
def test_adapters_continue_on_another_layout(tmp_path, to):
    base = _config(lora=None)
    run_ranks(_saved, 1, base, tmp_path / "base")
    checkpoint = CheckpointSection(init_from=str(tmp_path / "base"))
    config = _config(checkpoint=checkpoint)
    (alone,) = run_ranks(_trained, 1, config, tmp_path / "run", False)
    sections: dict[str, Any] = {
        "tp 2 sp": {"mesh": MeshSection(tp=2, sequence_parallel=True)},
        "pp 2": {"mesh": MeshSection(pp=2)},
        "parameters": {"optimizer": OptimizerSection(lr=1e-2, sharding="parameters")},
    }
    results = run_ranks(_trained, 2, _config(checkpoint=checkpoint, **sections[to]), tmp_path / "run", True)
    for name, parts in alone.items():
        check_same_gradients(assemble([part for result in results for part in result[name]]), assemble(parts))


def _saved(context: Any, config: RunConfig, folder: Path) -> None:
    layouts(context, config).save(str(folder / "checkpoints"), step=1, consumed_samples=1)


def _bytes(context: Any, config: RunConfig) -> Any:
    engine = layouts(context, config)
    engine.optimizer.gathers.release()
    tensors = (engine.buffers.parameters.values, engine.buffers.gradients.values, *engine.optimizer.outside_buffers)
    names = {name for name, *_ in logical(engine.optimizer.owned, engine.optimizer.state["weight"])}
    report = held_parameters(engine.optimizer, engine.executor.stages)
    return sum(tensor.nbytes for tensor in tensors), engine.buffers.parameters.values.nbytes, names, bool(report)


def test_frozen_weights_take_their_own_bytes_alone():
    config = _config(dtype="bf16")
    plan = make_plan(config, 2, facts=None)
    (kept, parameters, names, reported), *_ = run_ranks(_bytes, 2, config)
    assert reported and names and all(name.endswith(("lora_a", "lora_b")) for name in names)
    (table,) = tables(config, plan)
    planned = kept_bytes(config, plan, table=table)
    assert planned <= kept <= planned * 1.1, "padding of buckets"
    trained = sum(spec.numel for spec in table if not spec.frozen)
    assert plan.trained_parameters == trained < plan.num_parameters // 4
    # In bf16, over two ranks: a gradient in fp32, and half of the main weight and two moments.
    assert planned == 2 * sum(spec.numel for spec in table) + trained * (4 + 3 * 4 // 2)
    sharded = replace(config, optimizer=OptimizerSection(lr=1e-2, sharding="parameters"))
    (_, held, *_), *_ = run_ranks(_bytes, 2, sharded)
    assert held == parameters // 2
    full = replace(sharded, model=replace(config.model, lora=None))
    assert in_use_bytes(sharded, table) < in_use_bytes(full, tables(full, make_plan(full, 2, facts=None))[0])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": DataSection(blend="unused")}, "[model.lora] needs checkpoint.init_from"),
        ({"optimizer": OptimizerSection(lr=1e-2, name="muon")}, 'optimizer.name="muon" does not support [model.lora]'),
        ({"optimizer": OptimizerSection(lr=1e-2, embedding_lr=0.1)}, "[model.lora] freezes the embedding"),
        ({"moe": MoESection()}, "[model.lora] does not support [model.moe]"),
        ({"shape": "gpt2", "lora": ENDS}, "names the head, which is the embedding; set some of embedding"),
        (
            {"lora": TIED, "checkpoint": CheckpointSection(init_from="a", new_rows_from=3)},
            "rows that [model.lora] freezes; set model.lora.modules_to_save=['embedding', 'head']",
        ),
        ({"lora": LoRASection(rank=4, targets=("q", "q"))}, "model.lora.targets=['q', 'q'] lists one twice"),
        ({"shape": "gpt2", "lora": LoRASection(rank=4, targets=("gate",))}, 'has no gate with model.activation="gelu"'),
    ],
)
def test_what_adapters_lack_is_refused_by_name(sections, said):
    config = _config(**{name: section for name, section in sections.items() if name != "moe"})
    model = replace(config.model, moe=sections.get("moe"))
    (problem,) = check(replace(config, model=model), 1, facts=None)
    assert said in problem


def _float8_run(context: Any, config: RunConfig) -> Any:
    engine = layouts(context, config)
    draw_adapters(engine)
    losses = [engine.step(microbatches(engine, 0), 1e-2).read().loss for _ in range(3)]
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    return losses, logical(engine.optimizer.owned, engine.optimizer.state["weight"])


@pytest.mark.parametrize("lora", [ALL, pytest.param(SOME, marks=pytest.mark.soak)])
@pytest.mark.parametrize("mesh", [MeshSection(), MeshSection(tp=2, sequence_parallel=True)], ids=["tp 1", "tp 2 sp"])
def test_frozen_weights_are_multiplied_in_fp8(lora, mesh):
    wide = _config("llama", lora=lora, dtype="bf16", mesh=mesh)
    rounded = replace(wide, precision=replace(wide.precision, fp8="current"))
    (expected, weights), *_ = run_ranks(_float8_run, mesh.tp, wide)
    (losses, others), *_ = run_ranks(_float8_run, mesh.tp, rounded)
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    assert losses != expected, "something is rounded"
    for (name, _, values), (_, _, other) in zip(weights, others, strict=True):
        assert np.abs(values - other).max() < 0.1 and np.corrcoef(values.ravel(), other.ravel())[0, 1] > 0.98, name
