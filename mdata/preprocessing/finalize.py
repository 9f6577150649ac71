"""The last steps of a corpus, in the order that never shows a manifest which is not true.

The old manifest goes and its absence is made lasting; the pair and its origins take their names; the block
hashes and the tokenizer's files follow; the manifest is written last. If a step fails, the names are taken
away again and everything stays for a run that continues; if the process dies in between, the next run does
the same before it finishes (see mdata/preprocessing/placement.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from blake3 import blake3
from msgspec.structs import replace

from mdata.errors import os_errors_named
from mdata.indexed.writer import ShardFacts
from mdata.manifest.io import save_manifest
from mdata.manifest.sidecars import hashes_path, manifest_path, tokenizer_facts
from mdata.manifest.types import (
    FORMAT,
    VERSION,
    BlockHashes,
    CorpusManifest,
    Level,
    Origins,
    Provenance,
    Shard,
    Statistics,
    TokenDtype,
    TokenizerFacts,
)
from mdata.preprocessing.corpus_writer import Sink, origins_path
from mdata.preprocessing.placement import remove_lasting
from mdata.tokenizers.base.tokenizer import Tokenizer
from mdata.tokenizers.base.tokenizer_folder import folder_name, write_folder
from mdata.util import atomic_io


def write_corpus(
    sink: Sink, *, level: Level, tokenizer: Tokenizer, provenance: Provenance, statistics: Statistics
) -> CorpusManifest:
    """Finish a pair and everything beside it; returns the manifest that was written.

    Raises:
        ResourceError, UsageError: the file system refused; nothing that looks finished is left.
    """
    prefix = sink.prefix
    with os_errors_named(f"finishing {prefix}"):
        remove_lasting(manifest_path(prefix))
        facts = sink.writer.place()
        try:
            origins = Origins(path=origins_path(prefix).name, hash=sink.origins.place())
            atomic_io.atomic_write(hashes_path(prefix), b"".join(facts.block_hashes))
            if tokenizer.files:
                write_folder(prefix.parent / folder_name(tokenizer.files), tokenizer.files)
            made = corpus_manifest(
                prefix,
                facts,
                level=level,
                tokenizer=tokenizer_facts(tokenizer),
                provenance=replace(provenance, origins=origins),
                statistics=statistics,
            )
            return save_manifest(made, manifest_path(prefix))
        except BaseException:
            remove_lasting(manifest_path(prefix))
            sink.writer.unplace()
            sink.origins.unplace()
            hashes_path(prefix).unlink(missing_ok=True)
            raise


def corpus_manifest(
    prefix: Path,
    facts: ShardFacts,
    *,
    level: Level,
    tokenizer: TokenizerFacts,
    provenance: Provenance | None,
    statistics: Statistics | None,
) -> CorpusManifest:
    """The manifest of one pair whose content is known, not yet sealed."""
    hashes = b"".join(facts.block_hashes)
    shard = Shard(
        path=prefix.name,
        documents=facts.documents,
        sequences=facts.sequences,
        tokens=facts.tokens,
        bytes=facts.bin_bytes,
        contiguous=True,
        largest_id=facts.largest_id,
        idx_hash=facts.idx_hash,
        blocks=BlockHashes(path=hashes_path(prefix).name, hash=blake3(hashes).hexdigest()),
    )
    return CorpusManifest(
        format=FORMAT,
        version=VERSION,
        id="",
        checksum="",
        dtype=cast(TokenDtype, facts.dtype),
        level=level,
        verified=True,
        tokenizer=tokenizer,
        shards=[shard],
        provenance=provenance,
        statistics=statistics,
    )
