"""How a T5 is divided over tensor-parallel ranks and pipeline stages, as a table.

A GPT's table for one list of blocks, the encoder's first. Decoder blocks have cross attention, whose keys and values
are one parameter. The encoder's last norm is in the stage of its last block. The tables of relative positions are in
the first stage, as the embedding is, and travel with the activations. Pure, no torch.
"""

from __future__ import annotations

from dataclasses import replace

from trainer.models.gpt.params import Table
from trainer.models.t5.shape import T5Shape
from trainer.parallel.params import ParamSpec, Piece, Place, vocabulary_range


def parameter_table(shape: T5Shape, place: Place) -> tuple[ParamSpec, ...]:
    """Every parameter of the rank at a place, in the order of the module tree."""
    width, blocks = shape.hidden_size, place.blocks(shape.num_layers)
    table = Table(place)
    after_last = shape.num_layers + 1
    if place.is_first or (place.is_last and shape.tie_embeddings):
        apart = place.num_stages > 1 and place.ends_apart
        if not place.is_first:
            table.block = after_last
        again = after_last if shape.tie_embeddings and place.is_first and not apart else None
        ends = ("ends",) if shape.tie_embeddings and apart else ()
        table.vocabulary("embedding.weight", shape, _embedding_std(shape), ends=ends, again=again)
    if shape.position == "learned" and place.is_first:
        table.whole("positions.weight", (shape.max_position, width), std=shape.init_std, decay=True)
    for i in blocks:
        table.block = i + 1
        _block(table, shape, i)
    table.block = after_last
    if place.is_last:
        table.norm("final_norm", shape)
        if not shape.tie_embeddings:
            # So that the first logits are about 1; transformers begins with 1, and so with a loss of tens of nats.
            table.vocabulary("head.weight", shape, shape.init_std if shape.init == "normal" else width**-0.5)
    if shape.is_relative and place.is_first:
        table.block = 0
        for stack in ("encoder", "decoder"):
            _relative(table, f"{stack}_bias.weight", shape, place)
    if shape.encoder_layers - 1 in blocks:
        table.block = shape.encoder_layers
        table.norm("encoder_norm", shape)
    if shape.head_bias and place.is_last:
        table.block = after_last
        _head_bias(table, shape, place)
    return tuple(table.specs)


def _embedding_std(shape: T5Shape) -> float:
    return shape.init_std if shape.init == "normal" else 1.0


def _block(table: Table, shape: T5Shape, number: int) -> None:
    first, block, is_decoder = len(table.specs), f"blocks.{number}", number >= shape.encoder_layers
    layers = shape.decoder_layers if is_decoder else shape.encoder_layers
    width, inner, bias = shape.hidden_size, shape.num_heads * shape.head_dim, shape.bias is True
    # As deep as its stack, as in Megatron.
    residual_std = shape.init_std / (2 * max(1, layers)) ** 0.5
    table.attention_and_mlp(block, shape, residual_std=residual_std)
    if is_decoder:
        table.norm(f"{block}.cross_norm", shape)
        table.columns(f"{block}.cross.q", [("q", inner)], width, std=shape.init_std, bias=bool(shape.bias))
        table.columns(
            f"{block}.cross.kv", [("k", inner), ("v", inner)], width, std=shape.init_std, bias=bool(shape.bias)
        )
        table.rows(f"{block}.cross.out", width, inner, std=residual_std, bias=bias)
    if shape.init == "sizes":
        table.specs[first:] = [_by_sizes(spec, shape) for spec in table.specs[first:]]


def _by_sizes(spec: ParamSpec, shape: T5Shape) -> ParamSpec:
    """The initial values of Raffel et al. 2020: queries are smaller, because scores are not divided."""
    if not spec.std:
        return spec
    pieces = tuple(replace(piece, std_factor=_std(piece, shape)) for piece in spec.pieces)
    return replace(spec, std=1.0, pieces=pieces)


def _std(piece: Piece, shape: T5Shape) -> float:
    inputs = piece.shape[-1]
    return float(inputs * (shape.head_dim if piece.name.endswith(".q.weight") else 1)) ** -0.5


def _relative(table: Table, name: str, shape: T5Shape, place: Place) -> None:
    """A bias for each bucket of distances and each head; heads are divided over tp."""
    rows, heads = shape.relative_buckets, shape.num_heads // place.tp_size
    std = shape.init_std if shape.init == "normal" else shape.hidden_size**-0.5
    piece = Piece(name=name, shape=(rows, shape.num_heads), start=(0, place.tp_rank * heads), size=(rows, heads))
    spec = ParamSpec(name=name, shape=(rows, heads), pieces=(piece,), std=std, decay=True, block=table.block)
    table.specs.append(spec)


def _head_bias(table: Table, shape: T5Shape, place: Place) -> None:
    rows, name = shape.padded_vocab_size, "head_bias.bias"
    first, stop = vocabulary_range(shape.vocab_size, rows, tp_size=place.tp_size, tp_rank=place.tp_rank)
    piece = Piece(name=name, shape=(shape.vocab_size,), start=(first,), size=(stop - first,))
    local = (rows // place.tp_size,)
    table.specs.append(ParamSpec(name=name, shape=local, pieces=(piece,), std=0.0, decay=False, block=table.block))
