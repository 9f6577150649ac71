"""GPT-NeoX and Cohere: a GPT whose attention and MLP read the same residual stream, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from trainer.config.sections import GPTNeoXSection, RunConfig
from trainer.models.family import built_by
from trainer.models.gpt import FAMILY as GPT
from trainer.models.gpt.check import model_problems
from trainer.models.gpt.shape import GPTShape, effective_keys, function_keys, gpt_shape
from trainer.models.gpt_neox.huggingface import HUGGING_FACE

_OWN = ("parallel_residual", "shared_norm")  # keys of [model.gpt_neox]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXShape(GPTShape):
    """A GPT's, whether attention and MLP are side by side, and whether they read one norm."""

    parallel_residual: bool
    shared_norm: bool = False

    @property
    def kept_sums(self) -> int:
        """The second sum is the next block's."""
        return 1 if self.parallel_residual else 2

    @property
    def in_norms(self) -> int:
        """The shared one is not counted twice."""
        if self.shared_norm:
            return 1
        return 0 if self.block_norm == "output" else 2


def shape_of(config: RunConfig, vocab_size: int) -> GPTNeoXShape:
    """The model that a configuration describes."""
    shape = gpt_shape(config, vocab_size)
    same = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    return GPTNeoXShape(**same, **dataclasses.asdict(_section(config)))


def _section(config: RunConfig) -> GPTNeoXSection:
    return config.model.gpt_neox or GPTNeoXSection()


def _function(shape: GPTNeoXShape) -> dict[str, Any]:
    keys = function_keys(shape)
    return keys | {f"gpt_neox.{name}": keys.pop(name) for name in _OWN}


def _effective(config: RunConfig) -> dict[str, Any]:
    return effective_keys(config) | {f"gpt_neox.{name}": getattr(_section(config), name) for name in _OWN}


def _problems(config: RunConfig) -> Iterator[str]:
    yield from model_problems(config)
    section = _section(config)
    if section.shared_norm and not section.parallel_residual:
        yield "model.gpt_neox.shared_norm=True needs model.gpt_neox.parallel_residual=true; set that, or leave it out"
    if section.parallel_residual and config.model.block_norm != "input":
        yield (
            f'model.block_norm="{config.model.block_norm}" has no meaning with model.gpt_neox.parallel_residual=true; '
            "leave one of them out"
        )


FAMILY = dataclasses.replace(
    GPT,
    shape=shape_of,
    problems=_problems,
    function=_function,
    effective=_effective,
    build=built_by("trainer.models.gpt_neox.model", "build_gpt_neox"),
    sections=("gpt_neox", "lora"),
    hugging_face=HUGGING_FACE,
    megatron=None,
)
