"""Write the text of web pages and of wikis as lines of JSON.

Reads WARC files (the answers of servers), dumps of MediaWiki such as pages-articles.xml.bz2, and files of HTML; plain
or compressed. Each page becomes an object with text, id, url, title, date and language. The output folder gets a file
for each input file, and extract.report, which counts removed pages by reason. An interrupted command continues.

Examples:
  mdata extract --input crawl.warc.gz --output pages --compression zstd
  mdata extract --input wiki.xml --output wiki --on-error skip
"""

from __future__ import annotations

import argparse

from mdata.cleaning.extract import PAGE_FORMATS, ExtractRules, extract, extract_work
from mdata.cleaning.text_job import TextJobOptions, TextWork

from .console import SAME_COMMAND, Console, Parser
from .preprocess_options import size
from .text_job_options import add_bad_rows, counts_of, facts_of, text_job_of

_MAX_RECORD_BYTES = 16 << 20


def add_arguments(parser: Parser) -> None:
    """Input, output and how pages become text."""
    parser.resume = SAME_COMMAND
    add = parser.add_argument
    add("--input", required=True, nargs="+", metavar="PATH", help="files, folders or patterns")
    add("--output", required=True, metavar="FOLDER", help="where the result is written, a file for each input file")
    add("--include", nargs="+", default=(), metavar="PATTERN", help="read only these files of folders")
    add("--exclude", nargs="+", default=(), metavar="PATTERN", help="do not read these files of folders")
    formats = ("auto", *PAGE_FORMATS)
    add("--input-format", choices=formats, default="auto", metavar="F", help=f"one of {' '.join(formats)}")
    add("--json-key", default="text", metavar="KEY", help="key of the text (default: text)")
    extractors = ("resiliparse", "trafilatura")
    add("--extractor", choices=extractors, default="resiliparse", help="for HTML (default: resiliparse)")
    add("--whole-page", action="store_true", help="keep menus, headers and the like of HTML")
    add(
        "--namespaces", nargs="+", type=int, default=(0,), metavar="N", help="of a wiki, to keep (default: 0, articles)"
    )
    add("--compression", choices=("none", "gzip", "zstd"), default="none", help="of the output (default: none)")
    add("--removed", metavar="FILE", help="write what was removed, and why, as lines of JSON")
    page_size = "remove pages of more bytes than this, packed or unpacked (default: 16M)"
    add("--max-record-bytes", type=size, default=_MAX_RECORD_BYTES, metavar="N", help=page_size)
    add_bad_rows(parser)
    add("--shard", metavar="K/N", help="do part K of N, in a folder of its own below the output")
    add("--workers", type=int, default=0, metavar="W", help="processes (default: all cores)")


def _options_of(arguments: argparse.Namespace) -> tuple[TextJobOptions, ExtractRules]:
    rules = ExtractRules(
        extractor=arguments.extractor,
        main_content=not arguments.whole_page,
        namespaces=tuple(arguments.namespaces),
    )
    return text_job_of(arguments), rules


def work_of(arguments: argparse.Namespace) -> tuple[TextJobOptions, TextWork]:
    """The options and the work, for `mdata launch`."""
    options, rules = _options_of(arguments)
    return options, extract_work(options, rules)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `extract` and print what became of the pages."""
    options, rules = _options_of(arguments)
    with console.progress(continues=True) as progress:
        result = extract(options, rules, progress)
    others = f"; records that are not pages: {result.filtered:,} of {result.rows:,}" if result.filtered else ""
    lines = [f"pages with text: {result.kept:,}; removed: {sum(result.removed.values()):,}{others}"]
    lines += counts_of(result)
    console.result("\n".join(lines), facts_of(result))
