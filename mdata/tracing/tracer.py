"""From a sample of training back to documents, files and rows; and from a document to the samples that read it.

`Tracer(dataset)` takes an open dataset and, for steps, the `Steps` of a run. If the order is arithmetic, so are both
directions: no pass over the run. Megatron's order and packed rows are searched in their arrays. A sample is traced as
it is before fill-in-the-middle or masking changes it. Run folders are read in mdata/tracing/run_folder.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mdata.corpus.corpus import Corpus
from mdata.corpus.documents import DocumentReader, Origin
from mdata.dataset.component import Component
from mdata.dataset.dataset import Dataset
from mdata.dataset.dataset_options import MegatronOrder
from mdata.errors import UsageError, counted, few
from mdata.samples.base import SamplePiece
from mdata.samples.sample_options import Gpt, TextKind
from mdata.tokenizers.base.tokenizer import Tokenizer
from mdata.tracing.eval_steps import EvaluationSteps
from mdata.tracing.run_record import SampleRanges, in_ranges
from mdata.tracing.run_steps import StepPlace, Steps
from mdata.util.option_synonyms import nearest

_EPOCHS_LOOKED_AT = 3


@dataclass(frozen=True, kw_only=True)
class TracedPart:
    """A run of tokens of one document inside a sample.

    Attributes:
        first: its position in the sample. count: number of tokens.
        document: number in the corpus. in_document: position of its first token in the document.
        sequences: the sequences [first, last] of the corpus that contain it. shard: prefix of their files.
        origin: file and row; None if unknown.
        pieces: the same by sequence.
    """

    first: int
    count: int
    document: int
    in_document: int
    sequences: tuple[int, int]
    shard: Path
    origin: Origin | None
    pieces: tuple[SamplePiece, ...]


@dataclass(frozen=True, kw_only=True)
class TracedSample:
    """A sample and everything that it reads.

    Attributes:
        sample: its number. component: number of its corpus in the dataset; name: of the component.
        inside: which of the component's samples it is. epoch: of the component; None if epochs are mixed.
        parts: in the order of the sample.
        place: step, row and rank, if the steps are known and one reads it.
        again: later places, if a sampler or an evaluation reads a sample more than once.
        skipped: whether data.json records it as skipped; steps done before that were trained on it.
    """

    sample: int
    component: int
    name: str
    inside: int
    epoch: int | None
    parts: tuple[TracedPart, ...]
    place: StepPlace | None = None
    again: tuple[StepPlace, ...] = ()
    skipped: bool = False

    def part_at(self, place: int) -> TracedPart | None:
        """The part that contains the token at a position of the sample; None for padding."""
        return next((part for part in self.parts if part.first <= place < part.first + part.count), None)


class Tracer:
    """Traces samples of a dataset.

    Args:
        dataset: the training data.
        steps: when samples are read; None: samples have no steps.
        skip: samples that are not trained on, see `RunRecord`.
    """

    def __init__(
        self, dataset: Dataset, steps: Steps | EvaluationSteps | None = None, *, skip: SampleRanges = ()
    ) -> None:
        self.dataset, self.steps, self.skip = dataset, steps, skip
        self.documents = lru_cache(maxsize=64)(self._open_documents)
        self._tokenizers: dict[str, Tokenizer | None] = {}

    @property
    def num_samples(self) -> int | None:
        """Samples that the run reads, or that the dataset has; None if endless."""
        ends = [self.steps.num_samples if self.steps else None, self.dataset.num_samples]
        return min((end for end in ends if end is not None), default=None)

    @property
    def exact(self) -> bool:
        """Whether a sample's tokens are exactly those of its parts, at the same positions."""
        kind = self.dataset.options.kind
        return isinstance(kind, TextKind) and not (isinstance(kind, Gpt) and kind.fim)

    def sample(self, number: int) -> TracedSample:
        """Trace a sample.

        Raises:
            UsageError: there is no such sample.
        """
        self._check(number)
        (component,), (inside,) = (part.tolist() for part in self.dataset.locate([number]))
        place, *again = [*(self.steps.places(number) if self.steps else ())] or [None]
        return replace(self._traced(number, component, inside), place=place, again=tuple(again))

    def token(self, number: int) -> tuple[TracedSample, int]:
        """The sample that has token `number` of training as an input, and the token's position there.

        Tokens are counted as they are read, sample by sample: token t is at position t mod S of sample t div S.

        Raises:
            UsageError: there is no such token.
        """
        position, place = divmod(number, self.dataset.options.sequence_length)
        end = self.num_samples if self.steps is None or self.steps.consecutive else None
        if number < 0 or (end is not None and position >= end):
            tokens = None if end is None else end * self.dataset.options.sequence_length
            raise UsageError(
                f"there is no token {number}", expected="0 or more" if tokens is None else f"0 to {tokens - 1:,}"
            )
        return self.sample(position if self.steps is None else self.steps.sample_at(position)), place

    def step(self, step: int, *, dp_rank: int | None = None) -> npt.NDArray[np.int64]:
        """The samples of a step, of all ranks or of one, in the order of the rows: int64[n].

        Raises:
            UsageError: no such step or rank, or steps or ranks are unknown.
        """
        samples = self._known_steps.rows(step)
        self._check(int(samples.max()))
        return samples[self.rows(step, dp_rank=dp_rank)]

    def rows(self, step: int, *, dp_rank: int | None = None) -> npt.NDArray[np.int64]:
        """The numbers of the rows of `step`: int64[n].

        Raises:
            UsageError: as `step`.
        """
        steps = self._known_steps
        if dp_rank is None:
            return np.arange(len(steps.rows(step)))
        micro_batch, dp_size = steps.batch_shape(step)
        if micro_batch is None or dp_size is None:
            raise UsageError("the rank that reads a sample is not known", fix="--micro-batch and --dp")
        if not 0 <= dp_rank < dp_size:
            raise UsageError(
                f"no rank {dp_rank} has rows of step {step}",
                found=counted(dp_size, "data-parallel rank"),
                expected=f"0 to {dp_size - 1}",
            )
        return steps.rank_rows(step, dp_rank)

    def row(self, step: int, row: int) -> TracedSample:
        """Trace the sample in a row of a step.

        Raises:
            UsageError: no such step, or steps are unknown.
        """
        steps = self._known_steps
        sample = int(steps.rows(step)[row])
        return replace(self.sample(sample), place=steps.place_at(step, row), again=())

    @property
    def _known_steps(self) -> Steps | EvaluationSteps:
        if self.steps is None:
            raise UsageError("steps are not known", fix="a run folder, or --global-batch")
        return self.steps

    def counts(self, samples: npt.ArrayLike) -> dict[str, int]:
        """How many of these samples each component gives, without those that give none."""
        components, _ = self.dataset.locate(samples)
        counts = np.bincount(components, minlength=len(self.dataset.components)).tolist()
        names = [component.name for component in self.dataset.components]
        return {name: count for name, count in zip(names, counts, strict=True) if count}

    def component(self, name: str | None) -> int:
        """The number of a component by its name; None: the only one.

        Raises:
            UsageError: no such name, or several components and no name.
        """
        names = [component.name for component in self.dataset.components]
        if name is None and len(names) == 1:
            return 0
        if name in names:
            return names.index(name)
        close = nearest(name, names) if name else None
        raise UsageError(
            "no component is given, and there are several" if name is None else f"there is no component {name}",
            expected=few(names),
            fix="--component NAME" if name is None else f"{close}?" if close else None,
        )

    def readers(
        self, component: int, document: int, *, until: int | None = None, until_step: int | None = None
    ) -> Iterator[TracedSample]:
        """The samples that read a token of a document, each time they are read, with only the parts of that document.

        In ascending order of samples, or of steps if samples are not read in order.

        Args:
            component: number of the corpus in the dataset.
            document: its number in the corpus.
            until: samples below this one; None: all, or for endless training the first three epochs of the component.
            until_step: up to this step, if steps are known.

        Raises:
            UsageError: no such document, or it is not in the split.
        """
        part = self.dataset.components[component]
        if not 0 <= document < part.corpus.num_documents:
            raise UsageError(
                f"{part.name} has no document {document}", expected=f"one of the {part.corpus.num_documents}, from 0"
            )
        samples = self._reading(component, document, stop=self._stop(component, until))
        if self.steps is None:
            yield from samples
            return
        steps = self.steps
        each = (replace(sample, place=place) for sample in samples for place in steps.places(sample.sample, until_step))
        yield from each if steps.consecutive else sorted(each, key=_when)

    def _reading(self, component: int, document: int, *, stop: int) -> Iterator[TracedSample]:
        """The samples that read a document, in ascending order, without their places."""
        part = self.dataset.components[component]
        sequences = range(*part.corpus.sequences_of(document))
        for inside in self._inside(part, document, stop=stop):
            try:
                number = int(self.dataset.selection.inverse([component], [inside])[0])
            except IndexError:  # the mixture never gets that far
                return
            yield self._traced(number, component, inside, sequences=sequences)

    def tokens(self, component: int, part: TracedPart) -> npt.NDArray[np.int64]:
        """The ids of a part: int64[count]."""
        corpus = self.dataset.components[component].corpus
        tokens = [np.empty(0, np.int64)]
        for piece in part.pieces:
            shard, inside = corpus.locate_sequence(piece.sequence)
            sequence = corpus.readers[shard].sequence(inside)
            tokens.append(sequence[piece.first : piece.first + piece.length].astype(np.int64))
        return np.concatenate(tokens)

    def text(self, component: int, part: TracedPart) -> str | None:
        """The text of a part; None if the tokenizer is unknown.

        Raises:
            DamageError: the tokenizer beside the corpus is not the one that made the ids.
        """
        corpus = self.dataset.components[component].corpus
        name = corpus.tokenizer_fingerprint or corpus.id
        if name not in self._tokenizers:
            self._tokenizers[name] = corpus.load_tokenizer()
        tokenizer = self._tokenizers[name]
        return None if tokenizer is None else tokenizer.decode(self.tokens(component, part).tolist())

    def _traced(self, number: int, component: int, inside: int, sequences: range | None = None) -> TracedSample:
        """A traced sample with only the parts in these sequences; None: all."""
        part = self.dataset.components[component]
        with part.damage_check:
            return TracedSample(
                sample=number,
                component=component,
                name=part.name,
                inside=inside,
                epoch=self._epoch(part, inside),
                parts=tuple(self._parts(component, part.samples.pieces(inside), sequences)),
                skipped=bool(in_ranges(number, self.skip)),
            )

    def _check(self, number: int) -> None:
        end = self.num_samples
        if number < 0 or (end is not None and number >= end):
            run = self.steps is not None and self.steps.consecutive and self.steps.total is not None
            whose = "the run" if run else "the dataset"
            raise UsageError(
                f"{whose} has no sample {number}",
                found=None if end is None else f"{counted(end, 'sample')}, counted from 0",
            )

    def _epoch(self, part: Component, inside: int) -> int | None:
        if isinstance(self.dataset.options.order, MegatronOrder):
            return None
        return inside // part.samples.samples_per_epoch if part.samples.num_samples is None else 0

    def _parts(self, component: int, pieces: Sequence[SamplePiece], sequences: range | None) -> Iterator[TracedPart]:
        corpus = self.dataset.components[component].corpus
        run, first = list[SamplePiece](), 0
        # A sample of an empty document has no pieces.
        for piece, following in zip(pieces, [*pieces[1:], None], strict=False):
            if sequences is not None and piece.sequence not in sequences:
                first += piece.length
                continue
            run.append(piece)
            if following is not None and _goes_on(corpus, piece, following):
                continue
            yield self._part(component, corpus, run=run, first=first)
            first += sum(member.length for member in run)
            run = []

    def _part(self, component: int, corpus: Corpus, *, run: list[SamplePiece], first: int) -> TracedPart:
        document = corpus.document_of(run[0].sequence)
        before = range(corpus.sequences_of(document)[0], run[0].sequence)
        shard, _ = corpus.locate_sequence(run[0].sequence)
        return TracedPart(
            first=first,
            count=sum(piece.length for piece in run),
            document=document,
            in_document=sum(map(corpus.length_of, before)) + run[0].first,
            sequences=(run[0].sequence, run[-1].sequence),
            shard=corpus.readers[shard].bin_path.with_suffix(""),
            origin=self.documents(component).origin(document),
            pieces=tuple(run),
        )

    def _stop(self, component: int, until: int | None) -> int:
        """One past the last sample of a component that is searched."""
        ends = [end for end in (until, self.num_samples) if end is not None]
        if ends:
            return self.dataset.selection.counts(min(ends))[component]
        return _EPOCHS_LOOKED_AT * self.dataset.components[component].samples.samples_per_epoch

    def _inside(self, part: Component, document: int, *, stop: int) -> Iterator[int]:
        """A component's own samples below `stop` that read a document, ascending."""
        sequences = self._in_split(part, document)
        endless = part.samples.num_samples is None
        first, length = 0, part.samples.samples_per_epoch if endless else stop
        while first < stop:
            end = min(stop, first + length)
            samples: set[int] = set()
            with part.damage_check:
                for sequence in sequences:
                    samples.update(part.samples.samples_of(sequence, first=first, stop=end))
            yield from sorted(samples)
            first = end

    def _in_split(self, part: Component, document: int) -> list[int]:
        """The sequences of a document that are in the split, whose edge may divide a document.

        Raises:
            UsageError: none of them.
        """
        sequences, inside = range(*part.corpus.sequences_of(document)), []
        for sequence in sequences:
            try:
                part.samples.samples_of(sequence, first=0, stop=0)
            except IndexError:
                continue
            inside.append(sequence)
        if sequences and not inside:
            raise UsageError(
                f"document {document} of {part.name} is not read",
                found=f"split {self.dataset.options.split!r} of {self.dataset.options.split_shares!r}",
                expected="a document in that part of the corpus",
            )
        return inside

    def _open_documents(self, component: int) -> DocumentReader:
        return DocumentReader(self.dataset.components[component].corpus)


def _when(sample: TracedSample) -> tuple[int, int]:
    assert sample.place is not None, "it is read"
    return sample.place.step, sample.place.row


def _goes_on(corpus: Corpus, piece: SamplePiece, following: SamplePiece) -> bool:
    """Whether a piece is directly followed by the next one in the same document and shard."""
    if following.first or piece.first + piece.length < corpus.length_of(piece.sequence):
        return False
    between = range(piece.sequence + 1, following.sequence)
    if following.sequence <= piece.sequence or any(map(corpus.length_of, between)):
        return False
    return corpus.document_of(piece.sequence) == corpus.document_of(following.sequence)
