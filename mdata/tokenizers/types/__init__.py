"""Megatron's tokenizer types, one module each, and the choice of the engine."""
