"""The losses of a run's evaluation sets, the progress of an evaluation, the scores of tasks, and answers to prompts.

Every data-parallel rank reads its share of the samples; the sums are reduced once per set. All ranks compute the same
number of microbatches, because gathering sharded parameters is a collective: a rank with fewer samples ends with one
whose loss does not count. The progress of training shows how many samples are left, beside its steps: an evaluation has
no separate progress. Tasks ask for the log probabilities of rows of any length; these go through the pipeline as
microbatches do, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import mdata
from mdata.dataset.eval_sets import evaluated_samples
from mdata.loader.loader import collate
from mdata.progress import SILENT, Progress
from trainer.models.family import family_of
from trainer.models.stage import NO_PAIR, Microbatch
from trainer.run.data import evaluation_batches, to_device
from trainer.run.engine import Engine
from trainer.tasks.classify import Predicted, class_names
from trainer.tasks.in_training import Prompt
from trainer.tasks.loaded_model import prompt_ids
from trainer.tasks.score import ScoredSpan, SpanScore, batches_by_length

TOGETHER = 2048  # tokens of a microbatch of a task: the logits of all of them exist at the same time


def evaluate_sets(
    engine: Engine, splits: Mapping[str, Mapping[str, mdata.Dataset]], *, limit: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """Mean loss of each set, nats per token, on all ranks.

    Args:
        splits: split -> name -> set. limit: samples of a set to read, spread evenly over it; 0: all.
        progress: receives `to_evaluate`, the remaining samples over all ranks.
    """
    chosen = {
        (split, name): evaluated_samples(dataset, limit)
        for split, sets in splits.items()
        for name, dataset in sets.items()
    }
    left = sum(map(len, chosen.values()))
    losses: dict[str, dict[str, float]] = {split: {} for split in splits}

    def read(split: str, name: str) -> Iterator[Microbatch]:
        nonlocal left
        samples, plan, dp, dataset = chosen[split, name], engine.plan, engine.dp, splits[split][name]
        missing = -(-len(samples[:: dp.size]) // plan.micro_batch)  # of rank 0, which has the most

        def moved(batch: mdata.Batch) -> Microbatch:
            return to_device(
                batch,
                engine.world.device,
                vocab_size=plan.vocab_size,
                cp=engine.cp,
                reference=None if engine.references is None else engine.references.of(dataset, batch),
                beta=engine.config.train.dpo_beta,
            )

        for batch in evaluation_batches(dataset, samples, micro_batch=plan.micro_batch, dp=dp):
            yield moved(batch)
            missing -= 1
            left = max(0, left - len(batch.samples) * dp.size)
            progress.advance(0, to_evaluate=left)
        if missing:
            yield without_loss(moved(collate(dataset, samples[:1])))

    for split, name in chosen:
        losses[split][name] = engine.evaluate(read(split, name))
    if chosen:
        progress.advance(0, to_evaluate=0)
    return losses


def predict(engine: Engine, dataset: mdata.Dataset, samples: np.ndarray, *, progress: Progress = SILENT) -> Predicted:
    """The predictions for labelled rows, each computed once in any layout; the same on all ranks."""
    plan, dp, kind = engine.plan, engine.dp, dataset.options.kind
    assert isinstance(kind, mdata.Classify), "labelled rows"
    classes = class_names(family_of(engine.config).classes(engine.config) or (), kind.choices)
    per_rank = -(-len(samples) // dp.size)

    def read() -> Iterator[Microbatch]:
        places = np.arange(len(samples))[dp.rank :: dp.size]
        for first in range(0, per_rank, plan.micro_batch):
            mine = places[first : first + plan.micro_batch]
            numbers = mine if len(mine) else np.array([-1])  # the same number on all ranks
            batch = collate(dataset, samples[mine] if len(mine) else samples[:1])
            yield engine.microbatch(batch, components=numbers)
            progress.advance(0, to_evaluate=max(0, len(samples) - (first + plan.micro_batch) * dp.size))

    logits = engine.class_logits(read(), num_samples=len(samples), classes=len(classes)).cpu()
    return Predicted(dataset.row_names(samples), logits, classes)


def classify_sets(
    engine: Engine,
    splits: Mapping[str, Mapping[str, mdata.Dataset]],
    *,
    limit: int,
    folder: Path | None,
    progress: Progress,
) -> dict[str, dict[str, float]]:
    """Mean loss of each set by split, and "accuracy": the share of right predictions by set, and over the valid sets.

    Args:
        limit: samples of a set to read, spread evenly over it; 0: all.
        folder: where the predictions are written, as NAME.jsonl, on one rank; None: nowhere.
    """
    losses: dict[str, dict[str, float]] = {split: {} for split in splits}
    accuracy, right, labelled = dict[str, float](), 0, 0
    for split, sets in splits.items():
        for name, dataset in sets.items():
            predictions = predict(engine, dataset, evaluated_samples(dataset, limit), progress=progress)
            score = predictions.score()
            if score.loss is not None:
                losses[split][name], accuracy[name] = score.loss, score.correct / score.known
                if split == "valid":
                    right, labelled = right + score.correct, labelled + score.known
            if folder is not None:
                predictions.save(folder / f"{name}.jsonl")
    return {**losses, "accuracy": accuracy | ({"overall": right / labelled} if labelled else {})}


def without_loss(batch: Microbatch) -> Microbatch:
    """The microbatch with a loss of 0 from 0 tokens."""
    tokens = None if batch.loss_tokens is None else torch.zeros_like(batch.loss_tokens)
    swapped = None if batch.swapped_B is None else torch.full_like(batch.swapped_B, NO_PAIR)
    nothing = torch.zeros_like(batch.loss_mask_BS)
    return replace(batch, loss_mask_BS=nothing, loss_tokens=tokens, swapped_B=swapped)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunScorer:
    """A run that is scored while it trains: a `Scorer` of trainer/tasks/score.py.

    Args:
        tokenizer: of the data; None: no task has text.
    """

    engine: Engine
    tokenizer: mdata.Tokenizer | None
    name: str

    @property
    def context(self) -> int:
        """The longest row."""
        return self.engine.plan.sequence_length

    @property
    def rows(self) -> int:
        """Number of ids of the model."""
        return self.engine.plan.vocab_size

    @property
    def bos(self) -> int | None:
        """The id that begins a text."""
        return None if self.tokenizer is None else self.tokenizer.bos

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text."""
        return frozenset(() if self.tokenizer is None or self.tokenizer.eod is None else (self.tokenizer.eod,))

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        assert self.tokenizer is not None, "read_tasks refuses text without a tokenizer"
        return prompt_ids(self.tokenizer, text, bos=self.bos)

    def score_spans(
        self, spans: Sequence[ScoredSpan], *, batch_size: int = 8, greedy: bool = True, progress: Progress = SILENT
    ) -> list[SpanScore]:
        """The score of each span, on all ranks; microbatches have a size of their own, whatever `batch_size`."""
        scores = dict[int, SpanScore]()
        for numbers, batches in self._rounds(spans):
            nats = self.engine.row_sums(batches, num_rows=len(numbers)).tolist()
            wrong = nats
            if greedy:
                wrong = self.engine.row_sums(batches, num_rows=len(numbers), loss=_unlikely).tolist()
            scores |= {i: SpanScore(-loss, not bad) for i, loss, bad in zip(numbers, nats, wrong, strict=True)}
        return [scores[i] for i in range(len(spans))]

    def answers(self, prompts: Sequence[Prompt], *, most: int) -> list[str]:
        """The answer to each prompt, on all ranks: always the likeliest token, recomputing the whole row for each.

        Args:
            most: limit on the tokens of an answer, which also ends with the row.
        """
        assert self.tokenizer is not None, "read_prompts refuses prompts without a tokenizer"
        texts = [list(prompt.ids) for prompt in prompts]
        going = list(range(len(prompts)))
        for _ in range(most):
            spans = [ScoredSpan((*texts[number], 0), len(texts[number])) for number in going]
            likeliest = dict[int, int]()
            for numbers, batches in self._rounds(spans):
                ids = self.engine.row_sums(batches, num_rows=len(numbers), loss=_likeliest).tolist()
                likeliest |= {going[i]: int(id) for i, id in zip(numbers, ids, strict=True)}
            going = [n for n, id in likeliest.items() if id not in prompts[n].ends]
            for number in going:
                texts[number].append(likeliest[number])
            going = sorted(number for number in going if len(texts[number]) < self.context)
            if not going:
                break
        return [self.tokenizer.decode(text[len(prompt.ids) :]) for text, prompt in zip(texts, prompts, strict=True)]

    def _rounds(self, spans: Sequence[ScoredSpan]) -> Iterator[tuple[list[int], list[Microbatch]]]:
        """(numbers of some spans, this rank's microbatches of them) until all spans have been in one."""
        engine, mesh = self.engine, self.engine.world.mesh
        # Ranks that share a row need equal parts of it; FP8's products need multiples of 16 tokens.
        multiple = 32 * mesh.size("tp") * mesh.size("cp")
        together = engine.dp.size * engine.evaluated_together
        left = [number for (number,) in batches_by_length(spans, 1)]
        while left:
            longest = max(1, len(spans[left[0]].ids) - 1)
            length = min(-(-longest // multiple) * multiple, self.context)
            rows = max(1, TOGETHER // length)
            numbers, left = left[: rows * together], left[rows * together :]
            yield numbers, self._microbatches([spans[i] for i in numbers], rows=rows, length=length)

    def _microbatches(self, spans: Sequence[ScoredSpan], *, rows: int, length: int) -> list[Microbatch]:
        """This rank's part of the spans, in as many microbatches as each rank has; rows left over are empty."""
        dp, device = self.engine.dp, self.engine.world.device
        batches = []
        for first in range(0, len(spans), rows * dp.size):
            mine = range(first + dp.rank * rows, min(first + (dp.rank + 1) * rows, len(spans)))
            text = torch.zeros(rows, length + 1, dtype=torch.int64)
            mask = torch.zeros(rows, length)
            for row, number in enumerate(mine):
                span = spans[number]
                text[row, : len(span.ids)] = torch.tensor(span.ids)
                mask[row, max(0, span.first - 1) : len(span.ids) - 1] = 1
            numbers = torch.tensor([*mine, *[-1] * (rows - len(mine))], device=device)
            text, mask = text.to(device), mask.to(device)
            batch = Microbatch(
                tokens_BS=text[:, :-1],
                labels_BS=text[:, 1:],
                loss_mask_BS=mask,
                samples_B=numbers,
                components_B=numbers,
            )
            batches.append(batch.on_context_rank(self.engine.cp))
        return batches


def _unlikely(logits_BSV: Tensor, batch: Microbatch) -> Tensor:
    """1 for each token to be scored that is not the likeliest: [B, S]."""
    return (_best(logits_BSV) != batch.labels_BS) * batch.loss_mask_BS


def _likeliest(logits_BSV: Tensor, batch: Microbatch) -> Tensor:
    """The likeliest id where a token is to be scored, else 0: [B, S]."""
    return _best(logits_BSV) * batch.loss_mask_BS


def _best(logits_BSV: Tensor) -> Tensor:
    """The likeliest ids, the lowest of equal ones: int64[B, S]."""
    ids_V = torch.arange(logits_BSV.shape[-1], device=logits_BSV.device)
    return torch.where(logits_BSV == logits_BSV.amax(-1, keepdim=True), ids_V, len(ids_V)).amin(-1)
