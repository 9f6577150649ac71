"""Check that an interrupted run ends with the same bits as an uninterrupted one.

Both runs are made in separate folders with the given configuration (for a run folder: its config.toml); the run itself
is not changed. Losses, norms, counters and every slice of the last checkpoint are compared. Exit code 1 if
anything differs. On GPUs this needs run.deterministic = true.

Examples:
  mtrain prove runs/first
  mtrain prove run.toml --steps 40 --restart 15 mesh.tp=2
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mdata.errors import UsageError, counted
from mdata.util.commands import command_line
from trainer.parallel.placement import find_placement

from .console import Console, Parser
from .mtrain_options import add_run_arguments, world_size

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.run.prove import Proof

SHOWN = 8  # differences
STEPS, RESTART = 10, 5


def add_arguments(parser: Parser) -> None:
    """See `mtrain prove --help`."""
    add_run_arguments(parser)
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps of both runs (default: {STEPS})")
    restart = f"step after which one run is restarted (default: {RESTART})"
    parser.add_argument("--restart", type=int, default=RESTART, metavar="K", help=restart)
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="keep both runs in this folder (default: a temporary folder)"
    )


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Train, interrupt, train, compare."""
    from trainer.config.parse import ReadConfig, load_config
    from trainer.run.launch import preflight
    from trainer.run.prove import prove

    if find_placement(os.environ) is not None:
        raise UsageError("mtrain prove starts its own ranks", fix="run it without torchrun or srun, on one machine")
    if Path(arguments.config).is_dir():
        arguments.config = str(Path(arguments.config, "config.toml"))
    config = load_config(arguments.config, arguments.overrides)
    ranks = world_size(config, arguments.nproc)
    if arguments.output is not None and arguments.output.exists() and any(arguments.output.iterdir()):
        raise UsageError(f"{arguments.output} is not empty", fix="give a new folder")
    with tempfile.TemporaryDirectory(prefix="mtrain-prove-") as scratch:
        folder = arguments.output or Path(scratch)
        first = dataclasses.replace(config, run=dataclasses.replace(config.run, folder=str(folder / "straight")))
        with console.progress() as progress:
            preflight(ReadConfig(first, []), ranks, where=arguments.config, progress=progress)

        def train(run_config: RunConfig) -> None:
            where = Path(run_config.run.folder).name
            console.note(f"training {where} to step {run_config.train.exit_interval}")
            _train(run_config, ranks, Path(scratch, "run.toml"))

        proof = prove(config, folder, restart=arguments.restart, steps=arguments.steps, train=train)
    console.result(proof_text(proof), dataclasses.asdict(proof))
    return 1 if proof.differences else 0


def proof_text(proof: Proof) -> str:
    """The outcome as text."""
    compared = f"{counted(proof.steps, 'step')} and {counted(proof.slices, 'slice')} of the last checkpoint"
    if not proof.differences:
        return f"equal: {compared} have the same bits"
    lines = [f"not equal: {counted(len(proof.differences), 'difference')} in {compared}"]
    lines += [
        f"  {difference.what}: {difference.straight}, interrupted: {difference.interrupted}"
        for difference in proof.differences[:SHOWN]
    ]
    if len(proof.differences) > SHOWN:
        lines.append(f"  and {len(proof.differences) - SHOWN} more (--json has all)")
    return "\n".join(lines)


def _train(config: RunConfig, ranks: int, file: Path) -> None:
    """Train in separate processes, so that one run leaves nothing for the next."""
    from trainer.config.parse import dump_config

    file.write_text(dump_config(config), encoding="utf-8")
    words = [*command_line("mtrain"), "train", str(file), "--nproc", str(ranks)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if not line.startswith("{")][-4:]
        text = f"the run in {config.run.folder} ended with exit code {done.returncode}"
        error = UsageError(text, found="\n  ".join(last))
        error.exit_code = done.returncode
        raise error
