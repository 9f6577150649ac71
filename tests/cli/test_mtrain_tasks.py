"""`mtrain generate`, `logits` and `eval` on a folder of transformers: what they print and write, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cli.mtrain import main
from tests.helpers.examples import SOAK
from tests.helpers.processes import children_of
from tests.trainer.convert.hf_models import save
from trainer.tasks.loaded_model import Model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model with random weights."""
    return str(save("llama2", tmp_path_factory.mktemp("hf") / "model"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """A text and a list of ids."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the ", "other": 1}\n{"prompt": [5, 6]}\n')
    return str(path)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    """The JSON that a command prints."""
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_temperature_0_and_greedy_are_one(model, capsys):
    asked = ("generate", model, "--prompt", "the ", "--max-tokens", "4", "--log-probs", "1", "--prompt-log-probs")
    greedy, cold = said(capsys, *asked, "--greedy"), said(capsys, *asked, "--temperature", "0")
    assert greedy == cold
    (text,) = greedy["texts"]  # type: ignore[misc]
    assert len(text["log_probs"]) == 4 == len(text["top_log_probs"]) and text["prompt_log_probs"][0] is None


def test_a_file_of_samples(model, prompts, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    asked = ("generate", model, "--input", prompts, "--output", str(output), "--num-samples", "2", "--max-tokens", "3")
    assert said(capsys, *asked)["from_before"] == 0
    whole = output.read_bytes()
    output.write_bytes(whole[:-20])
    assert said(capsys, *asked)["from_before"] == 3 and output.read_bytes() == whole
    assert main([*asked, "--seed", "2"]) == 2
    assert "has lines of another model, prompt or option" in capsys.readouterr().err


def test_beams(model, capsys):
    asked = ("generate", model, "--prompt", "the ", "--beam-width", "3", "--num-results", "2", "--max-tokens", "3")
    first, second = said(capsys, *asked)["texts"]  # type: ignore[misc]
    assert first["score"] >= second["score"] and first["tokens"] != second["tokens"]


def test_logits(model, prompts, tmp_path, capsys):
    asked = ("logits", model, "--input", prompts, "--output", str(tmp_path / "x.safetensors"))
    rows = said(capsys, *asked)["tokens"]
    written, opened = load_file(tmp_path / "x.safetensors"), Model.load(model)
    for number, row in enumerate(rows):  # type: ignore[arg-type]
        assert written[str(number)].equal(opened.logits(row))
    assert main(list(asked)) == 2 and "exists" in capsys.readouterr().err


def test_eval(model, tmp_path, capsys):
    data = tmp_path / "lambada.jsonl"
    data.write_text('{"text": "the man saw the"}\n\n{"text": "no"}\n')
    found = said(capsys, "eval", model, "--task", "lambada", "--strict", "--data", str(data))
    assert (found["total"], found["blank_lines"], found["without_context"]) == (2, 1, 1)
    assert main(["eval", model, "--task", "lambada", "--strict", "--data", str(data)]) == 0
    assert "words without context: 1\n" in (err := capsys.readouterr().err) and "blank lines: 1\n" in err
    wiki = tmp_path / "ptb.txt"
    wiki.write_text(" \n = A = \n \n the man saw , the man \n")
    assert main(["eval", model, "--task", "wikitext103", "--data", str(wiki), "--overlap", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("validation results on WIKITEXT103 | avg loss: ") and "Megatron-LM takes ptb" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("generate", "--temperature", "nan"), "temperature=nan"),
        (("generate", "--top-k", "-1"), "top_k=-1"),
        (("generate", "--prompt", "the " * 70), "do not fit the context of model"),
        (("generate", "--prompt", "a", "--max-tokens", "100"), "and 100 new ones"),
        (("generate", "--logit-bias", "x"), "--logit-bias x is not valid"),
        (("generate", "--logit-bias", "300=1"), "token 300, the vocabulary has 300"),
        (("generate", "--beam-width", "0"), "beam_width=0"),
        (("generate", "--num-results", "2"), "--num-results and --length-penalty need --beam-width"),
        (("generate", "--length-penalty", "0.5"), "need --beam-width; --num-samples draws several texts"),
        (("generate", "--beam-width", "2", "--length-penalty", "nan"), "length_penalty=nan is out of range"),
        (("generate", "--checkpoint", "step-3"), "a run folder alone has checkpoints"),
        (("generate", "--strict"), "--strict is for the keys of --input"),
        (("generate", "--strict", "--input", "PROMPTS"), "line 1 has unknown keys"),
        (("eval",), "nothing to score"),
        (("eval", "--task", "lambada"), "--task lambada needs --data"),
        (("eval", "--task", "lambada", "--data", "x", "--overlap", "3"), "--overlap is for wikitext103"),
        (
            ("eval", "--task", "wikitext103", "--data", "TEXT", "--overlap", "65"),
            "--overlap 65 does not fit windows of 64",
        ),
        (("eval", "--task", "perplexity", "--data", "x", "--tp", "2"), "--tp 2 cannot divide the layers over 1 rank"),
    ],
)
def test_bad_input_is_named(words, text, model, prompts, capsys):
    text_file = Path(prompts).with_name("wiki.txt")
    text_file.write_text("the man saw the man\n")
    given = {"PROMPTS": prompts, "TEXT": str(text_file)}
    command, *rest = (given.get(word, word) for word in words)
    assert main([command, model, *rest]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.scaled
@pytest.mark.slow
def test_ranks_of_nproc_answer_as_one_process_does(model, prompts, tmp_path, capfd):
    found = []
    for more in ((), ("--nproc", "2", "--pp", "2"), *([("--nproc", "2")] if SOAK > 1 else [])):
        words = ["generate", model, "--input", prompts, "--max-tokens", "6", "--json", *more]
        assert main(words) == 0
        found.append(json.loads(capfd.readouterr().out))
    assert all(answer == found[0] for answer in found)
    if SOAK == 1:  # logits of ranks: tests/trainer/tasks; that a task may start them was just seen
        return
    output = tmp_path / "logits.safetensors"
    assert main(["logits", model, "--input", prompts, "--output", str(output), "--nproc", "2"]) == 0
    assert load_file(output)["1"].shape[0] == 2
    assert capfd.readouterr().out == f"2 rows in {output}\n"


@pytest.mark.soak  # in `make test` that of a rank of `train`, in tests/cli/test_mtrain.py
def test_an_error_of_ranks_of_nproc_is_told_once(model, capfd):
    assert main(["generate", model, "--nproc", "3", "--max-tokens", "2"]) == 2
    error = capfd.readouterr().err
    assert error.count("mtrain: error: ") == 1 and "cannot be divided over tp=3 x pp=1 ranks" in error


def test_a_number_of_ranks_that_cannot_be_is_refused(model, prompts, capfd, monkeypatch):
    assert main(["generate", model, "--nproc", "0"]) == 2
    assert "--nproc is too small" in capfd.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["logits", model, "--input", prompts, "--output", "new.safetensors", "--nproc", "3"]) == 2
    assert "--nproc 3 given under a launcher" in capfd.readouterr().err


@pytest.mark.slow
def test_ranks_end_without_an_error_once_the_reader_of_their_output_has_gone(model):
    words = ["generate", model, "--prompt", "the ", "--max-tokens", "2", "--nproc", "2"]
    reader, writer = os.pipe()
    os.close(reader)
    root, command = Path(__file__).parents[2], [sys.executable, "-m", "cli.mtrain", *words]
    done = subprocess.run(command, cwd=root, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.soak  # in `make test` those of tests/cli/test_mtrain.py and tests/trainer/run/test_launch.py
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGKILL, 5, "mtrain: error: rank 1 was killed by SIGKILL\n"),
        (signal.SIGINT, 130, "mtrain: interrupted\n"),
    ],
)
def test_ranks_of_nproc_end_together(model, tmp_path, number, code, text):
    output = tmp_path / "texts.jsonl"
    words = ["generate", model, "--num-samples", "20000", "--max-tokens", "9", "--output", str(output), "--nproc", "2"]
    command = [sys.executable, "-m", "cli.mtrain", *words, "--quiet"]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until_s = time.monotonic() + 120
    while not (output.exists() and output.stat().st_size) and time.monotonic() < until_s and process.poll() is None:
        time.sleep(0.05)
    ranks = [pid for pid in children_of(process.pid) if b"mtrain_rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(process.pid if number == signal.SIGINT else ranks[1], number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code and error.startswith(text), error
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
