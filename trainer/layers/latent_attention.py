"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"): keys and values are made of one latent per token.

In training, and for prompts, keys and values of each head are computed from the latents. A step of generation keeps
latents alone: queries and results are multiplied by the matrices that would make keys and values of them, so that all
heads share one key, the latent with the rotated features behind it, and one value, the latent.

Latents are small. Each tp rank computes them whole, and as its heads read all of them, their gradients are summed over
tp; so is that of the rotated features of keys. Under context parallelism they are gathered in place of keys and values.

Shapes: B batch, S sequence, T tokens of whole rows, N = B * S tokens, D hidden, H local heads, K head width of queries
and keys, V of values, R rotated features, L latent, C = L + R what all heads share.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.layers.attention import Attention, Sequences
from trainer.layers.base import Parallel
from trainer.layers.context_rows import gather_rows
from trainer.layers.linear import Linear
from trainer.layers.norm import Norm
from trainer.layers.paged import Pages
from trainer.layers.recompute import recomputed_parts
from trainer.layers.rope import Rotation, rotate
from trainer.layers.shapes import LatentShape
from trainer.parallel.collectives import Group
from trainer.parallel.conjugates import copy_to_group, gather_sequence


class LatentAttention(Attention):
    """Projections to latents, from these to heads, attention, one projection back.

    Attributes:
        keys_again: backward makes keys and values of the latents again.
    """

    keys_again = False

    def _make_projections(self, parallel: Parallel) -> int:
        shape, sizes, heads = self.shape, self._sizes, self.sizes[0]
        assert shape.qk_norm is not None, "latents are always normalized"
        # What these read, or give, is whole on each rank: no collectives of their own.
        alone = Parallel(Group.single("tp"), sequence_parallel=False)
        queries = heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim)
        if sizes.q_lora_rank:
            self.q_down = Linear(shape.width, sizes.q_lora_rank, parallel=alone, bias=False, column=True)
            self.q_norm = Norm(sizes.q_lora_rank, shape.qk_norm, kernels=self.kernels)
            self.q_up = Linear(sizes.q_lora_rank, queries, parallel=parallel, bias=False, column=True)
        else:
            self.q = Linear(shape.width, queries, parallel=parallel, bias=False, column=True)
        shared = sizes.kv_lora_rank + sizes.qk_rope_head_dim
        self.kv_down = Linear(shape.width, shared, parallel=alone, bias=False, column=True)
        self.kv_norm = Norm(sizes.kv_lora_rank, shape.qk_norm, kernels=self.kernels)
        up = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        self.kv_up = Linear(sizes.kv_lora_rank, up, parallel=alone, bias=False, column=True)
        return heads * sizes.v_head_dim

    def forward(self, x_ND: Tensor, sequences: Sequences) -> Tensor:
        turn = self._turn(sequences)
        q_BSHK, shared_BSC = self._queries(x_ND, turn, sequences), self._shared(x_ND, turn, sequences)
        if sequences.pages is not None:
            y_BSHV = self._attend_latents(q_BSHK, shared_BSC, sequences, sequences.pages)
        else:
            if sequences.context is not None:
                shared_BSC = gather_rows(shared_BSC, cp=sequences.context.cp)
            heads = _of_one_width(q_BSHK, *self._keys(shared_BSC))
            kept_BSC, widest = shared_BSC.detach(), heads[0].shape[-1]

            def keys() -> tuple[Tensor, ...]:
                return _of_one_width(*self._keys(kept_BSC), widest=widest)

            with recomputed_parts(heads[1:], keys) if self.keys_again else nullcontext():
                y_BSHV = self._attend(heads, sequences)[..., : self._sizes.v_head_dim]
        return self.out(y_BSHV.flatten(0, 1).flatten(1))

    @property
    def _sizes(self) -> LatentShape:
        assert self.shape.latent is not None, "made for shapes with latents"
        return self.shape.latent

    def _queries(self, x_ND: Tensor, turn: Rotation | None, sequences: Sequences) -> Tensor:
        """Rotated queries: [B, S, H, K]."""
        if self._sizes.q_lora_rank:
            q_NHK = self.q_up(self.q_norm(self.q_down(x_ND))[1])
        else:
            q_NHK = self.q(x_ND)
        q_BSHK = q_NHK.view(sequences.batch, sequences.length, self.sizes[0], -1)
        plain, turned = q_BSHK.split((self._sizes.qk_nope_head_dim, self._sizes.qk_rope_head_dim), dim=-1)
        return torch.cat((plain, self._rotate(turned, turn)), dim=-1)

    def _shared(self, x_ND: Tensor, turn: Rotation | None, sequences: Sequences) -> Tensor:
        """The normalized latents of keys and values, and the rotated features of keys: [B, S, C]."""
        sizes, parallel = (self._sizes.kv_lora_rank, self._sizes.qk_rope_head_dim), self.out.parallel
        latent_NL, turned_NR = self.kv_down(x_ND).split(sizes, dim=-1)
        _, latent_NL = self.kv_norm(latent_NL.contiguous())
        # The heads of this rank give a part of the gradient of both.
        enter = gather_sequence if parallel.sequence_parallel else copy_to_group
        shared_NC = enter(torch.cat((latent_NL, turned_NR), dim=-1), parallel.tp)
        latent_BSL, turned_BSR = shared_NC.view(sequences.batch, sequences.length, -1).split(sizes, dim=-1)
        return torch.cat((latent_BSL, self._rotate(turned_BSR.unsqueeze(2), turn).squeeze(2)), dim=-1)

    def _rotate(self, x_BSER: Tensor, turn: Rotation | None) -> Tensor:
        return rotate(x_BSER, turn, interleaved=bool(self.shape.rotary), kernels=self.kernels)

    def _keys(self, shared_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's heads: [B, T, H, K], [B, T, H, V]."""
        sizes = self._sizes
        latent_BTL, turned_BTR = shared_BTC.split((sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=-1)
        up_NX = self.kv_up(latent_BTL.flatten(0, 1).contiguous())
        up_BTHX = up_NX.view(*shared_BTC.shape[:2], self.sizes[0], -1)
        plain_BTHX, v_BTHV = up_BTHX.split((sizes.qk_nope_head_dim, sizes.v_head_dim), dim=-1)
        turned_BTHR = turned_BTR.unsqueeze(2).expand(-1, -1, self.sizes[0], -1)
        return torch.cat((plain_BTHX, turned_BTHR), dim=-1), v_BTHV

    def _attend_latents(self, q_1NHK: Tensor, shared_1NC: Tensor, sequences: Sequences, pages: Pages) -> Tensor:
        """A step of generation: keep the new latents, and attend to all of each row: [1, N, H, V]."""
        sizes, rows, scores, q_NHK = self._sizes, pages.rows, self.shape.scores, q_1NHK[0]
        tensors, shared_N1C = self._score_tensors(q_1NHK, sequences), shared_1NC.transpose(0, 1)
        if rows.counts:
            shared_M1C, lengths = pages.keep_rows("latent", shared_N1C, window=scores.window)
            q, k, v = (x[0] for x in _of_one_width(q_1NHK, *self._keys(shared_M1C.transpose(0, 1))))
            y_NHV = self.kernels.ragged_attention(q, k, v, rows.counts, lengths, scores, tensors)
            return y_NHV[None, ..., : sizes.v_head_dim]
        weight_HXL = self.kv_up.matrix(q_NHK.dtype).view(self.sizes[0], -1, sizes.kv_lora_rank)
        key_HXL, value_HVL = weight_HXL.split((sizes.qk_nope_head_dim, sizes.v_head_dim), dim=1)
        plain_NHX, turned_NHR = q_NHK.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), dim=-1)
        q_NHC = torch.cat((torch.einsum("nhx,hxl->nhl", plain_NHX, key_HXL), turned_NHR), dim=-1)
        pool_PT1C, latent = pages.tensors["latent"], sizes.kv_lora_rank
        y_NHL = self.kernels.paged_attention(
            q_NHC,
            shared_N1C,
            shared_N1C[..., :latent],
            pool_PT1C,
            pool_PT1C[..., :latent],
            rows.table_BP,
            rows.length_B,
            scores,
            tensors,
        )
        return torch.einsum("nhl,hvl->nhv", y_NHL, value_HVL)[None]


def _of_one_width(*heads: Tensor, widest: int = 0) -> tuple[Tensor, ...]:
    """Queries, keys and values with zeros behind them, as wide as the widest, for kernels that know one width."""
    widest = max(widest, *(x.shape[-1] for x in heads))
    return tuple(F.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x.contiguous() for x in heads)
