"""Our own engine, in C++ (mdata_cpp/punkt.hpp): linear time whatever the text, and no NLTK at run time.

It knows the characters of edition 14 of Unicode. Where a newer one decides, the running Python and `regex` are asked
about those in the batch and the batch is split again, so the result is what NLTK gives on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdata import _core
from mdata.sentences.character_facts import facts_of, newer_characters
from mdata.sentences.engine import SLICE_CHARS
from mdata.sentences.punkt_tables import Tables


class CoreEngine:
    """See `mdata.sentences.splitter.Engine`; twin: mdata/sentences/punkt_reference.py."""

    name = "mdata"

    def __init__(self, tables: Tables, *, keep_newlines: bool) -> None:
        self._core = _core.Punkt(
            tables.abbreviations,
            tables.collocations,
            dict(tables.contexts),
            tables.starters,
            keep_newlines=keep_newlines,
            slice_chars=SLICE_CHARS,
        )

    def split_batch(self, texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """See Splitter."""
        texts = texts if isinstance(texts, list) else list(texts)
        found = self._core.split(texts, {})
        if found is None:
            facts = facts_of(newer_characters(texts))
            found = self._core.split(texts, {ord(character): told for character, told in facts.items()})
        assert found is not None, "a character that Python was not asked about"
        return found
