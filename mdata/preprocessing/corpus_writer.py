"""The writer of one corpus: a pair, its origins, counts, and at the end the manifest.

The tokens are in files; the rest is a small state that a journal can record. `stage` completes everything under
temporary names; mdata/preprocessing/placing.py gives it the final ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata.corpus.origins import OriginsState, OriginsWriter
from mdata.errors import os_errors_named
from mdata.indexed.pair_format import bin_path, idx_path
from mdata.indexed.writer import IndexedWriter, ShardFacts, WriterState
from mdata.manifest.io import stage_manifest
from mdata.manifest.sidecars import hashes_path, manifest_path
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
from mdata.preprocessing.encode import Encoded
from mdata.preprocessing.placing import Staged
from mdata.tokenizers.base.tokenizer_folder import folder_name, write_folder
from mdata.util import atomic_io


@dataclass(frozen=True)
class CorpusContent:
    """What a manifest says besides the files that were written.

    Attributes:
        level: what a sequence is.
        tokenizer, tokenizer_files: the tokenizer that made the ids; None and no files if unknown.
        provenance: how the corpus was made; `records` and `origins` are filled in; None: unknown.
        statistics: None: unknown.
        notes: for humans, and for a command that looks for its own earlier result; not part of any id.
    """

    level: Level
    tokenizer: TokenizerFacts | None
    tokenizer_files: Mapping[str, bytes]
    provenance: Provenance | None
    statistics: Statistics | None
    notes: Mapping[str, Any] = field(default_factory=dict)


def origins_path(prefix: Path) -> Path:
    """The sidecar with file and row of each document."""
    return prefix.with_name(prefix.name + ".origins")


class CorpusWriter:
    """Appends encoded documents in the order of the input.

    Args:
        prefix: of the pair.
        dtype: numpy's name of the token type.
        step: rows between neighbouring documents, see `OriginsWriter`.
        resume: a state of `checkpoint` from which to continue.
    """

    def __init__(self, prefix: Path, dtype: str, *, step: int, resume: dict[str, Any] | None = None) -> None:
        self.prefix = prefix
        state = resume or {"writer": None, "origins": None, "document_lengths": [0] * 65, "text_bytes": 0}
        self._document_lengths = np.array(state["document_lengths"], np.int64)
        self._text_bytes = int(state["text_bytes"])
        self.pair = IndexedWriter(prefix, np.dtype(dtype), resume=WriterState(*state["writer"]) if resume else None)
        try:
            origins = OriginsState(*state["origins"]) if resume else None
            self.origins = OriginsWriter(origins_path(prefix), step, resume=origins)
        except BaseException:
            if resume:
                self.pair.close()
            else:
                self.pair.discard()
            raise
        self.num_tokens = self.pair.state.bin_bytes // np.dtype(dtype).itemsize

    def append(self, encoded: Encoded, file: int | npt.NDArray[np.int64], *, rows: npt.NDArray[np.int64]) -> None:
        """Append whole documents; `rows` (from 1) are their rows in the file, or in that of each."""
        self.pair.append(encoded.tokens, encoded.lengths, document_ends=encoded.document_ends)
        self.origins.append(file, rows)
        self.num_tokens += len(encoded.tokens)
        self._document_lengths += length_histogram(encoded.lengths, encoded.document_ends)
        self._text_bytes += int(encoded.text_bytes.sum())

    def checkpoint(self) -> dict[str, Any]:
        """Sync everything; returns the state from which `resume` continues, as JSON types."""
        return {
            "writer": self.pair.checkpoint(),
            "origins": self.origins.checkpoint(),
            "document_lengths": self._document_lengths.tolist(),
            "text_bytes": self._text_bytes,
        }

    def statistics(self) -> Statistics:
        """The counts for the manifest."""
        bins = np.trim_zeros(self._document_lengths, "b").tolist()
        return Statistics(document_lengths=bins, text_bytes=self._text_bytes)

    def stage(self, content: CorpusContent) -> Staged:
        """Complete everything, the manifest too, under temporary names; nothing can be appended afterwards.

        Raises:
            ResourceError, UsageError: a file operation failed. DamageError: a temporary file was removed.
        """
        prefix = self.prefix
        with os_errors_named(f"finishing {prefix}"):
            facts = self.pair.stage()
            files = [bin_path(prefix), idx_path(prefix), hashes_path(prefix), manifest_path(prefix)]
            provenance = content.provenance
            if provenance is not None:
                origins = Origins(path=origins_path(prefix).name, hash=self.origins.stage())
                provenance = msgspec.structs.replace(provenance, records=facts.documents, origins=origins)
                files.append(origins_path(prefix))
            atomic_io.write_partial(hashes_path(prefix), b"".join(facts.block_hashes))
            if tokenizer_files := content.tokenizer_files:
                write_folder(prefix.parent / folder_name(tokenizer_files), tokenizer_files)
            manifest = stage_manifest(_manifest(prefix, facts, content, provenance), manifest_path(prefix))
        self.close(keep=True)  # a run may have thousands of results, and open files are limited
        return Staged(prefix, manifest, tuple(files))

    def rest(self) -> None:
        """Close all files until they are used again; see `AppendFile.rest`."""
        self.pair.rest()
        self.origins.rest()

    def close(self, *, keep: bool) -> None:
        """Stop writing; files under temporary names are kept for a run that continues, or removed."""
        with ExitStack() as stack:  # close the others even after an error
            for path in (hashes_path(self.prefix), manifest_path(self.prefix)) if not keep else ():
                stack.callback(atomic_io.partial_path(path).unlink, missing_ok=True)
            for writer in (self.origins, self.pair):
                stack.callback(writer.close if keep else writer.discard)


def _manifest(prefix: Path, facts: ShardFacts, content: CorpusContent, provenance: Provenance | None) -> CorpusManifest:
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
        format=FORMAT,
        version=VERSION,
        id="",
        checksum="",
        dtype=cast(TokenDtype, facts.dtype),
        level=content.level,
        verified=True,
        tokenizer=content.tokenizer,
        shards=[shard],
        provenance=provenance,
        statistics=content.statistics,
        notes=dict(content.notes),
    )


def length_histogram(lengths: npt.NDArray[Any], document_ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Documents by length: int64[65], [0] without tokens, [k] with 2^(k-1) to 2^k - 1 tokens.

    Args:
        lengths: of sequences.
        document_ends: running count of sequences by document.
    """
    token_ends = np.concatenate(([0], np.cumsum(lengths)))
    of_documents = np.diff(token_ends[document_ends], prepend=0)
    # frexp's exponent is the number of binary digits, exact below 2^53.
    return np.bincount(np.frexp(of_documents.astype(np.float64))[1], minlength=65).astype(np.int64)
