"""The forward pass of Mamba-2 and its hybrids: a GPT whose layers are a mixer, attention, an MLP or experts each.

Shapes as in models/gpt/model.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from trainer.kernels.scan import ScanSizes
from trainer.kernels.table import Kernels
from trainer.layers.base import Parallel
from trainer.layers.dropout import Dropout
from trainer.layers.mamba import Mamba2
from trainer.models.family import DecodeState
from trainer.models.gpt.model import GPT, Block, Context, build_gpt, entered, make_norm
from trainer.models.mamba.shape import MambaShape, decode_state, kinds
from trainer.parallel.collectives import Group

_PARTS = {"mixer": (), "attention": ("attention",), "mlp": ("mlp",), "experts": ("mlp",)}


class MambaBlock(Block):
    """x + layer(norm(x)), of one layer; the next norm computes the sum."""

    def __init__(
        self,
        shape: MambaShape,
        parallel: Parallel,
        *,
        number: int,
        kernels: Kernels,
        seed: int,
        selective: bool,
        groups: Mapping[str, Group] = MappingProxyType({}),
        exchanges: bool = False,
        expert_buffer: float = 0.0,
    ) -> None:
        kind = kinds(shape)[number]
        super().__init__(
            shape,
            parallel,
            number=number,
            kernels=kernels,
            seed=seed,
            selective=selective,
            groups=groups,
            exchanges=exchanges,
            expert_buffer=expert_buffer,
            parts=_PARTS[kind],
        )
        self.kind = kind
        if kind == "mixer":
            self.mixer_norm = make_norm(shape, kernels)
            self.mixer = Mamba2(shape.mixer, parallel, kernels=kernels, selective=self.selective)
            self.drop_mixer = Dropout(shape.hidden_dropout, seed=seed, layer=number + 1, site="mixer", kernels=kernels)

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """See `Block`."""
        if self.kind == "attention":
            return self.attend(x_ND, branch_ND, context)
        if self.kind != "mixer":
            return self.feed_forward(x_ND, branch_ND, context)
        x_ND, y_ND = entered(self.mixer_norm, x_ND, branch_ND)
        with self.recomputed(self.mixer_norm, x_ND, y_ND):
            mixed_ND = self.mixer(y_ND, context.sequences)
        return x_ND, self.drop_mixer(self._left(None, mixed_ND), context.places)


class Mamba(GPT):
    """A stage of these blocks."""

    block_type = MambaBlock
    shape: MambaShape

    @staticmethod
    def scan_sizes(shape: MambaShape) -> ScanSizes | None:
        """See `GPT`."""
        return ScanSizes(shape.mixer.head_dim, shape.mixer.state_size) if "M" in shape.pattern else None

    def decode_states(self) -> Mapping[int, DecodeState]:
        """See `Stage`; MLPs and experts keep nothing."""
        of_block = {i: decode_state(self.shape, kinds(self.shape)[i]) for i in self.place.blocks(self.shape.num_layers)}
        return {i: state for i, state in of_block.items() if state.tensors}


build_mamba = functools.partial(build_gpt, model=Mamba)
