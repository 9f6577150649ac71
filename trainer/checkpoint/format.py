"""The two kinds of index of a checkpoint: which slices of which tensors are in which file, and the state of the run.

Each rank writes a side index of its own file (`Part`); index.json lists the side indexes with their hashes, and the
state of the run. `parse_index` joins them. It is pure and trusts nothing: it checks every type, size and name, accepts
only our file names, and requires that the slices of every tensor cover it exactly once, so readers need no checks of
their own. Unusual: the checksum of index.json covers the bytes of the file, so that a flipped byte is never taken for
white space. Version 1 had one index for all ranks; its oldest files have no hashes and are read without them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, get_type_hints

from blake3 import blake3

from mdata.errors import counted
from mdata.util.config_text import load_toml
from trainer.checkpoint.index_fields import (
    IndexFault,
    check_keys,
    is_history,
    is_of_type,
    list_of,
    object_of,
    sizes_of,
    text_of,
    whole_number,
)
from trainer.checkpoint.tiling import tiles_exactly

FORMAT, VERSION = "mtrain-checkpoint", 2
PART_FORMAT = "mtrain-checkpoint-part"
DTYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1}  # bytes

_KEYS = {"format", "version", "run", "parts", "extras", "checksum"}
_PART_KEYS = {"format", "version", "bytes", "header", "tensors"}
_SLICE_KEYS = {"start", "size", "hash"}
_KEYS_1 = {"format", "version", "run", "files", "tensors"}
_HASHED_1 = {"checksum", "headers"}  # what the oldest indexes lack
_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")
_PART = re.compile(r"rank-[0-9]{5,9}\.json")
_EXTRA = re.compile(r"(tokenizer/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_HASH = re.compile(r"[0-9a-f]{64}")
_SCALER = {"scale", "good_steps", "hysteresis"}  # see optim/scaler.py
_SPIKES = {"window": 2, "waiting": 5}  # numbers of a row; see run/spike_detector.py
_SPIKE_COUNTS = {"mixture", "in_a_row", "last_above"}
_EMPTY_CHECKSUM = b'"checksum": ""'


@dataclass(frozen=True, slots=True)
class SavedSlice:
    """A rectangle of a logical tensor, stored under `key` in `file`; the hash is of its bytes."""

    file: str
    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    hash: str | None = None


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A logical tensor; its slices cover it exactly once, those of a `Part` a part of it.

    Attributes:
        dtype: of all its slices, as in safetensors ("F32"); None in version 1.
    """

    shape: tuple[int, ...]
    slices: tuple[SavedSlice, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One rank's file: its size, and the hash of its header (the bytes before the first tensor)."""

    bytes: int
    header: str | None = None


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A small file that is read in one piece: a side index, or a file of the tokenizer."""

    bytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote: its file, and its slices by state and logical name."""

    file: SavedFile
    tensors: Mapping[str, SavedTensor]


@dataclass(frozen=True, slots=True)
class RunState:
    """The position of the run: what resuming needs besides tensors.

    Args:
        step: updates done. consumed_samples: training samples read.
        data_id: hash of what decides their order; data: its fields, so that a mismatch can be named.
        optimizer_steps: updates applied (skipped steps are not).
        config: the resolved configuration as TOML.
        measured: the line of metrics.jsonl for this step; written on resuming if the run ended before.
        scaler: the state of the loss scale (optim/scaler.py); empty in checkpoints of older versions.
        versions: of the programs that wrote it, and the layout; for humans.
        skipped_samples: samples of the steps that were not applied.
        float8: the largest values of each FP8 layer (layers/float8_scaling.py); empty without delayed scaling.
        spikes: the state of the spike detector (run/spike_detector.py); empty without one.
        base: hash of the frozen weights beside which adapters are trained (convert/adapters.py); empty without them.
        schedule_steps, schedule_samples, moment_steps: offsets that schedules and updates add to the run's steps and
            samples; may be negative; 0 without checkpoint.init_from.
    """

    step: int
    consumed_samples: int
    data_id: str
    data: dict[str, Any]
    optimizer_steps: int
    config: str
    measured: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    skipped_samples: int = 0
    float8: dict[str, Any] = field(default_factory=dict)
    schedule_steps: int = 0
    schedule_samples: int = 0
    moment_steps: int = 0
    spikes: dict[str, Any] = field(default_factory=dict)
    base: str = ""


@dataclass(frozen=True, slots=True)
class Index:
    """A checkpoint without its tensors.

    Attributes:
        files: by name. tensors: by state and logical name, "exp_avg/embedding.weight".
        hashed: whether damage of the files' content is detected; false for the oldest checkpoints.
        parts: the side indexes by name; none in version 1. extras: the tokenizer's files. version: of the format.
    """

    run: RunState
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor]
    hashed: bool
    parts: Mapping[str, HashedFile] = field(default_factory=dict)
    extras: Mapping[str, HashedFile] = field(default_factory=dict)
    version: int = VERSION


def dump_index(run: RunState, parts: Mapping[str, HashedFile], *, extras: Mapping[str, HashedFile]) -> bytes:
    """The bytes of index.json."""
    value = {
        "format": FORMAT,
        "version": VERSION,
        "run": asdict(run),
        "parts": {name: asdict(file) for name, file in parts.items()},
        "extras": {name: asdict(file) for name, file in extras.items()},
        "checksum": "",
    }
    # Sorted, so that the first word of the file is the checksum's.
    text = json.dumps(value, indent=1, sort_keys=True).encode()
    return text.replace(_EMPTY_CHECKSUM, f'"checksum": "{blake3(text).hexdigest()}"'.encode(), 1)


def dump_part(part: Part) -> bytes:
    """The bytes of a side index; names of its file and keys of slices are not stored, because they can be derived."""
    tensors = {
        name: {
            "shape": tensor.shape,
            "dtype": tensor.dtype,
            "slices": [{"start": piece.start, "size": piece.size, "hash": piece.hash} for piece in tensor.slices],
        }
        for name, tensor in part.tensors.items()
    }
    value = {"format": PART_FORMAT, "version": VERSION, **asdict(part.file), "tensors": tensors}
    return json.dumps(value, sort_keys=True).encode()


def file_of_part(name: str) -> str:
    """The file of slices that a side index describes."""
    return f"{name.removesuffix('.json')}.safetensors"


def parse_index(raw: bytes, read_part: Callable[[str], bytes]) -> Index:
    """Parse the output of `dump_index` or of an older version.

    Args:
        read_part: the content of a side index by its name; its hash is compared here.

    Raises:
        IndexFault: anything that they could not write.
    """
    table = object_of(_json(raw), "")
    version = table.get("version")
    if table.get("format") != FORMAT or type(version) is not int or version not in (1, VERSION):
        raise IndexFault("", f"{table.get('format')} version {version}", f"{FORMAT} version {VERSION} or 1")
    return _index_1(raw, table) if version == 1 else _index(raw, table, read_part)


def parse_part(raw: bytes, name: str) -> Part:
    """Parse the output of `dump_part`.

    Raises:
        IndexFault: anything that it could not write.
    """
    table = object_of(_json(raw, name), name)
    check_keys(table, _PART_KEYS, place=f"{name}/its keys")
    if (table["format"], table["version"]) != (PART_FORMAT, VERSION) or type(table["version"]) is not int:
        raise IndexFault(name, f"{table['format']} version {table['version']}", f"{PART_FORMAT} version {VERSION}")
    file = file_of_part(name)
    saved = SavedFile(
        whole_number(table["bytes"], f"{name}/bytes", low=8), text_of(table["header"], f"{name}/header", form=_HASH)
    )
    tensors = {
        key: _part_tensor(key, entry, place=f"{name}/{key}", file=file)
        for key, entry in object_of(table["tensors"], f"{name}/tensors").items()
    }
    return Part(saved, tensors)


def _json(raw: bytes, place: str = "") -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise IndexFault(place, str(error), "JSON") from error


def _index(raw: bytes, table: Mapping[str, Any], read_part: Callable[[str], bytes]) -> Index:
    check_keys(table, _KEYS, place="its keys")
    _check_checksum(raw, table["checksum"])
    parts = _hashed_files(table["parts"], "parts", _PART)
    files: dict[str, SavedFile] = {}
    merged: dict[str, list[SavedTensor]] = {}
    for name, file in parts.items():
        content = read_part(name)
        if (actual_hash := blake3(content).hexdigest()) != file.hash:
            raise IndexFault(name, f"hash {actual_hash}", f"{file.hash}, as index.json says")
        part = parse_part(content, name)
        files[file_of_part(name)] = part.file
        for key, tensor in part.tensors.items():
            merged.setdefault(key, []).append(tensor)
    tensors = {name: _joined(name, pieces) for name, pieces in merged.items()}
    extras = _hashed_files(table["extras"], "extras", _EXTRA)
    return Index(_run(table["run"]), files, tensors, hashed=True, parts=parts, extras=extras)


def _joined(name: str, parts: Sequence[SavedTensor]) -> SavedTensor:
    """Join the parts of a tensor that several ranks stored."""
    first = parts[0]
    for other in parts:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            actual = f"shape {list(other.shape)}, {other.dtype}"
            raise IndexFault(f"tensors/{name}", actual, f"shape {list(first.shape)}, {first.dtype} as in another part")
    slices = tuple(piece for part in parts for piece in part.slices)
    _check_tiles(f"tensors/{name}", first.shape, slices)
    return SavedTensor(first.shape, slices, first.dtype)


def _check_tiles(place: str, shape: tuple[int, ...], slices: Sequence[SavedSlice]) -> None:
    if not tiles_exactly(shape, [(piece.start, piece.size) for piece in slices]):
        covered = sum(math.prod(piece.size) for piece in slices)
        actual = f"{counted(len(slices), 'slice')} with {counted(covered, 'element')} in total"
        raise IndexFault(
            place, actual, f"slices that cover each of the {counted(math.prod(shape), 'element')} exactly once"
        )


def _part_tensor(name: str, value: Any, *, place: str, file: str) -> SavedTensor:
    table = object_of(value, place)
    check_keys(table, {"shape", "dtype", "slices"}, place=place)
    shape = sizes_of(table["shape"], f"{place}/shape", low=1)
    if type(table["dtype"]) is not str or table["dtype"] not in DTYPES:
        raise IndexFault(f"{place}/dtype", table["dtype"], f"one of {', '.join(DTYPES)}")
    slices = []
    for number, item in enumerate(list_of(table["slices"], f"{place}/slices")):
        if not _is_slice(item, shape):  # finding the reason is slower, and there may be a million slices
            _rectangle(item, f"{place}/{number}", shape=shape, keys=_SLICE_KEYS)
            text_of(item["hash"], f"{place}/{number}/hash", form=_HASH)
        start = tuple(item["start"])
        slices.append(SavedSlice(file, slice_key(name, start), start, tuple(item["size"]), item["hash"]))
    return SavedTensor(shape, tuple(slices), table["dtype"])


def _is_slice(item: Any, shape: tuple[int, ...]) -> bool:
    """Whether it is valid for `_rectangle` and has a hash."""
    if type(item) is not dict or item.keys() != _SLICE_KEYS:
        return False
    start, size, hashed = item["start"], item["size"], item["hash"]
    if type(start) is not list or type(size) is not list or not len(start) == len(size) == len(shape):
        return False
    for first, count, extent in zip(start, size, shape, strict=True):
        if type(first) is not int or type(count) is not int or first < 0 or not 0 < count <= extent - first:
            return False
    return type(hashed) is str and _HASH.fullmatch(hashed) is not None


def _hashed_files(value: Any, place: str, pattern: re.Pattern[str]) -> dict[str, HashedFile]:
    files = {}
    for name, entry in object_of(value, place).items():
        text_of(name, place, form=pattern)
        table = object_of(entry, f"{place}/{name}")
        check_keys(table, {"bytes", "hash"}, place=f"{place}/{name}")
        size = whole_number(table["bytes"], f"{place}/{name}/bytes", low=0)
        files[name] = HashedFile(size, text_of(table["hash"], f"{place}/{name}/hash", form=_HASH))
    return files


def _index_1(raw: bytes, table: Mapping[str, Any]) -> Index:
    hashed = bool(_HASHED_1 & table.keys())
    check_keys(table, _KEYS_1 | _HASHED_1 if hashed else _KEYS_1, place="its keys")
    if hashed:
        _check_checksum(raw, table["checksum"])
    files = _files_1(table["files"], table["headers"] if hashed else None)
    tensors = {
        name: _tensor_1(name, entry, files=files, hashed=hashed)
        for name, entry in object_of(table["tensors"], "tensors").items()
    }
    return Index(_run(table["run"]), files, tensors, hashed, version=1)


def _check_checksum(raw: bytes, claimed: Any) -> None:
    text_of(claimed, "checksum", form=_HASH)
    content = raw.replace(f'"checksum": "{claimed}"'.encode(), _EMPTY_CHECKSUM, 1)
    if blake3(content).hexdigest() != claimed:
        raise IndexFault("checksum", claimed, f"{blake3(content).hexdigest()}, the hash of the file's content")


def _files_1(sizes: Any, headers: Any) -> dict[str, SavedFile]:
    table = object_of(sizes, "files")
    hashes = {} if headers is None else object_of(headers, "headers")
    if headers is not None:
        check_keys(hashes, set(table), place="headers")
    files = {}
    for name, size in table.items():
        text_of(name, "files", form=_FILE)
        header = None if headers is None else text_of(hashes[name], f"headers/{name}", form=_HASH)
        files[name] = SavedFile(whole_number(size, f"files/{name}", low=8), header)
    return files


def _tensor_1(name: str, value: Any, *, files: Mapping[str, SavedFile], hashed: bool) -> SavedTensor:
    place = f"tensors/{name}"
    table = object_of(value, place)
    check_keys(table, {"shape", "slices"}, place=place)
    shape = sizes_of(table["shape"], f"{place}/shape", low=1)
    slices = tuple(
        _slice_1(name, item, place=f"{place}/slices/{number}", shape=shape, hashed=hashed)
        for number, item in enumerate(list_of(table["slices"], f"{place}/slices"))
    )
    for piece in slices:
        if piece.file not in files:
            raise IndexFault(place, piece.file, "one of the files that the index lists")
    _check_tiles(place, shape, slices)
    return SavedTensor(shape, slices)


def _slice_1(name: str, value: Any, *, place: str, shape: tuple[int, ...], hashed: bool) -> SavedSlice:
    keys = {"file", "key", "start", "size"} | ({"hash"} if hashed else set())
    start, size = _rectangle(value, place, shape=shape, keys=keys)
    if value["key"] != (key := slice_key(name, start)):
        raise IndexFault(f"{place}/key", value["key"], key)
    file = text_of(value["file"], f"{place}/file", form=_FILE)
    return SavedSlice(file, key, start, size, text_of(value["hash"], f"{place}/hash", form=_HASH) if hashed else None)


def _rectangle(
    value: Any, place: str, *, shape: tuple[int, ...], keys: set[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, size) of a slice that lies inside its tensor."""
    table = object_of(value, place)
    check_keys(table, keys, place=place)
    start, size = sizes_of(table["start"], f"{place}/start", low=0), sizes_of(table["size"], f"{place}/size", low=1)
    inside = len(start) == len(size) == len(shape)
    if not inside or any(a + n > extent for a, n, extent in zip(start, size, shape, strict=True)):
        raise IndexFault(place, f"start {list(start)}, size {list(size)}", f"a part of shape {list(shape)}")
    return start, size


def slice_key(name: str, start: Sequence[int]) -> str:
    """The name of a slice in its file: the tensor's, and where the slice begins."""
    return f"{name}@{','.join(map(str, start))}"


def _run(value: Any) -> RunState:
    table = object_of(value, "run")
    hints = get_type_hints(RunState)
    optional = {f.name for f in fields(RunState) if f.default is not MISSING or f.default_factory is not MISSING}
    check_keys({**dict.fromkeys(optional), **table}, set(hints), place="run")
    for name, item in table.items():
        if not is_of_type(item, hints[name]):
            raise IndexFault(f"run/{name}", item, str(getattr(hints[name], "__name__", hints[name])))
    run = RunState(**table)
    whole_number(run.step, "run/step", low=1)
    whole_number(run.consumed_samples, "run/consumed_samples", low=run.step)
    whole_number(run.optimizer_steps, "run/optimizer_steps", low=max(0, run.moment_steps))
    if run.optimizer_steps > (most := run.step + run.moment_steps):
        raise IndexFault("run/optimizer_steps", run.optimizer_steps, f"at most {most}, run/step + run/moment_steps")
    whole_number(run.schedule_steps, "run/schedule_steps", low=-run.step)
    whole_number(run.schedule_samples, "run/schedule_samples", low=-run.consumed_samples)
    if whole_number(run.skipped_samples, "run/skipped_samples", low=0) > run.consumed_samples:
        raise IndexFault("run/skipped_samples", run.skipped_samples, "at most run/consumed_samples")
    if run.scaler and not (run.scaler.keys() == _SCALER and all(type(x) is float for x in run.scaler.values())):
        raise IndexFault("run/scaler", run.scaler, f"numbers {', '.join(sorted(_SCALER))}")
    if wrong := [name for name, rows in run.float8.items() if not is_history(rows)]:
        raise IndexFault(f"run/float8/{wrong[0]}", run.float8[wrong[0]], "rows of 3 numbers from 0 on")
    if run.spikes:
        _check_spikes(run.spikes)
    if run.base:
        text_of(run.base, "run/base", form=_HASH)
    try:
        load_toml(run.config)
    except ValueError as error:  # not TOML, a number of 5,000 digits, nested too deep
        raise IndexFault("run/config", str(error), "TOML") from error
    return run


def _check_spikes(spikes: dict[str, Any]) -> None:
    check_keys(spikes, {*_SPIKES, *_SPIKE_COUNTS}, place="run/spikes")
    for name, length in _SPIKES.items():
        for row in list_of(spikes[name], f"run/spikes/{name}"):
            numbers = type(row) is list and len(row) == length and all(type(x) in (int, float, bool) for x in row)
            if not numbers or not all(map(math.isfinite, row)):
                raise IndexFault(f"run/spikes/{name}", row, f"{length} finite numbers")
    for name in _SPIKE_COUNTS:
        whole_number(spikes[name], f"run/spikes/{name}", low=-1000)
