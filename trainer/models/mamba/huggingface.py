"""Mamba-2, Nemotron-H and Bamba of transformers: config.json, and the names of tensors.

A layer of Bamba is two of ours: a mixer or attention, and an MLP. Nemotron-H's smallest step, time_step_min, is also
the smallest one of its first weights; its cached generation does not apply it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from trainer.config.sections import RunConfig
from trainer.models.family import Form, HuggingFace, Json, split_block
from trainer.models.gpt.hf_layers import demand, rope_json, rope_keys, share_of_head
from trainer.models.gpt.huggingface import GATED, PLAIN, activation, reverse
from trainer.models.mamba.shape import MambaShape, pattern_of

_MAMBA2: Json = {
    "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
    "state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 256, "expand": 2, "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu", "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": False,
    "initializer_range": 0.1, "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4,
    "max_position_embeddings": 8192,  # transformers has no limit, and ignores it
}  # fmt: skip
_NEMOTRON_H: Json = {
    "vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 21504, "mlp_hidden_act": "relu2", "max_position_embeddings": 4096, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
    "layer_norm_epsilon": 1e-5, "mamba_hidden_act": "silu", "use_bias": False, "use_conv_bias": True,
    "mamba_proj_bias": False, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "initializer_range": 0.02, "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "norm_topk_prob": True,
    "moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_BAMBA: Json = {
    "vocab_size": 128000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "hidden_act": "silu", "max_position_embeddings": 262144,
    "mamba_n_heads": 128, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False, "rms_norm_eps": 1e-5,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
_SIZES: Mapping[str, Mapping[str, str]] = {  # model_type -> setting -> key of [model]
    "mamba2": {"hidden_size": "hidden_size", "num_heads": "mamba.num_heads", "head_dim": "mamba.head_dim",
               "state_size": "mamba.state_size", "n_groups": "mamba.num_groups", "conv_kernel": "mamba.conv_kernel"},
    "nemotron_h": {"hidden_size": "hidden_size", "num_attention_heads": "num_heads",
                   "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim",
                   "intermediate_size": "ffn_hidden_size", "mamba_num_heads": "mamba.num_heads",
                   "mamba_head_dim": "mamba.head_dim", "ssm_state_size": "mamba.state_size",
                   "n_groups": "mamba.num_groups", "conv_kernel": "mamba.conv_kernel"},
    "bamba": {"hidden_size": "hidden_size", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
              "intermediate_size": "ffn_hidden_size", "mamba_n_heads": "mamba.num_heads",
              "mamba_d_state": "mamba.state_size", "mamba_n_groups": "mamba.num_groups",
              "mamba_d_conv": "mamba.conv_kernel"},
}  # fmt: skip
_OF_MAMBA1 = "its mixers are of Mamba-1, where each channel has decays of its own"
_UNLIKE = {
    "mamba": _OF_MAMBA1,
    "falcon_mamba": _OF_MAMBA1,
    "jamba": _OF_MAMBA1,
    "zamba": f"{_OF_MAMBA1}, and many layers share one attention block",
    "zamba2": "many layers share an attention block, each with adapters of its own, which also reads the embeddings",
    "falcon_h1": "in each layer a mixer and attention stand side by side",
}
_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
_NEGLIGIBLE = 1e-20  # a smallest step that is none: 0 has no logarithm
_NAMES: Mapping[str, Mapping[str, str]] = {
    "mamba2": {"mixer_norm": "norm", "attention_norm": "norm", "mlp_norm": "norm", "mixer": "mixer",
               "attention.q": "mixer.q_proj", "attention.k": "mixer.k_proj", "attention.v": "mixer.v_proj",
               "attention.out": "mixer.o_proj", "mlp.up": "mixer.up_proj", "mlp.down": "mixer.down_proj",
               "mlp.router": "mixer.gate", "mlp.shared.up": "mixer.shared_experts.up_proj",
               "mlp.shared.down": "mixer.shared_experts.down_proj",
               "embedding": "backbone.embeddings", "final_norm": "backbone.norm_f", "head": "lm_head"},
    "bamba": {"mixer_norm": "input_layernorm", "attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm",
              "mixer": "mamba", "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
              "attention.v": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
              "mlp.gate": "feed_forward.gate_proj", "mlp.up": "feed_forward.up_proj",
              "mlp.down": "feed_forward.down_proj",
              "embedding": "model.embed_tokens", "final_norm": "model.final_layernorm", "head": "lm_head"},
}  # fmt: skip


def _keys(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    keys: dict[str, Any] = {ours: settings[name] for name, ours in _SIZES[kind].items()}
    epsilon = settings["rms_norm_eps" if kind == "bamba" else "layer_norm_epsilon"]
    keys |= {
        "vocab_size": settings["vocab_size"],
        "max_position": settings["max_position_embeddings"],
        "norm": "rmsnorm",
        "norm_epsilon": epsilon,
        "bias": False,
        "tie_embeddings": settings["tie_word_embeddings"],
        "init_std": settings["initializer_range"],
        "mamba.norm_epsilon": epsilon,
        "mamba.chunk_size": settings["mamba_chunk_size" if kind == "bamba" else "chunk_size"],
    }
    for name in ("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"):
        demand(settings, name, False, problems)
    demand(settings, "mamba_conv_bias" if kind == "bamba" else "use_conv_bias", True, problems)
    low, high = _limits(settings, problems)
    of_kind = {"mamba2": _mamba2_keys, "nemotron_h": _nemotron_keys, "bamba": _bamba_keys}[kind]
    if kind == "nemotron_h":  # it does not read time_step_limit
        low, high = settings["time_step_min"], math.inf
    keys |= {"mamba.dt_limit_min": low if low > _NEGLIGIBLE else 0.0}
    keys |= {} if math.isinf(high) else {"mamba.dt_limit_max": high}
    return _nested(keys | of_kind(settings, keys, problems))


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model], with those of [model.mamba] in a table."""
    own = {name: value for name, value in keys.items() if "." not in name}
    return own | {"mamba": {name.removeprefix("mamba."): value for name, value in keys.items() if "." in name}}


def _limits(settings: Json, problems: list[str]) -> tuple[float, float]:
    """Smallest and largest step; newer versions write an infinite one as a table."""
    stated = settings.get("time_step_limit") or (0.0, math.inf)
    try:
        low, high = (float(x["__float__"] if isinstance(x, dict) else x) for x in stated)
    except (TypeError, ValueError, KeyError):
        problems.append(f"time_step_limit = {stated!r} is not two numbers")
        return 0.0, math.inf
    return low, high


def _initial(settings: Json) -> dict[str, Any]:
    return {f"mamba.{ours}": settings[name] for name, ours in (
        ("time_step_min", "dt_min"), ("time_step_max", "dt_max"), ("time_step_floor", "dt_floor"),
    )}  # fmt: skip


def _mamba2_keys(settings: Json, keys: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    demand(settings, "hidden_act", "silu", problems)
    inner, expand = keys["mamba.num_heads"] * keys["mamba.head_dim"], settings["expand"]
    if inner != expand * keys["hidden_size"]:
        problems.append(f"num_heads x head_dim = {inner} is not expand = {expand} x hidden_size")
    layers = settings["num_hidden_layers"]
    own = {"num_layers": layers, "num_heads": 1, "position": "none", "mamba.pattern": "M" * layers}
    return own | _initial(settings)


def _nemotron_keys(settings: Json, keys: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    for name, neutral in (("mamba_hidden_act", "silu"), ("sliding_window", None), ("num_nextn_predict_layers", 0)):
        demand(settings, name, neutral, problems)
    demand(settings, "tie_word_embeddings", False, problems)  # its class ties nothing, whatever this says
    pattern = settings.get("hybrid_override_pattern")
    listed = settings.get("layers_block_type", settings.get("layer_types"))
    if listed is not None:
        pattern = "".join(_LETTERS.get(str(each), "?") for each in listed) if isinstance(listed, list) else "?"
    pattern = "ME*-" if pattern is None else str(pattern)
    if set(pattern) - {*_LETTERS.values()}:
        problems.append(f"layers_block_type = {str(listed or pattern)[:80]}: supported are mamba, attention, mlp, moe")
    start = max(settings["time_step_min"], _NEGLIGIBLE)
    own = {"num_layers": len(pattern), "position": "none", "mamba.pattern": pattern}
    own["activation"] = activation(settings["mlp_hidden_act"], PLAIN, "mlp_hidden_act", problems=problems)
    own |= {"moe": _experts(settings, problems)} if "E" in pattern else {}
    return own | _initial({**settings, "time_step_min": start})


def _experts(settings: Json, problems: list[str]) -> dict[str, Any]:
    """Keys of [model.moe]: those of DeepSeek-V3's router, and one expert of every token."""
    demand(settings, "moe_latent_size", None, problems)
    top_k, groups, chosen = (settings[name] for name in ("num_experts_per_tok", "n_group", "topk_group"))
    if groups > 1 and top_k != 2 * chosen:
        problems.append(
            f"num_experts_per_tok = {top_k} and topk_group = {chosen}: a group counts by its best 2 experts there, and "
            "by the best num_experts_per_tok / topk_group here"
        )
    if not settings["norm_topk_prob"] or top_k == 1:
        problems.append("weights of experts that are not normalized are not supported (norm_topk_prob, or one expert)")
    moe = {
        "num_experts": settings["n_routed_experts"],
        "top_k": top_k,
        "ffn_hidden_size": settings["moe_intermediate_size"],
        "shared_ffn_hidden_size": settings["moe_shared_expert_intermediate_size"],
        "weight_scale": float(settings["routed_scaling_factor"]),
        "score": "sigmoid",
        "expert_bias": True,
        "balance": "none",
    }
    return moe | ({"groups": groups, "groups_per_token": chosen} if groups > 1 else {})


def _experts_json(keys: Json) -> dict[str, Any]:
    """What theirs does not express is read back as something else."""
    groups, chosen = keys["moe.groups"], keys["moe.groups_per_token"]
    if keys["moe.top_k"] != 2 * chosen:  # one group is whole; the number of several is then read back as another
        groups = chosen = 1
    return {
        "n_routed_experts": keys["moe.num_experts"],
        "num_experts_per_tok": max(2, keys["moe.top_k"]),
        "moe_intermediate_size": keys["moe.ffn_hidden_size"],
        "moe_shared_expert_intermediate_size": max(1, keys["moe.shared_ffn_hidden_size"]),
        "routed_scaling_factor": keys["moe.weight_scale"],
        "n_group": groups,
        "topk_group": chosen,
        "norm_topk_prob": True,
        "moe_latent_size": None,
    }


def _bamba_keys(settings: Json, keys: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    layers, with_attention = settings["num_hidden_layers"], settings.get("attn_layer_indices") or []
    if not isinstance(with_attention, list) or not all(type(i) is int and 0 <= i < layers for i in with_attention):
        problems.append(f"attn_layer_indices = {with_attention!r} are not numbers of {layers} layers")
        with_attention = []
    inner, heads = settings["mamba_expand"] * keys["hidden_size"], keys["mamba.num_heads"]
    size = settings.get("mamba_d_head", "auto")
    if inner % heads or size not in ("auto", inner // heads):
        problems.append(f"mamba_n_heads = {heads} x mamba_d_head = {size} is not mamba_expand x hidden_size = {inner}")
    share, rotary = share_of_head(settings, 0.5, problems)
    return {
        "num_layers": 2 * layers,
        "position": "rope",
        "rope_fraction": share,
        "activation": activation(settings["hidden_act"], GATED, "hidden_act", problems=problems),
        "mamba.head_dim": max(1, inner // heads),
        "mamba.pattern": "".join("*-" if i in with_attention else "M-" for i in range(layers)),
        **rope_keys(rotary, problems),
    }


def _settings(kind: str, keys: Json) -> dict[str, Any]:
    written: dict[str, Any] = {name: keys.get(ours, 1) for name, ours in _SIZES[kind].items()}
    written["max_position_embeddings"] = keys["max_position"]
    written["rms_norm_eps" if kind == "bamba" else "layer_norm_epsilon"] = keys["norm_epsilon"]
    pattern, inner = keys["mamba.pattern"], keys["mamba.num_heads"] * keys["mamba.head_dim"]
    expand, low, high = max(1, inner // keys["hidden_size"]), keys["mamba.dt_limit_min"], keys["mamba.dt_limit_max"]
    limits = {"time_step_limit": [low, high]} if high is not None else {}
    if low and high is None:
        limits = {"time_step_limit": [low, {"__float__": "Infinity"}]}
    if kind == "mamba2":
        return written | limits | {"num_hidden_layers": len(pattern), "expand": expand, "hidden_act": "silu"}
    if kind == "nemotron_h":
        theirs = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
        written["layers_block_type"] = [theirs[letter] for letter in pattern]
        written["mlp_hidden_act"] = reverse(PLAIN, keys.get("activation", "squared_relu"), "relu2")
        written |= _experts_json(keys) if "moe.num_experts" in keys else {}
        return written | {"time_step_min": max(low, _NEGLIGIBLE), "expand": expand, "tie_word_embeddings": False}
    written |= {"num_hidden_layers": len(pattern) // 2, "mamba_expand": expand, "mamba_d_head": keys["mamba.head_dim"]}
    written["attn_layer_indices"] = [number for number, letter in enumerate(pattern[::2]) if letter == "*"]
    written["hidden_act"] = reverse(GATED, keys.get("activation", "swiglu"), "silu")
    return written | limits | rope_json(keys, share=True)


def _fitting_type(config: RunConfig) -> str:
    pattern = pattern_of(config)
    if {*pattern} <= {"M"}:
        return "mamba2"
    pairs = {pattern[i : i + 2] for i in range(0, len(pattern), 2)}
    return "bamba" if pairs <= {"M-", "*-"} and config.model.activation in GATED.values() else "nemotron_h"


def _tensor(name: str, size: tuple[int, ...], shape: MambaShape, kind: str) -> Form | tuple[Form, ...]:
    block, rest = split_block(name)
    names, where = _NAMES["bamba" if kind == "bamba" else "mamba2"], ""
    if block is not None:
        where = f"model.layers.{block // 2}." if kind == "bamba" else f"backbone.layers.{block}."
    if rest.startswith("mixer."):
        return _in_mixer(f"{where}{names['mixer']}", rest.removeprefix("mixer."), size, shape)
    part, last = rest.rsplit(".", 1)
    if part.startswith("mlp.experts."):
        lengths = {"expert": 1, "row": size[1], "column": size[2]}
        matrix = f"{part.rpartition('.')[2]}_proj.weight"
        return tuple(
            Form(
                f"{where}mixer.experts.{number}.{matrix}",
                "expert row column",
                "row column",
                lengths,
                ours_in={"expert": (number, size[0])},
            )
            for number in range(size[0])
        )
    last = "e_score_correction_bias" if last == "expert_bias" else last
    dims = "row column" if len(size) == 2 else "row"
    # What transformers has no place for is refused by the configuration; its name is only looked up.
    return Form(f"{where}{names.get(part, part)}.{last}", dims, dims, dict(zip(("row", "column"), size, strict=False)))


def _in_mixer(where: str, part: str, size: tuple[int, ...], shape: MambaShape) -> Form:
    """One of a mixer's tensors; z, x, B, C and dt are one matrix there."""
    mixer = shape.mixer
    rows = {"z": mixer.inner, "x": mixer.inner, "B": mixer.of_groups, "C": mixer.of_groups, "dt": mixer.num_heads}
    layer, _, letter = part.rpartition(".")[0].rpartition(".")
    dims = ("row", "one", "column") if len(size) == 3 else ("row", "column")[: len(size)]
    lengths, notation = dict(zip(dims, size, strict=True)), " ".join(dims)
    if letter not in rows:
        return Form(f"{where}.{part}", notation, notation, lengths)
    rows = {name: rows[name] for name in ("x", "B", "C")} if layer == "conv1d" else rows
    first = dict(zip(rows, accumulate(rows.values(), initial=0), strict=False))[letter]
    theirs = f"{where}.{layer or 'in_proj'}.{part.rpartition('.')[2]}"
    return Form(theirs, notation, notation, lengths, {"row": (first, sum(rows.values()))})


HUGGING_FACE = HuggingFace(
    architectures={"mamba2": "Mamba2ForCausalLM", "nemotron_h": "NemotronHForCausalLM", "bamba": "BambaForCausalLM"},
    defaults={"mamba2": _MAMBA2, "nemotron_h": _NEMOTRON_H, "bamba": _BAMBA},
    fitting_type=_fitting_type,
    keys=_keys,
    settings=_settings,
    tensor=_tensor,
    unlike=_UNLIKE,
)
