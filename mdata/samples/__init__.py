"""What sample k looks like: the arrays that a model sees as one row.

`gpt` is concatenated text, cut into runs by an order.
"""

from mdata.samples.gpt import GptSamples, TokenStream

__all__ = ["GptSamples", "TokenStream"]
