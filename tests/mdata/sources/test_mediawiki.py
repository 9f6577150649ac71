"""Dumps of MediaWiki: pages however the dump is packed and divided, long and torn ones, and what is no dump."""

from __future__ import annotations

import bz2
import re
from pathlib import Path

import pytest

from mdata.errors import BadInputError
from mdata.sources.chunk import chunks
from mdata.sources.input_files import find_inputs
from mdata.sources.mediawiki import NotAPage, parse_head, parse_page, split_pages
from mdata.sources.record_batch import ReadSpec
from tests.helpers.pages import DUMP_END, DUMP_HEAD, wiki_page

PAGES = [wiki_page(f"P {number}", "x" * number * 300, number=number) for number in range(1, 40)]
DUMP = DUMP_HEAD + b"".join(PAGES) + DUMP_END


def read(path: Path, *, chunk_bytes: int = 10_000, **spec: object):
    (file,) = find_inputs([path], formats=("warc", "mediawiki", "html")).files
    return list(chunks([file], chunk_bytes, spec=ReadSpec(**spec)))  # type: ignore[arg-type]


def written(folder: Path, data: bytes, name: str = "wiki.xml") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def titles(found) -> list[str]:
    return [parse_page(page).title for chunk in found for page in split_pages(chunk.data)[1]]


def test_pages_do_not_depend_on_packing_and_chunks(tmp_path):
    members = [DUMP_HEAD, b"".join(PAGES[:20]), b"".join(PAGES[20:]), DUMP_END]
    packed = written(tmp_path, b"".join(map(bz2.compress, members)), "x-articles-multistream.xml-p1p39.bz2")
    plain = written(tmp_path, DUMP)
    expected = [f"P {number}" for number in range(1, 40)]
    for path in (plain, packed):
        for chunk_bytes in (1, 10_000, 1 << 20):
            found = read(path, chunk_bytes=chunk_bytes)
            assert titles(found) == expected
            assert all(chunk.data.startswith(DUMP_HEAD.rstrip()) for chunk in found)
    assert [chunk.data for chunk in read(plain)] == [chunk.data for chunk in read(packed)]


def test_the_fields_of_a_page_and_its_head():
    head = parse_head(DUMP_HEAD)
    assert (head.language, head.names) == ("de", {6: "Datei", 14: "Kategorie"})
    assert head.url('A "\u00df" (b)') == "https://de.wikipedia.org/wiki/A_%22%C3%9F%22_(b)"
    assert parse_head(b"<mediawiki>").url("A") is None and parse_head(b"<mediawiki a=>").names == {}
    page = parse_page(wiki_page("A", "1 < 2 & 3", number=5, namespace=-1, more='<redirect title="B" />', model="css"))
    assert (page.id, page.title, page.namespace, page.is_redirect) == ("5", "A", -1, True)
    assert (page.date, page.model, page.text) == ("2026-11-01T00:00:00Z", "css", "1 < 2 & 3")
    twice = wiki_page("A", "old").replace(b"</page>", b"<revision><text>new</text></revision></page>")
    assert parse_page(twice).text == "new"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<page><title>A</page>", "not XML: mismatched tag"),
        (b"<page>&a;</page>", "not XML: undefined entity"),
        (b"<page><title>A</title><ns>0</ns></page>", "no title, namespace or revision"),
        (b"<page><title>A</title><ns>x</ns><revision/></page>", "no title, namespace or revision"),
        (b"<page>\xff</page>", "not XML"),
    ],
)
def test_a_page_that_cannot_be_parsed(data, reason):
    with pytest.raises(NotAPage, match=reason):
        parse_page(data)


def test_a_page_that_is_too_long_is_cut(tmp_path):
    long = wiki_page("long", "y" * 300_000)
    path = written(tmp_path, DUMP_HEAD + PAGES[0] + long + PAGES[1] + DUMP_END)
    (chunk,) = read(path, chunk_bytes=1 << 20, max_record_bytes=20_000)
    first, cut, last = split_pages(chunk.data)[1]
    assert parse_page(first).title == "P 1" and parse_page(last).title == "P 2"
    assert len(cut) == 20_001 + len("</page>") and cut.startswith(long.lstrip()[:20_001])


@pytest.mark.parametrize(
    ("data", "pages", "message"),
    [
        (b"<html>", 0, "page 0 .* of the text[)]: b'<html>' in place of <mediawiki>"),
        (b"", 0, "in place of <mediawiki>"),
        (DUMP_HEAD, 0, "in place of <mediawiki>"),
        (DUMP[: -len(DUMP_END)], 39, "page 40 .* of the text[)]: no </mediawiki>"),
        (DUMP[:-400], 38, "page 39 .* of the text[)]: it ends inside of a page"),
        (DUMP_HEAD + PAGES[0] + b"<p>" + DUMP_END, 1, "page 2 .* in place of <page>"),
        (2 * bz2.compress(DUMP), 39, "after </mediawiki>; one file is one dump"),
        (bz2.compress(DUMP)[:-10], 13, "it ends in the middle of bzip2 data|damaged"),
    ],
)
def test_damage_is_an_error_or_ends_the_file(data, pages, message, tmp_path):
    path = written(tmp_path, data)
    with pytest.raises(BadInputError) as caught:
        read(path)
    found = read(path, keep_torn=True)
    assert len(titles(found)) == pages and all(not chunk.damage for chunk in found[:-1])
    assert re.search(message, found[-1].damage) and str(path) in str(caught.value)
