"""Reads a tokenizer.json without any library: ids, added tokens, and the ids put around every text.

Other formats, such as GPT-2's vocabulary and merges, are converted to this one, so that every engine is built from one
kind of document. Unusual: the ids of added tokens are those that the `tokenizers` library gives them (the model's own
id, otherwise the next free one in file order), because the library ignores the ids in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from unicodedata import is_normalized

from mdata.errors import UsageError
from mdata.tokenizers.base.byte_level import DEEPSEEK_V3, DEEPSEEK_V3_STEPS, DIGITS, FOR_TIKTOKEN, GPT2

Definition = Mapping[str, Any]

_MANY_ADDED = 1000
LONGEST_ADDED_CHARS = 1000


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token that is matched in the raw text before any other step."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


def model_vocabulary(definition: Definition) -> dict[str, int]:
    """The model's own entries, without added tokens."""
    model = definition.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, list):
        return {str(entry[0]): id for id, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    return vocabulary if isinstance(vocabulary, dict) else {}


def added_tokens(definition: Definition) -> list[AddedToken]:
    """The added tokens with the ids that the `tokenizers` library gives them."""
    by_content: dict[str, AddedToken] = {}
    vocabulary = model_vocabulary(definition)
    free = count(len(vocabulary))
    for entry in definition.get("added_tokens") or ():
        content = entry["content"]
        if not content:
            continue
        if content in by_content:
            id = by_content[content].id
        else:  # tokens that the model already has take no new id, wherever their ids are
            id = vocabulary[content] if content in vocabulary else next(free)
        flags = {name: bool(entry.get(name)) for name in _ADDED_FLAGS}
        by_content[content] = AddedToken(id=id, content=content, **flags)
    return list(by_content.values())


_ADDED_FLAGS = tuple(name for name in AddedToken.__dataclass_fields__ if name not in ("id", "content"))


def with_special_tokens(definition: Definition, contents: Sequence[str]) -> dict[str, Any]:
    """The definition with these special tokens added at the end; existing ones keep their id.

    Raises:
        UsageError: an empty token, or one whose id would belong to another entry.
    """
    vocabulary = model_vocabulary(definition)
    existing = {token.content for token in added_tokens(definition)}
    new = [content for content in dict.fromkeys(contents) if content not in existing]
    if "" in new:
        raise UsageError("a special token without text", fix="leave it out")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    old = list(definition.get("added_tokens") or ())
    changed = {**definition, "added_tokens": [*old, *({"content": content, **flags} for content in new)]}
    ids = {token.content: token.id for token in added_tokens(changed)}
    taken = Counter(id for id in vocabulary.values() if isinstance(id, int))
    for content in new:
        if taken[ids[content]] > (content in vocabulary):
            other = next(name for name, id in vocabulary.items() if id == ids[content] and name != content)
            raise UsageError(
                f"the new special token {content!r} would get an id that is taken",
                found=f"id {ids[content]} is {other!r}: the ids of the vocabulary have a gap",
                fix="give the token an id of its own in the vocabulary",
            )
    return {**changed, "added_tokens": [*old, *({"id": ids[name], "content": name, **flags} for name in new)]}


def without_special_tokens(definition: Definition) -> dict[str, Any]:
    """The definition without matching special tokens in the text; other added tokens are still matched."""
    ordinary = [entry for entry in definition.get("added_tokens") or () if not entry.get("special")]
    return {**definition, "added_tokens": ordinary}


def unknown_id(definition: Definition) -> int | None:
    """The id for text that the model cannot spell; None if there is none."""
    model = definition.get("model")
    if not isinstance(model, Mapping):
        return None
    name = model.get("unk_token")
    id_or_none = model.get("unk_id") if name is None else model_vocabulary(definition).get(name)
    return id_or_none if isinstance(id_or_none, int) else None


def surrounding_ids(definition: Definition) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ids that the post-processor puts before and after every text; None: not a simple template."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    for processor in components(definition.get("post_processor"), "processors"):
        if processor.get("type") == "ByteLevel":
            continue
        sides = _sides_of(processor)
        if sides is None or before or after:
            return None
        before, after = sides
    return before, after


def _sides_of(processor: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
        return (processor["cls"][1],), (processor["sep"][1],)
    if processor.get("type") != "TemplateProcessing":
        return None
    sides: tuple[list[int], list[int]] = ([], [])
    texts = 0
    for part in processor.get("single") or ():
        if "Sequence" in part:
            texts += 1
        else:
            sides[min(texts, 1)].extend(processor["special_tokens"][part["SpecialToken"]["id"]]["ids"])
    return (tuple(sides[0]), tuple(sides[1])) if texts == 1 else None


def components(part: Any, children: str) -> list[Mapping[str, Any]]:
    """The components of a Sequence, or the single component."""
    parts, left = [], [part]
    while left:
        part_or_sequence = left.pop()
        if isinstance(part_or_sequence, Mapping) and part_or_sequence.get("type") == "Sequence":
            inside = part_or_sequence.get(children)
            left += reversed(inside) if isinstance(inside, list) else ()
        elif isinstance(part_or_sequence, Mapping):
            parts.append(part_or_sequence)
    return parts


def split_pattern(definition: Definition) -> str | None:
    """The one of `PATTERNS` by which texts are split into words; None: another."""
    parts = components(definition.get("pre_tokenizer"), "pretokenizers")
    if not parts or any(part.get("add_prefix_space", True) for part in parts if part.get("type") == "ByteLevel"):
        return None
    *steps, last = parts
    if last.get("type") != "ByteLevel":
        return None
    if last.get("use_regex", True):
        return {(): GPT2, (_EACH_DIGIT,): DIGITS}.get(tuple(map(_step, steps)))
    patterns = tuple(map(_step, steps))
    if patterns == DEEPSEEK_V3_STEPS:
        return DEEPSEEK_V3
    return patterns[0] if len(patterns) == 1 and patterns[0] in FOR_TIKTOKEN and patterns[0] != DIGITS else None


_EACH_DIGIT = "each digit"


def _step(part: Mapping[str, Any]) -> str:
    """The pattern of a step that isolates its matches; "": it does something else."""
    if part.get("type") == "Digits" and part.get("individual_digits"):
        return _EACH_DIGIT
    isolated = part.get("type") == "Split" and part.get("behavior") == "Isolated" and not part.get("invert")
    pattern = (part.get("pattern") or {}).get("Regex") if isolated else None
    return pattern if isinstance(pattern, str) else ""


def merge_parts(merges: Sequence[Any]) -> tuple[list[str], list[str]]:
    """The left and the right part of every merge; merges are written as "a b" or as pairs."""
    if all(type(merge) is str for merge in merges):
        parts = " ".join(merges).split(" ") if merges else []
    else:
        parts = [part for merge in merges for part in (merge.split(" ") if isinstance(merge, str) else merge)]
    return parts[::2], parts[1::2]


def is_nfc_or_none(definition: Definition) -> bool:
    """Whether texts are not normalized, or only composed (NFC, which changes few texts)."""
    return all(part.get("type") == "NFC" for part in components(definition.get("normalizer"), "normalizers"))


def added_tokens_unsupported(definition: Definition) -> str | None:
    """Why another BPE engine may find added tokens at other positions."""
    tokens = added_tokens(definition)
    if reason := added_tokens_renumbered(definition):
        return reason
    if definition.get("normalizer") and not all(is_normalized("NFC", token.content) for token in tokens):
        return "an added token is not in the form to which texts are normalized"
    raw = [token.content for token in tokens if not token.normalized]
    normalized = [token.content for token in tokens if token.normalized]
    if len(raw) * len(normalized) > _MANY_ADDED:
        return "it has too many added tokens of two kinds"
    if any(_touch(a, b) or _touch(b, a) for a in raw for b in normalized):
        return "added tokens of two kinds overlap"
    return None


def tokens_left_to_exact(definition: Definition, *, plain: bool) -> list[str]:
    """The added tokens whose texts a fast BPE engine must leave to the exact one, which has rules for them.

    Tokens that are matched only as whole words; those that strip white space that another added token begins or ends
    with, because the library gives both tokens for the same characters; and, if special tokens are plain text, those
    that still hide an ordinary added token that begins inside them.
    """
    tokens = added_tokens(definition)
    blank_edges = any(token.content != token.content.strip() for token in tokens)
    ordinary = [token.content for token in tokens if not token.special] if plain else []
    many = len(ordinary) * len(tokens) > _MANY_ADDED
    return [
        token.content
        for token in tokens
        if token.single_word
        or (blank_edges and (token.lstrip or token.rstrip))
        or (token.special and (many or any(_touch(token.content, other) for other in ordinary)))
    ]


def added_tokens_renumbered(definition: Definition) -> str | None:
    """Why only the exact engine may be used with these added tokens."""
    tokens = added_tokens(definition)
    stated = {entry["content"]: entry.get("id") for entry in definition.get("added_tokens") or ()}
    if any(stated[token.content] != token.id for token in tokens):
        return "an added token has another id than its file says"
    return "an added token is very long" if any(len(t.content) > LONGEST_ADDED_CHARS for t in tokens) else None


def _touch(first: str, second: str) -> bool:
    """Whether `second` may begin inside `first` (or is contained in it)."""
    return any(first[start:].startswith(second[: len(first) - start]) for start in range(len(first)))
