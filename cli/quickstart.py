"""The main job on text from this machine: `make quickstart`, or python -m cli.quickstart.

Everything is written to quickstart/ in the current folder. Each step after gathering the text is one of our commands,
printed before it runs, so that the output reads as a tutorial; its exit code is passed on. A second run starts from
scratch: the folder of an earlier one is removed first, any other folder with that name is refused.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mdata.errors import UsageError
from mdata.util.commands import command_line

from .console import Command, Console, run

FOLDER = Path("quickstart")
MARK = FOLDER / "made-by-make-quickstart"
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.toml"
CORPORA = ("code-train", "code-valid", "prose-train", "prose-valid")
VOCABULARY = 2048
GPU_STEPS = "train.steps=3000"  # a GPU does this many in less time than two cores need for the configured number
PROMPTS = ("def main(", "class Error(", "Return the ", "The following ")

CLOSING = """
The whole job took {seconds:.0f} s. It made:
  {folder}/text/            text from this Python installation, as jsonl
  {folder}/tokenizer/       a byte-level BPE vocabulary of {vocabulary:,}
  {folder}/*_text_document.bin, .idx, .json   token files that Megatron reads, and their manifests
  {folder}/blend.json       70 % code, 30 % prose
  {folder}/run/             checkpoints, metrics, and report.html: open it in a browser

What to try next (after: source .venv/bin/activate):
  mtrain generate {folder}/run --prompt "import "
  mtrain train {config} {overrides}train.steps={more_steps}     continues to step {more_steps}
  mdata inspect {folder}/prose-train_text_document.json
  mdata preprocess --input YOUR.jsonl --output-prefix yours --tokenizer-type HuggingFaceTokenizer \\
    --tokenizer-model {folder}/tokenizer --append-eod"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides for the training, such as train.steps=20."""
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for mtrain train")


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Gather text, run the commands, print the results."""
    from .quickstart_text import gather

    began = time.monotonic()
    make_folder()
    console.note("collecting text from this Python installation")
    with console.progress() as progress:
        sizes = gather(FOLDER / "text", progress)
    console.note("".join(f"  {FOLDER}/text/{name}.jsonl  {size / 1e6:.1f} MB\n" for name, size in sizes.items()))
    machine = machine_words(count_gpus())
    for words in commands(machine, arguments.overrides):
        code = _run(words, console)
        if code:
            console.error(f"this command ended with exit code {code}: {shlex.join(words)}")
            return code
    closing = CLOSING.format(
        seconds=time.monotonic() - began,
        folder=FOLDER,
        vocabulary=VOCABULARY,
        config=_config_path(),
        overrides="".join(f"{word} " for word in machine if "=" in word and word != GPU_STEPS),
        more_steps=6000 if GPU_STEPS in machine else 2000,
    )
    console.result(closing, {"folder": str(FOLDER)})
    return 0


def make_folder() -> None:
    """Create an empty quickstart/, with a file that marks it as ours.

    Raises:
        UsageError: something else has that name.
    """
    if FOLDER.exists():
        if not MARK.exists() and (not FOLDER.is_dir() or any(FOLDER.iterdir())):
            raise UsageError(
                f"{FOLDER} already exists and was not made by the quickstart",
                fix="move it away, or run in another folder",
            )
        shutil.rmtree(FOLDER)
    FOLDER.mkdir()
    MARK.touch()


def machine_words(num_gpus: int) -> list[str]:
    """How `mtrain train` uses this machine: two ranks, on GPUs in bf16; a single GPU cannot be split."""
    if num_gpus == 0:
        return ["--nproc", "2"]
    layout = ["--nproc", "1", "mesh.tp=1", "mesh.sequence_parallel=false"] if num_gpus == 1 else ["--nproc", "2"]
    return [*layout, "precision.dtype=bf16", GPU_STEPS]


def count_gpus() -> int:
    """Number of CUDA devices that torch sees."""
    import torch

    return torch.cuda.device_count()


def commands(machine: list[str], overrides: list[str]) -> list[list[str]]:
    """The commands that a user would type, in order."""
    text, tokenizer = FOLDER / "text", FOLDER / "tokenizer"
    learn = ["mdata", "train-tokenizer", "--input", str(text / "code-train.jsonl"), str(text / "prose-train.jsonl")]
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer), "--append-eod"]
    files = [["--input", str(text / f"{name}.jsonl"), "--output-prefix", str(FOLDER / name)] for name in CORPORA]
    shares = ("0.7", str(_manifest("code-train")), "0.3", str(_manifest("prose-train")))
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return [
        [*learn, "--vocab-size", str(VOCABULARY), "--output", str(tokenizer)],
        *(["mdata", "preprocess", *names, *kind] for names in files),
        ["mdata", "blend", *shares, "--output", str(FOLDER / "blend.json")],
        ["mtrain", "train", str(_config_path()), *machine, *overrides],
        ["mtrain", "generate", str(FOLDER / "run"), *prompts, "--max-tokens", "48"],
        ["mtrain", "report", str(FOLDER / "run")],
    ]


def _manifest(name: str) -> Path:
    return FOLDER / f"{name}_text_document.json"


def _config_path() -> Path:
    """The path of the shipped configuration, relative to here if possible."""
    here = Path.cwd()
    return CONFIG.relative_to(here) if CONFIG.is_relative_to(here) else CONFIG


def _run(words: list[str], console: Console) -> int:
    """Run one of our commands with this Python; returns its exit code, as a shell would."""
    console.note(f"\n$ {shlex.join(words)}")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    code = subprocess.run([*command_line(words[0]), *words[1:]], env=environment).returncode
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    table = (Command("quickstart", "text to trained model on text from this machine", module=".quickstart"),)
    raise SystemExit(run("mdata", table, description="quickstart", argv=["quickstart", *sys.argv[1:]]))
