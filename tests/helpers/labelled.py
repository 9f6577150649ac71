"""Rows like those of MNLI whose class is a word of the second sentence, with the tokenizer of their words."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mdata.rewriting.labelled import write_labelled
from mdata.sources.labelled import LABELS, read_labelled
from mdata.tokenizers.base.tokenizer import Tokenizer, TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.runs import SPECIAL, WORDS
from trainer.convert.hf_config import from_hf
from trainer.convert.hf_folder import hf_links
from trainer.models.family import family_of

KEYS = dict(zip(("never", "surely", "perhaps"), LABELS["mnli"], strict=True))
HEADER = "index\ta\tb\tc\td\te\tf\tg\tsentence1\tsentence2\tlabel1\tgold_label"


def write_vocabulary(path: Path) -> Tokenizer:
    """vocab.txt of the words; its tokenizer."""
    path.write_text(
        "\n".join([*SPECIAL, *WORDS, *KEYS, "and", "or", *(f"[unused{number}]" for number in range(20))]) + "\n"
    )
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


def write_bert(folder: Path) -> Path:
    """A tiny BERT as a folder of Hugging Face, of random weights, with the vocabulary of the words."""
    folder.mkdir(parents=True)
    tokenizer = write_vocabulary(folder / "vocab.txt")
    settings = {
        "model_type": "bert",
        "architectures": ["BertForPreTraining"],
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    config = from_hf(settings, where="config.json")
    family, draw = family_of(config), np.random.default_rng(0)
    links = hf_links(family, family.shape(config, tokenizer.vocab_size), model_type="bert")
    tensors = {link.theirs.tensor: draw.normal(0, 0.02, link.theirs.shape).astype(np.float32) for link in links}
    tensors |= {name: np.ones_like(x) for name, x in tensors.items() if name.endswith("LayerNorm.weight")}
    save_file(tensors, folder / "model.safetensors")
    return folder
