"""Which tokens make sample k: orders as arithmetic, and one as arrays.

`permutation` is a keyed bijection of [0, n), `native` the order built on it; `megatron` is the order of
Megatron's GPT dataset, three arrays equal to its own. All are pure: nothing here reads a file. Why the numbers
in them are what they are: docs/design/order.md.
"""

from mdata.order.native import NativeOrder, OrderKey
from mdata.order.permutation import Permutation

__all__ = ["NativeOrder", "OrderKey", "Permutation"]
