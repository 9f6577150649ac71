"""`shuffle`: the documents of a corpus in a seeded random order, as a new corpus, in bounded memory and two passes.

The position of each document is computed by the same permutation that orders samples. The first pass reads the corpus
sequentially and puts each document into the bucket of its position; the second reads one bucket after another, each in
order of position. So random reads happen only inside a bucket, which is small enough to stay in the page cache, and
memory holds one batch and the positions of one bucket. Buckets are ordinary pairs in a hidden folder beside the result;
an interrupted run starts over.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mdata.corpus.corpus import open_corpus
from mdata.corpus.origins import OriginsTable, open_origins
from mdata.corpus.paths import check_prefix
from mdata.indexed.append_file import AppendFile
from mdata.manifest.types import CorpusManifest
from mdata.order.permutation import Permutation
from mdata.preprocessing.corpus_writer import CorpusWriter, origins_path
from mdata.preprocessing.placing import Staged, buckets_folder
from mdata.progress import SILENT, Progress
from mdata.rewriting.taken_documents import DocumentSource, DocumentWriter, Taken, new_corpus, write_corpora
from mdata.util.arrays import Int64s
from mdata.util.random_keys import derive_key

BUCKET_BYTES = 1 << 28
# Each bucket has six files open while it is filled.
_MOST_BUCKETS = 64
_BLOCK = 1 << 16


def shuffle(
    path: str | Path,
    output_prefix: str,
    *,
    seed: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    progress: Progress = SILENT,
) -> tuple[Path, CorpusManifest]:
    """Write all documents of a corpus in random order, as `{output_prefix}_{level}`.

    Args:
        path: the corpus.
        output_prefix: begins the name of the result.
        seed: decides the order.
        bucket_bytes: about how many bytes of tokens a bucket has; there are at most 64 buckets. The order is the same.
        progress: receives the tokens of both passes.

    Raises:
        UsageError: another corpus has the name of the result. DamageError: the corpus is damaged.
        ResourceError: the disk is full; a run needs twice the size of the corpus, in addition to the corpus itself.
    """
    check_prefix(output_prefix)
    source = DocumentSource(open_corpus(path))
    corpus = source.corpus
    result = Path(f"{output_prefix}_{corpus.manifest.level}")
    made_by = {"shuffle_of": corpus.id[:16], "shuffle_seed": seed}
    num_buckets = max(1, min(_MOST_BUCKETS, -(-corpus.num_tokens * corpus.dtype.itemsize // bucket_bytes)))
    permutation = Permutation(max(1, corpus.num_documents), derive_key("shuffle-documents", seed, corpus.id))

    def make(prefix: Path) -> Staged:
        folder = buckets_folder(prefix)
        folder.mkdir()
        with new_corpus(source, prefix) as writer:
            buckets = [_Bucket(folder / str(number), source) for number in range(num_buckets)]
            try:
                _fill(buckets, source, permutation, progress=progress)
                for bucket in buckets:
                    bucket.empty(writer, progress)
            finally:
                for bucket in buckets:
                    bucket.close()
            return writer.stage(made_by)

    made = write_corpora(
        source,
        {result: made_by},
        make=make,
        command=f"shuffle of {corpus.id[:16]}, seed {seed}",
        called=f"this shuffle of {corpus.name}",
        doing=f"shuffling {corpus.name}",
        num_tokens=2 * corpus.num_tokens,
        progress=progress,
    )
    return result, made[result]


def _fill(buckets: list[_Bucket], source: DocumentSource, permutation: Permutation, *, progress: Progress) -> None:
    """The first pass: put every document into the bucket of its position."""
    documents = source.corpus.num_documents
    of_each = -(-documents // len(buckets))
    for first in range(0, documents, _BLOCK):
        for batch in source.batches(np.arange(first, min(first + _BLOCK, documents))):
            places = permutation.inverse(batch)
            numbers = places // of_each
            order = np.argsort(numbers, kind="stable")
            bounds = np.searchsorted(numbers[order], np.arange(len(buckets) + 1))
            for bucket, begin, end in zip(buckets, bounds[:-1], bounds[1:], strict=True):
                if begin < end:
                    bucket.put(batch[order[begin:end]], places[order[begin:end]])
            progress.advance(int(source.num_tokens(batch).sum()))


class _Bucket:
    """The documents for a range of positions, in the order in which they were added."""

    def __init__(self, prefix: Path, source: DocumentSource) -> None:
        self._prefix, self._source = prefix, source
        self._writer = CorpusWriter(prefix, source.corpus.dtype.name, step=1)
        self._places = AppendFile(prefix.with_suffix(".places"))

    def put(self, numbers: Int64s, places: Int64s) -> None:
        """Add documents of the corpus, each with its position in the result."""
        taken = self._source.take(numbers)
        self._writer.pair.append(taken.tokens, taken.lengths, document_ends=taken.document_ends)
        if self._source.origins is not None:
            self._writer.origins.append(*self._source.origins.of_documents(numbers))
        self._places.append(places)

    def empty(self, writer: DocumentWriter, progress: Progress) -> None:
        """The second pass: write its documents in order of position, then remove its files."""
        self._writer.pair.commit()
        origins: OriginsTable | None = None
        if self._source.origins is not None:
            self._writer.origins.commit()
            origins = open_origins(origins_path(self._prefix))
        here = DocumentSource(open_corpus(self._prefix))
        places = np.concatenate([*self._places.blocks(np.dtype("<i8")), np.empty(0, np.int64)])
        for batch in here.batches(np.argsort(places)):
            taken: Taken = here.take(batch)
            writer.append(taken, origins.of_documents(batch) if origins else None)
            progress.advance(len(taken.tokens))
        self.close()
        for file in self._prefix.parent.glob(f"{self._prefix.name}.*"):
            file.unlink()

    def close(self) -> None:
        """Remove uncommitted files; does nothing the second time."""
        self._writer.close(keep=False)
        self._places.discard()
