"""Dumps of MediaWiki (pages-articles.xml, plain or compressed): where pages begin, and the fields of a page.

The reader finds the ends of pages, which text cannot contain because it is escaped, and workers parse them, each page
as a document of its own; so no entity can be declared, and one bad page spoils no other. A chunk is the dump's head
(<mediawiki> and <siteinfo>, which name the language and the namespaces) and whole pages. A page that is too long is
cut. Of several revisions the last in the file counts. Not read: the index of multistream dumps, whose members are read
one after the other like any bzip2 file's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote
from xml.etree import ElementTree

from mdata.errors import BadInputError
from mdata.sources.input_files import SourceFile
from mdata.sources.record_boundaries import DecompressedText

_PAGE, _PAGE_END, _DUMP_END = b"<page>", b"</page>", b"</mediawiki>"
_LONGEST_HEAD = 1 << 20
_SCAN_BYTES = 1 << 14
_BLOCK_BYTES = 1 << 16
# Letters that addresses of Wikipedia show as they are.
_SAFE = "/:,()!*'~;@$"


@dataclass(frozen=True)
class DumpHead:
    """What the head of a dump says.

    Args:
        language: its code. base: the address of a page without its title. names: of namespaces, by their numbers.
    """

    language: str
    base: str
    names: dict[int, str]

    def url(self, title: str) -> str | None:
        """The address of a page."""
        return self.base + quote(title.replace(" ", "_"), safe=_SAFE) if self.base else None


@dataclass(frozen=True)
class Page:
    """A page: its last revision. `model`: "wikitext", or the kind of other content."""

    id: str
    title: str
    namespace: int
    is_redirect: bool
    date: str
    model: str
    text: str


class NotAPage(Exception):
    """A page that cannot be parsed; the message says why."""


def page_spans(text: DecompressedText, file: SourceFile, *, longest: int) -> Iterator[tuple[int, bytes]]:
    """Where each page begins, and its bytes; first the head. A page that is too long is cut, and ended.

    Raises:
        BadInputError: the text is no dump, or ends before the dump does.
    """
    head = text.read(0, _LONGEST_HEAD)
    ends = [at for at in (head.find(_PAGE), head.find(_DUMP_END)) if at >= 0]
    if b"<mediawiki" not in head[:_SCAN_BYTES] or not ends:
        raise _damage(file, 0, 0, f"{head[:40]!r} in place of <mediawiki>")
    at, number = min(ends), 0
    yield 0, head[:at]
    while True:
        at = _without_blanks(text, at)
        begins = text.read(at, len(_DUMP_END))
        if begins == _DUMP_END:
            break
        if not begins.startswith(_PAGE):
            raise _damage(file, number + 1, at, f"{begins!r} in place of <page>" if begins else "no </mediawiki>")
        number += 1
        data, stop = _page(text, at, longest)
        if not data:
            raise _damage(file, number, at, "it ends inside of a page")
        yield at, data
        at = stop
        text.drop(at)
    at += len(_DUMP_END)
    # The rest is read to verify its checksums; pages of a second dump would be lost.
    while more := text.read(at, _BLOCK_BYTES):
        if rest := more.strip():
            raise _damage(file, number + 1, at, f"{rest[:40]!r} after </mediawiki>; one file is one dump")
        at += len(more)
        text.drop(at)


def _page(text: DecompressedText, at: int, longest: int) -> tuple[bytes, int]:
    """A page, and where it ends; nothing if the text ends first."""
    size = _SCAN_BYTES
    while True:
        data = text.read(at, size)
        if (end := data.find(_PAGE_END)) >= 0:
            return data[: end + len(_PAGE_END)], at + end + len(_PAGE_END)
        if len(data) < size:
            return b"", at
        if size > longest:
            break
        size *= 4
    held, at = data[: longest + 1] + _PAGE_END, at + size - len(_PAGE_END)
    while True:
        data = text.read(at, _BLOCK_BYTES)
        if (end := data.find(_PAGE_END)) >= 0:
            return held, at + end + len(_PAGE_END)
        if len(data) < _BLOCK_BYTES:
            return b"", at
        at += len(data) - len(_PAGE_END)
        text.drop(at)


def _without_blanks(text: DecompressedText, at: int) -> int:
    while (data := text.read(at, 64)) and not (rest := data.lstrip()):
        at += len(data)
    return at + len(data) - len(rest) if data else at


def _damage(file: SourceFile, number: int, at: int, reason: str) -> BadInputError:
    return BadInputError(
        f"{file.path}: this dump of MediaWiki is damaged at page {number:,} (byte {at:,} of the text)",
        found=reason,
        fix="download the file again",
    )


def split_pages(data: bytes) -> tuple[bytes, list[bytes]]:
    """The head of a chunk, and its pages."""
    begin = data.find(_PAGE)
    if begin < 0:
        return data, []
    pages = data[begin:].split(_PAGE_END)
    return data[:begin], [page + _PAGE_END for page in pages[:-1]]


def parse_head(head: bytes) -> DumpHead:
    """What the head says; nothing if it cannot be parsed."""
    try:
        root = ElementTree.fromstring(head + b"</mediawiki>")
    except ElementTree.ParseError:
        return DumpHead("", "", {})
    language = root.get("{http://www.w3.org/XML/1998/namespace}lang") or ""
    base, names = "", dict[int, str]()
    for element in root.iter():
        if element.tag.endswith("}base") or element.tag == "base":
            base = (element.text or "").rpartition("/")[0]
        elif "key" in element.attrib and element.text:
            names[int(element.attrib["key"])] = element.text
    return DumpHead(language, f"{base}/" if base else "", names)


def parse_page(data: bytes) -> Page:
    """The fields of a page.

    Raises:
        NotAPage: it is not XML, or has no title, namespace or revision.
    """
    try:
        root = ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError) as error:
        raise NotAPage(f"not XML: {error}") from error
    revisions = root.findall("revision")
    namespace = root.findtext("ns") or ""
    if not revisions or root.find("title") is None or not namespace.removeprefix("-").isdecimal():
        raise NotAPage("no title, namespace or revision")
    last = revisions[-1]
    return Page(
        id=root.findtext("id") or "",
        title=root.findtext("title") or "",
        namespace=int(namespace),
        is_redirect=root.find("redirect") is not None,
        date=last.findtext("timestamp") or "",
        model=last.findtext("model") or "wikitext",
        text=last.findtext("text") or "",
    )
