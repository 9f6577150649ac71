"""Mock data: rows of seeded random tokens, not read from any file, for trying a training at full size without data.

Row k is a Philox stream (Salmon et al. 2011) with the seed as its key and k as its number, so every rank, worker and
resumed run computes the same rows. Tokens are uniform over the vocabulary and independent: the best loss is
ln(vocab_size). There are no documents, no tokenizer and no validation set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mdata.blend.blend import OpenBlend
from mdata.dataset.dataset import Dataset
from mdata.dataset.dataset_options import DatasetOptions
from mdata.manifest.types import BlendManifest
from mdata.mixing.selection import chosen, from_start, sample_numbers
from mdata.samples.rows import Gathered, Rows, empty_rows, finish, room_in
from mdata.util.arrays import Int64s
from mdata.util.canonical_json import hash_of
from mdata.util.random_keys import derive_key

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


class MockDataset(Dataset):
    """An endless training set without components; otherwise it behaves like `Dataset`.

    Args:
        vocab_size: tokens are 0 to vocab_size - 1; sequence_length: inputs per row; seed: of the random tokens.
    """

    def __init__(self, *, vocab_size: int, sequence_length: int, seed: int) -> None:
        self.options = DatasetOptions(sequence_length=sequence_length, seed=seed)
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
        self.data_id = hash_of(self.identity)

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
        """See `Dataset.__getitem__`."""
        numbers = chosen(sample, None) if isinstance(sample, slice) else [from_start(sample, None)]
        rows = self.__getitems__(numbers)
        return rows if isinstance(sample, slice) else rows[0]

    def read(self, samples: npt.ArrayLike, *, out: Rows | Int64s | None = None) -> Rows:
        """See `Dataset.read`."""
        numbers, options = sample_numbers(samples), self.row_options
        self._check_range(numbers)
        rows = empty_rows(len(numbers), options) if out is None else room_in(out, len(numbers), options=options)
        for row, number in zip(rows.text, numbers.tolist(), strict=True):
            row[:] = self._tokens(number)
        return finish(rows, Gathered(np.full(len(numbers), rows.text.shape[1])), options=options)

    def _tokens(self, number: int) -> Int64s:
        """int64[S + 1] of a row: the upper 32 bits of each draw, multiplied down to the vocabulary."""
        key = np.array([self._key.low, self._key.high], np.uint64)
        stream = np.random.Philox(key=key, counter=np.array([0, 0, number, 0], np.uint64))
        high = stream.random_raw(self.options.sequence_length + 1) >> np.uint64(32)
        return (high * np.uint64(self._vocab_size) >> np.uint64(32)).astype(np.int64)

    def __reduce__(self) -> tuple[object, ...]:
        return _made, (self._vocab_size, self.options.sequence_length, self.options.seed)


def _made(vocab_size: int, sequence_length: int, seed: int) -> MockDataset:
    return MockDataset(vocab_size=vocab_size, sequence_length=sequence_length, seed=seed)
