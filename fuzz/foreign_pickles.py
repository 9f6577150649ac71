"""The readers of torch's and Megatron-LM's files: values that can be walked, or an error that names the file.

The first byte chooses: a whole file of torch.save (0), a pickle in a sound archive with one storage (1), or a
`.metadata` beside a .distcp file of zeros (2). What is read is asked for everything that a conversion asks for.
"""

from __future__ import annotations

import io
import zipfile

from fuzz.harness import scratch
from mdata.errors import DamageError, UsageError
from trainer.convert.distcp import METADATA, ChunkSource
from trainer.convert.megatron_args import from_arguments
from trainer.convert.megatron_folder import training_of
from trainer.convert.mp_rank_moments import named_moments
from trainer.convert.torch_file import StoredTensor, load_torch

FLOATS = 6  # in the storage of the sound archive


def check(data: bytes) -> None:
    """One file."""
    kind, text = data[0] % 3 if data[:1] else 0, data[1:]
    path = scratch() / ("x.pt" if kind < 2 else METADATA)
    path.write_bytes(archive(text) if kind == 1 else text)
    try:
        if kind == 2:
            (scratch() / "__0_0.distcp").write_bytes(bytes(4096))
            source = ChunkSource(scratch())
            for name, info in source.tensors.items():
                if all(info.shape) and info.shape:
                    source.read(name, (tuple(0 for _ in info.shape), tuple(1 for _ in info.shape)))
        else:
            use(load_torch(path))
    except (DamageError, UsageError) as error:
        assert str(scratch()) in str(error), error


def use(value: object) -> None:
    """What a conversion does with a file's values."""
    repr(value)
    if not isinstance(value, dict):
        return
    tensors = {str(name): tensor for name, tensor in value.items() if isinstance(tensor, StoredTensor)}
    for tensor in tensors.values():
        size = [min(size, 2) for size in tensor.shape]
        tensor.read((tuple(0 for _ in size), tuple(size)))
    where = scratch() / "x.pt"
    named_moments(value.get("optimizer"), tensors)
    if "args" in value:
        training = training_of(value, where=where)
        from_arguments(training.arguments, {}, where=str(where), settings={})


def archive(pickled: bytes) -> bytes:
    """A file of torch.save with this pickle and one storage."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as written:
        for name, content in (("data.pkl", pickled), ("data/0", bytes(4 * FLOATS))):
            written.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return out.getvalue()
