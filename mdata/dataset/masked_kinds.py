"""BERT and T5 as kinds of a dataset: what its options mean for them, and their samples over a part of a corpus.

A dataset's `sequence_length` is BERT's, or that of T5's encoder. Training in native order has no end; validation and
test are the same rows once, in file order; Megatron's order is shuffled in all of them. Imported where a dataset is of
such a kind, since other kinds need nothing of it.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mdata.array_cache.cache import Cache
from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError
from mdata.samples.bert import BertOptions, BertSamples
from mdata.samples.masked import MaskedSamples
from mdata.samples.t5 import T5Options, T5Samples

if TYPE_CHECKING:
    from mdata.dataset.dataset_options import DatasetOptions


def options_of(options: DatasetOptions) -> BertOptions | T5Options:
    """The options of the kind.

    Raises:
        UsageError: values that mean nothing, or no length for T5's decoder.
    """
    given: dict[str, Any] = {"seed": options.seed, "short_probability": options.short_probability}
    made: BertOptions | T5Options
    if options.kind == BertSamples.kind:
        made = BertOptions(sequence_length=options.sequence_length, head=options.head, **given)
    elif options.decoder_length is None:
        raise UsageError("samples of kind 't5' need the decoder's length", fix="decoder_length=128")
    else:
        made = T5Options(encoder_length=options.sequence_length, decoder_length=options.decoder_length, **given)
    made = made if options.masking is None else replace(made, masking=options.masking)
    _ = made.mapping  # says what is wrong with the length
    return made


def identity_of(options: DatasetOptions) -> dict[str, Any]:
    """What of the options decides the samples; the vocabulary only where it was given, else the corpus says it."""
    made = options_of(options)
    kind = BertSamples if options.kind == BertSamples.kind else T5Samples
    masking = {name: repr(value) for name, value in asdict(made.masking).items()}
    found = {
        "version": kind.version,
        "short_probability": repr(made.short_probability),
        "masking": masking,
        "head": made.head if isinstance(made, BertOptions) else None,
        "decoder_length": made.decoder_length if isinstance(made, T5Options) else None,
        "vocabulary": options.vocabulary.fingerprint if options.vocabulary else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def open_masked(corpus: Corpus, documents: tuple[int, int], *, options: DatasetOptions, cache: Cache) -> MaskedSamples:
    """The samples of a range of documents that is not empty.

    Raises:
        UsageError: no document can be used, or a corpus that is not divided into sentences.
    """
    megatron = options.order == "megatron"
    kind = BertSamples if options.kind == BertSamples.kind else T5Samples
    return kind(
        corpus,
        documents,
        options=options_of(options),
        vocabulary=options.vocabulary,
        order="megatron" if megatron else "native" if options.split == "train" else "file",
        num_samples=options.num_samples if megatron else None,
        cache=cache,
    )
