"""The results of a splitter, engine by engine, and the facts that are recorded about it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mdata.sentences import splitter as splitter_module
from mdata.sentences.punkt_engine import PunktEngine
from mdata.sentences.punkt_tables import SLICE_CHARS
from mdata.sentences.splitter import ENGINES, build_splitter, load_splitter
from mdata.tokenizers.base.tokenizer import TextRefused
from tests.mdata.sentences import visible

# (text, its sentences, the same with keep_newlines); by hand, from the rules.
CASES = [
    ("", [], []),
    (" \n\t ", [], []),
    ("One. Two.", ["One.", "Two."], ["One. ", "Two."]),
    (" One.\n\nTwo? \x85Three ", [" One.", "Two?", "Three"], [" One.\n\n", "Two? \x85", "Three"]),
    ("Mr. Smith (ill.) went! He said \u201cno.\u201d Then", None, None),
    ("Very bad acting!!! I promise.", ["Very bad acting!!!", "I promise."], ["Very bad acting!!! ", "I promise."]),
]

UNITS = (
    ".", "!", "?", "7", "-", '"', "'", "a", "(", ")", " ", "\n", ",", ".,", "-.", "x-.", ".)", "a.", "A.", "a. ", ". ",
    ". . ", "a.\n)", ".\n", ".\u2028", "a?b", "a?)", "a.b)", "??b", "\xa0", ".\xa0", "a.\xa0", "\x1c", ".\x1c",
    "\u03a3", "'\u03a3", "\u03a3.", "1.", "\u0301.", "Mr.", "\U0001fae8. ",
)  # fmt: skip


def splitter(engine="mdata", *, keep=False, **changed):
    return build_splitter(visible.files(**changed), language="ours", keep_newlines=keep, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("keep", [False, True])
def test_both_engines_give_the_sentences_written_down_here(engine, keep):
    texts = [text for text, *_ in CASES]
    sentences, counts = splitter(engine, keep=keep).split_batch(texts)
    assert len(counts) == len(texts)
    assert counts[-1] == len(sentences)
    for (text, *expected), start, stop in zip(CASES, [0, *counts], counts, strict=False):
        if expected[keep] is not None:
            assert sentences[start:stop] == expected[keep], text


@pytest.mark.parametrize("engine", ENGINES)
def test_a_long_text_is_cut_first(engine):
    text = "One. Two is cut here" + "x" * SLICE_CHARS
    sentences, counts = splitter(engine).split_batch(["", text])
    assert counts == [0, 3]
    assert sentences == ["One.", text[5:SLICE_CHARS], text[SLICE_CHARS:]]


def test_what_is_loaded_is_what_is_built(tmp_path):
    loaded = load_splitter("ours", keep_newlines=True, nltk_data=str(visible.write(tmp_path)))
    built = build_splitter(loaded.files, language=loaded.language, keep_newlines=True, engine=loaded.engine)
    assert (built.language, built.keep_newlines, built.engine) == ("ours", True, loaded.engine)
    assert built.fingerprint == loaded.fingerprint
    assert built.split_batch(["One two. Then four."]) == (["One two. ", "Then four."], [2])


def test_fingerprint_is_of_content():
    base = splitter().fingerprint
    assert len(base) == 64
    turned = "\n".join(reversed(visible.STARTERS)) + "\n"
    assert splitter(sent_starters=turned).fingerprint == base
    others = [
        splitter(keep=True),
        *(splitter(**{name: ""}) for name in ("abbrev", "coll", "orth", "sent")),
    ]
    assert len({base, *(other.fingerprint for other in others)}) == 6


def test_empty_tables_are_taken():
    empty = splitter(abbrev="", coll="", orth="", sent="")
    assert empty.split_batch(["Mr. Smith. A. Bach"]) == (["Mr.", "Smith.", "A. Bach"], [3])


@pytest.mark.parametrize("keep", [False, True])
def test_the_fast_engine_is_taken_when_it_is_equal(tmp_path, keep):
    folder = str(visible.write(tmp_path))
    loaded = load_splitter("ours", keep_newlines=keep, nltk_data=folder)
    assert (loaded.engine, loaded.notes) == ("mdata", ())


@pytest.mark.parametrize(("word", "other"), [("st", "sr"), ("\u03bf\u03c2", "\u03bf\u03c3"), ("3", "4")])
def test_an_engine_that_differs_is_not_taken(tmp_path, monkeypatch, word, other):
    class Wrong(PunktEngine):
        def __init__(self, tables, *, keep_newlines):
            changed = frozenset(tables.abbreviations - {word} | {other})
            super().__init__(replace(tables, abbreviations=changed), keep_newlines=keep_newlines)

    monkeypatch.setattr(splitter_module, "PunktEngine", Wrong)
    folder = str(visible.write(tmp_path))
    loaded = load_splitter("ours", nltk_data=folder)
    assert loaded.engine == "nltk"
    assert re.match("sentences come from nltk: mdata is not used: it gives other sentences for '", loaded.notes[0])


def test_another_edition_of_nltk_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.9.1")
    monkeypatch.setattr(splitter_module, "first_difference", lambda *_, **__: "One. Two.")
    loaded = load_splitter("ours", nltk_data=str(visible.write(tmp_path)))
    assert loaded.notes[1:] == ("NLTK 3.9.1 is installed; sentences may differ from those of 3.10",)


def test_what_nltk_gives_up_is_refused_by_name(monkeypatch):
    slow = splitter("nltk")
    monkeypatch.setattr(type(slow._engine._splitter), "tokenize", lambda self, text: time_out(text))
    with pytest.raises(TextRefused, match="NLTK takes more than 5 s") as caught:
        slow.split_batch(["fast", "slow"])
    assert caught.value.index == 1


def time_out(text):
    if text == "slow":
        raise TimeoutError
    return [text]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("unit", UNITS)
def test_time_grows_with_the_text_alone(unit, keep):
    """NLTK's would not end; what could go wrong here is a hang, and text that is lost."""
    text = unit * (900_000 // len(unit)) + " Then."
    sentences, (count,) = splitter(keep=keep).split_batch([text])
    assert len(sentences) == count
    assert "".join("".join(sentences).split()) == "".join(text.split())


def test_only_texts_are_taken():
    with pytest.raises(TypeError, match="a list of str is expected"):
        splitter().split_batch(["a", b"b"])
    assert splitter().split_batch(("One. Then.", "a")) == (["One.", "Then.", "a"], [2, 3])
