"""Tokenizers: names, fingerprints, the end-of-document rule, and training that gives the same vocabulary each time."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import UsageError
from mdata.tokenizers import registry
from mdata.tokenizers.base.tokenizer_folder import folder_name, write_folder
from mdata.tokenizers.registry import available, build_tokenizer, load_tokenizer
from tests.helpers.examples import examples

GOLDEN = Path(__file__).parents[2] / "golden" / "tokenizer"
NAME = "HuggingFaceTokenizer"
FILES = {path.name: path.read_bytes() for path in GOLDEN.iterdir()}
TOKENIZER = load_tokenizer(NAME, GOLDEN)


def changed(*, config: dict | None = None, **parts) -> mdata.Tokenizer:
    """The golden tokenizer with other parts of tokenizer.json, or another configuration."""
    definition = {**json.loads(FILES["tokenizer.json"]), **parts}
    files = {**FILES, "tokenizer.json": json.dumps(definition, indent=7).encode()}
    if config is not None:
        files["tokenizer_config.json"] = json.dumps(config).encode()
    return build_tokenizer(NAME, files)


def test_a_folder_and_its_file_are_the_same_tokenizer():
    assert load_tokenizer(NAME, GOLDEN / "tokenizer.json").fingerprint == TOKENIZER.fingerprint
    assert (TOKENIZER.name, TOKENIZER.vocab_size, TOKENIZER.eod) == (NAME, 320, 0)
    assert TOKENIZER.special_ids == {"<|endoftext|>": 0}
    assert NAME in available()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
@examples(50)
def test_a_batch_is_its_texts_one_after_another(texts):
    ids, lengths = TOKENIZER.encode_batch(texts)
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int64)
    parts = [TOKENIZER.encode_batch([text])[0].tolist() for text in texts]
    assert ids.tolist() == [id for part in parts for id in part]
    assert lengths.tolist() == [len(part) for part in parts]
    # Byte-level BPE loses nothing, and <|endoftext|> is spelled as it is.
    assert [TOKENIZER.decode(part) for part in parts] == texts


def test_special_tokens_in_the_text_are_matched_and_shown():
    ids, _ = TOKENIZER.encode_batch(["a<|endoftext|>b"])
    assert 0 in ids.tolist()
    assert TOKENIZER.decode(ids.tolist()) == "a<|endoftext|>b"


def test_the_fingerprint_is_of_what_decides_ids():
    model = json.loads(FILES["tokenizer.json"])["model"]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    assert changed().fingerprint == TOKENIZER.fingerprint
    assert changed(decoder=None).fingerprint == TOKENIZER.fingerprint
    assert changed(padding={"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                            "pad_type_id": 0, "pad_token": "!"}).fingerprint == TOKENIZER.fingerprint  # fmt: skip
    assert changed(model={**model, "merges": merges}).fingerprint == TOKENIZER.fingerprint
    assert changed(model={**model, "merges": model["merges"][:-1]}).fingerprint != TOKENIZER.fingerprint
    assert changed(normalizer={"type": "Lowercase"}).fingerprint != TOKENIZER.fingerprint
    assert changed(config={}).fingerprint != TOKENIZER.fingerprint
    bare = load_tokenizer(NAME, GOLDEN, include_special_tokens=False)
    assert bare.fingerprint != TOKENIZER.fingerprint


def test_the_fingerprint_does_not_change_between_versions_of_this_code():
    """If this fails, corpora of older versions no longer fit their tokenizer."""
    assert TOKENIZER.fingerprint == "d226b2eb09c4a27dd334b9a430cfec0b2e1eb27d6d310f092a5e41e379573f89"


def test_padding_and_truncation_of_the_file_are_off():
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 90}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    short = changed(truncation=truncation, padding={**padding, "pad_type_id": 0, "pad_token": "!"})
    text = ["a text of more than two tokens"]
    assert short.encode_batch(text)[0].tolist() == TOKENIZER.encode_batch(text)[0].tolist()


def test_the_post_processor_adds_unless_told_not_to():
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    adding = changed(post_processor=template)
    assert adding.encode_batch([""])[0].tolist() == [0]
    bare = build_tokenizer(NAME, adding.files, options={"include_special_tokens": False})
    assert bare.encode_batch([""])[0].tolist() == []
    assert build_tokenizer(NAME, bare.files, options=bare.options).fingerprint == bare.fingerprint


@pytest.mark.parametrize(
    ("config", "eod"),
    [
        ({"eos_token": "!"}, 1),
        ({"eos_token": {"content": "!", "lstrip": False}}, 1),
        ({"sep_token": "!"}, 1),
        ({"eos_token": "!", "sep_token": "<|endoftext|>"}, 1),
        ({"eos_token": None, "sep_token": "!"}, 1),
        ({}, None),
    ],
)
def test_the_end_of_document_is_eos_else_sep_else_unknown(config, eod):
    assert changed(config=config).eod == eod


def test_special_tokens_map_fills_in():
    files = {**FILES, "tokenizer_config.json": b"{}", "special_tokens_map.json": b'{"eos_token": "<|endoftext|>"}'}
    assert build_tokenizer(NAME, files).eod == 0


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"tokenizer.json": b"{"}, "tokenizer.json is not JSON"),
        ({"tokenizer.json": b"[]"}, "tokenizer.json is not a JSON object"),
        ({"tokenizer.json": b'{"model": {"type": "None"}}'}, "tokenizer.json is not a tokenizer"),
        ({**FILES, "tokenizer_config.json": b"{"}, "tokenizer_config.json is not JSON"),
        ({**FILES, "tokenizer_config.json": b'{"eos_token": "</s>"}'}, "eos_token is not in its vocabulary"),
    ],
)
def test_broken_files_are_named(tmp_path, files, text):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=text) as caught:
        load_tokenizer(NAME, tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HuggingFaceTokeniser", "try: HuggingFaceTokenizer?"),
        ("SFTTokenizer", "SFTTokenizer is not supported: it needs options that Megatron's"),
        ("nothing like it", "expected: one of GPT2BPETokenizer, HuggingFaceTokenizer"),
    ],
)
def test_names_that_cannot_be_loaded(name, text):
    with pytest.raises(UsageError) as caught:
        load_tokenizer(name, GOLDEN)
    assert text in str(caught.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"no tokenizer\.json in .*\n  found: nothing$"):
        load_tokenizer(NAME, tmp_path)


def test_a_kept_folder_gives_the_tokenizer_back(tmp_path):
    folder = tmp_path / folder_name(TOKENIZER.files)
    write_folder(folder, TOKENIZER.files)
    assert load_tokenizer(NAME, folder).fingerprint == TOKENIZER.fingerprint
    (folder / "tokenizer.json").write_bytes(b"spoilt")
    write_folder(folder, TOKENIZER.files)
    assert load_tokenizer(NAME, folder).fingerprint == TOKENIZER.fingerprint
    assert folder_name({**TOKENIZER.files, "more": b""}) != folder.name


def write_text(path: Path) -> None:
    words = ["stone", "river", "bridge", "cloud", "night", "lamp"]
    lines = [" ".join(words[(i * k) % 6] for k in range(1, 9)) for i in range(200)]
    path.write_text("".join(json.dumps({"text": line, "other": "zzz"}) + "\n" for line in lines))


def test_learning_is_repeatable_and_keeps_the_bytes(tmp_path):
    write_text(tmp_path / "x.jsonl")
    first = mdata.train_tokenizer([tmp_path / "x.jsonl"], tmp_path / "a", vocab_size=280).tokenizer
    mdata.train_tokenizer([tmp_path / "x.jsonl"], tmp_path / "b", vocab_size=280)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (first.vocab_size, first.eod) == (280, 0)
    assert load_tokenizer(NAME, tmp_path / "a").fingerprint == first.fingerprint
    vocabulary = json.loads((tmp_path / "a" / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(280))
    assert sum(len(token) == 1 for token, id in vocabulary.items() if 1 <= id <= 256) == 256


def test_learning_refuses_too_small_a_vocabulary_and_bad_rows(tmp_path):
    write_text(tmp_path / "x.jsonl")
    with pytest.raises(UsageError, match="a vocabulary of 256 is too small"):
        mdata.train_tokenizer([tmp_path / "x.jsonl"], tmp_path / "a", vocab_size=256)
    (tmp_path / "y.jsonl").write_text('{"text": "a"}\n{}\n')
    with pytest.raises(mdata.BadInputError, match=r"y\.jsonl:2: no key 'text'"):
        mdata.train_tokenizer([tmp_path / "y.jsonl"], tmp_path / "a", vocab_size=300)
    assert not (tmp_path / "a").exists()


def test_every_option_of_a_type_is_an_argument():
    arguments = inspect.signature(load_tokenizer).parameters.keys() - {"spec", "model", "on_files_read"}
    assert arguments == {option for name in available() for option in registry._type(name).OPTIONS}
    assert load_tokenizer("NullTokenizer", vocab_size=7, eod_id=3).eod == 3
    with pytest.raises(UsageError, match="ByteTokenizer has no option 'vocab_size'"):
        load_tokenizer("ByteTokenizer", vocab_size=7)
