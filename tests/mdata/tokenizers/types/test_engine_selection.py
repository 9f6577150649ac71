"""Added tokens of every kind: the engine that is selected gives the ids of the exact one, or is not selected.

The fuzz draws tokens with any flags and with white space of every kind, for many structures of tokenizer.json. It looks
at structure and routing alone (no check at load), and at the check at load alone (no routing): each must suffice.
"""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from mdata import UsageError
from mdata.tokenizers.base.byte_level import CL100K, GPT2, LLAMA3, PATTERNS
from mdata.tokenizers.base.tokenizer import TextRefused
from mdata.tokenizers.base.tokenizer_json import added_tokens
from mdata.tokenizers.engines import exact_fallback
from mdata.tokenizers.engines.libraries import EXACT, ExactEngine
from mdata.tokenizers.registry import build_tokenizer
from mdata.tokenizers.types.engine_selection import family_of, first_difference, make_engine
from tests.helpers.examples import examples
from tests.mdata.tokenizers import visible
from tests.mdata.tokenizers.engines import test_bpe_families as llama

BLANKS = (
    "\n", "\n\n", "\t", " ", "  ", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u1680", "\u2003", "\u2028",
    "\u2029", "\u202f", "\u205f", "\u3000", "\u200b", "\ufeff", "\n \n",
)  # fmt: skip
WORDS = (
    "<a>", "<|b|>", "ab", "a", "a b", " x", "x ", "\nx", "x\n", "\xe9", "e\u0301", "\u212b", "abc", "<a", "a>",
    "\u2581", "\u2581a", "_", "1", "1\r\n", "\u4e2d", "'s", "\u0301", "\xdf", "\u0130",
)  # fmt: skip
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def bert(**normalizer):
    letters = "abcdefghijklmnopqrstuvwxyz<>|_1'"
    entries = ["[UNK]", "[CLS]", *letters, *(f"##{letter}" for letter in letters), "\u4e2d", "\xe9"]
    made = Tokenizer(models.WordPiece({entry: id for id, entry in enumerate(entries)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(**normalizer)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return json.loads(made.to_str())


STRUCTURES = {
    **{f"pattern {number}": visible.definition(pattern) for number, pattern in enumerate(PATTERNS)},
    **{f"NFC {number}": visible.definition(pattern, normalizer={"type": "NFC"})
       for number, pattern in enumerate((GPT2, CL100K, LLAMA3))},
    **{f"llama {form}": llama.definition(form=form) for form in llama.FORMS},
    "bert": bert(),
    "bert, cased": bert(lowercase=False, clean_text=False, handle_chinese_chars=False),
}  # fmt: skip


def with_added(structure, tokens):
    """The structure with these added tokens, at the ids that the library gives them."""
    known = STRUCTURES[structure]
    tokens = {content: {"content": content, **dict.fromkeys(FLAGS, False), **flags} for content, flags in tokens}
    kept = [token for token in known["added_tokens"] if token["content"] not in tokens]
    made = {**known, "added_tokens": [*kept, *tokens.values()]}
    ids = {token.content: token.id for token in added_tokens(made)}
    return {**made, "added_tokens": [{**token, "id": ids[token["content"]]} for token in made["added_tokens"]]}


def flags(names=""):
    """Flags by their first letters; "S" is special."""
    return {name: (name[0] if name != "special" else "S") in names for name in FLAGS}


STRIPPING = st.fixed_dictionaries({name: st.booleans() for name in FLAGS}).filter(lambda f: f["lstrip"] or f["rstrip"])
ANY_FLAGS = st.fixed_dictionaries({name: st.sampled_from([False, False, True]) for name in FLAGS})
TOKENS = st.tuples(
    st.tuples(st.sampled_from([*WORDS, *BLANKS]), STRIPPING),
    st.tuples(st.sampled_from(BLANKS), ANY_FLAGS),
    *[st.tuples(st.sampled_from([*WORDS, *BLANKS]), ANY_FLAGS)] * 2,
)


@st.composite
def cases(draw):
    tokens = draw(TOKENS)
    own = st.sampled_from([content for content, _ in tokens])
    pieces = st.one_of(own, own, st.sampled_from([*BLANKS, *WORDS, "b", "hello "]))
    return tokens, draw(st.lists(st.lists(pieces, min_size=1, max_size=8).map("".join), min_size=8, max_size=24))


def compared(known, plain):
    """The exact engine, and the fast ones that the structure allows."""
    family = family_of(known)
    if family.unsupported(known) is not None:
        return None, []
    exact = ExactEngine(known, plain=plain)
    names = [n for n in family.engines if n not in family.unsupported_by or not family.unsupported_by[n](known, exact)]
    return exact, [make_engine(name, known, plain=plain, exact=lambda: exact) for name in names]


def difference(exact, fast, texts):
    """The first text with other ids, or that only the exact engine refuses."""
    for text in texts:
        try:
            right = exact.encode([text])[0]
        except TextRefused:
            continue
        if not np.array_equal(fast.encode([text])[0], right):
            return text
    return None


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
@given(case=cases())
@examples(6)
def test_structure_and_routing_suffice(structure, plain, case):
    tokens, texts = case
    exact, engines = compared(with_added(structure, tokens), plain)
    for fast in engines:
        assert difference(exact, fast, texts) is None, fast.name


def without_routing(known, plain):
    """`compared`, but the fast engines keep the texts that are left to the exact one."""

    def whole_words(known, plain):
        return [token.content for token in added_tokens(known) if token.single_word]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_fallback, "tokens_left_to_exact", whole_words)
        return compared(known, plain)


@pytest.mark.parametrize("structure", STRUCTURES)
@given(case=cases(), plain=st.booleans())
@examples(3)
def test_the_check_at_load_suffices(structure, plain, case):
    tokens, texts = case
    known = with_added(structure, tokens)
    exact, engines = without_routing(known, plain)
    for fast in engines:
        if (text := difference(exact, fast, texts)) is not None:
            try:
                seen = first_difference(fast, exact, definition=known)
            except TextRefused:
                continue  # the exact engine is taken
            assert seen is not None, (fast.name, text)


CASES = [  # structure, plain, tokens, a text for which gigatoken was seen to differ
    ("pattern 0", False, [("<|user|>", "rS"), ("\n\n", "")], "<|user|>\n\nhi"),
    ("pattern 1", False, [("\nx", "S"), ("'s", ""), ("\u2581a\x0b", "r")], "abc\u2581a\x0b\nx\nx's\xa0abc's"),
    ("pattern 4", False, [("\r\n", "lr"), ("\u200b", "lS"), ("abc", "rnS")], "ab\r\nabc\r\n\n\n\u200b"),
    ("pattern 5", False, [("\n \n", "nS"), ("\u0301", "r"), ("\xa0", "lS")], "\xa0\xe9\u2581abc\n \n\xa0ab"),
    ("NFC 0", False, [("\r\n", "nS"), ("_", "ln"), ("\u0301", "rn")], "\u0301\r\n\r\n\r\n_\u0301\u2028"),
    ("pattern 6", True, [("\n \n", ""), (" ", "S"), ("1\r\n", "S")], "\n \n1\r\n \n \n 1\r\n"),
    ("llama always-False", True, [("\xa0", ""), ("whole", "nS"), ("\xdf", "r")], "\x0b\r\n\xdf\xa0\xdf"),
    ("llama never-False", False, [("\u4e2d", "lrS"), ("\n \n", ""), ("\u2581aab", "ln")], "\n \n\u4e2d\n \n"),
]


@pytest.mark.parametrize(("structure", "plain", "tokens", "text"), CASES)
def test_ids_where_gigatoken_was_seen_to_differ(structure, plain, tokens, text):
    known = with_added(structure, [(content, flags(names)) for content, names in tokens])
    exact, engines = compared(known, plain)
    assert engines
    for fast in engines:
        assert fast.encode([text, "b"])[0].tolist() == exact.encode([text])[0].tolist()


@pytest.mark.parametrize(("structure", "plain", "tokens", "text"), CASES)
def test_the_check_at_load_sees_where_gigatoken_differs(structure, plain, tokens, text):
    known = with_added(structure, [(content, flags(names)) for content, names in tokens])
    exact, engines = without_routing(known, plain)
    for fast in engines:
        assert difference(exact, fast, [text]) == text
        with suppress(TextRefused):
            assert first_difference(fast, exact, definition=known) is not None


@pytest.mark.parametrize(
    ("content", "names", "text"),
    [("\u2581", "sn", "  hello"), (" !", "sn", "a\u2581!"), ("\u2581a", "srn", "    ab")],
)
@pytest.mark.parametrize("structure", ["llama gemma", "llama llama"])
def test_a_token_that_is_matched_after_blanks_are_replaced(structure, content, names, text):
    """Its text is not spelled like the token, so it would not be left to the exact engine."""
    known = with_added(structure, [(content, flags(names))])
    assert compared(known, False) == (None, [])
    exact = ExactEngine(known, plain=False)
    fast = make_engine("gigatoken", known, plain=False, exact=lambda: exact)
    if structure == "llama gemma":
        assert difference(exact, fast, [text]) == text
    plain = with_added(structure, [(content, flags(names.strip("sr")))])
    assert compared(plain, False)[1]


def test_a_strip_alone_stays_with_the_fast_engine():
    """Phi-3's form: tokens strip, and none is of white space, so no character belongs to two tokens."""
    known = with_added("pattern 0", [("<|user|>", flags("rS")), ("<|end|>", flags("rS"))])

    def asked():
        raise AssertionError("the exact engine was asked")

    fast = make_engine("gigatoken", known, plain=False, exact=asked)
    text = "<|user|>\n\n hi<|end|>\n \u3000<|user|>"
    assert fast.encode([text])[0].tolist() == ExactEngine(known, plain=False).encode([text])[0].tolist()


def tokenizer_of(known):
    return build_tokenizer("HuggingFaceTokenizer", {"tokenizer.json": json.dumps(known).encode()}, engine=EXACT)


def test_a_check_text_on_which_the_library_fails_leaves_the_exact_engine():
    """Both tokens take the same white space, and the library panics where the second ends before it begins."""
    known = with_added("pattern 0", [("\n", flags("ln")), ("</s>", flags("rn"))])
    with pytest.raises(TextRefused, match="bad split"):
        ExactEngine(known, plain=False).encode(["</s>\n\n\n"])
    tokenizer = tokenizer_of(known)
    tokenizer.select_engine("auto")
    assert tokenizer.engine == EXACT
    assert "gigatoken is not used: it cannot be compared: the tokenizers library fails on this" in tokenizer.notes[0]
    assert len(tokenizer.encode_batch(["some text\n"])[0]) == 10
    with pytest.raises(UsageError, match=r"gigatoken cannot be used here\n.*fails on this text"):
        tokenizer.select_engine("gigatoken")


@pytest.mark.parametrize(
    ("content", "normalizer"),
    [
        ("\u200c", bert()["normalizer"]),
        ("\u0301", {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}),
        (" \t", {"type": "Strip", "strip_left": True, "strip_right": True}),
        ("xx", {"type": "Replace", "pattern": {"String": "x"}, "content": ""}),
    ],
)  # fmt: skip
def test_an_added_token_that_its_normalizer_turns_into_nothing_is_refused(content, normalizer):
    known = {**with_added("pattern 0", [(content, flags("n"))]), "normalizer": normalizer}
    # Matched everywhere, it took all memory; so nothing is encoded here.
    with pytest.raises(UsageError, match=r"its normalizer turns the added token .* into nothing\n  found: id \d+") as e:
        tokenizer_of(known)
    assert ascii(content)[1:-1] in str(e.value)
    fine = {**with_added("pattern 0", [(content, flags())]), "normalizer": normalizer}
    assert tokenizer_of(fine).encode_batch([content])[0].tolist() == [fine["added_tokens"][-1]["id"]]
