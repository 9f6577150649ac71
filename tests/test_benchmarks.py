"""The benchmarks of benchmarks/ still run: small, in this process, with few rounds; times are not checked.

A benchmark that needs a GPU, or another project in a separate environment, is not run here, except its own side of the
comparison if that can be called alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.corpora import write_pair
from trainer.config.sections import MambaSection
from trainer.convert.model_keys import model_config
from trainer.kernels.scan import chunk_scan
from trainer.models.family import family_of, split_block
from trainer.models.stage import Microbatch
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place

ROOT = Path(__file__).resolve().parents[1]

# module, constants made small, arguments, and words that its table must have
RUNS = [
    ("samples", {"ROUNDS": 1, "SAMPLES_A_ROUND": 8}, ["reading", "--gb", "0.002"], ("numpy loop", "document masks")),
    ("samples", {"START_RUNS": 1}, ["start", "--documents", "1000"], ("import numpy", "document masks")),
    ("batches", {"ROUNDS": 1, "SAMPLES_A_ROUND": 64, "SHAPES": ((2, 2),)}, ["--gb", "0.002"], ("Loader",)),
    ("blend", {"ROUNDS": 1}, ["--samples", "200"], ("1000 zipf", "native blend")),
    ("webtext", {}, ["match", "--documents", "8000", "--parts", "2"], ("match", "group", "both")),
    ("webtext", {"SIMILARITIES": (0.6,)}, ["recall", "--pairs", "60"], ("expected", "0.600")),
    ("webtext", {}, ["model"], ("10 TB", "group")),
    ("corpora", {}, ["--corpora", "5", "--workers", "1", "--methods", "fork"], ("5 corpora", "fork")),
]


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs a benchmark's `main` and returns what it printed."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def run(name: str, constants: dict[str, object], arguments: list[str]) -> str:
        module = importlib.import_module(name)
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *arguments])
        assert not module.main()
        return capsys.readouterr().out

    yield run
    for name in {name for name, *_ in RUNS} | {"samples_masked", "samples_build", "web_text", "finetune", "planted"}:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "constants", "arguments", "words"), RUNS, ids=[f"{name} {words[-1]}" for name, *_, words in RUNS]
)
def test_a_benchmark_prints_its_table(run, name, constants, arguments, words):
    printed = run(name, constants, arguments)
    assert all(word in printed for word in words), printed


def test_our_side_of_web_text(run, tmp_path):
    pytest.importorskip("ftfy")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"the text {number} and more. " * 20}) + "\n" for number in range(9)))
    printed = run("web_text", {"ROUNDS": 1}, [str(text), "--items", "5"])
    assert "n-grams of 10 items" in printed and "decontaminate, end to end" in printed


def test_planted_faults_are_found_on_the_way_to_a_blend(run, tmp_path):
    for library in ("ftfy", "py3langid"):
        pytest.importorskip(library)
    english = " ".join(path.read_text() for path in sorted((ROOT / "docs/howto").glob("*.md")))
    german = "Der Rechner liest die Texte, zählt jedes Wort und schreibt das Ergebnis in eine neue Datei. " * 20
    rows = ({"kind": "prose", "text": english}, {"kind": "multilingual", "text": german})
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = run("planted", {}, [str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "way"), "--gb", "0.0008"])
    assert "foreign" in printed and "decontaminate" in printed and "blend" in printed


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_our_side_of_the_masked_samples(monkeypatch, tmp_path, kind):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("samples_masked")
    monkeypatch.setattr(module, "DOCUMENTS", 600)
    monkeypatch.setattr(module, "BATCH", 8)
    module.make_corpus(tmp_path / "x_text_sentence")
    found = module.our_side(tmp_path / "x_text_sentence", kind, 16)
    assert {"megatron, one by one", "native, batches of 8", "digest"} <= set(found)


def test_rows_are_as_long_as_those_of_a_corpus(tmp_path):
    lengths = importlib.import_module("benchmarks.text_lengths")
    write_pair(tmp_path / "x", [[7], [9, 0, 5], []])
    few = lengths.corpus_lengths(tmp_path / "x.idx")
    assert set(few.documents) == {7, 14} and set(few.sentences) == {5, 7, 9}
    drawn = list(itertools.islice(lengths.row_lengths(np.random.default_rng(0), 20, few), 2000))
    assert {7, 14} <= set(drawn) <= set(range(1, 15)), "a document is a row, or a few with shorter targets"
    drawn = list(itertools.islice(lengths.row_lengths(np.random.default_rng(0), 512), 4000))
    assert 0.8 < np.mean(drawn) / 512 < 0.9, "0.844 of the manual pages' rows are text, as the samplers cut them"


@pytest.mark.parametrize("what", ["arrays", "first sample"])
def test_our_side_of_the_sample_index(run, monkeypatch, tmp_path, what):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("samples_build")
    module.make_shard(tmp_path / "a", 200)
    arguments = ["--own", what, "--prefix", str(tmp_path / "a"), "--folder", str(tmp_path), "--epochs", "2"]
    assert json.loads(run("samples_build", {}, arguments))["peak_mib"] > 0


@pytest.mark.parametrize("rank", [4, pytest.param(0, marks=pytest.mark.soak)])
def test_our_side_of_finetuning(run, rank):
    small = {"STEPS": 1, "WARMUP_STEPS": 1}
    printed = run("finetune", small, ["--row", "ours", "--shape", "tiny", "--lora", str(rank)])
    found = json.loads(printed.splitlines()[-1])
    assert found["real_tokens_per_s"] > 0 and found["loss"] > 6


def test_rows_of_a_band_have_gpus_of_their_own():
    """Or share each with as many rows as asked for, never two ranks of a row."""
    gpus = importlib.import_module("benchmarks.layout_band").Gpus(["0", "1", "2"] * 2)
    with gpus.taken(2) as first, gpus.taken(3) as second, gpus.taken(1) as third:
        assert (first, second, third) == (["0", "1"], ["2", "0", "1"], ["2"]) and not gpus.free
    with gpus.taken(3) as every, gpus.taken(3) as again:
        assert sorted(every) == sorted(again) == ["0", "1", "2"]


def test_rates_of_checkpoints(run, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "O_DIRECT", 0)  # which tmpfs does not know
    small = ["model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.vocab_size=300"]
    found = json.loads(
        run("checkpoint_rates", {}, ["--out", str(tmp_path), "--preset", "gpt2", "--rounds", "1", "--layout", *small])
    )
    assert found["ranks"] == 1 and found["save"] > 0 and found["load"] > 0 and found["peak_host_gib"] > 0
    assert not list(tmp_path.iterdir()), "what was written is removed"


def test_the_peer_of_mixers_computes_our_function(monkeypatch):
    """With our plain scan in place of a library's; nothing is compiled."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    peer = importlib.import_module("benchmarks.mamba_peer")
    section = MambaSection(pattern="M*-M", head_dim=8, num_groups=2, state_size=6, chunk_size=8)
    keys = {"family": "mamba", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 128}
    keys |= {"position": "none", "activation": "squared_relu", "mamba": dataclasses.asdict(section)}
    config = model_config(keys, where="", context=16)
    family, device = family_of(config), torch.device("cpu")
    shape = family.shape(config, 128)
    ours = family.build(shape, Place(), groups={"tp": Group.single("tp")}, dtype=torch.float32, device=device)
    theirs = peer.Model(shape, lambda *parts: chunk_scan(*parts[:-1], chunk=parts[-1])[0])
    names = {"embedding.weight": "embedding.weight", "final_norm.weight": f"norms.{shape.num_layers}.weight"}
    parts = {"mixer.norm": "", "mixer": "", "attention.qkv": "qkv", "attention.out": "out", "mlp.up": "up"}
    parts |= {"mlp.down": "down"}
    held = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        block, rest = split_block(name)
        if block is not None and rest.endswith("_norm.weight"):
            target = f"norms.{block}.weight"
        elif block is not None:
            part = next(part for part in parts if rest.startswith(f"{part}."))
            target = ".".join(filter(None, ("layers", str(block), parts[part], rest.removeprefix(f"{part}."))))
        else:
            target = names[name]
        held.pop(target).data.copy_(parameter.data)
    assert not held
    tokens_BS, labels_BS = torch.randint(0, 128, (2, 2, 16))
    loss, _ = ours((), Microbatch(tokens_BS=tokens_BS, labels_BS=labels_BS, loss_mask_BS=torch.ones(2, 16)))
    assert float(theirs(tokens_BS, labels_BS).detach()) == pytest.approx(float(loss.detach()) / 32, rel=1e-5)
