"""GPT samples: S tokens of concatenated documents, the tokens after them as labels, and where loss counts.

A sample is one run of the corpus' token stream that the order chose, so it costs one read. A sample that
the order lets end early (the last of a validation pass) is filled up with zeros that the loss mask leaves
out: padding is known by place, never by value. Not done here: packing, masks between documents,
fill-in-the-middle.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mdata.order.native import NativeOrder, OrderKey


class TokenStream(Protocol):
    """What a sample needs of a corpus (`mdata.corpus.Corpus` is one)."""

    @property
    def id(self) -> str:
        """The corpus id; it keys the order."""

    def token_bounds(self, first_sequence: int, last_sequence: int) -> tuple[int, int]:
        """The stream's token numbers [start, stop) of sequences [first_sequence, last_sequence)."""

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """int64[count]: tokens [start, start + count) of the stream."""


class GptSamples:
    """The samples of one range of a corpus in native order; can be pickled if the corpus can.

    Args:
        corpus: the stream of tokens.
        sequences: the range of sequences [first, last), from `split_range`.
        sequence_length: tokens a sample, S.
        seed: the run's seed.
        extra_token: whether a sample reads one token more than S, so that its last token has a label.
        shuffle: false for validation and test: file order, one pass, the last partial sample kept.

    Raises:
        UsageError: the range holds less than one sample.
    """

    def __init__(
        self,
        corpus: TokenStream,
        sequences: tuple[int, int],
        *,
        sequence_length: int,
        seed: int,
        extra_token: bool = True,
        shuffle: bool = True,
    ) -> None:
        self.corpus = corpus
        self.first_token, self.last_token = corpus.token_bounds(*sequences)
        self.order = NativeOrder(
            self.last_token - self.first_token,
            sequence_length,
            key=OrderKey(seed, corpus.id),
            extra_token=extra_token,
            shuffle=shuffle,
        )

    @property
    def num_samples(self) -> int | None:
        """How many samples there are; None without end."""
        return self.order.num_samples

    def token_range(self, sample: int) -> tuple[int, int]:
        """The tokens [start, stop) of the corpus' stream that a sample reads, the last label included."""
        start = self.first_token + self.order.start(sample)
        length = self.order.sequence_length + int(self.order.extra_token)
        return start, min(start + length, self.last_token)

    def sample(self, k: int) -> dict[str, NDArray[np.int64] | NDArray[np.float32]]:
        """Sample k as {tokens int64[S], labels int64[S], loss_mask float32[S]}.

        `labels[i]` is the token after `tokens[i]`; where there is none the mask is 0 and the label 0.
        Without the extra token that is so at the last place of every sample.
        """
        start, stop = self.token_range(k)
        length = self.order.sequence_length
        text = np.zeros(length + 1, np.int64)
        text[: stop - start] = self.corpus.read(start, stop - start)
        loss_mask = np.zeros(length, np.float32)
        loss_mask[: stop - start - 1] = 1.0
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": loss_mask}
