"""A small BERT of Megatron-Core in plain tensors, under its names: seeded weights that bfloat16 holds, and batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH, HEADS, INNER, VOCABULARY, LAYERS, LENGTH, ROWS = 16, 2, 24, 40, 2, 12, 8


def weights() -> dict[str, Tensor]:
    """By Megatron-Core's names."""
    generator = torch.Generator().manual_seed(11)

    def normal(*size: int) -> Tensor:
        return (0.3 * torch.randn(size, generator=generator)).bfloat16().float()

    sizes = {
        "embedding.word_embeddings": (VOCABULARY, WIDTH),
        "embedding.position_embeddings": (LENGTH + 4, WIDTH),
        "embedding.tokentype_embeddings": (2, WIDTH),
    }
    weights = {f"{name}.weight": normal(*size) for name, size in sizes.items()}
    norms, layers = ["encoder.final_layernorm", "lm_head.layer_norm"], {"lm_head.dense": (WIDTH, WIDTH)}
    layers |= {"pooler.dense": (WIDTH, WIDTH), "binary_head": (2, WIDTH)}
    for i in range(LAYERS):
        layer = f"encoder.layers.{i}"
        norms += [f"{layer}.input_layernorm", f"{layer}.pre_mlp_layernorm"]
        layers |= {f"{layer}.self_attention.linear_qkv": (3 * WIDTH, WIDTH), f"{layer}.mlp.linear_fc1": (INNER, WIDTH)}
        layers |= {f"{layer}.self_attention.linear_proj": (WIDTH, WIDTH), f"{layer}.mlp.linear_fc2": (WIDTH, INNER)}
    for name in norms:
        weights |= {f"{name}.weight": (1 + normal(WIDTH)).bfloat16().float(), f"{name}.bias": normal(WIDTH)}
    for name, size in layers.items():
        weights |= {f"{name}.weight": normal(*size), f"{name}.bias": normal(size[0])}
    return weights | {"output_layer.bias": normal(VOCABULARY)}


def data() -> dict[str, Tensor]:
    """Four batches."""
    generator = torch.Generator().manual_seed(12)
    size = (4, ROWS, LENGTH)
    tokens, labels = (torch.randint(0, VOCABULARY, size, generator=generator) for _ in range(2))
    lengths = torch.randint(5, LENGTH + 1, size[:2], generator=generator)
    place = torch.arange(LENGTH)
    real = place < lengths[..., None]
    masked = (torch.rand(size, generator=generator) < 0.3) & real
    masked[..., 1] = True
    return {
        "tokens": tokens.int(),
        "labels": labels.int(),
        "loss_mask": masked.float(),
        "padding_mask": real.int(),
        "tokentypes": ((place >= lengths[..., None] // 2) & real).int(),
        "sentence_order": torch.randint(0, 2, size[:2], generator=generator).int(),
    }


def outputs(w: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits of tokens and of pairs."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    x = w["embedding.word_embeddings.weight"][batch["tokens"]] + w["embedding.position_embeddings.weight"][:LENGTH]
    x = x + w["embedding.tokentype_embeddings.weight"][batch["tokentypes"]]
    hidden = (batch["padding_mask"] == 0)[:, None, None]
    for i in range(LAYERS):
        layer = f"encoder.layers.{i}"
        y = linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attention.linear_qkv")
        q, k, v = y.unflatten(-1, (HEADS, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)  # q, k, v of each head
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -10000.0)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + linear(y, f"{layer}.self_attention.linear_proj")
        y = F.gelu(linear(norm(x, f"{layer}.pre_mlp_layernorm"), f"{layer}.mlp.linear_fc1"))
        x = x + linear(y, f"{layer}.mlp.linear_fc2")
    x = norm(x, "encoder.final_layernorm")
    y = norm(F.gelu(linear(x, "lm_head.dense")), "lm_head.layer_norm")
    logits = F.linear(y, w["embedding.word_embeddings.weight"], w["output_layer.bias"])
    return logits, linear(linear(x[:, 0], "pooler.dense").tanh(), "binary_head")
