"""Models near published ones, with a few other settings drawn: exported as the same function, or refused by name.

A class of transformers may lack a setting that config.json has. The conversion compares logits of both sides, so that
such a class is found here. Random models that Megatron-LM has are written as its own, and read back bit for bit.
MDATA_SOAK multiplies the draws.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mdata import UsageError
from tests.helpers.examples import SOAK
from tests.trainer.convert.hf_models import HYBRIDS, NAMES, OTHER_EXPERTS, save
from tests.trainer.convert.test_links import Held
from tests.trainer.convert.test_megatron import everything
from tests.trainer.engines import small_config
from tests.trainer.models import test_random_models
from trainer.checkpoint.format import RunState
from trainer.config.sections import CheckpointSection, DataSection, RunConfig
from trainer.convert.compare import logits_of
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.hf_config import to_hf
from trainer.convert.megatron_args import _NEGATED, to_arguments
from trainer.convert.model_folder import Format, ModelFolder
from trainer.convert.model_keys import effective, model_config
from trainer.convert.mp_rank import check_cut, write_mp_rank
from trainer.convert.torch_dist_write import OptimizerForm, write_torch_dist
from trainer.migrate.arguments import PROGRAMS
from trainer.migrate.flags import flag_table
from trainer.migrate.migrate import migrate
from trainer.models.family import family_of
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.check import check
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine

pytest.importorskip("transformers")
PUBLISHED = (*NAMES, *OTHER_EXPERTS, *HYBRIDS)
DENSE = tuple(name for name in NAMES if name not in ("qwen2_moe", "mamba2"))
FORMS_OF_ADAPTERS: Sequence[Format] = ("hf", "mtrain", "peft")
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


def _near_published(chance: random.Random, names: Sequence[str], folder: Path) -> RunConfig:
    """A changed model that is exported or, if it is refused, another one."""
    name = chance.choice(names)
    published = open_model(save(name, folder / "theirs", tokens=False)).config
    while True:
        config = _changed(chance, published)
        if check(config, 1, facts=None):
            continue
        try:
            to_hf(config, 50)
        except UsageError as error:
            assert "model_type" in str(error)
            continue
        print(name, config.model)  # shown where it fails
        return config


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
def test_a_model_near_a_published_one_is_exported_as_it_is_or_refused(seed, tmp_path):
    config = _near_published(random.Random(seed), PUBLISHED, tmp_path)
    exported = convert(_saved(config, tmp_path / "run"), tmp_path / "theirs again", options=ConvertOptions(to="hf"))
    assert exported["check"]["compared"]


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(3 * SOAK))
def test_random_adapters_are_merged_to_the_function_that_they_have(seed, tmp_path):
    """Read back from a merged model, and from a folder of peft where this has such adapters."""
    chance = random.Random(seed)
    dense = _near_published(chance, DENSE, tmp_path)
    base = _saved(dense, tmp_path / "base")
    while True:
        model = replace(dense.model, lora=test_random_models._lora(chance))
        config = replace(dense, model=model, checkpoint=CheckpointSection(init_from=str(base)))
        if not check(config, 1, facts=None):
            break
    print(config.model.lora)
    run = _saved(config, tmp_path / "run")
    engine = Engine(
        config, make_plan(config, 1, facts=None), world=join_world(Mesh(1), placement=Placement()), fresh=False
    )
    engine.load(run / "checkpoints" / "step-1")
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(5))
    expected = engine.model.logits(tokens)[..., :50].detach()  # without padding
    assert not torch.equal(expected, logits_of(open_model(base), tokens))
    for form in FORMS_OF_ADAPTERS:
        try:
            assert convert(run, tmp_path / form, options=ConvertOptions(to=form))["check"]["compared"]
        except UsageError as error:
            assert form == "peft" and "peft cannot have an adapter" in str(error)
            continue
        torch.testing.assert_close(logits_of(open_model(tmp_path / form), tokens), expected, rtol=1e-4, atol=1e-4)


STATES = ("weight", "exp_avg", "exp_avg_sq")
FORMS: Sequence[OptimizerForm] = ("adam", "distributed")
RUN = "--micro-batch-size 1 --global-batch-size 4 --train-iters 20 --lr 1e-3 --data-path x --save y --split 1,0,0"


def _of_megatron(chance: random.Random) -> tuple[RunConfig, Mapping[str, Any]]:
    """(a random model that Megatron-LM has, its arguments)."""
    base = small_config("llama")
    while True:
        config = replace(base, model=test_random_models._model(chance))
        if chance.random() < 0.5:
            model, data = chance.choice((test_random_models._bert, test_random_models._t5))(chance)
            config = replace(base, model=model, data=data)
        if not check(config, 1, facts=None):
            with suppress(UsageError):
                return config, to_arguments(config, config.model.vocab_size or 0, padded_rows=512)


def _words(arguments: Mapping[str, Any]) -> Iterator[str]:
    """They as on a command line."""
    negated = {stored: flag for flag, stored in _NEGATED.items()}
    for name, value in arguments.items():
        flag = negated.get(name, f"--{name.replace('_', '-')}")
        if name in negated:
            value = not value
        if flag not in flag_table() or name == "encoder_num_layers" or value is None or value is False:
            continue
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        yield flag if value is True else f"{flag}={value}"


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(5 * SOAK))
def test_a_random_model_is_what_is_read_of_it_as_megatrons(seed, tmp_path):
    """From both of its formats, cut for drawn ranks; and its arguments are those of the same model."""
    chance = random.Random(seed)
    config, arguments = _of_megatron(chance)
    print(config.model)  # shown where it fails
    family, kept = family_of(config), effective(config)
    shape = family.shape(config, config.model.vocab_size or 0)
    held = {f"{state}/{name}": torch.randn(n) for state in STATES for name, n in family.logical_shapes(shape).items()}
    held |= {f"buffer/{name}": torch.randn(size) for name, size in family.logical_buffers(shape).items()}
    run = RunState(3, 12, "", {}, 3, "")
    model = ModelFolder(path=tmp_path, format="mtrain", config=config, source=Held(held), run=run)
    cuts = list[tuple[int, int]]()
    for tp, pp in itertools.product((1, 2, 4), (1, 2, 3, 4, 5)):
        with suppress(UsageError):
            check_cut(model, tp=tp, pp=pp)
            cuts.append((tp, pp))
    (tp, pp), form = chance.choice(cuts), chance.choice(FORMS)
    print(tp, pp, form)
    write_mp_rank(tmp_path / "mp_rank", model, dtype=torch.float32, tp=tp, pp=pp, report=lambda _: None)
    options: dict[str, Any] = {"states": STATES, "dtype": torch.float32, "report": lambda _: None}
    write_torch_dist(tmp_path / "torch_dist", model, form=form, **options)
    for name, states in (("mp_rank", STATES[:1]), ("torch_dist", STATES)):
        found = open_model(tmp_path / name)
        tensors, expected = everything(found.source), (*states, "buffer")
        assert tensors.keys() == {key for key in held if key.startswith(expected)} and effective(found.config) == kept
        assert all(torch.equal(held[key], tensor) for key, tensor in tensors.items())
    program = next(name for name, of_program in PROGRAMS.items() if of_program == config.model.family)
    migrated = migrate([*_words(arguments), *RUN.split()], 1, program=program)
    assert not migrated.refused
    keys: dict[str, Any] = {}
    for section, table in migrated.tables.items():
        if section.startswith("model."):
            keys[section.removeprefix("model.")] = table
    keys |= migrated.tables["model"] | {"vocab_size": config.model.vocab_size}
    assert effective(model_config(keys, where="", context=config.train.sequence_length)) == kept
