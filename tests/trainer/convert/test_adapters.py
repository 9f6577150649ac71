"""Runs of adapters beside the folders that they begin with: checkpoints, merged weights, and folders of peft.

tests/golden/peft/adapter.json has what peft makes of the same model and adapters; its losses are beside those of trl
(tests/trainer/run/test_other_trainers.py).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mdata import UsageError
from tests.trainer.engines import draw_adapters, held_state, microbatches, small_config
from trainer.checkpoint.folder import read_index
from trainer.config.sections import CheckpointSection, DataSection, LoRASection, OptimizerSection, RunConfig
from trainer.convert.adapters import weights_hash
from trainer.convert.compare import build_model
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine

GOLDEN = Path(__file__).parents[2] / "golden/peft/adapter.json"
RATE = 1e-2
LORA = LoRASection(rank=4, alpha=6.0)


def _config(lora: LoRASection | None = None, init_from: str | None = None, **model: Any) -> RunConfig:
    data, optimizer = DataSection(blend="mock"), OptimizerSection(lr=RATE, schedule="constant")
    first = CheckpointSection(init_from=init_from)
    config = small_config("llama", dtype="fp32", data=data, optimizer=optimizer, checkpoint=first)
    return replace(config, model=replace(config.model, lora=lora, **model))


def _engine(config: RunConfig, **options: Any) -> Engine:
    world = join_world(Mesh(1), placement=Placement())
    return Engine(config, make_plan(config, 1, facts=None), world=world, **options)


def base_run(folder: Path, **model: Any) -> Path:
    """A run folder with drawn weights."""
    _engine(_config(**model)).save(str(folder / "checkpoints"), step=1, consumed_samples=1)
    return folder


def adapted(base: Path, lora: LoRASection = LORA) -> Engine:
    """Adapters beside the weights of a folder, with values that count."""
    engine = _engine(_config(lora, str(base)))
    draw_adapters(engine)
    return engine


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, another one, and a run of adapters beside the first."""
    folder = tmp_path_factory.mktemp("made")
    base_run(folder / "base")
    base_run(folder / "other", init_std=0.2)
    adapted(folder / "base").save(str(folder / "run/checkpoints"), step=1, consumed_samples=1)
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    source = open_model(folder).source
    return {
        name: source.read(name, (tuple(0 for _ in info.shape), info.shape)) for name, info in source.tensors.items()
    }


def test_an_adapter_folder_is_one_of_peft_and_is_read_back(made, tmp_path):
    golden, run = json.loads(GOLDEN.read_text()), made / "run"
    shutil.copytree(made / "base", tmp_path / "base")
    convert(run, tmp_path / "peft", options=ConvertOptions(to="peft"))
    stored = load_file(tmp_path / "peft/adapter_model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == golden["tensors"]
    settings = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (
        4,
        6,
        str(made / "base/checkpoints/step-1"),
    )
    before, after = _tensors(run), _tensors(tmp_path / "peft")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    tokens = microbatches(_engine(_config()), 0)[0].tokens_BS
    logits = build_model(open_model(tmp_path / "peft")).logits(tokens)[0, -1, :8]
    np.testing.assert_allclose(logits.detach().numpy(), golden["logits"], rtol=0, atol=1e-5)

    engine = _engine(_config(LORA, str(tmp_path / "peft")))  # training goes on from it
    first = adapted(made / "base")
    assert torch.equal(held_state(engine)["weight"], held_state(first)["weight"])
    settings["use_rslora"] = True
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(settings))
    (twice,) = {adapter.lora.scale for adapter in [open_model(tmp_path / "peft").adapter] if adapter}
    assert twice == 2 * LORA.scale


@pytest.mark.parametrize("tied", [False, True])
def test_saved_layers_begin_with_the_weights_and_stay_with_the_adapters(tied, tmp_path):
    base = base_run(tmp_path / "base", tie_embeddings=tied)
    convert(base, tmp_path / "hf", options=ConvertOptions(to="hf", check=False))
    lora = replace(LORA, modules_to_save=("embedding",) if tied else ("embedding", "head"))
    config = _config(lora, str(tmp_path / "hf"), tie_embeddings=tied)
    engine, layers = _engine(config), [f"{name}.weight" for name in lora.modules_to_save]
    folder = engine.save(str(tmp_path / "first/checkpoints"), step=1, consumed_samples=1)
    first, start = _tensors(tmp_path / "hf"), _tensors(folder)
    assert all(torch.equal(first[f"weight/{name}"], start[f"weight/{name}"]) for name in layers), "not drawn"

    draw_adapters(engine)
    for step in range(2):
        engine.step(microbatches(engine, step), RATE)
    index = read_index(engine.save(str(tmp_path / "run/checkpoints"), step=2, consumed_samples=2))
    assert {name for name in index.tensors if ".lora_" not in name} == {
        f"{state}/{name}" for state in ("weight", "exp_avg", "exp_avg_sq") for name in layers
    }
    last = _tensors(tmp_path / "run")
    assert all(not torch.equal(first[f"weight/{name}"], last[f"weight/{name}"]) for name in layers)
    again = _engine(config, fresh=False)
    again.load(tmp_path / "run/checkpoints/step-2")
    assert all(torch.equal(held_state(engine)[name], values) for name, values in held_state(again).items())

    convert(tmp_path / "run", tmp_path / "peft", options=ConvertOptions(to="peft"))
    settings = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["embed_tokens", "lm_head"]
    read = _tensors(tmp_path / "peft")
    assert read.keys() == last.keys() and all(torch.equal(read[name], last[name]) for name in read)
    continued = _engine(replace(config, checkpoint=CheckpointSection(init_from=str(tmp_path / "peft"))))
    assert torch.equal(held_state(continued)["weight"], held_state(engine)["weight"])

    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    adapted_model = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft")
    tokens = microbatches(engine, 0)[0].tokens_BS
    with torch.no_grad():
        expected = adapted_model(tokens).logits
    found = build_model(open_model(tmp_path / "run")).logits(tokens)
    torch.testing.assert_close(found[..., : expected.shape[-1]], expected, rtol=0, atol=1e-5)


def test_weights_are_merged_in_fp32_and_rounded_once(made, tmp_path):
    convert(made / "base", tmp_path / "bf16", options=ConvertOptions(to="hf", dtype="bf16", check=False))
    engine = adapted(tmp_path / "bf16")
    engine.save(str(tmp_path / "run/checkpoints"), step=1, consumed_samples=1)
    convert(tmp_path / "run", tmp_path / "merged", options=ConvertOptions(to="hf", check=False))
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("bf16", "merged"))
    source = open_model(tmp_path / "run").adapter
    assert source is not None
    for ours, theirs in (("attention.k", "self_attn.k_proj"), ("mlp.down", "mlp.down_proj")):
        a, b = (
            source.source.read(name, ((0, 0), source.source.tensors[name].shape))
            for name in (f"weight/blocks.1.{ours}.lora_{kind}" for kind in "ab")
        )
        name = f"model.layers.1.{theirs}.weight"
        assert torch.equal(merged[name], (base[name].float() + LORA.scale * (b @ a)).bfloat16())
    assert torch.equal(merged["lm_head.weight"], base["lm_head.weight"])


def test_a_checkpoint_holds_adapters_alone_and_resumes_bitwise(made, tmp_path):
    engine = adapted(made / "base")
    for step in range(2):
        engine.step(microbatches(engine, step), RATE)
    folder = engine.save(str(tmp_path / "checkpoints"), step=2, consumed_samples=8)
    index = read_index(folder)
    assert index.run.base == weights_hash(open_model(made / "base"))
    assert {name.rsplit(".", 1)[1] for name in index.tensors} == {"lora_a", "lora_b"}
    assert {name.split("/")[0] for name in index.tensors} == {"weight", "exp_avg", "exp_avg_sq"}
    again = _engine(_config(LORA, str(made / "base")), fresh=False)
    again.load(folder)
    for one in (engine, again):
        one.step(microbatches(one, 2), RATE)
    before, after = held_state(engine), held_state(again)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert engine.evaluate(microbatches(engine, 3)) == again.evaluate(microbatches(again, 3))


def test_the_hash_of_weights_counts_frozen_ones(made):
    """DPO keeps log probabilities under the first weights by it."""
    one, other = adapted(made / "base"), adapted(made / "other")
    other.optimizer.state["weight"].copy_(one.optimizer.state["weight"])  # the same adapters
    assert one.weights_hash() == adapted(made / "base").weights_hash() != other.weights_hash()


def test_another_base_is_refused(made, tmp_path):
    other = _engine(_config(LORA, str(made / "other")), fresh=False)
    with pytest.raises(UsageError, match="were trained beside other weights than those of") as caught:
        other.load(made / "run/checkpoints/step-1")
    assert str(made / "other") in str(caught.value)
    shutil.copytree(made / "run", tmp_path / "run")
    moved = tmp_path / "base"
    shutil.copytree(made / "other", moved)
    engine = adapted(moved)
    engine.save(str(tmp_path / "run/checkpoints"), step=2, consumed_samples=2)
    shutil.rmtree(moved)
    with pytest.raises(UsageError, match=r"the base weights of the adapters in .* are missing"):
        open_model(tmp_path / "run")
    shutil.copytree(made / "base", moved)
    with pytest.raises(UsageError, match="were trained beside other weights"):
        open_model(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"modules_to_save": ["lm_head", "score"]}, "modules_to_save = ['score']"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"base_model_name_or_path": "meta-llama/none"}, "base_model_name_or_path = 'meta-llama/none'"),
    ],
)
def test_settings_of_peft_that_we_lack_are_refused_by_name(made, tmp_path, changes, said):
    (tmp_path / "adapter_model.safetensors").touch()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(made / "base")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(UsageError) as caught:
        open_model(tmp_path)
    assert said in str(caught.value)


def test_layers_that_compute_several_matrices_have_no_adapter_folder(made, tmp_path):
    with pytest.raises(UsageError, match="peft cannot have an adapter of q alone in a model of type phi3"):
        convert(made / "run", tmp_path / "out", options=ConvertOptions(to="peft", model_type="phi3"))
    with pytest.raises(UsageError, match="holds no adapter"):
        convert(made / "base", tmp_path / "out", options=ConvertOptions(to="peft"))
