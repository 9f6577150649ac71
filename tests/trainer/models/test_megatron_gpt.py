"""Logits and losses of Megatron's own models: its options are ours under the names that docs/migrate.md gives."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.trainer.engines import microbatch
from tests.trainer.shapes import GPT2
from trainer.models.gpt import build_gpt
from trainer.models.gpt_params import GPTShape
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place

OUTSIDE = {
    "embedding.weight": "embedding.word_embeddings",
    "positions.weight": "embedding.position_embeddings",
    "head.weight": "output_layer",
    "final_norm": "decoder.final_layernorm",
}
INSIDE = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}


def _shape(told: dict, activation: str) -> GPTShape:
    width, heads = told["hidden_size"], told["num_attention_heads"]
    return replace(
        GPT2,
        num_layers=told["num_layers"],
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=told.get("kv_channels") or width // heads,
        ffn_hidden_size=told["ffn_hidden_size"],
        vocab_size=told["vocab_size"],
        padded_vocab_size=128,
        max_position=told["max_position_embeddings"],
        activation=activation,
        tie_embeddings=told["tie_embeddings"],
    )


def _theirs(name: str, weights: dict[str, Tensor], shape: GPTShape) -> Tensor:
    """Megatron's tensor for a parameter of one rank, in our order of rows."""
    parent, kind = name.rsplit(".", 1)
    if parent.startswith("blocks."):
        _, number, part = parent.split(".", 2)
        found = weights[f"decoder.layers.{number}.{INSIDE[part]}.{kind}"]
        if part == "attention.qkv":  # theirs: q, k, v of one head after the other
            rows = found.view(shape.num_heads, 3, shape.head_dim, *found.shape[1:])
            return rows.transpose(0, 1).reshape(found.shape)
        return found
    theirs = OUTSIDE.get(name) or OUTSIDE[parent]
    return weights[f"{theirs}.{kind}"]


@pytest.mark.parametrize(
    ("case", "activation"),
    [
        ("gpt_untied", "gelu_erf"),  # no fusion of bias and GELU
        ("gpt_kv_channels_12", "gelu_erf"),  # --kv-channels 12 beside hidden size 32 and 4 heads
        ("gpt_fused_bias_gelu", "gelu"),  # Megatron's default
        ("gpt_gelu_tanh", "gelu"),
    ],
)
def test_logits_and_losses_are_megatrons(oracles, case, activation):
    from safetensors.torch import load_file

    folder = oracles / "oracle" / "model" / "variants"
    tensors = load_file(folder / f"{case}.safetensors")
    shape = _shape(json.loads((folder / f"{case}.json").read_text())["model"], activation)
    weights = {k.removeprefix("weights/"): v.float() for k, v in tensors.items() if k.startswith("weights/")}
    model = build_gpt(shape, Place(), tp=Group.single("tp"), dtype=torch.float32, device=torch.device("cpu"))
    for name, parameter in model.named_parameters():
        found = _theirs(name, weights, shape)
        parameter.data.zero_()[: len(found)].copy_(found)
    tokens, labels, mask = (tensors[f"batch/{name}"] for name in ("tokens", "labels", "loss_mask"))
    with torch.no_grad():
        logits = model.logits(tokens)[..., : shape.vocab_size]
        (loss,) = model((), microbatch(tokens, labels, mask))
    torch.testing.assert_close(logits, tensors["out/logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(loss.float(), (tensors["out/per_token_loss"] * mask).sum(), rtol=1e-5, atol=0)
