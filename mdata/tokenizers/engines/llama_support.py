"""Whether a tokenizer.json is BPE over whole texts with bytes for unknown characters, as Llama 2's and Gemma's.

The form: every blank becomes U+2581, by a normalizer or by Metaspace, one may be put in front, and every byte has
an entry such as <0x0A>. Merges may have one result in several ways, as files made from a SentencePiece model do. Not
of the form: entries that count before merges, where gigatoken 0.10 was seen to differ.
"""

from __future__ import annotations

from mdata.tokenizers.base.tokenizer_json import (
    Definition,
    added_obstacle,
    flat,
    merge_parts,
    model_vocabulary,
    surroundings,
)

BLANK = "\u2581"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
_PREPEND = {"type": "Prepend", "prepend": BLANK}
# Cuts at blanks, of which none is left by then.
_NO_CUT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_SCHEMES = ("always", "first", "never")


def is_llama_model(definition: Definition) -> bool:
    """Whether the model is of this kind, whatever else may be in the way."""
    model = definition.get("model") or {}
    return model.get("type", "BPE") == "BPE" and bool(model.get("byte_fallback"))


def llama_obstacle(definition: Definition) -> str | None:
    """Why this is not of the form."""
    model = definition.get("model") or {}
    if not is_llama_model(definition):
        return f"its model is {model.get('type', 'BPE')} without bytes for unknown characters"
    tests = (
        (not _marks_blanks(definition), "it normalizes or cuts texts in a way of its own"),
        (surroundings(definition) is None, "its post-processor is not a simple template"),
        (model.get("ignore_merges"), "entries count before merges"),
        (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"), "it marks parts of words"),
    )
    reason = next((reason for holds, reason in tests if holds), None)
    return reason or _vocabulary_obstacle(definition) or added_obstacle(definition)


def _marks_blanks(definition: Definition) -> bool:
    normalizers = flat(definition.get("normalizer"), "normalizers")
    words = flat(definition.get("pre_tokenizer"), "pretokenizers")
    if normalizers in ([_REPLACE], [_PREPEND, _REPLACE]):
        return words in ([], [_NO_CUT])
    if normalizers or len(words) != 1 or words[0].get("type") != "Metaspace":
        return False
    return words[0].get("replacement") == BLANK and words[0].get("prepend_scheme") in _SCHEMES


def _vocabulary_obstacle(definition: Definition) -> str | None:
    vocabulary = model_vocabulary(definition)
    if any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
        return "a byte has no entry in its vocabulary"
    if len(set(vocabulary.values())) != len(vocabulary):
        return "two entries of its vocabulary share an id"
    lefts, rights = merge_parts(definition["model"].get("merges") or ())
    known = vocabulary.keys() >= {*lefts, *rights} | set(map(str.__add__, lefts, rights))
    return None if known else "a merge is of entries that do not exist"
