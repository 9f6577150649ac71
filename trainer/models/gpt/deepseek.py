"""DeepSeek-V2 and V3 of transformers: latent attention, dense layers before those with experts, and later tokens.

Published folders have the layers of later tokens behind the others, with copies of the embedding and of the head, which
are not read. transformers gives norms of latents an epsilon of their own, 1e-6, so models with another one are refused.
Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainer.config.sections import RunConfig
from trainer.models.family import Form, Json, split_block
from trainer.models.gpt.hf_layers import ROPE_TABLES, demand, rope_json, rope_keys
from trainer.models.gpt.shape import GPTShape

TYPES: Mapping[str, str] = MappingProxyType(
    {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
)
_V2 = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "initializer_range": 0.02, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_group": None,
    "n_routed_experts": 64, "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0, "topk_group": None, "topk_method": "greedy", "v_head_dim": 128,
    "num_experts_per_tok": None, "moe_intermediate_size": 1407,
}  # fmt: skip
_V3 = {name: value for name, value in _V2.items() if name not in ("mlp_bias", "topk_method")} | {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096,
    "first_k_dense_replace": 3, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "topk_group": 4, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "rope_interleave": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
DEFAULTS: Mapping[str, Json] = MappingProxyType({"deepseek_v2": _V2, "deepseek_v3": _V3})
NULLABLE = ("q_lora_rank", "n_group", "topk_group", "num_experts_per_tok")
ZEROS = ("first_k_dense_replace", "num_nextn_predict_layers")
SECOND_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "deepseek_v2": {"num_experts": "n_routed_experts"},
        "deepseek_v3": {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    }
)
COPIES = r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "attention.out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "mlp.router": "mlp.gate",
        "mlp.shared.gate": "mlp.shared_experts.gate_proj",
        "mlp.shared.up": "mlp.shared_experts.up_proj",
        "mlp.shared.down": "mlp.shared_experts.down_proj",
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
    }
)
_FURTHER = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "final_norm": "shared_head.norm"}
_EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EPSILON = 1e-6  # of the norms of latents


def keys(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    """The keys of [model] for the settings of a config.json; adds what we lack to `problems`."""
    heads, layers = settings["num_attention_heads"], settings["num_hidden_layers"]
    demand(settings, "hidden_act", "silu", problems)
    for name in ("attention_bias", "mlp_bias"):
        demand(settings, name, False, problems)
    if settings["num_key_value_heads"] not in (None, heads):
        problems.append(f"num_key_value_heads = {settings['num_key_value_heads']}: there are as many as heads, {heads}")
    if settings["rms_norm_eps"] != _EPSILON:
        problems.append(
            f"rms_norm_eps = {settings['rms_norm_eps']!r}: the norms of latents have {_EPSILON} there, and "
            "model.norm_epsilon is that of all"
        )
    mla = {name: settings[name] for name in _SIZES}
    settings, magnitudes = _without_magnitudes(settings, problems)
    model = {
        "num_layers": layers,
        "hidden_size": settings["hidden_size"],
        "num_heads": heads,
        "ffn_hidden_size": settings["intermediate_size"],
        "vocab_size": settings["vocab_size"],
        "max_position": settings["max_position_embeddings"],
        "position": "rope",
        "rope_interleaved": settings.get("rope_interleave", True),
        "norm": "rmsnorm",
        "norm_epsilon": settings["rms_norm_eps"],
        "activation": "swiglu",
        "tie_embeddings": settings["tie_word_embeddings"],
        "init_std": settings["initializer_range"],
        **rope_keys({name: value for name, value in settings.items() if name not in _OF_HEADS}, problems),
    }
    model["mla"] = mla | (magnitudes if model.get("rope_scaling") == "yarn" else {})
    if settings["first_k_dense_replace"] < layers:
        model["moe"] = _experts(kind, settings, problems)
    if further := settings.get("num_nextn_predict_layers"):
        model["mtp"] = {"num_layers": further}
    return model


_OF_HEADS = ("qk_rope_head_dim", "rope_interleave")


def _without_magnitudes(settings: Json, problems: list[str]) -> tuple[Json, dict[str, float]]:
    """(settings without the magnitudes of yarn, keys of [model.mla] for them).

    transformers turns by (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1) only if both are set.
    """
    tables = {name: dict(settings[name]) for name in ROPE_TABLES if settings.get(name)}
    said = [tuple(table.pop(name, None) or 0 for name in ("mscale", "mscale_all_dim")) for table in tables.values()]
    mscale, all_dim = said[0] if said else (0, 0)
    if len(set(said)) > 1:
        problems.append(f"rope_scaling and rope_parameters disagree on mscale and mscale_all_dim: {said}")
    elif any(type(value) not in (int, float) or value < 0 for value in (mscale, all_dim)):
        problems.append(f"mscale = {mscale!r} and mscale_all_dim = {all_dim!r} are not numbers of at least 0")
    elif all_dim and not mscale:
        problems.append("mscale_all_dim without mscale is not supported: heads and scores have other magnitudes there")
    magnitudes = {"mscale": float(mscale), "mscale_all_dim": float(all_dim)} if all_dim and mscale else {}
    return {**settings, **tables}, magnitudes


def _experts(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    """Keys of [model.moe]."""
    first, layers = settings["first_k_dense_replace"], settings["num_hidden_layers"]
    demand(settings, "moe_layer_freq", 1, problems)
    moe = {
        "num_experts": settings["n_routed_experts"],
        "top_k": settings["num_experts_per_tok"] or 1,
        "ffn_hidden_size": settings["moe_intermediate_size"],
        "shared_ffn_hidden_size": settings["n_shared_experts"] * settings["moe_intermediate_size"],
        "weight_scale": settings["routed_scaling_factor"],
    }
    if settings["num_experts_per_tok"] is None:
        problems.append("num_experts_per_tok is not set")
    if first:
        moe["layers"] = [int(number >= first) for number in range(layers)]
    if kind == "deepseek_v2":
        demand(settings, "scoring_func", "softmax", problems)
        return {**moe, "normalize_weights": False, **_best_groups(settings, problems)}
    demand(settings, "scoring_func", "sigmoid", problems)
    demand(settings, "topk_method", "noaux_tc", problems)
    groups, chosen = settings["n_group"] or 1, settings["topk_group"] or 1
    if groups > 1 and moe["top_k"] != 2 * chosen:
        problems.append(
            f"num_experts_per_tok = {moe['top_k']} and topk_group = {chosen}: a group counts by its best 2 experts "
            "there, and by the best num_experts_per_tok / topk_group here"
        )
    if not settings["norm_topk_prob"] or moe["top_k"] == 1:
        problems.append("weights of experts that are not normalized are not supported (norm_topk_prob, or one expert)")
    moe |= {"score": "sigmoid", "expert_bias": True, "balance": "none"}
    return moe | ({"groups": groups, "groups_per_token": chosen} if groups > 1 else {})


def _best_groups(settings: Json, problems: list[str]) -> dict[str, Any]:
    """V2: a token uses the groups with the best experts, if its method says so."""
    if settings["topk_method"] != "group_limited_greedy":
        demand(settings, "topk_method", "greedy", problems)
        return {}
    groups, chosen = settings["n_group"], settings["topk_group"]
    if not groups or not chosen:
        problems.append(f"n_group = {groups} and topk_group = {chosen}: topk_method 'group_limited_greedy' needs both")
        return {}
    return {"groups": groups, "groups_per_token": chosen, "group_score": "max"} if chosen < groups else {}


def settings(kind: str, keys: Json) -> dict[str, Any]:
    """The config.json for keys of [model]; keys that it cannot express are read back differently."""
    written = {
        "num_hidden_layers": keys["num_layers"],
        "hidden_size": keys["hidden_size"],
        "num_attention_heads": keys["num_heads"],
        "num_key_value_heads": keys["num_heads"],
        "intermediate_size": keys["ffn_hidden_size"],
        "max_position_embeddings": keys["max_position"],
        "rms_norm_eps": _EPSILON,
        "hidden_act": "silu",
        "attention_bias": False,
        "head_dim": keys.get("mla.qk_rope_head_dim"),
        **{name: keys[f"mla.{name}"] for name in _SIZES if f"mla.{name}" in keys},
    }
    if kind == "deepseek_v3":
        written |= {"rope_interleave": keys.get("rope_interleaved", True)}
        written |= {"num_nextn_predict_layers": keys.get("mtp.num_layers", 0)}
    rope = rope_json(keys)
    if keys.get("mla.mscale_all_dim") and keys["mla.mscale"]:
        magnitudes = {name: keys[f"mla.{name}"] for name in ("mscale", "mscale_all_dim")}
        rope |= {name: rope[name] | magnitudes for name in ROPE_TABLES if rope[name]}
    return written | rope | _experts_json(kind, keys)


def _experts_json(kind: str, keys: Json) -> dict[str, Any]:
    if "moe.num_experts" not in keys:
        return {"first_k_dense_replace": keys["num_layers"]}
    size, layers = keys["moe.ffn_hidden_size"], list(keys["moe.layers"])
    written = {
        "n_routed_experts": keys["moe.num_experts"],
        "num_experts_per_tok": keys["moe.top_k"],
        "moe_intermediate_size": size,
        "n_shared_experts": max(1, keys["moe.shared_ffn_hidden_size"] // size),
        "routed_scaling_factor": keys["moe.weight_scale"],
        "first_k_dense_replace": layers.index(1) if 1 in layers else len(layers),
        "moe_layer_freq": 1,
    }
    if kind == "deepseek_v2":
        written |= {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
        if keys.get("moe.group_score") != "max":
            return written
        of_groups = {"n_group": keys["moe.groups"], "topk_group": keys["moe.groups_per_token"]}
        return written | {"topk_method": "group_limited_greedy", **of_groups}
    groups, chosen = keys["moe.groups"], keys["moe.groups_per_token"]
    if keys["moe.top_k"] != 2 * chosen:  # one group is whole; the number of several is then read back as another
        groups = chosen = 1
    written |= {"n_group": groups, "topk_group": chosen, "num_experts_per_tok": max(2, keys["moe.top_k"])}
    return written | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}


def fitting_type(config: RunConfig) -> str:
    """Which of the two expresses a model."""
    moe = config.model.moe
    return "deepseek_v2" if moe is not None and moe.score == "softmax" else "deepseek_v3"


def seen(config: RunConfig, shapes: Mapping[str, tuple[int, ...]]) -> tuple[RunConfig, list[str]]:
    """transformers saves models without the layers of later tokens that config.json names."""
    model = config.model
    if model.mtp is None or f"model.layers.{model.num_layers}.eh_proj.weight" in shapes:
        return config, []
    note = (
        f"it has none of the {model.mtp.num_layers} further layers (num_nextn_predict_layers): [model.mtp] is left out"
    )
    return dataclasses.replace(config, model=dataclasses.replace(model, mtp=None)), [note]


def tensor(name: str, size: tuple[int, ...], shape: GPTShape) -> Form | tuple[Form, ...]:
    """Where one of our tensors is in theirs, or its parts are."""
    block, rest = split_block(name)
    if name.startswith("mtp."):
        _, depth, rest = name.split(".", 2)
        block, inside = shape.num_layers + int(depth), rest.removeprefix("block.")
        part, kind = rest.rsplit(".", 1)
        if inside == rest:
            return _form(f"model.layers.{block}.{_FURTHER[part]}.{kind}", size)
        rest = inside
    layer = "" if block is None else f"model.layers.{block}."
    part, kind = rest.rsplit(".", 1)
    if part == "mlp.router" and kind == "expert_bias":
        return _form(f"{layer}mlp.gate.e_score_correction_bias", size)
    if not part.startswith("mlp.experts."):
        return _form(f"{layer}{NAMES[part]}.{kind}", size)
    lengths = {"expert": 1, "row": size[1], "column": size[2]}
    matrix = _EXPERTS[part.removeprefix("mlp.experts.")]
    return tuple(
        Form(
            f"{layer}mlp.experts.{number}.{matrix}.weight",
            "expert row column",
            "row column",
            lengths,
            ours_in={"expert": (number, size[0])},
        )
        for number in range(size[0])
    )


def _form(theirs: str, size: tuple[int, ...]) -> Form:
    dims = "row column" if len(size) == 2 else "row"
    return Form(theirs, dims, dims, dict(zip(("row", "column"), size, strict=False)))
