"""Shared code of BERT and T5 samples: rows of sentences in an order, masking, and reading many samples at once.

`order="megatron"`: the shuffled mapping, and sample k's draws from MT19937(seed + k): equal to Megatron's datasets bit
for bit, including padding recognized by value. Options for which Megatron uses an unseeded generator (the permutation
of tokens) are refused.

`order="native"`: the mapping of one epoch in file order, permuted differently in each epoch, endless; the draws of
sample k come from its own stream. Everything is keyed by (seed, corpus id, epoch or sample), so nothing depends on the
length of a run or on earlier reads. `order="file"`: the same rows once, in file order, for validation and test.

Sentence numbers count over all shards, in order. The text of many rows is gathered at once, as flat arrays, so that C++
builds samples from it without returning to Python; rows may lie anywhere, even in a pair whose sequences are not
contiguous in .bin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.array_cache.cache import Cache, in_memory
from mdata.array_cache.store import Arrays
from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError, counted
from mdata.order.permutation import Permutation
from mdata.samples.base import SamplePiece
from mdata.samples.field_samples import FieldSamples
from mdata.samples.rows import Sample
from mdata.samples.sample_options import MASKED_VERSION, MaskedKind, check_one_of
from mdata.samples.sentence_mapping import MappingOptions, MappingRows, megatron_mapping, native_parts
from mdata.samples.special_tokens import vocabulary_of
from mdata.util.arrays import Int64s, locate_all, ranges
from mdata.util.random_keys import derive_key


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
        of_rows = {"chat": "conversations", "labelled": "labelled rows"}
        if level in of_rows or (level != "sentence" and not any(several)):
            raise UsageError(
                f"{corpus.name} is not divided into sentences",
                found=of_rows.get(
                    level, f"{counted(corpus.num_sequences, 'sequence')} in {counted(corpus.num_documents, 'document')}"
                ),
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


ORDERS = ("native", "file", "megatron")
_EPOCHS_KEPT = 16


@dataclass(frozen=True, kw_only=True)
class SentenceOrder:
    """Which row of sentences is sample k.

    Args:
        name: "native", "megatron", or "file" (the native samples once, in file order).
        seed: keys every draw.
        num_samples: Megatron's order: whole epochs with at least this many samples (None: one epoch); others: None.
    """

    name: str = "native"
    seed: int = 1234
    num_samples: int | None = None

    def __post_init__(self) -> None:
        check_one_of("order", self.name, allowed=ORDERS)
        if self.name != "megatron" and self.num_samples is not None:
            raise UsageError("num_samples applies only to Megatron's order: the native order has no end")


class MaskedSamples(FieldSamples):
    """Samples of a range of documents; can be pickled. `BertSamples` and `T5Samples` are the kinds.

    Args:
        corpus: of sentences.
        documents: the range [first, last), from `split_range` over the number of documents.
        options: of the kind: `Bert` or `T5`.
        sequence_length: tokens of a sample; for T5: of the encoder.
        order: None: the native order with the default seed.
        cache: keeps the mapping; None: it is built in memory.

    Attributes:
        num_samples: number of samples; None if endless.
        rows: the mapping, [r, 3] of first sentence, one past the last, target.

    Raises:
        UsageError: no usable document, or conflicting options.
    """

    kind: ClassVar[str]
    needed: ClassVar[tuple[str, ...]]
    """Fields of the vocabulary that may not be missing."""

    def __init__(
        self,
        corpus: Corpus,
        documents: tuple[int, int],
        *,
        options: MaskedKind,
        sequence_length: int,
        order: SentenceOrder | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.corpus, self.documents, self.options = corpus, documents, options
        order = order or SentenceOrder()
        self.sequence_length, self.seed, self.order = sequence_length, order.seed, order.name
        self.vocabulary = options.vocabulary or vocabulary_of(corpus)
        self._asked = order.num_samples
        self._check()
        self.num_samples = self._open(cache)
        self._core_vocabulary, self._core_rule = self.vocabulary.as_core(), options.masking.as_core()
        self._draws = self._make_draws()

    def _open(self, cache: Cache | None) -> int | None:
        """Open the text of the samples; their number, None if endless."""
        self._text = SentenceText(self.corpus)
        self.rows = in_memory(self._map)["rows"] if cache is None else self._kept(cache)
        self._permutation = lru_cache(maxsize=_EPOCHS_KEPT)(self._make_permutation)
        return None if self.order == "native" else len(self.rows)

    def texts(self, numbers: npt.NDArray[np.int64]) -> _core.MaskedRows:
        """The text of samples before masking."""
        return self._text.rows(numbers, self.rows[self._places(numbers)])

    @cached_property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the corpus; in Megatron's order on average."""
        first = self.rows[:, 0]
        # In every epoch a row begins at the start of each document, whatever the targets.
        epochs = int(np.count_nonzero(first == first.min())) if self.order == "megatron" and len(first) else 1
        return max(1, len(first) // epochs)

    def epochs(self, num_samples: int) -> float:
        """How many passes over the corpus this number of samples makes."""
        return num_samples / self.samples_per_epoch

    def pieces(self, sample: int) -> list[SamplePiece]:
        """The sentences of a sample, before truncation and masking; see `Samples`."""
        first, stop, _ = self.rows[self._places(np.array([sample], np.int64))[0]].tolist()
        counts = ((sentence, self.corpus.length_of(sentence)) for sentence in range(first, stop))
        return [SamplePiece(sentence, 0, count) for sentence, count in counts if count]

    def samples_of(self, sequence: int, *, first: int, stop: int) -> list[int]:
        """Samples with a sentence; see `Samples`. Searches the whole mapping."""
        document = self.corpus.document_of(sequence)
        if not self.documents[0] <= document < self.documents[1]:
            raise IndexError(f"document {document} outside of {self.documents[0]} to {self.documents[1]}")
        rows = np.flatnonzero((self.rows[:, 0] <= sequence) & (self.rows[:, 1] > sequence)).astype(np.int64)
        if not len(rows) or not self.corpus.length_of(sequence):
            return []
        if self.num_samples is not None:
            return [row for row in rows.tolist() if first <= row < stop]
        size = len(self.rows)
        epochs = range(first // size, -(-stop // size))
        samples = [epoch * size + self._permutation(epoch).inverse(rows) for epoch in epochs]
        return sorted(k for part in samples for k in part.tolist() if first <= k < stop)

    @property
    def mapping(self) -> MappingOptions:
        """How documents are split into samples."""
        raise AssertionError("a kind cuts documents")

    def _write(self, numbers: Int64s, fields: Sample) -> None:
        self._fill(numbers, self.texts(numbers), fields)

    def _fill(self, numbers: npt.NDArray[np.int64], rows: _core.MaskedRows, fields: Sample) -> None:
        """Write the samples."""
        raise AssertionError("a kind has samples")

    @property
    def _pad(self) -> tuple[int, bool]:
        """The padding id, and whether padding is recognized by its value."""
        return (self.vocabulary.megatron_pad, True) if self.order == "megatron" else (self.vocabulary.pad or 0, False)

    def _kept(self, cache: Cache) -> MappingRows:
        def make() -> Iterator[Arrays]:
            cache.progress.begin(f"arranging samples of {self.corpus.name}", None, unit="samples")
            for part in self._map():
                cache.progress.advance(len(part["rows"]))
                yield part
            cache.progress.end()

        (first, stop), mapping = self.documents, self.mapping
        key = {
            "name": f"{self.kind}-mapping",
            "version": MASKED_VERSION,
            "corpus": self.corpus.id,
            "documents": [first, stop],
            "order": "megatron" if self.order == "megatron" else "native",
            "num_samples": self._asked,
            "seed": self.seed,
            "rule": [mapping.longest, mapping.least_sentences, mapping.short_ratio],
        }
        entries = max(stop - first, self._asked or 0)
        return cache.arrays(self.corpus.path, key, make=make, entries=lambda: entries)["rows"]

    def _map(self) -> Iterator[Arrays]:
        boundaries, sizes = self._text.boundaries(*self.documents), self._text.sizes()
        mapping, seed = self.mapping, self.seed
        if self.order == "megatron":
            rows = megatron_mapping(boundaries, sizes, options=mapping, seed=seed, num_samples=self._asked)
            return iter([{"rows": rows}])
        key = derive_key(f"{self.kind} mapping v{MASKED_VERSION}", seed, self.corpus.id)
        parts = native_parts(boundaries, sizes, options=mapping, key=key, first_document=self.documents[0])
        return ({"rows": rows} for rows in parts)

    def _make_draws(self) -> _core.MegatronDraws | _core.KeyedDraws:
        if self.order == "megatron":
            return _core.MegatronDraws(self.seed)
        key = derive_key(f"{self.kind} sample v{MASKED_VERSION}", self.seed, self.corpus.id)
        return _core.KeyedDraws(key.low, key.high)

    def _make_permutation(self, epoch: int) -> Permutation:
        key = derive_key(f"{self.kind} order v{MASKED_VERSION}", self.seed, self.corpus.id, epoch)
        return Permutation(len(self.rows), key)

    def _places(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows of these samples."""
        if self.num_samples is not None:
            return numbers
        epochs, places = np.divmod(numbers, len(self.rows))
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            places[chosen] = self._permutation(epoch).forward(places[chosen])
        return places

    def _check(self) -> None:
        self.vocabulary.require(*self.needed)
        first, last = self.documents
        assert 0 <= first <= last <= self.corpus.num_documents, f"documents {first} to {last} of the corpus"
        megatron = self.order == "megatron"
        if megatron and self.options.masking.permutation:
            raise UsageError(
                "Megatron's permutation of tokens cannot be repeated: it draws from a generator without a seed",
                fix="order=NativeOrder(), or no permutation",
            )
        largest = self.corpus.largest_id
        if largest is not None and largest > max(self.vocabulary.ids):
            raise UsageError(
                f"{self.corpus.name} has ids that are not in the vocabulary",
                found=str(largest),
                expected=f"at most {max(self.vocabulary.ids)}",
            )
