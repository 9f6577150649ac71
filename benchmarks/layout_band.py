"""Do other layouts train the same model in bf16? The numerics policy's band, measured on this machine's GPUs.

    python benchmarks/layout_band.py --out DIR [--rows "pp 2" ...] [--config FILE.toml] [section.key=value ...]

The band is the largest difference per step of the training loss between two splits of the same batches (one microbatch
of B rows, and four of B/4) on one GPU; every other layout, and the plain kernels, must lie inside three times that
band, in each quarter of the steps: a spike early in the run excuses no later step. Rows that want more GPUs than there
are, are left out; what DIR/layout_band.json has already is not run again, and refused if it is of other text. Text is
gathered and prepared as in train_gpu.py. Prints a table, keeps all curves in that file, and exits 1 if a row lies
outside or a band is 0 (then the measurement is wrong).

A configuration with experts has rows of its own, and each prints their load in the last steps, over the mean load: the
largest, averaged over these steps, of the layer where it is largest, and the least of any expert in any of them.

Each row starts as soon as enough of the visible GPUs are free, so several run at once; with --together N a GPU is free
for N rows, which only changes how long they take.

With --share the ranks of a row share one GPU, which NCCL 2.30 and later allow: slow, but the same kernels and messages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.train_gpu import ROOT, prepare
from trainer.config.parse import load_config

BATCH, STEPS = 16, 200
LOAD_STEPS = 50  # the last ones, in which the load of experts is measured
QUARTER = f"train.micro_batch={BATCH // 4}"
BAND = ("1 x B", "B/4 x 4")
ROWS: dict[str, tuple[int, list[str]]] = {
    "1 x B": (1, [f"train.micro_batch={BATCH}"]),
    "B/4 x 4": (1, [QUARTER]),
    "plain kernels": (
        1,
        [
            f"train.micro_batch={BATCH}",
            *(f"kernels.{one}=plain" for one in ("norm", "activation", "rope", "loss", "optimizer")),
        ],
    ),
    "tp 2": (2, ["mesh.tp=2", f"train.micro_batch={BATCH}"]),
    "tp 2, sequence parallel": (2, ["mesh.tp=2", "mesh.sequence_parallel=true", f"train.micro_batch={BATCH}"]),
    "dp 2": (2, [f"train.micro_batch={BATCH // 2}"]),
    "dp 2, gradients": (2, ["optimizer.sharding=gradients", f"train.micro_batch={BATCH // 4}"]),
    "dp 2, parameters": (2, ["optimizer.sharding=parameters", f"train.micro_batch={BATCH // 4}"]),
    "dp 2, FP8": (2, ["precision.fp8=delayed", f"train.micro_batch={BATCH // 2}"]),
    "cp 2": (2, ["mesh.cp=2", f"train.micro_batch={BATCH}"]),
    "pp 2": (2, ["mesh.pp=2", QUARTER]),
    "pp 2, interleaved": (2, ["mesh.pp=2", "mesh.schedule=interleaved", QUARTER]),
    "pp 2, zb_h1": (2, ["mesh.pp=2", "mesh.schedule=zb_h1", QUARTER]),
    "pp 2, zb_v": (2, ["mesh.pp=2", "mesh.schedule=zb_v", QUARTER]),
}
SENT = "mesh.expert_dispatch=all_to_all"
EXPERT_ROWS: dict[str, tuple[int, list[str]]] = {name: ROWS[name] for name in BAND} | {
    "ep 2": (2, ["mesh.ep=2", f"train.micro_batch={BATCH // 2}"]),
    "ep 2, all-to-all": (2, ["mesh.ep=2", SENT, f"train.micro_batch={BATCH // 2}"]),
    "ep 2, parameters": (2, ["mesh.ep=2", "optimizer.sharding=parameters", f"train.micro_batch={BATCH // 4}"]),
    "ep 2, full recompute": (2, ["mesh.ep=2", SENT, "recompute.mode=full", f"train.micro_batch={BATCH // 2}"]),
    "tp 2, ep 2, etp 1": (
        2,
        ["mesh.tp=2", "mesh.sequence_parallel=true", "mesh.ep=2", "mesh.etp=1", f"train.micro_batch={BATCH}"],
    ),
    "cp 2, ep 2": (2, ["mesh.cp=2", "mesh.ep=2", f"train.micro_batch={BATCH}"]),
    **{name: ROWS[name] for name in ("tp 2", "tp 2, sequence parallel", "dp 2", "dp 2, gradients", "cp 2", "pp 2")},
    "pp 2, zb_v": ROWS["pp 2, zb_v"],
}


def main() -> int:
    """Run every row, compare the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", choices=list(dict.fromkeys((*ROWS, *EXPERT_ROWS))), help="default: all")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpt-small-h200.toml")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--together", type=int, default=1, help="rows that a GPU runs at once")
    parser.add_argument("--share", action="store_true", help="the ranks of a row share the first GPU")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if not (out / "mix.json").exists():
        prepare(out)
    kept, text = out / "layout_band.json", hashes_of_text(out)
    known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"text": text, "curves": {}}
    if known["text"] != text:
        sys.exit(f"{kept} has curves of other text, which cannot be compared with new ones; move it away")
    curves: dict[str, list[float]] = known["curves"]
    loads: dict[str, tuple[float, float]] = known.setdefault("loads", {})
    rows = EXPERT_ROWS if load_config(arguments.config).model.moe else ROWS
    sizes = [f"train.steps={arguments.steps}"]
    gpus = Gpus((["0"] if arguments.share else visible_gpus()) * arguments.together)
    wanted = [name for name in dict.fromkeys((*BAND, *(arguments.rows or rows))) if name not in curves]
    wanted = [name for name in wanted if arguments.share or rows[name][0] <= len(set(gpus.free))]

    def run(name: str) -> list[dict[str, Any]]:
        ranks, words = rows[name]
        with gpus.taken(1 if arguments.share else ranks) as taken:
            start = partial(started_beside if arguments.share and ranks > 1 else started, ranks=ranks, gpus=taken)
            return run_of(out, name, arguments.config, [*sizes, *words, *arguments.overrides], start)

    with ThreadPoolExecutor(len(gpus.free)) as pool:
        running = {pool.submit(run, name): name for name in wanted}
        for done in as_completed(running):
            name, lines = running[done], done.result()
            curves[name] = [line["loss"] for line in lines]
            if load := load_of_experts(lines[-LOAD_STEPS:]):
                loads[name] = load
            kept.write_text(json.dumps(known) + "\n")
            print(f"{name}: loss {curves[name][0]:.3f} -> {curves[name][-1]:.3f}", flush=True)
    for name, (largest, least) in loads.items():
        print(f"{name:>24}: load at most {largest:.3f}, at least {least:.3f} of the mean")
    first, second = (curves[name] for name in BAND)
    bands = differences(first, second)
    print(f"loss {first[0]:.3f} -> {first[-1]:.3f}; largest difference in nats in each quarter of {len(first)} steps:")
    print(f"{'band':>24}: {'  '.join(f'{band:.4f}' for band in bands)}")
    fits = min(bands) > 0
    for name in (name for name in rows if name in curves and name not in BAND):
        apart = differences(first, curves[name])
        bands_apart = max(one / band for one, band in zip(apart, bands, strict=True))
        fits &= bands_apart <= 3
        print(
            f"{name:>24}: {'  '.join(f'{one:.4f}' for one in apart)}  at most {bands_apart:.2f} bands, "
            f"{steps_within(first, curves[name], bands):.1%} of the steps within one",
            flush=True,
        )
    return 0 if fits else 1


def hashes_of_text(out: Path) -> dict[str, str]:
    """The SHA-256 of each file of training tokens."""
    files = sorted(out.glob("*-train_text_document.bin"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Gpus:
    """GPUs that rows take and give back, by the names that CUDA_VISIBLE_DEVICES has for them, once for each row."""

    def __init__(self, names: list[str]) -> None:
        self.free = names
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[list[str]]:
        """The names of this many GPUs; waits until they are free."""
        with self._changed:
            self._changed.wait_for(lambda: len(set(self.free)) >= count)
            names = list(dict.fromkeys(self.free))[:count]
            for name in names:
                self.free.remove(name)
        try:
            yield names
        finally:
            with self._changed:
                self.free += names
                self._changed.notify_all()


def visible_gpus() -> list[str]:
    """The GPUs of this process; without any, two names, for rows that run on the CPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(index) for index in range(torch.cuda.device_count() or 2)]


def run_of(
    out: Path, name: str, config: Path, words: list[str], start: Callable[[list[str]], tuple[int, str]]
) -> list[dict[str, Any]]:
    """The metrics of every step of one layout."""
    folder = out / "runs" / "".join(letter if letter.isalnum() else "-" for letter in name)
    shutil.rmtree(folder, ignore_errors=True)
    fixed = [f"run.folder={folder}", f"data.blend={out / 'mix.json'}", "data.valid=[]"]
    sizes = [f"train.global_batch={BATCH}", "optimizer.warmup_steps=50"]
    command = [sys.executable, "-m", "cli.mtrain", "train", str(config)]
    code, text = start([*command, *fixed, *sizes, *words])
    if code:
        sys.exit(f"{' '.join(words)} ended with {code}\n{text[-3000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def load_of_experts(lines: list[dict[str, Any]]) -> tuple[float, float] | None:
    """(the largest load of a layer's experts, mean over these steps; the least of any step), over the mean load."""
    if "experts" not in lines[-1]:
        return None
    largest = (statistics.mean(line["experts"][layer]["max"] for line in lines) for layer in lines[-1]["experts"])
    return max(largest), min(layer["min"] for line in lines for layer in line["experts"].values())


def started(command: list[str], *, ranks: int, gpus: list[str]) -> tuple[int, str]:
    """The exit code and the messages of a command whose ranks have a GPU each."""
    words = [*command, "--nproc", str(ranks)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def started_beside(command: list[str], *, ranks: int, gpus: list[str]) -> tuple[int, str]:
    """The same, where all ranks see one GPU only."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": gpus[0], "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    place = {"SLURM_NTASKS": str(ranks), "SLURM_STEP_TASKS_PER_NODE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    places = [place | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(ranks)]
    running = [
        subprocess.Popen(
            command, cwd=ROOT, env=env | here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for here in places
    ]
    texts = [process.communicate()[1] for process in running]
    codes = [process.returncode for process in running]
    return max(codes, key=abs), "\n".join(texts)


def differences(one: list[float], other: list[float]) -> list[float]:
    """The largest difference of a step in each quarter."""
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    quarter = len(apart) // 4
    return [max(apart[start : start + quarter]) for start in range(0, 4 * quarter, quarter)]


def steps_within(one: list[float], other: list[float], bands: list[float]) -> float:
    """The part of the steps that differ by no more than the band of their quarter."""
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    quarter = len(apart) // 4
    return statistics.mean(x <= bands[min(step // quarter, 3)] for step, x in enumerate(apart))


if __name__ == "__main__":
    sys.exit(main())
