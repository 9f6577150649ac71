"""Tokenizers that a tokenizer.json defines, or that can be written as one: what their types share.

Facts (ids of names, sizes) are read from the definition; the exact library is asked only where the
definition is not of the common byte-level kind, so that a worker process with a fast engine loads just that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np

from mdata.errors import UsageError
from mdata.tokenizers.base.text_growth import growth_of
from mdata.tokenizers.base.tokenizer import Announce, IdArray, LengthArray, Recipe, TextRefused
from mdata.tokenizers.base.tokenizer_json import (
    AddedToken,
    Definition,
    added_tokens,
    is_composed_only,
    model_vocabulary,
    split_pattern,
    surroundings,
    unknown_id,
    with_special_tokens,
)
from mdata.tokenizers.engines.libraries import EXACT, WORDPIECE, Engine, ExactEngine, FlatEngine, Ids
from mdata.tokenizers.engines.long_text import (
    PIECE_CHARS,
    can_cut,
    can_cut_at_blanks,
    cut,
    cut_at_blanks,
    encode_in_pieces,
    refuse_long,
)
from mdata.tokenizers.types.engine_fallback import routed
from mdata.tokenizers.types.engine_selection import choose, form_of, likely_engine

SPECIAL_IN_TEXT = ("special", "plain")
# Of special ids: as many are compared one by one, which is faster than a search.
_FEW_RUNS = 4


class DefinedTokenizer:
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`; types add `eod` and `fingerprint`.

    Args:
        files: what is kept beside a corpus.
        definition: the tokenizer.json, special tokens of the options not yet in it.
        options: as in the manifest: only those that differ from their defaults, but for what a type always names.
        engine: name of the library that gives the ids; taken as it is, see `checked`.
    """

    name: str

    def __init__(
        self, files: Mapping[str, bytes], definition: Definition, *, options: Mapping[str, Any], engine: str
    ) -> None:
        self.files = dict(files)
        self.options = dict(options)
        self.notes: tuple[str, ...] = ()
        self._plain = check_special_in_text(options.get("special_in_text", "special")) == "plain"
        self._add = bool(options.get("include_special_tokens", True))
        self._definition = with_special_tokens(definition, options.get("special_tokens", ()))
        # First of all, so that the library refuses what no reading of ours below is meant for.
        self._engine: Engine = self._exact if engine == EXACT else self._make(engine)
        self._added: list[AddedToken] = added_tokens(self._definition)
        self._around = surroundings(self._definition)
        simple = split_pattern(self._definition) is not None and is_composed_only(self._definition)
        self._cuttable = simple and self._around is not None and can_cut(self._added)
        self._cutter = cut
        if WORDPIECE in form_of(self._definition).engines and self._in_form:
            self._cuttable, self._cutter = can_cut_at_blanks(self._added), cut_at_blanks
        # A word that the model cannot spell has that id too, so it tells nothing about special tokens in a text.
        unknown = unknown_id(self._definition)
        self._special_runs = _runs([token.id for token in self._added if token.special and token.id != unknown])

    def checked(self, wanted: str, announce: Announce | None = None) -> Self:
        """This tokenizer, with the engine that is best or wanted; equality is shown before it is taken.

        Args:
            wanted: the name of an engine, or "auto".
            announce: see TokenizerSpec.

        Raises:
            UsageError: the exact library cannot read the definition, or the wanted engine cannot be had.
        """
        if announce is not None:
            likely = likely_engine(self._definition, wanted)
            announce(Recipe(self.name, dict(self.files), dict(self.options), likely))
        self._check_added()
        choice = choose(self._definition, self._exact, wanted=wanted, plain=self._plain)
        self._engine, self.notes = choice.engine, choice.notes
        return self

    def _check_added(self) -> None:
        """What we read out of the definition rests on it: the library has to number added tokens alike."""
        for token in self._added:
            found = self._exact.library.token_to_id(token.content)
            if found != token.id:
                raise UsageError(
                    f"the added token {token.content!r} has another id in this version of tokenizers",
                    found=f"{found}",
                    expected=f"{token.id}, the next one that is free",
                    fix="give the token an id of its own in the vocabulary",
                )

    @property
    def engine(self) -> str:
        """See the protocol."""
        return self._engine.name

    @cached_property
    def _in_form(self) -> bool:
        """Whether our own reading of the definition tells all facts."""
        return form_of(self._definition).obstacle(self._definition) is None

    @cached_property
    def vocab_size(self) -> int:
        """See the protocol."""
        if not self._in_form:
            return int(self._exact.library.get_vocab_size(with_added_tokens=True))
        vocabulary = model_vocabulary(self._definition)
        return len(vocabulary) + sum(token.content not in vocabulary for token in self._added)

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """See the protocol."""
        return {token.content: token.id for token in self._added if token.special}

    @cached_property
    def entries(self) -> Mapping[str, int]:
        """The text of every entry, added tokens included, and its id."""
        return {**model_vocabulary(self._definition), **self._ids_of_added}

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See the protocol."""
        try:
            if (
                isinstance(self._engine, FlatEngine)
                and self._around
                and all(len(text) <= PIECE_CHARS for text in texts)
            ):
                before, after = self._around if self._add else ((), ())
                return self._engine.encode_flat(texts, before=before, after=after)
            return self._assembled(self._encode(texts))
        except (UnicodeEncodeError, TypeError):
            for index, text in enumerate(texts):
                _refuse_surrogates(index, text)
            raise

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol."""
        found = self._count_special(ids)
        return found - num_texts * self._num_special_added if found else 0

    def _count_special(self, ids: IdArray) -> int:
        def count(first: int, last: int) -> int:
            inside = ids == first if first == last else (ids >= first) & (ids <= last)
            return int(np.count_nonzero(inside))

        if len(self._special_runs) <= _FEW_RUNS:
            return sum(count(first, last) for first, last in self._special_runs)
        # Inside of a run an odd number of edges lies at or before an id.
        edges = np.array([edge for first, last in self._special_runs for edge in (first, last + 1)])
        return int(np.count_nonzero(np.searchsorted(edges, ids, side="right") % 2))

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol."""
        return str(self._exact.library.decode([int(id) for id in ids], skip_special_tokens=False))

    def id_of(self, text: str) -> int | None:
        """The id of an entry by its name."""
        found = self._ids_of_added.get(text)
        return model_vocabulary(self._definition).get(text) if found is None else found

    @cached_property
    def _ids_of_added(self) -> Mapping[str, int]:
        return {token.content: token.id for token in self._added}

    @cached_property
    def _exact(self) -> ExactEngine:
        return ExactEngine(self._definition, plain=self._plain)

    def _make(self, engine: str) -> Engine:
        try:
            return routed(engine, self._definition, plain=self._plain, exact=lambda: self._exact)
        except (ImportError, KeyError) as error:
            raise UsageError(f"tokenizer engine {engine} is not installed here", found=str(error)) from error

    @cached_property
    def _growth(self) -> float:
        """How many characters rules of the tokenizer may make of one."""
        return growth_of(self._definition)

    @cached_property
    def _num_special_added(self) -> int:
        """How many special ids the post-processor puts around a text."""
        return self._count_special(self._assembled(self._encode([""]))[0])

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._around is None:
            refuse_long(texts, self._growth)
            return self._exact.encode_with(texts, add_special_tokens=self._add)
        cutter = self._cutter if self._cuttable else None
        return encode_in_pieces(self._engine, texts, cutter=cutter, growth=self._growth)

    def _assembled(self, arrays: list[Ids]) -> tuple[IdArray, LengthArray]:
        """The arrays of the texts as one, with what stands around every text."""
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        if self._around is not None and self._add and any(self._around):
            before, after = (np.array(ids, dtype=np.uint32) for ids in self._around)
            arrays = [part for ids in arrays for part in (before, ids, after)]
            lengths += len(before) + len(after)
        # One long text is not copied once more.
        joined = arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, dtype=np.uint32), *arrays])
        assert joined.dtype == np.uint32, f"an engine gave {joined.dtype}"
        # Ids are below 2**31, so the bytes of an unsigned array are those of a signed one.
        return joined.view(np.int32), lengths


def check_special_in_text(value: object) -> str:
    """The value, if it is one that `special_in_text` may have.

    Raises:
        UsageError: it is not.
    """
    if value not in SPECIAL_IN_TEXT:
        raise UsageError(f"special_in_text={value!r}", expected=f"one of {', '.join(SPECIAL_IN_TEXT)}")
    return str(value)


def _refuse_surrogates(index: int, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextRefused(index, f"a lone surrogate at character {error.start}") from error


def _runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Ids as runs (first, last) of neighbours."""
    runs: list[tuple[int, int]] = []
    for id in sorted(set(ids)):
        if runs and runs[-1][1] == id - 1:
            runs[-1] = (runs[-1][0], id)
        else:
            runs.append((id, id))
    return runs
