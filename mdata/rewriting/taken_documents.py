"""Copies documents of a corpus, chosen by number in any order, to a new corpus with their origins.

The new corpus is an ordinary one: a pair, its origins, and a manifest that names the corpus it was made from. C++
gathers tokens in batches of bounded size; only a document larger than a batch is held whole. The inputs in the manifest
are those of the source, and each document keeps its file and row. The size of the texts is unknown for a subset of
documents, so it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mdata.corpus.corpus import Corpus
from mdata.corpus.documents import DocumentReader
from mdata.corpus.origins import check_origins
from mdata.manifest.types import CorpusManifest, Provenance, Statistics
from mdata.preprocessing.corpus_writer import CorpusContent, CorpusWriter, length_histogram
from mdata.preprocessing.placing import Staged
from mdata.preprocessing.resume import difference
from mdata.progress import Progress
from mdata.rewriting.rewritten import Rewriting, write_results
from mdata.util.arrays import Int64s, locate_all

_MADE_BY = "made_by"  # the note that says how a corpus was made from one without origins
_DOCUMENTS_AT_ONCE = 1 << 16
_TOKENS_AT_ONCE = 1 << 22


class Taken(NamedTuple):
    """Whole documents: tokens [t], int64[n] lengths of sequences, int64[d] running count of sequences."""

    tokens: npt.NDArray[Any]
    lengths: Int64s
    document_ends: Int64s


class DocumentSource:
    """The documents of a corpus.

    Raises:
        UsageError: its sequences are not contiguous on disk. DamageError: its origins are damaged.
    """

    def __init__(self, corpus: Corpus) -> None:
        if not corpus.contiguous:
            corpus.token_bounds(0, 0)
        self.corpus = corpus
        self.origins = DocumentReader(corpus).origins
        recorded = corpus.manifest.provenance
        if self.origins and recorded and recorded.origins:
            check_origins(self.origins.path, recorded.origins.hash)

    def provenance(self, made_by: Mapping[str, Any]) -> Provenance | None:
        """The provenance of a corpus made from these documents, without what its writer fills in; None: unknown."""
        provenance = self.corpus.manifest.provenance if self.origins else None
        if provenance is None:
            return None
        return msgspec.structs.replace(provenance, options={**provenance.options, **made_by}, special_in_text=None)

    def differs(self, made_by: Mapping[str, Any], existing: CorpusManifest) -> str | None:
        """How a corpus differs from the result of taking these documents in this way; None: it does not."""
        sides = (
            (existing.provenance, existing.notes.get(_MADE_BY, {}), existing.tokenizer),
            (self.provenance(made_by), made_by, self.corpus.manifest.tokenizer),
        )
        facts = [
            {
                "options": dict(provenance.options if provenance else note),
                "provenance": "recorded" if provenance else "unknown",
                "tokenizer": tokenizer and tokenizer.fingerprint,
                "inputs": [file.hash for file in provenance.inputs] if provenance else [],
            }
            for provenance, note, tokenizer in sides
        ]
        return difference(*facts)

    def num_tokens(self, numbers: Int64s) -> Int64s:
        """int64[d], tokens of each document."""
        return self.corpus.gatherer.documents(numbers)[1]

    def take(self, numbers: Int64s) -> Taken:
        """Read these documents, in this order."""
        corpus = self.corpus
        first, count = corpus.gatherer.documents(numbers)
        out = np.empty((1, int(count.sum())), np.int64)
        if out.size:
            corpus.gatherer.gather(first, count, out=out, ends=np.array([len(numbers)]))
        of_each, lengths = self._sequences(numbers)
        return Taken(out[0].astype(corpus.dtype), lengths, np.cumsum(of_each))

    def _sequences(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """Sequences of each document, and the lengths of all."""
        corpus = self.corpus
        shards, inside = locate_all(corpus.document_offsets, numbers)
        begins, ends = np.empty_like(numbers), np.empty_like(numbers)
        for shard in np.unique(shards).tolist():
            mine = shards == shard
            boundaries = corpus.readers[shard].boundaries
            begins[mine], ends[mine] = boundaries[inside[mine]], boundaries[inside[mine] + 1]
        of_each = ends - begins
        sequences = np.repeat(begins - np.concatenate(([0], np.cumsum(of_each)[:-1])), of_each)
        sequences += np.arange(len(sequences))
        lengths, shard_of = np.empty(len(sequences), np.int64), np.repeat(shards, of_each)
        for shard in np.unique(shards).tolist():
            mine = shard_of == shard
            lengths[mine] = corpus.readers[shard].lengths[sequences[mine]]
        return of_each, lengths

    def batches(self, numbers: Int64s) -> Iterator[Int64s]:
        """The numbers in batches of bounded size, at least one document each."""
        for first in range(0, len(numbers), _DOCUMENTS_AT_ONCE):
            block = numbers[first : first + _DOCUMENTS_AT_ONCE]
            ends = np.cumsum(self.num_tokens(block))
            begin = before = 0
            while begin < len(block):
                stop = max(begin + 1, int(np.searchsorted(ends, before + _TOKENS_AT_ONCE, side="right")))
                yield block[begin:stop]
                begin, before = stop, int(ends[stop - 1])


class DocumentWriter:
    """Writes documents of a source to a new corpus; see `new_corpus`."""

    def __init__(self, source: DocumentSource, prefix: Path) -> None:
        self.source = source
        self.writer = CorpusWriter(prefix, source.corpus.dtype.name, step=1)
        self.num_tokens = 0
        self._histogram = np.zeros(65, np.int64)

    def append(self, taken: Taken, places: tuple[Int64s, Int64s] | None) -> None:
        """Add documents; `places` are the file and row of each, if those are known."""
        self.writer.pair.append(taken.tokens, taken.lengths, document_ends=taken.document_ends)
        if places is not None:
            self.writer.origins.append(*places)
        self.num_tokens += len(taken.tokens)
        self._histogram += length_histogram(taken.lengths, taken.document_ends)

    def append_numbers(self, numbers: Int64s) -> None:
        """Add a batch of documents of the source."""
        origins = self.source.origins
        self.append(self.source.take(numbers), origins.of_documents(numbers) if origins else None)

    def stage(self, made_by: Mapping[str, Any]) -> Staged:
        """Complete the corpus; `made_by` is added to the options that the source records."""
        manifest = self.source.corpus.manifest
        provenance = self.source.provenance(made_by)
        files = self.source.corpus.tokenizer_files()
        histogram = np.trim_zeros(self._histogram, "b").tolist()
        statistics = Statistics(document_lengths=histogram, text_bytes=None)
        notes = {} if provenance else {_MADE_BY: dict(made_by)}
        return self.writer.stage(
            CorpusContent(manifest.level, manifest.tokenizer, files, provenance, statistics, notes)
        )


def write_corpora(
    source: DocumentSource,
    made_by: Mapping[Path, Mapping[str, Any]],
    *,
    make: Callable[[Path], Staged],
    command: str,
    called: str,
    doing: str,
    num_tokens: int,
    progress: Progress,
) -> dict[Path, CorpusManifest]:
    """Write corpora of a source's documents, or find them written; the manifest of each.

    Args:
        source: of the documents.
        made_by: the prefix of each corpus, and what its `DocumentWriter.stage` records.
        make, command, called: as in `Rewriting`.
        doing, num_tokens: the name and length of the work, for `progress`.
        progress: receives notes, and the tokens that `make` advances.

    Raises:
        UsageError, ResourceError: as `write_results`.
    """
    rewriting = Rewriting(
        command,
        called,
        [*made_by],
        make=make,
        differs=lambda prefix, existing: source.differs(made_by[prefix], existing),
    )
    progress.begin(doing, num_tokens, unit="tokens")
    manifests = {prefix: written.manifest for prefix, written in write_results(rewriting, progress).items()}
    progress.end()
    return manifests


@contextmanager
def new_corpus(source: DocumentSource, prefix: Path) -> Iterator[DocumentWriter]:
    """A writer for this prefix, closed when the block ends; see `write_results`."""
    made = DocumentWriter(source, prefix)
    try:
        yield made
    finally:
        made.writer.close(keep=True)
