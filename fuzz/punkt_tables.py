"""The four tables of a Punkt language: read as NLTK reads them or refused by name, and then split alike.

The input is the four files and a text, with a byte 00 between. What is taken must hold what NLTK's simple reading of
lines gives, and with these tables the C++ engine must give the sentences of its twin, in both modes.
"""

from __future__ import annotations

from mdata.errors import UsageError
from mdata.sentences import punkt_reference as twin
from mdata.sentences.punkt_engine import PunktEngine
from mdata.sentences.punkt_tables import ABBREVIATIONS, COLLOCATIONS, CONTEXTS, FILES, STARTERS, Tables, read_tables

MOST_TEXT = 400


def check(data: bytes) -> None:
    """One language and a text."""
    parts = [*data.split(b"\0", len(FILES)), *[b""] * len(FILES)]
    files = dict(zip(FILES, parts, strict=False))
    try:
        tables = read_tables(files, "x/")
    except UsageError as error:
        assert str(error).startswith("x/") and str(error).count("\n") <= 3, str(error)
        return
    assert tables == by_lines(files)
    text = parts[len(FILES)].decode("utf-8", "surrogateescape")[:MOST_TEXT]
    words = "? ".join(sorted(tables.abbreviations)[:9] + sorted(tables.starters)[:9]).title()
    for keep in (False, True):
        engine = PunktEngine(tables, keep_newlines=keep)
        for one in (text, f"{words[:MOST_TEXT]}. {text}", text.upper()):
            found, counts = engine.split_batch([one])
            assert found == twin.split(one, tables, keep_newlines=keep), (keep, one, found)
            assert counts == [len(found)]


def by_lines(files: dict[str, bytes]) -> Tables:
    """The tables as NLTK reads lines, which here end with a line feed alone."""
    lines = {name: content.decode().splitlines() for name, content in files.items()}
    pairs = {name: [tuple(line.split("\t")) for line in lines[name]] for name in (COLLOCATIONS, CONTEXTS)}
    return Tables(
        abbreviations=frozenset(lines[ABBREVIATIONS]),
        collocations=frozenset((first, second) for first, second in pairs[COLLOCATIONS]),
        contexts={word: int(bits) for word, bits in pairs[CONTEXTS]},
        starters=frozenset(lines[STARTERS]),
    )
