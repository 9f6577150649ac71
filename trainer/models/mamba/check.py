"""Rules between the keys of [model] for Mamba-2 and hybrids, and the sizes that a layout divides. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.arithmetic import common_divisors, listed
from trainer.config.sections import RunConfig
from trainer.models.gpt.check import cut_by_tp as gpt_cut_by_tp
from trainer.models.gpt.check import float8_sizes as gpt_float8_sizes
from trainer.models.gpt.check import model_problems
from trainer.models.gpt.shape import ffn_hidden_size
from trainer.models.mamba.shape import LETTERS, num_heads, pattern_of, section_of

_KNOWN = "M (a mixer), * (attention), - (an MLP) and E (experts)"


def problems(config: RunConfig) -> Iterator[str]:
    """Every conflict among the model's sizes and options."""
    yield from _pattern_problems(config)
    yield from _mixer_problems(config)
    yield from _unsupported(config)
    if "*" not in pattern_of(config):  # keys of attention have no effect
        model = replace(config.model, num_heads=1, num_kv_heads=None, head_dim=2, rope_fraction=1.0)
        config = replace(config, model=model)
    yield from model_problems(config)


def _pattern_problems(config: RunConfig) -> Iterator[str]:
    model, section, pattern = config.model, section_of(config), pattern_of(config)
    for name in ("attention_ratio", "mlp_ratio"):
        if (ratio := getattr(section, name)) and section.pattern is not None:
            yield f"model.mamba.{name}={ratio:g} and model.mamba.pattern are both set; leave one of them out"
    if unknown := sorted({*pattern} - {*LETTERS}):
        advice = "; stages are divided by mesh.layers_per_stage" if "|" in unknown else ""
        yield (f'model.mamba.pattern="{pattern}" has unknown letters: {" ".join(unknown)}; known are {_KNOWN}{advice}')
    elif len(pattern) != model.num_layers:
        yield (
            f"model.mamba.pattern has {len(pattern)} letters, but model.num_layers={model.num_layers}; give a letter "
            "for each layer"
        )
    if section.pattern is None and section.attention_ratio + section.mlp_ratio > 1:
        yield (
            f"model.mamba.attention_ratio={section.attention_ratio:g} and mlp_ratio={section.mlp_ratio:g} add up "
            "to more than 1; lower one of them"
        )
    if "E" in pattern and model.moe is None:
        yield "model.mamba.pattern has layers with experts (E); add [model.moe]"
    if model.moe is not None:
        if "E" not in pattern:
            yield "[model.moe] is set, but model.mamba.pattern has no layer with experts; write E, or leave it out"
        if model.moe.layers or model.moe.interval != 1:
            key = "layers" if model.moe.layers else "interval"
            yield f'model.moe.{key} has no effect with model.family="mamba"; model.mamba.pattern says which layers (E)'


def _mixer_problems(config: RunConfig) -> Iterator[str]:
    model, section, heads = config.model, section_of(config), num_heads(config)
    if not section.num_heads and 2 * model.hidden_size % section.head_dim:
        yield (
            f"2 x model.hidden_size={2 * model.hidden_size} is not a multiple of "
            f"model.mamba.head_dim={section.head_dim}; choose another size, or set model.mamba.num_heads"
        )
    if heads % section.num_groups:
        of = "model.mamba.num_heads" if section.num_heads else "2 x model.hidden_size / model.mamba.head_dim"
        yield (
            f"{of} = {heads} heads are not a multiple of model.mamba.num_groups={section.num_groups}; choose "
            f"model.mamba.num_groups from {listed(common_divisors(heads))}"
        )
    if section.dt_min > section.dt_max:
        yield f"model.mamba.dt_min={section.dt_min:g} is above model.mamba.dt_max={section.dt_max:g}; lower it"
    if section.dt_limit_max is not None and section.dt_limit_min > section.dt_limit_max:
        yield (
            f"model.mamba.dt_limit_min={section.dt_limit_min:g} is above "
            f"model.mamba.dt_limit_max={section.dt_limit_max:g}; lower it"
        )


def _unsupported(config: RunConfig) -> Iterator[str]:
    model = config.model
    refused = {
        f'block_norm="{model.block_norm}"': model.block_norm != "input",
        f"window_interval={model.window_interval}": model.window_interval,
        f"rope_interval={model.rope_interval}": model.rope_interval,
        'position="relative"': model.position == "relative",
    }
    for name in (name for name, is_set in refused.items() if is_set):
        yield f'model.{name} is not supported by model.family="mamba"; leave it out'
    cp, length, width = config.mesh.cp, config.train.sequence_length, section_of(config).conv_kernel
    if cp > 1 and "M" in pattern_of(config) and length // (2 * cp) < width - 1:
        yield (
            f"train.sequence_length={length} with mesh.cp={cp} makes chunks of {length // (2 * cp)} tokens, fewer than "
            f"the {width - 1} before a token that model.mamba.conv_kernel={width} reads; lower mesh.cp"
        )


def cut_by_tp(config: RunConfig) -> dict[str, int]:
    """The sizes that tensor parallelism divides, by their setting names."""
    section, pattern, sizes = section_of(config), pattern_of(config), gpt_cut_by_tp(config)
    if "*" not in pattern:
        del sizes["model.num_heads"]
    if "-" not in pattern:
        sizes = {name: size for name, size in sizes.items() if not name.startswith("model.ffn_hidden_size")}
    if "M" in pattern:
        name = "model.mamba.num_heads" + ("" if section.num_heads else " (derived)")
        sizes |= {name: num_heads(config), "model.mamba.num_groups": section.num_groups}
    return sizes


def float8_sizes(config: RunConfig) -> dict[str, int]:
    """Rows and columns of the matrices of linear layers on a rank, by name."""
    section, pattern, tp = section_of(config), pattern_of(config), config.mesh.tp
    sizes = gpt_float8_sizes(config)
    if "*" not in pattern:
        sizes = {name: size for name, size in sizes.items() if not name.startswith("heads")}
    sizes.pop("model.ffn_hidden_size / mesh.tp", None)
    if "-" in pattern:
        sizes["model.ffn_hidden_size / mesh.tp"] = ffn_hidden_size(config) // tp
    if "M" in pattern:
        inner, of_groups = num_heads(config) * section.head_dim, section.num_groups * section.state_size
        sizes["mixer heads x head size / mesh.tp"] = inner // tp
        sizes["2 x (mixer heads x head size + groups x state size) + mixer heads, / mesh.tp"] = (
            2 * inner + 2 * of_groups + num_heads(config)
        ) // tp
    return sizes
