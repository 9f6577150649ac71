"""Show what a checkpoint contains: its step, the format, the tensors of each state, files and their sizes.

Takes a checkpoint, or a run folder (the checkpoint from which it would resume). Reads only indexes; --verify compares
every byte with its hash. --json also has the tensors of the optimizer's state, and the run's resolved configuration as
TOML in "config". Exit code 4 if the checkpoint is damaged.

Examples:
  mtrain inspect runs/first
  mtrain inspect runs/first/checkpoints/step-400 --verify
"""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from mdata.errors import UsageError, counted

from .console import Console
from .text import table

if TYPE_CHECKING:
    from trainer.checkpoint.format import Index
    from trainer.checkpoint.location import Location

COUNTS = ("skipped_samples", "schedule_steps", "schedule_samples", "moment_steps")  # of `RunState`; text: if above 0
LONGEST = 100  # characters of a value; the text cuts longer ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain inspect --help`."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint (a folder step-N), a run folder, or an address of either"
    )
    parser.add_argument("--verify", action="store_true", help="compare every byte with its hash")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Print the content of the indexes."""
    from trainer.checkpoint.folder import checkpoint_at, read_index
    from trainer.checkpoint.load import verify_checkpoint
    from trainer.checkpoint.location import location_of

    checkpoint = checkpoint_at(location_of(arguments.checkpoint))
    if (folder := checkpoint.folder) is None:
        fix = "give a folder step-N, or a run folder with checkpoints"
        raise UsageError(f"there is no checkpoint in {arguments.checkpoint}", fix=fix)
    if checkpoint.warning:
        console.note(checkpoint.warning)
    index = verify_checkpoint(folder) if arguments.verify else read_index(folder)
    facts = checkpoint_facts(folder, index, verified=arguments.verify and index.hashed)
    console.result(checkpoint_text(facts), facts)


def checkpoint_facts(folder: Location, index: Index, *, verified: bool) -> dict[str, Any]:
    """The facts about a checkpoint, as JSON types; names of tensors of the optimizer's state begin with the state's."""
    run = index.run
    states: dict[str, list[int]] = {}
    for name, tensor in index.tensors.items():
        states.setdefault(name.partition("/")[0], []).append(math.prod(tensor.shape))
    return {
        "path": str(folder),
        "version": index.version,
        "hashed": index.hashed,
        "verified": verified,
        "step": run.step,
        "consumed_samples": run.consumed_samples,
        "optimizer_steps": run.optimizer_steps,
        **{name: getattr(run, name) for name in COUNTS},
        "data_id": run.data_id,
        "data": run.data,
        "measured": run.measured,
        "scaler": run.scaler,
        "float8": run.float8,
        "spikes": run.spikes,
        "base": run.base,
        "written_by": run.versions,
        "states": {name: {"tensors": len(sizes), "elements": sum(sizes)} for name, sizes in states.items()},
        "files": {name: file.bytes for name, file in index.files.items()},
        "extras": {name: file.bytes for name, file in index.extras.items()},
        "tensors": {
            name.removeprefix("weight/"): {"shape": list(t.shape), "dtype": t.dtype, "slices": len(t.slices)}
            for name, t in index.tensors.items()
        },
        "config": run.config,
    }


def checkpoint_text(facts: dict[str, Any]) -> str:
    """The same as text."""
    loss = facts["measured"].get("loss")
    measured = f", loss {loss:.4f}" if isinstance(loss, (int, float)) else ""
    lines = [
        f"{facts['path']}: step {facts['step']:,}, {counted(facts['consumed_samples'], 'sample')} consumed, "
        f"{counted(facts['optimizer_steps'], 'update')} applied" + measured,
        f"format version {facts['version']}, "
        + ("every byte verified" if facts["verified"] else "with hashes" if facts["hashed"] else "without hashes"),
        f"data {facts['data_id']}",
        *(f"  {name} {_shown(value)}" for name, value in facts["data"].items()),
        'configuration: with --json, as TOML in "config"',
    ]
    if counts := [f"{name} {facts[name]:,}" for name in COUNTS if facts[name]]:
        lines.append(", ".join(counts))
    if facts["written_by"]:
        lines.append("written by " + ", ".join(f"{name} {value}" for name, value in facts["written_by"].items()))
    total, extras = sum(facts["files"].values()), ", ".join(facts["extras"]) or "no tokenizer"
    lines.append(f"{counted(len(facts['files']), 'file')} with {total:,} bytes; beside them {extras}")
    rows = [[name, state["tensors"], state["elements"]] for name, state in facts["states"].items()]
    lines += ["", table(["state", "tensors", "elements"], rows)]
    shown = [
        [name, " x ".join(map(str, tensor["shape"])), tensor["dtype"], tensor["slices"]]
        for name, tensor in facts["tensors"].items()
        if "/" not in name
    ]
    return "\n".join([*lines, "", table(["weight", "shape", "dtype", "slices"], shown)])


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
