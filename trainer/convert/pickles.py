"""Pickled parts of Megatron-LM's and torch's checkpoints, read without running anything of theirs.

Tensors and settings go through `torch.load(weights_only=True)`. Types beside torch's own are taken from a list: a
Namespace is read as such; enumerations, paths and random states, which nothing here needs, become an `Inert` that keeps
its arguments. `.metadata` of torch.distributed.checkpoint is a plain pickle: an unpickler finds only the dataclasses
that torch writes. Every other name is refused, and named.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
import types
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from mdata import DamageError, UsageError
from mdata.errors import few, os_errors_named

_HARMLESS = re.compile(
    r"(megatron\.[a-z_.]*[A-Z]\w*|pathlib\.\w+|pathlib\._local\.\w+|signal\.Signals|enum\.\w+|datetime\.timedelta"
    r"|numpy\.(_?core\.)*multiarray\._reconstruct|numpy\.ndarray|numpy\.dtype|numpy\.dtypes\.\w+"
    r"|numpy\.(_?core\.)*multiarray\.scalar|_codecs\.encode)"
)
_DTYPES = re.compile(r"(float|bfloat|int|uint|bool|complex)[0-9]*(_e[0-9]m[0-9]\w*)?")
_OF_METADATA = {
    kind.__name__: kind
    for kind in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
        planner.SavePlan,
        planner.TensorWriteData,
        planner.WriteItem,
        planner.WriteItemType,
    )
}


class Inert:
    """What stands for an object of a type that nothing here needs; it keeps what it was made of, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __new__(cls, *arguments: Any) -> Inert:
        """Any arguments."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Ignored."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inert)

    def __hash__(self) -> int:
        return 0


def load_torch(path: Path) -> Any:
    """What torch.save wrote, tensors mapped into memory where the file allows it.

    Raises:
        UsageError: it holds a type that is not on the list. DamageError: it is no such file.
    """
    with os_errors_named("reading a checkpoint"):
        path.stat()
    try:
        names = list(get_unsafe_globals_in_checkpoint(path))
        mapped = True
    except (ValueError, RuntimeError):  # of torch before 1.6, which is no zip file
        names, mapped = [], False
    except (pickle.UnpicklingError, EOFError, OSError) as error:
        raise _damaged(path, error) from error
    _refuse(path, [name for name in names if not _known(name)])
    stand_ins: list[Any] = [(Inert, name) for name in names if _HARMLESS.fullmatch(name)]
    try:
        with safe_globals([argparse.Namespace, types.SimpleNamespace, *stand_ins]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = re.findall(r"GLOBAL ([\w.]+)", str(error))
        _refuse(path, found[:1])
        raise _damaged(path, error) from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def load_item(file: io.RawIOBase, *, where: str) -> Any:
    """One tensor or object of a .distcp file.

    Raises:
        DamageError: it is none.
    """
    try:
        with safe_globals([argparse.Namespace, io.BytesIO]):
            return torch.load(cast(IO[bytes], file), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DamageError(f"{where} cannot be read", found=str(error)[:200], fix="restore the file") from error


def load_metadata(path: Path) -> metadata.Metadata:
    """The `.metadata` of a folder of torch.distributed.checkpoint.

    Raises:
        UsageError: it holds a type that torch does not write there. DamageError: it is no such file.
    """
    with os_errors_named("reading a checkpoint"):
        data = path.read_bytes()
    unpickler = _MetadataUnpickler(io.BytesIO(data))
    try:
        found = unpickler.load()
    except _RefusedError as error:
        _refuse(path, [str(error)])
        raise
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _damaged(path, error) from error
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise DamageError(f"{path} is damaged", found=type(found).__name__, expected="torch's Metadata")
    return found


class _RefusedError(Exception):
    """A name that the unpickler does not look up."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if module.startswith("torch.distributed.checkpoint") and name in _OF_METADATA:
            return _OF_METADATA[name]
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch" and _DTYPES.fullmatch(name):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if _HARMLESS.fullmatch(f"{module}.{name}"):
            return Inert
        raise _RefusedError(f"{module}.{name}")


def _layout(name: str) -> torch.layout:
    """torch's own, by name."""
    if name != "torch.strided":
        raise _RefusedError(f"layout {name}")
    return torch.strided


def _known(name: str) -> bool:
    return name in ("argparse.Namespace", "types.SimpleNamespace") or bool(_HARMLESS.fullmatch(name))


def _refuse(path: Path, names: list[str]) -> None:
    if names:
        raise UsageError(
            f"{path} holds objects that are not read, because reading them could run code",
            found=few(names, 4),
            expected="tensors, plain values and settings",
            fix="load the file where you trust it and save it without them",
        )


def _damaged(path: Path, error: Exception) -> DamageError:
    return DamageError(f"{path} is damaged", found=str(error)[:200], fix="restore the file from a copy")
