"""Commands with pipes in the place of files that users name: each is refused, where opening it would wait."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from cli.mdata import main as mdata_main
from cli.mtrain import main as mtrain_main


@pytest.fixture
def no_waiting():
    """An open that waits ends with an error of the test."""

    def fail(number, frame):
        raise AssertionError("a pipe was opened")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


TOKENIZERS = {
    "HuggingFaceTokenizer": "--tokenizer-model pipe",
    "SentencePieceTokenizer": "--tokenizer-model pipe",
    "TikTokenizer": "--tokenizer-model pipe",
    "GPT2BPETokenizer": "--vocab-file pipe --merge-file pipe",
    "BertWordPieceLowerCase": "--vocab-file pipe",
}
TEXTS = "mdata preprocess --input a.jsonl --output-prefix out --workers 1 --tokenizer-type"
COMMANDS = [
    "mdata inspect pipe.json",
    "mdata inspect pair",
    "mdata verify pair",
    "mdata cat pair",
    "mdata blend -o mix.json pipe.toml",
    "mdata blend -o mix.json 1 pipe.json",
    f"{TEXTS} ByteTokenizer --chat --chat-template pipe",
    *(f"{TEXTS} {name} {options}" for name, options in TOKENIZERS.items()),
    "mtrain check pipe.toml",
    "mtrain config --from-megatron pipe.sh",
    "mtrain report run",
    "mtrain convert mp_rank out --to hf",
    "mtrain convert torch_dist out --to hf",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_pipes(command, tmp_path, monkeypatch, capsys, no_waiting):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("mp_rank/mp_rank_00").mkdir(parents=True)
    Path("torch_dist").mkdir()
    Path("a.jsonl").write_text('{"text": "hello"}\n')
    files = "pipe pipe.json pipe.toml pipe.sh pair.bin run/metrics.jsonl torch_dist/common.pt"
    for name in [*files.split(), "mp_rank/mp_rank_00/model_optim_rng.pt"]:
        os.mkfifo(name)
    Path("torch_dist/.metadata").touch()
    if "pair" in command:
        assert mdata_main(f"{TEXTS} ByteTokenizer".split()[1:]) == 0
        shutil.copy("out_text_document.idx", "pair.idx")
    program, *words = command.split()
    assert {"mdata": mdata_main, "mtrain": mtrain_main}[program](words) == 2
    assert "is not a regular file\n  found: a pipe" in capsys.readouterr().err
