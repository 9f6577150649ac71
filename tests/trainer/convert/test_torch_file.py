"""Files of torch.save: the tensors are those that torch reads, and no header, size or bit in them is believed."""

from __future__ import annotations

import collections
import io
import itertools
import os
import pickle
import random
import socket
import struct
import tracemalloc
import warnings
import zipfile

import pytest
import torch

from mdata import DamageError, UsageError
from trainer.convert.pickles import Made
from trainer.convert.torch_file import StoredTensor, load_torch


def tensors():
    """A state with every kind of view, each dtype once."""
    grid = torch.arange(24.0).view(4, 6)
    names = "float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 float8_e4m3fn uint16"
    dtypes = [getattr(torch, name) for name in names.split()]
    named = torch.ones(2, 3)
    named.tensor_model_parallel = True
    return {
        "grid": grid,
        "transposed": grid.T,
        "rows": grid[1:3],
        "column": grid[:, 2],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "attributes": named,
        **{str(dtype): torch.arange(6).to(dtype).view(2, 3) for dtype in dtypes},
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_are_those_that_torch_reads(zipped, tmp_path):
    state = {name: tensor for name, tensor in tensors().items() if zipped or "float8" not in name}
    torch.save({"model": state, "n": 3}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found = load_torch(tmp_path / "x.pt")
    assert found["n"] == 3 and found["model"].keys() == state.keys()
    for name, tensor in state.items():
        stored = found["model"][name]
        assert (stored.shape, stored.dtype) == (tuple(tensor.shape), tensor.dtype), name
        read, expected = (one.flatten().contiguous().view(torch.uint8) for one in (stored.read(), tensor.detach()))
        assert torch.equal(read, expected), name
    assert torch.equal(found["model"]["transposed"].read(((1, 2), (3, 1))), state["transposed"][1:4, 2:3])


def test_an_expanded_tensor_is_none_because_its_elements_are_not_stored(tmp_path):
    torch.save([torch.ones(1).expand(1 << 40)], tmp_path / "x.pt")
    (found,) = load_torch(tmp_path / "x.pt")
    assert isinstance(found, Made)


def saved(state=None) -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(100.0), "b": torch.ones(7)} if state is None else state, buffer)
    return buffer.getvalue()


def refused(data: bytes, tmp_path) -> str:
    """The message of the error, once everything was read."""
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(DamageError) as error:
        for value in load_torch(tmp_path / "x.pt").values():
            if isinstance(value, StoredTensor):
                value.read()
    assert str(tmp_path / "x.pt") in str(error.value)
    return str(error.value)


def members(data: bytes):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.infolist()


def place(data: bytes, name: str) -> tuple[int, int]:
    """(first byte, size) of a member's content."""
    info = next(info for info in members(data) if info.filename.endswith(name))
    skipped = struct.unpack_from("<2H", data, info.header_offset + 26)
    return info.header_offset + 30 + sum(skipped), info.file_size


@pytest.mark.parametrize("name", ["data.pkl", "data/0", "data/1", "byteorder"])
def test_a_flipped_bit_is_found_by_the_crc_of_its_record(name, tmp_path):
    data = bytearray(saved())
    begin, size = place(data, name)
    data[begin + size // 2] ^= 0x40
    assert f"archive/{name} is damaged" in refused(data, tmp_path) and "CRC32" in refused(data, tmp_path)


def test_archives_that_were_written_without_crcs_are_read(tmp_path):
    """torch writes 0 for each; other programs that save distributed checkpoints do so for speed."""
    torch.serialization.set_crc32_options(False)
    try:
        data = saved()
    finally:
        torch.serialization.set_crc32_options(True)
    assert not any(info.CRC for info in members(data))
    (tmp_path / "x.pt").write_bytes(data)
    assert torch.equal(load_torch(tmp_path / "x.pt")["a"].read(), torch.arange(100.0))


def test_only_what_is_read_is_compared(tmp_path):
    data = bytearray(saved())
    data[place(data, "data/1")[0]] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    found = load_torch(tmp_path / "x.pt")
    assert torch.equal(found["a"].read(), torch.arange(100.0))
    with pytest.raises(DamageError, match="archive/data/1 is damaged"):
        found["b"].read(((0,), (0,)))


def rewritten(data: bytes, *, method=zipfile.ZIP_STORED, twice="", without="") -> bytes:
    """The same members in an archive of Python's zipfile."""
    out = io.BytesIO()
    warnings.filterwarnings("ignore", "Duplicate name")
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            for _ in range(1 + bool(twice and name.endswith(twice))):
                if not (without and name.endswith(without)):
                    new.writestr(name, old.read(name))
    return out.getvalue()


def entry(data: bytes, name: str) -> int:
    """Where the directory's entry of a member begins."""
    at = data.index(b"PK\1\2")
    while not data[at + 46 :].startswith(name.encode()):
        at = data.index(b"PK\1\2", at + 4)
    return at


def patched(name: str, offset: int, form: str, *values: int) -> bytes:
    """An archive with one field of a directory's entry changed."""
    data = bytearray(saved())
    struct.pack_into(form, data, entry(data, f"archive/{name}") + offset, *values)
    return bytes(data)


def with_end(offset: int, form: str, *values: int, magic: bytes = b"PK\5\6") -> bytes:
    data = bytearray(saved())
    struct.pack_into(form, data, data.rindex(magic) + offset, *values)
    return bytes(data)


ARCHIVES = {
    "compressed": (lambda: rewritten(saved(), method=zipfile.ZIP_DEFLATED), "compressed"),
    "a bomb": (lambda: rewritten(saved({"a": torch.zeros(1 << 20)}), method=zipfile.ZIP_LZMA), "compressed"),
    "called compressed": (lambda: patched("data/0", 10, "<H", 8), "compressed"),
    "encrypted": (lambda: patched("data/0", 8, "<H", 1), "encrypted"),
    "two sizes": (lambda: patched("data/0", 24, "<I", 401), "compressed"),
    "size beyond the file": (lambda: patched("data/0", 20, "<2I", 1 << 30, 1 << 30), "overlaps"),
    "no record": (lambda: rewritten(saved(), without="data/1"), "which the archive does not have"),
    "no pickle": (lambda: rewritten(saved(), without="data.pkl"), "0 pickles"),
    "two of one name": (lambda: rewritten(saved(), twice="data/0"), "two members are called archive/data/0"),
    "a name of another": (lambda: saved().replace(b"archive/data/1", b"archive/data/0", 1), "the directory"),
    "offset of another": (lambda: patched("data/1", 42, "<I", members(saved())[0].header_offset), "the directory"),
    "offset in the directory": (lambda: patched("data/1", 42, "<I", len(saved()) - 40), "begins after"),
    "64-bit size that is missing": (lambda: patched("data/0", 24, "<I", 0xFFFFFFFF), "without its 64-bit size"),
    "more members": (lambda: with_end(8, "<2H", 3, 3), "disagree"),
    "a directory elsewhere": (lambda: with_end(16, "<I", 7), "disagree"),
    "64-bit end elsewhere": (lambda: with_end(8, "<Q", 7, magic=b"PK\6\7"), "64-bit end"),
    "64-bit count": (lambda: with_end(32, "<Q", 1 << 60, magic=b"PK\6\6"), "disagree"),
    "cut": (lambda: saved()[:-10], "truncated"),
    "half": (lambda: saved()[: len(saved()) // 2], "truncated"),
    "two archives": (lambda: saved() + saved(), "64-bit end"),
    "more behind": (lambda: saved() + b"x", "does not match"),
    "empty": (lambda: b"", "is empty"),
    "text": (lambda: b"hello, world", "is damaged"),
    "zeros": (lambda: bytes(1000), "opcode"),
    "of a big-endian machine": (lambda: rewritten(saved()).replace(b"little", b"bigbig"), "CRC32"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_that_are_not_as_torch_writes_them_are_refused(name, tmp_path):
    make, told = ARCHIVES[name]
    assert told in refused(make(), tmp_path)


def test_members_that_overlap_are_refused(tmp_path):
    """Both have sizes and CRCs of their own that are right; the second lies inside the first."""
    data = bytearray(saved())
    first, second = (entry(data, f"archive/data/{number}") for number in (0, 1))
    begin, _ = place(data, "data/0")
    longer = place(data, "data/1")[0] + 4 - begin
    struct.pack_into("<2I", data, first + 20, longer, longer)
    assert "overlaps archive/data/1" in refused(bytes(data), tmp_path)
    assert second > first


class Reference:
    """Stands for a storage of `count` floats."""

    def __init__(self, count):
        self.count = count


class Call:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def archive(value, *, floats: int = 6, kind=torch.FloatStorage, count=None) -> bytes:
    """A file of torch.save whose pickle refers to one storage, with anything in it."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, found):
            return ("storage", kind, "0", "cpu", found.count) if isinstance(found, Reference) else None

    buffer, out = io.BytesIO(), io.BytesIO()
    Pickler(buffer, 2).dump({"x": value})
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/data/0", bytes(4 * floats))
    return out.getvalue()


def view(offset, shape, stride, *, count=6):
    function = torch._utils._rebuild_tensor_v2
    return Call(function, Reference(count), offset, shape, stride, False, collections.OrderedDict())


TENSORS = {
    "negative size": view(0, (-1, 3), (3, 1)),
    "negative stride": view(5, (2,), (-1,)),
    "negative offset": view(-1, (2,), (1,)),
    "offset behind": view(7, (0,), (1,)),
    "huge offset": view(1 << 62, (1,), (1,)),
    "one too many": view(1, (2, 3), (3, 1)),
    "stride too long": view(0, (2, 2), (5, 1)),
    "overflow": view(0, (1 << 40, 1 << 40), (1 << 61, 1 << 61)),
    "a stride that is not used": view(0, (1,), (1 << 61,)),
    "nothing of a huge size": view(0, (0, 1 << 47, 1 << 47), (1, 1, 1)),
    "64 bits": view(0, (1 << 64,), (0,)),
    "floats": view(0, (2.0,), (1,)),
    "true": view(0, (True,), (1,)),
    "a list": view(0, [2], [1]),
    "more strides": view(0, (2,), (1, 1)),
    "many dims": view(0, (1,) * 33, (1,) * 33),
    "a longer storage": view(0, (8,), (1,), count=8),
    "a shorter storage": view(0, (2,), (1,), count=2),
    "no count": view(0, (2,), (1,), count="6"),
    "a negative storage": view(0, (0,), (1,), count=-1),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_outside_their_storage_are_refused(name, tmp_path):
    tracemalloc.start()
    try:
        assert "storage" in refused(archive(TENSORS[name]), tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "value",
    [
        Call(torch._utils._rebuild_tensor_v2, 3, 0, (1,), (1,), False, None),
        Call(torch._utils._rebuild_tensor_v2, Reference(6)),
        Call(torch._utils._rebuild_parameter_with_state),
        Call(torch._tensor._rebuild_from_type_v2, torch.Size, torch.Size, ((1,),), {}),
        view(0, (1 << 40,), (0,)),
        Call(torch._utils._rebuild_tensor_v3, Reference(6), 0, (2,), (1,), False, None, 3),
        Call(torch._utils._rebuild_qtensor, Reference(6), 0, (2,), (1,), (), False, None),
    ],
)
def test_what_is_no_tensor_that_is_read_is_none(value, tmp_path):
    (tmp_path / "x.pt").write_bytes(archive(value))
    assert isinstance(load_torch(tmp_path / "x.pt")["x"], Made)


def test_an_archive_without_a_64_bit_end_is_read(tmp_path):
    """As other programs write it."""
    (tmp_path / "x.pt").write_bytes(archive(view(1, (2, 2), (2, 1))))
    assert torch.equal(load_torch(tmp_path / "x.pt")["x"].read(), torch.zeros(2, 2))


def test_any_bytes_are_values_or_an_error_that_names_the_file(tmp_path):
    seeds = [saved(), archive(view(1, (2, 2), (2, 1)))]
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(9.0)}, buffer, _use_new_zipfile_serialization=False)
    chance = random.Random(1)
    for seed, _ in itertools.product([*seeds, buffer.getvalue()], range(150)):
        data = bytearray(seed)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        (tmp_path / "x.pt").write_bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
        try:
            found = load_torch(tmp_path / "x.pt")
            for value in found.values() if isinstance(found, dict) else ():
                if isinstance(value, StoredTensor):
                    value.read()
        except (DamageError, UsageError) as error:
            assert str(tmp_path / "x.pt") in str(error)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    (tmp_path / "link").symlink_to("/dev/zero")
    for name, kind in {"pipe": "a pipe", "socket": "a socket", "link": "a device"}.items():
        with pytest.raises(UsageError, match=f"{name} is not a regular file\n  found: {kind}"):
            load_torch(tmp_path / name)
