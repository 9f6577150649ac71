"""A splitter: texts to sentences, whichever engine does the work; it depends on nothing but the tables and one option.

A text is cut every 1,000,000 characters first, as Megatron's tool does, so a sentence over such a cut becomes two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from blake3 import blake3

from mdata.sentences.tables import Tables

SLICE_CHARS = 1_000_000


class Engine(Protocol):
    """What splits; all that are taken give the same."""

    name: str

    def split_batch(self, texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """See Splitter."""


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
    from mdata.sentences.choice import build_splitter

    return build_splitter(files, language=language, keep_newlines=keep_newlines, engine=engine)


def slices(text: str) -> list[str]:
    """The text in slices of 1,000,000 characters."""
    return [text[start : start + SLICE_CHARS] for start in range(0, len(text), SLICE_CHARS)]
