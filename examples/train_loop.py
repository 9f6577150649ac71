"""A training loop of your own: five steps with tensor parallelism, a checkpoint, then two steps more in another layout.

    torchrun --nproc-per-node 2 examples/train_loop.py

What `mtrain train` adds is a schedule, evaluation, logs, and checkpoints in the background; the steps are the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trainer

CONFIG = Path(__file__).with_suffix(".toml")
RANKS = 2


def steps(config: trainer.RunConfig, *, until: int, checkpoint: str | None = None) -> str:
    """Train until a step, from a checkpoint or from the start, in the layout of the configuration; saves the end."""
    world = trainer.join_world(trainer.mesh_of(config, RANKS))
    plan = trainer.make_plan(config, RANKS)
    engine = trainer.Engine(config, plan, world=world, fresh=checkpoint is None)
    state = engine.load(checkpoint) if checkpoint else None
    step, samples = (state.step, state.consumed_samples) if state else (0, 0)

    data = trainer.open_data(config)
    batches = iter(trainer.training_batches(data, config, plan=plan, dp=world.groups["dp"], consumed=samples))
    while step < until:
        microbatches = [engine.microbatch(batch) for batch in next(batches)]
        report = engine.step(microbatches, learning_rate=config.optimizer.lr).read()
        step, samples = step + 1, samples + plan.global_batch
        if world.is_main:
            print(f"tp {plan.tp} x dp {plan.dp}, step {step}: loss {report.loss:.4f}, norm {report.grad_norm:.4f}")

    root = f"{config.run.folder}/checkpoints"
    saved = engine.save(root, step=step, consumed_samples=samples, data=data.train)
    trainer.leave_world()
    return str(saved)


if __name__ == "__main__":
    overrides = sys.argv[1:]  # such as run.folder=/tmp/run
    checkpoint = steps(trainer.load_config(CONFIG, ["mesh.tp=2", *overrides]), until=5)
    steps(trainer.load_config(CONFIG, ["mesh.tp=1", *overrides]), until=7, checkpoint=checkpoint)
