"""The parallel residual: its sum, its layouts, its recomputation. Its weights and logits: tests/trainer/convert."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mdata import UsageError
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    SEQUENCE,
    check_same_gradients,
    kept_bytes,
    small_config,
    whole_gradients,
)
from trainer.config.presets import PRESETS
from trainer.config.sections import GPTNeoXSection, MeshSection, RecomputeSection
from trainer.convert.hf_config import from_hf, to_hf
from trainer.convert.megatron_args import to_arguments
from trainer.convert.model_keys import model_config
from trainer.layers.rope import rotated_features
from trainer.models.family import family_of
from trainer.models.gpt.memory import block_bytes
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place, num_elements
from trainer.plan.check import check
from trainer.run.resume import _model_conflict

PUBLISHED = {  # elements of the tensors of presets
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1.4b": 1_414_647_808,
    "pythia-6.9b": 6_857_302_016,
    "stablelm-3b": 2_795_443_200,
    "stablelm2-1.6b": 1_644_515_328,
    "stablelm2-12b": 12_143_185_920,
    "aya-8b": 8_028_033_024,
    "command-r": 34_980_831_232,
    "command-r7b": 8_028_033_024,
}


def _config(*, parallel=True, shared=False, recompute="none", **mesh):
    config = small_config("wide")
    section = GPTNeoXSection(parallel_residual=parallel, shared_norm=shared) if shared or not parallel else None
    model = replace(config.model, family="gpt_neox", gpt_neox=section, rope_fraction=0.5, num_layers=4)
    return replace(config, model=model, mesh=MeshSection(**mesh), recompute=RecomputeSection(mode=recompute))


@pytest.fixture(scope="module")
def alone():
    return whole_gradients(_config(), 1)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
        (1, {"recompute": "selective"}),
        (2, {"recompute": "full", "pp": 2}),
    ],
)
def test_gradients_do_not_depend_on_layout_and_recomputation(alone, ranks, options):
    totals, _, gradients = whole_gradients(_config(**options), ranks)
    np.testing.assert_allclose(totals, alone[0], rtol=1e-12)
    check_same_gradients(gradients, alone[2])


def test_a_shared_norm_is_independent_of_layout_and_recomputation():
    totals, _, expected = whole_gradients(_config(shared=True), 1)
    assert not [name for name in expected if ".mlp_norm." in name]
    for ranks, options in ((4, {"tp": 2, "pp": 2, "sequence_parallel": True}), (1, {"recompute": "selective"})):
        got_totals, _, gradients = whole_gradients(_config(shared=True, **options), ranks)
        np.testing.assert_allclose(got_totals, totals, rtol=1e-12)
        check_same_gradients(gradients, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_knows_that_norms_read_one_sum(shared):
    for recompute in ("none", "selective"):
        config = _config(shared=shared, recompute=recompute)
        shape = family_of(config).shape(config, 250)
        how = {"tokens": SEQUENCE, "element": 8, "recompute": config.recompute}
        pairs = rotated_features(shape.rope, shape.head_dim) // 2
        said = shape.num_layers * block_bytes(shape, Place(), **how) + 2 * SEQUENCE * pairs * 8
        assert run_ranks(kept_bytes, 1, config) == [said], recompute


def test_operations_count_windows_and_documents():
    config = _config(shared=True)
    family = family_of(config)
    whole = family.shape(config, 250)
    window = family.shape(replace(config, model=replace(config.model, window=4, window_interval=2)), 250)
    full, short, documents = (
        family.flops_per_token(shape, lengths)
        for shape, lengths in ((whole, (16,)), (window, (16,)), (window, (2, 16)))
    )
    each = 12 * whole.num_heads * whole.head_dim
    assert full - short == each * 2 * (16 - 4)  # two of four blocks have the window
    assert short - documents == each * (2 * (4 - 3) + 2 * (16 - 9))
    lookups = 250 * whole.hidden_size
    assert full == 6 * (num_elements(family.parameters(whole, Place())) - lookups) + each * 4 * 16


def test_presets_have_the_published_number_of_parameters():
    assert {name for name, keys in PRESETS.items() if keys.get("family") == "gpt_neox"} == PUBLISHED.keys()
    for name, count in PUBLISHED.items():
        config = model_config({"preset": name}, where="", context=512)
        shape = family_of(config).shape(config, config.model.vocab_size)
        assert num_elements(family_of(config).parameters(shape, Place())) == count, name
        assert check(config, 1, facts=None) == []


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
    shared = _config(shared=True)
    assert neox.function(neox.shape(shared, 250))["gpt_neox.shared_norm"] is True
    (problem,) = neox.problems(_config(parallel=False, shared=True))
    assert "shared_norm=True needs model.gpt_neox.parallel_residual=true" in problem
    assert neox.effective(config)["gpt_neox.parallel_residual"] is True


def test_a_config_json_of_either_version_of_transformers_is_read():
    """Version 4 has rotary_pct and rotary_emb_base beside the other settings, version 5 a table."""
    sizes = {"model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    old = {**sizes, "rotary_pct": 0.5, "rotary_emb_base": 5000, "use_parallel_residual": False}
    table = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    new = {**sizes, "rope_parameters": table, "use_parallel_residual": False}
    read = [from_hf(found, where="").model for found in (old, new)]
    assert read[0] == read[1] and (read[0].rope_fraction, read[0].rope_theta) == (0.5, 5000.0)
    assert read[0].gpt_neox == GPTNeoXSection(parallel_residual=False)
    scaled = {**sizes, "rope_scaling": {"type": "linear", "factor": 2.0}}
    model = from_hf(scaled, where="").model
    assert (model.rope_scaling, model.rope_factor, model.rope_fraction) == ("linear", 2.0, 0.25)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": False}, "attention_bias = False is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor = 2 is not a share of a head"),
        ({"hidden_act": "swish"}, "hidden_act = 'swish' is not supported"),
        ({"hidden_size": "32"}, "hidden_size = '32' is not a size"),
    ],
)
def test_what_mtrain_lacks_is_refused_by_name(changes, named):
    with pytest.raises(UsageError, match=re.escape(named)):
        from_hf({"model_type": "gpt_neox", **changes}, where="")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_kv_heads": 2}, "model.num_kv_heads = 2"),
        ({"norm": "rmsnorm"}, "model.norm = 'rmsnorm'"),
        ({"window": 4}, "model.window = 4"),
        ({"bias": "qkv"}, "model.bias = 'qkv'"),
    ],
)
def test_what_its_class_cannot_express_is_refused_by_name(changes, named):
    config = _config()
    model = replace(config.model, head_dim=8, hidden_size=32, **changes)
    with pytest.raises(UsageError, match=re.escape(named)):
        to_hf(replace(config, model=model), 250)
    with pytest.raises(UsageError, match=r"config.json of model_type llama cannot express this model"):
        to_hf(replace(config, model=model), 250, model_type="llama")
    with pytest.raises(UsageError, match="Megatron-LM has no model of this family"):
        to_arguments(replace(config, model=model), 250, padded_rows=256)


def test_a_run_is_not_continued_as_another_family():
    config = _config()
    other = replace(config, model=replace(config.model, family="gpt"))
    (error,) = _model_conflict(other, config, data=None, folder=Path("step-1"))
    assert "family gpt" in str(error) and "family gpt_neox" in str(error)
    assert not [*_model_conflict(config, config, data=None, folder=Path("step-1"))]
