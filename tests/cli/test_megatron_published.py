"""eval and finetune on the archives of GPT-345M and BERT-345M as they were published, sizes shrunk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import mdata
from cli.mtrain import main
from mdata import PreprocessOptions
from tests.helpers.labelled import write_mnli, write_vocabulary
from tests.helpers.runs import write_jsonl
from tests.oracles import bert_twin
from tests.trainer.convert import test_megatron_bert as megatron
from trainer.config.parse import load_config
from trainer.run.metrics import read_metrics

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, LENGTH = 128, 2, 60  # heads of 64, as theirs
IDS, ROWS = 300, 320  # of the tokenizer; of the embedding, whose padding gets no probability


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt.zip, bert.zip, a tokenizer for each, and texts, a corpus and labelled rows."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WIDTH": WIDTH, "HEADS": HEADS, "LENGTH": LENGTH, "VOCABULARY": ROWS}.items():
            patch.setattr(bert_twin, name, value)
        megatron.published_decoder(folder / "gpt")
        megatron.published(folder / "bert", with_args=False, zipped=False)
        torch.save(bert_twin.weights(), folder / "weights.pt")
    for name in ("gpt", "bert"):
        shutil.make_archive(str(folder / name), "zip", folder / name)
    write_jsonl(folder / "texts.jsonl", 1, documents=12)
    mdata.train_tokenizer([folder / "texts.jsonl"], folder / "tokenizer", vocab_size=IDS)
    mdata.preprocess(
        PreprocessOptions(
            input=(str(folder / "texts.jsonl"),),
            output_prefix=str(folder / "texts"),
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(folder / "tokenizer"),
            append_eod=True,
        )
    )
    (folder / "words").mkdir()
    write_vocabulary(folder / "words/vocab.txt")
    write_mnli(folder / "train.tsv", 32, seed=0)
    write_mnli(folder / "dev.tsv", 8, seed=1)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gpt2_loss(weights: dict[str, torch.Tensor], rows: list[list[int]]) -> float:
    """Mean loss of each row's tokens but the first, by transformers' GPT-2."""
    config = transformers.GPT2Config(
        vocab_size=ROWS, n_positions=LENGTH + 4, n_embd=WIDTH, n_layer=bert_twin.LAYERS, n_head=HEADS,
        n_inner=bert_twin.INNER, activation_function="gelu_new", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    state, half = model.state_dict(), {name: x.half().float() for name, x in weights.items()}
    state["transformer.wte.weight"] = state["lm_head.weight"] = half["embedding.word_embeddings.weight"]
    state["transformer.wpe.weight"] = half["embedding.position_embeddings.weight"]
    names = {
        "input_layernorm": "ln_1", "self_attention.linear_qkv": "attn.c_attn", "self_attention.linear_proj":
        "attn.c_proj", "pre_mlp_layernorm": "ln_2", "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj",
    }  # fmt: skip
    for last in ("weight", "bias"):
        state[f"transformer.ln_f.{last}"] = half[f"encoder.final_layernorm.{last}"]
        for i in range(bert_twin.LAYERS):
            for theirs, hf in names.items():
                x = half[f"encoder.layers.{i}.{theirs}.{last}"]
                if "qkv" in theirs:  # theirs q, k, v of one head after the other; GPT-2's q of all heads first
                    x = x.unflatten(0, (HEADS, 3, -1)).transpose(0, 1).flatten(0, 2)
                state[f"transformer.h.{i}.{hf}.{last}"] = x.T if x.dim() == 2 else x
    model.load_state_dict(state)
    nats, tokens = 0.0, 0
    for row in rows:
        ids = torch.tensor([row])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, :, :IDS]
        nats += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += len(row) - 1
    return nats / tokens


def test_a_decoder_is_scored_and_trained_from_its_archive(here, capsys):
    corpus = mdata.open_blend("texts_text_document.json").corpora[0]
    documents = [corpus.document(number).tolist() for number in range(corpus.num_documents)]
    rows = [[document[-1], *document] for document in documents]
    windows = [row[at : at + LENGTH + 5] for row in rows for at in range(0, len(row) - 1, LENGTH + 4)]
    scored = ("--task", "perplexity", "--data", "texts_text_document.json", "--json")
    assert main(["eval", "gpt.zip", *scored, "--tokenizer", "tokenizer"]) == 0
    loss = json.loads(capsys.readouterr().out)["total"]["loss"]
    assert loss == pytest.approx(gpt2_loss(torch.load("weights.pt"), windows), abs=1e-4)

    texts = ("finetune", "gpt.zip", "texts.jsonl", "--gpus", "0", "--epochs", "2", "--lr", "1e-3")
    assert main([*texts]) == 2
    assert "--tokenizer FOLDER with the one that the model was trained with" in capsys.readouterr().err
    assert main([*texts, "--tokenizer", "tokenizer", "--print"]) == 0
    assert 'init_from = "gpt.zip"' in capsys.readouterr().out and not (here / "runs/gpt-texts/checkpoints").exists()
    assert main([*texts, "--tokenizer", "tokenizer"]) == 0
    losses = [line["loss"] for line in read_metrics(here / "runs/gpt-texts") if "loss" in line]
    assert losses[-1] < losses[0] < loss + 1, "it begins with the published weights, and learns"
    capsys.readouterr()
    assert main(["eval", "runs/gpt-texts", *scored]) == 0, "its folder has the tokenizer"
    assert json.loads(capsys.readouterr().out)["total"]["loss"] < loss
    assert main([*texts, "--tokenizer", "tokenizer"]) == 0, "the same command continues"
    assert "is already done" in capsys.readouterr().out


def test_a_bert_is_finetuned_from_its_archive_and_scored(here, capsys):
    rows = ("finetune", "bert.zip", "train.tsv", "--task", "mnli", "--valid", "dev.tsv", "--gpus", "0", "--epochs", "1")
    rows = (*rows, "--tokenizer", "words", "--folder", "runs/mnli")
    assert main([*rows, "--print"]) == 0
    assert 'init_from = "bert.zip"' in capsys.readouterr().out
    assert main([*rows]) == 0
    config = load_config(here / "runs/mnli/run.toml")
    assert config.model.bert is not None and (config.model.bert.norm, config.model.bert.task) == ("pre", "classify")
    capsys.readouterr()
    assert main(["eval", "runs/mnli", "--task", "mnli", "--data", "dev.tsv", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["known"] == 8 and facts["accuracy"] == pytest.approx(
        read_metrics(here / "runs/mnli")[-1]["accuracy"]["dev"]
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("eval bert.zip --task mnli --data dev.tsv --tokenizer words", "bert.zip does not classify rows"),
        (
            "eval bert.zip --task lambada --data texts.jsonl --tokenizer words",
            "predicts masked tokens, and not the next",
        ),
        ("finetune bert.zip texts.jsonl --tokenizer words --gpus 0", "--task finetunes it on labelled rows"),
        ("eval gpt.zip --task lambada --data texts.jsonl", "gpt.zip has no tokenizer"),
        ("finetune gpt.zip train.tsv --task mnli --tokenizer words --gpus 0", "no head that classifies rows"),
    ],
)
def test_what_does_not_fit_is_named(words, told, here, capsys):
    assert main(words.split()) == 2
    assert told in capsys.readouterr().err


@pytest.mark.soak  # in `make test` processes share a copy in tests/trainer/convert/test_published_archive.py
def test_ranks_that_unpack_an_archive_each_agree(here, capsys):
    data = ("texts_text_document.json", "--gpus", "0", "--print", "--folder", "runs/two")
    assert main(["finetune", "gpt.zip", *data]) == 0
    (here / "two.toml").write_text(capsys.readouterr().out)
    assert main(["train", "two.toml", "--nproc", "2", "train.steps=2", "train.global_batch=2"]) == 0
    assert read_metrics(here / "runs/two")[-1]["step"] == 2
