"""BertWordPieceLowerCase and BertWordPieceCase: their file, the ids they add, and the behaviour of the fork of 2023."""

from __future__ import annotations

import json

import pytest

from mdata import UsageError
from mdata.tokenizers.base.tokenizer import TextRefused, TokenizerSpec
from mdata.tokenizers.registry import build_tokenizer, load_tokenizer
from mdata.tokenizers.types.wordpiece_vocab import read_vocabulary

LOWER, CASE = "BertWordPieceLowerCase", "BertWordPieceCase"
ENTRIES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "Cat", "##s", "sat", "un", "##hap", "##py", "cafe",
    "caf\xe9", ".", ",", "[", "]", "cls", "sep", "\u4e2d", "\u6587", "a", "##a", "x", "##y", "CLS", "<", ">",
]  # fmt: skip
UNK, C, S = 1, 2, 3
U5 = "[UNK] [UNK] [UNK] [UNK] [UNK]"
FORK = ("compat", "megatron-2023")


def vocabulary(tmp_path, entries=ENTRIES):
    path = tmp_path / "v.txt"
    path.write_bytes("".join(f"{entry}\n" for entry in entries).encode())
    return str(path)


def bert(tmp_path, type=LOWER, *options, engine="auto", entries=ENTRIES):
    spec = TokenizerSpec(type=type, vocab_file=vocabulary(tmp_path, entries), options=options, engine=engine)
    return load_tokenizer(spec)


def names(tokenizer, *texts):
    """Ids as words, without the two around each text."""
    entries = [*ENTRIES, *(f"<extra_id_{number}>" for number in range(100))]
    ids, lengths = tokenizer.encode_batch(texts)
    assert lengths.sum() == len(ids)
    return " ".join(entries[id] for id in ids.tolist() if id not in (C, S) or tokenizer.name == "none")


@pytest.mark.parametrize("engine", ["mdata", "tokenizers"])
@pytest.mark.parametrize(
    ("text", "lower", "case"),
    [
        ("The cats sat.", "the cat ##s sat .", "[UNK] cat ##s sat ."),
        ("Caf\xe9 cafe\u0301", "cafe cafe", "[UNK] [UNK]"),
        ("caf\xe9, unhappy", "cafe , un ##hap ##py", "caf\xe9 , un ##hap ##py"),
        ("\u4e2d\u6587the", "\u4e2d \u6587 the", "\u4e2d \u6587 the"),
        ("the\x00\ufffd\x85\u200bcat\u3000cat", "[UNK] cat", "[UNK] cat"),
        ("x\u00a0y x\u0085y", "x [UNK] x ##y", "x [UNK] x ##y"),
        ("", "", ""),
        (" \n\t", "", ""),
        ("a" * 100 + " " + "a" * 101, "a" + " ##a" * 99 + " [UNK]", "a" + " ##a" * 99 + " [UNK]"),
        ("[MASK]the[UNK][pad]", "[MASK] the [UNK] [ [UNK] ]", "[MASK] the [UNK] [ [UNK] ]"),
        ("<extra_id_0>the<extra_id_99>", f"< {U5} > the < {U5} >", "<extra_id_0> the <extra_id_99>"),
    ],
)
def test_texts_become_entries(tmp_path, engine, text, lower, case):
    assert names(bert(tmp_path, engine=engine), text) == lower
    assert names(bert(tmp_path, CASE, engine=engine), text) == case


def test_facts(tmp_path):
    lower, case = bert(tmp_path), bert(tmp_path, CASE)
    size = len(ENTRIES)
    assert (lower.engine, lower.notes, case.engine, case.notes) == ("mdata", (), "mdata", ())
    assert (lower.name, lower.vocab_size, lower.eod, lower.options) == (LOWER, size, S, {})
    assert (case.name, case.vocab_size, case.eod) == (CASE, size + 100, S)
    assert lower.special_ids == {"[UNK]": 1, "[SEP]": 3, "[PAD]": 0, "[CLS]": 2, "[MASK]": 4}
    assert (case.special_ids["<extra_id_0>"], case.special_ids["<extra_id_99>"]) == (size, size + 99)
    assert lower.decode([2, 5, 6, 8, 3]) == "[CLS] the cats [SEP]"


def test_cls_and_sep_stand_around_every_sentence(tmp_path):
    found, lengths = bert(tmp_path).encode_batch(["the cat", "", "sat"])
    assert (found.tolist(), lengths.tolist()) == ([C, 5, 6, S, C, S, C, 9, S], [4, 2, 3])
    bare = bert(tmp_path, LOWER, ("include_special_tokens", False))
    found, lengths = bare.encode_batch(["the cat", "", "sat"])
    assert (found.tolist(), lengths.tolist()) == ([5, 6, 9], [2, 0, 1])
    assert bare.options == {"include_special_tokens": False}
    assert bare.fingerprint != bert(tmp_path).fingerprint
    assert bert(tmp_path, LOWER, ("include_special_tokens", True)).fingerprint == bert(tmp_path).fingerprint


def test_further_special_tokens_are_for_lower_case_only(tmp_path):
    wanted = ("special_tokens", ["<X>", "cat", "[CLS]"])
    lower, case = bert(tmp_path, LOWER, wanted), bert(tmp_path, CASE, wanted)
    size = len(ENTRIES)
    assert (lower.special_ids["<X>"], lower.special_ids["cat"], lower.vocab_size) == (size, 6, size + 1)
    assert lower.encode_batch(["thecat<X>s"])[0].tolist() == [C, 5, 6, size, UNK, S]
    assert (case.vocab_size, case.options) == (size + 100, {})
    assert case.notes[-1] == "BertWordPieceCase takes no further special tokens (as in Megatron): <X> cat [CLS]"
    assert case.fingerprint == bert(tmp_path, CASE).fingerprint
    assert lower.fingerprint != bert(tmp_path).fingerprint
    again = build_tokenizer(LOWER, lower.files, engine=lower.engine, options=lower.options)
    assert again.fingerprint == lower.fingerprint


def test_special_tokens_in_texts_are_counted_or_plain(tmp_path):
    tokenizer = bert(tmp_path)
    found, _ = tokenizer.encode_batch(["the [CLS] [MASK]", "zebra", ""])
    assert tokenizer.special_in_text(found, 3) == 2  # the unknown word is none
    plain = bert(tmp_path, LOWER, ("special_in_text", "plain"))
    found, _ = plain.encode_batch(["the [CLS] [MASK]", "zebra", ""])
    assert found.tolist() == [C, 5, 17, 19, 18, 17, UNK, 18, S, C, UNK, S, C, S]
    assert plain.special_in_text(found, 3) == 0
    assert plain.fingerprint != tokenizer.fingerprint


def test_entries_that_a_vocabulary_lacks_get_ids_after_it(tmp_path):
    entries = ["the", "[UNK]", "[CLS]"]
    tokenizer = bert(tmp_path, entries=entries)
    assert tokenizer.special_ids == {"[UNK]": 1, "[SEP]": 3, "[PAD]": 4, "[CLS]": 2, "[MASK]": 5}
    assert (tokenizer.eod, tokenizer.vocab_size) == (3, 6)
    assert tokenizer.notes[-1] == "not in the vocabulary: [SEP] gets id 3, [PAD] gets id 4, [MASK] gets id 5"
    assert tokenizer.encode_batch(["the [SEP]"])[0].tolist() == [2, 0, 3, 3]
    with pytest.raises(UsageError, match=r"v\.txt: .*'\[SEP\]' would get an id that is taken\n  found: id 3 is 'the'"):
        bert(tmp_path, entries=["[UNK]", "the", "x", "the"])


def test_the_vocabulary_file_is_read_as_the_library_reads_it(tmp_path):
    from tokenizers.models import WordPiece

    content = "[UNK]\r\n\nthe\u3000\t\n  a b \r\r\n\x1cx\x1c\n\ufeffy\nthe\n\x85\na\rb\nlast".encode()
    (tmp_path / "v.txt").write_bytes(content)
    found = read_vocabulary(content, "v.txt")
    assert found == WordPiece.read_file(str(tmp_path / "v.txt"))
    assert found == {"[UNK]": 0, "": 7, "the": 6, "  a b": 3, "\x1cx\x1c": 4, "\ufeffy": 5, "a\rb": 8, "last": 9}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", r"v\.txt: no entry \[UNK\].*\n  found: an empty file"),
        (b"[unk]\nthe\n", r"v\.txt: no entry \[UNK\].*\n  found: 2 lines, the first '\[unk\]'"),
        (b"[UNK]\n\xe9\n", r"v\.txt:2: not UTF-8 text\n  found: byte 0xe9"),
    ],
)
def test_wrong_files_are_named(tmp_path, content, text):
    (tmp_path / "v.txt").write_bytes(content)
    for options in ((), (FORK,)):
        with pytest.raises(UsageError, match=text):
            load_tokenizer(TokenizerSpec(type=CASE, vocab_file=str(tmp_path / "v.txt"), options=options))


@pytest.mark.parametrize("type", [LOWER, CASE])
def test_wrong_options_are_named(tmp_path, type):
    with pytest.raises(UsageError, match=f"{type} needs a vocabulary"):
        load_tokenizer(TokenizerSpec(type=type))
    with pytest.raises(UsageError, match=f"loading a {type}: .*none.txt: No such file"):
        load_tokenizer(TokenizerSpec(type=type, vocab_file=str(tmp_path / "none.txt")))
    with pytest.raises(UsageError, match=r"compat='2022'\n  expected: megatron-2023"):
        bert(tmp_path, type, ("compat", "2022"))
    with pytest.raises(UsageError, match="megatron-2023 has no special_tokens"):
        bert(tmp_path, type, FORK, ("special_tokens", ["x"]))
    with pytest.raises(UsageError, match=r"no engine 'gigatoken' for .*\n  expected: one of auto, mdata"):
        bert(tmp_path, type, FORK, engine="gigatoken")


@pytest.mark.parametrize(
    ("text", "lower", "case"),
    [
        ("The cats sat.", "the cat ##s sat .", "[UNK] cat ##s sat ."),
        ("Caf\xe9 caf\xe9", "cafe cafe", "[UNK] caf\xe9"),
        ("[CLS]", "[ cls ]", "[ CLS ]"),
        ("x\ue000 x\u200by \u2028the", "[UNK] x ##y the", "[UNK] x ##y the"),
        ("\u4e2d\u6587the\U0002b820", "\u4e2d \u6587 the [UNK]", "\u4e2d \u6587 the [UNK]"),
        ("a" * 200 + " " + "a" * 201, "a" + " ##a" * 199 + " [UNK]", "a" + " ##a" * 199 + " [UNK]"),
        ("the\U0001e8fft", "[UNK]", "[UNK]"),
    ],
)
def test_the_fork_of_2023(tmp_path, text, lower, case):
    assert names(bert(tmp_path, LOWER, FORK), text) == lower
    assert names(bert(tmp_path, CASE, FORK), text) == case


def test_facts_of_the_fork(tmp_path):
    tokenizer = bert(tmp_path, LOWER, FORK)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.special_ids) == (len(ENTRIES) + 2, None, {})
    assert tokenizer.notes == ("the ids are those of megatron-2023: nothing around texts, no end of document",)
    found, lengths = tokenizer.encode_batch(["the cat", "", "sat"])
    assert (found.tolist(), lengths.tolist()) == ([5, 6, 9], [2, 0, 1])
    assert tokenizer.special_in_text(found, 3) == 0
    assert tokenizer.decode([5, 6, 8]) == "the cats"
    assert tokenizer.encode_batch([])[0].tolist() == []
    with pytest.raises(TextRefused, match="text 1: a lone surrogate at character 0"):
        tokenizer.encode_batch(["a", "\ud800"])
    again = build_tokenizer(LOWER, tokenizer.files, engine=tokenizer.engine, options=tokenizer.options)
    assert again.fingerprint == tokenizer.fingerprint != bert(tmp_path).fingerprint
    assert bert(tmp_path, LOWER, FORK, entries=[*ENTRIES, "[EOS]"]).vocab_size == len(ENTRIES) + 2


@pytest.mark.slow
def test_character_classes_are_those_of_the_reference(oracles):
    """On every code point of planes with characters: the ids of these types rest on the library's classes."""
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    off = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False}
    clean, cjk, marks = (
        BertNormalizer(**{**off, flag: True}).normalize_str
        for flag in ("clean_text", "handle_chinese_chars", "strip_accents")
    )
    ranges = json.loads((oracles / "oracle/preprocess/bert_chars.json").read_text())
    space = {chr(code) for first, last in ranges.pop("space_in_pretokenizer") for code in range(first, last + 1)}
    kind = {chr(code): name for name in ranges for first, last in ranges[name] for code in range(first, last + 1)}
    known = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    known = [c for c in known if c < "\U00040000" or ord(c) >> 16 == 0xE or ord(c) % 61 == 0]
    for start in range(0, len(known), 4096):
        some = known[start : start + 4096]
        kinds = [(c, kind.get(c)) for c in some]
        text = "".join(f"x{c}y" for c in some)
        assert clean(text) == "".join({"dropped": "xy", "blank": "x y"}.get(k, f"x{c}y") for c, k in kinds)
        assert cjk(text) == "".join(f"x {c} y" if k == "cjk" else f"x{c}y" for c, k in kinds)
        # What is no mark leaves at least one character between.
        assert [part != "" for part in marks(text)[1:-1].split("yx")] == [k != "accent" for _, k in kinds]
        parted = ("x y" if c in space else f"x {c} y" if k == "punctuation" else f"x{c}y" for c, k in kinds)
        found = [word for word, _ in BertPreTokenizer().pre_tokenize_str("\n".join(f"x{c}y" for c in some))]
        assert found == [word for part in parted for word in part.split(" ")]
