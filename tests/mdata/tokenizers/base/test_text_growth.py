"""The bound on text growth is never below the library's result, and is checked before the library runs."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, example, given, reject
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from mdata import UsageError
from mdata.tokenizers.base import text_growth
from mdata.tokenizers.base.text_growth import MOST_GROWTH, growth_of, may_match_nothing
from mdata.tokenizers.base.tokenizer import TextRefused, TokenizerSpec
from mdata.tokenizers.engines import long_text
from mdata.tokenizers.registry import load_tokenizer
from mdata.util.stop_signals import LibraryError, library_errors
from tests.mdata.tokenizers.visible import definition

SMALL = st.text("ab \xe9\u0301e\u2026\u4e2d", max_size=4)


def plain(pattern: str, content: str) -> dict:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def regex(pattern: str, content: str) -> dict:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": False}
RULES = st.one_of(
    st.builds(plain, SMALL.filter(bool), SMALL),
    st.builds(regex, st.sampled_from(["a*", "a+", "(?=a)", r"\s", "[ab]+", "^", r"\b", "a|", "(?<=e)", "."]), SMALL),
    st.builds(lambda text: {"type": "Prepend", "prepend": text}, SMALL),
    st.sampled_from([{"type": form} for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt")]),
    st.sampled_from([{**BERT, "lowercase": True}, STRIP]),
)


def with_normalizers(*rules: dict, **parts: object) -> dict:
    return definition(normalizer={"type": "Sequence", "normalizers": list(rules)}, **parts)


@example([{"type": "Prepend", "prepend": " "}, {"type": "Prepend", "prepend": "a "}, STRIP], "a")
@given(st.lists(RULES, max_size=5), st.text("ab e\xe9\u0301", max_size=8))
def test_no_text_grows_more(rules, text):
    times, before = text_growth.growth(rules)
    assume(times <= 1000)
    normalizer = Library.from_str(json.dumps(with_normalizers(*rules))).normalizer
    try:
        with library_errors():
            found = normalizer.normalize_str(text)
    except LibraryError:
        reject()  # it panics over some rules, such as a Replace and then NFC
    # Unicode's own growth is not counted: of these characters two of an accented letter, three around a CJK one.
    own = 1 + any(rule["type"] in ("NFD", "NFKD", "BertNormalizer") for rule in rules) * text.count("\xe9")
    # A match may be empty once more, after the last character.
    assert len(found) <= (len(text) + own) * times + before


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], 1),
        ([plain(" ", "\u2581")], 1),
        ([{"type": "Prepend", "prepend": "\u2581"}, plain(" ", "\u2581")], 1),
        ([plain("\u2026", "..."), plain("\xbd", "1/2"), plain("``", '"')], 3),
        ([regex(r"\s+", " "), regex(r"\p{L}", "x"), regex("(?:a|b)+", "c")] * 20, 1),
        ([{"type": "NFKC"}, {"type": "Lowercase"}, regex(" {2,}", "\u2581")], 1),
        ([plain("a", "aa")] * 4, 16),
        ([plain("a", "bb"), plain("b", "cc"), plain("d", "e" * 7)], 7),
        ([plain("ab", "abab")] * 3, 8),
        ([regex("", "x")] * 3, 8),
    ],
)
def test_known_chains(rules, expected):
    assert growth_of(with_normalizers(*rules)) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("a", False), (r"\s+", False), (r"[0-9]{1,3}", False), (r"\p{N}{2}", False), ("a*", True), ("a|", True),
     (r"(?=a)", True), (r"\b", True), ("$", True), ("(", True), (r"\p{N}?", True), ("", True)],
)  # fmt: skip
def test_patterns_that_may_match_nothing(pattern, expected):
    assert may_match_nothing(pattern) == expected


def load(folder, content: dict):
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(TokenizerSpec(type="HuggingFaceTokenizer", model=str(folder)))


TWICE = {"type": "Sequence", "decoders": [plain("a", "aa")] * 30}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (with_normalizers(*[plain("a", "aa")] * 30), "its normalizer can turn one character into 1,073,741,824"),
        (with_normalizers(*[regex("a*", "aa")] * 300), r"its normalizer can turn one character into \d\.\de\+\d+"),
        (with_normalizers(*[plain(" ", "\ufdfa"), {"type": "NFKD"}] * 9), r"turn one character into [0-9,]+"),
        (with_normalizers({"type": "Prepend", "prepend": "x" * 40}, plain("x", "y" * 30)), "one character into"),
        (with_normalizers({"type": "Prepend", "prepend": "x" * 2000}), "puts up to 2,000 characters before every text"),
        (with_normalizers(*[plain("a", "b")] * 2000), "2,000 rules with 2 different characters"),
        (with_normalizers(plain("a", "".join(map(chr, range(0x4E00, 0x5E00))))), "with 4,097 different characters"),
        (definition(decoder=TWICE), "its decoder can turn one character into 1,073,741,824"),
        (definition(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTES] * 40}), "its pre_tokenizer can turn"),
    ],
)  # fmt: skip
def test_chains_that_double_are_refused_before_they_run(tmp_path, content, said):
    """A text of one letter took 3 GB, and an added token is normalized when a tokenizer is loaded."""
    content["added_tokens"].append({**content["added_tokens"][0], "content": "aaaa", "normalized": True, "id": 9000})
    with pytest.raises(UsageError, match=said):
        load(tmp_path, content)


def test_what_may_grow_is_taken_as_far_as_its_texts_stay_short(tmp_path, monkeypatch):
    tokenizer = load(tmp_path, with_normalizers(*[plain("a", "aa")] * 4))
    assert len(tokenizer.encode_batch(["a"])[0]) > 1
    assert MOST_GROWTH * long_text.PART_CHARS <= long_text.LONGEST_GROWN_CHARS
    monkeypatch.setattr(long_text, "PART_CHARS", 100)
    monkeypatch.setattr(long_text, "LONGEST_GROWN_CHARS", 1600)
    with pytest.raises(TextRefused, match="the text has 101 characters; this tokenizer accepts at most 100"):
        tokenizer.encode_batch(["a", "a" * 101])
    # As long as ever where nothing grows much.
    monkeypatch.undo()
    long_text.refuse_long(["a" * long_text.LONGEST_WHOLE_CHARS], growth_of(with_normalizers(plain("\u2026", "..."))))


def test_a_part_that_is_no_list_is_the_librarys_to_refuse(tmp_path):
    with pytest.raises(UsageError, match="tokenizer"):
        load(tmp_path, definition(normalizer={"type": "Sequence", "normalizers": 7}))
