"""The tensors of one of our checkpoints in object storage, any rectangle of them.

Slices are read whole, several parts at a time, and compared with their hashes before anything is returned. Nothing is
kept: a slice that is needed again is read again. Checkpoints on a disk are read by native.py, which maps files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.checkpoint.folder import read_index
from trainer.checkpoint.format import RunState, SavedSlice, SavedTensor
from trainer.checkpoint.load import SliceCopy, SliceReader, overlaps, read_extras
from trainer.checkpoint.location import ObjectFolder
from trainer.checkpoint.tiling import Rectangle
from trainer.convert.links import TensorInfo
from trainer.convert.safetensors_stream import TYPES


class ObjectSource:
    """See `Source`.

    Args:
        folder: such as s3://bucket/run/step-400.

    Raises:
        UsageError: there is no such checkpoint. DamageError: it is not whole.
    """

    def __init__(self, folder: ObjectFolder) -> None:
        self._index = read_index(folder)
        self._reader = SliceReader(folder, self._index)
        self.tensors = {
            name: TensorInfo(saved.shape, self._dtype(saved) or torch.int8)
            for name, saved in self._index.tensors.items()
        }

    @property
    def run(self) -> RunState:
        """Where the run was."""
        return self._index.run

    def extras(self) -> dict[str, bytes]:
        """The small files beside the tensors, by name: those of the tokenizer."""
        return read_extras(self._reader.folder, self._index)

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        out = torch.empty(box[1], dtype=self.tensors[name].dtype)
        wanted: dict[str, dict[SavedSlice, list[SliceCopy]]] = {}
        for piece, part in overlaps(box, self._index.tensors[name].slices):
            wanted.setdefault(piece.file, {})[piece] = [SliceCopy(part, out, box[0])]
        for file, copies in wanted.items():
            self._reader.read(file, copies)
        return out

    def _dtype(self, saved: SavedTensor) -> torch.dtype | None:
        return TYPES.get(saved.dtype) if saved.dtype else self._reader.dtype(saved.slices[0])
