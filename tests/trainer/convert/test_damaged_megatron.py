"""Megatron's checkpoints with one wrong value or some wrong bytes: each ends with an error that names file and key."""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import shutil
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, TensorProperties

from mdata import DamageError, UsageError
from tests.helpers.examples import SOAK
from tests.trainer.convert.test_links import Held
from trainer.convert.convert import ConvertOptions, convert
from trainer.convert.hf_folder import write_hf
from trainer.convert.model_folder import ModelFolder, no_run
from trainer.convert.model_keys import model_config
from trainer.convert.mp_rank import open_mp_rank, write_mp_rank
from trainer.convert.torch_dist_write import write_torch_dist
from trainer.models.gpt import FAMILY
from trainer.models.gpt.shape import gpt_shape

load = partial(torch.load, weights_only=False)
KEYS = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "vocab_size": 20, "window": 4, "position": "rope"}
size = torch.Size


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A checkpoint of each format, with moments in the first."""
    folder = tmp_path_factory.mktemp("sound")
    config = model_config(KEYS, where="", context=4)
    shapes = FAMILY.logical_shapes(gpt_shape(config, 20))
    states = ("weight", "exp_avg", "exp_avg_sq")
    tensors = {f"{state}/{name}": torch.rand(shape) for state in states for name, shape in shapes.items()}
    model = ModelFolder(path=folder, format="mtrain", config=config, source=Held(tensors), run=no_run(config))
    write_torch_dist(
        folder / "torch_dist", model, states=states, dtype=torch.float32, form="distributed", report=lambda n: None
    )
    write_mp_rank(folder / "mp_rank", model, dtype=torch.float32, tp=1, pp=1, report=lambda n: None)
    write_mp_rank(folder / "ranks", model, dtype=torch.float32, tp=2, pp=1, report=lambda n: None)
    write_hf(folder / "hf", model, dtype=torch.float32, max_shard_bytes=1 << 30, model_type="", report=lambda n: None)
    return folder


def converted(folder, target):
    """Its error as one text; "": there was none."""
    try:
        convert(folder, target, options=ConvertOptions(to="mtrain", check=False))
    except (DamageError, UsageError) as error:
        assert len(str(error)) < 2000 and len(str(error).splitlines()) <= 4
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(target, ignore_errors=True)
    return ""


def args(**values):
    return lambda state: vars(state["args"]).update(values)


def key(name, value):
    return lambda state: state.update({name: value})


def optimizer(**values):
    return lambda state: state["optimizer"].update(values)


def inner(**values):
    return lambda state: state["optimizer"]["optimizer"].update(values)


COMMON = {
    "args a number": (key("args", 7), "at args"),
    "args a text": (key("args", "--num-layers 2"), "at args"),
    "args a list": (key("args", [1]), "at args"),
    "args of numbers": (key("args", {1: 2}), "at args"),
    "no args": (key("args", None), "has no args"),
    "empty args": (key("args", {}), "no num_layers"),
    "layers a text": (args(num_layers="2"), "num_layers"),
    "layers below 0": (args(num_layers=-1), "num_layers"),
    "layers of 100 bits": (args(num_layers=1 << 100), "num_layers"),
    "more layers": (args(num_layers=65535), "num_layers = 65535"),
    "fewer layers": (args(num_layers=1), "num_layers = 1"),
    "true layers": (args(num_layers=True), "num_layers"),
    "layers a tensor": (args(num_layers=torch.tensor(2)), "num_layers"),
    "width 0": (args(hidden_size=0), "hidden_size"),
    "width a fraction": (args(hidden_size=8.5), "hidden_size"),
    "width a list": (args(hidden_size=[8]), "hidden_size"),
    "no heads": (args(num_attention_heads=0), "num_heads"),
    "heads not a number": (args(num_attention_heads=math.nan), "num_heads"),
    "groups a text": (args(num_query_groups="x"), "num_query_groups"),
    "inner width a list": (args(ffn_hidden_size=[1]), "ffn_hidden_size"),
    "inner width large": (args(ffn_hidden_size=1 << 40), "linear_fc1.weight"),
    "channels negative": (args(kv_channels=-4), "head_dim"),
    "vocabulary large": (args(padded_vocab_size=1 << 61, mtrain_vocab_size=None), "vocab_size"),
    "vocabulary a text": (args(mtrain_vocab_size="20"), "vocab_size"),
    "positions a list": (args(position_embedding_type=["rope"]), "args.position_embedding_type"),
    "positions unknown": (args(position_embedding_type="x" * 5000), "args.position_embedding_type"),
    "norm a dictionary": (args(normalization={}), "args.normalization"),
    "norm a path": (args(normalization=argparse.Namespace()), "args.normalization"),
    "base a text": (args(rotary_base="x"), "args.rotary_base"),
    "base infinite": (args(rotary_base=math.inf), "args.rotary_base"),
    "base of 2000 bits": (args(rotary_base=1 << 2000), "args.rotary_base"),
    "percent a list": (args(rotary_percent=[1]), "args.rotary_percent"),
    "window a number": (args(window_size=5), "window-size"),
    "window of lists": (args(window_size=[[]]), "window-size"),
    "window of digits": (args(window_size="9" * 5000 + ",0"), "args.window_size"),
    "skipped a dictionary": (args(no_rope_freq={}), "no-rope-freq"),
    "gated a text": (args(swiglu="yes"), "args.swiglu"),
    "softmax a list": (args(softmax_type=[]), "args.softmax_type"),
    "sequence a text": (args(seq_length="4"), "args.seq_length"),
    "sequence of 70 bits": (args(seq_length=1 << 70), "args.seq_length"),
    "experts": (args(num_experts=[8]), "num_experts"),
    "samples not a number": (args(consumed_train_samples=math.nan), "args.consumed_train_samples"),
    "samples below 0": (args(consumed_train_samples=-1), "args.consumed_train_samples"),
    "samples of 70 bits": (args(consumed_train_samples=1 << 70), "args.consumed_train_samples"),
    "batch a text": (args(global_batch_size="8"), "args.global_batch_size"),
    "iteration a text": (key("iteration", "3"), "at iteration"),
    "iteration below 0": (key("iteration", -3), "at iteration"),
    "iteration a list": (key("iteration", []), "at iteration"),
    "version a text": (key("checkpoint_version", "abc"), "at checkpoint_version"),
    "version not a number": (key("checkpoint_version", math.nan), "at checkpoint_version"),
    "version a list": (key("checkpoint_version", [3]), "at checkpoint_version"),
    "groups of numbers": (inner(param_groups=[7]), "at optimizer.param_groups"),
    "groups a number": (inner(param_groups=7), "at optimizer.param_groups"),
    "step a text": (inner(param_groups=[{"step": "x"}]), "the optimizer's step"),
    "step not a number": (inner(param_groups=[{"step": math.nan}]), "the optimizer's step"),
    "step of two": (inner(param_groups=[{"step": torch.ones(2)}]), "the optimizer's step"),
    "step infinite": (inner(param_groups=[{"step": torch.tensor(math.inf)}]), "the optimizer's step"),
    "norms of q and k without weights": (args(qk_l2_norm=True), "qk_l2_norm = True is not supported"),
    "multipliers": (args(use_mup=True), "use_mup = True is not supported"),
    "gated attention": (args(attention_output_gate=True), "attention_output_gate = True"),
    "layers of several kinds": (args(heterogeneous_layers_config_path="x.json"), "heterogeneous_layers_config_path"),
    "optimizer a number": (key("optimizer", 7), ""),
    "optimizer's a list": (optimizer(optimizer=[7]), ""),
    "state of numbers": (inner(state={1: 2}, param_groups=None), ""),
}


@pytest.mark.parametrize("name", COMMON)
def test_wrong_settings_are_named(name, sound, tmp_path):
    change, told = COMMON[name]
    folder = shutil.copytree(sound / "torch_dist", tmp_path / "c")
    (path,) = folder.glob("iter_*/common.pt")
    state = load(path)
    change(state)
    torch.save(state, path)
    message = converted(folder, tmp_path / "out")
    assert told in message and bool(message) == bool(told)


NAME = "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"  # what is read where it is there


def entry(**values):
    def change(metadata):
        vars(metadata.state_dict_metadata[NAME]).update(values)

    return change


def chunk(offsets, sizes):
    return ChunkStorageMetadata(size(offsets), size(sizes))


def place(**values):
    def change(metadata):
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == NAME)
        vars(info).update(values)

    return change


def field(name, value):
    return lambda metadata: vars(metadata).update({name: value})


def tensor_entry(name, value):
    return lambda metadata: metadata.state_dict_metadata.update({name: value})


def twice(metadata):
    chunks = metadata.state_dict_metadata[NAME].chunks
    chunks.append(chunks[0])


def renamed(metadata):
    metadata.state_dict_metadata[NAME + "x"] = metadata.state_dict_metadata.pop(NAME)


METADATA = {
    "tensors a number": (field("state_dict_metadata", 7), "at state_dict_metadata"),
    "no tensors": (field("state_dict_metadata", {}), "embedding"),
    "names that are numbers": (tensor_entry(7, BytesStorageMetadata()), "state_dict_metadata[7]"),
    "no places": (field("storage_data", {}), "does not record where"),
    "places a list": (field("storage_data", []), "at storage_data"),
    "places of numbers": (field("storage_data", {1: 2}), "at storage_data"),
    "an entry that is a number": (tensor_entry(NAME, 7), f"state_dict_metadata['{NAME}']"),
    "an entry of bytes": (tensor_entry(NAME, BytesStorageMetadata()), NAME),
    "no chunks": (entry(chunks=[]), ".chunks"),
    "chunks a number": (entry(chunks=3), ".chunks"),
    "chunks of numbers": (entry(chunks=[3]), ".chunks"),
    "a chunk twice": (twice, "overlap"),
    "a chunk too long": (entry(chunks=[chunk((0, 0, 0), (2, 8, 99))]), ".chunks"),
    "a chunk outside": (entry(chunks=[chunk((5, 0, 0), (2, 8, 32))]), ".chunks"),
    "a chunk of fewer dims": (entry(chunks=[chunk((0,), (2,))]), ".chunks"),
    "an empty chunk": (entry(chunks=[chunk((0, 0, 0), (0, 8, 32))]), ".chunks"),
    "a negative chunk": (entry(chunks=[chunk((0, 0, 0), (-2, -8, 32))]), ".chunks"),
    "a size of 61 bits": (entry(size=size((1 << 61, 1 << 61)), chunks=[chunk((0, 0), (1 << 61, 1 << 61))]), NAME),
    "a size a text": (entry(size="x"), ".size"),
    "a size of 100 dims": (entry(size=size((1,) * 100)), ".size"),
    "another dtype": (entry(properties=TensorProperties(torch.int8)), NAME),
    "properties a text": (entry(properties="x"), ".properties"),
    "another name": (renamed, NAME),
    "a file outside": (place(relative_path="../x.distcp"), "relative_path"),
    "an absolute file": (place(relative_path="/etc/passwd"), "relative_path"),
    "a file a number": (place(relative_path=3), "relative_path"),
    "a file that is not there": (place(relative_path="x.distcp"), "x.distcp is not whole"),
    "an offset below 0": (place(offset=-1), ".offset"),
    "an offset behind": (place(offset=1 << 40), "is not whole"),
    "an offset of 70 bits": (place(offset=1 << 70), ".offset"),
    "an offset beside": (place(offset=0), "overlap"),
    "a length of 0": (place(length=0), "storage_data of"),
    "a length of 61 bits": (place(length=1 << 61), "overlap"),
    "a length too short": (place(length=5000), "is damaged"),
    "compressed": (place(transform_descriptors=["zstd"]), "is compressed"),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_wrong_metadata_is_named(name, sound, tmp_path):
    change, told = METADATA[name]
    folder = shutil.copytree(sound / "torch_dist", tmp_path / "c")
    (path,) = folder.glob("iter_*/.metadata")
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    message = converted(folder, tmp_path / "out")
    assert message and told in message


def model(**values):
    return lambda state: state["model"].update(values)


def weight(make):
    """One weight of the model replaced."""

    def change(state):
        name = "decoder.layers.0.mlp.linear_fc2.weight"
        state["model"][name] = make(state["model"][name])

    return change


ADAM = {"optimizer": {"param_groups": [{}], "state": {0: {"step": 1}}}}
CLASSIC = {
    "model a number": (key("model", 7), "at model"),
    "model a list": (key("model", [torch.ones(1)]), "at model"),
    "no model": (lambda state: state.pop("model"), "has no model"),
    "an empty model": (key("model", {}), "embedding"),
    "a weight that is a list": (weight(lambda tensor: [1]), "linear_fc2.weight"),
    "a weight of another shape": (weight(lambda tensor: tensor[1:]), "linear_fc2.weight"),
    "a weight without dims": (weight(lambda tensor: torch.tensor(1.0)), "linear_fc2.weight"),
    "a weight of integers": (weight(lambda tensor: tensor.long()), "linear_fc2.weight"),
    "a weight in fp8": (weight(lambda tensor: tensor.to(torch.float8_e4m3fn)), "linear_fc2.weight"),
    "a weight that is negated when read": (weight(lambda tensor: torch._neg_view(tensor)), "linear_fc2.weight"),
    "a weight that is expanded": (weight(lambda tensor: torch.ones(1, 1).expand(tensor.shape)), "linear_fc2.weight"),
    "a layer far away": (model(**{"decoder.layers.999999.x": torch.ones(1)}), "layers"),
    "a layer of many digits": (model(**{f"decoder.layers.{'9' * 5000}.x": torch.ones(1)}), "at model.decoder.layers.9"),
    "a name that is a number": (lambda state: state["model"].update({7: torch.ones(1)}), "tensors that its model"),
    "another tensor": (model(x=torch.ones(1)), "tensors that its model"),
    "nested names": (model(decoder={"layers.0": {"mlp.linear_fc2.weight": torch.ones(1)}}), "one tensor of this name"),
    "embedding without dims": (model(**{"embedding.word_embeddings.weight": torch.tensor(1.0)}), "embedding"),
    "fewer layers": (args(num_layers=1), "num_layers = 1"),
    "more layers": (args(num_layers=60000), "num_layers = 60000"),
    "optimizer a text": (key("optimizer", "x"), ""),
    "groups a text": (key("optimizer", {"param_groups": "x", "state": {0: {}}}), "param_groups"),
    "groups of numbers": (key("optimizer", {"param_groups": [7], "state": {0: {}}}), "param_groups"),
    "parameters a text": (key("optimizer", {"param_groups": [{"params": "x"}], "state": {0: {"step": 1}}}), ""),
    "parameters of lists": (key("optimizer", {"param_groups": [{"params": [[]]}], "state": {0: {"step": 1}}}), ""),
    "state of numbers": (key("optimizer", {"param_groups": [{"params": [0]}], "state": {0: 7}}), ""),
    "main weights a number": (key("optimizer", {**ADAM, "fp32_from_fp16_params": 7}), ""),
    "main weights of numbers": (key("optimizer", {**ADAM, "fp32_from_fp16_params": [[7]]}), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSIC)
def test_wrong_classic_files_are_named(name, sound, tmp_path):
    """An optimizer's state that cannot be named is left out, as for sound files."""
    change, told = CLASSIC[name]
    folder = shutil.copytree(sound / "mp_rank", tmp_path / "c")
    (path,) = folder.glob("iter_*/mp_rank_00/*.pt")
    state = load(path)
    change(state)
    torch.save(state, path)
    message = converted(folder, tmp_path / "out")
    assert told in message and bool(message) == bool(told)


OTHER_RANK = {
    "another iteration": (key("iteration", 7), "iteration = 7"),
    "another version": (key("checkpoint_version", 2.0), "checkpoint_version = 2.0"),
    "other samples": (args(consumed_train_samples=99), "args.consumed_train_samples = 99"),
}


@pytest.mark.parametrize("name", OTHER_RANK)
def test_ranks_of_several_checkpoints_are_refused(name, sound, tmp_path):
    change, told = OTHER_RANK[name]
    folder = shutil.copytree(sound / "ranks", tmp_path / "c")
    (path,) = folder.glob("iter_*/mp_rank_01/*.pt")
    state = load(path)
    change(state)
    torch.save(state, path)
    message = converted(folder, tmp_path / "out")
    assert "is of another checkpoint than" in message and told in message


def test_a_rank_that_is_there_twice_is_refused(sound, tmp_path):
    folder = shutil.copytree(sound / "mp_rank", tmp_path / "c")
    (rank,) = folder.glob("iter_*/mp_rank_00")
    shutil.copytree(rank, rank.with_name("mp_rank_00_000"))
    assert "holds one rank twice" in converted(folder, tmp_path / "out")


def test_copies_of_ranks_that_differ_are_named(sound, tmp_path):
    folder = shutil.copytree(sound / "ranks", tmp_path / "c")
    assert not open_mp_rank(folder, settings={}).notes
    (path,) = folder.glob("iter_*/mp_rank_01/*.pt")
    state = load(path)
    state["model"]["decoder.final_layernorm.weight"].add_(1)
    torch.save(state, path)
    (note,) = open_mp_rank(folder, settings={}).notes
    assert note.endswith("the first one's is used: 1/0/0/decoder.final_layernorm.weight")


@pytest.mark.scaled
@pytest.mark.parametrize("form", ["torch_dist", "mp_rank"])
def test_any_wrong_bytes_are_an_error_or_change_nothing(form, sound, tmp_path):
    """Bytes that are set to others, and files that are cut."""
    chance = random.Random(form)
    folder = shutil.copytree(sound / form, tmp_path / "c")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for _ in range(20 * SOAK):
        path = chance.choice(files)
        before = path.read_bytes()
        data = bytearray(before)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] ^= chance.randint(1, 255)
        path.write_bytes(data[: chance.choice((len(data), len(data), chance.randrange(len(data))))])
        converted(folder, tmp_path / "out")
        path.write_bytes(before)
    assert converted(folder, tmp_path / "out") == ""


NUMBERS = (1 << 31, 1 << 40, 1 << 63, 1 << 100, -1, 0, math.nan, math.inf, 1.5, True)
OTHERS = (
    None,
    "",
    "x" * 5000,
    [],
    {},
    [[[]]],
    b"\xff",
    (1, (2,)),
    torch.ones(2),
    size((1 << 40,)),
    argparse.Namespace(x=1),
)


def attacked(value, chance, depth=0):
    """The value with something else at a random place."""
    if depth < 8 and chance.random() > 0.12:
        if isinstance(value, (dict, list)) and value:
            key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
            value[key] = attacked(value[key], chance, depth + 1)
            return value
        if type(value) in (tuple, size) and value:
            at = chance.randrange(len(value))
            inner = attacked(value[at], chance, depth + 1)
            return (*value[:at], inner, *value[at + 1 :])
        if isinstance(value, torch.Tensor) and value.dim():
            views = (value[:0], value.reshape(-1), value[:1].clone().expand(value.shape), value.to(torch.complex64))
            return chance.choice([*views, value.to(torch.int8), value.to_sparse()])
        if getattr(value, "__dict__", None) and not isinstance(value, torch.Tensor):
            key = chance.choice(list(vars(value)))
            object.__setattr__(value, key, attacked(vars(value)[key], chance, depth + 1))
            return value
    return chance.choice(NUMBERS if chance.random() < 0.4 else OTHERS)


def save_header(path, change):
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(change(json.loads(data[8:end])), default=str).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


STORED = {
    ".metadata": (
        "torch_dist",
        lambda path, change: path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes())))),
    ),
    "common.pt": ("torch_dist", lambda path, change: torch.save(change(load(path)), path)),
    "model_optim_rng.pt": ("ranks", lambda path, change: torch.save(change(load(path)), path)),
    "config.json": (
        "hf",
        lambda path, change: path.write_text(json.dumps(change(json.loads(path.read_text())), default=str)),
    ),
    "model.safetensors": ("hf", save_header),
}


@pytest.mark.scaled
@pytest.mark.parametrize("name", STORED)
def test_any_value_at_any_place_is_read_or_named(name, sound, tmp_path):
    chance, (form, save_changed) = random.Random(name), STORED[name]
    folder = shutil.copytree(sound / form, tmp_path / "c")
    path = sorted(folder.rglob(name))[-1]
    before, told = path.read_bytes(), 0
    for _ in range(12 * SOAK):
        save_changed(path, lambda value: attacked(value, chance))
        told += bool(converted(folder, tmp_path / "out"))
        path.write_bytes(before)
    assert told >= 3 * SOAK


def test_a_table_as_large_as_no_model_has_is_refused_unread(sound, tmp_path):
    folder = shutil.copytree(sound / "hf", tmp_path / "c")
    with (folder / "config.json").open("ab") as file:
        file.truncate(1 << 40)  # takes no space on the disk
    message = converted(folder, tmp_path / "out")
    assert "config.json is too large for a table of settings" in message
