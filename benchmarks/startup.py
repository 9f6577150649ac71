"""What starting costs over a bare interpreter: `import mdata`, `mdata --help`, `mtrain --help`.

Each command runs in a fresh process, in turns, so that a busy moment of the machine meets all of them; the
table shows medians. The design asks for at most 0.3 s over the bare interpreter. Run: python
benchmarks/startup.py [--runs N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
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


def seconds(words: list[str]) -> float:
    """Wall time of one fresh process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Measure in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the medians there")
    arguments = parser.parse_args()
    for words in COMMANDS.values():
        seconds(words)  # the first run compiles and fills the page cache
    times = {name: [] for name in COMMANDS}
    for _ in range(arguments.runs):
        for name, words in COMMANDS.items():
            times[name].append(seconds(words))
    medians = {name: statistics.median(found) for name, found in times.items()}
    bare = medians["bare interpreter"]
    print(f"{'command':<26}{'median s':>10}{'over bare':>11}{'limit':>8}")
    for name, median in medians.items():
        print(f"{name:<26}{median:>10.3f}{median - bare:>11.3f}{LIMIT_S:>8.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
