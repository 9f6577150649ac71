"""Rules that make the [model] section of a run from Megatron-LM's arguments. Pure.

If a speed option of Megatron-LM also changes the function, that function is chosen here: its fused bias and GELU
compute the tanh form, and the fusion is on unless it is disabled or the linear layers have no bias.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from trainer.config.sections import MambaSection
from trainer.migrate.arguments import Given
from trainer.migrate.settings import Refusal, Setting, is_count

PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_GPT2_VOCABULARY = 50257
_TIKTOKEN_VOCABULARY = 1 << 17
_LATENT_ORIGINAL = 4096
_CAUSAL = (
    "--window-size",
    "--softmax-type",
    "--mtp-num-layers",
    "--multi-latent-attention",
    "--context-parallel-size",
)
_NOT_OF = {  # family -> arguments that its models here do not have
    "bert": (*_CAUSAL, "--untie-embeddings-and-output-weights"),
    "t5": (*_CAUSAL, "--qk-layernorm"),
    "mamba": ("--mtp-num-layers", "--multi-latent-attention", "--no-rope-freq", "--window-attn-skip-freq"),
}
_OFF = {"--softmax-type": "vanilla", "--context-parallel-size": 1}


def model_rules(a: Given) -> Iterator[Setting | Refusal]:
    """Settings of [model]."""
    if a.family != "gpt":
        yield Setting("model.family", a.family, ())
    for flag in _NOT_OF.get(a.family, ()):
        if a[flag] and a[flag] != _OFF.get(flag):
            yield Refusal(flag, f'not supported with {a.program}, whose models are of model.family="{a.family}"')
    if a.family == "bert":
        yield Setting("model.bert.binary_head", not a["--bert-no-binary-head"], ("--bert-no-binary-head",), True)
        yield Setting("model.bert.head_activation", "gelu_erf", (), note="Megatron-LM fuses none in this head")
    if a.family == "t5" and (encoder := a["--num-layers"]):
        decoder, flags = a["--decoder-num-layers"] or encoder, ("--num-layers", "--decoder-num-layers")
        yield Setting("model.num_layers", encoder + decoder, flags, note="of both stacks")
        yield Setting("model.t5.encoder_layers", encoder, flags)
        untied = "--untie-embeddings-and-output-weights"
        yield Setting("model.t5.head_bias", not a[untied], (untied,), False, note="of a tied head, as there")
    yield from _shape(a)
    yield from _position(a)
    yield from _attention(a)
    if a["--multi-latent-attention"]:
        yield from _latent(a)
    if a["--mtp-num-layers"]:
        flags = ("--mtp-num-layers", "--mtp-loss-scaling-factor")
        yield Setting("model.mtp.num_layers", a["--mtp-num-layers"], flags[:1])
        yield Setting("model.mtp.loss_factor", a["--mtp-loss-scaling-factor"], flags[1:])
    yield from _mlp(a)
    if has_experts(a):
        yield from _experts(a)
    yield from _mixers(a)
    yield from _vocabulary(a)


def _shape(a: Given) -> Iterator[Setting | Refusal]:
    latent = a["--multi-latent-attention"]
    if a["--kv-channels"] and not latent:
        yield Setting("model.head_dim", a["--kv-channels"], ("--kv-channels",))
    if latent and "--group-query-attention" in a:
        yield Refusal("--group-query-attention", "Megatron-LM refuses it with --multi-latent-attention; leave it out")
    elif a.family == "t5" and a["--group-query-attention"] and a["--num-query-groups"] != a["--num-attention-heads"]:
        yield Refusal("--group-query-attention", "T5 has keys and values for each head here; leave it out")
    elif a["--group-query-attention"] and not latent:
        flags = ("--group-query-attention", "--num-query-groups")
        yield Setting("model.num_kv_heads", a["--num-query-groups"], flags)
    if a["--max-position-embeddings"]:
        yield Setting("model.max_position", a["--max-position-embeddings"], ("--max-position-embeddings",))
    if a["--normalization"] in ("LayerNorm", "RMSNorm"):
        yield Setting("model.norm", a["--normalization"].lower(), ("--normalization",))
    else:
        yield Refusal("--normalization", "LayerNorm and RMSNorm are supported")
    yield Setting("model.norm_zero_centered", a["--apply-layernorm-1p"], ("--apply-layernorm-1p",), False)
    untied = a["--untie-embeddings-and-output-weights"]
    yield Setting("model.tie_embeddings", not untied, ("--untie-embeddings-and-output-weights",))
    if a["--embedding-init-method-std"] not in (None, a["--init-method-std"]):
        yield Refusal("--embedding-init-method-std", "embeddings start with the deviation of --init-method-std")
    elif "--embedding-init-method-std" in a:
        yield Setting("model.init_std", a["--init-method-std"], ("--init-method-std", "--embedding-init-method-std"))


def _position(a: Given) -> Iterator[Setting | Refusal]:
    rotary = a["--use-rotary-position-embeddings"]
    kind = "rope" if rotary else a["--position-embedding-type"]
    names = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"}
    if a.family == "t5" and kind == "relative":
        names[kind] = kind
        for key, flag in (
            ("buckets", "--relative-attention-num-buckets"),
            ("distance", "--relative-attention-max-distance"),
        ):
            yield Setting(f"model.t5.relative_{key}", a[flag], (flag,))
    if kind not in names:
        yield Refusal("--position-embedding-type", f"no model here supports {kind}; rope is the nearest")
        return
    flags = ["--use-rotary-position-embeddings" if rotary else "--position-embedding-type"]
    flags += ["--no-position-embedding"] if kind == "rope" else []
    yield Setting("model.position", names[kind], tuple(flags))
    if a["--no-position-embedding"] and kind != "rope":
        yield Refusal(
            "--no-position-embedding", "Megatron-LM refuses it; --position-embedding-type none is the nearest"
        )
    if a["--multi-latent-attention"] and kind != "rope":
        yield Refusal("--position-embedding-type", "with --multi-latent-attention only rope has no effect of its own")
    if names[kind] != "rope":
        return
    yield Setting("model.rope_theta", float(a["--rotary-base"]), ("--rotary-base",))
    if kind == "yarn" and a["--rotary-interleaved"]:
        yield Refusal("--rotary-interleaved", "Megatron-LM refuses it with yarn; leave it out")
    elif kind == "rope":
        yield Setting("model.rope_fraction", a["--rotary-percent"], ("--rotary-percent",), 1.0)
    if a["--multi-latent-attention"] and a["--rotary-interleaved"]:
        yield Refusal("--rotary-interleaved", "pairs are neighbours with --multi-latent-attention; leave it out")
    elif a["--multi-latent-attention"]:
        yield Setting("model.rope_interleaved", True, ("--multi-latent-attention",), note="as always there")
    else:
        yield Setting("model.rope_interleaved", a["--rotary-interleaved"], ("--rotary-interleaved",), False)
    if a["--no-rope-freq"] is not None and not is_count(a["--no-rope-freq"]):
        yield Refusal("--no-rope-freq", "a list of layers is not supported; the nearest setting is one integer")
    elif a["--no-rope-freq"] is not None:
        yield Setting("model.rope_interval", int(a["--no-rope-freq"]), ("--no-rope-freq",))
    if not a["--multi-latent-attention"]:
        yield from _yarn(a) if kind == "yarn" else _rope_scaling(a)


def _yarn(a: Given) -> Iterator[Setting | Refusal]:
    """Megatron-LM's yarn, which ignores --rotary-percent and the other scalings."""
    factor, original = "--rotary-scaling-factor", "--yarn-original-max-position-embeddings"
    if a[factor] == 1:
        return  # the function of rope
    neutral = {"--mscale": 1, "--mscale-all-dim": 0}
    flags = ("--position-embedding-type", *neutral, "--yarn-correction-range-round-to-int")
    yield Setting("model.rope_scaling", "yarn", flags)
    yield Setting("model.rope_factor", a[factor], (factor,))
    yield Setting("model.rope_original_length", a[original], (original,))
    for end in ("fast", "slow"):
        yield Setting(f"model.rope_beta_{end}", a[f"--yarn-beta-{end}"], (f"--yarn-beta-{end}",))
    for name, value in neutral.items():
        if a[name] != value:
            yield Refusal(name, f"rotated heads are scaled by 0.1 ln(factor) + 1 here, as with {name} {value}")


def _latent(a: Given) -> Iterator[Setting | Refusal]:
    """Latent attention, whose yarn has fixed lengths: those of its own configuration, not --yarn-..."""
    if not a["--qk-layernorm"]:
        yield Refusal("--multi-latent-attention", "latents are always normalized here; add --qk-layernorm")
    if not a["--disable-bias-linear"]:
        yield Refusal("--multi-latent-attention", "it has no biases here; add --disable-bias-linear")
    sizes = {"kv_lora_rank": "--kv-lora-rank", "qk_nope_head_dim": "--qk-head-dim", "v_head_dim": "--v-head-dim"}
    sizes |= {"qk_rope_head_dim": "--qk-pos-emb-head-dim"} | (
        {"q_lora_rank": "--q-lora-rank"} if a["--q-lora-rank"] else {}
    )
    for key, flag in sizes.items():
        yield Setting(f"model.mla.{key}", a[flag], ("--multi-latent-attention", "--qk-layernorm", flag))
    kind, factor, all_dim = a["--rope-type"] or "yarn", a["--rotary-scaling-factor"], a["--mscale-all-dim"]
    flags = ("--rope-type", "--rotary-scaling-factor")
    if kind not in ("rope", "yarn"):
        yield Refusal("--rope-type", "expected rope or yarn")
    elif kind == "yarn" and factor > 1:
        yield Setting("model.rope_scaling", "yarn", flags, note="its default with --multi-latent-attention")
        yield Setting("model.rope_factor", factor, flags)
        yield Setting("model.rope_original_length", _LATENT_ORIGINAL, flags, note="Megatron-LM's, which is fixed")
        yield Setting("model.mla.mscale", a["--mscale"], ("--mscale",), 1.0)
        yield Setting("model.mla.mscale_all_dim", all_dim, ("--mscale-all-dim",), 0.0)
    elif factor > 1 and all_dim:
        magnitude = 0.1 * all_dim * math.log(factor) + 1
        scale = magnitude**2 / math.sqrt(a["--qk-head-dim"] + a["--qk-pos-emb-head-dim"])
        note = "Megatron-LM multiplies scores by it without yarn, too"
        yield Setting("model.attention_scale", scale, (*flags, "--mscale-all-dim"), note=note)


def _rope_scaling(a: Given) -> Iterator[Setting | Refusal]:
    factor = a["--rotary-seq-len-interpolation-factor"]
    if a["--use-rope-scaling"] and factor:
        yield Refusal("--use-rope-scaling", "one scaling at a time; leave out --rotary-seq-len-interpolation-factor")
    elif a["--use-rope-scaling"]:
        flags = ("--use-rope-scaling", "--rope-scaling-factor")
        yield Setting("model.rope_scaling", "llama3", flags)
        yield Setting("model.rope_factor", a["--rope-scaling-factor"], flags)
        yield Setting("model.rope_original_length", 8192, flags)
        yield Setting("model.rope_low_freq_factor", 1.0, flags)
        yield Setting("model.rope_high_freq_factor", 4.0, flags)
    elif factor:
        yield Setting("model.rope_scaling", "linear", ("--rotary-seq-len-interpolation-factor",))
        yield Setting("model.rope_factor", float(factor), ("--rotary-seq-len-interpolation-factor",))


def _attention(a: Given) -> Iterator[Setting | Refusal]:
    if not a["--multi-latent-attention"]:
        yield Setting("model.qk_norm", a["--qk-layernorm"], ("--qk-layernorm",), False)
    sinks = {"vanilla": "none", "off-by-one": "zero", "learnable": "learned"}
    if a["--softmax-type"] not in sinks:
        yield Refusal("--softmax-type", "expected vanilla, off-by-one or learnable")
    else:
        yield Setting("model.attention_sinks", sinks[a["--softmax-type"]], ("--softmax-type",), "none")
    every = a["--window-attn-skip-freq"]
    if a["--window-size"] is None:
        return
    sides = [int(number) for number in re.findall(r"-?[0-9]{1,18}", a["--window-size"])]
    if len(sides) != 2 or sides[0] < 0 or sides[1] != 0:
        yield Refusal("--window-size", "expected W,0: W tokens before a token, and none after it")
        return
    yield Setting("model.window", sides[0] + 1, ("--window-size",))
    if every is not None and not is_count(every):
        yield Refusal(
            "--window-attn-skip-freq", "a list of layers is not supported; the nearest setting is one integer"
        )
    elif every is not None:
        yield Setting("model.window_interval", int(every), ("--window-attn-skip-freq",))


def _mlp(a: Given) -> Iterator[Setting | Refusal]:
    bias, given = not a["--disable-bias-linear"], [name for name in _ACTIVATIONS if a[name]]
    gated = bool({"--swiglu", "--quick-geglu"}.intersection(given))
    if a["--ffn-hidden-size"] or a["--hidden-size"]:
        yield Setting("model.ffn_hidden_size", _ffn_hidden_size(a), ("--ffn-hidden-size",))
    if len(given) > 1:
        yield Refusal(given[1], f"Megatron-LM refuses it together with {given[0]}; leave one of them out")
    elif given:
        (flag,) = given
        yield Setting("model.activation", flag.removeprefix("--").replace("-", "_"), (flag,))
    else:
        exact = (a["--no-bias-gelu-fusion"] or not bias) and not a["--use-te-activation-func"]
        fusion = ("--no-bias-gelu-fusion", "--disable-bias-linear", "--use-te-activation-func")
        yield Setting("model.activation", "gelu_erf" if exact else "gelu", fusion)
    for name, key in (("--activation-func-clamp-value", "clamp"), ("--glu-linear-offset", "offset")):
        if a[name] and a["--swiglu"] and not a["--no-bias-swiglu-fusion"]:
            yield Refusal(name, "the fused SwiGLU ignores it; add --no-bias-swiglu-fusion, or leave it out")
        elif a[name] and gated:
            yield Setting(f"model.activation_{key}", a[name], (name, "--no-bias-swiglu-fusion"))
    value: bool | str = "qkv" if a["--add-qkv-bias"] and not bias else bias
    yield Setting("model.bias", value, ("--disable-bias-linear", "--add-qkv-bias"))


_ACTIVATIONS = ("--swiglu", "--squared-relu", "--quick-geglu")


def _ffn_hidden_size(a: Given) -> int:
    hidden: int = a["--hidden-size"] or 0
    return int(a["--ffn-hidden-size"] or (4 * hidden * 2 // 3 // 64 * 64 if a["--swiglu"] else 4 * hidden))


def has_experts(a: Given) -> bool:
    """Whether layers of the model have experts; those of hybrid models only where the pattern says E."""
    pattern = next((a[flag] for flag in PATTERNS if a[flag]), "")
    return bool(a["--num-experts"]) and (a.family == "gpt" or (a.family == "mamba" and "E" in pattern))


def _experts(a: Given) -> Iterator[Setting | Refusal]:
    """Settings of [model.moe]."""
    for key, flag in (("num_experts", "--num-experts"), ("top_k", "--moe-router-topk")):
        yield Setting(f"model.moe.{key}", a[flag], (flag,))
    size = a["--moe-ffn-hidden-size"] or (_ffn_hidden_size(a) if a["--ffn-hidden-size"] or a["--hidden-size"] else None)
    yield Setting("model.moe.ffn_hidden_size", size, ("--moe-ffn-hidden-size", "--ffn-hidden-size"))
    if a.family != "mamba":  # whose pattern says it
        yield from _expert_layers(a)
    score = a["--moe-router-score-function"]
    if score not in ("softmax", "sigmoid"):
        yield Refusal("--moe-router-score-function", "expected softmax or sigmoid")
    else:
        yield Setting("model.moe.score", score, ("--moe-router-score-function",), "softmax")
    pre = a["--moe-router-pre-softmax"] and score == "softmax"
    yield Setting("model.moe.normalize_weights", not pre, ("--moe-router-pre-softmax",), True)
    copied: tuple[tuple[str, str], ...] = (
        ("groups", "--moe-router-num-groups"),
        ("groups_per_token", "--moe-router-group-topk"),
        ("weight_scale", "--moe-router-topk-scaling-factor"),
        ("z_loss_factor", "--moe-z-loss-coeff"),
        ("shared_ffn_hidden_size", "--moe-shared-expert-intermediate-size"),
    )
    for key, flag in copied:
        if a[flag]:
            yield Setting(f"model.moe.{key}", a[flag], (flag,))
    yield Setting("model.moe.shared_gate", a["--moe-shared-expert-gate"], ("--moe-shared-expert-gate",), False)
    if a["--moe-router-enable-expert-bias"]:
        yield Setting("model.moe.expert_bias", True, ("--moe-router-enable-expert-bias",))
        rate = "--moe-router-bias-update-rate"
        yield Setting("model.moe.expert_bias_rate", a[rate], (rate,))
    yield from _balance(a)
    if a["--moe-expert-capacity-factor"]:
        yield from _capacity(a)


_OF_MIXERS: Mapping[str, str] = {
    "--hybrid-attention-ratio": "attention_ratio",
    "--hybrid-mlp-ratio": "mlp_ratio",
    "--mamba-num-heads": "num_heads",
    "--mamba-head-dim": "head_dim",
    "--mamba-num-groups": "num_groups",
    "--mamba-state-dim": "state_size",
}
_LAYERS = "M*-E"  # letters of a pattern: mixer, attention, MLP, experts


def _mixers(a: Given) -> Iterator[Setting | Refusal]:
    """Settings of [model.mamba]."""
    if a.family != "mamba":
        mixers = (flag for flag, key in _OF_MIXERS.items() if a[flag] != getattr(MambaSection(), key))
        for flag in (*(flag for flag in PATTERNS if a[flag]), *(flag for flag in mixers if flag in a)):
            yield Refusal(flag, "pretrain_mamba.py alone has such layers; leave it out, or name that program")
        return
    for flag, key in _OF_MIXERS.items():
        if a[flag] != getattr(MambaSection(), key):  # its defaults are ours
            yield Setting(f"model.mamba.{key}", a[flag], (flag,))
    for flag in [flag for flag in PATTERNS if a[flag]][:1]:
        stages = a[flag].split("|")
        if "/" in a[flag]:
            yield Refusal(flag, "layers that predict later tokens (/) are not supported here; leave them out")
            continue
        pattern = "".join(stages)
        if unknown := sorted({*pattern} - {*_LAYERS}):
            yield Refusal(flag, f"unknown letters: {' '.join(unknown)}; known are {' '.join(_LAYERS)}")
            continue
        yield Setting("model.mamba.pattern", pattern, (flag,))
        yield Setting("model.num_layers", len(pattern), ("--num-layers", flag), note="those of the pattern, as there")
        pp = a["--pipeline-model-parallel-size"]
        if len(stages) == 1:
            continue
        if pp < 2 or len(stages) % pp:
            ranks = f"{len(stages)} stages for --pipeline-model-parallel-size {pp}"
            yield Refusal(flag, f"{ranks}; leave | out, or use two ranks or more and a multiple of them as stages")
            continue
        yield Setting("mesh.layers_per_stage", tuple(map(len, stages)), (flag,), note="its | cut it into stages")
        if len(stages) > pp:
            yield Setting("mesh.schedule", "interleaved", (flag,))
            yield Setting("mesh.virtual_pipeline", len(stages) // pp, (flag,))


def _expert_layers(a: Given) -> Iterator[Setting | Refusal]:
    """A number, or a list as Python writes it: [0]*3+[1]*58."""
    flag = "--moe-layer-freq"
    text = "".join(str(a[flag]).split()).replace("(", "").replace(")", "")
    if is_count(text) and int(text):
        yield Setting("model.moe.interval", int(text), (flag,), 1)
        return
    if re.fullmatch(r"[01](,[01])+", text):
        text = f"[{text}]"
    layers: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*([0-9]{1,5}))?", part)
        if match is None:
            yield Refusal(flag, "expected a number, or a list such as [0]*3+[1]*58")
            return
        layers += [int(number) for number in match[1].split(",")] * int(match[2] or 1)
    yield Setting("model.moe.layers", layers, (flag,))


def _balance(a: Given) -> Iterator[Setting | Refusal]:
    flags = ("--moe-router-load-balancing-type", "--moe-aux-loss-coeff")
    kind, factor = (a[flag] if isinstance(a[flag], str) else ",".join(map(str, a[flag] or ())) for flag in flags)
    names = {"aux_loss": "microbatch", "seq_aux_loss": "sequence", "none": "none"}
    if kind not in names:
        yield Refusal(flags[0], "expected one of aux_loss, seq_aux_loss and none; the nearest is seq_aux_loss")
        return
    yield Setting("model.moe.balance", names[kind], flags[:1])
    try:
        number = float(factor)
    except ValueError:
        yield Refusal(flags[1], "expected one number")
        return
    yield Setting("model.moe.balance_factor", number, flags[1:])


def _capacity(a: Given) -> Iterator[Setting | Refusal]:
    names = {"probs": "weight", "position": "position"}
    flags = ("--moe-expert-capacity-factor", "--moe-token-drop-policy")
    if a[flags[1]] not in names:
        yield Refusal(flags[1], "expected probs or position")
        return
    yield Setting("model.moe.capacity_factor", a[flags[0]], flags[:1])
    yield Setting("model.moe.capacity_of", "microbatch", flags[:1])
    yield Setting("model.moe.drop", names[a[flags[1]]], flags[1:], "weight")


def _vocabulary(a: Given) -> Iterator[Setting | Refusal]:
    """Megatron-LM's loss includes the padding rows, so here they are rows of the vocabulary."""
    kind = a["--tokenizer-type"] if "--tokenizer-type" in a or a.continues_text else "BertWordPieceLowerCase"
    if a["--padded-vocab-size"]:
        yield Setting("model.vocab_size", a["--padded-vocab-size"], ("--padded-vocab-size",))
        return
    if kind == "NullTokenizer" and a["--vocab-size"]:
        size, why = a["--vocab-size"] + 1, "its end of document included"
    elif kind == "TikTokenizer":
        size, why = a["--vocab-size"] or _TIKTOKEN_VOCABULARY, "its size"
    elif kind == "GPT2BPETokenizer":
        size, why = _GPT2_VOCABULARY, "its size"
    else:
        note = "the manifest's is used; for the same loss, over the padding too, set it to Megatron's padded size"
        if a["--mock-data"]:
            note = "set it, to Megatron's padded size of the tokenizer's vocabulary: mock data has no manifest"
        yield Setting("model.vocab_size", None, ("--tokenizer-type",), note=note)
        return
    multiple = a["--make-vocab-size-divisible-by"] * a["--tensor-model-parallel-size"]
    if a["--no-pad-vocab-size"]:
        flags_read = ("--no-pad-vocab-size", "--tokenizer-type", "--vocab-size")
        yield Setting("model.vocab_size", size, flags_read, note=f"{why}, without padding")
        return
    if multiple < 1:
        yield Refusal("--make-vocab-size-divisible-by", "expected a number of at least 1")
        return
    flags = ("--tokenizer-type", "--make-vocab-size-divisible-by")
    read = flags if kind == "GPT2BPETokenizer" else (*flags, "--vocab-size")
    padded = -(-size // multiple) * multiple
    yield Setting("model.vocab_size", padded, read, note=f"{size} ({why}) padded to a multiple of {multiple}")
