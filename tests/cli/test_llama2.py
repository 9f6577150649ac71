"""Llama 2's path: a folder as it is published is asked, finetuned at any tp and exported; full sizes are rehearsed.

Small models have as many query heads to one of keys as the size that they stand for. Folders of full size are files of
holes: every shape, and no bytes on the disk.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from cli.mdata import main as mdata_main
from cli.mtrain import main
from tests.helpers.examples import SOAK, soaked
from tests.helpers.ranks import RankContext, run_ranks
from tests.trainer.convert.hf_models import save
from trainer.config.parse import load_config
from trainer.parallel.mesh import Mesh
from trainer.run.metrics import read_metrics
from trainer.tasks.generate import GenerationRequest, continue_rows
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling

transformers = pytest.importorskip("transformers")
VOCAB = 32000
SHARD = 9_900_000_000  # bytes, as published


class Size(NamedTuple):
    """Of a published model, and of a small one of the same structure."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    parameters: int
    small: dict[str, int]
    tp: tuple[int, ...]


SIZES = {
    "7b": Size(
        32, 4096, 32, 32, 11008, 6_738_415_616,
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 86}, (1, 2),
    ),
    "13b": Size(
        40, 5120, 40, 40, 13824, 13_015_864_320,
        {"hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 10, "intermediate_size": 110}, (1, 5),
    ),
    "70b": Size(
        80, 8192, 64, 8, 28672, 68_976_648_192,
        {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 224}, (1, 2),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of Llama 2's form, and conversations."""
    folder = tmp_path_factory.mktemp("made")
    words = ["rain", "falls", "on", "green", "hills", "and", "people", "walk", "home", "under", "grey", "clouds"]
    texts = [" ".join(words[(i * j + j) % len(words)] for j in range(1, 12)) for i in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    talks = [
        {"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text}]} for text in texts
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    options = ["--vocab-size", "300", "--kind", "sentencepiece-bpe", "--preset", "llama2", "--quiet"]
    assert (
        mdata_main(["train-tokenizer", "--input", str(folder / "texts.jsonl"), "--output", str(folder), *options]) == 0
    )
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "talks.jsonl").symlink_to(made / "talks.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def continued(context: RankContext, folder: str, ids: list[int]) -> list[int]:
    """Eight tokens after these, on ranks that share each layer."""
    model = Model.load(folder, world=context.join(Mesh(context.world, tp=context.world)))
    (answer,) = continue_rows(model, [GenerationRequest(ids=tuple(ids), rules=Sampling(max_tokens=8, greedy=True))])
    return list(answer.tokens)


@pytest.mark.scaled
@pytest.mark.parametrize("name", soaked(SIZES, but=["70b"]))
def test_a_small_model_is_asked_finetuned_at_any_tp_and_exported(name, here, made, capsys):
    size = SIZES[name]
    folder = save("llama2", here / "model", shard="40KB", tokens=False, vocab_size=300, **size.small)
    shutil.copy(made / "tokenizer.model", folder)
    assert len([*folder.glob("model-*-of-*.safetensors")]) > 2

    model = Model.load(folder)
    ids = model.encode("rain falls on green")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    greedy = theirs.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=2)
    for ranks in size.tp:
        assert run_ranks(continued, ranks, str(folder), ids) == [greedy[0].tolist()[len(ids) :]] * ranks
    assert main(["generate", "model", "--prompt", "rain falls on green", "--max-tokens", "8"]) == 0

    losses = {}
    # In `make test` ranks train a folder of theirs in tests/trainer/convert/test_hf.py and test_mtrain_finetune.py.
    trained = size.tp if SOAK > 1 else size.tp[:1]
    for tp in trained:
        words = ["--folder", f"tp{tp}", "--sequence-length", "64", "--lr", "1e-3", "train.steps=4", f"mesh.tp={tp}"]
        words += ["run.seed=1", "precision.dtype=fp64"]
        assert main(["finetune", "model", "talks.jsonl", *words, "--quiet"]) == 0
        steps = [record["loss"] for record in read_metrics(here / f"tp{tp}") if "loss" in record]
        assert len(steps) == 4 and steps[-1] < steps[0]
        losses[tp] = steps
    first, *others = losses.values()
    assert all(other == pytest.approx(first, rel=1e-9) for other in others)
    last = f"tp{trained[-1]}"
    assert main(["convert", last, "out", "--to", "hf", "--quiet"]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)
    assert exported.config.num_key_value_heads == size.small["num_key_value_heads"]
    with torch.no_grad():
        logits = exported(torch.tensor([ids])).logits[0]
    assert torch.allclose(Model.load(here / last).logits(ids), logits, atol=1e-5)
    assert not torch.allclose(model.logits(ids), logits, atol=1e-3)


def published_tensors(size: Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of the files."""
    hidden, kv = size.hidden, size.kv_heads * size.hidden // size.heads
    yield "model.embed_tokens.weight", (VOCAB, hidden)
    for layer in range(size.layers):
        name = f"model.layers.{layer}."
        squares = {"q": hidden, "k": kv, "v": kv, "o": hidden}
        parts = [(f"self_attn.{part}_proj", rows, hidden) for part, rows in squares.items()]
        parts += [(f"mlp.{part}_proj", size.ffn, hidden) for part in ("gate", "up")]
        for part, rows, columns in (*parts, ("mlp.down_proj", hidden, size.ffn)):
            yield f"{name}{part}.weight", (rows, columns)
        yield f"{name}input_layernorm.weight", (hidden,)
        yield f"{name}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCAB, hidden)


def write_published(folder: Path, size: Size) -> None:
    """config.json as it was published, and safetensors of holes."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": size.hidden, "initializer_range": 0.02, "intermediate_size": size.ffn,
        "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers, "num_key_value_heads": size.kv_heads, "pretraining_tp": 1,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "use_cache": True, "vocab_size": VOCAB,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in published_tensors(size):
        if 2 * sum(map(math.prod, [*files[-1].values(), shape])) > SHARD:
            files.append({})
        files[-1][name] = shape
    places = {}
    for number, tensors in enumerate(files, start=1):
        path, header, end = folder / f"model-{number:05}-of-{len(files):05}.safetensors", {}, 0
        for name, shape in tensors.items():
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
            places[name] = path.name
        raw = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw)
        with path.open("r+b") as file:
            file.truncate(8 + len(raw) + end)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_what_does_not_fit_says_that_adapters_may(here, made, capsys):
    write_published(here / "model", SIZES["7b"])
    shutil.copy(made / "tokenizer.model", here / "model")
    words = ["model", "talks.jsonl", "--print", "--gpus", "1", "--device", "H100"]
    assert main(["finetune", *words]) == 2
    error = capsys.readouterr().err
    assert "no layout of 1 x H100 works" in error and "more --gpus, or --lora 16" in error


@pytest.mark.parametrize(
    ("name", "gpus", "options"),
    [
        pytest.param("7b", 8, [], marks=pytest.mark.soak),
        ("7b", 1, ["--lora", "16"]),
        pytest.param("7b", 8, ["mesh.tp=8"], marks=pytest.mark.soak),
        pytest.param("13b", 8, [], marks=pytest.mark.soak),
        pytest.param("13b", 8, ["mesh.tp=2"], marks=pytest.mark.soak),
        pytest.param("70b", 8, ["--lora", "16"], marks=pytest.mark.soak),
        pytest.param("70b", 32, [], marks=pytest.mark.soak),
        pytest.param("70b", 64, ["mesh.tp=8", "mesh.pp=2"], marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(900)
def test_a_published_size_is_planned_and_rehearsed(name, gpus, options, here, made, capsys):
    size = SIZES[name]
    write_published(here / "model", size)
    shutil.copy(made / "tokenizer.model", here / "model")
    device = [] if any(option.startswith("mesh.") for option in options) else ["--device", "H100"]  # chooses a layout
    words = ["--print", "--gpus", str(gpus), *device, "--sequence-length", "4096", *options]
    assert main(["finetune", "model", "talks.jsonl", *words]) == 0
    (here / "run.toml").write_text(capsys.readouterr().out)
    model = load_config(here / "run.toml").model
    assert (model.num_layers, model.num_heads, model.num_kv_heads) == (size.layers, size.heads, size.kv_heads)
    assert main(["check", "run.toml", "--ranks", str(gpus), "--memory", "80"]) == 0
    rows = capsys.readouterr().out
    assert f"no problems with --ranks {gpus}" in rows
    if not model.lora:
        assert f"hold the {size.parameters:,} parameters" in rows
