"""BPE of Llama 2's form in a tokenizer.json: the fast engine gives the exact ids, or structure says why not."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from mdata.tokenizers.engines.bpe_families import llama_unsupported
from mdata.tokenizers.engines.exact_fallback import FallbackEngine
from mdata.tokenizers.engines.libraries import ExactEngine
from mdata.tokenizers.registry import build_tokenizer
from mdata.tokenizers.types import engine_selection
from mdata.tokenizers.types.engine_selection import try_engine
from tests.helpers.examples import examples
from tests.mdata.tokenizers.visible import token

REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, REPLACE]}
SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def metaspace(scheme="first", split=False):
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": split}


FORMS = {
    "llama": {"normalizer": PREPEND, "pre_tokenizer": None},
    "gemma": {"normalizer": REPLACE, "pre_tokenizer": SPLIT},
    **{f"{scheme}-{split}": {"normalizer": None, "pre_tokenizer": metaspace(scheme, split)}
       for scheme in ("first", "always", "never") for split in (False, True)},
}  # fmt: skip
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "\u2581 hello",
    "\u2581 \u2581",
    "\u2581\u2581 \u2581\u2581",
    "h el",
    "e l",
    "\u2581 h",
    "< s",
    "a b",
]
ADDED = (
    token(0, "<unk>"), token(1, "<s>"), token(2, "</s>"), token(0, "[X]", lstrip=True),
    token(0, "ab c", normalized=True), token(0, "whole", single_word=True), token(0, "<tool>", special=False),
)  # fmt: skip


def definition(merges=MERGES, *, form="llama", added=ADDED[:3], order=None, **parts):
    singles = [*"helo\u2581<s>abc1"]
    entries = [
        "<unk>",
        "<s>",
        "</s>",
        *dict.fromkeys([*BYTES, *singles, *(merge.replace(" ", "") for merge in merges)]),
    ]
    if order is not None:
        entries[3:] = order.sample(entries[3:], len(entries) - 3)
    vocabulary = {entry: id for id, entry in enumerate(entries)}
    new = iter(range(len(entries), len(entries) + len(added)))
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
             "vocab": vocabulary, "merges": merges}  # fmt: skip
    tokens = [{**one, "id": vocabulary[one["content"]] if one["content"] in vocabulary else next(new)} for one in added]
    usual = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, "decoder": None}
    return {**usual, **FORMS[form], "added_tokens": tokens, "model": model, **parts}


PIECES = [
    *"helo abc1<s>\n\t.", " ", "  ", "hello", " hello", "\u2581", "\u2581\u2581", "<s>", "</s>", "</s> ", " [X] ",
    "[X]", "ab c", "ab\u2581c", "whole", "a whole", "<tool>", "<0x41>", "<unk>", "\xe9", "e\u0301", "\u4e2d",
    "\xa0", "\x00",
    "\U0001f468\u200d", "\u088f", "\u3000",
]  # fmt: skip
TEXTS = st.lists(st.lists(st.one_of(st.sampled_from(PIECES), st.characters(exclude_categories=["Cs"]))).map("".join))


@functools.cache
def engines(form, plain):
    known = definition(form=form, added=ADDED)
    exact = ExactEngine(known, plain=plain)
    assert llama_unsupported(known) is None
    return exact, FallbackEngine("gigatoken", known, plain=plain, exact=lambda: exact)


def assert_equal(texts, exact, fast):
    for text, ours, theirs in zip(texts, fast.encode(texts), exact.encode(texts), strict=True):
        assert ours.tolist() == theirs.tolist(), ascii(text)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("form", FORMS)
@given(texts=TEXTS)
@examples(50)
def test_gigatoken_is_exact(form, plain, texts):
    assert_equal(texts, *engines(form, plain))


PAIRS = st.lists(
    st.tuples(st.text("\u2581ab", min_size=1, max_size=3), st.text("\u2581ab", min_size=1, max_size=3)), max_size=12
)


@pytest.mark.parametrize("form", ["llama", "gemma", "first-False", "always-True"])
@given(
    pairs=PAIRS,
    order=st.randoms(use_true_random=False),
    texts=st.lists(st.text(" abc\u2581x", max_size=25), max_size=5),
)
@examples(40)
def test_merges_in_any_order_and_several_ways_to_one_entry(form, pairs, order, texts):
    known, merges = {"\u2581", "a", "b"}, []
    for left, right in pairs:
        if left in known and right in known and f"{left} {right}" not in merges:
            merges.append(f"{left} {right}")
            known.add(left + right)
    made = definition(merges, form=form, order=order)
    assert llama_unsupported(made) is None
    exact = ExactEngine(made, plain=False)
    assert_equal(texts, exact, FallbackEngine("gigatoken", made, plain=False, exact=lambda: exact))


def files(**parts):
    return {"tokenizer.json": json.dumps(definition(**parts)).encode()}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_taken_without_a_word(form):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", files(form=form))
    tokenizer.select_engine("auto")
    assert (tokenizer.engine, tokenizer.notes) == ("gigatoken", ())
    assert tokenizer.vocab_size == tokenizer._exact.library.get_vocab_size()
    with pytest.raises(
        UsageError, match=r"tiktoken does not support this.*\n.*\n  expected: one of auto, gigatoken, tokenizers"
    ):
        tokenizer.select_engine("tiktoken")


TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def model(**parts):
    return {"model": {**definition()["model"], **parts}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normalizer": {"type": "NFKC"}}, "it normalizes or splits texts in a way of its own"),
        ({"normalizer": {"type": "Prepend", "prepend": "\u2581"}}, "it normalizes or splits"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "it normalizes or splits"),
        ({"pre_tokenizer": metaspace()}, "it normalizes or splits"),
        ({"normalizer": None, "pre_tokenizer": {**metaspace(), "replacement": "_"}}, "it normalizes or splits"),
        ({"normalizer": None, "pre_tokenizer": None}, "it normalizes or splits"),
        ({"post_processor": {"type": "TemplateProcessing", "single": [TEXT, TEXT]}}, "not a simple template"),
        (model(ignore_merges=True), "entries count before merges"),
        (model(end_of_word_suffix="</w>"), "marks parts of words"),
        (model(byte_fallback=False), "its model is BPE without bytes"),
        (model(vocab={"a": 1}), "a byte has no entry"),
        (model(vocab={**definition()["model"]["vocab"], "zz": 5}), "share an id"),
        (model(merges=["x y"]), "entries that do not exist"),
        ({"added_tokens": [token(900, "<new>")]}, "another id than its file says"),
    ],
)
def test_reasons_by_structure(change, reason):
    assert reason in str(llama_unsupported({**definition(), **change}))


def test_the_hostile_text_sees_merges_in_another_order(monkeypatch):
    """gigatoken is given two merges exchanged."""
    right, wrong = definition(), definition()
    merges = wrong["model"]["merges"] = list(MERGES)
    merges[0], merges[8] = merges[8], merges[0]
    exact = ExactEngine(right, plain=False)
    made = engine_selection.make_engine
    monkeypatch.setattr(engine_selection, "make_engine", lambda name, _, **rest: made(name, wrong, **rest))
    assert "it gives other ids for" in str(try_engine("gigatoken", right, exact=exact, plain=False))


def test_texts_without_any_place_to_stop():
    exact, fast = engines("llama", False)
    texts = ["a" * 200_000, " " * 200_000, "1" * 100_000, "\u4e2d" * 50_000]
    assert_equal(texts, exact, fast)
