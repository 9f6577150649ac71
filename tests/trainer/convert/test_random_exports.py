"""Models near published ones, with a few other settings drawn: exported as the same function, or refused by name.

A class of transformers may lack a setting that config.json has. The conversion compares logits of both sides, so that
such a class is found here. MDATA_SOAK multiplies the draws.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mdata import UsageError
from tests.helpers.examples import SOAK
from tests.trainer.convert.hf_models import HYBRIDS, NAMES, OTHER_EXPERTS, save
from tests.trainer.engines import small_config
from trainer.config.sections import DataSection, RunConfig
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.hf_config import to_hf
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.check import check
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine

pytest.importorskip("transformers")
PUBLISHED = (*NAMES, *OTHER_EXPERTS, *HYBRIDS)
OTHERS: Mapping[str, Sequence[Any]] = {
    "num_layers": (1, 2, 3, 5, 6),
    "num_kv_heads": (1, 2, 4),
    "head_dim": (4, 8, 16, None),
    "ffn_hidden_size": (24, 40),
    "tie_embeddings": (True, False),
    "bias": (True, False, "qkv"),
    "qk_norm": (True, False, "own_head", "all_heads"),
    "window": (None, 1, 3, 5, 40),
    "window_interval": (None, 2, 3, 4),
    "rope_fraction": (0.25, 0.5, 1.0),
    "rope_theta": (100.0, 1e6),
    "rope_window_theta": (None, 100.0),
    "rope_interval": (None, 2, 3, 4),
    "rope_interleaved": (True, False),
    "norm_epsilon": (1e-6, 1e-5),
    "norm_bias": (True, False),
    "norm_zero_centered": (True, False),
    "block_norm": ("input", "output", "both"),
    "activation": ("swiglu", "geglu", "geglu_tanh", "gelu", "gelu_erf", "relu"),
    "attention_scale": (None, 0.1, 0.5),
    "attention_softcap": (None, 5.0),
    "logit_softcap": (None, 3.0),
    "logit_scale": (None, 0.5),
    "embedding_multiplier": (None, 2.0, 4.0),
    "residual_multiplier": (None, 0.5),
    "attention_sinks": ("none", "learned"),
}
OF_EXPERTS: Mapping[str, Sequence[Any]] = {
    "top_k": (1, 2, 3),
    "normalize_weights": (True, False),
    "weight_scale": (None, 2.5),
    "shared_ffn_hidden_size": (None, 8, 16),
    "shared_gate": (True, False),
    "interval": (1, 2),
    "ffn_hidden_size": (8, 24),
}


def _changed(chance: random.Random, published: RunConfig) -> RunConfig:
    """The published model with one or two settings of another value, or more."""
    model = published.model
    changes = {name: chance.choice(values) for name, values in OTHERS.items() if chance.random() < 2 / len(OTHERS)}
    if model.moe is not None:
        own = {name: chance.choice(values) for name, values in OF_EXPERTS.items() if chance.random() < 0.15}
        changes["moe"] = replace(model.moe, **own)
    base = small_config("llama", dtype="fp32", data=DataSection(blend="mock"))
    train = replace(base.train, sequence_length=32)
    return replace(base, model=replace(model, **{"vocab_size": 50} | changes), train=train)


def _saved(config: RunConfig, folder: Path) -> Path:
    """A run folder with weights far from an initialization, so that every term matters."""
    world = join_world(Mesh(1), placement=Placement())
    engine = Engine(config, make_plan(config, 1, facts=None), world=world)
    weight = engine.optimizer.state["weight"]
    weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    engine.optimizer.publish()
    engine.save(str(folder / "checkpoints"), step=1, consumed_samples=1)
    return folder


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(6 * SOAK))
def test_a_model_near_a_published_one_is_exported_as_it_is_or_refused(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    name = chance.choice(PUBLISHED)
    published = open_model(save(name, tmp_path / "theirs", tokens=False)).config
    while True:
        config = _changed(chance, published)
        if check(config, 1, facts=None):
            continue
        try:
            to_hf(config, 50)
        except UsageError as error:
            assert "model_type" in str(error)
            continue
        break
    print(name, config.model)  # shown where it fails
    exported = convert(_saved(config, tmp_path / "run"), tmp_path / "theirs again", options=ConvertOptions(to="hf"))
    assert exported["check"]["compared"]
