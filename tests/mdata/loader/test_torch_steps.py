"""The IterableDataset of docs/howto/samples.md, as it stands there, in the loaders of torch and torchdata.

torchdata is no dependency: `pip install torchdata`, seen with 0.11.0. What it asks for is checked without it too.
"""

from __future__ import annotations

import json
import re

import pytest

import mdata
from mdata.loader.loader import BatchPlan
from tests.conftest import ROOT
from tests.helpers.corpora import write_pair

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata's own

STEPS, BATCH = 6, 8
PLAN = BatchPlan(BATCH, 2, dp_rank=0, dp_size=2)


@pytest.fixture
def steps(tmp_path):
    """Makes a fresh one."""
    page = (ROOT / "docs/howto/samples.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "IterableDataset" in code]
    names = {"mdata": mdata}
    exec(code, names)
    write_pair(tmp_path / "a", [[9]] * 30)

    def make():
        data = mdata.open_dataset(tmp_path / "a", sequence_length=8, num_samples=STEPS * BATCH + 3)
        return names["Steps"](data, PLAN)

    return make


def content(step) -> list[dict[str, list]]:
    return [{name: value.tolist() for name, value in batch.items()} for batch in step]


def expected(steps) -> list:
    loader = steps().loader
    whole = [[{"tokens": b.tokens.tolist(), "labels": b.labels.tolist()} for b in step] for step in loader]
    assert len(whole) == STEPS  # three samples more are no step
    return whole


def test_saved_and_restored_at_each_step(steps):
    whole, first = expected(steps), steps()
    assert [content(step) for step in torch.utils.data.DataLoader(first, batch_size=None)] == whole
    states = [first.state_dict() | {"consumed_samples": 0}]
    states += [json.loads(json.dumps(first.state_dict())) for _ in first]
    assert [state["consumed_samples"] for state in states] == [BATCH * done for done in range(STEPS + 1)]
    for done, state in enumerate(states):
        again = steps()
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [content(step) for step in torch.utils.data.DataLoader(again, batch_size=None)] == whole[done:]
        assert [content(step) for step in again] == whole  # a second pass is a whole one, as torchdata has it


def test_two_workers_are_refused(steps):
    with pytest.raises(ValueError, match="num_workers 0 or 1"):
        list(torch.utils.data.DataLoader(steps(), batch_size=None, num_workers=2))


@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_stateful_data_loader(steps, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    whole = expected(steps)
    loader = stateful(steps(), batch_size=None, num_workers=workers)
    states = [loader.state_dict() for _ in zip(range(STEPS - 1), loader, strict=False)]
    for done in (1, 2, STEPS - 1):
        again = stateful(steps(), batch_size=None, num_workers=workers)
        again.load_state_dict(states[done - 1])
        assert [content(step) for step in again] == whole[done:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_itself_in_a_stateful_data_loader(steps, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = steps().loader._dataset
    options = {"batch_size": 5, "shuffle": True, "num_workers": workers, "drop_last": False}
    loader = stateful(data, **options)
    seen, states = [], []
    for batch in loader:
        seen.append(batch["tokens"].tolist())
        states.append(loader.state_dict())
    assert sum(map(len, seen)) == len(data)
    again = stateful(data, **options)
    again.load_state_dict(states[3])
    assert [batch["tokens"].tolist() for batch in again] == seen[4:]
