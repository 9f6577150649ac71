"""`extract`: text from pages of the web and of MediaWiki (mdata/cleaning/pages.py), as lines of JSON.

A row is a record of WARC, a page of a dump, or a file of HTML. Each page that stays becomes an object with its text,
and id, url, title, date and language, which are null if the page does not state them. WARC records without a server's
response are left out and counted as filtered; everything after damage in a file counts as one bad row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from mdata.cleaning.pages import Extracted, HtmlPages, WikiPages
from mdata.cleaning.text_job import (
    Edit,
    RecordEdits,
    RecordWork,
    TextBatch,
    TextJobOptions,
    TextJobResult,
    run_text_job,
)
from mdata.errors import UsageError, install_command
from mdata.progress import SILENT, Progress
from mdata.sources.chunk import Chunk
from mdata.sources.input_files import Format
from mdata.sources.mediawiki import NotAPage, parse_head, parse_page, split_pages
from mdata.sources.record_batch import BadRecord, BadRow, ReadSpec
from mdata.sources.warc import records

PAGE_FORMATS: tuple[Format, ...] = ("warc", "mediawiki", "html")


@dataclass(frozen=True, kw_only=True)
class ExtractRules:
    """How pages become text.

    Args:
        extractor: for HTML; "trafilatura" leaves out more of the text around an article, at a twentieth of the speed.
        main_content: of HTML; False: menus, headers and the like stay.
        namespaces: of a wiki; pages of others are removed.
    """

    extractor: Literal["resiliparse", "trafilatura"] = "resiliparse"
    main_content: bool = True
    namespaces: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.extractor not in ("resiliparse", "trafilatura"):
            raise UsageError(f"extractor={self.extractor}", expected="resiliparse or trafilatura")
        if not self.namespaces:
            raise UsageError("namespaces is empty", expected="numbers such as 0, the articles")


@dataclass
class _Extract:
    """See `RecordWork`."""

    rules: ExtractRules
    max_bytes: int
    html: HtmlPages | None = None
    wiki: WikiPages | None = None

    name, keys, writes, formats = "extract", (), True, PAGE_FORMATS

    def record(self) -> dict[str, Any]:
        versions = {name: _version(name) for name in ("resiliparse", "mwparserfromhell")}
        if self.rules.extractor == "trafilatura":
            versions["trafilatura"] = _version("trafilatura")
        return {**vars(self.rules), "versions": versions}

    def prepare(self) -> None:
        self.wiki = WikiPages(self.rules.namespaces)
        self.html = HtmlPages(self.rules.extractor, main_content=self.rules.main_content, max_bytes=self.max_bytes)

    def edit(self, batch: TextBatch) -> tuple[list[Edit], Counter[str]]:
        raise AssertionError("pages have no text before extraction")

    def edit_records(self, chunk: Chunk, data: bytes, spec: ReadSpec) -> RecordEdits:
        """The text of each page, or why it is removed."""
        edits: list[tuple[int, Edit]] = []
        bad_rows: list[BadRow] = []
        rows = 0
        for page in self._pages(chunk, data, spec):
            rows += 1
            if isinstance(page, BadRow):
                bad_rows.append(replace(page, row=rows))
            elif page.reason != "skipped":
                edits.append((rows, _edit_of(page, spec.json_keys[0])))
        return RecordEdits(rows, edits, bad_rows)

    def _pages(self, chunk: Chunk, data: bytes, spec: ReadSpec) -> Iterator[Extracted | BadRow]:
        assert self.html is not None and self.wiki is not None, "prepared before"
        if chunk.source.format == "html" and not chunk.damage:
            yield self.html.of_file(chunk.source.path.name, data)
        elif chunk.source.format == "warc":
            for header, block in records(data, longest=spec.max_record_bytes):
                yield self.html.of_record(header, block)
        elif chunk.source.format == "mediawiki":
            yield from self._wiki_pages(data, spec)
        if chunk.damage:
            yield BadRow(0, "torn", chunk.damage, "no page after this place can be read")

    def _wiki_pages(self, data: bytes, spec: ReadSpec) -> Iterator[Extracted | BadRow]:
        assert self.wiki is not None, "prepared before"
        start, pages = split_pages(data)
        head = parse_head(start)
        for text in pages:
            if len(text) > spec.max_record_bytes:
                yield Extracted("", "max-record-bytes", {})
                continue
            try:
                page = parse_page(text)
            except NotAPage as error:
                yield BadRecord("bad-value", f"not a MediaWiki page: {error}").bad_row(0, text, spec=spec)
                continue
            yield self.wiki.of_page(page, head)

    def summary(self, counts: Counter[str]) -> dict[str, Any]:
        return {}


def _edit_of(page: Extracted, key: str) -> Edit:
    if page.reason:
        return Edit(page.reason, about=page.fields)
    return Edit(lines=(orjson.dumps({key: page.text, **page.fields}),))


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError as error:
        raise UsageError(f"extract needs {name}, which is not installed", fix=install_command("web")) from error


def extract(
    options: TextJobOptions, rules: ExtractRules = ExtractRules(), progress: Progress = SILENT
) -> TextJobResult:
    """Write the texts of pages; an interrupted command continues.

    Raises:
        UsageError: unusable options or input, a library is missing, or the folder holds a result of other options.
        BadInputError: a file is damaged.
        ResourceError: the disk or memory ran out; run again to continue.
    """
    return run_text_job(options, extract_work(options, rules), progress)


def extract_work(options: TextJobOptions, rules: ExtractRules) -> RecordWork:
    """The work on the pages of a job.

    Raises:
        UsageError: options that do not go together.
    """
    if options.rows_only or options.where is not None:
        raise UsageError("extract has neither rows_only nor where", fix="give them to `mdata clean`, on its output")
    return _Extract(rules, options.max_record_bytes)
