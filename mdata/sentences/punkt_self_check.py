"""Fixed texts for which an engine must give the twin's sentences before it is used.

They cover every rule and its near misses, every character in a pattern, white space of all kinds, case changes that
change a word's length, a final sigma, lone surrogates, newer characters, and words from the tables in positions where
they decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from mdata.sentences.punkt_tables import Tables

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
