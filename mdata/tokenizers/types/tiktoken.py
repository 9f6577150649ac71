"""TikTokenizer: tiktoken's byte pairs from a file of ranks, numbered as Megatron does.

Megatron's format is a JSON list whose first 256 entries are the bytes in order; an entry's id is its rank plus the
number of special tokens, which come first. Plain .tiktoken files are accepted too, and a note says which numbering is
used: Megatron's if the bytes are in order, otherwise the file's own ranks with the special tokens after the last.
Special tokens are matched in the text. A lone surrogate counts as U+FFFD, as in Megatron, although the reader of
records already refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
from blake3 import blake3

from mdata.errors import UsageError
from mdata.tokenizers.base.helpers import (
    AUTO,
    check_engine_name,
    concatenate,
    fast_or_exact,
    plain_special_tokens,
    read_file,
    whole_number,
)
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TokenizerSpec
from mdata.tokenizers.engines.libraries import Engine
from mdata.tokenizers.engines.long_text import encode_long_texts, split_at_words
from mdata.tokenizers.tiktoken.tiktoken_engine import PATTERNS, RanksEngine, as_definition
from mdata.tokenizers.tiktoken.tiktoken_ranks import SINGLE_BYTES, Ranks, is_list, read_lines, read_list
from mdata.tokenizers.types.engine_selection import make_engine, try_engine

NAME = "TikTokenizer"
EXACT = "tiktoken"
FAST = "gigatoken"
LIST_FILE, LINES_FILE = "ranks.json", "ranks.tiktoken"
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
END = "</s>"
VOCAB_SIZE, NUM_SPECIAL, PATTERN = 131072, 1000, "v2"


class TikTokenizer:
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`."""

    name = NAME
    OPTIONS = ("vocab_size", "num_special_tokens", "pattern", "special_tokens", "special_in_text")

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Self:
        """See TokenizerType."""
        if spec.model is None:
            raise UsageError(f"{NAME} needs a file of ranks", fix="--tokenizer-model RANKS.json (or RANKS.tiktoken)")
        content = read_file(spec.model, NAME)
        files = {LIST_FILE if is_list(content) else LINES_FILE: content}
        return cls(files, options, engine=EXACT, name=spec.model)

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Self:
        """See TokenizerType.

        Args:
            files: as a tokenizer has them.
            options: `vocab_size` (special tokens included), `num_special_tokens`, `pattern` ("v1" or "v2"),
                `special_tokens` (the first ones, in place of the usual seven), `special_in_text`: see TokenizerSpec.
            engine: as a tokenizer has it.
        """
        return cls(files, options, engine=engine)

    def __init__(
        self, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str, name: str | None = None
    ) -> None:
        self.files = dict(files)
        self.options = dict(options)
        self.notes: tuple[str, ...] = ()
        file, content = next(iter(files.items()))
        self._plain = plain_special_tokens(options)
        self._pattern = _pattern(options.get("pattern", PATTERN))
        names = _special_names(options)
        self._own_numbers = False
        if file == LIST_FILE:
            ranks, self.vocab_size = _of_list(content, name or file, options=options, num_special=len(names))
        else:
            ranks, self.vocab_size = _of_lines(content, name or file, options=options, num_special=len(names))
            self._own_numbers = any(ranks[byte] != rank for rank, byte in enumerate(SINGLE_BYTES))
            self.notes = (self._numbering(name or file, len(names)),)
        first = self.vocab_size - len(names) if self._own_numbers else 0
        base = 0 if self._own_numbers else len(names)
        self._tokens: Ranks = {token: rank + base for token, rank in ranks.items()}
        self.special_ids: Mapping[str, int] = {content: id for id, content in enumerate(names, first)}
        self.eod = self.special_ids[END]
        self._engine: Engine = self._exact if engine == EXACT else self._make_fast()

    def _numbering(self, name: str, num_special: int) -> str:
        """The note for the user about a plain file."""
        if self._own_numbers:
            last = self.vocab_size - num_special
            how = f"ids are its own ranks (its bytes are not in Megatron's order), special tokens from {last}"
        else:
            how = f"ids are its ranks + {num_special}, as Megatron numbers the same list in .json"
        return f"{name}: {how}; words are cut by pattern {self._pattern}"

    def likely_engine(self, wanted: str) -> str:
        """See SelectsEngine."""
        return FAST if wanted == AUTO else wanted

    def select_engine(self, wanted: str) -> None:
        """See SelectsEngine."""
        check_engine_name(wanted, (FAST, EXACT), used_for=NAME)
        if wanted != EXACT:
            self._engine, notes = fast_or_exact(self._try_fast(), self._exact, name=FAST, wanted=wanted)
            self.notes += notes

    def _try_fast(self) -> Engine | str:
        """The fast engine, or why it cannot be used."""
        definition = as_definition(self._tokens, self.special_ids, pattern=self._pattern)
        if isinstance(definition, str):
            return definition
        found = try_engine(FAST, definition, exact=self._exact, plain=self._plain)
        return "it does not know the pattern" if isinstance(found, str) and "regexes" in found else found

    def _make_fast(self) -> Engine:
        definition = as_definition(self._tokens, self.special_ids, pattern=self._pattern)
        assert not isinstance(definition, str), f"an engine that was not compared: {definition}"
        try:
            return make_engine(FAST, definition, plain=self._plain, exact=lambda: self._exact)
        except ImportError as error:
            raise UsageError(f"tokenizer engine {FAST} is not installed here", found=str(error)) from error

    @cached_property
    def _exact(self) -> RanksEngine:
        return RanksEngine(self._tokens, self.special_ids, pattern=self._pattern, plain=self._plain)

    @property
    def engine(self) -> str:
        """See the protocol."""
        return self._engine.name

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        import orjson

        content = {
            "type": NAME,
            "pattern": self._pattern,
            "special": self.special_ids,
            "vocab_size": self.vocab_size,
            "special_in_text": "plain" if self._plain else "special",
        }
        hashed = blake3(orjson.dumps(content, option=orjson.OPT_SORT_KEYS))
        for token, id in sorted(self._tokens.items(), key=lambda item: item[1]):
            hashed.update(f"\n{id} {token.hex()}".encode())
        return hashed.hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See the protocol."""
        try:
            arrays = encode_long_texts(self._engine, texts, splitter=split_at_words)
        except (UnicodeEncodeError, TypeError):
            whole = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
            arrays = encode_long_texts(self._engine, whole, splitter=split_at_words)
        return concatenate([ids.view(np.int32) for ids in arrays])

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol."""
        first = min(self.special_ids.values())
        return int(np.count_nonzero((ids >= first) & (ids < first + len(self.special_ids))))

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol."""
        return self._exact.decode([int(id) for id in ids])


def _pattern(value: object) -> str:
    if value not in PATTERNS:
        raise UsageError(f"{NAME}: pattern={value!r}", expected=f"one of {', '.join(PATTERNS)}")
    return str(value)


def _special_names(options: Mapping[str, Any]) -> tuple[str, ...]:
    """All special tokens, in the order of their ids."""
    given = tuple(options.get("special_tokens") or SPECIAL_TOKENS)
    count = whole_number(
        "num_special_tokens", options.get("num_special_tokens", NUM_SPECIAL), lowest=len(given), type=NAME
    )
    names = (*given, *(f"<SPECIAL_{number}>" for number in range(len(given), count)))
    missing = [name for name in SPECIAL_TOKENS if name not in names]
    if missing:
        expected = f"a list that holds {' '.join(SPECIAL_TOKENS)}"
        raise UsageError(f"{NAME}: special tokens without {' '.join(missing)}", expected=expected)
    ordered = sorted(names)
    for name, following in pairwise(ordered):
        if following.startswith(name):
            found = f"{name!r} and {following!r}"
            raise UsageError(f"{NAME}: a special token is the beginning of another, or empty", found=found)
    odd = next((name for name in given if any(character.isspace() for character in name)), None)
    if odd is not None:
        raise UsageError(f"{NAME}: a special token with white space in it", found=repr(odd))
    return names


def _of_list(content: bytes, name: str, *, options: Mapping[str, Any], num_special: int) -> tuple[Ranks, int]:
    """The entries of Megatron's list that are used, and the size of the vocabulary."""
    size = _vocab_size(options, VOCAB_SIZE, num_special)
    ranks = read_list(content, name, used=size - num_special)
    _check_size(name, size, there=len(ranks), num_special=num_special)
    return ranks, size


def _of_lines(content: bytes, name: str, *, options: Mapping[str, Any], num_special: int) -> tuple[Ranks, int]:
    """The same for a plain file; its vocabulary has the size of the file unless `vocab_size` is given."""
    ranks = read_lines(content, name)
    there = max(ranks.values()) + 1
    size = _vocab_size(options, there + num_special, num_special)
    _check_size(name, size, there=there, num_special=num_special)
    used = {token: rank for token, rank in ranks.items() if rank < size - num_special}
    missing = next((byte[0] for byte in SINGLE_BYTES if byte not in used), None)
    if missing is not None:
        raise UsageError(f"{name}: a vocabulary of {size} leaves out byte {missing}", fix="a larger --vocab-size")
    return used, size


def _vocab_size(options: Mapping[str, Any], default: int, num_special: int) -> int:
    given = options.get("vocab_size", default)
    return whole_number("vocab_size", given, lowest=num_special + len(SINGLE_BYTES), type=NAME)


def _check_size(name: str, size: int, *, there: int, num_special: int) -> None:
    if there < size - num_special:
        raise UsageError(
            f"{name}: too few entries for a vocabulary of {size}",
            found=f"{there} entries and {num_special} special tokens",
            fix=f"--vocab-size {there + num_special}",
        )
