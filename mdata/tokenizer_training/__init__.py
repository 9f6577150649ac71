"""Vocabularies learned from text, and the speed of tokenizers on this machine."""
