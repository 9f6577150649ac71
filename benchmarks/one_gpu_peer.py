"""What a user would write without a framework, for benchmarks/one_gpu.py: plain layers under torch.compile.

fp32 weights under autocast to bf16, PyTorch's attention and its fused AdamW, clipping by the norm. The same sizes,
tokens and number of microbatches as the run beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.models.gpt.shape import GPTShape


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        width, gated = shape.hidden_size, shape.activation == "swiglu"
        norm = nn.RMSNorm if shape.norm == "rmsnorm" else nn.LayerNorm
        self.norms = nn.ModuleList(norm(width, eps=shape.norm_epsilon) for _ in range(2))
        self.sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self.head_dim, self.gated = shape.head_dim, gated
        self.qkv = nn.Linear(width, sum(self.sizes) * shape.head_dim, bias=shape.bias)
        self.out = nn.Linear(shape.num_heads * shape.head_dim, width, bias=shape.bias)
        self.heads = nn.ModuleList(norm(shape.head_dim, eps=shape.norm_epsilon) for _ in range(2 * bool(shape.qk_norm)))
        self.experts = Experts(shape) if shape.moe is not None else None
        if self.experts is None:
            self.up = nn.Linear(width, shape.ffn_hidden_size * (2 if gated else 1), bias=shape.bias)
            self.down = nn.Linear(shape.ffn_hidden_size, width, bias=shape.bias)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.sizes, dim=1)
        if len(self.heads):
            q, k = self.heads[0](q), self.heads[1](k)
        if table is not None:
            q, k = (_rotated(part, *table) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.sizes[0] != self.sizes[1])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        if self.experts is not None:
            return x + self.experts(self.norms[1](x))
        up = self.up(self.norms[1](x))
        if not self.gated:
            return x + self.down(F.gelu(up, approximate="tanh"))
        gate, up = up.chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """The experts of each token, by PyTorch's grouped products."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        assert shape.moe is not None, "a shape with experts"
        count, width, inner = shape.moe.num_experts, shape.hidden_size, shape.moe.ffn_hidden_size
        self.top_k, self.factor, self.count = shape.moe.top_k, shape.moe.balance_factor, count
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        flat = x.flatten(0, 1).bfloat16()
        with torch.autocast("cuda", enabled=False):
            best, chosen = F.linear(flat.float(), self.router.weight).topk(self.top_k)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=self.count).cumsum(0).to(torch.int32)
        rows = flat[order // self.top_k]
        gate, up = F.grouped_mm(rows, self.up.bfloat16().transpose(1, 2), offs=ends).chunk(2, dim=-1)
        inner = F.silu(gate) * up * best.softmax(-1).flatten()[order].unsqueeze(1).bfloat16()
        out = F.grouped_mm(inner, self.down.bfloat16().transpose(1, 2), offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return out[back].view(len(flat), self.top_k, -1).sum(1).view(x.shape)


class Model(nn.Module):
    """Embedding, blocks, norm and head; the mean loss."""

    def __init__(self, shape: GPTShape, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        learned = shape.position == "learned"
        self.positions = nn.Embedding(length, shape.hidden_size) if learned else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = (nn.RMSNorm if shape.norm == "rmsnorm" else nn.LayerNorm)(shape.hidden_size)

    def forward(self, tokens: Tensor, labels: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
        """int64[B, S] twice -> scalar."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x, table)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def peer_step(shape: GPTShape, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], float]:
    """A function that trains one step on the batches and gives its mean loss."""
    device, length = batches[0][0].device, batches[0][0].shape[1]
    with device:
        model = Model(shape, length)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=shape.init_std)
    table = None if shape.position == "learned" else _angles(shape, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)

    def step() -> float:
        total = torch.zeros((), device=device)
        for tokens, labels in batches:
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(tokens, labels, table) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def nanogpt_step(shape: GPTShape, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
    """The same with nanoGPT's own compiled model and optimizer, in the order of its train.py; its folder is a path of
    Python's.
    """
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    device, length = batches[0][0].device, batches[0][0].shape[1]
    sizes = {"n_layer": shape.num_layers, "n_head": shape.num_heads, "n_embd": shape.hidden_size}
    model = GPT(GPTConfig(block_size=length, vocab_size=shape.padded_vocab_size, bias=shape.bias, **sizes)).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), device.type)
    compiled = torch.compile(model)

    rows = [(tokens.contiguous(), labels.contiguous()) for tokens, labels in batches]

    def step() -> Tensor:
        for tokens, labels in rows:
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(tokens, labels)[1] / len(batches)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach() * len(batches)

    return step


def _angles(shape: GPTShape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequency = shape.rope.theta ** (-torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim)
    angles = torch.outer(torch.arange(length, device=device).float(), frequency).repeat(1, 2)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
