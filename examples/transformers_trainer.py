"""The Trainer of transformers over a corpus or blend of mdata: `python examples/transformers_trainer.py mix.json`.

Warning: mdata's labels are shifted (labels[t] follows tokens[t]), but models of transformers shift labels themselves.
`input_ids=tokens, labels=labels` trains, without any error, on the token after the next. `ForTransformers` gives what
they want: the S + 1 tokens of a row, and the same as labels, -100 where there is no loss. Needs accelerate, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import mdata

BATCH, STEPS = 8, 5


class ForTransformers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The samples of a dataset of text as models of transformers take them."""

    def __init__(self, data: mdata.Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        rows = self.data.read(samples)
        labels = np.full_like(rows.text, -100)
        labels[:, 1:] = np.where(rows.loss_mask > 0, rows.labels, -100)
        pairs = zip(torch.from_numpy(rows.text), torch.from_numpy(labels), strict=True)
        return [{"input_ids": input_ids, "labels": unshifted} for input_ids, unshifted in pairs]


def main(path: str, folder: str) -> None:
    """Train a small GPT-2; the samples come in mdata's order, which is random already."""
    data = mdata.open_dataset(path, sequence_length=63, seed=1234, num_samples=BATCH * STEPS)
    vocab_size = data.vocab_size or 1 + (data.largest_id or 0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        train_sampling_strategy="sequential",  # sample k is random already
        logging_steps=1,
        save_steps=STEPS,
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=ForTransformers(data))
    trainer.train()
    for line in trainer.state.log_history[:STEPS]:
        print(f"step {line['step']}: loss {line['loss']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "runs/transformers")
