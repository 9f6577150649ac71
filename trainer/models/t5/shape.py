"""The function that a T5 computes: a GPT's numbers and choices, and how blocks are divided into two stacks. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from mdata import Tokenizer, UsageError
from mdata.tokenizers.base.special_names import decoder_ends
from trainer.config.sections import RunConfig, T5SamplesSection, T5Section
from trainer.kernels.scores import ScoreShape
from trainer.layers.recompute_chunks import RecomputedChunk
from trainer.layers.shapes import AttentionShape
from trainer.models.family import DecodeState
from trainer.models.gpt.shape import GPTShape, effective_keys, function_keys, gpt_shape
from trainer.models.gpt.shape import attention_shape as gpt_attention_shape

Kind = Literal["encoder", "decoder"]  # of a block
_OWN = ("encoder_layers", "relative_buckets", "relative_distance", "head_bias")  # keys of [model.t5]


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Shape(GPTShape):
    """A GPT's, of two stacks that share the embedding of tokens and learned positions.

    Args:
        encoder_layers: blocks of the encoder, the first ones. The others are the decoder's.
        encoder_length, decoder_length: most tokens of a row.
        relative_buckets, relative_distance: see `bucket_of` in layers/cross_attention.py.
        head_bias: whether the output head has a bias. init: see `T5Section`.
    """

    encoder_layers: int
    encoder_length: int
    decoder_length: int
    relative_buckets: int = 32
    relative_distance: int = 128
    head_bias: bool = False
    init: Literal["normal", "sizes"] = "normal"

    @property
    def decoder_layers(self) -> int:
        """Blocks of the decoder."""
        return max(0, self.num_layers - self.encoder_layers)

    @property
    def is_relative(self) -> bool:
        """Whether each stack has a table of biases of distances."""
        return self.position == "relative"


def t5_shape(config: RunConfig, vocab_size: int) -> T5Shape:
    """The model that a configuration describes."""
    shape, section = gpt_shape(config, vocab_size), section_of(config)
    same = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    encoder, decoder = config.train.sequence_length, decoder_length(config)
    same["max_position"] = config.model.max_position or max(encoder, decoder)
    return T5Shape(
        **same,
        encoder_layers=encoder_layers(config),
        encoder_length=encoder,
        decoder_length=decoder,
        relative_buckets=section.relative_buckets,
        relative_distance=section.relative_distance,
        head_bias=section.head_bias,
        init=section.init,
    )


def section_of(config: RunConfig) -> T5Section:
    """[model.t5]."""
    return config.model.t5 or T5Section()


def encoder_layers(config: RunConfig) -> int:
    """Blocks of the encoder."""
    return section_of(config).encoder_layers or config.model.num_layers // 2


def decoder_length(config: RunConfig) -> int:
    """Most tokens of a decoder's row; the encoder's are train.sequence_length."""
    options = config.data.of_kind
    return options.decoder_length if isinstance(options, T5SamplesSection) else config.train.sequence_length


def kinds(shape: T5Shape) -> tuple[Kind, ...]:
    """The kind of each block: of which stack it is."""
    return tuple("encoder" if i < shape.encoder_layers else "decoder" for i in range(shape.num_layers))


def scores_of(shape: T5Shape, kind: str) -> ScoreShape:
    """How self-attention changes scores in the blocks of a stack."""
    return replace(shape.scores, causal=kind == "decoder")


def attention_shape(shape: T5Shape, number: int) -> AttentionShape:
    """Sizes and choices of a block's self-attention."""
    kind = "encoder" if number < shape.encoder_layers else "decoder"
    return replace(gpt_attention_shape(shape, number), scores=scores_of(shape, kind))


def cross_shape(shape: T5Shape) -> AttentionShape:
    """Sizes and choices of the attention of decoder blocks to the encoder's output: without positions."""
    scores = replace(shape.scores, causal=False, relative=False)
    return replace(attention_shape(shape, 0), rotary=None, scores=scores)


def decode_state(shape: T5Shape, kind: str) -> DecodeState:
    """Keys and values of the decoder's tokens, and for cross attention of the encoder's."""
    heads = (shape.num_kv_heads, shape.head_dim)
    both = {"key": heads, "value": heads} if kind == "decoder" else {}
    return DecodeState(tensors=both, of_encoder=both)


def decoder_start(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    """The token with which the decoder begins: that of the rows of training, if no other is set."""
    start = section_of(config).start_token
    bos = None if start >= 0 or tokenizer is None else decoder_ends(tokenizer)[0]
    if start < 0 and bos is None:
        raise UsageError(
            "the decoder has no token to begin with",
            found="model.t5.start_token=-1, and a tokenizer without a token that begins a text",
            fix="set model.t5.start_token, such as to the id of padding in models of Hugging Face",
        )
    return cast(int, bos) if start < 0 else start


def of_stacks(parts: list[RecomputedChunk], first_of_decoder: int) -> list[RecomputedChunk]:
    """The chunks of a stage's blocks, none of which has blocks of both stacks."""
    divided: list[RecomputedChunk] = []
    for part in parts:
        start, stop = part.blocks.start, part.blocks.stop
        border = min(max(first_of_decoder, start), stop)
        divided += [
            RecomputedChunk(blocks, part.again) for blocks in (range(start, border), range(border, stop)) if blocks
        ]
    return divided


def function(shape: T5Shape) -> dict[str, Any]:
    """See `Family`."""
    keys = {name: value for name, value in function_keys(shape).items() if name not in _not_function()}
    return keys | {f"t5.{name}": keys.pop(name) for name in _own(relative=shape.is_relative) if name in keys}


def effective(config: RunConfig) -> dict[str, Any]:
    """See `Family`."""
    section, keys = section_of(config), effective_keys(config)
    own = {name: getattr(section, name) for name in _own(relative=config.model.position == "relative")}
    own["encoder_layers"] = encoder_layers(config)
    return keys | {f"t5.{name}": value for name, value in own.items()}


def _own(*, relative: bool) -> Iterator[str]:
    return (name for name in _OWN if relative or not name.startswith("relative_"))


def _not_function() -> tuple[str, ...]:
    return ("encoder_length", "decoder_length", "init")
