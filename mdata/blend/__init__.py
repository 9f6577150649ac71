"""Which component gives global sample k, and which of its samples.

`grammar` reads Megatron's words and `split` its split string, `shares` makes exact integers of shares as
given, and `native` deals samples to components. All pure.
"""

from mdata.blend.grammar import Word, parse_data_path
from mdata.blend.native import NativeBlend
from mdata.blend.shares import integer_weights
from mdata.blend.split import SPLITS, split_range

__all__ = ["SPLITS", "NativeBlend", "Word", "integer_weights", "parse_data_path", "split_range"]
