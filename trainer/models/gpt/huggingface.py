"""GPT-2, Llama and the models like it of transformers: config.json, and the names and forms of tensors.

config.json in both directions: a key that is missing has the default that transformers gives it, and what changes the
function and that we lack is a problem. Rotary positions and windows of layers are in hf_layers.py.

Tensors: Llama and most others keep q, k, v, gate and up apart, as we do. GPT-2 keeps its matrices transposed (its
layers are Conv1D) and q, k, v side by side in one; Phi-3 has q, k, v below each other in one, and gate and up. Where
our pairs of rotary features are neighbours, rows of q and k change their order: theirs are halves apart. Padding of the
vocabulary exists on neither side. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainer.config.sections import ModelSection, MoESection, RunConfig
from trainer.models.family import Form, HuggingFace, Json, split_block
from trainer.models.gpt import deepseek
from trainer.models.gpt.hf_layers import (
    ROPE_TABLES,
    contradictions,
    demand,
    layered_rope_json,
    layered_rope_keys,
    no_rope_interval,
    rope_json,
    rope_keys,
    share_of_head,
    window_json,
    window_keys,
)
from trainer.models.gpt.shape import GPTShape, blocks_with_experts, gpt_shape

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "olmo3": "Olmo3ForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "granite": "GraniteForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        **deepseek.TYPES,
    }
)
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "sliding_window": None, "initializer_range": 0.02, "partial_rotary_factor": 1.0,
}  # fmt: skip
_QWEN = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_QWEN |= {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN_MOE = {name: value for name, value in _LLAMA.items() if name != "sliding_window"} | {
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 32768,
    "use_sliding_window": False, "decoder_sparse_step": 1, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_OLMO = {**_LLAMA, "vocab_size": 50304, "rms_norm_eps": 1e-5}
_GEMMA = {name: value for name, value in _LLAMA.items() if name not in ("hidden_act", "mlp_bias")} | {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
DEFAULTS: Mapping[str, Json] = MappingProxyType(
    {
        "gpt2": {
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
        "llama": _LLAMA,
        "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096,
                    "max_position_embeddings": 131072},
        "qwen2": _QWEN,
        "qwen3": {**_QWEN, "head_dim": 128},
        "olmo2": _OLMO,
        "olmo3": {**_OLMO, "sliding_window": 4096},
        "smollm3": {**_LLAMA, "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
                    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
                    "tie_word_embeddings": True, "use_sliding_window": False, "no_rope_layer_interval": 4,
                    "rope_theta": 2e6},
        "phi3": {**_LLAMA, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "rms_norm_eps": 1e-5,
                 "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        "gemma2": _GEMMA,
        "gemma3_text": {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072,
                        "final_logit_softcapping": None, "attn_logit_softcapping": None},
        "granite": {**_LLAMA, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
                    "attention_multiplier": 1.0},
        "mixtral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                    "max_position_embeddings": 131072, "rope_theta": 1e6, "num_local_experts": 8,
                    "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0},
        "qwen2_moe": {**_QWEN_MOE, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
                      "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60,
                      "num_experts_per_tok": 4, "qkv_bias": True},
        "qwen3_moe": {**_QWEN_MOE, "intermediate_size": 6144, "num_key_value_heads": 4, "moe_intermediate_size": 768,
                      "num_experts": 128, "num_experts_per_tok": 8},
        "olmoe": {**_OLMO, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
                  "num_attention_heads": 16, "max_position_embeddings": 4096, "num_experts": 64,
                  "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
        "gpt_oss": {**_LLAMA, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
                    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True,
                    "sliding_window": 128, "rope_theta": 150000.0, "num_local_experts": 128, "num_experts_per_tok": 4,
                    "router_aux_loss_coef": 0.001, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        **deepseek.DEFAULTS,
    }
)  # fmt: skip
# What every model of a type has beside the settings of its config.json.
_FORMS: Mapping[str, Json] = MappingProxyType(
    {
        "qwen3": {"qk_norm": True},
        "olmo2": {"qk_norm": "all_heads", "block_norm": "output"},
        "olmo3": {"qk_norm": "all_heads", "block_norm": "output"},
        "gemma2": {"block_norm": "both", "norm_zero_centered": True},
        "gemma3_text": {"block_norm": "both", "norm_zero_centered": True, "qk_norm": True},
        "qwen3_moe": {"qk_norm": True},
        "olmoe": {"qk_norm": "all_heads"},
        "gpt_oss": {"attention_sinks": "learned", "activation": "quick_geglu", "activation_offset": 1.0},
    }
)
_LIMIT = 7.0  # of gpt-oss's activation
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}
_BIASED = ("llama", "smollm3", "granite")  # whose linear layers may have biases
_WINDOWED = ("mistral", "mixtral", "qwen2", "qwen3", "olmo3", "smollm3", "phi3", "gemma2", "gemma3_text", "gpt_oss")
_LAYERED_THETA = {"olmo3": (5e5, 5e5), "gemma3_text": (1e6, 1e4)}  # in layers without and with a window
LLAMA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
    }
)
_OUT_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
_GEMMA_NAMES = {**LLAMA_NAMES, **_OUT_NORMS, "mlp_norm": "pre_feedforward_layernorm"}
_FUSED = {"attention.q": "self_attn.qkv_proj", "attention.k": "self_attn.qkv_proj", "attention.v": "self_attn.qkv_proj"}
_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "olmo2": {**LLAMA_NAMES, **_OUT_NORMS},
        "olmo3": {**LLAMA_NAMES, **_OUT_NORMS},
        "phi3": {**LLAMA_NAMES, **_FUSED, "mlp.gate": "mlp.gate_up_proj", "mlp.up": "mlp.gate_up_proj"},
        "gemma2": _GEMMA_NAMES,
        "gemma3_text": _GEMMA_NAMES,
    }
)
_EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}
_GPT2_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "ln_1",
        "attention.q": "attn.c_attn",
        "attention.k": "attn.c_attn",
        "attention.v": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "embedding": "wte",
        "positions": "wpe",
        "final_norm": "ln_f",
        "head": "lm_head",
    }
)
_SECOND_NAMES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
_AMOUNTS = ("final_logit_softcapping", "attn_logit_softcapping")
_NULLABLE = ("num_key_value_heads", "head_dim", "n_inner", "sliding_window", *_AMOUNTS, *deepseek.NULLABLE)
PLAIN = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf", "relu": "relu", "relu2": "squared_relu"}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}


def keys(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    """The keys of [model] for the settings of a config.json; adds what we lack to `problems`."""
    if kind in deepseek.TYPES:
        return deepseek.keys(kind, settings, problems)
    return _gpt2(settings, problems) if kind == "gpt2" else _llama(kind, settings, problems)


def settings(kind: str, keys: Json) -> dict[str, Any]:
    """The config.json for keys of [model]."""
    if kind in deepseek.TYPES:
        return deepseek.settings(kind, keys)
    return _gpt2_json(keys) if kind == "gpt2" else _llama_json(kind, keys)


def free(config: RunConfig) -> tuple[str, ...]:
    """An interleaved pair is a matter of the order of rows, which `tensor` changes; no MLP has no hidden size."""
    shape = gpt_shape(config, 1)
    has_mlps = len(blocks_with_experts(shape)) < shape.num_layers
    names = ("rope_interleaved",) if config.model.rope_fraction == 1 and not config.model.mla else ()
    return names if has_mlps else (*names, "ffn_hidden_size")


def fitting_type(config: RunConfig) -> str:
    """The model_type that expresses a configuration, if one does."""
    model = config.model
    if model.mla is not None:
        return deepseek.fitting_type(config)
    if model.moe is not None:
        return _type_with_experts(model, model.moe)
    if model.position == "learned":
        return "gpt2"
    if model.block_norm == "output":
        return "olmo3" if model.window else "olmo2"
    if model.block_norm == "both":
        return "gemma3_text" if model.qk_norm else "gemma2"
    if model.embedding_multiplier or model.residual_multiplier or model.logit_scale:
        return "granite"
    if model.rope_scaling == "longrope" or model.rope_fraction < 1:
        return "phi3"
    if model.rope_interval:
        return "smollm3"
    if model.qk_norm:
        return "qwen3"
    if model.bias == "qkv":
        return "qwen2"
    return "mistral" if model.window else "llama"


def _type_with_experts(model: ModelSection, moe: MoESection) -> str:
    if model.attention_sinks == "learned":
        return "gpt_oss"
    if moe.shared_ffn_hidden_size or model.bias == "qkv":
        return "qwen2_moe"
    if model.qk_norm:
        return "olmoe" if model.qk_norm == "all_heads" else "qwen3_moe"
    return "mixtral"


def _gpt2(settings: Json, problems: list[str]) -> dict[str, Any]:
    for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        demand(settings, name, DEFAULTS["gpt2"][name], problems)
    return {
        "num_layers": settings["n_layer"],
        "hidden_size": settings["n_embd"],
        "num_heads": settings["n_head"],
        "ffn_hidden_size": settings["n_inner"] or 4 * settings["n_embd"],
        "vocab_size": settings["vocab_size"],
        "max_position": settings["n_positions"],
        "position": "learned",
        "norm": "layernorm",
        "norm_epsilon": settings["layer_norm_epsilon"],
        "activation": activation(settings["activation_function"], PLAIN, "activation_function", problems=problems),
        "bias": True,
        "tie_embeddings": settings["tie_word_embeddings"],
        "init_std": settings["initializer_range"],
    }


def _gpt2_json(keys: Json) -> dict[str, Any]:
    return {
        "n_layer": keys["num_layers"],
        "n_embd": keys["hidden_size"],
        "n_head": keys["num_heads"],
        "n_inner": keys["ffn_hidden_size"],
        "n_positions": keys["max_position"],
        "layer_norm_epsilon": keys["norm_epsilon"],
        "activation_function": reverse(PLAIN, keys["activation"], "gelu_new"),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _llama(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    name = "hidden_activation" if "hidden_activation" in settings else "hidden_act"
    keys = {
        "num_layers": settings["num_hidden_layers"],
        "hidden_size": settings["hidden_size"],
        "num_heads": settings["num_attention_heads"],
        "num_kv_heads": settings["num_key_value_heads"] or settings["num_attention_heads"],
        "head_dim": settings["head_dim"] or settings["hidden_size"] // settings["num_attention_heads"],
        "ffn_hidden_size": settings["intermediate_size"],
        "vocab_size": settings["vocab_size"],
        "max_position": settings["max_position_embeddings"],
        "position": "rope",
        "norm": "rmsnorm",
        "norm_epsilon": settings["rms_norm_eps"],
        "activation": activation(settings[name], GATED, name, problems=problems),
        "bias": _bias(kind, settings, problems),
        "tie_embeddings": settings["tie_word_embeddings"],
        "init_std": settings["initializer_range"],
        **window_keys(kind, settings, problems),
        **_FORMS.get(kind, {}),
    }
    if kind in _OF_EXPERTS:
        keys["moe"] = _moe(kind, settings, problems)
    if kind == "gpt_oss":
        if not any(settings.get(name) for name in ROPE_TABLES):
            settings = {**settings, "rope_parameters": _GPT_OSS_ROPE}
        keys["activation_clamp"] = settings["swiglu_limit"]
        demand(settings, "swiglu_alpha", 1.702, problems)
    if kind == "phi3":
        return keys | _phi3(settings, problems)
    demand(settings, "partial_rotary_factor", 1.0, problems)
    if kind in _LAYERED_THETA:
        theta, window_theta = _LAYERED_THETA[kind]
        keys |= layered_rope_keys(settings, problems, theta=theta, window_theta=window_theta)
    else:
        keys |= rope_keys({name: settings[name] for name in settings if not name.startswith("no_rope_layer")}, problems)
    if kind == "smollm3":
        keys["rope_interval"] = no_rope_interval(settings, problems)
    elif kind == "granite":
        problems += [f"{name} = {settings[name]!r} is not above 0" for name in _MULTIPLIERS if not settings[name] > 0]
        keys |= {name: settings[name] for name in ("embedding_multiplier", "residual_multiplier")}
        scaling = settings["logits_scaling"] or 1.0
        keys |= {"logit_scale": 1 / scaling, "attention_scale": settings["attention_multiplier"]}
    elif kind in ("gemma2", "gemma3_text"):
        if settings.get("use_bidirectional_attention"):
            problems.append("use_bidirectional_attention is set, but attention is causal here")
        keys["embedding_multiplier"] = settings["hidden_size"] ** 0.5
        keys["attention_scale"] = settings["query_pre_attn_scalar"] ** -0.5
        keys["logit_softcap"], keys["attention_softcap"] = (settings[name] for name in _AMOUNTS)
        if kind == "gemma3_text":  # transformers computes no softcap of its scores, whatever this says
            demand(settings, _AMOUNTS[1], None, problems)
    return keys


# Whose layers have experts: settings -> keys of [model.moe].
_OF_EXPERTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "mixtral": {"num_local_experts": "num_experts", "intermediate_size": "ffn_hidden_size"},
        "qwen2_moe": {
            "num_experts": "num_experts",
            "moe_intermediate_size": "ffn_hidden_size",
            "shared_expert_intermediate_size": "shared_ffn_hidden_size",
        },
        "qwen3_moe": {"num_experts": "num_experts", "moe_intermediate_size": "ffn_hidden_size"},
        "olmoe": {"num_experts": "num_experts", "intermediate_size": "ffn_hidden_size"},
        "gpt_oss": {"num_local_experts": "num_experts", "intermediate_size": "ffn_hidden_size"},
    }
)


def _moe(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    """Keys of [model.moe]."""
    for name, neutral in (("router_jitter_noise", 0.0), ("clip_qkv", None), ("use_sliding_window", False)):
        demand(settings, name, neutral, problems)
    if kind == "olmoe" and settings["head_dim"]:
        demand(settings, "head_dim", settings["hidden_size"] // settings["num_attention_heads"], problems)
    keys = {ours: settings[name] for name, ours in _OF_EXPERTS[kind].items()}
    keys |= {"top_k": settings["num_experts_per_tok"], "normalize_weights": settings.get("norm_topk_prob", True)}
    keys |= {"balance_factor": settings["router_aux_loss_coef"], "shared_gate": kind == "qwen2_moe"}
    every, mlps = settings.get("decoder_sparse_step", 1), settings.get("mlp_only_layers") or []
    if not isinstance(mlps, list):
        problems.append(f"mlp_only_layers = {mlps!r} is not a list of layers")
        mlps = []
    layers = [int((number + 1) % every == 0 and number not in mlps) for number in range(settings["num_hidden_layers"])]
    return keys if all(layers) else {**keys, "layers": layers}


def _moe_json(kind: str, keys: Json) -> dict[str, Any]:
    if "moe.num_experts" not in keys:  # refused, because what is read back has experts
        return {}
    written = {name: size for name, ours in _OF_EXPERTS[kind].items() if (size := keys[f"moe.{ours}"])}
    written["num_experts_per_tok"] = keys["moe.top_k"]
    if kind not in ("mixtral", "gpt_oss"):
        written["norm_topk_prob"] = keys["moe.normalize_weights"]
    if kind.startswith("qwen"):
        mlps = [number for number, has_experts in enumerate(keys["moe.layers"]) if not has_experts]
        written |= {"decoder_sparse_step": 1, "mlp_only_layers": mlps, "use_sliding_window": False}
    if kind == "qwen2_moe":
        written["qkv_bias"] = keys["bias"] == "qkv"
    return written


def _phi3(settings: Json, problems: list[str]) -> dict[str, Any]:
    """Keys of rotary positions; transformers knows longrope by older names."""
    share, settings = share_of_head(settings, 1.0, problems)
    for name in ("rope_scaling", "rope_parameters"):
        table = settings.get(name) or {}
        for key in ("rope_type", "type"):
            if table.get(key) in ("su", "yarn"):
                table = {**table, key: "longrope"}
        settings = {**settings, name: table}
    keys = rope_keys(settings, problems)
    if keys.get("rope_scaling", "longrope") != "longrope":
        problems.append(f"rotary scaling {keys['rope_scaling']!r}: Phi-3 has longrope only")
    return {**keys, "rope_fraction": share}


def _llama_json(kind: str, keys: Json) -> dict[str, Any]:
    written = {
        "num_hidden_layers": keys["num_layers"],
        "hidden_size": keys["hidden_size"],
        "num_attention_heads": keys["num_heads"],
        "num_key_value_heads": keys["num_kv_heads"],
        "head_dim": keys["head_dim"],
        "intermediate_size": keys["ffn_hidden_size"],
        "max_position_embeddings": keys["max_position"],
        "rms_norm_eps": keys["norm_epsilon"],
    }
    name = "hidden_activation" if kind in ("gemma2", "gemma3_text") else "hidden_act"
    written[name] = reverse(GATED, keys["activation"], "silu")
    scale = keys["attention_scale"] or keys["head_dim"] ** -0.5
    if kind in _OF_EXPERTS:
        written |= _moe_json(kind, keys)
    if kind == "olmoe":
        del written["head_dim"]  # its norms of queries and keys are of hidden_size, so heads have no other size
    if kind in _BIASED:
        written |= {"attention_bias": keys["bias"] is True, "mlp_bias": keys["bias"] is True}
    if kind in _WINDOWED:
        written |= window_json(kind, keys)
    if kind == "gpt_oss":
        written |= {"attention_bias": True, "swiglu_limit": keys.get("activation_clamp") or _LIMIT}
    if kind == "smollm3":
        every = keys.get("rope_interval") or 0
        numbers = range(1, keys["num_layers"] + 1)
        written["no_rope_layers"] = [int(not every or number % every != 0) for number in numbers]
    elif kind == "granite":
        written |= {name: keys[name] for name in ("embedding_multiplier", "residual_multiplier")}
        written |= {"logits_scaling": 1 / keys["logit_scale"], "attention_multiplier": scale}
    elif name == "hidden_activation":
        written |= {"query_pre_attn_scalar": max(1, round(scale**-2))}
        of_scores = keys["attention_softcap"] if kind == "gemma2" else None
        written |= dict(zip(_AMOUNTS, (keys["logit_softcap"], of_scores), strict=True))
    if kind == "phi3":
        is_long = keys.get("rope_scaling") == "longrope"  # it has no other scaling
        original = keys["rope_original_length"] if is_long else keys["max_position"]
        rope = rope_json(keys if is_long else {**keys, "rope_scaling": "none"}, share=True)
        share = keys.get("rope_fraction", 1.0)
        return written | rope | {"original_max_position_embeddings": original, "partial_rotary_factor": share}
    return written | (layered_rope_json(keys) if kind in _LAYERED_THETA else rope_json(keys))


def _bias(kind: str, settings: Json, problems: list[str]) -> bool | str:
    if kind == "gpt_oss":  # of all its linear layers
        demand(settings, "attention_bias", True, problems)
        return True
    if kind == "qwen2" or (kind == "qwen2_moe" and settings["qkv_bias"]):
        return "qkv"
    if kind in _BIASED and settings["attention_bias"] and settings["mlp_bias"]:
        return True
    for name in ("attention_bias", "mlp_bias"):
        demand(settings, name, False, problems)
    return False


def activation(name: str, activations: Mapping[str, str], key: str, *, problems: list[str]) -> str:
    """Our name of an activation."""
    if name not in activations:
        problems.append(f"{key} = {name!r} is not supported; supported are {', '.join(activations)}")
    return activations.get(name, next(iter(activations.values())))


def reverse(names: Mapping[str, str], value: str, otherwise: str) -> str:
    """Their name of one of ours."""
    return next((name for name, ours in names.items() if ours == value), otherwise)


def tensor(name: str, size: tuple[int, ...], shape: GPTShape, model_type: str) -> Form | tuple[Form, ...]:
    """Where one of our tensors is in theirs, or its parts are."""
    if model_type in deepseek.TYPES:
        return deepseek.tensor(name, size, shape)
    block, rest = split_block(name)
    part, kind = rest.rsplit(".", 1)
    if rest == "attention.sink":
        return Form(f"model.layers.{block}.self_attn.sinks", "row", "row", {"row": size[0]})
    if model_type == "gpt_oss" and part.startswith("mlp."):
        return _of_stacked_experts(f"model.layers.{block}.mlp", part.removeprefix("mlp."), kind, size=size)
    if model_type == "gpt2":
        outer = "" if part == "head" else "transformer."
        theirs = f"{outer}{'' if block is None else f'h.{block}.'}{_GPT2_NAMES[part]}.{kind}"
        return _gpt2_form(theirs, part, size=size)
    if block is not None and shape.moe is not None and shape.moe.has_experts(block) and part.startswith("mlp."):
        return _of_experts(f"model.layers.{block}", part.removeprefix("mlp."), size=size, model_type=model_type)
    names = _NAMES.get(model_type, LLAMA_NAMES)
    theirs = f"{'' if block is None else f'model.layers.{block}.'}{names[part]}.{kind}"
    return _llama_form(theirs, part, size=size, shape=shape, fused=model_type == "phi3")


def _of_experts(layer: str, part: str, *, size: tuple[int, ...], model_type: str) -> Form | tuple[Form, ...]:
    """Of a layer with experts, each of which has matrices of its own."""
    module, names = f"{layer}.mlp", _EXPERTS
    if model_type == "mixtral":
        module, names = f"{layer}.block_sparse_moe", _MIXTRAL_EXPERTS
    lengths = dict(zip(("expert", "row", "column")[-len(size) :], size, strict=True))
    outer, _, inner = part.partition(".")
    if outer == "experts":
        return tuple(
            Form(
                f"{module}.experts.{number}.{names[inner]}.weight",
                "expert row column",
                "row column",
                {**lengths, "expert": 1},
                ours_in={"expert": (number, size[0])},
            )
            for number in range(size[0])
        )
    theirs = {"router": "gate", "shared": f"shared_expert.{names.get(inner)}", "shared_gate": "shared_expert_gate"}
    return Form(f"{module}.{theirs[outer]}.weight", "row column", "row column", lengths)


def _of_stacked_experts(layer: str, part: str, kind: str, *, size: tuple[int, ...]) -> Form:
    """Of gpt-oss: the matrices of all experts are one tensor, transposed, with gate and up in alternating columns."""
    outer, _, inner = part.partition(".")
    if outer == "router":
        dims = "row column" if len(size) == 2 else "row"
        return Form(f"{layer}.router.{kind}", dims, dims, dict(zip(("row", "column"), size, strict=False)))
    lengths = dict(zip(("expert", "row", "column"), size, strict=False))
    columns, ours = (" column", "expert row column") if len(size) == 3 else ("", "expert row")
    tensor = f"{layer}.experts.{'down_proj' if inner == 'down' else 'gate_up_proj'}{'_bias' if kind == 'bias' else ''}"
    if inner == "down":
        return Form(tensor, ours, f"expert{columns} row", lengths)
    return Form(tensor, ours, f"expert{columns} (row half)", lengths, {"half": (int(inner == "up"), 2)})


def _gpt2_form(theirs: str, part: str, *, size: tuple[int, ...]) -> Form:
    lengths = dict(zip(("row", "column"), size, strict=False))
    columns = " column" if len(size) == 2 else ""
    stacked = ("attention.q", "attention.k", "attention.v")
    if part in stacked:
        front = "column " if columns else ""
        inside = {"slot": (stacked.index(part), 3)}
        return Form(theirs, f"row{columns}", f"{front}(slot row)", lengths, inside)
    turned = part in ("attention.out", "mlp.up", "mlp.down") and columns
    return Form(theirs, f"row{columns}", "column row" if turned else f"row{columns}", lengths)


def _llama_form(theirs: str, part: str, *, size: tuple[int, ...], shape: GPTShape, fused: bool) -> Form:
    lengths = dict(zip(("row", "column"), size, strict=False))
    columns = " column" if len(size) == 2 else ""
    last = part.rsplit(".", 1)[-1]
    turned = last in ("q", "k", "q_norm", "k_norm") and shape.position == "rope" and shape.rope.interleaved
    if fused and part in ("mlp.gate", "mlp.up") and shape.gated:
        half = {"half": (int(part == "mlp.up"), 2)}
        return Form(theirs, f"row{columns}", f"(half row){columns}", lengths, half)
    stacked = fused and part in _FUSED
    if not (turned or stacked):
        return Form(theirs, f"row{columns}", f"row{columns}", lengths)
    lengths |= {"head": size[0] // shape.head_dim, "pair": shape.head_dim // 2, "two": 2}
    ours, heads = f"(head pair two){columns}", (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    first = {"head": (sum(heads[: "qkv".index(last)]), sum(heads))} if stacked else {}
    return Form(theirs, ours, f"(head two pair){columns}" if turned else ours, lengths, first)


def is_derived(name: str, stored: Tensor, shape: GPTShape) -> bool:
    """Whether a stored buffer has the values that transformers computes from the configuration."""
    import torch

    from trainer.layers.rope import frequencies

    if re.fullmatch(deepseek.COPIES, name):
        return True
    if not stored.dtype.is_floating_point and not name.endswith(".attn.bias"):
        return False
    if name.endswith(".masked_bias"):
        return stored.numel() == 1
    if name.endswith(".attn.bias"):
        return stored.dim() == 4 and torch.equal(stored.float(), torch.ones_like(stored).tril().float())
    if stored.dim() != 1:
        return False
    # If positions were scaled instead of frequencies, the unscaled frequencies are stored.
    wanted = [
        frequencies(rope, shape.turned_width) for rope in (shape.rope, dataclasses.replace(shape.rope, scaling="none"))
    ]
    limits = torch.finfo(stored.dtype)
    near, tiny = 4 * limits.eps, 4 * limits.eps * limits.smallest_normal
    return any(
        candidate.shape == stored.shape and torch.allclose(stored.double(), candidate, rtol=near, atol=tiny)
        for candidate in wanted
    )


# Buffers that older versions of transformers stored beside the weights.
_GPT2_BUFFERS = r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
_ROTARY_BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
HUGGING_FACE = HuggingFace(
    architectures=ARCHITECTURES,
    defaults=DEFAULTS,
    nullable=_NULLABLE,
    amounts=_AMOUNTS,
    zeros=("max_window_layers", *deepseek.ZEROS),
    second_names={
        "gpt2": _SECOND_NAMES,
        "qwen3_moe": {"num_local_experts": "num_experts"},
        "gpt_oss": {"num_experts": "num_local_experts"},
        **deepseek.SECOND_NAMES,
    },
    fitting_type=fitting_type,
    keys=keys,
    settings=settings,
    free=free,
    notes=contradictions,
    tensor=tensor,
    prefixes={"gpt2": "transformer."},
    buffers={
        **{kind: _GPT2_BUFFERS if kind == "gpt2" else _ROTARY_BUFFERS for kind in ARCHITECTURES},
        **dict.fromkeys(deepseek.TYPES, f"{_ROTARY_BUFFERS}|{deepseek.COPIES}"),
    },
    is_derived=is_derived,
    seen=deepseek.seen,
)
