"""A splitter with its engine: "nltk" is NLTK itself.

Files are read and checked here, in the process that a user started; a worker builds its splitter from their content.
"""

from __future__ import annotations

from collections.abc import Mapping

from mdata.errors import UsageError, nearest
from mdata.sentences.by_nltk import NltkEngine
from mdata.sentences.places import find_files
from mdata.sentences.splitter import Engine, Splitter
from mdata.sentences.tables import Tables, read_tables

AUTO = "auto"
ENGINES = ("nltk",)


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
    made = _make("nltk" if engine == AUTO else engine, tables, keep_newlines=keep_newlines)
    return Splitter(files, tables, language=language, keep_newlines=keep_newlines, engine=made)


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


def _make(name: str, tables: Tables, *, keep_newlines: bool) -> Engine:
    return NltkEngine(tables, keep_newlines=keep_newlines)


def _check_name(engine: str) -> None:
    if engine not in (AUTO, *ENGINES):
        close = nearest(engine, (AUTO, *ENGINES))
        what = f"no sentence engine {engine!r}"
        raise UsageError(what, expected=f"one of {AUTO}, {', '.join(ENGINES)}", fix=f"{close}?" if close else None)
