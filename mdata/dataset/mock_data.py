"""Mock data: samples of seeded random tokens, not read from any file, for trying a training at full size without data.

Row k is a Philox stream (Salmon et al. 2011) with the seed as its key and k as its number, so every rank, worker and
resumed run computes the same rows. Tokens are uniform over the vocabulary and independent: the best loss is
ln(vocab_size). There are no corpora, no tokenizer and no validation set.

Other kinds than gpt have the form of real ones: rows of documents with random lengths, of which the second half is
trained in a chat; for bert and t5, random sentences that are masked by the code that masks those of corpora, with the
first ids of the vocabulary as special tokens and the last as sentinels.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.array_cache.cache import Cache
from mdata.blend.blend import OpenBlend
from mdata.corpus.corpus import Corpus
from mdata.dataset.dataset import Dataset
from mdata.dataset.dataset_options import DatasetOptions
from mdata.errors import UsageError
from mdata.indexed.gather import Cuts
from mdata.manifest.types import BlendManifest
from mdata.mixing.selection import chosen, from_start, sample_numbers
from mdata.samples.bert import BertSamples
from mdata.samples.masked import MaskedSamples, SentenceOrder
from mdata.samples.rows import FieldRows, Gathered, Rows, finish, room_in
from mdata.samples.sample_options import (
    Bert,
    Chat,
    Classify,
    Document,
    FieldKind,
    Gpt,
    MaskedKind,
    Packed,
    Pairs,
    TextKind,
)
from mdata.samples.special_tokens import MaskedVocabulary
from mdata.samples.t5 import T5Samples
from mdata.util.arrays import Int64s
from mdata.util.canonical_json import hash_of
from mdata.util.random_keys import Key, derive_key

MOCK = "mock"
_VERSION = 1
_NO_CORPORA = BlendManifest(
    format="mdata-manifest",
    version=1,
    id=MOCK,
    checksum="",
    algorithm="native",
    components=[],
    phases=[],
    parent=None,
)


_NUM_SPECIAL = 6  # the first ids, for bert and t5
_MOST_SENTINELS = 100
LEAST_MASKED_VOCABULARY = 16


class MockDataset(Dataset):
    """An endless training set without components; otherwise it behaves like `Dataset`.

    Args:
        vocab_size: tokens are 0 to vocab_size - 1; for bert and t5 there are at least `LEAST_MASKED_VOCABULARY`.
        sequence_length: inputs per row; of T5: of the encoder.
        seed: of the random tokens. kind: of samples.
    """

    def __init__(
        self, *, vocab_size: int, sequence_length: int, seed: int, kind: TextKind | FieldKind | None = None
    ) -> None:
        kind = kind or Gpt()
        if isinstance(kind, Classify):
            raise UsageError("mock data has no labels", found="kind classify", fix="name a corpus of labelled rows")
        if isinstance(kind, Pairs):
            raise UsageError("mock data has no pairs of conversations", fix="a corpus of mdata preprocess --chat")
        self.options = DatasetOptions(sequence_length=sequence_length, seed=seed, kind=kind)
        self.row_options = self.options.row_options(None)
        self.blend_id, self.components, self.num_samples = MOCK, (), None
        self._opened, self._alone, self._dataset_id_dtype = OpenBlend(_NO_CORPORA, ()), False, None
        self._vocab_size, self._key = vocab_size, derive_key(f"mock data v{_VERSION}", seed)
        self.identity = {
            "blend": f"{MOCK} {_VERSION}",
            "seed": seed,
            "sequence_length": sequence_length,
            "vocab_size": vocab_size,
        }
        if kind != Gpt():
            options = self.options.identity(MOCK)
            self.identity |= {name: value for name, value in options.items() if name not in ("blend", "order")}
        self.data_id = hash_of(self.identity)
        self._sentences = self._masked_samples(kind) if isinstance(kind, MaskedKind) else None

    def _masked_samples(self, kind: MaskedKind) -> MaskedSamples:
        vocabulary = _mock_vocabulary(self._vocab_size)
        made: type[MaskedSamples] = _MockBert if isinstance(kind, Bert) else _MockT5
        return made(
            cast(Corpus, _NoCorpus()),
            (0, 0),
            options=replace(kind, vocabulary=vocabulary),
            sequence_length=self.options.sequence_length,
            order=SentenceOrder(seed=self.options.seed),
        )

    def _of_fields(self, number: int) -> MaskedSamples:
        assert self._sentences is not None, "of kind bert or t5"
        return self._sentences

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; there is no tokenizer."""
        return self._vocab_size

    @property
    def largest_id(self) -> int:
        """The largest id that a row may hold."""
        return self._vocab_size - 1

    def locate(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """See `Dataset.locate`: all samples belong to one component, which is not a corpus."""
        numbers = sample_numbers(samples)
        self._check_range(numbers)
        return np.zeros_like(numbers), numbers

    def mixture_changes(self, least: float) -> tuple[int, ...]:
        """See `Dataset.mixture_changes`: there is no mixture."""
        return (0,)

    def __getitem__(self, sample: int | slice) -> Any:
        """See `Dataset.__getitem__`; only `read` gives the bounds of documents."""
        numbers = chosen(sample, None) if isinstance(sample, slice) else [from_start(sample, None)]
        fields = self.read(numbers).fields
        rows = [{name: array[row, ...] for name, array in fields.items()} for row in range(len(numbers))]
        return rows if isinstance(sample, slice) else rows[0]

    def read(self, samples: npt.ArrayLike, *, out: Rows | Int64s | None = None) -> Rows:
        """See `Dataset.read`."""
        numbers, options, kind = sample_numbers(samples), self.row_options, self.options.kind
        self._check_range(numbers)
        if isinstance(kind, MaskedKind):
            return FieldRows(self._of_fields(0).read(numbers, out.fields if isinstance(out, FieldRows) else None), kind)
        rows = self.empty_rows(len(numbers)) if out is None else room_in(out, len(numbers), options=options)
        for row, number in zip(rows.text, numbers.tolist(), strict=True):
            row[:] = self._tokens(number)
        return finish(rows, self._documents(numbers, rows.text), options=options)

    def _tokens(self, number: int) -> Int64s:
        """int64[S + 1] of a row."""
        return _below(self._vocab_size, self._draws(number, 0, self.options.sequence_length + 1))

    def _draws(self, number: int, purpose: int, count: int) -> npt.NDArray[np.uint64]:
        return _draws(self._key, number, purpose, count)

    def _documents(self, numbers: Int64s, text: Int64s) -> Gathered:
        """How many tokens rows have, where documents begin in them, and what is trained; clears what is padding."""
        kind, length = self.options.kind, text.shape[1]
        if isinstance(kind, Document):
            counts = np.array([1 + _below(length, self._draws(n, 1, 1))[0] for n in numbers.tolist()], np.int64)
            text[np.arange(length) >= counts[:, None]] = 0
            return Gathered(counts)
        counts = np.full(len(numbers), length)
        if not isinstance(kind, Packed):
            return Gathered(counts)
        ends, trained = [], np.zeros(text.shape, np.uint8)
        for row, number in enumerate(numbers.tolist()):
            lengths = 1 + _below(length - 1, self._draws(number, 1, length))
            stops = np.cumsum(lengths)
            bounds = [0, *stops[stops < length - 1].tolist(), length]
            ends.append(bounds[1:-1])
            for first, stop in pairwise(bounds):
                trained[row, (first + stop + 1) // 2 : stop] = 1
        places = np.array([place for of_row in ends for place in of_row], np.int32)
        cuts: Cuts = np.cumsum([len(of_row) for of_row in ends]).astype(np.int64), places
        return Gathered(counts, cuts, trained[:, 1:] if isinstance(kind, Chat) else None)

    def __reduce__(self) -> tuple[object, ...]:
        return _made, (self._vocab_size, self.options.sequence_length, self.options.seed, self.options.kind)


class _NoCorpus:
    """In place of a corpus: draws are keyed by its id."""

    id = name = MOCK


class _MockTexts(MaskedSamples):
    """Two random sentences of a row; of nine rows in ten as many tokens as fit, otherwise fewer."""

    def _check(self) -> None:
        self.vocabulary.require(*self.needed)

    def _open(self, cache: Cache | None) -> None:
        self._key = derive_key(f"mock data v{_VERSION}", self.seed)

    def texts(self, numbers: Int64s) -> _core.MaskedRows:
        longest, plain = self.mapping.longest, np.array(self.vocabulary.ids)[_NUM_SPECIAL:]
        targets, sizes, tokens = [], [], []
        for number in numbers.tolist():
            draws = _draws(self._key, number, 2, 3)
            short = _below(10, draws[:1])[0] == 0
            target = 2 + int(_below(longest - 1, draws[1:2])[0]) if short else longest
            first = 1 + int(_below(target - 1, draws[2:])[0])
            targets.append(target)
            sizes += [first, target - first]
            tokens.append(plain[_below(len(plain), _draws(self._key, number, 0, target))])
        return _core.MaskedRows(
            numbers,
            np.array(targets, np.int64),
            2 * np.arange(1, len(numbers) + 1, dtype=np.int64),
            np.array(sizes, np.int32),
            np.concatenate(tokens).astype(np.int64),
        )


class _MockBert(_MockTexts, BertSamples):
    pass


class _MockT5(_MockTexts, T5Samples):
    pass


def _mock_vocabulary(size: int) -> MaskedVocabulary:
    sentinels = range(size - 1, size - 1 - min(_MOST_SENTINELS, size // 4), -1)
    ids = tuple(range(size - len(sentinels)))
    pad, cls, sep, mask, bos, eos = ids[:_NUM_SPECIAL]
    return MaskedVocabulary(ids=ids, pad=pad, cls=cls, sep=sep, mask=mask, bos=bos, eos=eos, sentinels=tuple(sentinels))


def _draws(key: Key, number: int, purpose: int, count: int) -> npt.NDArray[np.uint64]:
    """The upper 32 bits of the first draws of a stream of row `number`."""
    stream = np.random.Philox(
        key=np.array([key.low, key.high], np.uint64), counter=np.array([0, purpose, number, 0], np.uint64)
    )
    return stream.random_raw(count) >> np.uint64(32)


def _below(bound: int, draws: npt.NDArray[np.uint64]) -> Int64s:
    """Draws of 32 bits, multiplied down to 0 to bound - 1."""
    return (draws * np.uint64(bound) >> np.uint64(32)).astype(np.int64)


def _made(vocab_size: int, sequence_length: int, seed: int, kind: TextKind | FieldKind) -> MockDataset:
    return MockDataset(vocab_size=vocab_size, sequence_length=sequence_length, seed=seed, kind=kind)
