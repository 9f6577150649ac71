"""First values of the parameters: element = f(seed, logical name, flat index in the logical tensor).

Counter-based (Philox4x64-10, Salmon et al. 2011, as numpy implements it), one 64-bit draw an element, turned into a
normal number by the inverse of its distribution function in fp64. So every layout starts from the same numbers, and
a rank makes only the rows it holds. Always computed on the CPU, so that the device does not matter either.
Construction version 1: key = derive_key("mtrain init v1", seed, name); element i takes 64-bit output i.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from mdata.util.random_keys import derive_key
from trainer.parallel.params import ParamSpec, Piece

_BLOCK = 4  # 64-bit outputs of one Philox counter
_CHUNK_ELEMENTS = 1 << 22  # bounds the fp64 scratch to some tens of MB


def normal(seed: int, name: str, *, first: int, count: int) -> Tensor:
    """Standard normal numbers for elements [first, first + count) of a logical tensor: fp64[count]."""
    return _to_normal(_raw(seed, name, first, count))


@torch.no_grad()
def initialize_(parameter: Tensor, spec: ParamSpec, *, seed: int) -> None:
    """Fill one local parameter in place; rows of padding become 0."""
    parameter.zero_()
    for piece in spec.pieces:
        target = parameter[piece.row : piece.row + piece.size[0]]
        if spec.std == 0.0:
            target.fill_(spec.fill)
            continue
        for first, values in _row_chunks(seed, piece):
            target[first : first + len(values)].copy_(values * spec.std)


def _row_chunks(seed: int, piece: Piece) -> Iterator[tuple[int, Tensor]]:
    """Yield (row within the piece, fp64 values of some of its rows)."""
    whole_width = piece.shape[1] if len(piece.shape) > 1 else 1
    columns = slice(piece.start[1], piece.start[1] + piece.size[1]) if len(piece.shape) > 1 else slice(0, 1)
    step = max(1, _CHUNK_ELEMENTS // whole_width)
    for first in range(0, piece.size[0], step):
        rows = min(step, piece.size[0] - first)
        raw = _raw(seed, piece.name, (piece.start[0] + first) * whole_width, rows * whole_width)
        values = _to_normal(np.ascontiguousarray(raw.reshape(rows, whole_width)[:, columns]))
        yield first, values.view(rows, *piece.size[1:])


def _raw(seed: int, name: str, first: int, count: int) -> np.ndarray:
    """64-bit outputs [first, first + count) of the stream that belongs to a logical tensor."""
    key = derive_key("mtrain init v1", seed, name)
    generator = np.random.Philox(key=np.array([key.low, key.high], dtype=np.uint64))
    generator.advance(first // _BLOCK)
    skip = first % _BLOCK
    return generator.random_raw(skip + count)[skip:]


def _to_normal(raw: np.ndarray) -> Tensor:
    # 53 bits in the open interval (0, 1): neither end is reached, so no value is infinite.
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return torch.special.ndtri(torch.from_numpy(uniform))
