"""Hugging Face folders: there and back bit for bit, the same text from both, and folders that are refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import tomllib
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers

import mdata
from mdata import DamageError, ResourceError, UsageError
from mdata.chat.templates import TEMPLATE_SOURCE, RecordedTemplate
from tests.helpers.examples import examples, soaked
from tests.helpers.house_rules import ROOT
from tests.helpers.notes import Counted, Notes
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import write_jsonl
from tests.helpers.ties import Ties
from tests.reference.whole_context import choice_gap
from tests.trainer.convert.coverage import covers_exactly
from tests.trainer.convert.hf_models import (
    HYBRIDS,
    LLAMA3,
    NAMES,
    OTHER_EXPERTS,
    SIZES,
    TOKENIZERS,
    YARN,
    config,
    save,
    save_tokenizer,
    save_tokenizer_of,
)
from tests.trainer.convert.test_links import Held
from tests.trainer.engines import save_engine
from trainer.checkpoint.folder import read_index
from trainer.checkpoint.format import HashedFile, dump_index
from trainer.checkpoint.load import verify_checkpoint
from trainer.checkpoint.save import SPARE_BYTES
from trainer.config.presets import PRESETS
from trainer.config.sections import CheckpointSection, MeshSection, MTPSection, OptimizerSection, RunSection
from trainer.convert import compare as comparing
from trainer.convert import convert as converting
from trainer.convert import hf_folder as opening
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.hf_config import families_of_types, from_hf, to_hf
from trainer.convert.hf_folder import hf_links
from trainer.convert.model_keys import effective, model_config
from trainer.convert.mp_rank import scratch_bytes
from trainer.models.family import family_named, family_of
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.run.resume import find_start
from trainer.tasks.generate import GenerationRequest, Sampling, continue_rows
from trainer.tasks.loaded_model import Model, template_of_run

transformers = pytest.importorskip("transformers")
MODEL_TYPES = tuple(families_of_types())
ALL = [*NAMES, *(pytest.param(name, marks=pytest.mark.soak) for name in (*OTHER_EXPERTS, *HYBRIDS))]
GREEDY = ["gpt2", "llama3", "gpt_neox", "stablelm2", "cohere2", "olmo3", "phi4", "gemma3", "qwen2_moe", "mamba2"]
NATIVE, HF = ConvertOptions(to="mtrain"), ConvertOptions(to="hf")


def weights(folder):
    """Every tensor of a folder, sharded or not."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _back(name, **more):
    """A Phi-3 without longrope is a Mistral, if nobody says otherwise."""
    return replace(HF, model_type="phi3" if name == "phi3" else "", **more)


@pytest.mark.parametrize("name", ALL)
def test_there_and_back_is_bit_equal(name, tmp_path):
    theirs = save(name, tmp_path / "theirs", dtype=torch.bfloat16, shard="40KB")
    assert len(list(theirs.glob("*.safetensors"))) > 1
    result = convert(theirs, tmp_path / "ours", options=NATIVE)
    assert result["check"]["by"] == ["transformers", "mtrain"]
    assert result["check"]["largest_difference"] < 1e-5
    options = _back(name, dtype="bf16", max_shard_bytes=30_000)
    assert convert(tmp_path / "ours", tmp_path / "back", options=options)["check"]["largest_difference"] < 1e-5
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert same(weights(theirs), weights(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "conversion.json").read_text())["check"]["compared"]
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (theirs, tmp_path / "back"))
    assert effective(from_hf(before, where="")) == effective(from_hf(after, where=""))
    assert before["eos_token_id"] == after["eos_token_id"] == 256


@pytest.mark.parametrize("name", [*soaked(NAMES, but=GREEDY), *ALL[len(NAMES) :]])
def test_both_write_the_same_greedy_text(name, tmp_path):
    theirs = save(name, tmp_path / "theirs")
    convert(theirs, tmp_path / "ours", options=NATIVE)
    convert(tmp_path / "ours", tmp_path / "back", options=replace(HF, max_shard_bytes=30_000))
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    world = join_world(Mesh(1, 1), placement=Placement())
    prompts = ["the ", "Zwei", "z" * 30]
    rules, ties = Sampling(max_tokens=24, greedy=True), Ties()
    ours = Model.load(tmp_path / "ours", world=world)
    requests = [GenerationRequest(ids=tuple(ours.encode(prompt)), rules=rules) for prompt in prompts]
    for prompt, answer in zip(prompts, continue_rows(ours, requests), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        gaps = [choice_gap(logits[0], 0.0, rules=rules, step=0) for logits in found.logits]
        theirs = found.sequences[0, ids.shape[1] :].tolist()
        if ties.common(answer.tokens, theirs, gap=gaps.__getitem__, row=prompt) == len(theirs):
            assert tokenizer.decode(found.sequences[0], skip_special_tokens=True) == prompt + answer.text
    ties.check()


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo3", "cohere2", "gpt_oss"])
def test_a_model_without_windows_of_a_class_with_windows_runs_there(name, tmp_path):
    """The conversion itself compares the logits of both sides."""
    layers = config(name).num_hidden_layers
    theirs = save(name, tmp_path / "theirs", layer_types=["full_attention"] * layers)
    convert(theirs, tmp_path / "ours", options=NATIVE)
    convert(tmp_path / "ours", tmp_path / "back", options=HF)
    assert same(weights(theirs), weights(tmp_path / "back"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen2_moe"])
def test_ids_of_an_exported_folder_are_those_of_training_or_it_is_said(name, tmp_path):
    """transformers makes a tokenizer of its own of a Qwen2 folder, with the vocabulary alone."""
    convert(save(name, tmp_path / "theirs"), tmp_path / "ours", options=NATIVE)
    heard = Counted()
    found = convert(tmp_path / "ours", tmp_path / "back", options=HF, progress=heard)["token_ids"]
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")("e\u0301").input_ids
    ours = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "back")("e\u0301").input_ids
    assert found["compared"] and found["texts"] > 300
    assert (ids == ours) is (not found["different"]) is (name != "qwen2")
    told = [line for line in heard.lines if "AutoTokenizer makes a Qwen2Tokenizer" in line and "other ids" in line]
    assert len(told) == (name == "qwen2")


@pytest.mark.parametrize(
    ("name", "normalized"),
    [*((name, True) for name in TOKENIZERS), *((name, False) for name in ("gemma3", "gpt_neox", "cohere"))],
)
def test_ids_are_compared_with_a_tokenizer_of_the_kind_of_each_family(name, normalized, tmp_path):
    """Of three kinds AutoTokenizer takes the vocabulary and the merges alone: one that normalizes otherwise is said."""
    folder = save(name, tmp_path / "theirs", tokens=False)
    save_tokenizer_of(name, folder)
    if not normalized:
        table = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(table | {"normalizer": None}))
    heard = Counted()
    found = convert(folder, tmp_path / "back", options=_back(name), progress=heard)["token_ids"]
    assert found["compared"] and found["texts"] > 300
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    texts = ["the  an\n", "e\u0301 \u4e16", " the1212", "", "don't  \t\n x"]
    same = all(list(theirs(text).input_ids) == raw.encode(text).ids for text in texts)
    assert same is normalized is (not found["different"])
    assert any("other ids" in line for line in heard.lines) is (not same)


def test_a_tokenizer_that_transformers_cannot_open_is_said(tmp_path):
    theirs = save("llama2", tmp_path / "theirs", tokens=False)
    (tmp_path / "words").mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    (tmp_path / "words" / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "words" / "merges.txt").write_text("#version: 0.2\n")
    heard = Counted()
    options = replace(HF, tokenizer=str(tmp_path / "words"))
    found = convert(theirs, tmp_path / "back", options=options, progress=heard)["token_ids"]
    assert not found["compared"] and "transformers cannot open a tokenizer in it" in heard.lines[-1]


def test_a_checkpoint_carries_its_tokenizer(tmp_path):
    """Also one that lies in checkpoint.folder, or was copied: no run folder is around it."""
    theirs = save("llama2", tmp_path / "theirs")
    convert(theirs, tmp_path / "ours", options=NATIVE)
    alone = (tmp_path / "ours" / "checkpoints" / "step-1").rename(tmp_path / "alone")
    names = ("tokenizer.json", "tokenizer_config.json")
    assert set(read_index(alone).extras) == {"tokenizer_facts.json", *(f"tokenizer/{name}" for name in names)}
    convert(alone, tmp_path / "back", options=replace(HF, check=False))
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes()


@pytest.mark.parametrize("rule", ["muon", "sgd"])
def test_a_run_of_another_update_rule_is_converted(rule, tmp_path):
    """Muon keeps other moments of matrices than of the rest; Megatron's forms are Adam's alone."""
    theirs = save("llama2", tmp_path / "theirs", tokens=False)
    run_ranks(_begun, 1, theirs, tmp_path / "run", MeshSection(), rule)
    convert(tmp_path / "run", tmp_path / "back", options=HF)
    assert same(weights(theirs), weights(tmp_path / "back"))
    convert(tmp_path / "run", tmp_path / "merged", options=NATIVE)
    before, after = (verify_checkpoint(tmp_path / name / "checkpoints" / "step-1") for name in ("run", "merged"))
    assert {name: one.shape for name, one in before.tensors.items()} == {n: x.shape for n, x in after.tensors.items()}
    assert any(name.startswith("momentum_buffer/") for name in after.tensors)
    heard = Counted()
    result = convert(tmp_path / "run", tmp_path / "megatron", options=ConvertOptions(to="torch_dist"), progress=heard)
    assert result["target"]["states"] == ["weight"] and f"those of {rule} and are left out" in heard.lines[-1]
    assert open_model(tmp_path / "megatron").states == ("weight",)


def _begun(context, folder, target, mesh, rule="adamw"):
    """A run of some ranks that begins with a Hugging Face folder; its first checkpoint."""
    from trainer.checkpoint.format import RunState
    from trainer.config.parse import dump_config
    from trainer.parallel.mesh import mesh_of
    from trainer.plan.plan import make_plan
    from trainer.run.engine import Engine

    config = open_model(folder).config
    config = replace(
        config,
        checkpoint=CheckpointSection(init_from=str(folder)),
        mesh=mesh,
        optimizer=replace(config.optimizer, name=rule),
        train=replace(config.train, global_batch=2),
        run=RunSection(folder="unused", seed=1),
    )
    world = context.join(mesh_of(config, context.world))
    engine = Engine(config, make_plan(config, context.world, facts=None), world=world)
    run = RunState(1, 1, "", {}, 0, dump_config(config))
    return str(save_engine(engine, target / "checkpoints", run=run))


def name_of(each):
    return each if isinstance(each, str) else f"tp{each.tp}pp{each.pp}"


TP, PP, BOTH = MeshSection(tp=2), MeshSection(pp=2), MeshSection(tp=2, pp=2)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, PP) for name in NAMES[:2]),
        *((name, TP) for name in ("olmo3", "phi4", "gemma3", "stablelm2", "cohere")),
        ("qwen3", BOTH),
        *soaked(
            [*((name, mesh) for name in NAMES[2:7] for mesh in (TP, PP)), ("gpt2", BOTH), ("qwen2_moe", BOTH)], but=[]
        ),
    ],
    ids=name_of,
)
def test_a_run_on_several_ranks_begins_with_a_folder_of_theirs(name, mesh, tmp_path):
    theirs, ranks = save(name, tmp_path / "theirs", dtype=torch.bfloat16, shard="40KB"), mesh.tp * mesh.pp
    run_ranks(_begun, ranks, theirs, tmp_path / "run", mesh)
    assert len(list((tmp_path / "run").glob("checkpoints/step-1/*.safetensors"))) == ranks
    convert(tmp_path / "run", tmp_path / "back", options=replace(HF, dtype="bf16", check=False))
    assert same(weights(theirs), weights(tmp_path / "back"))
    convert(tmp_path / "run", tmp_path / "merged", options=replace(NATIVE, check=False))
    assert len(list((tmp_path / "merged").glob("checkpoints/step-1/*.safetensors"))) == 1
    convert(tmp_path / "merged", tmp_path / "again", options=replace(HF, dtype="bf16", check=False))
    assert same(weights(theirs), weights(tmp_path / "again"))


def _trained(context, config):
    from trainer.parallel.mesh import mesh_of
    from trainer.run.train import train

    return train(config, context.join(mesh_of(config, context.world))).loss


@pytest.mark.parametrize(
    ("name", "mesh"), soaked([("gpt2", PP), ("qwen3", PP), ("llama3", BOTH)], but=[("llama3", BOTH)]), ids=name_of
)
def test_what_several_ranks_train_from_a_folder_of_theirs_goes_back_to_them(name, mesh, tmp_path):
    """Trained by transformers and torch from the same folder on the same tokens, the model computes the same."""
    theirs = save(name, tmp_path / "theirs")
    write_jsonl(tmp_path / "text.jsonl", 1)
    options = mdata.PreprocessOptions(
        input=(str(tmp_path / "text.jsonl"),), output_prefix=str(tmp_path / "text"), append_eod=True,
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(theirs),
    )  # fmt: skip
    mdata.preprocess(options)
    given = open_model(theirs).config
    config = replace(
        given,
        run=RunSection(folder=str(tmp_path / "run"), seed=1),
        data=replace(given.data, blend=str(tmp_path / "text_text_document.json")),
        mesh=mesh,
        train=replace(given.train, global_batch=4, micro_batch=1, steps=3, sequence_length=32),
        optimizer=OptimizerSection(lr=1e-3, schedule="constant", weight_decay=0.0),
        checkpoint=CheckpointSection(init_from=str(theirs)),
    )
    losses = set(run_ranks(_trained, mesh.tp * mesh.pp, config))
    check = convert(tmp_path / "run", tmp_path / "back", options=HF)["check"]
    assert check["by"] == ["mtrain", "transformers"] and check["largest_difference"] < 1e-5
    back, before, model = (
        transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "back", theirs, theirs)
    )
    losses.add(_trained_by_torch(model, config))
    assert max(losses) - min(losses) < 1e-5
    ids = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, reference, first = (each(ids).logits for each in (back, model, before))
    assert (ours - reference).abs().max() < 1e-4 < 1e-2 < (ours - first).abs().max()
    run = Model.load(tmp_path / "run", world=join_world(Mesh(1), placement=Placement()))
    rules = Sampling(max_tokens=16, greedy=True)
    (answer,) = continue_rows(run, [GenerationRequest(ids=tuple(run.encode("time ")), rules=rules)])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    prompt = tokenizer("time ", return_tensors="pt").input_ids
    found = back.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(found[0], skip_special_tokens=True) == "time " + answer.text


def _trained_by_torch(model, config):
    """The same steps of transformers' model; the loss of the last."""
    from trainer.run.data import open_data

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    data, count = open_data(config).train, config.train.global_batch
    for step in range(config.train.steps):
        rows = [data[count * step + i] for i in range(count)]
        tokens, labels = (torch.stack([torch.from_numpy(row[key]) for row in rows]) for key in ("tokens", "labels"))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
    return loss.item()


def test_interleaved_rows_are_put_apart(tmp_path):
    save("qwen3", tmp_path / "theirs", tokens=False)
    convert(tmp_path / "theirs", tmp_path / "ours", options=NATIVE)
    model = open_model(tmp_path / "ours")
    turned = replace(model, config=replace(model.config, model=replace(model.config.model, rope_interleaved=True)))
    from trainer.convert.compare import compare_logits
    from trainer.convert.hf_folder import write_hf

    more = {"dtype": torch.float32, "max_shard_bytes": 1 << 30, "model_type": "", "report": lambda count: None}
    write_hf(tmp_path / "back", turned, **more)
    assert compare_logits(turned, open_model(tmp_path / "back"))["largest_difference"] < 1e-5


MODELS = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 5),
        "hidden_size": st.sampled_from([16, 32]),
        "num_heads": st.sampled_from([2, 4]),
        "num_kv_heads": st.sampled_from([0, 1, 2]),
        "head_dim": st.sampled_from([0, 8, 16]),
        "ffn_hidden_size": st.sampled_from([0, 24, 40]),
        "max_position": st.sampled_from([32, 64]),
        "vocab_size": st.just(50),
        "norm_epsilon": st.sampled_from([1e-5, 1e-6]),
        "tie_embeddings": st.booleans(),
    }
)
FORMS = st.one_of(
    st.fixed_dictionaries(
        {
            "position": st.just("learned"),
            "norm": st.just("layernorm"),
            "bias": st.just(True),
            "activation": st.sampled_from(["gelu", "gelu_erf", "relu", "squared_relu"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "activation": st.sampled_from(["swiglu", "geglu", "geglu_tanh"]),
            "bias": st.sampled_from([True, False, "qkv"]),
            "qk_norm": st.sampled_from([False, True, "all_heads", "own_head"]),
            "block_norm": st.sampled_from(["input", "output", "both"]),
            "norm_zero_centered": st.booleans(),
            "window": st.sampled_from([0, 4]),
            "window_interval": st.sampled_from([0, 2]),
            "rope_theta": st.sampled_from([1e4, 5e5]),
            "rope_interleaved": st.booleans(),
            "rope_scaling": st.sampled_from(["none", "linear", "yarn", "llama3", "ntk"]),
            "rope_factor": st.sampled_from([2.0, 4.0]),
            "rope_original_length": st.just(16),
            "rope_beta_fast": st.sampled_from([32.0, 16.0]),
            "rope_window_theta": st.sampled_from([0, 1e4]),
            "rope_interval": st.sampled_from([0, 2]),
        }
    ),
    st.fixed_dictionaries(
        {
            "embedding_multiplier": st.sampled_from([0, 4.0, 12.0]),
            "residual_multiplier": st.sampled_from([0, 0.22]),
            "logit_scale": st.sampled_from([0, 1 / 13, 0.0625]),
            "attention_scale": st.sampled_from([0, 0.1, 0.2]),
            "attention_softcap": st.sampled_from([0, 50.0]),
            "logit_softcap": st.sampled_from([0, 30.0]),
            "block_norm": st.sampled_from(["input", "both"]),
            "norm_zero_centered": st.booleans(),
            "rope_fraction": st.sampled_from([1.0, 0.5]),
        }
    ),
    st.fixed_dictionaries(
        {
            "qk_norm": st.sampled_from([False, True, "all_heads"]),
            "bias": st.sampled_from([False, "qkv"]),
            "moe": st.fixed_dictionaries(
                {
                    "num_experts": st.sampled_from([4, 6]),
                    "top_k": st.sampled_from([1, 2]),
                    "ffn_hidden_size": st.sampled_from([0, 24]),
                    "interval": st.sampled_from([1, 2]),
                    "normalize_weights": st.booleans(),
                    "shared_ffn_hidden_size": st.sampled_from([0, 16]),
                    "shared_gate": st.booleans(),
                    "weight_scale": st.sampled_from([0, 2.5]),
                    "capacity_factor": st.sampled_from([0, 1.0]),
                }
            ),
        }
    ),
)


LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENTS = st.fixed_dictionaries(
    {
        "head_dim": st.just(0),
        "num_kv_heads": st.just(0),
        "rope_interleaved": st.booleans(),
        "rope_scaling": st.sampled_from(["none", "linear", "yarn"]),
        "rope_factor": st.just(4.0),
        "rope_original_length": st.just(16),
        "attention_scale": st.sampled_from([0, 0.2]),
        "mla": st.fixed_dictionaries(
            {name: st.just(size) for name, size in LATENT.items()}
            | {
                "q_lora_rank": st.sampled_from([0, 12]),
                "mscale": st.sampled_from([0.0, 0.5, 1.0]),
                "mscale_all_dim": st.sampled_from([0.0, 0.7, 1.0]),
            }
        ),
    },
    optional={
        "mtp": st.just({"num_layers": 2}),
        "moe": st.fixed_dictionaries(
            {
                "num_experts": st.just(8),
                "top_k": st.sampled_from([1, 2, 4]),
                "ffn_hidden_size": st.just(16),
                "shared_ffn_hidden_size": st.sampled_from([0, 24, 32]),
                "score": st.sampled_from(["softmax", "sigmoid"]),
                "expert_bias": st.booleans(),
                "normalize_weights": st.booleans(),
                "groups": st.sampled_from([0, 4]),
                "groups_per_token": st.sampled_from([0, 2]),
                "group_score": st.sampled_from(["sum", "max"]),
                "layers": st.sampled_from([[], [0, 1, 1, 1, 1], [1, 0, 1, 0, 1]]),
            }
        ),
    },
)
FORMS = st.one_of(FORMS, LATENTS)


@examples(300)
@given(MODELS, FORMS, st.sampled_from(["", *MODEL_TYPES]))
def test_a_model_is_written_as_it_is_or_refused_by_name(sizes, form, model_type):
    ours = model_config({**sizes, **form}, where="", context=32)
    if any("moe" in problem or "experts" in problem for problem in family_of(ours).problems(ours)):
        return  # no model of ours
    try:
        written = to_hf(ours, 50, model_type=model_type)
    except UsageError as error:
        assert "cannot express" in str(error) and "model." in str(error)
        return
    back = from_hf(json.loads(json.dumps(written)), where="")
    free = dict.fromkeys(family_of(ours).hugging_face.free(ours))
    before, after = ({**effective(c), "rope_interleaved": None, **free} for c in (ours, back))
    assert before == after
    family = family_of(ours)
    links = list(hf_links(family, family.shape(ours, 50), model_type=written["model_type"]))
    assert covers_exactly(links)
    assert covers_exactly([one.flipped() for one in links])


MOE = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 16}
SHARED = MOE | {"shared_ffn_hidden_size": 16}
BIASED = {"score": "sigmoid", "expert_bias": True}
PAGE = ROOT / "docs/howto/experts.md"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"qk_norm": True, "moe": MOE | {"layers": [0, 1]}}, "Qwen3Moe"),
        ({"qk_norm": "all_heads", "moe": MOE}, "Olmoe"),
        ({"moe": SHARED | {"shared_gate": True, "layers": [0, 1]}}, "Qwen2Moe"),
        ({"moe": MOE}, "Mixtral"),
        ({"mla": LATENT, "norm_epsilon": 1e-6, "moe": SHARED | BIASED | {"layers": [0, 1]}}, "DeepseekV3"),
        ({"moe": MOE | {"layers": [0, 1]}}, ""),
        ({"moe": MOE | BIASED}, ""),
    ],
)
def test_experts_are_exported_as_the_page_says(keys, named):
    config = model_config({"num_layers": 2, "hidden_size": 32, "num_heads": 4} | keys, where="", context=32)
    if not named:
        with pytest.raises(UsageError, match="model_type mixtral cannot express this model"):
            to_hf(config, 50)
        return
    assert to_hf(config, 50)["architectures"] == [f"{named}ForCausalLM"]
    assert f"| {named} |" in PAGE.read_text()


def test_a_softcap_of_scores_that_gemma_3_does_not_compute_is_refused(tmp_path):
    save("gemma3", tmp_path)
    ours = open_model(tmp_path).config
    with pytest.raises(UsageError, match=r"gemma3_text cannot express this model\s+found: .*attention_softcap"):
        to_hf(replace(ours, model=replace(ours.model, attention_softcap=5.0)), 50)
    _rewrite(tmp_path, attn_logit_softcapping=5.0)
    with pytest.raises(UsageError, match=r"attn_logit_softcapping = 5.0 is not supported; supported is None"):
        open_model(tmp_path)


def test_heads_of_olmoe_have_no_size_of_their_own(tmp_path):
    """Its norms of queries and keys are of hidden_size in transformers."""
    keys = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "qk_norm": "all_heads", "moe": MOE}
    with pytest.raises(UsageError, match="head_dim"):
        to_hf(model_config(keys, where="", context=32), 50)
    save("olmoe", tmp_path)
    _rewrite(tmp_path, head_dim=16)
    with pytest.raises(UsageError, match=r"head_dim = 16 is not supported; supported is 8"):
        open_model(tmp_path)


def test_the_sizes_of_the_page_on_experts_can_be_exported():
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    keys = tomllib.loads(next(block for block in blocks if "num_layers" in block))["model"]
    assert to_hf(model_config(keys, where="", context=32), 50)["model_type"] == "qwen3_moe"


@pytest.mark.soak
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_parameters_of_transformers(preset):
    ours = model_config({"preset": preset}, where="", context=1024)
    ours = replace(ours, model=replace(ours.model, mtp=None))  # transformers builds models without further layers
    if preset == "megatron-t5-220m":  # learned positions: no class of transformers has them
        with pytest.raises(UsageError, match=r"config\.json of model_type t5 cannot express this model"):
            to_hf(ours, ours.model.vocab_size)
        return
    written = to_hf(ours, ours.model.vocab_size)
    with torch.device("meta"):
        theirs = getattr(transformers, written["architectures"][0])(transformers.AutoConfig.for_model(**written))
    family = family_of(ours)
    shapes = family.logical_shapes(family.shape(ours, ours.model.vocab_size))
    theirs_count = sum(parameter.numel() for parameter in theirs.parameters())
    if theirs.config.tie_word_embeddings and not written["tie_word_embeddings"]:
        theirs_count += theirs.lm_head.weight.numel()  # T5Config of transformers 5 ties them whatever it is given
    assert sum(map(math.prod, shapes.values())) == theirs_count


def test_weights_in_mxfp4_are_read_as_the_numbers_that_they_stand_for(tmp_path):
    """As gpt-oss is published; transformers has the same numbers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = save("gpt_oss", tmp_path / "packed", dtype=torch.bfloat16)
    tensors, draws = weights(packed), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, columns, rows = tensors.pop(name).shape
        size = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=draws, dtype=torch.uint8)
        scales = torch.randint(120, 125, size, generator=draws, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, packed / "model.safetensors")
    stored = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**stored, "quantization_config": {"quant_method": "mxfp4"}}))
    source = opening.SafetensorsSource(packed, None)
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        expected = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        info, start, count = source.tensors[name], (1, 5, 3), (2, 27, 20)
        assert info.dtype == expected.dtype == torch.bfloat16 and info.shape == expected.shape
        assert torch.equal(source.read(name, ((0, 0, 0), info.shape)), expected)
        assert torch.equal(source.read(name, (start, count)), expected[1:3, 5:32, 3:23])
    convert(packed, tmp_path / "ours", options=replace(NATIVE, check=False))  # transformers wants Accelerate for these
    convert(tmp_path / "ours", tmp_path / "back", options=replace(HF, dtype="bf16"))
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(weights(tmp_path / "back")[name], source.read(name, ((0, 0, 0), source.tensors[name].shape)))
    del tensors[f"{name}_scales"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(DamageError, match=r"has blocks of mxfp4 without scales that fit"):
        opening.SafetensorsSource(packed, None)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("olmo2", {"attention_bias": True}, "attention_bias = True"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "is not one table for each of full_attention"),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0] * 9}, "without rotary positions lie at irregular"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "Phi-3 has longrope only"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1.0, "x"], "long_factor": [1.0]}},
            "short_factor = [1.0, 'x'] is not a number above 0",
        ),
        ("olmo2", {"rope_parameters": None, "rope_theta": [5.0]}, "rope_theta = [5.0] in config.json is not a number"),
        (
            "olmo2",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0, "factor": [2.0]}},
            "factor = [2.0] is not a number above 0",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping = '50'"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}, "is not a list of"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling = 0.0 is not above 0"),
        ("stablelm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5 is not a share of a head"),
        ("cohere", {"attention_bias": True}, "attention_bias = True"),
        ("cohere", {"logit_scale": 0.0}, "logit_scale = 0.0 is not above 0"),
        ("cohere2", {"sliding_window": None}, "without a sliding_window"),
        ("mamba2", {"use_bias": True}, "use_bias = True"),
        ("mamba2", {"expand": 3}, "num_heads x head_dim = 8192 is not expand = 3 x hidden_size"),
        ("mamba2", {"time_step_limit": ["x", 1.0]}, "time_step_limit = ['x', 1.0] is not two numbers"),
        ("nemotron_h", {"hybrid_override_pattern": "M*X"}, "layers_block_type = M*X: supported are mamba"),
        ("nemotron_h", {"n_group": 2, "topk_group": 2}, "a group counts by its best 2 experts there"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size = 8"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ("bamba", {"attn_layer_indices": [40]}, "attn_layer_indices = [40] are not numbers of 32 layers"),
    ],
)
def test_a_part_that_is_lacking_is_refused_by_name(kind, changes, named):
    with pytest.raises(UsageError, match=re.escape(named)):
        from_hf({"model_type": kind, **changes}, where="")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 4, "mamba": {"pattern": "M-M*"}}, "model.tie_embeddings = True"),
        ({"num_layers": 2, "mamba": {"pattern": "MM", "num_heads": 3}}, "num_heads x head_dim = 48 is not expand"),
    ],
)
def test_a_mixer_model_that_transformers_lacks_is_refused_as_an_export(changes, named):
    ours = model_config(
        {"family": "mamba", "hidden_size": 64, "num_heads": 4, "position": "none", **changes}
        | {"mamba": {"head_dim": 16, "num_groups": 1, **changes["mamba"]}},
        where="",
        context=32,
    )
    with pytest.raises(UsageError, match=re.escape(named)) as refused:
        to_hf(ours, 50)
    assert "try: export to another format" in str(refused.value)


def test_settings_of_older_versions_are_read():
    """Gemma 3 and OLMo 3 as they were published: the base of windows apart, the scaling of the other layers."""
    gemma = {"model_type": "gemma3_text", "rope_theta": 2e6, "rope_local_base_freq": 2e4, "sliding_window_pattern": 2}
    model = from_hf({**gemma, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, where="").model
    assert (model.rope_theta, model.rope_window_theta, model.window_interval) == (2e6, 2e4, 2)
    assert (model.rope_scaling, model.rope_factor) == ("linear", 8.0)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    olmo = {"model_type": "olmo3", "rope_scaling": {**yarn, "attention_factor": 1.2079441541679836}}
    model = from_hf(olmo, where="").model
    assert (model.rope_scaling, model.rope_window_theta, model.window_interval) == ("yarn", 5e5, 4)
    olmo["rope_scaling"]["attention_factor"] = 1.3
    with pytest.raises(UsageError, match=r"attention_factor = 1\.3 is not the one that the factor gives"):
        from_hf(olmo, where="")


def test_deepseek_with_further_layers_as_it_is_published(tmp_path):
    """Further layers are behind the others, with copies of the embedding and of the head; transformers ignores them."""
    theirs = save("deepseek_v3", tmp_path / "theirs", num_hidden_layers=2, num_mtp_layers=2)
    told = convert(theirs, tmp_path / "without", options=NATIVE)
    assert told["check"]["by"] == ["transformers", "mtrain"] and told["check"]["largest_difference"] < 1e-5
    model = open_model(theirs)
    assert "it has none of the 2 further layers" in model.notes[-1]
    further = replace(model.config, model=replace(model.config.model, mtp=MTPSection(num_layers=2)))
    family = family_of(further)
    torch.manual_seed(1)
    shapes = family.logical_shapes(family.shape(further, 300)).items()
    held = {f"weight/{name}": torch.randn(size) for name, size in shapes}
    biases = family.logical_buffers(family.shape(further, 300)).items()
    held |= {f"buffer/{name}": torch.randn(size) for name, size in biases}
    assert "buffer/mtp.1.block.mlp.router.expert_bias" in held
    options = {"dtype": torch.bfloat16, "max_shard_bytes": 1 << 30, "model_type": "", "report": lambda count: None}
    opening.write_hf(tmp_path / "there", replace(model, config=further, source=Held(held)), **options)
    stored = weights(tmp_path / "there")
    own = {name.removeprefix("model.layers.3.") for name in stored if name.startswith("model.layers.3.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} < own
    assert {"mlp.gate.e_score_correction_bias", "mlp.experts.7.down_proj.weight", "self_attn.kv_b_proj.weight"} < own
    assert stored["model.layers.2.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    copies = {"model.layers.2.embed_tokens.weight": "model.embed_tokens.weight"}
    copies["model.layers.2.shared_head.head.weight"] = "lm_head.weight"
    stored |= {copy: stored[name].clone() for copy, name in copies.items()}
    save_file(stored, tmp_path / "there/model.safetensors")
    found = open_model(tmp_path / "there")
    assert found.config.model.mtp == MTPSection(num_layers=2) and not found.notes
    for name, info in found.source.tensors.items():
        values = found.source.read(name, (tuple(0 for _ in info.shape), info.shape))
        assert torch.equal(values, held[name].to(values.dtype)), name
    assert found.source.tensors.keys() == held.keys()


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "the norms of latents have 1e-06 there"),
        ("deepseek_v3", {"num_key_value_heads": 4}, "there are as many as heads, 128"),
        ("deepseek_v3", {"topk_group": 2}, "a group counts by its best 2 experts there"),
        ("deepseek_v3", {"norm_topk_prob": False}, "weights of experts that are not normalized"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": None}}, "mscale_all_dim without mscale"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": "1"}}, "are not numbers of at least 0"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = True"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "topk_method": "group_limited_greedy"}, "needs both"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek_v2", {}, "num_experts_per_tok is not set"),
    ],
)
def test_a_deepseek_that_is_another_function_is_refused_by_name(kind, changes, named):
    with pytest.raises(UsageError, match=re.escape(named)):
        from_hf({"model_type": kind, **changes}, where="")


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_defaults_are_those_of_transformers(kind):
    needed = {"num_experts_per_tok": 2} if kind == "deepseek_v2" else {}
    config = transformers.AutoConfig.for_model(kind, **needed)
    empty = from_hf({"model_type": kind, **needed}, where="")
    full = from_hf(json.loads(config.to_json_string()), where="")
    face = family_named(families_of_types()[kind]).hugging_face
    assert face.defaults[kind]["vocab_size"] == config.vocab_size
    before, after = effective(empty), effective(full)
    if kind == "mistral":
        assert before.pop("window") == after.pop("window") == 4096
    assert before == after


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "electra"}, "model_type 'electra'"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "'dynamic'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide'"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"intermediate_size": 48}, "model.layers.0.mlp.down_proj.weight [32, 64] instead of [32, 48]"),
        ({"num_hidden_layers": 3}, "missing: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(changes, named, tmp_path):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises((UsageError, DamageError)) as error:
        convert(folder, tmp_path / "ours", options=NATIVE)
    assert named in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def _without_a_shard(folder):
    next(folder.glob("model-00002*")).unlink()


def _outside(folder):
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"] = dict.fromkeys(table["weight_map"], "../other.safetensors")
    index.write_text(json.dumps(table))


def _cut(folder):
    file = next(folder.glob("model-00001*"))
    file.write_bytes(file.read_bytes()[:100])


def _pickle(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def _integers(folder):
    file = next(folder.glob("model-00001*"))
    save_file({name: t.to(torch.int32) for name, t in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_without_a_shard, "model-00002"),
        (_outside, "../other.safetensors"),
        (_cut, "model-00001"),
        (_pickle, "pytorch_model.bin"),
        (_integers, "not in F64, F32, F16 or BF16: model."),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: save_tokenizer(folder, more=60), "317 ids"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer"),
    ],
)
def test_files_that_are_not_whole_are_refused_by_name(damage, named, tmp_path):
    folder = save("llama2", tmp_path / "theirs", shard="40KB")
    damage(folder)
    with pytest.raises((UsageError, DamageError)) as error:
        convert(folder, tmp_path / "ours", options=NATIVE)
    assert named in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def _with_tensors(folder, more):
    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), **more}, file, {"format": "pt"})


def _rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("kind", ["llama3", "gpt2"])
@pytest.mark.parametrize("installed", [True, False])
def test_a_head_beside_a_tied_embedding_is_that_embedding_or_used(kind, installed, tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "has_transformers", lambda: installed)
    folder = save(kind, tmp_path / "theirs", tokens=False)
    (embedding,) = (t for name, t in weights(folder).items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    _with_tensors(folder, {"lm_head.weight": embedding.clone()})
    model = open_model(folder)
    assert model.config.model.tie_embeddings and not model.notes
    _with_tensors(folder, {"lm_head.weight": embedding + 1})
    model = open_model(folder)
    assert not model.config.model.tie_embeddings and "lm_head.weight" in model.notes[0]
    convert(folder, tmp_path / "ours", options=NATIVE)
    convert(tmp_path / "ours", tmp_path / "back", options=HF)
    assert same(weights(folder), weights(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False


def test_buffers_that_are_stored_are_compared_with_what_config_json_gives(tmp_path):
    frequency = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    llama, gpt2 = (save(name, tmp_path / name, tokens=False) for name in ("llama2", "gpt2"))
    for number, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        _with_tensors(llama, {"model.layers.0.self_attn.rotary_emb.inv_freq": frequency.to(dtype)})
        assert not open_model(llama).notes, number
    mask = torch.ones(1, 1, 64, 64).tril().to(torch.uint8)
    _with_tensors(gpt2, {"transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)})
    assert not open_model(gpt2).notes
    _rewrite(llama, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" in open_model(llama).notes[0]
    _with_tensors(gpt2, {"transformer.h.0.attn.bias": 1 - mask})
    assert "transformer.h.0.attn.bias" in open_model(gpt2).notes[0]
    _with_tensors(llama, {"model.layers.0.attn.bias": mask})
    with pytest.raises(UsageError, match=r"model\.layers\.0\.attn\.bias"):
        open_model(llama)


@pytest.mark.parametrize("changes", [
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
     "original_max_position_embeddings": 16},
    {"rope_parameters": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
     "original_max_position_embeddings": 16},
    {"rope_parameters": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e4},
    {"rope_parameters": {"rope_type": "default", "original_max_position_embeddings": 16}},
    {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
])  # fmt: skip
def test_rotary_settings_are_found_where_transformers_finds_them(changes, tmp_path):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    _rewrite(folder, **changes)
    heard = Counted()
    check = convert(folder, tmp_path / "ours", options=NATIVE, progress=heard)["check"]
    assert check["by"] == ["transformers", "mtrain"] and check["largest_difference"] < 1e-5
    table, places = changes["rope_parameters"] or {}, ("rope_theta", "original_max_position_embeddings")
    twice = [key for key in places if key in table and key in changes]
    assert [key for key in places if any(f"two values of {key}" in line for line in heard.lines)] == twice


@pytest.mark.parametrize(("changes", "named"), [
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mrope_section": [1, 2]}}, "mrope_section = [1, 2]"),
    ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "factor = 4.0"),
    ({"rope_parameters": {"rope_type": "linear", "factor": None}}, "lacks factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}}, "full_attention"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, "['yarn']"),
    ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor = '4'"),
    ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta = '1e4'"),
    ({"rope_parameters": {"rope_theta": -1}}, "rope_theta = -1"),
    ({"rope_parameters": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "has two types"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "disagree"),
    ({"rotary_pct": 0.25}, "rotary_pct = 0.25"),
    ({"use_mrope": True}, "use_mrope = True"),
    ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "low_freq_factor = 4.0 is not"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1}}, "beta_slow = 1.0 is not below"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}}, "rope_theta = 1.0 is not above 1"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = ['full_attention', 'sliding_att"),
])  # fmt: skip
def test_rotary_settings_that_nobody_reads_are_refused_by_name(changes, named, tmp_path):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    _rewrite(folder, **changes)
    with pytest.raises(UsageError) as error:
        open_model(folder)
    assert named in str(error.value)


@pytest.mark.parametrize("kind", ["llama2", "gpt2", "qwen2"])
def test_a_number_of_layers_is_compared_with_the_files_before_a_table_is_made_of_it(kind, tmp_path, monkeypatch):
    folder = save(kind, tmp_path / "theirs", tokens=False)
    _rewrite(folder, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": 65_000})
    if kind == "qwen2":
        _rewrite(folder, use_sliding_window=True, sliding_window=4, max_window_layers=65_000, layer_types=None)
    monkeypatch.setattr(opening, "hf_links", None)
    with pytest.raises(DamageError, match="the tensors of 65000 layers"):
        open_model(folder)


def _describe(folder, *, facts=None, **changes):
    """Change settings in the index of a checkpoint of ours, and what it says of its tokenizer; all hashes are right."""
    index = read_index(folder)
    text, extras = index.run.config, dict(index.extras)
    for name, value in changes.items():
        text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert count == 1
    if facts is not None:
        (folder / "tokenizer_facts.json").write_bytes(facts)
        extras["tokenizer_facts.json"] = HashedFile(len(facts), blake3(facts).hexdigest())
    (folder / "index.json").write_bytes(dump_index(replace(index.run, config=text), index.parts, extras=extras))


def test_a_checkpoint_of_ours_says_no_more_layers_than_it_has_and_has_no_tensor_that_its_model_lacks(tmp_path):
    convert(save("llama2", tmp_path / "theirs", tokens=False), tmp_path / "ours", options=replace(NATIVE, check=False))
    folder = tmp_path / "ours" / "checkpoints" / "step-1"
    _describe(folder, tie_embeddings="true")
    with pytest.raises(DamageError, match=r"not of this model: weight/head\.weight"):
        open_model(tmp_path / "ours")
    _describe(folder, num_layers=65_000)
    with pytest.raises(DamageError, match="the tensors of 65000 layers"):
        open_model(tmp_path / "ours")


@pytest.mark.parametrize("facts", [b"[]", b"{}", b"{", b'{"type": 3, "options": {}}', b'{"type": "x", "options": []}'])
def test_a_tokenizer_that_a_checkpoint_of_ours_does_not_describe_is_damage(facts, tmp_path):
    convert(save("llama2", tmp_path / "theirs"), tmp_path / "ours", options=replace(NATIVE, check=False))
    _describe(tmp_path / "ours" / "checkpoints" / "step-1", facts=facts)
    with pytest.raises(DamageError, match=r"step-1/tokenizer_facts\.json is"):
        open_model(tmp_path / "ours")


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", None])
def test_the_template_of_a_run_is_exported(source, tmp_path):
    """A file that its tokenizer's files lack; the name of one that needs no file is kept among our own alone."""
    convert(save("llama2", tmp_path / "theirs"), tmp_path / "ours", options=replace(NATIVE, check=False))
    folder = tmp_path / "ours" / "checkpoints" / "step-1"
    template = {"chat_template": "plain"} if source is None else {"chat_template": "a.jinja", TEMPLATE_SOURCE: source}
    _describe(folder, facts=json.dumps(json.loads((folder / "tokenizer_facts.json").read_text()) | template).encode())
    convert(tmp_path / "ours", tmp_path / "again", options=replace(NATIVE, check=False))
    assert template_of_run(tmp_path / "again") == RecordedTemplate(template["chat_template"], source)
    convert(tmp_path / "again", tmp_path / "back", options=replace(HF, check=False))
    written = tmp_path / "back" / "chat_template.jinja"
    assert (written.read_text() if written.exists() else None) == source


def test_the_ranks_of_a_run_do_not_decide_how_much_memory_its_conversion_takes(tmp_path):
    """A model that is run for a comparison is on one rank: its vocabulary is not padded for those of the run."""
    convert(save("llama2", tmp_path / "theirs", tokens=False), tmp_path / "ours", options=replace(NATIVE, check=False))
    _describe(tmp_path / "ours" / "checkpoints" / "step-1", tp=1 << 30)
    assert open_model(tmp_path / "ours").shape.padded_vocab_size == 384
    assert convert(tmp_path / "ours", tmp_path / "back", options=HF)["check"]["compared"]


def _twice(folder):
    """A tensor in two shards: which one counts?"""
    first, second = sorted(folder.glob("model-0000[12]*"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor + 1}, second, {"format": "pt"})


def _two_models(folder):
    save_file({name: t for file in sorted(folder.glob("model-*")) for name, t in load_file(file).items()},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip


@pytest.mark.parametrize(("damage", "named"), [
    (_twice, "that another file also has"),
    (_two_models, "holds two models"),
    (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter"),
])  # fmt: skip
def test_weights_that_would_be_left_out_are_refused(damage, named, tmp_path):
    folder = save("llama2", tmp_path / "theirs", shard="40KB", tokens=False)
    damage(folder)
    with pytest.raises((UsageError, DamageError), match=named):
        open_model(folder)


def test_an_index_that_lists_too_little_leaves_nothing_out_and_strange_files_are_told(tmp_path):
    folder = save("llama2", tmp_path / "theirs", shard="40KB", tokens=False)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    one_each = {file: name for name, file in table.items()}
    assert len(one_each) < len(table)
    index.write_text(json.dumps({"weight_map": {name: file for file, name in one_each.items()}}))
    shutil.copy(next(folder.glob("model-00001*")), folder / "consolidated.safetensors")
    model = open_model(folder)
    assert model.notes == ("not read, because they do not belong to this model: consolidated.safetensors",)


@pytest.mark.parametrize(("kind", "changes", "named"), [
    ("gpt2", {"num_attention_heads": 2}, "num_attention_heads = 2 and n_head = 4 are two names of the same setting"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "supported is sliding_attention in all"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "supported is full_attention in all layers"),
    ("qwen2", {"layer_types": 5, "use_sliding_window": True}, "layer_types = 5 is not a list"),
])  # fmt: skip
def test_settings_of_equal_tensors_that_contradict_each_other_are_refused(kind, changes, named, tmp_path):
    folder = save(kind, tmp_path / "theirs", tokens=False)
    _rewrite(folder, **changes)
    with pytest.raises(UsageError, match=named):
        open_model(folder)


def test_second_names_of_gpt2_are_read(tmp_path):
    folder = save("gpt2", tmp_path / "theirs", tokens=False)
    before = open_model(folder).config
    table = json.loads((folder / "config.json").read_text())
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    (folder / "config.json").write_text(json.dumps({names.get(name, name): value for name, value in table.items()}))
    assert effective(open_model(folder).config) == effective(before)
    assert convert(folder, tmp_path / "ours", options=NATIVE)["check"]["by"][0] == "transformers"


def test_weights_that_are_no_numbers_are_told_as_such(tmp_path):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    _with_tensors(folder, {"model.norm.weight": torch.full((32,), math.nan)})
    with pytest.raises(DamageError, match=r"theirs holds a tensor that is all NaN(.|\n)*all 32 values"):
        convert(folder, tmp_path / "ours", options=NATIVE)
    assert not (tmp_path / "ours").exists()


def test_values_that_are_not_finite_are_counted_and_converted(tmp_path):
    folder, notes = save("llama2", tmp_path / "theirs", tokens=False), Counted()
    broken = torch.ones(32)
    broken[3], broken[4:6] = math.nan, -math.inf
    _with_tensors(folder, {"model.norm.weight": broken})
    result = convert(folder, tmp_path / "ours", options=NATIVE, progress=notes)
    told = [note for note in notes.lines if "not finite" in note]
    expected = "values that are not finite are converted as they are: "
    assert told == [f"{expected}weight/final_norm.weight (1 NaN and 2 infinite of 32)"]
    assert not result["check"]["compared"] and "not finite" in result["check"]["why"]
    stored = open_model(tmp_path / "ours").source.read("weight/final_norm.weight", ((0,), (32,)))
    assert torch.equal(stored.isfinite(), broken.isfinite())


def test_numbers_that_overflow_in_the_target_are_refused(tmp_path):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    _with_tensors(folder, {"model.norm.weight": torch.full((32,), 1e30)})
    with pytest.raises(DamageError, match="theirs computes logits that are not numbers"):
        convert(folder, tmp_path / "ours", options=ConvertOptions(to="hf", dtype="fp16"))


def test_a_comparison_of_ours_with_ours_is_not_called_a_check(tmp_path, monkeypatch):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    told = [comparing.check_text(convert(folder, tmp_path / "a", options=NATIVE)["check"])]
    told.append(comparing.check_text(convert(tmp_path / "a", tmp_path / "b", options=NATIVE)["check"]))
    monkeypatch.setattr(comparing, "has_transformers", lambda: False)
    told.append(comparing.check_text(convert(folder, tmp_path / "c", options=NATIVE)["check"]))
    assert [text.split(":")[0] for text in told] == ["checked", "copy checked", "not checked"]
    assert "source by transformers, target by mtrain" in told[0] and "transformers is not installed" in told[2]


def test_a_folder_that_transformers_cannot_run_is_an_error_of_the_user(tmp_path):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    _rewrite(folder, use_cache=[])
    with pytest.raises(UsageError, match="cannot run"):
        convert(folder, tmp_path / "ours", options=NATIVE)


def test_a_folder_that_is_none_and_a_target_that_exists_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(UsageError, match="is not a model that mtrain can read"):
        convert(tmp_path / "a", tmp_path / "b", options=NATIVE)
    with pytest.raises(UsageError, match="there is no folder"):
        convert(tmp_path / "nowhere", tmp_path / "b", options=NATIVE)
    (tmp_path / "a" / "file").write_text("")
    with pytest.raises(UsageError, match="exists already"):
        convert(tmp_path / "a", tmp_path / "a", options=NATIVE)


def test_the_same_conversion_finds_its_own_result(tmp_path):
    """As a run does that was killed between its last rename and its end; anything else is refused as before."""
    folder, notes = save("llama2", tmp_path / "theirs", tokens=False), Notes()
    options = replace(NATIVE, check=False)
    first = convert(folder, tmp_path / "ours", options=options)
    assert convert(folder, tmp_path / "ours", options=options, progress=notes) == first
    assert any("is finished and made of the same source" in line for line in notes.lines)
    with pytest.raises(UsageError, match="exists already"):
        convert(folder, tmp_path / "ours", options=replace(options, max_shard_bytes=1000))
    _rewrite(folder, use_cache=True)
    with pytest.raises(UsageError, match="exists already"):
        convert(folder, tmp_path / "ours", options=options)


def test_a_second_conversion_into_the_same_folder_is_told_of_the_first(tmp_path, monkeypatch):
    folder, options, told = save("llama2", tmp_path / "theirs", tokens=False), replace(NATIVE, check=False), []
    real = converting.write_native

    def meanwhile(*args, **more):
        with pytest.raises(UsageError, match=r"another run is writing there(.|\n)*found: process") as caught:
            convert(folder, tmp_path / "ours", options=options)
        told.append(caught.value)
        real(*args, **more)

    monkeypatch.setattr(converting, "write_native", meanwhile)
    convert(folder, tmp_path / "ours", options=options)
    assert told and sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(ResourceError, match="the converted model does not fit into"):
        convert(folder, tmp_path / "ours", options=NATIVE)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_weights_that_are_widened_need_the_room_that_they_take(tmp_path, monkeypatch):
    """A folder in bf16 becomes a checkpoint in fp32: what is told and needed beforehand is what is written."""
    folder = save("llama2", tmp_path / "theirs", dtype=torch.bfloat16, tokens=False)
    heard = Counted()
    written = convert(folder, tmp_path / "ours", options=NATIVE, progress=heard)["target"]
    assert heard.total == heard.done > 100_000 and written["dtype"] == "float32"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=SPARE_BYTES + heard.total - 1))
    with pytest.raises(ResourceError, match="the converted model does not fit into"):
        convert(folder, tmp_path / "again", options=NATIVE)


def test_tensors_that_are_gathered_on_the_disk_need_room_there(tmp_path, monkeypatch):
    """One file of an mp_rank target at a time, twice."""
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    model, options = open_model(folder), ConvertOptions(to="mp_rank", tp=2, pp=2, check=False)
    one = scratch_bytes(model, dtype=torch.float32, tp=2, pp=2)
    total = sum(math.prod(info.shape) * 4 for info in model.source.tensors.values())
    assert total / 4 < one < total / 2
    usage = shutil.disk_usage(tmp_path)
    for lacks in (1, 0):
        free = SPARE_BYTES + total + one - lacks
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        with pytest.raises(ResourceError, match="does not fit into") if lacks else nullcontext():
            convert(folder, tmp_path / "ranks", options=options)
    sizes = [file.stat().st_size for file in (tmp_path / "ranks").rglob("*") if file.is_file()]
    assert max(sizes) < one + SPARE_BYTES and len(sizes) == 6  # four ranks, the iteration, conversion.json


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (ConvertOptions(to="hf", tp=2, pp=2), "--tp counts for targets of format mp_rank; --pp counts"),
        (ConvertOptions(to="hf", optimizer_form="adam"), "--optimizer-form counts for targets of format torch_dist"),
        (
            ConvertOptions(to="hf", settings=("model.rope_theta=5",)),
            "--set counts for sources of format torch_dist or mp_rank",
        ),
        (ConvertOptions(to="hf", checkpoint="step-7"), "--checkpoint counts for sources of format mtrain"),
        (ConvertOptions(to="mtrain", dtype="bf16"), "--dtype counts for other targets: checkpoints of mtrain are fp32"),
        (ConvertOptions(to="mtrain", model_type="qwen2"), "--model-type counts for targets of format hf"),
        (
            ConvertOptions(to="mp_rank", max_shard_bytes=9, tokenizer="x"),
            "--max-shard-size counts for targets of format mtra",
        ),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(options, told, tmp_path):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    with pytest.raises(UsageError) as error:
        convert(folder, tmp_path / "there", options=options)
    assert told in str(error.value) and len(str(error.value).splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_conversion_that_computes_something_else_leaves_nothing(tmp_path, monkeypatch):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    before = converting.write_native

    def swapped(target, model, **options):
        before(target, replace(model, config=_changed(model.config, rope_theta=777.0)), **options)

    monkeypatch.setattr(converting, "write_native", swapped)
    with pytest.raises(DamageError, match="does not compute what"):
        convert(folder, tmp_path / "ours", options=NATIVE)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def _changed(config, **keys):
    return replace(config, model=replace(config.model, **keys))


def test_first_weights_that_do_not_fit_are_refused_and_other_settings_are_told(tmp_path):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    config = open_model(folder).config
    config = replace(
        config, checkpoint=CheckpointSection(init_from=str(folder)), run=RunSection(folder=str(tmp_path / "run"))
    )
    from trainer.run.data import open_data

    data = open_data(config)
    (told,) = find_start(config, data).notes
    assert "theirs" in told
    notes = find_start(_changed(config, rope_theta=5e5), data).notes
    assert "model.rope_theta 10000.0 -> 500000.0" in notes[-1]
    with pytest.raises(UsageError, match=r"blocks\.0\.mlp\.gate\.weight \[64, 32\] instead of \[48, 32\]"):
        find_start(_changed(config, ffn_hidden_size=48), data)
    assert SIZES["vocab_size"] == config.model.vocab_size


def test_a_flipped_byte_of_a_checkpoint_of_ours_is_found(tmp_path):
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    convert(folder, tmp_path / "ours", options=replace(NATIVE, check=False))
    (file,) = (tmp_path / "ours").glob("checkpoints/step-1/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamageError, match="a different hash"):
        convert(tmp_path / "ours", tmp_path / "back", options=HF)
    assert not (tmp_path / "back").exists()


def test_memory_that_the_system_can_take_back_counts_as_free(tmp_path, monkeypatch):
    """And a control group's limit counts, which the number of free pages does not know."""
    folder = save("llama2", tmp_path / "theirs", tokens=False)
    monkeypatch.setattr(comparing, "available_bytes", lambda: 1000)
    told = convert(folder, tmp_path / "ours", options=NATIVE)["check"]
    assert told["compared"] is False and told["why"].endswith("1000 bytes are free")
    monkeypatch.setattr(comparing, "available_bytes", lambda: None)
    assert convert(folder, tmp_path / "again", options=NATIVE)["check"]["compared"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("zamba2", "share an attention block, each with adapters"),
        ("zamba", "Mamba-1.*share one attention block"),
        ("mamba", "Mamba-1, where each channel has decays of its own"),
        ("jamba", "Mamba-1"),
        ("falcon_mamba", "Mamba-1"),
        ("falcon_h1", "side by side"),
        ("rwkv", "$"),
    ],
)
def test_models_that_only_resemble_ours_are_refused_with_the_part_that_we_lack(kind, reason):
    config_json = transformers.AutoConfig.for_model(kind).to_dict()
    with pytest.raises(UsageError, match=f"(?m)found: model_type '{kind}'.*{reason}"):
        from_hf(config_json, where="config.json")
