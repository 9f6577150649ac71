"""Rules between the keys of [model] for a T5, and the sizes that a layout divides. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.sections import RunConfig
from trainer.models.gpt.check import cut_by_tp as gpt_cut_by_tp
from trainer.models.gpt.check import float8_sizes as gpt_float8_sizes
from trainer.models.gpt.check import model_problems
from trainer.models.t5.shape import decoder_length, encoder_layers, section_of


def problems(config: RunConfig) -> Iterator[str]:
    """Every conflict among the model's sizes and options, and with the lengths of both rows."""
    yield from model_problems(config)
    model, section, encoder = config.model, section_of(config), encoder_layers(config)
    if not 0 < encoder < model.num_layers:
        yield (
            f"model.t5.encoder_layers={encoder} of model.num_layers={model.num_layers} leaves one stack without "
            "layers; set num_layers to those of both together"
        )
    if model.num_kv_heads not in (None, model.num_heads):
        yield (
            f"model.num_kv_heads={model.num_kv_heads} is not model.num_heads={model.num_heads}, which T5 has for keys "
            "and values too; leave model.num_kv_heads out"
        )
    if model.position == "learned" and model.max_position and model.max_position < decoder_length(config):
        yield (
            f"data.t5.decoder_length={decoder_length(config)} is longer than model.max_position={model.max_position}; "
            f"shorten the decoder, or set model.max_position to at least {decoder_length(config)}"
        )
    refused = {
        "window": model.window,
        "qk_norm": model.qk_norm,
        "attention_softcap": model.attention_softcap,
        "attention_sinks": model.attention_sinks != "none",
        'position="alibi"': model.position == "alibi",
        'rope_scaling="longrope"': model.rope_scaling == "longrope",
        'block_norm="' + model.block_norm + '"': model.block_norm != "input",
    }
    for name in (name for name, is_set in refused.items() if is_set):
        yield f'model.{name} is not supported by model.family="t5"; leave it out, or choose another family'
    if config.mesh.cp > 1:
        yield f'mesh.cp={config.mesh.cp} is not supported by model.family="t5": set mesh.cp=1, or use mesh.tp'
    if section.relative_distance <= section.relative_buckets // 2:
        yield (
            f"model.t5.relative_distance={section.relative_distance} is not above half of "
            f"model.t5.relative_buckets={section.relative_buckets}, the distances with a bucket of their own; raise it"
        )


def cut_by_tp(config: RunConfig) -> dict[str, int]:
    """The sizes that tensor parallelism divides, by their setting names."""
    sizes = gpt_cut_by_tp(config)
    if config.mesh.sequence_parallel:
        sizes["data.t5.decoder_length"] = decoder_length(config)
    return sizes


def float8_sizes(config: RunConfig) -> dict[str, int]:
    """Rows and columns of the matrices of linear layers on a rank, by name."""
    decoder = config.train.micro_batch * decoder_length(config)
    return {**gpt_float8_sizes(config), "train.micro_batch x data.t5.decoder_length": decoder}
