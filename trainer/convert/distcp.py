"""Tensors of torch.distributed.checkpoint, read by chunks: `.metadata` says where each lies in which .distcp file.

Every value and place is checked when the folder is opened: file names stay inside it, files are long enough, and
records do not overlap; the chunks of a tensor that is read cover it exactly once. Only the requested part of a chunk is
read. Also here: tensors that lie one after another in flat ones (`FlatSource`), and several sources as one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdata import DamageError, UsageError
from mdata.errors import few
from mdata.util.gc_pause import gc_paused
from trainer.checkpoint.tiling import Rectangle, tiles_exactly
from trainer.convert.links import Source, TensorInfo
from trainer.convert.pickles import Made, Name, unpickle
from trainer.convert.torch_file import FileRange, StoredTensor, faults_named, load_range, mapped, unread

METADATA = ".metadata"
_FILE = re.compile(r"[^/\\\x00]+\.distcp")
_LONGEST_NAME = 500
_MOST_DIMS = 32
_PREFIX = "torch.distributed.checkpoint."


class _Record(NamedTuple):
    """The place of a stored chunk or object, and whether it is compressed."""

    file: str
    begin: int
    size: int
    compressed: bool


class _Metadata(NamedTuple):
    """The content of `.metadata`.

    Args:
        tensors: name -> shape and dtype. chunks: of each tensor. objects: names of what is stored beside tensors.
        records: of (name, where the chunk begins); objects begin at ().
    """

    tensors: dict[str, TensorInfo]
    chunks: dict[str, list[Rectangle]]
    objects: list[str]
    records: dict[tuple[str, tuple[int, ...]], _Record]


def load_metadata(path: Path) -> _Metadata:
    """The `.metadata` of a folder.

    Raises:
        UsageError: it holds a type that torch does not write there. DamageError: the file is damaged; names the key.
    """
    with mapped(path) as data, faults_named(str(path)), gc_paused():
        value, _ = unpickle(data)
    reader = _MetadataReader(path)
    parsed = _Metadata({}, {}, [], {})
    metadata = reader.state(value, "metadata.Metadata", key="the file")
    for name, entry in reader.table(metadata, "state_dict_metadata").items():
        key = f"state_dict_metadata[{name!r}]"
        if not isinstance(name, str) or len(name) > _LONGEST_NAME:
            raise reader.damage(key[:200], name, f"a name of at most {_LONGEST_NAME} characters")
        if isinstance(entry, Made) and entry.kind == f"{_PREFIX}metadata.BytesStorageMetadata":
            parsed.objects.append(name)
            continue
        state = reader.state(entry, "metadata.TensorStorageMetadata", key=key)
        shape = reader.sizes(state.get("size"), key=f"{key}.size")
        parsed.tensors[name] = TensorInfo(shape, reader.dtype(state.get("properties"), key=f"{key}.properties"))
        chunks = state.get("chunks")
        if not isinstance(chunks, list):
            raise reader.damage(f"{key}.chunks", chunks, "a list")
        parsed.chunks[name] = [reader.chunk(chunk, shape, key=f"{key}.chunks") for chunk in chunks]
    for index, place in reader.table(metadata, "storage_data").items():
        fields = reader.state(index, "metadata.MetadataIndex", key="storage_data")
        name, offset = fields.get("fqn"), fields.get("offset")
        if not isinstance(name, str):
            raise reader.damage("storage_data", name, "a name")
        key = f"storage_data of {name[:_LONGEST_NAME]!r}"
        start = () if offset is None else reader.sizes(offset, key=f"{key}.offset")
        parsed.records[name, start] = reader.record(place, key=key)
    return parsed


class _MetadataReader:
    """Values of the types that torch writes, or an error that names the key."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def damage(self, key: str, found: Any, expected: str) -> DamageError:
        """The error of a wrong value."""
        return DamageError(
            f"{self._path} is damaged at {key}", found=repr(found)[:120], expected=expected, fix="restore the folder"
        )

    def state(self, value: Any, kind: str, *, key: str) -> dict[str, Any]:
        """The fields of an object of this type."""
        if not isinstance(value, Made) or value.kind != _PREFIX + kind or not isinstance(value.state, dict):
            raise self.damage(key, value, f"torch's {kind.rpartition('.')[2]}")
        return value.state

    def table(self, fields: dict[str, Any], name: str) -> dict[Any, Any]:
        """A field that is a dictionary."""
        value = fields.get(name)
        if not isinstance(value, dict):
            raise self.damage(name, value, "a dictionary")
        return value

    def sizes(self, value: Any, *, key: str) -> tuple[int, ...]:
        """A torch.Size."""
        is_size = isinstance(value, Made) and value.kind == "torch.Size" and len(value.arguments) == 1
        inner = value.arguments[0] if is_size else value
        is_short = isinstance(inner, (tuple, list)) and len(inner) <= _MOST_DIMS
        if not is_short or not all(type(size) is int and 0 <= size < 1 << 62 for size in inner):
            raise self.damage(key, inner, "sizes")
        return tuple(inner)

    def dtype(self, properties: Any, *, key: str) -> torch.dtype:
        """The dtype in TensorProperties, which keep their fields in a tuple."""
        ours = isinstance(properties, Made) and properties.kind == f"{_PREFIX}metadata.TensorProperties"
        fields = properties.state if ours else None
        first = fields[0] if isinstance(fields, tuple) and fields else None
        name = first.name.removeprefix("torch.") if isinstance(first, Name) else ""
        torch_dtype = getattr(torch, name, None)
        if not isinstance(torch_dtype, torch.dtype):
            raise self.damage(key, first, "a dtype of torch")
        return torch_dtype

    def chunk(self, value: Any, shape: tuple[int, ...], *, key: str) -> Rectangle:
        """A rectangle inside a tensor."""
        fields = self.state(value, "metadata.ChunkStorageMetadata", key=key)
        start, size = (self.sizes(fields.get(name), key=f"{key}.{name}") for name in ("offsets", "sizes"))
        inside = len(start) == len(size) == len(shape) and all(
            first + count <= most for first, count, most in zip(start, size, shape, strict=True)
        )
        if not inside or (0 in size and 0 not in shape):
            raise self.damage(key, [*start, *size], f"chunks inside {list(shape)}")
        return start, size

    def record(self, value: Any, *, key: str) -> _Record:
        """Where something is stored."""
        fields = self.state(value, "filesystem._StorageInfo", key=key)
        file, begin, size = (fields.get(name) for name in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise self.damage(f"{key}.relative_path", file, "a .distcp file of the folder")
        for name, number in (("offset", begin), ("length", size)):
            if type(number) is not int or not 0 <= number < 1 << 62:
                raise self.damage(f"{key}.{name}", number, "a number of bytes")
        assert isinstance(begin, int) and isinstance(size, int), "both were checked above"
        return _Record(file, begin, size, bool(fields.get("transform_descriptors")))


class ChunkSource:
    """The tensors of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors, self._chunks, self.objects, self._records = load_metadata(folder / METADATA)
        self._covered: set[str] = set()  # tensors whose chunks were checked
        self._opened: dict[tuple[str, tuple[int, ...]], StoredTensor] = {}
        self._check_files()

    def starts(self, name: str) -> list[tuple[int, ...]]:
        """Where the chunks of a tensor begin."""
        return [start for start, _ in self._chunks[name]]

    def load_object(self, name: str) -> Any:
        """The object that is stored under a name."""
        if name not in self.objects:
            raise DamageError(f"{self.folder / METADATA} has no {name}", fix="restore the folder")
        return self._load(name, ())

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        self._check_chunks(name)
        out = torch.empty(box[1], dtype=self.tensors[name].dtype)
        for start, size in self._chunks[name]:
            low = tuple(max(a, b) for a, b in zip(start, box[0], strict=True))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, size, box[0], box[1], strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                extent = tuple(b - a for a, b in zip(low, high, strict=True))
                inside = tuple(a - o for a, o in zip(low, start, strict=True))
                part = self._chunk(name, start, size).read((inside, extent))
                if extent == tuple(box[1]):
                    return part
                out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box[0], strict=True))] = part
        return out

    def _check_chunks(self, name: str) -> None:
        """Check that the chunks of a tensor cover it exactly once; done only for tensors that are read.

        Raises:
            DamageError: they do not.
        """
        shape, chunks = self.tensors[name].shape, self._chunks[name]
        if name not in self._covered and 0 not in shape and not tiles_exactly(shape, chunks):
            raise DamageError(
                f"{self.folder / METADATA} is damaged at state_dict_metadata[{name!r}].chunks",
                found=few([f"{list(size)} at {list(start)}" for start, size in chunks], 4) or "none",
                expected=f"chunks that cover a tensor of shape {list(shape)} exactly once",
                fix="restore the folder",
            )
        self._covered.add(name)

    def _chunk(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> StoredTensor:
        """A chunk, not read yet."""
        if (name, start) not in self._opened:
            stored = self._load(name, start)
            if not isinstance(stored, StoredTensor) or (stored.shape, stored.dtype) != (size, self.tensors[name].dtype):
                stands = unread(stored) or repr(stored)[:120]
                if isinstance(stored, StoredTensor):
                    stands = f"{list(stored.shape)}, {stored.dtype}"
                expected = f"{list(size)}, {self.tensors[name].dtype}"
                raise DamageError(f"{self.folder} is damaged at {name}", found=stands, expected=expected)
            self._opened[name, start] = stored
        return self._opened[name, start]

    def _load(self, name: str, start: tuple[int, ...]) -> Any:
        file, begin, size, _ = self._records[name, start]
        path = self.folder / file
        with mapped(path) as data:
            return load_range(data, FileRange(path, f"{name} in {path}", begin, size, None))

    def _check_files(self) -> None:
        """Check that every chunk has its own place, large enough, inside a file of this folder.

        Raises:
            DamageError: a chunk does not. UsageError: chunks are compressed.
        """
        metadata, ends = self.folder / METADATA, dict[str, int]()
        stored = [
            ((name, start), math.prod(size) * self.tensors[name].dtype.itemsize)
            for name, chunks in self._chunks.items()
            for start, size in chunks
        ]
        stored += [((name, ()), 0) for name in self.objects]
        lacking = dict.fromkeys(repr(name) for (name, start), _ in stored if (name, start) not in self._records)
        if lacking:
            raise DamageError(f"{metadata} does not record where {few(list(lacking), 4)} is stored", fix="restore it")
        for (name, start), needed in stored:
            record = self._records[name, start]
            if record.compressed:
                raise UsageError(f"{self.folder} is compressed, which is not supported", found=name)
            if record.size < needed:
                raise DamageError(
                    f"{metadata} is damaged at storage_data of {name!r}", found=f"{record.size} bytes",
                    expected=f"at least {needed} for a chunk of its size", fix="restore the folder",
                )  # fmt: skip
            ends[record.file] = max(ends.get(record.file, 0), record.begin + record.size)
        places = sorted((self._records[key][:3], key[0]) for key, _ in stored)
        for (before, _), (after, name) in itertools.pairwise(places):
            if before[0] == after[0] and before[1] + before[2] > after[1]:
                raise DamageError(
                    f"{metadata} is damaged at storage_data of {name!r}", found="bytes that overlap others",
                    expected="separate bytes for each", fix="restore the folder",
                )  # fmt: skip
        for file, end in ends.items():
            path = self.folder / file
            size = path.stat().st_size if path.is_file() else -1
            if size < end:
                found = "no such file" if size < 0 else f"{size} bytes"
                raise DamageError(f"{path} is not whole", found=found, expected=f"{end} bytes", fix="restore the file")


class FlatSource:
    """Tensors that lie one after the other in flat ones.

    Args:
        source: of the flat tensors. places: name -> (flat tensor, first element, shape).
    """

    def __init__(self, source: Source, places: Mapping[str, tuple[str, int, tuple[int, ...]]]) -> None:
        self._source, self._places = source, places
        self.tensors = {
            name: TensorInfo(shape, source.tensors[flat].dtype) for name, (flat, _, shape) in places.items()
        }

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`; reads whole rows."""
        flat, first, shape = self._places[name]
        inner = math.prod(shape[1:])
        begin, count = first + box[0][0] * inner, box[1][0] * inner
        rows = self._source.read(flat, ((begin,), (count,))).view(box[1][0], *shape[1:])
        return rows[(slice(None), *(slice(a, a + n) for a, n in zip(box[0][1:], box[1][1:], strict=True)))]


class JoinedSource:
    """Several sources as one; of equal names the first counts."""

    def __init__(self, *parts: Source) -> None:
        self._of = {name: part for part in reversed(parts) for name in part.tensors}
        self.tensors = {name: part.tensors[name] for name, part in self._of.items()}

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        return self._of[name].read(name, box)
