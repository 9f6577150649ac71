"""NLTK's own classes with our tables: the reference that decides, and slow.

What NLTK would load from its data folders is set by hand, so it never looks for a file. With keep_newlines a
candidate takes the white space behind it and the word before it, which is Megatron's change to NLTK's pattern;
then NLTK's time grows with the square of a run without white space. NLTK gives up a search after 5 s; such a text
is refused by name. Which rules NLTK follows depends on its edition: these are those of 3.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdata.sentences.splitter import slices
from mdata.sentences.tables import Tables
from mdata.tokenizers.protocol import TextRefused

_KEEPING = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"


class NltkEngine:
    """See `mdata.sentences.splitter.Engine`."""

    name = "nltk"

    def __init__(self, tables: Tables, *, keep_newlines: bool) -> None:
        from nltk.tokenize.punkt import PunktLanguageVars, PunktParameters, PunktSentenceTokenizer

        class Keeping(PunktLanguageVars):  # type: ignore[misc]
            _period_context_fmt = _KEEPING

        parameters = PunktParameters()
        parameters.abbrev_types = set(tables.abbreviations)
        parameters.collocations = set(tables.collocations)
        parameters.sent_starters = set(tables.starters)
        parameters.ortho_context.update(tables.contexts)
        self._splitter: Any = PunktSentenceTokenizer(parameters, lang_vars=Keeping() if keep_newlines else None)
        # A test of truth decides inside whether NLTK takes parameters or trains on them.
        self._splitter._params = parameters

    def split_batch(self, texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """See Splitter."""
        sentences: list[str] = []
        counts = []
        for index, text in enumerate(texts):
            try:
                for part in slices(text):
                    sentences += self._splitter.tokenize(part)
            except TimeoutError as error:
                raise TextRefused(index, "NLTK takes more than 5 s to split it") from error
            counts.append(len(sentences))
        return sentences, counts
