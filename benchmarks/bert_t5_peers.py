"""The peers of bert_t5.py: transformers under torch.compile, and megatron-core with Transformer Engine's layers.

Both as a careful user runs them: bf16, fused AdamW, clipping by the norm, PyTorch's or Transformer Engine's attention,
no mask where all rows are full, no dropout, and a head that computes as many tokens as ours: masked ones, their number
fixed for the compiler. The sizes, tokens and number of microbatches are those of the run beside it. On a CPU, where
only the small shapes run, in fp32 and without a compiler. Written against transformers 5.24 and megatron-core 0.16.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.megatron_peer import Megatron, join, stepper, transformer_config
from trainer.models.stage import Microbatch

ROW = Megatron(optimizer="distributed")


class Rows(NamedTuple):
    """A microbatch for a peer: of BERT with predicted tokens, types and pairs, of T5 with what the decoder reads.

    Args:
        mask: int64[B, S], 1 where there is text; None: everywhere.
        predicted_M: int64[M], flat tokens. labels: of these tokens [M], or of the decoder's [B, S]; -100: none.
    """

    tokens: Tensor
    mask: Tensor | None
    labels: Tensor
    predicted_M: Tensor | None = None
    types: Tensor | None = None
    swapped: Tensor | None = None
    decoder: Tensor | None = None


def rows_of(batches: list[list[Microbatch]]) -> list[list[Rows]]:
    """The microbatches of each step; the predicted tokens of all are as many as those of the largest."""
    every = list(itertools.chain(*batches))
    most = max(0 if batch.predicted_M is None else len(batch.predicted_M) for batch in every)
    return [[_rows(batch, most) for batch in step] for step in batches]


def _rows(batch: Microbatch, most: int) -> Rows:
    if batch.encoder is not None:
        labels = torch.where(batch.loss_mask_BS > 0, batch.labels_BS, -100)
        tokens, lengths, _ = batch.encoder
        return Rows(tokens, _mask(tokens, lengths), labels, decoder=batch.tokens_BS)
    assert batch.predicted_M is not None, "a BERT's microbatch tells them"
    others = torch.ones_like(batch.loss_mask_BS, dtype=torch.bool).flatten()
    others[batch.predicted_M] = False
    more = others.nonzero().squeeze(1)[: most - len(batch.predicted_M)]
    predicted_M = torch.cat((batch.predicted_M, more)).sort().values
    labels = torch.where(batch.loss_mask_BS > 0, batch.labels_BS, -100).flatten()[predicted_M]
    mask = _mask(batch.tokens_BS, batch.lengths_B)
    return Rows(batch.tokens_BS, mask, labels, predicted_M, batch.types_BS, batch.swapped_B)


def _mask(tokens: Tensor, lengths: Tensor | None) -> Tensor | None:
    length = tokens.shape[1]
    if lengths is None or int(lengths.min()) == length:
        return None
    return (torch.arange(length, device=tokens.device) < lengths.unsqueeze(1)).long()


# ---- transformers


def transformers_step(shape: Any, batches: list[list[Microbatch]]) -> Callable[[], float]:
    """A function that trains a step, on the batches of one step after the other, and gives its mean loss."""
    rows, device = rows_of(batches), batches[0][0].tokens_BS.device
    with device:
        model = _t5_model(shape) if rows[0][0].decoder is not None else _bert_model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss_of = torch.compile(model) if device.type == "cuda" else model
    turn = itertools.cycle(rows)

    def step() -> float:
        total, batch = torch.zeros((), device=device), next(turn)
        for each in batch:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = loss_of(each) / len(batch)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total  # type: ignore[return-value]  # read later

    return step


def _bert_model(shape: Any) -> nn.Module:
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=shape.padded_vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.ffn_hidden_size,
        max_position_embeddings=shape.max_position,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )

    class MaskedHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = BertForPreTraining(config)

        def forward(self, rows: Rows) -> Tensor:
            out = self.inner.bert(rows.tokens, attention_mask=rows.mask, token_type_ids=rows.types)
            masked = out.last_hidden_state.flatten(0, 1).index_select(0, rows.predicted_M)
            logits, pairs = self.inner.cls(masked, out.pooler_output)
            return F.cross_entropy(logits.float(), rows.labels) + F.cross_entropy(pairs.float(), rows.swapped)

    return MaskedHead().train()


def _t5_model(shape: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=shape.padded_vocab_size,
        d_model=shape.hidden_size,
        d_kv=shape.head_dim,
        d_ff=shape.ffn_hidden_size,
        num_layers=shape.encoder_layers,
        num_decoder_layers=shape.decoder_layers,
        num_heads=shape.num_heads,
        dropout_rate=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = T5ForConditionalGeneration(config)

        def forward(self, rows: Rows) -> Tensor:
            out = self.inner(rows.tokens, attention_mask=rows.mask, decoder_input_ids=rows.decoder, use_cache=False)
            return F.cross_entropy(out.logits.flatten(0, 1).float(), rows.labels.flatten())

    return Loss().train()


# ---- megatron-core


def megatron_step(shape: Any, batches: list[list[Microbatch]]) -> Callable[[], float]:
    """A function that trains a step, on the batches of one step after the other, and gives its mean loss."""
    rows, device = rows_of(batches), batches[0][0].tokens_BS.device
    (size, length), is_t5 = rows[0][0].tokens.shape, rows[0][0].decoder is not None
    on_gpu = device.type == "cuda"
    if on_gpu:
        join(ROW, device)
    else:
        from megatron.core import parallel_state

        from tests.trainer.convert.megatron_core_side import without_gpu

        without_gpu()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
    make, forward = (_t5, _t5_forward) if is_t5 else (_bert, _bert_forward)
    model, turn = make(shape, length, on_gpu=on_gpu), itertools.cycle(rows)
    if on_gpu:
        return stepper(ROW, model.config, [model], turn, forward, size=size, length=length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        made = [forward(each, model) for each in next(turn)]
        mean = torch.stack([mean_loss(output) for output, mean_loss in made]).mean()
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(mean)

    return step


def _bert(shape: Any, length: int, *, on_gpu: bool) -> Any:
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.bert.bert_model import BertModel

    if on_gpu:
        spec = bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    else:
        spec = bert_layer_specs.bert_layer_local_spec
    config = transformer_config(ROW, shape, on_gpu=on_gpu)
    config.persist_layer_norm = False  # without apex the norm of BERT's head is torch's, which refuses it
    model = BertModel(
        config,
        num_tokentypes=2,
        transformer_layer_spec=spec,
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=length,
        share_embeddings_and_output_weights=True,
        add_binary_head=True,
    )
    model.lm_head.register_forward_pre_hook(_select, with_kwargs=True)
    return model


def _select(head: Any, inputs: Any, named: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The predicted tokens of [S, B, D]: [1, M, D]."""
    hidden = named["hidden_states"].flatten(0, 1).index_select(0, head.predicted_M)
    return inputs, {"hidden_states": hidden.unsqueeze(0)}


def _bert_forward(rows: Rows, model: Any) -> tuple[Any, Callable[[Any], Tensor]]:
    predicted_M, swapped, inner = rows.predicted_M, rows.swapped, model
    assert predicted_M is not None and swapped is not None, "of a BERT"
    while hasattr(inner, "module"):
        inner = inner.module
    size, length = rows.tokens.shape
    inner.lm_head.predicted_M = predicted_M % length * size + predicted_M // length
    mask = torch.ones_like(rows.tokens) if rows.mask is None else rows.mask
    counted = rows.labels >= 0

    def mean_loss(output: Any) -> Tensor:
        losses, pairs = output
        mean = (losses.float().flatten() * counted).sum() / counted.sum()
        return mean + F.cross_entropy(pairs.float(), swapped)

    return model(rows.tokens, mask, tokentype_ids=rows.types, lm_labels=rows.labels.clamp(min=0)[:, None]), mean_loss


def _t5(shape: Any, length: int, *, on_gpu: bool) -> Any:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    layers = shape.encoder_layers, shape.decoder_layers
    read, written = (transformer_config(ROW, shape, num_layers=number, on_gpu=on_gpu) for number in layers)
    if on_gpu:
        specs = (
            t5_spec.get_t5_encoder_with_transformer_engine_block_spec(layers[0]),
            t5_spec.get_t5_decoder_with_transformer_engine_block_spec(layers[1]),
        )
    else:
        specs = t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()
    return T5Model(
        written,
        read,
        *specs,
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=length,
        share_embeddings_and_output_weights=True,
    )


def _t5_forward(rows: Rows, model: Any) -> tuple[Any, Callable[[Any], Tensor]]:
    """Masks are True where something is hidden; Transformer Engine's are those of rows, as its decoder is causal."""
    assert rows.decoder is not None, "of a T5"
    counted = rows.labels >= 0
    mask = torch.ones_like(rows.tokens) if rows.mask is None else rows.mask
    real, written = mask[:, None, None] < 0.5, ~counted[:, None, None]
    if rows.tokens.is_cuda:
        masks: tuple[Any, ...] = real, None, (written, real)
    else:
        later = torch.ones(rows.decoder.shape[1], rows.decoder.shape[1], dtype=torch.bool).triu(1)
        masks = (real | real.mT, later | written, real | written.mT)

    def mean_loss(losses: Tensor) -> Tensor:
        return (losses.float() * counted).sum() / counted.sum()

    return model(rows.tokens, rows.decoder, *masks, lm_labels=rows.labels.clamp(min=0)), mean_loss
