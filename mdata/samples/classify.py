"""Labelled rows: one text or two with a class, or several pairs of which one is right. Native order, each row whole.

A document of a corpus of level "labelled" (mdata/rewriting/labelled.py) is a row: its first sequence holds the label
and the row's name (`label_ids`), the others are texts. With `choices` the first text is the context of the others, and
sample k has a row of tokens for each of them. [CLS] A [SEP] B [SEP] has type 0 up to the first [SEP]; what is too long
loses its end (`pair`), as in Megatron-LM. BERT's own programs shorten the longer of both texts instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError
from mdata.order.native_order import OrderKey, StreamOrder
from mdata.samples.base import SamplePiece, samples_at
from mdata.samples.field_samples import FieldSamples
from mdata.samples.rows import Sample
from mdata.samples.sample_options import Classify
from mdata.samples.special_tokens import vocabulary_of
from mdata.sources.labelled import LEVEL, RowName, row_name
from mdata.util.arrays import Int64s


def pair(
    first: Sequence[int], second: Sequence[int] | None, *, length: int, cls: int, sep: int
) -> tuple[list[int], list[int]]:
    """(ids, types) of [CLS] A [SEP] B [SEP], or of [CLS] A [SEP] where there is no second text.

    What does not leave room for the last [SEP] is cut to length - 1 before it: a first text that fills the row removes
    the second, and the [SEP] behind it has type 1 if there was one.
    """
    after = [] if second is None else second
    ids = [cls, *first, sep, *after]
    types = [0] * (len(first) + 2) + [1] * len(after)
    if len(ids) >= length:
        ids, types = ids[: length - 1], types[: length - 1]
    elif second is None:
        return ids, types
    return [*ids, sep], [*types, 0 if second is None else 1]


class ClassifySamples(FieldSamples):
    """The rows of a range of documents; can be pickled.

    A sample: text (ids), types, int64[sequence_length], or [choices, sequence_length]; padding_mask (1 where there is
    text) of the same shape; labels (-1: unknown) and loss_mask (1 where it is known), one number each.

    Args:
        corpus: of level "labelled". documents: the range [first, last).
        options: of the kind. sequence_length: tokens of a row.
        seed: of the run. shuffle: false for validation and test: file order, one pass.

    Raises:
        UsageError: another corpus, or rows with another number of texts.
    """

    options: Classify

    def __init__(
        self,
        corpus: Corpus,
        documents: tuple[int, int],
        *,
        options: Classify,
        sequence_length: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        if corpus.manifest.level != LEVEL:
            raise UsageError(
                f"{corpus.name} has no labels",
                found=f"a corpus of level {corpus.manifest.level}",
                expected=f"one of level {LEVEL}, as `mtrain finetune --task` writes it",
            )
        self.corpus, self.documents, self.options, self.sequence_length = corpus, documents, options, sequence_length
        self.vocabulary = options.vocabulary or vocabulary_of(corpus)
        self.vocabulary.require("cls", "sep")
        self.order = StreamOrder(
            documents[1] - documents[0], 1, key=OrderKey(seed, corpus.id), extra_token=False, shuffle=shuffle
        )
        self.num_samples = self.order.num_samples
        counts = np.concatenate([np.diff(reader.boundaries) for reader in corpus.readers])[slice(*documents)] - 1
        least, most = (options.choices + 1,) * 2 if options.choices else (1, 2)
        if counts.min() < least or counts.max() > most:
            texts = str(least) if least == most else f"{least} or {most}"
            raise UsageError(
                f"{corpus.name} has rows of another kind",
                found=f"{counts.min()} to {counts.max()} texts in a row",
                expected=f"{texts}, for choices={options.choices}",
            )

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the corpus."""
        return self.order.samples_per_epoch

    def epochs(self, num_samples: int) -> float:
        """How many passes over the corpus this number of samples makes."""
        return num_samples / self.order.samples_per_epoch

    def names(self, numbers: npt.ArrayLike) -> list[RowName]:
        """The names and labels of samples."""
        documents = self.order.starts(np.ascontiguousarray(numbers, np.int64)) + self.documents[0]
        return [row_name(self.corpus.document_sequences(number)[0].tolist()) for number in documents.tolist()]

    def pieces(self, sample: int) -> list[SamplePiece]:
        """The sequences of a sample, before they are cut; see `Samples`."""
        first, stop = self.corpus.sequences_of(int(self.order.starts([sample])[0]) + self.documents[0])
        counts = ((sequence, self.corpus.length_of(sequence)) for sequence in range(first, stop))
        return [SamplePiece(sequence, 0, count) for sequence, count in counts if count]

    def samples_of(self, sequence: int, *, first: int, stop: int) -> list[int]:
        """Samples that read a sequence; see `Samples`."""
        place = self.corpus.document_of(sequence) - self.documents[0]
        if not 0 <= place < self.documents[1] - self.documents[0]:
            raise IndexError(f"sequence {sequence} outside of documents {self.documents[0]} to {self.documents[1]}")
        return samples_at(self.order, place, first=first, stop=stop) if self.corpus.length_of(sequence) else []

    def texts(self, numbers: Int64s) -> list[list[list[int]]]:
        """The sequences of samples."""
        documents = self.order.starts(numbers) + self.documents[0]
        return [[ids.tolist() for ids in self.corpus.document_sequences(number)] for number in documents.tolist()]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        row = (self.options.choices, self.sequence_length) if self.options.choices else (self.sequence_length,)
        return {"text": row, "types": row, "labels": (), "padding_mask": row, "loss_mask": ()}

    def _write(self, numbers: Int64s, fields: Sample) -> None:
        vocabulary, length = self.vocabulary, self.sequence_length
        assert vocabulary.cls is not None and vocabulary.sep is not None, "required above"
        fields["text"].fill(vocabulary.pad or 0)
        for name in ("types", "padding_mask"):
            fields[name].fill(0)
        for place, (label, *texts) in enumerate(self.texts(numbers)):
            label_number = row_name(label[:1]).label
            fields["labels"][place], fields["loss_mask"][place] = (
                -1 if label_number is None else label_number,
                label_number is not None,
            )
            pairs = [(text, texts[0]) for text in texts[1:]] if self.options.choices else [(texts[0], None)]
            if not self.options.choices and len(texts) > 1:
                pairs = [(texts[0], texts[1])]
            rows = [fields[name][place].reshape(-1, length) for name in ("text", "types", "padding_mask")]
            for number, (first, second) in enumerate(pairs):
                ids, types = pair(first, second, length=length, cls=vocabulary.cls, sep=vocabulary.sep)
                for array, values in zip(rows, (ids, types, [1] * len(ids)), strict=True):
                    array[number, : len(ids)] = values
