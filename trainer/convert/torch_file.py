"""Files of torch.save, in a zip archive or as torch wrote them before 1.6; tensors are read on demand.

    NAME/data.pkl   a pickle, in which tensors refer to storages
    NAME/data/0     the bytes of a storage, not compressed

`load_torch` returns the values, with a `StoredTensor` for each tensor after checking that it lies inside the file. No
header is trusted: members must be uncompressed, have unique names, not overlap, and lie inside the archive. A member is
compared with its CRC32 once, before it is used. Memory holds the pickle's values and the requested part of a tensor;
files are mapped while they are read.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mdata import DamageError, UsageError
from mdata.errors import counted, few, os_errors_named
from mdata.util.regular_files import regular_file
from trainer.checkpoint.tiling import Rectangle
from trainer.convert.links import TensorInfo
from trainer.convert.pickles import Made, Name, PickleFault, UnknownNames, unpickle

_DTYPES = MappingProxyType(
    {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128, "Untyped": torch.uint8,
    }
)  # fmt: skip
_BY_SIZE = MappingProxyType({1: "<i1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"})
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the format before zip archives
_LONGEST_NAME = 1000  # of a member
_CHECKED_AT_ONCE = 16 << 20
_MOST_ELEMENTS = 1 << 48  # of a tensor, and of its stride and offset: numpy refuses what it cannot address
_RESTORE = "restore the file from a copy"


class FileRange(NamedTuple):
    """Bytes [begin, begin + size) of a file, their name in messages, and their CRC32 if the file has one."""

    path: Path
    name: str
    begin: int
    size: int
    crc: int | None


class Storage:
    """The elements that tensors are views of.

    Args:
        key: its name in the file. dtype: of its elements. count: of them. file_range: its bytes; None: not known yet.
    """

    def __init__(self, key: str, dtype: torch.dtype, count: int, file_range: FileRange | None) -> None:
        self.key, self.dtype, self.count, self.file_range = key, dtype, count, file_range
        self._checked = False

    @contextmanager
    def bytes(self) -> Iterator[memoryview]:
        """Its bytes, after comparing them with their CRC32.

        Raises:
            DamageError: they do not match, or the file has become shorter.
        """
        assert self.file_range is not None, f"the place of storage {self.key} is known"
        path, name, begin, size, crc = self.file_range
        with mapped(path) as data:
            block = data[begin : begin + size]
            if len(block) != size:
                raise DamageError(f"{path} became shorter while it was read", fix=_RESTORE)
            if not self._checked and crc is not None:
                check_crc(block, crc, where=name)
            self._checked = True
            yield block


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor in a file; `offset` and `stride` are in elements of its dtype."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __repr__(self) -> str:
        return f"a tensor of shape {list(self.shape)}, {self.dtype}"

    def read(self, box: Rectangle | None = None) -> Tensor:
        """A copy of the elements of one rectangle, or of all.

        Raises:
            DamageError: the storage's bytes have changed since they were written.
        """
        with self.storage.bytes() as data:
            view = self._view(data)
            if box is not None:
                view = view[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]
            copy = np.array(view, order="C", copy=True)
            del view  # the file is unmapped with the last view of it
        return torch.from_numpy(copy).view(self.dtype)

    def _view(self, data: memoryview) -> Any:
        """The elements in these bytes; raises ValueError if they do not lie inside."""
        size = self.dtype.itemsize
        strides = [stride * size for stride in self.stride]
        return np.ndarray(self.shape, _BY_SIZE[size], buffer=data, offset=self.offset * size, strides=strides)


class StoredSource:
    """Tensors of several files, see `links.Source`."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._stored = tensors
        self.tensors = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `links.Source`."""
        return self._stored[name].read(box)


def load_torch(path: Path) -> Any:
    """The content of a file of torch.save: plain values, `Made`, `Name` and `StoredTensor`.

    Raises:
        UsageError: it holds a type that is not on the list, or is not a regular file. DamageError: torch.save did not
            write it.
    """
    with mapped(path) as data:
        return load_range(data, FileRange(path, str(path), 0, len(data), None))


def load_range(data: memoryview, file_range: FileRange) -> Any:
    """The content of a range of a file that torch.save wrote.

    Args:
        data: of the whole file. file_range: what to read; its name is for messages.

    Raises:
        UsageError: it holds a type that is not on the list. DamageError: it was not written by torch.save.
    """
    with faults_named(file_range.name):
        own = data[file_range.begin : file_range.begin + file_range.size]
        return _from_zip(own, file_range) if bytes(own[:4]) == b"PK\3\4" else _from_stream(own, file_range)


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a regular file, mapped while the block runs."""
    with os_errors_named("reading a checkpoint"), regular_file(path).open("rb", buffering=0) as file:
        if not file.seek(0, 2):
            raise DamageError(f"{path} is empty", fix=_RESTORE)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    yield memoryview(data)


@contextmanager
def faults_named(where: str) -> Iterator[None]:
    """Turn faults of pickles and archives in the block into errors that name the file."""
    try:
        yield
    except PickleFault as fault:
        raise DamageError(f"{where} is damaged", found=str(fault), fix=_RESTORE) from fault
    except UnknownNames as unknown:
        raise UsageError(
            f"{where} holds objects that are not read, because loading them elsewhere could run code",
            found=few(unknown.names, 4),
            expected="tensors, plain values and settings",
            fix="load the file where it is trusted, and save it without them",
        ) from unknown


def check_crc(data: memoryview, expected: int, *, where: str) -> None:
    """Compare bytes with their CRC32.

    Raises:
        DamageError: they differ.
    """
    crc = 0
    for first in range(0, len(data), _CHECKED_AT_ONCE):
        crc = zlib.crc32(data[first : first + _CHECKED_AT_ONCE], crc)
    if crc != expected:
        raise DamageError(
            f"{where} is damaged", found=f"CRC32 {crc:08x}", expected=f"{expected:08x}", fix=_RESTORE
        )  # fmt: skip


# ---- zip archives ----

_END, _END64, _AT_END64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_ENTRY, _LOCAL = struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s5H3I2H")


class _Member(NamedTuple):
    begin: int  # of its bytes
    size: int
    crc: int | None  # None: the archive was written without


def _from_zip(data: memoryview, file_range: FileRange) -> Any:
    members = zip_members(data)
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise PickleFault(f"an archive with {counted(len(pickles), 'pickle')} instead of one: {few(list(members), 4)}")
    prefix = pickles[0].removesuffix("data.pkl")

    def checked(name: str) -> memoryview:
        begin, size, crc = members[name]
        if crc is not None:
            check_crc(data[begin : begin + size], crc, where=f"{file_range.name} at {name}")
        return data[begin : begin + size]

    order = f"{prefix}byteorder"
    if order in members and bytes(checked(order)[:10]) != b"little":
        raise PickleFault("its byte order is not little")

    def storage(key: str, dtype: torch.dtype, count: int) -> Storage:
        name = f"{prefix}data/{key}"
        if name not in members:
            raise PickleFault(f"a tensor is in {name}, which the archive does not have")
        begin, size, crc = members[name]
        return Storage(
            key,
            dtype,
            count,
            FileRange(file_range.path, f"{file_range.name} at {name}", file_range.begin + begin, size, crc),
        )

    value, _ = unpickle(checked(pickles[0]), construct=_construct, persistent=_Storages(storage))
    return value


def zip_members(data: memoryview) -> dict[str, _Member]:
    """Where each member of an archive lies; as torch writes them: uncompressed, not overlapping, with unique names.

    Raises:
        PickleFault: the archive differs from this, or its headers disagree.
    """
    first, end, count = _directory(data)
    members: dict[str, _Member] = {}
    taken = [(first, len(data), "the directory")]
    at = first
    for _ in range(count):
        if at + _ENTRY.size > end:
            raise PickleFault("an archive whose directory has fewer entries than it says")
        head = _ENTRY.unpack_from(data, at)
        magic, flags, method, (crc, packed, size) = head[0], head[3], head[4], head[7:10]
        (name_size, extra_size, comment_size), offset = head[10:13], head[16]
        if name_size > _LONGEST_NAME:
            raise PickleFault("a member with a name that torch never writes")
        name = bytes(data[at + _ENTRY.size : at + _ENTRY.size + name_size]).decode(errors="replace")
        extra = data[at + _ENTRY.size + name_size :][:extra_size]
        at += _ENTRY.size + name_size + extra_size + comment_size
        if magic != b"PK\1\2" or at > end:
            raise PickleFault("an archive with a damaged directory")
        size, packed, offset = _wide(extra, size, packed, offset)
        if method or flags & 1 or packed != size:
            raise PickleFault(f"member {name} is compressed or encrypted, which torch never writes")
        if name in members:
            raise PickleFault(f"two members are called {name}")
        if offset + _LOCAL.size > first:
            raise PickleFault(f"member {name} begins after the end of the members")
        local = _LOCAL.unpack_from(data, offset)
        begin = offset + _LOCAL.size + local[9] + local[10]
        stored_name = bytes(data[offset + _LOCAL.size : offset + _LOCAL.size + local[9]]).decode(errors="replace")
        if local[0] != b"PK\3\4" or stored_name != name or local[3]:
            raise PickleFault(f"member {name} has a header that does not match the directory")
        members[name] = _Member(begin, size, crc)
        taken.append((offset, begin + size, name))
    for (_, stop, name), (begin, _, behind) in zip(ordered := sorted(taken), ordered[1:], strict=False):
        if stop > begin:
            raise PickleFault(f"member {name} overlaps {behind}")
    if not any(member.crc for member in members.values()):  # after torch.serialization.set_crc32_options(False)
        return {name: member._replace(crc=None) for name, member in members.items()}
    return members


def _directory(data: memoryview) -> tuple[int, int, int]:
    """(first byte, end, number of members) of the directory."""
    begin = max(0, len(data) - _END.size - (1 << 16))
    at = begin + bytes(data[begin:]).rfind(b"PK\5\6")
    if at < begin or at + _END.size > len(data):
        raise PickleFault("an archive without an end record: it is truncated")
    _, disk, _, _, count, size, first, comment = _END.unpack_from(data, at)
    end = at
    if at >= _AT_END64.size and bytes(data[at - _AT_END64.size : at - _AT_END64.size + 4]) == b"PK\6\7":
        _, _, end, _ = _AT_END64.unpack_from(data, at - _AT_END64.size)
        # Right before its locator, as torch writes it; elsewhere it may be of another archive in the same file.
        if end + _END64.size != at - _AT_END64.size or bytes(data[end : end + 4]) != b"PK\6\6":
            raise PickleFault("an archive whose 64-bit end record is not where it says")
        wide = _END64.unpack_from(data, end)
        narrow, limits = (count, size, first), (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        count, size, first = wide[7:10]
        if any(value not in pair for value, *pair in zip(narrow, limits, (count, size, first), strict=True)):
            raise PickleFault("an archive whose two end records disagree")
    if disk or at + _END.size + comment != len(data) or first + size != end or count * _ENTRY.size > size:
        raise PickleFault("an archive whose end record does not match its directory")
    return first, end, count


def _wide(extra: memoryview, *values: int) -> tuple[int, ...]:
    """Sizes and offset of an entry; those of 64 bits stand in its extra field."""
    wanted = sum(value == 0xFFFFFFFF for value in values)
    at, fields = 0, b""
    while wanted and at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            fields = bytes(extra[at + 4 : at + 4 + size])
            break
        at += 4 + size
    if len(fields) < 8 * wanted:
        raise PickleFault("a member without its 64-bit size")
    wide = iter(struct.unpack_from(f"<{wanted}Q", fields))
    return tuple(next(wide) if value == 0xFFFFFFFF else value for value in values)


# ---- the format before zip archives ----


def _from_stream(data: memoryview, file_range: FileRange) -> Any:
    """Five pickles, then each storage: its number of elements and its bytes."""
    storages: dict[str, Storage] = {}

    def storage(key: str, dtype: torch.dtype, count: int) -> Storage:
        return storages.setdefault(key, Storage(key, dtype, count, None))

    values: list[Any] = []
    at = 0
    for number in range(5):
        value, at = unpickle(data, start=at, construct=_construct, persistent=_Storages(storage))
        values.append(value)
        if number == 0 and value != _MAGIC:
            raise PickleFault("not a file of torch.save")
    _, protocol, system, value, keys = values
    if protocol != _PROTOCOL or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise PickleFault("a protocol other than 1001, or a byte order other than little")
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise PickleFault("the list of storages does not name those of the tensors")
    for key in keys:
        own = storages[str(key)]
        size = own.count * own.dtype.itemsize
        if len(data) - at < 8 + size or int.from_bytes(data[at : at + 8], "little") != own.count:
            raise PickleFault(f"storage {key} has another size than its tensors need, or is truncated")
        own.file_range = FileRange(
            file_range.path, f"{file_range.name} at storage {key}", file_range.begin + at + 8, size, None
        )
        at += 8 + size
    return value


# ---- tensors ----


class _Storages:
    """The storage that a pickle of torch.save refers to by ("storage", type, key, device, number of elements)."""

    def __init__(self, make: Callable[[str, torch.dtype, int], Storage]) -> None:
        self._make = make
        self._made: dict[str, Storage] = {}

    def __call__(self, reference: Any) -> Storage | Made:
        if type(reference) is not tuple or len(reference) not in (5, 6) or reference[0] != "storage":
            raise PickleFault("a reference to something other than a storage")
        kind, key, _, count = reference[1:5]
        if type(kind) is not Name or type(key) is not str or len(key) > 100 or not _is_size(count):
            raise PickleFault("a reference to a storage without type, key or size")
        if len(reference) == 6 and reference[5] is not None:
            raise PickleFault(f"storage {key} is a part of another, as written by torch before 0.4")
        dtype = _DTYPES.get(kind.name.rpartition(".")[2].removesuffix("Storage"))
        if dtype is None:
            return Made(kind.name, ())
        if key not in self._made:
            self._made[key] = self._make(key, dtype, count)
        storage = self._made[key]
        size = None if storage.file_range is None else storage.file_range.size
        if (storage.dtype, storage.count) != (dtype, count) or size not in (None, count * dtype.itemsize):
            available = f"{counted(storage.count, 'element')} of {storage.dtype}" if size is None else f"{size} bytes"
            raise PickleFault(
                f"storage {key} has {available}, but its tensors say {counted(count, 'element')} of {dtype}"
            )
        return storage


def _construct(name: str, arguments: tuple[Any, ...]) -> Any:
    """A tensor or a parameter; anything else is a `Made`."""
    function = name.rpartition(".")[2]
    if name == "torch._tensor._rebuild_from_type_v2" and len(arguments) == 4:
        inner, own = arguments[0], arguments[2]
        if type(inner) is Name and type(own) is tuple and inner.name.startswith("torch._utils._rebuild_"):
            return _construct(inner.name, own)
    if name.startswith("torch._utils."):
        if any(arguments[7 if function == "_rebuild_tensor_v3" else 6 :]):  # its values are negated or conjugated
            return Made(name, arguments)
        if function in ("_rebuild_tensor", "_rebuild_tensor_v2") and len(arguments) >= 4:
            return _tensor(*arguments[:4], dtype=None) or Made(name, arguments)
        if function == "_rebuild_tensor_v3" and len(arguments) >= 7:
            return _tensor(*arguments[:4], dtype=arguments[6]) or Made(name, arguments)
        if function in ("_rebuild_parameter", "_rebuild_parameter_with_state") and arguments:
            return arguments[0]
    return Made(name, arguments)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *, dtype: Any) -> StoredTensor | None:
    """A view of a storage; None: its type is not supported, or it is expanded, so not all elements are stored."""
    # Not getattr, which may import a module of torch.
    kind = vars(torch).get(dtype.name.removeprefix("torch.")) if type(dtype) is Name else None
    if type(storage) is not Storage or (dtype is not None and not isinstance(kind, torch.dtype)):
        return None
    kind = kind or storage.dtype
    sizes = [*shape, *stride, offset] if type(shape) is type(stride) is tuple else [None]
    is_valid = all(map(_is_size, sizes)) and len(shape) == len(stride) <= 32
    if not is_valid or math.prod(max(1, size) for size in shape) > _MOST_ELEMENTS:
        raise PickleFault(f"a tensor of storage {storage.key} whose shape, stride or offset is not valid")
    available = storage.count * storage.dtype.itemsize // kind.itemsize
    count = 1
    for size in shape:
        count *= size
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if count else offset
    if (count and last >= available) or offset > available:
        raise PickleFault(f"a tensor of shape {shape} that does not fit into storage {storage.key}")
    return StoredTensor(storage, kind, offset, shape, stride) if count <= available else None


def unread(value: Any) -> str:
    """Why a tensor of the file is not read; "" for other values."""
    if not isinstance(value, Made) or not value.kind.startswith("torch._utils._rebuild_"):
        return ""
    stride = value.arguments[3] if len(value.arguments) > 3 else None
    if value.kind.startswith("torch._utils._rebuild_tensor") and isinstance(stride, tuple) and 0 in stride:
        return "it is expanded (stride 0); save it with .contiguous()"
    return f"its type or dtype is not supported: {value!r} of {value.arguments!r}"[:120]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_ELEMENTS
