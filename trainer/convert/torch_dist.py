"""Megatron-Core's distributed checkpoints (torch_dist): chunks of tensors, and settings in common.pt.

    latest_checkpointed_iteration.txt   a number, or "release"
    iter_0000003/.metadata              torch.distributed.checkpoint: see distcp.py
                 common.pt              all that is not cut over ranks; metadata.json: names of the formats

Layers are stacked along a leading axis, whatever the layout. Moments are read in three forms: Adam's and the
distributed optimizer's fully reshardable one, which have the model's names, and the dp-reshardable one, whose flat
buffers say nothing of tp and pp, and are read where both are 1.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mdata import UsageError
from mdata.errors import few
from trainer.convert.distcp import METADATA, ChunkSource, FlatSource, JoinedSource
from trainer.convert.links import Linked, Source, TensorInfo
from trainer.convert.megatron_args import from_arguments
from trainer.convert.megatron_folder import (
    Training,
    adam_steps,
    block_numbers,
    check_layers,
    check_rows,
    iteration_folder,
    layer_number,
    training_of,
)
from trainer.convert.megatron_names import (
    StateDictLayout,
    buffer_links,
    has_experts,
    is_ignored,
    megatron_links,
    num_rows,
    stacks_named,
)
from trainer.convert.model_folder import ModelFolder, check_tensors, check_used
from trainer.convert.torch_file import load_torch
from trainer.models.family import Family, ModelShape, family_of

COMMON = "common.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = ("param", "fp32_param")  # what optimizers call main weights
_FLAT = "optimizer.distributed."
_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_BUCKET = re.compile(r"(optimizer\.distributed\.dp_group_idx_0\.gbuf_idx_0\..*bucket_idx_(\d{1,9}))\.param")
_MODULES = (
    "input_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_STACKED = ("decoder.layers.", "encoder.layers.")
_MOST_LAYERS = 1 << 16  # of [model]
_ALIGNMENT = 64  # elements at which each parameter of a flat buffer begins


class _States(NamedTuple):
    """The place of the optimizer's tensors.

    Args:
        source: of them and the model's. layouts: state of ours -> the form of the names that it has there.
        steps: updates applied; None: not recorded here. notes: for the user.
    """

    source: Source
    layouts: Mapping[str, StateDictLayout]
    steps: int | None = None
    notes: tuple[str, ...] = ()


def is_torch_dist(path: Path) -> bool:
    """Whether this is such a folder, or one of its iterations."""
    folder = iteration_folder(path)
    return folder is not None and (folder / METADATA).is_file()


def open_torch_dist(path: Path, *, settings: Mapping[str, Any]) -> ModelFolder:
    """A torch_dist checkpoint.

    Args:
        path: the folder, or one iteration of it. settings: keys of [model] that its args lack or have wrong.

    Raises:
        UsageError: an unsupported model or form. DamageError: files or tensors that are missing or do not fit.
    """
    folder = iteration_folder(path)
    assert folder is not None, "is_torch_dist was asked before"
    training = training_of(load_torch(folder / COMMON), where=folder / COMMON)
    source = ChunkSource(folder)
    model = {name: info for name, info in source.tensors.items() if not name.startswith("optimizer.")}
    plain = {
        re.sub(r"^(decoder\.layers)\.\d+\.", r"\1.", name): model[theirs]
        for name, theirs in stacks_named(model).items()
    }
    config, notes = from_arguments(training.arguments, plain, where=str(folder / COMMON), settings=settings)
    rows = num_rows(model)
    check_rows(config, rows, where=folder)
    check_layers(config, _layers(model), where=folder)
    layout = StateDictLayout(
        family=family_of(config),
        layers=range(config.model.num_layers),
        padded_rows=rows,
        stacked=all(layer_number(name) is None for name in model),
        fused=any(".layer_norm_" in name for name in model),
        experts_together=True,
        # Of Megatron-Core's own layers those of experts have the name of a fused one, too.
        renamed={} if any("pre_mlp_layernorm" in name for name in model) else _MLP_NORM,
        written=True,
    )
    shape = layout.family.shape(config, config.model.vocab_size or 0)
    links = [*megatron_links(shape, layout), *buffer_links(shape, layout)]
    check_tensors(source.tensors, {link.theirs.tensor: link.theirs.shape for link in links}, where=folder)
    names = sorted(name for name in model if not is_ignored(name, layout.family.megatron))
    check_used(names, {link.theirs.tensor for link in links}, where=folder)
    states = _states(source, shape, layout, training=training)
    every = [link for state, form in states.layouts.items() for link in megatron_links(shape, form, state=f"{state}/")]
    every += buffer_links(shape, layout)
    if states.steps is not None:
        training = dataclasses.replace(training, adam_steps=states.steps)
    return ModelFolder(
        path=folder,
        format="torch_dist",
        config=config,
        source=Linked(states.source, every),
        run=training.run(config),
        notes=(*notes, *states.notes),
    )


def _layers(model: Mapping[str, TensorInfo]) -> set[int]:
    """The numbers of the blocks that have tensors, stacked or not."""
    if numbers := block_numbers(model):
        return numbers
    of_stack = (
        max((info.shape[0] for name, info in model.items() if name.startswith(stack) and info.shape), default=0)
        for stack in _STACKED
    )
    return set(range(min(sum(of_stack), _MOST_LAYERS)))


def _states(source: ChunkSource, shape: ModelShape, layout: StateDictLayout, *, training: Training) -> _States:
    """Which tensors are the weights and the moments; main weights of fp32 where the optimizer has them."""
    if any(name.startswith(_FLAT) for name in source.tensors):
        sizes = [training.arguments.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline")]
        megatron = layout.family.megatron
        decoder = megatron is not None and megatron.stack == "decoder" and megatron.place is None
        further = any(name.startswith("mtp.") for name in source.tensors)
        decoder = decoder and not further and not has_experts(shape, layout)
        if sizes == [1, 1] and decoder:
            return _flat_states(source, shape, layout)
        others = "of decoders without experts and further layers (mtp) only"
        why = f"for tp = pp = 1, not {sizes}" if decoder else others
        note = f"the optimizer's state is left out: its dp-reshardable form is read {why}"
        return _States(source, {"weight": layout}, notes=(note,))
    names = list(source.tensors)
    main = next(
        (main_name for main_name in _MAIN if any(name.startswith(f"optimizer.state.{main_name}.") for name in names)),
        None,
    )
    prefixes = {"weight": "" if main is None else f"optimizer.state.{main}."}
    for moment in MOMENTS:
        prefix = f"optimizer.state.{moment}."
        if any(name.startswith(prefix) for name in names):
            prefixes[moment] = prefix
    layouts = {
        state: dataclasses.replace(layout, prefix=prefix, aliases=_aliases(layout.family, prefix, names))
        for state, prefix in prefixes.items()
    }
    for state, form in layouts.items():
        wanted = {main_name.theirs.tensor: main_name.theirs.shape for main_name in megatron_links(shape, form)}
        check_tensors(source.tensors, wanted, where=Path(f"the optimizer's {state}"))
    return _States(source, layouts)


def _aliases(family: Family, prefix: str, names: Collection[str]) -> Literal["none", "instead"]:
    """Whether the optimizer's state is under the other names of tensors."""
    others = () if family.megatron is None or not prefix else family.megatron.aliases.values()
    return "instead" if any(prefix + name in names for name in others) else "none"


def _flat_states(source: ChunkSource, shape: ModelShape, layout: StateDictLayout) -> _States:
    """Moments and main weights in the flat buffers of a distributed optimizer on one model-parallel rank.

    Raises:
        UsageError: the buffers are not laid out as a known version does it.
    """
    buckets = sorted({(int(match[2]), match[1]) for name in source.tensors if (match := _BUCKET.fullmatch(name))})
    states = {"weight": "param", **{moment: moment for moment in MOMENTS}}
    shapes = {name: source.tensors[f"{name}.param"].shape for _, name in buckets}
    expected = {f"{name}.{key}": shape for name, shape in shapes.items() for key in states.values()}
    check_tensors(source.tensors, expected, where=Path("the optimizer's flat buffers"))
    for fused in (False, True):  # layers of Transformer Engine register the norm before them
        form = dataclasses.replace(layout, stacked=False, fused=fused)
        places = _flat_places([name for _, name in buckets], source, _registered(shape, form))
        if places is None:
            continue
        flat = {
            f"{key}/{name}": (f"{bucket}.{key}", first, size)
            for key in states.values()
            for name, (bucket, first, size) in places.items()
        }
        layouts = {state: dataclasses.replace(form, prefix=f"{key}/") for state, key in states.items()}
        match = source.load_object(_FLAT + "dp_group_idx_0.optimizer/shard_0_1")
        inner = match[0] if isinstance(match, list) and match else match
        steps = adam_steps(inner, otherwise=0, where=source.folder / METADATA)
        return _States(JoinedSource(FlatSource(source, flat), source), layouts, steps)
    raise UsageError(
        "the flat buffers of the optimizer are not laid out as in any known version of Megatron-Core",
        found=few([name for _, name in buckets], 2) or "no buckets",
        fix="save the checkpoint in Megatron-LM with --dist-ckpt-optim-fully-reshardable,"
        " or convert with --no-optimizer",
    )


def _registered(shape: ModelShape, form: StateDictLayout) -> dict[str, tuple[int, ...]]:
    """Their parameters with shapes, in the order in which their modules register them."""
    sizes = {link.theirs.tensor: link.theirs.shape for link in megatron_links(shape, form)}

    def order(name: str) -> tuple[int, ...]:
        layer = re.match(r"decoder\.layers\.(\d+)\.(.*)\.\w+$", name)
        if layer is None:
            outside = ("embedding.word", "embedding.pos", "decoder.layers", "decoder.final", "output_layer")
            return (next(i for i, start in enumerate(outside) if name.startswith(start)), 0, 0, name.endswith("bias"))
        kind = ("layer_norm_weight", "layer_norm_bias", "softmax_offset", "weight", "bias")
        return (2, int(layer[1]), _MODULES.index(layer[2]), kind.index(name.rsplit(".", 1)[1]))

    return {name: sizes[name] for name in sorted(sizes, key=order)}


def _flat_places(
    buckets: list[str], source: ChunkSource, parameters: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, int, tuple[int, ...]]] | None:
    """name -> (bucket, first element, shape): the last parameter first; None: the chunks say otherwise."""
    places: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    if any(len(source.tensors[f"{bucket}.param"].shape) != 1 for bucket in buckets):
        return None
    number = at = 0
    for name, size in reversed(list(parameters.items())):
        first, count = -(-at // _ALIGNMENT) * _ALIGNMENT, math.prod(size)
        if number < len(buckets) and first + count > source.tensors[f"{buckets[number]}.param"].shape[0]:
            number, first = number + 1, 0
        if number >= len(buckets) or (first,) not in source.starts(f"{buckets[number]}.param"):
            return None
        places[name] = (buckets[number], first, size)
        at = first + count
    is_complete = number == len(buckets) - 1 and at == source.tensors[f"{buckets[-1]}.param"].shape[0]
    return places if is_complete else None
