"""A corpus written without our writer: a pair by struct, hashes by blake3 itself, origins, the manifest last.

Small enough for a test to flip each of its bits; it needs no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

import mdata
from mdata.corpus.origins import OriginsWriter
from mdata.manifest.io import save_manifest
from mdata.manifest.types import BlockHashes, Origins
from tests.helpers.corpora import write_pair
from tests.helpers.manifests import some_corpus

BLOCK = 4 << 20


def make_corpus(folder: Path, documents: Sequence[Sequence[int]], *, name: str = "x", code: int = 8) -> Path:
    """Write folder/name.json and all that it speaks of; `documents` as in `write_pair`, all tokens 0."""
    prefix = folder / name
    size = sum(map(sum, documents))
    write_pair(prefix, documents, tokens=np.zeros(size, np.uint16), code=code)
    data = prefix.with_name(f"{name}.bin").read_bytes()
    hashes = b"".join(blake3(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK))
    prefix.with_name(f"{name}.bin.blake3").write_bytes(hashes)
    writer = OriginsWriter(prefix.with_name(f"{name}.origins"), step=1)
    writer.append(0, np.arange(1, len(documents) + 1))
    origins = Origins(path=f"{name}.origins", hash=writer.commit())
    writer.close()
    made = some_corpus()
    (shard,) = mdata.open_corpus(prefix.with_name(f"{name}.idx")).manifest.shards
    shard = msgspec.structs.replace(
        shard, blocks=BlockHashes(path=f"{name}.bin.blake3", hash=blake3(hashes).hexdigest())
    )
    made = msgspec.structs.replace(
        made,
        dtype={8: "uint16", 4: "int32"}[code],
        tokenizer=None,
        shards=[shard],
        provenance=msgspec.structs.replace(made.provenance, origins=origins),
    )
    save_manifest(made, folder / f"{name}.json")
    return folder / f"{name}.json"
