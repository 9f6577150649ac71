"""Megatron-LM's classic checkpoints: one file for each model-parallel rank, of versions 0 to 3.

    iter_0000003/mp_rank_00/model_optim_rng.pt       tp rank 0; with pipeline stages mp_rank_00_000, mp_rank_00_001 ...
                                                     the ranks that share experts have one more number, the last

A file holds a rank's state dicts under the names of Megatron-Core or older versions; layers begin at 0 on each stage
and in each chunk of an interleaved one (model0, model1 ...). Moments are read if their order can be determined
(mp_rank_moments.py), and not written.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from mdata import DamageError, UsageError
from mdata.errors import few
from mdata.util import atomic_io
from trainer.arithmetic import round_up
from trainer.config.sections import RunConfig
from trainer.convert.links import Linked, TensorInfo
from trainer.convert.megatron_args import from_arguments, to_arguments
from trainer.convert.megatron_folder import (
    LATEST,
    RELEASE,
    Training,
    block_numbers,
    check_layers,
    check_rows,
    damaged,
    iteration_folder,
    training_of,
)
from trainer.convert.megatron_names import (
    StateDictLayout,
    buffer_links,
    extra_states,
    has_grouped_experts,
    is_ignored,
    megatron_links,
    megatron_model,
    modern_name,
    num_rows,
    stacks_named,
)
from trainer.convert.model_folder import ModelFolder, Report, boxes, check_tensors, check_used, equal_tensors, num_bytes
from trainer.convert.model_keys import effective
from trainer.convert.mp_rank_moments import NamedMoments, named_moments
from trainer.convert.pickles import Made
from trainer.convert.torch_file import StoredSource, StoredTensor, load_torch, unread
from trainer.models.family import ModelShape, family_of
from trainer.parallel.params import Place

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"^decoder\.layers\.(\d{1,6})\.")
_LONGEST_NAME = 500
_VOCABULARY_MULTIPLE = 128  # as --make-vocab-size-divisible-by


class _ModelChunk(NamedTuple):
    """The tensors of one chunk of layers on one rank."""

    tp: int
    stage: int
    ep: int
    chunk: int
    tensors: Mapping[str, StoredTensor]

    @property
    def prefix(self) -> str:
        """Before its names, so that they are different from other chunks'."""
        return f"{self.tp}/{self.stage}/{self.chunk}/" + (f"experts {self.ep}/" if self.ep else "")

    @property
    def is_first(self) -> bool:
        """Whether it is that of the first of the ranks that share its layers."""
        return self.tp == 0 and self.ep == 0

    @property
    def num_layers(self) -> int:
        """Layers in it."""
        return 1 + max(self.numbers, default=-1)

    @property
    def numbers(self) -> set[int]:
        """Of its layers that have tensors."""
        return block_numbers(self.tensors)


class _Ranks(NamedTuple):
    """All files of a checkpoint.

    Args:
        chunks: by tp, stage, ep and chunk. trainings: of each file. moments: of each file, by state and name.
    """

    chunks: list[_ModelChunk]
    trainings: list[Training]
    moments: list[NamedMoments]

    @property
    def states(self) -> tuple[str, ...]:
        """Of the optimizer, where all files have them."""
        return tuple(self.moments[0].states) if all(moment.states for moment in self.moments) else ()


class _Appended:
    """A file for torch.save, without a buffer."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> int:
        """Write all of the data."""
        atomic_io.write_all(self._fd, data)
        return len(data)

    def flush(self) -> None:
        """Nothing waits here."""


def is_mp_rank(path: Path) -> bool:
    """Whether this is such a folder, or one of its iterations."""
    folder = iteration_folder(path)
    return folder is not None and any(folder.glob(f"mp_rank_*/{FILE}"))


def open_mp_rank(path: Path, *, settings: Mapping[str, Any]) -> ModelFolder:
    """A classic checkpoint.

    Args:
        path: the folder, or one iteration of it. settings: keys of [model] that its args lack or have wrong.

    Raises:
        UsageError: a model that we lack. DamageError: ranks or tensors that are missing or do not fit.
    """
    folder = iteration_folder(path)
    assert folder is not None, "is_mp_rank was asked before"
    ranks = _load(folder)
    chunks, (training, *others), moments = ranks
    plain = {
        _LAYER.sub("decoder.layers.", name): TensorInfo(tensor.shape, tensor.dtype)
        for chunk in reversed(chunks)
        for name, tensor in chunk.tensors.items()
    }
    layers = sum(chunk.num_layers for chunk in chunks if chunk.is_first)
    config, notes = from_arguments(training.arguments, plain, where=str(folder), settings=settings, layers=layers)
    for other in others:
        if other.arguments != training.arguments:
            _check_model(other, training, config, tensors=plain, settings=settings)
    family = family_of(config)
    layouts = list(_layouts(chunks, config, version=training.version))
    check_rows(config, layouts[0].padded_rows, where=folder)
    held = {chunk.prefix + name: tensor for chunk in chunks for name, tensor in chunk.tensors.items()}
    source, shape = StoredSource(held), family.shape(config, config.model.vocab_size or 0)
    own = list(zip(chunks, layouts, strict=True))
    numbers = [layout.layers.start + number for chunk, layout in own if chunk.is_first for number in chunk.numbers]
    check_layers(config, numbers, where=folder)
    links = [pair for layout in layouts for pair in (*megatron_links(shape, layout), *buffer_links(shape, layout))]
    expected = {pair.theirs.tensor: pair.theirs.shape for pair in links}
    check_tensors(source.tensors, expected, where=folder)
    names = (chunk.prefix + name for chunk in chunks for name in chunk.tensors if not is_ignored(name, family.megatron))
    check_used(names, expected, where=folder)
    if differing := _differing_copies(source, shape, layouts):
        notes = (*notes, f"files differ in what they all hold; the first one's is used: {few(differing, 4)}")
    partly = "some files have none" if any(link.states for link in moments) and not ranks.states else ""
    if lacking := next((link.lacking for link in moments if link.lacking), partly):
        notes = (*notes, f"the optimizer's state is left out: {lacking}")
    for state in ranks.states:
        held |= {f"{state}/{name}": tensor for link in moments for name, tensor in link.states[state].items()}
    every = [
        link
        for state in dict.fromkeys(("weight", *ranks.states))
        for layout in (_of_state(layout, state, within=ranks.states) for layout in layouts)
        for link in megatron_links(shape, layout, state=f"{state}/", copies=False)
    ]
    every += [link for chunk, layout in own if chunk.is_first for link in buffer_links(shape, layout)]
    return ModelFolder(
        path=folder, format="mp_rank", config=config, source=Linked(StoredSource(held), every),
        run=training.run(config), notes=notes,
    )  # fmt: skip


def _differing_copies(source: StoredSource, shape: ModelShape, layouts: Sequence[StateDictLayout]) -> list[str]:
    """Copies of tensors that other files hold as well (norms, a tied embedding), where the values are not the same."""
    read = {link.ours: link.theirs for layout in layouts for link in megatron_links(shape, layout, copies=False)}
    used = set(read.values())
    copies = [link for layout in layouts for link in megatron_links(shape, layout) if link.theirs not in used]
    return [
        link.theirs.tensor
        for link in copies
        if not equal_tensors(source, (link.theirs.tensor, read[link.ours].tensor), size=link.theirs.shape)
    ]


def _of_state(layout: StateDictLayout, state: str, *, within: tuple[str, ...]) -> StateDictLayout:
    """The layout of a tensor of the optimizer; of the model's own weights where it has no main weights."""
    return dataclasses.replace(layout, prefix=f"{state}/{layout.prefix}") if state in within else layout


def write_mp_rank(target: Path, model: ModelFolder, *, dtype: torch.dtype, tp: int, pp: int, report: Report) -> None:
    """Write a classic checkpoint of version 3 for tp x pp ranks.

    torch.save wants all tensors of a file at once: they are gathered in files that are mapped into memory.

    Raises:
        UsageError: Megatron-LM's arguments do not express the model, or it cannot be cut so.
    """
    check_cut(model, tp=tp, pp=pp)
    rows, iteration = _padded_rows(model, tp), model.run.step
    arguments = to_arguments(model.config, model.shape.vocab_size, padded_rows=rows, tp=tp, pp=pp)
    for stage in range(pp):
        for rank in range(tp):
            layout = _target_layout(model, rows=rows, rank=(rank, tp), stage=(stage, pp))
            part = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            folder = target / f"iter_{iteration:07d}" / part
            folder.mkdir(parents=True)
            contents = {
                "args": argparse.Namespace(**arguments, consumed_train_samples=model.run.consumed_samples),
                "checkpoint_version": 3.0, "iteration": iteration,
            }  # fmt: skip
            with atomic_io.atomic_file(folder / FILE) as fd:
                state = _gathered(folder, _linked(model, layout), dtype=dtype, report=report)
                buffers = Linked(model.source, [link.flipped() for link in buffer_links(model.shape, layout)])
                state |= _gathered(folder, buffers, dtype=torch.float32, report=report)
                state |= dict.fromkeys(_extra_states(model, layout))
                torch.save({**contents, "model": state}, cast(Any, _Appended(fd)))
                del state  # before the next one's
    atomic_io.atomic_write(target / LATEST, str(iteration).encode())


def scratch_bytes(model: ModelFolder, *, dtype: torch.dtype, tp: int, pp: int) -> int:
    """Disk space that `write_mp_rank` needs beside the target: the largest rank's tensors once more.

    Raises:
        UsageError: as there.
    """
    check_cut(model, tp=tp, pp=pp)
    rows = _padded_rows(model, tp)
    to_arguments(model.config, model.shape.vocab_size, padded_rows=rows, tp=tp, pp=pp)  # its tensors may have no names
    layouts = [_target_layout(model, rows=rows, rank=(0, tp), stage=(stage, pp)) for stage in range(pp)]
    return max(num_bytes(_linked(model, layout).tensors, dtype) for layout in layouts)


def _padded_rows(model: ModelFolder, tp: int) -> int:
    return round_up(model.shape.vocab_size, _VOCABULARY_MULTIPLE * tp)


def _target_layout(model: ModelFolder, *, rows: int, rank: tuple[int, int], stage: tuple[int, int]) -> StateDictLayout:
    """The layout of one file; rank and stage are (number, total)."""
    first, last = stage[0] == 0, stage[0] == stage[1] - 1
    layers = Place(stage=stage[0], num_stages=stage[1]).blocks(model.shape.num_layers)
    return StateDictLayout(
        family=model.family,
        layers=layers, padded_rows=rows, has_embedding=first, has_head=last, tied_copy=last and not first,
        tp_rank=rank[0], tp_size=rank[1], aliases="beside", written=True,
    )  # fmt: skip


def _linked(model: ModelFolder, layout: StateDictLayout) -> Linked:
    return Linked(model.source, [link.flipped() for link in megatron_links(model.shape, layout)])


def _gathered(folder: Path, source: Linked, *, dtype: torch.dtype, report: Report) -> dict[str, Any]:
    """All tensors, each mapped from an unlinked file: the system can write its pages to the disk to free memory."""
    tensors = {}
    for name, info in source.tensors.items():
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            # Without this, a full disk would kill the process (SIGBUS) when a page is written.
            os.posix_fallocate(file.fileno(), 0, num_bytes({name: info}, dtype))
            held = torch.from_file(file.name, shared=True, size=math.prod(info.shape), dtype=dtype).view(info.shape)
        for start, size in boxes(info, dtype):
            piece = source.read(name, (start, size))
            held[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] = piece
            report(piece.numel() * dtype.itemsize)
        tensors[name] = held
    return tensors


def check_cut(model: ModelFolder, *, tp: int, pp: int) -> None:
    """Refuse a layout that Megatron-LM does not support for this model.

    Raises:
        UsageError: names what tp or pp does not divide.
    """
    if min(tp, pp) < 1:
        raise UsageError(f"--tp {tp} --pp {pp}", expected="1 or more, each")
    shape = model.shape
    cut = model.family.cut_by_tp(model.config)
    own = {name: size for name, size in cut.items() if name.startswith(("model.moe.", "model.mamba."))}
    sizes = {name.removeprefix("model."): size for name, size in own.items()}
    if "model.num_heads" in cut:
        sizes |= {"num_kv_heads": shape.num_kv_heads, "num_heads": shape.num_heads}
    if any(name.startswith("model.ffn_hidden_size") for name in cut):
        sizes["ffn_hidden_size"] = shape.ffn_hidden_size
    if model.config.model.moe is not None:
        sizes["moe.ffn_hidden_size"] = model.config.model.moe.ffn_hidden_size or shape.ffn_hidden_size
    wrong = [f"{name}={size} by tp={tp}" for name, size in sizes.items() if size % tp]
    wrong += [f"num_layers={shape.num_layers} by pp={pp}"] if shape.num_layers % pp else []
    if pp > 1 and megatron_model(model.config).place is not None:
        wrong.append(f"an encoder and a decoder by pp={pp}, for which Megatron-Core has no pipeline")
    if wrong:
        raise UsageError("the model cannot be split like this", found=few(wrong), expected="divisors of these numbers")


def _extra_states(model: ModelFolder, layout: StateDictLayout) -> Iterator[str]:
    """Names that Megatron-Core's layers ask for beside their tensors."""
    two = megatron_model(model.config).place is not None
    for place, module in extra_states(model.shape, layout):
        if module != "self_attention.core_attention":
            yield f"{place.stack}.layers.{place.number}.{module}._extra_state"
    if layout.has_head:
        yield "output_layer._extra_state"
        if two:
            yield "lm_head.output_layer._extra_state"


def _load(folder: Path) -> _Ranks:
    """All ranks' files.

    Raises:
        UsageError: experts that are cut otherwise than layers. DamageError: a rank is missing or there twice, or files
            are of several checkpoints.
    """
    ranks: dict[tuple[int, int, int], Path] = {}
    paths = {path: match for path in sorted(folder.glob("mp_rank_*")) if (match := _FOLDER.fullmatch(path.name))}
    # With one number beside tp's it is that of the stage, unless there is one stage and experts are shared.
    numbered = next((path for path, match in paths.items() if match[2]), None)
    shared = numbered is not None and _shares_experts(folder, numbered)
    for path, match in paths.items():
        first, second, third = (int(number or 0) for number in match.groups())
        place = (first, 0, second) if shared and not match[3] else (first, second, third)
        if place in ranks:
            both = f"{ranks[place].parent.name} and {path.name}"
            raise DamageError(f"{folder} holds one rank twice", found=both, fix="remove the one that is not meant")
        ranks[place] = path / FILE
    tp, pp, ep = (1 + max(place[i] for place in ranks) for i in (0, 1, 2))
    missing = [
        f"mp_rank_{t:02d}_{p:03d}" + (f"_{e:03d}" if ep > 1 else "")
        for t, p, e in itertools.product(range(tp), range(pp), range(ep))
        if (t, p, e) not in ranks
    ]
    if missing:
        raise DamageError(f"{folder} is not whole", found=f"no {few(missing, 4)}", fix="restore the folders")
    chunks: list[_ModelChunk] = []
    trainings, moments = [], []
    for (t, p, e), path in sorted(ranks.items()):
        state = load_torch(path)
        trainings.append(training := training_of(state, where=path, released=folder.name == RELEASE))
        _check_same(training, trainings[0])
        keys = [key for key in ("model", *(f"model{number}" for number in range(64))) if key in state]
        if not keys:
            raise DamageError(f"{path} has no model", found=few([str(key) for key in state], 4), fix="restore it")
        here = [_ModelChunk(t, p, e, number, _tensors(state[key], key, where=path)) for number, key in enumerate(keys)]
        named = (
            (chunk.prefix + name, x) for chunk in here for name, x in chunk.tensors.items() if not is_ignored(name)
        )
        parameters: dict[str, StoredTensor] = {}
        seen: set[tuple[int, int, tuple[int, ...]]] = set()
        for name, x in named:  # one that has two names is one parameter
            if (where := (id(x.storage), x.offset, x.shape)) not in seen:
                seen.add(where)
                parameters[name] = x
        moments.append(named_moments(state.get("optimizer"), parameters))
        chunks += here
    return _Ranks(chunks, trainings, moments)


def _shares_experts(folder: Path, path: Path) -> bool:
    """Whether ranks share the experts of one pipeline stage.

    Raises:
        UsageError: experts are cut otherwise than layers are.
    """
    file = path / FILE
    given = training_of(load_torch(file), where=file, released=folder.name == RELEASE).arguments
    tp, etp = given.get("tensor_model_parallel_size", 1), given.get("expert_tensor_parallel_size")
    if not given.get("num_experts"):
        return False
    if etp not in (None, tp):
        raise UsageError(
            f"{folder} has experts that are cut otherwise than layers",
            found=f"expert_tensor_parallel_size = {etp!r}, tensor_model_parallel_size = {tp!r}",
            fix="save the checkpoint as torch_dist",
        )
    return given.get("pipeline_model_parallel_size") == 1 and (given.get("expert_model_parallel_size") or 1) != 1


def _check_same(training: Training, first: Training) -> None:
    """Refuse a file of another checkpoint than the first file's.

    Raises:
        DamageError: their iterations, versions or consumed samples differ.
    """
    found, expected = (
        {
            "iteration": checkpoint.iteration,
            "checkpoint_version": checkpoint.version,
            "args.consumed_train_samples": checkpoint.arguments.get("consumed_train_samples"),
        }
        for checkpoint in (training, first)
    )
    for key, value in found.items():
        if value != expected[key]:
            raise DamageError(
                f"{training.where} is of another checkpoint than {first.where}",
                found=f"{key} = {str(value)[:80]}",
                expected=str(expected[key])[:80],
                fix="restore the files of one checkpoint",
            )


def _check_model(
    training: Training,
    first: Training,
    config: RunConfig,
    *,
    tensors: Mapping[str, TensorInfo],
    settings: Mapping[str, Any],
) -> None:
    """Refuse a file whose arguments describe another model than the first file's.

    Raises:
        DamageError: names the key that differs.
    """
    other, _ = from_arguments(training.arguments, tensors, where=str(training.where), settings=settings)
    found, expected = effective(other), effective(config)
    for key in found.keys() | expected.keys():
        if found.get(key) != expected.get(key):
            raise DamageError(
                f"the args of {training.where} describe another model than those of {first.where}",
                found=f"model.{key} = {found.get(key)}",
                expected=f"{expected.get(key)}",
                fix="restore the files of one checkpoint",
            )


def _tensors(model: Any, key: str, *, where: Path) -> dict[str, StoredTensor]:
    """The tensors of a model by their names in Megatron-Core.

    Raises:
        DamageError: it is not a dictionary, or two tensors have the same name.
    """
    if not isinstance(model, dict):
        raise damaged(where, key, model, expected="the tensors of a model by name")
    tensors: dict[str, StoredTensor] = {}
    held = list(_flattened(model))
    one_stack = {theirs: name for name, theirs in stacks_named(name for name, _ in held).items()}
    for theirs, tensor in held:
        name = one_stack[theirs]
        if not isinstance(tensor, StoredTensor):
            if is_ignored(name):
                continue
            raise UsageError(f"{where} holds a tensor {key}.{name[:100]} that cannot be read", found=unread(tensor))
        if name in tensors or len(name) > _LONGEST_NAME:
            expected = f"one tensor of this name, of at most {_LONGEST_NAME} characters"
            raise damaged(where, f"{key}.{name[:100]}", tensor, expected=expected)
        tensors[name] = tensor
    return tensors


def _flattened(value: dict[Any, Any], before: str = "") -> Iterator[tuple[str, StoredTensor | Made]]:
    """Tensors of nested dictionaries under their names in Megatron-Core; a `Made` for those that are not read."""
    for name, inner in value.items():
        if isinstance(inner, StoredTensor) or unread(inner):
            yield modern_name(f"{before}{name}"), inner
        elif isinstance(inner, dict):
            yield from _flattened(inner, f"{before}{name}.")


def _layouts(chunks: Sequence[_ModelChunk], config: RunConfig, *, version: float) -> Iterator[StateDictLayout]:
    """The layout of each chunk; layers are counted through chunk after chunk, over all stages in each."""
    tp, ep = (1 + max(getattr(chunk, axis) for chunk in chunks) for axis in ("tp", "ep"))
    experts = config.model.moe.num_experts // ep if config.model.moe is not None and ep > 1 else 0
    stages, numbers = ([*sorted({getattr(chunk, key) for chunk in chunks})] for key in ("stage", "chunk"))
    rows = next((rows for chunk in chunks if (rows := num_rows(chunk.tensors))), 0)
    start: dict[tuple[int, int], int] = {}
    at = 0
    for number in numbers:
        for stage in stages:
            start[stage, number] = at
            at += next(c.num_layers for c in chunks if (c.tp, c.stage, c.chunk) == (0, stage, number))
    fused = any(".layer_norm_" in name for name in chunks[0].tensors)
    for chunk in chunks:
        place = chunk.stage, chunk.chunk
        first, last = place == (stages[0], numbers[0]), place == (stages[-1], numbers[-1])
        low = start[place]
        yield StateDictLayout(
            family=family_of(config),
            experts=range(chunk.ep * experts, (chunk.ep + 1) * experts) if experts else None,
            layers=range(low, low + chunk.num_layers), padded_rows=rows * tp, has_embedding=first, has_head=last,
            tied_copy=last and not first, tp_rank=chunk.tp, tp_size=tp, version=version, fused=fused,
            grouped=has_grouped_experts(chunk.tensors), prefix=chunk.prefix,
        )  # fmt: skip
