"""The sentences of a corpus, for masked samples: all sizes and document boundaries, and the text of given rows.

Sentence numbers count over all shards, in order. The text of many rows is gathered at once, as flat arrays, so that C++
builds samples from it without returning to Python; rows may lie anywhere, even in a pair whose sequences are not
contiguous in .bin.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError
from mdata.util.arrays import Int64s, locate_all, ranges


class SentenceText:
    """See above; rebuilt in each process instead of being pickled.

    Args:
        corpus: its level is "sentence", or one of its documents has several sequences.

    Raises:
        UsageError: a corpus of whole documents.
    """

    def __init__(self, corpus: Corpus) -> None:
        several = (bool((np.diff(reader.boundaries) > 1).any()) for reader in corpus.readers)
        level = corpus.manifest.level
        if level == "chat" or (level != "sentence" and not any(several)):
            raise UsageError(
                f"{corpus.name} is not divided into sentences",
                found="conversations"
                if level == "chat"
                else f"{corpus.num_sequences} sequences in {corpus.num_documents} documents",
                fix="mdata preprocess --split-sentences",
            )
        self.corpus = corpus
        self._readers = corpus.readers
        self._gatherer = corpus.gatherer

    def sizes(self) -> npt.NDArray[np.int32]:
        """int32[s]: tokens of every sentence."""
        return np.concatenate([reader.lengths for reader in self._readers])

    def boundaries(self, first: int, stop: int) -> Int64s:
        """int64[n + 1]: the first sentences of documents [first, stop), then one past the last sentence."""
        offsets = self.corpus.sequence_offsets
        starts = [reader.boundaries[:-1] + before for reader, before in zip(self._readers, offsets, strict=False)]
        return np.concatenate([*starts, offsets[-1:]])[first : stop + 1]

    def rows(self, numbers: Int64s, rows: npt.NDArray[np.integer]) -> _core.MaskedRows:
        """The text of [n, 3] rows of a mapping, for samples with these numbers."""
        first, stop, targets = rows.astype(np.int64).T
        ends = np.cumsum(stop - first)
        sentences = ranges(first, stop - first)
        shards, insides = locate_all(self.corpus.sequence_offsets, sentences)
        sizes, starts = np.empty(len(sentences), np.int32), np.empty(len(sentences), np.int64)
        for shard, chosen in _each(shards):
            reader = self._readers[shard]
            inside = insides[chosen]
            sizes[chosen] = reader.lengths[inside]
            starts[chosen] = reader.pointers[inside] // reader.dtype.itemsize + self.corpus.token_offsets[shard]
        counts = sizes.astype(np.int64)
        tokens = np.empty((1, int(counts.sum())), np.int64)
        if tokens.size:
            self._gatherer.gather(starts, counts, out=tokens, ends=np.array([len(starts)]))
        return _core.MaskedRows(numbers, np.ascontiguousarray(targets), ends, sizes, tokens[0])


def _each(shards: npt.NDArray[np.integer]) -> Iterator[tuple[int, npt.NDArray[np.bool_] | slice]]:
    """Each shard that occurs, with a mask of its rows; no mask if there is only one shard."""
    if len(shards) and (shards[0] == shards).all():
        yield int(shards[0]), slice(None)
    else:
        for shard in np.unique(shards).tolist():
            yield shard, shards == shard
