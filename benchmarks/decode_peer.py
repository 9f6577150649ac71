"""The loops beside which decode.py puts ours: gpt-fast's, in short, and two of transformers.

gpt-fast (pytorch-labs) is a plain model with caches of fixed length, one token a call, under torch.compile in the mode
that records CUDA graphs. Written anew here from what it does; weights are those of our model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.layers.rope import rotation
from trainer.models.gpt.shape import GPTShape

Run = Callable[[Tensor, int], Tensor]


class GptFast:
    """A Llama with caches of `length` tokens.

    Args:
        module: our model, whose weights are used.
    """

    def __init__(self, module: Any, shape: GPTShape, *, batch: int, length: int) -> None:
        self.shape, self.module = shape, module
        like = next(module.parameters())
        size = (batch, shape.num_kv_heads, length, shape.head_dim)
        self.caches = [
            tuple(torch.zeros(size, dtype=like.dtype, device=like.device) for _ in "kv")
            for _ in range(shape.num_layers)
        ]
        self.mask_TT = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
        table = rotation(length, shape.head_dim, rope=shape.rope, dtype=like.dtype, device=like.device)
        self.table = tuple(part.to(like.dtype) for part in table)
        self.grouped = shape.num_heads != shape.num_kv_heads
        for cache in (part for pair in self.caches for part in pair):
            torch._dynamo.mark_static_address(cache)  # otherwise what writes to it is not recorded
        self.step = torch.compile(self._step, mode="reduce-overhead", fullgraph=True)

    @torch.no_grad()
    def run(self, ids: Tensor, count: int) -> Tensor:
        """Greedy tokens after the prompts: [B, count]."""
        length, device = ids.shape[1], ids.device
        tokens = [self._step(ids, torch.arange(length, device=device))]
        for at in range(length, length + count - 1):
            place = torch.tensor([at], device=device)
            torch.compiler.cudagraph_mark_step_begin()
            tokens.append(self.step(tokens[-1][:, None], place).clone())
        return torch.stack(tokens, dim=1)

    def _step(self, ids_BS: Tensor, place_S: Tensor) -> Tensor:
        module, shape = self.module, self.shape
        x = F.embedding(ids_BS, module.embedding.weight)
        mask = self.mask_TT[place_S][None, None]
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        for block, (keys, values) in zip(module.blocks.values(), self.caches, strict=True):
            y = F.rms_norm(x, (shape.hidden_size,), block.attention_norm.weight, shape.norm_epsilon)
            heads = F.linear(y, block.attention.qkv.weight).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            q, k, v = heads.split(sizes, dim=1)
            q, k = (self._rotated(part, place_S) for part in (q, k))
            keys[:, :, place_S], values[:, :, place_S] = k, v
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=self.grouped)
            x = x + F.linear(y.transpose(1, 2).flatten(2), block.attention.out.weight)
            y = F.rms_norm(x, (shape.hidden_size,), block.mlp_norm.weight, shape.norm_epsilon)
            gate, up = F.linear(y, block.mlp.up.weight).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, block.mlp.down.weight)
        x = F.rms_norm(x[:, -1], (shape.hidden_size,), module.final_norm.weight, shape.norm_epsilon)
        head = module.embedding if shape.tie_embeddings else module.head
        return F.linear(x, head.weight).argmax(-1)

    def _rotated(self, x: Tensor, place_S: Tensor) -> Tensor:
        cosine, sine = (part[place_S] for part in self.table)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _transformers_model(shape: GPTShape, device: torch.device) -> Any:
    """A Llama of transformers with weights of its own."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.padded_vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=shape.tie_embeddings,
    )
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def transformers_loop(shape: GPTShape, device: torch.device) -> Run:
    """generate() of transformers with a static cache."""
    model = _transformers_model(shape, device)

    @torch.no_grad()
    def run(ids: Tensor, count: int) -> Tensor:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), cache_implementation="static", **options)

    return run


def transformers_batches(shape: GPTShape, device: torch.device, *, most: int) -> Run:
    """Continuous batching of transformers (generate_batch), which keeps its cache and its graphs between calls.

    Args:
        most: new tokens of the longest call, for which the cache is made.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _transformers_model(shape, device)
    model.generation_config.eos_token_id = None  # every text has its length
    batching = ContinuousBatchingConfig(allow_block_sharing=False)

    def run(ids: Tensor, count: int) -> Tensor:
        # The length of the first call, which makes the cache, is given to all.
        rules = GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0)
        found = model.generate_batch(
            ids.tolist(),
            generation_config=rules,
            continuous_batching_config=batching,
            persistent_manager=True,
            max_new_tokens=count,
        )
        rows = [result.generated_tokens for result in found.values()]
        assert len(rows) == len(ids) and {len(row) for row in rows} == {count}, "a text is missing or ended early"
        return torch.tensor(rows)

    return run
