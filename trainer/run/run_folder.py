"""The files of a run folder that are written before the first step, and the lock that keeps other runs out of it.

What a run writes as it goes is metrics.py's; its checkpoints are those of the room checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mdata.errors import os_errors_named
from mdata.util import atomic_io, file_lock
from trainer.config.parse import dump_config
from trainer.config.sections import RunConfig
from trainer.parallel.world import World
from trainer.plan.facts import plan_facts
from trainer.plan.plan import Plan
from trainer.run.data import RunData


@contextmanager
def locked_folder(config: RunConfig, world: World) -> Iterator[None]:
    """Rank 0 keeps other runs out of the folder: two would write each other's metrics and checkpoints."""
    if not world.is_main:
        yield
        return
    folder = Path(config.run.folder)
    with os_errors_named("making the run folder"):
        folder.mkdir(parents=True, exist_ok=True)
    with file_lock.hold(folder / ".lock"):
        yield


def write_run_files(config: RunConfig, plan: Plan, *, data: RunData) -> Path:
    """Write what does not change during a run: config.toml, plan.json, tokenizer."""
    folder = Path(config.run.folder)
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    atomic_io.atomic_write(folder / "config.toml", dump_config(config).encode())
    _write_json(folder / "plan.json", {**plan_facts(config, plan), "data_id": data.train.data_id})
    for name, content in data.train.tokenizer_files.items():
        atomic_io.atomic_write(folder / "tokenizer" / name, content)
    if known := data.train.tokenizer:
        # With the files above all that decides ids, so that `generate` needs no corpus.
        facts = {"type": known.type, "options": known.options, "fingerprint": known.fingerprint}
        _write_json(folder / "tokenizer_facts.json", facts)
    return folder


def _write_json(path: Path, value: Any) -> None:
    atomic_io.atomic_write(path, (json.dumps(value, indent=1) + "\n").encode())
