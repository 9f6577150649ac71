"""A run on one rank in this process, and what it left in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.notes import Notes
from trainer.config.sections import RunConfig
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.run.metrics import read_events, read_metrics
from trainer.run.train import train


def alone(config: RunConfig) -> Notes:
    """Train; what was noted."""
    notes = Notes()
    train(config, join_world(Mesh(1), placement=Placement()), progress=notes)
    return notes


def curve(config: RunConfig) -> list[tuple[Any, ...]]:
    """Step, loss and gradient norm of each step."""
    return [(x["step"], x["loss"], x["grad_norm"]) for x in read_metrics(Path(config.run.folder))]


def events(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [event for event in read_events(Path(config.run.folder)) if event["event"] == kind]
