"""The configuration of a run: one frozen tree of dataclasses, one class per section.

The range of a field is in its type (`Annotated[int, Range(1)]`), and its comment is its documentation: `mtrain config`
prints both. A key that is not set is None, and its comment says after "not set:" what then applies; files before 0.1
have 0 or "" there, which is read as None unless 0 is a value of the key. Derived numbers are in `plan.Plan`, and rules
between sections in `plan/check.py`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal

ABOVE_0 = math.ulp(0.0)  # the smallest number above 0, as the lower end of a range
ABOVE_1 = math.nextafter(1, 2)  # as the upper end of a range that contains 1


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a number may have: low <= value < below."""

    low: float
    below: float = math.inf

    def __str__(self) -> str:
        end = " and <= 1" if self.below == ABOVE_1 else "" if self.below == math.inf else f" and < {self.below:g}"
        return f"> 0{end}" if self.low == ABOVE_0 else f">= {self.low:g}{end}"


Preset = Literal[
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "megatron-345m",
    "gpt3-175b",
    "llama2-7b",
    "llama2-13b",
    "llama2-70b",
    "llama3-8b",
    "llama3-70b",
    "llama3.2-1b",
    "llama3.2-3b",
    "mistral-7b",
    "qwen2-0.5b",
    "qwen2-1.5b",
    "qwen2-7b",
    "qwen2-72b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen1.5-moe-a2.7b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "olmoe-1b-7b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "olmo2-1b",
    "olmo2-7b",
    "olmo2-13b",
    "olmo2-32b",
    "olmo3-7b",
    "olmo3-32b",
    "smollm3-3b",
    "phi3-mini",
    "phi3-medium",
    "phi4",
    "phi4-mini",
    "gemma2-2b",
    "gemma2-9b",
    "gemma2-27b",
    "gemma3-270m",
    "gemma3-1b",
    "gemma3-4b",
    "gemma3-12b",
    "gemma3-27b",
    "granite3-2b",
    "granite3-8b",
    "pythia-160m",
    "pythia-410m",
    "pythia-1.4b",
    "pythia-6.9b",
    "stablelm-3b",
    "stablelm2-1.6b",
    "stablelm2-12b",
    "aya-8b",
    "command-r",
    "command-r7b",
    "bert-base",
    "bert-large",
    "megatron-bert-345m",
    "megatron-bert-1.3b",
    "t5-small",
    "t5-base",
    "t5-large",
    "t5-3b",
    "t5-v1.1-small",
    "t5-v1.1-base",
    "t5-v1.1-large",
    "t5-v1.1-xl",
    "mt5-small",
    "mt5-base",
    "mt5-large",
    "mt5-xl",
    "megatron-t5-220m",
    "mamba2-130m",
    "mamba2-370m",
    "mamba2-780m",
    "mamba2-1.3b",
    "mamba2-2.7b",
    "nemotron-h-8b",
]  # those of presets.py
FamilyName = Literal["gpt", "gpt_neox", "bert", "t5", "mamba"]  # each a room, trainer/models/NAME/
DataKind = Literal["gpt", "document", "packed", "chat", "pairs", "fim", "bert", "t5", "classify"]
# Those whose labels are the next tokens.
TEXT_KINDS: tuple[DataKind, ...] = ("gpt", "document", "packed", "chat", "pairs", "fim")
Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Amount = Annotated[float, Range(0)]
PositiveAmount = Annotated[float, Range(ABOVE_0)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, ABOVE_1)]
PositiveFraction = Annotated[float, Range(ABOVE_0, 1)]
Small = Annotated[float, Range(1e-30, 1)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    """The run's folder, its random seed, its log, when it ends early, and whether its kernels are reproducible."""

    folder: str  # run folder; created if missing
    seed: Count = 1234  # seed of the initial weights and of the data order
    deterministic: bool = False  # bitwise reproducible kernels, on GPUs too, where some are slower
    exit_at: str | None = (
        None  # "2026-11-26 18:00", local or with an offset: the run ends then, with a checkpoint and exit code 75; not
        # set: only before the time limit of a Slurm job
    )
    exit_after: PositiveAmount | None = (
        None  # minutes from each start after which the run ends in the same way; not set: no limit
    )
    max_restarts: Count | None = (
        None  # consecutive restarts without progress before the next is refused; not set: no limit
    )
    join_minutes: PositiveAmount = (
        5.0  # how long ranks wait for each other at the start before all end; from the 40th second on, notes name the
        # missing ones
    )
    on_lost_node: Literal["stop", "wait", "shrink"] | None = (
        None  # what a job does when restarted with fewer ranks; shrink: use a layout for them that keeps the global
        # batch; not set: continues if the layout fits them
    )
    log_interval: Positive = 1  # steps between lines in the log and in metrics.jsonl
    log_format: Literal["text", "json"] = "text"  # format of the log without a terminal
    log_params_norm: bool = False  # log the norm of all parameters after the step to metrics.jsonl
    log_num_zeros: bool = False  # log the number of zeros in the gradients to metrics.jsonl
    profile: tuple[int, ...] = ()  # [first, last] step for PyTorch's profiler, which writes traces to profile/
    profile_ranks: tuple[int, ...] = (0,)  # ranks to profile, one trace each
    health: Literal["warn", "stop", "off"] = (
        "warn"  # checks every rank before the first step: devices, rates, clocks, versions; stop: ends the run
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoESection:
    """Mixture of experts, for models of family gpt: layers whose MLP is replaced by experts, a few for each token."""

    num_experts: Positive = 8  # experts of a layer
    top_k: Positive = 2  # experts that compute a token
    ffn_hidden_size: Positive | None = None  # hidden size of an expert; not set: derived from model.ffn_hidden_size
    interval: Positive = 1  # every k-th layer has experts, from the first on; the others have an MLP
    layers: tuple[Annotated[int, Range(0, 2)], ...] = ()  # by hand: 1 for a layer with experts, 0 for one with an MLP
    score: Literal["softmax", "sigmoid"] = "softmax"  # of an expert for a token, from the router's logits, in fp32
    normalize_weights: bool = True  # weights of a token's experts add up to 1; with sigmoid only if there are several
    weight_scale: PositiveAmount | None = None  # factor of these weights; not set: 1
    groups: Positive | None = None  # groups of neighbouring experts, of which a token uses a few; not set: 1
    groups_per_token: Positive | None = (
        None  # groups that a token uses, those with the largest sums of their best top_k / groups_per_token scores; not
        # set: all
    )
    group_score: Literal["sum", "max"] = "sum"  # how groups are scored; max: by their best, as in DeepSeek-V2
    expert_bias: bool = False  # sigmoid: a bias of each expert, for the choice only, balances their load
    expert_bias_rate: Amount = 1e-3  # by how much it changes in a step
    balance: Literal["sequence", "microbatch", "none"] = (
        "sequence"  # loss that balances experts, over each row; microbatch: as in Megatron, depends on micro_batch
    )
    balance_factor: Amount = 0.01  # its factor; 0: off
    z_loss_factor: Amount = 0.0  # factor of the loss that keeps the router's logits small; 0: off
    capacity_factor: PositiveAmount | None = (
        None  # an expert computes at most this times its equal share of the tokens, and drops the rest; not set: all
    )
    capacity_of: Literal["row", "microbatch"] = "row"  # tokens that share a capacity; microbatch: as in Megatron
    drop: Literal["weight", "position"] = "weight"  # which are dropped: those of least weight, or the last
    shared_ffn_hidden_size: Positive | None = None  # hidden size of an expert that computes every token; not set: none
    shared_gate: bool = False  # its output is multiplied by a sigmoid of the token


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GPTNeoXSection:
    """Further keys of [model] for family gpt_neox."""

    parallel_residual: bool = True  # attention and MLP read the same sum; false: the MLP reads what attention added to
    shared_norm: bool = False  # attention and MLP share one norm, as in Cohere


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MLASection:
    """Multi-head latent attention, as in DeepSeek-V2 and V3: keys and values are made of one small latent per token."""

    q_lora_rank: Positive | None = None  # size of the latent of queries; not set: they are made of the hidden state
    kv_lora_rank: Positive  # size of the latent of keys and values, which generation keeps in their place
    qk_nope_head_dim: Positive  # features of a query's or key's head that are not rotated
    qk_rope_head_dim: Positive  # features that are; those of keys are shared by all heads
    v_head_dim: Positive  # size of a value's head
    mscale: Amount = 1.0  # yarn: rotated features are multiplied by (0.1 mscale ln factor + 1) / the same of all_dim
    mscale_all_dim: Amount = 0.0  # yarn: attention scores are multiplied by (0.1 mscale_all_dim ln factor + 1)^2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MTPSection:
    """Multi-token prediction, as in DeepSeek-V3: further layers that are trained to predict later tokens."""

    num_layers: Positive  # further layers behind each other, one for each later token
    loss_factor: PositiveAmount = 0.1  # of the mean of their losses, beside that of the next token


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BertSection:
    """Further keys of [model] for family bert."""

    norm: Literal["pre", "post"] = (
        "pre"  # pre: normalize the inputs of layers and the final output, as in Megatron; post: every residual sum and
        # the embedding, as in the original BERT
    )
    binary_head: bool = True  # a head on the first token says whether the second text of a row follows the first
    token_types: Count | None = (
        None  # number of token type embeddings; 0: none; not set: 2 with binary_head, otherwise 0
    )
    head_activation: Literal["gelu", "gelu_erf"] | None = (
        None  # nonlinearity before the output logits; Megatron always uses gelu_erf; not set: that of the layers
    )
    task: Literal["masked", "classify", "choice"] = (
        "masked"  # what the head predicts: masked tokens; the class of a row (classify), from its first token; or which
        # of several rows is right (choice)
    )
    labels: tuple[str, ...] = ()  # classify: the names of the classes, in the order of their numbers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class T5Section:
    """Further keys of [model] for family t5, where num_layers counts the layers of both stacks."""

    encoder_layers: Positive | None = None  # encoder layers, the first of model.num_layers; not set: half of them
    relative_buckets: Annotated[int, Range(4)] = 32  # learned biases per head, for model.position = "relative"
    relative_distance: Annotated[int, Range(2)] = 128  # tokens; larger distances share one bias
    start_token: Annotated[int, Range(-1)] = -1  # id that starts the decoder's sequence; -1: the tokenizer's
    head_bias: bool = False  # the output head has a bias, as in Megatron's T5 with tied embeddings
    init: Literal["normal", "sizes"] = (
        "normal"  # initial weights; sizes: scaled by the sizes of each matrix, as in the original T5
    )


LoRATarget = Literal["q", "k", "v", "out", "gate", "up", "down"]
SavedModule = Literal["embedding", "head"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoRASection:
    """Adapters of low rank (LoRA): they alone are trained, beside the frozen weights of checkpoint.init_from."""

    rank: Positive  # rank of each adapter, the product of two thin matrices
    alpha: PositiveAmount | None = None  # what an adapter adds is multiplied by alpha / rank; not set: 2 x rank
    targets: tuple[
        LoRATarget, ...
    ] = ()  # matrices with an adapter: q, k, v and out of attention, gate, up and down of the MLP; empty: all of them
    modules_to_save: tuple[
        SavedModule, ...
    ] = ()  # layers whose weights are trained as well, and saved with the adapters: embedding, head

    @property
    def scale(self) -> float:
        """Of what an adapter adds."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MambaSection:
    """Further keys of [model] for family mamba, where each layer is a Mamba-2 mixer, attention, an MLP or experts."""

    pattern: str | None = (
        None  # a letter for each layer: M a mixer, * attention, - an MLP, E experts; not set: derived from the ratios
    )
    attention_ratio: Share = 0.0  # share of layers that are attention, evenly between mixers, as Megatron places them
    mlp_ratio: Share = 0.0  # share of layers that are MLPs
    num_heads: Positive | None = None  # heads of a mixer; not set: derived from 2 x hidden_size / head_dim
    head_dim: Positive = 64  # features of a head
    num_groups: Positive = 8  # groups of heads that share B and C
    state_size: Positive = 128  # numbers that a head remembers for each of its features
    conv_kernel: Annotated[int, Range(2)] = 4  # tokens of the convolution's window
    chunk_size: Positive = 128  # tokens that are computed at a time; changes nothing but rounding
    norm_epsilon: Small = 1e-5  # added to the variance in the norm behind the gate
    dt_min: Small = 1e-3  # smallest step of a token at the start of training
    dt_max: PositiveAmount = 0.1  # largest step at the start
    dt_floor: Amount = 1e-4  # no step is smaller at the start
    dt_limit_min: Amount = 0.0  # steps are never smaller
    dt_limit_max: PositiveAmount | None = None  # steps are never larger; not set: no limit


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """The shape of the model; sizes are logical, whatever the layout."""

    family: FamilyName = (
        "gpt"  # kind of model; gpt: decoder only, as GPT-2 and Llama; gpt_neox: the same with a parallel residual;
        # bert: an encoder that predicts masked tokens; t5: encoder and decoder; mamba: Mamba-2, and hybrids of it with
        # attention
    )
    preset: Preset | None = (
        None  # a published model, such as llama2-7b, whose values are used for keys that are not set
    )
    num_layers: Annotated[int, Range(1, 1 << 16)]  # transformer blocks
    hidden_size: Positive  # features of the residual stream
    num_heads: Positive  # query heads
    num_kv_heads: Positive | None = None  # key and value heads; not set: derived from num_heads
    head_dim: Positive | None = None  # size of a head; not set: derived from hidden_size / num_heads
    ffn_hidden_size: Positive | None = (
        None  # hidden size of the MLP; not set: derived from 4 (swiglu: 8/3) x hidden_size
    )
    vocab_size: Positive | None = (
        None  # rows of the embedding, padding not counted; not set: derived from the tokenizer
    )
    max_position: Positive | None = (
        None  # rows of learned positions, in tokens; not set: derived from train.sequence_length
    )
    position: Literal["rope", "learned", "alibi", "relative", "none"] = (
        "rope"  # position encoding; alibi: Press et al. 2022; relative: learned biases of distances, as in T5
    )
    rope_theta: Annotated[float, Range(1)] = 10000.0  # base of the rotary frequencies
    rope_fraction: Annotated[float, Range(0.01, ABOVE_1)] = 1.0  # share of a head's features that are rotated
    rope_interleaved: bool = False  # rotate adjacent pairs (2i, 2i + 1), not pairs half a head apart
    rope_interval: Positive | None = (
        None  # every k-th layer (k, 2k, ...) has no rotary positions; not set: all have them
    )
    rope_scaling: Literal["none", "linear", "ntk", "yarn", "llama3", "longrope"] = (
        "none"  # scaling of rotary frequencies for longer sequences; llama3: as in Llama 3.1; longrope: as in Phi-3
    )
    rope_factor: Annotated[float, Range(1)] = 1.0  # how many times longer sequences may be than rope_original_length
    rope_original_length: Positive | None = (
        None  # tokens of a sequence before rope_scaling; yarn, llama3 and longrope need it
    )
    rope_low_freq_factor: Annotated[float, Range(1e-3)] = 1.0  # llama3: pairs with fewer rotations than this are scaled
    rope_high_freq_factor: Annotated[float, Range(1e-3)] = 4.0  # llama3: pairs with more rotations than this are kept
    rope_beta_fast: Annotated[float, Range(1e-3)] = 32.0  # yarn: pairs with more rotations than this are kept
    rope_beta_slow: Annotated[float, Range(1e-3)] = 1.0  # yarn: pairs with fewer rotations than this are scaled
    rope_truncate: bool = (
        True  # yarn: the range between the two begins and ends at a pair; false, as in gpt-oss: anywhere
    )
    rope_short_factors: tuple[float, ...] = ()  # longrope: factor of each pair for rows up to rope_original_length
    rope_long_factors: tuple[float, ...] = ()  # longrope: factor of each pair for longer rows
    rope_window_theta: Annotated[float, Range(1)] | None = (
        None  # rope_theta of layers with a window, which are then not scaled; not set: as in the other layers
    )
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # normalization in each layer and before the head
    norm_epsilon: Small = 1e-5  # added to the variance
    norm_bias: bool = True  # layernorm: has a bias
    norm_zero_centered: bool = False  # norm weights are stored minus 1, as in Gemma
    block_norm: Literal["input", "output", "both"] = (
        "input"  # where attention and MLP are normalized: input (pre-norm), output (OLMo 2), or both (Gemma 2)
    )
    activation: Literal["swiglu", "geglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_erf", "relu", "squared_relu"] = (
        "swiglu"  # nonlinearity of the MLP; gelu: tanh approximation, as in GPT-2; gelu_erf, geglu: exact; quick_geglu:
        # by sigmoid(1.702 x), as in gpt-oss
    )
    activation_clamp: PositiveAmount | None = (
        None  # gated: largest gate, and largest absolute value of the other factor; not set: no limit
    )
    activation_offset: float = 0.0  # gated: added to the factor beside the gate
    bias: bool | Literal["qkv"] = False  # biases in the linear layers; "qkv": only of queries, keys and values
    qk_norm: bool | Literal["own_head", "all_heads"] = (
        False  # normalizes each head of queries and keys; "own_head": with separate weights per head (StableLM);
        # "all_heads": all heads of a token together (OLMo 2)
    )
    window: Positive | None = None  # sliding window: last tokens that a token attends to, itself included; not set: all
    window_interval: Positive | None = None  # every k-th layer (k, 2k, ...) attends to all tokens; not set: none does
    attention_scale: PositiveAmount | None = (
        None  # factor of attention scores; not set: derived from 1 / sqrt(head_dim)
    )
    attention_softcap: PositiveAmount | None = None  # attention scores are c tanh(score / c); not set: off
    attention_sinks: Literal["none", "zero", "learned"] = (
        "none"  # one more logit in the softmax of attention: 0, or learned for each head
    )
    logit_softcap: PositiveAmount | None = None  # output logits are c tanh(logit / c); not set: off
    logit_scale: PositiveAmount | None = None  # factor of the output logits; not set: 1
    embedding_multiplier: PositiveAmount | None = None  # factor of the embeddings of tokens; not set: 1
    residual_multiplier: PositiveAmount | None = None  # factor of what attention and MLP add; not set: 1
    attention_dropout: Fraction = 0.0  # share of attention weights that are dropped; holds all scores in memory
    hidden_dropout: Fraction = 0.0  # share of dropped features, in the embedding and in what each layer adds
    tie_embeddings: bool = True  # the output head shares the embedding's weights
    init_std: Amount = 0.02  # standard deviation of the initial weights
    moe: MoESection | None = None
    mla: MLASection | None = None
    mtp: MTPSection | None = None
    lora: LoRASection | None = None
    gpt_neox: GPTNeoXSection | None = None
    bert: BertSection | None = None
    t5: T5Section | None = None
    mamba: MambaSection | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeSection:
    """Activation recomputation: trades speed for memory; results are unchanged."""

    mode: Literal["none", "selective", "full"] = (
        "none"  # selective: outputs of norms and of the MLP's nonlinearity; full: whole layers
    )
    method: Literal["uniform", "block"] = (
        "uniform"  # full: recompute chunks of recompute.layers layers, or (block) that many first layers of each stage
    )
    layers: Positive = 1  # full: layers per chunk (uniform), or layers recomputed per stage (block)
    mla_up_proj: bool = False  # latent attention: keys and values of all heads are made of latents again; not with full


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelsSection:
    """Which implementation computes an operation; auto is the fastest that was measured. `mtrain plan` shows them."""

    norm: Literal["auto", "plain", "library", "compiled", "transformer_engine", "apex"] = (
        "auto"  # RMSNorm and LayerNorm with the addition before them
    )
    activation: Literal["auto", "plain", "library", "compiled"] = "auto"  # SwiGLU and the other gates
    rope: Literal["auto", "plain", "compiled"] = "auto"  # rotary positions, and splitting heads into q, k and v
    attention: Literal["auto", "transformer_engine"] = "auto"  # causal attention over whole rows; auto: PyTorch's own
    loss: Literal["auto", "plain", "library", "compiled"] = "auto"  # softmax of the logits, and its gradient
    optimizer: Literal["auto", "plain", "library", "compiled", "apex"] = "auto"  # the update; apex: AdamW only
    scan: Literal["auto", "plain", "triton", "mamba_ssm"] = (
        "auto"  # scan, convolution and norm of Mamba-2 mixers; auto: on a GPU mtrain's Triton kernels or mamba-ssm's
    )
    weight_gradient: Literal["auto", "apex"] = "auto"  # products that are added to the main gradients
    tensor_parallel: Literal["auto"] = "auto"  # no other value: "symmetric_memory" was slower and is gone
    cuda_graphs: Literal["auto", "off", "on"] = (
        "auto"  # launch passes of stages and the update as CUDA graphs, so that GPUs do not wait for the host; auto:
        # where they can be, but not for experts or with mesh.cp
    )
    overlap_passes: Literal["auto", "off", "on"] = (
        "auto"  # on: overlap each forward pass with the previous backward pass, to hide communication
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FimSection:
    """Fill-in-the-middle, for kind fim."""

    rate: Share = 0.5  # share of documents that are rearranged
    spm_rate: Share = 0.5  # share of these that begin with the suffix
    level: Literal["character", "token"] = "character"  # documents are cut between characters or between tokens
    tokens: tuple[int | str, ...] = (
        "<fim_prefix>",
        "<fim_middle>",
        "<fim_suffix>",
    )  # prefix, middle and suffix, or their ids; then pad and eod, unless they are the tokenizer's
    split_sample: str | None = (
        None  # token between parts of a document that are rearranged separately; not set: documents are not divided
    )
    fragment_rate: Annotated[float, Range(ABOVE_0, ABOVE_1)] | None = (
        None  # share of these parts, in a chosen document; set it together with split_sample; not set: off
    )
    no_prefix: str | None = None  # documents that begin with this text are not rearranged; not set: none is exempt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BertSamplesSection:
    """Masked tokens and pairs of texts, for kind bert."""

    head: bool = True  # pairs of texts, for next-sentence prediction; false: one text per row
    short_probability: Share = 0.1  # share of rows that are made shorter than the sequence length
    mask_probability: PositiveFraction = 0.15  # share of tokens that are masked
    max_ngram: Positive = 3  # most consecutive words that are masked together
    whole_words: bool = True  # all tokens of a word are masked together
    longer_ngrams: bool = False  # longer n-grams are likelier; false: shorter ones
    geometric: bool = False  # span lengths are drawn as in SpanBERT, p = 0.2
    full_rows: bool = False  # native, without head: text fills each row, across documents, as RoBERTa's
    permutation: bool = False  # native: permute as many further tokens as are masked


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class T5SamplesSection:
    """Masked spans that the decoder predicts, for kind t5; train.sequence_length is the encoder's."""

    decoder_length: Annotated[int, Range(3)] = 128  # tokens that the decoder reads
    short_probability: Share = 0.1  # share of rows that are made shorter than the sequence length
    mask_probability: PositiveFraction = 0.15  # share of tokens that are masked
    max_ngram: Positive = 10  # most consecutive words that are masked together
    whole_words: bool = True  # all tokens of a word are masked together
    longer_ngrams: bool = False  # longer n-grams are likelier; false: shorter ones
    geometric: bool = True  # span lengths are drawn as in SpanBERT, p = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClassifySamplesSection:
    """Labelled rows, for kind classify."""

    choices: Annotated[int, Range(2)] | None = (
        None  # rows of a sample, of which one is right; not set: a sample is a row with a class
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """The training data; the manifest holds everything else about it."""

    blend: str  # blend or corpus manifest, a prefix, Megatron's "0.7 a 0.3 b", or "mock": seeded random tokens
    split: str = "100,0,0"  # shares of training, validation and test
    valid: tuple[str, ...] = ()  # validation corpora; their names are those of the files
    test: tuple[str, ...] = ()  # test corpora, evaluated once, after the last step
    allow_overlap: bool = False  # data.valid and data.test may contain training documents
    prefetch: Positive = 2  # steps that the loader reads ahead
    order: Literal["native", "megatron"] = "native"  # sample order; megatron: that of Megatron-LM for this run
    kind: DataKind = (
        "gpt"  # sample type: text stream, one document, several packed, conversations packed (chat), pairs of them
        # packed (pairs), a stream with documents rearranged (fim), a text with masked tokens (bert) or spans (t5), or
        # labelled rows (classify)
    )
    longer: Literal["cut", "drop"] = "cut"  # document, packed, chat: cut or drop documents longer than a row
    document_masks: bool = (
        False  # attention and positions do not cross documents; megatron: found by the id that ends one
    )
    shuffle_block: Positive | None = (
        None  # native, gpt: documents are shuffled within blocks of this many; not set: file order
    )
    order_samples: Positive | None = (
        None  # megatron: build the order for this many samples, so that the run can be extended to them; not set:
        # derived from the run's length
    )
    blend_surplus: Amount = 0.005  # megatron: extra samples built for each corpus of a blend, as a fraction
    tokenizer_unknown: Literal["refuse", "ok"] = "refuse"  # ok: allow corpora with an unknown tokenizer in a blend
    allow_outside: bool = False  # manifests of corpora may name files outside their folders
    cache: str | None = (
        None  # folder for built arrays (megatron, packed) and blocks of corpora in object storage; not set: arrays are
        # beside the corpus
    )
    cache_size: str | None = None  # limit on these blocks, such as "500 GiB"; not set: until the disk is nearly full
    skip: tuple[str, ...] = ()  # samples to skip, as ranges "FIRST-LAST" in the run's order
    fim: FimSection | None = None
    bert: BertSamplesSection | None = None
    t5: T5SamplesSection | None = None
    classify: ClassifySamplesSection | None = None

    @property
    def rows_per_sample(self) -> int:
        """Rows of tokens of a sample."""
        return (self.classify.choices or 1) if self.classify is not None else 1

    @property
    def documents_apart(self) -> bool:
        """Whether attention and positions do not cross documents; those of conversations never do."""
        return self.document_masks or self.kind in ("chat", "pairs")

    @property
    def of_kind(self) -> FimSection | BertSamplesSection | T5SamplesSection | ClassifySamplesSection | None:
        """The options of kind fim, bert, t5 or classify, with defaults if its sub-section is not set; None: another."""
        options: dict[str, FimSection | BertSamplesSection | T5SamplesSection | ClassifySamplesSection] = {
            "fim": self.fim or FimSection(),
            "bert": self.bert or BertSamplesSection(),
            "t5": self.t5 or T5SamplesSection(),
            "classify": self.classify or ClassifySamplesSection(),
        }
        return options.get(self.kind)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshSection:
    """The parallel layout; ranks beyond tp x cp x pp are data parallel."""

    tp: Positive = 1  # ranks that share each layer
    cp: Positive = 1  # ranks that share each sample: context parallelism, for long sequences
    pp: Positive = 1  # ranks that share the layers: pipeline stages follow each other on them
    ep: Positive = 1  # ranks of a pipeline stage that share the experts of its layers; each has whole ones
    etp: Positive | None = None  # ranks that share each expert; not set: derived from tp
    expert_dispatch: Literal["auto", "gather", "all_to_all"] = (
        "auto"  # how tokens reach experts of other ranks; all_to_all: only those that need it, but waits for the host;
        # auto: gather up to ep = 2 or top_k / 2
    )
    expert_buffer: PositiveAmount | None = (
        None  # size of buffers for tokens of experts, over an even load; a step whose tokens do not fit changes nothing
        # and ends the run; not set: all_to_all: the size needed, for which the host waits; gather: for every load
    )
    schedule: Literal["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"] = (
        "1f1b"  # order of forward and backward passes in a pipeline; zb: backward in two halves, for a smaller bubble
    )
    virtual_pipeline: Positive | None = None  # stages of each pipeline rank; not set: 1, or 2 for interleaved and zb_v
    stage_balance: Literal["layers", "flops"] = (
        "layers"  # balance pipeline ranks by layers, or by flops, embedding and head included
    )
    layers_per_stage: tuple[int, ...] = ()  # layers of each stage, set by hand
    sequence_parallel: bool = False  # norms and residuals split over tp along the sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainSection:
    """How long to train, and how often to evaluate."""

    sequence_length: Positive  # tokens per sample
    global_batch: Positive  # samples per step, over all ranks
    dpo_beta: PositiveAmount = 0.1  # kind pairs: beta of DPO, how much the first weights hold the model back
    loss_average: Literal["token", "megatron"] = (
        "token"  # loss averaging: over all loss tokens of the step; megatron: mean of the microbatch means
    )
    batch_ramp: str | None = (
        None  # "START INCREMENT SAMPLES": the batch grows to global_batch over that many samples; not set: no ramp
    )
    batch_schedule: str | None = (
        None  # "0:384 200B:768 400B:1152": consumed tokens, and the batch from there on; the last one is global_batch
    )
    micro_batch: Positive  # samples per forward pass of a rank
    steps: Positive | None = None  # length of the run in optimizer updates; set this, samples or tokens
    samples: Positive | None = None  # length of the run in samples; the last step ends at or before it
    tokens: Positive | None = None  # length of the run in tokens; the last step ends at or before it
    exit_interval: Positive | None = (
        None  # end the run early, with a checkpoint, after a step that is a multiple of it; not set: off
    )
    evaluate: bool = True  # false: validation and test sets are not read
    eval_interval: Positive | None = None  # steps between validations; not set: only at the end
    eval_samples: Count = 1024  # validation or test samples per corpus, spread evenly; 0: all


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateSection:
    """Tasks of `mtrain eval` that score the model during training, and prompts that it answers."""

    tasks: tuple[str, ...] = ()  # each TASK=FILE, such as "lambada=test.jsonl", with TASK as in `mtrain eval --task`
    interval: Positive | None = None  # steps between evaluations; not set: only at the end
    prompts: tuple[str, ...] = ()  # texts to continue, or of a user if the data are conversations
    answer_tokens: Positive = 64  # most tokens of an answer; each is the likeliest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSection:
    """The update rule, and how learning rate and weight decay change over the run."""

    name: Literal["adamw", "sgd", "muon"] = (
        "adamw"  # sgd: with momentum; muon: Muon for the matrices of the layers, AdamW for the rest
    )
    lr: Amount  # largest learning rate
    schedule: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = (
        "cosine"  # learning rate after the warmup; wsd: constant, then a decay at the end
    )
    min_lr: Amount = 0.0  # learning rate after the decay
    init_lr: Amount = 0.0  # learning rate at the start of the warmup
    embedding_lr: PositiveAmount | None = (
        None  # peak learning rate of the token embedding and the output head; not set: derived from lr
    )
    embedding_min_lr: Amount = 0.0  # with embedding_lr: their learning rate after the decay
    warmup_steps: Positive | None = None  # length of the linear warmup in steps; set at most one of warmup_*
    warmup_samples: Positive | None = None  # the same in samples
    warmup_tokens: Positive | None = None  # the same in tokens
    warmup_fraction: PositiveFraction | None = None  # length of the linear warmup as a fraction of the decay's length
    warmup_count: Literal["after", "before"] = (
        "after"  # after: the first step has lr / warmup_steps; before: it has init_lr, as in Megatron
    )
    count_skipped: bool = True  # skipped steps advance the schedules; false: they do not, as in Megatron
    decay_steps: Positive | None = (
        None  # step at which lr reaches min_lr; not set: derived from the run's length when it first started
    )
    decay_samples: Positive | None = None  # the same in samples
    decay_tokens: Positive | None = None  # the same in tokens
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"  # shape of the decay of wsd
    wsd_decay_steps: Positive | None = None  # length of the decay of wsd, which ends where decay_* says, in steps
    wsd_decay_samples: Positive | None = None  # the same in samples
    wsd_decay_tokens: Positive | None = None  # the same in tokens
    weight_decay: Amount = 0.1  # decoupled, for matrices only, times the learning rate; sgd: added to the gradient
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"  # from weight_decay to weight_decay_end
    weight_decay_end: Amount = 0.0  # weight decay at the end of a linear or cosine schedule
    weight_decay_steps: Positive | None = (
        None  # step at which it is reached; not set: derived from the run's length when it first started
    )
    weight_decay_samples: Positive | None = None  # the same in samples
    weight_decay_tokens: Positive | None = None  # the same in tokens
    beta1: Fraction = 0.9  # decay of the mean of gradients
    beta2: Fraction = 0.95  # decay of the mean of squared gradients
    epsilon: Small = 1e-8  # added to the root of the second moment
    momentum: Fraction = 0.9  # sgd: momentum, the decay of the sum of gradients
    muon_momentum: Fraction = 0.95  # muon: decay of the mean of gradients
    muon_nesterov: bool = True  # muon: Nesterov momentum
    muon_ns_steps: Annotated[int, Range(1, 100)] = 5  # muon: Newton-Schulz iterations
    muon_coefficient_type: Literal["simple", "quintic"] = (
        "simple"  # muon: polynomials of the iterations; simple: Jordan et al.; quintic: Megatron's, five in turn
    )
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = (
        "spectral"  # muon: update times sqrt(max(out, in)); sqrt(max(1, out / in)); sqrt(out / in)
    )
    muon_extra_scale_factor: Amount = 0.2  # muon: the update times this; 0.2 with spectral allows adamw's lr
    clip_norm: Amount = 1.0  # largest norm of the whole gradient; 0: off
    sharding: Literal["none", "state", "gradients", "parameters"] = (
        "state"  # what data-parallel ranks shard; each value includes those before it; state: main weights and moments
    )
    overlap_grad_reduce: bool = True  # gradients are summed over data-parallel ranks during the backward pass
    overlap_param_gather: bool = True  # new parameters are gathered during the next forward pass
    bucket_size: Positive | None = (
        None  # minimum parameters per communication bucket; not set: derived from a 64th of the rank's
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionSection:
    """Number formats of weights, activations and gradients; main weights and moments are fp32 (fp64 under fp64)."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"  # fp64 is for checking layouts on a CPU
    gradients: Literal["main", "params"] = (
        "main"  # dtype in which gradients are summed over microbatches and ranks: fp32; params: precision.dtype
    )
    loss_scale: PositiveAmount | None = None  # fp16: a constant loss scale; not set: dynamic
    initial_loss_scale: Annotated[float, Range(1)] = 4294967296.0  # fp16: first value of a dynamic loss scale
    min_loss_scale: Annotated[float, Range(1)] = 1.0  # fp16: lower limit of a dynamic loss scale
    loss_scale_window: Positive = 1000  # fp16: finite steps in a row after which the loss scale doubles
    loss_scale_hysteresis: Positive = 2  # fp16: overflows until the loss scale halves
    fp8: Literal["none", "delayed", "current", "blockwise"] = "none"  # FP8 products in linear layers, and their scales
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"  # gradients in E5M2, all else in E4M3; or all in E4M3
    fp8_amax_history_len: Positive = 16  # delayed: steps in the history of largest values
    fp8_amax_compute: Literal["max", "most_recent"] = "max"  # delayed: which value of the history sets the scale
    fp8_margin: Count = 0  # delayed: powers of two by which scales are lowered
    fp8_first_last_bf16: Count = 0  # blocks at each end of the model that are computed in bf16

    def float8_blocks(self, num_layers: int) -> range:
        """The blocks of the model whose linear layers are computed in FP8."""
        edge = num_layers if self.fp8 == "none" else self.fp8_first_last_bf16
        return range(edge, num_layers - edge)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    """When to write checkpoints, besides at the end and when asked to stop, and how many to keep."""

    interval: Positive | None = None  # steps between checkpoints; not set: off
    minutes: Amount = 10.0  # minutes of wall-clock time between checkpoints; 0: off
    folder: str | None = (
        None  # where checkpoints go: s3://, gs:// or az://, or a folder; not set: checkpoints in run.folder
    )
    keep: Positive = 2  # number of newest checkpoints to keep
    init_from: str | None = (
        None  # folder with the initial weights of a new run: of mtrain, Hugging Face or Megatron-LM; not set:
        # random
    )
    new_rows_from: Positive | None = (
        None  # with init_from: first id of new tokens; rows of embedding and head from it on begin as the mean of those
        # before; not set: there are none
    )
    init_optimizer: bool = False  # also take moments, number of updates and loss scale from init_from
    init_schedule: bool = False  # learning rate and weight decay continue from their position in init_from
    init_data: bool = False  # steps and samples of the data continue from their position in init_from
    keep_every: Positive | None = None  # checkpoints of steps that are multiples of it are kept as well; not set: off
    keep_best: Count = 0  # number of checkpoints with the lowest validation losses or highest accuracy to keep as well
    background: bool = True  # write checkpoints during training, from a copy of the state in host memory
    on_failure: Literal["stop", "continue"] = "stop"  # what to do if a checkpoint cannot be written
    load: Literal["latest", "latest-valid"] = (
        "latest"  # which checkpoint to resume from; latest-valid: compare every byte and skip damaged ones
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrackSection:
    """Experiment trackers and alerts, served by a separate process: howto/watch.md."""

    to: tuple[
        Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus", "webhook", "opentelemetry"], ...
    ] = ()  # trackers
    project: str = "mtrain"  # W&B or trackio project, MLflow experiment
    name: str | None = None  # display name of the run; not set: the last part of run.folder
    entity: str | None = None  # W&B user or team; not set: W&B's default
    id: str | None = None  # id of the run in trackers; not set: random, stored in tracking.json
    tensorboard_dir: str | None = None  # folder of event files; not set: tensorboard in run.folder
    wandb_dir: str | None = None  # folder of W&B's files; not set: run.folder
    mlflow_uri: str | None = None  # tracking server or store; not set: MLFLOW_TRACKING_URI, or mlflow.db in run.folder
    prometheus_file: str | None = None  # for a textfile collector; not set: metrics.prom in run.folder
    webhook_url: str | None = None  # URL that gets a POST per alert; not set: MTRAIN_WEBHOOK_URL
    webhook_form: Literal["json", "slack"] = "json"  # slack: payloads for Slack's incoming webhooks
    webhook_on: tuple[Literal["start", "stop", "crash", "hang", "spike", "finish"], ...] = (
        "start",
        "stop",
        "crash",
        "hang",
        "spike",
        "finish",
    )  # alerts to send
    hang_minutes: PositiveAmount = 10.0  # minutes without progress after which a run counts as hung


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpikesSection:
    """Detection of spikes in the loss or gradient norm, and what the run does about them: howto/spikes.md."""

    action: Literal["off", "report", "skip", "roll_back"] = (
        "report"  # report: write an event and a page; skip: also skip the update; roll_back: also return to the newest
        # checkpoint before the spike and skip its samples
    )
    window: Annotated[int, Range(16)] = 128  # previous steps to compare with; detection starts when it is half full
    threshold: PositiveAmount = 8.0  # robust z-score of a spike: deviations above the window's median
    warmup_steps: Count | None = None  # first steps of the run, without detection; not set: the learning rate's warmup
    skip_before: Count = 0  # roll_back: also skip the samples of this many steps before the spike
    skip_after: Count = 0  # roll_back: also skip the samples of this many steps after the spike
    max_rollbacks: Positive = 3  # roll_back: returns to the same checkpoint before the run ends with an error


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The whole run."""

    run: RunSection
    model: ModelSection
    data: DataSection
    mesh: MeshSection = dataclasses.field(default_factory=MeshSection)
    train: TrainSection
    evaluate: EvaluateSection = dataclasses.field(default_factory=EvaluateSection)
    optimizer: OptimizerSection
    precision: PrecisionSection = dataclasses.field(default_factory=PrecisionSection)
    recompute: RecomputeSection = dataclasses.field(default_factory=RecomputeSection)
    kernels: KernelsSection = dataclasses.field(default_factory=KernelsSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    track: TrackSection = dataclasses.field(default_factory=TrackSection)
    spikes: SpikesSection = dataclasses.field(default_factory=SpikesSection)
