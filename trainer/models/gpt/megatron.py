"""GPT as Megatron-Core has it: its arguments, and the names and forms of its tensors.

Megatron keeps q, k, v of one key-value group after the other in one matrix, and gate and up as its halves. Versions 0
and 1 of its checkpoints kept other orders of rows. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainer.models.family import Form, Json, Megatron, split_block
from trainer.models.gpt.shape import GPTShape

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention.q": "self_attention.linear_qkv",
        "attention.k": "self_attention.linear_qkv",
        "attention.v": "self_attention.linear_qkv",
        "attention.out": "self_attention.linear_proj",
        "attention.q_norm": "self_attention.q_layernorm",
        "attention.k_norm": "self_attention.k_layernorm",
        "mlp_norm": "pre_mlp_layernorm",
        "mlp.gate": "mlp.linear_fc1",
        "mlp.up": "mlp.linear_fc1",
        "mlp.down": "mlp.linear_fc2",
        "mlp.router": "mlp.router",
        "mlp.shared.gate": "mlp.shared_experts.linear_fc1",
        "mlp.shared.up": "mlp.shared_experts.linear_fc1",
        "mlp.shared.down": "mlp.shared_experts.linear_fc2",
        "embedding": "embedding.word_embeddings",
        "positions": "embedding.position_embeddings",
        "final_norm": "decoder.final_layernorm",
        "head": "output_layer",
    }
)
_LATENT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **_NAMES,
        "attention.q": "self_attention.linear_q_proj",
        "attention.q_down": "self_attention.linear_q_down_proj",
        "attention.q_norm": "self_attention.q_layernorm",
        "attention.q_up": "self_attention.linear_q_up_proj",
        "attention.kv_down": "self_attention.linear_kv_down_proj",
        "attention.kv_norm": "self_attention.kv_layernorm",
        "attention.kv_up": "self_attention.linear_kv_up_proj",
    }
)
_FURTHER_NAMES = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "project": "eh_proj",
    "final_norm": "final_layernorm",
}
# Fused layers hold the norm before them.
_FUSED: Mapping[str, str] = MappingProxyType(
    {"attention_norm": "self_attention.linear_qkv.layer_norm_", "mlp_norm": "mlp.linear_fc1.layer_norm_"}
)
_LATENT_FUSED: Mapping[str, str] = MappingProxyType(
    {
        "attention.q_norm": "self_attention.linear_q_up_proj.layer_norm_",
        "attention.kv_norm": "self_attention.linear_kv_up_proj.layer_norm_",
        "mlp_norm": _FUSED["mlp_norm"],
    }
)


def tensor(name: str, size: tuple[int, ...], shape: GPTShape, version: float, fused: bool) -> Form:
    """Where one of our tensors is in theirs."""
    if name.startswith("mtp."):
        return _further(name, size, shape, version, fused)
    block, rest = split_block(name)
    if rest == "attention.sink":
        return Form("self_attention.core_attention.softmax_offset", "row", "row", {"row": size[0]}, cut="row")
    part, kind = rest.rsplit(".", 1)
    if part.startswith("mlp.experts."):
        return _of_experts(part.rsplit(".", 1)[1], kind, size=size, shape=shape)
    if part == "mlp.shared_gate":
        lengths = dict(zip(("row", "column"), size, strict=True))
        return Form("mlp.shared_experts.gate_weight", "row column", "row column", lengths)
    if part == "mlp_norm" and block is not None and shape.moe is not None and shape.moe.has_experts(block):
        fused = False  # no layer of experts holds the norm before it
    names, of_fused = (_LATENT_NAMES, _LATENT_FUSED) if shape.mla else (_NAMES, _FUSED)
    theirs = f"{of_fused[part]}{kind}" if part in of_fused and fused else f"{names[part]}.{kind}"
    columns = " column" if len(size) == 2 else ""
    lengths = dict(zip(("row", "column"), size, strict=False))
    if part in ("attention.q", "attention.k", "attention.v") and not shape.mla:
        return _qkv(theirs, part, columns, lengths=lengths, shape=shape, version=version)
    if part.removeprefix("mlp.").removeprefix("shared.") in ("gate", "up") and shape.gated:
        half = {"half": (int(part.endswith(".up")), 2)}
        return Form(theirs, f"row{columns}", f"(half row){columns}", lengths, half, "row")
    cut = ""
    if part in ("mlp.up", "mlp.shared.up", "embedding", "head", "attention.q", "attention.q_up", "attention.kv_up"):
        cut = "row"
    elif part in ("attention.out", "mlp.down", "mlp.shared.down") and columns:
        cut = "column"
    return Form(theirs, f"row{columns}", f"row{columns}", lengths, {}, cut)


def _further(name: str, size: tuple[int, ...], shape: GPTShape, version: float, fused: bool) -> Form:
    """One of the tensors of a block that predicts a later token."""
    _, depth, rest = name.split(".", 2)
    prefix = f"mtp.layers.{depth}."
    if rest.startswith("block."):
        form = tensor(f"blocks.{shape.mtp_like}.{rest.removeprefix('block.')}", size, shape, version, fused)
        inside, apart = f"{prefix}transformer_layer.", form.apart
        named = None if apart is None else lambda *which: f"{inside}{apart(*which)}"
        return dataclasses.replace(form, tensor=f"{inside}{form.tensor}", apart=named)
    part, kind = rest.rsplit(".", 1)
    dims = "row column" if len(size) == 2 else "row"
    cut = "row" if part == "project" else ""
    lengths = dict(zip(("row", "column"), size, strict=False))
    return Form(f"{prefix}{_FURTHER_NAMES[part]}.{kind}", dims, dims, lengths, {}, cut)


def _of_experts(part: str, kind: str, *, size: tuple[int, ...], shape: GPTShape) -> Form:
    """All experts of a layer: one tensor in torch_dist, elsewhere one of each, whose names depend on its module."""
    layer, columns = "linear_fc2" if part == "down" else "linear_fc1", " column" if len(size) == 3 else ""
    lengths = dict(zip(("expert", "row", "column"), size, strict=False))
    half = {"half": (int(part == "up"), 2)} if part != "down" and shape.gated else {}
    rows = f"{'(half row)' if half else 'row'}{columns}"
    cut = "row" if part != "down" else "column" if columns else ""

    def apart(number: int, grouped: bool) -> str:
        if grouped:  # of Transformer Engine
            return f"mlp.experts.{layer}.{kind}{number}"
        return f"mlp.experts.local_experts.{number}.{layer}.{kind}"

    stacked = f"mlp.experts.experts.{layer}.{kind}"
    return Form(stacked, f"expert row{columns}", f"expert {rows}", lengths, half, cut, apart=apart)


def _qkv(theirs: str, part: str, columns: str, *, lengths: Mapping[str, int], shape: GPTShape, version: float) -> Form:
    groups, each, place = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, "qkv".index(part[-1])
    lengths = {**lengths, "group": groups, "channel": shape.head_dim, "slot": each if part[-1] == "q" else 1}
    ours = f"(group slot channel){columns}"
    if version >= 2:
        first = (0, each, each + 1)[place]
        return Form(theirs, ours, ours, lengths, {"slot": (first, each + 2)}, "group")
    inside = {"part": (place, 3)}
    order = "part group slot channel" if version == 0 else "group slot channel part"
    return Form(theirs, ours, f"({order}){columns}", lengths, inside, "group")


def arguments(keys: Json) -> dict[str, Any]:
    """The arguments with which Megatron-LM builds a model with these keys of [model]."""
    rope, gated = keys["position"] == "rope", keys["activation"] == "swiglu"
    scaling, latent = keys.get("rope_scaling", "none"), "mla.kv_lora_rank" in keys
    return {
        "num_layers": keys["num_layers"],
        "hidden_size": keys["hidden_size"],
        "num_attention_heads": keys["num_heads"],
        "kv_channels": keys["head_dim"],
        "ffn_hidden_size": keys["ffn_hidden_size"],
        "group_query_attention": keys["num_kv_heads"] != keys["num_heads"],
        "num_query_groups": None if latent else keys["num_kv_heads"],
        "max_position_embeddings": keys["max_position"],
        "seq_length": keys["sequence_length"],
        "position_embedding_type": {"learned": "learned_absolute", "rope": "rope"}.get(keys["position"], "none"),
        "rotary_base": int(keys.get("rope_theta", 10000.0)),
        "rotary_percent": keys.get("rope_fraction", 1.0),
        "rotary_interleaved": keys.get("rope_interleaved", False) and not latent,
        "no_rope_freq": keys.get("rope_interval") or None,
        "use_rope_scaling": scaling == "llama3",
        "rope_scaling_factor": keys["rope_factor"] if scaling == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": int(keys["rope_factor"]) if scaling == "linear" else None,
        "add_position_embedding": not rope,
        "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[keys["norm"]],
        "norm_epsilon": keys["norm_epsilon"],
        "layernorm_epsilon": keys["norm_epsilon"],
        "apply_layernorm_1p": keys.get("norm_zero_centered", False),
        "swiglu": gated,
        "quick_geglu": keys["activation"] == "quick_geglu",
        "squared_relu": keys["activation"] == "squared_relu",
        "bias_gelu_fusion": keys["activation"] == "gelu",
        "bias_swiglu_fusion": not (keys.get("activation_clamp") or keys.get("activation_offset")),
        "activation_func_clamp_value": keys.get("activation_clamp") or None,
        "glu_linear_offset": keys.get("activation_offset", 0.0),
        "add_bias_linear": keys["bias"] is True,
        "add_qkv_bias": bool(keys["bias"]),
        "qk_layernorm": keys["qk_norm"] is True or latent,
        "window_size": (keys["window"] - 1, 0) if keys["window"] else None,
        "window_attn_skip_freq": keys.get("window_interval") or None,
        "softmax_type": {"zero": "off-by-one", "learned": "learnable"}.get(keys["attention_sinks"], "vanilla"),
        "untie_embeddings_and_output_weights": not keys["tie_embeddings"],
        "init_method_std": keys["init_std"],
        "mtp_num_layers": keys.get("mtp.num_layers"),
        "mtp_loss_scaling_factor": keys.get("mtp.loss_factor", 0.1),
        **(_latent_arguments(keys) if latent else {}),
        **(_expert_arguments(keys) if "moe.num_experts" in keys else {}),
    }


def _latent_arguments(keys: Json) -> dict[str, Any]:
    """Those of latent attention. Its pairs of rotated features are always neighbours."""
    scaled = keys["rope_scaling"] == "yarn"
    return {
        "multi_latent_attention": True,
        "q_lora_rank": keys["mla.q_lora_rank"],
        "kv_lora_rank": keys["mla.kv_lora_rank"],
        "qk_head_dim": keys["mla.qk_nope_head_dim"],
        "qk_pos_emb_head_dim": keys["mla.qk_rope_head_dim"],
        "v_head_dim": keys["mla.v_head_dim"],
        "rope_type": "yarn" if scaled else "rope",
        "rotary_scaling_factor": keys["rope_factor"] if scaled else 1.0,
        "mscale": keys.get("mla.mscale", 1.0),
        "mscale_all_dim": keys.get("mla.mscale_all_dim", 0.0),
    }


def _expert_arguments(keys: Json) -> dict[str, Any]:
    layers = list(keys["moe.layers"])
    return {
        "num_experts": keys["moe.num_experts"],
        "moe_router_topk": keys["moe.top_k"],
        "moe_ffn_hidden_size": keys["moe.ffn_hidden_size"],
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_router_score_function": keys["moe.score"],
        "moe_router_pre_softmax": not keys["moe.normalize_weights"],
        "moe_router_num_groups": keys["moe.groups"] if keys["moe.groups"] > 1 else None,
        "moe_router_group_topk": keys["moe.groups_per_token"] if keys["moe.groups"] > 1 else None,
        "moe_router_topk_scaling_factor": keys["moe.weight_scale"] if keys["moe.weight_scale"] != 1 else None,
        "moe_router_enable_expert_bias": keys["moe.expert_bias"],
        "moe_router_load_balancing_type": "none",
        "moe_expert_capacity_factor": keys["moe.capacity_factor"] or None,
        "moe_token_drop_policy": {"weight": "probs"}.get(keys.get("moe.drop", "weight"), "position"),
        "moe_shared_expert_intermediate_size": keys["moe.shared_ffn_hidden_size"] or None,
        "moe_shared_expert_gate": keys.get("moe.shared_gate", False),
    }


MEGATRON = Megatron(arguments=arguments, tensor=tensor)
