"""A splitter: texts to sentences, whichever engine does the work; it depends on nothing but the tables and one option.

Our own engine in C++ is taken if it gives the sentences of its twin on a fixed text, else NLTK. The comparison is with
punkt_reference.py and not with NLTK: NLTK takes 0.3 s to load, the twin 0.03 s, and the sentences shall be those of
NLTK 3.10 whatever edition is installed; the tests compare the twin and NLTK. Files are read and checked in the process
that a user started; a worker builds its splitter from their content and compares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from blake3 import blake3

from mdata.errors import UsageError
from mdata.sentences.engine import Engine
from mdata.sentences.nltk_data import find_files
from mdata.sentences.punkt_engine import CoreEngine
from mdata.sentences.punkt_nltk import NltkEngine, older_rules
from mdata.sentences.punkt_self_check import hostile_texts
from mdata.sentences.punkt_tables import Tables, read_tables
from mdata.util.option_synonyms import nearest

AUTO = "auto"
ENGINES = ("mdata", "nltk")


class Splitter:
    """Made by `load_splitter` or `build_splitter`.

    Attributes:
        language: the name of the tables' folder.
        keep_newlines: Megatron's --keep-newlines: white space stays at the end of a sentence.
        files: file name -> content: the four tables.
        notes: lines for the user, such as why the fast engine was not taken.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        tables: Tables,
        *,
        language: str,
        keep_newlines: bool,
        engine: Engine,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.files, self.language, self.keep_newlines, self.notes = files, language, keep_newlines, notes
        self._tables, self._engine = tables, engine

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self._engine.name

    @cached_property
    def fingerprint(self) -> str:
        """BLAKE3 (hex) of what decides the sentences: the entries whatever their order, and keep_newlines."""
        import orjson

        content: dict[str, Any] = {
            "type": "Punkt",
            "abbreviations": sorted(self._tables.abbreviations),
            "collocations": sorted(self._tables.collocations),
            "contexts": self._tables.contexts,
            "starters": sorted(self._tables.starters),
            "keep_newlines": self.keep_newlines,
        }
        return blake3(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def split_batch(self, texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """All sentences of the texts in order, and the running count of sentences after each text.

        Raises:
            TextRefused: NLTK takes too long for a text (never with engine "mdata").
        """
        return self._engine.split_batch(texts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.files, self.language, self.keep_newlines, self.engine)


def _rebuild(files: Mapping[str, bytes], language: str, keep_newlines: bool, engine: str) -> Splitter:
    """What travels to a worker is what decides, not a library's objects."""
    return build_splitter(files, language=language, keep_newlines=keep_newlines, engine=engine)


def load_splitter(
    language: str = "english", *, keep_newlines: bool = False, nltk_data: str | None = None, engine: str = AUTO
) -> Splitter:
    """The splitter of a language, from tables on this machine.

    Args:
        language: the name of the tables' folder.
        keep_newlines: Megatron's --keep-newlines.
        nltk_data: the folder to look in; otherwise NLTK_DATA and NLTK's usual places.
        engine: "auto", or the name of an engine.

    Raises:
        UsageError: no tables, a table at fault, an engine that is not known or cannot be had.
    """
    _check_name(engine)
    folder, files = find_files(language, nltk_data)
    tables = read_tables(files, folder)
    made, notes = _choose(engine, tables, keep_newlines=keep_newlines)
    return Splitter(files, tables, language=language, keep_newlines=keep_newlines, engine=made, notes=notes)


def build_splitter(files: Mapping[str, bytes], *, language: str, keep_newlines: bool, engine: str) -> Splitter:
    """The splitter whose files these are; needs no file system, compares nothing.

    Args:
        files: as a Splitter has them.
        language: as a Splitter has it.
        keep_newlines: as a Splitter has it.
        engine: as a Splitter has it.
    """
    tables = read_tables(files)
    made = _make(engine, tables, keep_newlines=keep_newlines)
    return Splitter(files, tables, language=language, keep_newlines=keep_newlines, engine=made)


def _choose(wanted: str, tables: Tables, *, keep_newlines: bool) -> tuple[Engine, tuple[str, ...]]:
    if wanted == NltkEngine.name:
        return NltkEngine(tables, keep_newlines=keep_newlines), older_rules()
    engine = CoreEngine(tables, keep_newlines=keep_newlines)
    difference = first_difference(engine, tables, keep_newlines=keep_newlines)
    if difference is None:
        return engine, ()
    found = f"it gives other sentences for {difference[:40]!a}"
    if wanted != AUTO:
        raise UsageError(f"{wanted} cannot be used to split sentences", found=found, fix="--engine auto")
    note = f"sentences come from nltk: mdata is not taken: {found}"
    return NltkEngine(tables, keep_newlines=keep_newlines), (note, *older_rules())


def first_difference(engine: Engine, tables: Tables, *, keep_newlines: bool) -> str | None:
    """The first of the hostile texts that the engine and the twin do not split alike."""
    from mdata.sentences.punkt_reference import split

    texts = hostile_texts(tables)
    sentences, ends = engine.split_batch(texts)
    parts = [sentences[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    pairs = zip(texts, parts, strict=True)
    return next((text for text, part in pairs if part != split(text, tables, keep_newlines=keep_newlines)), None)


def _make(name: str, tables: Tables, *, keep_newlines: bool) -> Engine:
    return {made.name: made for made in (CoreEngine, NltkEngine)}[name](tables, keep_newlines=keep_newlines)


def _check_name(engine: str) -> None:
    if engine not in (AUTO, *ENGINES):
        close = nearest(engine, (AUTO, *ENGINES))
        what = f"no sentence engine {engine!r}"
        raise UsageError(what, expected=f"one of {AUTO}, {', '.join(ENGINES)}", fix=f"{close}?" if close else None)
