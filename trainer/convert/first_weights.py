"""`checkpoint.init_from`: the first weights of a new run, from a folder of any format that can be converted.

Each rank reads the rectangles that it owns, as it does from a checkpoint; nothing is converted on the disk. Tensors
have to fit; a model of equal tensors that computes something else (another rope_theta) is told and not refused,
because some runs want just that. Moments, counters and data begin anew.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from mdata import UsageError
from mdata.errors import few
from trainer.config.sections import RunConfig
from trainer.convert.convert import open_model
from trainer.convert.model_folder import expected_tensors
from trainer.convert.model_keys import effective
from trainer.optim.layout import Ownership


def start_notes(config: RunConfig, vocab_size: int) -> tuple[str, ...]:
    """What a user should know of the first weights; nothing where init_from is not set.

    Raises:
        UsageError: they do not fit the model; names the tensors. DamageError: the folder is not whole.
    """
    if not config.checkpoint.init_from:
        return ()
    model = open_model(Path(config.checkpoint.init_from))
    expected = expected_tensors(config, vocab_size)
    found = {name: info.shape for name, info in model.source.tensors.items() if name.startswith("weight/")}
    wrong = [
        f"{name.removeprefix('weight/')} {list(found.get(name, ())) or 'missing'} instead of "
        f"{list(expected.get(name, ())) or 'none'}"
        for name in {**expected, **found}
        if found.get(name) != expected.get(name)
    ]
    if wrong:
        raise UsageError(
            f"checkpoint.init_from = {config.checkpoint.init_from} does not fit [model]",
            found=few(wrong, 4),
            fix="set [model] as the folder's configuration says (mtrain convert writes it), or leave init_from out",
        )
    before, now = effective(model.config), effective(config)
    differ = [
        f"model.{name} {before.get(name)!r} -> {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name != "vocab_size"
    ]
    told = f"the first weights are those of {model.path} ({model.format})"
    return (*model.notes, told, *([f"they were trained with other settings: {', '.join(differ)}"] if differ else []))


def owned_weights(folder: Path, owned: Ownership, *, dtype: torch.dtype) -> Tensor:
    """What a rank of any layout owns of the weights: flat, its runs one after the other, padding 0."""
    source = open_model(folder).source
    out = torch.zeros(owned.size, dtype=dtype)
    for _, part, first in owned.slices():
        found = source.read(f"weight/{part.name}", (part.start, part.size))
        out[first : first + math.prod(part.size)] = found.reshape(-1).to(dtype)
    return out
