"""A byte-level vocabulary whose merges make every split between words visible in the ids.

It merges nearly every pair of bytes that can meet at a split, so engines that split differently give different ids,
which an ordinary vocabulary would often hide.
"""

from __future__ import annotations

from typing import Any

from mdata.tokenizers.base.byte_level import ALPHABET, DEEPSEEK_V3, DEEPSEEK_V3_STEPS, DIGITS, GPT2

END = "<|endoftext|>"
_ASCII = b"' aA1!\n\t\r/s_"


def definition(pattern: str = GPT2, *, added: tuple[dict[str, Any], ...] = (), **parts: Any) -> dict[str, Any]:
    """A tokenizer.json with that vocabulary and this pattern."""
    high = range(0x80, 0x100)
    pairs = [(a, b) for a in _ASCII for b in (*_ASCII, *high)] + [(a, b) for a in high for b in _ASCII]
    merges = [f"{ALPHABET[a]} {ALPHABET[b]}" for a, b in pairs]
    entries = [*ALPHABET, *(merge.replace(" ", "") for merge in merges), END]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": pattern in (GPT2, DIGITS),
    }
    words = {"type": "Sequence", "pretokenizers": [*_steps(pattern), byte_level]} if pattern != GPT2 else byte_level
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token(len(entries) - 1, END), *added],
        "normalizer": None,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {entry: id for id, entry in enumerate(entries)},
            "merges": merges,
        },
        **parts,
    }


def _steps(pattern: str) -> list[dict[str, Any]]:
    """The steps in front of the bytes."""
    if pattern == DIGITS:
        return [{"type": "Digits", "individual_digits": True}]
    steps = DEEPSEEK_V3_STEPS if pattern == DEEPSEEK_V3 else (pattern,)
    return [{"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False} for step in steps]


def token(id: int, content: str, **flags: bool) -> dict[str, Any]:
    """An entry of added_tokens, special unless said otherwise."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": id, "content": content, **usual, **flags}
