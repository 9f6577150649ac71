"""What a CUDA graph does, on a CPU: records the operations on tensors that a function makes, and makes them again.

Like a graph, a tape repeats operations on the same memory, whatever Python would decide by then, and recording leaves
all tensors as they were. Unlike a graph it runs operations one by one and does not reuse the memory that a recording
freed, so a wrong sharing of pools is not seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only


class TapeRecorder:
    """The recorder of trainer/pipeline/graphs.py for CPUs, whose lanes are all itself: nothing runs beside others."""

    def __init__(self) -> None:
        self.recordings = 0

    def __call__(self) -> TapeRecorder:
        return self

    def beside(self, after: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> None:
        """Operations are done in the order in which they are given."""

    join = mark

    def record(self, run: Callable[[], Any]) -> Tape:
        self.recordings += 1
        tape = Tape()
        with tape:
            run()
        tape.restore()
        return tape


class Tape(TorchDispatchMode):
    """The operations of a block, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self._made: set[int] = set()  # addresses of storages that were allocated in the block
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> what was written to, and a copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # whose schemas do not say what they write
            self._keep(args)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        for name, value in kwargs.items():
            if name == "out":
                self._keep(value)
        known = {_storage(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        results, _ = tree_flatten(result)
        fresh = [x if isinstance(x, Tensor) and _storage(x) not in known else None for x in results]
        self._made |= {_storage(x) for x in fresh if x is not None}
        # As with a graph, autograd does not see that a replay writes: `data` has a version counter of its own.
        unseen = tree_map_only(Tensor, lambda x: x.data, (args, kwargs))
        self.operations.append((func, *unseen, [None if x is None else x.data for x in fresh]))
        return result

    def restore(self) -> None:
        """Undo the block: tensors that existed before it get their values back."""
        for tensor, copy in self._before.values():
            tensor.data.copy_(copy)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        """Make the operations again."""
        for func, args, kwargs, fresh in self.operations:
            results, _ = tree_flatten(func(*args, **kwargs))
            for kept, value in zip(fresh, results, strict=True):
                if kept is not None:
                    kept.copy_(value)
                elif hasattr(value, "wait"):  # a collective
                    value.wait()

    def _keep(self, values: Any) -> None:
        for value in tree_flatten(values)[0]:
            if isinstance(value, Tensor) and _storage(value) not in self._made | self._before.keys():
                whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
                self._before[_storage(value)] = whole, whole.clone()


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
