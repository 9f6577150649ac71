"""Which tokens make sample k: orders as arithmetic, without stored index arrays.

`permutation` is a keyed bijection of [0, n), `native` the order built on it. Both are pure: nothing here
reads a file. Why the numbers in them are what they are: docs/design/order.md.
"""

from mdata.order.native import NativeOrder, OrderKey
from mdata.order.permutation import Permutation

__all__ = ["NativeOrder", "OrderKey", "Permutation"]
