"""The two families of BPE with faster engines: byte-level, and that of Llama 2 and Gemma.

Llama's family is BPE over whole texts: every blank becomes U+2581, by a normalizer or by Metaspace, one may be put in
front, and every byte has an entry such as <0x0A>. Several merges may give the same result, as in files converted from
SentencePiece models. Not supported there: entries that take precedence over merges (`ignore_merges`), for which
gigatoken 0.10 was seen to differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from mdata.tokenizers.base.byte_level import ALPHABET, FOR_TIKTOKEN, NOT_FOR_GIGATOKEN
from mdata.tokenizers.base.self_check_texts import byte_level_texts, llama_texts
from mdata.tokenizers.base.token_matching import prefix_of_another
from mdata.tokenizers.base.tokenizer_json import (
    Definition,
    added_tokens,
    added_tokens_unsupported,
    components,
    is_nfc_or_none,
    merge_parts,
    model_vocabulary,
    split_pattern,
    surrounding_ids,
)
from mdata.tokenizers.engines.exact_fallback import FallbackEngine
from mdata.tokenizers.engines.libraries import EngineFamily
from mdata.tokenizers.engines.long_text import word_splitter

BLANK = "\u2581"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
_PREPEND = {"type": "Prepend", "prepend": BLANK}
# Splits at blanks, none of which is left at that point.
_NO_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_SCHEMES = ("always", "first", "never")
_OUTSIDE_ALPHABET = re.compile(f"[^{re.escape(''.join(ALPHABET))}]")


def byte_level_unsupported(definition: Definition) -> str | None:
    """Why engines cannot be expected to agree on this as a byte-level BPE."""
    model = definition.get("model") or {}
    tests = (
        (model.get("type", "BPE") != "BPE", f"its model is {model.get('type')}, not byte-level BPE"),
        (not is_nfc_or_none(definition), "it normalizes texts"),
        (split_pattern(definition) is None, "it splits words by a pattern of its own"),
        (surrounding_ids(definition) is None, "its post-processor is not a simple template"),
        (model.get("byte_fallback") or model.get("fuse_unk"), "it has rules for unknown characters"),
        (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"), "it marks parts of words"),
    )
    reason = next((reason for holds, reason in tests if holds), None) or _vocabulary_unsupported(definition, ALPHABET)
    if reason:
        return reason
    added = {token.content for token in added_tokens(definition)}
    if _OUTSIDE_ALPHABET.search("".join(token for token in model_vocabulary(definition) if token not in added)):
        return "an entry of its vocabulary is not spelled in bytes"
    results = list(map(str.__add__, *merge_parts(definition["model"].get("merges") or ())))
    if len(set(results)) != len(results):
        return "two merges have the same result"
    return added_tokens_unsupported(definition)


def is_llama_model(definition: Definition) -> bool:
    """Whether the model is BPE with bytes for unknown characters."""
    model = definition.get("model")
    return isinstance(model, Mapping) and model.get("type", "BPE") == "BPE" and bool(model.get("byte_fallback"))


def llama_unsupported(definition: Definition) -> str | None:
    """Why a model with bytes for unknown characters is not like Llama 2's."""
    model = definition.get("model") or {}
    if not is_llama_model(definition):
        return f"its model is {model.get('type', 'BPE')} without bytes for unknown characters"
    tests = (
        (not _replaces_blanks(definition), "it normalizes or splits texts in a way of its own"),
        (surrounding_ids(definition) is None, "its post-processor is not a simple template"),
        (model.get("ignore_merges"), "entries count before merges"),
        (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"), "it marks parts of words"),
        (_matches_replaced_blanks(definition), "an added token with a blank in it has rules of its own"),
    )
    reason = next((reason for holds, reason in tests if holds), None)
    bytes_ = (f"<0x{byte:02X}>" for byte in range(256))
    return reason or _vocabulary_unsupported(definition, bytes_) or added_tokens_unsupported(definition)


def _replaces_blanks(definition: Definition) -> bool:
    normalizers = components(definition.get("normalizer"), "normalizers")
    words = components(definition.get("pre_tokenizer"), "pretokenizers")
    if normalizers in ([_REPLACE], [_PREPEND, _REPLACE]):
        return words in ([], [_NO_SPLIT])
    if normalizers or len(words) != 1 or words[0].get("type") != "Metaspace":
        return False
    return words[0].get("replacement") == BLANK and words[0].get("prepend_scheme") in _SCHEMES


def _matches_replaced_blanks(definition: Definition) -> bool:
    """Whether an added token for the exact engine is matched after blanks were replaced.

    Texts that need the exact engine are recognized by the token's own spelling, which such a text need not have.
    """
    return bool(definition.get("normalizer")) and any(
        token.normalized
        and (token.single_word or token.lstrip or token.rstrip)
        and (" " in token.content or BLANK in token.content)
        for token in added_tokens(definition)
    )


def _vocabulary_unsupported(definition: Definition, bytes_: Iterable[str]) -> str | None:
    vocabulary = model_vocabulary(definition)
    if any(byte not in vocabulary for byte in bytes_):
        return "a byte has no entry in its vocabulary"
    if len(set(vocabulary.values())) != len(vocabulary):
        return "two entries of its vocabulary share an id"
    lefts, rights = merge_parts(definition["model"].get("merges") or ())
    has_all = vocabulary.keys() >= {*lefts, *rights} | set(map(str.__add__, lefts, rights))
    return None if has_all else "a merge joins entries that do not exist"


def _gigatoken_unsupported(definition: Definition, exact: Any) -> str | None:
    other = split_pattern(definition) in NOT_FOR_GIGATOKEN
    return "it does not split by this tokenizer's pattern" if other else None


def _tiktoken_unsupported(definition: Definition, exact: Any) -> str | None:
    """Why tiktoken differs: it has no list of merges, joins any two parts of an entry, and takes a whole entry at once.

    The ids are the same if merging each entry's text gives that entry; trained vocabularies are like that.
    """
    if split_pattern(definition) not in FOR_TIKTOKEN:
        return "it does not split by this tokenizer's pattern"
    model = definition["model"]
    added = added_tokens(definition)
    if prefix_of_another(token.content for token in added) is not None:
        return "an added token is the beginning of another"
    # Texts with a token that must be a whole word go to the exact engine anyway.
    if any((token.lstrip or token.rstrip) and not token.single_word for token in added):
        return "an added token strips white space"
    if model.get("ignore_merges"):
        return "entries count before merges"
    results = map(str.__add__, *merge_parts(model["merges"]))
    tokenize = exact.library.model.tokenize
    return "an entry cannot be reached by its merges" if any(len(tokenize(entry)) > 1 for entry in results) else None


_GIGATOKEN = {"gigatoken": partial(FallbackEngine, "gigatoken")}
_TIKTOKEN = {"tiktoken": partial(FallbackEngine, "tiktoken")}

LLAMA = EngineFamily(
    matches=is_llama_model,
    unsupported=llama_unsupported,
    engines=MappingProxyType(_GIGATOKEN),
    self_check_texts=llama_texts,
    text_splitter=word_splitter,
)
# A tokenizer of no other family is closest to this one.
BYTE_LEVEL = EngineFamily(
    matches=lambda definition: True,
    unsupported=byte_level_unsupported,
    engines=MappingProxyType({**_GIGATOKEN, **_TIKTOKEN}),
    unsupported_by=MappingProxyType({"gigatoken": _gigatoken_unsupported, "tiktoken": _tiktoken_unsupported}),
    self_check_texts=byte_level_texts,
    text_splitter=word_splitter,
)
