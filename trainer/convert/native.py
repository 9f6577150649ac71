"""Our own checkpoints as model folders: read from any layout, and written as a run folder with one checkpoint.

    config.toml, tokenizer/, tokenizer_facts.json   as `mtrain train` leaves them, so that `mtrain generate` reads them
    data.json                                       of our checkpoints: the samples read so far
    checkpoints/step-N/rank-*.safetensors           whole logical tensors, split at --max-shard-size
    checkpoints/step-N/tokenizer/, data.json, index.json ..., checkpoints/latest

Reading goes by the index, with the hashes that it has. Writing streams each tensor and hashes it on its way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mdata import DamageError, UsageError
from mdata.chat.templates import RecordedTemplate, template_of_facts
from mdata.errors import os_errors_named
from mdata.tokenizers.base.tokenizer import TokenizerConfig
from mdata.tokenizers.registry import build_tokenizer
from mdata.tracing.run_record import RECORD
from mdata.util import atomic_io
from mdata.util.config_text import load_toml
from trainer.checkpoint.folder import checkpoint_at, folder_name, instead, point_to, read_index
from trainer.checkpoint.format import (
    HashedFile,
    Index,
    Part,
    SavedFile,
    SavedSlice,
    SavedTensor,
    dump_index,
    dump_part,
    file_of_part,
    slice_key,
)
from trainer.checkpoint.load import SliceCopy, SliceReader, overlaps, read_extras
from trainer.checkpoint.location import Location, ObjectFolder, checkpoints_of
from trainer.checkpoint.rank_file import DTYPE_NAMES, part_name
from trainer.checkpoint.stored_files import INDEX
from trainer.checkpoint.tiling import Rectangle
from trainer.config.parse import dump_config, parse_config, problems_error
from trainer.convert.links import TensorInfo
from trainer.convert.model_folder import (
    ModelFolder,
    Report,
    boxes,
    check_layers,
    check_tensors,
    expected_tensors,
    read_pieces,
)
from trainer.convert.safetensors_stream import TYPES, split_by_size, write_safetensors

TOKENIZER_FACTS = "tokenizer_facts.json"


class CheckpointSource:
    """The tensors of one of our checkpoints; each slice is compared with its hash before it is used."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index
        self._open: dict[str, Any] = {}
        self._compared: set[SavedSlice] = set()
        self.tensors = {
            name: TensorInfo(saved.shape, TYPES.get(self._part(saved.slices[0]).get_dtype(), torch.int8))
            for name, saved in index.tensors.items()
        }

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        saved = self._index.tensors[name]
        out = torch.empty(box[1], dtype=self.tensors[name].dtype)
        for piece, (start, size) in overlaps(box, saved.slices):
            there = tuple(slice(a - b, a - b + n) for a, b, n in zip(start, box[0], size, strict=True))
            here = tuple(slice(a - b, a - b + n) for a, b, n in zip(start, piece.start, size, strict=True))
            out[there] = self._compared_part(piece)[here]
        return out

    def _compared_part(self, piece: SavedSlice) -> Any:
        part = self._part(piece)
        # Version 1 does not record the type.
        listed = self._index.tensors[piece.key.rpartition("@")[0]].dtype or part.get_dtype()
        if tuple(part.get_shape()) != piece.size or part.get_dtype() != listed or listed not in TYPES:
            stands = f"{piece.key} of shape {part.get_shape()}, {part.get_dtype()}"
            raise self._damage(piece.file, stands, f"{listed} of shape {list(piece.size)}")
        if piece.hash is not None and piece not in self._compared:
            digest = blake3()
            rows = TensorInfo(piece.size, TYPES[part.get_dtype()])
            for start, size in boxes(rows, rows.dtype):
                rows_of = part[start[0] : start[0] + size[0]].contiguous()
                digest.update(rows_of.reshape(-1).view(torch.uint8).numpy().data)
            if digest.hexdigest() != piece.hash:
                raise self._damage(piece.file, f"{piece.key} with a different hash than when it was written", None)
            self._compared.add(piece)
        return part

    def _part(self, piece: SavedSlice) -> Any:
        """A slice in its file, of which nothing is read yet."""
        try:
            if piece.file not in self._open:
                self._open[piece.file] = self._opened(piece.file)
            return self._open[piece.file].get_slice(piece.key)
        except SafetensorError as error:
            raise self._damage(piece.file, str(error), f"a tensor {piece.key}") from error

    def _opened(self, name: str) -> Any:
        path, header = self._folder / name, self._index.files[name].header
        with os_errors_named("reading a checkpoint"):
            if header is not None:
                with path.open("rb") as file:
                    length = min(8 + int.from_bytes(file.read(8), "little"), self._index.files[name].bytes)
                    file.seek(0)
                    if blake3(file.read(length)).hexdigest() != header:
                        raise self._damage(name, "a header with a different hash than when it was written", None)
            return safe_open(path, framework="pt")

    def _damage(self, name: str, found: str, expected: str | None) -> DamageError:
        fix = instead(self._folder)
        return DamageError(f"{self._folder / name} is damaged", found=found, expected=expected, fix=fix)


class ObjectSource:
    """The tensors of one of our checkpoints in object storage, any rectangle of them; see `Source`.

    Slices are read whole, several parts at a time, and compared with their hashes before anything is returned. Nothing
    is kept: a slice that is needed again is read again.
    """

    def __init__(self, folder: ObjectFolder, index: Index) -> None:
        self._index, self._reader = index, SliceReader(folder, index)
        self.tensors = {
            name: TensorInfo(saved.shape, self._dtype(saved) or torch.int8) for name, saved in index.tensors.items()
        }

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        out = torch.empty(box[1], dtype=self.tensors[name].dtype)
        wanted: dict[str, dict[SavedSlice, list[SliceCopy]]] = {}
        for piece, part in overlaps(box, self._index.tensors[name].slices):
            wanted.setdefault(piece.file, {})[piece] = [SliceCopy(part, out, box[0])]
        for file, copies in wanted.items():
            self._reader.read(file, copies)
        return out

    def _dtype(self, saved: SavedTensor) -> torch.dtype | None:
        return TYPES.get(saved.dtype) if saved.dtype else self._reader.dtype(saved.slices[0])


def is_native(path: Path) -> bool:
    """Whether this is a run folder or a checkpoint of ours."""
    return (path / INDEX).is_file() or (path / "checkpoints").is_dir() or checkpoints_of(path).parent != path


def open_native(path: Location, *, checkpoint: str = "latest") -> ModelFolder:
    """A run folder, or one checkpoint in it, on a disk or in object storage.

    Args:
        checkpoint: "latest" or a name such as "step-400", of a run folder.

    Raises:
        UsageError: there is no such checkpoint. DamageError: it is not whole, or not of the model of its configuration.
    """
    resume_point = checkpoint_at(path, name=checkpoint)
    if (folder := resume_point.folder) is None:
        raise UsageError(f"there is no checkpoint in {path}", fix="train first (mtrain train)")
    index = read_index(folder)
    source = CheckpointSource(folder, index) if isinstance(folder, Path) else ObjectSource(folder, index)
    extras = read_extras(folder, index)  # such as the tokenizer's files
    found = _tokenizer_in(extras, folder)
    if found is None and isinstance(folder, Path):
        found = _tokenizer_of_run(folder.parent.parent)  # checkpoints of version 1 carry none
    tokenizer, template = found or (None, None)
    config, problems = parse_config(load_toml(index.run.config))
    if config is None:
        raise problems_error(f"the configuration in {folder}", problems, fix="use the version of mtrain that wrote it")
    if "weight/embedding.weight" in source.tensors:
        rows = source.tensors["weight/embedding.weight"].shape[0]
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=rows))
    states = tuple(dict.fromkeys(name.split("/", 1)[0] for name in source.tensors))
    check_layers(config.model.num_layers, len(source.tensors), where=folder)
    expected = expected_tensors(config, config.model.vocab_size or 0, states=states)
    check_tensors(source.tensors, expected, where=folder, exact=True)
    return ModelFolder(
        path=folder,
        format="mtrain",
        config=config,
        source=source,
        run=index.run,
        tokenizer=tokenizer,
        template=template,
        record=extras.get(RECORD),
        notes=(resume_point.warning,) if resume_point.warning else (),
    )


def write_native(
    target: Path, model: ModelFolder, *, states: tuple[str, ...], max_shard_bytes: int, report: Report
) -> None:
    """Write a run folder with one checkpoint; the folder is new or empty.

    Args:
        states: of the source, to write. max_shard_bytes: of a file. report: called with bytes as they are written.
    """
    folder = target / "checkpoints" / folder_name(model.run.step)
    folder.mkdir(parents=True)
    names = [name for name in model.source.tensors if name.split("/", 1)[0] in states]
    # Main weights and moments are fp32, and fp64 where training was; a file of less is widened without loss.
    entries = {
        name: TensorInfo(info.shape, torch.promote_types(info.dtype, torch.float32))
        for name, info in ((name, model.source.tensors[name]) for name in names)
    }
    parts: dict[str, HashedFile] = {}
    for number, some in enumerate(split_by_size(entries, max_shard_bytes)):
        name = part_name(number)
        content = dump_part(_write_part(folder / file_of_part(name), model, some, report=report))
        atomic_io.atomic_write(folder / name, content)
        parts[name] = _hashed(content)
    extras = {} if model.tokenizer is None else _tokenizer_files(model.tokenizer, model.template)
    extras |= {} if model.record is None else {RECORD: model.record}  # a run that continues from here can be traced
    for root in (folder, target):
        for name, content in extras.items():
            (root / name).parent.mkdir(exist_ok=True)
            atomic_io.atomic_write(root / name, content)
    # Its checkpoint is here, wherever the source had its own.
    config = dataclasses.replace(model.config, checkpoint=dataclasses.replace(model.config.checkpoint, folder=None))
    run = dataclasses.replace(model.run, config=dump_config(config))
    hashed = {name: _hashed(content) for name, content in extras.items()}
    atomic_io.atomic_write(folder / INDEX, dump_index(run, parts, extras=hashed))
    point_to(folder)
    atomic_io.atomic_write(target / "config.toml", dump_config(config).encode())


def _hashed(content: bytes) -> HashedFile:
    return HashedFile(len(content), blake3(content).hexdigest())


def _write_part(path: Path, model: ModelFolder, entries: dict[str, TensorInfo], *, report: Report) -> Part:
    """Write whole tensors into one file; what its side index says of them."""
    keyed = {slice_key(name, [0] * len(info.shape)): info for name, info in entries.items()}
    written = write_safetensors(path, keyed, pieces=read_pieces(model.source, entries, report=report))
    tensors = {
        name: SavedTensor(
            info.shape,
            (SavedSlice(path.name, key, tuple(0 for _ in info.shape), info.shape, written.tensors[key]),),
            DTYPE_NAMES[info.dtype],
        )
        for (name, info), key in zip(entries.items(), keyed, strict=True)
    }
    return Part(SavedFile(written.size, written.header), tensors)


def _tokenizer_files(config: TokenizerConfig, template: RecordedTemplate | None) -> dict[str, bytes]:
    """As `mtrain train` writes them into the run folder and into each checkpoint."""
    tokenizer = build_tokenizer(config.name, config.files, options=config.options)
    facts = {"type": config.name, "options": dict(config.options), "fingerprint": tokenizer.fingerprint}
    facts |= {} if template is None else template.facts
    files = {f"tokenizer/{name}": content for name, content in config.files.items()}
    return {**files, TOKENIZER_FACTS: (json.dumps(facts, indent=1) + "\n").encode()}


def _tokenizer_of_run(run_folder: Path) -> tuple[TokenizerConfig, RecordedTemplate | None] | None:
    path = run_folder / TOKENIZER_FACTS
    if not path.is_file():
        return None
    files = {file.name: file.read_bytes() for file in (run_folder / "tokenizer").glob("*") if file.is_file()}
    return _tokenizer(path.read_bytes(), files, where=path)


def _tokenizer_in(
    extras: Mapping[str, bytes], folder: Location
) -> tuple[TokenizerConfig, RecordedTemplate | None] | None:
    """The tokenizer that a checkpoint carries: there need be no run folder around it."""
    if TOKENIZER_FACTS not in extras:
        return None
    files = {name.removeprefix("tokenizer/"): file for name, file in extras.items() if name.startswith("tokenizer/")}
    return _tokenizer(extras[TOKENIZER_FACTS], files, where=folder / TOKENIZER_FACTS)


def _tokenizer(
    facts: bytes, files: Mapping[str, bytes], *, where: Location
) -> tuple[TokenizerConfig, RecordedTemplate | None]:
    """The tokenizer and template of `_tokenizer_files`, whose content has not been compared.

    Raises:
        DamageError: the file of facts is not valid.
    """
    try:
        table = json.loads(facts)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{where} is not JSON", found=str(error)[:120], fix="restore it from a copy") from error
    kinds = {"type": str, "options": dict}
    if type(table) is not dict or any(type(table.get(name)) is not kind for name, kind in kinds.items()):
        expected = "an object with the type and the options of a tokenizer"
        raise DamageError(
            f"{where} is damaged", found=ascii(table)[:120], expected=expected, fix="restore it from a copy"
        )
    return TokenizerConfig(table["type"], files, table["options"], "tokenizers"), template_of_facts(table)
