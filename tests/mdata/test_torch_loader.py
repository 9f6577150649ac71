"""A dataset inside a torch DataLoader: any number of workers, forked or spawned, and restored at every state."""

from __future__ import annotations

import numpy as np
import pytest

import mdata
from tests.helpers.corpora import write_pair

torch_data = pytest.importorskip("torch.utils.data")

SAMPLES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    write_pair(folder / "a", [[9]] * 30)
    write_pair(folder / "b", [[7]] * 50, tokens=np.arange(350) + 1000)
    mdata.make_blend(["1", str(folder / "a"), "2", str(folder / "b")], folder / "mix.json")
    return folder


def opened(folder, order: str) -> mdata.Dataset:
    name = "mix.json" if order == "native" else "a"
    return mdata.open(folder / name, sequence_length=8, order=order, num_samples=SAMPLES, document_masks=True)


def batches(dataset, *, first=0, workers=0, context=None) -> list[dict]:
    chosen = range(first * 4, SAMPLES)
    loader = torch_data.DataLoader(
        dataset, batch_size=4, sampler=chosen, num_workers=workers, multiprocessing_context=context
    )
    return [{name: value.tolist() for name, value in batch.items()} for batch in loader]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize(
    ("order", "context", "workers"), [("native", "fork", 4), ("megatron", "fork", 4), ("megatron", "spawn", 2)]
)
def test_workers_change_nothing(folder, order, context, workers):
    dataset = opened(folder, order)
    alone = batches(dataset)
    assert len(alone) == SAMPLES // 4
    rows = dataset.read(range(4))
    assert alone[0]["tokens"] == rows.tokens.tolist()
    assert alone[0]["labels"] == rows.labels.tolist()
    assert alone[0]["position_ids"] == rows.position_ids.tolist()
    assert batches(dataset, workers=workers, context=context) == alone


@pytest.mark.parametrize("order", ["native", "megatron"])
def test_restored_at_every_state_the_rest_is_the_same(folder, order):
    whole = batches(opened(folder, order))
    for state in range(len(whole) + 1):
        assert batches(opened(folder, order), first=state) == whole[state:]


def test_a_sampler_of_torch_takes_its_length(folder):
    assert len(torch_data.DataLoader(opened(folder, "native"), batch_size=4, shuffle=True)) == SAMPLES // 4
    assert len(opened(folder, "megatron")) >= SAMPLES
