"""A run goes on with the same data, or with a mixture made to continue it: samplers and loaders as mtrain does."""

from __future__ import annotations

import itertools
import json
from itertools import islice

import pytest

import mdata
from mdata import Loader, UsageError
from mdata.blend_planning.change import BlendEdits, change_blend
from mdata.blend_planning.make_blend import save_blend
from mdata.loader.loader import BatchPlan
from mdata.loader.resume_check import continued, resumes
from tests.helpers.corpora import write_pair
from tests.helpers.open_by_keys import open_by_keys

LENGTH, BATCH, CHANGE = 16, 8, 40
PLAN = BatchPlan(BATCH, 2, dp_rank=1, dp_size=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    for name in "abc":
        write_pair(folder / name, [[400 + ord(name)]])
    old = mdata.make_blend(["7", str(folder / "a"), "3", str(folder / "b")], folder / "old.json")
    edits = BlendEdits(add=[("2", str(folder / "c"))])
    new = change_blend(old, CHANGE, folder=folder, sequence_length=LENGTH, edits=edits)
    save_blend(new, folder / "new.json")
    mdata.make_blend(["1", str(folder / "a"), "1", str(folder / "c")], folder / "stranger.json")
    return folder


def opened(folder, name: str, **options) -> mdata.Dataset:
    return open_by_keys(folder / f"{name}.json", **{"sequence_length": LENGTH, **options})


def numbers(steps) -> list:
    return [[batch.samples.tolist() for batch in step] for step in steps]


@pytest.mark.parametrize("steps", [0, 1, CHANGE // BATCH])
def test_a_changed_mixture_goes_on_from_the_state_of_the_one_before(folder, steps):
    old, new = opened(folder, "old"), opened(folder, "new")
    state = json.loads(json.dumps(PLAN.sampler(old, 0).state(steps)))
    resumed = PLAN.sampler(new, 0).restored(state)
    assert resumed.consumed == steps * BATCH and resumed.data_id == new.data_id
    whole = PLAN.sampler(new, 0)
    assert [step.tolist() for step in islice(resumed, 3)] == [step.tolist() for step in islice(whole, steps, steps + 3)]
    loader = Loader(new, PLAN)
    loader.load_state_dict(state)
    assert numbers(islice(loader, 2)) == [step.tolist() for step in islice(whole, steps, steps + 2)]
    assert resumes(new, old.identity, consumed=steps * BATCH)
    assert loader.state_dict()["data_id"] == new.data_id
    # Up to the change both read the same.
    assert (old.read(range(CHANGE)).text == new.read(range(CHANGE)).text).all()


def test_a_mixture_that_changes_what_was_read_is_refused(folder):
    old, new = opened(folder, "old"), opened(folder, "new")
    state = PLAN.sampler(old, 0).state(CHANGE // BATCH + 1)
    words = rf"changes at sample {CHANGE}; the run has read {CHANGE + BATCH} samples\n.*{CHANGE + BATCH} or later"
    for go_on in (
        lambda: PLAN.sampler(new, 0).restored(state),
        lambda: Loader(new, PLAN).load_state_dict(state),
        lambda: resumes(new, old.identity, consumed=CHANGE + BATCH),
    ):
        with pytest.raises(UsageError, match=words):
            go_on()


@pytest.mark.parametrize(
    ("name", "options"),
    [("stranger", {}), ("new", {"seed": 5}), ("new", {"document_masks": True}), ("old", {"sequence_length": 8})],
    ids=str,
)
def test_other_data_is_refused_whatever_it_continues(folder, name, options):
    old, other = opened(folder, "old"), opened(folder, name, **options)
    assert not resumes(other, old.identity, consumed=0)
    with pytest.raises(UsageError, match="state is for a different data_id"):
        PLAN.sampler(other, 0).restored(PLAN.sampler(old, 0).state(1))


def test_a_mixture_does_not_go_back_to_the_one_before(folder):
    old, new = opened(folder, "old"), opened(folder, "new")
    assert continued(old) == [] and continued(new) == [(old.data_id, CHANGE)]
    with pytest.raises(UsageError, match="a different data_id"):
        PLAN.sampler(old, 0).restored(PLAN.sampler(new, 0).state(1))
    for missing in ("data_id", "seed", "consumed_samples"):
        state = {key: value for key, value in PLAN.sampler(new, 0).state(1).items() if key != missing}
        with pytest.raises(UsageError, match=missing):
            PLAN.sampler(new, 0).restored(state)


@pytest.mark.parametrize("blend", ["a.json", "old.json", "sizes"])
def test_megatrons_order_of_another_length_goes_on_exactly_where_its_samples_are_the_same(folder, blend):
    """What is found from the number of epochs is what reading all samples says; 30 samples are about an epoch."""
    given = f"{folder / 'a'} {folder / 'b'}" if blend == "sizes" else folder / blend
    if blend == "a.json":
        given = folder / "a"
    sizes = [1, 20, 27, 29, 30, 31, 45, 53, 58, 70, 90]
    built = {n: open_by_keys(given, sequence_length=LENGTH, order="megatron", num_samples=n) for n in sizes}
    text = {n: dataset.read(range(min(n, dataset.num_samples))).text for n, dataset in built.items()}
    answers = set()
    for before, now in itertools.combinations(sizes, 2):
        both = min(len(text[before]), len(text[now]))
        equal = bool((text[before][:both] == text[now][:both]).all())
        found = resumes(built[now], built[before].identity, consumed=1)
        assert resumes(built[before], built[now].identity, consumed=1) == found
        # One sample may be the same by chance, or the first ones before a place where the orders part.
        assert equal or not found, (before, now)
        answers.add(found)
    assert answers == ({True} if blend == "sizes" else {True, False})
    other = open_by_keys(given, sequence_length=LENGTH, order="megatron", num_samples=20, seed=5)
    assert not resumes(other, built[1].identity, consumed=1)
