"""mtrain finetune --task and mtrain eval --task: rows as they come, the run.toml, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from cli.mtrain import main
from tests.helpers.labelled import KEYS, write_bert, write_mnli
from trainer.config.parse import load_config
from trainer.convert.convert import open_model
from trainer.run.metrics import read_metrics

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT, and a folder like that of GLUE."""
    folder = tmp_path_factory.mktemp("made")
    write_bert(folder / "bert")
    for seed, (name, rows) in enumerate({"train": 64, "dev_matched": 9, "dev_mismatched": 6}.items()):
        write_mnli(folder / f"MNLI/{name}.tsv", rows, seed=seed)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_of_glue_is_trained_scored_and_exported(here, capsys):
    words = ("finetune", "bert", "MNLI", "--task", "mnli", "--epochs", "1", "--lr", "1e-3", "--gpus", "0")
    assert main([*words]) == 0
    said = capsys.readouterr()
    assert "64 rows to train on, with classes contradiction, entailment, neutral" in said.err
    assert "next: mtrain eval runs/bert-MNLI --task mnli --data " in said.out
    command = shlex.split(said.out.splitlines()[-1].removeprefix("next: mtrain "))
    assert main([*command, "--json"]) == 0, "it works as it is printed"
    assert json.loads(capsys.readouterr().out)["known"] == 9
    config = load_config(here / "runs/bert-MNLI/run.toml")
    assert (config.train.steps, config.train.eval_interval, config.train.eval_samples) == (2, 2, 0)
    assert (config.checkpoint.keep_best, config.model.hidden_dropout, config.train.sequence_length) == (1, 0.1, 32)
    last = read_metrics(here / "runs/bert-MNLI")[-1]
    assert set(last["accuracy"]) == {"dev_matched", "dev_mismatched", "overall"}

    data = ("--data", "MNLI/dev_matched.tsv", "--predictions", "p.jsonl")
    assert main(["eval", "runs/bert-MNLI", "--task", "mnli", *data, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["known"], facts["accuracy"]) == (9, pytest.approx(last["accuracy"]["dev_matched"]))
    assert facts["loss"] == pytest.approx(last["valid"]["dev_matched"], abs=1e-5)
    assert len((here / "p.jsonl").read_text().splitlines()) == 9

    assert main(["convert", "runs/bert-MNLI", "exported", "--to", "hf"]) == 0
    capsys.readouterr()
    assert main(["eval", "exported", "--task", "mnli", *data[:2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(facts["accuracy"])
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(here / "exported")
    assert theirs.config.id2label[1] == "entailment"

    assert main(["generate", "runs/bert-MNLI", "--prompt", "a"]) == 2
    assert "mtrain eval MODEL --task classify --data FILE" in capsys.readouterr().err
    (here / "ids.jsonl").write_text(json.dumps({"prompt": [5, 6]}))
    assert main(["logits", "--input", "ids.jsonl", "--output", "logits.safetensors", "runs/bert-MNLI"]) == 2
    assert "bert-MNLI classifies rows" in capsys.readouterr().err and not (here / "logits.safetensors").exists()
    assert main(["report", "runs/bert-MNLI"]) == 0
    assert "dev_matched: " in (report := capsys.readouterr().out) and "nats per token" not in report
    assert main(["report", "runs/bert-MNLI", "runs/bert-MNLI", "--output", "both.html"]) == 0
    for page in (here / "runs/bert-MNLI/report.html", here / "both.html"):
        text = page.read_text()
        assert "nats per row" in text and "nats per token" not in text and "perplexity" not in text
    capsys.readouterr()
    assert main([*words]) == 0, "the same command continues"
    assert "step 2 is already done" in capsys.readouterr().out


def test_own_rows_and_the_file_alone(here, capsys):
    rows = [{"review": f"man {key}", "stars": stars} for stars, key in enumerate(KEYS, 3)] * 20
    (here / "own.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"review": "", "stars": 3}])))
    columns = ("--columns", "text=review,label=stars")
    assert main(["finetune", "bert", "own.jsonl", "--task", "classify", *columns, "--print", "--gpus", "0"]) == 3
    assert "own.jsonl:61: no text under 'review'" in capsys.readouterr().err
    (here / "bare.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"review": "man"}])))
    assert main(["finetune", "bert", "bare.jsonl", "--task", "classify", *columns, "--print", "--gpus", "0"]) == 3
    assert "bare.jsonl:61: a row to train on without a label" in capsys.readouterr().err
    words = ("finetune", "bert", "own.jsonl", "--task", "classify", *columns, "--on-error", "skip", "--gpus", "0")
    assert main([*words, "--print"]) == 0
    said = capsys.readouterr()
    assert 'labels = ["3", "4", "5"]' in said.out and 'split = "98,2,0"' in said.out
    assert "own.jsonl: 60 rows; left out: 1 with an empty text" in said.err
    assert main([*words, "--epochs", "1"]) == 0
    advised = re.search(r"next: mtrain (eval .*)", capsys.readouterr().out)
    assert advised and main(shlex.split(advised[1])) == 0, "what it advises reads these rows too"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("MNLI", "--labels", "a,b"), "--labels is for labelled rows"),
        (("MNLI", "--task", "mnli", "--columns", "text=x"), "give --task classify"),
        (("MNLI", "--task", "classify", "--columns", "words=x"), "NAME one of label, text, text_pair, id"),
        (("MNLI",), "--task finetunes it on labelled rows"),
        (("nowhere.tsv", "--task", "mnli"), "there is no nowhere.tsv"),
    ],
)
def test_what_does_not_fit_is_named(here, words, named, capsys):
    assert main(["finetune", "bert", *words]) == 2
    assert named in capsys.readouterr().err


def test_classes_of_another_order_are_matched_by_name(here, capsys):
    names = ("NEUTRAL", "Entailment", "contradiction")
    config = transformers.BertConfig.from_pretrained(here / "bert", id2label=dict(enumerate(names)))
    model = transformers.BertForSequenceClassification(config)
    model.classifier.weight.data.zero_()
    model.classifier.bias.data[:] = model.classifier.bias.new_tensor([0.0, 5.0, 0.0])
    model.save_pretrained(here / "other")
    (here / "other/vocab.txt").write_bytes((here / "bert/vocab.txt").read_bytes())
    data = ("--data", "MNLI/dev_matched.tsv", "--json")
    assert main(["eval", "other", "--task", "mnli", *data]) == 0
    rows = (here / "MNLI/dev_matched.tsv").read_text().splitlines()[1:]
    expected = sum(row.endswith("\tentailment") for row in rows) / len(rows)
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(expected)
    assert main(["eval", "other", "--task", "race", *data]) == 2
    assert "other has classes" in capsys.readouterr().err
    rows = [{"text": "man", "label": label} for label in sorted(names)] * 20
    (here / "named.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["finetune", "other", "named.jsonl", "--task", "classify", "--print", "--gpus", "0"]) == 0
    assert f'labels = ["{names[0]}", "{names[1]}", "{names[2]}"]' in capsys.readouterr().out, "its head goes on"
    assert open_model(here / "other").config.model.bert.labels == names  # type: ignore[union-attr]
