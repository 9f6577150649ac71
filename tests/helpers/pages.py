"""Small WARC files and dumps of MediaWiki."""

from __future__ import annotations

import random

HTML = (
    "<html lang='en'><head><meta charset='utf-8'><title>A  title</title></head><body><nav><a href='/'>Menu</a></nav>"
    "<article><h1>Head</h1><p>{text}</p></article></body></html>"
)
WORDS = [
    "the",
    "a",
    "of",
    "house",
    "river",
    "old",
    "new",
    "city",
    "people",
    "water",
    "light",
    "north",
    "was",
    "is",
    "built",
    "near",
    "long",
    "year",
    "first",
    "road",
]


def html(text: str = "A caf\u00e9 stands near the river, and people have met there for a hundred years.") -> bytes:
    return HTML.format(text=text).encode()


def answer(body: bytes, *headers: str, status: str = "200 OK", type: str = "text/html; charset=utf-8") -> bytes:
    """What a server sent."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {type}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def warc_record(block: bytes, *headers: str, kind: str = "response", number: int = 0) -> bytes:
    type = "application/http; msgtype=response" if kind == "response" else "text/html"
    lines = ["WARC/1.0", f"WARC-Type: {kind}", f"WARC-Target-URI: http://example.org/{number}"]
    lines += [f"WARC-Record-ID: <urn:uuid:{number}>", "WARC-Date: 2026-11-01T00:00:00Z", *headers]
    lines += [f"Content-Type: {type}", f"Content-Length: {len(block)}", "", ""]
    return "\r\n".join(lines).encode() + block + b"\r\n\r\n"


def chunked(body: bytes, size: int = 50) -> bytes:
    """A body in the chunks of HTTP."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


DUMP_HEAD = b"""<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo>
    <dbname>dewiki</dbname>
    <base>https://de.wikipedia.org/wiki/Wikipedia:Hauptseite</base>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""
DUMP_END = b"</mediawiki>\n"


def wiki_page(
    title: str, text: str, *, number: int = 1, namespace: int = 0, more: str = "", model: str = "wikitext"
) -> bytes:
    """A page of a dump; its text is escaped."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"""  <page>
    <title>{title}</title>
    <ns>{namespace}</ns>
    <id>{number}</id>
    {more}
    <revision>
      <id>{number}7</id>
      <timestamp>2026-11-01T00:00:00Z</timestamp>
      <model>{model}</model>
      <text bytes="1" xml:space="preserve">{escaped}</text>
    </revision>
  </page>
""".encode()


def sentences(draw: random.Random, count: int = 5) -> str:
    """Text without meaning."""
    return " ".join(" ".join(draw.choices(WORDS, k=draw.randrange(5, 15))).capitalize() + "." for _ in range(count))
