"""`extract`: lines for pages, the same bytes however the work is divided or interrupted, torn files, and refusals."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from pathlib import Path

import pytest

pytest.importorskip("resiliparse")
pytest.importorskip("mwparserfromhell")

from mdata.cleaning import text_job
from mdata.cleaning.extract import ExtractRules, extract
from mdata.cleaning.text_job import TextJobOptions, TextJobResult
from mdata.errors import BadInputError, ResourceError, UsageError
from tests.helpers.failures import durable_calls
from tests.helpers.pages import DUMP_END, DUMP_HEAD, answer, html, sentences, warc_record, wiki_page


def run(source: object, output: Path, **options: object) -> TextJobResult:
    rules = options.pop("rules", ExtractRules())
    return extract(TextJobOptions(input=source, output=output, **{"workers": 1, **options}), rules)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a WARC file of 40 pages, a dump of 40, and a file of HTML."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("pages")
    found = [warc_record(answer(html(sentences(draw))), number=number) for number in range(40)]
    found[10] = warc_record(answer(html(), status="500 Broken"), number=10)
    found[20] = warc_record(b"GET /", kind="request")
    (folder / "a.warc.gz").write_bytes(b"".join(map(gzip.compress, found)))
    pages = [wiki_page(f"P {number}", sentences(draw), number=number) for number in range(40)]
    pages[5] = wiki_page("talk", "x", namespace=1)
    (folder / "b.xml.bz2").write_bytes(bz2.compress(DUMP_HEAD + b"".join(pages) + DUMP_END))
    (folder / "c.html").write_bytes(html())
    (folder / "d.txt").write_text("no page")
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "out"
    run(source, folder)
    return folder


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_job, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(text_job, "_CHECKPOINT_S", 0)


def content(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("**/*.jsonl"))]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_page(source, whole, tmp_path):
    removed = tmp_path / "removed.jsonl"
    result = run(source, tmp_path / "out", removed=str(removed), json_key="body")
    assert (result.rows, result.kept, result.filtered, result.bad) == (81, 78, 1, 0)
    assert result.removed == {"namespace-1": 1, "status-5xx": 1}
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [
        "a.jsonl",
        "b.jsonl",
        "c.jsonl",
        "extract.report",
    ]
    first, *_ = lines(tmp_path / "out/a.jsonl")
    assert list(first) == ["body", "id", "url", "title", "date", "language"]
    assert [(row["file"], row["row"], row["reason"], row["title"]) for row in lines(removed)] == [
        (str(source / "a.warc.gz"), 11, "status-5xx", None),
        (str(source / "b.xml.bz2"), 6, "namespace-1", "talk"),
    ]
    assert lines(whole / "c.jsonl")[0]["id"] == "c.html"
    made_of = json.loads((whole / "extract.report").read_text())["made_of"]["extract"]
    assert made_of["extractor"] == "resiliparse" and made_of["versions"]["mwparserfromhell"]


@pytest.mark.parametrize(("workers", "count"), [(4, 1), (1, 3)])
def test_bytes_do_not_depend_on_workers_and_parts(source, whole, workers, count, small_chunks, tmp_path):
    for number in range(1, count + 1):
        run(source, tmp_path / "out", workers=workers, shard=f"{number}/{count}" if count > 1 else None)
    assert content(tmp_path / "out") == content(whole)


def test_an_interrupted_run_continues(source, whole, small_chunks, tmp_path, monkeypatch):
    with durable_calls(monkeypatch) as calls:
        run(source, tmp_path / "counted")
    for stop in range(3, len(calls.seen), len(calls.seen) // 3):
        out = tmp_path / str(stop)
        with durable_calls(monkeypatch, stop), pytest.raises(ResourceError):
            run(source, out)
        run(source, out)
        assert content(out) == content(whole)


@pytest.mark.parametrize("name", ["a.warc.gz", "b.xml.bz2"])
def test_a_torn_file_is_a_bad_row(name, source, whole, tmp_path):
    path = tmp_path / name
    path.write_bytes((source / name).read_bytes()[:-40])
    with pytest.raises(BadInputError, match=rf"{name}:\d+: .*\n.*no page after this place can be read\n.*download"):
        run(path, tmp_path / "stopped")
    plain = tmp_path / name.rpartition(".")[0]
    decompressed = (gzip if name.endswith(".gz") else bz2).decompress((source / name).read_bytes())
    plain.write_bytes(decompressed[:-40])
    with pytest.raises(BadInputError, match=r" is damaged at [^:]*: it ends [^:]*\n  found: no page .*\n  try: [^:]*$"):
        run(plain, tmp_path / "stopped")
    after = tmp_path / "c.html"
    after.write_bytes(html())
    result = run([path, after], tmp_path / "out", on_error="quarantine", quarantine=str(tmp_path / "bad"))
    assert result.bad == 1 and [row["kind"] for row in lines(tmp_path / "bad")] == ["torn"]
    stem = name.partition(".")[0]
    pages = lines(whole / f"{stem}.jsonl")
    found = lines(tmp_path / f"out/{stem}.jsonl")
    assert found == pages[: len(found)] and (len(found) >= 37 or name == "b.xml.bz2")
    assert len(lines(tmp_path / "out/c.jsonl")) == 1


def test_a_page_of_a_dump_that_is_no_page(tmp_path):
    bad = wiki_page("A", "x").replace(b"<ns>0</ns>", b"<ns>0<ns>")
    (tmp_path / "a.xml").write_bytes(DUMP_HEAD + wiki_page("B", "y") + bad + wiki_page("C", "z" * 3000) + DUMP_END)
    with pytest.raises(BadInputError, match=r"a\.xml:2: not a MediaWiki page: not XML"):
        run(tmp_path / "a.xml", tmp_path / "out")
    result = run(tmp_path / "a.xml", tmp_path / "out", on_error="skip", max_record_bytes=2000)
    assert (result.kept, result.bad, result.removed) == (1, 1, {"max-record-bytes": 1})


def test_what_it_refuses(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.dat").write_text("x")
    with pytest.raises(UsageError, match="no input in this folder"):
        run(tmp_path, tmp_path / "out")
    with pytest.raises(UsageError, match=r"a.dat: its name does not tell its format\n.*warc, mediawiki, html"):
        run(tmp_path / "a.dat", tmp_path / "out")
    with pytest.raises(UsageError, match="input format 'jsonl'"):
        run(tmp_path / "a.dat", tmp_path / "out", input_format="jsonl")
    with pytest.raises(BadInputError, match="this dump of MediaWiki is damaged at page 0"):
        run(tmp_path / "a.dat", tmp_path / "out", input_format="mediawiki")
    with pytest.raises(UsageError, match="max_record_bytes is 0\n  expected: at least 1"):
        run(tmp_path / "a.dat", tmp_path / "out", max_record_bytes=0)
    with pytest.raises(UsageError, match="neither rows_only nor where"):
        run(tmp_path / "a.dat", tmp_path / "out", rows_only=True)
    with pytest.raises(UsageError, match="extractor=x"):
        ExtractRules(extractor="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="namespaces is empty"):
        ExtractRules(namespaces=())
