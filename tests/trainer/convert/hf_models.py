"""Small models of transformers with random weights and a tokenizer, saved as its users save them."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": None, "eos_token_id": 256}
NEOX = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "rms_norm_eps")}
NAMES = ("gpt2", "llama2", "llama3", "mistral", "qwen2", "qwen3", "gpt_neox")


def config(name, **changes):
    """A tiny configuration of a family."""
    import transformers

    return {
        "gpt2": lambda: transformers.GPT2Config(**GPT2 | changes),
        "llama2": lambda: transformers.LlamaConfig(**SIZES | changes),
        "llama3": lambda: transformers.LlamaConfig(
            **SIZES | {"rope_parameters": LLAMA3, "tie_word_embeddings": True} | changes
        ),
        "mistral": lambda: transformers.MistralConfig(**SIZES | {"sliding_window": 5} | changes),
        "qwen2": lambda: transformers.Qwen2Config(**SIZES | changes),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES | {"head_dim": 16, "tie_word_embeddings": True} | changes),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**NEOX | {"rotary_pct": 0.5} | changes),
    }[name]()


def save(name: str, folder: Path, *, dtype=torch.float32, shard="1GB", tokens=True, **changes) -> Path:
    """Weights far from an initialization, so that every term matters."""
    import transformers

    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    if tokens:
        save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, more: int = 0) -> None:
    """One id for each byte, and the end of a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", *(f"<|{i}|>" for i in range(more))])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
