"""Latent attention: layouts that test_options.py does not have, what it counts, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    check_same_gradients,
    kept_bytes,
    small_config,
    whole_gradients,
)
from trainer.config.sections import MeshSection, MLASection, RecomputeSection, RunConfig
from trainer.layers.rope import rotation
from trainer.models.family import family_of
from trainer.models.gpt.cost import flops_per_token, stage_cost
from trainer.models.gpt.memory import block_bytes
from trainer.models.gpt.shape import gpt_shape
from trainer.parallel.params import Place, num_elements
from trainer.plan.check import check

LATENT = MLASection(q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 8}


def config_of(mla: MLASection = LATENT, *, mesh: MeshSection | None = None, **model: object) -> RunConfig:
    config = small_config("llama", mesh=mesh or MeshSection())
    given = {"mla": mla, "head_dim": None, "num_kv_heads": None, "rope_interleaved": True} | model
    return replace(config, model=replace(config.model, **given))


@pytest.mark.parametrize(("mode", "mesh"), [("none", {}), ("selective", {"cp": 2})])
def test_keys_and_values_that_are_made_again_have_the_same_bits(mode, mesh):
    config = config_of(mesh=MeshSection(**mesh), **YARN)
    ranks = max(mesh.values(), default=1)
    (loss, _, kept), (again_loss, _, again) = (
        whole_gradients(replace(config, recompute=RecomputeSection(mode=mode, mla_up_proj=on)), ranks)
        for on in (False, True)
    )
    assert loss == again_loss
    for name, gradient in kept.items():
        np.testing.assert_array_equal(again[name], gradient, err_msg=name)


@pytest.mark.parametrize(
    ("recompute", "mla", "message"),
    [
        ({}, None, "recompute.mla_up_proj=true needs latent attention; add [model.mla], or leave it out"),
        ({"mode": "full"}, LATENT, 'recompute.mla_up_proj=true adds nothing to recompute.mode="full"'),
    ],
)
def test_a_recomputation_of_keys_that_changes_nothing_is_refused(recompute, mla, message):
    config = small_config("llama") if mla is None else config_of(mla)
    config = replace(config, recompute=RecomputeSection(mla_up_proj=True, **recompute))
    assert [problem for problem in check(config, 1, facts=None) if problem.startswith(message)]


@pytest.mark.parametrize("mla_up_proj", [False, True])
def test_what_attention_keeps_for_backward_is_what_a_plan_says(mla_up_proj):
    wide = replace(LATENT, qk_nope_head_dim=24, v_head_dim=28)  # of one width: plain kernels keep no padded copies
    recompute = RecomputeSection(mla_up_proj=mla_up_proj)
    config = replace(config_of(wide, num_heads=8), recompute=recompute)
    config = replace(
        config, train=replace(config.train, micro_batch=4), precision=replace(config.precision, dtype="fp32")
    )
    (held,) = run_ranks(kept_bytes, 1, config)
    shape = family_of(config).shape(config, 256)
    tokens = 4 * config.train.sequence_length
    block = block_bytes(shape, Place(), tokens=tokens, element=4, recompute=recompute)
    assert shape.num_layers * block == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize("documents", [False, True])
def test_every_layout_has_the_gradients_of_one_rank(documents):
    (loss, _), _, expected = whole_gradients(config_of(**YARN), 1, documents)
    for ranks, mesh in (
        (2, MeshSection(cp=2)),
        (4, MeshSection(tp=2, pp=2, sequence_parallel=True)),
        (4, MeshSection(tp=2, cp=2, sequence_parallel=True)),
    ):
        (got_loss, _), _, got = whole_gradients(config_of(mesh=mesh, **YARN), ranks, documents)
        assert got_loss == pytest.approx(loss, rel=1e-12)
        check_same_gradients(got, expected)


def test_yarn_multiplies_rotated_heads_and_scores():
    """m(x) = 0.1 x ln 4 + 1: the table has m(mscale) / m(mscale_all_dim), the scale of scores m(mscale_all_dim)^2."""
    shape = gpt_shape(config_of(replace(LATENT, mscale=0.5, mscale_all_dim=2.0), **YARN), 250)
    half, double = 0.05 * math.log(4) + 1, 0.2 * math.log(4) + 1
    cosine, sine = rotation(4, 4, rope=shape.rope, dtype=torch.float64, device=torch.device("cpu"))
    np.testing.assert_allclose(cosine.square() + sine.square(), (half / double) ** 2, rtol=1e-12)
    assert shape.scores.scale == pytest.approx(double**2 / math.sqrt(12), rel=1e-12)
    plain = gpt_shape(config_of(LATENT), 250)
    assert plain.scores.scale == pytest.approx(12**-0.5, rel=1e-12)


def test_numbers_of_deepseek_v3s_attention():
    """Of its paper's sizes: parameters of a block's attention, operations, and bytes that generation keeps."""
    mla = MLASection(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = config_of(mla, hidden_size=7168, num_heads=128, num_layers=1)
    shape, family = gpt_shape(config, 250), family_of(config)
    named = family.parameters(shape, Place())
    attention = [spec for spec in named if ".attention." in spec.name]
    assert num_elements(attention) == 187_107_328
    (state,) = {str(family.decode_state(shape, kind).tensors) for kind in family.kinds(shape)}
    assert state == "{'latent': (1, 576)}"
    lookups = shape.vocab_size * shape.hidden_size
    assert flops_per_token(shape, (4096,)) == 6 * (num_elements(named) - lookups) + 6 * 128 * (192 + 128) * 4096
    place = Place(tp_size=2, sequence_parallel=True)
    how = {"tokens": 4096, "document_lengths": (4096,), "element": 2, "recompute": RecomputeSection()}
    one, two = (stage_cost(shape, where, **how) for where in (Place(), place))
    assert two.product_flops == pytest.approx(one.product_flops / 2)
    assert two.attention_flops == one.attention_flops / 2
    apart = stage_cost(shape, replace(place, sequence_parallel=False), **how)
    assert apart.product_flops > two.product_flops  # every rank computes all latents


@pytest.mark.parametrize(
    "model, problem",
    [
        ({"head_dim": 8}, "model.head_dim=8 has no meaning with [model.mla]"),
        ({"num_kv_heads": 2}, "model.num_kv_heads=2 has no meaning"),
        ({"qk_norm": True}, "always normalizes its latents"),
        ({"bias": True}, "which has no biases"),
        (
            {"position": "learned", "rope_interleaved": False},
            'model.position="learned" cannot be used with [model.mla]',
        ),
        ({"mla": replace(LATENT, qk_rope_head_dim=3)}, "model.mla.qk_rope_head_dim=3 is odd"),
        ({"mla": replace(LATENT, mscale_all_dim=1.0)}, 'mscale_all_dim=1 needs model.rope_scaling="yarn"'),
        ({"mla": replace(LATENT, mscale_all_dim=1.0), "attention_scale": 0.2, **YARN}, "leave one of them out"),
        ({"family": "t5"}, '[model.mla] is for model.family="gpt", not "t5"'),
        ({"num_heads": 3}, None),  # sizes of heads do not depend on it
    ],
)
def test_wrong_keys_are_refused(model, problem):
    found = check(config_of(**model), 1, facts=None)
    if problem is None:
        assert not found
    else:
        assert any(problem in line for line in found), found


def test_tensor_parallelism_divides_heads_and_no_latents():
    config = config_of(mesh=MeshSection(tp=3))
    assert any("model.num_heads=4 is not a multiple of mesh.tp=3" in line for line in check(config, 3, facts=None))
    shape, family = gpt_shape(config_of(mesh=MeshSection(tp=2)), 250), family_of(config)
    held = {spec.name: spec for spec in family.parameters(shape, Place(tp_size=2, sequence_parallel=True))}
    for name in ("q_down.weight", "q_norm.weight", "kv_down.weight", "kv_norm.weight"):
        spec = held[f"blocks.0.attention.{name}"]
        assert spec.partial == spec.copies == ("tp",)
    assert held["blocks.0.attention.kv_up.weight"].shape == (2 * (8 + 6), 16)
    assert held["blocks.0.attention.out.weight"].shape == (32, 2 * 6)
    alone = {spec.name: spec for spec in family.parameters(shape, Place(tp_size=2))}
    assert alone["blocks.0.attention.q_norm.weight"].partial == ()  # whole on each rank: summing would double it
