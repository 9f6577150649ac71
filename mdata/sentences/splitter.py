"""Splits texts into sentences with Punkt, NLTK's splitter: only a language's tables and one option decide the result.

mdata's own engine in C++ is used if it gives the sentences of its twin for the self-check texts, otherwise NLTK. It is
compared with punkt_reference.py and not with NLTK: NLTK takes 0.3 s to load, the twin 0.03 s, and the sentences must be
those of NLTK 3.10 whatever version is installed; the tests compare the twin and NLTK. Files are read and checked in the
process that a user started; a worker builds its splitter from their content and compares nothing.

The self-check texts cover every rule and its near misses, every character in a pattern, white space of all kinds, case
changes that change a word's length, a final sigma, lone surrogates, newer characters, and words from the tables in
positions where they decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from types import MappingProxyType
from typing import TypeVar

from mdata.sentences.punkt_engine import PunktEngine
from mdata.sentences.punkt_nltk import NltkEngine, edition_note
from mdata.sentences.punkt_tables import Tables, find_files, read_tables
from mdata.tokenizers.base.helpers import hash_content

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
        build = partial(build_splitter, language=self.language, keep_newlines=self.keep_newlines, engine=self.engine)
        return build, (self.files,)


def load_splitter(language: str = "english", *, keep_newlines: bool = False, nltk_data: str | None = None) -> Splitter:
    """The splitter of a language, from tables on this machine.

    Args:
        language: the name of the tables' folder.
        keep_newlines: Megatron's --keep-newlines.
        nltk_data: the only folder to search; otherwise NLTK_DATA and NLTK's default folders.

    Raises:
        UsageError: no tables, an invalid table, or the engine gives other sentences and there is no NLTK.
    """
    folder, files = find_files(language, nltk_data)
    tables = read_tables(files, folder)
    engine, notes = _select_engine(tables, keep_newlines=keep_newlines)
    return Splitter(files, tables, language=language, keep_newlines=keep_newlines, engine=engine, notes=notes)


def build_splitter(files: Mapping[str, bytes], *, language: str, keep_newlines: bool, engine: str) -> Splitter:
    """Build the splitter from these files, language, option and engine; reads no file and compares nothing."""
    tables = read_tables(files)
    made = ENGINES[engine](tables, keep_newlines=keep_newlines)
    return Splitter(files, tables, language=language, keep_newlines=keep_newlines, engine=made)


def _select_engine(tables: Tables, *, keep_newlines: bool) -> tuple[Engine, tuple[str, ...]]:
    engine = PunktEngine(tables, keep_newlines=keep_newlines)
    difference = first_difference(engine, tables, keep_newlines=keep_newlines)
    if difference is None:
        return engine, ()
    why = f"{engine.name} is not used: it gives other sentences for {difference[:40]!a}"
    return NltkEngine(tables, keep_newlines=keep_newlines), (f"sentences come from nltk: {why}", *edition_note())


def first_difference(engine: Engine, tables: Tables, *, keep_newlines: bool) -> str | None:
    """The first self-check text for which engine and twin give different sentences."""
    from mdata.sentences.punkt_reference import split

    texts = self_check_texts(tables)
    sentences, ends = engine.split_batch(texts)
    parts = [sentences[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    pairs = zip(texts, parts, strict=True)
    return next((text for text, part in pairs if part != split(text, tables, keep_newlines=keep_newlines)), None)


_WRITTEN = (
    "One. Two? Three! Four... Five.. Six?! Seven!!! (Eight.) \u201cNine.\u201d [Ten.] 'Eleven!' Twelve.) \u2019 End",
    "He said \"no.\" She went -- fast. -- Then a.-- So? -he. \xabOui.\xbb Non ). ' -- x.",
    "'- y. \")\" z.)--a. b.)- c. d.\"-- e.\u2019\u2019  B. ) - c. \u201d\u201d\n\nD. ]]}\t\x1cE. \")",
    "A. B. Smith, J. Bach and e.g. the 3. of 1,5. At -.5. In 12.-13. On \u0663. By x-1. _. \u0301. \u4e00. \u2160. X",
    "a?b c!d. e.f) g?)h (i.j) k.\"l m.:n o.;p q.*r s.@t u.'v w.{x y.[z a.}b c.]d",
    "Wait. . . what. .x . . .y. . . . Then -- or --- and a-- b. -. --. x-. ,. ;. a,. b,, c.",
    " \n One.\nTwo.\n\nThree. \x0b\nFour.\x0c Five.\r\nSix.",
    "Six.\x1cSeven. \x1d Eight.\x85Nine.\xa0Ten. \u2028Eleven.\u3000Twelve.\x1f",
    "Tab.\tThen.\xa0\xa0He.\u2003it\xa0is.\u200bno.\ufeffX. \x1c\x1d. \x1e\nA.\x1c\nB.\x1f",
    "\u039f\u03a3. \u039f\u0394\u039f\u03a3. \u03a3. \u0391\u03a3\u0301. '\u03a3. \u0391'\u03a3'\u0391. \u02b0\u03a3.",
    "\u0130. (\u0130. \u0130X). \u0131. \u01c5. \u01c6 \xdf. \u1e9e.",
    "\ud83d. \udc00\ud83d x. \U0001f600. \U0001d400. \U00010400.",
    "\U0001fae8. \U0001e030. \U00010d50. \U00010d70 \u10fc. \ua7f2. \uab69 A",
    "", " ", "\x1c", ".", "..", ". .", "?", "a", ".a", ") .", ". )", "\u2028", "a.\n", "\n.a",
    "Z.\x85\x1c", "\xa0a. b. c",
)  # fmt: skip
_MARKS = ".?!,;:-'\"`()[]{}*@#&\u2018\u2019\u201c\u201d\xab\xbb"
_BLANKS = " \n\t\x0b\x0c\r\x1c\x1f\x85\xa0\u1680\u2000\u200a\u2028\u202f\u205f\u3000"
_MAX_WORDS = 80

_Word = TypeVar("_Word", str, tuple[str, str])


def self_check_texts(tables: Tables) -> list[str]:
    """The texts for one language's tables."""
    return [*_WRITTEN, *(text.replace(" ", "") for text in _WRITTEN), *_around(), *_of_tables(tables)]


def _around() -> Iterator[str]:
    yield " ".join(f"a.{mark}b c{mark}. d? {mark}e" for mark in _MARKS)
    yield " ".join(f"x.{mark} Y.{mark}{mark} z" for mark in _MARKS)
    yield " .".join(f"a.{blank}Then.{blank}{blank}he" for blank in _BLANKS)
    yield "".join(f"A.{blank}." for blank in _BLANKS)


def _of_tables(tables: Tables) -> Iterator[str]:
    starters = list(_some(tables.starters))
    following = [word.capitalize() for word in starters] + ["Then", "x", "##"]
    for number, word in enumerate(_some(tables.abbreviations)):
        after = following[number % len(following)]
        yield f"The {word}. {after} and {word.upper()}. {after.lower()}, x-{word}. {after}. ({word}.) {word}.. Z"
        yield f'{word}.? {word.title()}." {after} {word}.\xa0{after} 5-{word}.\n{after}'
    for first, second in _some(tables.collocations):
        yield f"In {first}. {second} and {first.upper()}. {second.capitalize()}, 7. {second}. {first}. {second}."
    for word in _some(tables.contexts):
        yield f"A. {word} e.g. {word.capitalize()} 3. {word}. J. {word.capitalize()}. St. {word.upper()}. 4. Z"
        yield f"Well... {word.capitalize()},) e.g. {word.capitalize()},... 3. {word},) ... {word}, J. {word.title()}--"
    yield " x. ".join(starters)


def _some(words: Iterable[_Word]) -> Iterable[_Word]:
    """A limited, fixed choice of entries."""
    ordered = sorted(words)
    return islice(ordered, 0, None, max(1, len(ordered) // _MAX_WORDS))
