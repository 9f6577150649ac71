"""GPT-NeoX, StableLM, Cohere and Cohere 2 of transformers: config.json, and the names and forms of tensors.

StableLM is here because its larger models have a parallel residual; the smaller ones say parallel_residual = false.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.sections import RunConfig
from trainer.models.family import Form, HuggingFace, Json, split_block
from trainer.models.gpt.hf_layers import demand, rope_json, rope_keys, share_of_head, window_json, window_keys
from trainer.models.gpt.huggingface import GATED, LLAMA_NAMES, PLAIN, activation, reverse
from trainer.models.gpt.shape import GPTShape

_SIZES: Mapping[str, str] = {  # setting -> key of [model]
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position",
    "layer_norm_eps": "norm_epsilon",
}
_NEOX: Json = {
    "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
    "intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False, "use_parallel_residual": True, "attention_bias": True, "initializer_range": 0.02,
    "rotary_pct": 0.25, "rotary_emb_base": 10000.0,
}  # fmt: skip
_STABLELM: Json = {
    "vocab_size": 50304, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 6912, "hidden_act": "silu", "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.02, "use_qkv_bias": False,
    "qk_layernorm": False, "use_parallel_residual": False,
}  # fmt: skip
_COHERE: Json = {
    "vocab_size": 256000, "hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64,
    "num_key_value_heads": None, "intermediate_size": 22528, "hidden_act": "silu", "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.02, "logit_scale": 0.0625,
    "attention_bias": False,
}  # fmt: skip
_NEOX_NAMES: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention.q": "attention.query_key_value",
    "attention.k": "attention.query_key_value",
    "attention.v": "attention.query_key_value",
    "attention.out": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "embedding": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}


def _keys(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    activations = PLAIN if kind == "gpt_neox" else GATED
    keys = {ours: settings[name] for name, ours in _SIZES.items()} | {
        "vocab_size": settings["vocab_size"],
        "position": "rope",
        "norm": "layernorm",
        "activation": activation(settings["hidden_act"], activations, "hidden_act", problems=problems),
        "tie_embeddings": settings["tie_word_embeddings"],
        "init_std": settings["initializer_range"],
    }
    if kind == "gpt_neox":
        return keys | _neox_keys(settings, problems)
    keys["num_kv_heads"] = settings["num_key_value_heads"] or settings["num_attention_heads"]
    return keys | (_stablelm_keys if kind == "stablelm" else _cohere_keys)(kind, settings, problems)


def _neox_keys(settings: Json, problems: list[str]) -> dict[str, Any]:
    """It says by other names what part of a head is rotated."""
    demand(settings, "attention_bias", True, problems)
    share, rotary = share_of_head(settings, settings["rotary_pct"], problems)
    plain = {name: value for name, value in rotary.items() if not name.startswith("rotary_")}
    return {
        "rope_fraction": share,
        "bias": True,
        "gpt_neox": {"parallel_residual": settings["use_parallel_residual"]},
        **rope_keys({"rope_theta": settings["rotary_emb_base"], **plain}, problems),
    }


def _stablelm_keys(_: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    share, rotary = share_of_head(settings, 0.25, problems)
    parallel = settings["use_parallel_residual"]
    return {
        "rope_fraction": share,
        "bias": "qkv" if settings["use_qkv_bias"] else False,
        "qk_norm": "own_head" if settings["qk_layernorm"] else False,
        "gpt_neox": {"parallel_residual": parallel, "shared_norm": parallel},
        **rope_keys(rotary, problems),
    }


def _cohere_keys(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    """Cohere 2 rotates in layers with a window only."""
    for name, neutral in (("attention_bias", False), ("partial_rotary_factor", 1.0)):
        demand(settings, name, neutral, problems)
    if not settings["logit_scale"] > 0:
        problems.append(f"logit_scale = {settings['logit_scale']!r} is not above 0")
    keys = {
        "norm_bias": False,
        "bias": False,
        "qk_norm": "own_head" if settings.get("use_qk_norm") else False,
        "logit_scale": settings["logit_scale"],
        "gpt_neox": {"parallel_residual": True, "shared_norm": True},
        "rope_interleaved": True,
        **rope_keys(settings, problems),
    }
    if kind == "cohere2":
        keys |= window_keys(kind, settings, problems)
        keys["rope_interval"] = keys.get("window_interval", 0)
        if not keys.get("window"):
            keys["position"] = "none"
    return keys


def _settings(kind: str, keys: Json) -> dict[str, Any]:
    activations = PLAIN if kind == "gpt_neox" else GATED
    written = {name: keys[ours] for name, ours in _SIZES.items()}
    written["hidden_act"] = reverse(activations, keys["activation"], "gelu" if kind == "gpt_neox" else "silu")
    parallel, share = keys["gpt_neox.parallel_residual"], keys.get("rope_fraction", 1.0)
    if kind == "gpt_neox":
        written |= {"rotary_pct": share, "rotary_emb_base": keys.get("rope_theta", 10000.0)}
        return written | {"attention_bias": True, "use_parallel_residual": parallel, **rope_json(keys, share=True)}
    written["num_key_value_heads"] = keys["num_kv_heads"]
    if kind == "stablelm":
        flags = {"use_qkv_bias": keys["bias"] == "qkv", "qk_layernorm": bool(keys["qk_norm"])}
        flags |= {"use_parallel_residual": parallel, "partial_rotary_factor": share}
        return written | flags | rope_json(keys, share=True)
    written |= {"logit_scale": keys["logit_scale"], "attention_bias": False, **rope_json(keys)}
    return written | (window_json(kind, keys) if kind == "cohere2" else {"use_qk_norm": bool(keys["qk_norm"])})


def _fitting_type(config: RunConfig) -> str:
    model = config.model
    if not model.norm_bias:
        return "cohere2" if model.window or model.position == "none" else "cohere"
    return "stablelm" if model.activation in GATED.values() else "gpt_neox"


def _tensor(name: str, size: tuple[int, ...], shape: GPTShape, kind: str) -> Form | tuple[Form, ...]:
    block, rest = split_block(name)
    part, last = rest.rsplit(".", 1)
    names, blocks = (_NEOX_NAMES, "gpt_neox.layers") if kind == "gpt_neox" else (LLAMA_NAMES, "model.layers")
    where = "" if block is None else f"{blocks}.{block}."
    theirs = f"{where}{names[part]}.{last}"
    columns = " column" if len(size) == 2 else ""
    lengths = dict(zip(("row", "column"), size, strict=False))
    if kind == "gpt_neox" and part in ("attention.q", "attention.k", "attention.v"):
        # q, k, v of one head after the other in one matrix.
        lengths |= {"head": shape.num_heads, "channel": shape.head_dim}
        slot = {"slot": ("qkv".index(part[-1]), 3)}
        return Form(theirs, f"(head channel){columns}", f"(head slot channel){columns}", lengths, slot)
    if part not in ("attention.q_norm", "attention.k_norm"):
        return Form(theirs, f"row{columns}", f"row{columns}", lengths)
    heads, lengths = size[0] // shape.head_dim, {"channel": shape.head_dim}
    if kind != "stablelm":
        return Form(theirs, "(head channel)", "head channel", {**lengths, "head": heads})
    norms = f"{where}self_attn.{part[-6:-5]}_layernorm.norms"  # each head's weights are a tensor
    return tuple(
        Form(f"{norms}.{number}.weight", "(head channel)", "channel", lengths, ours_in={"head": (number, heads)})
        for number in range(heads)
    )


HUGGING_FACE = HuggingFace(
    architectures={
        "gpt_neox": "GPTNeoXForCausalLM",
        "stablelm": "StableLmForCausalLM",
        "cohere": "CohereForCausalLM",
        "cohere2": "Cohere2ForCausalLM",
    },
    defaults={
        "gpt_neox": _NEOX,
        "stablelm": _STABLELM,
        "cohere": {**_COHERE, "rope_theta": 5e5},
        "cohere2": {**_COHERE, "sliding_window": 4096},
    },
    nullable=("num_key_value_heads", "sliding_window"),
    fitting_type=_fitting_type,
    keys=_keys,
    settings=_settings,
    tensor=_tensor,
    buffers={"gpt_neox": r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"},
)
