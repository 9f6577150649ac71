"""A model in a folder of any format, in our terms; and the helpers of all readers and writers.

The tensors of a `ModelFolder` have the names of our checkpoints ("weight/embedding.weight", "exp_avg/..."), whatever
the format. `check_tensors` compares a folder's tensors with its configuration, and names those that do not fit. Reads
no tensor.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mdata import DamageError, UsageError
from mdata.chat.templates import RecordedTemplate
from mdata.errors import counted, few, os_errors_named
from mdata.tokenizers.base.tokenizer import TokenizerConfig
from mdata.util.regular_files import regular_file
from trainer.checkpoint.format import RunState
from trainer.checkpoint.location import Location
from trainer.checkpoint.tiling import Rectangle
from trainer.config.parse import dump_config
from trainer.config.sections import LoRASection, MeshSection, RunConfig
from trainer.convert.links import Source, TensorInfo
from trainer.convert.safetensors_stream import DTYPES
from trainer.kernels.updates import state_names
from trainer.models.family import Family, ModelShape, family_of
from trainer.optim.model_buffers import ModelBuffers
from trainer.parallel.params import ParamSpec, Place

Format = Literal["mtrain", "hf", "meta", "torch_dist", "mp_rank", "peft"]
Report = Callable[[int], None]  # called with the number of bytes written
BUFFER = "buffer"  # the state of what no optimizer updates, see optim/model_buffers.py
CHUNK_BYTES = 64 << 20  # of one tensor that are held at a time
MOST_JSON = 128 << 20  # bytes of a file; an index of 10,000 shards has a few


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """An opened model.

    Args:
        path, format: of the folder.
        config: of the run, or one around the model where the format has no other settings.
        source: our logical tensors, by state and name.
        run: the training progress; step 1 and no data if the format does not record it.
        tokenizer: None where the folder has none.
        template: of the run's conversations, where its tokenizer's files lack it; None: it has none, or they have it.
        record: data.json, the samples read by the run; None if the format or the checkpoint lacks it.
        notes: for the user, a line each.
        adapter: the folder's adapter, which is merged in `source`; None: the folder holds weights.
    """

    path: Location
    format: Format
    config: RunConfig
    source: Source
    run: RunState
    tokenizer: TokenizerConfig | None = None
    template: RecordedTemplate | None = None
    record: bytes | None = None
    notes: tuple[str, ...] = ()
    adapter: Adapter | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the logical embedding."""
        return self.source.tensors["weight/embedding.weight"].shape[0]

    @property
    def family(self) -> Family:
        """Of the model."""
        return family_of(self.config)

    @property
    def shape(self) -> ModelShape:
        """All numbers that define the function, on one rank; a run's mesh would pad the vocabulary."""
        shape: ModelShape = self.family.shape(dataclasses.replace(self.config, mesh=MeshSection()), self.vocab_size)
        return shape

    @property
    def states(self) -> tuple[str, ...]:
        """ "weight", and the moments of the optimizer where they are there."""
        states = {name.split("/", 1)[0] for name in self.source.tensors}
        return ("weight", *sorted(states - {"weight"}))

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of the embedding, for all."""
        return self.source.tensors["weight/embedding.weight"].dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """Adapters of low rank, and the model beside whose weights they are; `source` has their tensors alone."""

    base: ModelFolder
    source: Source
    lora: LoRASection


class NewRows:
    """A source whose vocabulary is larger, or has rows for new tokens: those from `first` on.

    They are the mean of the rows before, so a new token is neither likely nor unlikely at first (Hewitt 2021,
    "Initializing New Word Embeddings for Pretrained Language Models").
    """

    def __init__(self, source: Source, rows: Mapping[str, tuple[int, ...]], *, first: int) -> None:
        self.first, self._source, self._rows = first, source, rows
        self._means: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Those of the source, with the new shapes."""
        return {
            name: TensorInfo(self._rows.get(name, info.shape), info.dtype)
            for name, info in self._source.tensors.items()
        }

    def read(self, name: str, box: Rectangle) -> torch.Tensor:
        """Of old rows those of the source, then the mean."""
        start, size = box
        if name not in self._rows or start[0] + size[0] <= self.first:
            return self._source.read(name, box)
        old = max(self.first - start[0], 0)
        columns = tuple(slice(begin, begin + count) for begin, count in zip(start[1:], size[1:], strict=True))
        new = self._mean(name)[columns].expand(size[0] - old, *size[1:])
        if not old:
            return new.clone()
        return torch.cat((self._source.read(name, (start, (old, *size[1:]))), new.to(self.tensors[name].dtype)))

    def _mean(self, name: str) -> torch.Tensor:
        """Over the rows before `first`: one row, in the dtype of the tensor, summed in fp64."""
        if name not in self._means:
            info = self._source.tensors[name]
            total = torch.zeros(info.shape[1:], dtype=torch.float64)
            for start, size in boxes(TensorInfo((self.first, *info.shape[1:]), info.dtype), torch.float64):
                total += self._source.read(name, (start, size)).to(torch.float64).sum(0)
            self._means[name] = (total / self.first).to(info.dtype)
        return self._means[name]


def with_new_rows(model: ModelFolder, first: int, vocab_size: int, *, where: str) -> ModelFolder:
    """The model with a vocabulary of `vocab_size`, in which the ids from `first` on are new tokens; see `NewRows`.

    Raises:
        UsageError: the weights have fewer rows before `first`, or the vocabulary ends there.
    """
    if not first <= model.vocab_size <= vocab_size or first >= vocab_size:
        raise UsageError(
            f"{where}: checkpoint.new_rows_from = {first} does not fit",
            found=f"weights for {model.vocab_size} ids, and model.vocab_size = {vocab_size}",
            expected="the first new id: at most the number of ids of the weights, and below model.vocab_size",
        )
    now, more = (expected_tensors(model.config, size) for size in (vocab_size, vocab_size + 1))
    rows = {name: size for name, size in now.items() if more[name] != size and name in model.source.tensors}
    return dataclasses.replace(model, source=NewRows(model.source, rows, first=first))


def no_run(config: RunConfig) -> RunState:
    """The state of a run for weights without a known run."""
    return RunState(step=1, consumed_samples=1, data_id="", data={}, optimizer_steps=0, config=dump_config(config))


def check_layers(layers: int, most: int, *, where: Location) -> None:
    """Compare the number of layers with what the files can hold, before a table of all tensors is built.

    Args:
        most: an upper bound of the number of layers, such as the number of tensors.

    Raises:
        DamageError: the configuration has more.
    """
    if layers > most:
        raise DamageError(
            f"the tensors of {where} do not fit its configuration",
            found=f"files with {counted(most, 'tensor')}",
            expected=f"the tensors of {layers} layers, as in the configuration",
            fix="restore the configuration that belongs to these weights, or the missing files",
        )


def check_tensors(
    tensors: Mapping[str, TensorInfo], expected: Mapping[str, Sequence[int]], *, where: Location, exact: bool = False
) -> None:
    """Compare the tensors of a folder with those of its configuration.

    Args:
        exact: whether other tensors are an error.

    Raises:
        DamageError: names tensors that are missing, have another shape, or do not belong there.
    """
    missing = [name for name in expected if name not in tensors]
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(size)}"
        for name, size in expected.items()
        if name in tensors and tensors[name].shape != tuple(size)
    ]
    broken = [name for name in expected if name in tensors and tensors[name].dtype not in DTYPES]
    others = [name for name in tensors if name not in expected] if exact else []
    if missing or wrong or broken or others:
        parts = [f"missing: {few(missing, 4)}"] if missing else []
        parts += [f"of another shape: {few(wrong, 4)}"] if wrong else []
        parts += [f"not in F64, F32, F16 or BF16: {few(broken, 4)}"] if broken else []
        parts += [f"not of this model: {few(others, 4)}"] if others else []
        raise DamageError(
            f"the tensors of {where} do not fit its configuration",
            found="; ".join(parts),
            expected=f"the {counted(len(expected), 'tensor')} of the model that the configuration describes",
            fix="restore the configuration that belongs to these weights, or the missing files",
        )


def check_used(names: Iterable[str], used: Container[str], *, where: Location, fix: str | None = None) -> None:
    """Check that no tensor is silently dropped.

    Args:
        used: tensors that are read, or whose content follows from others.

    Raises:
        UsageError: names the others.
    """
    if unknown := [name for name in names if name not in used]:
        raise UsageError(f"{where} has tensors that its model does not have", found=few(unknown, 4), fix=fix)


def equal_tensors(source: Source, names: tuple[str, str], *, size: tuple[int, ...]) -> bool:
    """Whether two tensors have this size and the same values; read in pieces."""
    first, second = (source.tensors[name] for name in names)
    if not first.shape == second.shape == size:
        return False
    dtype = torch.promote_types(first.dtype, second.dtype)
    pieces = ([source.read(name, box).to(dtype) for name in names] for box in boxes(first, dtype))
    return all(torch.equal(*both) for both in pieces)


def expected_tensors(config: RunConfig, vocab_size: int, *, states: Sequence[str] = ("weight",)) -> dict[str, Any]:
    """Shapes of our logical tensors by state and name: of these states, what the update rule keeps of each tensor.

    Frozen tensors are none of a checkpoint's.
    """
    family, rule = family_of(config), config.optimizer.name
    shape = family.shape(config, vocab_size)
    kept = {
        piece.name: state_names(rule, matrix=spec.matrix)
        for spec in family.parameters(shape, Place())
        for piece in spec.pieces
        if not spec.frozen
    }
    shapes = {name: size for name, size in family.logical_shapes(shape).items() if name in kept}
    expected = {f"{state}/{name}": size for state in states for name, size in shapes.items() if state in kept[name]}
    return expected | {f"{BUFFER}/{name}": size for name, size in family.logical_buffers(shape).items()}


def fill_buffers(module: nn.Module, folder: ModelFolder, specs: Sequence[ParamSpec], *, device: torch.device) -> None:
    """Give a stage its state that no optimizer updates, in fp32."""
    if not specs:
        return
    buffers = ModelBuffers(module, specs, device=device)
    for _, part, first in buffers.holds.slices():
        values = folder.source.read(f"{BUFFER}/{part.name}", (part.start, part.size)).flatten()
        buffers.values[first : first + len(values)] = values.to(buffers.values)


def boxes(info: TensorInfo, dtype: torch.dtype, *, limit: int = CHUNK_BYTES) -> Iterator[Rectangle]:
    """A tensor as boxes of whole rows, in order, each of at most `limit` bytes or one row."""
    if not info.shape:
        yield (), ()
        return
    row = max(1, math.prod(info.shape[1:]) * dtype.itemsize)
    step = max(1, limit // row)
    rest = tuple(0 for _ in info.shape[1:])
    for first in range(0, info.shape[0], step):
        yield (first, *rest), (min(step, info.shape[0] - first), *info.shape[1:])


def read_pieces(source: Source, entries: Mapping[str, TensorInfo], *, report: Report) -> Iterator[torch.Tensor]:
    """The rows of these tensors, in order; `entries` have the dtypes of the target, in which bytes are counted."""
    for name, info in entries.items():
        for box in boxes(info, info.dtype):
            piece = source.read(name, box)
            report(piece.numel() * info.dtype.itemsize)
            yield piece


def num_bytes(tensors: Mapping[str, TensorInfo], dtype: torch.dtype | None = None) -> int:
    """Of tensors, in their own dtype or in another."""
    return sum(math.prod(info.shape) * (dtype or info.dtype).itemsize for info in tensors.values())


def check_new(target: Path) -> None:
    """Refuse to write into a folder that has something in it.

    Raises:
        UsageError: it is there and not empty, or it is a file.
    """
    with os_errors_named("reading the target folder"):
        if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} exists already", fix="give a folder that does not exist yet, or an empty one")


def read_json(path: Path, *, subject: str) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        DamageError: it is not JSON, or larger than MOST_JSON. UsageError: the file cannot be read.
    """
    with os_errors_named(f"reading {subject}"):
        if (size := regular_file(path).stat().st_size) > MOST_JSON:
            found, expected = f"{size:,} bytes", f"at most {MOST_JSON:,}"
            raise DamageError(
                f"{path} is too large for a table of settings", found=found, expected=expected, fix="restore the file"
            )
        raw = path.read_bytes()
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} is not JSON", found=str(error), fix="restore the file from its origin") from error
    if not isinstance(value, dict):
        raise DamageError(f"{path} does not hold a JSON object", found=type(value).__name__, fix="restore the file")
    return value
