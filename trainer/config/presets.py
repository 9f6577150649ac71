"""Published models by name, as keys of the [model] section. Keys in a run's file override those of its preset.

Numbers are those of the models' papers and of the configurations beside their published weights. Dropout is 0: models
of this size see their data about once.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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
        "pythia-160m": _pythia(12, 768, 12),
        "pythia-410m": _pythia(24, 1024, 16),
        "pythia-1.4b": _pythia(24, 2048, 16),
        "pythia-6.9b": _pythia(32, 4096, 32, vocab=50432),
    }
)
