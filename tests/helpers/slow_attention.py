"""A kernel of attention as chunk_attention.py calls it, written out with all scores."""

from __future__ import annotations

import math

import torch

from trainer.kernels.chunk_attention import Attended, merge_


class Slow:
    """A kernel as cuDNN's is: forward tells the sums, backward takes them as they come."""

    merge_ = staticmethod(merge_)

    @staticmethod
    def fits(q):
        return True

    @staticmethod
    def _scores(q, k, causal, scale):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q @ k.transpose(2, 3) * (scale or 1 / math.sqrt(q.shape[3]))
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1) & causal
        return scores.masked_fill(hidden, -math.inf)

    @classmethod
    def forward(cls, heads, *, causal, scale):
        q, k, v = heads
        scores = cls._scores(q, k, causal, scale)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return Attended(scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True), ())

    @classmethod
    def backward(cls, dy, heads, *, attended, causal, scale):
        q, k, v = heads
        groups = k.shape[1]
        weights = (cls._scores(q, k, causal, scale) - attended.sums_BHS1).exp()
        wide = [x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v)]
        dscores = weights * (dy @ wide[1].transpose(2, 3) - (dy * attended.y_BHSK).sum(-1, keepdim=True))
        dscores = dscores * (scale or 1 / math.sqrt(q.shape[3]))
        dk, dv = ((x.transpose(2, 3) @ y).unflatten(1, (groups, -1)).sum(2) for x, y in ((dscores, q), (weights, dy)))
        return dscores @ wide[0], dk, dv
