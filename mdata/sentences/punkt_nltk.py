"""NLTK's own classes with our tables: right by definition, but slow.

The tables are passed to NLTK, so it never looks for a file. With keep_newlines a candidate includes the white space
after it and the word before it, which is Megatron's change to NLTK's pattern; then NLTK's time grows with the square of
a run without white space. NLTK stops a search after 5 s; such a text is refused. Versions of NLTK have different rules;
those of 3.10 are the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdata.errors import UsageError
from mdata.sentences.punkt_tables import SLICE_CHARS, Tables
from mdata.tokenizers.base.tokenizer import TextRefused

_EDITION = "3.10"
_KEEPING = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"


def edition_note() -> tuple[str, ...]:
    """A line for the user if another version of NLTK is installed than the reference."""
    from importlib.metadata import version

    installed = version("nltk")
    same = installed.startswith(f"{_EDITION}.")
    return () if same else (f"NLTK {installed} is installed; sentences may differ from those of {_EDITION}",)


class NltkEngine:
    """The engine."""

    name = "nltk"

    def __init__(self, tables: Tables, *, keep_newlines: bool) -> None:
        try:
            from nltk.tokenize.punkt import PunktLanguageVars, PunktParameters, PunktSentenceTokenizer
        except ImportError as error:
            raise UsageError("NLTK cannot be loaded", found=str(error), fix="pip install nltk") from error

        class Keeping(PunktLanguageVars):  # type: ignore[misc]
            _period_context_fmt = _KEEPING

        parameters = PunktParameters()
        parameters.abbrev_types = set(tables.abbreviations)
        parameters.collocations = set(tables.collocations)
        parameters.sent_starters = set(tables.starters)
        parameters.ortho_context.update(tables.contexts)
        self._splitter: Any = PunktSentenceTokenizer(parameters, lang_vars=Keeping() if keep_newlines else None)
        # NLTK tests the truth value of this object to decide whether it takes parameters or trains on them.
        self._splitter._params = parameters

    def split_batch(self, texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """See Splitter."""
        sentences: list[str] = []
        counts = []
        for index, text in enumerate(texts):
            try:
                for start in range(0, len(text), SLICE_CHARS):
                    sentences += self._splitter.tokenize(text[start : start + SLICE_CHARS])
            except TimeoutError as error:
                raise TextRefused(index, "NLTK takes more than 5 s to split it") from error
            counts.append(len(sentences))
        return sentences, counts
