"""Texts of HTML and of wikitext, what answers of servers are packed in, and the limits on what libraries get."""

from __future__ import annotations

import gzip
import zlib

import pytest
import zstandard

pytest.importorskip("resiliparse")
pytest.importorskip("mwparserfromhell")

from mdata.cleaning import pages
from mdata.cleaning.pages import HtmlPages, WikiPages
from mdata.sources.mediawiki import DumpHead, parse_head, parse_page
from mdata.sources.warc import records
from tests.helpers.pages import DUMP_HEAD, answer, chunked, html, warc_record, wiki_page

LIMIT = 100_000
TEXT = "Head\n\nA caf\u00e9 stands near the river, and people have met there for a hundred years."
PACKED = gzip.compress(html())


@pytest.fixture(scope="module")
def reader() -> HtmlPages:
    return HtmlPages("resiliparse", main_content=True, max_bytes=LIMIT)


def extracted(reader: HtmlPages, block: bytes, *headers: str, kind: str = "response"):
    ((header, data),) = records(warc_record(block, *headers, kind=kind, number=3)[:-4], longest=1 << 30)
    return reader.of_record(header, data)


def raw_deflate(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


@pytest.mark.parametrize(
    "block",
    [
        answer(html()),
        answer(html(), type="Text/HTML"),
        answer(html().decode().encode("latin-1"), type='text/html; charset="ISO-8859-1"'),
        answer(html().decode().encode("utf-16"), type="text/html"),
        answer(chunked(html()), "Transfer-Encoding: chunked"),
        answer(html(), "Transfer-Encoding: chunked"),  # taken apart by the crawler
        answer(PACKED, "Content-Encoding: gzip"),
        answer(gzip.compress(html()[:99]) + gzip.compress(html()[99:]), "Content-Encoding: gzip"),
        answer(PACKED + b"\0\x1f", "Content-Encoding: gzip"),
        answer(html(), "Content-Encoding: gzip"),
        answer(chunked(PACKED, 7), "Transfer-Encoding: chunked", "Content-Encoding: x-gzip"),
        answer(zlib.compress(html()), "Content-Encoding: deflate"),
        answer(raw_deflate(html()), "Content-Encoding: deflate"),
        answer(zstandard.compress(html()), "Content-Encoding: zstd"),
        answer(zstandard.compress(html()[:99]) + zstandard.compress(html()[99:]), "Content-Encoding: zstd"),
        answer(gzip.compress(zstandard.compress(html())), "Content-Encoding: zstd, gzip"),
        answer(html(), "Content-Encoding: br"),
    ],
)
def test_what_an_answer_is_packed_in(reader, block):
    page = extracted(reader, block)
    assert (page.text, page.reason) == (TEXT, "")
    assert page.fields == {
        "id": "urn:uuid:3",
        "url": "http://example.org/3",
        "title": "A title",
        "date": "2026-11-01T00:00:00Z",
        "language": "en",
    }


def test_brotli(reader):
    brotli = pytest.importorskip("brotli")
    assert extracted(reader, answer(brotli.compress(html()), "Content-Encoding: br")).text == TEXT
    bomb = answer(brotli.compress(b"a" * 5_000_000), "Content-Encoding: br")
    assert extracted(reader, bomb).reason == "max-record-bytes"
    assert extracted(reader, answer(b"\x00\xff\xff", "Content-Encoding: br")).reason in ("content-encoding", "torn")
    assert extracted(reader, answer(brotli.compress(html())[:-9], "Content-Encoding: br")).reason == "torn"


def test_other_records(reader):
    assert extracted(reader, html(), kind="resource").text == TEXT
    for kind in ("request", "warcinfo", "metadata", "revisit"):
        assert extracted(reader, html(), kind=kind).reason == "skipped"
    identified = "WARC-Identified-Payload-Type: text/html"
    assert extracted(reader, answer(html(), type="text/plain"), identified).text == TEXT
    no_language = html().replace(b" lang='en'", b"")
    assert extracted(reader, answer(no_language, "Content-Language: de")).fields["language"] == "de"
    assert extracted(reader, answer(no_language)).fields["language"] is None
    assert reader.of_file("a.html", html()).fields["id"] == "a.html"


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"", "not-http"),
        (html(), "not-http"),
        (answer(html(), status="404 Not Found"), "status-4xx"),
        (answer(html(), type="image/png"), "not-html"),
        (answer(b""), "empty"),
        (answer(b"<html><script>x</script>"), "empty"),
        (answer(html("a" * LIMIT)), "max-record-bytes"),
        (answer(gzip.compress(b"a" * 10_000_000), "Content-Encoding: gzip"), "max-record-bytes"),
        (answer(zlib.compress(b"a" * 10_000_000), "Content-Encoding: deflate"), "max-record-bytes"),
        (answer(zstandard.compress(b"a" * 10_000_000), "Content-Encoding: zstd"), "max-record-bytes"),
        (answer(b"ffffffffffff\r\nx", "Transfer-Encoding: chunked"), "max-record-bytes"),
        (answer(PACKED[:-20], "Content-Encoding: gzip"), "torn"),
        (answer(PACKED + PACKED[:-20], "Content-Encoding: gzip"), "torn"),
        (answer(zstandard.compress(html())[:-20], "Content-Encoding: zstd"), "torn"),
        (answer(chunked(html())[:-60], "Transfer-Encoding: chunked"), "torn"),
        (answer(b"\x1f\x8b!!!!!!!!!!!", "Content-Encoding: gzip"), "content-encoding"),
        (answer(b"\xff\xff", "Content-Encoding: deflate"), "content-encoding"),
        (answer(html(), "Content-Encoding: rot13"), "content-encoding"),
        (answer(b"<html>" + b"<div>" * 600 + b"x"), "max-depth"),
        (answer(b"<html>" + b"<div>" * 600 + b"x" + b"</div>" * 600), "max-depth"),
        (answer(b"<html><div " + b"a " * 20_000 + b">x"), "max-attributes"),
        (answer(b"<html>" + b"".join(b"<p><font c=%d>" % n for n in range(3_000)) + b"x"), "max-formatting"),
    ],
)
def test_why_a_page_is_removed(reader, block, reason):
    page = extracted(reader, block)
    assert (page.text, page.reason) == ("", reason)
    assert page.fields["url"] == "http://example.org/3"


def test_a_page_that_the_crawler_cut_gives_its_beginning(reader):
    cut = "WARC-Truncated: length"
    assert extracted(reader, answer(PACKED[:-20], "Content-Encoding: gzip"), cut).text.startswith("Head\n\nA caf")
    torn = extracted(reader, answer(chunked(html())[:-60], "Transfer-Encoding: chunked"), cut).text
    assert torn and TEXT.startswith(torn)


def test_formatting_that_is_closed_or_repeats_is_kept(reader):
    closed = b"".join(b"<p><font c=%d>%d</FONT>" % (n, n) for n in range(3_000))
    for body in (closed, b"<p><b>x" * 3_000, b"</b>" * 9_000 + b"x"):
        assert extracted(reader, answer(b"<html>" + body)).reason == ""


def test_pages_that_are_only_wide(reader):
    """Void and unclosed tags are not depth, and an inline picture is no attribute."""
    for body in (b"<br>x" * 2000, b"<li>x" * 2000, b"<p>x" * 2000, b"<div>x</div>" * 2000):
        assert extracted(reader, answer(b"<html>" + body)).reason == ""
    assert extracted(reader, answer(html(f"<img src='data:{'A' * 90_000}'>text"))).reason == ""


def test_the_whole_page_has_its_menu():
    whole = HtmlPages("resiliparse", main_content=False, max_bytes=LIMIT)
    assert "Menu" in extracted(whole, answer(html())).text


def test_trafilatura():
    pytest.importorskip("trafilatura")
    reader = HtmlPages("trafilatura", main_content=True, max_bytes=LIMIT)
    page = extracted(reader, answer(html()))
    assert "caf\u00e9 stands near" in page.text and page.fields["title"] == "A title"
    assert extracted(reader, answer(b"<html>" + b"<li>x" * 11_000)).reason == "max-tags"


HEAD = parse_head(DUMP_HEAD)


def wiki_text(text: str) -> str:
    return WikiPages((0,)).of_page(parse_page(wiki_page("A", text)), HEAD).text


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("'''A''' is ''b''.", "A is b."),
        ("a [[b]], [[c|d e]] and [[:Kategorie:F]]", "a b, d e and Kategorie:F"),
        ("[[Datei:x.jpg|mini|a [[b]]]]c [[file:y.png]]d[[Kategorie:K]][[Category:L]]", "c d"),
        ("a {{b|c={{d}}}} e{{f|}}.", "a e."),
        ("a ({{b}}) c ({{b}}; ) d", "a c d"),
        ("a<ref>b</ref> c<ref name=d/>.<!-- e -->", "a c."),
        ("a\n{| class=x\n|-\n| b\n|}\nc", "a\n\nc"),
        ("* a\n* b\n# c\n: d", "a\nb\nc\nd"),
        ("a<br>b <b>c</b> <math>x^2</math> <code>f()</code>", "a\nb c $x^2$ f()"),
        ("[http://a.b c] [http://a.b] http://a.b", "c http://a.b"),
        ("1 &lt; 2 &#xD800; &nbsp;", "1 < 2 ?"),
        ("__NOTOC__\na\n\n\n\n\nb", "a\n\nb"),
        ("a\n== B ==\nc\n=== D ===\ne\n== F ==\n{{g}}\n== H ==\n=== I ===\n{{j}}", "a\n\nB\n\nc\n\nD\n\ne"),
        ("== A ==\n=== B ===\nc", "A\n\nB\n\nc"),
        ("<syntaxhighlight lang=c>a = [[1]];</syntaxhighlight>", "a = [[1]];"),
        ("{{unclosed [[x", "{{unclosed [[x"),
    ],
)
def test_wikitext(wikitext, text):
    assert wiki_text(wikitext) == text


def test_pages_of_a_wiki_that_fall():
    reader = WikiPages((0, 4))

    def reason(text: str = "x", **options: object) -> str:
        return reader.of_page(parse_page(wiki_page("A", text, **options)), HEAD).reason  # type: ignore[arg-type]

    assert reason() == reason(namespace=4) == ""
    assert reason(namespace=1) == "namespace-1"
    assert reason(more='<redirect title="B" />') == "redirect"
    assert reason(model="json") == "model-json"
    assert reason("{{a}}") == reason("") == "empty"
    for bomb in ("[[a|", "{{a|", "<b>", "<ref>", "[http://a ", "{{a|b=[[c|"):
        assert reason(bomb * 10_000) == "max-open-brackets"


@pytest.mark.parametrize(
    "text",
    ["{{a|b=}}" * 999, "[[a]] [http://b c]\n" * 999, "{|\n| a {{{b|}}}\n|}\n" * 999, "<br><p>a</p><ref/>" * 999],
)
def test_brackets_that_close_cost_nothing(text):
    assert pages.reread_characters(text) == 0


def test_brackets_that_stay_open_cost_the_rest_of_the_page():
    assert pages.reread_characters("ab[[cd") == 4
    assert pages.reread_characters("{{ [[ }} x") == 7
    assert pages.reread_characters("[http://a b\nc") == 11


def test_a_page_has_no_address_where_the_dump_names_none():
    page = WikiPages((0,)).of_page(parse_page(wiki_page("A", "x")), DumpHead("", "", {}))
    assert page.fields == {"id": "1", "url": None, "title": "A", "date": "2026-11-01T00:00:00Z", "language": None}
