"""Models and tensors of Megatron's oracle files in our words; used by the tests of one stage."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.arithmetic import round_up
from trainer.config.sections import OptimizerSection, TrainSection
from trainer.kernels.scores import ScoreShape
from trainer.layers.shapes import RopeShape
from trainer.models.gpt.model import GPT
from trainer.models.gpt.params import parameter_table
from trainer.models.gpt.shape import GPTShape
from trainer.parallel.params import Place
from trainer.run.engine import Engine

OUTSIDE = {
    "embedding": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "head": "output_layer",
    "final_norm": "decoder.final_layernorm",
}
INSIDE = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "attention.out": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
POSITIONS = {"rope": "rope", "learned_absolute": "learned", "none": "none"}
SINKS = {None: "none", "off-by-one": "zero", "learnable": "learned"}
# Options that change nothing in fp32: divided by the layer's number before the softmax, multiplied after.
WITHOUT_EFFECT = {"apply_query_key_layer_scaling"}


def load(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of a variant."""
    from safetensors.torch import load_file

    return load_file(folder / f"{name}.safetensors"), json.loads((folder / f"{name}.json").read_text())


def activation(told: dict[str, Any]) -> str:
    """Megatron computes GELU by tanh where it is fused with the bias."""
    if told["activation"] == "silu":
        return "swiglu"
    if told["activation"] == "quick_gelu":
        return "quick_geglu"
    exact = not told.get("extra", {}).get("bias_activation_fusion") and told["activation"] == "gelu"
    if told["gated_linear_unit"]:
        return "geglu" if exact else "geglu_tanh"
    return {"gelu": "gelu_erf" if exact else "gelu", "gelu_tanh": "gelu"}.get(told["activation"], told["activation"])


def shape_of(told: dict[str, Any]) -> GPTShape:
    """Our shape of one of their models; every option of theirs is read."""
    extra = dict(told.get("extra", {}))
    width, heads = told["hidden_size"], told["num_attention_heads"]
    window = extra.pop("window_size", [-1, 0])[0] + 1  # theirs does not count the token itself
    shape = GPTShape(
        num_layers=told["num_layers"],
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=told.get("num_query_groups") or heads,
        head_dim=told.get("kv_channels") or width // heads,
        ffn_hidden_size=told["ffn_hidden_size"],
        vocab_size=told["vocab_size"],  # theirs counts the padding as ids
        padded_vocab_size=round_up(told["vocab_size"], 128),
        max_position=told["max_position_embeddings"],
        position=POSITIONS[told["position_embedding"]],
        rope=_rope(told, extra),
        rope_interval=extra.pop("no_rope_freq", 0),
        norm=told["normalization"].lower(),
        norm_epsilon=told.get("layernorm_epsilon", 1e-5),
        activation=activation(told),
        activation_clamp=extra.pop("activation_func_clamp_value", 0.0),
        activation_offset=extra.pop("glu_linear_offset", 0.0),
        bias=told["add_bias_linear"] or ("qkv" if told.get("add_qkv_bias") else False),
        qk_norm=extra.pop("qk_layernorm", False),
        scores=ScoreShape(
            scale=extra.pop("softmax_scale", 0.0), window=window, sinks=SINKS[extra.pop("softmax_type", None)]
        ),
        window_interval=extra.pop("window_attn_skip_freq", 0),
        tie_embeddings=told["tie_embeddings"],
        init_std=0.02,
    )
    extra.pop("bias_activation_fusion", None)
    unknown = set(extra) - WITHOUT_EFFECT
    assert not unknown, f"options that nothing here reads: {unknown}"
    return shape


def _rope(told: dict[str, Any], extra: dict[str, Any]) -> RopeShape:
    theta, interleaved = float(told.get("rotary_base", 10000)), extra.pop("rotary_interleaved", False)
    options: dict[str, Any] = {"theta": theta, "interleaved": interleaved, "fraction": told.get("rotary_percent", 1.0)}
    if told.get("rope_scaling"):
        return RopeShape(scaling="llama3", factor=told["rope_scaling_factor"], original_length=8192, **options)
    if told.get("seq_len_interpolation_factor"):
        return RopeShape(scaling="linear", factor=told["seq_len_interpolation_factor"], **options)
    return RopeShape(**options)


def ours(name: str, found: dict[str, Tensor], shape: GPTShape) -> Tensor:
    """Megatron's tensor for one of our parameters of one rank, in our order of rows; found: theirs by name."""
    if name.endswith("attention.sink"):
        return found[f"decoder.layers.{name.split('.')[1]}.self_attention.core_attention.softmax_offset"]
    parent, kind = name.rsplit(".", 1)
    if not parent.startswith("blocks."):
        return found[f"{OUTSIDE[parent]}.{kind}"]
    _, number, part = parent.split(".", 2)
    theirs = found[f"decoder.layers.{number}.{INSIDE[part]}.{kind}"]
    if part != "attention.qkv":
        return theirs
    # Theirs: queries, key and value of one group after the other.
    group = shape.num_heads // shape.num_kv_heads
    rows = theirs.view(shape.num_kv_heads, group + 2, shape.head_dim, *theirs.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in rows.split((group, 1, 1), dim=1)])


def logical_tensors(found: dict[str, Tensor], shape: GPTShape) -> dict[str, Tensor]:
    """Megatron's tensors as our logical ones, whole; found: theirs by name."""
    whole: dict[str, Tensor] = {}
    for spec in parameter_table(shape, Place()):
        flat = ours(spec.name, found, shape).flatten()
        for piece in spec.pieces:
            whole[piece.name] = flat[piece.offset : piece.offset + math.prod(piece.size)].view(piece.shape)
    return whole


def load_weights(engine: Engine, weights: dict[str, Tensor]) -> None:
    """Their weights into a rank's main weights, and from there into its model, in any layout."""
    engine.optimizer.gathers.release()
    whole, held = logical_tensors(weights, engine.plan.shape), engine.optimizer.state["weight"]
    dtype = engine.buffers.parameters.values.dtype  # main weights are copies of what it can hold
    for _, part, first in engine.optimizer.holds["weight"].slices():
        box = tuple(slice(a, a + n) for a, n in zip(part.start, part.size, strict=True))
        held[first : first + math.prod(part.size)] = whole[part.name][box].flatten().to(dtype)
    engine.optimizer.publish()


@torch.no_grad()
def fill(model: GPT, weights: dict[str, Tensor]) -> None:
    """Their weights into our parameters; padding becomes 0."""
    for name, parameter in model.named_parameters():
        found = ours(name, weights, model.shape)
        parameter.zero_()[: len(found)].copy_(found)


def train_section(
    train: Mapping[str, Any], *, sequence_length: int, micro_batch: int, loss_average: Any
) -> TrainSection:
    """[train] of a case that Megatron trained, from its options."""
    return TrainSection(
        sequence_length=sequence_length,
        global_batch=train["global_batch"],
        micro_batch=micro_batch,
        steps=train["steps"],
        loss_average=loss_average,
    )


def optimizer_section(train: Mapping[str, Any]) -> OptimizerSection:
    """[optimizer] of such a case."""
    return OptimizerSection(
        lr=train["lr"],
        min_lr=train["min_lr"],
        init_lr=train["init_lr"],
        warmup_steps=train["warmup_iters"],
        warmup_count="before",
        decay_steps=train["decay_iters"],
        weight_decay=train["weight_decay"],
        beta1=train["betas"][0],
        beta2=train["betas"][1],
        epsilon=train["eps"],
        clip_norm=train["clip_grad"],
    )
