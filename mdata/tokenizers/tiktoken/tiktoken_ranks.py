"""Reads files of ranks: Megatron's list of JSON objects, and tiktoken's lines of base64 and rank.

A published tekken.json is an object with such a list. All give bytes -> rank. As in Megatron, only the used entries of
a list are checked: each has exactly the keys rank, token_bytes and token_str, its rank is its position, and the first
256 are the single bytes in order. Lines may be in any order and skip ranks. A rank or the bytes of an entry must not
occur twice, and no single byte may be missing.
"""

from __future__ import annotations

import json
from binascii import Error as NotBase64
from binascii import a2b_base64
from types import MappingProxyType
from typing import Any

from mdata.errors import UsageError
from mdata.tokenizers.base.byte_level import CL100K, LLAMA3, O200K, QWEN2, TIK_V1, TIK_V2

Ranks = dict[bytes, int]

SINGLE_BYTES = tuple(bytes([byte]) for byte in range(256))
# Special tokens of published files that list none (versions up to v7).
TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
# Megatron's two, and those of published rank files.
PATTERNS = MappingProxyType(
    {"v1": TIK_V1, "v2": TIK_V2, "cl100k_base": CL100K, "o200k_base": O200K, "llama3": LLAMA3, "qwen2": QWEN2}
)
_KEYS = {"rank", "token_bytes", "token_str"}
_LARGEST_RANK = 2**31 - 1


def is_list(content: bytes) -> bool:
    """Whether the content is a JSON list."""
    return content.lstrip()[:1] in (b"[", b"{")


def read_list(content: bytes, name: str, *, used: int | None = None) -> Ranks:
    """The ranks of Megatron's list.

    Args:
        content: of the file.
        name: of the file, for errors.
        used: number of entries that are used; None: all. Later ones are not checked.

    Raises:
        UsageError: not such a list; names the entry, counted from 0 like ranks.
    """
    ranks: Ranks = {}
    for place, entry in enumerate(_entries(content, name)[:used]):
        token = _token_of(entry, place, name)
        before = ranks.setdefault(token, place)
        if before != place:
            raise UsageError(f"{name}: entry {place} has the bytes of entry {before}", found=repr(token[:60]))
        if place < 256 and token != SINGLE_BYTES[place]:
            raise UsageError(
                f"{name}: entry {place} is not byte {place}",
                found=repr(token[:60]),
                expected="the 256 single bytes in order, then longer entries",
            )
    return ranks


def read_tekken(content: bytes, name: str) -> dict[str, Any]:
    """The settings of a published tekken.json as options of a TikTokenizer; nothing for Megatron's list.

    Raises:
        UsageError: its settings are missing, or cannot be those of such a file.
    """
    if content.lstrip()[:1] != b"{":
        return {}
    entries = _entries(content, name)
    facts = json.loads(content.decode())
    config = facts.get("config")
    if not isinstance(config, dict):
        expected = "a list of ranks, or an object with config and vocab, as in tekken.json"
        raise UsageError(f"{name}: not a list of ranks", found="an object without config", expected=expected)
    pattern = next((short for short, pattern in PATTERNS.items() if pattern == config.get("pattern")), None)
    if pattern is None:
        actual = repr(config.get("pattern"))[:200]
        raise UsageError(
            f"{name}: its pattern is unknown", found=actual, expected=f"a pattern of {', '.join(PATTERNS)}"
        )
    size: Any = config.get("default_vocab_size")
    num_special: Any = config.get("default_num_special_tokens")
    # Loops run over these numbers, so they must fit the file.
    are_integers = isinstance(size, int) and isinstance(num_special, int)
    if not are_integers or not 0 < num_special <= len(entries) or not num_special < size <= len(entries) + num_special:
        actual = f"default_vocab_size {size!r}, default_num_special_tokens {num_special!r}, {len(entries)} entries"
        raise UsageError(f"{name}: its config does not fit its entries", found=actual[:200])
    special = facts.get("special_tokens")
    names = list(TEKKEN_SPECIAL) if special is None else _special_of_tekken(special, name)
    return {"vocab_size": size, "num_special_tokens": num_special, "pattern": pattern, "special_tokens": names}


def _special_of_tekken(special: object, name: str) -> list[str]:
    tokens: list[Any] = special if isinstance(special, list) else [None]
    for rank, token in enumerate(tokens):
        if not isinstance(token, dict) or token.get("rank") != rank or not isinstance(token.get("token_str"), str):
            expected = f"an object with rank {rank} and token_str"
            raise UsageError(f"{name}: special token {rank} is unusable", found=repr(token)[:80], expected=expected)
    return [token["token_str"] for token in tokens]


def _entries(content: bytes, name: str) -> list[Any]:
    try:
        entries = json.loads(content.decode())
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}:{error.lineno}: not a JSON list of ranks", found=str(error)) from error
    # Bytes that are not UTF-8, numbers with thousands of digits, deeply nested brackets.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: not a JSON list of ranks", found=str(error)) from error
    if isinstance(entries, dict) and "vocab" in entries:
        entries = entries["vocab"]
    if not isinstance(entries, list):
        start = " ".join(content[:80].decode(errors="replace").split())
        raise UsageError(f"{name}: not a list of ranks", found=start, expected="a list of objects")
    return entries


def _token_of(entry: object, place: int, name: str) -> bytes:
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        actual = ", ".join(map(repr, entry)) if isinstance(entry, dict) else repr(entry)
        problem = f"{name}: entry {place} is not a rank"
        raise UsageError(problem, found=actual[:200], expected=f"exactly the keys {', '.join(sorted(_KEYS))}")
    if type(entry["rank"]) is not int or entry["rank"] != place:
        raise UsageError(f"{name}: entry {place} has another rank", found=repr(entry["rank"])[:40], expected=str(place))
    text = entry["token_bytes"]
    token = _decoded(text.encode() if isinstance(text, str) and text.isascii() else b"\xff")
    if not token:
        raise UsageError(f"{name}: entry {place} has no bytes", found=repr(text)[:200], expected="base64")
    return token


def read_lines(content: bytes, name: str) -> Ranks:
    """The ranks of a .tiktoken file.

    Raises:
        UsageError: an invalid line; names it.
    """
    ranks: Ranks = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        token, rank = _line(line, f"{name}:{number}")
        if rank in lines:
            raise UsageError(f"{name}:{number}: rank {rank} is in line {lines[rank]} already", found=_shown(line))
        if token in ranks:
            problem = f"{name}:{number}: the bytes {token[:60]!r} are in line {lines[ranks[token]]} already"
            raise UsageError(problem, found=_shown(line))
        ranks[token] = rank
        lines[rank] = number
    missing = next((byte for byte in SINGLE_BYTES if byte not in ranks), None)
    if missing is not None:
        problem = f"{name}: byte {missing[0]} has no rank, so texts with it have no ids"
        raise UsageError(problem, expected="a line for each of the 256 bytes")
    return ranks


def _line(line: bytes, place: str) -> tuple[bytes, int]:
    parts = line.split()
    token = _decoded(parts[0]) if len(parts) == 2 else b""
    if not token or not parts[1].isdigit() or len(parts[1]) > 10 or int(parts[1]) > _LARGEST_RANK:
        expected = "the bytes of an entry in base64, a blank, a rank"
        raise UsageError(f"{place}: not a line of ranks", found=_shown(line), expected=expected)
    return token, int(parts[1])


def _decoded(text: bytes) -> bytes:
    """The decoded bytes; None if the text is not base64."""
    try:
        return a2b_base64(text, strict_mode=True)
    except NotBase64:
        return b""


def _shown(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace"))
