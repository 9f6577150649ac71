"""The Python of the README, the docs and the examples: type-checked, and that of the docs run.

A page's blocks between two headings of the second level are one program, so that a block may use the names of those
before it. Blocks that are no programs are fenced as text.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys

import pytest

import mdata
import trainer
from tests.helpers.house_rules import ROOT
from tests.helpers.runs import make_corpora, write_jsonl
from tests.mdata.samples.test_chat import make_corpus
from tests.mdata.samples.test_special_tokens import preprocessed

# A page may leave types out. Said in each program: mypy would check all that they import anew for options of its own.
LOOSE = "# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-any-generics, "
LOOSE += "allow-subclassing-any"
# Need object storage, of which tests/mdata/object_storage has one, or a GPU.
NOT_RUN = ("s3://", 'device="cuda"')
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN = """
[run]
folder = "{folder}"
[model]
num_layers = 1
hidden_size = 16
num_heads = 2
vocab_size = 300
[data]
blend = "{blend}"
[train]
sequence_length = 16
global_batch = 8
micro_batch = 8
steps = {steps}
[optimizer]
lr = 0.01
"""


def programs() -> dict[str, str]:
    found = {}
    for page in PAGES:
        for section in page.read_text(encoding="utf-8").split("\n## "):
            if blocks := BLOCK.findall(section):
                name = f"{page.relative_to(ROOT).with_suffix('')}-{section.splitlines()[0].strip('# ')}"
                found[re.sub(r"\W+", "_", name)] = "\n".join(blocks)
    return found


@pytest.mark.slow
def test_the_python_of_docs_and_examples_has_the_right_types(tmp_path):
    """With the options and the cache of `make types`, which has checked what they import a moment ago."""
    for name, program in programs().items():
        (tmp_path / f"{name}.py").write_text(f"{program}\n{LOOSE}")
    for path in (ROOT / "examples").glob("*.py"):
        (tmp_path / path.name).write_text(f"{path.read_text(encoding='utf-8')}\n{LOOSE}")
    words = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", *tmp_path.glob("*.py")]
    done = subprocess.run(
        list(map(str, words)),
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with all that the pages name, small."""
    folder = tmp_path_factory.mktemp("world")
    names = ("web", "books", "prose", "code")
    texts = {name: write_jsonl(folder / f"{name}.jsonl", seed, documents=250) for seed, name in enumerate(names)}
    made = make_corpora(folder, texts)
    parts = [{"path": str(made[name]), "weight": weight} for name, weight in (("code", 7), ("prose", 3))]
    mdata.make_blend({"component": parts, "test": {"books": str(made["books"])}}, folder / "mix.json")
    (folder / "corpora").mkdir()
    (folder / "web").mkdir()
    for path in folder.glob("web_text_document*"):
        (folder / "web" / path.name).write_bytes(path.read_bytes())
    (folder / "web" / "tokenizer").symlink_to(folder / "tokenizer")
    sentences = preprocessed(folder, "BertWordPieceCase").path
    (folder / "books_text_sentence.json").write_bytes(sentences.read_bytes())
    make_corpus(folder, "talk", [[("user", "a question"), ("assistant", "an answer")]] * 60)
    first = RUN.format(folder="runs/first", blend="mix.json", steps=50)
    (folder / "first.toml").write_text(first)
    (folder / "run.toml").write_text(RUN.format(folder="runs/own", blend="mock", steps=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer.train(trainer.load_config("first.toml"))
    return folder


def first_two(loader):
    return itertools.islice(every_step(loader), 2)


every_step = mdata.Loader.__iter__


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, text in programs().items() if not any(w in text for w in NOT_RUN)])
def test_the_python_of_docs_runs(name, world, monkeypatch):
    monkeypatch.chdir(world)
    program = programs()[name]
    if "mdata.Loader(" in program:
        monkeypatch.setattr(mdata.Loader, "__iter__", first_two)  # training data has no end
    exec(compile(program, name, "exec"), {"__name__": name})
