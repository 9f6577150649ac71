"""Splits texts into sentences with Punkt, NLTK's splitter: only a language's tables and one option decide the result.

mdata's own engine in C++ is used if it gives the sentences of its twin for the self-check texts, otherwise NLTK. It is
compared with punkt_reference.py and not with NLTK: NLTK takes 0.3 s to load, the twin 0.03 s, and the sentences must be
those of NLTK 3.10 whatever version is installed; the tests compare the twin and NLTK. Files are read and checked in the
process that a user started; a worker builds its splitter from their content and compares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from mdata.sentences.nltk_data import find_files
from mdata.sentences.punkt_engine import PunktEngine
from mdata.sentences.punkt_nltk import NltkEngine, edition_note
from mdata.sentences.punkt_self_check import self_check_texts
from mdata.sentences.punkt_tables import Tables, read_tables
from mdata.tokenizers.base.helpers import AUTO, check_engine_name, fast_or_exact, hash_content

Engine = PunktEngine | NltkEngine
ENGINES: Mapping[str, type[PunktEngine | NltkEngine]] = MappingProxyType({"mdata": PunktEngine, "nltk": NltkEngine})


class Splitter:
    """Splits texts as Punkt does; made by `load_splitter` or `build_splitter`.

    Attributes:
        language: the name of the tables' folder.
        keep_newlines: Megatron's --keep-newlines: white space stays at the end of a sentence.
        files: file name -> content: the four tables.
        notes: lines for the user, such as why the fast engine is not used.
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
        """BLAKE3 (hex) of everything that decides the sentences: the entries in any order, and keep_newlines."""
        return hash_content(
            {
                "type": "Punkt",
                "abbreviations": sorted(self._tables.abbreviations),
                "collocations": sorted(self._tables.collocations),
                "contexts": self._tables.contexts,
                "starters": sorted(self._tables.starters),
                "keep_newlines": self.keep_newlines,
            }
        )

    def split_batch(self, texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """All sentences of the texts in order, and the running count of sentences after each text.

        Raises:
            TextRefused: NLTK takes too long for a text (never with engine "mdata").
        """
        return self._engine.split_batch(texts)

    def __reduce__(self) -> tuple[object, ...]:
        """A worker gets the data that decides sentences; a library's objects cannot be sent."""
        how: dict[str, Any] = {"language": self.language, "keep_newlines": self.keep_newlines, "engine": self.engine}
        return partial(build_splitter, **how), (self.files,)


def load_splitter(
    language: str = "english", *, keep_newlines: bool = False, nltk_data: str | None = None, engine: str = AUTO
) -> Splitter:
    """The splitter of a language, from tables on this machine.

    Args:
        language: the name of the tables' folder.
        keep_newlines: Megatron's --keep-newlines.
        nltk_data: the only folder to search; otherwise NLTK_DATA and NLTK's default folders.
        engine: "auto", or the name of an engine.

    Raises:
        UsageError: no tables, an invalid table, or an engine that is unknown or cannot be used.
    """
    check_engine_name(engine, tuple(ENGINES), used_for="sentences")
    folder, files = find_files(language, nltk_data)
    tables = read_tables(files, folder)
    made, notes = _select_engine(engine, tables, keep_newlines=keep_newlines)
    return Splitter(files, tables, language=language, keep_newlines=keep_newlines, engine=made, notes=notes)


def build_splitter(files: Mapping[str, bytes], *, language: str, keep_newlines: bool, engine: str) -> Splitter:
    """Build the splitter from these files, language, option and engine; reads no file and compares nothing."""
    tables = read_tables(files)
    made = ENGINES[engine](tables, keep_newlines=keep_newlines)
    return Splitter(files, tables, language=language, keep_newlines=keep_newlines, engine=made)


def _select_engine(wanted: str, tables: Tables, *, keep_newlines: bool) -> tuple[Engine, tuple[str, ...]]:
    if wanted == NltkEngine.name:
        return NltkEngine(tables, keep_newlines=keep_newlines), edition_note()
    engine = PunktEngine(tables, keep_newlines=keep_newlines)
    difference = first_difference(engine, tables, keep_newlines=keep_newlines)
    if difference is None:
        return engine, ()
    found = f"it gives other sentences for {difference[:40]!a}"
    exact = NltkEngine(tables, keep_newlines=keep_newlines)
    _, notes = fast_or_exact(found, exact, name=engine.name, wanted=wanted, gives="sentences")
    return exact, (*notes, *edition_note())


def first_difference(engine: Engine, tables: Tables, *, keep_newlines: bool) -> str | None:
    """The first self-check text for which engine and twin give different sentences."""
    from mdata.sentences.punkt_reference import split

    texts = self_check_texts(tables)
    sentences, ends = engine.split_batch(texts)
    parts = [sentences[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    pairs = zip(texts, parts, strict=True)
    return next((text for text, part in pairs if part != split(text, tables, keep_newlines=keep_newlines)), None)
