"""The lines that a program executes inside functions, by file, without what runs while a module is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers.house_rules import ROOT

_COUNTING = """
import collections, json, sys, threading
lines = collections.Counter()
def called(frame, event, _):
    above = frame
    while above is not None:  # a module's body other than this program's: an import
        if above.f_code.co_name == "<module>" and above.f_globals.get("__name__") != "__main__":
            return None
        above = above.f_back
    file = frame.f_code.co_filename
    lines[file] += 0
    def ran(frame, event, _):
        lines[file] += event == "line"
        return ran
    return ran
threading.settrace(called)
sys.settrace(called)
{code}
sys.settrace(None)
threading.settrace(None)
print(json.dumps(lines))
"""


def executed_lines(code: str, folder: Path, *, before: str = "") -> dict[str, int]:
    """Files of this repository, from its root -> executed lines, in a process whose working directory is `folder`.

    Args:
        before: runs first, and is not counted.
    """
    program = before + _COUNTING.replace("{code}", code)
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=folder, env={"PYTHONPATH": str(ROOT)}
    )
    counted: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    ours = {Path(file): number for file, number in counted.items() if "site-packages" not in file}
    return {str(file.relative_to(ROOT)): number for file, number in ours.items() if file.is_relative_to(ROOT)}


def main_files(lines: dict[str, int], share: float = 0.01) -> set[str]:
    """Those that execute more than this share of the lines."""
    least = share * sum(lines.values())
    return {file for file, number in lines.items() if number > least}
