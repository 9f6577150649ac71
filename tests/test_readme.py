"""The marked blocks of the README, the tutorial and the guides are run, command by command; links lead to files."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import mdata
from cli import mdata as mdata_command
from cli import mtrain as mtrain_command
from mdata import errors
from mdata.sentences.punkt_tables import FILES
from mdata.version import DISTRIBUTION
from tests.helpers import pages, runs
from tests.helpers.labelled import write_bert

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- (?P<mark>[^>]*tests/test_readme\.py) -->\n```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
# In this order, in one folder: the guides use what the tutorial makes.
PAGES = ["docs/tutorial.md", "README.md", *sorted(f"docs/howto/{path.name}" for path in ROOT.glob("docs/howto/*.md"))]
PAGES += ["docs/reference/input.md"]
# The tutorial trains for minutes; what its commands do shows after a few steps, on a part of its text.
SHORTER = {
    'glob("*.py")': 'glob("[a-d]*.py")',
    "--vocab-size 2048": "--vocab-size 600",
    "num_layers = 4": "num_layers = 2",
    "steps = 300": "steps = 20",
    "steps = 600": "steps = 6",
    "train.steps=320": "train.steps=22",
    "sequence_length = 256": "sequence_length = 128",
    "eval_interval = 100": "eval_interval = 15",
    "eval_samples = 64": "eval_samples = 8",
    "warmup_steps = 30": "warmup_steps = 5",
    "'400 steps'": "'3 steps'",
}
GENERATED = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))["PAGES"]
DOCUMENTS = [path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]]


@pytest.fixture(scope="module")
def blocks():
    """(page, mark, kind, text) of the blocks that are run."""
    return [
        (page, match["mark"], match["kind"], match["text"])
        for page in PAGES
        for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))
    ]


@pytest.fixture(scope="module")
def environment():
    """The console scripts of this Python come first, whatever they were installed from."""
    folder = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{folder}:{os.environ.get('PATH', '')}"}


def test_marked_blocks_are_found(blocks):
    found = Counter(page for page, *_ in blocks)
    assert found["README.md"] == 3 and found["docs/tutorial.md"] == 11 and sum(found.values()) >= 18
    commands = [line for page, _, kind, text in blocks if kind == "bash" for line in text.splitlines()]
    assert len([line for line in commands if line.startswith("m")]) >= 30


def test_every_command_of_the_tutorial_is_run(blocks):
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    run = "".join(text for page, _, _, text in blocks if page == "docs/tutorial.md")
    for block in re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        assert block in run or "pip install" in block


def _write_input(folder):
    """What the commands name: texts of every kind, one bad row among them, and the two files of a GPT-2 vocabulary."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    write_bert(folder / "bert-base-uncased")
    (folder / "shelf").mkdir()
    runs.write_jsonl(folder / "your.jsonl", 1, documents=150)
    plain = runs.write_jsonl(folder / "shelf" / "plain.jsonl", 2, documents=100).read_bytes()
    (folder / "other.jsonl.gz").write_bytes(gzip.compress(plain))
    (folder / "shelf" / "packed.jsonl.zst").write_bytes(zstandard.compress(plain + b'{"txt": "no such key"}\n'))
    (folder / "shelf" / "note.txt").write_text("A file is a document.")
    short = [" ".join(json.loads(line)["text"].split()[:12]).strip(".").capitalize() for line in plain.splitlines()]
    chapters = [{"text": ". ".join(short[first : first + 5]) + "."} for first in range(0, len(short), 5)]
    (folder / "book.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chapters))
    tables = folder / "nltk_data/tokenizers/punkt_tab/english"  # without exceptions: a sentence ends with its mark
    tables.mkdir(parents=True)
    for name in FILES:
        (tables / name).write_text("")
    texts = [json.loads(line)["text"] for line in plain.splitlines()]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "papers.parquet")
    mdata.train_tokenizer([folder / "your.jsonl"], folder / "learnt", vocab_size=300)
    model = json.loads((folder / "learnt" / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    draw = random.Random(0)
    records = [pages.warc_record(pages.answer(pages.html(pages.sentences(draw, 15))), number=n) for n in range(60)]
    (folder / "crawl.warc.gz").write_bytes(b"".join(map(gzip.compress, records)))
    articles = b"".join(pages.wiki_page(f"P {n}", pages.sentences(draw, 15), number=n) for n in range(60))
    (folder / "wiki.xml.bz2").write_bytes(bz2.compress(pages.DUMP_HEAD + articles + pages.DUMP_END))


def _run(line, environment):
    """The exit code of a line of a shell."""
    program, *words = shlex.split(line, comments=True)
    command = {"mdata": mdata_command, "mtrain": mtrain_command}.get(program)
    if command is None or {"|", ">"} & set(words):
        return subprocess.run(["bash", "-e", "-c", line], env=environment).returncode
    return command.main(words)


def _shorter(text):
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def test_the_commands_are_installed_under_their_names():
    expected = {"mdata": "mdata_mtrain.cli.mdata:main", "mtrain": "mdata_mtrain.cli.mtrain:main"}
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == expected
    scripts = metadata.entry_points(group="console_scripts", module="mdata_mtrain.cli.mdata")
    assert all(script.dist.name == DISTRIBUTION for script in scripts)


@pytest.mark.slow
def test_marked_blocks_run(blocks, environment, tmp_path, monkeypatch, capfd):
    """Commands run in this process, which has imported what they need; a line with a pipe runs in the shell."""
    _write_input(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for page, mark, kind, text in blocks:
        if page == "docs/howto/extract.md" and find_spec("resiliparse") is None:
            continue
        if mark.startswith("run by") and kind == "python":
            exec(text, {})
        elif kind != "bash":
            Path(mark.split()[0]).write_text(_shorter(text))
        else:
            for line in _shorter(text).replace("\\\n", " ").splitlines():
                if line and not line.startswith("#"):
                    assert _run(line, environment) == 0, f"{page}: {line}\n{capfd.readouterr()}"
    printed = capfd.readouterr().out
    assert "(64,) (64,) 64.0" in printed
    (bad,) = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert json.loads(bad)["kind"] == "no-key" and "gigatoken" in printed
    made = {
        name: mdata.load_manifest(tmp_path / f"{name}_text_document.json") for name in ("all", "all_holdout", "piped")
    }
    counts = {name: manifest.shards[0].documents for name, manifest in made.items()}
    assert counts["all"] + counts["all_holdout"] == 301 and counts["all_holdout"] and counts["piped"] == 100
    made = {path.name for path in (tmp_path / "runs" / "first").iterdir()}
    assert {"report.html", "generated.jsonl", "metrics.jsonl", "ranks.json", "config.toml", "checkpoints"} <= made


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        path = (ROOT / name).parent.joinpath(target).resolve()
        generated = path.is_relative_to(ROOT / "docs") and path.relative_to(ROOT / "docs").as_posix() in GENERATED
        assert path.exists() or generated, f"{name} links to {target}"


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_files_that_are_named_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:mdata|trainer|cli|tests|configs|docs|scripts|benchmarks|mdata_cpp)/[\w./-]+)`", text)
    missing = [path for path in named if "NAME" not in path and not (ROOT / path).exists()]  # NAME: of your own
    assert not missing, f"{name} names {missing}"


def test_every_exit_code_is_in_its_table():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")]
    page = (ROOT / "docs/reference/exit_codes.md").read_text(encoding="utf-8")
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert codes == sorted({0, 130, *(kind.exit_code for kind in kinds)})


def test_the_readme_is_short_and_its_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"(?:^|`)make\s+(\w+)", README, re.MULTILINE)
    assert len(targets) >= 3 and all(f"\n{target}:" in makefile for target in targets)
    assert len(README.splitlines()) <= 150
