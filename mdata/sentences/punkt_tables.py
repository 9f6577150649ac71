"""The four tables of a Punkt language: words counted by NLTK, as text files; and finding them on this machine.

Nothing is downloaded. A folder of NLTK data holds tokenizers/punkt_tab/LANGUAGE, or the same in
tokenizers/punkt_tab.zip, as NLTK's downloader leaves it. If the user names a folder, only that one is searched;
otherwise those of the environment variable NLTK_DATA, then the folders where NLTK looks.

Abbreviations and sentence starters have one entry per line, collocations two words separated by a tab, contexts a word,
a tab and a sum of bits. Entries are compared with lower-case text. NLTK accepts any lines; here a line that NLTK could
not use, or would read as two, is refused. The last line may lack its end, as in NLTK's own files.
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mdata.errors import UsageError, explain_os_error
from mdata.tokenizers.base.helpers import decode_text
from mdata.util.option_synonyms import nearest
from mdata.util.regular_files import regular_file

ABBREVIATIONS, COLLOCATIONS, CONTEXTS, STARTERS = FILES = (
    "abbrev_types.txt",
    "collocations.tab",
    "ortho_context.tab",
    "sent_starters.txt",
)
MAX_BYTES = 64 << 20
# Megatron's tool first splits a longer text every 1,000,000 characters, so a sentence across such a position becomes
# two.
SLICE_CHARS = 1_000_000
# Bits of a context: upper case at the start of a sentence, inside, unknown; then the same of lower case.
START_UPPER, INSIDE_UPPER, UNKNOWN_UPPER, START_LOWER, INSIDE_LOWER, UNKNOWN_LOWER = (1 << bit for bit in range(1, 7))
UPPER = START_UPPER | INSIDE_UPPER | UNKNOWN_UPPER
LOWER = START_LOWER | INSIDE_LOWER | UNKNOWN_LOWER
MAX_BITS = 127

# Characters besides the line feed that end a line for NLTK's reader.
_OTHER_LINE_ENDS = re.compile("[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")


@dataclass(frozen=True)
class Tables:
    """The tables that decide where a language's sentences end.

    Attributes:
        abbreviations: without their final period.
        collocations: (word before the period, word after it).
        contexts: word -> the contexts in which it was seen.
        starters: words that often begin a sentence.
    """

    abbreviations: frozenset[str]
    collocations: frozenset[tuple[str, str]]
    contexts: Mapping[str, int]
    starters: frozenset[str]


def read_tables(files: Mapping[str, bytes], folder: str = "") -> Tables:
    """Parse the content of the four files.

    Args:
        files: by their names, FILES.
        folder: of the files, for messages; ends with a separator.

    Raises:
        UsageError: an invalid line; names it.
    """
    collocations = _pairs(files[COLLOCATIONS], folder + COLLOCATIONS)
    contexts = _pairs(files[CONTEXTS], folder + CONTEXTS)
    return Tables(
        abbreviations=frozenset(_lines(files[ABBREVIATIONS], folder + ABBREVIATIONS)),
        collocations=frozenset(collocations),
        contexts=_bit_sums(contexts, folder + CONTEXTS),
        starters=frozenset(_lines(files[STARTERS], folder + STARTERS)),
    )


def _lines(content: bytes, name: str) -> list[str]:
    text = decode_text(content, name)
    if match := _OTHER_LINE_ENDS.search(text):
        number = text.count("\n", 0, match.start()) + 1
        raise UsageError(
            f"{name}:{number}: a line may end with a line feed only",
            found=repr(match.group()),
            fix="copy the file again, without changing its line ends",
        )
    lines = text.split("\n")
    if not lines[-1]:
        del lines[-1]
    if "" in lines:
        raise UsageError(f"{name}:{lines.index('') + 1}: an empty line", expected="an entry")
    return lines


def _pairs(content: bytes, name: str) -> list[tuple[str, str]]:
    lines = _lines(content, name)
    pairs = [(left, right) for left, tab, right in (line.partition("\t") for line in lines) if tab and right]
    if len(pairs) != len(lines) or any("\t" in right for _, right in pairs):
        number, line = next(_not_pairs(lines))
        expected = "two entries with one tab between"
        raise UsageError(f"{name}:{number}: not a pair", found=repr(line[:80]), expected=expected)
    return pairs


def _not_pairs(lines: list[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, 1):
        parts = line.split("\t")
        if len(parts) != 2 or not parts[1]:
            yield number, line


def _bit_sums(pairs: list[tuple[str, str]], name: str) -> dict[str, int]:
    sums = {str(bits): bits for bits in range(MAX_BITS + 1)}
    try:
        return {word: sums[bits] for word, bits in pairs}
    except KeyError:
        number, bits = next((number, bits) for number, (_, bits) in enumerate(pairs, 1) if bits not in sums)
        raise UsageError(
            f"{name}:{number}: not a sum of the context bits",
            found=repr(bits[:80]),
            expected=f"an integer from 0 to {MAX_BITS}",
        ) from None


_LANGUAGE = re.compile(r"[\w-]+")
# Language codes of other programs -> the names of NLTK's tables.
_NAMES = MappingProxyType(
    {
        "cs": "czech", "da": "danish", "de": "german", "el": "greek", "en": "english", "es": "spanish",
        "et": "estonian", "fi": "finnish", "fr": "french", "it": "italian", "ml": "malayalam", "nb": "norwegian",
        "nl": "dutch", "no": "norwegian", "pl": "polish", "pt": "portuguese", "ru": "russian", "sl": "slovene",
        "sv": "swedish", "tr": "turkish",
    }
)  # fmt: skip
_FETCH = "python -m nltk.downloader punkt_tab on a machine with network, then --nltk-data FOLDER or NLTK_DATA"


def find_files(language: str, nltk_data: str | None = None) -> tuple[str, dict[str, bytes]]:
    """The folder of a language's four files (for messages), and their content.

    Raises:
        UsageError: there are none, one is missing, or one cannot be read.
    """
    if not _LANGUAGE.fullmatch(language):
        raise UsageError(
            f"{language!r} is not the name of a language", expected="the name of a folder, such as english"
        )
    folders = [Path(nltk_data)] if nltk_data else usual_folders()
    languages: set[str] = set()
    for place in _places(folders):
        names = _languages(place)
        if language in names:
            return f"{place / language}{os.sep}", _read(place, language)
        languages |= names
    problem = f"no punkt_tab tables for the language {language!r}"
    name = _NAMES.get(re.sub("[-_][a-z]{2,4}$", "", language.lower()))
    if name is not None:
        expected = f"the name of a language{', one of ' * bool(languages)}{', '.join(sorted(languages))}"
        raise UsageError(problem, expected=expected, fix=f"--lang {name}")
    if languages:
        close = nearest(language, languages)
        raise UsageError(
            problem, expected=f"one of {', '.join(sorted(languages))}", fix=f"{close}?" if close else _FETCH
        )
    raise UsageError(problem, found=f"searched {', '.join(map(str, folders))}", fix=_FETCH)


def usual_folders() -> list[Path]:
    """The folders in which NLTK looks for its data, in order."""
    named = [Path(folder) for folder in os.environ.get("NLTK_DATA", "").split(os.pathsep) if folder]
    home = [Path(user_home) / "nltk_data"] if (user_home := os.path.expanduser("~")) != "~" else []  # noqa: PTH111
    prefix = Path(sys.prefix)
    here = [prefix / "nltk_data", prefix / "share" / "nltk_data", prefix / "lib" / "nltk_data"]
    if sys.platform == "win32":
        shared = [Path(os.environ.get("APPDATA", "C:\\")), *map(Path, ("C:\\", "D:\\", "E:\\"))]
    else:
        shared = list(map(Path, ("/usr/share", "/usr/local/share", "/usr/lib", "/usr/local/lib")))
    return [*named, *home, *here, *(folder / "nltk_data" for folder in shared)]


def _places(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        # The folder of NLTK data itself, or one below it that the user named.
        for inside in ("tokenizers", "."):
            yield folder / inside / "punkt_tab"
            yield folder / inside / "punkt_tab.zip"


@contextmanager
def _opened(place: Path) -> Iterator[Path | zipfile.Path]:
    """The folder of languages: the path itself, or punkt_tab/ inside an archive."""
    try:
        if place.suffix != ".zip" or not place.is_file():
            yield place
            return
        with zipfile.ZipFile(place) as archive:
            yield zipfile.Path(archive, "punkt_tab/")
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise UsageError(f"{place}: cannot be unpacked", found=str(error), fix=_FETCH) from error
    except OSError as error:
        raise explain_os_error(error, "reading punkt_tab") from error


def _languages(place: Path) -> set[str]:
    """The languages in a folder or an archive; empty if it does not exist."""
    with _opened(place) as root:
        return {entry.name for entry in root.iterdir() if entry.is_dir()} if root.is_dir() else set()


def _read(place: Path, language: str) -> dict[str, bytes]:
    with _opened(place) as root:
        return {name: _content(root / language / name) for name in FILES}


def _content(path: Path | zipfile.Path) -> bytes:
    if not path.exists():
        raise UsageError(f"{path} is missing", expected=f"the four tables {', '.join(FILES)}", fix=_FETCH)
    with (regular_file(path) if isinstance(path, Path) else path).open("rb") as file:
        content: bytes = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: not a table of Punkt", found="more than 64 MiB")
    return content
