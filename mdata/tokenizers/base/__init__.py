"""The interface of all tokenizers, and a tokenizer.json read without any library."""
