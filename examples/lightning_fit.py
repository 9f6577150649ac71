"""Lightning over a corpus or blend of mdata: `python examples/lightning_fit.py mix.json`. Needs lightning.

`Batches` is the loader: Lightning saves its state with each checkpoint, so that a run that continues reads the samples
after those that were trained on, with any number of devices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import lightning
import torch
from torch.nn.functional import cross_entropy

import mdata

BATCH, STEPS = 8, 6


class Batches:
    """This rank's batches as tensors. It has a length: otherwise Lightning reads one batch ahead of its checkpoints."""

    def __init__(self, data: mdata.Dataset, plan: mdata.BatchPlan) -> None:
        self.loader, self.length = mdata.Loader(data, plan), len(data) // plan.global_batch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for (batch,) in self.loader:  # one microbatch a step
            names = {"tokens": batch.tokens, "labels": batch.labels, "loss_mask": batch.loss_mask}
            yield {name: torch.from_numpy(array) for name, array in names.items()}

    def state_dict(self) -> dict[str, int | str]:
        """Of the loader, behind the last batch that was given."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """The next loop begins there."""
        self.loader.load_state_dict(state)


class Module(lightning.LightningModule):
    """A small model of the next token."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(vocab_size, 32), torch.nn.Linear(32, vocab_size))

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """The loss of a batch."""
        losses = cross_entropy(self.model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        loss = (losses * batch["loss_mask"].flatten()).sum() / batch["loss_mask"].sum()
        print(f"step {self.global_step + 1}: loss {loss.item():.4f}, tokens {batch['tokens'].sum().item()}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(path: str, folder: str, *, steps: int, checkpoint: str | None = None) -> None:
    """Train until a step; goes on from a checkpoint, if one is given."""
    data = mdata.open_dataset(path, sequence_length=64, seed=1234, num_samples=BATCH * STEPS)
    trainer = lightning.Trainer(
        max_steps=steps,
        use_distributed_sampler=False,  # the plan says which samples are this rank's
        default_root_dir=folder,
        accelerator="auto",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    rank, size = trainer.global_rank, trainer.world_size
    plan = mdata.BatchPlan(BATCH, BATCH // size, dp_rank=rank, dp_size=size, seed=1234)
    vocab_size = data.vocab_size or 1 + (data.largest_id or 0)
    trainer.fit(Module(vocab_size), Batches(data, plan), ckpt_path=checkpoint)
    trainer.save_checkpoint(f"{folder}/step-{steps}.ckpt")


if __name__ == "__main__":
    folder = sys.argv[2] if len(sys.argv) > 2 else "runs/lightning"
    fit(sys.argv[1], folder, steps=3)
    fit(sys.argv[1], folder, steps=6, checkpoint=f"{folder}/step-3.ckpt")
