"""Every hostile tokenizer file has the outcome of malformed.md, as in the reference; docs/reference/tokenizers.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mdata import UsageError
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import available, load_tokenizer
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reference" / "tokenizers.md").read_text()
ROW = re.compile(r"^\| `((?:good|hf|merges|sp|tik|vocab|wordpiece)_\S+)` \| [^|]+ \| (.+) \|$", re.MULTILINE)
STATED = dict(ROW.findall(Path(__file__).with_name("malformed.md").read_text()))
REFERENCE = re.compile(
    r"^\| tokenizer/(\S+) \|.*\| (?:accepted: vocab size (\d+), eod (\d+), `hello world Z` gives \[(.*)\]|(\w+).*) \|$",
    re.MULTILINE,
)
# Given to the reference so that its list is large enough.
TIK_SIZE = 1259
# The reference takes it, and gives " w" the id that ends documents.
STRICTER = {"vocab_no_endoftext.json"}


def spec_of(folder, name):
    if name.startswith("hf_"):
        return TokenizerSpec(type="HuggingFaceTokenizer", model=str(folder / name))
    if name.startswith("wordpiece_"):
        return TokenizerSpec(type="BertWordPieceLowerCase", vocab_file=str(folder / name))
    if name.startswith("sp_"):
        return TokenizerSpec(type="SentencePieceTokenizer", model=str(folder / name))
    if name.startswith("tik_"):
        options = (("vocab_size", TIK_SIZE),) if name.endswith(".json") else ()
        return TokenizerSpec(type="TikTokenizer", model=str(folder / name), options=options)
    vocabulary = name if "vocab" in name else "good_vocab.json"
    merges = name if "merges" in name else "good_merges.txt"
    return TokenizerSpec(type="GPT2BPETokenizer", vocab_file=str(folder / vocabulary), merge_file=str(folder / merges))


def outcome(folder, name):
    """As the table states it: what is taken and gives which ids, or the first line of the error."""
    try:
        tokenizer = load_tokenizer(spec_of(folder, name))
    except UsageError as error:
        lines = str(error).replace(f"{folder}/", "").splitlines()
        assert len(lines) in (2, 3, 4)
        return "refused: " + lines[0].replace("|", "\\|")
    ids = " ".join(map(str, tokenizer.encode_batch(["hello world Z"])[0].tolist()))
    return f"taken: {tokenizer.vocab_size} entries, end {tokenizer.eod}, ids {ids}"


def test_every_hostile_file_has_the_stated_outcome(oracles):
    folder = oracles / "hostile" / "tokenizer"
    names = sorted(path.name for path in folder.iterdir())
    assert {name: outcome(folder, name) for name in names} == STATED
    assert len(names) == 42


def test_what_the_reference_takes_is_taken_with_its_ids_and_no_more(oracles):
    rows = REFERENCE.findall((oracles / "hostile" / "table.md").read_text())
    assert len(rows) == len(STATED)
    for path, size, end, ids, verdict in rows:
        name = path.removesuffix("/tokenizer.json")
        if size and name not in STRICTER:
            expected = f"taken: {size} entries, end {end}, ids {ids.replace(',', '')}"
            assert STATED[name] == expected, name
        elif name not in ("tik_good.tiktoken",):
            assert verdict in ("refused", "not", ""), name
            assert STATED[name].startswith("refused: "), name


@pytest.mark.parametrize("type", available())
def test_every_type_has_its_row_and_its_section(type):
    assert re.search(rf"^\| `{type}`", PAGE, re.MULTILINE)
    assert re.search(rf"^### .*\b{type}\b", PAGE, re.MULTILINE)
