"""WikiText-103 as Megatron-LM scores it: one text, detokenized, in overlapping windows; perplexity per original word.

The numbers are those of `tasks/main.py --task WIKITEXT103`, with three differences: an overlap beyond the sequence
leaves tokens unscored and is refused; windows that score nothing are not computed; every window counts once, whatever
the number of ranks. The name of the detokenizer is an option, not a part of the path.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from mdata import BadInputError, UsageError
from mdata.errors import counted
from mdata.progress import SILENT, Progress
from mdata.util.regular_files import refuse_wide_encoding, regular_file
from trainer.tasks.score import ScoredSpan, Scorer, row_length

CAP = 20.0  # Megatron caps the exponent of a perplexity
DETOKENIZERS = ("wiki", "ptb", "none")
_MARKS = (":", ";", ".", "!", "?", ",")
_PAIRS = (r"\(\)", r"\[\]", r"\{\}", '""', "''")


class Window(NamedTuple):
    """Tokens start to stop of the text, of which those from `first` on (counted in the text) are scored."""

    start: int
    first: int
    stop: int


def detokenize(text: str, *, kind: str = "wiki") -> str:
    """The text as people write it, from WikiText's ("wiki") or Penn Treebank's ("ptb") spacing.

    Quotes are paired over the whole text, as by Megatron-LM and lm-evaluation-harness: an odd one shifts all after it.
    """
    if kind == "none":
        return text
    if kind == "ptb":
        pairs = (
            (" '", "'"),
            (" \n", "\n"),
            ("\n ", "\n"),
            (" n't", "n't"),
            (" N ", "1 "),
            ("$ 1", "$1"),
            ("# 1", "#1"),
        )
        return _replaced(text, pairs)
    text = text.replace("s '", "s'")
    text = re.sub(r"/' [0-9]/", "/'[0-9]/", text)  # meant for digits; kept, for comparable results
    text = _replaced(text, ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")))
    text = _replaced(text, tuple((f" {mark} ", f"{mark} ") for mark in _MARKS))
    for opening, closing in ((pair[: len(pair) // 2], pair[len(pair) // 2 :]) for pair in _PAIRS):
        text = re.sub(rf"{opening}\s*([^{closing}]*?)\s*{closing}", rf"{opening[-1]}\1{closing[-1]}", text)
    titles = (("= = = =", "===="), ("= = =", "==="), ("= =", "=="))
    rest = ((" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"))
    return _replaced(text, titles + rest)


def detokenizer_by_path(path: str) -> str | None:
    """The detokenizer that Megatron-LM takes, by the first of these words anywhere in a path; None: it would fail."""
    return next((name for name in ("ptb", "wiki", "lambada") if name in path), None)


def windows(num_tokens: int, *, sequence_length: int, overlap: int) -> list[Window]:
    """The windows that score something: each token from the second on is scored in one of them.

    Args:
        overlap: tokens by which windows are shifted (Megatron's name); a window scores its last `overlap` tokens.

    Raises:
        UsageError: windows would leave tokens unscored.
    """
    if not 1 <= overlap <= sequence_length:
        raise UsageError(
            f"--overlap {overlap} does not fit windows of {sequence_length} tokens",
            expected=f"1 to {sequence_length}; beyond it, tokens between windows are not scored",
            fix=f"--overlap {min(32, sequence_length)}, or {sequence_length} for windows side by side",
        )
    result, scored = [], 1  # the first token is never predicted
    for number in range(megatron_windows(num_tokens, overlap=overlap)):
        start = number * overlap
        stop = min(start + sequence_length + 1, num_tokens)
        if stop > scored:
            result.append(Window(start, scored, stop))
            scored = stop
    return result


def megatron_windows(num_tokens: int, *, overlap: int) -> int:
    """How many windows Megatron-LM computes; the last ones may score nothing."""
    return math.ceil(max(num_tokens - 1 - overlap, 0) / overlap) + 1


def wikitext(
    model: Scorer,
    path: Path,
    *,
    overlap: int = 32,
    sequence_length: int | None = None,
    detokenizer: str = "wiki",
    batch_size: int = 8,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Perplexity of a file of raw WikiText.

    Args:
        sequence_length: of a window; None: the model's context.

    Raises:
        UsageError: options out of range. BadInputError: see `read_wikitext`; or the file has no two words.
    """
    length = row_length(model, sequence_length)
    if detokenizer not in DETOKENIZERS:
        raise UsageError(f"no detokenizer {detokenizer!r}", expected=f"one of {', '.join(DETOKENIZERS)}")
    text = read_wikitext(path)
    words = len(text.strip().split(" "))
    ids = model.encode(detokenize(text, kind=detokenizer)) if text.strip() else []
    if words < 2 or len(ids) < 2:
        raise BadInputError(
            f"{path} is too short for a perplexity",
            found=f"{counted(words, 'word')}, {counted(len(ids), 'token')}",
            expected="at least 2",
        )
    parts = windows(len(ids), sequence_length=length, overlap=overlap)
    spans = [ScoredSpan(ids[part.start : part.stop], part.first - part.start) for part in parts]
    scores = model.score_spans(spans, batch_size=batch_size, greedy=False, progress=progress)
    total = -math.fsum(score.log_prob for score in scores)
    targets = len(ids) - 1
    loss, ratio = total / targets, targets / (words - 1)
    return {
        "task": "wikitext103",
        "file": path.name,
        "detokenizer": detokenizer,
        "sequence_length": length,
        "overlap": overlap,
        "windows": megatron_windows(len(ids), overlap=overlap),
        "windows_that_score": len(parts),
        "targets": targets,
        "num_original_tokens": words,
        "num_tokenized_tokens": len(ids),
        "avg_loss": loss,
        "ppl": math.exp(min(CAP, loss)),
        "token_ratio": ratio,
        "adjusted_ppl": math.exp(min(CAP, loss * ratio)),
        "uncapped_ppl": _exp(loss),
        "uncapped_adjusted_ppl": _exp(loss * ratio),
    }


def wikitext_line(facts: dict[str, Any]) -> str:
    """The result as Megatron-LM prints it."""
    return (
        f"validation results on WIKITEXT103 | avg loss: {facts['avg_loss']:.4E} | ppl: {facts['ppl']:.4E} | "
        f"adjusted ppl: {facts['adjusted_ppl']:.4E} | token ratio: {facts['token_ratio']} |"
    )


def read_wikitext(path: Path) -> str:
    """A file of plain text.

    Raises:
        UsageError: it cannot be read. BadInputError: it is not UTF-8, has no text, or its first line is JSON.
    """
    text = read_text(path)
    if not text.strip():
        raise BadInputError(f"{path} has no text", expected="plain text, such as wiki.test.raw")
    line = text.lstrip().partition("\n")[0]
    try:
        value = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        value = None
    if value is not None:
        raise BadInputError(
            f"{path} has lines of JSON",
            found=line[:80],
            expected="plain text, such as wiki.test.raw",
            fix="--task lambada reads such lines; --task perplexity a corpus or blend",
        )
    return text


def read_text(path: Path) -> str:
    """The text of a UTF-8 file with its original line ends, without a byte order mark.

    Raises:
        UsageError: it cannot be read, is a pipe or a device, or text in UTF-16. BadInputError: it is not UTF-8.
    """
    try:
        content = regular_file(path).read_bytes()
        refuse_wide_encoding(path, content)
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read", found=error.strerror) from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not UTF-8 text", found=f"byte {error.start:,}: {error.reason}") from error


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _replaced(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for before, after in pairs:
        text = text.replace(before, after)
    return text
