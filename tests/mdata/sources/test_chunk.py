"""Chunks of any size over any mixture of line ends: every record once, the same with any compression."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import BadInputError, UsageError
from mdata.sources.chunk import Chunk, chunk_digest, chunks, read_chunk
from mdata.sources.record_batch import ReadSpec
from mdata.sources.record_boundaries import LINES, PARAGRAPHS, chunk_span
from tests.helpers.examples import examples
from tests.mdata.sources.inputs import ENDINGS, PACKERS, chunk_data, find_files, packed, texts, write
from tests.reference import sources as twin

BITS = [b"a", b"bc", b"\xc3\xa9", b"\n", b"\r", b"\r\n", b"\n\n", b"\x0c", b" ", b"\xe2\x80\xa8", b"long line " * 3]
TEXT = st.lists(st.sampled_from(BITS), max_size=30).map(b"".join)
LONGEST = st.sampled_from([0, 1, 3, 9, 1 << 20])


class Memory:
    """A text in memory that refuses to give much at once."""

    def __init__(self, data, most=1 << 17):
        self.data, self.most = data, most

    def read(self, place, size):
        assert place >= 0 and 0 < size <= self.most, (place, size)
        return self.data[place : place + size]


@examples(400)
@given(text=TEXT, chunk_bytes=st.integers(1, 40), longest=LONGEST, by_paragraph=st.booleans(), scan=st.integers(1, 9))
def test_spans_equal_the_twin(text, chunk_bytes, longest, by_paragraph, scan):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mdata.sources.record_boundaries._SCAN_BYTES", 8 + scan)
        rule = PARAGRAPHS if by_paragraph else LINES
        found = []
        for start in range(0, len(text), chunk_bytes):
            stop = min(start + chunk_bytes, len(text))
            first, last = chunk_span(Memory(text), start, stop=stop, rule=rule, longest=longest)
            found.append(text[first:last])
    assert found == twin.chunks(text, chunk_bytes, by_paragraph=by_paragraph, longest=longest)


@given(text=TEXT, chunk_bytes=st.integers(1, 40))
def test_lines_are_those_of_a_python_text_file(tmp_path_factory, text, chunk_bytes):
    expected = [line.rstrip("\n") for line in io.TextIOWrapper(io.BytesIO(text), encoding="utf-8")]
    if expected and not expected[-1].strip(" \x0c"):
        expected.pop()
    file = write(tmp_path_factory.mktemp("lines"), text)
    found = [line.decode() for data in chunk_data(file, chunk_bytes) for line in data.splitlines()]
    assert found == expected


@examples(60)
@given(
    text=TEXT,
    chunk_bytes=st.integers(1, 40),
    longest=LONGEST,
    cut=st.integers(0, 60),
    name=st.sampled_from(["x.jsonl", "x.txt"]),
    documents=st.sampled_from(["file", "paragraph"]),
)
def test_packed_chunks_are_the_plain_ones(tmp_path_factory, text, chunk_bytes, longest, cut, name, documents):
    spec = ReadSpec(max_record_bytes=longest, text_documents=documents)
    folder = tmp_path_factory.mktemp("packed")

    def facts(file):
        found = list(chunks([file], chunk_bytes, spec=spec))
        assert [chunk.number for chunk in found] == list(range(len(found)))
        assert sum(chunk.file_bytes for chunk in found) == (file.size_bytes if found else 0)
        return [(chunk.start, chunk.stop, read_chunk(chunk, spec)) for chunk in found]

    plain = facts(write(folder, text, name=name))
    if name == "x.jsonl":
        expected = twin.chunks(text, chunk_bytes, by_paragraph=False, longest=longest, blank_end=False)
        assert [data for _, _, data in plain] == expected
    for compression in PACKERS:
        assert facts(write(folder, text, compression, name=name, cut=cut)) == plain, compression
    if name == "x.txt" and documents == "paragraph" and longest > 100:
        expected = [paragraph.decode() for paragraph in twin.documents(text)]
        assert texts(write(folder, text, name=name), chunk_bytes, spec)[0] == expected


@given(text=TEXT, chunk_bytes=st.integers(1, 12), first=st.integers(0, 12), compression=st.sampled_from([*ENDINGS]))
def test_reading_may_begin_at_any_chunk(tmp_path_factory, text, chunk_bytes, first, compression):
    folder = tmp_path_factory.mktemp("begin")
    files = [write(folder, text, "zstd", name=name) for name in ("a", "c")]
    files.insert(1, write(folder, text, compression, name="b"))
    spec = ReadSpec()

    def listed(**options):
        found = chunks(files, chunk_bytes, spec=spec, **options)
        return [(p.file_number, p.number, p.start, read_chunk(p, spec)) for p in found]

    everything = listed()
    assert [p for p in everything if p[:2] >= (1, first)] == listed(start=(1, first))


@pytest.mark.parametrize("compression", ENDINGS)
@pytest.mark.parametrize("chunk_bytes", [1, 5, 16, 1 << 20])
def test_only_the_last_line_may_be_blank(tmp_path, compression, chunk_bytes):
    line = b'{"text": "a"}'

    def found(data, **spec):
        return texts(write(tmp_path, data, compression), chunk_bytes, ReadSpec(**spec))

    for end in (b"", b"\n", b"\r\n", b"\n\n", b"\r\n\r\n", b"\n \t", b"\r\r", b"\n \n", b"\n\x0b\x0c\n"):
        assert found(line + b"\n" + line + end) == (["a", "a"], [], 2), end
    assert found(line + b"\n\n\n") == (["a"], [(2, "blank")], 2)
    assert found(line + b"\n\n" + line) == (["a", "a"], [(2, "blank")], 3)
    assert found(b"\n") == found(b"  ") == ([], [], 0)
    assert found(line + b"\n\xc2\xa0") == (["a"], [(2, "blank")], 2)  # a blank of Unicode, not of ASCII
    assert found(line + b"\n" + b" " * 20, max_record_bytes=19) == (["a"], [(2, "too-long")], 2)


def test_a_whole_text_file_is_one_chunk_without_its_mark(tmp_path):
    data = b"\xef\xbb\xbfone\r\n\r\ntwo\n"
    for compression in ENDINGS:
        assert chunk_data(write(tmp_path, data, compression, name="a.txt"), 2) == [data[3:]]
        assert chunk_data(write(tmp_path, b"", compression, name="a.txt"), 2) == [b""]
    paragraphs = ReadSpec(text_documents="paragraph")
    for compression in ENDINGS:
        assert texts(write(tmp_path, data, compression, name="a.txt"), 4, paragraphs)[0] == ["one", "two"]


def test_the_hash_of_a_chunk():
    # BLAKE3 of nothing, from the algorithm's test vectors.
    assert chunk_digest(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_one_text_a_document(tmp_path):
    file = write(tmp_path, b"x", name="a.txt")
    with pytest.raises(UsageError, match=r"a\.txt is plain text(.|\n)*2 keys: text, title"):
        next(chunks([file], 9, spec=ReadSpec(json_keys=("text", "title"))))


@pytest.mark.parametrize("compression", PACKERS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "tail", "nothing"])
def test_damage_is_named_after_what_came_before(tmp_path, compression, damage):
    text = b'{"text": "%d"}\n' * 20_000
    good = PACKERS[compression](text)
    data = {
        "cut": good + good[:-9],
        "flipped": good + good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :],
        "tail": good + b"\1garbage",
        "nothing": good[:7],
    }[damage]
    (tmp_path / "x").write_bytes(data)
    (file,) = find_files([tmp_path / "x"])
    seen = []
    with pytest.raises(BadInputError, match=rf"x: the {compression} data is damaged after \d+ bytes of text"):
        seen.extend(chunks([file], 1000, spec=ReadSpec()))
    # What comes within the last 64 KiB before the damage may be lost with it.
    assert b"".join(chunk.data for chunk in seen)[:200_000] == (b"" if damage == "nothing" else text[:200_000])


@pytest.mark.parametrize("compression", ENDINGS)
def test_a_line_of_any_length_is_never_held(tmp_path, compression):
    """A line of 24 MB between two good ones, in chunks of 64 KB and records of 100 KB."""
    text = b'{"text": "a"}\n{"text": "' + b"x" * 24_000_000 + b'"}\r\n{"text": "b"}\n'
    spec = ReadSpec(max_record_bytes=100_000)
    for name, chunk_bytes in (("x.jsonl", 1 << 16), ("x.txt", 1 << 16)):
        file = write(tmp_path, text, compression, name=name)
        sizes = [len(data) for data in chunk_data(file, chunk_bytes, spec)]
        assert max(sizes) <= chunk_bytes + 100_004
    assert texts(write(tmp_path, text, compression), 1 << 16, spec) == (["a", "b"], [(2, "too-long")], 3)
    assert texts(file, 1 << 16, spec) == ([], [(1, "too-long")], 1)


def test_a_stream_holds_a_chunk_and_no_more(tmp_path):
    from mdata.sources import streams

    file = write(tmp_path, b"x" * 9_000_000 + b"\n", "gzip")
    largest = 0

    class Watched(bytearray):
        def __iadd__(self, more):
            nonlocal largest
            result = super().__iadd__(more)
            largest = max(largest, len(self))
            return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "bytearray", Watched, raising=False)
        spec = ReadSpec(max_record_bytes=1 << 16)
        parts = list(streams.stream_chunks(file, 1 << 16, spec=spec, one_chunk=False, stopped=lambda: False))
    assert len(parts) == 138 and 1 << 16 < largest < 1 << 20


@contextmanager
def standard_input(data):
    """The data, given through a pipe by another process, as descriptor 0."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            while data:
                data = data[os.write(writer, data[:1000]) :]
        finally:
            os._exit(0)
    os.close(writer)
    kept = os.dup(0)
    os.dup2(reader, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, reader):
            os.close(descriptor)
        os.waitpid(child, 0)


@pytest.mark.parametrize("compression", ENDINGS)
@pytest.mark.parametrize("text", [b"", b'{"text": "a"}\r\n' * 5000])
def test_standard_input_gives_the_chunks_of_the_file(tmp_path, compression, text):
    expected = chunk_data(write(tmp_path, text), 777)
    (stdin,) = find_files(["-"])
    with standard_input(packed(text, compression, 100)):
        assert chunk_data(stdin, 777) == expected


def test_parquet_on_standard_input_is_refused():
    (stdin,) = find_files(["-"])
    with standard_input(b"PAR1" + b"\0" * 100), pytest.raises(UsageError, match="parquet cannot be read from"):
        chunk_data(stdin, 777)


def tar_archive() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in ("a.jsonl", "b.jsonl"):
            content = b'{"text": "a"}\n' * 5
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


@pytest.mark.parametrize("compression", ENDINGS)
@pytest.mark.parametrize("format", ["jsonl", "text"])
def test_a_tar_archive_of_another_name_is_refused_whatever_its_compression(tmp_path, compression, format):
    data = packed(tar_archive(), compression)
    (tmp_path / "three.jsonl").write_bytes(data)
    with pytest.raises(
        UsageError, match=r"three\.jsonl is a tar archive.*, not .*\n  try: rename it to end in \.tar(\.\w+)?, "
    ):
        chunk_data(*find_files([tmp_path / "three.jsonl"], format=format), 777)
    (stdin,) = find_files(["-"], format=format)
    with standard_input(data), pytest.raises(UsageError, match=r"- is a tar archive.*\n  try: --input-format tar"):
        chunk_data(stdin, 777)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"PK\x03\x04....", "is a zip archive"),
        (b"PAR1....", r"is parquet compressed by gzip, not lines of JSON\n  try: decompress it first"),
        (b"WARC/1.0\r\n", r"is warc compressed by gzip, not lines of JSON\n  try: rename it to end in \.warc\.gz"),
    ],
)
def test_what_is_compressed_but_no_text_is_refused(tmp_path, text, reason):
    (tmp_path / "x.jsonl").write_bytes(gzip.compress(text))
    with pytest.raises(UsageError, match=reason):
        chunk_data(*find_files([tmp_path / "x.jsonl"]), 777)


def test_a_text_with_the_word_of_a_tar_archive_is_text(tmp_path):
    text = b"x" * 257 + b"ustar and so on\n"
    for data in (text, gzip.compress(text)):
        (tmp_path / "a.txt").write_bytes(data)
        assert chunk_data(*find_files([tmp_path / "a.txt"]), 777) == [text]


def test_a_chunk_of_a_lost_file_is_usage(tmp_path):
    file = write(tmp_path, b"{}\n")
    file.path.unlink()
    with pytest.raises(UsageError, match=r"x\.jsonl: No such file"):
        read_chunk(Chunk(0, 0, file, 0, 3, None, 3), ReadSpec())
    gone = write(tmp_path, b"{}\n", "gzip")
    gone.path.unlink()
    with pytest.raises(UsageError, match=r"x\.jsonl\.gz: No such file"):
        chunk_data(gone, 9)
