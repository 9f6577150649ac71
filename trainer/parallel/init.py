"""Initial values of the parameters: element = f(seed, logical name, flat index in the logical tensor).

Counter-based (Philox4x64-10, Salmon et al. 2011, as numpy implements it), one 64-bit draw per element, converted to a
normal number by the inverse of its distribution function in fp64, or as its `Spread` says. So every layout starts from
the same numbers, and a rank computes only the elements it owns, on all of its own cores. Always computed on the CPU, so
that the device does not matter either. Construction version 1: key = derive_key("mtrain init v1", seed, name); element
i takes 64-bit output i.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mdata.util.random_keys import derive_key
from trainer.parallel.params import ParamSpec, Slice, Spread, rectangles, slices

_BLOCK = 4  # 64-bit outputs of one Philox counter
_CHUNK_ELEMENTS = 1 << 20  # bounds the fp64 scratch of a thread to some tens of MB


class ElementRange(NamedTuple):
    """Elements [first, stop) of a flat local parameter, and the tensor of that length that receives their values."""

    spec: ParamSpec
    first: int
    stop: int
    target: Tensor


def normal(seed: int, name: str, *, first: int, count: int) -> Tensor:
    """Standard normal numbers for elements [first, first + count) of a logical tensor: fp64[count]."""
    return _to_normal(_uniform(seed, name, first, count))


@torch.no_grad()
def initialize_(runs: Iterable[ElementRange], *, seed: int, threads: int = 1) -> None:
    """Fill runs of parameters in place; padding becomes 0.

    Args:
        threads: that draw at the same time; they do not change the numbers.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    pending: deque[tuple[Tensor, Future[Tensor]]] = deque()
    try:
        for target, part, values in _parts(runs):
            pending.append((target, pool.submit(_draw, seed, part, values)))
            if len(pending) > 2 * threads:
                _finish(*pending.popleft())
        while pending:
            _finish(*pending.popleft())
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # a thread that starts later takes the number that was set last


def _finish(target: Tensor, drawn: Future[Tensor]) -> None:
    target.copy_(drawn.result())


def _parts(runs: Iterable[ElementRange]) -> Iterator[tuple[Tensor, Slice, float | Spread]]:
    """Set constants and padding; yield (target, rectangle, std or spread) for the elements to draw."""
    for spec, first, stop, target in runs:
        target.zero_()
        for rectangle in slices(spec, first=first, stop=stop):
            where = target[rectangle.flat - first : rectangle.flat - first + math.prod(rectangle.size)]
            if spec.std == 0.0 and spec.spread is None:
                where.fill_(spec.fill)
                continue
            for low in range(0, len(where), _CHUNK_ELEMENTS):
                high = min(low + _CHUNK_ELEMENTS, len(where))
                for start, size, flat in rectangles(rectangle.size, low, high=high):
                    at = tuple(a + b for a, b in zip(rectangle.start, start, strict=True))
                    part = Slice(name=rectangle.name, shape=rectangle.shape, start=at, size=size, flat=flat)
                    values = spec.spread or spec.std * rectangle.std_factor
                    yield where[flat : flat + math.prod(size)], part, values


def _draw(seed: int, part: Slice, values: float | Spread) -> Tensor:
    """The first values of a rectangle, flat; a number is the standard deviation of normal ones."""
    uniform = np.concatenate([run.reshape(-1) for run in _uniform_rows(seed, part)])
    return _to_normal(uniform) * values if isinstance(values, float) else _to_spread(uniform, values)


def _uniform_rows(seed: int, part: Slice) -> Iterator[np.ndarray]:
    """Uniform numbers of a rectangle: draws whole rows, each one run of the stream, and selects columns.

    With more than two dims, it loops over the leading ones.
    """
    shape, start, size = part.shape, part.start, part.size
    if size[1:] == shape[1:]:
        width = math.prod(shape[1:])
        yield _uniform(seed, part.name, start[0] * width, size[0] * width)
        return
    for outer in np.ndindex(*size[:-2]):
        row = 0
        for begin, extent, offset in zip(start[:-2], shape[:-2], outer, strict=True):
            row = row * extent + begin + offset
        row = row * shape[-2] + start[-2]
        drawn = _uniform(seed, part.name, row * shape[-1], size[-2] * shape[-1]).reshape(size[-2], shape[-1])
        yield drawn[:, start[-1] : start[-1] + size[-1]]


def _uniform(seed: int, name: str, first: int, count: int) -> np.ndarray:
    """Numbers (bits + 0.5) / 2^53 of outputs [first, first + count) of a logical tensor's stream: in (0, 1).

    Neither end is reached, so no value is infinite. numpy's `random` is bits / 2^53, and releases the GIL.
    """
    key = derive_key("mtrain init v1", seed, name)
    generator = np.random.Philox(key=np.array([key.low, key.high], dtype=np.uint64))
    generator.advance(first // _BLOCK)
    skip = first % _BLOCK
    uniform = np.random.Generator(generator).random(skip + count)
    uniform += 2.0**-54
    np.minimum(uniform, 1 - 2.0**-53, out=uniform)  # the last number would round to 1
    return uniform[skip:]


def _to_normal(uniform: np.ndarray) -> Tensor:
    return torch.special.ndtri(torch.from_numpy(uniform))


def _to_spread(uniform: np.ndarray, spread: Spread) -> Tensor:
    values = torch.from_numpy(spread.low + (spread.high - spread.low) * uniform)
    if spread.value == "log":
        return values.log()
    if spread.value == "softplus_inverse":
        values = values.exp().clamp(min=spread.least)
        return values + torch.log(-torch.expm1(-values))
    return values
