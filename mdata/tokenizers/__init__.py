"""Tokenizers: one protocol, Megatron's names, and a fingerprint of the content that decides ids."""

from mdata.tokenizers.protocol import IdArray, LengthArray, Tokenizer
from mdata.tokenizers.registry import available, build_tokenizer, load_tokenizer

__all__ = ["IdArray", "LengthArray", "Tokenizer", "available", "build_tokenizer", "load_tokenizer"]
