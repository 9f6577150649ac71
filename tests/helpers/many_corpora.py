"""Many tiny corpora and their blend, written as plain files.

The real writer syncs each file, which takes minutes for ten thousand corpora; here files are written directly. Each
corpus has different tokens; token t of corpus n is (31 n + t) mod 50,000, so that a reader knows the expected value.
Not done here: hashes of blocks, tokenizers.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mdata.manifest.ids import sealed, text_of
from mdata.manifest.types import BlendComponent, BlockHashes, CorpusManifest, Shard
from tests.helpers.manifests import some_blend, some_corpus

SEQUENCES = 8


def tokens_of(number: int, length: int) -> NDArray[np.uint16]:
    """uint16[8 length]: the tokens of a corpus."""
    return ((31 * number + np.arange(SEQUENCES * length)) % 50_000).astype(np.uint16)


def write_corpora(folder: Path, count: int, *, length: int = 64) -> Path:
    """`count` corpora of 8 documents of `length` tokens each, and the manifest of their blend, which is returned."""
    components = []
    for number in range(count):
        inside = folder / f"{number // 500:03}"
        inside.mkdir(exist_ok=True)
        corpus = _write_one(inside / f"c{number:05}", number, length)
        components.append(
            BlendComponent(
                path=f"{inside.name}/c{number:05}.json",
                id=corpus.id,
                name=f"c{number:05}",
                share=str(number % 7 + 1),
                group=None,
                cap=None,
            )
        )
    blend = msgspec.structs.replace(some_blend(), components=components)
    path = folder / "mix.json"
    path.write_bytes(text_of(sealed(blend)))
    return path


def _write_one(prefix: Path, number: int, length: int) -> CorpusManifest:
    lengths = np.full(SEQUENCES, length, "<i4")
    pointers = np.arange(SEQUENCES, dtype="<i8") * 2 * length
    # Four documents of two sequences would do too; one each is the plainest.
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, SEQUENCES, SEQUENCES + 1)
    index = header + lengths.tobytes() + pointers.tobytes() + np.arange(SEQUENCES + 1, dtype="<i8").tobytes()
    content = tokens_of(number, length).tobytes()
    prefix.with_suffix(".bin").write_bytes(content)
    prefix.with_suffix(".idx").write_bytes(index)
    shard = Shard(
        path=prefix.name,
        documents=SEQUENCES,
        sequences=SEQUENCES,
        tokens=SEQUENCES * length,
        bytes=len(content),
        contiguous=True,
        largest_id=None,
        idx_hash=blake3(index).hexdigest(),
        # Of the tokens, which differ: an id that is each corpus' own.
        blocks=BlockHashes(path=f"{prefix.name}.bin.blake3", hash=blake3(blake3(content).digest()).hexdigest()),
    )
    corpus = msgspec.structs.replace(some_corpus(), tokenizer=None, shards=[shard], provenance=None, statistics=None)
    done = sealed(corpus)
    prefix.with_suffix(".json").write_bytes(text_of(done))
    return done
