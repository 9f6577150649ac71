"""BERT samples: one or two texts of a document, with masked tokens to predict.

[CLS] A [SEP] B [SEP]: the sentences of a row, split in two at random and swapped half of the time, for the head of the
model to predict; without the head, one text. A row that is too long is truncated at both ends. Of the masked tokens 80
% become [MASK], 10 % another token, 10 % stay. The order and the padding are explained in masked.py. Slow twin:
tests/reference/masking.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.samples.masked import MaskedSamples
from mdata.samples.rows import Sample
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
