"""How a Mamba-2 or hybrid model is divided over tensor-parallel ranks and pipeline stages, as a table.

z, x, dt and everything else that belongs to heads are divided by heads, B and C by groups; each is a logical tensor of
its own in the one parameter of the first projection, or of the convolution. Pure, no torch.
"""

from __future__ import annotations

import dataclasses
import math

from trainer.models.gpt.params import Table, stage_table
from trainer.models.mamba.shape import MambaShape, kinds
from trainer.parallel.params import ParamSpec, Piece, Place, Spread


def parameter_table(shape: MambaShape, place: Place) -> tuple[ParamSpec, ...]:
    """Every parameter of the rank at a place, in the order of the module tree."""

    def add_block(table: Table, number: int, residual_std: float) -> None:
        block, kind = f"blocks.{number}", kinds(shape)[number]
        if kind == "mixer":
            _mixer(table, block, shape, residual_std=residual_std)
        elif kind == "attention":
            table.attention(block, shape, residual_std=residual_std)
        else:
            table.mlp(block, shape, residual_std=residual_std, experts=kind == "experts")

    return stage_table(shape, place, add_block, terms=1)


def _mixer(table: Table, block: str, shape: MambaShape, *, residual_std: float) -> None:
    """A norm and a mixer."""
    mixer, name = shape.mixer, f"{block}.mixer"
    inner, of_groups, width, heads = mixer.inner, mixer.of_groups, mixer.width, mixer.num_heads
    low, high = shape.dt_range
    steps = Spread(low=math.log(low), high=math.log(high), value="softplus_inverse", least=shape.dt_floor)
    table.norm(f"{block}.mixer_norm", shape)
    _heads(table, f"{name}.dt_bias", heads, spread=steps)
    _heads(table, f"{name}.A_log", heads, spread=Spread(low=1.0, high=16.0, value="log"))
    _heads(table, f"{name}.D", heads, fill=1.0)
    parts = [("z", inner), ("x", inner), ("B", of_groups), ("C", of_groups), ("dt", heads)]
    table.columns(f"{name}.in_proj", parts, width, std=shape.init_std, bias=False)
    _convolution(table, f"{name}.conv1d", parts[1:4], width=mixer.conv_kernel)
    table.columns(f"{name}.norm.weight", [("weight", inner)], None, std=0.0, bias=False, fill=1.0)
    table.rows(f"{name}.out_proj", width, inner, std=residual_std, bias=False)


def _heads(table: Table, name: str, heads: int, *, spread: Spread | None = None, fill: float = 0.0) -> None:
    """A number of each head."""
    table.columns(name, [(name.rsplit(".", 1)[1], heads)], None, std=0.0, bias=False, fill=fill)
    table.specs[-1] = dataclasses.replace(table.specs[-1], spread=spread)


def _convolution(table: Table, name: str, parts: list[tuple[str, int]], *, width: int) -> None:
    """Weights [channels, 1, K] and biases of x, B and C; the initial values are those of PyTorch."""
    spread = Spread(low=-(width**-0.5), high=width**-0.5)
    for kind, rest in ((".weight", (1, width)), (".bias", ())):
        pieces, row = [], 0
        for part, channels in parts:
            mine = channels // table.tp_size
            piece = Piece(
                name=f"{name}.{part}{kind}",
                shape=(channels, *rest),
                start=(table.tp_rank * mine, *(0 for _ in rest)),
                size=(mine, *rest),
                offset=row * math.prod(rest),
            )
            pieces.append(piece)
            row += mine
        spec = ParamSpec(
            name=f"{name}{kind}",
            shape=(row, *rest),
            pieces=tuple(pieces),
            std=0.0,
            spread=spread,
            decay=bool(rest),
            block=table.block,
        )
        table.specs.append(spec)
