"""Do other layouts train the same model in bf16? The numerics policy's band, measured on this machine's GPUs.

    python benchmarks/layout_band.py --out DIR [--config configs/gpt-small-h200.toml] [section.key=value ...]

The band is the largest difference per step of the training loss between two splits of the same batches (one microbatch
of B rows, and B of one row) on one GPU; every other layout must lie inside three times that band. With one GPU only
the band is measured. Text is gathered and prepared as in train_gpu.py. Prints a table, writes all curves to
DIR/layout_band.json, and exits 1 if a layout lies outside or the band is 0 (then the measurement is wrong).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.train_gpu import ROOT, prepare

BATCH, STEPS = 16, 100
SINGLE = {"1 x B": (1, [f"train.micro_batch={BATCH}"]), "B x 1": (1, ["train.micro_batch=1"])}
SEVERAL = {
    "tp 2": (2, ["mesh.tp=2", f"train.micro_batch={BATCH}"]),
    "tp 2, sequence parallel": (2, ["mesh.tp=2", "mesh.sequence_parallel=true", f"train.micro_batch={BATCH}"]),
    "dp 2": (2, [f"train.micro_batch={BATCH // 2}"]),
}


def main() -> int:
    """Run every layout, compare the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpt-small-h200.toml")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if not (out / "mix.json").exists():
        prepare(out)
    layouts = SINGLE | (SEVERAL if torch.cuda.device_count() > 1 else {})
    curves = {
        name: curve(out, arguments.config, [*words, *arguments.overrides], ranks)
        for name, (ranks, words) in layouts.items()
    }
    band = difference(curves["1 x B"], curves["B x 1"])
    print(f"band over {STEPS} steps: {band:.4f} nats; loss {curves['1 x B'][0]:.3f} -> {curves['1 x B'][-1]:.3f}")
    fits = band > 0
    for name in curves.keys() - SINGLE.keys():
        apart = difference(curves["1 x B"], curves[name])
        fits &= apart <= 3 * band
        print(f"{name:>24}: {apart:.4f} nats, {apart / band:.2f} bands")
    (out / "layout_band.json").write_text(json.dumps({"band": band, "curves": curves}) + "\n")
    return 0 if fits else 1


def curve(out: Path, config: Path, words: list[str], ranks: int) -> list[float]:
    """The training loss of every step of one layout."""
    folder = out / "band-run"
    shutil.rmtree(folder, ignore_errors=True)
    fixed = [f"run.folder={folder}", f"data.blend={out / 'mix.json'}", "data.valid=[]"]
    sizes = [f"train.global_batch={BATCH}", f"train.steps={STEPS}", "optimizer.warmup_steps=50"]
    command = [sys.executable, "-m", "cli.mtrain", "train", str(config), "--nproc", str(ranks)]
    subprocess.run([*command, *fixed, *sizes, *words], check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def difference(one: list[float], other: list[float]) -> float:
    """The largest difference of a step."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    sys.exit(main())
