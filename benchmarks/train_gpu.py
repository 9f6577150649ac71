"""How fast a larger model trains on this machine's GPU, on text of its own Python installation.

    python benchmarks/train_gpu.py --out DIR [--config configs/gpt-small-h200.toml] [section.key=value ...]

Gathers text, learns a vocabulary, preprocesses, blends 70/30, trains by the `mtrain` command, and prints one table:
the model's shape, first and last loss, tokens per second (median over steps after the first 20), the share of the
GPU's measured matrix rate that this is (model FLOP utilization, flops_per_token of `mtrain plan`), and peak memory.
The matrix rate is measured in the same run: bf16 products of 8192 x 8192 random matrices. Writes DIR/train_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import mdata
from cli.quickstart_text import gather
from mdata.progress import SILENT

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 16_384
TEXT_BYTES = {"code": 40_000_000, "prose": 40_000_000}


def main() -> None:
    """Prepare, train, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpt-small-h200.toml")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    prepare(out)
    rate = matrix_rate()
    names = ["code-valid", "prose-valid"]
    overrides = [
        f"run.folder={out / 'run'}",
        f"data.blend={out / 'mix.json'}",
        "data.valid=" + json.dumps([str(out / f"{name}_text_document.json") for name in names]),
        *arguments.overrides,
    ]
    command = [sys.executable, "-m", "cli.mtrain", "train", str(arguments.config), *overrides]
    subprocess.run(command, check=True, cwd=ROOT)
    report(out, rate)


def prepare(out: Path) -> None:
    """Text, tokenizer, four corpora and a blend in `out`."""
    began = time.perf_counter()
    sizes = gather(out, SILENT, limits=TEXT_BYTES)
    print("gathered", sizes, f"in {time.perf_counter() - began:.0f} s", flush=True)
    training = [out / "code-train.jsonl", out / "prose-train.jsonl"]
    mdata.train_tokenizer(training, out / "tokenizer", vocab_size=VOCABULARY)
    for name in sizes:
        began = time.perf_counter()
        mdata.preprocess(
            mdata.PreprocessOptions(
                input=(str(out / f"{name}.jsonl"),),
                output_prefix=str(out / name),
                tokenizer_type="HuggingFaceTokenizer",
                tokenizer_model=str(out / "tokenizer"),
                append_eod=True,
                workers=8,
            )
        )
        print("preprocessed", name, f"in {time.perf_counter() - began:.1f} s", flush=True)
    words = ["0.7", str(out / "code-train_text_document.json"), "0.3", str(out / "prose-train_text_document.json")]
    mdata.make_blend(words, out / "mix.json")


def matrix_rate() -> float:
    """Floating-point operations per second of this GPU's bf16 matrix product."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(13):
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.mm(a, b)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * 8192**3 / statistics.median(seconds[3:])


def report(out: Path, rate: float) -> None:
    """Print and write what was measured."""
    plan = json.loads((out / "run" / "plan.json").read_text())
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    speed = statistics.median(line["tokens_per_s"] for line in lines[20:])
    valid = [line for line in lines if "valid" in line]
    facts = {
        "parameters": plan["num_parameters"],
        "shape": {k: plan["shape"][k] for k in ("num_layers", "hidden_size", "num_heads", "vocab_size")},
        "tokens_per_step": plan["tokens_per_step"],
        "steps": lines[-1]["step"],
        "loss": {"first": lines[0]["loss"], "last": lines[-1]["loss"]},
        "validation": {"first": valid[0]["valid"], "last": valid[-1]["valid"]},
        "tokens_per_s": round(speed),
        "matrix_tflops": round(rate / 1e12, 1),
        "model_flop_utilization": round(speed * plan["flops_per_token"] / rate, 4),
    }
    (out / "train_gpu.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name, value in facts.items():
        print(f"{name:>24}  {value}")


if __name__ == "__main__":
    main()
