"""WARC and WET: the records that the twin and warcio find, in chunks of whole records, compressed or not."""

from __future__ import annotations

import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import BadInputError, UsageError
from mdata.sources import warc
from mdata.sources.chunk import chunks
from mdata.sources.record_batch import ReadSpec
from mdata.sources.row_filter import parse_filter
from mdata.sources.text_template import parse_template
from tests.helpers.examples import examples
from tests.mdata.sources.inputs import find_files, texts
from tests.reference import warc as twin

KINDS = st.sampled_from(["conversion", "resource", "response", "warcinfo", "request"])
TYPES = st.sampled_from(["text/plain", "text/plain; charset=UTF-8", "TEXT/PLAIN", "text/html", "application/http"])
BLOCKS = st.binary(max_size=30) | st.text(max_size=20).map(str.encode) | st.just(b"\r\n\r\nWARC/1.0\r\n")
RECORDS = st.lists(st.tuples(KINDS, TYPES, BLOCKS), max_size=8)


def record(kind, mime, block, end="\r\n", **more):
    fields = {"WARC-Type": kind, "Content-Type": mime, "Content-Length": len(block), **more}
    lines = ["WARC/1.0", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return end.join(lines).encode() + block + 2 * end.encode()


def wet(folder, data, name="x.wet"):
    (folder / name).write_bytes(data)
    (file,) = find_files([folder / name])
    assert file.format == "warc"
    return file


@examples(150)
@given(
    records=RECORDS, chunk_bytes=st.integers(1, 200), end=st.sampled_from(["\n", "\r\n"]), longest=st.integers(0, 30)
)
def test_records_are_those_of_the_twin_in_any_packing(tmp_path_factory, records, chunk_bytes, end, longest):
    folder = tmp_path_factory.mktemp("warc")
    members = [record(*one, end=end) for one in records]
    good, bad = [], []
    for row, (fields, block) in enumerate(twin.records(b"".join(members)), 1):
        assert (fields["warc-type"], fields["content-type"], block) == records[row - 1]
        if fields["warc-type"] not in ("conversion", "resource") or "text/plain" not in fields["content-type"].lower():
            continue
        if len(block) > longest:
            bad.append((row, "too-long"))
            continue
        try:
            good.append(block.decode())
        except UnicodeDecodeError:
            bad.append((row, "not-utf8"))
    spec = ReadSpec(max_record_bytes=longest)
    plain, packed = wet(folder, b"".join(members)), wet(folder, b"".join(map(gzip.compress, members)), "x.warc.gz")
    assert texts(plain, chunk_bytes, spec) == texts(packed, chunk_bytes, spec) == (good, bad, len(records))
    found = list(chunks([plain], chunk_bytes, spec=spec))
    assert [c.data for c in found] == [c.data for c in chunks([packed], chunk_bytes, spec=spec)]
    assert all(len(c.data) >= chunk_bytes for c in found[:-1])
    assert sum(c.file_bytes for c in found) == (plain.size_bytes if records else 0)


def test_records_are_those_of_warcio(tmp_path):
    """The library reads what it wrote itself; so do we."""
    warcio = pytest.importorskip("warcio")
    from warcio.warcwriter import WARCWriter

    path = tmp_path / "x.warc.gz"
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        writer.write_record(writer.create_warcinfo_record("x.warc.gz", {"software": "a test"}))
        for number in range(40):
            block = f"text {number} caf\u00e9\n".encode() * (number % 5)
            writer.write_record(
                writer.create_warc_record(
                    f"http://x/{number}", "conversion", payload=io.BytesIO(block), warc_content_type="text/plain",
                    warc_headers_dict={"WARC-Identified-Content-Language": "eng"},
                )
            )  # fmt: skip
    with path.open("rb") as file:
        wanted = [
            (one.rec_headers.get_header("WARC-Target-URI"), one.content_stream().read().decode())
            for one in warcio.ArchiveIterator(file)
            if one.rec_type == "conversion"
        ]
    assert len(wanted) == 40
    (file,) = find_files([path])
    spec = ReadSpec(template=parse_template("{WARC-Target-URI} {text}"), where=parse_filter("text is not null"))
    assert texts(file, 300, spec) == ([f"{uri} {text}" for uri, text in wanted], [], 41)
    assert texts(file, 300)[0] == [text for _, text in wanted]


def test_fields_of_the_header_are_columns(tmp_path):
    file = wet(
        tmp_path,
        record("conversion", "text/plain", b"one", **{"WARC-Language": "eng"})
        + record("conversion", "text/plain", b"two", **{"warc-language": "deu\r\n  and more"})
        + record("conversion", "text/plain", b"three"),
    )
    kept = texts(file, 99, ReadSpec(where=parse_filter("WARC-Language = 'deu and more' or WARC-Language is null")))
    assert kept == (["two", "three"], [], 3)
    made = texts(file, 99, ReadSpec(template=parse_template("{text} in {WARC-Language}")))
    assert made == (["one in eng", "two in deu and more"], [(3, "no-key")], 3)
    with pytest.raises(UsageError, match="is WARC, which has one text per document"):
        texts(file, 99, ReadSpec(json_keys=("a", "b")))


GOOD = record("conversion", "text/plain", b"one")


@pytest.mark.parametrize(
    ("data", "reason"),
    [(GOOD + b"junk", r" 2 \(byte 87.*\n.*b'junk' in place of WARC/1.0"), (GOOD[:-6], "ends 2 bytes before"),
     (GOOD[:30], "ends inside of a header"), (b"WARC/1.0\r\nx: 1\r\n\r\n", "no Content-Length"),
     (b"WARC/1.0\r\nContent-Length: -1\r\n\r\n", "Content-Length '-1' is not a number"),
     (b"WARC/1.0\r\nx\r\n\r\n", "the header line b'x' has no colon"),
     (b"WARC/1.0\r\n" + b"x: " + b"y" * (1 << 22), "a header longer than"),
     (b"WARC/1.0\r\nContent-Length: 99999999999999\r\n\r\nabc", "it ends 99,999,999,999,996 bytes before")],
)  # fmt: skip
def test_damage_is_named_with_its_record(tmp_path, data, reason):
    file = wet(tmp_path, data)
    with pytest.raises(BadInputError, match=rf"x\.wet: the WARC data is damaged at record(.|\n)*{reason}"):
        texts(file, 10)


def test_a_block_that_is_too_long_is_never_held(tmp_path):
    data = record("conversion", "text/plain", b"x" * 3_000_000) + GOOD
    file = wet(tmp_path, gzip.compress(data), "x.wet.gz")
    spec = ReadSpec(max_record_bytes=1000)
    assert texts(file, 100, spec) == (["one"], [(1, "too-long")], 2)
    (first, _) = chunks([file], 100, spec=spec)
    assert len(first.data) < 1200
    largest, kept = [], warc._without_line_ends

    def seen(text, at):
        largest.append(len(text._buffer))
        return kept(text, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warc, "_without_line_ends", seen)
        list(chunks([file], 100, spec=spec))
    assert max(largest) < 1_000_000
