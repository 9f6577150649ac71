"""Operations of a BERT: attention sees both sides, and the head computes masked tokens only. Pure, no torch."""

from __future__ import annotations

from trainer.models.bert.params import parameter_table
from trainer.models.bert.shape import BertShape
from trainer.parallel.params import Place


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
