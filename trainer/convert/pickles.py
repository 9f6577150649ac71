"""Pickles of other programs, read as plain values: nothing that they name is imported, called or compared.

An interpreter of the opcodes that pickle and torch write (protocols 2 to 5). A name becomes a `Name`, and an object a
`Made` with the type and arguments that it would have been made from; `construct` may replace it by a value of ours.
Every name must be on a list: others could run code when another program loads the file, so they are an error.

Memory is bounded by the size of the pickle: references copy nothing, a set is a list, keys of dictionaries are short,
and the result has no cycles, few levels, and few values even if every reference is followed. So it is safe to walk,
print or compare it.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mdata.util.config_text import MOST_LEVELS

# Names that are read, as plain values or as a `Made`.
_NAMES = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|collections\.(OrderedDict|Counter)|_io\.BytesIO|_codecs\.encode"
    r"|(builtins|__builtin__)\.(set|frozenset|bytearray|complex)"
    r"|torch\.((cuda\.)?\w+Storage|storage\.\w+Storage|Size|device|Tensor|nn\.parameter\.Parameter|strided|per_\w+)"
    r"|torch\.(float|bfloat|int|uint|bool|complex|qu?int|bits)[0-9a-z_]*|torch\.serialization\._get_layout"
    r"|torch\._utils\._rebuild_\w+|torch\._tensor\._rebuild_from_type_v2"
    r"|torch\.distributed\.checkpoint\.(metadata\.(BytesStorageMetadata|ChunkStorageMetadata|Metadata|MetadataIndex"
    r"|StorageMeta|TensorProperties|TensorStorageMetadata|_MEM_FORMAT_ENCODING)"
    r"|filesystem\.(_StorageInfo|_StoragePrefix)|planner\.(SavePlan|TensorWriteData|WriteItem|WriteItemType))"
    r"|megatron\.[a-z_.]*[A-Z]\w*|pathlib\.\w+|pathlib\._local\.\w+|signal\.Signals|enum\.\w+|datetime\.timedelta"
    r"|numpy\.(_?core\.)*multiarray\._reconstruct|numpy\.ndarray|numpy\.dtype|numpy\.dtypes\.\w+"
    r"|numpy\.(_?core\.)*multiarray\.scalar"
)
_DICTIONARIES = ("collections.OrderedDict",)
_KEY_RANGE = range(-(1 << 31), 1 << 31)  # integers whose hashes cannot be made to collide in large numbers
_KEY_PARTS = 8  # of a tuple that is a key: its hash is computed at each use
_LONGEST_NAME = 400
_VALUES_PER_BYTE = 32  # with every reference followed; Megatron's and torch's files have fewer than 2


class PickleFault(ValueError):
    """The reason why a pickle cannot be read; the caller adds the file's name."""


class UnknownNames(Exception):
    """Names that are not on the list."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(*names)
        self.names = names


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A type, function or constant of a module to which a pickle refers by name."""

    name: str


class Made:
    """Stands for an object: its type's name, its arguments and its state. Equal only to itself."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = None

    def __repr__(self) -> str:
        return f"a {self.kind.rpartition('.')[2]}"


Construct = Callable[[str, tuple[Any, ...]], Any]


def unpickle(
    data: memoryview, *, start: int = 0, construct: Construct = Made, persistent: Callable[[Any], Any] | None = None
) -> tuple[Any, int]:
    """Returns (the value, the position after its pickle).

    Args:
        construct: (name, arguments) -> what stands for the object; a `Made` unless it is wanted.
        persistent: reference to something outside the pickle -> its value; None: such references are errors.

    Raises:
        PickleFault: it is not a pickle, is truncated, or would take more memory than its size allows.
        UnknownNames: names are not on the list.
    """
    reader = _Reader(data, start, construct=construct, persistent=persistent)
    try:
        value = reader.run()
        if not _is_small(value, most=reader.at - start):  # each value of a tree takes a byte or more
            _check_references(value, most=_VALUES_PER_BYTE * (reader.at - start) + 100)
    except PickleFault:
        if not reader.unknown:
            raise
    except (struct.error, IndexError) as error:
        raise PickleFault(f"it is truncated, or uses a value that it does not have, at byte {reader.at}") from error
    if reader.unknown:
        raise UnknownNames(list(reader.unknown))
    return value, reader.at


_CONTAINERS = frozenset((dict, list, tuple, Made))


class _Reader:
    def __init__(
        self, data: memoryview, start: int, *, construct: Construct, persistent: Callable[[Any], Any] | None
    ) -> None:
        self.data, self.at, self._construct, self._persistent = data, start, construct, persistent
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []  # stacks below the marks
        self.memo: dict[int, Any] = {}
        self.unknown: dict[str, None] = {}

    def run(self) -> Any:
        """Read to the end; returns the value on top of the stack."""
        data, operations = self.data, _BY_CODE
        while (code := data[self.at]) != _STOP:
            self.at += 1
            operation = operations[code]
            if operation is None:
                raise PickleFault(f"opcode {code:#04x} at byte {self.at - 1}, which torch does not write")
            operation(self)
        self.at += 1
        return self.stack.pop()

    def number(self, form: struct.Struct) -> Any:
        """The next number."""
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def byte(self) -> int:
        """The next byte; most numbers are of this size."""
        self.at += 1
        return self.data[self.at - 1]

    def part(self, size: int) -> bytes:
        """The next bytes."""
        if not 0 <= size <= len(self.data) - self.at:
            raise PickleFault(
                f"a length of {size} bytes at byte {self.at}, of which {len(self.data) - self.at} are left"
            )
        self.at += size
        return bytes(self.data[self.at - size : self.at])

    def since_mark(self) -> list[Any]:
        """The values put on the stack since the last mark."""
        items, self.stack = self.stack, self.marked.pop()
        return items

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def tuple_since_mark(self) -> None:
        items = self.since_mark()
        self.stack.append(tuple(items))

    def tuple_of(self, count: int) -> None:
        if count > len(self.stack):
            raise PickleFault(f"a tuple of more values than there are at byte {self.at}")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise PickleFault(f"something is appended to {_kind(target)} at byte {self.at}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise PickleFault(f"keys and values are put into {_kind(target)} at byte {self.at}")
        for place in range(0, len(items), 2):
            if not _is_key(items[place]):
                raise PickleFault(f"{_kind(items[place])} is a key at byte {self.at}")
            target[items[place]] = items[place + 1]

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > _LONGEST_NAME:
            raise PickleFault(f"a name that is not a short text at byte {self.at}")
        full = f"{module}.{name}"
        if not _NAMES.fullmatch(full):
            self.unknown[full] = None
        self.stack.append(Name(full))

    def line(self) -> str:
        end = bytes(self.data[self.at : self.at + _LONGEST_NAME]).find(b"\n")
        if end < 0:
            raise PickleFault(f"a name without an end at byte {self.at}")
        text = self.part(end + 1)
        return text[:-1].decode(errors="replace")

    def make(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(name) is not Name:
            raise PickleFault(f"{_kind(name)} is called with {_kind(arguments)} at byte {self.at}")
        if name.name in _DICTIONARIES and not arguments:
            self.stack.append({})
        else:
            self.stack.append(self._construct(name.name, arguments))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, Name):
            raise PickleFault(f"{_kind(made)} gets a state at byte {self.at}")
        if isinstance(made, Made) and made.state is None:
            made.state = state  # attributes of dictionaries and tensors are not needed here

    def get(self, place: int) -> None:
        if place not in self.memo:
            raise PickleFault(f"value {place} is used but was never stored, at byte {self.at}")
        self.stack.append(self.memo[place])

    def put(self, place: int) -> None:
        if place > len(self.data):
            raise PickleFault(f"value {place} is stored at byte {self.at}, in a file of {len(self.data)} bytes")
        self.memo[place] = self.stack[-1]

    def refer(self) -> None:
        if self._persistent is None:
            raise PickleFault(f"a reference to something outside at byte {self.at}")
        self.stack.append(self._persistent(self.stack.pop()))

    def protocol(self) -> None:
        self.part(1)  # the protocol; opcodes of later ones are refused by themselves

    def frame(self) -> None:
        size = self.number(_U64)
        if size > len(self.data) - self.at:
            raise PickleFault(
                f"a frame of {size} bytes at byte {self.at}, of which {len(self.data) - self.at} are left"
            )


_U8, _U32, _U64 = (struct.Struct(f"<{letter}") for letter in "BIQ")
_STOP = ord(".")
_Operation = Callable[[_Reader], None]


def _pushes(make: Callable[[], Any]) -> _Operation:
    return lambda reader: reader.stack.append(make())


def _pushes_number(form: str) -> _Operation:
    number = struct.Struct(form)
    return lambda reader: reader.stack.append(reader.number(number))


def _pushes_part(size: struct.Struct, read: Callable[[bytes], Any]) -> _Operation:
    return lambda reader: reader.stack.append(read(reader.part(reader.number(size))))


def _text(part: bytes) -> str:
    return part.decode(errors="replace")


def _whole_number(part: bytes) -> int:
    return int.from_bytes(part, "little", signed=True)


_OPERATIONS: dict[int, _Operation] = {
    ord("N"): _pushes(lambda: None),
    0x88: _pushes(lambda: True),
    0x89: _pushes(lambda: False),
    ord("]"): _pushes(list),
    ord("}"): _pushes(dict),
    ord(")"): _pushes(tuple),
    0x8F: _pushes(list),  # EMPTY_SET
    ord("J"): _pushes_number("<i"),
    ord("K"): lambda reader: reader.stack.append(reader.byte()),
    ord("M"): _pushes_number("<H"),
    ord("G"): _pushes_number(">d"),
    0x8A: _pushes_part(_U8, _whole_number),
    ord("X"): _pushes_part(_U32, _text),
    ord("U"): _pushes_part(_U8, _text),  # of Python 2
    0x8C: _pushes_part(_U8, _text),
    0x8D: _pushes_part(_U64, _text),
    ord("C"): _pushes_part(_U8, bytes),
    ord("B"): _pushes_part(_U32, bytes),
    0x8E: _pushes_part(_U64, bytes),
    0x96: _pushes_part(_U64, bytes),  # BYTEARRAY8
    ord("("): _Reader.mark,
    ord("t"): _Reader.tuple_since_mark,
    0x91: _Reader.tuple_since_mark,  # FROZENSET
    0x85: lambda reader: reader.tuple_of(1),
    0x86: lambda reader: reader.tuple_of(2),
    0x87: lambda reader: reader.tuple_of(3),
    ord("a"): lambda reader: reader.append([reader.stack.pop()]),
    ord("e"): lambda reader: reader.append(reader.since_mark()),
    0x90: lambda reader: reader.append(reader.since_mark()),  # ADDITEMS
    ord("s"): lambda reader: reader.set_items([reader.stack.pop(), reader.stack.pop()][::-1]),
    ord("u"): lambda reader: reader.set_items(reader.since_mark()),
    ord("c"): lambda reader: reader.name(reader.line(), reader.line()),
    0x93: lambda reader: reader.name(*[reader.stack.pop(), reader.stack.pop()][::-1]),
    ord("R"): _Reader.make,
    0x81: _Reader.make,  # NEWOBJ
    ord("b"): _Reader.build,
    ord("Q"): _Reader.refer,
    ord("h"): lambda reader: reader.get(reader.byte()),
    ord("j"): lambda reader: reader.get(reader.number(_U32)),
    ord("q"): lambda reader: reader.put(reader.byte()),
    ord("r"): lambda reader: reader.put(reader.number(_U32)),
    0x94: lambda reader: reader.put(len(reader.memo)),
    0x80: _Reader.protocol,
    0x95: _Reader.frame,
}
_BY_CODE = [_OPERATIONS.get(code) for code in range(256)]


def _is_key(value: Any) -> bool:
    if type(value) is tuple:
        return len(value) <= _KEY_PARTS and all(type(part) is not tuple and _is_key(part) for part in value)
    if type(value) is int:
        return value in _KEY_RANGE
    return value is None or type(value) in (str, bytes, bool, Name, Made)


def _kind(value: Any) -> str:
    return value.name if isinstance(value, Name) else repr(value) if isinstance(value, Made) else type(value).__name__


def _inside(value: Any) -> Sequence[Any]:
    if type(value) is dict:
        return [*value, *value.values()]
    return (value.arguments, value.state) if type(value) is Made else value


def _is_small(value: Any, *, most: int) -> bool:
    """Whether the value is as `_check_references` asks for, seen without following references one by one."""
    total, level = 0, [value] if type(value) in _CONTAINERS else []
    for _ in range(MOST_LEVELS):
        inside = [_inside(container) for container in level]
        total += sum(map(len, inside))
        if total > most:
            return False
        level = [inner for values in inside for inner in values if type(inner) in _CONTAINERS]
        if not level:
            return True
    return False


def _check_references(value: Any, *, most: int) -> None:
    """Check that the value stays small if every reference is followed, and is not nested too deep.

    Raises:
        PickleFault: it does not, or it is.
    """
    totals: dict[int, tuple[int, int]] = {}  # container -> number of values in it, levels
    path: list[tuple[Any, Iterator[Any], list[int]]] = []
    on_path: set[int] = set()
    root = [value]
    path.append((root, iter(root), [1, 0]))
    while path:
        container, rest, total = path[-1]
        for inner in rest:
            if type(inner) not in _CONTAINERS:
                total[0] += 1
                continue
            if id(inner) in on_path:
                raise PickleFault("a value that contains itself")
            if (reached := totals.get(id(inner))) is None:
                on_path.add(id(inner))
                path.append((inner, iter(_inside(inner)), [1, 0]))
                break
            total[0] += reached[0]
            total[1] = max(total[1], reached[1])
        else:
            path.pop()
            on_path.discard(id(container))
            totals[id(container)] = here = (total[0], total[1] + 1)
            if here[0] > most:
                raise PickleFault("values repeated by reference so often that they would not fit into memory")
            if path:
                path[-1][2][0] += here[0]
                path[-1][2][1] = max(path[-1][2][1], here[1])
        if len(path) > MOST_LEVELS + 1 or (totals and here[1] > MOST_LEVELS + 1):
            raise PickleFault(f"values nested more than {MOST_LEVELS} levels deep")
