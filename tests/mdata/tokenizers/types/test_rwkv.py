"""RWKVTokenizer: ids against the twin, the forms of its file, what is refused by line, and a corpus with its copy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from cli.mdata import main
from mdata import UsageError, _core
from mdata.tokenizers.base.tokenizer import TextRefused, TokenizerSpec
from mdata.tokenizers.registry import build_tokenizer, config_of, load_tokenizer
from mdata.tokenizers.types.rwkv import FILE, read_vocabulary
from tests.helpers.examples import examples
from tests.reference.rwkv import encode as twin

# As in the published file: bytes that are text first, others as b'', then longer entries in any order.
ASCII = [chr(byte) for byte in range(128)]
OTHERS = [bytes([byte]) for byte in range(128, 256)]
LONGER = [
    "ab",
    "abc",
    "abcd",
    "cd",
    "  ",
    "\r\n",
    "it's",
    '"',
    "'\"",
    "\u2028",
    "\xe9",
    "\xe9a",
    b"\xe9\x80",
    "d" * 128,
]
TOKENS = [*ASCII, *OTHERS, *(token for token in LONGER if token not in ASCII)]


def line(id, token, literal=None):
    size = len(token.encode() if isinstance(token, str) else token)
    return f"{id} {literal or repr(token)} {size}\n"


LINES = [line(id, token) for id, token in enumerate(TOKENS, 1)]
CONTENT = "".join(LINES).encode()
IDS = {token.encode() if isinstance(token, str) else token: id for id, token in enumerate(TOKENS, 1)}
TOKENIZER = build_tokenizer("RWKVTokenizer", {FILE: CONTENT})


@given(st.lists(st.text(st.sampled_from("abcd '\"\r\n\u2028\xe9\u9000\U0001f600") | st.characters(codec="utf-8"))))
@examples(60)
def test_ids_are_the_twins(texts):
    ids, lengths = TOKENIZER.encode_batch(texts)
    assert [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])][: len(texts)] == [
        twin(text, IDS) for text in texts
    ]
    assert (ids.dtype, lengths.dtype, len(lengths)) == (np.int32, np.int64, len(texts))
    assert TOKENIZER.decode(ids.tolist()) == "".join(texts)


def test_the_longest_entry_wins_and_the_end_of_documents_is_in_no_text():
    ids, _ = TOKENIZER.encode_batch(["abcdab", "<|endoftext|>"])
    assert ids[:2].tolist() == [IDS[b"abcd"], IDS[b"ab"]] and 0 not in ids
    assert (TOKENIZER.eod, TOKENIZER.bos, TOKENIZER.vocab_size) == (0, None, len(TOKENS) + 1)
    assert TOKENIZER.decode([IDS[b"a"], 0, 10**6]) == "a<|endoftext|>\ufffd"
    with pytest.raises(TextRefused, match="text 1: a lone surrogate at character 1"):
        TOKENIZER.encode_batch(["a", "x\ud800"])
    with pytest.raises(ValueError, match="a byte has no entry"):
        _core.GreedyTrie({b"a": 1})


def test_the_fingerprint_is_that_of_entries_and_ids():
    other = [*reversed(LINES[1:]), "\n", "1 '\\0' 1"]  # order, an empty line, another literal, no line end
    same = build_tokenizer("RWKVTokenizer", {FILE: "".join(other).replace("\n", "\r\n").encode()})
    assert same.fingerprint == TOKENIZER.fingerprint
    content = CONTENT.replace(line(IDS[b"ab"], "ab").encode(), line(IDS[b"ab"], "zz").encode())
    assert build_tokenizer("RWKVTokenizer", {FILE: content}).fingerprint != TOKENIZER.fingerprint


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("900 'x", "v.txt:271: not an entry of a vocabulary"),
        ("900 'xy' 2 ", "v.txt:271: not an entry of a vocabulary"),
        ("900 'xy'+'z' 3", "v.txt:271: not an entry of a vocabulary"),
        ("900 '\\xz' 1", "v.txt:271: not a Python literal"),
        ("900 '\\ud800' 3", "v.txt:271: not a Python literal"),
        ("900 b'\xe9' 1", "v.txt:271: not a Python literal"),
        ("900 'xy' 3", "v.txt:271: an entry of 2 bytes"),
        ("900 '' 0", "v.txt:271: an entry of 0 bytes"),
        ("0 'xy' 2", "v.txt:271: the id 0"),
        ("4000000000 'xy' 2", "v.txt:271: the id 4000000000"),
        ("900 'ab' 2", "v.txt:271: the entry or its id is in line 257 already"),
        ("1 'xy' 2", "v.txt:271: the entry or its id is in line 1 already"),
    ],
)
def test_wrong_lines_are_named(more, message):
    assert len(LINES) == 269
    with pytest.raises(UsageError) as caught:
        read_vocabulary(CONTENT + b"\n" + more.encode() + b"\n", "v.txt")
    assert str(caught.value).startswith(message)


def test_a_byte_without_an_entry_and_no_file_are_refused():
    with pytest.raises(UsageError, match=r"v\.txt: byte 97 has no entry"):
        read_vocabulary(CONTENT.replace(line(98, "a").encode(), b""), "v.txt")
    with pytest.raises(UsageError, match="RWKVTokenizer needs a vocabulary"):
        load_tokenizer(TokenizerSpec(type="RWKVTokenizer"))


def test_a_corpus_keeps_its_vocabulary(tmp_path):
    (tmp_path / "v.txt").write_bytes(CONTENT)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "abcdab"}) + "\n")
    words = ["preprocess", "--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out")]
    words += ["--tokenizer-type", "RWKVTokenizer", "--tokenizer-model", str(tmp_path / "v.txt"), "--append-eod"]
    assert main(words) == 0
    corpus = mdata.open_corpus(tmp_path / "out_text_document.json")
    assert corpus.document(0).tolist() == [IDS[b"abcd"], IDS[b"ab"], 0]
    (tmp_path / "v.txt").unlink()
    assert config_of(TOKENIZER).files[FILE] == next(tmp_path.glob(f"**/*{FILE}")).read_bytes()
