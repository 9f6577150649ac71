"""What sample k looks like: the arrays that a model sees as one row.

`gpt` is concatenated text, cut into runs by the native order; `gpt_megatron` the same in Megatron's; `documents` one
document a row, `packed` whole documents fitted into rows. `rows` is what they share. `mapping` is for BERT and T5.
"""

from mdata.samples.documents import DocumentSamples
from mdata.samples.gpt import GptSamples, TokenStream
from mdata.samples.gpt_megatron import MegatronGptSamples, effective_pad
from mdata.samples.packed import PackedSamples
from mdata.samples.packing import PackingRule
from mdata.samples.rows import RowKind, RowOptions, Rows

__all__ = [
    "DocumentSamples",
    "GptSamples",
    "MegatronGptSamples",
    "PackedSamples",
    "PackingRule",
    "RowKind",
    "RowOptions",
    "Rows",
    "TokenStream",
    "effective_pad",
]
