"""Losses of transformers' Trainer and of trl's trainers; prints losses.json. Needs transformers, trl, peft, datasets.

    python -m tests.golden.trl.make > tests/golden/trl/losses.json

The model, the adapter, the rows and the rule are those of tests/trainer/run/test_other_trainers.py.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import torch
import transformers
import trl
from trl.trainer.dpo_trainer import DataCollatorForPreference

from tests.trainer.convert.hf_models import save_tokenizer
from tests.trainer.run.test_other_trainers import (
    BETA,
    RATES,
    STEPS,
    WARMUP,
    Case,
    config_of,
    make_starts,
    rows_hash,
    rows_of,
)

Rows = list[tuple[np.ndarray, np.ndarray, np.ndarray]]
IGNORED = -100


class DPOTrainer(trl.DPOTrainer):
    """trl's, which has no option for rows that are tokens already."""

    def _prepare_dataset(self, dataset: datasets.Dataset, *_: Any) -> datasets.Dataset:
        return dataset


def main() -> None:
    """Train each case."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        starts = make_starts(root)
        save_tokenizer(root / "tokenizer")
        cases = {}
        for case in RATES:
            config = config_of(case, starts, root / case)
            model = transformers.AutoModelForCausalLM.from_pretrained(starts.model, dtype=torch.float32)
            if case == "lora":
                model = peft.PeftModel.from_pretrained(model, starts.adapter, is_trainable=True)
            trainer = _trainer(case, model, rows_of(config), root)
            with contextlib.redirect_stdout(sys.stderr):
                trainer.train()
            losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
            cases[case] = {"rows": rows_hash(config), "trainer": type(trainer).__name__, "losses": losses}
    packages = ("torch", "transformers", "trl", "peft", "accelerate")
    versions = {package: importlib.metadata.version(package) for package in packages}
    json.dump({"versions": versions, "cases": cases}, sys.stdout, indent=1)


def _trainer(case: Case, model: Any, rows: Rows, root: Path) -> transformers.Trainer:
    """The trainer that has the case, with batches of two rows or pairs and four a step, in the order given."""
    options = {
        "output_dir": str(root / f"{case}.out"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": RATES[case],
        "lr_scheduler_type": "cosine",
        "warmup_steps": WARMUP,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "train_sampling_strategy": "sequential",
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token
    pad = tokenizer.pad_token_id
    if case == "full":
        del options["disable_dropout"]
        data = [{"input_ids": text, "labels": _labels(text, trained)} for text, trained, _ in rows]
        arguments = transformers.TrainingArguments(**options)
        return transformers.Trainer(
            model, arguments, train_dataset=data, data_collator=transformers.default_data_collator
        )
    if case == "dpo":
        data = datasets.Dataset.from_list([_pair(*row) for row in rows])
        config = trl.DPOConfig(**options, beta=BETA, max_length=None)
        return DPOTrainer(
            model,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            data_collator=DataCollatorForPreference(pad_token_id=pad),
        )
    del options["disable_dropout"]
    data = datasets.Dataset.from_list(
        [
            {"input_ids": text.tolist(), "labels": _labels(text, trained).tolist(), "seq_lengths": lengths.tolist()}
            for text, trained, lengths in rows
        ]
    )
    skip = {"skip_prepare_dataset": True}
    config = trl.SFTConfig(**options, padding_free=True, max_length=None, shuffle_dataset=False, dataset_kwargs=skip)
    return trl.SFTTrainer(model, args=config, train_dataset=data, processing_class=tokenizer)


def _labels(text: np.ndarray, trained: np.ndarray) -> np.ndarray:
    return np.where(trained, text, IGNORED)


def _pair(text: np.ndarray, trained: np.ndarray, lengths: np.ndarray) -> dict[str, list[int]]:
    """The two conversations of a row; the question is what both have in front of the first trained token."""
    first = int(lengths[0])
    start, end = (int(place) for place in trained[:first].nonzero()[0][[0, -1]])
    answer = trained[first:].nonzero()[0] + first
    assert np.array_equal(text[:start], text[first : answer[0]]), "one pair in a row, of one question"
    return {
        "prompt_ids": text[:start].tolist(),
        "chosen_ids": text[start : end + 1].tolist(),
        "rejected_ids": text[answer[0] : answer[-1] + 1].tolist(),
    }


if __name__ == "__main__":
    main()
