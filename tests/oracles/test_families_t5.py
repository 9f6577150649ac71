"""T5s of Megatron-Core: what is equal, and that a comparison can fail."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.oracles.families_t5 import cases

FAST = ("logits", "gradients", "micro4")


@pytest.mark.parametrize("name", ["model/variants/t5_learned_tied", "families/bert_t5/t5_gated_rmsnorm"])
def test_t5s_of_megatron_are_equal(oracles, name):
    path = oracles / "oracle" / f"{name}.safetensors"
    found = {what: compare() for what, compare in cases(path) if what in FAST}
    assert found and not any(found.values()), found


@pytest.mark.soak
def test_every_case_and_layout_is_equal(oracles):
    paths = sorted((oracles / "oracle").glob("*/*/t5_*.safetensors"))
    found = {f"{path.stem} {what}": compare() for path in paths for what, compare in cases(path)}
    assert len(found) > 30 and not any(found.values()), found


def test_another_weight_is_a_difference(oracles, tmp_path):
    source = oracles / "oracle/model/variants/t5_rope_untied.safetensors"
    tensors = load_file(source)
    tensors["weights/decoder.layers.1.cross_attention.linear_kv.bias"][40] += 0.5
    save_file(tensors, tmp_path / source.name)
    shutil.copy(source.with_suffix(".json"), tmp_path)
    found = {what: compare() for what, compare in cases(tmp_path / source.name)}
    assert found["logits"].startswith("logits: differs by") and "instead of" in found["gradients"]
