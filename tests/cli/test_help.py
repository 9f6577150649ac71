"""--help of every command: it fits the terminal, and its examples work."""

from __future__ import annotations

import gzip
import json
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from cli import mdata, mtrain
from cli.console import command_parser
from cli.help import EXAMPLES, split_examples, wrapped
from tests.helpers import pages
from tests.helpers.corpora import write_pair

COMMANDS = [(main, command) for main in (mdata, mtrain) for command in main.COMMANDS]
EVERY = pytest.mark.parametrize(("program", "command"), COMMANDS, ids=lambda one: getattr(one, "name", ""))
# Not run: they need object storage, Slurm, files of others, a trained model, or a minute, or go on in the background.
NOT_RUN = {
    "mdata fetch": 2, "mdata stage": 2, "mdata launch slurm": 1, "mdata adopt gpt2_text_document": 1,
    "mdata trace runs/first": 1, "mdata tokenizers": 2, "mtrain check run.toml --ranks": 1, "mtrain train": 2,
    "mtrain prove": 2, "mtrain track": 2, "mtrain report": 2, "mtrain generate": 2, "mtrain eval": 2,
    "mtrain serve": 2, "mtrain chat": 2, "mtrain client": 2,
    "mtrain logits": 2, "mtrain convert": 2, "mtrain inspect": 2,
    "mtrain finetune": 2, "mtrain launch": 2, "mtrain status": 2, "mtrain tail": 2, "mtrain stop": 2, "mtrain skip": 2,
    "mtrain config --from-megatron": 1, "mtrain plan run.toml --gpus": 1,
}  # fmt: skip
RUN = """
[run]
folder = "runs/first"
[model]
num_layers = 2
hidden_size = 16
num_heads = 2
vocab_size = 300
[data]
blend = "mock"
[train]
sequence_length = 16
global_batch = 8
micro_batch = 1
steps = 3
[optimizer]
lr = 1e-3
"""


def examples_of(text: str) -> list[str]:
    """The command lines in the examples of a docstring; a line that ends in a backslash continues."""
    lines = split_examples(text)[1].replace("\\\n", " ").splitlines()[1:]
    return [" ".join(line.split()) for line in lines]


def examples(command) -> list[str]:
    return examples_of(import_module(command.module, "cli").__doc__)


def test_the_usage_shows_what_may_be_repeated(capsys):
    assert mtrain.main(["report", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: mtrain report [options] RUN ...\n")


@EVERY
@pytest.mark.parametrize("columns", [72, 132])
def test_help_fits_the_terminal_and_ends_with_two_examples(program, command, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert program.main([command.name, "--help"]) == 0
    text, heading, shown = capsys.readouterr().out.partition(f"\n{EXAMPLES}")
    assert max(map(len, text.splitlines())) <= columns
    assert heading and examples_of(f"{EXAMPLES}{shown}") == examples(command)
    assert len(examples(command)) == 2
    assert "options of every command:\n  -h, --help" in text


def test_an_overview_fits_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for program in (mdata, mtrain):
        assert program.main(["--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 60
        assert [line.split()[0] for line in lines if line[:2] == "  " and line[2] != " "] == [
            command.name for command in program.COMMANDS
        ]


def test_indented_lines_are_not_wrapped():
    assert wrapped("one two\nthree\n\n  four five\nsix", 9) == ["one two", "three", "", "  four five", "six"]


@EVERY
def test_examples_are_command_lines(program, command):
    module = import_module(command.module, "cli")
    for example in examples(command):
        name, given, *words = shlex.split(example.partition(" > ")[0])
        assert given == command.name
        assert name == program.__name__.removeprefix("cli.") or given == "completion"  # of both programs
        parser = command_parser(name, command, module)
        parser.parse_intermixed_args(words[: words.index("--")] if "--" in words else words)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """What the examples read; each writes what later ones read."""
    monkeypatch.chdir(tmp_path)
    for name, word in (("web", "river"), ("code", "return")):
        lines = [json.dumps({"text": f"{word} {i} {chr(97 + i % 26) * 9} of {word}s"}) + "\n" for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    asked = {"question": "How many rivers are there in all of the words?", "text": "river of rivers and of codes"}
    for name in ("gsm8k", "eval"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(asked) + "\n")
    (tmp_path / "crawl.warc.gz").write_bytes(gzip.compress(pages.warc_record(pages.answer(pages.html()))))
    (tmp_path / "wiki.xml").write_bytes(pages.DUMP_HEAD + pages.wiki_page("A", "B") + pages.DUMP_END)
    samples = [{"id": n, "prompt": f"p{n % 2}", "text": f"sample {n}"} for n in range(20)]
    scores = [{**one, "score": {"toxicity": 1 / (one["id"] + 1)}} for one in samples]
    quality = [{"id": one["id"], "score": {"edu": one["id"], "fun": 0}} for one in samples]
    rated = [{"prompt": {"text": f"p{n}", "toxicity": n}} for n in range(2)]
    files = {"samples": samples, "scores": scores, "quality": quality, "rated_prompts": rated}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_pair(tmp_path / "other_text_document", [[5], [6]])
    (tmp_path / "run.toml").write_text(RUN)
    words = ["preprocess", "--input", "web.jsonl", "--output-prefix", "parts", "--tokenizer-type", "ByteTokenizer"]
    for shard in ("1/2", "2/2"):
        assert mdata.main([*words, "--shard", shard]) == 0
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_examples_work(capsys):
    """In the order of the commands, but for smaller numbers; what is not run is counted."""
    not_run = dict.fromkeys(NOT_RUN, 0)
    smaller = {
        "32000": "300",
        "4096": "16",
        "1e9": "1e2",
        "100000": "20",
        "98,1,1": "60,20,20",
        "--nproc 8": "",
        "--at-once 2": "--cpus 1",
    }
    for program, command in COMMANDS:
        if command.name == "extract" and find_spec("resiliparse") is None:
            continue
        for example in examples(command):
            skipped = [start for start in not_run if f"{example} ".startswith(f"{start} ")]
            if skipped:
                not_run[skipped[0]] += 1
                continue
            text = example
            for large, small in smaller.items():
                text = text.replace(large, small)
            words = shlex.split(text.partition(" > ")[0])[1:]
            assert program.main(words) == 0, (example, capsys.readouterr().err)
            capsys.readouterr()
    assert not_run == NOT_RUN
