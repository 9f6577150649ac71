"""Checkpoints: named slices of logical tensors, in safetensors, with the index committed last.

    checkpoints/step-400/rank-00000.safetensors   slices that rank 0 holds
                         index.json               every tensor's slices, every file's size, the run's state
    checkpoints/latest                            "step-400"

A slice is a rectangle of a logical tensor, so any layout reads any other; padding and copies are never stored. Each
weight and moment is stored in the optimizer's own precision, therefore resuming on the same layout is bit exact.
Everything is written under a temporary folder name that is renamed when the index is on disk, and `latest` moves
after that: a crash leaves the older checkpoint whole. What a load reads is planned by `overlaps`, which is pure.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

import mdata
from mdata import DamageError, MdataError, UsageError, durable
from trainer.collectives import Axis, gather_objects
from trainer.layout import BufferLayout

T = TypeVar("T")
FORMAT, VERSION = "mtrain-checkpoint", 1
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # start, size


@dataclass(frozen=True, slots=True)
class SavedSlice:
    """A rectangle of a logical tensor, stored under `key` in `file`."""

    file: str
    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunState:
    """Where the run is; all that resuming needs beside tensors.

    Args:
        step: updates done. consumed_samples: training samples read.
        data_id: hash of what decides their order; data: the same, field by field, so that a mismatch can be named.
        optimizer_steps: updates applied (skipped steps are not).
        config: the resolved configuration as TOML.
    """

    step: int
    consumed_samples: int
    data_id: str
    data: dict[str, Any]
    optimizer_steps: int
    config: str


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a rank's buffers that it owns.

    Args:
        layout: of the buffers. start, stop: elements of them. owns_copies: whether this rank is the one that
            stores what all tp ranks hold copies of.
    """

    layout: BufferLayout
    start: int
    stop: int
    owns_copies: bool


def folder_name(step: int) -> str:
    """The folder of a step's checkpoint inside `checkpoints/`."""
    return f"step-{step}"


def save(root: Path, run: RunState, *, shard: Shard, state: dict[str, Tensor], world: Axis) -> Path:
    """Write one checkpoint; it exists under its name when this returns, on every rank.

    Args:
        root: the run's `checkpoints` folder, seen by all ranks.
        state: name -> flat tensor of elements [shard.start, shard.stop).
        world: the axis of all ranks.

    Raises:
        MdataError: a rank could not write; no rank goes on, nothing that looks finished is left.
    """
    final = root / folder_name(run.step)
    partial = durable.partial_path(final)
    lead = world.rank == 0
    try:
        _together(world, lambda: _prepare(partial) if lead else None)
        path = partial / f"rank-{world.rank:05d}.safetensors"
        parts = _together(world, lambda: _write_slices(path, shard, state))
        _together(world, lambda: _commit(root, partial, final, _index(run, parts)) if lead else None)
    except BaseException:
        if lead:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load_state(folder: Path, shard: Shard, *, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read a shard of any layout: name -> flat tensor of elements [shard.start, shard.stop), padding 0.

    Raises:
        DamageError: a slice is missing, or a tensor's shape differs from the model's.
    """
    tensors = read_index(folder)["tensors"]
    reader = _Reader(folder)
    out = {name: torch.zeros(shard.stop - shard.start, dtype=dtype) for name in names}
    for _, wanted, first in shard.layout.slices_within(shard.start, shard.stop):
        count = math.prod(wanted.size)
        where = slice(first - shard.start, first - shard.start + count)
        for name in names:
            entry = tensors.get(f"{name}/{wanted.name}")
            if entry is None or tuple(entry["shape"]) != wanted.shape:
                raise DamageError(
                    f"{folder} does not fit this model at {wanted.name}",
                    found="no such tensor" if entry is None else f"shape {entry['shape']}",
                    expected=f"shape {list(wanted.shape)}",
                    fix="use the configuration that the checkpoint was written with",
                )
            target = out[name][where].view(wanted.size)
            covered = 0
            for saved, (start, size) in overlaps((wanted.start, wanted.size), _saved(entry)):
                inside = _box(start, size, wanted.start)
                target[inside] = reader.read(saved.file, saved.key, _box(start, size, saved.start)).to(dtype)
                covered += math.prod(size)
            if covered != count:
                raise DamageError(
                    f"{folder} lacks a part of {name}/{wanted.name}",
                    found=f"{covered} of {count} elements from {wanted.start}",
                    fix="use an older checkpoint of the run",
                )
    return out


def overlaps(wanted: Rectangle, saved: Sequence[SavedSlice]) -> Iterator[tuple[SavedSlice, Rectangle]]:
    """The parts of saved slices that lie in a wanted rectangle, in the logical tensor's coordinates."""
    for piece in saved:
        low = tuple(max(a, b) for a, b in zip(wanted[0], piece.start, strict=True))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(wanted[0], wanted[1], piece.start, piece.size, strict=True)
        )
        if all(a < b for a, b in zip(low, high, strict=True)):
            yield piece, (low, tuple(b - a for a, b in zip(low, high, strict=True)))


def read_index(folder: Path) -> dict[str, Any]:
    """A checkpoint's index, checked: format, version, and every file's size.

    Raises:
        UsageError: there is no such checkpoint. DamageError: it is not whole.
    """
    path = folder / "index.json"
    try:
        index: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        fix = _instead(folder) if folder.is_dir() else "give a folder with index.json"
        raise UsageError(f"there is no checkpoint at {folder}", expected="index.json in it", fix=fix) from error
    except ValueError as error:
        raise DamageError(f"{path} is not JSON", found=str(error), fix=_instead(folder)) from error
    if (index.get("format"), index.get("version")) != (FORMAT, VERSION):
        found = f"{index.get('format')} version {index.get('version')}"
        raise DamageError(f"{path} is of another kind", found=found, expected=f"{FORMAT} version {VERSION}")
    for name, size in index["files"].items():
        found = f"{(folder / name).stat().st_size} bytes" if (folder / name).exists() else "no such file"
        if found != f"{size} bytes":
            what = f"{folder / name} is damaged"
            raise DamageError(what, found=found, expected=f"{size} bytes", fix=_instead(folder))
    return index


def _instead(folder: Path) -> str:
    """What to do without a checkpoint that was there."""
    others = [path for path in folder.parent.glob("step-*") if path != folder and (path / "index.json").is_file()]
    if not others:
        return "restore it from a copy; there is no other checkpoint beside it"
    newest = max(others, key=lambda path: int(path.name.removeprefix("step-")))
    return f"restore it from a copy; or write {newest.name} into {folder.parent / 'latest'} to go on from there"


def run_state(folder: Path) -> RunState:
    """Where the run was when this checkpoint was written."""
    return RunState(**read_index(folder)["run"])


def latest(root: Path) -> Path | None:
    """The newest finished checkpoint of a run's `checkpoints` folder, or None."""
    pointer = root / "latest"
    return root / pointer.read_text().strip() if pointer.exists() else None


def remove_old(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and temporary folders of crashed saves.

    What `latest` names always stays: after going back to an older checkpoint it is not the one of the highest step.
    """
    for leftover in root.glob(".step-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    done = sorted(root.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
    current = latest(root)
    for folder in done[:-keep]:
        if folder == current:
            continue
        shutil.rmtree(folder, ignore_errors=True)


class _Reader:
    """Opens each file of a checkpoint once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}

    def read(self, file: str, key: str, box: tuple[slice, ...]) -> Tensor:
        if file not in self.files:
            self.files[file] = safe_open(self.folder / file, framework="pt")
        part: Tensor = self.files[file].get_slice(key)[box]
        return part


def _write_slices(path: Path, shard: Shard, state: dict[str, Tensor]) -> dict[str, Any]:
    """Write this rank's slices; returns {"file", "bytes", "tensors": {name: {shape, slices}}}."""
    tensors: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    for spec, part, first in shard.layout.slices_within(shard.start, shard.stop):
        if spec.over_tp != "split" and not shard.owns_copies:
            continue
        where = slice(first - shard.start, first - shard.start + math.prod(part.size))
        for name, flat in state.items():
            logical = f"{name}/{part.name}"
            key = f"{logical}@{','.join(map(str, part.start))}"
            tensors[key] = flat[where].view(part.size).cpu()
            saved = SavedSlice(path.name, key, part.start, part.size)
            index.setdefault(logical, {"shape": part.shape, "slices": []})["slices"].append(asdict(saved))
    data = safetensors.torch.save(tensors)
    durable.atomic_write(path, data)
    return {"file": path.name, "bytes": len(data), "tensors": index}


def _prepare(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _index(run: RunState, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, entry in part["tensors"].items():
            tensors.setdefault(name, {"shape": entry["shape"], "slices": []})["slices"] += entry["slices"]
    files = {part["file"]: part["bytes"] for part in parts}
    return {"format": FORMAT, "version": VERSION, "run": asdict(run), "files": files, "tensors": tensors}


def _commit(root: Path, partial: Path, final: Path, index: dict[str, Any]) -> None:
    durable.atomic_write(partial / "index.json", json.dumps(index, indent=1, sort_keys=True).encode())
    if final.exists():  # a step that is done again after a resume from before it
        shutil.rmtree(final)
    durable.rename(partial, final)
    durable.sync_folder(root)
    durable.atomic_write(root / "latest", final.name.encode())


def _together(world: Axis, action: Callable[[], T]) -> list[T]:
    """Do something on every rank; if one fails all raise its error, so that none waits for one that gave up."""
    outcome: T | MdataError
    try:
        outcome = action()
    except OSError as error:
        outcome = mdata.explain_os_error(error, f"rank {world.rank} writing a checkpoint")
    values = gather_objects(outcome, world)
    for value in values:
        if isinstance(value, MdataError):
            raise value
    return cast(list[T], values)


def _saved(entry: dict[str, Any]) -> list[SavedSlice]:
    return [
        SavedSlice(item["file"], item["key"], tuple(item["start"]), tuple(item["size"])) for item in entry["slices"]
    ]


def _box(start: tuple[int, ...], size: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """A rectangle as slices relative to an origin."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, size, origin, strict=True))
