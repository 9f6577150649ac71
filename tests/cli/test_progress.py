"""The progress bar and the JSON lines: rates of this run only, time left, shares of the stages, notes."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import termios

import pytest

from cli.progress import BarProgress, LineProgress, Meter, RankNotes, _short


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(clock) -> tuple[LineProgress, list[str]]:
    written: list[str] = []
    return LineProgress(written.append, program="prog", clock=clock), written


def test_lines_come_each_ten_seconds_and_at_the_end(clock, lines):
    progress, written = lines
    progress.begin("counting", 100, unit="B")
    for second in range(25):
        clock.now = float(second)
        progress.advance(4, tokens=second)
    progress.end()
    found = [json.loads(line) for line in written]
    assert [(line["seconds"], line["done"], line["tokens"]) for line in found] == [
        (10.0, 44, 10),
        (20.0, 84, 20),
        (24.0, 100, 24),
    ]
    assert found[-1] | {"doing": "counting", "total": 100, "unit": "B", "finished": True} == found[-1]


def test_a_line_has_rates_time_left_and_stages(clock, lines):
    progress, written = lines
    progress.begin("tokenizing", 100_000_000, unit="B", done=20_000_000)
    progress.stages(read=1.0, encode=2.0)
    progress.stages(encode=3.0)
    clock.now = 10.0
    progress.advance(40_000_000, tokens=5_000_000, documents=7)
    (line,) = map(json.loads, written)
    assert line | {"mb_per_s": 4.0, "tokens_per_s": 500_000, "eta_s": 10, "documents": 7} == line
    assert line["done"] == 60_000_000 and line["stages"] == {"read": 0.25, "encode": 0.75}


def test_numbers_of_a_line_are_short_and_json(clock, lines):
    progress, written = lines
    progress.begin("train", 10, unit="steps", done=3)
    progress.advance(1, step=4, loss=3.14159265, lr=0.0, grad_norm=float("nan"), tokens=2**40)
    progress.end()
    (line,) = (json.loads(text, parse_constant=pytest.fail) for text in written)
    assert line | {"done": 4, "step": 4, "loss": 3.14159, "lr": 0.0, "grad_norm": None, "tokens": 2**40} == line


def test_a_line_says_only_what_is_known(clock, lines):
    progress, written = lines
    progress.begin("train", None, unit="steps")
    progress.end()
    (line,) = map(json.loads, written)
    assert line == {
        "doing": "train", "done": 0, "eta_s": 0, "finished": True, "seconds": 0.0, "total": None, "unit": "steps",
    }  # fmt: skip


def test_a_note_is_a_line_of_its_own(lines):
    progress, written = lines
    progress.note("the engine is the slow one")
    assert written == ["prog: the engine is the slow one"]


def test_rates_follow_the_last_half_minute_and_at_the_end_the_whole(clock):
    meter = Meter(2000, done=0, now=0.0)
    for second in range(1, 101):
        clock.now = float(second)
        meter.advance(1 if second <= 50 else 10, {"tokens": 0}, now=clock.now)
    assert meter.rates(clock.now)[0] == pytest.approx(10)
    assert meter.seconds_left(clock.now) == pytest.approx(145)
    assert meter.rates(clock.now, finished=True)[0] == pytest.approx(5.5)


def test_nothing_is_left_of_unknown_or_unbegun_work():
    assert Meter(None, done=0, now=0.0).seconds_left(5.0) is None
    assert Meter(9, done=0, now=0.0).seconds_left(5.0) is None
    assert Meter(9, done=0, now=0.0).rates(0.0) == (0.0, 0.0)


def read_all(terminal: int) -> str:
    """What was written to a pseudo-terminal whose other end is closed."""
    parts = []
    with contextlib.suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as file:
        while part := file.read(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def test_the_bar_on_a_terminal(clock):
    """A real terminal of 150 columns: the last picture holds everything, a note stands on a line of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 150, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        bar = BarProgress(terminal, program="prog", clock=clock)
        bar.note("before any work")
        bar.begin("tokenizing", 100_000_000, unit="B")
        bar.stages(read=1.0, parse=2.0, encode=17.0)
        clock.now = 2.0
        bar.advance(60_000_000, tokens=30_000_000, documents=123_456)
        bar.note("one line")
        bar.advance(40_000_000, tokens=50_000_000, documents=200_000, skipped=0)
        bar.end()
        bar.close()
    shown = read_all(ours)
    rows = [row.rsplit("\r", 1)[-1] for row in shown.replace("\r\n", "\n").split("\n")]
    assert rows[0] == "prog: before any work" and rows[1] == "prog: one line"
    assert re.fullmatch(
        r"tokenizing: 100%\|.+\| 100M/100M \[.+, 25.0M tokens/s, encode 85%, parse 10%, read 5%, documents=200.0k\]",
        rows[2],
    )
    assert rows[3:] == [""]


def test_a_bar_tells_its_own_count_once(clock):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 150, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        bar = BarProgress(terminal, program="prog", clock=clock)
        bar.begin("train", 10, unit="steps", done=3)
        clock.now = 2.0
        bar.advance(1, step=4, loss=3.14159, lr=1e-4, grad_norm=0.5, tokens=40_000)
        bar.end()
    last = read_all(ours).rstrip().rsplit("\r", 1)[-1]
    assert " 4/10 " in last and last.endswith("20.0k tokens/s, loss=3.142, lr=0.0001, grad_norm=0.5]")


def test_what_an_earlier_run_did_counts_for_no_rate(clock):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        bar = BarProgress(terminal, program="prog", clock=clock)
        bar.begin("training", 100, unit="steps", done=60)
        bar.advance(10)
        bar.end()
    first, *_, last = read_all(ours).strip().split("\r")
    assert "training:  60%" in first and "60/100" in first and "70/100" in last


def test_a_terminal_without_a_size_has_a_bar_too(clock):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        bar = BarProgress(terminal, program="prog", clock=clock)
        bar.begin("tokenizing", 100, unit="B")
        bar.advance(100)
        bar.end()
    last = read_all(ours).rstrip().rsplit("\r", 1)[-1]
    assert last.startswith("tokenizing: 100%|") and len(last) <= 80


@pytest.mark.parametrize(
    ("columns", "end"),
    [(80, ", 25.0M tokens/s]"), (95, ", 25.0M tokens/s, encode 85%]"), (150, ", read 5%, documents=200.0k]"), (40, "")],
)
def test_a_part_is_shown_whole_or_not_at_all(clock, columns, end):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        bar = BarProgress(terminal, program="prog", clock=clock)
        bar.begin("tokenizing", 100_000_000, unit="B")
        bar.stages(read=1.0, parse=2.0, encode=17.0)
        clock.now = 2.0
        bar.advance(100_000_000, tokens=50_000_000, documents=200_000)
        bar.end()
    last = read_all(ours).rstrip().rsplit("\r", 1)[-1]
    assert last.endswith(end) and len(last) <= columns


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (9_999, "9999"), (12_345, "12.3k"), (2_201_400, "2.2M"), (3 * 10**9, "3.0G"), (2.5, "2.5")],
)
def test_short_numbers(value, text):
    assert _short(value) == text


def test_a_bar_shows_totals_that_change_while_no_unit_is_done(clock):
    """An evaluation between two steps counts down; its last 0 takes the count away."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 150, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        bar = BarProgress(terminal, program="prog", clock=clock)
        bar.begin("train", 10, unit="steps")
        bar._bar.mininterval = 0
        bar.advance(1, loss=2.0)
        bar.advance(0, to_evaluate=512)
        bar.advance(0, to_evaluate=0)
        bar.end()
    shown = read_all(ours)
    assert "to_evaluate=512" in shown and "to_evaluate" not in shown.rstrip().rsplit("\r", 1)[-1]


def test_a_bar_that_was_never_begun_closes_and_writes_nothing(clock):
    shown = io.StringIO()
    bar = BarProgress(shown, program="prog", clock=clock)
    bar.end()
    bar.close()
    assert shown.getvalue() == ""


def test_of_a_rank_without_progress_only_notes_are_shown(lines):
    progress, written = lines
    rank = RankNotes(progress, 3)
    rank.begin("train", 10, unit="steps")
    rank.advance(1, loss=2.0)
    rank.stages(read=1.0)
    rank.note("waiting for data since 30 s")
    rank.end()
    assert written == ["prog: rank 3: waiting for data since 30 s"]
