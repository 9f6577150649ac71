"""Which component gives global sample k, and which of its samples.

`grammar` reads Megatron's words and `split` its split string, `shares` makes exact integers of shares as
given, `deal` says what any way of dealing samples to components offers, and `native` deals by shares. All pure.
"""

from mdata.blend.deal import MOST_SAMPLES, Deal, InTurn, chosen, sample_numbers
from mdata.blend.grammar import Word, parse_data_path
from mdata.blend.native import NativeBlend
from mdata.blend.shares import integer_weights
from mdata.blend.split import SPLITS, split_range

__all__ = [
    "MOST_SAMPLES",
    "SPLITS",
    "Deal",
    "InTurn",
    "NativeBlend",
    "Word",
    "chosen",
    "integer_weights",
    "parse_data_path",
    "sample_numbers",
    "split_range",
]
