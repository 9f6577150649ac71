"""The native order: which tokens make sample k, by arithmetic alone.

T tokens in the range, S tokens per sample, x = 1 if one more token is read (the last label). An epoch holds n = max(1,
(T - x - S + 1) // S) samples; each epoch starts at its own offset in [0, min(S, T - x - n S + 1)), so that the cuts
between samples move from epoch to epoch; sample k belongs to epoch k // n and starts at token offset + S P(k mod n),
with P the epoch's permutation. Offset and permutation are keyed only by (seed, corpus id, epoch): not by the blend, the
run's length or the number of ranks. The tokens are those of the file, or of the file with its sequences permuted inside
blocks, which `GptSamples` looks up. Without shuffling (validation, test) the offset is 0, the order is that of the
file, and the last sample may be partial. No token array is used here. Slow twin: tests/reference/native_order.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdata.errors import UsageError, counted
from mdata.order.permutation import Permutation
from mdata.util.pickling import PickledByArguments
from mdata.util.random_keys import Key, derive_key

NAME = "native"
VERSION = 1  # of the whole construction, part of every data id; another version is another order
_EPOCHS_KEPT = 16  # a table of 4,096 entries each at most: 256 KB


@dataclass(frozen=True, slots=True)
class OrderKey:
    """The key of an order's random draws.

    Attributes:
        seed: the run's seed.
        corpus_id: the id of the corpus, not of the blend: changing the blend must not reshuffle a corpus.
    """

    seed: int
    corpus_id: str

    def epoch(self, epoch: int) -> Key:
        """The key of one epoch's permutation; its `draw` gives the epoch's offset."""
        return derive_key(f"{NAME} order v{VERSION}", self.seed, self.corpus_id, epoch)

    def blocks(self, epoch: int) -> Key:
        """The key of one epoch's permutations of sequences inside blocks (mdata_cpp/block_shuffle.hpp)."""
        return derive_key(f"{NAME} blocks v{VERSION}", self.seed, self.corpus_id, epoch)


class StreamOrder(PickledByArguments):
    """Sample number -> first token, for one range of one corpus; can be pickled.

    Args:
        num_tokens: tokens of the range, T.
        sequence_length: tokens per sample, S.
        key: seed and corpus.
        extra_token: whether a sample reads S + 1 tokens, so that its last token has a label.
        shuffle: false gives offset 0, file order and the last partial sample, for one pass.

    Attributes:
        samples_per_epoch: n above; without shuffling the samples of the single pass, including the partial one.
        num_samples: None with shuffling (endless), otherwise `samples_per_epoch`.

    Raises:
        UsageError: the range is shorter than one sample (without shuffling: than one token with its label).
    """

    def __init__(
        self,
        num_tokens: int,
        sequence_length: int,
        *,
        key: OrderKey,
        extra_token: bool = True,
        shuffle: bool = True,
    ) -> None:
        extra = int(extra_token)
        if sequence_length < 1:
            raise UsageError("the sequence length is not positive", found=str(sequence_length))
        least = extra + (sequence_length if shuffle else 1)
        if num_tokens < least:
            raise UsageError(
                f"corpus {key.corpus_id}: the split is shorter than one sample",
                found=f"{counted(num_tokens, 'token')} for sequence length {sequence_length}",
                expected=f"at least {counted(least, 'token')}",
                fix="use a shorter sequence length, give the split a larger share, or add text",
            )
        self.num_tokens = num_tokens
        self.sequence_length = sequence_length
        self.key = key
        self.extra_token = extra_token
        self.shuffle = shuffle
        self._usable = usable = num_tokens - extra  # tokens that can be an input
        if shuffle:
            self.samples_per_epoch = max(1, (usable - sequence_length + 1) // sequence_length)
            self._num_offsets = min(sequence_length, usable - self.samples_per_epoch * sequence_length + 1)
        else:
            self.samples_per_epoch = -(-usable // sequence_length)
            self._num_offsets = 1
        self._epoch = lru_cache(maxsize=_EPOCHS_KEPT)(self._make_epoch)

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if endless."""
        return None if self.shuffle else self.samples_per_epoch

    def start(self, sample: int) -> int:
        """The first token of a sample, relative to the range; it reads S tokens, or S + 1."""
        return int(self.starts([sample])[0])

    def starts(self, samples: ArrayLike) -> NDArray[np.int64]:
        """The first tokens of many samples: integer[k], in any order -> int64[k].

        Raises:
            IndexError: a negative number, or one past the last sample of an order without shuffling.
        """
        numbers = np.ascontiguousarray(samples, np.int64)
        if numbers.size and (numbers.min() < 0 or (not self.shuffle and numbers.max() >= self.samples_per_epoch)):
            raise IndexError(f"samples {numbers.min()} to {numbers.max()} of {self.num_samples}")
        if not self.shuffle:
            return numbers * self.sequence_length
        epochs = numbers // self.samples_per_epoch
        starts = np.empty_like(numbers)
        for epoch in set(epochs.tolist()):  # np.unique would import numpy.ma
            chosen = epochs == epoch
            offset, permutation = self._epoch(epoch)
            places = numbers[chosen] - epoch * self.samples_per_epoch
            starts[chosen] = offset + self.sequence_length * permutation.forward(places)
        return starts

    def epoch_of(self, sample: int) -> tuple[int, int, Permutation]:
        """The epoch of a sample, with shuffling: first sample, offset, permutation."""
        assert self.shuffle and sample >= 0, (
            f"sample {sample} of an order {'with' if self.shuffle else 'without'} epochs"
        )
        epoch = sample // self.samples_per_epoch
        return epoch * self.samples_per_epoch, *self._epoch(epoch)

    def sample_at(self, epoch: int, token: int) -> int | None:
        """The sample of an epoch that has this token of the range as an input; None if the epoch skips it."""
        assert 0 <= token < self.num_tokens, f"token {token} of {self.num_tokens}"
        assert self.shuffle or epoch == 0, f"epoch {epoch} of an order of one pass"
        offset, permutation = self._epoch(epoch) if self.shuffle else (0, None)
        slot = (token - offset) // self.sequence_length
        if token >= self._usable or not 0 <= slot < self.samples_per_epoch:
            return None
        place = slot if permutation is None else int(permutation.inverse([slot])[0])
        return epoch * self.samples_per_epoch + place

    def samples_reading(self, epoch: int, token: int, *, count: int) -> list[int]:
        """The samples of an epoch that read any of `count` tokens of the range, as input or label; unordered."""
        offset, permutation = self._epoch(epoch) if self.shuffle else (0, None)
        length = self.sequence_length + int(self.extra_token)
        first = max(0, (token - offset - length) // self.sequence_length + 1)
        last = min(self.samples_per_epoch - 1, (token + count - 1 - offset) // self.sequence_length)
        places = np.arange(first, last + 1)
        if permutation is not None:
            places = permutation.inverse(places)
        return (places + epoch * self.samples_per_epoch).tolist()

    def _make_epoch(self, epoch: int) -> tuple[int, Permutation]:
        key = self.key.epoch(epoch)
        return key.below(self._num_offsets), Permutation(self.samples_per_epoch, key)
