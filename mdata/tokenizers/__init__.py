"""Tokenizers by Megatron's names: `registry` loads them."""
