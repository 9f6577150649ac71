"""Megatron's checkpoints: every folder of the oracle, there and back, older versions, and files that are refused."""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from mdata import DamageError, UsageError
from tests.helpers.examples import examples
from tests.helpers.notes import Counted
from tests.helpers.ranks import run_ranks
from tests.trainer.convert.coverage import covers_exactly
from tests.trainer.convert.test_links import Held
from tests.trainer.engines import layouts, microbatches, save_engine, small_config
from trainer.checkpoint.format import RunState
from trainer.config.parse import dump_config
from trainer.config.sections import MoESection
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.distcp import ChunkSource
from trainer.convert.links import Linked
from trainer.convert.megatron_args import from_arguments, to_arguments
from trainer.convert.megatron_names import StateDictLayout, megatron_links
from trainer.convert.model_folder import ModelFolder
from trainer.convert.model_keys import effective, model_config, refuse_differences
from trainer.convert.mp_rank import FILE, write_mp_rank
from trainer.convert.torch_dist_write import write_torch_dist
from trainer.models.family import family_named
from trainer.models.gpt import FAMILY as GPT
from trainer.models.gpt.shape import gpt_shape

FOLDERS = [
    *(f"{kind}_tp{tp}pp{pp}_optim" for kind in ("gpt2", "llama") for tp in (1, 2) for pp in (1, 2)),
    *(f"{kind}_{form}" for kind in ("gpt2", "llama") for form in ("tp1pp1_model", "tp2pp2_model")),
    *(f"{kind}_dp2_distopt_{form}_reshardable" for kind in ("gpt2", "llama") for form in ("dp", "fully")),
    "gpt2_classic_tp2pp1",
    "gpt2_classic_tp2pp2",
    "llama_classic_tp2pp1",
]
SETTINGS = {"gpt2": ("model.activation=gelu_erf",), "llama": ("model.norm_epsilon=1e-6",)}
load_torch = partial(torch.load, weights_only=False)
STATES = {"weight": "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def everything(source, prefix=""):
    """All tensors of a source in memory."""
    return {
        name: source.read(name, (tuple(0 for _ in info.shape), info.shape))
        for name, info in source.tensors.items()
        if name.startswith(prefix)
    }


def opened(folder):
    return open_model(folder, settings=SETTINGS[folder.name.split("_")[0]])


def reference(folder, shape):
    """The tensors of the run on one process, in our names."""
    found = load_file(folder.parent / f"{folder.name.split('_')[0]}_reference.safetensors")
    out = {}
    for ours, theirs in STATES.items():
        held = Held({name.split("/", 1)[1]: t for name, t in found.items() if name.startswith(f"{theirs}/")})
        shard = StateDictLayout(family=GPT, layers=range(shape.num_layers), padded_rows=shape.vocab_size)
        out |= everything(Linked(held, megatron_links(shape, shard, state=f"{ours}/")))
    return out


@pytest.mark.parametrize("name", FOLDERS)
def test_every_folder_of_the_oracle_has_the_tensors_of_the_reference(name, oracles):
    folder = oracles / "oracle" / "model" / "checkpoints" / name
    model = opened(folder)
    inventory = json.loads((folder.parent / "inventory.json").read_text())
    # What the layouts differ by is arithmetic of the runs that wrote them, and the inventory states it.
    allowed = inventory.get(name, {}).get("max_difference_from_one_process", {})
    expected, found = reference(folder, model.shape), everything(model.source)
    assert model.states == (("weight",) if name.endswith("_model") or "classic" in name else tuple(STATES))
    for state in model.states:
        difference = max(
            (found[key] - value).abs().max().item() for key, value in expected.items() if key.startswith(f"{state}/")
        )
        # Of these two folders the inventory has no moments, or no entry: the same layout has the same numbers.
        limit = allowed.get(STATES[state], 1e-8 if state != "weight" else 4e-5 if "classic" in name else 0)
        assert difference <= limit, state
    assert (model.run.step, model.run.optimizer_steps) == (3, 3)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_logits_are_those_of_the_reference(kind, oracles):
    from trainer.convert.compare import logits_of

    folder = oracles / "oracle" / "model" / "checkpoints" / f"{kind}_tp1pp1_optim"
    found = load_file(folder.parent / f"{kind}_reference.safetensors")
    ours = logits_of(opened(folder), found["tokens"])
    assert (ours - found["logits"]).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("llama_tp1pp1_optim", "adam"),
        ("gpt2_tp1pp1_optim", "adam"),
        ("llama_dp2_distopt_fully_reshardable", "distributed"),
        ("gpt2_dp2_distopt_fully_reshardable", "distributed"),
    ],
)
def test_ours_written_back_has_the_keys_and_values_of_theirs(name, form, oracles, tmp_path):
    folder = oracles / "oracle" / "model" / "checkpoints" / name
    convert(folder, tmp_path / "ours", options=ConvertOptions(to="mtrain", settings=SETTINGS[name.split("_")[0]]))
    convert(tmp_path / "ours", tmp_path / "theirs", options=ConvertOptions(to="torch_dist", optimizer_form=form))
    before, after = (ChunkSource(path / "iter_0000003") for path in (folder, tmp_path / "theirs"))
    assert before.tensors.keys() == after.tensors.keys()
    for key, info in before.tensors.items():
        box = (tuple(0 for _ in info.shape), info.shape)
        assert torch.equal(before.read(key, box), after.read(key, box)), key
    ours_only = {key for key in after.objects if "core_attention" not in key} - set(before.objects)
    assert not ours_only
    common = [load_torch(path / "iter_0000003" / "common.pt") for path in (folder, tmp_path / "theirs")]
    assert common[0]["optimizer"].keys() == common[1]["optimizer"].keys()
    assert common[0].keys() == common[1].keys()
    assert common[0]["opt_param_scheduler"].keys() == common[1]["opt_param_scheduler"].keys()
    back = open_model(tmp_path / "theirs")
    assert effective(back.config) == effective(open_model(tmp_path / "ours").config)
    assert back.run.optimizer_steps == 3


def test_schedules_in_steps_of_a_table_are_written_in_samples(oracles, tmp_path):
    model = opened(oracles / "oracle" / "model" / "checkpoints" / "llama_tp1pp1_model")
    train = replace(model.config.train, steps=20, global_batch=8, batch_schedule="0:2 32:8")
    train = replace(train, sequence_length=1)  # 16 steps of 2 samples, then 8
    optimizer = {"schedule": "cosine", "warmup_steps": 4, "decay_steps": 18, "weight_decay_schedule": "linear"}
    config = replace(model.config, train=train, optimizer=replace(model.config.optimizer, **optimizer))
    model = replace(model, config=config)
    write_torch_dist(
        tmp_path, model, states=("weight",), dtype=torch.float32, form="adam", report=lambda num_bytes: None
    )
    written = load_torch(next(tmp_path.glob("iter_*")) / "common.pt")["opt_param_scheduler"]
    names = ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
    assert [written[name] for name in names] == [4 * 2, 16 * 2 + 2 * 8, 16 * 2 + 4 * 8]


def test_a_model_in_bf16_has_fp32_main_weights_beside_it(oracles, tmp_path):
    """They are what is compared; bytes told beforehand lack 64 rows of padding of two matrices."""
    folder = oracles / "oracle" / "model" / "checkpoints" / "llama_tp1pp1_optim"
    convert(folder, tmp_path / "ours", options=ConvertOptions(to="mtrain", settings=SETTINGS["llama"]))
    options, heard = ConvertOptions(to="torch_dist", dtype="bf16"), Counted()
    result = convert(tmp_path / "ours", tmp_path / "theirs", options=options, progress=heard)
    assert result["check"]["largest_difference"] == 0
    assert heard.done - heard.total == 64 * 16 * 2 * (2 + 3 * 4)
    found = everything(ChunkSource(tmp_path / "theirs" / "iter_0000003"))
    prefix = "optimizer.state.param."
    names = [name.removeprefix(prefix) for name in found if name.startswith(prefix)]
    assert len(names) > 5 and found[prefix + names[0]].dtype == torch.float32
    assert all(torch.equal(found[name], found[prefix + name].to(torch.bfloat16)) for name in names)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_mp_rank_folders_there_and_back(kind, tp, pp, oracles, tmp_path):
    folder = oracles / "oracle" / "model" / "checkpoints" / f"{kind}_tp1pp1_model"
    convert(folder, tmp_path / "ours", options=ConvertOptions(to="mtrain", settings=SETTINGS[kind], check=False))
    options = ConvertOptions(to="mp_rank", tp=tp, pp=pp)
    assert convert(tmp_path / "ours", tmp_path / "theirs", options=options)["check"]["largest_difference"] == 0
    assert len(list(tmp_path.glob(f"theirs/iter_0000003/mp_rank_*/{FILE}"))) == tp * pp
    before, after = (everything(open_model(tmp_path / name).source) for name in ("ours", "theirs"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def relabeled(model, state):
    """A model whose weights are the moments of another."""
    whole = everything(model.source, f"{state}/")
    whole |= everything(model.source, "buffer/")
    return replace(model, source=Held({name.replace(f"{state}/", "weight/", 1): x for name, x in whole.items()}))


def classic(folder, target, *, tp, pp, half=False):
    """A classic checkpoint with an Adam, of the tensors of a torch_dist folder: files of weights and of moments, joined
    as Megatron numbers them."""
    model = opened(folder)
    for state in STATES:
        dtype = torch.bfloat16 if half and state == "weight" else torch.float32
        write_mp_rank(
            target.with_name(state), relabeled(model, state), dtype=dtype, tp=tp, pp=pp, report=lambda n: None
        )
    write_mp_rank(target, model, dtype=torch.bfloat16 if half else torch.float32, tp=tp, pp=pp, report=lambda n: None)
    main = relabeled(model, "weight")
    write_mp_rank(target.with_name("main"), main, dtype=torch.float32, tp=tp, pp=pp, report=lambda n: None)
    for path in target.glob("iter_*/mp_rank_*/*.pt"):
        part = path.relative_to(target)
        held = {
            state: load_torch(target.with_name(state) / part)["model"] for state in ("main", "exp_avg", "exp_avg_sq")
        }
        whole = load_torch(path)
        names = [name for name, tensor in whole["model"].items() if tensor is not None]
        inner, ordered = numbered({name: whole["model"][name] for name in names}, held)
        mains = [[held["main"][name] for name in group] for group in ordered]
        whole["optimizer"] = {"optimizer": inner, "fp32_from_fp16_params": mains} if half else inner
        replaced(whole, path)
    return target


def numbered(model, held):
    """(the state of an Adam of these parameters, their names by group)."""
    ordered = [[name for name, tensor in model.items() if (tensor.dim() > 1) == matrix] for matrix in (True, False)]
    numbers = {name: i for i, name in enumerate(itertools.chain(*ordered))}
    state = {
        i: {"step": torch.tensor(3.0), **{kind: held[kind][name] for kind in ("exp_avg", "exp_avg_sq")}}
        for name, i in numbers.items()
    }
    groups = [
        {"params": [numbers[name] for name in group], "wd_mult": mult, "weight_decay": 0.1 * mult}
        for mult, group in zip((1.0, 0.0), ordered, strict=True)
    ]
    return {"state": state, "param_groups": groups}, ordered


def replaced(state, path):
    """A new file: the old one is mapped into memory."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_moments_of_classic_folders_are_read(kind, tp, pp, half, oracles, tmp_path):
    folder = oracles / "oracle" / "model" / "checkpoints" / f"{kind}_tp1pp1_optim"
    model = open_model(classic(folder, tmp_path / "theirs", tp=tp, pp=pp, half=half), settings=SETTINGS[kind])
    assert model.states == tuple(STATES) and (model.run.step, model.run.optimizer_steps) == (3, 3)
    expected, found = everything(opened(folder).source), everything(model.source)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def without_moments(state):
    state["optimizer"]["state"].clear()


def another_group(state):
    first = state["optimizer"]["param_groups"][0]["params"]
    state["optimizer"]["param_groups"].append({"params": [first.pop()], "wd_mult": 1.0})


def another_shape(state):
    entry = state["optimizer"]["state"][0]
    entry["exp_avg"] = entry["exp_avg"].T.contiguous()


def several(state):
    state["optimizer"] = [state["optimizer"]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without_moments, "a distributed optimizer keeps it elsewhere"),
        (another_group, "a group has"),
        (another_shape, "exp_avg of parameter 0 has not the shape of"),
        (several, "it is not that of one Adam"),
        (lambda state: state.pop("optimizer"), "some files have none"),
    ],
)
def test_moments_that_have_no_names_are_left_out_and_it_is_said(change, told, oracles, tmp_path):
    folder = oracles / "oracle" / "model" / "checkpoints" / "gpt2_tp1pp1_optim"
    target = classic(folder, tmp_path / "theirs", tp=2, pp=1)
    (path, _) = sorted(target.glob("iter_*/mp_rank_*/*.pt"))
    state = load_torch(path)
    change(state)
    replaced(state, path)
    model = open_model(target, settings=SETTINGS["gpt2"])
    assert model.states == ("weight",)
    assert f"the optimizer's state is left out: {told}" in model.notes[-1]


LATENT = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 2, "qk_rope_head_dim": 4, "v_head_dim": 3}
LATENTS = [{"mla": LATENT}, {"mla": {**LATENT, "q_lora_rank": 0}}]
SHAPES = st.builds(
    lambda layers, groups, each, channels, ffn, extra, form, latent: gpt_shape(
        model_config(
            {
                "num_layers": layers,
                "hidden_size": 8,
                "num_heads": groups * each,
                "num_kv_heads": groups,
                "head_dim": channels,
                "ffn_hidden_size": 2 * ffn,
                "vocab_size": 10 + extra,
                "position": "learned" if form & 1 else "rope",
                "norm": "layernorm" if form & 2 else "rmsnorm",
                "activation": "gelu" if form & 4 else "swiglu",
                "bias": bool(form & 8),
                "qk_norm": bool(form & 16),
                "tie_embeddings": bool(form & 32),
                **latent,
            },
            where="",
            context=6,
        ),
        10 + extra,
    ),
    st.integers(2, 4),
    st.sampled_from([2, 4]),
    st.integers(1, 3),
    st.sampled_from([2, 4]),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 63),
    st.sampled_from([{}, *LATENTS, {"mtp": {"num_layers": 2}}]),
)


def _numbered(shape, state="weight/"):
    at, out = 1, {}
    for name, size in GPT.logical_shapes(shape).items():
        count = torch.Size(size).numel()
        out[state + name] = torch.arange(at, at + count).view(size)
        at += count
    return out


def _shards(shape, tp, cuts, **more):
    for index, (low, high) in enumerate(itertools.pairwise(cuts)):
        for rank in range(tp):
            yield StateDictLayout(
                family=GPT,
                layers=range(low, high),
                padded_rows=16,
                tp_rank=rank,
                tp_size=tp,
                has_embedding=index == 0,
                has_head=index == len(cuts) - 2,
                tied_copy=0 < index == len(cuts) - 2,
                prefix=f"{rank}/{index}/",
                **more,
            )


@examples(40)
@given(SHAPES, st.sampled_from([1, 2]), st.sampled_from([0, 1.0, 2.0, 3.0]), st.data())
def test_shards_of_any_layout_there_and_back(shape, tp, version, data):
    grouped = shape.num_heads != shape.num_kv_heads or shape.mla is not None  # of which there are no older versions
    version = 3.0 if grouped else version
    cuts = sorted({0, shape.num_layers, *data.draw(st.lists(st.integers(1, shape.num_layers - 1), max_size=2))})
    shards = list(_shards(shape, tp, cuts, version=version, fused=data.draw(st.booleans())))
    ours = _numbered(shape)
    there = Linked(Held(ours), [one.flipped() for shard in shards for one in megatron_links(shape, shard)])
    links = [one for shard in shards for one in megatron_links(shape, shard, copies=False)]
    assert covers_exactly(links)
    back = everything(Linked(Held(everything(there)), links))
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


@examples(20)
@given(SHAPES)
def test_stacked_layers_there_and_back(shape):
    shard = StateDictLayout(family=GPT, layers=range(shape.num_layers), padded_rows=16, stacked=True, fused=True)
    ours = _numbered(shape)
    there = Linked(Held(ours), [one.flipped() for one in megatron_links(shape, shard)])
    assert there.tensors["decoder.layers.mlp.linear_fc2.weight"].shape[0] == shape.num_layers
    back = everything(Linked(Held(everything(there)), megatron_links(shape, shard)))
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_rows_of_versions_0_and_1_are_those_of_the_old_reshaping():
    """As Megatron-LM's own loader brought them to version 2: 0 from (3, head, d), 1 from (head, d, 3)."""
    shape = gpt_shape(
        model_config({"num_layers": 1, "hidden_size": 8, "num_heads": 4, "vocab_size": 16}, where="", context=4), 16
    )
    now = torch.arange(24 * 8).view(4, 3, 2, 8)  # (head, q|k|v, channel)
    old = {0: now.transpose(0, 1), 1: now.transpose(1, 2), 2: now}
    found = []
    for version, rows in old.items():
        shard = StateDictLayout(family=GPT, layers=range(1), padded_rows=16, version=float(version))
        name = "decoder.layers.0.self_attention.linear_qkv.weight"
        links = [one for one in megatron_links(shape, shard) if one.theirs.tensor == name]
        found.append(everything(Linked(Held({name: rows.reshape(24, 8)}), links)))
    for name in found[2]:
        assert torch.equal(found[0][name], found[2][name])
        assert torch.equal(found[1][name], found[2][name])


@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0, 3.0])
def test_files_of_every_version_are_read(version, oracles, tmp_path):
    """A file without a version is of version 0."""
    folder = oracles / "oracle" / "model" / "checkpoints" / "gpt2_classic_tp2pp1"
    shutil.copytree(folder, tmp_path / folder.name)
    for path in (tmp_path / folder.name).glob(f"iter_0000003/mp_rank_*/{FILE}"):
        path.parent.chmod(0o755)
        state = load_torch(path)
        state["checkpoint_version"] = version
        heads = state["args"].num_attention_heads // 2
        for name, tensor in state["model"].items():
            if "linear_qkv" in name and tensor is not None:
                rows = tensor.clone().view(heads, 3, -1, *tensor.shape[1:])
                rows = rows.transpose(0, 1) if not version else rows.transpose(1, 2) if version == 1 else rows
                state["model"][name] = rows.reshape(tensor.shape)
        if version is None:
            del state["checkpoint_version"]
        replaced(state, path)
    before, after = (everything(opened(one).source) for one in (folder, tmp_path / folder.name))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def _renamed(state, tied):
    """Today's names as those of Megatron-LM before its core, in nested dictionaries."""
    inside, outside = {}, {}
    for name, tensor in state.items():
        if tensor is None:
            continue
        for new, old in (
            ("decoder.", ""),
            ("linear_qkv", "query_key_value"),
            ("linear_proj", "dense"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
            ("linear_fc1", "dense_h_to_4h"),
            ("linear_fc2", "dense_4h_to_h"),
        ):
            name = name.replace(new, old)
        (inside if name.startswith(("layers", "final")) else outside)[name] = tensor
    embedding = {name.split(".")[1]: {"weight": t} for name, t in outside.items() if name.startswith("embedding")}
    model = {"language_model": {"embedding": embedding, "encoder": inside}}
    if "output_layer.weight" in outside and tied:
        model["word_embeddings_for_head"] = {"weight": outside["output_layer.weight"]}
    elif "output_layer.weight" in outside:
        model["language_model"]["output_layer"] = {"weight": outside["output_layer.weight"]}
    return {name: value for name, value in model.items() if value}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["gpt2_classic_tp2pp2", "llama_classic_tp2pp1"])
def test_names_before_the_core_and_interleaved_chunks(name, zipped, oracles, tmp_path):
    folder = oracles / "oracle" / "model" / "checkpoints" / name
    shutil.copytree(folder, tmp_path / name)
    for path in (tmp_path / name).glob(f"iter_0000003/mp_rank_*/{FILE}"):
        path.parent.chmod(0o755)
        state = load_torch(path)
        state["model"] = _renamed(
            {key: t if t is None else t.clone() for key, t in state["model"].items()}, "gpt2" in name
        )
        if not state["model"]["language_model"]["embedding"]:
            del state["model"]["language_model"]["embedding"]
        path.unlink()
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
    before, after = everything(opened(folder).source), everything(opened(tmp_path / name).source)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


class _Runs:
    def __reduce__(self):
        return (eval, ("1 + 1",))


def _poisoned_common(folder):
    state = load_torch(folder / "common.pt")
    (folder / "common.pt").unlink()
    torch.save({**state, "x": _Runs()}, folder / "common.pt")


def _poisoned_metadata(folder):
    (folder / ".metadata").unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(_Runs()))


def _missing_file(folder):
    next(folder.glob("__0_1.distcp")).unlink()


def _cut_file(folder):
    path = folder / "__0_1.distcp"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-100])


def _flipped(folder):
    path = folder / "__0_1.distcp"
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size))


def _other_sizes(folder):
    state = load_torch(folder / "common.pt")
    state["args"].ffn_hidden_size = 48
    (folder / "common.pt").unlink()
    torch.save(state, folder / "common.pt")


def _experts(folder):
    state = load_torch(folder / "common.pt")
    state["args"].num_experts = 8
    (folder / "common.pt").unlink()
    torch.save(state, folder / "common.pt")


def _no_args(folder):
    (folder / "common.pt").unlink()
    torch.save({"iteration": 3}, folder / "common.pt")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_poisoned_common, "eval"),
        (_poisoned_metadata, "eval"),
        (_missing_file, "__0_1.distcp is not whole"),
        (_cut_file, "__0_1.distcp is not whole"),
        (_flipped, "is damaged"),
        (_other_sizes, "linear_fc1.weight [2, 80, 16] instead of [2, 96, 16]"),
        (_experts, "missing: decoder.layers.mlp.router.weight"),
        (_no_args, "has no args"),
        (lambda folder: (folder.parent / "latest_checkpointed_iteration.txt").write_text("../x"), "'../x'"),
    ],
)
def test_what_is_not_whole_or_could_run_code_is_refused(damage, named, oracles, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(oracles / "oracle" / "model" / "checkpoints" / "llama_tp1pp1_optim", folder)
    for path in (folder, folder / "iter_0000003", folder / "latest_checkpointed_iteration.txt"):
        path.chmod(0o755)
    damage(folder / "iter_0000003")
    with pytest.raises((UsageError, DamageError)) as error:
        convert(folder, tmp_path / "ours", options=ConvertOptions(to="mtrain"))
    assert named in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_a_missing_rank_is_named(oracles, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(oracles / "oracle" / "model" / "checkpoints" / "llama_classic_tp2pp1", folder)
    for path in [folder / "iter_0000003", *folder.glob("iter_0000003/*")]:
        path.chmod(0o755)
    shutil.rmtree(folder / "iter_0000003" / "mp_rank_00")
    with pytest.raises(DamageError, match="no mp_rank_00"):
        open_model(folder)


def _changed_rank(oracles, tmp_path, change):
    """A checkpoint of two ranks; the second one's file is changed."""
    folder = tmp_path / "llama"
    shutil.copytree(oracles / "oracle" / "model" / "checkpoints" / "llama_classic_tp2pp1", folder)
    path = folder / "iter_0000003" / "mp_rank_01" / FILE
    path.parent.chmod(0o755)
    state = load_torch(path)
    change(state)
    path.unlink()
    torch.save(state, path)
    return folder


def test_the_arguments_of_all_ranks_describe_one_model(oracles, tmp_path):
    def other_base(state):
        state["args"].rotary_base, state["args"].rank = 77, 1

    with pytest.raises(DamageError, match=r"mp_rank_01(.|\n)*another model(.|\n)*model.rope_theta = 77"):
        open_model(_changed_rank(oracles, tmp_path, other_base))


def test_what_does_not_describe_the_model_may_differ_between_ranks(oracles, tmp_path):
    def other_rank(state):
        state["args"].rank, state["args"].local_rank = 1, 1

    assert open_model(_changed_rank(oracles, tmp_path, other_rank)).format == "mp_rank"


def test_an_expanded_tensor_is_named(oracles, tmp_path):
    def expand(state):
        name = "embedding.word_embeddings.weight"
        state["model"][name] = state["model"][name][:1].clone().expand(state["model"][name].shape)

    with pytest.raises(UsageError, match=r"model.embedding.word_embeddings.weight that cannot be(.|\n)*stride 0"):
        open_model(_changed_rank(oracles, tmp_path, expand))


ARGUMENTS = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 4),
        "hidden_size": st.sampled_from([16, 32]),
        "num_heads": st.sampled_from([2, 4]),
        "num_kv_heads": st.sampled_from([0, 1, 2]),
        "head_dim": st.sampled_from([0, 8]),
        "vocab_size": st.just(50),
        "position": st.sampled_from(["rope", "learned", "none", "alibi"]),
        "rope_theta": st.sampled_from([1e4, 5e5, 12345.5]),
        "rope_fraction": st.sampled_from([1.0, 0.5]),
        "rope_interleaved": st.booleans(),
        "rope_interval": st.sampled_from([0, 2]),
        "rope_scaling": st.sampled_from(["none", "linear", "llama3", "yarn"]),
        "rope_factor": st.sampled_from([1.0, 2.0, 8.0, 2.5]),
        "rope_original_length": st.sampled_from([8192, 16]),
        "norm": st.sampled_from(["rmsnorm", "layernorm"]),
        "norm_epsilon": st.sampled_from([1e-5, 1e-6]),
        "norm_zero_centered": st.booleans(),
        "activation": st.sampled_from(["swiglu", "geglu", "gelu", "gelu_erf", "relu", "squared_relu"]),
        "activation_clamp": st.sampled_from([0.0, 7.0]),
        "bias": st.sampled_from([True, False, "qkv"]),
        "qk_norm": st.booleans(),
        "window": st.sampled_from([0, 4]),
        "window_interval": st.sampled_from([0, 2]),
        "attention_softcap": st.sampled_from([0.0, 30.0]),
        "attention_sinks": st.sampled_from(["none", "zero", "learned"]),
        "tie_embeddings": st.booleans(),
    }
)


@examples(100)
@given(ARGUMENTS)
def test_arguments_express_the_model_or_it_is_refused_by_name(keys):
    ours = model_config(keys, where="", context=32)
    try:
        written = to_arguments(ours, 50, padded_rows=128)
    except UsageError as error:
        assert "model." in str(error)
        return
    back, notes = from_arguments(vars(argparse.Namespace(**written)), {}, where="", settings={})
    assert effective(ours) == effective(back)
    assert not notes


@pytest.mark.parametrize(
    "changes",
    [
        {"block_norm": "output"},
        {"norm": "layernorm", "norm_bias": False},
        {"qk_norm": "all_heads"},
        {"qk_norm": "own_head"},
        {"embedding_multiplier": 12.0},
        {"residual_multiplier": 0.22},
        {"logit_scale": 0.0625},
        {"rope_window_theta": 5e5, "window": 4},
        {"rope_scaling": "longrope", "rope_original_length": 16}
        | {"rope_short_factors": [1.0] * 4, "rope_long_factors": [2.0] * 4, "rope_factor": 2.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_option_that_megatron_lacks_is_refused_by_name(changes):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 50}
    ours = model_config(sizes | changes, where="", context=32)
    name = next(name for name in changes if name not in ("norm", "window"))
    with pytest.raises(UsageError, match=f"Megatron-LM cannot express this model(.|\n)*model.{name} ="):
        to_arguments(ours, 50, padded_rows=128)


def test_a_key_that_another_form_does_not_use_is_named_in_words():
    """Clamped gates have an offset; a model that is written without their clamp has neither."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 50}
    ours, back = (
        model_config(sizes | keys, where="", context=32)
        for keys in ({"activation": "swiglu", "activation_offset": 1.0}, {"activation": "gelu"})
    )
    with pytest.raises(UsageError, match=r"activation_offset = 1.0(.|\n)* expected: (.|\n)*no activation_offset"):
        refuse_differences(ours, back, form="a form")
    with pytest.raises(UsageError, match=r"found: (.|\n)*no model.activation_offset"):
        refuse_differences(back, ours, form="a form")


@pytest.mark.parametrize("latent", LATENTS)
def test_arguments_of_latent_attention(latent):
    """Yarn begins at 4,096 tokens there, and pairs are neighbours: other models are refused by name."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 50, "rope_interleaved": True}
    yarn = {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_original_length": 4096}
    yarn |= {"mla": latent["mla"] | {"mscale": 0.5, "mscale_all_dim": 0.7}}
    for keys in (sizes | latent, sizes | latent | yarn):
        ours = model_config(keys, where="", context=32)
        written = to_arguments(ours, 50, padded_rows=128)
        back, notes = from_arguments(vars(argparse.Namespace(**written)), {}, where="", settings={})
        assert effective(ours) == effective(back) and back.model.mla == ours.model.mla and not notes
    for other in ({"rope_original_length": 64}, {"rope_interleaved": False}):
        ours = model_config(sizes | yarn | other, where="", context=32)
        with pytest.raises(UsageError, match=f"cannot express this model(.|\n)*model.{next(iter(other))} ="):
            to_arguments(ours, 50, padded_rows=128)


def test_the_yarn_of_a_checkpoint_is_that_of_the_command_line():
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}
    yarn = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_beta_fast": None, "mscale": 1.0}
    stored = sizes | yarn | {"yarn_original_max_position_embeddings": 16, "yarn_correction_range_round_to_int": None}
    model = from_arguments(stored, {}, where="", settings={})[0].model
    keys = (model.rope_scaling, model.rope_factor, model.rope_original_length, model.rope_beta_fast)
    assert keys == ("yarn", 4.0, 16, 32.0)
    with pytest.raises(UsageError, match="yarn_correction_range_round_to_int = False is not supported"):
        from_arguments(stored | {"yarn_correction_range_round_to_int": False}, {}, where="", settings={})


def test_a_tensor_that_is_too_small_for_a_vocabulary_is_refused(oracles):
    folder = oracles / "oracle" / "model" / "checkpoints" / "llama_tp1pp1_model"
    with pytest.raises(UsageError, match="the embedding of"):
        open_model(folder, settings=("model.vocab_size=100",))
    small = open_model(folder, settings=("model.vocab_size=61",))
    assert small.source.tensors["weight/embedding.weight"].shape == (61, 16)
    with pytest.raises(UsageError, match="does not set a key of the model"):
        open_model(folder, settings=("train.steps=3",))


@pytest.mark.parametrize(("form", "tied"), [("mp_rank", True), ("mp_rank", False), ("torch_dist", False)])
def test_latents_and_further_layers_are_written_and_read(form, tied, tmp_path):
    """Extra states are those of the layers that the model has; the last stage has the embedding too."""
    given = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 50, "rope_interleaved": True}
    given |= LATENTS[0] | {"mtp": {"num_layers": 2, "loss_factor": 0.3}, "tie_embeddings": tied}
    config = model_config(given, where="", context=32)
    held = {name: x.float() for name, x in _numbered(gpt_shape(config, 50)).items()}
    run = RunState(3, 0, "", {}, 3, "")
    model = ModelFolder(path=tmp_path, format="mtrain", config=config, source=Held(held), run=run)
    options = {"dtype": torch.float32, "report": lambda _: None}
    if form == "mp_rank":
        write_mp_rank(tmp_path, model, tp=2, pp=2, **options)
        names = load_torch(next(tmp_path.glob(f"iter_*/mp_rank_00_001/{FILE}")))["model"]
        assert "embedding.word_embeddings.weight" in names and names["mtp.layers.1.eh_proj.weight"].shape == (16, 64)
        states = {name.split("layers.0.")[-1] for name in names if name.endswith("_extra_state")}
        linear = {"q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj"}
        wanted = {f"self_attention.linear_{name}._extra_state" for name in linear}
        assert wanted == {name for name in states if name.startswith("self_attention")}
    else:
        write_torch_dist(tmp_path, model, states=("weight",), form="adam", **options)
    found = open_model(tmp_path)
    back = everything(found.source)
    assert back.keys() == held.keys() and all(torch.equal(back[name], x) for name, x in held.items())
    assert effective(found.config) == effective(config) and found.config.model.mtp == config.model.mtp


@pytest.mark.parametrize("form", ["mp_rank", "torch_dist"])
@pytest.mark.parametrize("pattern", ["M-*E", "MM"])
def test_mixers_are_written_and_read(form, pattern, tmp_path):
    """z, x, B, C and dt are cut each by itself for tp ranks, and are tensors of their own in torch_dist."""
    section = {"pattern": pattern, "head_dim": 8, "num_groups": 2, "state_size": 6}
    given = {"family": "mamba", "num_layers": len(pattern), "hidden_size": 32, "num_heads": 4, "vocab_size": 50}
    given |= {"mamba": section, "position": "none", "activation": "squared_relu", "tie_embeddings": False}
    given |= {"moe": {"num_experts": 4, "ffn_hidden_size": 16, "balance": "none"}} if "E" in pattern else {}
    config = model_config(given, where="", context=32)
    family = family_named("mamba")
    sizes = family.logical_shapes(family.shape(config, 50))
    held = {f"weight/{name}": torch.randn(size) for name, size in sizes.items()}
    run = RunState(3, 0, "", {}, 3, "")
    model = ModelFolder(path=tmp_path, format="mtrain", config=config, source=Held(held), run=run)
    options = {"dtype": torch.float32, "report": lambda _: None}
    if form == "mp_rank":
        write_mp_rank(tmp_path, model, tp=2, pp=2, **options)
        stored = load_torch(next(tmp_path.glob(f"iter_*/mp_rank_01_000/{FILE}")))["model"]
        parts = [held[f"weight/blocks.0.mixer.{part}.weight"].chunk(2)[1] for part in ("z", "x", "B", "C", "dt")]
        assert torch.equal(stored["decoder.layers.0.mixer.in_proj.weight"], torch.cat(parts))
        assert "decoder.final_norm.weight" in load_torch(next(tmp_path.glob(f"iter_*/mp_rank_01_001/{FILE}")))["model"]
    else:
        write_torch_dist(tmp_path, model, states=("weight",), form="adam", **options)
        source = ChunkSource(tmp_path / "iter_0000003")
        assert source.tensors["decoder.layers.0.mixer.conv1d.weight.B"].shape == (12, 1, 4)
    found = open_model(tmp_path)
    back = everything(found.source)
    assert back.keys() == held.keys() and all(torch.equal(back[name], x) for name, x in held.items())
    assert effective(found.config) == effective(config)


EXPERTS = MoESection(
    num_experts=4, top_k=2, ffn_hidden_size=16, score="sigmoid", expert_bias=True, weight_scale=2.5, groups=2,
    groups_per_token=1, shared_ffn_hidden_size=24, shared_gate=True, balance="none",
)  # fmt: skip


def _trained_experts(context, root, moe, activation):
    """A checkpoint of two steps, in which weights, moments and biases of experts have changed."""
    config = small_config("llama", dtype="fp32")
    config = replace(config, model=replace(config.model, moe=moe, activation=activation))
    engine = layouts(context, config)
    for step in range(2):
        engine.step(microbatches(engine, step), 1e-2).read()
    text = dump_config(config)
    run = RunState(step=2, consumed_samples=8, data_id="", data={}, optimizer_steps=2, config=text, versions={})
    return save_engine(engine, root / "checkpoints", run=run)


@pytest.mark.parametrize(
    ("moe", "activation", "key"),
    [
        (EXPERTS, "swiglu", "decoder.layers.mlp.experts.experts.linear_fc1.weight"),
        (
            replace(EXPERTS, layers=(0, 1)),
            "quick_geglu",
            "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        ),
    ],
    ids=["every layer", "one of two layers"],
)
def test_experts_there_and_back(moe, activation, key, tmp_path):
    (folder,) = run_ranks(_trained_experts, 1, tmp_path / "run", moe, activation)
    before = open_model(folder)
    expected = everything(before.source)
    assert {name.partition("/")[0] for name in expected} == {"weight", "exp_avg", "exp_avg_sq", "buffer"}
    for options in (
        ConvertOptions(to="torch_dist", dtype="fp32"),
        ConvertOptions(to="mp_rank", dtype="fp32", tp=2, pp=2),
    ):
        target = tmp_path / options.to
        assert convert(folder, target, options=options)["check"]["largest_difference"] < 1e-5
        model = open_model(target)
        found = everything(model.source)
        assert effective(model.config) | {"vocab_size": 0} == effective(before.config) | {"vocab_size": 0}
        kept = {name for name in expected if options.to == "torch_dist" or name.startswith(("weight/", "buffer/"))}
        assert found.keys() == kept and all(torch.equal(found[name], expected[name]) for name in kept)
        result = convert(target, tmp_path / f"{options.to} back", options=ConvertOptions(to="mtrain"))
        assert result["check"]["largest_difference"] < 1e-5
    source = ChunkSource(tmp_path / "torch_dist/iter_0000002")
    assert source.tensors[key].shape[-3:] == (4, 32, before.shape.hidden_size)
    stored = load_torch(tmp_path / "mp_rank/iter_0000002/mp_rank_00_001" / FILE)["model"]
    assert stored["decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight"].shape[1] == 8


def test_experts_of_grouped_layers_are_read(tmp_path):
    (folder,) = run_ranks(_trained_experts, 1, tmp_path / "run", EXPERTS, "swiglu")
    convert(folder, tmp_path / "classic", options=ConvertOptions(to="mp_rank", dtype="fp32", check=False))
    expected = everything(open_model(tmp_path / "classic").source)
    path = tmp_path / "classic/iter_0000002/mp_rank_00" / FILE
    state = load_torch(path)
    local = re.compile(r"experts\.local_experts\.(\d)\.(\w+)\.weight")
    state["model"] = {local.sub(r"experts.\2.weight\1", name): x for name, x in state["model"].items()}
    path.unlink()
    torch.save(state, path)
    found = everything(open_model(tmp_path / "classic").source)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_files_of_ranks_that_share_experts_are_read(tmp_path):
    """Numbers of experts begin with 0 in each file; the rest is in all of them."""
    (folder,) = run_ranks(_trained_experts, 1, tmp_path / "run", EXPERTS, "swiglu")
    convert(folder, tmp_path / "classic", options=ConvertOptions(to="mp_rank", dtype="fp32", check=False))
    expected = everything(open_model(tmp_path / "classic").source)
    iteration = tmp_path / "classic/iter_0000002"
    state = load_torch(iteration / "mp_rank_00" / FILE)
    shutil.rmtree(iteration / "mp_rank_00")
    local = re.compile(r"(.*local_experts\.)(\d)(\..*)")

    def write(place, *, etp=1):
        model = {}
        for name, x in state["model"].items():
            match = local.fullmatch(name)
            if match is None or int(match[2]) // 2 == place:
                model[name if match is None else f"{match[1]}{int(match[2]) % 2}{match[3]}"] = x
        args = argparse.Namespace(**vars(state["args"]), expert_model_parallel_size=2, expert_tensor_parallel_size=etp)
        path = iteration / f"mp_rank_00_00{place}" / FILE
        path.parent.mkdir(exist_ok=True)
        torch.save({**state, "args": args, "model": model}, path)

    write(0)
    with pytest.raises(DamageError, match="do not fit its configuration"):
        open_model(tmp_path / "classic")
    write(1)
    found = everything(open_model(tmp_path / "classic").source)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    write(0, etp=2)
    with pytest.raises(UsageError, match="experts that are cut otherwise than layers"):
        open_model(tmp_path / "classic")


@pytest.mark.parametrize("ep", [1, 2])
def test_the_moments_of_experts_in_classic_folders_are_read(ep, tmp_path):
    """Where ranks share experts, these have an optimizer of their own."""
    (folder,) = run_ranks(_trained_experts, 1, tmp_path / "run", EXPERTS, "swiglu")
    ours = open_model(folder)
    held, local = {}, re.compile(r"(.*local_experts\.)(\d)(\..*)")
    for state in STATES:
        target = tmp_path / state
        write_mp_rank(target, relabeled(ours, state), dtype=torch.float32, tp=1, pp=1, report=lambda n: None)
        held[state] = load_torch(target / "iter_0000002/mp_rank_00" / FILE)
    whole, target = held["weight"], tmp_path / "weight"
    shutil.rmtree(target / "iter_0000002/mp_rank_00")
    for place in range(ep):
        parts = {state: _of_place(files["model"], local, place, ep) for state, files in held.items()}
        trained = {name: x for name, x in parts["weight"].items() if x is not None and not name.endswith("expert_bias")}
        experts = {name: x for name, x in trained.items() if local.fullmatch(name)}
        others = {name: x for name, x in trained.items() if name not in experts}
        adams = [numbered(each, parts)[0] for each in ([trained] if ep == 1 else [others, experts])]
        args = argparse.Namespace(**vars(whole["args"]), expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
        path = target / "iter_0000002" / ("mp_rank_00" if ep == 1 else f"mp_rank_00_00{place}") / FILE
        path.parent.mkdir()
        optimizer = adams[0] if ep == 1 else adams
        torch.save({**whole, "args": args, "model": parts["weight"], "optimizer": optimizer}, path)
    found, expected = open_model(target), everything(ours.source)
    assert {*found.states} == {*STATES, "buffer"} and not found.notes
    found = everything(found.source)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _of_place(model, local, place, ep):
    """The tensors of a rank; its experts are numbered from 0 on."""
    out = {}
    for name, x in model.items():
        match, each = local.fullmatch(name), 4 // ep
        if match is None:
            out[name] = x
        elif int(match[2]) // each == place:
            out[f"{match[1]}{int(match[2]) % each}{match[3]}"] = x
    return out
