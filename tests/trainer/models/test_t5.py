"""T5: layouts, pipelines over both stacks and recomputation against one rank; the function against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import assemble, check_same_gradients, layouts, reduced, small_config
from trainer.config.parse import parse_config
from trainer.config.sections import MeshSection, OptimizerSection, RecomputeSection, RunConfig, T5ModelSection
from trainer.models.family import family_of
from trainer.models.stage import EncoderTokens, Microbatch
from trainer.parallel.collectives import all_reduce_
from trainer.parallel.params import Place, num_elements

PUBLISHED = {  # elements of the tensors of presets
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-v1.1-base": 247_577_856,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
}
ENCODER, DECODER = 16, 12  # tokens of a row
FORMS: dict[str, dict[str, Any]] = {
    "relative": {
        "position": "relative",
        "norm": "rmsnorm",
        "activation": "geglu_tanh",
        "bias": False,
        "attention_scale": 1.0,
        "logit_scale": 0.2,
    },
    "learned": {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
    "rope": {"position": "rope", "norm": "rmsnorm", "activation": "relu", "bias": False},
}


def _config(
    form: str = "relative",
    *,
    layers: tuple[int, int] = (3, 3),
    tied: bool = True,
    dropout: float = 0.0,
    recompute: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    micro_batch: int = 1,
    **mesh: Any,
) -> RunConfig:
    config = small_config("gpt2")
    section = T5ModelSection(
        encoder_layers=layers[0], relative_buckets=8, relative_distance=10, head_bias=tied and form != "relative"
    )
    model = replace(
        config.model,
        family="t5",
        t5=section,
        num_layers=sum(layers),
        tie_embeddings=tied,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        **FORMS[form],
    )
    return replace(
        config,
        model=model,
        mesh=MeshSection(**mesh),
        train=replace(config.train, micro_batch=micro_batch),
        recompute=RecomputeSection(**(recompute or {})),
        optimizer=OptimizerSection(lr=1e-2, **(optimizer or {})),
    )


def _microbatches(engine: Any, step: int = 0) -> list[Microbatch]:
    """This rank's part of a seeded global batch: rows of several lengths."""
    generator, batch = np.random.default_rng(step), engine.plan.global_batch
    encoder = generator.integers(0, 250, (batch, ENCODER))
    tokens, labels = (generator.integers(0, 250, (batch, DECODER)) for _ in range(2))
    lengths = generator.integers(3, ENCODER + 1, batch).astype(np.int32)
    own = generator.integers(2, DECODER + 1, batch).astype(np.int32)
    mask = (np.arange(DECODER) < own[:, None]).astype(np.float32)
    plan, dp = engine.plan, engine.dp
    rows = np.arange(batch).reshape(plan.num_microbatches, dp.size, plan.micro_batch)[:, dp.rank]
    made = []
    for r in rows:
        parts = [torch.from_numpy(x[r]) for x in (tokens, labels, mask, own, encoder, lengths)]
        made.append(
            Microbatch(
                tokens_BS=parts[0],
                labels_BS=parts[1],
                loss_mask_BS=parts[2],
                lengths_B=parts[3],
                encoder=EncoderTokens(parts[4], parts[5]),
                samples_B=torch.from_numpy(r + step * batch),
            )
        )
    return made


def _gradients(context: Any, config: RunConfig) -> Any:
    engine = layouts(context, config)
    batches = _microbatches(engine)
    evaluated = engine.evaluate(batches)
    totals = engine.add_gradients(batches)
    for axis in ("data", "pp"):
        all_reduce_(totals, engine.world.groups[axis])
    return totals.tolist(), evaluated, reduced(engine, totals[1])


def _whole(config: RunConfig, ranks: int) -> Any:
    results = run_ranks(_gradients, ranks, config)
    (totals,) = {tuple(totals) for totals, *_ in results}
    (evaluated,) = {loss for _, loss, _ in results}
    return totals, evaluated, assemble([part for *_, parts in results for part in parts])


def _same(options: dict[str, Any], ranks: int, form: str = "relative", **model: Any) -> None:
    expected_totals, expected_loss, expected = _whole(_config(form, **model), 1)
    totals, evaluated, gradients = _whole(_config(form, **model, **options), ranks)
    np.testing.assert_allclose(totals, expected_totals, rtol=1e-12)
    np.testing.assert_allclose(evaluated, expected_loss, rtol=1e-12)
    check_same_gradients(gradients, expected)
    assert all(np.abs(values).max() > 0 for values in expected.values()), "every tensor has a gradient"


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    tables = {"run": {"folder": "x"}, "model": {"preset": name}, "data": {"blend": "mock"}, "optimizer": {"lr": 1e-3}}
    tables["train"] = {"sequence_length": 512, "global_batch": 8, "micro_batch": 1, "steps": 3}
    config, problems = parse_config(tables)
    assert config is not None and not problems
    family = family_of(config)
    assert not [*family.problems(config)]
    assert (
        num_elements(family.parameters(family.shape(config, config.model.vocab_size or 0), Place())) == PUBLISHED[name]
    )


LAYOUTS = {
    "tp": (2, "relative", {"tp": 2}, {}),
    "tp, sequence parallel, selective": (
        2, "learned", {"tp": 2, "sequence_parallel": True, "recompute": {"mode": "selective"}}, {"dropout": 0.2},
    ),
    "dp, sharded, full": (
        2, "relative", {"optimizer": {"sharding": "parameters"}, "recompute": {"mode": "full", "layers": 2}}, {},
    ),
    "pp in the encoder": (2, "relative", {"pp": 2, "layers_per_stage": (1, 5)}, {}),
    "pp at the border, recomputed": (
        2, "relative", {"pp": 2, "layers_per_stage": (3, 3), "recompute": {"mode": "full", "layers": 4}}, {},
    ),
    "pp in the decoder": (2, "rope", {"pp": 2, "layers_per_stage": (5, 1), "schedule": "gpipe"}, {"tied": False}),
    "pp in both, tp": (
        8, "relative",
        {"pp": 4, "tp": 2, "sequence_parallel": True, "layers_per_stage": (1, 1, 3, 1), "schedule": "zb_h1"}, {},
    ),
    "interleaved": (2, "learned", {"pp": 2, "schedule": "interleaved", "layers_per_stage": (2, 2, 1, 1)}, {}),
    "zb_v": (
        2, "relative", {"pp": 2, "schedule": "zb_v", "layers_per_stage": (1, 1, 3, 1)}, {"dropout": 0.2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_fp64_gradients_do_not_depend_on_the_layout(name: str) -> None:
    ranks, form, options, model = LAYOUTS[name]
    _same(options, ranks, form, **model)
