"""Open complaints about order, resume and blends in other projects, each tried here as a small script.

Every test is named after its complaint and says where it was made; docs/design/complaints.md is the table of them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mdata
from cli.mdata import main
from mdata import Loader
from mdata.blend_planning.change import BlendEdits, change_blend
from mdata.loader.loader import BatchPlan
from mdata.loader.megatron_sampler import SamplerArgs, random
from mdata.mixing import megatron_blend
from mdata.mixing.native_blend import NativeBlend
from mdata.mixing.shares import integer_weights
from tests.helpers.corpora import write_pair
from tests.helpers.open_by_keys import open_by_keys

S = 8


@pytest.fixture
def folder(tmp_path) -> Path:
    """a, b, c: 100, 62 and 37 samples an epoch."""
    for name, count in (("a", 162), ("b", 101), ("c", 61)):
        write_pair(tmp_path / name, [[5]] * count)
    return tmp_path


def numbers(data: mdata.Dataset, *, consumed: int, steps: int, ranks: int = 1, batch: int = 12) -> list[list[int]]:
    """What all ranks together read in some steps, by loaders that start there."""
    loaders = [
        iter(Loader(data, BatchPlan(batch, 1, dp_rank=r, dp_size=ranks), consumed=consumed)) for r in range(ranks)
    ]
    found = []
    for _ in range(steps):
        of_ranks = [next(loader) for loader in loaders]
        found.append([n for parts in zip(*of_ranks, strict=True) for part in parts for n in part.samples.tolist()])
    for loader in loaders:
        loader.close()
    return found


def places(data: mdata.Dataset, count: int) -> list[tuple[str, int]]:
    """(corpus, sample inside it) of the first samples."""
    components, inside = data.locate(np.arange(count))
    return [(data.components[c].name, i) for c, i in zip(components.tolist(), inside.tolist(), strict=True)]


def test_the_loader_restarts_on_the_second_resume(folder):
    """pytorch/torchtitan#3907, #3908: after a second resume the stream begins anew, its saved place being stale."""
    data = mdata.open_dataset(folder / "a", sequence_length=S)
    plan = BatchPlan(12, 1)
    whole = numbers(data, consumed=0, steps=12)
    state, found = plan.sampler(data, 0).state(), []
    for _ in range(4):  # each run goes on from what the run before saved, three steps at a time
        again = mdata.open_dataset(folder / "a", sequence_length=S)
        resumed = plan.sampler(again, 0).restored(json.loads(json.dumps(state)))
        found += numbers(data, consumed=resumed.consumed, steps=3)
        state = resumed.state(3)
    assert found == whole


def test_another_data_parallel_degree_is_refused_on_resume(folder):
    """pytorch/torchtitan#816, NVIDIA-NeMo/Megatron-Bridge#5637: it loses the places of the ranks that are gone."""
    data = mdata.open_dataset(folder / "a", sequence_length=S)
    whole = numbers(data, consumed=0, steps=8, ranks=4)
    assert whole == numbers(data, consumed=0, steps=8)
    for ranks in (1, 2, 3, 6, 12):
        assert numbers(data, consumed=36, steps=5, ranks=ranks) == whole[3:]


def test_past_the_first_epoch_a_resumed_run_reads_the_first_epoch_again(folder):
    """huggingface/accelerate#2016, #3242: a run interrupted in its second epoch resumes in the order of the first."""
    data = mdata.open_dataset(folder / "a", sequence_length=S)
    size = data.components[0].samples.samples_per_epoch
    assert size == 100
    starts = [data.components[0].samples.token_range(k)[0] // S for k in range(3 * size)]
    epochs = [starts[i * size : (i + 1) * size] for i in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert all(len(set(epoch)) == size for epoch in epochs)
    whole = numbers(data, consumed=0, steps=25)
    for step in (9, 12, 20):  # in the second and third epoch
        reopened = mdata.open_dataset(folder / "a", sequence_length=S)
        assert numbers(reopened, consumed=12 * step, steps=5) == whole[step:][:5]
        row = data.read(whole[step])
        again = reopened.read(whole[step])
        assert (row.text == again.text).all()


def test_changing_the_length_of_training_reorders_all_data(folder):
    """EleutherAI/gpt-neox#984: more train-iters are more epochs, and all of them are shuffled together."""

    def first(order: str, length: int) -> tuple[str, bytes]:
        data = open_by_keys(
            folder / "a", sequence_length=S, order=order, num_samples=length, cache=str(folder / "cache")
        )
        return data.data_id, data.read(np.arange(100)).text.tobytes()

    assert first("native", 100) == first("native", 10_000)
    ours, theirs = first("megatron", 100), first("megatron", 10_000)
    assert ours[1] != theirs[1]  # the complaint is true of that order
    assert ours[0] != theirs[0]  # so the length is part of its identity, and a resume is refused


def test_nobody_says_what_another_sequence_length_does_to_the_order(folder):
    """NVIDIA/Megatron-LM#1002, unanswered: here a run's state and checkpoint refuse it, and name both numbers."""
    short = mdata.open_dataset(folder / "a", sequence_length=S)
    longer = mdata.open_dataset(folder / "a", sequence_length=2 * S)
    changed = [name for name in short.identity if short.identity[name] != longer.identity[name]]
    assert changed == ["sequence_length"]
    state = BatchPlan(12, 1).sampler(short, 0).state(3)
    with pytest.raises(mdata.UsageError, match="a different data_id"):
        BatchPlan(12, 1).sampler(longer, 0).restored(state)


def test_ranks_disagree_at_the_tail_of_an_epoch(folder):
    """modelscope/ms-swift#10141, NVIDIA/Megatron-LM#7299: 2, 1 and 1 batches of 10 samples on 3 ranks."""
    write_pair(folder / "tail", [[81]])
    data = mdata.open_dataset(folder / "tail", sequence_length=S, split="whole", num_samples=10)
    assert len(data) == 10
    counts = {len(list(Loader(data, BatchPlan(6, 2, dp_rank=r, dp_size=3)))) for r in range(3)}
    assert counts == {1}
    for sharded in (True, False):
        lists = [
            list(random(SamplerArgs(total=10, micro_batch=2, dp_rank=r, dp_size=3), sharded=sharded)) for r in range(3)
        ]
        assert [len(found) for found in lists] == [1, 1, 1]
        assert len({number for found in lists for number in found[0]}) == 6


def test_another_mixture_in_mid_run_loses_samples_of_one_corpus_and_repeats_those_of_another(folder):
    """NVIDIA/Megatron-LM#457 (2023), #725: weights 1:1, after N samples 2:1, with one counter for both blends."""
    at, end = 90, 150
    old = mdata.make_blend(["1", str(folder / "a"), "1", str(folder / "b")], folder / "old.json")
    naive = mdata.make_blend(["2", str(folder / "a"), "1", str(folder / "b")], folder / "naive.json")
    edits = BlendEdits(shares={"a": "2"})
    new = change_blend(old, at, folder=folder, sequence_length=S, edits=edits)
    options = mdata.DatasetOptions(sequence_length=S)
    before = places(mdata.Dataset(old, options), at)
    careless = before + places(mdata.Dataset(naive, options), end)[at:]
    careful = places(mdata.Dataset(new, options), end)
    assert careful[:at] == before

    def read(stream: list[tuple[str, int]], name: str) -> list[int]:
        return [inside for corpus, inside in stream if corpus == name]

    lost = set(range(max(read(careless, "a")))) - set(read(careless, "a"))
    assert (len(lost), len(read(careless, "b")) - len(set(read(careless, "b")))) == (15, 15)  # the complaint is true
    assert read(careful, "a") == list(range(45 + 40))
    assert read(careful, "b") == list(range(45 + 20))  # its share changed with the other's, its order did not


def test_a_weight_over_1_is_refused_or_means_nothing(folder):
    """microsoft/ltp-megatron-lm#15, NVIDIA/Megatron-LM#547: "support weight > 1 (oversampling)"."""
    words = [str(folder / "a"), str(folder / "b")]
    over = mdata.make_blend(["2.5", words[0], "0.5", words[1]], folder / "over.json")
    same = mdata.make_blend(["5", words[0], "1", words[1]], folder / "same.json")
    options = mdata.DatasetOptions(sequence_length=S)
    assert places(mdata.Dataset(over, options), 600) == places(mdata.Dataset(same, options), 600)
    # Oversampling itself has a unit of its own: so many passes, and then the blend ends.
    entries = [{"path": words[0], "epochs": "2.5"}, {"path": words[1], "epochs": 1}]
    data = mdata.Dataset(mdata.make_blend({"component": entries}, folder / "epochs.json"), options)
    assert data.num_samples == 250 + 62
    read = places(data, data.num_samples)
    assert sorted(inside for name, inside in read if name == "a") == list(range(250))


def shares_of_small_sources() -> tuple[list[float], NativeBlend]:
    exact = [f"1/{i * i}" for i in range(1, 201)]
    total = math.fsum(1 / i**2 for i in range(1, 201))
    return [1 / i**2 / total for i in range(1, 201)], NativeBlend(integer_weights(exact, [str(i) for i in range(200)]))


def test_small_sources_get_nothing_and_nobody_is_told(folder, capsys):
    """marin-community/marin#4132, #8373 (8 sources whose share of each block rounds to 0 never appear), and Megatron's.

    200 sources with weights 1/i^2: 1,000 samples owe 166 of them less than half a sample, so that no rule draws all.
    """
    shares, native = shares_of_small_sources()
    for count, by_megatron, by_us in ((1_000, 157, 153), (20_000, 38, 43)):
        owed = np.array(shares) * count
        theirs = np.bincount(megatron_blend.weighted(shares, count).components, minlength=200)
        ours = np.array(native.counts(count))
        assert ((theirs == 0).sum(), (ours == 0).sum()) == (by_megatron, by_us)
        assert (ours[owed >= 1] > 0).all() and np.abs(ours - owed).max() < 1.68
    # Nothing rounds to never: each comes before it is owed 1.68 samples, and the place of its first one is known.
    first = native.inverse(np.arange(200), np.zeros(200, np.int64))
    assert (first * np.array(shares) < 1.68).all()
    tiny = NativeBlend(integer_weights(["1", "0.00000000959"], ["web", "c22q0"]))
    assert int(tiny.inverse([1], [0])[0]) * 9.59e-9 < 1.68
    # And it is told before anything is built.
    words = ["1000000", str(folder / "a"), "1", str(folder / "b")]
    assert main(["blend", *words, "--dry-run", "--json", "--samples", "1000", "--sequence-length", "8"]) == 0
    rows = json.loads(capsys.readouterr().out)["components"]
    assert [(row["name"], row["samples"]) for row in rows] == [("a", 1000), ("b", 0)]


def test_how_many_epochs_is_this(folder, capsys):
    """NVIDIA/Megatron-LM#3012, #1127, bigcode-project/Megatron-LM#25: epochs of each source, before and after."""
    words = ["0.7", str(folder / "a"), "0.2", str(folder / "b"), "0.1", str(folder / "c"), "-o", str(folder / "m.json")]
    assert main(["blend", *words, "--json", "--samples", "500", "--sequence-length", "8"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["components"]}
    data = mdata.open_dataset(folder / "m.json", sequence_length=S)
    read = places(data, 500)
    for component in data.components:
        mine = [inside for name, inside in read if name == component.name]
        assert mine == list(range(rows[component.name]["samples"]))
        assert rows[component.name]["epochs"] == pytest.approx(len(mine) / component.samples.samples_per_epoch)


MANY = """
import json, os, sys, threading
import numpy as np, mdata
def held():
    maps = sum(sys.argv[2] in line for line in open("/proc/self/maps"))
    return len(os.listdir("/proc/self/fd")), maps, len(os.listdir("/proc/self/task"))
mdata.DatasetOptions(sequence_length=8)
import mdata.dataset.dataset, mdata.loader.loader
before = held()
data = mdata.open_dataset(sys.argv[1], sequence_length=8)
steps = iter(mdata.Loader(data, mdata.loader.loader.BatchPlan(500, 50)))
seen = {int(c) for _ in range(20) for batch in next(steps) for c in data.locate(batch.samples)[0]}
print(json.dumps([before, held(), len(seen)]))
steps.close()
"""


@pytest.mark.parametrize("count", [10, 200, pytest.param(1000, marks=pytest.mark.soak)])
def test_hundreds_of_sources_need_hundreds_of_maps_and_thread_pools(tmp_path, count):
    """NVIDIA-NeMo/Megatron-Bridge#3968 (EPERM at 590 sets), AI-Hypercomputer/maxtext#5037 (17,920 thread pools)."""
    words: list[str] = []
    for i in range(count):
        write_pair(tmp_path / f"c{i}", [[20 + i]] * 3)
        words += [str(1 + i % 7), str(tmp_path / f"c{i}")]
    mdata.make_blend(words, tmp_path / "mix.json")
    script = [sys.executable, "-c", MANY, str(tmp_path / "mix.json"), str(tmp_path)]
    done = subprocess.run(
        script, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    before, after, seen = json.loads(done.stdout)
    descriptors, maps, threads = (now - then for now, then in zip(after, before, strict=True))
    assert seen == count
    assert threads == 1  # the one that reads ahead, for any number of sources
    # A bare pair costs a map of its .bin, and one of its .idx; neither holds a descriptor.
    assert maps <= 2 * count
    assert descriptors < 4
