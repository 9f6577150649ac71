"""Where samples lie, in words: component, shard and byte, for whoever waits for them.

Nothing is read for it, as the disk may be what is waited for. So a byte is named only where it is arithmetic (native
order of concatenated text; with `shuffle_block` it is near); of other samples the component and the number of the
sample, and of Megatron's blends, whose arrays are files, the numbers alone. `mdata trace` is the exact answer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mdata.dataset.component import Component
from mdata.dataset.dataset import Dataset
from mdata.mixing.megatron_blend import MegatronBlend
from mdata.samples.gpt import GptSamples

_MOST_COMPONENTS = 4


def describe_places(dataset: Dataset, samples: npt.NDArray[np.int64]) -> str:
    """The first sample of each component among these: "web: web_text_document.bin at byte 8192 (3 samples); ..."."""
    if not dataset.components or isinstance(dataset.selection, MegatronBlend):
        return f"samples {', '.join(map(str, samples[:8].tolist()))}{', ...' * (len(samples) > 8)}"
    components, inside = dataset.locate(samples)
    told = []
    for number in np.unique(components).tolist():
        mine = inside[components == number]
        count = f"({len(mine)} sample{'s' * (len(mine) != 1)})"
        told.append(f"{_describe(dataset.components[number], int(mine[0]))} {count}")
    others = len(told) - _MOST_COMPONENTS
    return "; ".join([*told[:_MOST_COMPONENTS], *([f"{others} more components"] if others > 0 else [])])


def _describe(component: Component, sample: int) -> str:
    if not isinstance(component.samples, GptSamples):
        return f"{component.name}: its sample {sample}"
    token, _ = component.samples.token_range(sample)
    path, byte = component.corpus.file_position(token)
    return f"{component.name}: {path} at byte {byte}"
