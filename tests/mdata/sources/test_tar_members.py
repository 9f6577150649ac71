"""Tar archives: lines and samples as rows however the archive is packed, what is passed over, and damage."""

from __future__ import annotations

import io
import tarfile

import pytest

from mdata.errors import BadInputError, UsageError
from mdata.sources.chunk import chunks
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec, in_members
from tests.mdata.sources.inputs import ENDINGS, find_files, packed

MEMBERS = {
    "./a.jsonl": b'{"text": "a1"}\n{"text": "a2"}\n\n',
    "d/b.ndjson": b'{"text": "b1"}',
    "d/.hidden.jsonl": b"x",
    "w/0001.json": b'{\n "text": "c", "n": 12345678901234567890123\n}',
    "w/0001.jpg": b"\xff" * 3000,
    "w/0002.txt": b"d\n\xc3\xa9",
    "w/0002.json": b'{"n": 2}',
    "w/0003.txt": b"e",
    "v/0003.txt": b"f",
}
TEXTS = ["a1", "a2", "b1", "c", "d\n\u00e9", "e", "f"]


def archive(members=MEMBERS, **options) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", **options) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        folder = tarfile.TarInfo("w")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    return made.getvalue()


def read(path, *, chunk_bytes=1 << 20, **options):
    """(texts, bad rows as (row, kind)) of an archive."""
    spec = ReadSpec(**options)
    (file,) = find_files([path])
    assert file.format == "tar" and file.streamed
    rows, texts, bad = 0, [], []
    for chunk in chunks([file], chunk_bytes, spec=spec):
        batch = parse(file.format, chunk.data, spec=spec)
        texts += batch.columns[0].sentences
        bad += [(rows + row.row, row.kind) for row in batch.bad_rows]
        rows += batch.rows
    return texts, bad


@pytest.mark.parametrize("compression", ENDINGS)
def test_rows_do_not_depend_on_packing_and_chunks(compression, tmp_path):
    path = tmp_path / f"x.tar{ENDINGS[compression]}"
    path.write_bytes(packed(archive(), compression, 1000))
    for chunk_bytes in (1, 50, 1 << 20):
        assert read(path, chunk_bytes=chunk_bytes) == (TEXTS, [])
    assert read(path, json_keys=("__key__",))[0] == ["w/0003", "v/0003"] if compression == "none" else True


def test_an_archive_is_known_by_its_content(tmp_path):
    long = "n" * 300 + ".jsonl"
    for name, format in (("x", tarfile.GNU_FORMAT), ("y.dat", tarfile.PAX_FORMAT)):
        (tmp_path / name).write_bytes(archive({**MEMBERS, long: b'{"text": "z"}\n'}, format=format))
        assert read(tmp_path / name) == ([*TEXTS, "z"], [])


def test_a_second_text_of_a_sample_is_a_row(tmp_path):
    (tmp_path / "x.tar").write_bytes(archive({"a.txt": b"1", "a.md": b"2", "b.json": b'{"text": "3"}', "b.jpg": b""}))
    assert read(tmp_path / "x.tar") == (["1", "2", "3"], [])


def test_a_second_ending_is_passed_over_beside_a_text(tmp_path):
    members = {
        "a.meta.json": b"{}",
        "a.txt": b"1",
        "b.txt": b"2",
        "b.de.txt": b"3",
        "c.seg.jpg": b"",
        "d.v1.jsonl": b"",
    }
    (tmp_path / "x.tar").write_bytes(archive(members))
    assert read(tmp_path / "x.tar") == (["1", "2"], [])


def test_bad_rows_spoil_no_others(tmp_path):
    members = {
        "a.json": b"{\n",
        "b.txt": b"\xff\n",
        "c.json": b"[1]",
        "d.json": b"[" * 100_000,
        "e.txt": b"x\n" * 40_000,
        "f.jsonl": b'{"text": "' + b"y" * 70_000 + b'"}\n{"text": "good"}\n',
        "g.json": b'{"n": 1}',
        "h.txt": b"last",
    }
    (tmp_path / "x.tar").write_bytes(archive(members))
    texts, bad = read(tmp_path / "x.tar", max_record_bytes=60_000)
    assert texts == ["good", "last"]
    kinds = ["not-json", "not-utf8", "not-object", "too-long", "too-long", "too-long", "no-key"]
    assert bad == list(zip([1, 2, 3, 4, 5, 6, 8], kinds, strict=True))


@pytest.mark.parametrize("chunk_bytes", [1, 50, 1 << 20])
def test_a_bad_row_names_its_member(chunk_bytes, tmp_path):
    members = {
        "./a.jsonl": b'{"text": "1"}\r{"text": "2"}\r\n{"text": "3"}\n{\n\n{"text": "4"}\n{',
        "d/b.txt": b"5",
        "d/b.jpg": b"",
        "d/b.json": b"[]",
        "c/b.jsonl": b'{"text": "6"}\n{',
        "c/c.json": b"{",
        "c/d.txt": b"7",
    }
    (tmp_path / "x.tar").write_bytes(archive(members))
    (file,) = find_files([tmp_path / "x.tar"])
    places, rows = [], 0
    for chunk in chunks([file], chunk_bytes, spec=ReadSpec()):
        batch = parse(file.format, chunk.data, spec=ReadSpec())
        places += [row.place("x.tar", rows) for row in in_members(batch.bad_rows, chunk.members)]
        rows += batch.rows
    assert places == [
        "x.tar:4 (member ./a.jsonl, line 4)",
        "x.tar:5 (member ./a.jsonl, line 5)",
        "x.tar:7 (member ./a.jsonl, line 7)",
        "x.tar:8 (member d/b.txt and d/b.json)",
        "x.tar:10 (member c/b.jsonl, line 2)",
        "x.tar:11 (member c/c.json)",
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (archive()[:1000], "the archive is damaged at byte 1,000\n  found: unexpected end of data"),
        (archive()[:512] + b"x" * 9728, "the archive is damaged"),
        (b"b" + archive()[1:], "the archive is damaged at byte 0\n  found: bad checksum"),
        (archive()[:1024] + b"x" * 1024, "no header of a member, nor the end of the archive"),
        (archive() + archive(), "no header of a member, nor the end of the archive"),
    ],
)
def test_damage_is_named(data, message, tmp_path):
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(BadInputError, match=message):
        read(tmp_path / "x.tar")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.jsonl.gz": b"x"}, "its member a.jsonl.gz is an archive or compressed\n  try: unpack"),
        ({"a.jpg": b"x"}, "x.tar has no members with text"),
        ({"a.txt": b"x", "b.en.txt": b"y"}, "its member b.en.txt has two endings"),
        ({"a.en.txt": b"x", "b.txt": b"y"}, "its member a.en.txt has two endings"),
        ({"d/a.meta.JSON": b"{}", "a.txt": b"y"}, "its member d/a.meta.JSON has two endings"),
    ],
)
def test_what_would_be_lost_is_refused(members, message, tmp_path):
    (tmp_path / "x.tar").write_bytes(archive(members))
    with pytest.raises(UsageError, match=message):
        read(tmp_path / "x.tar")
