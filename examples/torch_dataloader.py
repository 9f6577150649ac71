"""torch's DataLoader over a corpus or blend of mdata: `python examples/torch_dataloader.py mix.json`.

Sample k is random already, and the same for every number of workers: the sampler only counts. The one number to keep in
a checkpoint is how many samples were consumed; the batches after it are those of a run that was never interrupted.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mdata

BATCH, STEPS = 8, 5


def main(path: str, *, consumed: int = 0) -> None:
    """Train a small model on the samples after the consumed ones."""
    data = mdata.open_dataset(path, sequence_length=64, seed=1234)
    numbers = range(consumed, BATCH * STEPS)
    # A map-style dataset, but no subclass of torch's: mdata does not import torch.
    batches: DataLoader[mdata.Sample] = DataLoader(data, BATCH, sampler=numbers, num_workers=2)  # type: ignore[arg-type]

    torch.manual_seed(0)
    vocab_size = data.vocab_size or 1 + (data.largest_id or 0)
    model = torch.nn.Sequential(torch.nn.Embedding(vocab_size, 32), torch.nn.Linear(32, vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        losses = cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        loss = (losses * batch["loss_mask"].flatten()).sum() / batch["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        consumed += BATCH
        print(f"{consumed} samples: loss {loss.item():.4f}, tokens {batch['tokens'].sum().item()}")


if __name__ == "__main__":
    main(sys.argv[1], consumed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
