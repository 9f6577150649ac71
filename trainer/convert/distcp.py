"""Tensors of torch.distributed.checkpoint, read by chunks: `.metadata` says where each lies in which .distcp file.

A chunk is read when a rectangle needs it, and a few are kept. Every place is checked when the folder is opened: file
names stay inside it, and files are long enough. Also tensors that lie one after the other in flat ones (`FlatSource`),
and several sources as one.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mdata import DamageError, UsageError
from mdata.errors import os_errors_named
from trainer.checkpoint.tiling import Rectangle
from trainer.convert.links import Source, TensorInfo
from trainer.convert.pickles import load_item, load_metadata

METADATA = ".metadata"
_FILE = re.compile(r"[^/\\\x00]+\.distcp")
_KEPT_BYTES = 64 << 20  # of chunks, or one larger chunk: q, k and v of a chunk are read once


class _Window(io.RawIOBase):
    """A part of an open file as a file of its own, read directly into the caller's memory."""

    def __init__(self, fd: int, begin: int, *, size: int) -> None:
        super().__init__()
        self._fd, self._begin, self._size, self._at = fd, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._size - self._at)]
        done = 0
        while done < len(wanted) and (got := os.preadv(self._fd, [wanted[done:]], self._begin + self._at + done)):
            done += got
        self._at += done
        return done


class ChunkSource:
    """The tensors of a folder.

    Args:
        folder: with `.metadata` in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = load_metadata(folder / METADATA)
        self._where: dict[tuple[str, tuple[int, ...]], Any] = {
            (index.fqn, tuple(index.offset or ())): info for index, info in found.storage_data.items()
        }
        self._chunks: dict[str, list[Rectangle]] = {}
        self.objects: list[str] = []
        self.tensors: dict[str, TensorInfo] = {}
        for name, entry in found.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                self.objects.append(name)
                continue
            self.tensors[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)
            self._chunks[name] = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        self._kept: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._check_files()

    def starts(self, name: str) -> list[tuple[int, ...]]:
        """Where the chunks of a tensor begin."""
        return [start for start, _ in self._chunks[name]]

    def load_object(self, name: str) -> Any:
        """What is stored beside tensors under a name."""
        return self._load(name, ())

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        out: Tensor | None = None
        covered, wanted = 0, math.prod(box[1])
        if not wanted:
            return torch.empty(box[1], dtype=self.tensors[name].dtype)
        for start, size in self._chunks[name]:
            low = tuple(max(a, b) for a, b in zip(start, box[0], strict=True))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, size, box[0], box[1], strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                chunk = self._read_chunk(name, start, size)
                there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box[0], strict=True))
                here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True))
                part = chunk[here]
                if part.numel() == wanted:
                    return part
                out = torch.zeros(box[1], dtype=chunk.dtype) if out is None else out
                out[there] = part
                covered += part.numel()
        if out is None or covered != wanted:
            found = f"{covered} elements of {wanted}"
            raise DamageError(f"{self._folder} does not hold all of {name}", found=found, fix="restore the folder")
        return out

    def _read_chunk(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """A chunk. It is kept, with those last used before it that fit into _KEPT_BYTES."""
        found = self._kept.pop((name, start), None)
        if found is None:
            room = _KEPT_BYTES - math.prod(size) * self.tensors[name].dtype.itemsize
            while self._kept and sum(chunk.nbytes for chunk in self._kept.values()) > room:
                del self._kept[next(iter(self._kept))]
            found = self._load_chunk(name, start, size)
        self._kept[name, start] = found
        return found

    def _load_chunk(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        found = self._load(name, start)
        if not isinstance(found, Tensor) or tuple(found.shape) != size or found.dtype != self.tensors[name].dtype:
            stands = f"{list(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise DamageError(f"{self._folder} is damaged at {name}", found=stands, expected=str(list(size)))
        return found

    def _load(self, name: str, start: tuple[int, ...]) -> Any:
        info = self._where[name, start]
        path = self._folder / info.relative_path
        with os_errors_named("reading a checkpoint"), path.open("rb", buffering=0) as file:
            return load_item(_Window(file.fileno(), info.offset, size=info.length), where=f"{name} in {path}")

    def _check_files(self) -> None:
        """Every chunk has a place inside a file of this folder.

        Raises:
            DamageError: one has not. UsageError: chunks are compressed.
        """
        ends: dict[str, int] = {}
        places = [(name, start) for name, chunks in self._chunks.items() for start, _ in chunks]
        for name, start in [*places, *((name, ()) for name in self.objects)]:
            info = self._where.get((name, start))
            if info is None or not _FILE.fullmatch(str(info.relative_path)) or info.offset < 0 or info.length < 0:
                raise DamageError(f"{self._folder / METADATA} does not record where {name} is stored", fix="restore it")
            if getattr(info, "transform_descriptors", None):
                raise UsageError(f"{self._folder} is compressed, which is not supported", found=name)
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for file, end in ends.items():
            path = self._folder / file
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
