"""Our WordPiece engine gives the ids of the `tokenizers` library and of the readable twin."""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from mdata._core import WordPiece
from mdata.tokenizers.base.tokenizer import TextRefused
from mdata.tokenizers.base.tokenizer_json import added_tokens
from mdata.tokenizers.base.unicode14 import unassigned
from mdata.tokenizers.engines import long_text
from mdata.tokenizers.engines.libraries import ExactEngine
from mdata.tokenizers.registry import build_tokenizer, load_tokenizer
from mdata.tokenizers.types import engine_selection
from mdata.tokenizers.wordpiece import wordpiece_engine
from mdata.tokenizers.wordpiece.wordpiece_engine import WordPieceEngine, wordpiece_settings, wordpiece_unsupported
from tests.helpers.examples import examples
from tests.mdata.tokenizers.visible import token
from tests.reference import wordpiece as twin

LOWER, CASED = (True, True, True, True), (True, True, False, False)
TREATMENTS = list(itertools.product((True, False), repeat=4))
ENTRIES = ["[UNK]", "[CLS]", "[SEP]", "the", "##s", "a", "##a", "##b", "ab", "##ab", "e", "\xe9", "\u4e2d", "!", "x"]


def definition(entries=ENTRIES, treatment=LOWER, *, added=(), model=(), **parts):
    """A tokenizer.json of BERT's settings."""
    clean, cjk, strip, lower = treatment
    ids = {entry: id for id, entry in enumerate(entries)}
    flags = {"clean_text": clean, "handle_chinese_chars": cjk, "strip_accents": strip, "lowercase": lower}
    known = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": {"type": "BertNormalizer", **flags},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {**known, "vocab": ids, **dict(model)},
        **parts,
    }


@functools.cache
def both(treatment, plain=False):
    known = definition(treatment=treatment, added=(token(1, "[CLS]"), token(len(ENTRIES), "<a>", special=False)))
    exact = ExactEngine(known, plain=plain)
    return exact, WordPieceEngine(known, plain=plain, exact=lambda: exact)


@functools.cache
def classes():
    return {
        name: frozenset(chr(code) for first, last in ranges for code in range(first, last + 1))
        for name, ranges in WordPiece.classes().items()
    }


def library_words(exact, text):
    library = exact.library
    return [word for word, _ in library.pre_tokenizer.pre_tokenize_str(library.normalizer.normalize_str(text))]


def code_points(step):
    """Every step-th code point of the large scripts, all others."""
    large = ((0x3400, 0xA000), (0xAC00, 0xD7A4), (0x17000, 0x18D00), (0x20000, 0x110000))
    codes = {code for code in range(0x20000) if not any(first <= code < last for first, last in large)}
    codes |= {code for first, last in large for code in range(first, last, step)}
    return [chr(code) for code in sorted(codes) if not 0xD800 <= code < 0xE000]


def compare_code_points(treatment, characters):
    """In company: after and before a letter, twice, among marks that go and marks that stay."""
    exact, ours = both(treatment)
    left = classes()["unsettled"] - (classes()["dropped"] if treatment[0] else frozenset())
    settled = [c for c in characters if c not in left or not (treatment[2] or treatment[3])]
    for start in range(0, len(settled), 512):
        text = " ".join(f"x{c}Y {c}{c} e\u0323{c}\u0301\u302e\u1dfb" for c in settled[start : start + 512])
        assert ours._core.words(text) == library_words(exact, text), ascii(settled[start])
    if treatment[2] or treatment[3]:
        assert all(ours._core.words(f"x{c}") is None for c in characters if c in left)


@pytest.mark.parametrize("treatment", [LOWER, CASED])
def test_code_points_in_company(treatment):
    compare_code_points(treatment, [c for c in code_points(1999) if ord(c) % 5 == 0 or ord(c) < 0x3100])


@pytest.mark.slow
@pytest.mark.parametrize("treatment", [LOWER, CASED])
def test_every_code_point_in_company(treatment):
    """Behind the first alphabets every 31st; `make soak` takes them all."""
    compare_code_points(
        treatment, [c for c in code_points(1) if ord(c) < 0x3400 or ord(c) >> 12 == 0xE0 or ord(c) % 31 == 0]
    )


@pytest.mark.soak
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_every_code_point_with_every_treatment(treatment):
    compare_code_points(treatment, code_points(1))


def test_what_is_left_to_the_library_is_little():
    """Assigned characters on which editions differ: marks newer than the library's decompositions."""
    late = {c for c in classes()["unsettled"] if not unassigned()[ord(c)]}
    assert len(late) < 120
    assert all(unicodedata.category(c) in ("Mn", "Mc") or unicodedata.decomposition(c) for c in late)


def test_the_classes_are_those_of_the_reference(oracles):
    ranges = json.loads((oracles / "oracle/preprocess/bert_chars.json").read_text())
    ours = WordPiece.classes()
    for name, pairs in ranges.items():
        codes = {code for first, last in pairs for code in range(first, last + 1)}
        assert {code for first, last in ours[name] for code in range(first, last + 1)} == codes, name


STAYING = "\u302e\u302f\u1dfb\u1bf2\U0001d165\U0001d16d\U0001d16e\U0001e000\u08d4\u08e3"
PIECES = [
    *"aAbBeEsxXT019 !\n\t\r.,[]#", "the", "##s", "\xe9", "\xc9", "e\u0301", "\u0130", "\u1ec7", "\u1e69", "\xdf",
    "\u1e9e", "\u4e2d", "\u6587", "\uf900", "\U0002f81a", "\u3042", "\uac00", "\uac01", "\u1100\u1161", "\u0344",
    "\u0f73", "\u037e",
    "\u1fef", "\u226e", "\x00", "\ufffd", "\x85", "\xa0", "\u2028", "\u200b", "\xad", "\ue000", "\u0903", "\u093c",
    "\u0315", "\u0334", "\u0345", "\U0001d15e", "\U0001d160", *STAYING, "\u1df6", "\u088f", "\U0001fae8", "[CLS]",
    "[CLS", "<a>", "<<a>>",
]  # fmt: skip
TEXTS = st.lists(
    st.lists(st.one_of(st.sampled_from(PIECES), st.characters(exclude_categories=["Cs"])), max_size=25).map("".join),
    max_size=6,
)


@given(treatment=st.sampled_from(TREATMENTS), texts=TEXTS)
@examples(300)
def test_words_are_those_of_the_library_and_of_the_twin(treatment, texts):
    exact, ours = both(treatment)
    for text in texts:
        found = ours._core.words(text)
        if found is not None:
            assert found == library_words(exact, text), ascii(text)
            assert found == twin.words(text, treatment=treatment, classes=classes()), ascii(text)


@given(plain=st.booleans(), treatment=st.sampled_from(TREATMENTS), texts=TEXTS)
@examples(200)
def test_ids_are_those_of_the_library(plain, treatment, texts):
    exact, ours = both(treatment, plain)
    for text, mine, theirs in zip(texts, ours.encode(texts), exact.encode(texts), strict=True):
        assert mine.tolist() == theirs.tolist(), ascii(text)
    ids, lengths = ours.encode_flat(texts, before=(7,), after=(8, 9))
    expected = [[7, *theirs.tolist(), 8, 9] for theirs in exact.encode(texts)]
    assert (ids.tolist(), lengths.tolist()) == ([id for one in expected for id in one], [len(one) for one in expected])


SYLLABLES = st.text("ab#\xe9\u4e2d\U0001d15e", max_size=4)


@given(
    entries=st.lists(SYLLABLES, max_size=12),
    prefix=st.sampled_from(["##", "", "a", "\xe9", "bb"]),
    most_chars=st.integers(0, 9),
    added=st.dictionaries(st.text("ab#<", min_size=1, max_size=3), st.booleans(), max_size=4),
    plain=st.booleans(),
    texts=st.lists(st.text("ab#\xe9\u4e2d< \U0001d15e", max_size=20), max_size=8),
)
@examples(150)
def test_any_vocabulary(entries, prefix, most_chars, added, plain, texts):
    names = list(dict.fromkeys(["[UNK]", *entries, *(prefix + entry for entry in entries)]))
    model = {"continuing_subword_prefix": prefix, "max_input_chars_per_word": most_chars}
    tokens = [
        token(names.index(n) if n in names else len(names) + i, n)
        for i, n in enumerate(sorted(added, key=names.__contains__))
    ]
    tokens = [{**one, "special": added[one["content"]]} for one in tokens]
    known = definition(names, (True, True, False, False), added=tokens, model=model.items(), post_processor=None)
    exact = ExactEngine(known, plain=plain)
    assert wordpiece_unsupported(known) is None
    ours = WordPieceEngine(known, plain=plain, exact=lambda: exact)
    for text, mine, theirs in zip(texts, ours.encode(texts), exact.encode(texts), strict=True):
        assert mine.tolist() == theirs.tolist() == twin_ids(text, known, plain), ascii(text)


def twin_ids(text, known, plain):
    settings = wordpiece_settings(known)
    added = {one["content"]: -1 if plain and one["special"] else one["id"] for one in known["added_tokens"]}
    ids = []
    for part in twin.around_tokens(text, added):
        if added.get(part, -1) >= 0:
            ids.append(added[part])
        else:
            for word in twin.words(part, treatment=settings.normalization, classes=classes()):
                ids += twin.pieces(
                    word,
                    vocabulary=known["model"]["vocab"],
                    unknown=settings.unknown,
                    prefix=settings.prefix,
                    most_chars=settings.max_chars,
                )
    return ids


def folder(known, engine="tokenizers", **options):
    return build_tokenizer(
        "HuggingFaceTokenizer", {"tokenizer.json": json.dumps(known).encode()}, engine=engine, options=options
    )


def choose(known, wanted="auto"):
    return engine_selection.select_engine(known, ExactEngine(known, plain=False), wanted=wanted, plain=False)


def test_a_folder_of_the_form_gets_the_fast_engine():
    for processor in ("BertProcessing", "RobertaProcessing"):
        parts = {
            "type": processor,
            "sep": ["[SEP]", 2],
            "cls": ["[CLS]", 1],
            "trim_offsets": True,
            "add_prefix_space": False,
        }
        known = definition(post_processor=parts)
        engine, notes = choose(known)
        assert (engine.name, notes) == ("mdata", ())
        texts = ["The ab!", "", "\u1df6 a", "\xc9\x00"]
        fast, exact = folder(known, "mdata"), folder(known)
        for mine, theirs in zip(fast.encode_batch(texts), exact.encode_batch(texts), strict=True):
            assert (mine.dtype, mine.tolist()) == (theirs.dtype, theirs.tolist())
        assert fast.encode_batch(["the"])[0].tolist() == [1, 3, 2]
        assert (fast.vocab_size, fast.fingerprint) == (exact.vocab_size, exact.fingerprint)
    bare = folder(known, "mdata", include_special_tokens=False)
    assert [part.tolist() for part in bare.encode_batch(["the", ""])] == [[3], [1, 0]]
    with pytest.raises(TextRefused, match="text 1: a lone surrogate at character 2"):
        fast.encode_batch(["a", "ab\udc00"])


@pytest.mark.parametrize(
    "flags", [{"single_word": True}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}]
)
def test_texts_with_tokens_that_look_around_are_left_to_the_library(flags):
    known = definition(added=(token(len(ENTRIES), "<a>", **flags), token(5, "a", special=False)))
    exact = ExactEngine(known, plain=False)
    ours = WordPieceEngine(known, plain=False, exact=lambda: exact)
    texts = ["x<a>x", "x \u3000<a>\x85 x", "<a>", "the a", "x<a>\x1cs"]
    for mine, theirs in zip(ours.encode(texts), exact.encode(texts), strict=True):
        assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "it normalizes texts in a way of its own"),
        ({"normalizer": ["BertNormalizer", True, True, None, True]}, "it normalizes texts in a way of its own"),
        ({"normalizer": None}, "it normalizes texts in a way of its own"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "it splits words in a way of its own"),
        ({"normalizer": {"type": "BertNormalizer", "clean_text": True}}, "of its file is missing"),
        ({"model": {"type": "WordPiece", "unk_token": "<unk>", "vocab": {"a": 0}}}, "no entry for unknown words"),
        ({"model": {"type": "BPE"}}, "its model is BPE, not WordPiece"),
        ({"post_processor": {"type": "Unheard"}}, "not a simple template"),
        ({"added_tokens": [token(7, "[NEW]")]}, "another id than its file says"),
        ({"added_tokens": [token(15, "[NEW]", normalized=True)]}, "matched in the normalized text"),
        ({"added_tokens": [token(15, "n" * 1001)]}, "very long"),
    ],
)
def test_reasons_by_structure(change, reason):
    assert wordpiece_unsupported(definition()) is None
    assert reason in str(wordpiece_unsupported(definition(**change)))


def test_reasons_are_told():
    known = definition(pre_tokenizer={"type": "Whitespace"})
    assert choose(known)[1] == ("ids come from tokenizers: it splits words in a way of its own",)
    with pytest.raises(UsageError, match="engine mdata cannot be used here\n  found: it splits words"):
        choose(known, "mdata")
    with pytest.raises(
        UsageError,
        match=r"gigatoken does not support this.*\n  found: its model is WordPiece.*\n.*one of auto, mdata, tokenizers",
    ):
        choose(definition(), "gigatoken")


@pytest.mark.parametrize("change", [{"max_chars": 99}, {"normalization": (True, True, True, False)}, {"prefix": "#"}])
def test_the_check_sees_an_engine_that_is_a_little_different(monkeypatch, change):
    wrong = replace(wordpiece_settings(definition()), **change)
    monkeypatch.setattr(wordpiece_engine, "wordpiece_settings", lambda _: wrong)
    assert "mdata is not used: it gives other ids for" in choose(definition())[1][0]


def test_the_check_sees_classes_that_are_a_little_different():
    """Words are compared, so that no vocabulary can hide what a character is."""
    _, ours = both(LOWER)

    class Library:
        def __init__(self, exact, character):
            self.normalizer, self.pre_tokenizer = self, exact.library.pre_tokenizer
            self._inner, self._character = exact.library.normalizer, character

        def normalize_str(self, text):
            return self._inner.normalize_str(text.replace(self._character, ""))

    assert ours.compare_words(both(LOWER)[0]) is None
    for character in ("\u166d", "\u2e42", "\U0002b91f", "\u08e2", "\xad", "\u3000"):
        changed = ours.compare_words(SimpleNamespace(library=Library(both(LOWER)[0], character)))
        assert (changed is None) == (character == "\xad")


@given(st.lists(st.sampled_from(["ab", " ", "\n", "\t", "\r\n", "!", "\u4e2d", "e\u0301", "\x1c", "<a>"])).map("".join))
@examples(150)
def test_long_texts_are_cut_where_no_id_can_notice(text):
    _, ours = both(LOWER)
    pieces = list(long_text.split_at_whitespace(text, part_chars=3))
    assert "".join(pieces) == text
    assert [id for ids in ours.encode(pieces) for id in ids] == ours.encode([text])[0].tolist()


def test_texts_and_words_of_any_length():
    tokenizer = folder(definition(), "mdata")
    long = "The ab! " * 2_500_000
    ids, lengths = tokenizer.encode_batch(["a", long, "x" * 15_000_000])
    assert lengths.tolist() == [3, 7_500_002, 3]
    assert ids[-3:].tolist() == [1, 0, 2] and ids[4:7].tolist() == ids[-7:-4].tolist() == [3, 8, 13]
    with pytest.raises(TextRefused, match="text 1: a word of more than 16,777,216 characters"):
        tokenizer.encode_batch(["a", "x" * 18_000_000])


def test_threads_may_share_an_engine():
    _, ours = both(LOWER)
    texts = [f"the ab{'a' * (n % 40)} s{n}! \xe9{n % 7} {'ab' * (n % 20)}" for n in range(4000)]
    expected = ours.encode_flat(texts, before=(), after=())[0].tolist()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: ours.encode_flat(texts, before=(), after=())[0].tolist(), range(8)))
    assert all(one == expected for one in found)


def test_no_text_takes_quadratic_time():
    """A megabyte of what is slowest: each would take minutes if a step cost as much as what came before it."""
    known = definition(model={"max_input_chars_per_word": 10**9}.items())
    ours = WordPieceEngine(known, plain=False, exact=lambda: ExactEngine(known, plain=False))
    units = ["a", "ab", "aab", "z", "\u302e", "\u1dfb\u302e", "\u0301", "\uac01", "\u4e2d", "!", "\xad", "\U0001d15e"]
    counts = [len(ids) for ids in ours.encode([unit * (1_000_000 // len(unit)) for unit in units])]
    assert counts == [1_000_000, 500_000, 666_666, 1, 1, 1, 0, 1, 1_000_000, 1_000_000, 0, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "x"},
        {"model": {"type": "WordPiece", "unk_token": "a", "vocab": {"a": []}}},
        {"model": {"type": "WordPiece", "unk_token": "a", "vocab": [["a", 0]]}},
        {"model": {"type": "WordPiece", "unk_token": ["a"], "vocab": {"a": 0}}},
        {"post_processor": {"type": "BertProcessing"}},
        {"post_processor": {"type": "BertProcessing", "cls": ["a"], "sep": 1}},
        {"normalizer": {"type": "BertNormalizer", "clean_text": 1}},
    ],
)
def test_broken_files_are_refused_by_name(tmp_path, change):
    (tmp_path / "tokenizer.json").write_text(json.dumps({**definition(), **change}))
    with pytest.raises(UsageError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer("HuggingFaceTokenizer", tmp_path)


NAMES = ["[UNK]", *"abcdefgh"]


@given(
    ids=st.permutations(range(14)).map(lambda ids: ids[: len(NAMES)]),
    wanted=st.lists(st.sampled_from([*NAMES, "x", "y", "z"]), unique=True),
)
@examples(100)
def test_added_tokens_are_numbered_as_the_library_numbers_them(ids, wanted):
    """Also where the ids of the vocabulary have gaps: entries that it knows already do not count."""
    vocabulary = dict(zip(NAMES, ids, strict=True))
    known = definition(model={"vocab": vocabulary}.items(), added=[token(0, name) for name in wanted])
    library = ExactEngine(known, plain=False).library
    assert {one.content: one.id for one in added_tokens(known)} == {name: library.token_to_id(name) for name in wanted}


def test_another_numbering_of_added_tokens_is_refused(monkeypatch):
    known = folder(definition(added=(token(len(ENTRIES), "<a>"),)))
    known._added = [replace(known._added[0], id=99)]
    with pytest.raises(
        UsageError, match="'<a>' has another id in this version of tokenizers\n  found: 15\n  expected: 99"
    ):
        known.select_engine("auto")
