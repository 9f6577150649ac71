"""mtrain init: its files pass the check, its answers come from options, a pipe or the defaults."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from cli.mtrain import main
from cli.mtrain_init import number, shape_of, short
from mdata import UsageError
from tests.helpers.examples import SOAK
from tests.helpers.runs import make_chat, make_mix, make_sentences
from trainer.config.parse import load_config, read_config
from trainer.run.launch import survey


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(path: Path, ranks: int) -> list[str]:
    """Without the libraries of trackers, which need not be installed here."""
    return [text for text in survey(read_config(path), ranks).problems if "the library of tracker" not in text]


@pytest.mark.scaled
def test_random_answers_make_files_that_pass_the_check(here, capsys):
    """12 of them, 50 in a soak run; a refusal may only say that no layout works."""
    drawn, refused = random.Random(45), 0
    for _ in range(min(12 * SOAK, 50)):
        gpus = drawn.choice([0, 1, 2, 3, 8, 16])
        words = [
            "--gpus",
            str(gpus),
            "--model",
            drawn.choice(["2M", "125M", "1.3B", "gpt2", "llama3.2-1b", "qwen3-4b"]),
        ]
        words += ["--sequence-length", drawn.choice(["256", "1008", "1024"])]
        words += ["--batch-tokens", drawn.choice(["4096", "0.1M", "1M", "3e5"])]
        words += ["--length", drawn.choice(["100 steps", "1B", "123456789"])]
        words += ["--precision", "fp32" if gpus == 0 else drawn.choice(["bf16", "fp16", "fp32", "fp8"])]
        words += ["--tracker", drawn.choice(["none", "wandb", "tensorboard,mlflow"])]
        code = main(["init", "--yes", "--overwrite", "--quiet", *words])
        if code:
            refused += 1
            assert (code, gpus > 0) == (2, True) and "no layout of" in capsys.readouterr().err, words
            continue
        assert problems(here / "run.toml", max(gpus, 1)) == [], words
    assert refused < 10


@pytest.mark.parametrize(
    ("make", "model", "kind"),
    [(make_sentences, [], "bert"), (make_sentences, ["--model", "t5-small"], "t5"), (make_chat, [], "chat")],
)
def test_the_kind_of_samples_follows_from_the_corpus_and_the_model(here, make, model, kind):
    made = make(here)
    length = ["--sequence-length", "128" if kind == "chat" else "64"]
    assert main(["init", "--yes", "--quiet", "--gpus", "0", "--data", str(made), *length, *model]) == 0
    config = load_config(here / "run.toml")
    assert config.data.kind == kind and config.model.family == {"chat": "gpt"}.get(kind, kind)
    assert problems(here / "run.toml", 1) == []


def test_the_default_folder_is_not_that_of_a_run(here):
    (here / "runs/first").mkdir(parents=True)
    (here / "runs/first/config.toml").write_text("")
    assert main(["init", "--yes", "--gpus", "0", "--model", "2M", "--length", "10 steps", "--quiet"]) == 0
    assert load_config(here / "run.toml").run.folder == "runs/2"


def test_answers_from_a_pipe_and_defaults_from_the_data(here, monkeypatch, capsys):
    make_mix(here, ["a", "b"])
    (here / "mix.json").rename(here / "blend.json")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n1M\n0\n32\n256\n20 steps\n\nruns/x\nwandb, tensorboard\n"))
    assert main(["init"]) == 0
    out, err = capsys.readouterr()
    assert "[blend.json]" in err and err.count("\n") == 9 and out.startswith("wrote run.toml: ")
    config = load_config(here / "run.toml")
    assert (config.data.blend, config.train.global_batch, config.train.steps) == ("blend.json", 8, 20)
    assert config.model.vocab_size is None, "it is that of the data's tokenizer"
    assert (config.run.folder, config.precision.dtype) == ("runs/x", "fp32")
    assert config.track.to == ("wandb", "tensorboard")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "12Q"], "unknown model '12Q'"),
        (["--model", "."], "--model is '.'"),
        (["--gpus", "-1"], "--gpus is '-1'"),
        (["--gpus", "7", "--nodes", "2"], "cannot be divided over the machines"),
        (["--length", "soon"], "--length is 'soon'"),
        (["--batch-tokens", "0"], "--batch-tokens is '0'"),
        (["--batch-tokens", "1K", "--sequence-length", "2048"], "--batch-tokens 1K is less than a row of 2048 tokens"),
        (["--precision", "fp4"], "--precision is 'fp4'"),
        (["--data", "none.json"], "none.json"),
        (["--tracker", "wandb,aim"], "--tracker is 'aim'"),
        (["--model", "gpt2", "--sequence-length", "9999"], "model.max_position"),
        (["--model", "gpt2", "--sequence-length", "9999", "--gpus", "2"], "model.max_position"),
        (["--gpus", "1", "--model", "400B"], "no layout of 1 x H100 works"),
        (["--device", "Z9", "--gpus", "1"], "unknown --device Z9"),
        (["--device", "H100", "--gpus", "0"], "--device H100 would have no effect: without GPUs the run is for the"),
        (["--gpus", "0", "--nodes", "2", "--device", "H100"], "--device H100 and --nodes 2 would have no effect"),
    ],
)
def test_a_wrong_answer_is_named_and_nothing_is_written(here, capsys, words, said):
    assert main(["init", "--yes", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (here / "run.toml").exists()


@pytest.mark.parametrize("stdin", [io.StringIO(""), None])  # None: Python's name for a closed one
def test_without_an_answer_the_option_is_named(here, monkeypatch, capsys, stdin):
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["init"]) == 2
    assert "try: give --data ANSWER, or --yes" in capsys.readouterr().err


def test_a_terminal_is_asked_again(here, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("\n12Q\n1M\n0\n64\n\n5 steps\n\n\n\n"))
    assert main(["init"]) == 0
    assert "unknown model '12Q'" in capsys.readouterr().err


def test_a_file_is_kept(here, capsys):
    (here / "run.toml").write_text("mine")
    assert main(["init", "--yes"]) == 2
    assert "run.toml already exists" in capsys.readouterr().err and (here / "run.toml").read_text() == "mine"


@pytest.mark.parametrize("parameters", [1e6, 125e6, 350e6, 1.3e9, 6.7e9, 70e9])
def test_a_size_is_met_within_a_tenth(parameters):
    keys = shape_of(int(parameters), vocab_size=2000)
    embeddings = 2000 * keys["hidden_size"] * (1 if keys["tie_embeddings"] else 2)
    assert 12 * keys["num_layers"] * keys["hidden_size"] ** 2 + embeddings == pytest.approx(parameters, rel=0.1)
    assert keys["hidden_size"] % keys["num_heads"] == 0


def test_numbers_as_people_write_them():
    for text, value in (("4096", 4096), ("1.3B", 1_300_000_000), ("0.5m", 500_000), ("1e9", 10**9), ("20_000", 20000)):
        assert number(text, "x") == value
    for value in (1, 999_999, 1_500_000, 20_000_000_000, 524288):
        assert number(short(value), "x") == value
    for text in ("", "-1", "0", "1e99", "nan", "1.3BB"):
        with pytest.raises(UsageError):
            number(text, "x")
