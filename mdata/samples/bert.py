"""BERT samples: one or two texts of a document, with masked tokens to predict.

[CLS] A [SEP] B [SEP]: the sentences of a row, split in two at random and swapped half of the time, for the head of the
model to predict; without the head, one text. A row that is too long is truncated at both ends. Of the masked tokens 80
% become [MASK], 10 % another token, 10 % stay. The order and the padding are explained in masked.py. Slow twin:
tests/reference/masking.py. With `full_rows` the text of a row is that of a row of GPT samples, as RoBERTa's: it crosses
documents and fills the row, and each epoch begins its rows at another token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.array_cache.cache import Cache
from mdata.errors import UsageError, counted
from mdata.samples.base import SamplePiece
from mdata.samples.gpt import GptSamples
from mdata.samples.masked import MaskedSamples
from mdata.samples.rows import RowOptions, Sample
from mdata.samples.sample_options import Bert
from mdata.samples.sentence_mapping import MappingOptions

_NUM_SPECIAL = 3  # [CLS] and two [SEP]


class BertSamples(MaskedSamples):
    """See `MaskedSamples`; the vocabulary has cls, sep and mask.

    A sample: text, types (0 for the first text, 1 for the second), labels (-1 where nothing was masked), padding_mask
    (1 where there is text), loss_mask (1 where a token is predicted): int64[sequence_length]; is_random (the texts were
    swapped), truncated: one number each.
    """

    kind = Bert.name
    needed = ("cls", "sep", "mask")
    options: Bert

    @property
    def mapping(self) -> MappingOptions:
        """How documents are split: two texts need two sentences."""
        return MappingOptions(
            longest=self.sequence_length - _NUM_SPECIAL,
            least_sentences=2 if self.options.head else 1,
            short_probability=self.options.short_probability,
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        row = (self.sequence_length,)
        return {
            "text": row,
            "types": row,
            "labels": row,
            "is_random": (),
            "padding_mask": row,
            "loss_mask": row,
            "truncated": (),
        }

    def _fill(self, numbers: npt.NDArray[np.int64], rows: _core.MaskedRows, fields: Sample) -> None:
        arrays = [fields[name] for name in self._shapes()]
        form = _core.BertForm(self.sequence_length, self.options.head, *self._pad)
        _core.bert_samples(form, self._core_vocabulary, self._core_rule, self._draws, rows, arrays)


class FullRowBertSamples(BertSamples):
    """Samples in one text that fills the row, less a token: Megatron's rows without a head have room for two [SEP]."""

    def _open(self, cache: Cache | None) -> int | None:
        first, last = self.documents
        sequences = self.corpus.sequences_of(first)[0], self.corpus.sequences_of(last - 1)[1]
        start, stop = self.corpus.token_bounds(*sequences)
        self._length = self.sequence_length - _NUM_SPECIAL
        if self._length < 1:
            raise UsageError(
                "the sequence length leaves no room for text",
                found=f"{counted(self.sequence_length, 'token')}",
                expected=f"{_NUM_SPECIAL + 1} or more, as {_NUM_SPECIAL} are special ones or padding",
            )
        if stop - start < (self._length if self.order == "native" else 1):
            raise UsageError(
                f"{self.corpus.name} is shorter than one full row",
                found=f"{counted(stop - start, 'token')}, sequence length {self.sequence_length}",
                expected=f"at least {counted(self._length if self.order == 'native' else 1, 'token')}",
                fix="a shorter sequence length, or more text",
            )
        self._stream = GptSamples(
            self.corpus,
            sequences,
            options=RowOptions(sequence_length=self._length),
            seed=self.seed,
            extra_token=False,
            shuffle=self.order == "native",
        )
        return self._stream.num_samples

    def texts(self, numbers: npt.NDArray[np.int64]) -> _core.MaskedRows:
        """The text of samples before masking."""
        text = np.empty((len(numbers), self._length + 1), np.int64)
        counts = self._stream.gather(numbers, text).counts
        tokens = text[np.arange(text.shape[1]) < counts[:, None]]
        ends = np.arange(1, len(numbers) + 1, dtype=np.int64)
        return _core.MaskedRows(numbers, counts, ends, counts.astype(np.int32), tokens)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the corpus."""
        return self._stream.samples_per_epoch

    def pieces(self, sample: int) -> list[SamplePiece]:
        """The sequences of a sample, before masking; see `Samples`."""
        return self._stream.pieces(sample)

    def samples_of(self, sequence: int, *, first: int, stop: int) -> list[int]:
        """Samples that read a token of a sequence; see `Samples`."""
        return self._stream.samples_of(sequence, first=first, stop=stop)
