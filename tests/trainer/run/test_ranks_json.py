"""What ranks.json says of each rank of meshes of 2, 4 and 8, with everything else varied: engines without data."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest

from tests.trainer.run.test_meshes import ROWS, _config, _name, _ranks
from trainer.parallel.mesh import mesh_of
from trainer.parallel.recorded import Record, recorded_world
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine
from trainer.run.metrics import held_parameters

# bytes of a parameter in fp64: (whole on each rank, divided over the ranks that share gradients)
BYTES = {"none": (32, 0), "state": (16, 16), "gradients": (8, 24), "parameters": (0, 32)}


@pytest.mark.parametrize("row", ROWS[::7], ids=_name)
def test_the_ranks_of_a_mesh_hold_the_model(row):
    """The pieces of all stages and tp ranks are the model, each element once; the rest are copies or divided."""
    config, ranks = _config(row), _ranks(row)
    plan, mesh = make_plan(config, ranks, facts=None), mesh_of(config, ranks)
    data = plan.cp * plan.dp
    boxes, same = set(), defaultdict(list)
    for rank in range(ranks):
        world = recorded_world(mesh, rank, record=Record(lambda _, value: [value] * ranks))
        engine = Engine(config, plan, world=world, fresh=False)
        said = held_parameters(engine.optimizer, engine.executor.stages)
        pieces = [(p["name"], *p["start"], *p["size"], len(p["size"])) for q in said["parameters"] for p in q["pieces"]]
        assert sum(math.prod(p["shape"]) for p in said["parameters"]) <= said["buffer_elements"]
        assert said["owned_elements"] * data == said["buffer_elements"]
        assert said["split_parameters"] + said["copied_parameters"] == sum(map(_elements, pieces))
        whole, divided = BYTES[config.optimizer.sharding]
        assert sum(said["kept_bytes"].values()) == said["buffer_elements"] * (whole + divided / data)
        boxes.update(pieces)
        place = mesh.coordinates(rank)
        same[place.tp, place.pp].append((said["stages"], pieces))
    assert sum(map(_elements, boxes)) == plan.num_parameters
    assert all(len(held) == data and held.count(held[0]) == data for held in same.values())


def _elements(piece: tuple[object, ...]) -> int:
    dims = int(piece[-1])  # type: ignore[call-overload]
    return math.prod(piece[-1 - dims : -1])  # type: ignore[arg-type]
