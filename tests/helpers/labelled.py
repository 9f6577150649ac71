"""Rows like those of MNLI whose class is a word of the second sentence, with the tokenizer of their words."""

from __future__ import annotations

import random
from pathlib import Path

from mdata.rewriting.labelled import write_labelled
from mdata.sources.labelled import LABELS, read_labelled
from mdata.tokenizers.base.tokenizer import Tokenizer, TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.runs import SPECIAL, WORDS

KEYS = dict(zip(("never", "surely", "perhaps"), LABELS["mnli"], strict=True))
HEADER = "index\ta\tb\tc\td\te\tf\tg\tsentence1\tsentence2\tlabel1\tgold_label"


def write_vocabulary(path: Path) -> Tokenizer:
    """vocab.txt of the words; its tokenizer."""
    path.write_text("\n".join([*SPECIAL, *WORDS, *KEYS, *(f"[unused{number}]" for number in range(20))]) + "\n")
    return load_tokenizer(TokenizerSpec(type="BertWordPieceLowerCase", vocab_file=str(path)))


def write_mnli(path: Path, rows: int, *, seed: int, noise: float = 0.0) -> Path:
    """`noise`: share of rows with another label than their word's; no model can do better than 1 - noise."""
    draw, lines = random.Random(seed), [HEADER]
    for number in range(rows):
        key = draw.choice(list(KEYS))
        first, second = (draw.choices(WORDS, k=draw.randint(2, 6)) for _ in range(2))
        second.insert(draw.randint(0, len(second)), key)
        gold = KEYS[key]
        if draw.random() < noise:
            gold = draw.choice([label for label in KEYS.values() if label != gold])
        lines.append("\t".join([str(number), *"xxxxxxx", " ".join(first), " ".join(second), gold, gold]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def make_labelled(folder: Path, rows: dict[str, int], *, noise: float = 0.0) -> dict[str, Path]:
    """Corpora of such rows; name -> manifest."""
    tokenizer = write_vocabulary(folder / "vocab.txt")
    manifests = {}
    for seed, (name, count) in enumerate(rows.items()):
        read = read_labelled(write_mnli(folder / f"{name}.tsv", count, seed=seed, noise=noise), "mnli")
        write_labelled({folder / name: [read]}, tokenizer, task="mnli")
        manifests[name] = folder / f"{name}.json"
    return manifests
