"""Writes Megatron-Core's distributed checkpoints, streamed: a chunk for each layer and each run of rows.

Keys, dims and chunks are those that Megatron-Core 0.16 writes; it loads them on any layout. Moments have the model's
names: `adam` is the form of an optimizer that is not distributed and trains in fp32, `distributed` the fully
reshardable one of the distributed optimizer, with main weights. Random states are not written: use --no-load-rng.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mdata import UsageError
from mdata.util import atomic_io
from trainer.arithmetic import round_up
from trainer.config.sections import RunConfig
from trainer.convert.distcp import METADATA
from trainer.convert.links import Linked, TensorInfo
from trainer.convert.megatron_args import to_arguments
from trainer.convert.megatron_folder import LATEST
from trainer.convert.megatron_names import (
    StateDictLayout,
    are_alike,
    buffer_links,
    extra_states,
    megatron_links,
    megatron_model,
)
from trainer.convert.model_folder import ModelFolder, Report, boxes
from trainer.convert.torch_dist import COMMON
from trainer.plan.lengths import schedule_lengths

OptimizerForm = Literal["distributed", "adam"]
_VOCABULARY_MULTIPLE = 128  # as --make-vocab-size-divisible-by, with tp = 1
_FORMATS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_torch_dist(
    target: Path,
    model: ModelFolder,
    *,
    states: tuple[str, ...],
    dtype: torch.dtype,
    form: OptimizerForm,
    report: Report,
) -> None:
    """Write a torch_dist checkpoint; the folder is new or empty.

    Args:
        states: of the source, that are written. dtype: of the model's tensors; moments and main weights are fp32.
        form: of the optimizer's state.

    Raises:
        UsageError: Megatron-LM's arguments or the form of the optimizer do not express the model.
    """
    if form == "adam" and dtype != torch.float32 and len(states) > 1:
        raise UsageError(
            "Megatron-Core's plain Adam has main weights of its own in half precision",
            found=f"--optimizer-form adam with {dtype}",
            expected="--optimizer-form distributed, or --dtype fp32",
        )
    rows = round_up(model.shape.vocab_size, _VOCABULARY_MULTIPLE)
    arguments = to_arguments(model.config, model.vocab_size, padded_rows=rows)
    folder = target / f"iter_{model.run.step:07d}"
    folder.mkdir(parents=True)
    metadata, stacked = Metadata({}, storage_data={}), _layout(model, rows).stacked
    with atomic_io.atomic_file(folder / "__0_0.distcp") as fd:
        writer = _Writer(fd, metadata, report)
        for prefix, tensors, stored in _parts(model, states, rows, dtype=dtype, form=form):
            for name, info in tensors.tensors.items():
                layered = stacked and ".layers." in name and not name.startswith("mtp.")
                writer.tensor(prefix + name, info, tensors=tensors, dtype=stored, name=name, layered=layered)
        for name in _extra_states(model, rows):
            writer.object(name)
    atomic_io.atomic_write(folder / METADATA, pickle.dumps(metadata))
    common = _common(model, arguments, optimizer=form if len(states) > 1 else None)
    buffer = io.BytesIO()
    torch.save(common, buffer)
    atomic_io.atomic_write(folder / COMMON, buffer.getvalue())
    atomic_io.atomic_write(folder / "metadata.json", json.dumps(_FORMATS).encode())
    atomic_io.atomic_write(target / LATEST, str(model.run.step).encode())


class _Writer:
    """Appends chunks to one file and notes where they are."""

    def __init__(self, fd: int, metadata: Metadata, report: Report) -> None:
        self._fd, self._metadata, self._report, self._at = fd, metadata, report, 0

    def tensor(
        self, key: str, info: TensorInfo, *, tensors: Linked, dtype: torch.dtype, name: str, layered: bool
    ) -> None:
        """All chunks of a tensor."""
        chunks = []
        for start, size in boxes(info, dtype):
            # A leading axis of layers is cut into them: that is how ranks ask for it.
            for layer in range(size[0]) if layered else (None,):
                begin = start if layer is None else (start[0] + layer, *start[1:])
                extent = size if layer is None else (1, *size[1:])
                piece = tensors.read(name, (begin, extent)).to(dtype)
                chunks.append(ChunkStorageMetadata(torch.Size(begin), torch.Size(extent)))
                self._append(MetadataIndex(key, torch.Size(begin)), piece)
                self._report(piece.numel() * dtype.itemsize)
        properties = TensorProperties(dtype=dtype)
        self._metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(info.shape), chunks)

    def object(self, key: str) -> None:
        """The empty state that layers ask for."""
        self._metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), [None])

    def _append(self, index: MetadataIndex, value: Tensor | list[None]) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getbuffer()
        atomic_io.write_all(self._fd, data)
        self._metadata.storage_data[index] = _StorageInfo("__0_0.distcp", self._at, len(data))
        self._at += len(data)


def _parts(
    model: ModelFolder, states: tuple[str, ...], rows: int, *, dtype: torch.dtype, form: OptimizerForm
) -> Iterator[tuple[str, Linked, torch.dtype]]:
    """(what stands before the names, tensors, their dtype) of the model and of each state."""
    shape, layout = model.shape, _layout(model, rows)

    def of(state: str) -> Linked:
        links = megatron_links(shape, layout, state=f"{state}/")
        return Linked(model.source, [link.flipped() for link in links])

    yield "", of("weight"), dtype
    if buffers := [link.flipped() for link in buffer_links(shape, layout)]:
        yield "", Linked(model.source, buffers), torch.float32
    moments = [state for state in states if state != "weight"]
    if moments and form == "distributed":
        yield "optimizer.state.param.", of("weight"), torch.float32
    for state in moments:
        yield f"optimizer.state.{state}.", of(state), torch.float32


def _layout(model: ModelFolder, rows: int) -> StateDictLayout:
    return StateDictLayout(
        family=model.family,
        layers=range(model.shape.num_layers),
        padded_rows=rows,
        stacked=are_alike(model.family, model.shape),
        fused=True,
        experts_together=True,
        aliases="beside",
        written=True,
    )


def _extra_states(model: ModelFolder, rows: int) -> Iterator[str]:
    layout, megatron = _layout(model, rows), megatron_model(model.config)
    two = megatron.place is not None
    for (stack, number, count), module in extra_states(model.shape, layout):
        if layout.stacked:
            yield f"{stack}.layers.{module}._extra_state/shard_{number}_{count}"
        else:
            yield f"{stack}.layers.{number}.{module}._extra_state/shard_0_1"
    if two or megatron.stack == "encoder":  # a GPTModel asks for none
        yield "output_layer._extra_state/shard_0_1"
    if two:
        yield "lm_head.output_layer._extra_state/shard_0_1"


def _common(model: ModelFolder, arguments: Mapping[str, Any], *, optimizer: OptimizerForm | None) -> dict[str, Any]:
    run, config = model.run, model.config
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common: dict[str, Any] = {
        "args": argparse.Namespace(**arguments, consumed_train_samples=run.consumed_samples, iteration=run.step),
        "checkpoint_version": 3.0,
        "iteration": run.step,
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": _scheduler(config, run.consumed_samples),
        "content_metadata": content,
    }
    groups = [_group(config, decays=decays) for decays in (True, False)]
    if config.optimizer.embedding_lr:  # --decoupled-lr
        rates = {"max_lr": config.optimizer.embedding_lr, "min_lr": config.optimizer.embedding_min_lr}
        groups.insert(1, {**groups[0], **rates, "lr": config.optimizer.embedding_lr, "default_config": False})
    if optimizer == "adam":
        state = {"common_step": torch.tensor(float(run.optimizer_steps))}
        common["optimizer"] = {"state": state, "param_groups": groups}
    elif optimizer == "distributed":
        groups = [{**group, "step": run.optimizer_steps} for group in groups]
        common["optimizer"] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
        content |= {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
    return common


def _group(config: RunConfig, *, decays: bool) -> dict[str, Any]:
    """A group of parameters of Adam, with the keys by which Megatron-Core finds it again."""
    optimizer = config.optimizer
    return {
        "is_expert_parallel": False, "default_config": True, "wd_mult": float(decays), "lr_mult": 1.0,
        "is_decoupled_lr": False, "max_lr": optimizer.lr, "min_lr": optimizer.min_lr, "lr": optimizer.lr,
        "betas": (optimizer.beta1, optimizer.beta2), "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay if decays else 0.0, "amsgrad": False, "maximize": False,
        "foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
    }  # fmt: skip


def _scheduler(config: RunConfig, consumed_samples: int) -> dict[str, Any]:
    """The state of the schedules, which count samples there."""
    optimizer, lengths = config.optimizer, schedule_lengths(config, in_samples=True)
    constant = optimizer.weight_decay_schedule == "constant"
    return {
        "max_lr": optimizer.lr, "lr_warmup_steps": lengths.warmup, "num_steps": consumed_samples,
        "lr_decay_style": {"wsd": "WSD", "inverse_sqrt": "inverse-square-root"}.get(
            optimizer.schedule, optimizer.schedule
        ),
        "lr_decay_steps": lengths.decay, "min_lr": optimizer.min_lr, "start_wd": optimizer.weight_decay,
        "end_wd": optimizer.weight_decay if constant else optimizer.weight_decay_end,
        "wd_incr_style": optimizer.weight_decay_schedule, "wd_incr_steps": lengths.weight_decay,
    }  # fmt: skip
