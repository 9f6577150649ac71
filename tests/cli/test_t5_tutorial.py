"""The tutorial "T5 from raw text" of docs/howto/bert_t5.md, as it stands there, with fewer steps."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cli import mdata as mdata_command
from cli import mtrain as mtrain_command
from mdata.sentences.punkt_tables import FILES

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


def test_the_tutorial_trains_fills_spans_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    _write_input(tmp_path)
    (settings,) = re.findall(r"<!-- t5.toml of [^\n]*\n```toml\n(.*?)```", _section(), re.DOTALL)
    assert "steps = 2000" in settings
    (tmp_path / "t5.toml").write_text(settings.replace("steps = 2000", "steps = 3"))
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
    inputs = tokenizer("it was the <extra_id_0> of times", add_special_tokens=False, return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=2).shape == (1, 3)
