"""`mdata cat` and `mdata adopt` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cli.mdata import main
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.corpora import write_pair
from tests.helpers.legacy_pairs import write_legacy

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "golden" / "tokenizer"
NAMED = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(FOLDER)]
TEXTS = ["One sentence, ", "and another.", "caf\u00e9 \u4e16\u754c", "last"]


@pytest.fixture
def prefix(tmp_path) -> str:
    """Document 0 has two sentences, 1 is empty, 2 and 3 have one; the last ends with eod."""
    tokenizer = load_tokenizer("HuggingFaceTokenizer", FOLDER)
    tokens, lengths = tokenizer.encode_batch(TEXTS)
    a, b, c, d = lengths.tolist()
    tokens = np.append(tokens, tokenizer.eod)
    write_pair(tmp_path / "x_text_document", [[a, b], [], [c], [d + 1]], tokens=tokens, code=8)
    return str(tmp_path / "x_text_document")


def test_adopt_then_cat(prefix, capsys):
    assert main(["adopt", prefix, *NAMED, "--full"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{prefix}.json: written\n4 documents, 4 sequences, ")
    assert main(["adopt", prefix, *NAMED, "--full", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["there_before"] and facts["verified"] and facts["documents"] == 4
    assert main(["cat", prefix]) == 0
    out = capsys.readouterr().out.split("==> document ")[1:]
    assert [part.split("<==\n")[1] for part in out] == [
        f"{TEXTS[0]}\n{TEXTS[1]}\n", "", f"{TEXTS[2]}\n", f"{TEXTS[3]}<|endoftext|>\n",
    ]  # fmt: skip
    assert out[1].startswith("1, 0 tokens")


def test_one_document_is_written_as_it_is(prefix, capsys):
    main(["adopt", prefix, *NAMED])
    capsys.readouterr()
    assert main(["cat", prefix, "--documents", "2"]) == 0
    assert capsys.readouterr().out == f"{TEXTS[2]}\n"
    assert main(["cat", prefix, "--documents=-1"]) == 0
    assert capsys.readouterr().out == f"{TEXTS[3]}<|endoftext|>\n"


def test_json_lines_and_ids(prefix, capsys):
    main(["adopt", prefix, *NAMED])
    capsys.readouterr()
    assert main(["cat", prefix, "--json", "--documents", "0:2"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["sequences"] == TEXTS[:2] and first["file"] is first["row"] is None
    assert second == {"document": 1, "file": None, "row": None, "tokens": 0, "sequences": []}
    assert main(["cat", prefix, "--json", "--ids", "--documents", "0"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert [len(ids) for ids in line["ids"]] and line["tokens"] == sum(map(len, line["ids"]))
    assert main(["cat", prefix, "--ids", "--documents", "0"]) == 0
    assert capsys.readouterr().out == "".join(" ".join(map(str, ids)) + "\n" for ids in line["ids"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "its tokenizer is unknown\n  try: --ids, or mdata adopt"),
        (["--ids", "--documents", "9"], "document 9\n  expected: one of the 4, counted from 0"),
        (["--ids", "--origin", "a.jsonl:1"], "the origins of its documents are not known"),
    ],
)
def test_what_cannot_be_shown(prefix, capsys, words, text):
    assert main(["cat", prefix, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and text in err


def test_a_reader_that_leaves(tmp_path):
    write_pair(tmp_path / "x", [[50]] * 20_000)
    words = [sys.executable, "-m", "cli.mdata", "cat", "--ids", str(tmp_path / "x")]
    child = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 0
    child.stderr.close()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tokenizer-model", "m"], "--tokenizer-model given without a tokenizer type"),
        (["--tokenizer-type", "ByteTokenizer", "--full"], "was not made by this tokenizer"),
        (["--tokenizer-type", "NoTokenizer"], "no tokenizer type 'NoTokenizer'"),
    ],
)
def test_what_cannot_be_adopted(tmp_path, capsys, words, text):
    write_pair(tmp_path / "x", [[300]])
    assert main(["adopt", str(tmp_path / "x"), *words]) == 2
    assert text in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_a_tokenizer_without_files(tmp_path, capsys):
    write_pair(tmp_path / "x", [[5]], tokens=np.frombuffer("ab\u00e9c".encode(), np.uint8), code=8)
    assert main(["adopt", str(tmp_path / "x"), "--tokenizer-type", "ByteTokenizer", "--full"]) == 0
    capsys.readouterr()
    assert main(["cat", str(tmp_path / "x")]) == 0
    assert capsys.readouterr().out == "ab\u00e9c\n"


def test_adopt_names_options_without_effect(tmp_path, capsys):
    write_pair(tmp_path / "x", [[3]], code=8)
    assert main(["adopt", str(tmp_path / "x"), "--tokenizer-type", "ByteTokenizer", "--vocab-size", "9"]) == 0
    assert capsys.readouterr().err == "mdata: ignored for ByteTokenizer: --vocab-size\n"


def test_a_pair_of_an_older_format(tmp_path, capsys):
    """Every command names it and the way out; the way works."""
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    write_legacy(Path(old), [[list(b"ab"), list(b"c")], [list(b"d")]])
    for words in (["inspect"], ["verify"], ["cat"], ["adopt"]):
        assert main([*words, old]) == 4
        error = capsys.readouterr().err
        assert "found: Megatron's TNTIDX, an older format\n" in error and len(error.splitlines()) <= 5
        assert f"try: mdata adopt {old} --convert NEWPREFIX" in error
    assert main(["adopt", old, "--convert", new, "--tokenizer-type", "ByteTokenizer"]) == 0
    assert capsys.readouterr().out == f"{new}.json: written\n2 documents, 3 sequences, 4 tokens, int32\n"
    assert main(["cat", new, "--documents", "0"]) == 0
    assert capsys.readouterr().out == "ab\nc\n"
    assert main(["adopt", old, "--convert", new, "--tokenizer-type", "ByteTokenizer"]) == 0
    assert "already exists with the same content" in capsys.readouterr().out


def test_ids_plus_one(tmp_path, capsys):
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    write_legacy(Path(old), [[[5, 1]], [[3]]], form="fairseq")
    assert main(["adopt", old, "--fairseq-ids-plus-one"]) == 2
    assert "--fairseq-ids-plus-one needs --convert" in capsys.readouterr().err
    assert main(["adopt", old, "--convert", new, "--fairseq-ids-plus-one"]) == 0
    assert "each of its 2 sequences becomes a document" in capsys.readouterr().err
    assert main(["cat", new, "--ids", "--documents", "0"]) == 0
    assert capsys.readouterr().out == "4 0\n"


def test_what_verify_advises_works(prefix, capsys):
    """A plain adopt, then --full without saying the tokenizer again."""
    main(["adopt", prefix, *NAMED])
    assert main(["verify", prefix, "--full"]) == 0
    assert "mdata adopt --full records them" in capsys.readouterr().err
    assert main(["adopt", prefix, "--full"]) == 0
    heard = capsys.readouterr()
    assert "completed; its id was" in heard.err and "written" in heard.out
    assert main(["verify", prefix, "--full"]) == 0
    assert "checked every byte of .bin" in capsys.readouterr().out
