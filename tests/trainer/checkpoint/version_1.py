"""The writer of checkpoints of version 1: one index for all ranks. Only reading them is in trainer/checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blake3 import blake3

from trainer.checkpoint.format import Index, parse_index


def dump_1(index: Index) -> bytes:
    """The bytes of index.json, with hashes."""
    run = {name: value for name, value in asdict(index.run).items() if name != "versions"}
    value = {
        "format": "mtrain-checkpoint",
        "version": 1,
        "run": run,
        "files": {name: file.bytes for name, file in index.files.items()},
        "headers": {name: file.header for name, file in index.files.items()},
        "tensors": {
            name: {"shape": tensor.shape, "slices": [asdict(piece) for piece in tensor.slices]}
            for name, tensor in index.tensors.items()
        },
        "checksum": "",
    }
    text = json.dumps(value, indent=1, sort_keys=True).encode()
    return text.replace(b'"checksum": ""', f'"checksum": "{blake3(text).hexdigest()}"'.encode(), 1)


def unhashed_1(index: bytes) -> dict[str, Any]:
    """The same as the oldest version wrote it: no checksum, no hashes, no measured values."""
    value: dict[str, Any] = json.loads(index)
    del value["checksum"], value["headers"], value["run"]["measured"], value["run"]["scaler"]
    for tensor in value["tensors"].values():
        for piece in tensor["slices"]:
            del piece["hash"]
    return value


def parse_1(raw: bytes) -> Index:
    """An index that has no side indexes."""

    def no_part(name: str) -> bytes:
        raise AssertionError(f"version 1 has no {name}")

    return parse_index(raw, no_part)


def make_1(folder: Path, index: Index) -> dict[str, Any]:
    """Turn a checkpoint on disk into one of the oldest version; its index."""
    value = unhashed_1(dump_1(index))
    for path in (*folder.glob("rank-*.json"), *folder.glob("tokenizer*")):
        path.unlink()
    (folder / "index.json").write_text(json.dumps(value))
    return value
