"""The tutorial "T5 from raw text" of docs/howto/bert_t5.md, as it stands there, with fewer steps."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import mdata
from cli import mdata as mdata_command
from cli import mtrain as mtrain_command
from mdata.sentences.punkt_tables import FILES
from trainer.tasks.loaded_model import Model

PAGE = Path(__file__).parents[2] / "docs/howto/bert_t5.md"
COMMANDS = {"mdata": mdata_command.main, "mtrain": mtrain_command.main}
WORDS = (
    "time",
    "age",
    "season",
    "spring",
    "winter",
    "light",
    "belief",
    "hope",
    "wisdom",
    "was",
    "it",
    "the",
    "of",
    "best",
)


def _section() -> str:
    return PAGE.read_text(encoding="utf-8").split("## T5 from raw text\n")[1].split("\n## ")[0]


def _commands() -> list[list[str]]:
    """The commands of the section, with braces expanded as a shell does."""
    blocks = re.findall(r"<!-- run by tests/cli/test_t5_tutorial.py -->\n```bash\n(.*?)```", _section(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    how = {"capture_output": True, "text": True, "check": True, "timeout": 30}
    shown = [subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], **how).stdout for line in lines]
    return [text.splitlines() for text in shown]


def _write_input(folder: Path) -> None:
    draw = np.random.default_rng(5)
    texts = [
        " ".join(f"{' '.join(draw.choice(WORDS, 9))}.".capitalize() for _ in range(draw.integers(3, 8)))
        for _ in range(60)
    ]
    (folder / "book.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tables = folder / "nltk_data/tokenizers/punkt_tab/english"  # without exceptions: a sentence ends with its mark
    tables.mkdir(parents=True)
    for name in FILES:
        (tables / name).write_text("")


def test_the_tutorial_trains_fills_spans_and_exports(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    _write_input(tmp_path)
    (settings,) = re.findall(r"<!-- t5.toml of [^\n]*\n```toml\n(.*?)```", _section(), re.DOTALL)
    assert "steps = 1000" in settings
    (tmp_path / "t5.toml").write_text(settings.replace("steps = 1000", "steps = 3"))
    texts = {}
    for command in _commands():
        assert COMMANDS[command[0]](command[1:]) in (None, 0), command
        texts[" ".join(command[:2])] = capsys.readouterr()
    answer = texts["mtrain generate"].out
    assert answer.startswith("it was the <extra_id_0> of times\n")
    assert "token ids are those of training" in texts["mtrain convert"].out + texts["mtrain convert"].err
    model = transformers.T5ForConditionalGeneration.from_pretrained("./t5-hf")
    assert model.generation_config.decoder_start_token_id == model.generation_config.pad_token_id
    tokenizer = transformers.AutoTokenizer.from_pretrained("./t5-hf")
    prompt = "it was the <extra_id_0> of times"
    inputs = tokenizer(prompt, return_tensors="pt")
    assert inputs["input_ids"].tolist() == [tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    written = {}
    for folder in ("runs/t5", "t5-hf"):
        capsys.readouterr()
        assert mtrain_command.main(
            ["generate", folder, "--prompt", prompt, "--max-tokens", "8", "--temperature", "0"]
        ) in (None, 0)
        written[folder] = capsys.readouterr().out
    assert written["runs/t5"] == written["t5-hf"]
    assert model.generate(**inputs, max_new_tokens=2).shape == (1, 3)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        pytest.param("wordpiece", [], marks=pytest.mark.soak),
        ("wordpiece", ["[BOS]", "[EOS]"]),
        ("byte-bpe", ["[CLS]", "[SEP]"]),
        pytest.param("byte-bpe", ["<pad>", "</s>"], marks=pytest.mark.soak),
    ],
)
def test_answers_begin_and_end_as_rows_do(kind, tokens, tmp_path, capsys):
    """Whatever begins and ends texts of this tokenizer; the export says the same, with all special tokens."""
    _write_input(tmp_path)
    book, words, prefix = (str(tmp_path / name) for name in ("book.jsonl", "words", "spans"))
    lower = ["--lower-case"] if kind == "wordpiece" else []
    command = ["train-tokenizer", "--input", book, "--vocab-size", "300", "--kind", kind, *lower, "--output", words]
    assert mdata_command.main(command) in (None, 0)
    command = ["preprocess", "--input", book, "--output-prefix", prefix, "--split-sentences", "--nltk-data"]
    command += [str(tmp_path / "nltk_data"), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", words]
    command += ["--tokenizer-hf-no-include-special-tokens", "--tokenizer-special-tokens", *tokens]
    assert mdata_command.main([*command, *(f"<extra_id_{number}>" for number in range(32))]) in (None, 0)
    (settings,) = re.findall(r"<!-- t5.toml of [^\n]*\n```toml\n(.*?)```", _section(), re.DOTALL)
    (tmp_path / "t5.toml").write_text(settings)
    run = str(tmp_path / "run")
    words = ["train.steps=1", f"run.folder={run}", f"data.blend={prefix}_text_sentence.json", "data.split=100,0,0"]
    assert mtrain_command.main(["train", str(tmp_path / "t5.toml"), *words]) in (None, 0)
    dataset = mdata.open_dataset(f"{prefix}_text_sentence.json", sequence_length=64, kind=mdata.T5(decoder_length=32))
    fields = dataset.read([0]).fields
    first, last = fields["text_dec"][0, 0], fields["labels"][0][fields["labels"][0] >= 0][-1]
    capsys.readouterr()
    assert mtrain_command.main(["convert", run, str(tmp_path / "hf"), "--to", "hf"]) in (None, 0)
    if find_spec("transformers") is not None:
        assert "token ids are those of training" in "".join(capsys.readouterr())
    for folder in (run, str(tmp_path / "hf")):
        model = Model.load(folder)
        assert (model.start, model.ends) == (first, {last})
        assert (
            model.encode("it <extra_id_0> was")
            == dataset.load_tokenizer().encode_batch(["it <extra_id_0> was"])[0].tolist()
        )
