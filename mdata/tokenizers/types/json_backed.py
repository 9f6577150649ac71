"""Shared code of types that are defined by a tokenizer.json, or can be converted to one.

Facts (ids of names, sizes) are read from the definition. The exact library is used for them only if the definition
belongs to no family with faster engines, so a worker process with a fast engine loads only that engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from mdata.errors import UsageError
from mdata.tokenizers.base.helpers import AUTO, plain_special_tokens, refuse_surrogates
from mdata.tokenizers.base.text_growth import growth_of
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray
from mdata.tokenizers.base.tokenizer_json import (
    AddedToken,
    Definition,
    added_tokens,
    model_vocabulary,
    surrounding_ids,
    unknown_id,
    with_special_tokens,
)
from mdata.tokenizers.engines.libraries import EXACT, ExactEngine, FlatEngine, Ids, TokenizerEngine
from mdata.tokenizers.engines.long_text import PART_CHARS, encode_long_texts, refuse_long
from mdata.tokenizers.types.engine_selection import family_of, make_engine, select_engine

# Up to this many runs of special ids are compared one by one, which is faster than a search.
_FEW_RUNS = 4


class JsonTokenizer:
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`; types add `eod` and `fingerprint`.

    Args:
        files: the files that are kept beside a corpus.
        definition: the tokenizer.json, without the special tokens of the options.
        options: as in the manifest: those that differ from their defaults, and those that a type always records.
        engine: name of the library that computes the ids; it is not compared with the exact one.
    """

    name: str

    def __init__(
        self, files: Mapping[str, bytes], definition: Definition, *, options: Mapping[str, Any], engine: str
    ) -> None:
        self.files = dict(files)
        self.options = dict(options)
        self.notes: tuple[str, ...] = ()
        self._plain = plain_special_tokens(options)
        self._add = bool(options.get("include_special_tokens", True))
        self._definition = with_special_tokens(definition, options.get("special_tokens", ()))
        # First, so that the library refuses a definition that the functions below cannot read.
        self._engine: TokenizerEngine = self._exact if engine == EXACT else self._make(engine)
        self._added: list[AddedToken] = added_tokens(self._definition)
        self._surrounding = surrounding_ids(self._definition)
        self._family = family_of(self._definition)
        self._splitter = self._family.text_splitter(self._definition)
        # A word that the model cannot spell has that id too, so the id does not prove a special token in the text.
        unknown = unknown_id(self._definition)
        self._special_runs = _runs([token.id for token in self._added if token.special and token.id != unknown])

    @property
    def definition(self) -> Definition:
        """The tokenizer.json with the special tokens of the options."""
        return self._definition

    def likely_engine(self, wanted: str) -> str:
        """See SelectsEngine."""
        return next(iter(self._family.engines)) if wanted == AUTO else wanted

    def select_engine(self, wanted: str) -> None:
        """See SelectsEngine."""
        self._check_added()
        self._engine, notes = select_engine(self._definition, self._exact, wanted=wanted, plain=self._plain)
        self.notes = (*notes, *self._file_notes())

    def _file_notes(self) -> list[str]:
        """Notes for the user about the files."""
        return []

    def _check_added(self) -> None:
        """Check that the library numbers added tokens as `added_tokens` does."""
        for token in self._added:
            library_id = self._exact.library.token_to_id(token.content)
            if library_id != token.id:
                raise UsageError(
                    f"the added token {token.content!r} has another id in this version of tokenizers",
                    found=f"{library_id}",
                    expected=f"{token.id}, the next one that is free",
                    fix="give the token an id of its own in the vocabulary",
                )

    @property
    def engine(self) -> str:
        """See the protocol."""
        return self._engine.name

    @cached_property
    def vocab_size(self) -> int:
        """See the protocol."""
        if self._family.unsupported(self._definition) is not None:
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
            short = all(len(text) <= PART_CHARS for text in texts)
            if short and self._surrounding is not None and isinstance(self._engine, FlatEngine):
                before, after = self._surrounding if self._add else ((), ())
                return self._engine.encode_flat(texts, before=before, after=after)
            return self._assembled(self._encode(texts))
        except (UnicodeEncodeError, TypeError):
            refuse_surrogates(texts)
            raise

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol."""
        count = self._count_special(ids)
        return count - num_texts * self._num_special_added if count else 0

    def _count_special(self, ids: IdArray) -> int:
        def count(first: int, last: int) -> int:
            inside = ids == first if first == last else (ids >= first) & (ids <= last)
            return int(np.count_nonzero(inside))

        if len(self._special_runs) <= _FEW_RUNS:
            return sum(count(first, last) for first, last in self._special_runs)
        # For an id inside a run, the number of edges at or before it is odd.
        edges = np.array([edge for first, last in self._special_runs for edge in (first, last + 1)])
        return int(np.count_nonzero(np.searchsorted(edges, ids, side="right") % 2))

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol."""
        return str(self._exact.library.decode([int(id) for id in ids], skip_special_tokens=False))

    def id_of(self, text: str) -> int | None:
        """The id of an entry by its name."""
        added_id = self._ids_of_added.get(text)
        return model_vocabulary(self._definition).get(text) if added_id is None else added_id

    @cached_property
    def _ids_of_added(self) -> Mapping[str, int]:
        return {token.content: token.id for token in self._added}

    @cached_property
    def _exact(self) -> ExactEngine:
        return ExactEngine(self._definition, plain=self._plain)

    def _make(self, engine: str) -> TokenizerEngine:
        try:
            return make_engine(engine, self._definition, plain=self._plain, exact=lambda: self._exact)
        except (ImportError, KeyError) as error:
            raise UsageError(f"tokenizer engine {engine} is not installed here", found=str(error)) from error

    @cached_property
    def _growth(self) -> float:
        """How many characters the tokenizer's rules may make of one."""
        return growth_of(self._definition)

    @cached_property
    def _num_special_added(self) -> int:
        """Number of special ids that the post-processor puts around a text."""
        return self._count_special(self._assembled(self._encode([""]))[0])

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._surrounding is None:
            refuse_long(texts, self._growth)
            return self._exact.encode_with(texts, add_special_tokens=self._add)
        return encode_long_texts(self._engine, texts, splitter=self._splitter, growth=self._growth)

    def _assembled(self, arrays: list[Ids]) -> tuple[IdArray, LengthArray]:
        """The arrays of the texts joined, with the ids that are put around every text."""
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        if self._surrounding is not None and self._add and any(self._surrounding):
            before, after = (np.array(ids, dtype=np.uint32) for ids in self._surrounding)
            arrays = [part for ids in arrays for part in (before, ids, after)]
            lengths += len(before) + len(after)
        # Avoids another copy of a single long text.
        joined = arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, dtype=np.uint32), *arrays])
        assert joined.dtype == np.uint32, f"an engine gave {joined.dtype}"
        # Ids are below 2**31, so unsigned and signed arrays have the same bytes.
        return joined.view(np.int32), lengths


@contextmanager
def errors_name(path: str) -> Iterator[None]:
    """Prefix errors inside the block with the path."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Ids as runs (first, last) of neighbours."""
    runs: list[tuple[int, int]] = []
    for id in sorted(set(ids)):
        if runs and runs[-1][1] == id - 1:
            runs[-1] = (runs[-1][0], id)
        else:
            runs.append((id, id))
    return runs
