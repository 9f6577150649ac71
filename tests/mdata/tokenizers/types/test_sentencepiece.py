"""The three types of SentencePiece models: what options do to ids, what decides identity, what is refused."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from mdata.tokenizers.base.tokenizer import TextRefused, TokenizerSpec
from mdata.tokenizers.registry import build_tokenizer, load_tokenizer
from mdata.tokenizers.sentencepiece.sentencepiece_library import SentencePieceLibrary
from mdata.tokenizers.sentencepiece.sentencepiece_model import CONTROL, USER_DEFINED
from tests.helpers.examples import examples
from tests.mdata.tokenizers.models import bpe
from tests.mdata.tokenizers.test_oracles import documents, option

NAMES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
WORDS = [" ", "a", "b", "c", "<", ">", "s", "/", "ab", " a", " ab", "bc", "  "]
# <unk> 0, <s> 1, </s> 2, blank 3, a 4, b 5, c 6, < 7, > 8, s 9, / 10, ab 11, blank a 12, blank ab 13, bc 14, blanks 15
SMALL = bpe(WORDS)
FILES = {"tokenizer.model": SMALL}


def build(content=SMALL, name="Llama2Tokenizer", **options):
    return build_tokenizer(name, {"tokenizer.model": content}, engine="auto", options=options)


def ids(tokenizer, text):
    return tokenizer.encode_batch([text])[0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_the_plain_encoding(name):
    tokenizer = build(name=name)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == (name, 16, 2)
    found, lengths = tokenizer.encode_batch(["ab  c", "", "abc", "a\x00b", "<s>"])
    assert found.dtype == np.int32 and lengths.dtype == np.int64
    # The highest score comes first: " " is joined with nothing before "a" and "b" are, then " a" would come.
    assert found.tolist() == [13, 15, 6, 13, 6, 12, 0, 5, 3, 7, 9, 8]
    assert lengths.tolist() == [3, 0, 2, 3, 4]
    assert tokenizer.decode([13, 15, 6, 2, 13, 6]) == "ab  c</s>abc"
    assert tokenizer.special_ids == {"<s>": 1, "</s>": 2} and tokenizer.special_in_text(found, 5) == 0


def test_three_types_with_the_same_ids_have_one_fingerprint():
    prints = {build(name=name).fingerprint for name in NAMES}
    same = {build(bpe(WORDS, pad="<pad>")).fingerprint, build(special_in_text="plain").fingerprint}
    same |= {build(name="GPTSentencePieceTokenizer", compat="megatron-2023").fingerprint}
    assert prints == same and len(prints) == 1
    others = [
        build(bpe([*WORDS[:-1], "c "])),
        build(bpe([*reversed(WORDS)])),
        build(bpe(WORDS, remove_extra_whitespaces=1)),
        build(bpe(WORDS, eos="none")),
        build(legacy=True, special_tokens=["[X]"]),
        build(legacy=True, special_tokens=["[X]"], special_in_text="plain"),
        build(compat="megatron-2023"),
        build(name="SentencePieceTokenizer", compat="megatron-2023"),
    ]
    assert len(prints | {other.fingerprint for other in others}) == 9
    assert build(legacy=True).fingerprint == build(bpe(WORDS, eos="none")).fingerprint, "neither has an end"


def test_a_model_without_eos_has_no_end_of_document():
    assert build(bpe(WORDS, eos="none")).eod is None
    assert build(bpe(WORDS, eos="a")).eod is None, "a piece of text ends nothing"


def test_legacy_mode_cuts_at_special_tokens():
    tokenizer = build(legacy=True, special_tokens=["<x", "[Y]", "c", "<x>", "<x", "<unk>"])
    # New ones follow the pieces, "c" is one; what the library calls unknown is new too.
    assert (tokenizer.vocab_size, tokenizer.eod) == (20, None)
    assert tokenizer.special_ids == {"<s>": 1, "</s>": 2, "<x": 16, "[Y]": 17, "c": 6, "<x>": 18, "<unk>": 19}
    # The lone blank after a token goes, but not before the first and not after the last.
    assert ids(tokenizer, " [Y]b[Y] b<unk>b") == [15, 17, 5, 17, 15, 5, 19, 3, 5]
    assert ids(tokenizer, "ab<x>acab") == [13, 16, 8, 4, 6, 13]
    assert ids(tokenizer, "[Y]") == [17] and ids(tokenizer, "") == []
    found = tokenizer.encode_batch(["[Y]c<unk>c", "</s>"])[0]
    assert tokenizer.special_in_text(found, 2) == 2, "c is an ordinary piece, which texts hold anyway"
    plain = build(legacy=True, special_tokens=["<x", "[Y]", "c"], special_in_text="plain")
    assert plain.vocab_size == 18 and 17 not in ids(plain, "[Y]") and plain.special_in_text(found[:0], 0) == 0


def megatron_2023(tokenizer, text):
    """Cut at the earliest token, the first listed of several."""
    tokens = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<s>", "</s>"]
    out = []
    while found := [(text.index(token), place, token) for place, token in enumerate(tokens) if token in text]:
        start, _, token = min(found)
        out += [*ids(build(), text[:start]), tokenizer.special_ids[token]]
        text = text[start + len(token) :]
    return out + ids(build(), text)


@examples(100)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(["<CLS>", "<EOD>", "<PAD>", "<s>", "</s>", "<", "s>", "a", "b ", "  ", "\u00e9"])).map(
            "".join
        ),
        max_size=4,
    )
)
def test_the_older_fork_cut_at_tokens_of_its_own(texts):
    tokenizer = build(name="SentencePieceTokenizer", compat="megatron-2023")
    assert (tokenizer.vocab_size, tokenizer.eod) == (21, 18)
    assert [tokenizer.special_ids[token] for token in ("<CLS>", "<MASK>", "<PAD>", "<s>", "</s>")] == [16, 19, 20, 1, 2]
    found, lengths = tokenizer.encode_batch(texts)
    expected = [megatron_2023(tokenizer, text) for text in texts]
    assert found.tolist() == [id for of_text in expected for id in of_text]
    assert lengths.tolist() == [len(of_text) for of_text in expected]
    spelled = sum(text.count(token) for text in texts for token in ("<CLS>", "<EOD>", "<PAD>", "<s>", "</s>"))
    assert tokenizer.special_in_text(found, len(texts)) == spelled


def test_the_older_fork_put_bos_before_every_text():
    tokenizer = build(compat="megatron-2023")
    found, lengths = tokenizer.encode_batch(["ab", "", "c", ""])
    assert found.tolist() == [1, 13, 1, 1, 3, 6, 1] and lengths.tolist() == [2, 1, 3, 1]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.special_in_text(found, 4)) == (16, 2, 0)
    assert tokenizer.encode_batch([])[0].tolist() == []
    with pytest.raises(UsageError, match="puts bos before every text"):
        build(bpe(WORDS, bos="none"), compat="megatron-2023")


def test_blanks_are_kept_where_the_model_drops_them():
    drops = bpe(WORDS[:-1], remove_extra_whitespaces=1)
    plain, keeping = build(drops), build(drops, ignore_extra_whitespaces=False)
    assert ids(plain, "a  b") == ids(plain, "a b") == [12, 3, 5]
    # Each run is an unknown mark, which is dropped, and the blanks around it.
    assert ids(keeping, "a b") == [12, 3, 5]
    assert ids(keeping, "a  b") == [12, 3, 3, 5] and ids(keeping, " a") == [3, 12]
    assert ids(keeping, "a ") == [12, 3] and ids(keeping, "") == []
    assert keeping.fingerprint != plain.fingerprint
    assert keeping.encode_batch(["a  b", "", " ", "c"])[1].tolist() == [4, 0, 1, 2]
    # Nothing to keep: the same tokenizer.
    assert build(ignore_extra_whitespaces=False).fingerprint == build().fingerprint
    assert ids(build(ignore_extra_whitespaces=False), "a  b") == ids(build(), "a  b")


def test_pieces_for_users_are_special_where_they_look_so():
    more = [("[END]", 0.0, USER_DEFINED), ("\n", 0.0, USER_DEFINED), ("<c>", 0.0, CONTROL)]
    tokenizer = build(bpe(WORDS, more))
    assert tokenizer.special_ids == {"<s>": 1, "</s>": 2, "[END]": 16, "<c>": 18}
    found, _ = tokenizer.encode_batch(["a[END]\n", "<c>"])
    assert found.tolist() == [12, 16, 17, 3, 7, 6, 8] and tokenizer.special_in_text(found, 2) == 1
    with pytest.raises(UsageError, match=r"user-defined pieces everywhere\n  found: '\[END\]'"):
        build(bpe(WORDS, more), special_in_text="plain")
    plain = build(bpe(WORDS, more[1:]), special_in_text="plain")
    assert plain.special_in_text(plain.encode_batch(["\n", "<c>"])[0], 2) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"special_tokens": ["[X]"]}, "only in its legacy mode"),
        ({"legacy": True, "special_tokens": [""]}, r"special_tokens=\[''\]"),
        ({"legacy": True, "ignore_extra_whitespaces": False}, "exclude each other"),
        ({"legacy": True, "compat": "megatron-2023"}, "compat and legacy exclude each other"),
        ({"compat": "megatron-2020"}, "compat='megatron-2020'\n  expected: megatron-2023"),
        ({"special_in_text": "maybe"}, "special_in_text='maybe'"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        build(**options)


def test_what_the_library_refuses_is_told_with_the_file(tmp_path, capfd):
    (tmp_path / "odd.model").write_bytes(bpe(WORDS, charsmap=b"\xff" * 9))
    with pytest.raises(UsageError, match=r"odd.model: the sentencepiece library refuses it\n  found: Trie data"):
        load_tokenizer("Llama2Tokenizer", tmp_path / "odd.model")
    assert capfd.readouterr() == ("", "")


def test_loading(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(SMALL)
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        tokenizer = load_tokenizer("Llama2Tokenizer", path)
        assert tokenizer.files == FILES and tokenizer.fingerprint == build().fingerprint
        again = build_tokenizer(
            tokenizer.name, tokenizer.files, engine=tokenizer.engine, options={**tokenizer.options, "legacy": True}
        )
        assert again.options == {"legacy": True}
    with pytest.raises(UsageError, match="needs a model file"):
        load_tokenizer("Llama2Tokenizer")
    with pytest.raises(UsageError, match="No such file"):
        load_tokenizer("SentencePieceTokenizer", tmp_path / "absent.model")
    with pytest.raises(UsageError, match=r"(?s)no engine 'tiktoken' for SentencePiece models.*sentencepiece"):
        load_tokenizer(TokenizerSpec(type="Llama2Tokenizer", model=str(tmp_path), engine="tiktoken"))


@pytest.mark.parametrize("options", [{}, {"legacy": True, "special_tokens": ["[X]"]}])
def test_texts_that_are_refused(monkeypatch, options):
    tokenizer = build(**options)
    with pytest.raises(TextRefused, match="text 1: a lone surrogate at character 4"):
        tokenizer.encode_batch(["a[X]b", "[X]b\ud800[X]"])
    monkeypatch.setattr("mdata.tokenizers.engines.long_text.LONGEST_WHOLE_CHARS", 3)
    with pytest.raises(TextRefused, match="text 1: the text has 4 characters; this tokenizer accepts at most 3"):
        tokenizer.encode_batch(["aaa", "aaaa"])


def test_ids_outside_the_vocabulary_have_no_text():
    """A model may have more rows, and write them."""
    tokenizer = build()
    assert tokenizer.decode([3, 16, 3]) == tokenizer.decode([3]) + "\ufffd" + tokenizer.decode([3])
    assert build_tokenizer("ByteTokenizer", {}, options={}).decode([72, 290, 33, 256]) == "H\ufffd!<|endofdocument|>"


def test_a_text_that_the_library_gives_up_on_is_named(monkeypatch):
    class Library:
        def encode(self, texts, **_):
            if "!" in "".join(texts):
                raise RuntimeError("INTERNAL: src/x.cc(7) [a == b] not consumed")
            return [np.zeros(1, np.int32) for _ in texts]

    engine = SentencePieceLibrary(SMALL, "a model")
    engine.library = Library()
    with pytest.raises(TextRefused, match=r"text 2: the sentencepiece library fails: \[a == b\] not consumed"):
        engine.encode(["a", "b", "c!", "!"])
    monkeypatch.setattr("mdata.tokenizers.sentencepiece.sentencepiece_library._BATCH_CHARS", 2)
    with pytest.raises(TextRefused, match="text 2: "):
        engine.encode(["a", "b", "c!", "!"])


# What the reference wrote.

NO_MODEL = "not a SentencePiece model, or a damaged one\n  found: "
HOSTILE = {
    "sp_empty.model": "an empty file",
    "sp_random.model": f"{NO_MODEL}field number 0 at byte 0",
    "sp_truncated.model": f"{NO_MODEL}it ends inside field 1, 7 bytes early",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_odd_files_that_are_refused(oracles, name, capfd):
    for type in NAMES:
        with pytest.raises(UsageError, match=f"{name}: {HOSTILE[name]}"):
            load_tokenizer(type, oracles / "hostile/tokenizer" / name)
    assert capfd.readouterr() == ("", "")


def test_an_odd_file_that_the_reference_takes(oracles):
    tokenizer = load_tokenizer("SentencePieceTokenizer", oracles / "hostile/tokenizer/sp_flipped.model")
    assert (tokenizer.vocab_size, tokenizer.eod) == (4000, 2)
    assert ids(tokenizer, "hello world Z") == [621, 1353, 344, 303, 279, 1353, 1354, 1344, 1843]


def test_every_odd_file_is_decided(oracles):
    names = {path.name for path in (oracles / "hostile/tokenizer").glob("sp_*")}
    assert names == {*HOSTILE, "sp_flipped.model"}


def reference_cases(oracles, fork):
    """(id, words of the command line, sha256 of the tokens) of all cases of these types without sentence splitting."""
    cases = {case["id"]: case for case in json.loads((oracles / "oracle/preprocess/cases.json").read_text())["cases"]}
    found = json.loads((oracles / "oracle/preprocess/fork_2023.json").read_text())["cases"] if fork else cases.values()
    for case in found:
        words = cases[case["id"]]["options"]
        outputs = cases[case["id"]]["outputs"] if case.get("equal") else case.get("outputs", [])
        whole = [output["sha256"] for output in outputs if output["name"] == "out/d_text_document.bin"]
        if option(words, "--tokenizer-type") in NAMES and whole:
            yield case["id"], words, whole[0]


def options_of(words, fork):
    options = {"compat": "megatron-2023"} if fork else {}
    if "--tokenizer-sentencepiece-legacy" in words:
        options["legacy"] = True
    if "--no-tokenizer-sentencepiece-ignore-extra-whitespaces" in words:
        options["ignore_extra_whitespaces"] = False
    if "--tokenizer-special-tokens" in words:
        rest = words[words.index("--tokenizer-special-tokens") + 1 :]
        options["special_tokens"] = rest[: next(n for n, word in enumerate(rest) if word.startswith("--"))]
    return tuple(options.items())


@pytest.mark.parametrize(("fork", "count"), [(False, 13), (True, 8)])
def test_ids_are_those_of_the_reference(oracles, fork, count):
    done = 0
    for name, words, expected in reference_cases(oracles, fork):
        if "--partitions" in words:
            continue
        path, type = str(oracles / option(words, "--tokenizer-model")), option(words, "--tokenizer-type")
        tokenizer = load_tokenizer(TokenizerSpec(type=type, model=path, options=options_of(words, fork)))
        parts = []
        for sentences in documents(oracles / option(words, "--input")):
            found, _ = tokenizer.encode_batch(sentences)
            parts += [found, [tokenizer.eod]] if "--append-eod" in words and len(found) else [found]
        stored = np.concatenate(parts).astype(np.uint16)
        assert hashlib.sha256(stored.tobytes()).hexdigest() == expected, name
        done += 1
    assert done == count
