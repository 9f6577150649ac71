"""Tokenizers: one protocol, Megatron's names, engines that give equal ids, and a fingerprint of what decides them."""

from mdata.tokenizers.protocol import IdArray, LengthArray, TextRefused, Tokenizer, TokenizerSpec
from mdata.tokenizers.registry import available, build_tokenizer, load_tokenizer

__all__ = [
    "IdArray",
    "LengthArray",
    "TextRefused",
    "Tokenizer",
    "TokenizerSpec",
    "available",
    "build_tokenizer",
    "load_tokenizer",
]
