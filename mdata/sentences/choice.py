"""Which engine splits: ours in C++, if it gives the twin's sentences on a hostile text, else NLTK itself.

The comparison is with mdata/reference/punkt.py and not with NLTK: NLTK takes 0.3 s to load, the twin 0.03 s, and the
sentences shall be those of NLTK 3.10 whatever edition is installed. The tests compare the twin and NLTK. Files are
read and checked here, in the process that a user started; a worker builds its splitter from their content and
compares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from mdata.errors import UsageError, nearest
from mdata.sentences.by_core import CoreEngine
from mdata.sentences.by_nltk import NltkEngine, older_rules
from mdata.sentences.hostile import hostile_texts
from mdata.sentences.places import find_files
from mdata.sentences.splitter import Engine, Splitter
from mdata.sentences.tables import Tables, read_tables

AUTO = "auto"
ENGINES = ("mdata", "nltk")


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
    from mdata.reference.punkt import split

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
