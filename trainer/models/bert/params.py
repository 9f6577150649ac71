"""How a BERT is divided over ranks: a GPT's table, with an encoder's embeddings and heads; and what it computes.

The bias of logits is divided as the vocabulary is. The other layers of the heads are whole on each tp rank, and each
sees all tokens that it computes anything for, so their gradients are no partial sums. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.models.bert.shape import BertShape
from trainer.models.gpt import params as gpt
from trainer.parallel.params import ParamSpec, Piece, Place, vocabulary_range


def parameter_table(shape: BertShape, place: Place) -> tuple[ParamSpec, ...]:
    """Every parameter of the rank at a place."""
    last_norm = () if shape.is_post_norm else ("final_norm.weight", "final_norm.bias")
    table = [
        spec
        for spec in gpt.parameter_table(shape, place)
        if not spec.name.startswith("final_norm.") or spec.name in last_norm
    ]
    return (*table, *_embeddings(shape, place), *_heads(shape, place))


def _embeddings(shape: BertShape, place: Place) -> Iterator[ParamSpec]:
    if not place.is_first:
        return
    table, width = gpt.Table(place), shape.hidden_size
    if shape.token_types:
        table.whole("types.weight", (shape.token_types, width), std=shape.init_std, decay=True)
    if shape.is_post_norm:
        table.norm("embedding_norm", shape)
    yield from table.specs


def _heads(shape: BertShape, place: Place) -> Iterator[ParamSpec]:
    if not place.is_last:
        return
    table, width, std = gpt.Table(replace(place, sequence_parallel=False)), shape.hidden_size, shape.init_std
    table.block = shape.num_layers + 1
    if shape.classes:
        table.dense("pooler", width, width, std=std)
        table.dense("classifier", shape.classes, width, std=std)
        yield from table.specs
        return
    table.dense("transform.dense", width, width, std=std)
    table.norm("transform.norm", shape)
    rows, size = shape.padded_vocab_size, place.tp_size
    first, stop = vocabulary_range(shape.vocab_size, rows, tp_size=size, tp_rank=place.tp_rank)
    piece = Piece(name="head_bias.bias", shape=(shape.vocab_size,), start=(first,), size=(stop - first,))
    yield from table.specs
    last = table.block
    yield ParamSpec(name="head_bias.bias", shape=(rows // size,), pieces=(piece,), std=0.0, decay=False, block=last)
    if shape.binary_head:
        table.specs.clear()
        table.dense("pooler", width, width, std=std)
        table.dense("binary_head", 2, width, std=std)
        yield from table.specs


def flops_per_token(shape: BertShape, document_lengths: tuple[int, ...]) -> int:
    """Operations of forward and backward per token: 6 N + 12 L H x A + 6 p (D D + D V).

    N counts the matrices of blocks, H = heads x head_dim, A the tokens that a token attends to, and p the share of
    tokens that are predicted. The pooler, one token of a row, is left out.
    """
    blocks = sum(spec.numel for spec in parameter_table(shape, Place()) if spec.matrix)
    attended = sum(document_lengths) / len(document_lengths)
    attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * attended
    head = 6 * shape.predicted * shape.hidden_size * (shape.hidden_size + shape.vocab_size)
    return 6 * blocks + round(attention + head)
