"""Tables are found offline, in folders and in NLTK's archive, and every invalid line is named."""

from __future__ import annotations

import os
import zipfile

import pytest

from mdata import UsageError
from mdata.sentences.punkt_tables import FILES, find_files, read_tables, usual_folders
from mdata.sentences.splitter import load_splitter
from tests.mdata.sentences import visible

LINES = [
    ("abbrev", "mr\n\nst\n", r"abbrev_types\.txt:2: an empty line"),
    ("abbrev", "mr\r\nst\r\n", r"abbrev_types\.txt:1: a line may end with a line feed only\n  found: '\\r'"),
    ("abbrev", "mr\nst\u2028x\n", r"abbrev_types\.txt:2: a line may end"),
    ("sent_starters", b"he\nit\n\xff", r"sent_starters\.txt:3: not UTF-8 text\n  found: byte 0xff"),
    ("collocations", "a\tb\nab\n", r"collocations\.tab:2: not a pair\n  found: 'ab'"),
    ("collocations", "a\tb\tc\n", r"collocations\.tab:1: not a pair"),
    ("collocations", "a\t\n", r"collocations\.tab:1: not a pair"),
    ("ortho", "a\t4\nb\tx\n", r"ortho_context\.tab:2: not a sum of the context bits\n  found: 'x'"),
    ("ortho", "a\t128\n", r"ortho_context\.tab:1: not a sum of the context bits"),
    ("ortho", "a\t-2\n", r"ortho_context\.tab:1: not a sum of the context bits"),
    ("ortho", "a\t 2\n", r"ortho_context\.tab:1: not a sum of the context bits"),
    ("ortho", "a\n", r"ortho_context\.tab:1: not a pair"),
]


@pytest.mark.parametrize(("name", "content", "message"), LINES)
def test_a_line_at_fault_is_named(tmp_path, name, content, message):
    with pytest.raises(UsageError, match=message) as caught:
        load_splitter("ours", nltk_data=str(visible.write(tmp_path, **{name: content})))
    assert str(tmp_path) in str(caught.value)


def test_files_may_be_empty():
    tables = read_tables(dict.fromkeys(FILES, b""))
    assert not tables.abbreviations | tables.collocations | tables.starters
    assert not tables.contexts


def test_the_last_of_two_lines_for_a_word_counts():
    assert read_tables(visible.files(ortho="a\t2\na\t4")).contexts == {"a": 4}


def test_a_folder_that_is_named_is_the_only_one(tmp_path, monkeypatch):
    monkeypatch.setenv("NLTK_DATA", str(visible.write(tmp_path / "there")))
    where, files = find_files("ours")
    assert where == f"{tmp_path / 'there/tokenizers/punkt_tab/ours'}{os.sep}"
    assert files == visible.files()
    with pytest.raises(UsageError, match=r"no punkt_tab tables for the language 'ours'\n  found: searched .*nothing\n"):
        find_files("ours", str(tmp_path / "nothing"))


@pytest.mark.parametrize("inside", ["tokenizers/punkt_tab/ours", "punkt_tab/ours"])
def test_the_environment_names_several(tmp_path, monkeypatch, inside):
    place = tmp_path / "b" / inside
    place.mkdir(parents=True)
    for name, content in visible.files().items():
        (place / name).write_bytes(content)
    monkeypatch.setenv("NLTK_DATA", os.pathsep.join(["", str(tmp_path / "a"), str(tmp_path / "b")]))
    assert find_files("ours")[1] == visible.files()
    assert usual_folders()[:2] == [tmp_path / "a", tmp_path / "b"]


def test_an_archive_is_read(tmp_path):
    (tmp_path / "tokenizers").mkdir()
    path = tmp_path / "tokenizers" / "punkt_tab.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in visible.files().items():
            archive.writestr(f"punkt_tab/ours/{name}", content)
        archive.writestr(f"punkt_tab/part/{FILES[0]}", b"a")
    assert find_files("ours", str(tmp_path))[1] == visible.files()
    with pytest.raises(UsageError, match=rf"punkt_tab\.zip/punkt_tab/part/{FILES[1]} is missing"):
        find_files("part", str(tmp_path))
    path.write_bytes(b"PK" + path.read_bytes()[2:-30])
    with pytest.raises(UsageError, match=r"punkt_tab\.zip: cannot be unpacked\n  found: File is not a zip file"):
        find_files("ours", str(tmp_path))


def test_damaged_archive(tmp_path):
    path = tmp_path / "punkt_tab.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in visible.files().items():
            archive.writestr(f"punkt_tab/ours/{name}", content)
    data = bytearray(path.read_bytes())
    data[80] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"punkt_tab\.zip: cannot be unpacked"):
        find_files("ours", str(tmp_path))


def test_other_languages_are_told(tmp_path):
    folder = str(visible.write(tmp_path))
    with pytest.raises(UsageError, match=r"the language 'our'\n  expected: one of ours\n  try: ours\?$"):
        find_files("our", folder)
    with pytest.raises(UsageError, match="is not the name of a language"):
        find_files("../ours", folder)
    (tmp_path / "tokenizers" / "punkt_tab" / "ours" / FILES[2]).unlink()
    with pytest.raises(UsageError, match=rf"{FILES[2]} is missing\n  expected: the four tables"):
        find_files("ours", folder)


@pytest.mark.parametrize(("code", "name"), [("en", "english"), ("DE", "german"), ("pt-BR", "portuguese")])
def test_a_code_is_refused_with_the_name_of_the_language(tmp_path, code, name):
    """Each name is one of NLTK's; a folder that is named like a code is still taken."""
    with pytest.raises(
        UsageError, match=rf"the language '{code}'\n  expected: the name of a language\n  try: --lang {name}$"
    ):
        find_files(code, str(tmp_path))
    folder = tmp_path / "tokenizers" / "punkt_tab"
    visible.write(tmp_path)
    with pytest.raises(UsageError, match=rf"one of ours\n  try: --lang {name}$"):
        find_files(code, str(tmp_path))
    (folder / "ours").rename(folder / code)
    assert find_files(code, str(tmp_path))[0].endswith(f"punkt_tab/{code}/")


def test_nothing_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setattr("mdata.sentences.punkt_tables.sys.prefix", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"try: python -m nltk\.downloader punkt_tab"):
        load_splitter("no-such-language")
