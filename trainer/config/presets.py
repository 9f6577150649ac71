"""Published models by name, as keys of the [model] section. Keys in a run's file override those of its preset.

Numbers are those of the models' papers and of the configurations beside their published weights. Dropout is 0: models
of this size see their data about once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mdata.util.option_synonyms import nearest

_Values = dict[str, Any]


def _sizes(layers: int, hidden: int, heads: int, ffn: int, kv_heads: int | None = None) -> _Values:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "ffn_hidden_size": ffn}
    return sizes if kv_heads is None else sizes | {"num_kv_heads": kv_heads}


def _gpt(layers: int, hidden: int, heads: int, *, length: int) -> _Values:
    """Radford et al. 2019; Brown et al. 2020."""
    form = {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True, "tie_embeddings": True}
    return _sizes(layers, hidden, heads, 4 * hidden) | {"vocab_size": 50257, "max_position": length} | form


def _llama(sizes: _Values, *, vocab: int, theta: float = 10000.0, tied: bool = False) -> _Values:
    """Touvron et al. 2023; Jiang et al. 2023; Grattafiori et al. 2024."""
    form = {"position": "rope", "norm": "rmsnorm", "norm_epsilon": 1e-5, "activation": "swiglu", "bias": False}
    return sizes | form | {"vocab_size": vocab, "rope_theta": theta, "tie_embeddings": tied}


def _llama32(sizes: _Values) -> _Values:
    stretched = {"rope_scaling": "llama3", "rope_factor": 32.0, "rope_original_length": 8192}
    return _llama(sizes, vocab=128256, theta=5e5, tied=True) | stretched


def _qwen2(sizes: _Values, *, vocab: int = 151936, tied: bool = False) -> _Values:
    """Yang et al. 2024."""
    return _llama(sizes, vocab=vocab, theta=1e6, tied=tied) | {"norm_epsilon": 1e-6, "bias": "qkv"}


def _qwen3(sizes: _Values, *, tied: bool = False) -> _Values:
    """Yang et al. 2025."""
    wide = sizes | {"num_kv_heads": 8, "head_dim": 128}
    return _llama(wide, vocab=151936, theta=1e6, tied=tied) | {"norm_epsilon": 1e-6, "qk_norm": True}


def _mixtral(sizes: _Values) -> _Values:
    """Jiang et al. 2024."""
    experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": sizes["ffn_hidden_size"], "balance_factor": 0.02}
    return _llama(sizes | {"num_kv_heads": 8}, vocab=32000, theta=1e6) | {"moe": experts}


def _deepseek(sizes: _Values, *, q_lora_rank: int | None, mscale: float, vocab: int, moe: _Values) -> _Values:
    """DeepSeek-AI 2024; the context is 40 times that of the first training."""
    mla: _Values = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    mla |= {"mscale": mscale, "mscale_all_dim": mscale} | ({"q_lora_rank": q_lora_rank} if q_lora_rank else {})
    stretched = {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_original_length": 4096, "rope_interleaved": True}
    return _llama(sizes, vocab=vocab) | stretched | {"norm_epsilon": 1e-6, "mla": mla, "moe": moe}


def _qwen3_moe(layers: int, hidden: int, heads: int, ffn: int, *, expert: int) -> _Values:
    """Yang et al. 2025."""
    experts = {"num_experts": 128, "top_k": 8, "ffn_hidden_size": expert, "balance_factor": 0.001}
    return _qwen3(_sizes(layers, hidden, heads, ffn)) | {"num_kv_heads": 4, "moe": experts}


def _olmo2(sizes: _Values, *, vocab: int = 100352) -> _Values:
    """Walsh et al. 2024."""
    form = {"norm_epsilon": 1e-6, "block_norm": "output", "qk_norm": "all_heads"}
    return _llama(sizes, vocab=vocab, theta=5e5) | form


def _olmo3(sizes: _Values) -> _Values:
    """Olmo team 2025; positions are stretched in the layers without a window."""
    stretched = {"rope_scaling": "yarn", "rope_factor": 8.0, "rope_original_length": 8192, "rope_window_theta": 5e5}
    return _olmo2(sizes, vocab=100278) | stretched | {"window": 4096, "window_interval": 4}


def _phi(sizes: _Values, *, vocab: int = 32064, theta: float = 10000.0, window: int = 2047) -> _Values:
    """Abdin et al. 2024."""
    return _llama(sizes, vocab=vocab, theta=theta) | ({"window": window} if window else {})


# Of each rotated pair beyond 4,096 tokens, as searched by Ding et al. 2024.
_PHI4_MINI_FACTORS = (
    *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6),
    *(32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)


def _phi4_mini() -> _Values:
    """Abouelenin et al. 2025; its window of 262,144 is longer than its longest row."""
    sizes = _sizes(32, 3072, 24, 8192, kv_heads=8)
    stretched = {"rope_scaling": "longrope", "rope_factor": 32.0, "rope_original_length": 4096}
    stretched |= {"rope_short_factors": [1.0] * 48, "rope_long_factors": list(_PHI4_MINI_FACTORS)}
    return _llama(sizes, vocab=200064, tied=True) | stretched | {"rope_fraction": 0.75}


def _gemma(sizes: _Values, *, head_dim: int, vocab: int, window: int, interval: int, scale: float) -> _Values:
    """Gemma team 2024, 2025; scores are divided by the root of `scale`."""
    form = {"head_dim": head_dim, "norm_epsilon": 1e-6, "norm_zero_centered": True, "block_norm": "both"}
    form |= {"activation": "geglu_tanh", "embedding_multiplier": sizes["hidden_size"] ** 0.5}
    form |= {"window": window, "window_interval": interval, "attention_scale": scale**-0.5}
    return _llama(sizes, vocab=vocab, tied=True) | form


def _gemma2(sizes: _Values, *, head_dim: int = 256, scale: float = 256) -> _Values:
    gemma = _gemma(sizes, head_dim=head_dim, vocab=256000, window=4096, interval=2, scale=scale)
    return gemma | {"attention_softcap": 50.0, "logit_softcap": 30.0}


def _gemma3(sizes: _Values, *, head_dim: int = 256, scale: float = 256, small: bool = False) -> _Values:
    vocab, window = (262144, 512) if small else (262208, 1024)
    gemma = _gemma(sizes, head_dim=head_dim, vocab=vocab, window=window, interval=6, scale=scale)
    gemma |= {"qk_norm": True, "rope_theta": 1e6, "rope_window_theta": 1e4}
    return gemma if small else gemma | {"rope_scaling": "linear", "rope_factor": 8.0}


def _granite(sizes: _Values, *, scale: float, logits: float) -> _Values:
    """IBM 2024; scores are multiplied by `scale`, logits by `logits`."""
    form = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_scale": scale, "logit_scale": logits}
    return _llama(sizes | {"num_kv_heads": 8}, vocab=49155, tied=True) | form


def _pythia(layers: int, hidden: int, heads: int, *, vocab: int = 50304) -> _Values:
    """Biderman et al. 2023."""
    form: _Values = {
        "family": "gpt_neox",
        "vocab_size": vocab,
        "position": "rope",
        "rope_fraction": 0.25,
        "norm": "layernorm",
        "bias": True,
    }
    form |= {"activation": "gelu_erf", "tie_embeddings": False, "max_position": 2048}
    return _sizes(layers, hidden, heads, 4 * hidden) | form


def _stablelm(layers: int, hidden: int, ffn: int, *, vocab: int = 100352, kv_heads: int = 32) -> _Values:
    """Bellagente et al. 2024; only the largest has a parallel residual."""
    form: _Values = {"family": "gpt_neox", "norm": "layernorm", "rope_fraction": 0.25, "vocab_size": vocab}
    form |= {"activation": "swiglu", "tie_embeddings": False, "gpt_neox": {"parallel_residual": False}}
    return _sizes(layers, hidden, 32, ffn, kv_heads) | form


def _cohere(sizes: _Values, *, theta: float, scale: float = 0.0625) -> _Values:
    """Cohere 2024; logits are multiplied by `scale`."""
    form: _Values = {"family": "gpt_neox", "norm": "layernorm", "norm_bias": False, "rope_interleaved": True}
    form |= {"gpt_neox": {"parallel_residual": True, "shared_norm": True}, "logit_scale": scale}
    return _llama(sizes, vocab=256000, theta=theta, tied=True) | form


def _bert(layers: int, hidden: int, heads: int) -> _Values:
    """Devlin et al. 2019."""
    form: _Values = {"family": "bert", "vocab_size": 30522, "max_position": 512, "position": "learned"}
    form |= {"norm": "layernorm", "norm_epsilon": 1e-12, "activation": "gelu_erf", "bias": True}
    return _sizes(layers, hidden, heads, 4 * hidden) | form | {"tie_embeddings": True, "bert": {"norm": "post"}}


def _megatron_bert(layers: int, hidden: int, heads: int) -> _Values:
    """Shoeybi et al. 2019; the vocabulary is that of cased text with its padding, as published."""
    form = {"vocab_size": 29056, "norm_epsilon": 1e-5, "bert": {"norm": "pre"}}
    return _bert(layers, hidden, heads) | form


def _t5(layers: int, hidden: int, heads: int, ffn: int, *, head_dim: int = 64, gated: bool = False) -> _Values:
    """Raffel et al. 2020; v1.1 has gates and a head of its own. Scores are not divided: the first weights are."""
    form: _Values = {"family": "t5", "position": "relative", "norm": "rmsnorm", "norm_epsilon": 1e-6, "bias": False}
    form |= {"head_dim": head_dim, "attention_scale": 1.0, "vocab_size": 32128, "t5": {"init": "sizes"}}
    if gated:
        form |= {"activation": "geglu_tanh", "tie_embeddings": False}
    else:
        form |= {"activation": "relu", "tie_embeddings": True, "logit_scale": hidden**-0.5}
    return _sizes(2 * layers, hidden, heads, ffn) | form


def _mt5(layers: int, hidden: int, heads: int, ffn: int) -> _Values:
    """Xue et al. 2021."""
    return _t5(layers, hidden, heads, ffn, gated=True) | {"vocab_size": 250112}


def _mamba2(layers: int, hidden: int) -> _Values:
    """Dao and Gu 2024; num_heads is of attention, which it does not have."""
    form: _Values = {"family": "mamba", "position": "none", "norm": "rmsnorm", "norm_epsilon": 1e-5, "bias": False}
    form |= {"num_layers": layers, "hidden_size": hidden, "num_heads": 1, "vocab_size": 50288, "tie_embeddings": True}
    return form | {"mamba": {"num_groups": 1, "chunk_size": 256}}


def _nemotron_h(pattern: str) -> _Values:
    """NVIDIA 2025: mixers, MLPs and few layers of attention without positions."""
    form: _Values = {"family": "mamba", "position": "none", "norm": "rmsnorm", "norm_epsilon": 1e-5, "bias": False}
    form |= {"activation": "squared_relu", "vocab_size": 131072, "tie_embeddings": False, "head_dim": 128}
    return _sizes(len(pattern), 4096, 32, 21504, kv_heads=8) | form | {"mamba": {"pattern": pattern, "num_groups": 8}}


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt2": _gpt(12, 768, 12, length=1024),
        "gpt2-medium": _gpt(24, 1024, 16, length=1024),
        "gpt2-large": _gpt(36, 1280, 20, length=1024),
        "gpt2-xl": _gpt(48, 1600, 25, length=1024),
        "megatron-345m": _gpt(24, 1024, 16, length=1024),
        "gpt3-175b": _gpt(96, 12288, 96, length=2048),
        "llama2-7b": _llama(_sizes(32, 4096, 32, 11008), vocab=32000),
        "llama2-13b": _llama(_sizes(40, 5120, 40, 13824), vocab=32000),
        "llama2-70b": _llama(_sizes(80, 8192, 64, 28672, kv_heads=8), vocab=32000),
        "llama3-8b": _llama(_sizes(32, 4096, 32, 14336, kv_heads=8), vocab=128256, theta=5e5),
        "llama3-70b": _llama(_sizes(80, 8192, 64, 28672, kv_heads=8), vocab=128256, theta=5e5),
        "llama3.2-1b": _llama32(_sizes(16, 2048, 32, 8192, kv_heads=8)),
        "llama3.2-3b": _llama32(_sizes(28, 3072, 24, 8192, kv_heads=8)),
        "mistral-7b": _llama(_sizes(32, 4096, 32, 14336, kv_heads=8), vocab=32000) | {"window": 4096},
        "qwen2-0.5b": _qwen2(_sizes(24, 896, 14, 4864, kv_heads=2), tied=True),
        "qwen2-1.5b": _qwen2(_sizes(28, 1536, 12, 8960, kv_heads=2), tied=True),
        "qwen2-7b": _qwen2(_sizes(28, 3584, 28, 18944, kv_heads=4), vocab=152064),
        "qwen2-72b": _qwen2(_sizes(80, 8192, 64, 29568, kv_heads=8), vocab=152064),
        "qwen3-0.6b": _qwen3(_sizes(28, 1024, 16, 3072), tied=True),
        "qwen3-1.7b": _qwen3(_sizes(28, 2048, 16, 6144), tied=True),
        "qwen3-4b": _qwen3(_sizes(36, 2560, 32, 9728), tied=True),
        "qwen3-8b": _qwen3(_sizes(36, 4096, 32, 12288)),
        "qwen3-14b": _qwen3(_sizes(40, 5120, 40, 17408)),
        "qwen3-32b": _qwen3(_sizes(64, 5120, 64, 25600)),
        "qwen1.5-moe-a2.7b": _qwen2(_sizes(24, 2048, 16, 5632))
        | {
            "moe": {
                "num_experts": 60,
                "top_k": 4,
                "ffn_hidden_size": 1408,
                "normalize_weights": False,
                "balance_factor": 0.001,
                "shared_ffn_hidden_size": 5632,
                "shared_gate": True,
            }
        },
        "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, expert=768),
        "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12288, expert=1536),
        "mixtral-8x7b": _mixtral(_sizes(32, 4096, 32, 14336)),
        "mixtral-8x22b": _mixtral(_sizes(56, 6144, 48, 16384)) | {"vocab_size": 32768},
        "olmoe-1b-7b": _llama(_sizes(16, 2048, 16, 1024), vocab=50304)
        | {
            "qk_norm": "all_heads",
            "moe": {
                "num_experts": 64,
                "top_k": 8,
                "ffn_hidden_size": 1024,
                "normalize_weights": False,
                "balance_factor": 0.01,
                "z_loss_factor": 0.001,
            },
        },
        "olmo2-1b": _olmo2(_sizes(16, 2048, 16, 8192)),
        "olmo2-7b": _olmo2(_sizes(32, 4096, 32, 11008)),
        "olmo2-13b": _olmo2(_sizes(40, 5120, 40, 13824)),
        "olmo2-32b": _olmo2(_sizes(64, 5120, 40, 27648, kv_heads=8)),
        "olmo3-7b": _olmo3(_sizes(32, 4096, 32, 11008)),
        "olmo3-32b": _olmo3(_sizes(64, 5120, 40, 27648, kv_heads=8)),
        "smollm3-3b": _llama(_sizes(36, 2048, 16, 11008, kv_heads=4), vocab=128256, theta=5e6, tied=True)
        | {"norm_epsilon": 1e-6, "rope_interval": 4},
        "phi3-mini": _phi(_sizes(32, 3072, 32, 8192)),
        "phi3-medium": _phi(_sizes(40, 5120, 40, 17920, kv_heads=10)),
        "phi4": _phi(_sizes(40, 5120, 40, 17920, kv_heads=10), vocab=100352, theta=250000.0, window=0),
        "phi4-mini": _phi4_mini(),
        "gemma2-2b": _gemma2(_sizes(26, 2304, 8, 9216, kv_heads=4)),
        "gemma2-9b": _gemma2(_sizes(42, 3584, 16, 14336, kv_heads=8)),
        "gemma2-27b": _gemma2(_sizes(46, 4608, 32, 36864, kv_heads=16), head_dim=128, scale=144),
        "gemma3-270m": _gemma3(_sizes(18, 640, 4, 2048, kv_heads=1), small=True),
        "gemma3-1b": _gemma3(_sizes(26, 1152, 4, 6912, kv_heads=1), small=True),
        "gemma3-4b": _gemma3(_sizes(34, 2560, 8, 10240, kv_heads=4)),
        "gemma3-12b": _gemma3(_sizes(48, 3840, 16, 15360, kv_heads=8)),
        "gemma3-27b": _gemma3(_sizes(62, 5376, 32, 21504, kv_heads=16), head_dim=128, scale=168),
        "deepseek-v2-lite": _deepseek(
            _sizes(27, 2048, 16, 10944),
            q_lora_rank=None,
            mscale=0.707,
            vocab=102400,
            moe={
                "num_experts": 64,
                "top_k": 6,
                "ffn_hidden_size": 1408,
                "shared_ffn_hidden_size": 2816,
                "layers": [0] + [1] * 26,
                "normalize_weights": False,
                "balance_factor": 0.001,
            },
        ),
        "deepseek-v3": _deepseek(
            _sizes(61, 7168, 128, 18432),
            q_lora_rank=1536,
            mscale=1.0,
            vocab=129280,
            moe={
                "num_experts": 256,
                "top_k": 8,
                "ffn_hidden_size": 2048,
                "shared_ffn_hidden_size": 2048,
                "layers": [0] * 3 + [1] * 58,
                "score": "sigmoid",
                "expert_bias": True,
                "weight_scale": 2.5,
                "groups": 8,
                "groups_per_token": 4,
                "balance_factor": 1e-4,
            },
        )
        | {"mtp": {"num_layers": 1, "loss_factor": 0.3}},
        "granite3-2b": _granite(_sizes(40, 2048, 32, 8192), scale=0.015625, logits=0.125),
        "granite3-8b": _granite(_sizes(40, 4096, 32, 12800), scale=0.0078125, logits=0.0625),
        "pythia-160m": _pythia(12, 768, 12),
        "pythia-410m": _pythia(24, 1024, 16),
        "pythia-1.4b": _pythia(24, 2048, 16),
        "pythia-6.9b": _pythia(32, 4096, 32, vocab=50432),
        "stablelm-3b": _stablelm(32, 2560, 6912, vocab=50304),
        "stablelm2-1.6b": _stablelm(24, 2048, 5632) | {"bias": "qkv"},
        "stablelm2-12b": _stablelm(40, 5120, 13824, kv_heads=8)
        | {"qk_norm": "own_head", "gpt_neox": {"parallel_residual": True, "shared_norm": True}},
        "aya-8b": _cohere(_sizes(32, 4096, 32, 14336, kv_heads=8), theta=10000.0),
        "command-r": _cohere(_sizes(40, 8192, 64, 22528), theta=8e6),
        "command-r7b": _cohere(_sizes(32, 4096, 32, 14336, kv_heads=8), theta=50000.0, scale=0.25)
        | {"window": 4096, "window_interval": 4, "rope_interval": 4},
        "bert-base": _bert(12, 768, 12),
        "bert-large": _bert(24, 1024, 16),
        "megatron-bert-345m": _megatron_bert(24, 1024, 16),
        "megatron-bert-1.3b": _megatron_bert(24, 2048, 32),
        "t5-small": _t5(6, 512, 8, 2048),
        "t5-base": _t5(12, 768, 12, 3072),
        "t5-large": _t5(24, 1024, 16, 4096),
        "t5-3b": _t5(24, 1024, 32, 16384, head_dim=128),
        "t5-v1.1-small": _t5(8, 512, 6, 1024, gated=True),
        "t5-v1.1-base": _t5(12, 768, 12, 2048, gated=True),
        "t5-v1.1-large": _t5(24, 1024, 16, 2816, gated=True),
        "t5-v1.1-xl": _t5(24, 2048, 32, 5120, gated=True),
        "mt5-small": _mt5(8, 512, 6, 1024),
        "mt5-base": _mt5(12, 768, 12, 2048),
        "mt5-large": _mt5(24, 1024, 16, 2816),
        "mt5-xl": _mt5(24, 2048, 32, 5120),
        "megatron-t5-220m": _gpt(24, 768, 12, length=512)
        | {"family": "t5", "activation": "gelu", "vocab_size": 30624, "t5": {"head_bias": True}},
        "mamba2-130m": _mamba2(24, 768),
        "mamba2-370m": _mamba2(48, 1024),
        "mamba2-780m": _mamba2(48, 1536),
        "mamba2-1.3b": _mamba2(48, 2048),
        "mamba2-2.7b": _mamba2(64, 2560),
        "nemotron-h-8b": _nemotron_h("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
    }
)


def presets_like(name: str) -> str | None:
    """The presets that an unknown name may mean, as a text: one that is spelt alike, or some of the same models.

    Sizes alone resemble each other, too: gpt2-small is rather gpt2 than t5-small.
    """
    import difflib

    name = name.lower().replace("_", "-")
    if close := difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.85):
        return close[0]
    for size in ("-.*", "[^A-Za-z].*"):  # of gpt2-small, what follows gpt2, then what follows gpt
        series = re.sub(size, "", name)
        same = [preset for preset in PRESETS if re.sub(size, "", preset) == series]
        if close := difflib.get_close_matches(name, same, n=4, cutoff=0):
            *others, last = (preset for preset in same if preset in close)
            return f"{', '.join(others)} or {last}" if others else last
    return nearest(name, PRESETS)
