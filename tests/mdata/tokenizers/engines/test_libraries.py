"""All engines give the ids of the exact one, and that one those of the twin."""

from __future__ import annotations

import functools
import json
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from mdata.tokenizers.base.byte_level import (
    ALPHABET,
    CL100K,
    DEEPSEEK_V3_STEPS,
    FOR_TIKTOKEN,
    GPT2,
    LLAMA3,
    NOT_FOR_GIGATOKEN,
    PATTERNS,
)
from mdata.tokenizers.base.self_check_texts import byte_level_texts
from mdata.tokenizers.base.tokenizer import TextRefused
from mdata.tokenizers.base.unicode14 import texts_with_newer_characters, unassigned
from mdata.tokenizers.engines import bpe_families, exact_fallback
from mdata.tokenizers.engines.bpe_families import BYTE_LEVEL, byte_level_unsupported
from mdata.tokenizers.engines.exact_fallback import FallbackEngine
from mdata.tokenizers.engines.libraries import EXACT, LIBRARIES, ExactEngine, GigatokenEngine, TiktokenEngine
from mdata.tokenizers.registry import build_tokenizer
from mdata.tokenizers.types import engine_selection
from mdata.tokenizers.types.engine_selection import first_difference, select_engine, try_engine
from tests.helpers.examples import examples
from tests.mdata.tokenizers.visible import END, definition, token
from tests.reference.bpe import encode as twin

FAST = ("gigatoken", "tiktoken")
ADDED = (
    token(4000, "<|fim|>"), token(4001, "<|fim|>more", special=False), token(4002, "[INST]", normalized=True),
    token(4003, "<pad>", lstrip=True, rstrip=True), token(4004, "whole", single_word=True),
)  # fmt: skip
PIECES = [
    *"aAzZ019 '\n\t\r.!,/_sdmt", "'s", "'re", "'LL", " ", "  ", "\r\n", "\n\n", "\xa0", "\u2028", "\x1c", "\x85",
    "\u0301", "\u200d", "\U0001f468", "\u4e2d", "\u3042", "\u30a2", "\u0663", "\u2160", "\u017f", "\u212a", "\u01c5",
    "\u02b0", "e\u0301", "\u088f", "\U00018d80", END, END[:-1], "<|fim|>", "<|fim|>more", "[INST]", "<pad>", "whole",
]  # fmt: skip
TEXTS = st.lists(st.lists(st.one_of(st.sampled_from(PIECES), st.characters(exclude_categories=["Cs"]))).map("".join))


def renumbered(pattern: str) -> dict:
    """The visible definition with added tokens at the ids that the library gives them."""
    size = len(definition(pattern)["model"]["vocab"])
    return definition(pattern, added=tuple({**entry, "id": size + n} for n, entry in enumerate(ADDED)))


@functools.cache
def engines(pattern: str, plain: bool) -> tuple[ExactEngine, list[FallbackEngine]]:
    known = renumbered(pattern)
    exact = ExactEngine(known, plain=plain)
    # One of ADDED begins another: tiktoken takes no such set.
    names = [name for name in FAST if name not in ("tiktoken", "gigatoken" if pattern in NOT_FOR_GIGATOKEN else "")]
    return exact, [FallbackEngine(name, known, plain=plain, exact=lambda: exact) for name in names]


def assert_equal(texts, exact, fast):
    for text, ours, theirs in zip(texts, fast.encode(texts), exact.encode(texts), strict=True):
        assert ours.tolist() == theirs.tolist(), (fast.name, ascii(text))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
@given(texts=TEXTS)
@examples(60)
def test_gigatoken_is_exact_with_awkward_tokens(pattern, plain, texts):
    exact, fast = engines(pattern, plain)
    for engine in fast:
        assert_equal(texts, exact, engine)


@pytest.mark.parametrize("pattern", FOR_TIKTOKEN)
@given(texts=TEXTS)
@examples(60)
def test_tiktoken_is_exact(pattern, texts):
    known = definition(pattern)
    exact = simple_exact(pattern)
    assert_equal(texts, exact, simple_tiktoken(pattern, known))


@functools.cache
def simple_exact(pattern):
    return ExactEngine(definition(pattern), plain=False)


def simple_tiktoken(pattern, known, memory={}):  # noqa: B006
    made = FallbackEngine("tiktoken", known, plain=False, exact=lambda: simple_exact(pattern))
    return memory.setdefault(pattern, made)


def company(code: int) -> str:
    """A code point where its class shows: before a contraction, beside letters, digits, blanks, line ends, marks."""
    c = chr(code)
    return f"{c}'s {c}a{c}1{c}!{c}{c}  {c} \n{c}\n '{c} A{c}'S{c}/"


def code_points(step: int) -> list[int]:
    """Every step-th code point that has a meaning, and all of the smaller scripts'."""
    large = ((0x3400, 0xA000), (0xAC00, 0xF900), (0x17000, 0x18D00), (0x20000, 0x110000))
    codes = [code for code in range(0x20000) if not any(first <= code < last for first, last in large)][::step]
    codes += range(0x3400, 0x110000, 509)
    return [code for code in codes if not 0xD800 <= code < 0xE000]


def compare_code_points(pattern: str, codes: list[int]) -> None:
    """Without routing: the fast engines alone."""
    texts = [company(code) for code in codes if not unassigned()[code]]
    for name, patterns in (("gigatoken", set(PATTERNS) - NOT_FOR_GIGATOKEN), ("tiktoken", FOR_TIKTOKEN)):
        if pattern in patterns:
            assert_equal(texts, simple_exact(pattern), LIBRARIES[name](definition(pattern), plain=False))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_code_points_in_company(pattern):
    compare_code_points(pattern, code_points(41))


@pytest.mark.soak
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_code_point_in_company(pattern):
    compare_code_points(pattern, [code for code in range(0x110000) if not 0xD800 <= code < 0xE000])


@given(texts=TEXTS)
@examples(100)
def test_the_exact_engine_is_the_twin(texts):
    known = definition(GPT2, added=(token(len(definition()["model"]["vocab"]), "<|fim|>"),))
    special = {entry["content"]: entry["id"] for entry in known["added_tokens"]}
    exact = twin_engine()
    texts = [text for text in texts if not texts_with_newer_characters([text])]
    parts = {"vocabulary": known["model"]["vocab"], "merges": known["model"]["merges"], "special": special}
    ours = [twin(text, **parts) for text in texts]
    assert [ids.tolist() for ids in exact.encode(texts)] == ours


@functools.cache
def twin_engine():
    return ExactEngine(definition(added=(token(len(definition()["model"]["vocab"]), "<|fim|>"),)), plain=False)


MERGES = st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.text("ab", min_size=1, max_size=3)), max_size=12)


@given(merges=MERGES, order=st.randoms(use_true_random=False), texts=st.lists(st.text("abc ", max_size=30), max_size=5))
@examples(100)
def test_odd_vocabularies_are_refused_or_equal(merges, order, texts):
    """Merges that no training would make: unreachable entries, two ways to one entry, ids in any order.

    Structure alone has to tell, without the check on the hostile text.
    """
    known = odd_definition(merges, order)
    exact = ExactEngine(known, plain=False)
    for name in FAST:
        if not byte_level_unsupported(known) and not BYTE_LEVEL.unsupported_by[name](known, exact):
            assert_equal(texts, exact, FallbackEngine(name, known, plain=False, exact=lambda: exact))


def odd_definition(merges, order):
    wanted, entries = [], list(ALPHABET)
    for left, right in merges:
        if left in entries and right in entries:
            wanted.append([left, right])
            entries += [left + right] if left + right not in entries else []
    order.shuffle(entries)
    known = definition()
    known["model"] = {**known["model"], "vocab": {entry: id for id, entry in enumerate(entries)}, "merges": wanted}
    return {**known, "added_tokens": [token(len(entries), END)]}


def test_entries_that_merges_never_reach_are_not_for_tiktoken():
    known = definition()
    entries = [*ALPHABET, "ab", "bb", "abb"]
    vocabulary = {entry: id for id, entry in enumerate(entries)}
    known["model"] = {**known["model"], "vocab": vocabulary, "merges": ["a b", "b b", "a bb"]}
    known["added_tokens"] = [token(len(entries), END)]
    exact = ExactEngine(known, plain=False)
    assert [entries[id] for id in exact.encode(["abb"])[0]] == ["ab", "b"]
    found = try_engine("tiktoken", known, exact=exact, plain=False)
    assert found == "an entry cannot be reached by its merges"
    assert_equal(["abb", "babb abb", "bbabb"], exact, try_engine("gigatoken", known, exact=exact, plain=False))


def test_added_tokens_of_two_kinds_that_overlap_are_for_the_exact_engine():
    size = len(definition()["model"]["vocab"])
    for first, second, fine in (("<a", "a>", False), ("x<a>y", "<a>", False), ("<a>", "<b>", True)):
        known = definition(added=(token(size, first), token(size + 1, second, normalized=True)))
        reason = byte_level_unsupported(known)
        assert reason == (None if fine else "added tokens of two kinds overlap")


class Liar:
    """An engine that is wrong on one text."""

    name = "liar"

    def __init__(self, exact, text):
        self.exact, self.text = exact, text

    def encode(self, texts):
        wrong = np.zeros(1, dtype=np.uint32)
        return [wrong if text == self.text else ids for text, ids in zip(texts, self.exact.encode(texts), strict=True)]


@pytest.mark.parametrize("number", [1, 20, 150, -1])
def test_the_check_sees_every_difference_in_its_texts(number):
    exact = simple_exact(GPT2)
    vocabulary = definition()["model"]["vocab"]
    text = byte_level_texts([entry for entry in vocabulary if entry != END], [END])[number]
    assert first_difference(Liar(exact, text), exact, definition=definition()) == text
    assert first_difference(exact, exact, definition=definition()) is None


def test_the_hostile_text_finds_a_pattern_that_is_a_little_different(monkeypatch):
    """gigatoken takes cl100k's pattern for another one; without the list of patterns the check has to see it."""
    monkeypatch.setattr(bpe_families, "NOT_FOR_GIGATOKEN", frozenset())
    found = try_engine("gigatoken", definition(CL100K), exact=simple_exact(CL100K), plain=False)
    assert isinstance(found, str) and "other ids for" in found


DEEPSEEK = [{"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated"} for step in DEEPSEEK_V3_STEPS]


def steps(*parts, own=True):
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": own}
    return {"type": "Sequence", "pretokenizers": [*parts, byte_level]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "it normalizes texts"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "it splits words by a pattern of its own"),
        ({"pre_tokenizer": steps({"type": "Digits", "individual_digits": False})}, "it splits words by a pattern"),
        ({"pre_tokenizer": steps({"type": "Digits", "individual_digits": True}, own=False)}, "it splits words by a"),
        ({"pre_tokenizer": steps(*reversed(DEEPSEEK), own=False)}, "it splits words by a pattern of its own"),
        ({"pre_tokenizer": steps(*DEEPSEEK)}, "it splits words by a pattern of its own"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "it splits words by a pattern of its own"),
        ({"added_tokens": [token(7, END)]}, "another id than its file says"),
        ({"added_tokens": [token(3000, "ab"), token(3001, "bc", normalized=True)]}, "another id"),
        ({"post_processor": {"type": "Unheard"}}, "not a simple template"),
    ],
)
def test_reasons_by_structure(change, reason):
    assert reason in str(byte_level_unsupported(definition(**change)))


def model(**parts):
    return {"model": {**definition()["model"], **parts}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (model(type="Unigram"), "its model is Unigram"),
        (model(fuse_unk=True), "rules for unknown"),
        (model(end_of_word_suffix="</w>"), "marks parts of words"),
        (model(merges=[*definition()["model"]["merges"], "a a"]), "same result"),
        (model(merges=["x y"]), "entries that do not exist"),
        (model(vocab={**definition()["model"]["vocab"], "\u4e2d": 99999}), "not spelled in bytes"),
        (model(vocab={**definition()["model"]["vocab"], "aa": 0}), "share an id"),
    ],
)
def test_reasons_by_vocabulary(change, reason):
    assert reason in str(byte_level_unsupported(definition(**change)))


def test_an_engine_that_is_missing_or_fails_is_said(monkeypatch):
    def missing(*_, **__):
        raise ImportError("no")

    def failing(*_, **__):
        raise ValueError("does not like it")

    exact = simple_exact(GPT2)
    monkeypatch.setattr(engine_selection, "make_engine", missing)
    engine, notes = select_engine(definition(), exact, wanted="auto", plain=False)
    assert engine is exact and "gigatoken is not used: it is not installed; tiktoken" in notes[0]
    monkeypatch.setattr(engine_selection, "make_engine", failing)
    with pytest.raises(UsageError, match=r"gigatoken cannot be used.*\n.*does not like it"):
        select_engine(definition(), exact, wanted="gigatoken", plain=False)
    with pytest.raises(UsageError, match=r"try: gigatoken\?"):
        select_engine(definition(), exact, wanted="gigatokens", plain=False)


@pytest.mark.parametrize("name", ["gigatoken", "tiktoken", "tokenizers"])
def test_texts_without_any_place_to_stop(name):
    known = definition(LLAMA3)
    engine = FallbackEngine(name, known, plain=False, exact=lambda: ExactEngine(known, plain=False))
    # tiktoken gives up on the first of these by itself.
    counts = [len(ids) for ids in engine.encode([" " * 1_000_000 + "x", "a" * 100_000, "\n" * 100_000, "7" * 99_999])]
    assert counts == [500_002, 50_000, 50_000, 99_999]


def test_gigatoken_is_made_anew_when_it_has_grown(monkeypatch):
    sizes = iter(range(0, 10**12, 200 << 20))
    monkeypatch.setattr("mdata.tokenizers.engines.libraries.resident_bytes", lambda: next(sizes))
    monkeypatch.setattr("mdata.tokenizers.engines.libraries._CHECK_EVERY_CHARS", 100)
    engine = GigatokenEngine(definition(), plain=False)
    before = engine._encode
    assert engine.encode(["a" * 99]) and engine._encode is before
    assert engine.encode(["a"]) and engine._encode is before  # the first look only remembers
    assert engine.encode(["a" * 99]) and engine._encode is before
    first = engine.encode(["a b c"])
    assert engine._encode is not before
    assert engine.encode(["a b c"])[0].tolist() == first[0].tolist()


def test_tiktoken_wants_no_token_that_begins_another_and_entries_that_are_reached():
    exact = ExactEngine(renumbered(GPT2), plain=False)
    assert (
        try_engine("tiktoken", renumbered(GPT2), exact=exact, plain=False)
        == "an added token is the beginning of another"
    )
    assert isinstance(TiktokenEngine(definition(), plain=True).encode(["a"])[0], np.ndarray)


def test_newer_code_points_are_found():
    late = unassigned()
    if unicodedata.unidata_version == "14.0.0":
        assert all(late[code] == (unicodedata.category(chr(code)) == "Cn") for code in range(0, 0x110000, 7) if not 0xD800 <= code < 0xE000)  # fmt: skip  # noqa: E501
    texts = ["a", "\xe9", "\u0410\u4e2d", "x\u088fy", "\U0001f468", "\U0001f468\U00018d80", "\ud800"]
    assert texts_with_newer_characters(texts) == [3, 5]
    assert texts_with_newer_characters([]) == []
    long = ["\u0411" * 20_000, "\u088f", "b", "\u0411\u0412"]
    assert texts_with_newer_characters(long * 3) == [1, 5, 9]


def test_composition_is_left_to_the_exact_engine():
    known = definition(normalizer={"type": "NFC"})
    exact = ExactEngine(known, plain=False)
    found = try_engine("gigatoken", known, exact=exact, plain=False)
    assert not isinstance(found, str)
    assert_equal(["e\u0301 \xe9", "\u1100\u1161", "A\u030a's"], exact, found)
    assert found.encode(["e\u0301"])[0].tolist() == found.encode(["\xe9"])[0].tolist()


class Watching:
    """The exact engine, and how much it is asked for."""

    name = EXACT

    def __init__(self, known: dict) -> None:
        self.engine, self.chars = ExactEngine(known, plain=False), 0

    def encode(self, texts):
        self.chars += sum(map(len, texts))
        return self.engine.encode(texts)


@pytest.mark.parametrize("name", FAST)
def test_the_exact_engine_gets_the_odd_part_of_a_long_text(name):
    watching = Watching(definition())
    engine = FallbackEngine(name, definition(), plain=False, exact=lambda: watching)
    text = "some words " * 1000
    assert_equal([text, text + "\U0001fae8 " + text, "b"], watching.engine, engine)
    assert 0 < watching.chars < 3000


@pytest.mark.parametrize("pattern", PATTERNS)
@given(texts=st.lists(st.lists(st.sampled_from([*PIECES, "a b", "b c d", "d;\ne", " ", "\U0001fae8"])).map("".join)))
@examples(50)
def test_odd_texts_are_cut_where_no_id_can_notice(pattern, texts):
    exact = ExactEngine(definition(pattern, normalizer={"type": "NFC"}), plain=False)
    name = "tiktoken" if pattern in NOT_FOR_GIGATOKEN else "gigatoken"
    engine = FallbackEngine(name, definition(pattern, normalizer={"type": "NFC"}), plain=False, exact=lambda: exact)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_fallback, "_PART_CHARS", 2)
        assert_equal(texts, exact, engine)


def test_a_worker_builds_the_engine_that_it_is_told():
    files = {"tokenizer.json": json.dumps(definition()).encode()}
    for name in (*FAST, EXACT):
        assert build_tokenizer("HuggingFaceTokenizer", files, engine=name, options={}).engine == name


@pytest.mark.parametrize("name", ["gigatoken", "tiktoken"])
def test_a_refusal_of_the_exact_engine_names_the_text_of_the_batch(name):
    class Refusing:
        name = "refusing"

        def encode(self, texts):
            raise TextRefused(len(texts) - 1, "why")

    engine = FallbackEngine(name, definition(), plain=False, exact=Refusing)
    with pytest.raises(TextRefused, match="text 2: why"):
        engine.encode(["a", "\U0001fae8", "b\U0001fae8", "c"])


def test_a_short_text_keeps_no_large_buffer():
    """gigatoken's own results hold some kilobytes each: a batch of tiny texts took a gigabyte."""
    engine = GigatokenEngine(definition(), plain=False)
    for ids in engine.encode(["a", "", "b c"]):
        assert ids.base is None and ids.flags.owndata
