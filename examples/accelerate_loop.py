"""Accelerate over a corpus or blend of mdata: `accelerate launch examples/accelerate_loop.py mix.json`.

mdata.Loader gives each process its batches and is registered for checkpoints, so that `load_state` also puts the data
back: with any number of processes, a run that continues reads the samples after those that were trained on.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

import mdata

BATCH, STEPS = 8, 6


def main(path: str, folder: str) -> None:
    """Three steps and a checkpoint, two more that are lost, then the checkpoint again and the rest."""
    accelerator = Accelerator()
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    data = mdata.open_dataset(path, sequence_length=64, seed=1234, num_samples=BATCH * STEPS)
    loader = mdata.Loader(data, mdata.BatchPlan(BATCH, BATCH // size, dp_rank=rank, dp_size=size, seed=1234))

    torch.manual_seed(0)
    vocab_size = data.vocab_size or 1 + (data.largest_id or 0)
    model = torch.nn.Sequential(torch.nn.Embedding(vocab_size, 32), torch.nn.Linear(32, vocab_size))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.register_for_checkpointing(loader)

    def train(first: int, last: int) -> None:
        for step, (batch,) in zip(range(first, last + 1), loader, strict=False):
            rows = (batch.tokens, batch.labels, batch.loss_mask)
            tokens, labels, mask = (torch.from_numpy(array).to(device) for array in rows)
            losses = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="none")
            loss = (losses * mask.flatten()).sum() / mask.sum()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.print(f"step {step}: loss {loss.item():.4f}, tokens {tokens.sum().item()}")

    train(1, 3)
    accelerator.save_state(folder)
    loader.load_state_dict(loader.state_dict())  # without this, the next loop begins again at the first sample
    train(4, 5)
    accelerator.load_state(folder)
    train(4, STEPS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "runs/accelerate")
