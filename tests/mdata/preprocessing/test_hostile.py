"""Hostile input through the whole pipeline: the outcomes of sources/malformed.md, and the reference's counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mdata
from mdata import BadInputError
from mdata.errors import MdataError
from tests.mdata.preprocessing.test_preprocess import contents
from tests.mdata.sources.test_page import STATED, hostile

pytestmark = pytest.mark.usefixtures("loaded_once")
REFERENCE = re.compile(
    r"\| (?:jsonl|compressed)/(\S+) \|.*?\| accepted, exit 0: (\d+) documents, \d+ sequences, (\d+) tokens"
)
# Rows of malformed.md: "row 2: blank; rows 3-5: not-json".
BAD = re.compile(r"rows? (\d+)(?:-(\d+))?: (\S+?)(?:;|$)")


def run(path: Path, folder: Path, **changes) -> mdata.CorpusManifest:
    options = {"tokenizer_type": "ByteTokenizer", "workers": 1, "on_error": "skip", "input_format": "auto", **changes}
    job = mdata.PreprocessOptions(input=(str(path),), output_prefix=str(folder / "out"), **options)
    return mdata.preprocess(job).manifests["text"]


@pytest.mark.slow
def test_every_hostile_file_has_the_stated_outcome(tmp_path, oracles):
    for path in hostile(oracles / "hostile"):
        documents, bad = STATED[path.name]
        folder = tmp_path / path.name
        if bad.startswith("refused"):
            with pytest.raises(MdataError, match=f"^{re.escape(str(path))}(: | is ){bad.removeprefix('refused: ')}"):
                run(path, folder)
            continue
        rows = [(int(first), int(last or first), kind) for first, last, kind in BAD.findall(bad)]
        manifest = run(path, folder)
        skipped: dict[str, int] = {}
        for first, last, kind in rows:
            skipped[kind] = skipped.get(kind, 0) + last - first + 1
        assert (manifest.shards[0].documents, manifest.provenance.skipped) == (documents, skipped), path.name
        assert bool(rows) == (bad != "none")
        if rows:
            with pytest.raises(BadInputError, match=f"^{re.escape(str(path))}:{rows[0][0]}: ") as caught:
                run(path, folder / "stop", on_error="stop")
            assert len(str(caught.value).splitlines()) <= 4, path.name
            assert contents(folder / "stop") == {}, path.name


@pytest.mark.slow
def test_what_the_reference_accepts_gives_as_many_tokens(tmp_path, oracles):
    """Among them words of a million letters, blanks, digits and joined emoji."""
    found = REFERENCE.findall((oracles / "hostile" / "table.md").read_text())
    vocabulary = oracles / "vocab" / "gpt2"
    for name, documents, tokens in found:
        path = next(path for path in hostile(oracles / "hostile") if path.name == name)
        files = {"vocab_file": str(vocabulary / "vocab.json"), "merge_file": str(vocabulary / "merges.txt")}
        manifest = run(
            path, tmp_path / name, tokenizer_type="GPT2BPETokenizer", append_eod=True, on_error="stop", **files
        )
        assert (manifest.shards[0].documents, manifest.shards[0].tokens) == (int(documents), int(tokens)), name
    assert len(found) > 10
