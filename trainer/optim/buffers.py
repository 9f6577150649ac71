"""Memory of a rank's parameters and main gradients: flat tensors, whole or only the runs that the rank owns.

A model's parameters are views of one flat tensor per bucket, in their dtype, and its layers' main gradients are views
of another, of at least fp32 by default, to which backward adds. If a rank keeps only its own runs (see
`optimizer.sharding`), a bucket's tensor has memory only while it is in use: its storage is resized, so that the views,
including those that autograd keeps, stay valid (as in PyTorch's FSDP). Frozen parameters have no gradients; their
buckets are the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.layers.base import Layer, MainGradients
from trainer.optim.layout import Bucket, BufferLayout
from trainer.optim.ownership import Ownership, everything


class Flat(NamedTuple):
    """Runs of the buffers, concatenated in a flat tensor."""

    runs: Ownership
    values: Tensor

    def view(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the buffers, which must be in one run."""
        first = self.runs.place(start)
        return self.values[first : first + stop - start]


class Buffers:
    """A model's parameters and main gradients.

    Args:
        model: its parameters are replaced by views; their values are dropped, so they may be on "meta".
        layout: position of each parameter. owned: this rank's runs of it.
        device: of the buffers. sharding: as in the configuration; tensors that are not sharded are whole on each rank.
        in_params_dtype: whether gradients have the parameters' dtype.

    Attributes:
        owned: this rank's runs of what is trained. frozen: the runs of frozen parameters that it keeps.
        main_dtype: of main weights and moments: fp32, or fp64 for an fp64 model.
        sharding: "none" if no axis divides anything.
        parameters, gradients: kept by the rank from step to step.
        bucket_parameters, bucket_gradients: [size] of each bucket, by its number; see `has_memory`.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: BufferLayout,
        *,
        owned: Ownership,
        device: torch.device,
        sharding: str = "state",
        in_params_dtype: bool = False,
    ) -> None:
        named = dict(model.named_parameters())
        planned = {slot.spec.name: slot.spec.shape for slot in layout.slots}
        actual = {name: tuple(p.shape) for name, p in named.items()}
        assert actual == planned, f"model and table differ: {set(actual.items()) ^ set(planned.items())}"
        dtype = next(iter(named.values())).dtype
        self.layout, self.owned = layout, owned.of(frozen=False)
        self.main_dtype = torch.promote_types(dtype, torch.float32)
        self.sharding = sharding if any(bucket.shard_size > 1 for bucket in layout.buckets) else "none"
        self._main_gradients: list[list[MainGradients]] = [[] for _ in layout.buckets]
        gradients_dtype = dtype if in_params_dtype else self.main_dtype
        own, trained = (owned if self.shards_parameters else None), everything(layout).of(frozen=False)
        self.parameters, self.bucket_parameters = _allocate(everything(layout), own, dtype=dtype, device=device)
        own = self.owned if self.shards_gradients else None
        self.gradients, self.bucket_gradients = _allocate(trained, own, dtype=gradients_dtype, device=device)
        self.frozen = self.parameters.runs.of(frozen=True)
        for number, bucket in enumerate(layout.buckets):
            of_bucket = [self.bucket_parameters[number], *([] if bucket.frozen else [self.bucket_gradients[number]])]
            sharded = [flat for flat in of_bucket if not has_memory(flat)]
            for flat in sharded:
                give_memory(flat)  # a tensor without memory cannot be viewed
            self._adopt(model, number)
            for flat in sharded:
                take_memory(flat)

    @property
    def shards_parameters(self) -> bool:
        """Whether the rank keeps only its own runs of the parameters."""
        return self.sharding == "parameters"

    @property
    def shards_gradients(self) -> bool:
        """Whether the rank keeps only its own runs of the gradients."""
        return self.sharding in ("gradients", "parameters")

    @property
    def has_main_weights(self) -> bool:
        """Whether main weights are kept beside the parameters; if these are not rounded, they are the main weights."""
        return self.parameters.values.dtype != self.main_dtype

    def rounded(self, start: int, stop: int) -> Tensor | None:
        """The parameters that are elements [start, stop), where they are rounded main weights."""
        return self.parameters.view(start, stop) if self.has_main_weights else None

    def forget(self, number: int | None = None) -> None:
        """Mark the gradients of one bucket, or of all, as zero, whatever the buffers hold."""
        for mains in self._main_gradients if number is None else [self._main_gradients[number]]:
            for main in mains:
                main.forget()

    def settle(self, number: int) -> None:
        """Make the tensor of a bucket hold its gradients: zero where backward added nothing."""
        for main in self._main_gradients[number]:
            main.settle()

    def clear_gaps(self, number: int) -> None:
        """Set the padding between and after the gradients of a bucket to zero."""
        bucket, gradients = self.layout.buckets[number], self.bucket_gradients[number]
        for start, stop in gaps(bucket):
            gradients[start - bucket.start : stop - bucket.start].zero_()

    def _adopt(self, model: nn.Module, number: int) -> None:
        """Replace a bucket's parameters and main gradients by views of its tensors."""
        bucket = self.layout.buckets[number]
        mains: dict[str, MainGradients] = {}
        for slot in bucket.slots:
            where = slice(slot.start - bucket.start, slot.start - bucket.start + slot.spec.numel)
            owner, _, name = slot.spec.name.rpartition(".")
            layer = model.get_submodule(owner)
            assert isinstance(layer, Layer), f"{slot.spec.name} belongs to {type(layer).__name__}, not to a Layer"
            flat, shape = self.bucket_parameters[number], slot.spec.shape
            # With a version counter of its own, which autograd compares: gathers write to tensors that forward passes
            # saved.
            setattr(layer, name, nn.Parameter(_view(flat, where, shape).data))
            if bucket.frozen:
                layer.main_gradients.frozen |= {name}
                continue
            layer.main_gradients.tensors[name] = _view(self.bucket_gradients[number], where, shape)
            mains[owner] = layer.main_gradients
        self._main_gradients[number] = list(mains.values())


def _allocate(
    owned_buckets: Ownership, own: Ownership | None, *, dtype: torch.dtype, device: torch.device
) -> tuple[Flat, list[Tensor]]:
    """Allocate the kept tensor, and the tensor of each bucket; `own`: the runs that are kept, None: whole buckets."""
    kept = owned_buckets if own is None else own
    values = torch.zeros(kept.size, dtype=dtype, device=device)
    if own is None:
        return Flat(kept, values), [values[span] for span in kept.spans()]
    return Flat(kept, values), [_without_memory(run.bucket.size, dtype, device) for run in kept.runs]


def gaps(bucket: Bucket) -> Iterator[tuple[int, int]]:
    """Elements [start, stop) of the bucket that belong to no parameter."""
    at = bucket.start
    for slot in bucket.slots:
        if at < slot.start:
            yield at, slot.start
        at = slot.start + slot.spec.numel
    if at < bucket.stop:
        yield at, bucket.stop


def has_memory(flat: Tensor) -> bool:
    """Whether the tensor of a bucket can be read and written."""
    return flat.untyped_storage().nbytes() > 0


def give_memory(flat: Tensor) -> None:
    """Allocate uninitialized memory for the tensor of a bucket without memory."""
    assert not has_memory(flat), "a bucket that is in use"
    flat.untyped_storage().resize_(flat.nbytes)


def take_memory(flat: Tensor) -> None:
    """Free the memory of a bucket's tensor. On a GPU it can be reused by later work on this stream."""
    flat.untyped_storage().resize_(0)


def _view(flat: Tensor, where: slice, shape: tuple[int, ...]) -> Tensor:
    return flat[where].view(shape)


def _without_memory(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    flat = torch.empty(size, dtype=dtype, device=device)
    flat.untyped_storage().resize_(0)
    return flat
