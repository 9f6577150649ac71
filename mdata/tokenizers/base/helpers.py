"""Small functions that several tokenizer types and engines share: options, files, arrays of ids, refusals.

The option `compat` has one value, "megatron-2023": the ids of a fork of Megatron-LM of 2023 where they differ from
today's. Each type documents what it changes; types that the fork did not have do not accept the option.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3

from mdata.errors import UsageError, explain_os_error
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TextRefused
from mdata.util.option_synonyms import nearest
from mdata.util.regular_files import regular_file

AUTO = "auto"
MEGATRON_2023 = "megatron-2023"
LARGEST_ID = 2**31 - 1

_SPECIAL_IN_TEXT = ("special", "plain")
_Engine = TypeVar("_Engine")


def plain_special_tokens(options: Mapping[str, Any]) -> bool:
    """Whether special tokens that occur in a text are ordinary text.

    Raises:
        UsageError: an invalid value of `special_in_text`.
    """
    value = options.get("special_in_text", "special")
    if value not in _SPECIAL_IN_TEXT:
        raise UsageError(f"special_in_text={value!r}", expected=f"one of {', '.join(_SPECIAL_IN_TEXT)}")
    return bool(value == "plain")


def is_megatron_2023(options: Mapping[str, Any]) -> bool:
    """Whether `compat` asks for the ids of the fork of 2023.

    Raises:
        UsageError: another value.
    """
    value = options.get("compat")
    if value not in (None, MEGATRON_2023):
        raise UsageError(f"compat={value!r}", expected=MEGATRON_2023)
    return value == MEGATRON_2023


def whole_number(name: str, value: object, *, lowest: int, type: str) -> int:
    """The value of an integer option of 31 bits.

    Raises:
        UsageError: it is not an integer; names the tokenizer type and the option.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= LARGEST_ID:
        raise UsageError(f"{type}: {name}={value!r}", expected=f"an integer from {lowest} to {LARGEST_ID}")
    return value


def read_file(path: str | Path, type: str) -> bytes:
    """The content of a tokenizer's file.

    Raises:
        MdataError: it cannot be read.
    """
    try:
        return regular_file(path).read_bytes()
    except OSError as error:
        raise explain_os_error(error, f"loading a {type}") from error


def decode_text(content: bytes, name: str) -> str:
    """The text of a UTF-8 file.

    Raises:
        UsageError: it is not UTF-8; names the line.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}:{number}: not UTF-8 text", found=f"byte {content[error.start]:#04x}") from error


def hash_content(content: Mapping[str, Any]) -> str:
    """A fingerprint: BLAKE3 (hex) of JSON with sorted keys."""
    import orjson

    return blake3(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def concatenate(arrays: Sequence[IdArray]) -> tuple[IdArray, LengthArray]:
    """The ids of several texts as one array, and the number of ids of each."""
    lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32), lengths


def batches(texts: Sequence[str], max_chars: int) -> Iterator[tuple[int, int]]:
    """Runs (start, stop) of texts; each ends with the text that reaches `max_chars`."""
    start = size = 0
    for stop, text in enumerate(texts, 1):
        size += len(text)
        if size >= max_chars or stop == len(texts):
            yield start, stop
            start, size = stop, 0


def refuse_surrogates(texts: Iterable[str], first: int = 0) -> None:
    """Raise TextRefused for the first text with a lone surrogate; `first`: the index of the first text in its batch."""
    for index, text in enumerate(texts, first):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextRefused(index, f"a lone surrogate at character {error.start}") from error


def check_engine_name(wanted: str, engines: Sequence[str], *, used_for: str) -> None:
    """Raise UsageError unless this is "auto" or one of the engines."""
    if wanted not in (AUTO, *engines):
        close = nearest(wanted, (AUTO, *engines))
        raise UsageError(
            f"no engine {wanted!r} for {used_for}",
            expected=f"one of {AUTO}, {', '.join(engines)}",
            fix=f"{close}?" if close else None,
        )


def fast_or_exact(fast: _Engine | str, exact: _Engine, *, name: str, wanted: str) -> tuple[_Engine, tuple[str, ...]]:
    """The fast engine, or the exact one with a note for the user.

    Args:
        fast: the fast engine, or why it cannot be used.
        exact: its `name` is shown in the note.
        name: of the fast engine.
        wanted: "auto", or the name of the fast engine.

    Raises:
        UsageError: the fast engine was requested by name and cannot be used.
    """
    if not isinstance(fast, str):
        return fast, ()
    if wanted != AUTO:
        raise UsageError(f"engine {name} cannot be used here", found=fast, fix="--engine auto")
    return exact, (f"ids come from {getattr(exact, 'name')}: {name} is not used: {fast}",)  # noqa: B009
