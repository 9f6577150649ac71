"""The last steps of a corpus, in the order that never shows a manifest which is not true.

The old manifest goes and its absence is made lasting; the pair takes its names; the block hashes and the
tokenizer's files follow; the manifest is written last. If any step fails, what this run put in place is
taken away again.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from blake3 import blake3

from mdata import durable, manifest
from mdata.errors import os_errors_named
from mdata.indexed import IndexedWriter, ShardFacts
from mdata.manifest import (
    BlockHashes,
    CorpusManifest,
    Provenance,
    Shard,
    Statistics,
    TokenizerFacts,
)
from mdata.manifest.structs import TokenDtype
from mdata.tokenizers import Tokenizer
from mdata.tokenizers.folder import folder_name, write_folder


def manifest_path(prefix: Path) -> Path:
    """The manifest of the pair with this prefix."""
    return prefix.with_name(prefix.name + ".json")


def hashes_path(prefix: Path) -> Path:
    """The sidecar with the hashes of .bin's blocks."""
    return prefix.with_name(prefix.name + ".bin.blake3")


def write_corpus(
    writer: IndexedWriter,
    prefix: Path,
    *,
    tokenizer: Tokenizer,
    provenance: Provenance,
    statistics: Statistics,
) -> CorpusManifest:
    """Finish a pair and everything beside it; returns the manifest that was written.

    Raises:
        ResourceError, UsageError: the file system refused; nothing that looks finished is left.
    """
    with os_errors_named(f"finishing {prefix}"):
        _forget(manifest_path(prefix))
        facts = writer.finish()
        try:
            durable.atomic_write(hashes_path(prefix), b"".join(facts.block_hashes))
            write_folder(prefix.parent / folder_name(tokenizer.files), tokenizer.files)
            return manifest.save(
                _manifest(
                    prefix,
                    facts,
                    tokenizer=_tokenizer_facts(tokenizer),
                    provenance=provenance,
                    statistics=statistics,
                ),
                manifest_path(prefix),
            )
        except BaseException:
            for ending in (".json", ".idx", ".bin", ".bin.blake3"):
                prefix.with_name(prefix.name + ending).unlink(missing_ok=True)
            raise


def _forget(path: Path) -> None:
    if path.exists():
        path.unlink()
        durable.sync_folder(path.parent)


def _tokenizer_facts(tokenizer: Tokenizer) -> TokenizerFacts:
    return TokenizerFacts(
        type=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        special_ids=dict(tokenizer.special_ids),
        options=dict(tokenizer.options),
        folder=folder_name(tokenizer.files),
    )


def _manifest(
    prefix: Path, facts: ShardFacts, *, tokenizer: TokenizerFacts, provenance: Provenance, statistics: Statistics
) -> CorpusManifest:
    shard = Shard(
        path=prefix.name,
        documents=facts.documents,
        sequences=facts.sequences,
        tokens=facts.tokens,
        bytes=facts.bin_bytes,
        contiguous=True,
        largest_id=facts.largest_id,
        idx_hash=facts.idx_hash,
        blocks=BlockHashes(path=hashes_path(prefix).name, hash=blake3(b"".join(facts.block_hashes)).hexdigest()),
    )
    return CorpusManifest(
        format=manifest.FORMAT,
        version=manifest.VERSION,
        id="",
        checksum="",
        dtype=cast(TokenDtype, facts.dtype),
        level="document",
        verified=True,
        tokenizer=tokenizer,
        shards=[shard],
        provenance=provenance,
        statistics=statistics,
    )
