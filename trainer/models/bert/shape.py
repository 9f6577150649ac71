"""The function that a BERT computes: a GPT's numbers, and what an encoder has beside them. Pure, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.sections import BertSamplesSection, BertSection, DataKind, RunConfig
from trainer.models.family import DecodeState
from trainer.models.gpt import shape as gpt

OWN_KEYS = ("norm", "binary_head", "token_types", "head_activation")  # keys of [model.bert]
SENTENCE_LOSS = "sop"  # the loss of pairs, whose name in Megatron stands for the order of sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class BertShape(gpt.GPTShape):
    """A GPT's, with attention to tokens on both sides. Post-norm has block_norm "output".

    Args:
        token_types: kinds of texts in a row, each with an embedding; 0: they have none.
        binary_head: whether token 0 says if the second text follows the first.
        head_activation: before the logits, "gelu" (by tanh) or "gelu_erf".
        masked: share of tokens that are predicted; the head computes no others.
        classes: of a head on the first token, in place of the others; 1: it says which of several rows is right. 0: it
            predicts masked tokens.
    """

    token_types: int
    binary_head: bool
    head_activation: str = "gelu_erf"
    masked: float = 0.15
    classes: int = 0

    @property
    def embeds_last(self) -> bool:
        """Whether the last stage has the embedding, too: only the head of masked tokens shares it."""
        return not self.classes

    @property
    def is_post_norm(self) -> bool:
        """Whether sums and the embedding are normalized, rather than the inputs of layers."""
        return self.block_norm == "output"

    @property
    def predicted(self) -> float:
        """The share of tokens for which the head computes logits."""
        return self.masked


def section_of(config: RunConfig) -> BertSection:
    """[model.bert], with its defaults if it is left out."""
    return config.model.bert or BertSection()


def token_types(config: RunConfig) -> int:
    """Rows of the embedding of token types; as in Megatron, only pairs have them unless they are asked for."""
    section = section_of(config)
    return (2 if section.binary_head else 0) if section.token_types is None else section.token_types


def bert_shape(config: RunConfig, vocab_size: int) -> BertShape:
    """The model that a configuration describes."""
    shape, section = gpt.gpt_shape(config, vocab_size), section_of(config)
    same = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    same |= {"block_norm": "output" if section.norm == "post" else "input"}
    same |= {"scores": replace(shape.scores, causal=False)}
    masking = config.data.bert or BertSamplesSection()
    classes = {"masked": 0, "choice": 1, "classify": len(section.labels)}[section.task]
    masked = 0.0 if classes else masking.mask_probability
    return BertShape(**same, **_own(config), masked=masked, classes=classes)


def _own(config: RunConfig) -> dict[str, Any]:
    """Keys of [model.bert] with derived values, but for the place of norms."""
    section = section_of(config)
    return {
        "token_types": token_types(config),
        "binary_head": section.binary_head and section.task == "masked",
        "head_activation": section.head_activation or config.model.activation,
    }


def loss_names(shape: BertShape) -> tuple[str, ...]:
    """The loss of pairs, if there is a head for them."""
    return (SENTENCE_LOSS,) if shape.binary_head else ()


def decode_state(shape: BertShape, kind: str) -> DecodeState:
    """Nothing: each token depends on all others, so none is kept."""
    return DecodeState(tensors={})


def classes(config: RunConfig) -> tuple[str, ...] | None:
    """The names of the classes of rows; (): it chooses one. None: it predicts tokens."""
    section = section_of(config)
    return None if section.task == "masked" else section.labels


HEADS = ("transform.", "head_bias.", "pooler.", "binary_head.", "classifier.")  # parameters of all heads


def heads(shape: BertShape) -> tuple[str, ...]:
    """What a classifier may begin without, or leave behind, of other weights."""
    return HEADS if shape.classes else ()


def usual_kind(keys: Mapping[str, Any]) -> DataKind:
    """The kind of samples for a model with these keys of [model]."""
    return "bert" if (keys.get("bert") or {}).get("task", "masked") == "masked" else "classify"


def function_keys(shape: BertShape) -> dict[str, Any]:
    """See `gpt.function_keys`."""
    keys = gpt.function_keys(shape)
    del keys["masked"]
    classes = keys.pop("classes")
    own = {"norm": "post" if keys.pop("block_norm") == "output" else "pre"}
    own |= {name: keys.pop(name) for name in OWN_KEYS[1:]}
    own |= {"task": "choice" if classes == 1 else "classify", "labels": classes} if classes else {}
    return keys | {f"bert.{name}": value for name, value in own.items()}


def effective_keys(config: RunConfig) -> dict[str, Any]:
    """See `gpt.effective_keys`."""
    section = section_of(config)
    own = {"norm": section.norm, **_own(config)}
    own |= {"task": section.task, "labels": section.labels} if section.task != "masked" else {}
    return gpt.effective_keys(config) | {f"bert.{name}": value for name, value in own.items()}
