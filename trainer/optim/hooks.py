"""The data-parallel hooks of a model's blocks: gathers of parameters and sums of gradients.

Forwards each border to the one that needs it; gathers.py and reducer.py do the work.
"""

from __future__ import annotations

from trainer.layers.block_hooks import BlockHooks
from trainer.optim.gathers import ParameterGathers
from trainer.optim.reducer import GradientReducer


class DataParallelHooks(BlockHooks):
    """Blocks wait for their parameters, and report when their gradients are complete."""

    def __init__(self, gathers: ParameterGathers, reducer: GradientReducer) -> None:
        super().__init__()
        self.gathers, self.reducer = gathers, reducer

    def before_forward(self, block: int, *, adds: bool = False) -> None:
        """Wait for the parameters; a pass that adds to main gradients needs memory for them."""
        self.gathers.before_forward(block)
        if adds:
            self.reducer.before_gradients(block)

    def before_backward(self, block: int) -> None:
        """Wait for the parameters, whose memory sharded ranks had freed."""
        self.gathers.before_backward(block)
        super().before_backward(block)

    def after_backward(self, block: int) -> None:
        """The parameters are no longer needed."""
        self.gathers.after_backward()
        super().after_backward(block)

    def before_gradients(self, block: int) -> None:
        """Memory for sharded gradients."""
        self.reducer.before_gradients(block)

    def after_gradients(self, block: int) -> None:
        """Start summing complete gradients."""
        self.reducer.after_gradients(block, last=self.last_microbatch)
