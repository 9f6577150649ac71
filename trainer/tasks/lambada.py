"""LAMBADA: whether the last word of a passage is the one that the model finds likeliest.

The numbers are those of Megatron-LM's `--task LAMBADA`, with differences where it fails: a passage longer than the
sequence loses its beginning instead of stopping the run, and blank lines are skipped (both are counted); padding of the
vocabulary is not a candidate; every line counts once, whatever the number of ranks. Strict: all tokens of the last word
must be the likeliest; otherwise the last token alone, which depends on the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from mdata import BadInputError, UsageError
from mdata.errors import counted
from mdata.progress import SILENT, Progress
from trainer.tasks.score import ScoredSpan, Scorer, row_length
from trainer.tasks.wikitext import read_text


class Passage(NamedTuple):
    """The tokens before the last word, and the tokens of the word."""

    context: list[int]
    label: list[int]


def passage(model: Scorer, text: str, *, strict: bool) -> Passage:
    """Divide a text that is not blank into context and label."""
    if not strict:
        ids = model.encode(text)
        return Passage(ids[:-1], ids[-1:])
    word = text.split()[-1]
    before = text[: text.rfind(word)].strip()
    if not before:
        return Passage([], model.encode(f" {word}"))
    context, full_ids = model.encode(before), model.encode(f"{before} {word}")
    # A SentencePiece tokenizer adds a piece for the blank to " word" alone, which no text has.
    together = full_ids[: len(context)] == context and len(full_ids) > len(context)
    return Passage(context, full_ids[len(context) :] if together else model.encode(f" {word}"))


def read_passages(path: Path) -> tuple[list[str], int]:
    """The texts of a JSON Lines file, and how many blank lines it has.

    Raises:
        UsageError: it cannot be read. BadInputError: a line is something else; names it.
    """
    texts, blank = [], 0
    for number, line in enumerate(read_text(path).removesuffix("\n").split("\n"), 1):
        if not line.strip():
            blank += 1
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise BadInputError(f"{path}, line {number} is not a passage", found=line[:80], expected='{"text": "..."}')
        if text.strip():
            texts.append(text)
        else:
            blank += 1
    if not texts:
        raise BadInputError(f"{path} has no passages", expected='lines such as {"text": "..."}')
    return texts, blank


def lambada(
    model: Scorer,
    path: Path,
    *,
    strict: bool = False,
    sequence_length: int | None = None,
    batch_size: int = 8,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Accuracy of the last words of a file of passages.

    Args:
        sequence_length: tokens of a row; None: the model's context.

    Raises:
        UsageError: options out of range, or a word longer than a row. BadInputError: see `read_passages`.
    """
    length = row_length(model, sequence_length)
    texts, blank = read_passages(path)
    spans, cut, bare = [], 0, 0
    for number, text in enumerate(texts, 1):
        context, label = passage(model, text, strict=strict)
        if len(label) > length:
            raise UsageError(
                f"{path}: the last word of passage {number} has {counted(len(label), 'token')}",
                expected=f"at most {length}, the tokens of a row",
            )
        cut += len(context) + len(label) > length + 1
        bare += not context
        ids = [*context, *label][-length - 1 :]
        # Without context the first token of a word cannot be predicted; the others are.
        spans.append(ScoredSpan(ids, max(1, len(ids) - len(label))))
    correct = sum(score.greedy for score in model.score_spans(spans, batch_size=batch_size, progress=progress))
    return {
        "task": "lambada",
        "file": path.name,
        "strict": strict,
        "sequence_length": length,
        "number_correct": correct,
        "total": len(texts),
        "accuracy": correct / len(texts),
        "cut": cut,
        "without_context": bare,
        "blank_lines": blank,
    }


def lambada_line(facts: dict[str, Any]) -> str:
    """The result as Megatron-LM prints it."""
    return (
        f"validation results on LAMBADA | number correct: {facts['number_correct']:.4E} | "
        f"total examples: {facts['total']:.4E} | avg accuracy: {facts['accuracy']:.4E}"
    )
