"""Mamba-2 and its hybrids: layouts and recomputation against one rank, documents against each alone, and bad input."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    SEQUENCE,
    assemble,
    check_same_gradients,
    kept_bytes,
    layouts,
    logical,
    microbatches,
    save_engine,
    small_config,
    whole_gradients,
)
from trainer.checkpoint.format import RunState
from trainer.config.presets import PRESETS
from trainer.config.sections import (
    MambaSection,
    MeshSection,
    MoESection,
    OptimizerSection,
    RecomputeSection,
    RunConfig,
)
from trainer.convert.model_keys import model_config
from trainer.kernels.scan import ScanSizes
from trainer.kernels.table import PLAIN, Kernels
from trainer.models.family import family_of
from trainer.models.mamba.shape import allocated
from trainer.models.stage import Microbatch
from trainer.parallel.collectives import Group
from trainer.parallel.init import ElementRange, initialize_
from trainer.parallel.params import Place, num_elements
from trainer.plan.check import check
from trainer.plan.plan import make_plan
from trainer.plan.stages import block_weights
from trainer.run.engine import Engine

MIXER = MambaSection(pattern="M-*ME", head_dim=8, num_groups=2, state_size=6, chunk_size=4)
EXPERTS = MoESection(num_experts=4, top_k=2, ffn_hidden_size=16, balance_factor=0.02)
SOAK = pytest.mark.soak


def config_of(
    pattern: str | None = "M-*ME",
    *,
    recompute: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    mixer: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    dtype: str = "fp64",
    **mesh: Any,
) -> RunConfig:
    config = small_config("llama", dtype=dtype)
    given: dict[str, Any] = {"family": "mamba", "num_layers": len(pattern or ""), "position": "none"}
    given |= {"mamba": replace(MIXER, pattern=pattern, **(mixer or {})), "activation": "squared_relu"}
    given["moe"] = EXPERTS if pattern and "E" in pattern else None
    return replace(
        config,
        model=replace(config.model, **(given | (model or {}))),
        mesh=MeshSection(**mesh),
        recompute=RecomputeSection(**(recompute or {})),
        optimizer=OptimizerSection(lr=1e-2, **(optimizer or {})),
    )


@functools.cache
def _of_one_rank(documents: bool) -> Any:
    return whole_gradients(config_of(), 1, documents)


@pytest.mark.parametrize(
    ("options", "ranks", "documents"),
    [
        ({"tp": 2, "pp": 2, "sequence_parallel": True}, 4, True),
        ({"cp": 2}, 2, True),
        pytest.param({"cp": 2}, 2, False, marks=SOAK),
        pytest.param({"cp": 2, "tp": 2, "sequence_parallel": True}, 4, True, marks=SOAK),
        pytest.param({"cp": 2, "pp": 2, "recompute": {"mode": "full"}}, 4, True, marks=SOAK),
        pytest.param({"tp": 2}, 2, False, marks=SOAK),
        pytest.param({"tp": 2}, 2, True, marks=SOAK),
        pytest.param({"pp": 2, "schedule": "zb_h1"}, 2, False, marks=SOAK),
        pytest.param({"pp": 2, "virtual_pipeline": 2, "schedule": "interleaved"}, 2, False, marks=SOAK),
        pytest.param({"ep": 2, "optimizer": {"sharding": "parameters"}}, 2, True, marks=SOAK),
        pytest.param({"optimizer": {"sharding": "gradients"}}, 2, False, marks=SOAK),
        pytest.param({"recompute": {"mode": "full"}}, 1, True, marks=SOAK),
        pytest.param({"recompute": {"mode": "selective"}, "tp": 2, "sequence_parallel": True}, 2, False, marks=SOAK),
        pytest.param({"pp": 2, "stage_balance": "flops"}, 2, False, marks=SOAK),
    ],
)
def test_every_layout_has_the_gradients_of_one_rank(options, ranks, documents):
    *_, expected = _of_one_rank(documents)
    *_, got = whole_gradients(config_of(**options), ranks, documents)
    check_same_gradients(got, expected)
    assert all(np.abs(values).max() > 0 for values in expected.values()), "every tensor has a gradient"


def _model(config: RunConfig, dtype: torch.dtype = torch.float64) -> Any:
    """The whole model with its initial values."""
    family = family_of(config)
    shape = family.shape(config, config.model.vocab_size or 250)
    model = family.build(shape, Place(), groups={"tp": Group.single("tp")}, dtype=dtype, device=torch.device("cpu"))
    held = dict(model.named_parameters())
    with torch.no_grad():
        for spec in family.parameters(shape, Place()):
            flat = torch.empty(spec.numel, dtype=torch.float64)
            initialize_([ElementRange(spec, 0, spec.numel, flat)], seed=3)
            held[spec.name].copy_(flat.view(spec.shape) * (10 if spec.std else 1))
    return model


@pytest.mark.parametrize(("pattern", "tried"), [("MM", ScanSizes(8, 6)), ("**", None)])
def test_kernels_are_chosen_for_the_sizes_of_mixers(pattern, tried, monkeypatch):
    seen = []

    def chosen(*_: Any, scans: Any) -> Kernels:
        seen.append(scans)
        return PLAIN

    monkeypatch.setattr("trainer.models.gpt.model.choose_kernels", chosen)
    _model(config_of(pattern))
    assert seen == [tried]


def _losses(model: Any, tokens_BS: Tensor, bounds: list[int] | None = None) -> Tensor:
    documents = {} if bounds is None else {"bounds": torch.tensor(bounds).int(), "longest": max(np.diff(bounds))}
    batch = Microbatch(tokens_BS=tokens_BS, labels_BS=tokens_BS, loss_mask_BS=torch.ones(tokens_BS.shape), **documents)
    loss, losses_N = model((), batch)
    loss.backward()
    return losses_N.detach()


def _same_gradients(model: Any, run: Any, expected: list[Tensor]) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    run()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bounds", [[0, 3, 4, 5, 8, 12, 13, 20], [0, 1, 7, 16, 20]])
def test_packed_documents_are_documents_alone(bounds):
    """Losses and gradients; bounds on and beside borders of chunks (4, 8, ...), and within the window."""
    model, draw = _model(config_of("MM*M")), torch.Generator().manual_seed(1)
    tokens_1S = torch.randint(0, 250, (1, bounds[-1]), generator=draw)
    apart = [_losses(model, tokens_1S[:, a:b]) for a, b in itertools.pairwise(bounds)]
    gradients = [parameter.grad for parameter in model.parameters()]

    def together() -> None:
        losses_N = _losses(model, tokens_1S, bounds)
        torch.testing.assert_close(losses_N, torch.cat(apart), rtol=1e-10, atol=1e-12)

    _same_gradients(model, together, gradients)


def test_the_size_of_chunks_changes_nothing():
    tokens_BS = torch.randint(0, 250, (2, SEQUENCE), generator=torch.Generator().manual_seed(2))
    model = _model(config_of("MM"))
    expected = _losses(model, tokens_BS)
    gradients = [parameter.grad for parameter in model.parameters()]
    for chunk in (1, 5, 64):
        other = _model(config_of("MM", mixer={"chunk_size": chunk}))

        def run(other: Any = other) -> None:
            torch.testing.assert_close(_losses(other, tokens_BS), expected, rtol=1e-10, atol=1e-12)

        _same_gradients(other, run, gradients)


def _went_on(context: Any, config: RunConfig, root: Path) -> bool:
    """Whether two steps after a checkpoint are those without it."""
    engine = layouts(context, config)
    for step in range(4):
        if step == 2:
            run = RunState(step=2, consumed_samples=8, data_id="", data={}, optimizer_steps=2, config="x = 1\n")
            save_engine(engine, root, run=run)
        engine.step(microbatches(engine, step), 1e-2)
    again = Engine(config, engine.plan, world=engine.world, fresh=False)
    again.load(root / "step-2")
    for step in (2, 3):
        again.step(microbatches(again, step), 1e-2)
    return all(torch.equal(again.optimizer.state[name], x) for name, x in engine.optimizer.state.items())


def test_training_goes_on_bit_for_bit(tmp_path):
    assert run_ranks(_went_on, 1, config_of(dtype="bf16"), tmp_path) == [True]


def _state(context: Any, config: RunConfig, root: Path) -> Any:
    """Two steps and their checkpoint; or what a layout reads of one that is there."""
    exists = (root / "step-2").exists()
    engine = layouts(context, config, fresh=not exists)
    if exists:
        engine.load(root / "step-2")
    else:
        for step in range(2):
            engine.step(microbatches(engine, step), 1e-2)
        run = RunState(step=2, consumed_samples=8, data_id="", data={}, optimizer_steps=2, config="x = 1\n")
        save_engine(engine, root, run=run)
    optimizer = engine.optimizer
    parts = ((name, logical(optimizer.owns[name], values)) for name, values in optimizer.state.items())
    return [(f"{name}/{tensor}", place, values) for name, part in parts for tensor, place, values in part]


@pytest.mark.soak
def test_checkpoints_are_read_in_any_other_layout(tmp_path):
    """The parts of a fused projection lie elsewhere on each number of tp ranks."""
    writer = config_of(tp=2, pp=2, sequence_parallel=True)
    expected = assemble([part for parts in run_ranks(_state, 4, writer, tmp_path) for part in parts])
    for ranks, config in ((1, config_of()), (2, config_of(tp=2)), (2, config_of(pp=2))):
        found = assemble([part for parts in run_ranks(_state, ranks, config, tmp_path) for part in parts])
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_initial_steps_and_decays_are_in_their_ranges():
    """softplus(dt_bias) in [dt_min, dt_max], but never below dt_floor; A in [1, 16]; the same on every tp rank."""
    config = config_of("MM", mixer={"num_heads": 64, "dt_floor": 5e-3})
    shape, table = family_of(config).shape(config, 250), dict[str, Tensor]()
    for rank in range(2):
        for spec in family_of(config).parameters(shape, Place(tp_rank=rank, tp_size=2)):
            flat = torch.empty(spec.numel, dtype=torch.float64)
            initialize_([ElementRange(spec, 0, spec.numel, flat)], seed=3)
            for piece in spec.pieces:
                box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
                values = flat[piece.offset : piece.offset + int(np.prod(piece.size))].view(piece.size)
                table.setdefault(piece.name, torch.full(piece.shape, torch.nan, dtype=torch.float64))[box] = values
    whole = _model(config)
    torch.testing.assert_close(table["blocks.1.mixer.A_log"], whole.blocks["1"].mixer.A_log.detach())
    steps, decays = torch.nn.functional.softplus(table["blocks.0.mixer.dt_bias"]), table["blocks.0.mixer.A_log"].exp()
    assert float(steps.min()) == pytest.approx(5e-3, rel=1e-9) and 0.05 < float(steps.max()) <= 0.1
    assert 1 <= float(decays.min()) < 2 and 15 < float(decays.max()) <= 16
    assert bool((table["blocks.0.mixer.D"] == 1).all())
    conv = table["blocks.0.mixer.conv1d.x.weight"]
    assert conv.shape == (512, 1, 4) and 0.49 < float(conv.abs().max()) <= 0.5


def test_numbers_of_mamba2_and_of_a_mixers_cost():
    """Parameters and operations of the published 2.7B; a mixer's block counts by its own work in stages."""
    sizes = {"hidden_size": 2560, "num_layers": 64, "vocab_size": 50288, "tie_embeddings": True}
    section = MambaSection(pattern="M" * 64, num_groups=1, chunk_size=256)
    config = config_of("M" * 64, model=sizes | {"mamba": section})
    family, shape = family_of(config), family_of(config).shape(config, 50288)
    total = num_elements(family.parameters(shape, Place()))
    assert total == 2_702_599_680
    scan = 256 * (128 + 5120) + 4 * 5120 * 128
    assert family.flops_per_token(shape, (4096,)) == 6 * total + 3 * 64 * scan
    hybrid = config_of("M*-")
    weights = block_weights(hybrid, family_of(hybrid).shape(hybrid, 250), document_lengths=(SEQUENCE,))
    assert len({round(weight, 6) for weight in weights}) == 3 and sum(weights) == pytest.approx(3)


def test_kept_bytes_are_those_that_a_plan_counts():
    """What four more layers add, without what the backward pass of one needs meanwhile."""
    once, twice = (
        config_of(pattern, dtype="fp32", mixer={"head_dim": 16}, model={"hidden_size": 64})
        for pattern in ("M-*M", 2 * "M-*M")
    )
    kept = []
    for config in (once, twice):
        family, layers = family_of(config), config.model.num_layers
        inside = Place(stage=1, num_stages=3, layers_per_stage=(0, layers, 0))
        shape, recompute = family.shape(config, 250), RecomputeSection()
        how = {"tokens": SEQUENCE, "element": 4, "recompute": recompute, "scan": "plain"}
        kept.append(family.activation_bytes(shape, inside, **how))
    (held,) = run_ranks(kept_bytes, 1, once)
    assert kept[1] - kept[0] == pytest.approx(held, rel=0.1)  # small parameters are copied, which is not counted


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (config_of("MX|*"), 'model.mamba.pattern="MX|*" has unknown letters: X |'),
        (config_of("MM", model={"num_layers": 3}), "model.mamba.pattern has 2 letters, but model.num_layers=3"),
        (config_of("MM", mixer={"attention_ratio": 0.2}), "model.mamba.attention_ratio=0.2 and model.mamba.pattern"),
        (config_of("ME", model={"moe": None}), "layers with experts (E); add [model.moe]"),
        (config_of("MM", model={"moe": EXPERTS}), "has no layer with experts; write E"),
        (config_of("MM", tp=4), "model.mamba.num_groups=2 is not a multiple of mesh.tp=4"),
        (config_of("MM", mixer={"num_groups": 3}), "8 heads are not a multiple of model.mamba.num_groups=3"),
        (config_of("MM", mixer={"head_dim": 7}), "is not a multiple of model.mamba.head_dim=7"),
        (config_of("MM", cp=4), "with mesh.cp=4 makes chunks of 2 tokens, fewer than the 3 before a token"),
        (config_of("MM", model={"block_norm": "both"}), 'model.block_norm="both" is not supported'),
        (config_of("MM", mixer={"dt_min": 0.2}), "model.mamba.dt_min=0.2 is above model.mamba.dt_max=0.1"),
        (
            config_of(None, mixer={"attention_ratio": 0.6, "mlp_ratio": 0.5}, model={"num_layers": 4}),
            "up to more than 1",
        ),
        (config_of("MM", model={"num_heads": 5}), None),  # no layer has them
    ],
)
def test_bad_input_is_named(config, problem):
    found = check(config, config.mesh.tp * config.mesh.cp, facts=None)
    assert any(problem in line for line in found) if problem else not found, found


def test_layers_are_allocated_by_ratios():
    """As `hybrid_patterns.json` of the oracle, which tests/oracles/families.py compares whole."""
    assert allocated(10, attention=0.2, mlp=0.2) == "MMM*-M*MM-"
    assert allocated(24, attention=1 / 12, mlp=0.5) == "M-M-M--*M-M-M-M-*M--M-M-"
    config = config_of(None, mixer={"attention_ratio": 0.2}, model={"num_layers": 10})
    assert family_of(config).kinds(family_of(config).shape(config, 250)).count("attention") == 2


PUBLISHED = {  # elements of the tensors of presets
    "mamba2-130m": 128_989_632,
    "mamba2-370m": 368_346_624,
    "mamba2-780m": 780_161_280,
    "mamba2-1.3b": 1_343_757_312,
    "mamba2-2.7b": 2_702_599_680,
    "nemotron-h-8b": 8_100_852_736,
}


@pytest.mark.parametrize("preset", [name for name, keys in PRESETS.items() if keys.get("family") == "mamba"])
def test_presets_have_the_published_number_of_parameters(preset):
    config = model_config({"preset": preset}, where="", context=4096)
    family, shape = family_of(config), family_of(config).shape(config, config.model.vocab_size or 0)
    assert num_elements(family.parameters(shape, Place())) == PUBLISHED[preset]
    assert check(config, 1, facts=None) == []
    if preset == "nemotron-h-8b":
        plan = make_plan(replace(config, mesh=MeshSection(tp=8)), 8, facts=None)
        assert plan.active_parameters == PUBLISHED[preset]
        kept = family.activation_bytes(shape, Place(), tokens=4096, element=2, recompute=RecomputeSection())
        assert kept > family.activation_bytes(
            shape, Place(), tokens=4096, element=2, recompute=RecomputeSection(mode="full")
        )
