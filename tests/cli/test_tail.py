"""Following logs: every line that is added is printed once, the last ones too."""

from __future__ import annotations

import pytest

from cli.console import Console
from cli.tail import print_logs
from mdata.errors import UsageError


def test_lines_that_are_added_are_printed_once_to_the_end(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(5)))
    added = iter(["line 5\nline 6\n", "line 7\n"])

    def ended():
        """Adds lines until there are none: those that come with the last answer are printed as well."""
        with log.open("a") as file:
            file.write(next(added, ""))
        return "line 7" in log.read_text()

    print_logs(Console("mtrain"), lambda: [log], lines=2, ended=ended, ask_every_s=0.0)
    told = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("==>")]
    assert told == [f"line {number}" for number in range(3, 8)]


def test_a_number_of_lines_below_1_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--lines 0"):
        print_logs(Console("mtrain"), lambda: [], lines=0, ended=lambda: True)
