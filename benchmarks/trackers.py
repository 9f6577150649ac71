"""What trackers cost a run: alternating blocks of steps with and without `mtrain track --follow` beside it.

    python benchmarks/trackers.py --out DIR [--to tensorboard wandb prometheus webhook] [--blocks 20] [--steps 50]

One run trains all the time. In every second block a process follows it and sends to all trackers, as the process that
`track.to` starts; W&B stays offline and the webhook is a server of this script. The first steps of a block, in which
that process starts or ends, count too. Prints the quotient of the medians of each pair of neighbouring blocks, their
median and its 95 % interval (order statistics), and writes DIR/trackers.json. The aim is at most 0.5 % with steps of
at least 200 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = """
[run]
folder = "{folder}"
[data]
blend = "mock"
[model]
preset = "llama3.2-1b"
[train]
sequence_length = 2048
global_batch = {batch}
micro_batch = 2
steps = {steps}
[optimizer]
lr = 1e-4
[precision]
dtype = "bf16"
[checkpoint]
minutes = 0
"""


class Hook(BaseHTTPRequestHandler):
    """Accepts alerts."""

    def do_POST(self) -> None:
        """Read the body, answer 200."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def step_times(folder: Path) -> dict[int, float]:
    """Seconds of each step so far."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {row["step"]: row["step_time_s"] for row in rows if "step_time_s" in row}


def interval(values: list[float]) -> tuple[float, float]:
    """95 % of a median, by order statistics (normal approximation of the binomial)."""
    ordered, n = sorted(values), len(values)
    off = 1.96 * n**0.5 / 2
    low, high = int(n / 2 - off), int(n / 2 + off)
    return ordered[max(0, low)], ordered[min(n - 1, high)]


def main() -> int:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--to", nargs="+", default=["tensorboard", "wandb", "prometheus", "webhook"])
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks are half of it")
    parser.add_argument("--steps", type=int, default=50, help="of a block")
    parser.add_argument("--batch", type=int, default=8, help="rows of 2,048 tokens in a step")
    parser.add_argument("overrides", nargs="*", help="section.key=value of the run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    folder, warm = (arguments.out / "run").resolve(), 30
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = os.environ | {
        "WANDB_MODE": "offline",
        "MTRAIN_WEBHOOK_URL": f"http://127.0.0.1:{server.server_address[1]}/",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    config = arguments.out / "run.toml"
    total = warm + (arguments.blocks + 1) * arguments.steps
    config.write_text(CONFIG.format(folder=folder, batch=arguments.batch, steps=total))
    mtrain = [sys.executable, "-m", "cli.mtrain"]
    log = (arguments.out / "log").open("w")
    run = subprocess.Popen([*mtrain, "train", str(config), *arguments.overrides], stdout=log, stderr=log, env=env)
    follower: subprocess.Popen[bytes] | None = None
    try:
        for block in range(arguments.blocks):
            while run.poll() is None and len(step_times(folder)) < warm + block * arguments.steps:
                time.sleep(0.2)
            if follower is not None:
                follower.terminate()
                follower.wait()
                follower = None
            elif block % 2:
                track = [*mtrain, "track", str(folder), "--to", *arguments.to, "--follow"]
                follower = subprocess.Popen(track, stdout=log, stderr=log, env=env)
        run.wait()
    finally:
        for process in (follower, run):
            if process is not None and process.poll() is None:
                process.kill()
    times = step_times(folder)
    starts = range(warm + 1, warm + 1 + arguments.blocks * arguments.steps, arguments.steps)
    blocks = [statistics.median(times[step] for step in range(first, first + arguments.steps)) for first in starts]
    ratios = [followed / alone for alone, followed in zip(blocks[::2], blocks[1::2], strict=True)]
    low, high = interval(ratios)
    facts = {
        "to": arguments.to,
        "step_ms": round(1e3 * statistics.median(blocks[::2]), 2),
        "ratios": [round(ratio, 5) for ratio in ratios],
        "median": round(statistics.median(ratios), 5),
        "interval": [round(low, 5), round(high, 5)],
    }
    (arguments.out / "trackers.json").write_text(json.dumps(facts))
    print(json.dumps(facts))
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
