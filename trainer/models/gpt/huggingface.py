"""GPT-2, Llama, Mistral, Qwen2 and Qwen3 of transformers: config.json, and the names and forms of tensors.

config.json in both directions: a key that is missing has the default that transformers gives it, and what changes the
function and that we lack is a problem. Values of both spellings of rotary settings are read and written:
`rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of older versions.

Tensors: Llama, Mistral and Qwen keep q, k, v, gate and up apart, as we do. GPT-2 keeps its matrices transposed (its
layers are Conv1D) and q, k, v side by side in one. Where our pairs of rotary features are neighbours, rows of q and k
change their order: theirs are halves apart. Padding of the vocabulary exists on neither side. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainer.config.sections import RunConfig
from trainer.models.family import Form, HuggingFace, Json, split_block
from trainer.models.gpt.shape import GPTShape

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
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
    }
)  # fmt: skip
_LLAMA_NAMES: Mapping[str, str] = MappingProxyType(
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
_NULLABLE = ("num_key_value_heads", "head_dim", "n_inner", "sliding_window")
PLAIN = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf", "relu": "relu", "relu2": "squared_relu"}
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_SCALINGS = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "yarn": ("yarn", {"factor": "factor", "original_max_position_embeddings": "original_length",
                      "beta_fast": "beta_fast", "beta_slow": "beta_slow"}),
    "llama3": ("llama3", {"factor": "factor", "original_max_position_embeddings": "original_length",
                          "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}),
}  # fmt: skip
_ATTENTIONS = ("full_attention", "sliding_attention")
ROPE_TABLES = ("rope_scaling", "rope_parameters")
_ORIGINAL = "original_max_position_embeddings"
_ROPE_TOP = ("rope_theta", "partial_rotary_factor")  # beside the tables
_ROPE_ANY = ("rope_type", "type", "rope_theta", _ORIGINAL, "finetuned")  # in a table of any type
# Settings that have no counterpart here, with the values that change nothing.
_ROPE_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
_ROPE_NEUTRAL = {"partial_rotary_factor": 1.0}
_YARN_NEUTRAL = {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "truncate": True}


def contradictions(found: Json) -> Iterator[str]:
    """Notes on rotary settings that have two values at two places of a config.json, with the one that is used."""
    for name in ROPE_TABLES:
        table = found.get(name) or {}
        for key, first, second in (("rope_theta", table, found), (_ORIGINAL, found, table)):
            counts, other = first.get(key), second.get(key)
            scaled = _SCALINGS.get(str(table.get("rope_type", table.get("type"))), ("", {}))[1]
            if None not in (counts, other) and counts != other and (key == "rope_theta" or key in scaled):
                where = f"in {name}" if first is table else f"outside {name}"
                yield f"config.json has two values of {key}: {counts!r} {where} is used, not {other!r}"


def keys(kind: str, found: Json, problems: list[str]) -> dict[str, Any]:
    """The keys of [model] for the settings of a config.json; adds what we lack to `problems`."""
    return _gpt2(found, problems) if kind == "gpt2" else _llama(kind, found, problems)


def settings(kind: str, keys: Json) -> dict[str, Any]:
    """The config.json for keys of [model]."""
    return _gpt2_json(keys) if kind == "gpt2" else _llama_json(kind, keys)


def free(config: RunConfig) -> tuple[str, ...]:
    """An interleaved pair is a matter of the order of rows, which `tensor` changes."""
    return ("rope_interleaved",) if config.model.rope_fraction == 1 else ()


def fitting_type(config: RunConfig) -> str:
    """The model_type that expresses a configuration, if one does."""
    model = config.model
    if model.position == "learned":
        return "gpt2"
    if model.qk_norm:
        return "qwen3"
    if model.bias == "qkv":
        return "qwen2"
    return "mistral" if model.window else "llama"


def _gpt2(found: Json, problems: list[str]) -> dict[str, Any]:
    for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        demand(found, name, DEFAULTS["gpt2"][name], problems)
    return {
        "num_layers": found["n_layer"],
        "hidden_size": found["n_embd"],
        "num_heads": found["n_head"],
        "ffn_hidden_size": found["n_inner"] or 4 * found["n_embd"],
        "vocab_size": found["vocab_size"],
        "max_position": found["n_positions"],
        "position": "learned",
        "norm": "layernorm",
        "norm_epsilon": found["layer_norm_epsilon"],
        "activation": activation(found["activation_function"], PLAIN, "activation_function", problems=problems),
        "bias": True,
        "tie_embeddings": found["tie_word_embeddings"],
        "init_std": found["initializer_range"],
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


def _llama(kind: str, found: Json, problems: list[str]) -> dict[str, Any]:
    demand(found, "partial_rotary_factor", 1.0, problems)
    window, interval = _window(kind, found, problems)
    return {
        "num_layers": found["num_hidden_layers"],
        "hidden_size": found["hidden_size"],
        "num_heads": found["num_attention_heads"],
        "num_kv_heads": found["num_key_value_heads"] or found["num_attention_heads"],
        "head_dim": found["head_dim"] or found["hidden_size"] // found["num_attention_heads"],
        "ffn_hidden_size": found["intermediate_size"],
        "vocab_size": found["vocab_size"],
        "max_position": found["max_position_embeddings"],
        "position": "rope",
        "norm": "rmsnorm",
        "norm_epsilon": found["rms_norm_eps"],
        "activation": activation(found["hidden_act"], _GATED, "hidden_act", problems=problems),
        "bias": _bias(kind, found, problems),
        "qk_norm": kind == "qwen3",
        "window": window,
        "window_interval": interval,
        "tie_embeddings": found["tie_word_embeddings"],
        "init_std": found["initializer_range"],
        **rope_keys(found, problems),
    }


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
        "hidden_act": reverse(_GATED, keys["activation"], "silu"),
    }
    if kind == "llama":
        written |= {"attention_bias": keys["bias"] is True, "mlp_bias": keys["bias"] is True}
    if kind == "mistral":
        written["sliding_window"] = keys["window"] or None
    if kind in ("qwen2", "qwen3"):
        written |= _qwen_window(keys)
    return written | rope_json(keys)


def _bias(kind: str, found: Json, problems: list[str]) -> bool | str:
    if kind == "qwen2":
        return "qkv"
    if kind == "llama" and found["attention_bias"] and found["mlp_bias"]:
        return True
    for name in ("attention_bias", "mlp_bias"):
        demand(found, name, False, problems)
    return False


def _window(kind: str, found: Json, problems: list[str]) -> tuple[int, int]:
    """(window, every k-th layer that sees everything)."""
    if kind in ("llama", "mistral") or not found["use_sliding_window"]:
        window = (found["sliding_window"] or 0) if kind == "mistral" else 0
        kinds, usual = found.get("layer_types"), _ATTENTIONS[window > 0]
        if kinds is not None and (not isinstance(kinds, list) or any(one != usual for one in kinds)):
            problems.append(f"layer_types = {str(kinds)[:80]}: supported is {usual} in all layers")
        return window, 0
    layers, first, kinds = found["num_hidden_layers"], found["max_window_layers"], found.get("layer_types")
    if kinds is None:
        if first >= layers:
            return 0, 0
        if first:
            problems.append(f"sliding windows in layers from {first + 1} on, and full attention in those before")
        whole = []
    elif isinstance(kinds, list) and len(kinds) == layers and set(map(str, kinds)) <= set(_ATTENTIONS):
        whole = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
        if len(whole) == layers:
            return 0, 0
    else:
        expected = f"a list of {' or '.join(_ATTENTIONS)} for {layers} layers"
        problems.append(f"layer_types = {str(kinds)[:80]} is not {expected}")
        return 0, 0
    interval = whole[0] if whole else 0
    if whole != list(range(interval, layers + 1, interval) if interval else []):
        problems.append(f"sliding windows in layers that are no multiple of a number: full attention in {whole[:8]}")
    if found["sliding_window"] is None:
        problems.append("use_sliding_window is set without a sliding_window")
    return found["sliding_window"] or 0, interval


def _qwen_window(keys: Json) -> dict[str, Any]:
    if not keys["window"]:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": keys["num_layers"]}
    every = keys["window_interval"]
    whole = [bool(every) and (number % every == 0) for number in range(1, keys["num_layers"] + 1)]
    kinds = ["full_attention" if sees_all else "sliding_attention" for sees_all in whole]
    return {
        "use_sliding_window": True, "sliding_window": keys["window"], "max_window_layers": 0, "layer_types": kinds,
    }  # fmt: skip


def rope_keys(found: Json, problems: list[str]) -> dict[str, Any]:
    """Rotary settings; for a key at two places, transformers' choice is used (see `contradictions`)."""
    tables = {name: found[name] for name in ROPE_TABLES if found.get(name)}
    problems += [f"{name} = {found[name]!r} is not supported" for name in found if _is_unknown_rope_key(name, found)]
    read = {name: _rope_table(name, table, found, problems) for name, table in tables.items()}
    keys = next(iter(read.values()), _rope_theta({}, found, "config.json", problems=problems))
    if any(other != keys for other in read.values()):
        problems.append(f"rope_scaling and rope_parameters disagree: {' and '.join(map(repr, tables.values()))}")
    return keys


def _rope_table(where: str, table: Json, found: Json, problems: list[str]) -> dict[str, Any]:
    """Our keys for one of the two tables."""
    keys = _rope_theta(table, found, where, problems=problems)
    kinds = [table[name] for name in ("rope_type", "type") if table.get(name) is not None] or ["default"]
    kind = kinds[0]
    if not isinstance(kind, str) or kind not in _SCALINGS:
        problems.append(f"{where} of type {kind!r} is not supported; supported are {', '.join(_SCALINGS)}")
        return keys
    if kinds[-1] != kind:
        problems.append(f"{where} has two types, {kind!r} and {kinds[-1]!r}")
    scaling, names = _SCALINGS[kind]
    settings = {name: value for name, value in table.items() if value is not None}
    neutral = {**_ROPE_NEUTRAL, **(_YARN_NEUTRAL if kind == "yarn" else {})}
    for name, value in settings.items():
        if name in neutral:
            demand(table, name, neutral[name], problems)
        elif name not in {*names, *_ROPE_ANY}:
            problems.append(f"{where} has {name} = {value!r}, which type {kind!r} does not use")
    if _ORIGINAL in names:
        settings[_ORIGINAL] = found.get(_ORIGINAL) or settings.get(_ORIGINAL) or found["max_position_embeddings"]
    missing = [name for name in names if name not in settings and not name.startswith("beta")]
    if missing:
        problems.append(f"{where} of type {kind!r} lacks {', '.join(missing)}")
        return keys
    given = {f"rope_{ours}": settings[name] for name, ours in names.items() if name in settings}
    wrong = [name for name in names if name in settings and not _is_positive(settings[name])]
    problems += [f"{name} = {settings[name]!r} is not a number above 0" for name in wrong]
    if not wrong:
        problems += _wrong_order(kind, {**keys, **_ROPE_DEFAULTS, **settings})
    return {**keys, "rope_scaling": scaling, **given} if scaling != "none" and not wrong else keys


def _wrong_order(kind: str, settings: Json) -> Iterator[str]:
    """Problems of settings for which the formula is undefined; programs differ in what they then compute."""
    below = {"yarn": ("beta_slow", "beta_fast"), "llama3": ("low_freq_factor", "high_freq_factor")}.get(kind)
    if below and not settings[below[0]] < settings[below[1]]:
        yield f"{below[0]} = {settings[below[0]]!r} is not below {below[1]} = {settings[below[1]]!r}"
    if kind == "yarn" and settings.get("rope_theta", math.inf) <= 1:
        yield f"rope_theta = {settings['rope_theta']!r} is not above 1, which yarn needs"


def _rope_theta(table: Json, found: Json, where: str, *, problems: list[str]) -> dict[str, Any]:
    theta = next((place["rope_theta"] for place in (table, found) if place.get("rope_theta") is not None), 10000.0)
    if not _is_positive(theta):
        problems.append(f"rope_theta = {theta!r} in {where} is not a number above 0")
        return {}
    return {"rope_theta": float(theta)}


def _is_unknown_rope_key(name: str, found: Json) -> bool:
    """Whether a key outside the tables seems to change the rotation in an unknown way."""
    known = (*ROPE_TABLES, *_ROPE_TOP)
    return ("rope" in name or "rotary" in name) and name not in known and found[name] not in (None, False)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def rope_json(keys: Json) -> dict[str, Any]:
    """The settings of rotary positions, in both spellings."""
    theta = keys.get("rope_theta", 10000.0)
    kind, names = next(
        ((kind, names) for kind, (scaling, names) in _SCALINGS.items() if scaling == keys.get("rope_scaling")),
        ("default", {}),
    )
    settings = {name: keys[f"rope_{ours}"] for name, ours in names.items()}
    scaling = {"rope_type": kind, **settings} if kind != "default" else None
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings},
    }


def demand(found: Json, name: str, neutral: Any, problems: list[str]) -> None:
    """Add a problem if a setting that we lack is not neutral."""
    if found.get(name, neutral) != neutral:
        problems.append(f"{name} = {found[name]!r} is not supported; supported is {neutral!r}")


def activation(name: str, known: Mapping[str, str], key: str, *, problems: list[str]) -> str:
    """Our name of an activation."""
    if name not in known:
        problems.append(f"{key} = {name!r} is not supported; supported are {', '.join(known)}")
    return known.get(name, next(iter(known.values())))


def reverse(known: Mapping[str, str], value: str, otherwise: str) -> str:
    """Their name of one of ours."""
    return next((name for name, ours in known.items() if ours == value), otherwise)


def tensor(name: str, size: tuple[int, ...], shape: GPTShape, model_type: str) -> Form:
    """Where one of our tensors is in theirs."""
    block, rest = split_block(name)
    part, kind = rest.rsplit(".", 1)
    if model_type == "gpt2":
        outer = "" if part == "head" else "transformer."
        theirs = f"{outer}{'' if block is None else f'h.{block}.'}{_GPT2_NAMES[part]}.{kind}"
        return _gpt2_form(theirs, part, size=size)
    theirs = f"{'' if block is None else f'model.layers.{block}.'}{_LLAMA_NAMES[part]}.{kind}"
    return _llama_form(theirs, part, size=size, shape=shape)


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


def _llama_form(theirs: str, part: str, *, size: tuple[int, ...], shape: GPTShape) -> Form:
    lengths = dict(zip(("row", "column"), size, strict=False))
    columns = " column" if len(size) == 2 else ""
    turned = part.rsplit(".", 1)[-1] in ("q", "k", "q_norm", "k_norm")
    if not (turned and shape.position == "rope" and shape.rope.interleaved):
        return Form(theirs, f"row{columns}", f"row{columns}", lengths)
    lengths |= {"head": size[0] // shape.head_dim, "pair": shape.head_dim // 2, "two": 2}
    return Form(theirs, f"(head pair two){columns}", f"(head two pair){columns}", lengths)


def is_derived(name: str, stored: Tensor, shape: GPTShape) -> bool:
    """Whether a stored buffer has the values that transformers computes from the configuration."""
    import torch

    from trainer.layers.rope import frequencies

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
        frequencies(rope, shape.head_dim) for rope in (shape.rope, dataclasses.replace(shape.rope, scaling="none"))
    ]
    limits = torch.finfo(stored.dtype)
    near, tiny = 4 * limits.eps, 4 * limits.eps * limits.smallest_normal
    return any(
        one.shape == stored.shape and torch.allclose(stored.double(), one, rtol=near, atol=tiny) for one in wanted
    )


# Buffers that older versions of transformers stored beside the weights.
_GPT2_BUFFERS = r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
_ROTARY_BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
HUGGING_FACE = HuggingFace(
    architectures=ARCHITECTURES,
    defaults=DEFAULTS,
    nullable=_NULLABLE,
    zeros=("max_window_layers",),
    second_names={"gpt2": _SECOND_NAMES},
    fitting_type=fitting_type,
    keys=keys,
    settings=settings,
    free=free,
    notes=contradictions,
    tensor=tensor,
    prefixes={"gpt2": "transformer."},
    buffers={kind: _GPT2_BUFFERS if kind == "gpt2" else _ROTARY_BUFFERS for kind in ARCHITECTURES},
    is_derived=is_derived,
)
