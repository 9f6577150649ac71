"""What a CUDA graph does, on a CPU: records the operations on tensors that a function makes, and makes them again.

Like a graph, a tape repeats operations on the same memory, whatever Python would decide by then, and recording leaves
all tensors as they were. A replay may write to the memory of tensors that were computed in its lane after its
recording, so here it spoils them. Unlike a graph a tape runs operations one by one, and recordings of a lane do not
share memory with each other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only


class TapeRecorder:
    """The recorder of trainer/pipeline/graphs.py for CPUs; nothing runs beside others."""

    def __init__(self) -> None:
        self.recordings = 0

    def __call__(self) -> TapeLane:
        return TapeLane(self)


class TapeLane:
    """Makes tapes; numbers them, and knows which tensors came after which of them."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder, self._tapes = recorder, 0
        self._computed: list[tuple[StorageWeakRef, int]] = []  # what was computed here, and how many tapes there were

    @contextmanager
    def beside(self, after: Any) -> Iterator[None]:
        yield

    @contextmanager
    def inside(self) -> Iterator[None]:
        with _Made() as made:
            yield
        self._computed += [(storage, self._tapes) for storage in made.storages]

    def held(self) -> int:
        gc.collect()  # ranks decide alike, whenever Python frees what nothing refers to
        self._computed = [(storage, tapes) for storage, tapes in self._computed if not storage.expired()]
        return len(self._computed)

    def mark(self) -> None:
        """Operations are done in the order in which they are given."""

    join = mark

    def record(self, run: Callable[[], Any]) -> Tape:
        self._recorder.recordings += 1
        self._tape = tape = Tape(before_replay=lambda number=self._tapes: self._spoil(number))
        self._tapes += 1
        with tape:
            run()
        tape.restore()
        return tape

    def cut(self, between: Callable[[], None]) -> None:
        self._tape.operations.append(between)

    def _spoil(self, number: int) -> None:
        """Make NaN of what was computed after this tape."""
        for weak, tapes in self._computed:
            if tapes > number and (storage := torch.UntypedStorage._new_with_weak_ptr(weak.cdata)) is not None:
                storage.fill_(255)


class _Made(TorchDispatchMode):
    """The storages that a block allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_storage(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        fresh = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor) and _storage(x) not in known]
        self.storages += [StorageWeakRef(x.untyped_storage()) for x in fresh]
        return result


class Tape(TorchDispatchMode):
    """The operations of a block, in order."""

    def __init__(self, *, before_replay: Callable[[], None]) -> None:
        super().__init__()
        self._before_replay = before_replay
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]] | Callable[[], None]] = []
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
        self._before_replay()
        for operation in self.operations:
            if callable(operation):
                operation()
                continue
            func, args, kwargs, fresh = operation
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
