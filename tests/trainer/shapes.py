"""Small models for the trainer's tests."""

from __future__ import annotations

from dataclasses import replace

from trainer.models.gpt.shape import GPTShape

LLAMA = GPTShape(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=64,
    vocab_size=250,
    padded_vocab_size=256,
    max_position=16,
    position="rope",
    norm="rmsnorm",
    norm_epsilon=1e-5,
    activation="swiglu",
    bias=False,
    tie_embeddings=False,
    init_std=0.1,
)
GPT2 = replace(
    LLAMA,
    num_kv_heads=4,
    position="learned",
    norm="layernorm",
    activation="gelu",
    bias=True,
    tie_embeddings=True,
)
# Heads that are together wider than the residual stream.
WIDE = replace(GPT2, head_dim=12, position="rope", activation="gelu_erf", tie_embeddings=False)
SHAPES = {"llama": LLAMA, "gpt2": GPT2, "wide": WIDE}
