"""The reader of a checkpoint's index: an index that can be relied on, or an `IndexFault`, whatever the bytes.

The first byte chooses: the text as it comes, or a sound index of version 1 (1: with hashes, 2: as the oldest) or a
side index of version 2 (3) with the fields of a JSON object put over its own, and the hashes made to fit. What is read
can be written and read again, its files are names inside the folder, and its slices cover each tensor exactly once,
element by element.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

from blake3 import blake3

from fuzz.manifest import put_over
from trainer.checkpoint.format import (
    HashedFile,
    Index,
    Part,
    RunState,
    dump_index,
    dump_part,
    parse_index,
    parse_part,
    slice_key,
)
from trainer.checkpoint.index_fields import IndexFault

HASH = "0123456789abcdef" * 4
FILES = {"rank-00000.safetensors": 300, "rank-00001.safetensors": 300}
RUN = {"step": 3, "consumed_samples": 12, "data_id": "x", "data": {}, "optimizer_steps": 2, "config": "a = 1\n"}
MOST_PAINTED = 1 << 12


def piece(name: str, file: int, start: list[int], size: list[int]) -> dict[str, Any]:
    """A slice."""
    return {"file": f"rank-0000{file}.safetensors", "key": slice_key(name, start), "start": start, "size": size}


OLDER: dict[str, Any] = {
    "format": "mtrain-checkpoint",
    "version": 1,
    "run": RUN,
    "files": FILES,
    "tensors": {
        "weight/a": {
            "shape": [4, 3],
            "slices": [piece("weight/a", 0, [0, 0], [2, 3]), piece("weight/a", 1, [2, 0], [2, 3])],
        },
        "weight/b": {"shape": [5], "slices": [piece("weight/b", 0, [0], [5])]},
    },
}


def check(data: bytes) -> None:
    """One index."""
    text, kind = data[1:], data[0] & 3 if data[:1] else 0
    try:
        found = read_parts(text) if kind == 3 else parse_index(built(text, kind), lambda name: text)
    except IndexFault as fault:
        assert len(f"{fault.place}{fault.expected}") < 4000, fault
        return
    assert all("/" not in name and name.startswith("rank-") for name in found.files)
    check_slices(found)


def read_parts(fields: bytes) -> Index:
    """An index with one side index, that of the older one's tensors with other fields."""
    name = "rank-00000.json"
    file = name.replace("json", "safetensors")
    whole = parse_index(built(b"{}", 1), lambda name: b"")
    tensors = {
        key: replace(tensor, dtype="F32", slices=tuple(replace(piece, file=file) for piece in tensor.slices))
        for key, tensor in whole.tensors.items()
    }
    text = dump_part(Part(replace(whole.files[file], header=HASH), tensors))
    try:
        given = json.loads(fields)
        text = json.dumps(put_over(json.loads(text), given)).encode() if isinstance(given, dict) else text
    except (ValueError, RecursionError):
        text = fields
    index = dump_index(RunState(**RUN), {name: HashedFile(len(text), blake3(text).hexdigest())}, extras={})
    found = parse_index(index, lambda name: text)
    part = parse_part(text, name)
    assert parse_part(dump_part(part), name) == part
    return found


def check_slices(index: Index) -> None:
    """Each element of each small tensor lies in one slice."""
    for tensor in index.tensors.values():
        if math.prod(tensor.shape) > MOST_PAINTED:
            continue
        painted = [
            place
            for part in tensor.slices
            for place in itertools.product(*(range(a, a + n) for a, n in zip(part.start, part.size, strict=True)))
        ]
        assert sorted(painted) == list(itertools.product(*map(range, tensor.shape)))


def built(fields: bytes, kind: int) -> bytes:
    """The bytes as they come (0), or a sound index of version 1 with other fields."""
    base = OLDER
    if kind == 0:
        return fields
    try:
        if kind == 1:
            tensors = {
                name: {**entry, "slices": [{**part, "hash": HASH} for part in entry["slices"]]}
                for name, entry in OLDER["tensors"].items()
            }
            base = {**OLDER, "tensors": tensors, "headers": dict.fromkeys(FILES, HASH), "checksum": ""}
        given = json.loads(fields)
        text = json.dumps(put_over(base, given) if isinstance(given, dict) else base, sort_keys=True).encode()
    except (ValueError, RecursionError):
        return fields
    return text.replace(b'"checksum": ""', b'"checksum": "%s"' % blake3(text).hexdigest().encode(), 1)
