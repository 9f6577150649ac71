"""The parallel residual: its sum, its layouts, its recomputation. Its weights and logits: tests/trainer/convert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import assemble, check_same_gradients, layouts, microbatches, reduced, small_config
from trainer.config.sections import GPTNeoXSection, MeshSection, RecomputeSection
from trainer.models.family import family_of
from trainer.parallel.collectives import Group, all_reduce_
from trainer.parallel.params import Place


def _config(*, parallel=True, recompute="none", **mesh):
    config = small_config("wide")
    section = None if parallel else GPTNeoXSection(parallel_residual=False)
    model = replace(config.model, family="gpt_neox", gpt_neox=section, rope_fraction=0.5, num_layers=4)
    return replace(config, model=model, mesh=MeshSection(**mesh), recompute=RecomputeSection(mode=recompute))


def _gradients(context, config):
    engine = layouts(context, config)
    totals = engine.add_gradients(microbatches(engine, 0))
    for axis in ("dp", "pp"):
        all_reduce_(totals, engine.world.groups[axis])
    return totals.tolist(), reduced(engine, totals[1])


def _whole(config, ranks):
    results = run_ranks(_gradients, ranks, config)
    return results[0][0], assemble([part for _, parts in results for part in parts])


@pytest.fixture(scope="module")
def alone():
    return _whole(_config(), 1)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
        (1, {"recompute": "selective"}),
        (2, {"recompute": "full", "pp": 2}),
    ],
)
def test_gradients_do_not_depend_on_layout_and_recomputation(alone, ranks, options):
    totals, gradients = _whole(_config(**options), ranks)
    np.testing.assert_allclose(totals, alone[0], rtol=1e-12)
    check_same_gradients(gradients, alone[1])


def test_a_block_adds_both_of_the_same_stream():
    config = _config()
    family = family_of(config)
    shape = family.shape(config, 250)
    how = {"groups": {"tp": Group.single("tp")}, "dtype": torch.float64, "device": torch.device("cpu")}
    built = [family.build(one, Place(), **how) for one in (shape, replace(shape, parallel_residual=False))]
    torch.manual_seed(0)
    for parameter, other in zip(*(model.parameters() for model in built), strict=True):
        parameter.data.normal_()
        other.data.copy_(parameter.data)
    tokens = torch.arange(16).view(2, 8)
    parallel, serial = (model.logits(tokens) for model in built)
    assert not torch.allclose(parallel, serial)
    for block in (model.blocks[str(i)] for model in built for i in range(shape.num_layers)):
        torch.nn.init.zeros_(block.attention.out.weight)
        torch.nn.init.zeros_(block.attention.out.bias)
    parallel, serial = (model.logits(tokens) for model in built)
    torch.testing.assert_close(parallel, serial)


def test_another_family_of_the_same_tensors_is_another_model():
    config = _config()
    gpt = replace(config, model=replace(config.model, family="gpt"))
    neox = family_of(config)
    assert neox.logical_shapes(neox.shape(config, 250)) == family_of(gpt).logical_shapes(family_of(gpt).shape(gpt, 250))
    serial = _config(parallel=False)
    first, second = (neox.function(neox.shape(one, 250)) for one in (config, serial))
    assert {name for name in first if first[name] != second[name]} == {"gpt_neox.parallel_residual"}
    assert neox.effective(config)["gpt_neox.parallel_residual"] is True
