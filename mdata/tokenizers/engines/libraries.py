"""The engines for a tokenizer.json, with one interface: texts in, one array of ids for each.

`tokenizers` is the exact engine: it reads every tokenizer.json, and its ids are right by definition. The others are
used only if mdata/tokenizers/types/engine_selection.py found them equal. None of them adds ids around a text. gigatoken
caches every word; after growing by _MAX_GROWTH_BYTES it is rebuilt, so a process stays small for any amount of text;
its results are copied, because each holds a large buffer. Measured with gigatoken 0.10: it grew by 60 MB over 430 MB of
prose and code, by less than 144 over 1,755 MB of C sources, by 10 MB for every MB of random words; rebuilding takes 0.1
to 0.2 s and empties the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mdata.errors import UsageError
from mdata.tokenizers.base.byte_level import ALPHABET, FOR_TIKTOKEN, to_bytes
from mdata.tokenizers.base.helpers import batches
from mdata.tokenizers.base.text_growth import refuse_growth
from mdata.tokenizers.base.token_matching import pattern_of_any
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TextRefused, indices_in_batch
from mdata.tokenizers.base.tokenizer_json import (
    Definition,
    added_tokens,
    merge_parts,
    split_pattern,
    without_special_tokens,
)
from mdata.util.machine_limits import resident_bytes
from mdata.util.stop_signals import LibraryError, library_errors

EXACT = "tokenizers"

# A batch of the exact library takes 350 bytes of memory per token until it is converted to an array.
_EXACT_BATCH_CHARS = 256 << 10
# With 96 as with 144 a process had at most 360 MB over 100 MB of random words, with 160 it had 565. Over 300 and
# 534 MB of tiny distinct documents a worker had 520 MB at its peak.
_MAX_GROWTH_BYTES = 144 << 20
_CHECK_EVERY_CHARS = 1 << 20
# If memory is not returned, rebuilding again and again would not help.
_MIN_CHARS_OF_ONE = 8 << 20

Ids = npt.NDArray[np.uint32]


class TokenizerEngine(Protocol):
    """One library with one tokenizer."""

    name: str

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without added ids.

        Raises:
            TextRefused: the library fails on a text.
        """


@runtime_checkable
class FlatEngine(TokenizerEngine, Protocol):
    """An engine that gives the ids of a batch as one array."""

    def encode_flat(
        self, texts: Sequence[str], *, before: Sequence[int], after: Sequence[int]
    ) -> tuple[IdArray, LengthArray]:
        """The ids of all texts, with `before` and `after` around each, and the number of ids of each."""


EngineMaker = Callable[..., TokenizerEngine]
"""Called as (definition, plain=..., exact=...); `exact` makes the exact engine, for texts that need it."""


@dataclass(frozen=True, kw_only=True)
class EngineFamily:
    """Tokenizers of one kind, and the faster engines for them.

    Args:
        matches: whether a tokenizer.json is of this kind, by its model.
        unsupported: why no fast engine supports a given tokenizer.json, judged by its structure; None: supported.
        engines: name -> constructor, the fastest first.
        unsupported_by: name -> the same for a single engine; also receives the exact engine.
        self_check_texts: (entries in the order of their ids, added tokens) -> texts for which ids are compared.
        text_splitter: splits long texts of a given tokenizer without changing an id; None: they are not split.
        compare_words: (engine, exact engine) -> a text that they split into different words, if there is one.
    """

    matches: Callable[[Definition], bool]
    unsupported: Callable[[Definition], str | None]
    engines: Mapping[str, EngineMaker]
    unsupported_by: Mapping[str, Callable[[Definition, Any], str | None]] = field(default_factory=dict)
    self_check_texts: Callable[[Sequence[str], Sequence[str]], list[str]]
    text_splitter: Callable[[Definition], Callable[..., Iterator[str]] | None]
    compare_words: Callable[[Any, Any], str | None] | None = None


class ExactEngine:
    """The `tokenizers` library, which also decodes."""

    name = EXACT

    def __init__(self, definition: Definition, *, plain: bool) -> None:
        self.library = _load_tokenizers_library(definition)
        self.library.encode_special_tokens = plain

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See `TokenizerEngine`."""
        return self.encode_with(texts, add_special_tokens=False)

    def encode_with(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Ids]:
        """The same, with the ids that the post-processor adds.

        Raises:
            TextRefused: the library fails on a text.
        """
        out: list[Ids] = []
        for start, stop in batches(texts, _EXACT_BATCH_CHARS):
            out += self._encode_each(texts[start:stop], start, special=add_special_tokens)
        return out

    def _encode_each(self, texts: Sequence[str], first: int, *, special: bool) -> list[Ids]:
        """The ids of texts; `first` is the index of the first text in its batch."""
        try:
            return self._call(texts, special=special)
        except TextRefused:
            out = []
            for index, text in enumerate(texts, first):
                with indices_in_batch([index]):
                    out += self._call([text], special=special)
            return out

    def _call(self, texts: Sequence[str], *, special: bool) -> list[Ids]:
        try:
            # The caller explains errors in the text itself.
            with library_errors(passed=(UnicodeEncodeError, TypeError)):
                # The fast call leaves out character offsets, which are not needed.
                batch = self.library.encode_batch_fast(list(texts), add_special_tokens=special)
        except LibraryError as error:
            raise TextRefused(0, f"the tokenizers library fails on this text: {error}") from error
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in batch]


def _load_tokenizers_library(definition: Definition) -> Any:
    from tokenizers import Tokenizer as Library

    refuse_growth(definition)
    try:
        with library_errors(chars=300):
            library = Library.from_buffer(as_json(definition))
    except LibraryError as error:
        raise UsageError("tokenizer.json is not a tokenizer", found=str(error)) from error
    _refuse_empty_added(library, definition)
    library.no_truncation()
    library.no_padding()
    return library


def _refuse_empty_added(library: Any, definition: Definition) -> None:
    """Refuse an added token that normalizes to nothing: the library would match it everywhere, endlessly."""
    normalizer = library.normalizer
    for token in added_tokens(definition) if normalizer is not None else ():
        if token.normalized and not normalizer.normalize_str(token.content):
            raise UsageError(
                f"tokenizer.json: its normalizer turns the added token {token.content[:60]!a} into nothing",
                found=f"id {token.id}, matched in normalized text",
                fix='set "normalized" of the token to false, or remove it',
            )


class GigatokenEngine:
    """The Rust engine gigatoken, called with one text at a time: its batches need another library for their arrays."""

    name = "gigatoken"

    def __init__(self, definition: Definition, *, plain: bool) -> None:
        self._json = as_json(without_special_tokens(definition) if plain else definition)
        self._encode = self._load()
        # Set after a first batch, so that what the caller allocates before is not counted as growth.
        self._bytes_before: int | None = None
        self._chars_left = _CHECK_EVERY_CHARS

    def _load(self) -> Callable[[str], Ids]:
        from gigatoken.gigatoken_rs import load_hf_json

        encode: Callable[[str], Ids] = load_hf_json(self._json).encode
        return encode

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See `TokenizerEngine`."""
        encode = self._encode
        # Each result holds a buffer of some kilobytes, however short the text: a batch of tiny texts took a gigabyte.
        out = [encode(text).copy() for text in texts]
        self._chars_left -= sum(map(len, texts))
        if self._chars_left <= 0:
            self._chars_left = _CHECK_EVERY_CHARS
            if self._bytes_before is None:
                self._bytes_before = resident_bytes()
            elif resident_bytes() - self._bytes_before > _MAX_GROWTH_BYTES:
                # Free the old one before the new one allocates memory.
                del encode, self._encode
                self._encode = self._load()
                self._chars_left = _MIN_CHARS_OF_ONE
        return out


class TiktokenEngine:
    """OpenAI's tiktoken with ranks in the order of the merges."""

    name = "tiktoken"

    def __init__(self, definition: Definition, *, plain: bool) -> None:
        import tiktoken

        vocabulary = definition["model"]["vocab"]
        added = added_tokens(definition)
        special = {token.content: token.id for token in added if not (plain and token.special)}
        ids = np.array(_ids_in_merge_order(definition), dtype=np.uint32)
        names = {id: name for name, id in vocabulary.items()}
        ranks = {to_bytes(names[id]): rank for rank, id in enumerate(ids.tolist())}
        # Ranks are positions; ids are looked up afterwards, special ones after the last rank.
        self._ids = np.concatenate([ids, np.array(list(special.values()), dtype=np.uint32)])
        self._special = pattern_of_any(special)
        self._library = tiktoken.Encoding(
            "mdata",
            pat_str=FOR_TIKTOKEN[str(split_pattern(definition))],
            mergeable_ranks=ranks,
            special_tokens={content: len(ids) + number for number, content in enumerate(special)},
        )

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See `TokenizerEngine`."""
        encode, ids, special = self._library.encode_to_numpy, self._ids, self._special
        # Passing a thousand names takes longer than encoding a short text.
        return [ids[encode(text, allowed_special=set(special.findall(text)), disallowed_special=())] for text in texts]


def _ids_in_merge_order(definition: Definition) -> list[int]:
    """The ids of the single bytes, then the results of the merges."""
    vocabulary = definition["model"]["vocab"]
    results = map(str.__add__, *merge_parts(definition["model"]["merges"]))
    return [vocabulary[symbol] for symbol in (*ALPHABET, *results)]


def as_json(definition: Definition) -> bytes:
    """A tokenizer.json as text."""
    import orjson

    return orjson.dumps(definition)


# Engines that need only a tokenizer.json, by name.
LIBRARIES: Mapping[str, Callable[..., TokenizerEngine]] = MappingProxyType(
    {"gigatoken": GigatokenEngine, "tiktoken": TiktokenEngine, EXACT: ExactEngine}
)
