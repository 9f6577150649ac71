"""The function that a GPT computes: all of its numbers and choices, derived from a configuration, without the layout.

Pure, no torch. How it is divided over ranks is in params.py, its forward pass in model.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from trainer.arithmetic import round_up
from trainer.config.parse import own_keys
from trainer.config.sections import LoRATarget, MLASection, ModelSection, MoESection, RunConfig
from trainer.kernels.scores import ScoreShape
from trainer.layers.shapes import (
    GATED,
    AttentionShape,
    LatentShape,
    LoRAShape,
    MLPShape,
    MoEShape,
    NormShape,
    RopeShape,
)
from trainer.models.family import DecodeState

_LATENT_SIZES = tuple(field.name for field in dataclasses.fields(LatentShape))
_KEYS = {  # keys of [model] whose names are not those of the parts of a shape, joined
    "scores_scale": "attention_scale",
    "scores_softcap": "attention_softcap",
    "scores_window": "window",
    "scores_sinks": "attention_sinks",
    **{f"mla_{name}": f"mla.{name}" for name in _LATENT_SIZES},
    "rope_mscale": "mla.mscale",
    "rope_mscale_all_dim": "mla.mscale_all_dim",
}
# A learned max_position is a tensor's shape; alibi is a value of position; dropout is often lowered on the way.
_NOT_FUNCTION = (
    "padded_vocab_size", "max_position", "init_std", "scores_alibi", "scores_dropout", "hidden_dropout",
    "mtp_like", "mtp_factor", "scores_causal", "scores_relative",  # the family decides the first, position the second
)  # fmt: skip
_NOT_TRAINED = ("family", "preset", "init_std", "attention_dropout", "hidden_dropout")
_OF_SCALING = {
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "truncate"),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "original_length", "short_factors", "long_factors"),
}
_SCALING_KEYS = {key for keys in _OF_SCALING.values() for key in keys}
# Keys of [model.moe] that training has, and that leave the function as it is.
_MOE_TRAINING = ("expert_bias_rate", "balance", "balance_factor", "z_loss_factor", "dispatch", "buffer")
_MOST_LISTED = 1024  # experts of all layers whose loads a line of metrics.jsonl lists
Kind = Literal["full", "window", "full experts", "window experts"]  # of a block: what it attends to, and its MLP
VOCABULARY_MULTIPLE = 128  # rows per tp rank, as Megatron's --make-vocab-size-divisible-by


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """All numbers and choices that define the function, without the layout.

    Args:
        vocab_size: rows of the logical embedding. padded_vocab_size: rows over all ranks with padding.
        head_dim: elements of one head; num_heads of them may differ from hidden_size. With latent attention, of
            one of queries and keys.
        max_position: rows of learned positions; longest sequence.
        bias: of all linear layers, or of the projections to q, k and v only.
        rope_interval: every k-th block does not rotate its heads; 0: all blocks do.
        scores: how attention changes scores, except in the blocks of window_interval.
        window_interval: every k-th block attends to all tokens; 0: none.
        mla: sizes of latent attention; None: keys and values are projected.
        norm_bias: of a layernorm. norm_zero_centered: weights of norms are stored less 1.
        block_norm: what is normalized: what attention and MLP read, what they add, or both.
        qk_norm: whether the heads of queries and keys are normalized; "own_head", "all_heads": see AttentionShape.
        activation_clamp, activation_offset: see MLPShape. logit_softcap: c of c tanh(logit / c); 0: off.
        logit_scale: factor of logits. embedding_multiplier: of the embeddings of tokens. residual_multiplier: of what
            attention and MLP add.
        hidden_dropout: probability in the embedding and in the output of each block.
        mtp_layers: further blocks that predict later tokens; 0: none. mtp_like: the block whose kind they have.
            mtp_factor: of the mean of their losses.
        moe: the blocks with experts in place of an MLP; None: there are none.
        lora: adapters, beside which all other weights are frozen; None: all are trained.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    padded_vocab_size: int
    max_position: int
    position: Literal["rope", "learned", "alibi", "relative", "none"]
    rope: RopeShape = field(default_factory=RopeShape)
    rope_interval: int = 0
    norm: Literal["rmsnorm", "layernorm"]
    norm_epsilon: float
    norm_bias: bool = True
    norm_zero_centered: bool = False
    block_norm: Literal["input", "output", "both"] = "input"
    activation: Literal["swiglu", "geglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_erf", "relu", "squared_relu"]
    activation_clamp: float = 0.0
    activation_offset: float = 0.0
    bias: bool | Literal["qkv"]
    qk_norm: bool | Literal["own_head", "all_heads"] = False
    mla: LatentShape | None = None
    scores: ScoreShape = field(default_factory=ScoreShape)
    window_interval: int = 0
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    hidden_dropout: float = 0.0
    mtp_layers: int = 0
    mtp_like: int = 0
    mtp_factor: float = 0.0
    tie_embeddings: bool
    init_std: float
    moe: MoEShape | None = None
    lora: LoRAShape | None = None

    @property
    def embeds_last(self) -> bool:
        """Whether the last stage has the embedding: as its head, or because further blocks read later tokens."""
        return self.tie_embeddings or self.mtp_layers > 0

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.activation in GATED

    @property
    def kept_sums(self) -> int:
        """Sums of the residual stream in a block that are kept for backward."""
        return 2

    @property
    def predicted(self) -> float:
        """The share of tokens for which the head computes logits."""
        return 1.0

    @property
    def in_norms(self) -> int:
        """Norms of what attention and MLP read in a block."""
        return 0 if self.block_norm == "output" else 2

    @property
    def out_norms(self) -> int:
        """Norms of what they add."""
        return 0 if self.block_norm == "input" else 2

    @property
    def turned_width(self) -> int:
        """Features of a head in which the table of rotary positions lies."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def value_width(self) -> int:
        """Features of a head of values."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def norm_shape(self) -> NormShape:
        """That of all norms; those over several heads have no bias."""
        return NormShape(
            kind=self.norm, epsilon=self.norm_epsilon, bias=self.norm_bias, zero_centered=self.norm_zero_centered
        )


def gpt_shape(config: RunConfig, vocab_size: int) -> GPTShape:
    """The model with every key of its section that is not set derived; a 0 here means "none" or "off"."""
    model = config.model
    return GPTShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=head_dim(config),
        ffn_hidden_size=ffn_hidden_size(config),
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size(vocab_size, config.mesh.tp),
        max_position=model.max_position or config.train.sequence_length,
        position=model.position,
        rope=_rope_shape(model),
        rope_interval=model.rope_interval or 0,
        norm=model.norm,
        norm_epsilon=model.norm_epsilon,
        norm_bias=model.norm_bias,
        norm_zero_centered=model.norm_zero_centered,
        block_norm=model.block_norm,
        activation=model.activation,
        activation_clamp=model.activation_clamp or 0.0,
        activation_offset=model.activation_offset,
        bias=model.bias,
        qk_norm=model.qk_norm,
        mla=_latent_shape(model.mla),
        scores=ScoreShape(
            scale=_scores_scale(model),
            softcap=model.attention_softcap or 0.0,
            alibi=model.position == "alibi",
            relative=model.position == "relative",
            window=model.window or 0,
            sinks=model.attention_sinks,
            dropout=model.attention_dropout,
        ),
        window_interval=model.window_interval or 0,
        logit_softcap=model.logit_softcap or 0.0,
        logit_scale=model.logit_scale or 1.0,
        embedding_multiplier=model.embedding_multiplier or 1.0,
        residual_multiplier=model.residual_multiplier or 1.0,
        hidden_dropout=model.hidden_dropout,
        mtp_layers=model.mtp.num_layers if model.mtp else 0,
        mtp_like=model.num_layers - 1,
        mtp_factor=model.mtp.loss_factor if model.mtp else 0.0,
        tie_embeddings=model.tie_embeddings,
        init_std=model.init_std,
        moe=_moe_shape(model.moe, config) if model.moe else None,
        lora=_lora_shape(model),
    )


def _lora_shape(model: ModelSection) -> LoRAShape | None:
    if (lora := model.lora) is None:
        return None
    gated = model.activation in GATED
    targets = lora.targets or tuple(name for name in get_args(LoRATarget) if gated or name != "gate")
    return LoRAShape(rank=lora.rank, scale=lora.scale, targets=targets, saved=lora.modules_to_save)


def _moe_shape(moe: MoESection, config: RunConfig) -> MoEShape:
    groups = moe.groups or 1
    return MoEShape(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        ffn_hidden_size=moe.ffn_hidden_size or ffn_hidden_size(config),
        interval=moe.interval,
        layers=moe.layers,
        score=moe.score,
        normalize_weights=moe.normalize_weights,
        weight_scale=moe.weight_scale or 1.0,
        groups=groups,
        groups_per_token=moe.groups_per_token or groups,
        group_score=moe.group_score,
        expert_bias=moe.expert_bias,
        expert_bias_rate=moe.expert_bias_rate,
        balance=moe.balance,
        balance_factor=moe.balance_factor,
        z_loss_factor=moe.z_loss_factor,
        capacity_factor=moe.capacity_factor or 0.0,
        capacity_of=moe.capacity_of,
        drop=moe.drop,
        shared_ffn_hidden_size=moe.shared_ffn_hidden_size or 0,
        shared_gate=moe.shared_gate,
        dispatch=config.mesh.expert_dispatch,
        buffer=config.mesh.expert_buffer or 0.0,
    )


def _latent_shape(mla: MLASection | None) -> LatentShape | None:
    if mla is None:
        return None
    return LatentShape(
        q_lora_rank=mla.q_lora_rank or 0,
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
    )


def _scores_scale(model: ModelSection) -> float:
    """The factor of scores; 0: 1 / sqrt(head width). Latent attention may compute with wider heads."""
    if model.attention_scale or model.mla is None:
        return model.attention_scale or 0.0
    width = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
    return _rope_shape(model).magnitude(model.mla.mscale_all_dim) ** 2 / math.sqrt(width)


def _rope_shape(model: ModelSection) -> RopeShape:
    return RopeShape(
        theta=model.rope_theta,
        fraction=model.rope_fraction,
        interleaved=model.rope_interleaved,
        scaling=model.rope_scaling,
        factor=model.rope_factor,
        original_length=model.rope_original_length or 0,
        low_freq_factor=model.rope_low_freq_factor,
        high_freq_factor=model.rope_high_freq_factor,
        beta_fast=model.rope_beta_fast,
        beta_slow=model.rope_beta_slow,
        truncate=model.rope_truncate,
        short_factors=model.rope_short_factors,
        long_factors=model.rope_long_factors,
        window_theta=model.rope_window_theta or 0.0,
        mscale=model.mla.mscale if model.mla else 1.0,
        mscale_all_dim=model.mla.mscale_all_dim if model.mla else 0.0,
    )


def attention_shape(shape: GPTShape, number: int) -> AttentionShape:
    """Sizes and choices of a block's attention."""
    turns = shape.position == "rope" and not (shape.rope_interval and (number + 1) % shape.rope_interval == 0)
    over = shape.qk_norm if isinstance(shape.qk_norm, str) else "head"
    qk_norm = replace(shape.norm_shape, bias=shape.norm_bias and over == "head")
    has_norm = shape.qk_norm or shape.mla
    return AttentionShape(
        width=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        bias=bool(shape.bias),
        out_bias=shape.bias is True,
        rotary=shape.rope.interleaved if turns else None,
        qk_norm=qk_norm if has_norm else None,
        qk_norm_over=over,
        scores=scores_of(shape, kinds(shape)[number]),
        latent=shape.mla,
    )


def mlp_shape(shape: GPTShape) -> MLPShape:
    """Sizes and choices of a block's feed-forward layer."""
    return MLPShape(
        width=shape.hidden_size,
        inner=shape.ffn_hidden_size,
        activation=shape.activation,
        bias=shape.bias is True,
        clamp=shape.activation_clamp,
        offset=shape.activation_offset,
    )


def expert_shape(shape: GPTShape) -> MLPShape:
    """Sizes and choices of one expert."""
    assert shape.moe is not None, "the model has experts"
    return replace(mlp_shape(shape), inner=shape.moe.ffn_hidden_size)


def exchanges_tokens(config: RunConfig) -> bool:
    """Whether tokens are sent to the ranks of their experts by all-to-all; otherwise all are gathered.

    CUDA graphs cannot wait for the host, which has to know how many there are, unless buffers have a size.
    """
    moe, mesh = config.model.moe, config.mesh
    if moe is None or mesh.ep == 1 or mesh.expert_dispatch != "auto":
        return mesh.expert_dispatch == "all_to_all"
    shape = _moe_shape(moe, config)
    return not shape.is_gathered(mesh.ep) and (mesh.expert_buffer is not None or config.kernels.cuda_graphs != "on")


def kinds(shape: GPTShape) -> tuple[Kind, ...]:
    """The kind of each block: what it attends to, and whether it has experts."""
    return tuple(_kind(shape, number) for number in range(shape.num_layers))


def _kind(shape: GPTShape, number: int) -> Kind:
    every = shape.window_interval if shape.scores.window else 1
    is_full = bool(every) and (number + 1) % every == 0
    if shape.moe is not None and shape.moe.has_experts(number):
        return "full experts" if is_full else "window experts"
    return "full" if is_full else "window"


def mtp_kind(shape: GPTShape) -> Kind:
    """The kind of further blocks."""
    return _kind(shape, shape.mtp_like)


def scores_of(shape: GPTShape, kind: str) -> ScoreShape:
    """How attention changes scores in the blocks of a kind."""
    return replace(shape.scores, window=0) if kind.startswith("full") else shape.scores


def blocks_with_experts(shape: GPTShape, *, further: bool = False) -> list[int]:
    """Their numbers; `further`: with those that predict later tokens, whose numbers follow."""
    of_blocks = [*kinds(shape), *[mtp_kind(shape)] * (shape.mtp_layers if further else 0)]
    return [number for number, kind in enumerate(of_blocks) if kind.endswith("experts")]


def losses(shape: GPTShape) -> tuple[str, ...]:
    """See `Family`."""
    return (*expert_losses(shape), *later_losses(shape))


def expert_losses(shape: GPTShape) -> tuple[str, ...]:
    """Those of the routers of blocks with experts."""
    names: list[str] = []
    if shape.moe is not None:
        blocks = blocks_with_experts(shape, further=True)
        if shape.moe.balance_factor and shape.moe.balance != "none":
            names += [f"balance_{number}" for number in blocks]
        if shape.moe.z_loss_factor:
            names += [f"z_{number}" for number in blocks]
    return tuple(names)


def later_losses(shape: GPTShape) -> tuple[str, ...]:
    """Those of later tokens: mtp_1 is of the token after the next one."""
    return tuple(f"mtp_{depth}" for depth in range(1, shape.mtp_layers + 1))


def counts(shape: GPTShape) -> dict[str, int]:
    """See `Family`: of each block with experts what RouterLosses in layers/router.py says."""
    numbers = blocks_with_experts(shape, further=True)
    return {f"experts_{number}": shape.moe.num_experts + 2 for number in numbers if shape.moe}


def decode_state(shape: GPTShape, kind: str) -> DecodeState:
    """Keys and values of all tokens, or of those in the window; with latent attention, what all heads share."""
    restart = shape.rope.original_length if shape.position == "rope" and shape.rope.scaling == "longrope" else None
    last = scores_of(shape, kind).window or None
    if shape.mla:
        tensors = {"latent": (1, shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim)}
        return DecodeState(tensors=tensors, last=last, divided=False, restart=restart)
    heads = (shape.num_kv_heads, shape.head_dim)
    return DecodeState(tensors={"key": heads, "value": heads}, last=last, restart=restart)


def expert_metrics(shape: GPTShape, counts: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of each layer with experts: the tokens of each expert, unless there are very many, and what they say."""
    moe, layers = shape.moe, dict[str, Any]()
    if moe is None:
        return {}
    listed = len(counts) * moe.num_experts <= _MOST_LISTED
    for name, numbers in counts.items():
        *load, dropped, entropy = numbers
        slots = sum(load) + dropped
        if not slots:
            continue
        mean = sum(load) / moe.num_experts
        layers[name.removeprefix("experts_")] = {
            "max": max(load) / mean if mean else 0.0,
            "min": min(load) / mean if mean else 0.0,
            "entropy": entropy / (slots / moe.top_k),
            **({"dropped": dropped / slots} if moe.capacity_factor else {}),
            **({"load": [round(tokens) for tokens in load]} if listed else {}),
        }
    return {"experts": layers} if layers else {}


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The smallest multiple of 128 x tp that holds the vocabulary, as Megatron pads."""
    return round_up(vocab_size, VOCABULARY_MULTIPLE * tp)


def head_dim(config: RunConfig) -> int:
    """Features of one attention head; with latent attention, of queries and keys."""
    if mla := config.model.mla:
        return mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return config.model.head_dim or config.model.hidden_size // config.model.num_heads


def ffn_hidden_size(config: RunConfig) -> int:
    """4 x hidden; for a gated MLP, which has three matrices, 2/3 of that (Shazeer 2020), rounded up to 64."""
    model = config.model
    if model.ffn_hidden_size:
        return model.ffn_hidden_size
    return round_up(-(-8 * model.hidden_size // 3), 64) if model.activation in GATED else 4 * model.hidden_size


def function_keys(shape: GPTShape) -> dict[str, Any]:
    """What decides the function, by keys of [model]: the shape without what the layout or the first weights decide."""
    values = dataclasses.asdict(shape)
    further = values.pop("mtp_layers")
    values.pop("moe")
    lora = {f"lora.{name}": value for name, value in (values.pop("lora") or {}).items()}
    values["mla"] = values["mla"] or dict.fromkeys(_LATENT_SIZES, 0)
    keys = {name: value for name, value in _settings(values) if name not in _NOT_FUNCTION}
    return keys | {"mtp.num_layers": further} | _moe_keys(shape) | lora


def _moe_keys(shape: GPTShape) -> dict[str, Any]:
    """The keys of [model.moe] that decide the function, with every layer that has experts."""
    if shape.moe is None:
        return {}
    keys = {f"moe.{name}": value for name, value in dataclasses.asdict(shape.moe).items() if name not in _MOE_TRAINING}
    del keys["moe.interval"]
    keys["moe.layers"] = tuple(int(shape.moe.has_experts(number)) for number in range(shape.num_layers))
    if not shape.moe.capacity_factor:
        del keys["moe.capacity_of"], keys["moe.drop"]
    if not shape.moe.shared_ffn_hidden_size:
        del keys["moe.shared_gate"]
    if shape.moe.groups_per_token == shape.moe.groups:
        del keys["moe.group_score"]
    return keys


def _settings(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values of a shape, those of its parts under the keys that they have in [model]."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            joined = ((f"{name}_{inner}", x) for inner, x in _settings(value))
            yield from ((_KEYS.get(key, key), x) for key, x in joined)
        else:
            yield name, value


def effective_keys(config: RunConfig) -> dict[str, Any]:
    """The keys of [model] that have an effect on a trained model, every derived value written out."""
    model: ModelSection = config.model
    keys = {name: getattr(model, name) for name in own_keys("model") if name not in _NOT_TRAINED}
    keys["num_kv_heads"] = model.num_kv_heads or model.num_heads
    keys["head_dim"] = size = head_dim(config)
    keys["ffn_hidden_size"] = ffn_hidden_size(config)
    keys["max_position"] = model.max_position or config.train.sequence_length
    if model.attention_scale and math.isclose(model.attention_scale, size**-0.5, rel_tol=1e-6):
        keys["attention_scale"] = None
    idle = {f"rope_{key}" for key in _SCALING_KEYS.difference(_OF_SCALING[model.rope_scaling])}
    if keys["rope_window_theta"] == model.rope_theta and model.rope_scaling == "none":
        keys["rope_window_theta"] = None
    for name in ("window_interval", "rope_interval"):
        if (keys[name] or 0) > model.num_layers:
            keys[name] = None
    for name in ("logit_scale", "embedding_multiplier", "residual_multiplier"):
        keys[name] = keys[name] or 1.0
    if not model.window:
        idle.add("rope_window_theta")
    if model.position != "rope":
        idle = {name for name in keys if name.startswith("rope_")}
    if model.position != "learned":
        idle.add("max_position")
    if model.activation not in GATED:
        idle |= {"activation_clamp", "activation_offset"}
    if not model.window:
        idle.add("window_interval")
    if model.norm != "layernorm":
        idle.add("norm_bias")
    if model.mtp:
        keys["mtp.num_layers"] = model.mtp.num_layers
    if model.moe is not None:
        keys |= _moe_keys(gpt_shape(config, model.vocab_size or 1))
    if model.mla:
        keys |= {f"mla.{name}": value for name, value in dataclasses.asdict(model.mla).items()}
        idle |= set() if model.rope_scaling == "yarn" else {"mla.mscale", "mla.mscale_all_dim"}
    return {name: value for name, value in keys.items() if name not in idle}
