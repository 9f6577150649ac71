"""Whether a tokenizer.json is WordPiece as BERT has it, and what our own engine has to know of it.

The form: BertNormalizer with any of its flags, BertPreTokenizer, a WordPiece model with any name for unknown
words, any prefix and any longest word, and a post-processor that puts fixed ids around a text. Added tokens
have to be matched in the raw text; what they may ask beyond that is left to the exact engine, text by text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mdata.tokenizers.base.tokenizer_json import (
    LONGEST_ADDED_CHARS,
    Definition,
    added_tokens,
    flat,
    model_vocabulary,
    surroundings,
    unknown_id,
)

_FLAGS = ("clean_text", "handle_chinese_chars", "lowercase")


@dataclass(frozen=True)
class WordPieceForm:
    """What decides ids besides the vocabulary and the added tokens.

    Args:
        prefix: of entries that go on with a word.
        most_chars: of a word; longer ones are unknown.
        unknown: the id of words that no entries cover.
        treatment: whether texts are cleaned, CJK is set apart, accents are dropped, letters lose their case.
    """

    prefix: str
    most_chars: int
    unknown: int
    treatment: tuple[bool, bool, bool, bool]


def wordpiece_form(definition: Definition) -> WordPieceForm:
    """The form of a definition for which `wordpiece_obstacle` knows no obstacle."""
    model = definition["model"]
    normalizer = flat(definition["normalizer"], "normalizers")[0]
    clean, cjk, lower = (bool(normalizer[name]) for name in _FLAGS)
    strip = normalizer.get("strip_accents")
    unknown = unknown_id(definition)
    assert unknown is not None, "a definition with an obstacle"
    return WordPieceForm(
        prefix=model.get("continuing_subword_prefix", "##"),
        most_chars=model.get("max_input_chars_per_word", 100),
        unknown=unknown,
        treatment=(clean, cjk, lower if strip is None else bool(strip), lower),
    )


def wordpiece_obstacle(definition: Definition) -> str | None:
    """Why this is not WordPiece in the form of BERT's."""
    model = definition.get("model") or {}
    if model.get("type") != "WordPiece":
        return f"its model is {model.get('type', 'BPE')}, not WordPiece"
    normalizers = flat(definition.get("normalizer"), "normalizers")
    words = [part.get("type") for part in flat(definition.get("pre_tokenizer"), "pretokenizers")]
    tests = (
        ([part.get("type") for part in normalizers] != ["BertNormalizer"], "it normalizes texts in a way of its own"),
        (words != ["BertPreTokenizer"], "it cuts words in a way of its own"),
        (not _plain_values(model, normalizers), "its file leaves something out"),
        (unknown_id(definition) is None, "its vocabulary has no entry for unknown words"),
        (surroundings(definition) is None, "its post-processor is not a simple template"),
        (not all(0 <= id < 2**31 for id in model_vocabulary(definition).values()), "an id does not fit into 31 bits"),
    )
    return next((reason for holds, reason in tests if holds), None) or _added_obstacle(definition)


def _plain_values(model: Mapping[str, object], normalizers: list[Mapping[str, object]]) -> bool:
    values = [normalizers[0].get(name) for name in _FLAGS] if normalizers else []
    strip = normalizers[0].get("strip_accents") if normalizers else None
    most = model.get("max_input_chars_per_word", 100)
    return (
        all(isinstance(value, bool) for value in values)
        and (strip is None or isinstance(strip, bool))
        and isinstance(model.get("continuing_subword_prefix", "##"), str)
        and isinstance(most, int)
        and 0 <= most < 2**32
    )


def _added_obstacle(definition: Definition) -> str | None:
    tokens = added_tokens(definition)
    said = {entry["content"]: entry.get("id") for entry in definition.get("added_tokens") or ()}
    if any(said[token.content] != token.id for token in tokens):
        return "an added token has another id than its file says"
    if any(token.normalized for token in tokens):
        return "an added token is matched in the normalized text"
    if any(len(token.content) > LONGEST_ADDED_CHARS for token in tokens):
        return "an added token is very long"
    return None
