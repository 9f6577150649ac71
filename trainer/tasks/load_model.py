"""The weights of a checkpoint as a model, without an optimizer.

For what only runs a model forward, such as generate.py. A run that goes on from a checkpoint uses Engine.load,
which reads the state of the optimizer, too.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.checkpoint.load import load_state
from trainer.checkpoint.location import Location
from trainer.config.sections import RunConfig
from trainer.convert.convert import DTYPES
from trainer.errors import out_of_memory_in
from trainer.models.family import family_of
from trainer.optim.layout import make_layout
from trainer.optim.model_buffers import STATE, ModelBuffers
from trainer.optim.ownership import everything
from trainer.parallel.params import Place
from trainer.parallel.world import World
from trainer.plan.plan import Plan


@out_of_memory_in("setting up the model", fix="more ranks: each holds a part of the model")
def load_model(folder: Location, config: RunConfig, *, plan: Plan, world: World) -> Any:
    """This rank's stage with its weights alone: no optimizer, no sequence parallelism, from a checkpoint of any layout.

    Args:
        plan: with one stage for each pipeline rank.
    """
    family, tp = family_of(config), world.groups["tp"]
    (place,) = plan.pipeline.places(world.groups["pp"].rank, Place(tp_rank=tp.rank, tp_size=tp.size))
    layout = make_layout(family.parameters(plan.shape, place), {"data": 1, "edp": 1})
    dtype = (DTYPES | {"fp64": torch.float64})[config.precision.dtype]
    main = torch.promote_types(dtype, torch.float32)
    weights = load_state(folder, {"weight": everything(layout)}, dtype=main)["weight"]
    model = family.build(plan.shape, place, groups={"tp": tp}, dtype=dtype, device=world.device)
    named = dict(model.named_parameters())
    for slot in layout.slots:
        flat = weights[slot.start : slot.start + slot.spec.numel]
        named[slot.spec.name].data.copy_(flat.view(slot.spec.shape))
    if specs := family.buffers(plan.shape, place):
        buffers = ModelBuffers(model, specs, device=world.device)
        buffers.values.copy_(load_state(folder, {STATE: buffers.holds}, dtype=torch.float32)[STATE])
    return model.eval()
