"""A run folder like that of `mtrain train`, without training: real corpora and data, made-up losses."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import mdata
from trainer.config.parse import dump_config, parse_config
from trainer.config.sections import RunConfig

WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_jsonl(path: Path, seed: int, documents: int = 40) -> Path:
    """Documents of 5 to 120 words with a little grammar: a word is often followed by the same next word."""
    draw = random.Random(seed)
    lines = []
    for number in range(documents):
        words = [draw.choice(WORDS)]
        while len(words) < draw.randint(5, 120):
            after = WORDS[(WORDS.index(words[-1]) * 7 + 3) % len(WORDS)]
            words.append(after if draw.random() < 0.7 else draw.choice(WORDS))
        lines.append(json.dumps({"text": " ".join(words) + ".", "file": f"made-up/{number}"}) + "\n")
    path.write_text("".join(lines))
    return path


def make_corpora(folder: Path, texts: dict[str, Path], *, vocab_size: int = 300) -> dict[str, Path]:
    """Train a tokenizer on all texts and preprocess each; name -> manifest."""
    mdata.train_tokenizer(list(texts.values()), folder / "tokenizer", vocab_size=vocab_size)
    for name, path in texts.items():
        mdata.preprocess(
            mdata.PreprocessOptions(
                input=(str(path),),
                output_prefix=str(folder / name),
                tokenizer_type="HuggingFaceTokenizer",
                tokenizer_model=str(folder / "tokenizer"),
                append_eod=True,
            )
        )
    return {name: folder / f"{name}_text_document.json" for name in texts}


def make_sentences(
    folder: Path,
    *,
    name: str = "s",
    documents: int = 40,
    sentences: int = 8,
    seed: int = 3,
    sentinels: int = 30,
    split_sentences: bool = True,
    with_ends: bool = True,
) -> Path:
    """Documents of 1 to 8 sentences of 2 to 9 words, as a corpus of sentences, by a WordPiece vocabulary."""
    tables = folder / "nltk/tokenizers/punkt_tab/english"
    tables.mkdir(parents=True, exist_ok=True)
    for table in ("abbrev_types.txt", "sent_starters.txt", "collocations.tab", "ortho_context.tab"):
        (tables / table).write_text("")
    entries = [*SPECIAL, *WORDS, ".", *(f"<extra_id_{number}>" for number in range(sentinels))]
    (folder / "vocab.txt").write_text("\n".join(entries) + "\n")
    draw, lines = random.Random(seed), []
    for _ in range(documents):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(draw.randint(1, sentences))]
        lines.append(json.dumps({"text": " ".join(f"{text.capitalize()}." for text in texts)}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines))
    mdata.preprocess(
        mdata.PreprocessOptions(
            input=(str(folder / f"{name}.jsonl"),),
            output_prefix=str(folder / name),
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=str(folder / "vocab.txt"),
            tokenizer_options=() if with_ends else (("include_special_tokens", False),),
            split_sentences=split_sentences,
            nltk_data=str(folder / "nltk") if split_sentences else None,
        )
    )
    return folder / f"{name}_text_{'sentence' if split_sentences else 'document'}.json"


def make_chat(folder: Path, *, chat_template: str = "plain") -> Path:
    """Conversations of one or two questions and answers of up to three words, by bytes."""
    draw = random.Random(5)
    lines = []
    for _ in range(40):
        turns = [
            {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))}
            for _ in range(draw.randint(1, 2))
            for role in ("user", "assistant")
        ]
        lines.append(json.dumps({"messages": turns}) + "\n")
    (folder / "c.jsonl").write_text("".join(lines))
    mdata.preprocess(
        mdata.PreprocessOptions(
            input=(str(folder / "c.jsonl"),),
            output_prefix=str(folder / "c"),
            tokenizer_type="ByteTokenizer",
            json_keys=("messages",),
            chat=True,
            chat_template=chat_template,
        )
    )
    return folder / "c_messages_chat.json"


def make_pairs(folder: Path, *, number: int = 40, name: str = "p") -> Path:
    """Pairs of conversations with one or two questions, of which the last has two answers, by bytes."""
    draw = random.Random(6)

    def said(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))}

    lines = []
    for _ in range(number):
        before = [said(role) for _ in range(draw.randint(0, 1)) for role in ("user", "assistant")] + [said("user")]
        chosen, rejected = said("assistant"), said("assistant")
        rejected["content"] += "?"
        lines.append(json.dumps({"chosen": [*before, chosen], "rejected": [*before, rejected]}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines))
    mdata.preprocess(
        mdata.PreprocessOptions(
            input=(str(folder / f"{name}.jsonl"),),
            output_prefix=str(folder / name),
            tokenizer_type="ByteTokenizer",
            json_keys=("chosen",),
            chat=True,
            chat_schema="pairs",
            chat_template="plain",
        )
    )
    return folder / f"{name}_chosen_pairs.json"


def make_mix(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Corpora of these names, and mix.json beside them: 0.7 of the first, 0.3 of the second; name -> manifest."""
    made = make_corpora(folder, {name: write_jsonl(folder / f"{name}.jsonl", seed) for seed, name in enumerate(names)})
    mdata.make_blend(["0.7", str(made[names[0]]), "0.3", str(made[names[1]])], folder / "mix.json")
    return made


def make_config(folder: Path, *, blend: Path | str, valid: Sequence[Path], **train: int) -> RunConfig:
    """A small run over these corpora."""
    tables = {
        "run": {"folder": str(folder)},
        "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4},
        "data": {"blend": str(blend), "valid": [str(path) for path in valid]},
        "mesh": {"tp": 2, "sequence_parallel": True},
        "train": {"sequence_length": 32, "global_batch": 4, "micro_batch": 2, "steps": 40, **train},
        "optimizer": {"lr": 1e-3},
    }
    config, problems = parse_config(tables)
    assert config is not None, problems
    return config


def _by_component(loss: float, step: int, names: Sequence[str]) -> dict[str, float]:
    """Losses of components; the last one only in every third step."""
    return {name: loss + 0.4 * (i - 0.5) for i, name in enumerate(names) if i + 1 < len(names) or step % 3 == 0}


def write_run(config: RunConfig, *, steps: int, eval_interval: int = 10) -> Path:
    """metrics.jsonl and the rest, with losses that fall from 6 towards 2."""
    folder = Path(config.run.folder)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(config))
    (folder / "plan.json").write_text(json.dumps({"num_parameters": 123_456, "world_size": 2, "vocab_size": 300}))
    ranks = [
        {"rank": i, "tp": i, "dp": 0, "split_parameters": 60_000, "copied_parameters": 3_456, "parameters": []}
        for i in range(2)
    ]
    (folder / "ranks.json").write_text(json.dumps(ranks))
    (folder / "events.jsonl").write_text(json.dumps({"time_s": 0.0, "event": "start"}) + "\n")
    names = [mdata.open_corpus(path).name for path in config.data.valid]
    components = mdata.open_blend(config.data.blend, tokenizer_unknown="ok").names
    draw = random.Random(1)
    lines = []
    for step in range(1, steps + 1):
        loss = 2 + 4 * math.exp(-3 * step / steps)
        line = {
            "step": step,
            "consumed_samples": step * config.train.global_batch,
            "loss": loss + draw.gauss(0, 0.08),
            **({"train": _by_component(loss, step, components)} if len(components) > 1 else {}),
            "grad_norm": 1.0,
            "lr": 1e-3,
            "weight_decay": 0.1,
            "tflops": 408.125,
            "mfu": 0.4125,
            "memory_bytes": 3 << 30,
            "tokens_per_s": 9000 + draw.gauss(0, 200),
            "data_wait": 0.00125,
            "time_s": 1000.0 + step,
        }
        if names and (step % eval_interval == 0 or step == steps):
            line["valid"] = {name: loss + 0.1 * i for i, name in enumerate(names)}
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder
