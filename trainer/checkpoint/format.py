"""The index of a checkpoint: which slices of which tensors lie in which file, and where the run was.

`parse_index` is pure and trusts nothing: every type, size and name is checked, file names are those that we give, and
the slices of every tensor cover it exactly once, so that whoever reads by an index needs no check of its own.
`dump_index` writes it. What is unusual: the checksum covers the bytes of the file, so that no flipped byte is taken for
white space; a file without a checksum was written by an older version, which knew no hashes, and is read without them.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

from blake3 import blake3

FORMAT, VERSION = "mtrain-checkpoint", 1
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # start, size

_KEYS = {"format", "version", "run", "files", "tensors"}
_HASHED = {"checksum", "headers"}  # what the indexes of older versions lack
_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")
_HASH = re.compile(r"[0-9a-f]{64}")
_MOST = (1 << 63) - 1
_MOST_DIMS = 8
_SCALER = {"scale", "good_steps", "hysteresis"}  # see optim/scaler.py
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
    """A logical tensor; its slices cover it exactly once."""

    shape: tuple[int, ...]
    slices: tuple[SavedSlice, ...]


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One rank's file: its size, and the hash of its header (the bytes before the first tensor)."""

    bytes: int
    header: str | None = None


@dataclass(frozen=True, slots=True)
class RunState:
    """Where the run is; all that resuming needs beside tensors.

    Args:
        step: updates done. consumed_samples: training samples read.
        data_id: hash of what decides their order; data: the same, field by field, so that a mismatch can be named.
        optimizer_steps: updates applied (skipped steps are not).
        config: the resolved configuration as TOML.
        measured: what metrics.jsonl says of this step; a run that ended before it was written writes it on resuming.
        scaler: the state of the loss scale (optim/scaler.py); empty in checkpoints of older versions.
    """

    step: int
    consumed_samples: int
    data_id: str
    data: dict[str, Any]
    optimizer_steps: int
    config: str
    measured: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Index:
    """A checkpoint without its tensors.

    Attributes:
        files: by name. tensors: by state and logical name, "exp_avg/embedding.weight".
        hashed: whether damage of the files' content will be seen; not in checkpoints of older versions.
    """

    run: RunState
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor]
    hashed: bool


@dataclass
class IndexFault(ValueError):
    """Something that no writer of ours puts into an index.

    Args:
        place: where it stands, such as "run/step"; "": the file as a whole. found, expected: there.
    """

    place: str
    found: object
    expected: str

    @property
    def shown(self) -> str:
        """What was found, for the user: in a damaged file it may be long, or no text that a terminal takes."""
        return ascii(self.found)[1:-1][:120] if isinstance(self.found, str) else ascii(self.found)[:120]


def dump_index(index: Index) -> bytes:
    """The bytes of index.json."""
    tensors = {
        name: {"shape": tensor.shape, "slices": [asdict(piece) for piece in tensor.slices]}
        for name, tensor in index.tensors.items()
    }
    value = {
        "format": FORMAT,
        "version": VERSION,
        "run": asdict(index.run),
        "files": {name: file.bytes for name, file in index.files.items()},
        "headers": {name: file.header for name, file in index.files.items()},
        "tensors": tensors,
        "checksum": "",
    }
    # Sorted, so that the first word of the file is the checksum's.
    text = json.dumps(value, indent=1, sort_keys=True).encode()
    return text.replace(_EMPTY_CHECKSUM, f'"checksum": "{blake3(text).hexdigest()}"'.encode(), 1)


def parse_index(raw: bytes) -> Index:
    """What `dump_index` or an older version wrote.

    Raises:
        IndexFault: anything that they could not have written.
    """
    try:
        return _index(raw, json.loads(raw))
    except IndexFault:
        raise
    except (ValueError, RecursionError) as error:
        raise IndexFault("", str(error), "JSON") from error


def tiles_exactly(shape: Sequence[int], boxes: Sequence[Rectangle]) -> bool:
    """Whether rectangles cover every element of a tensor exactly once.

    Args:
        shape: of the tensor, every size at least 1. boxes: each inside it and not empty.
    """
    if not shape:
        return len(boxes) == 1
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    # Between two neighbouring edges along dim 0 the same boxes lie side by side: they tile the other dims.
    waiting = sorted(boxes, key=lambda box: -box[0][0])
    edges = sorted({0, *(start[0] for start, _ in boxes), *(start[0] + size[0] for start, size in boxes)})
    across: list[Rectangle] = []
    for edge in edges:
        before = len(across)
        across = [(start, size) for start, size in across if start[0] + size[0] > edge]
        changed = len(across) != before
        while waiting and waiting[-1][0][0] == edge:
            across.append(waiting.pop())
            changed = True
        if (
            changed
            and edge != shape[0]
            and not tiles_exactly(shape[1:], [(start[1:], size[1:]) for start, size in across])
        ):
            return False
    return True


def _index(raw: bytes, value: Any) -> Index:
    table = _table(value, "", "a JSON object")
    if (table.get("format"), table.get("version")) != (FORMAT, VERSION) or type(table["version"]) is not int:
        found = f"{table.get('format')} version {table.get('version')}"
        raise IndexFault("", found, f"{FORMAT} version {VERSION}")
    hashed = bool(_HASHED & table.keys())
    _check_keys(table, _KEYS | _HASHED if hashed else _KEYS, place="its keys")
    if hashed:
        _check_checksum(raw, table["checksum"])
    files = _files(table["files"], table["headers"] if hashed else None)
    tensors = {
        name: _tensor(name, entry, files=files, hashed=hashed)
        for name, entry in _table(table["tensors"], "tensors", "an object").items()
    }
    return Index(_run(table["run"]), files, tensors, hashed)


def _check_checksum(raw: bytes, claimed: Any) -> None:
    _text(claimed, "checksum", _HASH)
    whole = raw.replace(f'"checksum": "{claimed}"'.encode(), _EMPTY_CHECKSUM, 1)
    if blake3(whole).hexdigest() != claimed:
        raise IndexFault("checksum", claimed, f"{blake3(whole).hexdigest()}, the hash of the file's content")


def _files(sizes: Any, headers: Any) -> dict[str, SavedFile]:
    table = _table(sizes, "files", "an object")
    hashes = {} if headers is None else _table(headers, "headers", "an object")
    if headers is not None:
        _check_keys(hashes, set(table), place="headers")
    files = {}
    for name, size in table.items():
        _text(name, "files", _FILE)
        header = None if headers is None else _text(hashes[name], f"headers/{name}", _HASH)
        files[name] = SavedFile(_whole(size, f"files/{name}", low=8), header)
    return files


def _tensor(name: str, value: Any, *, files: Mapping[str, SavedFile], hashed: bool) -> SavedTensor:
    place = f"tensors/{name}"
    table = _table(value, place, "an object")
    _check_keys(table, {"shape", "slices"}, place=place)
    shape = _sizes(table["shape"], f"{place}/shape", low=1)
    if type(table["slices"]) is not list:
        raise IndexFault(f"{place}/slices", table["slices"], "a list")
    slices = tuple(
        _slice(name, item, place=f"{place}/slices/{number}", shape=shape, hashed=hashed)
        for number, item in enumerate(table["slices"])
    )
    for piece in slices:
        if piece.file not in files:
            raise IndexFault(place, piece.file, "one of the files that the index lists")
    if not tiles_exactly(shape, [(piece.start, piece.size) for piece in slices]):
        covered = sum(math.prod(piece.size) for piece in slices)
        found = f"{len(slices)} slices with {covered} elements in total"
        raise IndexFault(place, found, f"slices that cover each of the {math.prod(shape)} elements exactly once")
    return SavedTensor(shape, slices)


def _slice(name: str, value: Any, *, place: str, shape: tuple[int, ...], hashed: bool) -> SavedSlice:
    table = _table(value, place, "an object")
    _check_keys(table, {"file", "key", "start", "size"} | ({"hash"} if hashed else set()), place=place)
    start, size = _sizes(table["start"], f"{place}/start", low=0), _sizes(table["size"], f"{place}/size", low=1)
    inside = len(start) == len(size) == len(shape)
    if not inside or any(a + n > whole for a, n, whole in zip(start, size, shape, strict=True)):
        raise IndexFault(place, f"start {list(start)}, size {list(size)}", f"a part of shape {list(shape)}")
    if table["key"] != (key := slice_key(name, start)):
        raise IndexFault(f"{place}/key", table["key"], key)
    file = _text(table["file"], f"{place}/file", _FILE)
    return SavedSlice(file, key, start, size, _text(table["hash"], f"{place}/hash", _HASH) if hashed else None)


def slice_key(name: str, start: Sequence[int]) -> str:
    """The name of a slice in its file: the tensor's, and where the slice begins."""
    return f"{name}@{','.join(map(str, start))}"


def _run(value: Any) -> RunState:
    table = _table(value, "run", "an object")
    hints = get_type_hints(RunState)
    optional = {f.name for f in fields(RunState) if f.default is not MISSING or f.default_factory is not MISSING}
    _check_keys({**dict.fromkeys(optional), **table}, set(hints), place="run")
    for name, item in table.items():
        if not _is(item, hints[name]):
            raise IndexFault(f"run/{name}", item, str(getattr(hints[name], "__name__", hints[name])))
    run = RunState(**table)
    _whole(run.step, "run/step", low=1)
    _whole(run.consumed_samples, "run/consumed_samples", low=run.step)
    if _whole(run.optimizer_steps, "run/optimizer_steps", low=0) > run.step:
        raise IndexFault("run/optimizer_steps", run.optimizer_steps, f"at most run/step, {run.step}")
    if run.scaler and not (run.scaler.keys() == _SCALER and all(type(x) is float for x in run.scaler.values())):
        raise IndexFault("run/scaler", run.scaler, f"numbers {', '.join(sorted(_SCALER))}")
    try:
        tomllib.loads(run.config)
    except (ValueError, RecursionError) as error:  # not TOML, a number of 5,000 digits, nested too deep
        raise IndexFault("run/config", str(error), "TOML") from error
    return run


def _is(value: Any, hint: Any) -> bool:
    kinds = get_args(hint) if get_origin(hint) not in (None, dict, list, tuple) else (hint,)
    return any(type(value) is (get_origin(kind) or kind) for kind in kinds)


def _table(value: Any, place: str, expected: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise IndexFault(place, value, expected)
    return value


def _check_keys(table: Mapping[str, Any], keys: set[str], *, place: str) -> None:
    if table.keys() != keys:
        raise IndexFault(place, ", ".join(sorted(table)) or "nothing", ", ".join(sorted(keys)) or "nothing")


def _text(value: Any, place: str, pattern: re.Pattern[str]) -> str:
    if type(value) is not str or not pattern.fullmatch(value):
        raise IndexFault(place, value, f"text of the form {pattern.pattern}")
    return value


def _whole(value: Any, place: str, *, low: int) -> int:
    if type(value) is not int or not low <= value <= _MOST:
        raise IndexFault(place, value, f"a whole number of at least {low}")
    return value


def _sizes(value: Any, place: str, *, low: int) -> tuple[int, ...]:
    if type(value) is not list or not 1 <= len(value) <= _MOST_DIMS:
        raise IndexFault(place, value, f"a list of 1 to {_MOST_DIMS} whole numbers")
    return tuple(_whole(item, place, low=low) for item in value)
