"""Small models of transformers with random weights and a tokenizer, saved as its users save them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

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
NEMOTRON = {name: size for name, size in SIZES.items() if name not in ("num_hidden_layers", "rms_norm_eps")}
PHI4 = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
PHI4 |= {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.5, 8.0]}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5, "num_hidden_layers": 3}
GEMMA3 = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
GEMMA3 |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
OLMO3 = {"full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}
OLMO3["full_attention"] |= {"original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
OLMO3 |= {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 13.0, "residual_multiplier": 0.22}
GRANITE |= {"attention_multiplier": 0.4, "tie_word_embeddings": True}
T5 = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "n_positions": 64}
T5 |= {"pad_token_id": 0, "eos_token_id": 256, "decoder_start_token_id": 0}
TWO_STACKS = ("t5", "t5_v1.1", "mt5")  # which read one text and write another
NAMES = ("gpt2", "llama2", "llama3", "mistral", "qwen2", "qwen3", "gpt_neox")
NAMES += ("stablelm", "stablelm2", "cohere", "cohere2")
NAMES += ("olmo2", "olmo3", "smollm3", "phi3", "phi4", "gemma2", "gemma3", "granite")
NAMES += ("qwen2_moe", "mamba2")
HYBRIDS = ("nemotron_h", "nemotron_moe", "bamba")
OTHER_EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
OTHER_EXPERTS += ("deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_dense")
LATENT = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
LATENT |= {"num_hidden_layers": 3, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENT |= {"v_head_dim": 6, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 16}
LATENT |= {"num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4}
GPT_OSS_ROPE = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
GPT_OSS_ROPE |= {"truncate": False, "original_max_position_embeddings": 16}
MAMBA2 = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 6}
MAMBA2 |= {"n_groups": 2, "chunk_size": 8, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
MIXERS = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 8}
MIXERS |= {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "time_step_min": 1e-30}
NEMOTRON_EXPERTS = {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 8}
NEMOTRON_EXPERTS |= {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16}
NEMOTRON_EXPERTS |= {"moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 2.5}
BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}
BAMBA |= {"attn_layer_indices": [1], "time_step_limit": (0.01, 5.0)}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}


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
        "olmo2": lambda: transformers.Olmo2Config(**SIZES | changes),
        "olmo3": lambda: transformers.Olmo3Config(
            **SIZES | {"num_hidden_layers": 5, "sliding_window": 5, "rope_parameters": OLMO3} | changes
        ),
        "smollm3": lambda: transformers.SmolLM3Config(**SIZES | {"no_rope_layer_interval": 2} | changes),
        "phi3": lambda: transformers.Phi3Config(**SIZES | {"sliding_window": 5} | changes),
        "phi4": lambda: transformers.Phi3Config(
            **SIZES | {"original_max_position_embeddings": 16, "rope_parameters": PHI4} | changes
        ),
        "gemma2": lambda: transformers.Gemma2Config(
            **SIZES | GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0} | changes
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **SIZES
            | GEMMA
            | {"layer_types": ["sliding_attention", "full_attention"] * 2}
            | {"num_hidden_layers": 4}
            | {"rope_parameters": GEMMA3}
            | changes
        ),
        "mixtral": lambda: transformers.MixtralConfig(**SIZES | {"num_local_experts": 4} | changes),
        "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
            **SIZES
            | {"num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
            | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
            | changes
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **SIZES
            | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
            | {"norm_topk_prob": True}
            | changes
        ),
        "olmoe": lambda: transformers.OlmoeConfig(
            **SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24} | changes
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **SIZES
            | {"head_dim": 8, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 3}
            | {"sliding_window": 5, "swiglu_limit": 1.0, "rope_parameters": GPT_OSS_ROPE}
            | changes
        ),
        "deepseek_v2": lambda: transformers.DeepseekV2Config(
            **LATENT | {"q_lora_rank": None, "routed_scaling_factor": 1.5} | changes
        ),
        "deepseek_v2_groups": lambda: transformers.DeepseekV2Config(
            **LATENT
            | {"num_experts_per_tok": 3, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
            | changes
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **LATENT
            | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN, "num_mtp_layers": 0}  # as it is saved
            | changes
        ),
        "deepseek_dense": lambda: transformers.DeepseekV3Config(
            **LATENT
            | {"first_k_dense_replace": 3, "rope_interleave": False, "tie_word_embeddings": True, "num_mtp_layers": 0}
            | changes
        ),
        "granite": lambda: transformers.GraniteConfig(**SIZES | GRANITE | changes),
        "stablelm": lambda: transformers.StableLmConfig(**SIZES | {"partial_rotary_factor": 0.5} | changes),
        "stablelm2": lambda: transformers.StableLmConfig(
            **SIZES | {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True} | changes
        ),
        "cohere": lambda: transformers.CohereConfig(**SIZES | {"use_qk_norm": True} | changes),
        "cohere2": lambda: transformers.Cohere2Config(
            **SIZES | {"num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 2} | changes
        ),
        "mamba2": lambda: transformers.Mamba2Config(**MAMBA2 | changes),
        "nemotron_h": lambda: transformers.NemotronHConfig(**NEMOTRON | MIXERS | changes),
        "nemotron_moe": lambda: transformers.NemotronHConfig(**NEMOTRON | MIXERS | NEMOTRON_EXPERTS | changes),
        "bamba": lambda: transformers.BambaConfig(**SIZES | BAMBA | changes),
        "t5": lambda: transformers.T5Config(**T5 | changes),
        "t5_v1.1": lambda: transformers.T5Config(
            **T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3} | changes
        ),
        "mt5": lambda: transformers.MT5Config(**T5 | {"feed_forward_proj": "gated-gelu"} | changes),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**NEOX | {"rotary_pct": 0.5} | changes),
    }[name]()


def save(name: str, folder: Path, *, dtype=torch.float32, shard="1GB", tokens=True, **changes) -> Path:
    """Weights far from an initialization, so that every term matters."""
    import transformers

    torch.manual_seed(len(name))
    made = config(name, **changes)
    opens = transformers.AutoModelForSeq2SeqLM if name in TWO_STACKS else transformers.AutoModelForCausalLM
    model = opens.from_config(made)
    if name in TWO_STACKS[1:]:  # transformers ties them whatever the configuration says
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
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


# The kind of tokenizer that each family is published with: the class that its tokenizer_config.json names.
TOKENIZERS = {
    "gemma2": "GemmaTokenizer", "gemma3": "GemmaTokenizer", "phi3": "LlamaTokenizer", "phi4": "GPT2Tokenizer",
    "olmo2": "GPT2Tokenizer", "olmo3": "GPT2Tokenizer", "smollm3": "PreTrainedTokenizerFast",
    "gpt_neox": "GPTNeoXTokenizer", "stablelm": "GPTNeoXTokenizer", "stablelm2": "GPT2Tokenizer",
    "granite": "GPT2Tokenizer", "cohere": "CohereTokenizer", "cohere2": "CohereTokenizer",
}  # fmt: skip
_WORDS = Regex(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def save_tokenizer_of(name: str, folder: Path) -> None:
    """A tokenizer of the kind that a family is published with, of fewer than 300 ids and some merges."""
    kind = TOKENIZERS[name]
    folder.mkdir(exist_ok=True)
    if kind in ("GemmaTokenizer", "LlamaTokenizer"):
        tokenizer, ends = _with_byte_fallback(starts_with_space=kind == "LlamaTokenizer")
    else:
        tokenizer, ends = _of_bytes(kind)
    if kind in ("GemmaTokenizer", "LlamaTokenizer", "CohereTokenizer"):
        begin = ends["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**ends, "tokenizer_class": kind}))


def _with_byte_fallback(*, starts_with_space: bool) -> tuple[Tokenizer, dict[str, str]]:
    """SentencePiece's BPE as tokenizer.json has it: spaces are letters, what is no piece is bytes."""
    ends = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"thean", "th", "the", "\u2581the", "an", "\u2581an"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("a", "n"), ("\u2581", "an")]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(numbers, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if starts_with_space else spaces
    )
    if not starts_with_space:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [decoders.Strip(" ", 1, 0)] if starts_with_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([*ends.values()])
    return tokenizer, ends


def _of_bytes(kind: str) -> tuple[Tokenizer, dict[str, str]]:
    """Byte-level BPE; with the normalizer and the cuts of its kind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "th", "the", "\u0120the", "12"]
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("1", "2")]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "PreTrainedTokenizerFast")
    if kind in ("GPTNeoXTokenizer", "CohereTokenizer"):
        tokenizer.normalizer = normalizers.NFC()
    first = {"PreTrainedTokenizerFast": pre_tokenizers.Split(_WORDS, "isolated"),
             "CohereTokenizer": pre_tokenizers.Digits(individual_digits=True)}.get(kind)  # fmt: skip
    tokenizer.pre_tokenizer = of_bytes if first is None else pre_tokenizers.Sequence([first, of_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"eos_token": "<|endoftext|>", "bos_token": "<BOS_TOKEN>" if kind == "CohereTokenizer" else "<|endoftext|>"}
    tokenizer.add_special_tokens(sorted(set(ends.values())))
    return tokenizer, ends
