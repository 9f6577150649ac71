"""HuggingFaceTokenizer with any model: equal to the `tokenizers` library through the whole pipeline.

And the messages for a folder without a tokenizer, or one that Megatron's library would read differently.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import mdata
from mdata import UsageError
from mdata.indexed.reader import IndexedReader
from mdata.tokenizers.base.tokenizer import TextRefused, TokenizerSpec
from mdata.tokenizers.registry import build_tokenizer, load_tokenizer
from tests.mdata.tokenizers.visible import definition, token

TEXTS = [
    "Hello world, hello again.", "", " ", "  two  blanks\n\nand lines\t", "hello</s>world <s> x[SEP]",
    "caf\xe9 \u4f60\u597d \U0001f600",
    "\xc5 e\u0301 A\u030a", "1234 a1b2", "unknown \u2603 word", "</s></s>", "\u2581x \u2581 y", "<0x41>\x00\x7f",
]  # fmt: skip
PIECES = [
    "\u2581",
    "\u2581hello",
    "\u2581world",
    "hello",
    "wor",
    "ld",
    "l",
    "o",
    "h",
    "e",
    ",",
    ".",
    "\u2581two",
    "\u2581a",
]


def unigram():
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -1.5 - n) for n, piece in enumerate(PIECES))]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def wordpiece():
    entries = [
        "[UNK]",
        "<s>",
        "</s>",
        "hello",
        "world",
        "##ld",
        "##o",
        "wor",
        "x",
        ",",
        ".",
        "1",
        "##2",
        "##3",
        "caf",
        "##e",
        "cafe",
    ]
    made = Tokenizer(models.WordPiece({entry: id for id, entry in enumerate(entries)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def wordlevel():
    entries = ["[UNK]", "<s>", "</s>", "Hello", "hello", "world", "again", ",", "."]
    made = Tokenizer(models.WordLevel({entry: id for id, entry in enumerate(entries)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    return made


def llama(**parts):
    """BPE with bytes for unknown characters."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"helowrd",
        "he",
        "ll",
        "hell",
        "hello",
    ]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>", **parts))


def llama_old():
    made = llama()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return made


def llama_new():
    made = llama()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made


def with_suffix():
    entries = ["[UNK]", "<s>", "</s>", *"helo", "h</w>", "e</w>", "l</w>", "o</w>", "he", "lo</w>"]
    vocabulary = {entry: id for id, entry in enumerate(entries)}
    merges = [("h", "e"), ("l", "o</w>")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def byte_level():
    made = Tokenizer.from_str(json.dumps(definition()))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=True)])  # fmt: skip
    made.add_special_tokens(["<s>", "</s>"])
    return made


MODELS = {
    made.__name__: made for made in (unigram, wordpiece, wordlevel, llama_old, llama_new, with_suffix, byte_level)
}
PROCESSORS = ("none", "bert", "roberta", "template", "sequence")


def made(model, processor):
    """A tokenizer of that model, which puts what it says around texts."""
    tokenizer = MODELS[model]()
    tokenizer.add_special_tokens(["<s>", AddedToken("</s>", lstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("again", single_word=True), "two"])
    begin, end = (("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>")))
    template = processors.TemplateProcessing(single="<s> $A </s> </s>", pair="$A $B", special_tokens=[begin, end])
    found = {
        "none": None,
        "bert": processors.BertProcessing(end, begin),
        "roberta": processors.RobertaProcessing(end, begin, trim_offsets=True, add_prefix_space=False),
        "template": template,
        "sequence": processors.Sequence([processors.ByteLevel(trim_offsets=False), template]),
    }[processor]
    if found is not None:
        tokenizer.post_processor = found
    return tokenizer


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("model", MODELS)
def test_the_whole_tool_gives_the_ids_of_the_library(tmp_path, model, processor):
    library = made(model, processor)
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    end = library.token_to_id("</s>")
    for flags, add in (({}, True), ({"include_special_tokens": False}, False)):
        job = mdata.PreprocessOptions(
            input=(str(tmp_path / "in.jsonl"),),
            output_prefix=str(tmp_path / f"out{add}"),
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(tmp_path),
            tokenizer_options=tuple(flags.items()),
            workers=1,
            append_eod=True,
        )
        manifest = mdata.preprocess(job).manifests["text"]
        expected = [library.encode(text, add_special_tokens=add).ids for text in TEXTS]
        reader = IndexedReader(tmp_path / f"out{add}_text_document")
        found = [reader.sequence(number).tolist() for number in range(reader.num_sequences)]
        assert found == [[*ids, end] for ids in expected if ids]
        inside = [id for text in TEXTS for id in library.encode(text, add_special_tokens=False).ids]
        special = {id for id, token in library.get_added_tokens_decoder().items() if token.special}
        assert manifest.provenance.special_in_text == sum(id in special for id in inside)


def one_line(tmp_path, name):
    with pytest.raises(UsageError) as caught:
        load_tokenizer("HuggingFaceTokenizer", name)
    return str(caught.value).replace(str(tmp_path), "HERE")


def test_nothing_is_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert one_line(tmp_path, "org/some-Model_1.0") == (
        "no folder org/some-Model_1.0 here, and mdata never downloads: get it first "
        "(hf download org/some-Model_1.0 --local-dir FOLDER), then name that folder"
    )
    expected = "no folder or file {}: --tokenizer-model names a folder with tokenizer.json; nothing is downloaded"
    for name in ("gpt2", "./org/name", f"{tmp_path}/a/b", "a/b/c"):
        assert one_line(tmp_path, name) == expected.format(name.replace(str(tmp_path), "HERE"))
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "tokenizer.json").write_text(json.dumps(definition()))
    assert load_tokenizer("HuggingFaceTokenizer", "org/name").vocab_size == len(definition()["model"]["vocab"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), None),
        (("README.md",), None),
        (
            ("tokenizer.model", "tokenizer_config.json"),
            "SentencePieceTokenizer or Llama2Tokenizer, --tokenizer-model HERE/tokenizer.model",
        ),
        (("spiece.model",), "SentencePieceTokenizer or Llama2Tokenizer, --tokenizer-model HERE/spiece.model"),
        (("vocab.json", "merges.txt"), "GPT2BPETokenizer --vocab-file HERE/vocab.json --merge-file HERE/merges.txt"),
        (("vocab.json",), None),
        (("vocab.txt", "config.json"), "BertWordPieceLowerCase or BertWordPieceCase, --vocab-file HERE/vocab.txt"),
        (("tiktoken.model",), "TikTokenizer --tokenizer-model HERE/tiktoken.model"),
        (
            ("tokenizer_config.json",),
            "a folder that transformers saved with its tokenizer.json; tokenizer_config.json alone",
        ),
    ],
)
def test_a_folder_of_another_kind_is_told(tmp_path, names, words):
    for name in names:
        (tmp_path / name).touch()
    error = one_line(tmp_path, tmp_path)
    assert error.splitlines()[:2] == ["no tokenizer.json in HERE", f"  found: {', '.join(sorted(names)) or 'nothing'}"]
    assert (f"  try: --tokenizer-type {words}" if words and "folder" not in words else words or "") in error
    assert words or "try" not in error


@pytest.mark.parametrize(("name", "type"), [("x.model", "Llama2"), ("x.txt", "BertWordPiece"), ("x.tiktoken", "Tik")])
def test_a_file_of_another_kind_is_told(tmp_path, name, type):
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>")
    error = one_line(tmp_path, tmp_path / name)
    assert error.startswith(f"HERE/{name} is not a tokenizer.json\n  try: --tokenizer-type") and type in error


def noted(tmp_path, config, *, parts=None, **files):
    """The notes on a folder with that tokenizer_config.json."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({**definition(), **(parts or {})}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(TokenizerSpec(type="HuggingFaceTokenizer", model=str(tmp_path), engine="tokenizers"))
    assert set(tokenizer.files) <= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert build_tokenizer(tokenizer.name, tokenizer.files, options=tokenizer.options).notes == ()
    return tokenizer.notes


END = "<|endoftext|>"
PLAIN = "ordinary text here, but special tokens in Megatron, because other files of the folder name them: "


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"eos_token": END, "bos_token": END, "add_bos_token": True, "add_eos_token": True, "pad_token": None}, None),
        ({"pad_token": "<pad>", "image_token": {"content": "<img>"}}, "<pad> <img>"),
        (
            {"additional_special_tokens": ["<a>", {"content": "<b>"}], "extra_special_tokens": {"x": "<c>"}},
            "<a> <b> <c>",
        ),
        ({"added_tokens_decoder": {"7": {"content": "<d>"}}, "unk_token": "a"}, "a <d>"),
    ],
)
def test_tokens_that_only_other_files_name(tmp_path, config, names):
    """Seen with transformers 5.14.1: it adds them; add_bos_token and add_eos_token change nothing there."""
    expected = (f"{PLAIN}{names} (add them to the added_tokens of tokenizer.json)",) if names else ()
    assert noted(tmp_path, config) == expected


def test_older_files_count_where_there_is_no_list_of_all_tokens(tmp_path):
    older = {"special_tokens_map": {"pad_token": "<pad>"}, "added_tokens": {"<old>": 5000}}
    assert noted(tmp_path, {}, **older)[0].startswith(f"{PLAIN}<pad> <old> (")
    assert noted(tmp_path, {"added_tokens_decoder": {}}, **older) == ()


def test_the_end_of_document_of_two_files(tmp_path):
    """As transformers 5.14.1: the older file counts, unless the newer lists all added tokens."""
    files = {"tokenizer.json": json.dumps(definition()).encode(), "special_tokens_map.json": b'{"eos_token": "a"}'}
    for config, eod in (({"eos_token": "b"}, 97), ({"eos_token": "b", "added_tokens_decoder": {}}, 98), ({}, 97)):
        files["tokenizer_config.json"] = json.dumps(config).encode()
        assert build_tokenizer("HuggingFaceTokenizer", files).eod == eod


def test_flags_that_only_the_configuration_has(tmp_path):
    listed = {"9": {"content": END, "lstrip": True}}
    assert noted(tmp_path, {"added_tokens_decoder": listed}) == (
        f"matched as tokenizer.json says; Megatron follows tokenizer_config.json, which has other flags for: {END}",
    )
    listed["9"]["lstrip"] = False
    assert noted(tmp_path, {"added_tokens_decoder": listed}) == ()


METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}]}
WORDS = {"type": "BertPreTokenizer"}
BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}


@pytest.mark.parametrize(
    ("config", "parts", "word"),
    [
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"normalizer": PREPEND}, None),
        ({"tokenizer_class": "SomeTokenizer"}, {"normalizer": PREPEND}, None),
        ({"tokenizer_class": "GPT2Tokenizer"}, {}, None),
        ({"tokenizer_class": "GPT2TokenizerFast"}, {"normalizer": {"type": "NFC"}}, "a GPT2Tokenizer"),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, {}, "a GPT2Tokenizer"),
        ({"tokenizer_class": "LlamaTokenizerFast"}, {"pre_tokenizer": METASPACE}, None),
        ({"tokenizer_class": "LlamaTokenizer", "legacy": True}, {"pre_tokenizer": METASPACE}, "a LlamaTokenizer"),
        ({"tokenizer_class": "LlamaTokenizer"}, {"normalizer": PREPEND, "pre_tokenizer": None}, "a LlamaTokenizer"),
        ({"tokenizer_class": "BertTokenizer"}, {"normalizer": BERT, "pre_tokenizer": WORDS}, None),
        ({"tokenizer_class": "BertTokenizer", "do_lower_case": False},
         {"normalizer": BERT, "pre_tokenizer": WORDS}, "a BertTokenizer"),
        ({"tokenizer_class": "Qwen2Tokenizer"}, {}, "a Qwen2Tokenizer"),
        ({"tokenizer_class": "GemmaTokenizer"}, {}, "a GemmaTokenizer"),
        ({"tokenizer_class": "GPTNeoXTokenizer"}, {"normalizer": {"type": "NFC"}}, None),
        ({"tokenizer_class": "T5TokenizerFast"}, {}, "a T5Tokenizer"),
    ],
)  # fmt: skip
def test_classes_that_transformers_builds_by_its_own_rules(tmp_path, config, parts, word):
    notes = noted(tmp_path, config, parts=parts)
    assert len(notes) == bool(word)
    if word:
        cuts = "may cut" if word == "a T5Tokenizer" else "cuts"
        assert (
            notes[0]
            == f"ids follow tokenizer.json; transformers 5, which Megatron uses, {cuts} words of {word} by other rules"
        )


@pytest.mark.parametrize(
    ("model_config", "word"),
    [('{"model_type": "qwen2"}', "cuts words of a Qwen2Tokenizer"), ('{"model_type": "qwen3_5"}', "may cut words of a"),
     ('{"model_type": "llama"}', None), ('{"model_type": ["qwen2"]}', None), ("[" * 5000, None), ("", None)],
)  # fmt: skip
def test_the_model_beside_it_decides_the_class_for_some_models(tmp_path, model_config, word):
    (tmp_path / "config.json").write_text(model_config)
    notes = noted(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"}, parts={})
    assert len(notes) == bool(word) and all(word in note for note in notes)


def test_split_special_tokens_is_our_plain(tmp_path):
    files = {"tokenizer.json": json.dumps(definition()).encode()}
    plain = build_tokenizer("HuggingFaceTokenizer", files, options={"special_in_text": "plain"})
    split = build_tokenizer(
        "HuggingFaceTokenizer", {**files, "tokenizer_config.json": b'{"split_special_tokens": true}'}
    )
    assert split.fingerprint == plain.fingerprint
    assert np.array_equal(split.encode_batch([END])[0], [ord(c) for c in END])
    assert "special_in_text" not in split.options


def test_a_token_of_the_options_is_not_noted(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition(added=(token(3000, "<x>"),))))
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    assert (
        load_tokenizer("HuggingFaceTokenizer", tmp_path, special_tokens=["<pad>"]).notes[0].startswith("ids come from")
    )


TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": []}
CLS = {"type": "BertProcessing", "sep": [END, 2**31], "cls": [END, 0]}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"post_processor": {**TEMPLATE, "special_tokens": {}}}, r"adds a token to every text and .*\n  found: '<s>'"),
        ({"post_processor": {"type": "Sequence", "processors": [{**TEMPLATE, "special_tokens": {}}]}}, "not give its"),
        ({"post_processor": CLS}, r"has an id that does not fit\n  found: 2147483648"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 2**31, "[UNK]": 0}, "unk_token": "[UNK]"}}, "does not fit"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}, "cannot spell"),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "x", "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 9}}, "cannot spell"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<unk>"}}, "cannot spell"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}}, "without unk_id"),
        ({"model": {"type": "BPE", "vocab": {"ab": 0, "a": 1, "b": 2}, "merges": ["a b"],
                    "continuing_subword_prefix": "##"}}, "merge 0 has a second part without '##'"),
        ({"model": {"type": "BPE", "vocab": {"a": 1, "b": 2}, "merges": [["a", "b"]]}}, "merge 0 makes 'ab'"),
        ({"model": {"type": "BPE", "vocab": {"a": 1, "b": 2}, "merges": ["a b c"]}}, "is not a tokenizer"),
        ({"added_tokens": [{"content": 7}]}, "added_tokens that are not a list of tokens"),
        ({"added_tokens": [{"id": 1, "content": "x"}]}, "tokenizer.json is not a tokenizer"),
    ],
)  # fmt: skip
def test_what_the_library_would_stumble_over_later(tmp_path, change, text):
    (tmp_path / "tokenizer.json").write_text(json.dumps({**definition(), **change}))
    error = one_line(tmp_path, tmp_path)
    assert re.search(text, error), error
    assert len(error.splitlines()) <= 4


class PanicException(BaseException):
    """As the library's, which is no Exception."""


@pytest.mark.parametrize("error", [PanicException, Exception])
def test_a_panic_of_the_library_is_a_refusal(tmp_path, monkeypatch, error):
    def panic(*_, **__):
        raise error("index out of range")

    (tmp_path / "tokenizer.json").write_text(json.dumps(definition()))
    monkeypatch.setattr("tokenizers.Tokenizer.from_buffer", panic)
    assert one_line(tmp_path, tmp_path) == "HERE: tokenizer.json is not a tokenizer\n  found: index out of range"
    monkeypatch.undo()
    monkeypatch.setattr("tokenizers.Tokenizer.encode", panic)
    assert one_line(tmp_path, tmp_path) == "HERE: tokenizer.json cannot be used\n  found: index out of range"


PANICS = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x"},
          {"type": "Replace", "pattern": {"String": ""}, "content": "y"}]}  # fmt: skip


@pytest.mark.parametrize("texts", [["", "", "a"], ["", "", "a b" * 200_000]])
def test_a_text_on_which_the_library_panics_is_refused(texts):
    content = json.dumps({**definition(), "normalizer": PANICS}).encode()
    tokenizer = build_tokenizer("HuggingFaceTokenizer", {"tokenizer.json": content}, engine="tokenizers")
    with pytest.raises(TextRefused, match=r"text 2: the tokenizers library fails on this text: index out of bounds"):
        tokenizer.encode_batch(texts)
