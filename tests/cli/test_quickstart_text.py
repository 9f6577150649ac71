"""The corpora of the quickstart, gathered from small made-up installations."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cli import quickstart_text as text
from mdata.errors import UsageError
from mdata.progress import SILENT

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
]


def sentence(random_words, count):
    return " ".join(random_words.choice(WORDS) for _ in range(count))


@pytest.fixture
def installation(tmp_path):
    """A library of 60 modules, one site with a package; each file has its own text."""
    draw = random.Random(7)
    library, site = tmp_path / "lib", tmp_path / "site-packages"
    for i in range(60):
        path = library / f"pack{i % 3}" / f"module{i:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""{sentence(draw, 60)}."""\n\nVALUE = "{sentence(draw, 30)}"\n')
    (library / "test").mkdir()
    (library / "test" / "test_it.py").write_text("SECRET = 'never gathered'\n" * 50)
    (library / "broken.py").write_text('"""x"""\ndef (:\n' + "# filler line\n" * 40)
    info = site / "pack-1.0.dist-info"
    (info / "licenses").mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: pack\nVersion: 1.0\n\n# Pack\n\n{sentence(draw, 80)}\n")
    (info / "licenses" / "LICENSE").write_text(sentence(draw, 90))
    return library, site


def test_code_is_every_file_once_without_tests(installation):
    library, _ = installation
    (library / "zcopy.py").write_bytes((library / "pack0" / "module00.py").read_bytes())
    documents = list(text.code(library))
    assert [d.file for d in documents] == sorted(d.file for d in documents)
    assert len(documents) == 61, "60 modules and the one that does not parse; the copy and the test left out"
    assert not any("never gathered" in d.text for d in documents)


def test_prose_follows_its_file_to_its_side_and_repeats_no_paragraph(installation):
    library, site = installation
    code = {d.file: d for d in text.code(library)}
    prose = list(text.prose(library, [site]))
    from_library = [d for d in prose if d.file in code]
    assert {d.valid for d in from_library} == {True, False}
    assert all(d.valid == code[d.file].valid for d in from_library)
    names = [d.file for d in prose]
    assert "pack-1.0.dist-info/METADATA" in names and "pack-1.0.dist-info/licenses/LICENSE" in names
    metadata = next(d for d in prose if d.file.endswith("METADATA"))
    assert "# Pack" in metadata.text and "Version:" not in metadata.text
    paragraphs = [" ".join(p.lower().split()) for d in prose for p in d.text.split("\n\n")]
    paragraphs = [p for p in paragraphs if len(p) >= 80]
    assert len(paragraphs) == len(set(paragraphs))


def test_without_repeats_keeps_short_paragraphs():
    seen: set[str] = set()
    long = "the same long paragraph " * 8
    assert text.without_repeats(f"short\n\n{long}", seen) == f"short\n\n{long}"
    assert text.without_repeats(f"short\n\n{long.upper()}\n\nnew", seen) == "short\n\nnew"


def test_docstrings_of_a_source_are_found_without_running_it():
    source = b'"""A."""\nclass C:\n    """B."""\n    def f(self):\n        """C\n\n        D."""\n'
    assert text.docstrings(source) == "A.\n\nB.\n\nC\n\nD."
    assert text.docstrings(b"def (") == ""
    assert text.docstrings(b"\0") == ""


def test_prose_is_always_utf8(installation):
    library, site = installation
    (library / "surrogate.py").write_text('"""Half a pair: \\ud800."""\n')
    found = next(d for d in text.prose(library, [site]) if d.file == "surrogate.py")
    assert found.text == "Half a pair: ?."


def gather(monkeypatch, installation, folder, **limits):
    library, site = installation
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(library))
    monkeypatch.setattr(text.sys, "path", ["", str(site)])
    return text.gather(folder, SILENT, limits={**text.LIMITS, **limits})


def test_gather_writes_the_same_bytes_again(monkeypatch, installation, tmp_path):
    monkeypatch.setattr(text, "LEAST_BYTES", 1000)
    sizes = gather(monkeypatch, installation, tmp_path / "a")
    gather(monkeypatch, installation, tmp_path / "b")
    for name, size in sizes.items():
        data = (tmp_path / "a" / f"{name}.jsonl").read_bytes()
        assert data == (tmp_path / "b" / f"{name}.jsonl").read_bytes()
        records = [json.loads(line) for line in data.decode().splitlines()]
        assert size == sum(len(record["text"].encode()) for record in records)
        assert not any(Path(record["file"]).is_absolute() for record in records)
    train = {json.loads(line)["file"] for line in (tmp_path / "a/code-train.jsonl").open()}
    valid = {json.loads(line)["file"] for line in (tmp_path / "a/code-valid.jsonl").open()}
    assert train and valid and not train & valid


def test_gather_stays_below_its_limits(monkeypatch, installation, tmp_path):
    monkeypatch.setattr(text, "LEAST_BYTES", 1000)
    sizes = gather(monkeypatch, installation, tmp_path, code=20_000, prose=60_000)
    assert 18_000 < sizes["code-train"] + sizes["code-valid"] <= 20_000


def test_a_python_without_sources_is_named(monkeypatch, installation, tmp_path):
    with pytest.raises(UsageError, match=r"too little text for the quickstart's code corpus\n  found: \d+ bytes"):
        gather(monkeypatch, installation, tmp_path)
