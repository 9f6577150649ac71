"""Fill in the middle: GPT samples in which a share of the documents is rearranged as prefix, suffix, middle.

A row of the GPT kind is split after each end of a document and rearranged by Megatron's rules (docs/howto/fim.md); then
it is cut, or padded without loss, to its length. In Megatron every read advances one generator; here the draws of
sample k come from its own stream, keyed by (seed, corpus id), so workers and resuming change no row. Positions are
drawn between characters (each part is tokenized again: Megatron's way) or between tokens (in C++, no tokenizer). Ids
that the tokenizer puts around every text, such as BOS, stay around a rearranged document; Megatron puts them around
each part. Slow twin: tests/reference/fim.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mdata._core import FimRule, KeyedStream, fim_rows
from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError
from mdata.samples.base import RowSamples, SamplePiece
from mdata.samples.rows import Gathered, RowOptions
from mdata.samples.sample_options import CHARACTER, FIM_VERSION, ROLES, Fim, Name
from mdata.tokenizers.base.tokenizer import TextRefused, Tokenizer, token_id
from mdata.util.arrays import Int64s
from mdata.util.pickling import PickledByArguments
from mdata.util.random_keys import derive_key

PURPOSE = f"fim sample v{FIM_VERSION}"
PAD_NAME = "<fim_pad>"


@dataclass(frozen=True, kw_only=True)
class FimIds:
    """The ids of the tokens in `Fim`; `dropped` ids are not text; `around`: ids that surround every text."""

    prefix: int
    middle: int
    suffix: int
    eod: int
    pad: int | None
    split: int | None
    untouched: tuple[int, ...]
    dropped: frozenset[int]
    around: frozenset[int]


class FimSamples(PickledByArguments, RowSamples):
    """The rearranged samples of another kind; can be pickled if that kind and the corpus can.

    Args:
        kind: the samples to rearrange; its options do not keep documents apart.
        corpus: its tokenizer is used, and its id keys the draws.
        fim: how documents are rearranged.
        options: which masks and positions rows have; `eod` is set.
        seed: the run's seed.
        extra_token: whether rows have one more token than inputs.

    Raises:
        UsageError: an id or the tokenizer is unknown.
    """

    def __init__(
        self,
        kind: RowSamples,
        corpus: Corpus,
        *,
        fim: Fim,
        options: RowOptions,
        seed: int,
        extra_token: bool = True,
    ) -> None:
        self.kind, self.corpus, self.fim, self.options = kind, corpus, fim, options
        self._longest = options.sequence_length + int(extra_token)
        key = derive_key(PURPOSE, seed, corpus.id)
        self._key = key.low, key.high
        named = (*fim.tokens, fim.split_sample, fim.no_prefix)
        wanted = fim.level == CHARACTER or any(isinstance(name, str) for name in named)
        tokenizer = _tokenizer_of(corpus, fim) if wanted else None
        self.ids = _resolve(fim, tokenizer, eod=options.eod)
        # Earlier versions dropped these ids, so the data id says that they are kept.
        self.keeps_ids_around = bool(self.ids.around)
        self._characters = _Characters(self.fim, self.ids, tokenizer) if fim.level == CHARACTER and tokenizer else None
        self._rule = FimRule(
            [self.ids.prefix, self.ids.middle, self.ids.suffix, self.ids.eod],
            self.ids.split,
            list(self.ids.untouched),
            fim.rate,
            fim.spm_rate,
            fim.fragment_rate or 0.0,
        )

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the corpus."""
        return self.kind.samples_per_epoch

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if endless."""
        return self.kind.num_samples

    def epochs(self, num_samples: int) -> float:
        """How many passes over the corpus this number of samples makes; tokens that are cut off count as read."""
        return self.kind.epochs(num_samples)

    def gather(self, samples: Int64s, text: Int64s, *, out_rows: Int64s | None = None, threads: int = 1) -> Gathered:
        """Fill rows with samples; see `RowSamples`."""
        counts = self.kind.gather(samples, text, out_rows=out_rows, threads=threads).counts
        rows = np.arange(len(samples), dtype=np.int64) if out_rows is None else out_rows
        fill = next(id for id in (self.ids.pad, self.options.pad, 0) if id is not None)
        if self._characters is None:
            counts = fim_rows(self._rule, self._key, samples, text, rows, counts, self._longest, fill)
        else:
            gathered = self._rearranged(samples, text, rows=rows, counts=counts)
            counts = np.minimum([len(ids) for ids in gathered], self._longest, dtype=np.int64)
            for place, count, ids in zip(rows.tolist(), counts.tolist(), gathered, strict=True):
                text[place, :count], text[place, count:] = ids[:count], fill
        return Gathered(counts, self._cuts(text, rows, counts) if self.options.document_masks else None)

    def _rearranged(self, samples: Int64s, text: Int64s, *, rows: Int64s, counts: Int64s) -> list[Int64s]:
        assert self._characters is not None, "asked for by its caller"
        before = [text[row, :count] for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]
        try:
            return self._characters.rows(before, [KeyedStream(*self._key, number) for number in samples.tolist()])
        except TextRefused as refused:
            raise UsageError(
                f"a part of a document of {self.corpus.name} cannot be tokenized",
                found=refused.reason,
                fix='fim_level="token"',
            ) from refused

    def _cuts(self, text: Int64s, rows: Int64s, counts: Int64s) -> tuple[Int64s, npt.NDArray[np.int32]]:
        """Documents begin after each end of a document; rearranged text contains no such end."""
        row, place = np.nonzero(text[rows, :-1] == self.ids.eod)
        inside = place + 1 < np.minimum(counts, self.options.sequence_length)[row]
        ends = np.cumsum(np.bincount(row[inside], minlength=len(rows))).astype(np.int64)
        return ends, (place[inside] + 1).astype(np.int32)

    def pieces(self, sample: int) -> list[SamplePiece]:
        """The sequences that a sample reads before they are rearranged; see `Samples`."""
        return self.kind.pieces(sample)

    def samples_of(self, sequence: int, *, first: int, stop: int) -> list[int]:
        """Samples that read a token of a sequence; see `Samples`. Tokens that are cut off count as read."""
        return self.kind.samples_of(sequence, first=first, stop=stop)


class _Characters:
    """Rearranges rows by characters: all draws are made first, then all parts are tokenized at once."""

    def __init__(self, fim: Fim, ids: FimIds, tokenizer: Tokenizer) -> None:
        self._fim, self._ids, self._tokenizer = fim, ids, tokenizer
        self._dropped, self._around = (np.array(sorted(some), np.int64) for some in (ids.dropped, ids.around))
        self._names = tuple(np.array([id], np.int64) for id in (ids.prefix, ids.middle, ids.suffix))

    def rows(self, rows: Sequence[Int64s], draws: Sequence[KeyedStream]) -> list[Int64s]:
        """The rearranged rows, of any length.

        Raises:
            TextRefused: a part has no ids.
        """
        texts: list[str] = []
        plans = [list(self._row(row, draw, texts)) for row, draw in zip(rows, draws, strict=True)]
        ids, lengths = self._tokenizer.encode_batch(texts)
        parts = [part[~np.isin(part, self._dropped)] for part in np.split(ids, np.cumsum(lengths)[:-1])]
        return [
            np.concatenate([parts[item] if isinstance(item, int) else item for item in plan], dtype=np.int64)
            for plan in plans
        ]

    def _row(self, row: Int64s, draws: KeyedStream, texts: list[str]) -> Iterator[Int64s | int]:
        """The parts of the new row, in order: ids, or the index of a text in `texts`."""
        for stretch, end in _stretches(row, self._ids.eod):
            yield from self._stretch(stretch, draws, texts)
            yield end

    def _stretch(self, ids: Int64s, draws: KeyedStream, texts: list[str]) -> Iterator[Int64s | int]:
        split = self._ids.split
        if split is None or not (ids == split).any():
            yield from self._permuted(ids, self._fim.rate, draws=draws, texts=texts)
        elif draws.real() < self._fim.rate:
            for fragment, end in _stretches(ids, split):
                yield from self._permuted(fragment, self._fim.fragment_rate or 0.0, draws=draws, texts=texts)
                yield end
        else:
            yield ids

    def _permuted(self, ids: Int64s, rate: float, *, draws: KeyedStream, texts: list[str]) -> Iterator[Int64s | int]:
        if draws.real() >= rate:
            yield ids
            return
        before, ids, after = self._inside(ids)
        text = self._tokenizer.decode(ids[~np.isin(ids, self._dropped)].tolist())
        if self._fim.no_prefix and text.startswith(self._fim.no_prefix):
            yield from (before, ids, after)
            return
        first, second = sorted((draws.up_to(len(text)), draws.up_to(len(text))))
        number = len(texts)
        texts += (text[:first], text[first:second], text[second:])
        prefix, middle, suffix = self._names
        yield before
        if draws.real() < self._fim.spm_rate:
            yield from (prefix, suffix, number + 2, middle, number, number + 1)
        else:
            yield from (prefix, number, suffix, number + 2, middle, number + 1)
        yield after

    def _inside(self, ids: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """The ids that the tokenizer put around the text, and the ids between them."""
        text = np.flatnonzero(~np.isin(ids, self._around))
        first, last = (text[0], text[-1] + 1) if len(text) else (len(ids), len(ids))
        return ids[:first], ids[first:last], ids[last:]


def _stretches(ids: Int64s, mark: int) -> Iterator[tuple[Int64s, Int64s]]:
    """The text before each mark, if any, with that mark; then the text after the last mark, even if empty."""
    start = 0
    for place in np.flatnonzero(ids == mark).tolist():
        if place > start:
            yield ids[start:place], ids[place : place + 1]
        start = place + 1
    yield ids[start:], ids[:0]


@dataclass(frozen=True)
class _TokenizerOf:
    """The tokenizer of a corpus, compared by the fields that decide its ids."""

    fingerprint: str | None
    corpus: Corpus = field(compare=False)


@lru_cache(maxsize=4)
def _shared(key: _TokenizerOf) -> Tokenizer | None:
    """Shared by all corpora of a blend: a tokenizer may take 100 MB, and a second to load."""
    return key.corpus.load_tokenizer()


def _tokenizer_of(corpus: Corpus, fim: Fim) -> Tokenizer:
    tokenizer = _shared(_TokenizerOf(corpus.tokenizer_fingerprint, corpus))
    if tokenizer is None:
        needed = "characters" if fim.level == CHARACTER else "the texts of tokens"
        raise UsageError(
            f"{corpus.name}: fill-in-the-middle by {needed} needs the tokenizer, and none is beside the corpus",
            fix='`mdata adopt --tokenizer-type`, or fim_level="token" and ids for fim_tokens',
        )
    return tokenizer


def _resolve(fim: Fim, tokenizer: Tokenizer | None, *, eod: int | None) -> FimIds:
    """Look up all ids.

    Raises:
        UsageError: an unknown id, or one with two meanings.
    """
    named: dict[str, Name] = dict(zip(ROLES, fim.tokens, strict=False))
    ids = {role: _id_of(name, tokenizer, option=f"the {role} of fim_tokens") for role, name in named.items()}
    ends = ids.get("eod", eod)
    if ends is None:
        raise UsageError(
            "fill-in-the-middle needs the id that ends a document, which the corpus does not record",
            fix="set eod, or `mdata adopt --tokenizer-type` gives the corpus a tokenizer",
        )
    split = None if fim.split_sample is None else _id_of(fim.split_sample, tokenizer, option="fim_split_sample")
    prefix, middle, suffix = (ids[role] for role in ROLES[:3])
    single = [prefix, middle, suffix, ends, *([] if split is None else [split])]
    if len(set(single)) < len(single):
        raise UsageError(
            "two tokens of fill-in-the-middle have the same id", found=f"ids {', '.join(map(str, single))}"
        )
    special = tokenizer.special_ids.values() if tokenizer else ()
    dropped = frozenset((*special, *single))
    pad = ids.get("pad", tokenizer.special_ids.get(PAD_NAME) if tokenizer else None)
    around: frozenset[int] = frozenset()
    if tokenizer and fim.level == CHARACTER:
        around = frozenset(_ids_of(tokenizer, "")).intersection(special).difference(single)
    untouched: tuple[int, ...] = ()
    if fim.no_prefix and tokenizer:
        untouched = tuple(id for id in _ids_of(tokenizer, fim.no_prefix) if id not in dropped)
    return FimIds(
        prefix=prefix,
        middle=middle,
        suffix=suffix,
        eod=ends,
        pad=pad,
        split=split,
        untouched=untouched,
        dropped=dropped,
        around=around,
    )


def _ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return list(map(int, tokenizer.encode_batch([text])[0]))
    except TextRefused as refused:
        raise UsageError(f"the tokenizer has no ids for {text[:60]!r}", found=refused.reason) from refused


def _id_of(name: Name, tokenizer: Tokenizer | None, *, option: str) -> int:
    id = name if isinstance(name, int) else None if tokenizer is None else token_id(tokenizer, name)
    if id is None or id < 0:
        raise UsageError(
            f"the tokenizer has no token for {option}",
            found=repr(name),
            fix="give an id, or a token that it has; nothing is added to a vocabulary",
        )
    return id
