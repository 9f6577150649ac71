"""Selects the engine for a tokenizer.json: the fastest one that gives the exact ids.

A faster engine is tried only for the families of tokenizers that it supports, and used only if it gives the exact ids
for the self-check texts. If it is not used, one line tells the user why. An engine in a folder of its own (WordPiece in
mdata/tokenizers/wordpiece) is registered by one line of `FAMILIES`; no other code refers to it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mdata.errors import UsageError
from mdata.tokenizers.base.helpers import AUTO, check_engine_name, fast_or_exact
from mdata.tokenizers.base.self_check_texts import added_token_texts
from mdata.tokenizers.base.tokenizer import TextRefused
from mdata.tokenizers.base.tokenizer_json import Definition, added_tokens, model_vocabulary
from mdata.tokenizers.engines.bpe_families import BYTE_LEVEL, LLAMA
from mdata.tokenizers.engines.libraries import EXACT, EngineFamily, TokenizerEngine
from mdata.tokenizers.wordpiece.wordpiece_engine import WORDPIECE
from mdata.util.stop_signals import LibraryError, library_errors

# The first match is used.
FAMILIES: tuple[EngineFamily, ...] = (WORDPIECE, LLAMA, BYTE_LEVEL)

_LIBRARY_EXCEPTIONS = (ValueError, TypeError, KeyError, RuntimeError, OverflowError)


def family_of(definition: Definition) -> EngineFamily:
    """The family of a tokenizer.json, by its model; its engines may still not support the file."""
    return next(family for family in FAMILIES if family.matches(definition))


def select_engine(
    definition: Definition, exact: TokenizerEngine, *, wanted: str, plain: bool
) -> tuple[TokenizerEngine, tuple[str, ...]]:
    """The engine to use, and notes for the user.

    Args:
        definition: a tokenizer.json.
        exact: the exact engine of it.
        wanted: "auto", or the name of an engine.
        plain: special tokens that occur in a text are ordinary text.

    Raises:
        UsageError: no such engine, or the named engine cannot be used.
    """
    engine_names = dict.fromkeys(name for family in (BYTE_LEVEL, *FAMILIES) for name in family.engines)
    check_engine_name(wanted, (*engine_names, EXACT), used_for="tokenizers")
    family = family_of(definition)
    if wanted == EXACT:
        return exact, ()
    if wanted not in (AUTO, *family.engines):
        raise UsageError(
            f"engine {wanted} does not support this tokenizer",
            found=next(other for other in FAMILIES if wanted in other.engines).unsupported(definition),
            expected=f"one of {', '.join((AUTO, *family.engines, EXACT))}",
        )
    unsupported = family.unsupported(definition)
    reasons: list[str] = []
    for name in family.engines if wanted == AUTO else (wanted,):
        engine_or_reason = unsupported or try_engine(name, definition, exact=exact, plain=plain)
        if not isinstance(engine_or_reason, str) or wanted != AUTO:
            engine, _ = fast_or_exact(engine_or_reason, exact, name=name, wanted=wanted)
            return engine, _notes(reasons, name)
        reasons.append(f"{name} is not used: {engine_or_reason}")
    return exact, _notes([unsupported] if unsupported else reasons, EXACT)


def _notes(reasons: list[str], used: str) -> tuple[str, ...]:
    return (f"ids come from {used}: {'; '.join(reasons)}",) if reasons else ()


def make_engine(
    name: str, definition: Definition, *, plain: bool, exact: Callable[[], TokenizerEngine]
) -> TokenizerEngine:
    """A fast engine that passes texts to the exact one if it might not encode them exactly.

    Raises:
        ImportError: it is not installed.
        KeyError: it is not an engine for this family of tokenizers.
    """
    return family_of(definition).engines[name](definition, plain=plain, exact=exact)


def try_engine(name: str, definition: Definition, *, exact: TokenizerEngine, plain: bool) -> TokenizerEngine | str:
    """The engine, if it is equal to the exact one; otherwise why it cannot be used."""
    family = family_of(definition)
    try:
        with library_errors(*_LIBRARY_EXCEPTIONS):
            if name in family.unsupported_by and (reason := family.unsupported_by[name](definition, exact)):
                return reason
            engine = make_engine(name, definition, plain=plain, exact=lambda: exact)
            difference = first_difference(engine, exact, definition=definition)
    except ImportError:
        return "it is not installed"
    except LibraryError as error:
        return f"it fails: {error}"
    except TextRefused as refused:
        return f"it cannot be compared: {refused.reason}"
    return engine if difference is None else f"it gives other ids for {difference[:40]!r}"


def first_difference(engine: TokenizerEngine, exact: TokenizerEngine, *, definition: Definition) -> str | None:
    """The first self-check text for which the two differ.

    Raises:
        TextRefused: the exact engine fails on a text.
    """
    vocabulary = model_vocabulary(definition)
    tokens = added_tokens(definition)
    entries = vocabulary.keys() - {token.content for token in tokens}
    # The exact engine gets the texts with tokens that are matched only as whole words.
    compared = [token for token in tokens if not token.single_word]
    family = family_of(definition)
    texts = family.self_check_texts(sorted(entries, key=vocabulary.__getitem__), [token.content for token in compared])
    texts += added_token_texts(compared)
    if family.compare_words is not None and (other := family.compare_words(engine, exact)) is not None:
        return other
    try:
        pairs = zip(texts, exact.encode(texts), engine.encode(texts), strict=True)
    except TextRefused as refused:
        raise TextRefused(refused.index, f"{refused.reason} ({texts[refused.index][:40]!r})") from refused
    return next((text for text, theirs, ours in pairs if not np.array_equal(ours, theirs)), None)
