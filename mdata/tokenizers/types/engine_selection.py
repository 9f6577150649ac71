"""Which engine gives the ids: the fastest that is equal to the exact one, shown here and now.

A faster engine is tried only for the forms of tokenizer.json that it is made for (FORMS: byte-level BPE, BPE of
Llama 2's form, BERT's WordPiece), and taken only if it gives the exact ids on a fixed hostile text. Why it was not
taken is one line for the user; nothing is ever decided silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from mdata.errors import UsageError
from mdata.tokenizers.base.self_check_texts import hostile_texts, hostile_texts_for_llama, hostile_texts_for_wordpiece
from mdata.tokenizers.base.split_patterns import NOT_FOR_GIGATOKEN
from mdata.tokenizers.base.token_matching import beginning_of_another
from mdata.tokenizers.base.tokenizer_json import (
    Definition,
    added_tokens,
    byte_level_obstacle,
    merge_parts,
    model_vocabulary,
    split_pattern,
)
from mdata.tokenizers.engines.libraries import ENGINES, EXACT, WORDPIECE, Engine, ExactEngine
from mdata.tokenizers.engines.llama_support import is_llama_model, llama_obstacle
from mdata.tokenizers.types.engine_fallback import routed
from mdata.tokenizers.wordpiece.wordpiece_engine import WordPieceEngine
from mdata.tokenizers.wordpiece.wordpiece_support import wordpiece_obstacle
from mdata.util.option_synonyms import nearest
from mdata.util.stop_signals import LibraryError, library_errors

AUTO = "auto"


@dataclass(frozen=True)
class Form:
    """A kind of definition for which faster engines are known.

    Args:
        obstacle: why a definition is not of this kind, by structure alone; None: it is.
        engines: from the fastest.
        hostile_texts: see mdata/tokenizers/base/self_check_texts.py.
    """

    obstacle: Callable[[Definition], str | None]
    engines: tuple[str, ...]
    hostile_texts: Callable[[Sequence[str], Sequence[str]], list[str]]


_BYTE_LEVEL = Form(byte_level_obstacle, ("gigatoken", "tiktoken"), hostile_texts)
_LLAMA = Form(llama_obstacle, ("gigatoken",), hostile_texts_for_llama)
_WORDPIECE = Form(wordpiece_obstacle, (WORDPIECE,), hostile_texts_for_wordpiece)
FORMS = (_BYTE_LEVEL, _LLAMA, _WORDPIECE)


def form_of(definition: Definition) -> Form:
    """The form to which a definition comes nearest, whatever may be in the way."""
    model = definition.get("model")
    if not isinstance(model, Mapping):
        return _BYTE_LEVEL
    if is_llama_model(definition):
        return _LLAMA
    return _WORDPIECE if model.get("type") == "WordPiece" else _BYTE_LEVEL


_WHAT_LIBRARIES_RAISE = (ValueError, TypeError, KeyError, RuntimeError, OverflowError)


@dataclass(frozen=True)
class Choice:
    """The engine that was taken, and what to tell the user about it."""

    engine: Engine
    notes: tuple[str, ...]


def choose(definition: Definition, exact: ExactEngine, *, wanted: str, plain: bool) -> Choice:
    """Pick the engine.

    Args:
        definition: a tokenizer.json.
        exact: the exact engine of it.
        wanted: "auto", or the name of an engine.
        plain: see `make_engine`.

    Raises:
        UsageError: no such engine, or the engine that was named cannot be had or gives other ids.
    """
    check_name(wanted)
    if wanted == EXACT:
        return Choice(exact, ())
    reasons: list[str] = []
    form = form_of(definition)
    if wanted not in (AUTO, *form.engines):
        form = next(form for form in FORMS if wanted in form.engines)
    common = form.obstacle(definition)
    for name in form.engines if wanted == AUTO else (wanted,):
        found = common or try_engine(name, definition, exact=exact, plain=plain)
        if not isinstance(found, str):
            return Choice(found, _notes(reasons, name))
        reasons.append(f"{name} is not taken: {found}")
    if wanted != AUTO:
        names = (AUTO, *form_of(definition).engines, EXACT)
        what = f"{wanted} cannot be used for this tokenizer"
        expected = None if wanted in names else f"one of {', '.join(names)}"
        raise UsageError(what, found=common or reasons[0], expected=expected, fix="--engine auto")
    return Choice(exact, _notes([common] if common else reasons, EXACT))


def likely_engine(definition: Definition, wanted: str) -> str:
    """The one that `choose` tries first; no promise that it is taken."""
    return form_of(definition).engines[0] if wanted == AUTO else wanted


def check_name(wanted: str) -> None:
    """Raise UsageError unless this is "auto" or the name of an engine."""
    if wanted not in (AUTO, *ENGINES):
        close = nearest(wanted, (AUTO, *ENGINES))
        what = f"no tokenizer engine {wanted!r}"
        raise UsageError(what, expected=f"one of {AUTO}, {', '.join(ENGINES)}", fix=f"{close}?" if close else None)


def _notes(reasons: list[str], taken: str) -> tuple[str, ...]:
    return (f"ids come from {taken}: {'; '.join(reasons)}",) if reasons else ()


def try_engine(name: str, definition: Definition, *, exact: ExactEngine, plain: bool) -> Engine | str:
    """The engine, if it is equal to the exact one; else why it cannot be taken."""
    try:
        if obstacle := _OBSTACLES[name](definition, exact):
            return obstacle
        with library_errors(*_WHAT_LIBRARIES_RAISE):
            engine = routed(name, definition, plain=plain, exact=lambda: exact)
            difference = first_difference(engine, exact, definition=definition)
    except ImportError:
        return "it is not installed"
    except LibraryError as error:
        return f"it fails: {error}"
    return engine if difference is None else f"it gives other ids for {difference[:40]!r}"


def first_difference(engine: Engine, exact: Engine, *, definition: Definition) -> str | None:
    """The first of the hostile texts for which the two do not agree."""
    vocabulary = model_vocabulary(definition)
    tokens = added_tokens(definition)
    entries = vocabulary.keys() - {token.content for token in tokens}
    added = [token.content for token in tokens if not token.single_word]
    texts = form_of(definition).hostile_texts(sorted(entries, key=vocabulary.__getitem__), added)
    if isinstance(engine, WordPieceEngine) and isinstance(exact, ExactEngine):
        other = engine.first_other_words(exact.library)
        if other is not None:
            return other
    pairs = zip(texts, engine.encode(texts), exact.encode(texts), strict=True)
    return next((text for text, ours, theirs in pairs if not np.array_equal(ours, theirs)), None)


def _gigatoken_obstacle(definition: Definition, exact: ExactEngine) -> str | None:
    other = split_pattern(definition) in NOT_FOR_GIGATOKEN
    return "it knows another pattern than this tokenizer's" if other else None


def _tiktoken_obstacle(definition: Definition, exact: ExactEngine) -> str | None:
    """What tiktoken leaves out: it has no list of merges, so it joins any two parts of an entry, at once if it can.

    That is the same if every entry is made, in the end, of its own two parts; training makes such vocabularies.
    """
    model = definition["model"]
    added = [token.content for token in added_tokens(definition)]
    if beginning_of_another(added) is not None:
        return "an added token is the beginning of another"
    if model.get("ignore_merges"):
        return "entries count before merges"
    results = map(str.__add__, *merge_parts(model["merges"]))
    tokenize = exact.library.model.tokenize
    return "an entry cannot be reached by its merges" if any(len(tokenize(entry)) > 1 for entry in results) else None


def _no_obstacle(definition: Definition, exact: ExactEngine) -> str | None:
    return None


_OBSTACLES = MappingProxyType(
    {"gigatoken": _gigatoken_obstacle, "tiktoken": _tiktoken_obstacle, WORDPIECE: _no_obstacle}
)
