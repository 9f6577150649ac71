"""The reader of Hugging Face folders: a tokenizer or a UsageError, whatever the bytes.

Where the library then fails on a text, that text is refused.

The first byte chooses: raw bytes as tokenizer.json, with a configuration after a zero byte; or a sound definition of
one of several kinds, in which the following bytes exchange parts, three bytes for each: where, and for what. Facts
that we read ourselves must be those of the library: sizes, ids of added tokens, what stands around texts.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

from fuzz.record_lines import check_message
from mdata.errors import UsageError
from mdata.tokenizers.base.byte_level import ALPHABET
from mdata.tokenizers.base.tokenizer import TextRefused
from mdata.tokenizers.engines.libraries import EXACT
from mdata.tokenizers.types.huggingface import HuggingFaceTokenizer

TEXTS = ["hello he\n  lo <s>[X]</s> \xe9\u4f60", "", " 'll aaaa\x00"]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}},
}


def definition(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """A small tokenizer.json."""
    size = len(model["vocab"])
    tokens = [{"id": size + number, "content": content, **FLAGS} for number, content in enumerate(("</s>", "<s>"))]
    usual = {"normalizer": None, "pre_tokenizer": BYTE_LEVEL, "post_processor": None, "decoder": BYTE_LEVEL}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        **usual,
        **parts,
        "model": model,
    }


def listed(*entries: str) -> dict[str, int]:
    """A vocabulary of these entries."""
    return {entry: id for id, entry in enumerate(entries)}


BPE = {"type": "BPE", "unk_token": None, "fuse_unk": False, "byte_fallback": False, "merges": ["h e", "l l"]}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
        "lowercase": True}  # fmt: skip
PIECES = [["<unk>", 0.0], ["\u2581", -2.0], ["\u2581he", -3.0], ["l", -3.5], ["o", -4.0]]
DIGITS = {"type": "Digits", "individual_digits": True}
ROBERTA = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1], "trim_offsets": True,
           "add_prefix_space": True}  # fmt: skip
WORDPIECE = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 100, "vocab": listed("[UNK]", "he", "##l", "##lo")}  # fmt: skip
LLAMA = {**BPE, "byte_fallback": True, "unk_token": "<unk>",
         "vocab": listed("<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"helo", "he", "ll")}  # fmt: skip
BLANKS = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
BASES = (
    definition({**BPE, "vocab": listed(*ALPHABET[:254], "he", "ll")}),
    definition({**BPE, "vocab": listed(*ALPHABET, "he", "ll")}, post_processor=TEMPLATE),
    definition(
        WORDPIECE,
        normalizer=BERT,
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor={"type": "BertProcessing", "sep": ["</s>", 4], "cls": ["<s>", 5]},
    ),
    definition(
        {"type": "WordLevel", "unk_token": "[UNK]", "vocab": listed("[UNK]", "he", "hello")},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, DIGITS]},
    ),
    definition({"type": "Unigram", "unk_id": 0, "vocab": PIECES, "byte_fallback": False}, pre_tokenizer=METASPACE),
    definition(
        LLAMA,
        pre_tokenizer=None,
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, BLANKS]},
    ),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 257, 2**31, 2**40, 0.5),
    *("", "he", "</s>", "\u4e2d", "A", "BPE", "Unigram", "WordPiece"),
    *([], {}, [1], ["he", "ll"], [["he", "ll"]], {"he": 1}),
    *({"type": "Sequence"}, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}),
    {"type": "Sequence", "processors": [TEMPLATE, TEMPLATE]},
    {"type": "Sequence", "pretokenizers": [BYTE_LEVEL]},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": True},
    *(BYTE_LEVEL, METASPACE, BERT, TEMPLATE, ROBERTA),
    *({"id": 3, "content": "he", **FLAGS}, {"id": 3, "content": "[X]"}, {"content": "[X]", "special": 1}),
    [{"id": 9, "content": "he", **FLAGS, "normalized": True}],
)


def check(data: bytes) -> None:
    """One folder."""
    choice, rest = (data[0] if data else 0), data[1:]
    if choice & 1:
        main, _, config = rest.partition(b"\0")
    else:
        main = json.dumps(exchanged(BASES[(choice >> 1) % len(BASES)], rest)).encode()
        config = b'{"eos_token": "</s>"}' if choice & 128 else b""
    files = {"tokenizer.json": main, **({"tokenizer_config.json": config} if config else {})}
    try:
        tokenizer = HuggingFaceTokenizer(files, {}, engine=EXACT)
        tokenizer.select_engine(EXACT)
        ids, _ = tokenizer.encode_batch(TEXTS)
    except UsageError as error:
        check_message(str(error))
        return
    except TextRefused as refused:
        assert "the tokenizers library fails" in refused.reason and refused.index in range(len(TEXTS)), refused
        return
    library = tokenizer._exact.library
    assert tokenizer.vocab_size == library.get_vocab_size(with_added_tokens=True)
    special = {token.content: id for id, token in library.get_added_tokens_decoder().items() if token.special}
    assert dict(tokenizer.special_ids) == special
    expected = [id for text in TEXTS for id in library.encode(text).ids]
    assert ids.tolist() == expected
    again = HuggingFaceTokenizer.build(tokenizer.files, tokenizer.options, engine=tokenizer.engine)
    assert again.fingerprint == tokenizer.fingerprint
    assert np.array_equal(again.encode_batch(TEXTS)[0], ids)
    tokenizer.special_in_text(ids, len(TEXTS))
    tokenizer.decode(ids.tolist())


def exchanged(base: dict[str, Any], edits: bytes) -> dict[str, Any]:
    """The definition with parts exchanged."""
    changed = copy.deepcopy(base)
    for at in range(0, min(len(edits), 24) - 2, 3):
        place: Any = changed
        steps = edits[at] | edits[at + 1] << 8
        while True:
            keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = keys[steps % len(keys)]
            steps //= len(keys)
            if not isinstance(place[key], dict | list) or not place[key] or steps & 1:
                place[key] = copy.deepcopy(VALUES[edits[at + 2] % len(VALUES)])
                break
            place, steps = place[key], steps >> 1
    return changed
