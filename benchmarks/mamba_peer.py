"""The peer of mixers in benchmarks/one_gpu.py: plain layers around the Triton scan of mamba-ssm or of fla.

fp32 weights under autocast to bf16, PyTorch's fused AdamW, clipping by the norm; everything but the scan and the
convolution under torch.compile. The convolution is causal-conv1d's where it is installed, otherwise our own. The same
sizes, tokens and number of microbatches as the run beside it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.kernels.mamba_ssm import causal_conv
from trainer.models.mamba.shape import MambaShape

SCANS = ("mamba-ssm", "fla")


def is_installed(name: str) -> bool:
    """Whether a scan of SCANS is there."""
    return importlib.util.find_spec({"mamba-ssm": "mamba_ssm", "fla": "fla"}[name]) is not None


def scan_of(name: str) -> Callable[..., Tensor]:
    """(x [B, S, H, P], steps [B, S, H], A [H], B and C [B, S, G, N], chunk) -> [B, S, H, P]."""
    if name == "mamba-ssm":
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return lambda x, dt, A, B, C, chunk: mamba_chunk_scan_combined(x, dt, A, B, C, chunk)
    from fla.ops.simple_gla import chunk_simple_gla

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int) -> Tensor:
        keys, queries = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (B, C))
        values = (x * dt[..., None]).to(x.dtype)
        y: Tensor = chunk_simple_gla(queries, keys, values, g=dt * A, scale=1.0)[0]
        return y

    return scan


class Mixer(nn.Module):
    """A Mamba-2 mixer around a scan."""

    def __init__(self, shape: MambaShape, scan: Callable[..., Tensor]) -> None:
        super().__init__()
        mixer = shape.mixer
        self.shape, self.scan = mixer, scan
        self.in_proj = nn.Linear(mixer.width, mixer.projected, bias=False)
        self.conv1d = nn.Conv1d(mixer.convolved, mixer.convolved, mixer.conv_kernel, groups=mixer.convolved)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.zeros(mixer.num_heads)) for _ in range(3))
        self.weight = nn.Parameter(torch.ones(mixer.inner))
        self.out_proj = nn.Linear(mixer.inner, mixer.width, bias=False)
        self.begin, self.end = torch.compile(self._begin), torch.compile(self._end)

    def _begin(self, u: Tensor) -> tuple[Tensor, ...]:
        mixer = self.shape
        z, xBC, dt = self.in_proj(u).split([mixer.inner, mixer.convolved, mixer.num_heads], -1)
        return z, xBC, F.softplus(dt.float() + self.dt_bias)

    def _end(self, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
        grouped = (y.float() + self.D[:, None] * x).flatten(2) * F.silu(z.float())
        grouped = grouped.unflatten(-1, (self.shape.num_groups, -1))
        unit = grouped * (grouped.square().mean(-1, keepdim=True) + self.shape.norm_epsilon).rsqrt()
        return self.out_proj(unit.flatten(2) * self.weight)

    def forward(self, u: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        mixer = self.shape
        z, xBC, dt = self.begin(u)
        with torch.autocast("cuda", enabled=False):
            xBC = causal_conv(xBC, self.conv1d.weight.squeeze(1), self.conv1d.bias)
            x, B, C = xBC.split([mixer.inner, mixer.of_groups, mixer.of_groups], -1)
            x = x.unflatten(-1, (mixer.num_heads, -1))
            B, C = (part.unflatten(-1, (mixer.num_groups, -1)) for part in (B, C))
            y = self.scan(x, dt, -self.A_log.exp(), B, C, mixer.chunk_size)
        return self.end(y, x, z)


class Attention(nn.Module):
    """Attention without positions."""

    def __init__(self, shape: MambaShape) -> None:
        super().__init__()
        self.sizes, self.head_dim = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], shape.head_dim
        self.qkv = nn.Linear(shape.hidden_size, sum(self.sizes) * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(self.sizes, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.sizes[0] != self.sizes[1])
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Squared ReLU."""

    def __init__(self, shape: MambaShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.down(F.relu(self.up(x)).square())


class Model(nn.Module):
    """Embedding, layers by the pattern, norm and head; the mean loss."""

    def __init__(self, shape: MambaShape, scan: Callable[..., Tensor]) -> None:
        super().__init__()
        make: dict[str, Callable[[], nn.Module]] = {
            "M": lambda: Mixer(shape, scan),
            "*": lambda: torch.compile(Attention(shape)),
            "-": lambda: torch.compile(MLP(shape)),
        }
        self.embedding = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(make[letter]() for letter in shape.pattern)
        norm = [nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon) for _ in range(shape.num_layers + 1)]
        self.norms = nn.ModuleList(norm)
        self.loss = torch.compile(self._loss)

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(self.norms[-1](x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """int64[B, S] twice -> scalar."""
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return self.loss(x, labels)


def mamba_step(name: str, shape: MambaShape, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], Any]:
    """A function that trains one step on the batches and gives its mean loss."""
    device = batches[0][0].device
    with device:
        model = Model(shape, scan_of(name))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=shape.init_std)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> Any:
        total = torch.zeros((), device=device)
        for tokens, labels in batches:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens, labels) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step
