"""--split-sentences in a run: the sequences, and the counts that still refer to whole texts."""

from __future__ import annotations

import json

import pytest

import mdata
from mdata import BadInputError, UsageError
from mdata.sentences.splitter import load_splitter
from tests.mdata.preprocessing.test_preprocess import GOLDEN, contents, options
from tests.mdata.preprocessing.twin import documents_of, pair_of

TEXTS = [
    "One sentence. Another one! A third?  And a fourth.",
    "",
    "   ",
    "Dr. No came. He left at 5 p.m. sharp.",
    "no end",
    'She said "Go." He went.\nA new line. (And brackets.) End.',
    "Caf\u00e9. \u00dcber alles.\u00a0So.",
]


@pytest.fixture
def tables(tmp_path):
    """A folder of NLTK's form with small tables of our own."""
    folder = tmp_path / "nltk/tokenizers/punkt_tab/english"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("dr\np.m\n")
    (folder / "sent_starters.txt").write_text("he\n")
    (folder / "collocations.tab").write_text("no\tcame\n")
    (folder / "ortho_context.tab").write_text("he\t46\nsharp\t32\n")
    return str(tmp_path / "nltk")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text, "title": text[:9]}) + "\n" for text in TEXTS))
    return str(path)


def run(folder, corpus, tables, **changes):
    asked = {"input": (corpus,), "split_sentences": True, "nltk_data": tables, "append_eod": True, **changes}
    return mdata.preprocess(options(folder, **asked))


@pytest.mark.parametrize("keep_newlines", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_each_sentence_is_a_sequence(tmp_path, corpus, tables, keep_newlines, workers):
    result = run(tmp_path, corpus, tables, keep_newlines=keep_newlines, workers=workers, chunk_bytes=60)
    splitter = load_splitter(keep_newlines=keep_newlines, nltk_data=tables)
    (tmp_path / "split.jsonl").write_text(
        "".join(json.dumps({"text": splitter.split_batch([text])[0]}) + "\n" for text in TEXTS)
    )
    tokenizer = mdata.load_tokenizer("HuggingFaceTokenizer", GOLDEN / "tokenizer")
    documents = documents_of(tmp_path / "split.jsonl", tokenizer, eod=tokenizer.eod)
    assert max(map(len, documents)) > 3
    written = (tmp_path / "out_text_sentence.bin").read_bytes(), (tmp_path / "out_text_sentence.idx").read_bytes()
    assert written == pair_of(documents, code=8)
    manifest = result.manifests["text"]
    assert manifest.level == "sentence" and manifest.provenance.options["lang"] == "english"
    assert mdata.verify(result.paths["text"], full=True).problems == ()


def test_bytes_of_text_and_what_is_held_out_are_those_of_whole_texts(tmp_path, corpus, tables):
    whole = mdata.preprocess(options(tmp_path / "whole", input=(corpus,), holdout="0.5"))
    split = run(tmp_path / "split", corpus, tables, holdout="0.5", append_eod=False)
    assert whole.manifests.keys() == split.manifests.keys()
    for name, manifest in whole.manifests.items():
        other = split.manifests[name]
        assert manifest.statistics.text_bytes == other.statistics.text_bytes
        assert manifest.shards[0].documents == other.shards[0].documents


def test_a_list_of_sentences_cannot_be_split(tmp_path, tables):
    (tmp_path / "lists.jsonl").write_text('{"text": "Fine. Good."}\n{"text": ["a", "b"]}\n')
    with pytest.raises(BadInputError, match=r"lists\.jsonl:2: .*cannot be split into sentences"):
        run(tmp_path, str(tmp_path / "lists.jsonl"), tables)
    result = run(tmp_path, str(tmp_path / "lists.jsonl"), tables, on_error="skip")
    assert result.manifests["text"].provenance.skipped == {"bad-value": 1}


def test_other_tables_are_another_job(tmp_path, corpus, tables):
    run(tmp_path, corpus, tables)
    assert run(tmp_path, corpus, tables).finished_before
    before = contents(tmp_path)
    (tmp_path / "nltk/tokenizers/punkt_tab/english/abbrev_types.txt").write_text("dr\n")
    assert not run(tmp_path, corpus, tables, overwrite=True).finished_before
    assert contents(tmp_path)["out_text_sentence.idx"] != before["out_text_sentence.idx"]


def test_both_levels_live_beside_each_other(tmp_path, corpus, tables):
    run(tmp_path, corpus, tables)
    whole = mdata.preprocess(options(tmp_path, input=(corpus,)))
    assert whole.manifests["text"].level == "document"
    assert run(tmp_path, corpus, tables).finished_before


def test_without_tables_one_line_says_how_to_get_them(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="punkt_tab"):
        mdata.preprocess(options(tmp_path, input=(corpus,), split_sentences=True, lang="klingon"))
