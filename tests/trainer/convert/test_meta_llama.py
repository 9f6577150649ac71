"""Llama 2 as Meta distributes it, cut into files for one, two and eight ranks: against Meta's own arithmetic."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mdata import DamageError, UsageError
from mdata.tokenizer_training.train import train_tokenizer
from mdata.tokenizer_training.train_options import TrainOptions
from tests.helpers.runs import write_jsonl
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.tasks.loaded_model import Model

DIM, HEADS, KV_HEADS, LAYERS, FFN, VOCAB, EPS = 64, 16, 8, 2, 96, 288, 1e-5
PARAMS = {"dim": DIM, "multiple_of": 32, "n_heads": HEADS, "n_layers": LAYERS, "norm_eps": EPS, "vocab_size": -1}
GROUPED = PARAMS | {"n_kv_heads": KV_HEADS, "ffn_dim_multiplier": 1.3}
IDS = [1, 5, 250, 17, 3, 99]
COLUMNS = ("tok_embeddings", "wo", "w2")  # cut along columns; other matrices along rows


def weights(kv_heads: int) -> dict[str, Tensor]:
    """Of a whole model, by Meta's names."""
    generator, kv = torch.Generator().manual_seed(3), kv_heads * DIM // HEADS
    shapes = {"tok_embeddings": (VOCAB, DIM), "output": (VOCAB, DIM), "norm": (DIM,)}
    for layer in range(LAYERS):
        parts = {"wq": (DIM, DIM), "wk": (kv, DIM), "wv": (kv, DIM), "wo": (DIM, DIM)}
        shapes |= {f"layers.{layer}.attention.{part}": shape for part, shape in parts.items()}
        parts = {"w1": (FFN, DIM), "w3": (FFN, DIM), "w2": (DIM, FFN)}
        shapes |= {f"layers.{layer}.feed_forward.{part}": shape for part, shape in parts.items()}
        shapes |= {f"layers.{layer}.{norm}": (DIM,) for norm in ("attention_norm", "ffn_norm")}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {f"{name}.weight": t / 8 if t.dim() > 1 else 1 + t / 8 for name, t in drawn.items()}


def write_meta(folder: Path, files: int, *, kv_heads: int = KV_HEADS, dtype: torch.dtype = torch.float32) -> Path:
    """A folder as it is downloaded."""
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(GROUPED if kv_heads != HEADS else PARAMS))
    for number in range(files):
        part = {}
        for name, tensor in weights(kv_heads).items():
            along = 1 if name.split(".")[-2] in COLUMNS else 0
            part[name] = (tensor if tensor.dim() == 1 else tensor.chunk(files, along)[number]).to(dtype).clone()
        part["rope.freqs"] = 1.0 / (10000 ** (torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS)))
        torch.save(part, folder / f"consolidated.{number:02}.pth")
    return folder


def logits_by_neighbours(found: dict[str, Tensor], kv_heads: int) -> Tensor:
    """The whole model as it is defined: channels 2 i and 2 i + 1 of a head are a complex number that is turned."""
    x, channels = found["tok_embeddings.weight"][IDS].double(), DIM // HEADS
    angles = torch.outer(torch.arange(len(IDS)), 10000.0 ** (-torch.arange(0, channels, 2) / channels)).double()
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * found[f"{name}.weight"]

    def heads(x: Tensor, name: str, count: int, turned: bool) -> Tensor:
        x = (x @ found[f"{name}.weight"].double().T).view(len(IDS), count, channels)
        if turned:
            pairs = torch.view_as_complex(x.reshape(len(IDS), count, channels // 2, 2).contiguous())
            x = torch.view_as_real(pairs * turns).flatten(2)
        return x.repeat_interleave(HEADS // count, 1).transpose(0, 1)

    for layer in range(LAYERS):
        at, y = f"layers.{layer}.attention", norm(x, f"layers.{layer}.attention_norm")
        q, k = heads(y, f"{at}.wq", HEADS, True), heads(y, f"{at}.wk", kv_heads, True)
        scores = q @ k.transpose(1, 2) / channels**0.5
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        mixed = (scores.softmax(-1) @ heads(y, f"{at}.wv", kv_heads, False)).transpose(0, 1).flatten(1)
        x = x + mixed @ found[f"{at}.wo.weight"].double().T
        of, y = f"layers.{layer}.feed_forward", norm(x, f"layers.{layer}.ffn_norm")
        w1, w2, w3 = (found[f"{of}.{part}.weight"].double() for part in ("w1", "w2", "w3"))
        x = x + (torch.nn.functional.silu(y @ w1.T) * (y @ w3.T)) @ w2.T
    return norm(x, "norm") @ found["output.weight"].double().T


@pytest.mark.parametrize(("files", "kv_heads"), [(1, HEADS), (2, HEADS), (2, KV_HEADS), (8, KV_HEADS)])
def test_logits_are_those_of_metas_arithmetic(files, kv_heads, tmp_path):
    folder = write_meta(tmp_path / "llama", files, kv_heads=kv_heads)
    expected = logits_by_neighbours(weights(kv_heads), kv_heads)
    model = Model.load(folder)
    assert model.context == 4096 and model.step is None
    assert torch.allclose(model.logits(IDS).double(), expected, atol=1e-5)


def test_an_export_is_a_folder_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = write_meta(tmp_path / "llama", 2, dtype=torch.bfloat16)
    result = convert(folder, tmp_path / "hf", options=ConvertOptions(to="hf"))
    assert result["source"]["format"] == "meta" and result["target"]["dtype"] == "bfloat16"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights(KV_HEADS).items()}
    with torch.no_grad():
        found = theirs(torch.tensor([IDS])).logits[0]
    assert torch.allclose(found.double(), logits_by_neighbours(rounded, KV_HEADS), atol=1e-5)


def test_the_tokenizer_may_lie_beside_the_folder(tmp_path):
    texts = write_jsonl(tmp_path / "a.jsonl", 1)
    options = TrainOptions(preset="llama2")
    train_tokenizer([texts], tmp_path / "sp", vocab_size=VOCAB, kind="sentencepiece-bpe", options=options)
    folder = write_meta(tmp_path / "llama", 1)
    assert open_model(folder).tokenizer is None
    shutil.copy(tmp_path / "sp/tokenizer.model", tmp_path)
    tokenizer = open_model(folder).tokenizer
    assert tokenizer is not None and tokenizer.name == "Llama2Tokenizer"


def test_what_does_not_fit_is_named(tmp_path):
    folder = write_meta(tmp_path / "llama", 2)
    first, second, params = (folder / name for name in ("consolidated.00.pth", "consolidated.01.pth", "params.json"))
    for change, text in (
        ({"rope_theta": 5e5, "use_scaled_rope": True}, "is not that of Llama 2(.|\n)*rope_theta, use_scaled_rope"),
        ({"n_layers": 10**9}, "the tensors of .* do not fit its configuration"),
        ({"n_layers": 3}, r"missing: 0/layers.2.attention.wq.weight"),
        ({"n_heads": 7}, "does not fit the files of weights(.|\n)*n_heads 7 for 2 files"),
        ({"dim": "x"}, "does not fit the files of weights(.|\n)*dim 'x'"),
        ({"norm_eps": None}, "does not fit the files of weights(.|\n)*norm_eps None"),
        ({"dim": 128}, "of another shape: "),
    ):
        params.write_text(json.dumps(GROUPED | change))
        with pytest.raises((UsageError, DamageError), match=text):
            open_model(folder)
    params.write_text(json.dumps(GROUPED))
    stored = torch.load(second)
    torch.save({**stored, "norm.weight": stored["norm.weight"] + 1}, second)
    assert "files differ in what they all hold; the first one's is used: 1/norm.weight" in open_model(folder).notes
    torch.save({**stored, "bias": stored["norm.weight"]}, second)
    with pytest.raises(UsageError, match=r"has tensors that its model does not have(.|\n)*1/bias"):
        open_model(folder)
    torch.save([1], second)
    with pytest.raises(UsageError, match="does not hold tensors by name"):
        open_model(folder)
    first.unlink()
    with pytest.raises(DamageError, match=r"lacks files of weights(.|\n)*expected: consolidated.00.pth"):
        open_model(folder)
