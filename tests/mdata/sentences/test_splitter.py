"""What a splitter gives, engine by engine, and what is kept of it."""

from __future__ import annotations

import pytest

from mdata import UsageError
from mdata.sentences import build_splitter, load_splitter
from mdata.sentences.choice import ENGINES
from mdata.sentences.splitter import SLICE_CHARS
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


def splitter(engine="nltk", *, keep=False, **changed):
    return build_splitter(visible.files(**changed), language="ours", keep_newlines=keep, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("keep", [False, True])
def test_sentences(engine, keep):
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


def test_unknown_engine(tmp_path):
    with pytest.raises(UsageError, match=r"no sentence engine 'nltj'\n  expected: one of auto, .*\n  try: nltk\?$"):
        load_splitter("ours", nltk_data=str(visible.write(tmp_path)), engine="nltj")
