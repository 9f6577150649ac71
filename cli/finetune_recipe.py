"""`mtrain finetune`: the settings of its run, which follow from model, data and GPUs."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mdata
from mdata import UsageError

from .console import Console
from .mtrain_init import PRECISIONS, RECIPES, Draft, NoLayoutError, Tables, batch_rows, parsed, with_layout

if TYPE_CHECKING:
    from mdata.blend.blend import OpenBlend
    from trainer.config.sections import RunConfig
    from trainer.convert.model_folder import ModelFolder
    from trainer.plan.layouts import Layout
    from trainer.run.data import RunData

EPOCHS = 2
TASK_EPOCHS, TASK_BATCH = 3, 32  # rows of a step (Devlin et al. 2019: 16 or 32, 2 to 4 epochs)
DPO_EPOCHS, DPO_LR_SHARE = 1, 0.003  # 1e-6 for a model of 1B
LR_SHARE = 0.1  # of the learning rate with which a model of this size is pretrained
WARMUP, TASK_WARMUP, DPO_WARMUP = 0.03, 0.06, 0.1  # of the steps
LORA_LR_FACTOR = 10  # adapters want ten times the rate of all weights (Schulman et al. 2025, "LoRA Without Regret")
BATCH_TOKENS = 262144  # 64 rows of 4,096 tokens (Touvron et al. 2023)
LEAST_STEPS = 32  # of an epoch, where the data has as many rows
USUAL_ROW, SHORTEST_ROW = 2048, 256  # tokens
_LAYOUT_KEYS = ("mesh.", "recompute.", "train.micro_batch=")


def layout_keys(overrides: Sequence[str]) -> list[str]:
    """The settings of the command line that are the layout, which is then not chosen."""
    return [word for word in overrides if word.startswith(_LAYOUT_KEYS)]


def choose_settings(
    settings: Tables,
    given: Tables,
    opened: OpenBlend,
    model: ModelFolder,
    *,
    gpus: int,
    arguments: argparse.Namespace,
    console: Console,
) -> tuple[RunConfig, Layout | None, Tables]:
    """The configuration with every default, its layout, and its tables; shorter rows where none fits the memory."""
    asked = given.get("train", {}).get("sequence_length") or arguments.sequence_length
    length = asked or _row_length(opened, _context(model))
    while True:
        draft = _draft(settings, given, length=length, gpus=gpus, arguments=arguments)
        try:
            if layout_keys(arguments.overrides):
                layout, tables = None, _merged(_merged(draft.tables, {"train": {"micro_batch": 1}}), given)
            else:
                _, layout = with_layout(draft, arguments)
                tables = _merged(draft.tables, given)
            return parsed(tables), layout, tables
        except NoLayoutError:
            if asked or length <= SHORTEST_ROW:
                raise
        console.note(f"rows of {length} tokens do not fit into memory; trying {length // 2}")
        length //= 2


def _draft(settings: Tables, given: Tables, *, length: int, gpus: int, arguments: argparse.Namespace) -> Draft:
    from trainer.plan.plan import make_plan

    epochs, share, warmup = EPOCHS, LR_SHARE, WARMUP
    if arguments.task:
        epochs, warmup = TASK_EPOCHS, TASK_WARMUP
    if arguments.dpo:
        epochs, share, warmup = DPO_EPOCHS, DPO_LR_SHARE, DPO_WARMUP
    train: dict[str, Any] = {"sequence_length": length, "global_batch": 1, "micro_batch": 1, "steps": 1}
    if arguments.beta is not None:
        train["dpo_beta"] = arguments.beta
    precision = PRECISIONS[arguments.precision or ("bf16" if gpus else "fp32")]
    tables: Tables = {
        **{name: dict(settings[name]) for name in ("run", "model", "data")},
        "mesh": {},
        "train": train,
        "optimizer": {"lr": 1e-5, "warmup_fraction": warmup},
        "precision": dict(precision),
        "recompute": {},
        "checkpoint": settings["checkpoint"],
    }
    data = _opened(tables, given)
    rows = sum(component.samples.samples_per_epoch for component in data.train.components)
    if not rows:
        raise UsageError(
            f"{arguments.data} has nothing to train on",
            found=f"no row of {length} tokens",
            fix="a longer --sequence-length, or data.longer=cut",
        )
    given_train = given.get("train", {})
    batch = given_train.get("global_batch", _global_batch(rows, length=length, gpus=gpus, arguments=arguments))
    train["global_batch"] = batch
    if {"steps", "samples", "tokens"} & given_train.keys():
        if arguments.epochs:
            raise UsageError("--epochs and train.* both say how long to train", fix="leave one of them out")
        del train["steps"]
    else:
        train["steps"] = max(math.ceil((arguments.epochs or epochs) * rows / batch), 1)
    if data.facts.has_valid:
        train["eval_interval"] = math.ceil(rows / batch)
        if arguments.task:  # after each epoch, on all rows
            train["eval_samples"] = 0
            tables["checkpoint"] = {**tables["checkpoint"], "interval": train["eval_interval"], "keep_best": 1}
    parameters = make_plan(parsed(_merged(tables, given) | {"mesh": {}}), 1, facts=data.facts).num_parameters
    recipe = min(RECIPES, key=lambda recipe: abs(math.log(parameters / recipe.parameters)))
    if "lora" in _merged(tables, given)["model"]:
        share *= LORA_LR_FACTOR
    tables["optimizer"]["lr"] = arguments.lr or float(f"{share * recipe.lr:.3g}")
    return Draft(_merged(tables, given), gpus, data.facts)


def _opened(tables: Tables, given: Tables) -> RunData:
    """The data of the tables, to which a split is added if there is no validation set and enough documents."""
    from trainer.run.data import open_data

    data = open_data(parsed(_merged(tables, given)))
    if data.facts.has_valid or "split" in given.get("data", {}):
        return data
    tables["data"]["split"] = "98,2,0"
    try:
        return open_data(parsed(_merged(tables, given)))
    except UsageError:  # too few documents
        del tables["data"]["split"]
        return data


def _row_length(opened: OpenBlend, context: int) -> int:
    """A power of two for the longest document, at least the usual row where there are many; at most the context.

    Labelled rows are not packed: their longest is enough, with [CLS] and two [SEP].
    """
    longest = max((_longest(corpus) for corpus in opened.corpora), default=1)
    if all(corpus.manifest.level == "labelled" for corpus in opened.corpora):
        return min(1 << max(longest + 2, 16).bit_length(), context)
    tokens = sum(corpus.num_tokens for corpus in opened.corpora)
    wanted = max(longest, min(USUAL_ROW, tokens // LEAST_STEPS), 16)
    return min(1 << (wanted - 1).bit_length(), context)


def _longest(corpus: mdata.Corpus) -> int:
    """Tokens of the longest document."""
    import numpy as np

    longest = 0
    for reader in corpus.readers:
        ends = np.append(0, np.cumsum(reader.lengths, dtype=np.int64))
        longest = max(longest, int(np.diff(ends[reader.boundaries]).max(initial=0)))
    return longest


def _global_batch(rows: int, *, length: int, gpus: int, arguments: argparse.Namespace) -> int:
    """Rows of a step: a multiple of the GPUs."""
    if arguments.batch_tokens:
        return batch_rows(arguments.batch_tokens, length, gpus)
    if arguments.task:
        return -(-min(TASK_BATCH, rows) // max(gpus, 1)) * max(gpus, 1)
    batch = max(round(min(BATCH_TOKENS, rows // LEAST_STEPS * length) / length), 1)
    return max(round(batch / gpus), 1) * gpus if gpus else batch


def model_keys(model: ModelFolder) -> dict[str, Any]:
    """[model] for a run that begins with these weights: keys that differ from their defaults, sub-sections whole.

    The model's length is one of them: rows may be shorter, and generation still uses all of it.
    """
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(model.config.model):
        value = getattr(model.config.model, field.name)
        if dataclasses.is_dataclass(value):
            keys[field.name] = {
                name: list(inner) if isinstance(inner, tuple) else inner
                for name, inner in dataclasses.asdict(value).items()  # type: ignore[arg-type]
                if inner not in (None, ())
            }
        elif value is not None and value != field.default:
            keys[field.name] = list(value) if isinstance(value, tuple) else value
    keys.pop("preset", None)  # its values are written out
    return keys | {"vocab_size": model.vocab_size, "max_position": _context(model)}


def lora_keys(model: ModelFolder, rank: int | None, *, new_tokens: bool) -> dict[str, Any]:
    """[model.lora], with the settings of the adapters that the folder holds; none to train all weights.

    With new tokens their layers are trained as well.
    """
    if rank is None:
        return {}
    there = dataclasses.asdict(model.adapter.lora) if model.adapter is not None else {}
    keys = {name: list(value) if isinstance(value, tuple) else value for name, value in there.items()}
    if new_tokens:
        keys["modules_to_save"] = ["embedding", *([] if model.config.model.tie_embeddings else ["head"])]
    return {"lora": {name: value for name, value in keys.items() if value not in (None, [])} | {"rank": rank}}


def kind_keys(opened: OpenBlend) -> dict[str, Any]:
    """Conversations, pairs of them, or whole texts that do not attend to each other."""
    if any(corpus.manifest.level == "pairs" for corpus in opened.corpora):
        return {"kind": "pairs"}
    if all(corpus.manifest.level == "chat" for corpus in opened.corpora):
        return {"kind": "chat"}
    return {"kind": "packed", "document_masks": True}


def _merged(tables: Tables, given: Mapping[str, Any]) -> Tables:
    """The tables with the given keys, which win; keys that are given as not set are left out."""
    merged = {name: dict(table) for name, table in tables.items()}
    for name, table in given.items():
        own = merged.setdefault(name, {})
        for key, value in table.items():
            if isinstance(value, dict):
                own[key] = {**own.get(key, {}), **value}
            elif value is None:
                own.pop(key, None)
            else:
                own[key] = value
    return merged


def _context(model: ModelFolder) -> int:
    """The longest row that the model was made for."""
    return model.config.model.max_position or model.config.train.sequence_length
