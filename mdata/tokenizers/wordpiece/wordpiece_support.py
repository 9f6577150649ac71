"""Decides whether our own engine supports a tokenizer.json, and reads the settings that it needs.

Supported: BertNormalizer with any of its flags, BertPreTokenizer, a WordPiece model with any name for unknown
words, any prefix and any longest word, and a post-processor that puts fixed ids around a text. Added tokens
must be matched in the raw text; texts with tokens that have further rules are left to the exact engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mdata.tokenizers.base.tokenizer_json import (
    Definition,
    added_tokens,
    added_tokens_renumbered,
    components,
    model_vocabulary,
    surrounding_ids,
    unknown_id,
)

_FLAGS = ("clean_text", "handle_chinese_chars", "lowercase")


class BertNormalization(NamedTuple):
    """What happens to texts before they are split, in the order of `_core.WordPiece`."""

    clean_text: bool
    separate_cjk: bool
    strip_accents: bool
    lowercase: bool


@dataclass(frozen=True)
class WordPieceSettings:
    """The settings on which ids depend besides the vocabulary and the added tokens.

    Args:
        prefix: of entries that continue a word.
        max_chars: of a word; longer words are unknown.
        unknown: the id of words that entries cannot cover.
    """

    prefix: str
    max_chars: int
    unknown: int
    normalization: BertNormalization


def wordpiece_settings(definition: Definition) -> WordPieceSettings:
    """The settings of a supported definition."""
    model = definition["model"]
    normalizer = components(definition["normalizer"], "normalizers")[0]
    clean, cjk, lower = (bool(normalizer[name]) for name in _FLAGS)
    strip = normalizer.get("strip_accents")
    unknown = unknown_id(definition)
    assert unknown is not None, "a definition that is not supported"
    return WordPieceSettings(
        prefix=model.get("continuing_subword_prefix", "##"),
        max_chars=model.get("max_input_chars_per_word", 100),
        unknown=unknown,
        normalization=BertNormalization(clean, cjk, lower if strip is None else bool(strip), lower),
    )


def wordpiece_unsupported(definition: Definition) -> str | None:
    """Why this is not WordPiece like BERT's; None: it is."""
    model = definition.get("model") or {}
    if model.get("type") != "WordPiece":
        return f"its model is {model.get('type', 'BPE')}, not WordPiece"
    normalizers = components(definition.get("normalizer"), "normalizers")
    words = [part.get("type") for part in components(definition.get("pre_tokenizer"), "pretokenizers")]
    tests = (
        ([part.get("type") for part in normalizers] != ["BertNormalizer"], "it normalizes texts in a way of its own"),
        (words != ["BertPreTokenizer"], "it splits words in a way of its own"),
        (not _has_valid_values(model, normalizers), "a field of its file is missing or of another type"),
        (unknown_id(definition) is None, "its vocabulary has no entry for unknown words"),
        (surrounding_ids(definition) is None, "its post-processor is not a simple template"),
        (not all(0 <= id < 2**31 for id in model_vocabulary(definition).values()), "an id does not fit into 31 bits"),
    )
    if reason := next((reason for holds, reason in tests if holds), None):
        return reason
    if any(token.normalized for token in added_tokens(definition)):
        return "an added token is matched in the normalized text"
    return added_tokens_renumbered(definition)


def _has_valid_values(model: Mapping[str, object], normalizers: list[Mapping[str, object]]) -> bool:
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
