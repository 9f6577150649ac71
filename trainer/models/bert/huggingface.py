"""Bert, Roberta and MegatronBert of transformers: config.json, and the names of tensors.

Bert is the post-norm model, MegatronBert the pre-norm one: each place of norms has one class. Roberta is the post-norm
one without pairs, under other names; its table of positions begins with rows that no text reads, written as zeros.
Whether there is a head for pairs is said by the tensors of a folder, not by its config.json, and so is the number of
rows of the vocabulary, which published folders have wrong. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mdata import UsageError
from mdata.errors import counted
from trainer.config.sections import RunConfig
from trainer.models.bert.shape import BertShape, section_of
from trainer.models.family import Form, HuggingFace, Json, split_block
from trainer.models.gpt.hf_layers import demand
from trainer.models.gpt.huggingface import PLAIN, activation, reverse

if TYPE_CHECKING:
    from torch import Tensor

_NORMS = {"bert": "post", "megatron-bert": "pre", "roberta": "post"}
_CLASSES = {"bert": "Bert", "megatron-bert": "MegatronBert", "roberta": "Roberta"}
_PADDING = 1  # Roberta's token of padding; the rows of positions up to it are no text's
_TASKS = {"classify": "ForSequenceClassification", "choice": "ForMultipleChoice"}  # model.bert.task -> class
_SIZES: Mapping[str, str] = {  # setting -> key of [model]
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position",
    "layer_norm_eps": "norm_epsilon",
}
_BERT: Json = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "initializer_range": 0.02, "layer_norm_eps": 1e-12, "tie_word_embeddings": True,
}  # fmt: skip
_MEGATRON: Json = {
    **_BERT, "vocab_size": 29056, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip
_ROBERTA: Json = {**_BERT, "vocab_size": 50265, "pad_token_id": _PADDING}
_ACTIVATIONS = {name: PLAIN[name] for name in ("gelu", "gelu_new", "gelu_pytorch_tanh")} | {"gelu_fast": "gelu"}
_NAMES: Mapping[str, str] = {
    "embedding": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "types": "bert.embeddings.token_type_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "final_norm": "bert.encoder.ln",
    "transform.dense": "cls.predictions.transform.dense",
    "transform.norm": "cls.predictions.transform.LayerNorm",
    "head_bias": "cls.predictions",
    "pooler": "bert.pooler.dense",
    "binary_head": "cls.seq_relationship",
    "classifier": "classifier",
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.ln",
    "attention_out_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "ln",
    "mlp_out_norm": "output.LayerNorm",
}
_ROBERTA_NAMES: Mapping[str, str] = {
    "transform.dense": "lm_head.dense",
    "transform.norm": "lm_head.layer_norm",
    "head_bias": "lm_head",
    "head": "lm_head.decoder",
}


def _keys(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    neutral_values = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
    for name, neutral in neutral_values.items():
        demand(settings, name, neutral, problems)
    task, before = _task(settings), 0
    if kind == "roberta":
        before = _PADDING + 1
        demand(settings, "pad_token_id", _PADDING, problems)
        if task != "masked":
            problems.append(
                f"architectures = {settings['architectures']!r}; of Roberta the head for masked tokens is read"
            )
    kind_of_loss = settings.get("problem_type")
    if task == "classify" and kind_of_loss not in (None, "single_label_classification"):
        problems.append(f"problem_type = {kind_of_loss!r}; rows have one class")
    form = activation(settings["hidden_act"], _ACTIVATIONS, "hidden_act", problems=problems)
    pairs = any(str(name).endswith(("ForPreTraining", "ForNextSentencePrediction")) for name in _listed(settings))
    return {ours: settings[name] for name, ours in _SIZES.items()} | {
        "max_position": settings["max_position_embeddings"] - before,
        "vocab_size": settings["vocab_size"],
        "position": "learned",
        "norm": "layernorm",
        "activation": form,
        "bias": True,
        "tie_embeddings": settings["tie_word_embeddings"],
        "init_std": settings["initializer_range"],
        "bert": {"norm": _NORMS[kind], "binary_head": pairs, "token_types": settings["type_vocab_size"]}
        | ({} if task == "masked" else {"task": task, "labels": _labels(settings) if task == "classify" else []}),
    }


def _task(settings: Json) -> str:
    """What the class that a config.json names predicts."""
    return next((t for t, c in _TASKS.items() if any(str(name).endswith(c) for name in _listed(settings))), "masked")


def _labels(settings: Json) -> list[str]:
    """The names of classes; transformers numbers them where there are none, and has two."""
    named = settings.get("id2label")
    if isinstance(named, dict) and sorted(named) == sorted(map(str, range(len(named)))):
        return [str(named[str(number)]) for number in range(len(named))]
    return [f"LABEL_{number}" for number in range(settings.get("num_labels") or 2)]


def _listed(settings: Json) -> list[Any]:
    classes = settings.get("architectures")
    return classes if isinstance(classes, list) else []


def _settings(kind: str, keys: Json) -> dict[str, Any]:
    if not keys["bert.token_types"]:
        raise UsageError(
            f"{_CLASSES[kind]} of transformers always adds embeddings of token types, and this model has none",
            found="model.bert.token_types not set, and model.bert.binary_head=false",
            fix="train with model.bert.token_types=1",
        )
    task = keys.get("bert.task", "masked")
    usual = "ForPreTraining" if keys["bert.binary_head"] and kind != "roberta" else "ForMaskedLM"
    names = {str(number): label for number, label in enumerate(keys.get("bert.labels", ()))}
    labels = {"id2label": names, "label2id": {label: int(number) for number, label in names.items()}}
    roberta = {"bos_token_id": 0, "pad_token_id": _PADDING}
    roberta |= {"max_position_embeddings": keys["max_position"] + _PADDING + 1}
    return {name: keys[ours] for name, ours in _SIZES.items()} | {
        **(labels if task == "classify" else {}),
        **(roberta if kind == "roberta" else {}),
        "hidden_act": reverse(_ACTIVATIONS, keys["activation"], "gelu"),
        "type_vocab_size": keys["bert.token_types"],
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "architectures": [_CLASSES[kind] + _TASKS.get(task, usual)],
    }


def _fitting_type(config: RunConfig) -> str:
    return "bert" if section_of(config).norm == "post" else "megatron-bert"


def _seen(config: RunConfig, shapes: Mapping[str, tuple[int, ...]]) -> tuple[RunConfig, list[str]]:
    """The same model with what the tensors of a folder show, and notes on what its config.json says otherwise."""
    names = (f"{prefix}.embeddings.word_embeddings.weight" for prefix in ("bert", "roberta"))
    rows = next((shapes[name][0] for name in names if name in shapes), 0)
    pairs = "cls.seq_relationship.weight" in shapes
    model, notes = config.model, []
    if rows and rows != model.vocab_size:
        notes.append(
            f"vocab_size = {model.vocab_size} in config.json is not used: the embedding has {counted(rows, 'row')}"
        )
        model = dataclasses.replace(model, vocab_size=rows)
    section = dataclasses.replace(section_of(config), binary_head=pairs)
    return dataclasses.replace(config, model=dataclasses.replace(model, bert=section)), notes


def _lacking(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    if not {"cls.predictions.transform.dense.weight", "lm_head.dense.weight", "classifier.weight"} & shapes.keys():
        yield "no head for masked tokens (cls.predictions), as a folder of ForPreTraining or ForMaskedLM has"


def _tensor(name: str, size: tuple[int, ...], shape: BertShape, kind: str) -> Form:
    block, rest = split_block(name)
    part, last = rest.rsplit(".", 1)
    where = "" if block is None else f"bert.encoder.layer.{block}."
    lengths, dims = dict(zip(("row", "column"), size, strict=False)), "row column" if len(size) == 2 else "row"
    theirs = f"{where}{_NAMES[part]}.{last}" if rest != "head.weight" else "cls.predictions.decoder.weight"
    if kind != "roberta":
        return Form(theirs, dims, dims, lengths)
    theirs = f"{_ROBERTA_NAMES[part]}.{last}" if part in _ROBERTA_NAMES else theirs.replace("bert.", "roberta.", 1)
    before = _PADDING + 1
    inside = {"row": (before, before + size[0])} if part == "positions" else {}
    return Form(theirs, dims, dims, lengths, theirs_in=inside)


def _is_derived(name: str, stored: Tensor, shape: BertShape) -> bool:
    """Positions are counted, and transformers ties the second name of a bias to the first."""
    if not name.endswith("position_ids"):
        return True
    return stored.flatten().tolist() == list(range(stored.numel()))


_STORED = r"bert\.embeddings\.position_ids|cls\.predictions\.decoder\.bias"
# Published folders of Roberta have a pooler, which masked tokens do not read; transformers leaves it out, too.
_ROBERTA_STORED = r"roberta\.embeddings\.position_ids|lm_head\.decoder\.bias|roberta\.pooler\.dense\.(weight|bias)"
# Names of older folders, as patterns, and those of today.
_OLDER = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}
_OLDER |= {r"^cls\.predictions\.decoder\.bias$": "cls.predictions.bias", r"^lm_head\.decoder\.bias$": "lm_head.bias"}
HUGGING_FACE = HuggingFace(
    architectures={kind: f"{name}ForPreTraining" for kind, name in _CLASSES.items()}
    | {"roberta": "RobertaForMaskedLM"},
    defaults={"bert": _BERT, "megatron-bert": _MEGATRON, "roberta": _ROBERTA},
    zeros=("type_vocab_size",),
    fitting_type=_fitting_type,
    keys=_keys,
    settings=_settings,
    tensor=_tensor,
    buffers=dict.fromkeys(_CLASSES, _STORED) | {"roberta": _ROBERTA_STORED},
    is_derived=_is_derived,
    auto_class=lambda config: "AutoModel" + _TASKS.get(section_of(config).task, "ForMaskedLM"),
    older_names=_OLDER,
    seen=_seen,
    lacking=_lacking,
)
