"""Our own BPE against the library and against its slow twin: trained models of every kind, random and hostile texts."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from mdata._core import SentencePiece
from mdata.tokenizers.base.tokenizer import TextRefused, TokenizerSpec
from mdata.tokenizers.registry import build_tokenizer, load_tokenizer
from mdata.tokenizers.sentencepiece.sentencepiece_bpe import SentencePieceBpe, self_check_texts
from mdata.tokenizers.sentencepiece.sentencepiece_library import SentencePieceLibrary
from mdata.tokenizers.sentencepiece.sentencepiece_model import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_model,
)
from tests.helpers.examples import SOAK, examples
from tests.mdata.tokenizers.models import BPE, BYTES, START, UNIGRAM, bpe, model, trained
from tests.reference.sentencepiece import encode

HERE = Path(__file__)
MULTI = (
    "\u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \u30ab\u30bf\u30ab\u30ca \uc548\ub155 \uff21\uff22\uff11 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 caf\u00e9 na\u00efve e\u0301 \u212b \ufb01 "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \U0001f600\U0001f468\u200d\U0001f469"
)
KINDS = {
    "like-llama2": {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
                    "allow_whitespace_only_pieces": True, "split_digits": True},
    "library-defaults": {},
    "case-folded-suffix": {"normalization_rule_name": "nmt_nfkc_cf", "treat_whitespace_as_suffix": True},
    "no-prefix-across-words": {"add_dummy_prefix": False, "split_by_whitespace": False, "byte_fallback": True,
                               "split_by_unicode_script": False, "normalization_rule_name": "nfkc"},
    "user-pieces": {"user_defined_symbols": ["<x>", "<x>y", "\n", "  ", "ab", "\u2581the", "\u4f60", " q", "E\u0301"],
                    "remove_extra_whitespaces": False},
    "user-pieces-blanks-removed": {"user_defined_symbols": ["  ", "a ", "<x>", "\u00e9"], "byte_fallback": True},
}  # fmt: skip


@functools.cache
def trained_model(kind):
    lines = [line for line in HERE.read_text().split("\n") if line.strip()] + MULTI.split(" ") * 3 + [MULTI]
    return trained(lines, model_type="bpe", vocab_size=900, **KINDS[kind])


@functools.cache
def pair(kind):
    """(the model, our engine, the library's)."""
    content = trained_model(kind)
    found = read_model(content, kind)
    return found, SentencePieceBpe(found), SentencePieceLibrary(content, kind)


def check(kind, texts, *, twin):
    found, own, exact = pair(kind)
    ids, lengths = own.encode(texts)
    expected, expected_lengths = exact.encode(texts)
    if not np.array_equal(ids, expected) or not np.array_equal(lengths, expected_lengths):
        for text in texts:
            assert own.encode([text])[0].tolist() == exact.encode([text])[0].tolist(), repr(text)
        raise AssertionError("a batch differs from its texts one by one")
    if twin:
        for text, of_text in zip(texts, np.split(ids, np.cumsum(lengths)[:-1]), strict=True):
            assert encode(found, text) == of_text.tolist(), repr(text)


def texts_of(kind):
    """Pieces of the model glued together, with blanks of several forms, and any characters."""
    found = pair(kind)[0]
    words = st.sampled_from(found.pieces).map(lambda piece: piece.replace("\u2581", " "))
    blanks = st.sampled_from([" ", "  ", "\u2581", "\t", "\n", "\u3000", "\xa0", "\u200b", "x", "<x>"])
    return st.one_of(
        st.lists(st.one_of(words, blanks), max_size=12).map("".join),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        st.text(st.sampled_from(MULTI + "abc \u2581"), max_size=40),
    )


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(data=st.data())
def test_ids_are_the_library_s_and_the_twin_s(kind, data):
    check(kind, data.draw(st.lists(texts_of(kind), min_size=1, max_size=4)), twin=True)


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_texts(kind):
    found, _, exact = pair(kind)
    assert SentencePieceBpe.unsupported(found) is None
    assert isinstance(SentencePieceBpe.try_model(found, exact), SentencePieceBpe)
    texts = self_check_texts(found)
    check(kind, texts, twin=False)
    check(kind, [text + "".join(reversed(text)) for text in texts], twin=False)


@pytest.mark.scaled
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_point(kind):
    every = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    every = every[:: 1 if kind == "like-llama2" or SOAK > 1 else 31]
    for start in range(0, len(every), 100_000):
        texts = [f"a{character}b {character}{character} \u0301" for character in every[start : start + 100_000]]
        check(kind, ["".join(texts[at : at + 20]) for at in range(0, len(texts), 20)], twin=False)


def random_model(draw):
    """A BPE model of random pieces over few letters, with scores that are often equal."""
    letters = "ab\u00e9\u4e2d\u2581"
    texts = {"".join(draw.choices(letters, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 25))}
    kinds = [(text, draw.choice([0.0, -1.0, -1.5, -2.0]), draw.choice([NORMAL] * 9 + [USER_DEFINED])) for text in texts]
    fallback = draw.random() < 0.5
    pieces = [*START, *(BYTES if fallback else []), *kinds]
    facts = {name: draw.randint(0, 1) for name in ("add_dummy_prefix", "remove_extra_whitespaces", "suffix")}
    return model(pieces, model_type=BPE, byte_fallback=int(fallback), **facts)


@examples(150)
@given(seed=st.integers(0, 1 << 32))
def test_models_that_nobody_would_train(seed):
    """Pieces that cannot be reached, letters that are none, blanks inside of pieces, equal scores."""
    draw = random.Random(seed)
    content = random_model(draw)
    found = read_model(content, "random")
    own, exact = SentencePieceBpe(found), SentencePieceLibrary(content, "random")
    lengths = [draw.choice([0, 1, 5, 20, 60, 100]) for _ in range(6)]
    texts = ["".join(draw.choices("aab\u00e9\u4e2d\u2581  xz\U0001f600", k=length)) for length in lengths]
    ids, counts = own.encode(texts)
    expected, expected_counts = exact.encode(texts)
    assert ids.tolist() == expected.tolist() and counts.tolist() == expected_counts.tolist(), texts
    assert [id for text in texts for id in encode(found, text)] == ids.tolist()


@pytest.mark.parametrize("unit", ["a", " ", "\u4e2d", "\U0001f468\u200d", "ab ", "=", "\u2581a"])
def test_words_of_any_length(unit):
    for kind in ("like-llama2", "library-defaults"):
        check(kind, [unit * count for count in (40, 48, 49, 80, 240, 241, 1000, 100_000)], twin=False)


def test_words_are_forgotten_without_a_trace():
    """More words than there are places for, and more ids beside the table than it holds."""
    draw = random.Random(7)
    letters = [chr(code) for code in range(0x4E00, 0x4E00 + 3000)] + list("abcdefgh")
    texts = ["".join(draw.choices(letters, k=60)) + " " + "".join(draw.choices("abc", k=12)) for _ in range(25_000)]
    check("no-prefix-across-words", texts, twin=False)
    check("no-prefix-across-words", texts[:5000], twin=False)


def test_the_engine_is_chosen_and_kept(tmp_path):
    path = tmp_path / "x.model"
    path.write_bytes(trained_model("like-llama2"))
    for engine, taken in (("auto", "mdata"), ("mdata", "mdata"), ("sentencepiece", "sentencepiece")):
        tokenizer = load_tokenizer(TokenizerSpec(type="Llama2Tokenizer", model=str(path), engine=engine))
        assert (tokenizer.engine, tokenizer.notes) == (taken, ())
        again = build_tokenizer(tokenizer.name, tokenizer.files, engine=taken)
        assert again.engine == taken and again.fingerprint == tokenizer.fingerprint
        assert again.encode_batch(["some words"])[0].tolist() == tokenizer.encode_batch(["some words"])[0].tolist()


OTHERS = {
    "its model is unigram, not BPE": model([*START, ("a", 0.0, NORMAL)], model_type=UNIGRAM),
    "the model leaves blanks as they are": bpe(["a"], escape_whitespaces=0),
    "the model has unused pieces": bpe(["a"], [("b", 0.0, UNUSED)]),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_models_that_it_leaves_to_the_library(tmp_path, reason):
    (tmp_path / "x.model").write_bytes(OTHERS[reason])
    tokenizer = load_tokenizer("Llama2Tokenizer", tmp_path / "x.model")
    assert tokenizer.engine == "sentencepiece"
    told = (f"ids come from sentencepiece: mdata is not used: {reason}",)
    assert tokenizer.notes == (() if "unigram" in reason else told), "unigram has no other engine"
    with pytest.raises(UsageError, match=f"engine mdata cannot be used here\n  found: {reason}"):
        load_tokenizer(TokenizerSpec(type="Llama2Tokenizer", model=str(tmp_path / "x.model"), engine="mdata"))


def test_an_engine_that_differs_is_not_taken(monkeypatch):
    found, _, exact = pair("like-llama2")
    assert isinstance(SentencePieceBpe.try_model(found, exact), SentencePieceBpe)
    other = pair("library-defaults")[1]
    encode = other.encode
    monkeypatch.setattr(SentencePieceBpe, "encode", lambda _, texts: encode(texts))
    assert str(SentencePieceBpe.try_model(found, exact)).startswith("it gives other ids for ")

    def fails(*_):
        raise ValueError("damaged")

    monkeypatch.setattr(SentencePieceBpe, "__init__", fails)
    assert SentencePieceBpe.try_model(found, exact) == "it fails: damaged"


def test_lone_surrogates_are_refused():
    own = pair("like-llama2")[1]
    with pytest.raises(TextRefused, match="text 1: a lone surrogate at character 2"):
        own.encode(["a", "bc\udfff"])
    assert own.encode(())[0].tolist() == [] and own.encode(("a",))[1].tolist() == [1]


def core(pieces=("a",), kinds=(NORMAL,), scores=(0.0,), charsmap=b""):
    return SentencePiece(list(pieces), np.array(scores, np.float32), bytes(kinds), charsmap, True, False, False)


def test_what_the_core_refuses():
    assert core(("?", "a"), (UNKNOWN, NORMAL), (0.0, 0.0)).encode(["a"])[0].tolist() == [0, 1]
    for wrong, told in (
        ({"kinds": ()}, "every piece"),
        ({"scores": (0.0, 1.0)}, "every piece"),
        ({"pieces": ("",)}, "empty"),
        ({"kinds": (UNUSED,)}, "unused"),
        ({"pieces": ("<0x41>",), "kinds": (6,)}, "256 pieces|<0x"),
        ({"pieces": ("<0xZZ>", "<0x00>"), "kinds": (6, 6), "scores": (0.0, 0.0)}, "256 pieces|<0x"),
        ({"charsmap": b"\xff\xff\xff\xff"}, "normalization"),
        ({"charsmap": b"\0\0\0\0abc"}, "normalization"),
    ):
        with pytest.raises(ValueError, match=told):
            core(**wrong)
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        core(("\ud800",))
    with pytest.raises(TypeError):
        core().encode([1])


@examples(25)
@given(data=st.binary(min_size=8, max_size=600), text=st.text(max_size=20))
def test_damaged_rules_do_no_harm(data, text):
    """Rules that the library would refuse: any ids that the model has, no crash."""
    units = len(data) // 8 * 4
    charsmap = units.to_bytes(4, "little") + data
    ids, counts = core(charsmap=charsmap).encode([text.encode(errors="replace").decode(), "ab\u00e9"])
    assert set(ids.tolist()) <= {0} and len(counts) == 2 and counts.sum() == len(ids)


def test_control_pieces_in_a_text_are_letters():
    found = read_model(bpe(["a", "b", "c", "ab"], [("<c>", 0.0, CONTROL), ("z", 0.0, CONTROL)]), "x")
    own = SentencePieceBpe(found)
    assert own.encode(["az<c>"])[0].tolist() == encode(found, "az<c>") == [0, 3, 0, 5, 0]
