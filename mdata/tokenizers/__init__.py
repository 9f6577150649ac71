"""Tokenizers: one protocol, Megatron's names, engines that give equal ids, and a fingerprint of what decides them."""

from mdata.tokenizers.protocol import Announce, IdArray, LengthArray, Recipe, TextRefused, Tokenizer, TokenizerSpec
from mdata.tokenizers.registry import FILES_OF, WITHOUT_FILES, available, build_tokenizer, load_tokenizer

__all__ = [
    "FILES_OF",
    "WITHOUT_FILES",
    "Announce",
    "IdArray",
    "LengthArray",
    "Recipe",
    "TextRefused",
    "Tokenizer",
    "TokenizerSpec",
    "available",
    "build_tokenizer",
    "load_tokenizer",
]
