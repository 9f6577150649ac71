"""A dataset: sample number in, tokens out, independent of rank, number of workers and earlier reads.

`open_dataset` turns a blend, a corpus or a bare prefix into one map from sample numbers to samples. In native order,
training never ends and takes its samples from components by the native blend; validation and test are finite, in file
order, one component after another. Megatron's order is that of its GPTDataset and blends. `read` fills a caller's
buffer with many samples at once, without the GIL. `identity` lists everything that decides the order; `data_id` is its
hash. Random draws inside a corpus are keyed by the corpus' id, so changing the blend does not reshuffle its corpora.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, cast, overload

import numpy as np
import numpy.typing as npt

from mdata.array_cache.cache import Cache
from mdata.blend.blend import OpenBlend
from mdata.blend.open_blend import open_blend
from mdata.blend.same_tokenizer import OK, REFUSE, may_be_unknown
from mdata.corpus.corpus import Corpus
from mdata.dataset.component import Component, facts_in_short
from mdata.dataset.dataset_options import (
    DatasetOptions,
    KindName,
    MegatronOrder,
    NativeOrder,
    OrderName,
    Split,
    named_kind,
    named_order,
)
from mdata.dataset.open_samples import bounds_of, open_samples, tokens_in
from mdata.errors import UsageError, counted
from mdata.indexed.reader import Mode
from mdata.manifest.types import TokenizerFacts
from mdata.mixing.selection import MOST_SAMPLES, Concatenation, SelectionMap, chosen, from_start, sample_numbers
from mdata.progress import SILENT, Progress
from mdata.samples.base import RowSamples, Samples
from mdata.samples.gpt import GptSamples
from mdata.samples.rows import Empty, FieldRows, Gathered, Rows, Sample, empty_rows, finish, in_order, room_in
from mdata.samples.sample_options import T5, Bert, FieldKind, Pairs, TextKind
from mdata.util.arrays import Int64s
from mdata.util.canonical_json import hash_of
from mdata.util.gc_pause import gc_paused

if TYPE_CHECKING:
    from mdata.mixing.megatron_blend import MegatronBlend
    from mdata.samples.chat import PairSamples
    from mdata.samples.classify import ClassifySamples
    from mdata.samples.field_samples import FieldSamples
    from mdata.sources.labelled import RowName
    from mdata.tokenizers.base.tokenizer import Tokenizer


P = ParamSpec("P")
LEAST_MASKED = 0.75  # of the masking probability; without limits nearly all of it is reached


def _accepts_options(open_by_keywords: Callable[P, Dataset]) -> Callable[P, Dataset]:
    """Also accept `open_dataset(path, DatasetOptions(...))`, the form of before 0.1, until 0.2."""

    @wraps(open_by_keywords)
    def opened(*args: P.args, **keywords: P.kwargs) -> Dataset:
        older: dict[str, Any] = dict(zip(("path", "options"), args, strict=False)) | keywords
        if not isinstance(older.get("options"), DatasetOptions):
            return open_by_keywords(*args, **keywords)
        text = "mdata.open_dataset(path, options) is now mdata.Dataset.from_options(path, options)"
        warnings.warn(text, FutureWarning, stacklevel=2)
        from_options: Callable[..., Dataset] = Dataset.from_options
        return from_options(**older)

    return opened


@_accepts_options
def open_dataset(
    path: str | Path,
    *,
    sequence_length: int,
    seed: int = 1234,
    split: Split = "train",
    split_shares: str = "100,0,0",
    num_samples: int | None = None,
    kind: KindName | TextKind | FieldKind = "gpt",
    order: OrderName | NativeOrder | MegatronOrder = "native",
    cache: str | Path | None = None,
    cache_size: str | None = None,
    tokenizer_unknown: Literal["refuse", "ok"] = "refuse",
    allow_outside: bool = False,
    mode: Mode = "mmap",
    threads: int = 1,
    progress: Progress = SILENT,
) -> Dataset:
    """Open a blend manifest, a corpus manifest, a bare prefix, or Megatron's "0.7 a 0.3 b".

    `open_dataset("a.json", sequence_length=4096, kind=Packed(longer="drop"))`; docs/howto/samples.md has the options.

    Args:
        path: one of these.
        sequence_length: tokens of a sample; of T5: of the encoder.
        seed: keys every draw.
        split: "train", "valid", "test" by `split_shares`, or "whole": all of it (native: in file order, once).
        split_shares: shares of training, validation and test, as in Megatron's --split.
        num_samples: Megatron's order: decides the epochs (None: one). Native: only the length of a training set.
        kind: `Gpt`, `Document`, `Packed`, `Chat`, `Pairs`, `Bert`, `T5` or `Classify`; or the name of one, with
            defaults.
        order: `NativeOrder` or `MegatronOrder`, or its name.
        cache, cache_size: folder for built arrays and for blocks of corpora in object storage; limit of the blocks.
        tokenizer_unknown: "ok" mixes corpora that record their tokenizer with others that do not.
        allow_outside: manifests of corpora may name files outside their folders; only for manifests that you trust.
        mode: "mmap" or "pread": how token files are read. threads: number that read and build.
        progress: receives notes on arrays that are built, and on corpora of a folder that are left out.

    Raises:
        UsageError: nothing at the path, a corpus or split shorter than one sample, two tokenizers, conflicting options.
        DamageError: a file does not match its manifest.
    """
    options = DatasetOptions(
        sequence_length=sequence_length,
        seed=seed,
        split=split,
        split_shares=split_shares,
        num_samples=num_samples,
        kind=named_kind(kind),
        order=named_order(order),
        cache=None if cache is None else str(cache),
        cache_size=cache_size,
        tokenizer_unknown=tokenizer_unknown,
        allow_outside=allow_outside,
        mode=mode,
        threads=threads,
    )
    return Dataset.from_options(path, options, progress=progress)


class Dataset:
    """A map from sample number to sample; can be pickled, and be given to a torch DataLoader.

    Args:
        blend: open corpora and their weights.
        options: how they are read.
        cache: keeps built arrays; None: the cache of the options.

    Attributes:
        components: the corpora that have samples in the split.
        selection: which of them gives sample k, and which of its samples.
        num_samples: None if endless (training in native order, unless the options set a number).
        identity: everything that decides the order; data_id: its hash. blend_id: hash of the blend alone.
    """

    def __init__(self, blend: OpenBlend, options: DatasetOptions, *, cache: Cache | None = None) -> None:
        self.options = options
        self.blend_id = blend.manifest.id
        self._opened = blend
        self.row_options = options.row_options(self.eod)
        kinds, mix, mix_facts = self._open_components(cache or _cache_of(options))
        self.components = tuple(
            Component(name, corpus, kind, tokens_in(corpus, bounds_of(corpus, options), options=options))
            for name, corpus, kind in zip(blend.names, blend.corpora, kinds, strict=True)
            if kind is not None
        )
        if not self.components:
            raise UsageError(
                f"the split {options.split!r} is empty",
                found=f"split {options.split_shares!r} of {', '.join(blend.names)}",
                fix="give it a larger share in the split string, or add documents"
                + (", or a share of 0 if it is not used" if options.split != "train" else ""),
            )
        self.selection: SelectionMap = mix or self._selection()
        ends = (self.selection.num_samples, options.num_samples if self.options.endless else None)
        self.num_samples = min((end for end in ends if end is not None), default=None)
        self._alone = len(self.components) == 1 and mix is None
        # Samples of Megatron's blends also say their component, in the type of the blend's array.
        self._dataset_id_dtype = None if mix is None else mix.components.dtype
        self.identity = options.identity(self.blend_id) | mix_facts
        # Left out where it changes nothing, so that earlier data ids stay the same.
        if any(getattr(component.samples, "keeps_ids_around", False) for component in self.components):
            self.identity["fim"] = {**self.identity["fim"], "ids_around": "kept"}
        self.data_id = hash_of(self.identity)

    @classmethod
    def from_options(
        cls, path: str | Path, options: DatasetOptions, *, progress: Progress = SILENT, evaluation: bool = False
    ) -> Dataset:
        """`open_dataset` with one object of options; `evaluation`: held-out parts in a folder are read too.

        Raises:
            UsageError, DamageError: as `open_dataset`.
        """
        with gc_paused():
            opened = open_for(path, options, evaluation=evaluation)
            opened.tell_left_out(progress)
            return cls(opened, options, cache=_cache_of(options, progress))

    def _open_components(self, cache: Cache) -> tuple[list[Samples | None], MegatronBlend | None, dict[str, Any]]:
        """The samples of each corpus (None if it has none and none are needed), Megatron's mix and its identity."""
        corpora, options = self._opened.corpora, self.options

        def open_one(number: int, num_samples: int | None) -> Samples | None:
            # With many corpora, checking the options again for each would double the time.
            how = options if num_samples == options.num_samples else replace(options, num_samples=num_samples)
            bounds = bounds_of(corpora[number], how)
            return open_samples(corpora[number], bounds, options=how, rows=self.row_options, cache=cache)

        if not isinstance(options.order, MegatronOrder):
            return [open_one(number, options.num_samples) for number in range(len(corpora))], None, {}
        from mdata.dataset.megatron_mix import open_mixed

        surplus, beside = options.order.blend_surplus, (cache, corpora[0].path)
        return open_mixed(self._opened, open_one, num_samples=options.num_samples, surplus=surplus, cache=beside)

    def same_order_for(self, num_samples: int) -> bool:
        """Whether Megatron's order for this many samples has the same ones, as far as both go; False for others."""
        order = self.options.order
        if not isinstance(order, MegatronOrder) or self.options.num_samples is None:
            return False
        from mdata.dataset.megatron_mix import same_order

        parts = [component.samples for component in self.components]
        return same_order(self._opened, parts, num_samples=num_samples, surplus=order.blend_surplus)

    def _selection(self) -> SelectionMap:
        """The selection map: by shares in training, otherwise one component after another."""
        if self.options.endless:
            sizes = [component.samples.samples_per_epoch for component in self.components]
            return self._opened.selection(sizes, self.options.sequence_length)
        return Concatenation([component.samples.num_samples or 0 for component in self.components])

    def __len__(self) -> int:
        if self.num_samples is None:
            raise TypeError("a training dataset has no end; take samples by their number, or set num_samples")
        return self.num_samples

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, count() if self.num_samples is None else range(len(self)))

    def __repr__(self) -> str:
        options, names = self.options, [component.name for component in self.components]
        shown: dict[str, object] = {"kind": options.kind.name, "order": options.order.name, "split": options.split}
        shown["sequence_length"] = options.sequence_length
        return facts_in_short(self.num_samples, names, options=shown, data_id=self.data_id)

    def locate(self, samples: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Integer[n] sample numbers -> (number of the component, sample inside it), int64[n] each.

        Raises:
            IndexError: a number below 0 or past the end.
        """
        numbers = sample_numbers(samples)
        self._check_range(numbers)
        return self.selection.locate(numbers)

    def _check_range(self, numbers: Int64s) -> None:
        end = MOST_SAMPLES if self.num_samples is None else self.num_samples
        if numbers.size and (numbers.min() < 0 or numbers.max() >= end):
            of = "; numbers are from 0 to below 2^62" if self.num_samples is None else f" of {end}"
            raise IndexError(f"samples {numbers.min()} to {numbers.max()}{of}")

    @overload
    def __getitem__(self, sample: int) -> Sample: ...
    @overload
    def __getitem__(self, sample: slice) -> list[Sample]: ...
    def __getitem__(self, sample: int | slice) -> Sample | list[Sample]:
        """One sample: tokens int64[S], labels int64[S], loss_mask float32[S]; masks and positions as the options say.

        For the kinds bert and t5: the fields of `BertSamples` and `T5Samples`. Slices and negative indices are those of
        a Python list; a dataset without end has no negative indices.

        Raises:
            IndexError: past either end. TypeError: not an integer, or a slice without an end.
        """
        if isinstance(sample, slice):
            return self.__getitems__(chosen(sample, self.num_samples))
        (component,), (inside,) = self.locate([from_start(sample, self.num_samples)])
        part = self.components[component]
        with part.damage_check:
            row: Sample = part.samples.sample(int(inside))
        if self._dataset_id_dtype is not None:
            return {"dataset_id": np.array(component, self._dataset_id_dtype), **row}
        return row

    def __getitems__(self, samples: Sequence[int]) -> list[Sample]:
        """Several samples, each equal to `self[k]`, read in one call; torch's DataLoader uses this."""
        samples = [from_start(k, self.num_samples) for k in samples]
        if self.row_options.document_masks or self.row_options.attention_mask:
            return [self[k] for k in samples]  # rows know the lengths of all their documents, and no dense masks
        fields = self.read(samples).fields
        if self._dataset_id_dtype is not None:
            components, _ = self.locate(samples)
            fields = {"dataset_id": components.astype(self._dataset_id_dtype), **fields}
        return [{name: array[row, ...] for name, array in fields.items()} for row in range(len(samples))]

    def empty_rows(self, num_rows: int, *, empty: Empty = np.empty) -> Rows:
        """A buffer for `read` that can be reused; `empty` makes its arrays."""
        if isinstance(self.options.kind, FieldKind):
            return FieldRows(self._of_fields(0).allocate(num_rows, empty=empty), self.options.kind)
        return empty_rows(num_rows, self.row_options, empty=empty)

    def read(self, samples: npt.ArrayLike, *, out: Rows | Int64s | None = None) -> Rows:
        """Read many samples at once, in the given order; the GIL is released while tokens are read.

        `rows["labels"]` and `rows.fields` have the fields of a sample by name, for all kinds.

        Args:
            samples: integer[n], sample numbers.
            out: from `empty_rows`, or int64[n, S + 1] for rows of text; it is filled in. None: a new buffer. Masks and
                positions are in the rows that are returned; dense attention masks are made for single samples only.

        Raises:
            IndexError: a number below 0, past the end, or 2^62 and above. UsageError: `out` does not fit the samples.
            DamageError: a file has changed since it was opened.
        """
        numbers = sample_numbers(samples)
        if isinstance(self.options.kind, FieldKind):
            return self._read_fields(numbers, out, kind=self.options.kind)
        if isinstance(out, FieldRows):
            raise UsageError(
                "out is for samples of several fields, but these samples are rows of text",
                found=", ".join(out.fields),
                expected="what empty_rows gives",
            )
        options = self.row_options
        rows = empty_rows(len(numbers), options) if out is None else room_in(out, len(numbers), options=options)
        if self.num_samples is not None:
            self._check_range(numbers)
        kind = self.components[0].samples
        if self._alone and isinstance(kind, GptSamples):
            read_rows = kind.read(numbers, rows, threads=self.options.threads)
            if read_rows is not None:
                return read_rows
        self._check_range(numbers)  # only now: for eight rows it costs a tenth, and C++ checks each number anyway
        return finish(rows, self._gather(numbers, rows.text), options=options)

    def _read_fields(self, numbers: Int64s, out: Rows | Int64s | None, *, kind: FieldKind) -> FieldRows:
        """`read` for kinds whose samples are several fields (bert, t5, classify), not rows of text."""
        if out is not None and not isinstance(out, FieldRows):
            raise UsageError("out is for rows of text, not for these samples", expected="what empty_rows gives")
        if self._alone:
            self._check_range(numbers)
            with self.components[0].damage_check:
                fields = self._of_fields(0).read(numbers, None if out is None else out.fields)
            return FieldRows(fields, kind)
        components, inside = self.locate(numbers)
        first = self._of_fields(0)
        fields = first.allocate(len(numbers)) if out is None else first.checked(out.fields, len(numbers))
        rows = FieldRows(fields, kind)
        for number in np.unique(components).tolist():
            places = np.flatnonzero(components == number)
            with self.components[number].damage_check:
                part = self._of_fields(number).read(inside[places])
            for name, values in part.items():
                rows.fields[name][places] = values
        return rows

    def check_spans(self, samples: npt.ArrayLike) -> None:
        """T5: read these samples, and refuse options that leave much less masked in them than was asked for.

        Raises:
            UsageError: sentinels or the decoder's length run out; in Megatron's order already for one sample.
        """
        kind = self.options.kind
        assert isinstance(kind, T5), "only T5 has spans"
        fields, sentinels = self.read(samples).fields, self._of_fields(0).vocabulary.sentinels
        spans = np.isin(fields["text_enc"], sentinels).sum(1)
        cells = fields["dec_mask"].sum(1)
        masked = cells - spans - 1  # the decoder reads bos, and each span behind its sentinel
        tokens = fields["enc_mask"].sum(1) - spans + masked
        share = float(masked.sum() / max(1, tokens.sum()))
        if share >= LEAST_MASKED * kind.masking.probability:
            return
        of_sentinels, of_decoder = (spans == len(sentinels)).sum(), (cells >= kind.decoder_length - 1).sum()
        limit = (
            counted(len(sentinels), "sentinel")
            if of_sentinels > of_decoder
            else f"decoder_length={kind.decoder_length}"
        )
        raise UsageError(
            f"too few tokens of t5 samples are masked: {limit} is the limit",
            found=f"{share:.1%} masked, in {counted(len(masked), 'sample')} of {int(tokens.mean())} tokens on average",
            expected=f"about {kind.masking.probability:.1%}, the masking probability",
            fix="a tokenizer with more sentinels (<extra_id_0> ...), or shorter samples"
            if of_sentinels > of_decoder
            else "a longer decoder, or shorter samples",
        )

    def row_names(self, samples: npt.ArrayLike) -> list[RowName]:
        """Classify: the name and the label of each sample."""
        components, inside = self.locate(samples)
        return [
            name
            for number, sample in zip(components.tolist(), inside.tolist(), strict=True)
            for name in cast("ClassifySamples", self.components[number].samples).names([sample])
        ]

    def rows_with_ends_inside(self, samples: npt.ArrayLike) -> float:
        """BERT and T5: the share of these samples whose sentences hold tokens that only samples should add.

        [CLS] or [SEP]; where documents may end inside a row, more of them than those ends.
        """
        kind, vocabulary, fields = self.options.kind, self._of_fields(0).vocabulary, self.read(samples).fields
        if isinstance(kind, T5):
            return float(((fields["text_enc"] == vocabulary.eos).sum(1) > 1).mean())
        assert isinstance(kind, Bert), "other kinds add none"
        begins, ends = ((fields["text"] == token).sum(1) for token in (vocabulary.cls, vocabulary.sep))
        return float((begins > 1 if kind.full_rows else begins + ends > (3 if kind.head else 2)).mean())

    def _of_fields(self, number: int) -> FieldSamples:
        return cast("FieldSamples", self.components[number].samples)

    def _gather(self, numbers: Int64s, text: Int64s) -> Gathered:
        if self._alone:
            return self._gather_of(0, numbers, text)  # its numbers are the dataset's own
        components, inside = self.locate(numbers)
        parts = []
        for number in np.unique(components).tolist():
            rows = np.flatnonzero(components == number)
            parts.append((rows, self._gather_of(number, inside[rows], text, out_rows=rows)))
        return in_order(parts, len(numbers))

    def read_component(self, number: int, samples: npt.ArrayLike) -> Rows:
        """Samples of one component by their numbers inside it, integer[n]; of kinds whose samples are rows of text."""
        inside = sample_numbers(samples)
        rows = empty_rows(len(inside), self.row_options)
        return finish(rows, self._gather_of(number, inside, rows.text), options=self.row_options)

    def _gather_of(self, number: int, inside: Int64s, text: Int64s, *, out_rows: Int64s | None = None) -> Gathered:
        part = self.components[number]
        kind = cast("RowSamples", part.samples)
        with part.damage_check:
            return kind.gather(inside, text, out_rows=out_rows, threads=self.options.threads)

    @property
    def conversation_counts(self) -> list[int]:
        """Of kind `Pairs`: how many conversations the rows of each component have; of other kinds nothing."""
        return [part.num_pieces for part in self._pairs()]

    @property
    def pairs_left_out(self) -> int:
        """Of kind `Pairs`: how many pairs fit into no row; of other kinds 0."""
        return sum(part.documents[1] - part.documents[0] - part.num_pieces // 2 for part in self._pairs())

    def _pairs(self) -> list[PairSamples]:
        if not isinstance(self.options.kind, Pairs):
            return []
        return [cast("PairSamples", component.samples) for component in self.components]

    def mixture_changes(self, least: float) -> tuple[int, ...]:
        """First samples from which the shares of components differ by at least `least`; the first is 0.

        A ramp has one whenever its shares have moved that far.
        """
        from mdata.mixing.phased_blend import PhasedBlend

        return self.selection.changes(least) if isinstance(self.selection, PhasedBlend) else (0,)

    @property
    def continues(self) -> tuple[str, int] | None:
        """(id of the blend that this one continues, first sample that differs); None if it continues none."""
        return self._opened.continues

    @property
    def continued_blends(self) -> Mapping[str, int]:
        """Every blend that this one continues, through all its changes: id -> first sample that differs."""
        return self._opened.continued_blends

    @property
    def valid_sets(self) -> Mapping[str, tuple[Path, str]]:
        """The blend's named validation sets: name -> (path, id of the corpus or blend there)."""
        return self._opened.valid_sets

    @property
    def test_sets(self) -> Mapping[str, tuple[Path, str]]:
        """The blend's named test sets, in the same form; `evaluation_sets` opens both."""
        return self._opened.test_sets

    def read_as(self, options: DatasetOptions, *, progress: Progress = SILENT) -> Dataset:
        """The same corpora read with other options; nothing is opened again.

        Raises:
            UsageError: options that do not apply, or an empty split.
        """
        return Dataset(self._opened, options, cache=_cache_of(options, progress))

    @property
    def corpus_ids(self) -> tuple[str, ...]:
        """Ids of all corpora."""
        return tuple(corpus.id for corpus in self._corpora)

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the tokenizer; None if no corpus records it."""
        return next((c.tokenizer_fingerprint for c in self._corpora if c.tokenizer_fingerprint), None)

    @property
    def tokenizer_unknown(self) -> str:
        """ "ok" if the options or the blend's manifest allow corpora without a recorded tokenizer beside others."""
        allowed = may_be_unknown(self.options.tokenizer_unknown, self._opened.tokenizer_unknown)
        return OK if allowed else REFUSE

    @property
    def vocab_size(self) -> int | None:
        """Number of entries of the tokenizer; None if no corpus records it."""
        return next((c.tokenizer.vocab_size for c in self._corpora if c.tokenizer), None)

    @property
    def eod(self) -> int | None:
        """The end-of-document id; None if no corpus records it."""
        return next((corpus.eod for corpus in self._corpora if corpus.eod is not None), None)

    @property
    def largest_id(self) -> int | None:
        """The largest token id of all corpora; None if one of them does not record it."""
        largest_ids = [c.largest_id for c in self._corpora if c.num_tokens]
        return None if None in largest_ids else max((id for id in largest_ids if id is not None), default=None)

    @property
    def tokenizer(self) -> TokenizerFacts | None:
        """The tokenizer facts of the manifests, for the tokenizer of `tokenizer_files`; None if no corpus has them."""
        corpus = self._tokenizer_corpus
        return corpus.tokenizer if corpus else None

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Paths of the tokenizer's files; empty if it has none, or if no corpus keeps them.

        Raises:
            UsageError: the tokenizer's folder beside the corpus is missing.
        """
        corpus = self._tokenizer_corpus
        return corpus.tokenizer_files() if corpus else {}

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of `tokenizer_files`; None if it is unknown.

        Raises:
            DamageError: the files are not those that made the corpus.
        """
        corpus = self._tokenizer_corpus
        return corpus.load_tokenizer() if corpus else None

    @property
    def _tokenizer_corpus(self) -> Corpus | None:
        """The corpus whose tokenizer is used: one that keeps its files, otherwise one that names it."""
        with_tokenizer = [(c.tokenizer.folder is None, c) for c in self._corpora if c.tokenizer]
        return min(with_tokenizer, key=lambda pair: pair[0])[1] if with_tokenizer else None

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the texts of all corpora, in all splits; None if one of them does not record it."""
        sizes = [c.text_bytes for c in self._corpora]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def num_corpus_tokens(self) -> int:
        """Tokens of all corpora, in all splits: the divisor of `text_bytes`."""
        return sum(corpus.num_tokens for corpus in self._corpora)

    @property
    def _corpora(self) -> tuple[Corpus, ...]:
        return self._opened.corpora

    def __reduce__(self) -> tuple[object, ...]:
        # Pickled as separate bytes, so that garbage collection can be paused while they are loaded.
        return _unpacked, (pickle.dumps((self._opened, self.options), pickle.HIGHEST_PROTOCOL),)


def open_for(path: str | Path | Sequence[str], options: DatasetOptions, *, evaluation: bool = False) -> OpenBlend:
    """The corpora that a dataset with these options reads; the tables of an .idx are checked when they are first used.

    Raises:
        UsageError, DamageError: as `open_dataset`.
    """
    return open_blend(
        path,
        mode=options.mode,
        checked=False,
        tokenizer_unknown=options.tokenizer_unknown,
        allow_outside=options.allow_outside,
        evaluation=evaluation,
        cache=(options.cache, options.cache_size),
    )


def _cache_of(options: DatasetOptions, progress: Progress = SILENT) -> Cache:
    return Cache(options.cache, mapped=options.mode == "mmap", progress=progress)


def _unpacked(packed: bytes) -> Dataset:
    with gc_paused():
        return Dataset(*pickle.loads(packed))
