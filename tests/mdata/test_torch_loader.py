"""Datasets inside a torch DataLoader: any number of workers, forked or spawned, and restored at every state."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.corpora import write_pair
from tests.helpers.examples import soaked

torch_data = pytest.importorskip("torch.utils.data")

from tests.helpers.loops import BATCH, KINDS, STEPS, Resumed, loader_of, opened, write_corpora  # noqa: E402 - torch

pytestmark = pytest.mark.slow  # it starts many processes
SAMPLES = BATCH * STEPS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    write_corpora(folder)
    return folder


def batches(loader) -> list[dict]:
    return [{name: value.tolist() for name, value in batch.items()} for batch in loader]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize(
    ("name", "context", "workers"),
    [
        ("native", "fork", 4),
        ("megatron", "fork", 4),
        ("megatron", "spawn", 2),
        ("bert", "fork", 4),
        pytest.param("t5", "spawn", 2, marks=pytest.mark.soak),
    ],
)
def test_workers_change_nothing(folder, name, context, workers):
    dataset = opened(folder, name)
    alone = batches(loader_of(dataset))
    assert len(alone) == STEPS
    numbers = list(Resumed())[:BATCH]
    rows = dataset.read(numbers)
    if "tokens" in alone[0]:
        assert alone[0]["tokens"] == rows.tokens.tolist()
        assert alone[0]["labels"] == rows.labels.tolist()
        assert alone[0]["position_ids"] == rows.position_ids.tolist()
    else:
        assert alone[0] == {field: rows[field].tolist() for field in alone[0]}
    assert batches(loader_of(dataset, workers=workers, multiprocessing_context=context)) == alone


@pytest.mark.parametrize(
    ("name", "workers"),
    [*((name, 0) for name in KINDS), *soaked(((name, 2) for name in KINDS), but=[("native", 2), ("t5", 2)])],
)
def test_restored_at_every_state_the_rest_is_the_same(folder, name, workers):
    """The sampler's state is noted after each batch that was handed out, and given to a new one over a new dataset."""
    sampler = Resumed()
    whole, states = [], [sampler.state(0)]
    for batch in batches(loader_of(opened(folder, name), sampler, workers=workers)):
        whole.append(batch)
        states.append(sampler.state(len(whole)))
    assert len(whole) == STEPS and len({str(batch) for batch in whole}) == STEPS
    for step, state in enumerate(states):
        again = Resumed(state)
        assert len(again) == SAMPLES - step * BATCH
        assert batches(loader_of(opened(folder, name), again, workers=workers)) == whole[step:]


def test_a_sampler_of_torch_takes_its_length(folder):
    assert len(torch_data.DataLoader(opened(folder, "native"), batch_size=4, shuffle=True)) == SAMPLES // 4
    assert len(opened(folder, "megatron")) >= SAMPLES


def test_neither_opening_nor_reading_imports_torch(tmp_path):
    write_pair(tmp_path / "a", [[9]] * 30)
    code = (
        "import sys, pickle, mdata; data = mdata.open_dataset(sys.argv[1], sequence_length=8);"
        "data[3]; data.read([1, 2]);"
        "pickle.loads(pickle.dumps(data))[3];"
        "sys.exit(f'imported: {sorted(sys.modules)}' if 'torch' in sys.modules else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")]).returncode == 0


def test_the_corpora_of_these_tests_differ_from_batch_to_batch(folder):
    for name in KINDS:
        dataset = opened(folder, name)
        rows = [next(iter(dataset[k].values())) for k in range(SAMPLES)]
        assert len({np.asarray(row).tobytes() for row in rows}) > SAMPLES // 2
