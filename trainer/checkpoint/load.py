"""Reading checkpoints: the slices that a rank needs, from a checkpoint of any layout, in one pass over each file.

What a load reads is planned by `overlaps`, which is pure. Slices are read in the order of the files, each once, by a
few threads in blocks of a few megabytes, straight into the target tensors, and each is compared with its hash. The
extra memory is one block for each thread, for slices of any size, also on a GPU. A slice is compared after its last
block, so the content of the tensors is undefined after an error. `verify_checkpoint` compares every byte; `find_valid`
looks for the newest checkpoint that passes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import torch
from blake3 import blake3
from torch import Tensor

from mdata import DamageError, UsageError
from mdata.errors import few
from trainer.checkpoint.folder import ResumePoint, find_checkpoint, instead, read_index, step_of, whole_checkpoints
from trainer.checkpoint.format import DTYPES as SIZES
from trainer.checkpoint.format import Index, SavedSlice
from trainer.checkpoint.location import Location
from trainer.checkpoint.rank_file import DTYPE_NAMES, Owned
from trainer.checkpoint.stored_files import BlockReader, files_of
from trainer.checkpoint.tiling import Rectangle, cut

BLOCK_BYTES = 8 << 20
_TORCH = MappingProxyType({name: dtype for dtype, name in DTYPE_NAMES.items()})


class SliceCopy(NamedTuple):
    """A part of a slice, in the logical tensor's coordinates, and the rectangle of the result that it lies in."""

    part: Rectangle
    target: Tensor
    origin: tuple[int, ...]


def load_state(folder: Location, owned: Mapping[str, Owned], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a rank of any layout owns, in host memory: name -> its runs, one after the other; see `load_into`."""
    state = {name: torch.empty(runs.size, dtype=dtype) for name, runs in owned.items()}
    load_into(state, folder, owned={name: runs.packed() for name, runs in owned.items()})
    return state


def load_into(state: Mapping[str, Tensor], folder: Location, *, owned: Mapping[str, Owned]) -> None:
    """Read what a rank of any layout owns.

    Args:
        state: name -> flat tensor that its runs lie in, on any device; padding becomes 0.
        owned: these runs.

    Raises:
        DamageError: the checkpoint is incomplete, or a slice differs from what was written.
        UsageError: the model's tensors differ from those of the checkpoint; names them.
    """
    index = read_index(folder)
    check_fits(folder, index, owned=owned)
    plan: dict[str, dict[SavedSlice, list[SliceCopy]]] = {}
    for name, runs in owned.items():
        slices = list(runs.slices())
        if sum(math.prod(wanted.size) for _, wanted, _ in slices) < runs.size:
            for span in runs.spans():
                state[name][span].zero_()
        for _, wanted, first in slices:
            target = state[name][first : first + math.prod(wanted.size)].view(wanted.size)
            for piece, part in overlaps((wanted.start, wanted.size), index.tensors[f"{name}/{wanted.name}"].slices):
                plan.setdefault(piece.file, {}).setdefault(piece, []).append(SliceCopy(part, target, wanted.start))
    reader = SliceReader(folder, index, pinned=any(tensor.is_cuda for tensor in state.values()))
    for file, wanted_of_file in sorted(plan.items()):
        reader.read(file, wanted_of_file)
    read_extras(folder, index)


def check_fits(folder: Location, index: Index, *, owned: Mapping[str, Owned]) -> None:
    """Check that every requested tensor exists with the expected shape.

    Raises:
        UsageError: some are not; names them.
    """
    wrong: dict[str, str] = {}
    expected: dict[str, str] = {}
    for name, runs in owned.items():
        for _, wanted, _ in runs.slices():
            key = f"{name}/{wanted.name}"
            saved = index.tensors.get(key)
            if saved is None or saved.shape != tuple(wanted.shape):
                # The weight's name alone where the weight itself does not fit.
                shown = wanted.name if name == "weight" or wanted.name in wrong else key
                wrong.setdefault(shown, "no such tensor" if saved is None else f"shape {list(saved.shape)}")
                expected.setdefault(shown, f"shape {list(wanted.shape)}")
    if wrong:
        first = next(iter(wrong))
        raise UsageError(
            f"{folder} does not fit this model at {few(list(wrong), 4)}",
            found=wrong[first],
            expected=f"{expected[first]}" + (f" of {first}" if len(wrong) > 1 else ""),
            fix="use the configuration with which the checkpoint was written",
        )


def overlaps(wanted: Rectangle, saved: Sequence[SavedSlice]) -> Iterator[tuple[SavedSlice, Rectangle]]:
    """The parts of saved slices that lie in a wanted rectangle, in the logical tensor's coordinates."""
    for piece in saved:
        if common := intersection(wanted, (piece.start, piece.size)):
            yield piece, common


def verify_checkpoint(folder: Location) -> Index:
    """Compare every byte of a checkpoint with its hash; returns its index.

    Raises:
        DamageError: names the first file that differs from what was written. UsageError: there is no checkpoint.
    """
    index = read_index(folder)
    read_extras(folder, index)
    reader = SliceReader(folder, index)
    slices: dict[str, dict[SavedSlice, list[SliceCopy]]] = {name: {} for name in index.files}
    for tensor in index.tensors.values():
        for piece in tensor.slices:
            slices[piece.file][piece] = []
    for file, wanted in slices.items():
        reader.read(file, wanted)
        reader.check_whole(file, wanted)
    return index


def find_valid(root: Location, *, every_byte: bool = True) -> ResumePoint:
    """Like `find_checkpoint`, but skips damaged checkpoints and reports them.

    Args:
        every_byte: compare every byte; False: only indexes and the sizes of files, which is fast.

    Raises:
        DamageError: there are checkpoints and none is valid.
    """
    named = find_checkpoint(root)
    if named.folder is None:
        return named
    # A later one may be of a curve that this run has left.
    others = [path for path in whole_checkpoints(root) if step_of(path) < step_of(named.folder)]
    messages = [named.warning] if named.warning else []
    for folder in (named.folder, *others):
        try:
            (verify_checkpoint if every_byte else read_index)(folder)
        except (DamageError, UsageError) as error:  # not of a disk or a storage that fails: it says nothing of the next
            messages.append(str(error).splitlines()[0])
        else:
            messages += [f"using {folder.name}, the newest valid checkpoint"] if folder != named.folder else []
            return ResumePoint(folder, "; ".join(messages) or None)
    raise DamageError(
        f"no checkpoint in {root} is valid",
        found=few(messages, 3),
        fix=f"restore one from a copy, or move {root} away to begin at step 1",
    )


class _Entry(NamedTuple):
    """A tensor of a safetensors file: its type as in the file, its shape, and its first byte."""

    type: str
    shape: tuple[int, ...]
    begin: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype; bool for types that checkpoints do not use."""
        return _TORCH.get(self.type, torch.bool)


def _parse_header(header: bytes, file_bytes: int) -> dict[str, _Entry]:
    """The tensors of a file, checked to be contiguous up to its end, each with the size of its shape.

    Raises:
        ValueError: they are not.
    """
    table = json.loads(header[8:])
    if type(table) is not dict:
        raise ValueError("not a JSON object")
    places: list[tuple[list[int], str, _Entry]] = []
    for key, value in table.items():
        if key == "__metadata__":
            continue
        fields: dict[str, Any] = value if type(value) is dict else {}
        kind, shape, offsets = (fields.get(name) for name in ("dtype", "shape", "data_offsets"))
        if type(kind) is not str or kind not in SIZES or not _are_sizes(shape) or not _are_sizes(offsets):
            raise ValueError(f"{key} is {str(value)[:80]}")
        if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * SIZES[kind]:
            raise ValueError(f"{key} of type {kind} and shape {shape} lies at {offsets}")
        places.append((offsets, key, _Entry(kind, tuple(shape), len(header) + offsets[0])))
    end = 0
    for (first, last), key, _ in sorted(places):
        if first != end:
            raise ValueError(f"{key} begins at byte {first}, but the tensor before it ends at {end}")
        end = last
    if len(header) + end != file_bytes:
        raise ValueError(f"its tensors end at byte {len(header) + end} of {file_bytes}")
    return {key: entry for _, key, entry in places}


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return type(value) is list and len(value) <= 8 and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


class SliceReader:
    """Reads slices of a checkpoint's files, each compared with its hash.

    Args:
        pinned: read into pinned memory, for copies to a GPU.
    """

    def __init__(self, folder: Location, index: Index, *, pinned: bool = False) -> None:
        self.folder, self.index, self.files = folder, index, files_of(folder)
        self._headers: dict[str, dict[str, _Entry]] = {}
        self._pinned, self._blocks = pinned, list[Tensor]()

    def read(self, name: str, wanted: Mapping[SavedSlice, Sequence[SliceCopy]]) -> None:
        """Read slices of one file in file order, and copy the wanted parts of each."""
        try:
            with self.files.open(name) as file:
                entries = self._entries(name, file)
                for piece in wanted:
                    self._check_entry(piece, entries.get(piece.key))
                self._read_all(file, [(piece, entries[piece.key], copies) for piece, copies in wanted.items()])
        except EOFError:
            raise self._damage(name, "a file that became shorter while it was read", None) from None

    def dtype(self, piece: SavedSlice) -> torch.dtype | None:
        """The dtype of a slice in its file; None: there is no such slice."""
        with self.files.open(piece.file) as file:
            entry = self._entries(piece.file, file).get(piece.key)
        return entry.dtype if entry else None

    def _read_all(self, file: BlockReader, wanted: list[tuple[SavedSlice, _Entry, Sequence[SliceCopy]]]) -> None:
        """Read with the number of threads that suits the file, each with its own reused block."""
        while len(self._blocks) < file.threads:
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._pinned))
        free = SimpleQueue[Tensor]()
        for block in self._blocks:
            free.put(block)

        def read(wanted_slice: tuple[SavedSlice, _Entry, Sequence[SliceCopy]]) -> None:
            block = free.get()
            try:
                self._read_slice(file, *wanted_slice, block=block)
            finally:
                free.put(block)

        with ThreadPoolExecutor(file.threads, thread_name_prefix="load") as threads:
            try:
                for _ in threads.map(read, sorted(wanted, key=lambda item: item[1].begin)):
                    pass
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _read_slice(
        self, file: BlockReader, piece: SavedSlice, entry: _Entry, copies: Sequence[SliceCopy], *, block: Tensor
    ) -> None:
        hasher, at = blake3(), entry.begin
        for box in cut((piece.start, piece.size), BLOCK_BYTES // entry.dtype.itemsize):
            count = math.prod(box[1]) * entry.dtype.itemsize
            content = block[:count]
            file.read_into(content.numpy().data, at)
            at += count
            if piece.hash is not None:
                hasher.update(content.numpy().data)
            values = content.view(entry.dtype).view(box[1])
            for copy in copies:
                if common := intersection(copy.part, box):
                    start, size = common
                    copy.target[_box(start, size, copy.origin)] = values[_box(start, size, box[0])].to(
                        copy.target.dtype
                    )
        if piece.hash is not None and hasher.hexdigest() != piece.hash:
            raise self._damage(piece.file, f"{piece.key} with a different hash than when it was written", None)

    def _entries(self, name: str, file: BlockReader) -> dict[str, _Entry]:
        """The entries of the file's header, after checking its hash and consistency."""
        if name not in self._headers:
            self._headers[name] = self._read_entries(name, file)
        return self._headers[name]

    def _read_entries(self, name: str, file: BlockReader) -> dict[str, _Entry]:
        saved = self.index.files[name]
        size = bytearray(8)
        file.read_into(memoryview(size), 0)
        length = 8 + int.from_bytes(size, "little")
        header = bytearray(min(length, saved.bytes))
        file.read_into(memoryview(header), 0)
        if saved.header is not None and blake3(header).hexdigest() != saved.header:
            raise self._damage(name, "a header with a different hash than when it was written", None)
        try:
            return _parse_header(bytes(header), saved.bytes)
        except (ValueError, RecursionError) as error:
            raise self._damage(name, str(error)[:200], "a safetensors header") from error

    def check_whole(self, name: str, slices: Collection[SavedSlice]) -> None:
        """Check that a file holds these slices and nothing else."""
        with self.files.open(name) as file:
            others = sorted(set(self._entries(name, file)).difference(piece.key for piece in slices))
        if others:
            raise self._damage(name, f"tensors that the index does not list: {few(others, 3)}", None)

    def _check_entry(self, piece: SavedSlice, entry: _Entry | None) -> None:
        if entry is None:
            raise self._damage(piece.file, "no such tensor", f"a tensor {piece.key}")
        # Version 1 does not record the type.
        listed = self.index.tensors[piece.key.rpartition("@")[0]].dtype
        wrong = not entry.dtype.is_floating_point or listed not in (None, entry.type)
        if entry.shape != piece.size or wrong:
            stands = f"{piece.key} of shape {list(entry.shape)}, {entry.type}"
            raise self._damage(piece.file, stands, f"{listed or 'floats'} of shape {list(piece.size)}")

    def _damage(self, name: str, actual: str, expected: str | None) -> DamageError:
        fix = instead(self.folder)
        return DamageError(f"{self.folder / name} is damaged", found=actual, expected=expected, fix=fix)


def read_extras(folder: Location, index: Index, *, names: Collection[str] | None = None) -> dict[str, bytes]:
    """The small files of a checkpoint, by name, each compared with its hash.

    Args:
        names: only these, as far as they exist; None: all.
    """
    files = files_of(folder)
    contents = {name: files.read(name) for name in index.extras if names is None or name in names}
    for name, content in contents.items():
        if blake3(content).hexdigest() != index.extras[name].hash:
            problem = "a different hash than when it was written"
            raise DamageError(f"{folder / name} is damaged", found=problem, fix=instead(folder))
    return contents


def intersection(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """The intersection of two rectangles; None: empty."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    return (low, tuple(y - x for x, y in zip(low, high, strict=True))) if all(map(int.__lt__, low, high)) else None


def _box(start: tuple[int, ...], size: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """A rectangle as slices relative to an origin."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, size, origin, strict=True))
