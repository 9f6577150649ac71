"""Startup time compared with a bare interpreter: `import mdata`, `mdata --help`, `mtrain --help`.

Each command runs in a fresh process, in turns, so that a busy moment of the machine meets all of them; the
table shows medians. The design asks for at most 0.3 s over the bare interpreter. Compiled modules go to a
folder of this run, whatever the environment says of writing them, as an installed package has them. Run:
python benchmarks/startup.py [--runs N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 0.3
COMMANDS = {
    "bare interpreter": ["-c", "pass"],
    "import numpy": ["-c", "import numpy"],
    "import mdata": ["-c", "import mdata"],
    "mdata --help": ["-m", "cli.mdata", "--help"],
    "mdata preprocess --help": ["-m", "cli.mdata", "preprocess", "--help"],
    "mtrain --help": ["-m", "cli.mtrain", "--help"],
}


def seconds(words: list[str], compiled: str) -> float:
    """Wall time of one fresh process, whose compiled modules lie in a folder."""
    variables = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=variables)
    return time.perf_counter() - start


def measure(runs: int) -> dict[str, float]:
    """Median seconds of each command."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as compiled:
        for words in COMMANDS.values():
            seconds(words, compiled)  # the first run compiles and fills the page cache
        for _ in range(runs):
            for name, words in COMMANDS.items():
                times[name].append(seconds(words, compiled))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Measure in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the medians there")
    arguments = parser.parse_args()
    medians = measure(arguments.runs)
    bare = medians["bare interpreter"]
    print(f"{'command':<26}{'median s':>10}{'over bare':>11}{'limit':>8}")
    for name, median in medians.items():
        print(f"{name:<26}{median:>10.3f}{median - bare:>11.3f}{LIMIT_S:>8.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
