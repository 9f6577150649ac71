"""TikTokenizer: numbering, special tokens, patterns against the twin, files that are refused by entry or line."""

from __future__ import annotations

import base64
import functools
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from mdata.tokenizers.base.byte_level import O200K, TIK_V2
from mdata.tokenizers.base.tokenizer import TextRefused, TokenizerSpec
from mdata.tokenizers.base.unicode14 import texts_with_newer_characters
from mdata.tokenizers.engines.long_text import LONGEST_WORD_CHARS, split_at_words
from mdata.tokenizers.registry import build_tokenizer, load_tokenizer
from mdata.tokenizers.tiktoken import tiktoken_engine
from mdata.tokenizers.tiktoken.tiktoken_engine import as_definition
from mdata.tokenizers.tiktoken.tiktoken_ranks import PATTERNS, SINGLE_BYTES
from mdata.tokenizers.types import tiktoken
from tests.helpers.examples import examples
from tests.reference.tiktoken import encode as twin
from tests.reference.tiktoken import words

ENGINES = ("gigatoken", "tiktoken")
WORDS = [b"he", b"ll", b"hell", b"hello", b" w", b"  ", b"\n\n", b"'s", b"AB", b"</"]
BYTES = [*SINGLE_BYTES, *WORDS]


def entry(rank, token, **more):
    return {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None, **more}


def as_list(tokens=BYTES):
    return json.dumps([entry(rank, token) for rank, token in enumerate(tokens)]).encode()


def as_lines(tokens=BYTES):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def loaded(folder, content=None, *, name="ranks.json", engine="auto", **options):
    (folder / name).write_bytes(as_list() if content is None else content)
    given = {} if name.endswith("tiktoken") else {"vocab_size": len(BYTES) + 10, "num_special_tokens": 10}
    given |= options
    spec = TokenizerSpec(type="TikTokenizer", model=str(folder / name), options=tuple(given.items()), engine=engine)
    return load_tokenizer(spec)


def ids(tokenizer, *texts):
    return tokenizer.encode_batch(texts)[0].tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_megatrons_numbering(tmp_path, engine):
    tokenizer = loaded(tmp_path, engine=engine)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.engine, tokenizer.notes) == (276, 2, engine, ())
    names = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>", "<SPECIAL_7>", "<SPECIAL_8>", "<SPECIAL_9>"]
    assert tokenizer.special_ids == {name: id for id, name in enumerate(names)}
    assert ids(tokenizer, "hello w", "<s>hell</s>", "<SPECIAL_9>Z<SPECIAL_10") == [
        269, 270, 1, 268, 2, 9, 100, *(10 + ord(c) for c in "<SPECIAL_10"),
    ]  # fmt: skip
    found, lengths = tokenizer.encode_batch(["a<s>b", "", "</s></s>"])
    assert (found.dtype, lengths.dtype, lengths.tolist()) == (np.int32, np.int64, [3, 0, 2])
    assert tokenizer.special_in_text(found, 3) == 3
    assert tokenizer.decode(ids(tokenizer, "hello\xe9</s>")) == "hello\xe9</s>"
    assert tokenizer.decode([269, 5000, 2]) == "hello\ufffd</s>"


@pytest.mark.parametrize("engine", ENGINES)
def test_special_tokens_in_the_text_may_stay_text(tmp_path, engine):
    plain = loaded(tmp_path, engine=engine, special_in_text="plain")
    found = ids(plain, "<s></s>")
    assert found == [10 + ord("<"), 10 + ord("s"), 10 + ord(">"), 275, 10 + ord("s"), 10 + ord(">")]
    assert plain.special_in_text(np.array(found), 1) == 0
    assert plain.decode([2, 5000]) == "</s>\ufffd"
    assert plain.fingerprint != loaded(tmp_path).fingerprint
    assert build_tokenizer("TikTokenizer", plain.files, engine=engine, options=plain.options).decode([2]) == "</s>"


def test_special_tokens_of_ones_own_keep_their_places(tmp_path):
    wanted = ["</s>", "<unk>", "[X]", "<s>", "<mask>", "<pad>", "<cls>", "<sep>"]
    tokenizer = loaded(tmp_path, special_tokens=wanted)
    assert (tokenizer.eod, tokenizer.special_ids["[X]"], tokenizer.special_ids["<SPECIAL_8>"]) == (0, 2, 8)
    assert ids(tokenizer, "a[X]<SPECIAL_9>") == [107, 2, 9]


def test_the_first_entries_count(tmp_path):
    """A vocabulary that is smaller than its file; what stands behind is not even looked at."""
    cut = json.loads(as_list())
    cut[-1] = "no rank at all"
    tokenizer = loaded(tmp_path, json.dumps(cut).encode(), vocab_size=256 + 3 + 7, num_special_tokens=7)
    assert ids(tokenizer, "hello") == [7 + 258, 7 + ord("o")]
    assert tokenizer.vocab_size == 266


def test_defaults_are_megatrons(tmp_path):
    with pytest.raises(UsageError, match=r"ranks\.json: too few entries for a vocabulary of 131072\n.*found: 266 en"):
        loaded(tmp_path, vocab_size=None, num_special_tokens=None)
    tokenizer = loaded(tmp_path, vocab_size=1266, num_special_tokens=1000, pattern="v2")
    assert tokenizer.options == {"vocab_size": 1266}
    assert (len(tokenizer.special_ids), ids(tokenizer, "hello")) == (1000, [1259])


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_files_say_how_they_are_numbered(tmp_path, engine):
    tokenizer = loaded(tmp_path, as_lines(), name="a.tiktoken", engine=engine, num_special_tokens=10)
    path = tmp_path / "a.tiktoken"
    assert tokenizer.notes == (
        f"{path}: ids are its ranks + 10; special tokens from 0, documents end with 2 (</s>); "
        "text is split by pattern v2",
    )
    listed = loaded(tmp_path, engine=engine)
    assert ids(tokenizer, "hello</s>") == ids(listed, "hello</s>") == [269, 2]
    assert tokenizer.fingerprint == listed.fingerprint
    other = [*reversed(SINGLE_BYTES), *WORDS]
    tokenizer = loaded(tmp_path, as_lines(other), name="a.tiktoken", engine=engine, num_special_tokens=10)
    assert tokenizer.notes == (
        f"{path}: ids are its own ranks (its bytes are not in Megatron's order); special tokens from 266, documents "
        "end with 268 (</s>); text is split by pattern v2; if the model has others, set "
        "--tiktoken-pattern and --tokenizer-special-tokens NAME=ID ...",
    )
    assert (ids(tokenizer, "helloA</s>"), tokenizer.eod, tokenizer.vocab_size) == ([259, 255 - 65, 268], 268, 276)
    assert tokenizer.special_in_text(np.array([259, 265, 266, 275]), 1) == 2
    again = build_tokenizer("TikTokenizer", tokenizer.files, engine=engine, options=tokenizer.options)
    assert (again.fingerprint, ids(again, "<s>A")) == (tokenizer.fingerprint, [267, 190])


OWN = as_lines([*reversed(SINGLE_BYTES), *WORDS])  # ranks 0 to 265


@pytest.mark.parametrize("engine", ENGINES)
def test_special_tokens_of_a_model_are_given_by_name(tmp_path, engine):
    """As in qwen.tiktoken (<|endoftext|> follows the last rank) and cl100k_base (ids with gaps)."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|endofprompt|>=300", "<|last|>"]
    tokenizer = loaded(tmp_path, OWN, name="q.tiktoken", engine=engine, special_tokens=names)
    expected = {"<|endoftext|>": 266, "<|im_start|>": 267, "<|im_end|>": 268, "<|endofprompt|>": 300, "<|last|>": 301}
    assert (tokenizer.special_ids, tokenizer.eod, tokenizer.vocab_size) == (expected, 266, 302)
    assert "special tokens from 266, documents end with 266 (<|endoftext|>)" in tokenizer.notes[0]
    found = ids(tokenizer, "hello<|im_end|>A<|endofprompt|></s>")
    assert found[:4] == [259, 268, 190, 300]
    assert tokenizer.special_in_text(np.array([*found, 299]), 1) == 2
    assert tokenizer.decode(found) == "hello<|im_end|>A<|endofprompt|></s>"
    again = build_tokenizer("TikTokenizer", tokenizer.files, engine=engine, options=tokenizer.options)
    assert (again.fingerprint, again.special_ids) == (tokenizer.fingerprint, expected)
    llama = loaded(tmp_path, OWN, name="q.tiktoken", special_tokens=["<|begin|>", "<|end_of_text|>"], vocab_size=500)
    assert (llama.eod, llama.vocab_size) == (267, 500)
    assert "pattern v2; if the model has others, set --tiktoken-pattern" in llama.notes[0]
    own = loaded(tmp_path, OWN, name="q.tiktoken", special_tokens=["<|begin|>"], pattern="llama3")
    assert own.notes[0].endswith("text is split by pattern llama3")
    nameless = loaded(tmp_path, OWN, name="q.tiktoken", special_tokens=["<|begin|>"])
    assert nameless.eod is None and "no end of document (none of </s>, <|endoftext|>" in nameless.notes[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"special_tokens": ["<|a|>=265"]}, r"has the id of another entry(.|\n)*<\|a\|>=265(.|\n)*such as 266"),
        ({"special_tokens": ["<|a|>=300", "<|b|>=300"]}, "has the id of another entry"),
        ({"special_tokens": ["<|a|>=300", "<|a|>=301"]}, "named twice"),
        ({"special_tokens": ["<|a|>=9999999999"]}, "has the id of another entry"),
        ({"special_tokens": ["<|a|>", "<|a|>b"]}, "the beginning of another"),
        ({"special_tokens": ["=300"]}, "a special token is empty"),
        ({"special_tokens": ["< a>"]}, "white space"),
        ({"special_tokens": ["<|a|>"], "vocab_size": 266}, r"vocab_size=266\n.*from 267"),
        ({"special_tokens": ["<|a|>"], "num_special_tokens": 5}, "leave out --tiktoken-num-special-tokens"),
    ],
)
def test_names_that_cannot_be_special_tokens(tmp_path, options, said):
    with pytest.raises(UsageError, match=said):
        loaded(tmp_path, OWN, name="q.tiktoken", **options)


def tekken(special=None, **changed):
    """A published tekken.json: an object, with more entries than are used."""
    config = {"pattern": TIK_V2, "num_vocab_tokens": 266, "default_vocab_size": 284, "default_num_special_tokens": 24}
    made = {"config": {**config, "version": "v3", **changed}, "vocab": json.loads(as_list())}
    if special is not None:
        made["special_tokens"] = [{"rank": n, "token_str": name, "is_control": True} for n, name in enumerate(special)]
    return json.dumps(made).encode()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_published_tekken_json(tmp_path, engine):
    path = tmp_path / "tekken.json"
    path.write_bytes(tekken())
    tokenizer = load_tokenizer(TokenizerSpec(type="TikTokenizer", model=str(path), engine=engine))
    # 284 - 24 entries are used, so "hello" (rank 259) is, and " w" (260) is not.
    assert ids(tokenizer, "hello w[INST]</s>") == [24 + 259, 24 + 32, 24 + ord("w"), 3, 2]
    assert (tokenizer.vocab_size, tokenizer.eod, len(tokenizer.special_ids)) == (284, 2, 24)
    assert (tokenizer.special_ids["<pad>"], tokenizer.special_ids["<SPECIAL_20>"]) == (11, 20)
    assert f"{path}: ids are its ranks + 24; special tokens from 0, documents end with 2 (</s>)" in tokenizer.notes[0]
    again = build_tokenizer("TikTokenizer", tokenizer.files, engine=engine, options=tokenizer.options)
    assert again.fingerprint == tokenizer.fingerprint
    path.write_bytes(tekken(pattern=O200K))
    other = load_tokenizer(TokenizerSpec(type="TikTokenizer", model=str(path), engine=engine))
    assert "text is split by pattern o200k_base" in other.notes[0] and other.fingerprint != tokenizer.fingerprint
    path.write_bytes(tekken(special=["<unk>", "<s>", "</s>", "[NEW]"]))
    newer = load_tokenizer(TokenizerSpec(type="TikTokenizer", model=str(path), engine=engine))
    assert (ids(newer, "[NEW]"), newer.special_ids["<SPECIAL_4>"]) == ([3], 4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (tekken(pattern="x+"), r"its pattern is unknown\n.*'x\+'"),
        (tekken(default_num_special_tokens=10**12), "its config does not fit its entries"),
        (tekken(default_vocab_size=10**12), "its config does not fit its entries"),
        (tekken(default_vocab_size="284"), "its config does not fit its entries"),
        (tekken(special=["<unk>", 7]), "special token 1 is unusable"),
        (b'{"vocab": []}', "an object without config"),
        (b'{"config": {}}', "not a list of ranks"),
    ],
)
def test_a_tekken_json_that_cannot_be_used(tmp_path, content, said):
    with pytest.raises(UsageError, match=said):
        loaded(tmp_path, content, name="tekken.json", vocab_size=None, num_special_tokens=None)


def test_plain_files_may_leave_ranks_out_and_stand_in_any_order(tmp_path):
    lines = [*as_lines().splitlines(), b"", base64.b64encode(b"gap") + b" 300 "]
    tokenizer = loaded(tmp_path, b"\r\n".join(reversed(lines)), name="a.tiktoken", num_special_tokens=7)
    assert (tokenizer.vocab_size, ids(tokenizer, "hello")) == (308, [266])
    smaller = loaded(tmp_path, as_lines(), name="a.tiktoken", num_special_tokens=7, vocab_size=7 + 258)
    assert ids(smaller, "hello") == [263, 264, 7 + ord("o")]


PIECES = [
    *"aAzZ09 '\n\t\r./!_", "'s", "'S", "  ", "\r\n", "\n\n", "\n/\n", "\xa0", "\u2028", "\x1c", "\x85", "\u0301",
    "\u0903", "\u200d", "\U0001f468", "\u4e2d", "\u0663", "\u2160", "\u017f", "\u01c5", "\u02b0", "e\u0301",
    "AB", "Ab", "aB", "\u088f", "\U00018d80", "<s>", "</s>", "<SPECIAL_7>", "<SPECIAL_10>", "</",
]  # fmt: skip
TEXTS = st.lists(st.lists(st.one_of(st.sampled_from(PIECES), st.characters(exclude_categories=["Cs"]))).map("".join))
# Nearly every two bytes that meet at a cut are an entry, so that each cut shows in the ids.
MEETING = b"' aA1!\n\t\r/s_<"
VISIBLE = [
    *SINGLE_BYTES,
    *sorted({bytes([a, b]) for a in MEETING for b in (*MEETING, *range(0x80, 0x100))}),
    *sorted({bytes([a, b]) for a in range(0x80, 0x100) for b in MEETING}),
]


@functools.cache
def visible(engine, pattern, plain=False):
    options = {"vocab_size": len(VISIBLE) + 10, "num_special_tokens": 10, "pattern": pattern}
    options |= {"special_in_text": "plain"} if plain else {}
    return build_tokenizer("TikTokenizer", {"ranks.json": as_list(VISIBLE)}, engine=engine, options=options)


MEGATRONS = ("v1", "v2")
PUBLISHED = tuple(pattern for pattern in PATTERNS if pattern not in MEGATRONS)


@pytest.mark.parametrize("pattern", MEGATRONS)
@given(texts=TEXTS)
@examples(200)
def test_the_exact_engine_is_the_twin(pattern, texts):
    assert_exact_is_the_twin(pattern, texts)


@pytest.mark.parametrize("pattern", PUBLISHED)
@given(texts=TEXTS)
@examples(50)
def test_the_exact_engine_is_the_twin_for_published_patterns(pattern, texts):
    assert_exact_is_the_twin(pattern, texts)


def assert_exact_is_the_twin(pattern, texts):
    tokenizer = visible("tiktoken", pattern)
    texts = [text for text in texts if not texts_with_newer_characters([text])]
    parts = {"tokens": {token: 10 + rank for rank, token in enumerate(VISIBLE)}, "special": tokenizer.special_ids}
    expected = [id for text in texts for id in twin(text, pattern=pattern, **parts)]
    assert ids(tokenizer, *texts) == expected


@pytest.mark.parametrize("plain", [False, True])
@given(texts=TEXTS)
@examples(200)
def test_the_fast_engine_is_exact(plain, texts):
    assert ids(visible("gigatoken", "v2", plain), *texts) == ids(visible("tiktoken", "v2", plain), *texts)


@pytest.mark.parametrize("pattern", ["o200k_base", "llama3", "qwen2"])
@given(texts=TEXTS)
@examples(50)
def test_the_fast_engine_is_exact_for_published_patterns(pattern, texts):
    assert ids(visible("gigatoken", pattern), *texts) == ids(visible("tiktoken", pattern), *texts)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_which_engine_takes_a_pattern(tmp_path, pattern):
    tokenizer = loaded(tmp_path, as_list(VISIBLE), vocab_size=len(VISIBLE) + 10, pattern=pattern)
    assert tokenizer.engine == ("tiktoken" if pattern in ("v1", "cl100k_base") else "gigatoken"), tokenizer.notes


def test_words_of_published_patterns():
    text = "I'LL we'd DON'Tgo 1234 /a/b!\r\n\n x"
    assert list(words(text, "cl100k_base")) == [
        *("I", "'LL", " we", "'d", " DON", "'T", "go", " ", "123", "4", " /", "a", "/b", "!\r\n\n", " x")
    ]
    assert list(words(text, "qwen2"))[7:12] == [" ", "1", "2", "3", "4"]
    assert list(words(text, "o200k_base"))[:4] == ["I'LL", " we'd", " DON'T", "go"]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.lists(st.sampled_from([*PIECES, " a", "b c", "d;\ne"])).map("".join))
@examples(60)
def test_long_texts_are_cut_where_no_id_can_notice(pattern, text):
    pieces = list(split_at_words(text, part_chars=3))
    assert "".join(pieces) == text
    assert ids(visible("tiktoken", pattern), *pieces) == ids(visible("tiktoken", pattern), text)


MERGES = st.lists(st.text("ab", min_size=2, max_size=5), max_size=10, unique=True)


@given(entries=MERGES, texts=st.lists(st.text("abc ", max_size=30), max_size=5))
@examples(150)
def test_odd_entries_are_refused_or_equal(entries, texts):
    """Entries that no training would make: the definition says so, or the fast engine gives the same."""
    tokens = [*SINGLE_BYTES, *(entry.encode() for entry in entries)]
    options = {"vocab_size": len(tokens) + 7, "num_special_tokens": 7}
    exact = build_tokenizer("TikTokenizer", {"ranks.json": as_list(tokens)}, engine="tiktoken", options=options)
    table = {token: 7 + rank for rank, token in enumerate(tokens)}
    expected = [id for text in texts for id in twin(text, tokens=table, special=exact.special_ids, pattern="v2")]
    assert ids(exact, *texts) == expected
    if not isinstance(as_definition(table, exact.special_ids, pattern="v2"), str):
        fast = build_tokenizer("TikTokenizer", exact.files, engine="gigatoken", options=options)
        assert ids(fast, *texts) == expected


@pytest.mark.parametrize(
    ("tokens", "special", "reason"),
    [
        ([*BYTES, b"xyz"], tiktoken.SPECIAL_TOKENS, "an entry cannot be reached by merges"),
        ([*BYTES, b"<s"], ("<s", *tiktoken.SPECIAL_TOKENS[2:], "<unk>", "[s]"), "special tokens without <s>"),
        ([*BYTES, b"[s", b"[s]"], (*tiktoken.SPECIAL_TOKENS, "[s]"), "a special token is an ordinary entry too"),
    ],
)
def test_where_the_fast_engine_is_not_tried_a_line_says_why(tmp_path, tokens, special, reason):
    given = {"vocab_size": len(tokens) + 10, "num_special_tokens": 10, "special_tokens": list(special)}
    if reason.startswith("special"):
        with pytest.raises(UsageError, match=reason):
            loaded(tmp_path, as_list(tokens), **given)
        return
    tokenizer = loaded(tmp_path, as_list(tokens), **given)
    assert (tokenizer.engine, tokenizer.notes) == (
        "tiktoken",
        (f"ids come from tiktoken: gigatoken is not used: {reason}",),
    )
    assert ids(tokenizer, "xyz [s]") == ([10 + 266, 10 + ord(" "), 10 + ord("["), 10 + ord("s"), 10 + ord("]")]
                                         if b"xyz" in tokens else [10 + ord("x"), 10 + ord("y"), 10 + ord("z"), 42, 7])  # fmt: skip  # noqa: E501
    with pytest.raises(UsageError, match=f"engine gigatoken cannot be used here\n  found: {reason}"):
        loaded(tmp_path, as_list(tokens), engine="gigatoken", **given)


def test_pattern_v1_is_left_to_tiktoken(tmp_path):
    tokenizer = loaded(tmp_path, pattern="v1")
    assert tokenizer.notes == ("ids come from tiktoken: gigatoken is not used: it does not know the pattern",)
    assert ids(tokenizer, "AB")[0] == 10 + BYTES.index(b"AB")
    assert tokenizer.fingerprint != loaded(tmp_path).fingerprint


def test_a_wrong_fast_engine_is_seen(tmp_path, monkeypatch):
    """A vocabulary in which two entries are exchanged: the hostile text shows it."""
    right = as_definition

    def wrong(tokens, special, *, pattern):
        known = right(tokens, special, pattern=pattern)
        vocabulary = known["model"]["vocab"]
        vocabulary["he"], vocabulary["ll"] = vocabulary["ll"], vocabulary["he"]
        return known

    monkeypatch.setattr(tiktoken, "as_definition", wrong)
    tokenizer = loaded(tmp_path)
    assert tokenizer.engine == "tiktoken" and "it gives other ids for" in tokenizer.notes[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lone_surrogate_counts_as_a_replacement_character(engine):
    tokenizer = visible(engine, "v2")
    assert ids(tokenizer, "a\ud800b", "\ud83d\ude00") == ids(tokenizer, "a\ufffdb", "\U0001f600")


@pytest.mark.parametrize("pattern", PATTERNS)
@given(
    texts=st.lists(
        st.lists(st.sampled_from([" ", "  \t", "\xa0 ", "\n", "\r", "a", "B", "1", "!", "/", "<s>", "\x1c"])).map(
            "".join
        )
    )
)
@examples(60)
def test_long_blanks_are_cut_out_unnoticed(pattern, texts):
    exact, run = visible("tiktoken", pattern)._exact, tiktoken_engine._LONG_RUN.pattern.replace("500000", "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken_engine, "_LONG_RUN", re.compile(run))
        for text in texts:
            assert exact._encode_long(text).tolist() == exact._encode(text).tolist(), text


@pytest.mark.parametrize("engine", ENGINES)
def test_texts_without_any_place_to_stop(engine):
    tokenizer = visible(engine, "v2")
    million = 1_000_000
    texts = [
        " " * million + "x",
        " " * million,
        "a" + "\t" * million + "<s>",
        " " * (2 * million) + "\nx",
        "!" * million,
    ]
    counts = tokenizer.encode_batch(texts)[1].tolist()
    assert counts == [500_002, 500_000, 500_002, million + 2, 500_000]
    with pytest.raises(TextRefused, match=r"text 1: a word of more than 4,194,304 characters"):
        tokenizer.encode_batch(["a", "e\u0301" * (LONGEST_WORD_CHARS // 2)])


def changed(place, **parts):
    entries = json.loads(as_list())
    entries[place] = {**entries[place], **parts}
    return json.dumps(entries).encode()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[{]", r"ranks\.json:1: not a JSON list of ranks"),
        (b"[1, \xff]", r"ranks\.json: not a JSON list of ranks\n  found: 'utf-8' codec"),
        (b"[" * 100_000, r"ranks\.json: not a JSON list of ranks\n  found: maximum recursion"),
        (b"{}", r"ranks\.json: not a list of ranks\n  found: {}"),
        (
            changed(3, more=1),
            r"entry 3 is not a rank\n  found: 'rank', .*, 'more'\n  expected: exactly the keys rank",
        ),
        (json.dumps([entry(0, b"\0"), 7]).encode(), r"entry 1 is not a rank\n  found: 7"),
        (changed(258, rank=300), r"entry 258 has another rank\n  found: 300\n  expected: 258"),
        (changed(1, rank=True), r"entry 1 has another rank\n  found: True"),
        (changed(5, token_bytes="%%"), r"entry 5 has no bytes\n  found: '%%'\n  expected: base64"),
        (changed(5, token_bytes=None), r"entry 5 has no bytes\n  found: None"),
        (changed(260, token_bytes=""), r"entry 260 has no bytes"),
        (changed(260, token_bytes="YQ="), r"entry 260 has no bytes"),
        (changed(5, token_bytes="AAA="), r"entry 5 is not byte 5\n.*\n  expected: the 256 single bytes in order"),
        (changed(260, token_bytes="aGU="), r"entry 260 has the bytes of entry 256\n  found: b'he'"),
        (as_list(BYTES[:200]), r"too few entries for a vocabulary of 276\n  found: 200 .*\n  try: --vocab-size 210"),
    ],
)
def test_wrong_lists_are_named_by_entry(tmp_path, content, text):
    with pytest.raises(UsageError, match=text) as caught:
        loaded(tmp_path, content)
    assert len(str(caught.value).splitlines()) <= 4


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        (
            b"%%%% 300\n",
            r"a\.tiktoken:267: not a line of ranks\n  found: '%%%% 300'\n  expected: the bytes of",
        ),
        (b"eno=\n", r"a\.tiktoken:267: not a line of ranks"),
        (b"eno= 1 2\n", r"a\.tiktoken:267: not a line of ranks"),
        (b"\n\neno= -1\n", r"a\.tiktoken:269: not a line of ranks"),
        (b"eno= 99999999999\n", r"a\.tiktoken:267: not a line of ranks"),
        (b"\xff\xfe= 7\n", r"a\.tiktoken:267: not a line of ranks"),
        (b"eno= 258\n", r"a\.tiktoken:267: rank 258 is in line 259 already\n  found: 'eno= 258'"),
        (b"aGU= 300\n", r"a\.tiktoken:267: the bytes b'he' are in line 257 already"),
    ],
)
def test_wrong_lines_are_named(tmp_path, tail, text):
    with pytest.raises(UsageError, match=text):
        loaded(tmp_path, as_lines() + tail, name="a.tiktoken")


def test_a_byte_without_a_rank_is_named(tmp_path):
    without = b"".join(line for line in as_lines().splitlines(keepends=True) if not line.startswith(b"Wg=="))
    for content, byte in ((without, 90), (b"", 0)):
        with pytest.raises(UsageError, match=rf"a\.tiktoken: byte {byte} has no rank"):
            loaded(tmp_path, content, name="a.tiktoken")
    reordered = as_lines([*WORDS, *SINGLE_BYTES])
    with pytest.raises(UsageError, match=r"a vocabulary of 272 leaves out byte 255\n  try: a larger --vocab-size"):
        loaded(tmp_path, reordered, name="a.tiktoken", num_special_tokens=7, vocab_size=272)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pattern": "v3"}, r"pattern='v3'\n  expected: one of v1, v2"),
        ({"num_special_tokens": 6}, r"num_special_tokens=6\n  expected: an integer from 7"),
        ({"vocab_size": 265}, r"vocab_size=265\n  expected: an integer from 266"),
        ({"special_tokens": ["<s>", "</s>"]}, r"special tokens without <unk> <mask> <pad> <cls> <sep>"),
        (
            {"special_tokens": [*tiktoken.SPECIAL_TOKENS, "<s"]},
            r"beginning of another, or empty\n  found: '<s' and '<s>'",
        ),
        (
            {"special_tokens": [*tiktoken.SPECIAL_TOKENS, "<s>"]},
            r"beginning of another, or empty\n  found: '<s>' and '<s>'",
        ),
        ({"special_tokens": [*tiktoken.SPECIAL_TOKENS, ""]}, r"beginning of another, or empty"),
        ({"special_tokens": [*tiktoken.SPECIAL_TOKENS, "a b"]}, r"white space in it\n  found: 'a b'"),
        ({"special_in_text": "odd"}, "special_in_text='odd'"),
        ({"compat": "megatron-2023"}, "TikTokenizer has no option 'compat'"),
        (
            {"engine": "tokenizers"},
            r"no engine 'tokenizers' for TikTokenizer\n  expected: one of auto, gigatoken, tiktoken",
        ),
    ],
)
def test_wrong_options_are_named(tmp_path, options, text):
    with pytest.raises(UsageError, match=text):
        loaded(tmp_path, **options)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"needs a file of ranks\n  try: --tokenizer-model"):
        load_tokenizer(TokenizerSpec(type="TikTokenizer"))
    with pytest.raises(UsageError, match=r"loading a TikTokenizer: .*none\.json: No such file"):
        load_tokenizer(TokenizerSpec(type="TikTokenizer", model=str(tmp_path / "none.json")))


def test_the_fingerprint_does_not_change_between_versions_of_this_code(tmp_path):
    """If this fails, corpora of older versions no longer fit their tokenizer."""
    assert loaded(tmp_path).fingerprint == "b0eb4773cde9c6076cd1623d85f7934ccd5e9cf9cf28e1f4d3b680538108748a"
