"""The C++ engine, its twin and NLTK give the same sentences: random texts, golden ones, files of Megatron's tool."""

from __future__ import annotations

import gzip
import hashlib
import json
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.sentences import punkt_reference as twin
from mdata.sentences.splitter import build_splitter, load_splitter, self_check_texts
from tests.helpers.examples import examples
from tests.mdata.sentences import visible

GOLDEN = Path(__file__).parents[2] / "golden" / "sentences.json"
LANGUAGES = ("english", "german", "french")

MARKS = ".?!.?!..\"')]}({[*:@;,-`&#\u2018\u2019\u201c\u201d\xab\xbb"
BLANKS = "   \n\t\xa0\x85\x1c\x1f\u2028\u3000\r\x0b\x0c"
LETTERS = "aAbZz\xe9\xc9\xdf\u0130\u03a3\u03c3\u0391\u0301\u4e00\u01c5\u02b0_07\u0663\U0001d400\U0001f600\ud800"
NEWER = "\u10fc\ua7f2\U0001fae8\U0001e030\U00010d50\U00010d41\u0378"
PIECES = ("..", "...", "--", ". . .", ".\xa0.\xa0.", "- -", "1.2.", "3,5", "-1", "a?b", "##number##", " ", ". ")
SPLIT_CASES = {
    "split-gpt2-small": ("small", "english", False),
    "split-gpt2-en": ("en", "english", False),
    "split-gpt2-en-kn": ("en", "english", True),
    "split-gpt2-edge": ("edge", "english", False),
    "split-gpt2-edge-kn": ("edge", "english", True),
    "split-gpt2-multi-german": ("multi", "german", False),
    "split-gpt2-multi-french-kn": ("multi", "french", True),
    "split-gpt2-keys": ("keys", "english", False),
    "split-gpt2-long": ("long_line", "english", False),
}


@cache
def splitter(engine, keep):
    return build_splitter(visible.files(), language="ours", keep_newlines=keep, engine=engine)


def drawn_texts(words, characters=(MARKS, BLANKS, LETTERS)):
    words = st.sampled_from([*words, *PIECES])
    short = [st.sampled_from(part) for part in characters]
    piece = st.one_of(words, words.map(str.upper), words.map(lambda word: f" {word}. "), *short)
    return st.lists(piece, max_size=14).map("".join)


def assert_alike(text, keep):
    expected = splitter("nltk", keep).split_batch([text])[0]
    assert splitter("mdata", keep).split_batch([text])[0] == expected
    assert twin.split(text, splitter("nltk", keep)._tables, keep_newlines=keep) == expected


@examples(1000)
@given(drawn_texts(visible.WORDS), st.booleans())
def test_drawn_texts(text, keep):
    assert_alike(text, keep)


@examples(300)
@given(drawn_texts(visible.WORDS, (MARKS, BLANKS, LETTERS, NEWER, NEWER)), st.booleans())
def test_characters_newer_than_the_table(text, keep):
    assert_alike(text, keep)


@examples(300)
@given(st.text(max_size=60), st.booleans())
def test_any_text(text, keep):
    assert_alike(text, keep)


@pytest.mark.parametrize("keep", [False, True])
def test_self_check_texts(keep):
    for text in self_check_texts(splitter("mdata", keep)._tables):
        assert_alike(text, keep)


@pytest.mark.parametrize("engine", ["mdata", "nltk"])
def test_golden_texts(engine):
    """Written with Unicode 14; later Pythons class a few letters otherwise, and NLTK goes by the running Python."""
    for case in json.loads(GOLDEN.read_text()):
        if unicodedata.unidata_version != "14.0.0" and set(NEWER) & set(case["text"]):
            continue
        for keep, name in ((False, "sentences"), (True, "keeping")):
            assert splitter(engine, keep).split_batch([case["text"]])[0] == case[name], case["text"]


@pytest.mark.parametrize("keep", [False, True])
def test_batches_are_the_texts_one_by_one(keep):
    texts = ["", *self_check_texts(splitter("mdata", keep)._tables), "", "One. Then."]
    one_by_one = [splitter("mdata", keep).split_batch([text])[0] for text in texts]
    sentences, ends = splitter("mdata", keep).split_batch(texts)
    assert [sentences[start:end] for start, end in zip([0, *ends], ends, strict=False)] == one_by_one


@pytest.mark.parametrize("case", SPLIT_CASES)
def test_what_megatron_wrote_before_it_tokenized(oracles, case):
    corpus, language, keep = SPLIT_CASES[case]
    known = {
        entry["id"]: entry for entry in json.loads((oracles / "oracle/preprocess/cases.json").read_text())["cases"]
    }
    options, (file,) = known[case]["options"], known[case]["files_written_beside_the_input"]
    keys = ["text", "summary"] if "--json-keys" in options else ["text"]
    path = oracles / "corpus" / f"{corpus}.jsonl"
    content = path.read_bytes() if path.exists() else gzip.decompress(path.with_suffix(".jsonl.gz").read_bytes())
    loaded = load_splitter(language, keep_newlines=keep, nltk_data=str(oracles / "vocab" / "nltk_data"))
    records = [json.loads(line) for line in content.split(b"\n") if line]
    split = [{key: loaded.split_batch([record[key]])[0] for key in keys} for record in records]
    written = "".join(json.dumps(record) + "\n" for record in split).encode()
    assert (len(written), hashlib.sha256(written).hexdigest()) == (file["size"], file["sha256"])


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("keep", [False, True])
def test_texts_of_the_published_tables(oracles, language, keep):
    """Drawn from the tables' own words, with hypothesis's idea of what is awkward."""
    folder = str(oracles / "vocab" / "nltk_data")
    ours = load_splitter(language, keep_newlines=keep, nltk_data=folder)
    assert ours.engine == "mdata"
    theirs = build_splitter(ours.files, language=language, keep_newlines=keep, engine="nltk")
    tables = ours._tables
    words = [f"{word}." for word in sorted(tables.abbreviations)] + [word.title() for word in sorted(tables.starters)]
    words += [part for first, second in sorted(tables.collocations) for part in (f"{first}.", second, second.title())]
    words += sorted(tables.contexts)[::50]

    @examples(150)
    @given(drawn_texts(words))
    def check(text):
        assert ours.split_batch([text]) == theirs.split_batch([text])

    check()
    hostile = self_check_texts(tables)
    assert ours.split_batch(hostile) == theirs.split_batch(hostile)
