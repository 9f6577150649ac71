"""Which sentences make a sample of BERT or T5: rows of first sentence, one past the last, and target length.

Documents are split into runs of whole sentences that reach a target length, which is sometimes a short one. A run never
leaves its document, and a single sentence is never left over. `megatron_mapping` equals Megatron's (helpers.cpp:
build_mapping) bit for bit: all epochs from one generator, then shuffled. `native_parts` gives one epoch in file order,
whose targets are keyed by document, so it does not depend on the run and can be made in parts.

Unlike the original: if no document can be used, that is refused (there: 2^31 empty epochs), no request means one epoch
(there: a TypeError), and documents are counted in 64 bits. Slow twin: tests/reference/mapping.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.errors import UsageError, counted
from mdata.util.random_keys import Key

LONGEST_SENTENCE = 512
_MOST_EPOCHS = 2**31 - 2
_NO_LIMIT = 1 << 62
_MOST_SAMPLES = 1 << 40
_WINDOW = 1 << 18  # documents that are mapped at once
_MOST_TARGET = 2**31 - 1

MappingRows = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class MappingOptions:
    """How documents are split into samples.

    Args:
        longest: tokens of text in a sample, at least 2; the usual target.
        least_sentences: of a sample: 2 if the next sentence is predicted, otherwise 1.
        short_probability: share of samples with a shorter target; Megatron takes the nearest 1 / integer.
    """

    longest: int
    least_sentences: int = 1
    short_probability: float = 0.1

    def __post_init__(self) -> None:
        if not 2 <= self.longest <= _MOST_TARGET:
            raise UsageError(
                "the sequence length leaves no room for text",
                found=f"{counted(max(self.longest, 0), 'token')} beside the special ones",
                expected="2 or more",
            )
        if not 0.0 <= self.short_probability <= 1.0:
            raise UsageError("short_probability is not between 0 and 1", found=str(self.short_probability))

    @property
    def short_ratio(self) -> int:
        """One sample in this many is short; 0: none."""
        if self.short_probability <= 0.0:
            return 0
        inverse = min(1.0 / self.short_probability, 2.0**32)
        rounded = math.floor(inverse)
        return rounded + (inverse - rounded >= 0.5)


def megatron_mapping(
    boundaries: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    *,
    options: MappingOptions,
    seed: int,
    num_samples: int | None,
    epochs: int = _MOST_EPOCHS,
) -> MappingRows:
    """Megatron's mapping: [rows, 3], uint32 (uint64 from 2^32 sentences on), shuffled.

    Args:
        boundaries: int64[d + 1], the first sentence of each document of the split, then one past the last.
        sizes: int32[s], tokens of all sentences of the file.
        options: how documents are cut.
        seed: of both generators, below 2^32 - 1.
        num_samples: requested; whole epochs are mapped until there are enough. None: one epoch.
        epochs: at most this many.

    Raises:
        UsageError: no usable document, or an invalid request.
    """
    if not 0 <= seed < 2**32 - 1:
        raise UsageError("the seed is outside of 0 to 2^32 - 2", found=str(seed))
    if num_samples is not None and not 0 <= num_samples <= _MOST_SAMPLES:
        raise UsageError("the number of samples is outside of 0 to 2^40", found=str(num_samples))
    limit, most = (_NO_LIMIT, 1) if num_samples is None else (num_samples, epochs)
    rows = _core.megatron_mapping(*_arrays(boundaries, sizes), *_rule(options), most, limit, seed)
    if not len(rows) and num_samples != 0:
        _refuse_empty(boundaries, options)
    return rows


def native_parts(
    boundaries: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    *,
    options: MappingOptions,
    key: Key,
    first_document: int = 0,
) -> Iterator[MappingRows]:
    """One epoch in file order: [rows, 3] as in `megatron_mapping`, in parts, one per window of documents.

    Args:
        boundaries: of the documents from number `first_document` of the corpus on.
        sizes: int32[s], tokens of all sentences of the corpus.
        options: how documents are cut.
        key: decides the short targets, together with a document's number.
        first_document: the document at which the boundaries begin.

    Raises:
        UsageError: at the end, if no document was usable.
    """
    boundaries, sizes = _arrays(boundaries, sizes)
    any_rows = False
    for first in range(0, max(1, len(boundaries) - 1), _WINDOW):
        part = boundaries[first : first + _WINDOW + 1]
        rows = _core.keyed_mapping(part, sizes, *_rule(options), key.low, key.high, first_document + first)
        any_rows = any_rows or len(rows) > 0
        yield rows
    if not any_rows:
        _refuse_empty(boundaries, options)


def _rule(options: MappingOptions) -> tuple[int, int, int]:
    return options.longest, options.short_ratio, options.least_sentences


def _arrays(
    boundaries: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The arrays in the form that C++ reads: the tables of an .idx are not aligned."""
    return np.require(boundaries, np.int64, ["C", "A"]), np.require(sizes, np.int32, ["C", "A"])


def _refuse_empty(boundaries: npt.NDArray[np.int64], options: MappingOptions) -> None:
    counts = np.diff(boundaries)
    least = counted(options.least_sentences, "sentence")
    enough = int(np.count_nonzero(counts >= options.least_sentences))
    raise UsageError(
        "no document can be made into samples",
        found=f"{counted(len(counts), 'document')}, {enough} of them with at least {least}",
        expected=f"such a document, with no sentence longer than {LONGEST_SENTENCE} tokens",
        fix="mdata preprocess --split-sentences; without the next-sentence head (head = false) one sentence is enough",
    )
