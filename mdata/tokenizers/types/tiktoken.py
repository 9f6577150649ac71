"""TikTokenizer: tiktoken's byte pairs from a file of ranks, numbered as Megatron does.

Megatron's format is a JSON list whose first 256 entries are the bytes in order; an entry's id is its rank plus the
number of special tokens, which come first. A published tekken.json is numbered in the same way, with the special tokens
that it names. Plain .tiktoken files are accepted too, and a note says which numbering is used: Megatron's if the bytes
are in order, otherwise the file's own ranks with the special tokens after the last, or where the user puts them.
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

from mdata.errors import UsageError, counted
from mdata.tokenizers.base.helpers import (
    AUTO,
    LARGEST_ID,
    check_engine_name,
    concatenate,
    fast_or_exact,
    plain_special_tokens,
    read_file,
    whole_number,
)
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TokenizerSpec
from mdata.tokenizers.engines.libraries import TokenizerEngine
from mdata.tokenizers.engines.long_text import encode_long_texts, split_at_words
from mdata.tokenizers.tiktoken.tiktoken_engine import RanksEngine, as_definition
from mdata.tokenizers.tiktoken.tiktoken_ranks import (
    PATTERNS,
    SINGLE_BYTES,
    Ranks,
    is_list,
    read_lines,
    read_list,
    read_tekken,
)
from mdata.tokenizers.types.engine_selection import make_engine, try_engine

NAME = "TikTokenizer"
EXACT = "tiktoken"
FAST = "gigatoken"
LIST_FILE, LINES_FILE = "ranks.json", "ranks.tiktoken"
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
# The first of these that is a special token ends documents.
BEGINS = ("<s>", "<|begin_of_text|>")
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>")
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
            options: `vocab_size` (special tokens included), `num_special_tokens`, `pattern` (see PATTERNS),
                `special_tokens` (the first ones, in place of the usual seven; for a file with ranks of its own also
                any names, or NAME=ID), `special_in_text`: see TokenizerSpec.
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
        name = name or file
        self._plain = plain_special_tokens(options)
        # A published file states its settings; the user's options take precedence.
        published = read_tekken(content, name) if file == LIST_FILE else {}
        options = {**published, **options}
        self._pattern = _pattern(options.get("pattern", PATTERN))
        ranks = read_lines(content, name) if file == LINES_FILE else {}
        own_numbers = any(ranks[byte] != rank for rank, byte in enumerate(SINGLE_BYTES)) if ranks else False
        named = own_numbers and _are_named(options.get("special_tokens") or ())
        if named:
            self.special_ids: Mapping[str, int] = _named_ids(options, ranks)
            most = max([*ranks.values(), *self.special_ids.values()]) + 1
            self.vocab_size = whole_number("vocab_size", options.get("vocab_size", most), lowest=most, type=NAME)
        else:
            names = _special_names(options, published=bool(published) and "special_tokens" not in self.options)
            read = _of_list if file == LIST_FILE else _of_lines
            ranks, self.vocab_size = read(content, name, options=options, num_special=len(names))
            first = self.vocab_size - len(names) if own_numbers else 0
            self.special_ids = {content: id for id, content in enumerate(names, first)}
        base = 0 if own_numbers else len(self.special_ids)
        self._tokens: Ranks = {token: rank + base for token, rank in ranks.items()}
        self.bos = next((self.special_ids[begin] for begin in BEGINS if begin in self.special_ids), None)
        self.eod = next((self.special_ids[end] for end in ENDS if end in self.special_ids), None)
        if file == LINES_FILE or published:
            how = "its own ranks (its bytes are not in Megatron's order)" if own_numbers else f"its ranks + {base}"
            self.notes = (f"{name}: ids are {how}; {self._said_of_special(named, own_numbers=own_numbers)}",)
        self._engine: TokenizerEngine = self._exact if engine == EXACT else self._make_fast()

    def _said_of_special(self, named: bool, *, own_numbers: bool) -> str:
        """The note on special tokens, for a file whose numbering is not obvious."""
        end = next((end for end in ENDS if end in self.special_ids), None)
        ends = f"documents end with {self.eod} ({end})" if end else f"no end of document (none of {', '.join(ENDS)})"
        said = f"special tokens from {min(self.special_ids.values())}, {ends}; text is split by pattern {self._pattern}"
        if not own_numbers:
            return said
        pattern = [] if "pattern" in self.options else ["--tiktoken-pattern"]
        tokens = [] if named else ["--tokenizer-special-tokens NAME=ID ..."]
        return (
            f"{said}; if the model has others, set {' and '.join([*pattern, *tokens])}" if pattern or tokens else said
        )

    def likely_engine(self, wanted: str) -> str:
        """See SelectsEngine."""
        return FAST if wanted == AUTO else wanted

    def select_engine(self, wanted: str) -> None:
        """See SelectsEngine."""
        check_engine_name(wanted, (FAST, EXACT), used_for=NAME)
        if wanted != EXACT:
            self._engine, notes = fast_or_exact(self._try_fast(), self._exact, name=FAST, wanted=wanted)
            self.notes += notes

    def _try_fast(self) -> TokenizerEngine | str:
        """The fast engine, or why it cannot be used."""
        definition = as_definition(self._tokens, self.special_ids, pattern=self._pattern)
        if isinstance(definition, str):
            return definition
        engine_or_reason = try_engine(FAST, definition, exact=self._exact, plain=self._plain)
        if isinstance(engine_or_reason, str) and "regexes" in engine_or_reason:
            return "it does not know the pattern"
        return engine_or_reason

    def _make_fast(self) -> TokenizerEngine:
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
            repaired = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
            arrays = encode_long_texts(self._engine, repaired, splitter=split_at_words)
        return concatenate([ids.view(np.int32) for ids in arrays])

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol."""
        special = self.special_ids.values()
        first, last = min(special), max(special)
        inside = ids[(ids >= first) & (ids <= last)]
        if last - first + 1 == len(special):
            return len(inside)
        return int(np.count_nonzero(np.isin(inside, list(special))))

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol."""
        return self._exact.decode([int(id) for id in ids])


def _pattern(value: object) -> str:
    if value not in PATTERNS:
        raise UsageError(f"{NAME}: pattern={value!r}", expected=f"one of {', '.join(PATTERNS)}")
    return str(value)


def _are_named(special_tokens: Sequence[str]) -> bool:
    """Whether these are a model's own special tokens, not Megatron's seven in another order."""
    has_ids = any(_with_id(text)[1] is not None for text in special_tokens)
    return bool(special_tokens) and (has_ids or not set(SPECIAL_TOKENS) <= set(special_tokens))


def _with_id(text: str) -> tuple[str, int | None]:
    """Splits NAME=ID; any other text is a name without an id."""
    name, equals, digits = text.rpartition("=")
    has_id = equals and digits.isascii() and digits.isdigit() and len(digits) <= len(str(LARGEST_ID))
    return (name, int(digits)) if has_id else (text, None)


def _named_ids(options: Mapping[str, Any], ranks: Ranks) -> dict[str, int]:
    """The special tokens that the user names; one without an id gets the next after the last one or rank."""
    if "num_special_tokens" in options:
        problem = (
            f"{NAME}: num_special_tokens is for Megatron's special tokens, but special_tokens names those of a model"
        )
        raise UsageError(problem, fix="leave out --tiktoken-num-special-tokens")
    taken = set(ranks.values())
    ids: dict[str, int] = {}
    following = max(taken) + 1
    for name, id in map(_with_id, options["special_tokens"]):
        if not name:
            raise UsageError(f"{NAME}: a special token is empty", fix="leave it out")
        id = following if id is None else id
        if name in ids or id in taken or id > LARGEST_ID:
            clash = f"{name}={id}"
            raise UsageError(
                f"{NAME}: a special token has the id of another entry, or is named twice",
                found=clash,
                expected=f"an id that the file leaves free, such as {max(taken) + 1}",
            )
        ids[name] = id
        taken.add(id)
        following = id + 1
    _refuse_odd_names(list(ids), list(ids))
    return ids


def _special_names(options: Mapping[str, Any], *, published: bool) -> tuple[str, ...]:
    """All special tokens in the order of their ids; `published`: the file names them in its own way, not Megatron's."""
    listed = tuple(options.get("special_tokens") or SPECIAL_TOKENS)
    count = whole_number(
        "num_special_tokens", options.get("num_special_tokens", NUM_SPECIAL), lowest=len(listed), type=NAME
    )
    names = (*listed, *(f"<SPECIAL_{number}>" for number in range(len(listed), count)))
    missing = [name for name in SPECIAL_TOKENS if name not in names]
    if missing and not published:
        expected = f"a list that holds {' '.join(SPECIAL_TOKENS)}"
        raise UsageError(f"{NAME}: special tokens without {' '.join(missing)}", expected=expected)
    _refuse_odd_names(names, listed)
    return names


def _refuse_odd_names(names: Sequence[str], listed: Sequence[str]) -> None:
    """Refuse special tokens of which one hides another, or with white space; only `listed` ones can have that."""
    ordered = sorted(names)
    for name, following in pairwise(ordered):
        if following.startswith(name):
            pair = f"{name!r} and {following!r}"
            raise UsageError(f"{NAME}: a special token is the beginning of another, or empty", found=pair)
    odd = next((name for name in listed if any(character.isspace() for character in name)), None)
    if odd is not None:
        raise UsageError(f"{NAME}: a special token with white space in it", found=repr(odd))


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
    vocab_size = options.get("vocab_size", default)
    return whole_number("vocab_size", vocab_size, lowest=num_special + len(SINGLE_BYTES), type=NAME)


def _check_size(name: str, size: int, *, there: int, num_special: int) -> None:
    if there < size - num_special:
        raise UsageError(
            f"{name}: too few entries for a vocabulary of {size}",
            found=f"{counted(there, 'entry', 'entries')} and {counted(num_special, 'special token')}",
            fix=f"--vocab-size {there + num_special}",
        )
