"""Text from the pages of the web (HTML, alone or in the responses of WARC files) and of MediaWiki.

Libraries do the work: resiliparse or trafilatura for HTML, mwparserfromhell for wikitext. Before they see a page, it is
checked for input on which they take hours: nesting, many attributes of one tag and unclosed brackets cost them
quadratic time. Such a page is removed and the limit named, as is one that is too long before or after decompression.
Limits are counts, not times, so the result does not depend on the machine.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mdata.sources.mediawiki import DumpHead, Page
from mdata.sources.warc import RecordHeader
from mdata.util.stop_signals import LibraryError, library_errors

# As many as browsers allow. resiliparse takes 2.4 s for 10,000, trafilatura stops.
MAX_DEPTH = 512
# Of one tag. lexbor compares each with all before it: 1.2 s for 20,000.
MAX_ATTRIBUTES = 10_000
# trafilatura takes 14 s for 10,000 items of a list, four times as long for twice as many.
MAX_TAGS_TRAFILATURA = 10_000
# mwparserfromhell reads on to the end of the page from each bracket that stays open, at a few million characters a
# second.
MAX_REREAD_CHARACTERS = 10_000_000
# lexbor takes 1.3 s and 1.7 GB for 4.5 million, which 47 KB of HTML ask for.
MAX_REOPENED = 2_000_000
_SHORT_HTML = 1 << 15
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class Extracted(NamedTuple):
    """The text of a page, or why it is removed.

    Args:
        reason: why it is removed; "": it is kept; "skipped": not a page at all.
        fields: id, url, title, date and language; None if the page does not state it.
    """

    text: str
    reason: str
    fields: dict[str, str | None]


def fields_of(**fields: str | None) -> dict[str, str | None]:
    """The fields in their order; an empty one is None."""
    return {name: fields.get(name) or None for name in ("id", "url", "title", "date", "language")}


class _Removed(Exception):
    """A page is removed, for the reason given."""


# --- WARC and HTTP ---

_HTML_TYPES = ("text/html", "application/xhtml+xml")
_LINE_END = re.compile(rb"\r?\n")
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_CHUNK_SIZE = re.compile(rb"\s*([0-9a-fA-F]{1,15})[^\r\n]*\r?\n")
_STATUS = re.compile(rb"HTTP/[0-9.]+ +([0-9]{3})")


class HtmlPages:
    """Texts of HTML pages.

    Args:
        extractor: "resiliparse" or "trafilatura". main_content: leave out menus, headers and the like.
        max_bytes: of a page.
    """

    def __init__(self, extractor: str, *, main_content: bool, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._text_of = _extractor(extractor, main_content=main_content)

    def of_record(self, header: RecordHeader, block: bytes) -> Extracted:
        """The page of a WARC record; "skipped" if it is not a server's response."""
        fields = fields_of(
            id=header.fields.get("warc-record-id", "").strip("<>"),
            url=header.fields.get("warc-target-uri", "").strip("<>"),
            date=header.fields.get("warc-date"),
        )
        kind = header.fields.get("warc-type", "").lower()
        if kind not in ("response", "resource"):
            return Extracted("", "skipped", fields)
        try:
            if len(block) > self._max_bytes:
                raise _Removed("max-record-bytes")
            if kind == "resource":
                content_type, language, body = header.fields.get("content-type", ""), None, block
            else:
                content_type, language, body = self._answer(header, block)
            identified = header.fields.get("warc-identified-payload-type") or content_type
            if identified.partition(";")[0].strip().lower() not in _HTML_TYPES:
                raise _Removed("not-html")
            return self._page(body, charset_of(content_type), {**fields, "language": language})
        except _Removed as removed:
            return Extracted("", str(removed), fields)

    def of_file(self, name: str, data: bytes) -> Extracted:
        """The page of a file."""
        fields = fields_of(id=name)
        try:
            if len(data) > self._max_bytes:
                raise _Removed("max-record-bytes")
            return self._page(data, None, fields)
        except _Removed as removed:
            return Extracted("", str(removed), fields)

    def _answer(self, header: RecordHeader, block: bytes) -> tuple[str, str | None, bytes]:
        """(content type, language, body) of a server's response."""
        end = _HEADER_END.search(block)
        head, body = (block[: end.start()], block[end.end() :]) if end else (block, b"")
        status = _STATUS.match(head)
        if status is None:
            raise _Removed("not-http")
        if status[1] != b"200":
            raise _Removed(f"status-{status[1].decode()[0]}xx")
        fields: dict[str, str] = {}
        for line in _LINE_END.split(head)[1:]:
            name, _, value = line.decode("latin-1").partition(":")
            fields.setdefault(name.strip().lower(), value.strip())
        cut = "warc-truncated" in header.fields
        if "chunked" in fields.get("transfer-encoding", "").lower():
            body = unchunked(body, self._max_bytes, cut=cut)
        for coding in reversed(fields.get("content-encoding", "").lower().split(",")):
            body = unpacked(body, coding.strip(), self._max_bytes, cut=cut)
        return fields.get("content-type", ""), fields.get("content-language"), body

    def _page(self, body: bytes, charset: str | None, fields: dict[str, str | None]) -> Extracted:
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5
        from resiliparse.parse.html import HTMLTree

        encoding = charset and map_encoding_to_html5(charset, fallback_utf8=False)
        try:
            with library_errors(passed=(_Removed,)):
                encoding = encoding or detect_encoding(body, from_html_meta=True) or "utf-8"
                html = bytes_to_str(body, encoding, errors="replace")
                if too_many_attributes(html):
                    raise _Removed("max-attributes")
                if reopens_too_many(html):
                    raise _Removed("max-formatting")
                tree = HTMLTree.parse(html)
                if most_open(html) > MAX_DEPTH and is_deep(tree.document):
                    raise _Removed("max-depth")
                root = tree.document.query_selector("html") if tree.document else None
                language = (root.getattr("lang") or "").strip() if root else ""
                title = " ".join((tree.title or "").split())
                text = self._text_of(tree, html).strip()
        except LibraryError as error:
            raise _Removed("library-error") from error
        fields = fields_of(**{**fields, "title": title, "language": language or fields["language"]})
        return Extracted(text, "" if text else "empty", fields)


def _extractor(name: str, *, main_content: bool) -> Callable[[Any, str], str]:
    if name == "trafilatura":
        from trafilatura import extract

        def by_trafilatura(_: Any, html: str) -> str:
            if html.count("<") > MAX_TAGS_TRAFILATURA:
                raise _Removed("max-tags")
            return extract(html, include_comments=False, favor_recall=not main_content) or ""

        return by_trafilatura
    from resiliparse.extract.html2text import extract_plain_text

    def by_resiliparse(tree: Any, _: str) -> str:
        text: str = extract_plain_text(tree, main_content=main_content, alt_texts=False)
        return text

    return by_resiliparse


def charset_of(content_type: str) -> str | None:
    """The charset named by a content type."""
    match = re.search(r"charset\s*=\s*[\"']?([^\s\"';,]+)", content_type, re.IGNORECASE)
    return match[1] if match else None


def unchunked(body: bytes, max_bytes: int, *, cut: bool) -> bytes:
    """A body without its chunk sizes; a crawler may have removed them already, or `cut` the body."""
    size = _CHUNK_SIZE.match(body)
    if size is None:
        return body
    held, at = list[bytes](), 0
    while size := _CHUNK_SIZE.match(body, at):
        length = int(size[1], 16)
        if length == 0:
            return b"".join(held)
        at = size.end() + length
        held.append(body[size.end() : at])
        if length > max_bytes:
            raise _Removed("max-record-bytes")
        at += 2 if body[at : at + 2] == b"\r\n" else 1 if body[at : at + 1] == b"\n" else 0
    if not cut:
        raise _Removed("torn")
    return b"".join(held)


def unpacked(body: bytes, coding: str, max_bytes: int, *, cut: bool) -> bytes:
    """A body without its content encoding; crawlers may have unpacked it already."""
    if coding in ("", "identity", "none") or not body:
        return body
    if coding in ("gzip", "x-gzip"):
        return _inflated(body, 31, max_bytes, cut=cut) if body[:2] == b"\x1f\x8b" else body
    if coding == "deflate":
        # Some servers send the stream of zlib, as they should, some raw deflate.
        packed = len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _inflated(body, 15 if packed else -15, max_bytes, cut=cut)
    if coding == "br":
        return _unbrotlied(body, max_bytes, cut=cut)
    if coding == "zstd":
        return _unzstd(body, max_bytes, cut=cut) if body[:4] == _ZSTD_MAGIC else body
    raise _Removed("content-encoding")


def _inflated(body: bytes, wbits: int, max_bytes: int, *, cut: bool) -> bytes:
    magic = b"\x1f\x8b" if wbits == 31 else b""
    try:
        data, ended = _joined(body, partial(zlib.decompressobj, wbits=wbits), magic, max_bytes)
    except zlib.error as error:
        if wbits == -15 and not body[:1].isascii():
            raise _Removed("content-encoding") from error
        if body.lstrip()[:1] == b"<":
            return body  # unpacked by the crawler
        raise _Removed("content-encoding") from error
    return _whole(data, max_bytes, ended=ended, cut=cut)


def _joined(body: bytes, begin: Callable[[], Any], magic: bytes, max_bytes: int) -> tuple[bytes, bool]:
    """The data of the members of gzip, or frames of zstd, that follow each other; and whether the last one is whole.

    Args:
        begin: makes a decompressor of one. magic: how the next one begins, otherwise the rest is left out; "": no next.
    """
    packed, pieces, size, at = memoryview(body), list[bytes](), 0, 0
    while True:
        one = begin()
        while at < len(packed) and size <= max_bytes and not one.eof:
            # A kilobyte becomes 1 MB at most with zlib, 32 MB with zstd.
            pieces.append(one.decompress(packed[at : at + 1024]))
            size, at = size + len(pieces[-1]), at + 1024
        at = min(at, len(packed)) - len(one.unused_data)
        if not magic or not one.eof or size > max_bytes or packed[at : at + len(magic)] != magic:
            return b"".join(pieces), one.eof


def _unbrotlied(body: bytes, max_bytes: int, *, cut: bool) -> bytes:
    import brotli

    if body.lstrip()[:1] == b"<":
        return body  # no brotli of HTML begins so
    decompressor, data = brotli.Decompressor(), b""
    try:
        data = decompressor.process(body, output_buffer_limit=max_bytes + 1)
        while not decompressor.is_finished() and len(data) <= max_bytes:
            more = decompressor.process(b"", output_buffer_limit=max_bytes + 1 - len(data))
            if not more:
                break
            data += more
    except brotli.error as error:
        raise _Removed("content-encoding") from error
    return _whole(data, max_bytes, ended=decompressor.is_finished(), cut=cut)


def _unzstd(body: bytes, max_bytes: int, *, cut: bool) -> bytes:
    import zstandard

    frames = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        data, ended = _joined(body, frames.decompressobj, _ZSTD_MAGIC, max_bytes)
    except zstandard.ZstdError as error:
        raise _Removed("content-encoding") from error
    return _whole(data, max_bytes, ended=ended, cut=cut)


def _whole(data: bytes, max_bytes: int, *, ended: bool, cut: bool) -> bytes:
    if len(data) > max_bytes:
        raise _Removed("max-record-bytes")
    if not ended and not cut:
        raise _Removed("torn")
    return data


# --- limits of the libraries ---

_FORMATTING = re.compile(r"<(/?)(b|big|code|em|font|i|s|small|strike|strong|tt|u)\b[^<>]*", re.IGNORECASE)
_TAG = re.compile(r"<!--(?s:.*?)(?:-->|\Z)|<[a-zA-Z](?:[^>\"']++|\"[^\"]*+\"?|'[^']*+'?)*+>?")
_SEPARATOR = re.compile(r"[\s/]+")


def too_many_attributes(html: str) -> bool:
    """Whether a tag may have more than MAX_ATTRIBUTES; scripts may look like tags, which counts too many at worst."""
    if len(html) < _SHORT_HTML:
        return False
    return any(
        len(match[0]) > 2 * MAX_ATTRIBUTES and sum(1 for _ in _SEPARATOR.finditer(match[0])) > MAX_ATTRIBUTES
        for match in _TAG.finditer(html)
    )


def reopens_too_many(html: str) -> bool:
    """Whether a parser may have to reopen more than MAX_REOPENED formatting elements.

    HTML parsers reopen unclosed ones in each following paragraph or cell, up to three equal ones.
    """
    most_active = MAX_REOPENED // max(html.count("<"), 1)
    open_tags: dict[str, list[str]] = {}
    active = 0
    for match in _FORMATTING.finditer(html):
        of_name = open_tags.setdefault(match[2].lower(), [])
        if match[1]:
            active -= bool(of_name)
            del of_name[-1:]
        elif of_name.count(match[0]) < 3:
            of_name.append(match[0])
            active += 1
            if active > most_active:
                return True
    return False


def most_open(html: str) -> int:
    """The largest number of open tags if none is closed implicitly: at least the depth of the tree."""
    codes = np.frombuffer(html.encode("latin-1", "replace"), np.uint8)
    at = np.flatnonzero(codes[:-1] == ord("<"))
    after = codes[at + 1]
    letter = (after | 32) - ord("a") < 26
    opened = np.where(after == ord("/"), -1, letter.astype(np.int64))
    # Ends without a beginning close nothing.
    height = np.cumsum(opened)
    return int((height - np.minimum(np.minimum.accumulate(height), 0)).max(initial=0))


def is_deep(root: Any) -> bool:
    """Whether a tree is deeper than MAX_DEPTH."""
    node, depth = root, 0
    while True:
        if depth > MAX_DEPTH:
            return True
        child = node.first_child
        if child is not None:
            node, depth = child, depth + 1
            continue
        while depth and node.next is None:
            node, depth = node.parent, depth - 1
        if not depth:
            return False
        node = node.next


# --- MediaWiki ---

# Namespaces whose links are no text: media, files, categories; English names work in every wiki.
_NO_TEXT, _NO_TEXT_NAMES = (-2, 6, 14), ("media", "file", "image", "category")
_DROPPED_TAGS = frozenset(
    [
        "gallery",
        "graph",
        "hiero",
        "imagemap",
        "includeonly",
        "indicator",
        "maplink",
        "mapframe",
        "ref",
        "references",
        "score",
        "section",
        "style",
        "table",
        "templatedata",
        "templatestyles",
        "timeline",
    ]
)
_MAGIC_WORD = re.compile(r"__[A-Z]{3,}__")
# Omitted parts leave a mark, so that the blanks around them become one.
_MARK = "\0"
_MARKED = re.compile(f" {_MARK}+(?= |$)|{_MARK}+", re.MULTILINE)
_EMPTIED_BRACKETS = re.compile(f" ?\\([\\s,;]*{_MARK}[\\s,;{_MARK}]*\\)")
_FIRST_BLANK = re.compile(r"^ (?=\S)", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")
_BLANKS_BEFORE_END = re.compile(r"[ \t]+$", re.MULTILINE)
_BRACKET = re.compile(
    r"^[ \t:]*\{\||^[ \t]*\|\}(?!\})|\[\[|\]\]|\{\{|\}\}|\[(?=https?:|//)|\]|\n|<(/?)([a-zA-Z]+)[^<>]*?(/?)>",
    re.MULTILINE,
)
_CLOSES = {"]]": "[[", "}}": "{{", "|}": "{|", "]": "["}
_SINGLE_TAGS = frozenset(["br", "wbr", "hr", "meta", "link", "img", "li", "dt", "dd", "th", "td", "tr"])


class WikiPages:
    """Texts of the pages of a wiki.

    Args:
        namespaces: their numbers; pages of others are removed.
    """

    def __init__(self, namespaces: tuple[int, ...]) -> None:
        import mwparserfromhell

        self._parse = mwparserfromhell.parse
        self._namespaces = namespaces

    def of_page(self, page: Page, head: DumpHead) -> Extracted:
        """The text of a page."""
        fields = fields_of(
            id=page.id, url=head.url(page.title), title=page.title, date=page.date, language=head.language
        )
        if page.namespace not in self._namespaces:
            return Extracted("", f"namespace-{page.namespace}", fields)
        if page.is_redirect:
            return Extracted("", "redirect", fields)
        if page.model != "wikitext":
            return Extracted("", f"model-{page.model}", fields)
        if reread_characters(page.text) > MAX_REREAD_CHARACTERS:
            return Extracted("", "max-open-brackets", fields)
        prefixes = {head.names[number].lower() for number in _NO_TEXT if number in head.names} | set(_NO_TEXT_NAMES)
        try:
            with library_errors():
                text = _wiki_text(self._parse(page.text.replace(_MARK, "")), prefixes)
                text = text.encode(errors="replace").decode()  # of entities: &#xD800;
        except LibraryError:
            return Extracted("", "library-error", fields)
        return Extracted(text, "" if text else "empty", fields)


def reread_characters(text: str) -> int:
    """An estimate of the characters that a parser reads again because of unclosed brackets and tags."""
    opened: list[tuple[str, int]] = []
    cost = 0
    for match in _BRACKET.finditer(text):
        token = match[0] if match[0] == "\n" else match[0].lstrip(" \t:")
        if token == "\n":  # a link to an address ends with its line
            while opened and opened[-1][0] == "[":
                cost += match.start() - opened.pop()[1]
            continue
        if match[2]:
            name = match[2].lower()
            if match[3] or (name in _SINGLE_TAGS and not match[1]):
                continue
            opening, opens = f"<{name}", not match[1]
        else:
            opening, opens = _CLOSES.get(token, token), token not in _CLOSES
        if opens:
            opened.append((opening, match.start()))
        elif any(name == opening for name, _ in opened[-40:]):
            while (top := opened.pop())[0] != opening:
                cost += len(text) - top[1]
    return cost + sum(len(text) - at for _, at in opened)


def _wiki_text(code: Any, prefixes: set[str]) -> str:
    """Text without templates, tables, notes and pictures; a heading of an empty section is left out."""
    sections: list[tuple[int, str, list[str]]] = [(0, "", [])]
    for node in code.nodes:
        if type(node).__name__ == "Heading":
            title = "".join(_node_texts(node.title, prefixes)).strip()
            sections.append((node.level, title, []))
        else:
            sections[-1][2].extend(_texts_of_node(node, prefixes))
    kept, below = list[str](), 0  # `below`: the level of the section after this one
    for level, title, pieces in reversed(sections):
        body = _tidied("".join(pieces))
        if body or below > level:
            kept.append("\n\n".join(part for part in (title, body) if part))
            below = level
    return "\n\n".join(part for part in reversed(kept) if part)


def _tidied(text: str) -> str:
    text = _MARKED.sub("", _EMPTIED_BRACKETS.sub("", _MAGIC_WORD.sub("", text)))
    text = _FIRST_BLANK.sub("", text)
    return _BLANK_LINES.sub("\n\n", _BLANKS_BEFORE_END.sub("", text)).strip()


def _node_texts(code: Any, prefixes: set[str]) -> Iterator[str]:
    for node in code.nodes if code is not None else ():
        yield from _texts_of_node(node, prefixes)


def _texts_of_node(node: Any, prefixes: set[str]) -> Iterator[str]:
    kind = type(node).__name__
    if kind == "Text":
        yield str(node.value)
    elif kind == "Wikilink":
        title = str(node.title).strip()
        if title.partition(":")[0].strip().lower() in prefixes:
            yield _MARK
            return
        if node.text is None:
            yield title.removeprefix(":")
        else:
            yield from _node_texts(node.text, prefixes)
    elif kind == "ExternalLink":
        if node.title is not None:
            yield from _node_texts(node.title, prefixes)
        else:
            yield _MARK if node.brackets else str(node)
    elif kind == "HTMLEntity":
        yield node.normalize()
    elif kind == "Heading":
        yield from _node_texts(node.title, prefixes)
    elif kind == "Tag":
        name = str(node.tag).strip().lower()
        if name in _DROPPED_TAGS:
            yield _MARK
            return
        if name in ("br", "hr"):
            yield "\n"
        elif name == "math":
            yield f"${str(node.contents).strip()}$"
        else:
            yield from _node_texts(node.contents, prefixes)
    else:  # templates and their arguments, comments
        yield _MARK
