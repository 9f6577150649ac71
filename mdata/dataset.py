"""A dataset: sample number in, tokens out; the same for every rank, worker count and history.

`open_dataset` turns a blend, a corpus or a bare prefix into one map from sample numbers to samples.
Training has no end and deals its samples to components by the native blend; validation and test are finite,
in file order, one component after another. `identity` lists everything that decides the order, and
`data_id` is its hash: a checkpoint keeps both, so that a mismatch can name its field. Draws inside a corpus
are keyed by its own id (invariant 6), so another mixture does not reshuffle it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mdata.blend import SPLITS, NativeBlend, split_range
from mdata.blend import native as native_blend
from mdata.blend.split import split_edges
from mdata.blending import OpenBlend, open_blend
from mdata.corpus import Corpus
from mdata.errors import UsageError
from mdata.manifest import TokenizerFacts, hash_of
from mdata.order import native as native_order
from mdata.samples.gpt import GptSamples

WHOLE = "whole"
SAMPLE_KIND = "gpt"

Sample = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """How a run reads a blend.

    Args:
        sequence_length: tokens of a sample.
        seed: keys every draw.
        split: "train", "valid", "test" by `split_shares`, or "whole": everything, in file order, once.
        split_shares: Megatron's split string.
    """

    sequence_length: int
    seed: int = 1234
    split: str = "train"
    split_shares: str = "100,0,0"


@dataclass(frozen=True)
class Component:
    """One corpus of a dataset: its part in the split has `num_tokens`; `samples` makes them rows."""

    name: str
    corpus: Corpus
    samples: GptSamples
    num_tokens: int


def open_dataset(path: str | Path, options: DatasetOptions) -> Dataset:
    """Open a blend manifest, a corpus manifest, a bare prefix, or Megatron's "0.7 a 0.3 b".

    Raises:
        UsageError: nothing there, a corpus or split shorter than one sample, two tokenizers.
        DamageError: something that is not what its manifest says.
    """
    if options.split not in (*SPLITS, WHOLE):
        raise UsageError(f"no split {options.split!r}", expected=", ".join((*SPLITS, WHOLE)))
    return Dataset(open_blend(path), options)


class Dataset:
    """A map from sample number to sample; can be pickled.

    Args:
        blend: open corpora and their weights.
        options: how they are read.

    Attributes:
        components: the corpora that have a part in the split.
        num_samples: None without end (training).
        identity: all that decides the order; data_id: its hash. blend_id: the blend alone.
    """

    def __init__(self, blend: OpenBlend, options: DatasetOptions) -> None:
        self.options = options
        self.blend_id = blend.manifest.id
        self._opened = blend
        training = options.split == "train"
        names = [part.name for part in blend.manifest.components]
        parts = [_component(*pair, options=options) for pair in zip(names, blend.corpora, strict=True)]
        self.components = tuple(part for part in parts if part is not None)
        if not self.components:
            raise UsageError(
                f"the split {options.split!r} is empty",
                found=f"split {options.split_shares!r} of {', '.join(names)}",
                fix="give it a share in the split string",
            )
        self._blend = NativeBlend(blend.weights) if training else None
        counts = [component.samples.num_samples or 0 for component in self.components]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.num_samples = None if training else int(self._ends[-1])
        self.identity = _identity(self.blend_id, options)
        self.data_id = hash_of(self.identity)

    def __len__(self) -> int:
        if self.num_samples is None:
            raise TypeError("a training dataset has no end; take samples by their number")
        return self.num_samples

    def locate(self, samples: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Integer[n] sample numbers -> (number of the component, sample inside it), int64[n] each.

        Raises:
            IndexError: a number below 0 or past the end.
        """
        numbers = np.ascontiguousarray(samples, np.int64)
        end = self.num_samples
        if numbers.size and (numbers.min() < 0 or (end is not None and numbers.max() >= end)):
            raise IndexError(f"samples {numbers.min()} to {numbers.max()} of {end}")
        if self._blend is not None:
            return self._blend.locate(numbers)
        components = np.searchsorted(self._ends, numbers, side="right").astype(np.int64)
        before = np.concatenate((np.zeros(1, np.int64), self._ends))[components]
        return components, numbers - before

    def __getitem__(self, sample: int) -> Sample:
        """One sample: tokens int64[S], labels int64[S], loss_mask float32[S].

        Raises:
            IndexError: a number below 0 or past the end.
        """
        (component,), (inside,) = self.locate([sample])
        return dict(self.components[component].samples.sample(int(inside)))

    @property
    def fingerprint(self) -> str | None:
        """Of the tokenizer; None where no corpus says."""
        return next((c.tokenizer_fingerprint for c in self._corpora if c.tokenizer_fingerprint), None)

    @property
    def vocab_size(self) -> int | None:
        """Entries of the tokenizer; None where no corpus says."""
        return next((c.tokenizer.vocab_size for c in self._corpora if c.tokenizer), None)

    @property
    def eod(self) -> int | None:
        """The end-of-document id; None where no corpus says."""
        return next((c.eod for c in self._corpora if c.eod is not None), None)

    @property
    def largest_id(self) -> int | None:
        """The largest token id of all corpora; None if one of them does not say."""
        known = [c.largest_id for c in self._corpora if c.num_tokens]
        return None if None in known else max((id for id in known if id is not None), default=None)

    @property
    def tokenizer(self) -> TokenizerFacts | None:
        """What the manifests say of the tokenizer, that of `tokenizer_files`; None where no corpus says."""
        corpus = self._tokenizer_corpus
        return corpus.tokenizer if corpus else None

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer's files; empty where it has none, or no corpus keeps them.

        Raises:
            UsageError: the folder beside the corpus is gone.
        """
        corpus = self._tokenizer_corpus
        return corpus.tokenizer_files() if corpus else {}

    @property
    def _tokenizer_corpus(self) -> Corpus | None:
        """The corpus that answers for the tokenizer: one that keeps its files, else one that names it."""
        known = [(c.tokenizer.folder is None, c) for c in self._corpora if c.tokenizer]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the texts of all corpora, whatever the split; None if one of them does not say."""
        sizes = [c.text_bytes for c in self._corpora]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def num_corpus_tokens(self) -> int:
        """Tokens of all corpora, whatever the split: what `text_bytes` is to be divided by."""
        return sum(corpus.num_tokens for corpus in self._corpora)

    @property
    def _corpora(self) -> tuple[Corpus, ...]:
        return self._opened.corpora

    def __reduce__(self) -> tuple[object, ...]:
        return Dataset, (self._opened, self.options)


def parse_split(shares: str) -> tuple[float, float, float]:
    """Fractions of training, validation and test of Megatron's split string.

    Raises:
        UsageError: it cannot be read.
    """
    start, train, valid, test = split_edges(shares)
    return train - start, valid - train, test - valid


def _component(name: str, corpus: Corpus, *, options: DatasetOptions) -> Component | None:
    """The part of a corpus in a split; None where it has none and that is no loss.

    Raises:
        UsageError: a training part shorter than one sample.
    """
    if options.split == WHOLE:
        edges: tuple[int, int] | None = (0, corpus.num_sequences)
    else:
        edges = split_range(options.split_shares, options.split, num_sequences=corpus.num_sequences)
    first, last = edges or (0, 0)
    start, stop = corpus.token_bounds(first, last)
    training = options.split == "train"
    # A label stands after each token, so one token alone is no text to predict.
    least = options.sequence_length + 1 if training else 2
    if stop - start < least:
        if not training:
            return None
        raise UsageError(
            f"corpus {name} is shorter than one sample",
            found=f"{stop - start} tokens in {last - first} sequences of the split {options.split_shares!r}",
            expected=f"at least sequence length {options.sequence_length} + 1 = {least} tokens",
            fix="a shorter sequence length, more text, or a larger share of training in the split",
        )
    samples = GptSamples(
        corpus,
        (first, last),
        sequence_length=options.sequence_length,
        seed=options.seed,
        shuffle=training,
    )
    return Component(name, corpus, samples, stop - start)


def _identity(blend_id: str, options: DatasetOptions) -> dict[str, Any]:
    """Everything that decides which tokens sample k has."""
    return {
        "blend": blend_id,
        "blend_algorithm": f"{native_blend.NAME} {native_blend.VERSION}",
        "order": f"{native_order.NAME} {native_order.VERSION}",
        "sample_kind": SAMPLE_KIND,
        "seed": options.seed,
        "sequence_length": options.sequence_length,
        "extra_token": True,
        "split": options.split,
        "split_shares": [repr(share) for share in parse_split(options.split_shares)],
    }
