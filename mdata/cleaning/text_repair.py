"""Repair of texts: ftfy, and quotes, dashes and blanks as ASCII.

ftfy fixes text that was decoded wrongly, and HTML entities, ligatures, line ends and the like. It works line by line at
about 3 MB/s, so lines that it cannot change are found in C++ first (`doubtful_lines`); what the others become depends
on earlier lines only through "<", after which entities are left alone. The result is ftfy's for the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mdata import _core
from mdata.errors import UsageError, install_command

_TO_ASCII: Mapping[str, str] = MappingProxyType(
    {
        "'": "\u2018\u2019\u201a\u201b\u2039\u203a\u02bc\u2032",
        '"': "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033",
        "-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212",
        "...": "\u2026",
        " ": "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
    }
)
_PUNCTUATION = str.maketrans({code: plain for plain, codes in _TO_ASCII.items() for code in codes})


def fixed(texts: list[str]) -> list[str]:
    """The texts as `ftfy.fix_text` repairs them.

    Raises:
        UsageError: ftfy is not installed.
    """
    from ftfy import fix_text

    results = list(texts)
    pieces: dict[int, list[str]] = {}
    ends: dict[int, int] = {}
    for number, begin, end, after_tag in _core.doubtful_lines(texts).tolist():
        text, before = texts[number], ends.get(number, 0)
        repaired = fix_text(text[begin:end], unescape_html=False if after_tag else "auto")
        pieces.setdefault(number, []).extend((text[before:begin], repaired))
        ends[number] = end
    for number, parts in pieces.items():
        results[number] = "".join((*parts, texts[number][ends[number] :]))
    return results


def ftfy_version() -> str:
    """The version of ftfy.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import ftfy
    except ImportError as error:
        raise UsageError("step fix needs ftfy, which is not installed", fix=install_command("web")) from error
    return str(ftfy.__version__)


def plain_punctuation(texts: list[str]) -> list[str]:
    """The texts with ASCII quotes, dashes and blanks instead of others."""
    return [text if text.isascii() else text.translate(_PUNCTUATION) for text in texts]
