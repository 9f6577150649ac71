"""Does the order of the data change what a model learns? Validation loss by order, on a corpus sorted by its sources.

    python -m benchmarks.order_loss --out DIR [--config FILE.toml] [--seeds 3] [--jobs 3] [section.key=value ...]

The corpus is text of this machine's Python installation in the order of its files, code first and then prose: in native
order neighbours stay together inside of a sample, `data.shuffle_block` moves documents within blocks, Megatron's order
moves them everywhere. The same model is trained on each order from the same seeds; only the order differs between runs
of one seed. Prints the mean and the spread over seeds of every validation corpus; the orders are alike where the means
lie no further apart than the spread. Writes all figures to DIR/order_loss.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mdata
from benchmarks.train_gpu import ROOT, TEXT_BYTES, VOCABULARY
from cli.quickstart_text import gather
from mdata.progress import SILENT

ORDERS = {
    "native": [],
    "native, blocks of 64": ["data.shuffle_block=64"],
    "native, blocks of 1024": ["data.shuffle_block=1024"],
    "megatron": ["data.order=megatron"],
}


def main() -> None:
    """Prepare once, train every order with every seed, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "order-loss.toml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--workers", type=int, default=None, help="of preprocessing")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if not (out / "prepared").exists():
        prepare(out, workers=arguments.workers)
    runs = [(order, seed) for seed in range(arguments.seeds) for order in ORDERS]
    with ThreadPoolExecutor(arguments.jobs) as threads:
        losses = list(threads.map(lambda run: train(out, arguments.config, *run, overrides=arguments.overrides), runs))
    found = [{"order": order, "seed": seed, "loss": loss} for (order, seed), loss in zip(runs, losses, strict=True)]
    (out / "order_loss.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found)


def prepare(out: Path, *, workers: int | None) -> None:
    """One training corpus sorted by its sources, and two for validation."""
    sizes = gather(out, SILENT, limits=TEXT_BYTES)
    print("gathered", sizes, flush=True)
    training = [out / "code-train.jsonl", out / "prose-train.jsonl"]
    mdata.train_tokenizer(training, out / "tokenizer", vocab_size=VOCABULARY)
    inputs = {"sorted": training, "code-valid": [out / "code-valid.jsonl"], "prose-valid": [out / "prose-valid.jsonl"]}
    for name, files in inputs.items():
        mdata.preprocess(
            mdata.PreprocessOptions(
                input=tuple(map(str, files)),
                output_prefix=str(out / name),
                tokenizer_type="HuggingFaceTokenizer",
                tokenizer_model=str(out / "tokenizer"),
                append_eod=True,
                workers=workers,
            )
        )
    (out / "prepared").touch()


def train(out: Path, config: Path, order: str, seed: int, *, overrides: list[str]) -> dict[str, float]:
    """Validation losses at the end of one training, nats per token."""
    folder = out / f"run-{list(ORDERS).index(order)}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    valid = json.dumps([str(out / f"{name}-valid_text_document.json") for name in ("code", "prose")])
    data = [f"data.blend={out / 'sorted_text_document.json'}", f"data.valid={valid}", *ORDERS[order]]
    words = [f"run.folder={folder}", f"run.seed={seed}", *data, *overrides]
    command = [sys.executable, "-m", "cli.mtrain", "train", str(config), *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{order}, seed {seed}: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses: dict[str, float] = [line["valid"] for line in lines if "valid" in line][-1]
    print(f"{order}, seed {seed}: {losses}", flush=True)
    return losses


def show(found: list[dict]) -> None:
    """One line an order: mean and largest distance from it, and the mean difference from native of the same seed."""
    names = list(found[0]["loss"])
    of = {(run["order"], run["seed"]): run["loss"] for run in found}
    seeds = sorted({run["seed"] for run in found})
    print(f"{'order':>24}", *(f"{name:>36}" for name in names))
    for order in ORDERS:
        cells = []
        for name in names:
            values = [of[order, seed][name] for seed in seeds]
            mean = statistics.mean(values)
            apart = statistics.mean(value - of["native", seed][name] for value, seed in zip(values, seeds, strict=True))
            spread = max(abs(value - mean) for value in values)
            cells.append(f"{mean:.4f} +- {spread:.4f} ({apart:+.4f} to native)")
        print(f"{order:>24}", *(f"{cell:>36}" for cell in cells))


if __name__ == "__main__":
    main()
