"""Finds a language's tables on this machine; nothing is downloaded.

A folder of NLTK data holds tokenizers/punkt_tab/LANGUAGE, or the same in tokenizers/punkt_tab.zip, as NLTK's
downloader leaves it. If the user names a folder, only that one is searched; otherwise those of the environment
variable NLTK_DATA, then the folders where NLTK looks.
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from mdata.errors import UsageError, explain_os_error
from mdata.sentences.punkt_tables import FILES, MAX_BYTES
from mdata.util.option_synonyms import nearest
from mdata.util.regular_files import regular_file

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

    Args:
        language: a folder's name, such as "english".
        nltk_data: the only folder to search.

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
        found = _languages(place)
        if language in found:
            return f"{place / language}{os.sep}", _read(place, language)
        languages |= found
    what = f"no punkt_tab tables for the language {language!r}"
    name = _NAMES.get(re.sub("[-_][a-z]{2,4}$", "", language.lower()))
    if name is not None:
        expected = f"the name of a language{', one of ' * bool(languages)}{', '.join(sorted(languages))}"
        raise UsageError(what, expected=expected, fix=f"--lang {name}")
    if languages:
        close = nearest(language, languages)
        raise UsageError(what, expected=f"one of {', '.join(sorted(languages))}", fix=f"{close}?" if close else _FETCH)
    raise UsageError(what, found=f"searched {', '.join(map(str, folders))}", fix=_FETCH)


def usual_folders() -> list[Path]:
    """The folders in which NLTK looks for its data, in order."""
    named = [Path(folder) for folder in os.environ.get("NLTK_DATA", "").split(os.pathsep) if folder]
    home = [Path(found) / "nltk_data"] if (found := os.path.expanduser("~")) != "~" else []  # noqa: PTH111
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
