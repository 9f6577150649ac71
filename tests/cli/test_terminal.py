"""Names, messages and texts from strangers cannot control the terminal; a pipe gets texts unchanged."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cli.mdata import main
from cli.progress import BarProgress
from cli.terminal import quoted, say
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.corpora import write_pair

ROOT = Path(__file__).parents[2]
NAMED = ["--tokenizer-type", "ByteTokenizer"]
HOSTILE = "a\x1b[2Jb\u202ec\x9bd\x7fe\rf"
HARMLESS = "a\\u001b[2Jb\\u202ec\\u009bd\\u007fe\\u000df"
CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xD800, 0xDFFF}


def test_every_control_character_is_quoted_and_nothing_else():
    seen = {code for code in range(0x110000) if quoted(chr(code)) != chr(code)}
    assert seen == (CONTROLS | set(range(0xD800, 0xE000))) - {0x09, 0x0A}
    assert quoted("caf\u00e9 \u4e16 \U0001f600\ttab\n") == "caf\u00e9 \u4e16 \U0001f600\ttab\n"
    assert json.loads(quoted(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE


def test_raw_is_raw_only_away_from_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, raw, expected in [
        (io.StringIO(), True, HOSTILE), (io.StringIO(), False, HARMLESS), (Terminal(), True, HARMLESS),
    ]:  # fmt: skip
        say(HOSTILE, stream, raw=raw)
        assert stream.getvalue() == expected
    say(HOSTILE, None)


def test_bar_and_notes_are_quoted():
    stream = io.StringIO()
    progress = BarProgress(stream, program="prog")
    progress.begin(f"reading {HOSTILE}", 10, unit="B")
    progress.note(HOSTILE)
    progress.end()
    assert f"prog: {HARMLESS}\n" in stream.getvalue() and f"reading {HARMLESS}" in stream.getvalue()
    assert not set(stream.getvalue()) & set("\x1b\x9b\x7f\u202e")


@pytest.fixture
def prefix(tmp_path, capsys) -> str:
    """A corpus whose name and only document hold control characters."""
    tokenizer = load_tokenizer("ByteTokenizer", None)
    tokens, lengths = tokenizer.encode_batch([HOSTILE])
    made = tmp_path / "x\x1b[31m\u202e_text_document"
    write_pair(made, [lengths.tolist()], tokens=np.array(tokens), code=8)
    assert main(["adopt", str(made), *NAMED]) == 0
    out = capsys.readouterr().out
    assert "x\\u001b[31m\\u202e_text_document.json: written" in out and "\x1b" not in out
    return str(made)


@pytest.mark.parametrize("words", [["inspect"], ["inspect", "--json"], ["verify"], ["cat", "--json"]])
def test_results_show_names_and_texts_quoted(prefix, capsys, words):
    assert main([words[0], prefix, *words[1:]]) == 0
    out = capsys.readouterr().out
    assert not {ord(char) for char in out} & (CONTROLS - {0x09, 0x0A})
    assert "--json" not in words or HOSTILE in out or json.loads(out)


@pytest.mark.parametrize("name", [b"no\x1b]0;title\x07such.json", b"no\xffsuch.json"])
def test_errors_show_names_quoted(name, tmp_path, capsys):
    name = os.fsdecode(name)
    assert main(["inspect", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert quoted(name) in err and name not in err


def test_cat_gives_a_pipe_the_bytes_and_a_terminal_what_is_harmless(prefix):
    words = [sys.executable, "-m", "cli.mdata", "cat", prefix]
    piped = subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    assert piped.stdout == f"{HOSTILE}\n".encode()
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        with os.fdopen(theirs, "wb", buffering=0) as terminal:
            child = subprocess.Popen(words, cwd=ROOT, stdout=terminal, stderr=terminal, stdin=terminal)
        shown = b""
        try:
            while part := screen.read(1000):
                shown += part
        except OSError:  # what Linux says where others say that this is the end
            pass
        assert child.wait() == 0
    assert shown == HARMLESS.encode() + b"\r\n"
