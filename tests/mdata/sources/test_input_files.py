"""Which files the arguments name, in which order, and the format of each."""

from __future__ import annotations

import errno
import gzip
import os
from contextlib import nullcontext

import pytest

from mdata.errors import UsageError
from mdata.sources.chunk import chunks
from mdata.sources.input_files import check_unchanged
from mdata.sources.record_batch import ReadSpec
from tests.mdata.sources.inputs import PACKERS, SKIPPABLE, find_files, write
from tests.mdata.sources.test_warc import record


def test_order_is_sorted_and_endings_are_known(tmp_path):
    for name in ["b.jsonl", "a.json", "sub/c.jsonl.gz", "note.txt", "e.jsonl.bin", ".d.jsonl", ".cache/f.json"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")

    def names(*inputs, **options):
        return [str(file.path.relative_to(tmp_path)) for file in find_files(inputs, **options)]

    assert names(tmp_path) == ["a.json", "b.jsonl", "note.txt", "sub/c.jsonl.gz"]
    assert names(tmp_path, format="jsonl") == ["a.json", "b.jsonl", "sub/c.jsonl.gz"]
    assert names(tmp_path, format="text") == ["note.txt"]
    assert names(tmp_path / "b.jsonl", str(tmp_path / "*.json")) == ["b.jsonl", "a.json"]
    assert names(str(tmp_path / "**" / "*.gz")) == ["sub/c.jsonl.gz"]
    assert names(tmp_path / "e.jsonl.bin", tmp_path / ".d.jsonl") == ["e.jsonl.bin", ".d.jsonl"]


@pytest.mark.parametrize(
    ("name", "format"),
    [("a.JSONL", "jsonl"), ("a.jsonlines", "jsonl"), ("a.ndjson", "jsonl"), ("a.NDJSON.GZ", "jsonl"),
     ("A.Json", "jsonl"),
     ("a.TXT", "text"), ("a.Md.Xz", "text")],
)  # fmt: skip
def test_endings_are_known_in_any_case(tmp_path, name, format):
    """A folder of .JSONL files gave nothing of them, and said nothing."""
    (tmp_path / "b.jsonl").write_text("{}\n")
    (tmp_path / name).write_text("{}\n")
    assert {(file.path.name, file.format) for file in find_files([tmp_path])} == {("b.jsonl", "jsonl"), (name, format)}


def test_kinds_of_storage_that_are_not_read_are_told():
    with pytest.raises(UsageError, match="mdata does not read abfss://") as caught:
        find_files(["abfss://c@a/x"])
    assert "copy it first, with " in str(caught.value)


def test_an_address_of_this_machine(tmp_path):
    with pytest.raises(UsageError, match=f"try: {tmp_path}/x"):
        find_files([f"file://{tmp_path}/x"])


def test_a_file_whose_name_holds_a_star_is_itself(tmp_path):
    (tmp_path / "a*.jsonl").write_text("{}\n")
    (tmp_path / "ab.jsonl").write_text("{}\n")
    assert [f.path.name for f in find_files([tmp_path / "a*.jsonl"])] == ["a*.jsonl"]


@pytest.mark.parametrize("compression", PACKERS)
@pytest.mark.parametrize("data", [b"", b"{}\n"])
def test_content_says_how_a_file_is_packed(tmp_path, compression, data):
    (tmp_path / "plain.jsonl.gz").write_bytes(b"{}\n")
    (tmp_path / "packed.jsonl").write_bytes(PACKERS[compression](data))
    kinds = [file.compression for file in find_files([tmp_path / "plain.jsonl.gz", tmp_path / "packed.jsonl"])]
    assert kinds == ["none", compression]


def test_a_file_may_begin_with_a_skippable_frame_and_text_with_letters_of_a_mark(tmp_path):
    (tmp_path / "a").write_bytes(SKIPPABLE)
    (tmp_path / "b.txt").write_bytes(b"BZh is how bzip2 begins")
    (tmp_path / "c.txt").write_bytes(b"BZh91A is not")
    found = find_files([tmp_path / "a", tmp_path / "b.txt", tmp_path / "c.txt"])
    assert [file.compression for file in found] == ["zstd", "none", "none"]


@pytest.mark.parametrize("text", [b"PARE", b"PAR1 and PAR1", b"ARROW1\n", b"FEA1", b"WARC/1.0 is a version\n"])
def test_a_text_may_begin_with_a_magic_number_of_letters(tmp_path, text):
    """Its name or the user says that it is text; in a file of any other name, letters alone decide."""
    (tmp_path / "a.md").write_bytes(text)
    assert find_files([tmp_path / "a.md"])[0].format == "text"
    (tmp_path / "a.jsonl").write_bytes(text)
    assert find_files([tmp_path / "a.jsonl"], format="text")[0].format == "text"
    packed = write(tmp_path, text, "gzip", name="a.txt")
    (chunk,) = chunks([packed], 100, spec=ReadSpec())
    assert chunk.data == text
    if text.startswith((b"PARE", b"FEA1")):
        with pytest.raises(UsageError, match="which mdata does not read"):
            find_files([tmp_path / "a.jsonl"])
    (tmp_path / "b.txt").write_bytes(text + b"\0\x15")
    with pytest.raises(UsageError) if text.startswith((b"PARE", b"FEA1")) else nullcontext():
        assert find_files([tmp_path / "b.txt"])[0].format != "text"


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["bare", "mark"])
@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.jsonl.gz"])
def test_text_in_another_encoding_is_refused_by_its_name(tmp_path, name, encoding, mark):
    data = (mark + '{"text": "na\u00efve"}\n').encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    iconv = encoding[:6] if mark else encoding  # a byte order mark says the rest
    with pytest.raises(
        UsageError, match=rf"{name} is {iconv} text\n  expected: UTF-8\n  try: iconv -f {iconv} -t UTF-8"
    ):
        list(chunks(find_files([tmp_path / name]), 100, spec=ReadSpec()))
    (tmp_path / "utf8").write_bytes("\ufeff\u4e00\u0100 a\0b\0".encode())
    assert find_files([tmp_path / "utf8"], format="text")[0].format == "text"


def test_a_warc_file_may_have_the_name_of_a_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(record("conversion", "text/plain", b"text"))
    assert find_files([tmp_path / "a.txt"])[0].format == "warc"


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.txt", "text"),
        ("a.md", "text"),
        ("a.text", "text"),
        ("a.jsonl", "jsonl"),
        ("a.json", "jsonl"),
        ("a", "jsonl"),
    ],
)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_endings_tell_text_from_lines(tmp_path, name, format, compression):
    file = write(tmp_path, b"x", compression, name=name)
    assert (file.format, file.streamed) == (format, compression != "none")
    (asked,) = find_files([file.path], format="text")
    assert asked.format == "text"


def test_parquet_is_known_by_its_first_bytes(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"PAR1....")
    (file,) = find_files([tmp_path / "a.jsonl"])
    assert (file.format, file.streamed) == ("parquet", True)
    with pytest.raises(UsageError, match=r"a\.jsonl is parquet, but the input format is jsonl"):
        find_files([tmp_path / "a.jsonl"], format="jsonl")
    (tmp_path / "b.parquet").write_bytes(b"{}\n")
    with pytest.raises(UsageError, match="is not parquet, but"):
        find_files([tmp_path / "b.parquet"], format="parquet")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none.jsonl", "none.jsonl: No such file or directory"),
        ("*.csv", "no file matches this pattern"),
        (
            "empty",
            r"\n  expected: files named \*.jsonl, .*\*.parquet, .*, also followed by .*\(except .parquet, .arrow",
        ),
        ("pipe", "is not a regular file"),
        ("x.zip", "is a zip archive, which mdata does not read"),
        ("twice", "is named twice"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, text):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04....")
    (tmp_path / "twice").write_text("{}\n")
    inputs = [tmp_path / name] * (2 if name == "twice" else 1)
    with pytest.raises(UsageError, match=text):
        find_files(inputs)


def test_no_input_and_unknown_formats_are_usage():
    with pytest.raises(UsageError, match="no input is named"):
        find_files([])
    with pytest.raises(UsageError, match="input format 'xls'"):
        find_files(["-"], format="xls")


def test_standard_input_is_a_file_without_size():
    (file,) = find_files(["-"], format="text")
    assert (str(file.path), file.size_bytes, file.format, file.streamed) == ("-", 0, "text", True)
    check_unchanged(file)
    with pytest.raises(UsageError, match="- is named twice"):
        find_files(["-", "-"])
    with pytest.raises(UsageError, match="parquet cannot be read from standard input"):
        find_files(["-"], format="parquet")


def test_a_file_that_changes_is_refused(tmp_path):
    file = write(tmp_path, b'{"text": "a"}\n')
    check_unchanged(file)
    file.path.write_text('{"text": "a"}\n' * 2)
    with pytest.raises(UsageError, match="changed while it was read"):
        check_unchanged(file)
    file.path.unlink()
    with pytest.raises(UsageError, match="No such file"):
        check_unchanged(file)


def test_a_folder_inside_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    for name in ("open", "shut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text('{"text": "x"}\n')
    real = os.scandir

    def scandir(folder):
        if str(folder).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UsageError, match="shut: Permission denied"):
        find_files([tmp_path])


@pytest.mark.parametrize("name", ["s3:bucket/x.jsonl", "S3:/bucket/x.jsonl", "gs:/bucket/x.jsonl"])
def test_an_address_with_too_few_slashes_is_named(name):
    with pytest.raises(UsageError, match=rf"{name} is neither a path nor an address\n +try: write .*://bucket/x.jsonl"):
        find_files([name])
