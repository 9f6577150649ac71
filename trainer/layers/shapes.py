"""Sizes and choices of the layers, over all ranks: everything that a layer gets from its model.

Pure, so that a plan can use them without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from trainer.kernels.scores import ScoreShape

Scaling = Literal["none", "linear", "ntk", "yarn", "llama3", "longrope"]
GATED = ("swiglu", "geglu", "geglu_tanh", "quick_geglu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """Rotary positions and their scaling to longer sequences.

    Args:
        theta: base of the frequencies.
        fraction: of a head's features that are rotated, from the first on.
        interleaved: pairs are (2i, 2i + 1) and not (i, i + half).
        scaling: the rule by which frequencies are lowered. factor: how many times longer sequences may be.
        original_length: tokens of a sequence before that (yarn, llama3).
        low_freq_factor, high_freq_factor: llama3: waves longer than original_length / low are stretched, those
            shorter than original_length / high are not.
        beta_fast, beta_slow: yarn: pairs that turn more than beta_fast times in original_length are kept, those that
            turn less than beta_slow times are stretched. truncate: the range between them begins and ends at a pair.
        short_factors, long_factors: longrope: what each pair's wave is stretched by, in rows of up to original_length
            tokens and in longer ones.
        window_theta: base in blocks with a window, whose frequencies are then not scaled; 0: as in the others.
        mscale, mscale_all_dim: yarn: rotated heads are multiplied by the quotient of their magnitudes.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Scaling = "none"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    window_theta: float = 0.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def magnitude(self, mscale: float) -> float:
        """0.1 mscale ln(factor) + 1 with yarn (Peng et al. 2023, eq. 22), otherwise 1."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0

    @property
    def in_windows(self) -> RopeShape:
        """That of blocks with a window."""
        if not self.window_theta:
            return self
        return RopeShape(theta=self.window_theta, fraction=self.fraction, interleaved=self.interleaved)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormShape:
    """A norm.

    Args:
        kind: "rmsnorm" or "layernorm". epsilon: added to the mean square or the variance.
        bias: whether a layernorm has one. zero_centered: weights are stored less 1.
    """

    kind: str
    epsilon: float
    bias: bool = True
    zero_centered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Sizes of multi-head latent attention.

    Args:
        q_lora_rank: of the latent of queries; 0: there is none. kv_lora_rank: of that of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: features of a head of queries and keys that are not rotated, and that are.
        v_head_dim: of a head of values.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAShape:
    """Adapters of low rank beside frozen weights.

    Args:
        rank: of each. scale: factor of what they add. targets: the matrices that have one.
        saved: layers that are not frozen.
    """

    rank: int
    scale: float
    targets: tuple[str, ...]
    saved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One attention layer.

    Args:
        width: D.
        bias: of the projection to q, k and v. out_bias: of the one back.
        rotary: None: heads are not rotated; otherwise whether pairs are interleaved.
        qk_norm: of queries and keys; None: there is none.
        qk_norm_over: what it normalizes: each head, each head with weights of its own, or all heads of a token.
        scores: how scores are changed.
        latent: of latent attention, whose latents are normalized by `qk_norm`; None: keys and values are projected.
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool
    out_bias: bool
    rotary: bool | None = None
    qk_norm: NormShape | None = None
    qk_norm_over: Literal["head", "own_head", "all_heads"] = "head"
    scores: ScoreShape = field(default_factory=ScoreShape)
    latent: LatentShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPShape:
    """One feed-forward layer.

    Args:
        width: D. inner: F. bias: of both projections.
        activation: one of GATED, "gelu" (by tanh), "gelu_erf", "relu" or "squared_relu".
        clamp: gated: largest gate, and largest absolute value of the other factor; 0: off.
        offset: gated: added to the other factor.
    """

    width: int
    inner: int
    activation: str
    bias: bool
    clamp: float = 0.0
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """Experts in place of feed-forward layers: keys of [model.moe], see there.

    Args:
        num_experts: E. top_k: K. ffn_hidden_size: F of an expert. shared_ffn_hidden_size: 0: there is no shared one.
        weight_scale: factor of the weights of chosen experts.
        groups, groups_per_token: 1: all experts are one group.
        capacity_factor: 0: no slot is dropped.
        dispatch, buffer: mesh.expert_dispatch and mesh.expert_buffer; 0: not set.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    interval: int = 1
    layers: tuple[int, ...] = ()
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_weights: bool = True
    weight_scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["sum", "max"] = "sum"
    expert_bias: bool = False
    expert_bias_rate: float = 1e-3
    balance: Literal["sequence", "microbatch", "none"] = "sequence"
    balance_factor: float = 0.0
    z_loss_factor: float = 0.0
    capacity_factor: float = 0.0
    capacity_of: Literal["row", "microbatch"] = "row"
    drop: Literal["weight", "position"] = "weight"
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    dispatch: Literal["auto", "gather", "all_to_all"] = "auto"
    buffer: float = 0.0

    def is_gathered(self, ep: int) -> bool:
        """Whether ep ranks gather all tokens; by default where that moves half of an all-to-all, or ep is 2.

        It moves ep - 1 times the tokens, an all-to-all top_k (ep - 1) / ep times; but it has rows for the largest load.
        """
        if self.dispatch != "auto":
            return self.dispatch == "gather"
        return ep <= max(2, self.top_k // 2)

    def has_experts(self, number: int) -> bool:
        """Whether this block has experts; the others have a feed-forward layer."""
        if self.layers:
            return number < len(self.layers) and bool(self.layers[number])
        return number % self.interval == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerShape:
    """A Mamba-2 mixer: keys of [model.mamba], see there.

    Args:
        width: D. num_heads, head_dim: H heads of P features. num_groups: G, each of H / G heads that share B and C.
        state_size: N of a head. conv_kernel: tokens of the convolution's window.
        norm_epsilon: of the norm behind the gate.
        dt_limit: smallest and largest step of a token; (0, inf): none.
    """

    width: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int = 4
    chunk_size: int = 128
    norm_epsilon: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def of_groups(self) -> int:
        """Features of B, and of C."""
        return self.num_groups * self.state_size

    @property
    def convolved(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.of_groups

    @property
    def projected(self) -> int:
        """Rows of the first projection: z, x, B, C and the steps."""
        return self.inner + self.convolved + self.num_heads
