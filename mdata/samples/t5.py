"""T5 samples: a text whose masked spans are removed for the decoder to predict.

The encoder reads the sentences of a row with a sentinel for each span; the decoder predicts each sentinel and the
tokens of its span. In Megatron's order a sample with more spans than sentinels, or with more tokens than fit the
decoder, is an error as in Megatron; in native order such spans are not masked. The order and the padding are explained
in masked.py. Slow twin: tests/reference/masking.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.errors import UsageError
from mdata.samples.masked import MaskedSamples
from mdata.samples.rows import Sample
from mdata.samples.sample_options import T5
from mdata.samples.sentence_mapping import MappingOptions

_NUM_SPECIAL = 2


class T5Samples(MaskedSamples):
    """See `MaskedSamples`; the vocabulary has bos, eos and sentinels.

    A sample: text_enc, enc_mask (1 where there is text): int64[encoder_length]; text_dec, labels (-1 after their end),
    loss_mask, dec_mask: int64[decoder_length]; truncated: one number.
    """

    kind = T5.name
    needed = ("bos", "eos", "sentinels")
    options: T5

    @property
    def mapping(self) -> MappingOptions:
        """How documents are split into samples."""
        longest = self.sequence_length - _NUM_SPECIAL
        return MappingOptions(longest=longest, short_probability=self.options.short_probability)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        encoder, decoder = (self.sequence_length,), (self.options.decoder_length,)
        return {
            "text_enc": encoder,
            "text_dec": decoder,
            "labels": decoder,
            "loss_mask": decoder,
            "truncated": (),
            "enc_mask": encoder,
            "dec_mask": decoder,
        }

    def _fill(self, numbers: npt.NDArray[np.int64], rows: _core.MaskedRows, fields: Sample) -> None:
        arrays = [fields[name] for name in self._shapes()]
        words = self.vocabulary
        assert words.bos is not None and words.eos is not None, "required when it was made"
        lengths, sentinels = (self.sequence_length, self.options.decoder_length), np.array(words.sentinels, np.int64)
        form = _core.T5Form(*lengths, words.bos, words.eos, sentinels, *self._pad)
        failed = _core.t5_samples(form, self._core_vocabulary, self._core_rule, self._draws, rows, arrays)
        if failed is None:
            return
        row, spans, cells = failed
        raise UsageError(
            f"sample {numbers[row]} of {self.corpus.name} does not fit",
            found=f"{spans} spans, {cells} tokens for the decoder",
            expected=f"{len(self.vocabulary.sentinels)} sentinels and {self.options.decoder_length} tokens at most",
            fix="a longer decoder or more sentinels (Megatron stops here too), or order=NativeOrder()",
        )
