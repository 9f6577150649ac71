"""Opens a corpus as samples of the kind that the options name, over its part of the split.

`bounds_of` computes that part, `open_samples` opens it. An empty part gives None if no samples are needed from it; a
training set in native order, in which every corpus has a fixed share, refuses it. Each kind is imported when it is
first used, so that a process that reads plain text starts without the others. How corpora are mixed is in mdata/blend,
how each kind makes its samples in mdata/samples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mdata.array_cache.cache import Cache
from mdata.corpus.corpus import Corpus
from mdata.dataset.dataset_options import WHOLE, DatasetOptions, MegatronOrder, NativeOrder
from mdata.errors import UsageError, counted
from mdata.order.data_split import split_range
from mdata.samples.base import RowSamples, Samples
from mdata.samples.gpt import GptSamples
from mdata.samples.rows import RowOptions
from mdata.samples.sample_options import (
    Bert,
    Chat,
    Classify,
    Document,
    Fim,
    Gpt,
    MaskedKind,
    Pairs,
    TextKind,
    WholeDocuments,
)
from mdata.util.arrays import locate

if TYPE_CHECKING:
    from mdata.samples.classify import ClassifySamples
    from mdata.samples.masked import MaskedSamples
    from mdata.samples.packed import PackedSamples

Bounds = tuple[int, int]


def bounds_of(corpus: Corpus, options: DatasetOptions) -> Bounds:
    """The part of a corpus in the split: sequences [first, last), or documents for kinds that count those."""
    total = corpus.num_documents if options.by_documents else corpus.num_sequences
    if options.split == WHOLE:
        return 0, total
    return split_range(options.split_shares, options.split, num_sequences=total) or (0, 0)


def open_samples(
    corpus: Corpus, bounds: Bounds, *, options: DatasetOptions, rows: RowOptions, cache: Cache
) -> Samples | None:
    """The samples of a part of a corpus.

    Args:
        corpus: all of it.
        bounds: the part, from `bounds_of`.
        options: of the dataset.
        rows: which masks and positions rows have, from `DatasetOptions.row_options`.
        cache: keeps what is built.

    Returns:
        None if the part is too small for a sample, except for training in native order.

    Raises:
        UsageError: the part is too small for training, or options that do not apply to this corpus.
    """
    kind = options.kind
    if isinstance(kind, Classify):
        return None if _is_empty(corpus, bounds, options) else _classify(corpus, bounds, options, kind)
    if isinstance(kind, MaskedKind):
        empty = _is_empty(corpus, bounds, options)
        return None if empty else _masked(corpus, bounds, options, kind=kind, cache=cache)
    if isinstance(kind, WholeDocuments):
        return _documents(corpus, bounds, options, kind=kind, rows=rows, cache=cache)
    if isinstance(kind, Gpt) and kind.fim is not None:
        return _rearranged(corpus, bounds, options, fim=kind.fim, rows=rows, cache=cache)
    return _gpt(corpus, bounds, options, rows=rows, cache=cache)


def _gpt(
    corpus: Corpus, bounds: Bounds, options: DatasetOptions, *, rows: RowOptions, cache: Cache
) -> RowSamples | None:
    """Samples of concatenated documents, in either order."""
    extra = isinstance(options.kind, TextKind) and options.kind.extra_token
    if isinstance(options.order, MegatronOrder):
        return _megatron(corpus, bounds, options, extra_token=extra, rows=rows, cache=cache)
    return _native(corpus, bounds, options, order=options.order, extra_token=extra, rows=rows)


def tokens_in(corpus: Corpus, bounds: Bounds, *, options: DatasetOptions) -> int:
    """Tokens of a part of a corpus."""
    first, last = bounds
    if first == last:
        return 0
    if bounds == (0, corpus.num_documents if options.by_documents else corpus.num_sequences):
        return corpus.num_tokens  # no table is read for it
    if not corpus.contiguous:
        edges = (_first_sequence(corpus, d) for d in bounds) if options.by_documents else bounds
        return int(corpus.lengths[slice(*edges)].sum(dtype=np.int64))
    if options.by_documents:
        starts, counts = corpus.gatherer.documents(np.array([first, last - 1]))
        return int(starts[1] + counts[1] - starts[0])
    start, stop = corpus.token_bounds(first, last)
    return stop - start


def _first_sequence(corpus: Corpus, document: int) -> int:
    """The first sequence of a document; for the number of documents, the number of sequences."""
    shard, inside = locate(corpus.document_offsets, document)
    before = corpus.sequence_offsets[shard]
    return before + int(corpus.readers[shard].boundaries[inside]) if shard < len(corpus.readers) else before


def _rearranged(
    corpus: Corpus, bounds: Bounds, options: DatasetOptions, *, fim: Fim, rows: RowOptions, cache: Cache
) -> RowSamples | None:
    from mdata.samples.fim import FimSamples

    plain = _gpt(corpus, bounds, options, rows=replace(rows, document_masks=False), cache=cache)
    if plain is None:
        return None
    extra = isinstance(options.kind, TextKind) and options.kind.extra_token
    return FimSamples(plain, corpus, fim=fim, options=rows, seed=options.seed, extra_token=extra)


def _megatron(
    corpus: Corpus, bounds: Bounds, options: DatasetOptions, *, extra_token: bool, rows: RowOptions, cache: Cache
) -> RowSamples | None:
    from mdata.order.megatron_order import MegatronRequest
    from mdata.samples.megatron_gpt import MegatronGptSamples

    if bounds[0] == bounds[1]:
        return None
    request = MegatronRequest(
        first=bounds[0],
        stop=bounds[1],
        sequence_length=options.sequence_length,
        num_samples=options.num_samples,
        seed=options.seed,
        extra_token=extra_token,
        keep_partial=options.keeps_partial,
    )
    return MegatronGptSamples(corpus, request, options=rows, threads=options.threads, cache=cache)


def _documents(
    corpus: Corpus,
    bounds: Bounds,
    options: DatasetOptions,
    *,
    kind: WholeDocuments,
    rows: RowOptions,
    cache: Cache,
) -> RowSamples | None:
    if _is_empty(corpus, bounds, options):
        return None
    if not corpus.contiguous:
        corpus.token_bounds(0, 0)  # says so
    seed, shuffle = options.seed, options.split == "train"
    if isinstance(kind, Document):
        from mdata.samples.single_document import DocumentSamples

        extra, longer = kind.extra_token, kind.longer
        return DocumentSamples(
            corpus, bounds, options=rows, seed=seed, extra_token=extra, shuffle=shuffle, longer=longer
        )
    from mdata.samples.packed import PackingRule

    rule = PackingRule(sequence_length=options.sequence_length, extra_token=kind.extra_token, longer=kind.longer)
    packed = _packed_samples(corpus, kind)
    return packed(corpus, bounds, rule=rule, cache=cache, options=rows, seed=seed, shuffle=shuffle)


def _packed_samples(corpus: Corpus, kind: WholeDocuments) -> type[PackedSamples]:
    if isinstance(kind, Pairs):
        from mdata.samples.chat import PAIRS_LEVEL, PairSamples, require_chat

        require_chat(corpus.name, corpus.manifest.level, wanted=PAIRS_LEVEL)
        return PairSamples
    if isinstance(kind, Chat):
        from mdata.samples.chat import ChatSamples, require_chat

        require_chat(corpus.name, corpus.manifest.level)
        return ChatSamples
    from mdata.samples.packed import PackedSamples

    return PackedSamples


def _classify(corpus: Corpus, bounds: Bounds, options: DatasetOptions, kind: Classify) -> ClassifySamples:
    from mdata.samples.classify import ClassifySamples

    shuffle = options.split == "train"
    return ClassifySamples(
        corpus,
        bounds,
        options=kind,
        sequence_length=options.sequence_length,
        seed=options.seed,
        shuffle=shuffle,
    )


def _masked(
    corpus: Corpus, documents: Bounds, options: DatasetOptions, *, kind: MaskedKind, cache: Cache
) -> MaskedSamples:
    from mdata.samples.bert import BertSamples, FullRowBertSamples
    from mdata.samples.masked import SentenceOrder
    from mdata.samples.t5 import T5Samples

    megatron = isinstance(options.order, MegatronOrder)
    # Training in native order has no end; validation and test are the same rows once, in file order.
    name = "megatron" if megatron else "native" if options.endless else "file"
    order = SentenceOrder(name=name, seed=options.seed, num_samples=options.num_samples if megatron else None)
    masked: type[MaskedSamples] = T5Samples
    if isinstance(kind, Bert):
        masked = FullRowBertSamples if kind.full_rows else BertSamples
    return masked(corpus, documents, options=kind, sequence_length=options.sequence_length, order=order, cache=cache)


def _native(
    corpus: Corpus,
    bounds: Bounds,
    options: DatasetOptions,
    *,
    order: NativeOrder,
    extra_token: bool,
    rows: RowOptions,
) -> RowSamples | None:
    first, last = bounds
    start, stop = corpus.token_bounds(first, last)
    training = options.split == "train"
    # The label of a token is the next one, so a single token has nothing to predict.
    extra = int(extra_token)
    least = options.sequence_length + extra if training else 2
    if stop - start < least:
        if not training:
            return None
        available = f"{counted(stop - start, 'token')} in {counted(last - first, 'sequence')}"
        expected = f"at least sequence length {options.sequence_length} + {extra} = {counted(least, 'token')}"
        raise _too_short(corpus, options, found=available, expected=expected)
    return GptSamples(
        corpus,
        bounds,
        options=rows,
        seed=options.seed,
        extra_token=extra_token,
        shuffle=training,
        shuffle_block=order.shuffle_block,
    )


def _is_empty(corpus: Corpus, bounds: Bounds, options: DatasetOptions) -> bool:
    """Whether a part has no document; training in native order refuses that."""
    if bounds[0] == bounds[1] and options.endless:
        raise _too_short(corpus, options, found=f"none of {corpus.num_documents} documents", expected="a document")
    return bounds[0] == bounds[1]


def _too_short(corpus: Corpus, options: DatasetOptions, *, found: str, expected: str) -> UsageError:
    return UsageError(
        f"corpus {corpus.name} is shorter than one sample",
        found=f"{found} of the split {options.split_shares!r}",
        expected=expected,
        fix="a shorter sequence length, more text, or a larger share of training in the split",
    )
