"""GPT2BPETokenizer, NullTokenizer and ByteTokenizer, and what all types share: options, special tokens, long texts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from mdata.tokenizers.base.byte_level import ALPHABET, from_bytes, to_bytes
from mdata.tokenizers.base.tokenizer import TextRefused, TokenizerSpec
from mdata.tokenizers.engines import long_text
from mdata.tokenizers.registry import build_tokenizer, load_tokenizer
from tests.helpers.examples import examples
from tests.mdata.tokenizers.visible import END, definition, token

MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 w"]
ENTRIES = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
ENGINES = ("gigatoken", "tiktoken", "tokenizers")


def files(tmp_path, *, entries=(*ENTRIES, END), merges=MERGES, version="#version: 0.2\n"):
    vocabulary = entries if isinstance(entries, dict) else {entry: id for id, entry in enumerate(entries)}
    (tmp_path / "v.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "m.txt").write_text(version + "".join(f"{merge}\n" for merge in merges), encoding="utf-8")
    return {"vocab_file": str(tmp_path / "v.json"), "merge_file": str(tmp_path / "m.txt")}


def gpt2(tmp_path, engine="auto", options=(), **parts):
    return load_tokenizer(
        TokenizerSpec(type="GPT2BPETokenizer", **files(tmp_path, **parts), engine=engine, options=tuple(options))
    )


def ids(tokenizer, *texts):
    return tokenizer.encode_batch(texts)[0].tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_two_files_give_ids(tmp_path, engine):
    tokenizer = gpt2(tmp_path, engine)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.special_ids) == (262, 261, {END: 261})
    assert (tokenizer.engine, tokenizer.notes) == (engine, ())
    space = ord(" ")
    assert ids(tokenizer, "hello wo", f" {END}h") == [259, 260, ord("o"), space, 261, ord("h")]
    assert tokenizer.decode(ids(tokenizer, f"hello\xe9{END}")) == f"hello\xe9{END}"


def test_a_fast_engine_is_taken_and_the_exact_one_where_a_byte_is_missing(tmp_path):
    assert gpt2(tmp_path).engine == "gigatoken"
    without_z = [entry for entry in (*ENTRIES, END) if entry != "Z"]
    tokenizer = gpt2(tmp_path, entries=without_z)
    assert tokenizer.engine == "tokenizers"
    assert tokenizer.notes == (
        "ids come from tokenizers: a byte has no entry in its vocabulary",
        "bytes without an entry are dropped from every text, as in Megatron: b'Z'",
    )
    assert ids(tokenizer, "aZa") == ids(tokenizer, "aa") == [96, 96]
    with pytest.raises(UsageError, match="engine tiktoken cannot be used here\n  found: a byte has no entry"):
        gpt2(tmp_path, "tiktoken", entries=without_z)


def test_the_first_line_of_merges_is_left_out_only_if_it_tells_a_version(tmp_path):
    assert ids(gpt2(tmp_path, version=""), "hello") == ids(gpt2(tmp_path), "hello") == [259]
    assert gpt2(tmp_path, version="").fingerprint == gpt2(tmp_path).fingerprint


@pytest.mark.parametrize("engine", ENGINES)
def test_special_tokens_follow_in_their_order_and_the_longest_wins(tmp_path, engine):
    wanted = ["[B]", "<a>", "hell", "[B]"]
    tokenizer = gpt2(tmp_path, engine, [("special_tokens", wanted)], entries=ENTRIES)
    assert tokenizer.special_ids == {END: 261, "[B]": 262, "<a>": 263, "hell": 258}
    assert (tokenizer.eod, tokenizer.vocab_size) == (261, 264)
    assert ids(tokenizer, f"hello[B]{END}<a>") == [258, ord("o"), 262, 261, 263]
    assert tokenizer.options == {"special_tokens": wanted}
    again = build_tokenizer(tokenizer.name, tokenizer.files, engine=engine, options=tokenizer.options)
    assert again.fingerprint == tokenizer.fingerprint != gpt2(tmp_path, engine, entries=ENTRIES).fingerprint
    assert ids(again, "[B]hell") == [262, 258]


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_the_longest_special_token_wins(tmp_path, engine):
    tokenizer = gpt2(tmp_path, engine, [("special_tokens", ["<a>", "<a>b", "x<a"])])
    assert ids(tokenizer, "<a>b<a>x<a>") == [263, 262, 264, ord(">")]


@pytest.mark.parametrize("engine", ENGINES)
def test_special_tokens_can_be_plain_text(tmp_path, engine):
    plain = gpt2(tmp_path, engine, [("special_in_text", "plain"), ("special_tokens", ["[B]"])])
    assert ids(plain, f"h{END}[B]") == [ord(c) for c in f"h{END}[B]"]
    assert plain.special_in_text(plain.encode_batch([END])[0], 1) == 0
    assert (plain.eod, plain.vocab_size) == (261, 263)
    assert plain.options == {"special_in_text": "plain", "special_tokens": ["[B]"]}
    special = gpt2(tmp_path, engine, [("special_in_text", "special"), ("special_tokens", ["[B]"])])
    assert "special_in_text" not in special.options and special.fingerprint != plain.fingerprint
    assert special.special_in_text(special.encode_batch([f"h{END}[B]", "[B]", ""])[0], 3) == 3


FORK = ("compat", "megatron-2023")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_fork_of_2023_knows_no_special_tokens_in_the_text(tmp_path, engine):
    fork = gpt2(tmp_path, engine, [FORK])
    assert ids(fork, f"h{END}hello") == [*(ord(c) for c in f"h{END}"), 259]
    assert (fork.eod, fork.vocab_size, fork.options) == (261, 262, dict([FORK]))
    assert fork.fingerprint == gpt2(tmp_path, engine, [("special_in_text", "plain")]).fingerprint
    again = build_tokenizer(fork.name, fork.files, engine=engine, options=fork.options)
    assert (again.fingerprint, ids(again, END)) == (fork.fingerprint, [ord(c) for c in END])


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"entries": ENTRIES}, r"v\.json: no entry '<\|endoftext\|>', without which megatron-2023 fails"),
        ({"entries": [entry for entry in (*ENTRIES, END) if entry != "Z"]}, r"v\.json: no entry 'Z'"),
        ({"version": ""}, r"m\.txt: megatron-2023 drops the first line"),
        ({"merges": ["h e", "l l\nx"]}, r"not a merge"),
        ({"options": [FORK, ("special_tokens", ["[B]"])]}, "megatron-2023 takes no further special tokens"),
        ({"options": [("compat", "megatron-2022")]}, r"compat='megatron-2022'\n  expected: megatron-2023"),
    ],
)
def test_what_the_fork_would_read_otherwise_is_refused(tmp_path, parts, text):
    with pytest.raises(UsageError, match=text):
        gpt2(tmp_path, **{"options": [FORK], **parts})


def test_a_last_merge_that_the_fork_would_lose(tmp_path):
    given = files(tmp_path)
    (tmp_path / "m.txt").write_text("#version: 0.2\nh e", encoding="utf-8")
    with pytest.raises(UsageError, match="drops the first line in any case, and a last line"):
        load_tokenizer(TokenizerSpec(type="GPT2BPETokenizer", **given, options=(FORK,)))


@pytest.mark.parametrize("type", ["HuggingFaceTokenizer", "TikTokenizer", "ByteTokenizer"])
def test_types_that_the_fork_did_not_have_know_no_compat(type):
    with pytest.raises(UsageError, match=f"{type} has no option 'compat'"):
        load_tokenizer(TokenizerSpec(type=type, options=(FORK,)))


def test_a_new_id_that_is_taken_is_refused(tmp_path):
    gap = {**{entry: id for id, entry in enumerate(ENTRIES[:-1])}, ENTRIES[-1]: 261}
    with pytest.raises(UsageError, match=r"'<\|endoftext\|>' would get an id that is taken\n.*id 261 is"):
        gpt2(tmp_path, entries=gap)


def test_fingerprints_are_of_content_only(tmp_path):
    (tmp_path / "x").mkdir()
    reference = gpt2(tmp_path)
    shuffled = dict(sorted(((entry, id) for id, entry in enumerate((*ENTRIES, END))), reverse=True))
    assert gpt2(tmp_path / "x", "tokenizers", entries=shuffled).fingerprint == reference.fingerprint
    assert gpt2(tmp_path, merges=MERGES[:-1]).fingerprint != reference.fingerprint
    swapped = [END, *ENTRIES]
    assert gpt2(tmp_path, entries=swapped).fingerprint != reference.fingerprint
    assert reference.fingerprint == "386a3cd2dfa8baea2446ef99a595c9e2cf2ebcda34e91162140fa5395fad6bca"


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ({"entries": {**dict.fromkeys(ENTRIES, 1), "he": 1.5}}, r"v\.json:1: the entry 'he' has no usable id"),
        ({"entries": {"a": True}}, r"v\.json:1: the entry 'a' has no usable id\n  found: True"),
        ({"entries": {"a": 2**31}}, r"expected: an integer from 0 to 2147483647"),
        ({"merges": ["h e", "he ll extra"]}, r"m\.txt:3: not a merge\n  found: 'he ll extra'"),
        ({"merges": ["h e", "", "l l"], "version": ""}, r"m\.txt:2: not a merge\n  found: ''"),
        ({"merges": ["h e", "hell"]}, r"m\.txt:3: not a merge"),
        ({"merges": ["h e", " e"]}, r"m\.txt:3: not a merge"),
        ({"merges": ["x y"]}, r"m\.txt:2: a merge of 'x' and 'y' needs an entry.*\n  found: 'xy'"),
        ({"merges": ["#version: 0.2"]}, r"m\.txt:2: a merge of '#version:' and '0\.2'"),
    ],
)
def test_wrong_files_are_named_by_line(tmp_path, kinds, text):
    with pytest.raises(UsageError, match=text):
        gpt2(tmp_path, **kinds)


def test_files_that_are_no_text(tmp_path):
    given = files(tmp_path)
    (tmp_path / "m.txt").write_bytes(b"#version: 0.2\nh e\n\xff e\n")
    with pytest.raises(UsageError, match=r"m\.txt:3: not UTF-8 text\n  found: byte 0xff"):
        load_tokenizer(TokenizerSpec(type="GPT2BPETokenizer", **given))
    (tmp_path / "v.json").write_text('{"a": 0,\n"b"')
    with pytest.raises(UsageError, match=r"v\.json:2: not a JSON vocabulary"):
        load_tokenizer(TokenizerSpec(type="GPT2BPETokenizer", **given))
    with pytest.raises(UsageError, match=r"loading a GPT2BPETokenizer: .*none\.json: No such file"):
        load_tokenizer(TokenizerSpec(type="GPT2BPETokenizer", **{**given, "vocab_file": str(tmp_path / "none.json")}))
    with pytest.raises(UsageError, match="needs two files"):
        load_tokenizer(TokenizerSpec(type="GPT2BPETokenizer"))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (TokenizerSpec(type="HuggingFaceTokenizer"), "needs a folder"),
        (TokenizerSpec(type="NullTokenizer"), "needs the number of ids"),
        (TokenizerSpec(type="NullTokenizer", options=(("vocab_size", 0),)), "vocab_size=0"),
        (TokenizerSpec(type="NullTokenizer", options=(("vocab_size", 9), ("eod_id", 2**31))), "eod_id=2147483648"),
        (TokenizerSpec(type="NullTokenizer", options=(("vocab_size", 9), ("special_in_text", "plain"))), "eod-id N"),
        (TokenizerSpec(type="NullTokenizer", options=(("vocab_size", 9), ("compat", "x"))), "compat='x'"),
        (
            TokenizerSpec(
                type="NullTokenizer", options=(("vocab_size", 9), ("eod_id", 3), ("compat", "megatron-2023"))
            ),
            "megatron-2023 ends documents with the vocabulary's size, 9",
        ),
        (TokenizerSpec(type="ByteTokenizer", options=(("special_in_text", "odd"),)), "special_in_text='odd'"),
        (TokenizerSpec(type="ByteTokenizer", options=(("vocab_size", 9),)), "has no option 'vocab_size'"),
    ],
)
def test_wrong_options_are_named(spec, text):
    with pytest.raises(UsageError, match=text):
        load_tokenizer(spec)


def null(**options):
    return load_tokenizer(TokenizerSpec(type="NullTokenizer", options=tuple(options.items())))


def test_null_takes_what_python_takes_for_a_number():
    tokenizer = null(vocab_size=1000)
    assert (tokenizer.vocab_size, tokenizer.eod, null(vocab_size=1000, eod_id=5).eod) == (1000, 999, 5)
    texts = ["+8 007 1_000", "\t12\n -3", "\u0661\u0662", "99999"]
    found, lengths = tokenizer.encode_batch(texts)
    assert (found.tolist(), lengths.tolist()) == ([8, 7, 1000, 12, -3, 12, 99999], [3, 2, 1, 1])
    assert (found.dtype, lengths.dtype) == (np.int32, np.int64)
    assert tokenizer.decode(found[:4]) == "8 7 1000 12"
    assert tokenizer.special_in_text(tokenizer.encode_batch(["999 1", "999"])[0], 2) == 2
    fork = null(vocab_size=1000, compat="megatron-2023")
    assert (fork.vocab_size, fork.eod, fork.options["vocab_size"]) == (1001, 1000, 1000)
    assert build_tokenizer("NullTokenizer", {}, options=fork.options).eod == 1000
    assert fork.fingerprint == null(vocab_size=1001).fingerprint != tokenizer.fingerprint
    assert null(vocab_size=1000, eod_id=5).fingerprint != tokenizer.fingerprint
    assert null(vocab_size=1000, eod_id=None).fingerprint == null(vocab_size=1000, eod_id=999).fingerprint
    assert build_tokenizer("NullTokenizer", {}, options=tokenizer.options).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "an empty text is not an integer"),
        ("1  2", "two blanks, or one at an end, is not an integer"),
        ("1 x2 3", "'x2' is not an integer"),
        ("1.0", "'1.0' is not an integer"),
        ("2147483648", "2147483648 does not fit into 32 bits"),
        ("-2147483649", "-2147483649 does not fit into 32 bits"),
        ("9" * 60, "a number of more than 40 digits does not fit into 32 bits"),
        ("9" * 5000, "is not an integer"),
    ],
)
def test_null_refuses_a_text_by_its_number(text, reason):
    with pytest.raises(TextRefused) as caught:
        null(vocab_size=9).encode_batch(["1", text, "2"])
    assert caught.value.index == 1 and reason in caught.value.reason


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
@examples(50)
def test_bytes_are_the_bytes(texts):
    tokenizer = load_tokenizer(TokenizerSpec(type="ByteTokenizer"))
    found, lengths = tokenizer.encode_batch(texts)
    assert bytes(found.tolist()) == "".join(texts).encode()
    assert lengths.tolist() == [len(text.encode()) for text in texts]
    assert (found.dtype, lengths.dtype) == (np.int32, np.int64)
    assert tokenizer.decode(found) == "".join(texts)


def test_byte_facts():
    tokenizer = load_tokenizer(TokenizerSpec(type="ByteTokenizer", options=(("special_in_text", "plain"),)))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.special_ids) == (257, 256, {"<|endofdocument|>": 256})
    assert tokenizer.special_in_text(tokenizer.encode_batch(["<|endofdocument|>"])[0], 1) == 0
    assert tokenizer.decode([104, 105, 256, 0xC3, 256]) == "hi<|endofdocument|>\ufffd<|endofdocument|>"
    assert ids(tokenizer) == []


@pytest.mark.parametrize("type", ["ByteTokenizer", "HuggingFaceTokenizer"])
def test_a_lone_surrogate_is_refused(type):
    content = {"tokenizer.json": json.dumps(definition()).encode()} if type[0] == "H" else {}
    for engine in ENGINES:
        with pytest.raises(TextRefused, match="text 2: a lone surrogate at character 1"):
            build_tokenizer(type, content, engine=engine).encode_batch(["a", "\xe9", "x\ud800"])


def adding(engine, **flags):
    """A Hugging Face tokenizer that puts a special and an ordinary id around every text."""
    parts = [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    parts += [{"SpecialToken": {"id": "a", "type_id": 0}}]
    number = len(definition()["model"]["vocab"]) - 1
    special = {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in ((END, number), ("a", 97))}
    template = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}
    steps = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "trim_offsets": False, "add_prefix_space": False, "use_regex": True},
            template,
        ],
    }
    content = {"tokenizer.json": json.dumps(definition(post_processor=steps)).encode()}
    return build_tokenizer("HuggingFaceTokenizer", content, engine=engine, options=flags), number


@pytest.mark.parametrize("engine", ENGINES)
def test_what_stands_around_texts_is_added_and_not_counted(engine):
    tokenizer, end = adding(engine)
    found, lengths = tokenizer.encode_batch(["", "1", END])
    assert found.tolist() == [end, 97, end, 49, 97, end, end, 97]
    assert lengths.tolist() == [2, 3, 3]
    assert tokenizer.special_in_text(found, 3) == 1
    bare, _ = adding(engine, include_special_tokens=False)
    assert ids(bare, "", "1", END) == [49, end]
    assert bare.special_in_text(bare.encode_batch(["", "1", END])[0], 3) == 1


def test_a_post_processor_that_is_not_simple_is_left_to_the_library():
    """Roberta's and BERT's own forms; ids and facts then all come from the library."""
    number = len(definition()["model"]["vocab"]) - 1
    parts = {"type": "RobertaProcessing", "sep": ["a", 97], "cls": [END, number], "trim_offsets": True, "add_prefix_space": False}  # fmt: skip  # noqa: E501
    content = {"tokenizer.json": json.dumps(definition(post_processor=parts)).encode()}
    tokenizer = build_tokenizer("HuggingFaceTokenizer", content)
    assert ids(tokenizer, "1") == [number, 49, 97]
    assert tokenizer.special_in_text(tokenizer.encode_batch(["1", END])[0], 2) == 1


def test_merges_dropped_at_random_are_refused():
    known = definition()
    known["model"]["dropout"] = 0.1
    with pytest.raises(UsageError, match="uses BPE dropout"):
        build_tokenizer("HuggingFaceTokenizer", {"tokenizer.json": json.dumps(known).encode()})


def test_special_tokens_of_a_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition()))
    options = (("special_tokens", ["[B]", END, "a"]),)
    size = len(definition()["model"]["vocab"])
    for engine in ENGINES:
        spec = TokenizerSpec(type="HuggingFaceTokenizer", model=str(tmp_path), options=options, engine=engine)
        tokenizer = load_tokenizer(spec)
        assert tokenizer.special_ids == {END: size - 1, "[B]": size, "a": 97}
        assert tokenizer.vocab_size == size + 1
        assert ids(tokenizer, "1[B]a1") == [49, size, 97, 49]


@given(
    st.lists(st.sampled_from(["a", "Zz", " a", " ", "\n", ";\nb", "'s", "1", "e\u0301", END, "\u4e2d", " b c"])).map(
        "".join
    )
)
@examples(150)
def test_long_texts_are_cut_where_no_id_can_notice(text):
    tokenizer = HUGGING["tokenizers"]
    pieces = list(long_text.split_at_words(text, part_chars=3))
    assert "".join(pieces) == text
    assert ids(tokenizer, *pieces) == ids(tokenizer, text)


HUGGING = {
    engine: build_tokenizer(
        "HuggingFaceTokenizer", {"tokenizer.json": json.dumps(definition()).encode()}, engine=engine
    )
    for engine in ENGINES
}


def test_a_long_text_keeps_its_surroundings_once(monkeypatch):
    tokenizer, _ = adding("tokenizers")
    whole = tokenizer.encode_batch(["1", "a b " * 20, "2"])
    monkeypatch.setattr("mdata.tokenizers.engines.long_text.PART_CHARS", 10)
    monkeypatch.setattr(long_text.split_at_words, "__defaults__", (10,))
    for ours, theirs in zip(tokenizer.encode_batch(["1", "a b " * 20, "2"]), whole, strict=True):
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize(
    ("added", "fine"),
    [
        ({}, True),
        ({"content": "<a b>"}, False),
        ({"content": "a b"}, False),
        ({"content": "end", "lstrip": True}, False),
        ({"content": "<end>", "lstrip": True}, True),
        ({"content": "word", "single_word": True}, False),
        ({"content": " <x>"}, False),
        ({"content": "\nab"}, False),
        ({"content": "<a>\nb"}, False),
        ({"content": "word"}, True),
    ],
)
def test_added_tokens_that_may_lie_over_a_cut(added, fine):
    known = definition(added=[token(**{"id": 1, "content": END, **added})])
    assert (long_text.word_splitter(known) is not None) is fine


def test_a_word_that_is_too_long_is_refused(monkeypatch):
    long = "a" * long_text.LONGEST_WORD_CHARS
    for text in (long, f"x y {long} z", " " * long_text.LONGEST_WORD_CHARS, "!" * long_text.LONGEST_WORD_CHARS):
        with pytest.raises(TextRefused, match=r"text 1: a word of more than 4,194,304 characters"):
            HUGGING["gigatoken"].encode_batch(["a", text])
    monkeypatch.setattr("mdata.tokenizers.engines.long_text.LONGEST_WHOLE_CHARS", 5)
    monkeypatch.setattr("mdata.tokenizers.engines.long_text.PART_CHARS", 4)
    known = definition(normalizer={"type": "Lowercase"})
    whole = build_tokenizer("HuggingFaceTokenizer", {"tokenizer.json": json.dumps(known).encode()})
    assert len(ids(whole, "12345")) == 5
    with pytest.raises(TextRefused, match="text 1: the text has 6 characters; this tokenizer accepts at most 5"):
        whole.encode_batch(["1", "123456"])


def test_the_alphabet_is_gpt2s():
    assert len(set(ALPHABET)) == 256 and all(c.isprintable() and not c.isspace() for c in ALPHABET)
    assert (ALPHABET[0], ALPHABET[32], ALPHABET[ord("a")], ALPHABET[0xAD]) == ("\u0100", "\u0120", "a", "\u0143")
    assert all(to_bytes(from_bytes(bytes([b]))) == bytes([b]) for b in range(256))


def test_the_model_may_know_added_tokens_already():
    known = definition(added=(token(0, "!"),))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", {"tokenizer.json": json.dumps(known).encode()})
    assert tokenizer.vocab_size == len(known["model"]["vocab"])
    assert tokenizer.special_ids["!"] == 33
