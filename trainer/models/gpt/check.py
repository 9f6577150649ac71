"""Rules between the keys of [model] for a GPT, and the sizes that a layout divides.

Each problem is one line with the conflicting values and advice. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.arithmetic import common_divisors, listed, round_up
from trainer.config.parse import sub_sections
from trainer.config.presets import PRESETS
from trainer.config.sections import MLASection, ModelSection, MoESection, RunConfig
from trainer.layers.shapes import GATED
from trainer.models.gpt.shape import ffn_hidden_size, head_dim


def model_problems(config: RunConfig) -> Iterator[str]:
    """Every conflict among the model's sizes and options, and with the length of samples."""
    yield from _latent_problems(config.model, config.model.mla) if config.model.mla else _head_problems(config)
    yield from _size_problems(config)
    yield from _option_problems(config.model)
    yield from _longrope_problems(config)
    yield from _expert_problems(config)
    yield from _later_problems(config)
    yield from _lora_problems(config)
    if config.model.norm_zero_centered and config.kernels.norm not in ("auto", "plain", "compiled"):
        yield (
            f'kernels.norm="{config.kernels.norm}" has no weights that are stored less 1 (model.norm_zero_centered); '
            'set kernels.norm="auto"'
        )


def cut_by_tp(config: RunConfig) -> dict[str, int]:
    """The sizes that tensor parallelism divides, by their setting names."""
    model = config.model
    sizes = {"model.num_heads": model.num_heads}
    sizes["model.ffn_hidden_size" + ("" if model.ffn_hidden_size else " (derived)")] = ffn_hidden_size(config)
    if model.mtp:
        sizes["model.hidden_size"] = model.hidden_size
    if model.moe is not None and model.moe.shared_ffn_hidden_size:
        sizes["model.moe.shared_ffn_hidden_size"] = model.moe.shared_ffn_hidden_size
    if config.mesh.sequence_parallel:
        sizes["train.sequence_length"] = config.train.sequence_length
    return sizes


def float8_sizes(config: RunConfig) -> dict[str, int]:
    """Rows and columns of the matrices of linear layers on a rank, by name."""
    model, train, tp = config.model, config.train, config.mesh.tp
    kv_heads = model.num_kv_heads or model.num_heads
    sizes = {
        "train.micro_batch x train.sequence_length / mesh.cp": train.micro_batch
        * train.sequence_length
        // config.mesh.cp,
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size / mesh.tp": ffn_hidden_size(config) // tp,
    }
    if model.moe is not None:  # experts are computed in 16 bits, unless they are shared
        sizes["model.moe.shared_ffn_hidden_size / mesh.tp"] = (model.moe.shared_ffn_hidden_size or 0) // tp
        if model.moe.interval == 1 and all(model.moe.layers):
            del sizes["model.ffn_hidden_size / mesh.tp"]
    if mla := model.mla:
        heads = model.num_heads // tp
        return sizes | {
            "model.mla.q_lora_rank": mla.q_lora_rank or 0,
            "model.mla.kv_lora_rank": mla.kv_lora_rank,
            "model.mla.kv_lora_rank + qk_rope_head_dim": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "heads x (qk_nope_head_dim + qk_rope_head_dim) / mesh.tp": heads * head_dim(config),
            "heads x (qk_nope_head_dim + v_head_dim) / mesh.tp": heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "heads x v_head_dim / mesh.tp": heads * mla.v_head_dim,
        }
    return sizes | {
        "heads x head size / mesh.tp": model.num_heads * head_dim(config) // tp,
        "heads of q, k and v x head size / mesh.tp": (model.num_heads // tp + 2 * max(1, kv_heads // tp))
        * head_dim(config),
    }


def _size_problems(config: RunConfig) -> Iterator[str]:
    model, length = config.model, config.train.sequence_length
    kv_heads = model.num_kv_heads or model.num_heads
    if model.num_heads % kv_heads:
        yield (
            f"model.num_heads={model.num_heads} is not a multiple of model.num_kv_heads={kv_heads}; "
            f"choose model.num_kv_heads from {listed(common_divisors(model.num_heads))}"
        )
    if model.max_position and model.max_position < length:
        yield (
            f"train.sequence_length={length} is longer than model.max_position={model.max_position}; "
            f"shorten the sequence, set model.max_position to at least {length}, or leave it out"
        )


def _head_problems(config: RunConfig) -> Iterator[str]:
    """Sizes of heads that are impossible."""
    model = config.model
    if not model.head_dim and model.hidden_size % model.num_heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not a multiple of model.num_heads={model.num_heads}; "
            f"choose a multiple, such as {round_up(model.hidden_size, model.num_heads)}, or set model.head_dim"
        )
    elif model.position == "rope" and model.rope_fraction == 1 and head_dim(config) % 2:
        quotient = f"model.hidden_size={model.hidden_size} / model.num_heads={model.num_heads}"
        yield (
            f"{f'model.head_dim={model.head_dim}' if model.head_dim else quotient} is odd, but rope "
            'rotates features in pairs; choose an even head size, or model.position="learned"'
        )
    elif model.position == "rope" and int(head_dim(config) * model.rope_fraction) % 2:
        yield (
            f"model.rope_fraction={model.rope_fraction:g} of {head_dim(config)} features of a head is "
            f"{int(head_dim(config) * model.rope_fraction)}, but rope rotates features in pairs; choose an even number"
        )
    elif model.position == "rope" and int(head_dim(config) * model.rope_fraction) == 0:
        yield (
            f"model.rope_fraction={model.rope_fraction:g} of {head_dim(config)} features of a head rotates none; "
            'raise it, or choose model.position="none"'
        )
    elif model.rope_scaling == "ntk" and int(head_dim(config) * model.rope_fraction) <= 2:
        yield 'model.rope_scaling="ntk" needs more than 2 rotated features of a head; raise model.head_dim'


def _option_problems(model: ModelSection) -> Iterator[str]:
    """Options of the model that have no effect, or are impossible, together with others."""
    if model.position == "relative" and model.family != "t5":
        yield (
            f'model.position="relative" is for model.family="t5", not "{model.family}"; choose "rope", "learned", '
            '"alibi" or "none"'
        )
    preset = PRESETS.get(model.preset or "", {})
    rope, scaling, gated = model.position == "rope", model.rope_scaling, model.activation in GATED
    # (keys, whether they have an effect, what they need)
    needs: tuple[tuple[tuple[str, ...], bool, str], ...] = (
        (("rope_fraction", "rope_interleaved", "rope_interval", "rope_scaling"), rope, 'model.position="rope"'),
        (("rope_factor",), scaling != "none", "a model.rope_scaling"),
        (("rope_window_theta",), rope and model.window is not None, "rope, and a model.window"),
        (("rope_short_factors", "rope_long_factors"), scaling == "longrope", 'model.rope_scaling="longrope"'),
        (
            ("rope_original_length",),
            scaling in ("yarn", "llama3", "longrope"),
            'model.rope_scaling="yarn", "llama3" or "longrope"',
        ),
        (("rope_low_freq_factor", "rope_high_freq_factor"), scaling == "llama3", 'model.rope_scaling="llama3"'),
        (("rope_beta_fast", "rope_beta_slow", "rope_truncate"), scaling == "yarn", 'model.rope_scaling="yarn"'),
        (("activation_clamp", "activation_offset"), gated, f"model.activation from {', '.join(GATED)}"),
        (("window_interval",), model.window is not None, "a model.window"),
        (("norm_bias",), model.norm == "layernorm", 'model.norm="layernorm"'),
    )
    for key, requirement in ((key, requirement) for keys, holds, requirement in needs if not holds for key in keys):
        value = getattr(model, key)
        # Values from a preset were not written by the user.
        if value not in (ModelSection.__dataclass_fields__[key].default, preset.get(key)):
            yield f"model.{key}={value!r} needs {requirement}; set that, or leave model.{key} out"
    if model.rope_scaling != "none" and model.rope_factor == 1:
        yield (
            f'model.rope_scaling="{model.rope_scaling}" changes nothing with model.rope_factor=1; set the factor '
            "by which sequences may be longer, or leave model.rope_scaling out"
        )
    if model.rope_scaling in ("yarn", "llama3", "longrope") and not model.rope_original_length:
        yield (
            f'model.rope_scaling="{model.rope_scaling}" needs model.rope_original_length, the tokens of a sequence '
            "before scaling; set it, such as to 8192"
        )
    if scaling == "llama3" and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        yield (
            f"model.rope_low_freq_factor={model.rope_low_freq_factor:g} is not below "
            f"model.rope_high_freq_factor={model.rope_high_freq_factor:g}; choose a smaller one"
        )
    if scaling == "yarn" and model.rope_beta_slow >= model.rope_beta_fast:
        yield (
            f"model.rope_beta_slow={model.rope_beta_slow:g} is not below "
            f"model.rope_beta_fast={model.rope_beta_fast:g}; choose a smaller one"
        )


def _latent_problems(model: ModelSection, mla: MLASection) -> Iterator[str]:
    """Keys that have no meaning with latent attention, which has sizes of its own and always normalizes latents."""
    derived = {"head_dim": None, "num_kv_heads": None, "qk_norm": False, "bias": False, "rope_fraction": 1.0}
    for key, only in derived.items():
        if (value := getattr(model, key)) != only:
            why = {"qk_norm": "always normalizes its latents", "bias": "has no biases"}.get(key, "has its own sizes")
            yield f"model.{key}={value!r} has no meaning with [model.mla], which {why}; leave it out"
    if model.position != "rope":
        yield f'model.position="{model.position}" cannot be used with [model.mla]; set model.position="rope"'
    if mla.qk_rope_head_dim % 2:
        yield (
            f"model.mla.qk_rope_head_dim={mla.qk_rope_head_dim} is odd, but rope rotates features in pairs; "
            "choose an even number"
        )
    for key, usual in (("mscale", 1.0), ("mscale_all_dim", 0.0)):
        if model.rope_scaling != "yarn" and (value := getattr(mla, key)) != usual:
            yield (f'model.mla.{key}={value:g} needs model.rope_scaling="yarn"; set that, or leave model.mla.{key} out')
    if model.attention_scale and mla.mscale_all_dim:
        yield (
            f"model.attention_scale={model.attention_scale:g} and model.mla.mscale_all_dim={mla.mscale_all_dim:g} "
            "both say by what scores are multiplied; leave one of them out"
        )


def _later_problems(config: RunConfig) -> Iterator[str]:
    """Multi-token prediction is on the last stage, which has no learned positions."""
    model, length = config.model, config.train.sequence_length
    if model.mtp is None:
        return
    if model.position == "learned":
        yield 'model.position="learned" cannot be used with [model.mtp]; choose "rope", "alibi" or "none"'
    if model.mtp.num_layers >= length:
        yield (
            f"model.mtp.num_layers={model.mtp.num_layers} leaves no token of train.sequence_length={length} to "
            f"predict; choose fewer layers"
        )


def without_lora(model: ModelSection) -> list[str]:
    """The sub-sections of a model that adapters do not support."""
    return [
        name for name in sub_sections("model") if name not in ("lora", "gpt_neox") and getattr(model, name) is not None
    ]


def _lora_problems(config: RunConfig) -> Iterator[str]:
    """What adapters cannot be combined with, and the frozen weights that they need."""
    model, lora, settings = config.model, config.model.lora, config.checkpoint
    if lora is None:
        return
    if not settings.init_from and config.data.blend != "mock":
        yield "[model.lora] needs checkpoint.init_from, the folder with the weights that stay frozen; set it"
    rows = ("embedding",) if model.tie_embeddings else ("embedding", "head")
    if settings.new_rows_from and not {*rows} <= {*lora.modules_to_save}:
        fix = f"set model.lora.modules_to_save={[*rows]}"
        yield f"checkpoint.new_rows_from asks for rows that [model.lora] freezes; {fix}"
    if len({*lora.modules_to_save}) < len(lora.modules_to_save) or not {*lora.modules_to_save} <= {*rows}:
        why = "lists one twice" if {*lora.modules_to_save} <= {*rows} else "names the head, which is the embedding"
        yield f"model.lora.modules_to_save={list(lora.modules_to_save)} {why}; set some of {', '.join(rows)}"
    if settings.init_optimizer:
        yield "checkpoint.init_optimizer=true asks for moments of weights that [model.lora] freezes; leave it out"
    for name in without_lora(model):
        yield f"[model.lora] does not support [model.{name}]; leave [model.lora] out to train all weights"
    if len({*lora.targets}) < len(lora.targets) or ("gate" in lora.targets and model.activation not in GATED):
        why = f'has no gate with model.activation="{model.activation}"' if "gate" in lora.targets else "lists one twice"
        yield f"model.lora.targets={list(lora.targets)} {why}; remove it"
    if config.optimizer.name == "muon":
        yield 'optimizer.name="muon" does not support [model.lora]; set optimizer.name="adamw"'
    if config.optimizer.embedding_lr and "embedding" not in lora.modules_to_save:
        yield (
            f"optimizer.embedding_lr={config.optimizer.embedding_lr:g} changes nothing: [model.lora] freezes the "
            "embedding; leave it out"
        )


def _longrope_problems(config: RunConfig) -> Iterator[str]:
    """The lists of longrope have one factor above 0 for each rotated pair."""
    model = config.model
    pairs = int(head_dim(config) * model.rope_fraction) // 2
    if model.rope_scaling != "longrope":
        return
    for key in ("rope_short_factors", "rope_long_factors"):
        factors = getattr(model, key)
        if len(factors) != pairs or min(factors, default=0) <= 0:
            yield (
                f"model.{key} has {len(factors)} numbers, the smallest {min(factors, default=0):g}; "
                f"longrope needs {pairs}, one above 0 for each rotated pair of a head"
            )
    if model.rope_original_length == 1:
        yield "model.rope_original_length=1 is too short for longrope; set it to at least 2"


def _expert_problems(config: RunConfig) -> Iterator[str]:
    """Rules between the keys of [model.moe], and with the layout."""
    moe, mesh = config.model.moe, config.mesh
    if moe is None:
        return
    experts, top_k = moe.num_experts, moe.top_k
    if top_k > experts:
        yield f"model.moe.top_k={top_k} is above model.moe.num_experts={experts}; choose at most {experts}"
    else:
        yield from _group_problems(moe)
    yield from _pattern_problems(config)
    if moe.expert_bias and moe.score != "sigmoid":
        yield (
            f'model.moe.expert_bias=True needs model.moe.score="sigmoid", not "{moe.score}"; set that, or balance by '
            "model.moe.balance"
        )
    if moe.shared_gate and not moe.shared_ffn_hidden_size:
        yield "model.moe.shared_gate=True needs model.moe.shared_ffn_hidden_size; set it, or leave the gate out"
    if not moe.capacity_factor:
        for key, neutral in (("capacity_of", "row"), ("drop", "weight")):
            if (value := getattr(moe, key)) != neutral:
                yield f'model.moe.{key}="{value}" needs a model.moe.capacity_factor; set it, or leave {key} out'
    elif mesh.cp > 1 or (mesh.sequence_parallel and mesh.tp > 1):
        divided = f"mesh.cp={mesh.cp}" if mesh.cp > 1 else f"mesh.tp={mesh.tp} with mesh.sequence_parallel"
        yield (
            f"model.moe.capacity_factor={moe.capacity_factor:g} is a limit for the tokens of whole rows, but "
            f"{divided} divides rows among ranks; leave the capacity out, or set mesh.cp=1 and "
            "mesh.sequence_parallel=false"
        )


def _pattern_problems(config: RunConfig) -> Iterator[str]:
    """The layers with experts."""
    moe, layers = config.model.moe, config.model.num_layers
    assert moe is not None, "the model has experts"
    if not moe.layers:
        return
    if len(moe.layers) != layers:
        yield (
            f"model.moe.layers has {len(moe.layers)} entries, but model.num_layers={layers}; give 0 or 1 for each, "
            "or set model.moe.interval"
        )
    if not any(moe.layers):
        yield "model.moe.layers has no layer with experts; set a 1, or leave [model.moe] out"
    if moe.interval != 1:
        yield f"model.moe.interval={moe.interval} and model.moe.layers are both set; leave one of them out"


def _group_problems(moe: MoESection) -> Iterator[str]:
    """Groups of experts have equal sizes, and enough experts for a token."""
    groups, kept = moe.groups, moe.groups_per_token
    if moe.group_score != "sum" and (kept is None or kept == groups):
        yield f'model.moe.group_score="{moe.group_score}" needs model.moe.groups_per_token, how many are chosen'
    if groups is None:
        if kept is not None:
            yield f"model.moe.groups_per_token={kept} needs model.moe.groups; set it, or leave groups_per_token out"
        return
    if moe.num_experts % groups:
        yield (
            f"model.moe.num_experts={moe.num_experts} cannot be divided into model.moe.groups={groups}; choose from "
            f"{listed(common_divisors(moe.num_experts))}"
        )
        return
    each = moe.num_experts // groups
    if kept is not None and kept > groups:
        yield f"model.moe.groups_per_token={kept} is above model.moe.groups={groups}; choose at most {groups}"
    elif kept is None or kept == groups:
        return
    elif moe.group_score == "max":
        if moe.top_k > kept * each:
            yield (
                f"model.moe.top_k={moe.top_k} is above the {kept * each} experts of "
                f"model.moe.groups_per_token={kept} groups; choose more groups, or fewer experts"
            )
    elif moe.top_k % kept or moe.top_k // kept > each:
        yield (
            f"model.moe.top_k={moe.top_k} experts cannot be chosen evenly from model.moe.groups_per_token={kept} "
            f"groups of {each}; choose a multiple of {kept}, up to {kept * each}"
        )
