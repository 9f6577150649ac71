"""Steps of Megatron's random sampler compared with the sampler itself, rank by rank, epoch by epoch."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from cli.mdata import main
from mdata import UsageError
from mdata.loader.batch_sizes import constant, ramp_up
from mdata.loader.megatron_sampler import SamplerArgs, random
from mdata.tracing.cyclic_steps import CyclicSteps, shuffled_epoch
from mdata.tracing.run_steps import StepSpan
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples

NUMBERS = st.tuples(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4)).filter(lambda n: n[0] >= n[1] * n[2])


def lists(total: int, micro_batch: int, *, dp_size: int, epochs: int, sharded: bool) -> list[list[list[int]]]:
    """The microbatches of each rank over some epochs, as Megatron's iterator goes round."""
    active = total - total % (micro_batch * dp_size)
    return [
        [
            one
            for epoch in range(epochs)
            for one in random(
                SamplerArgs(
                    total=total, consumed=epoch * active, micro_batch=micro_batch, dp_rank=rank, dp_size=dp_size
                ),
                sharded=sharded,
            )
        ]
        for rank in range(dp_size)
    ]  # fmt: skip


@given(NUMBERS, st.booleans(), st.integers(0, 3))
def test_an_epoch_of_all_ranks_is_that_of_each(numbers, sharded, epoch):
    total, micro, dp_size = numbers
    args = SamplerArgs(total=total, micro_batch=micro, dp_size=dp_size)
    whole = shuffled_epoch(args, epoch, sharded=sharded)
    active = total - total % args.group
    for rank in range(dp_size):
        mine = SamplerArgs(total=total, consumed=epoch * active, micro_batch=micro, dp_rank=rank, dp_size=dp_size)
        assert whole[:, rank].tolist() == list(random(mine, sharded=sharded))


@examples(40)
@given(NUMBERS, st.booleans(), st.integers(1, 4), st.integers(0, 2))
def test_steps_both_ways(numbers, sharded, microbatches, ramp):
    total, micro, dp_size = numbers
    group, epochs = micro * dp_size, 4
    size = group * (microbatches + ramp)
    sizes = ramp_up(group, group, samples=4 * size, size=size) if microbatches + ramp > 1 and ramp else constant(size)
    steps = CyclicSteps(
        StepSpan(sizes=sizes, micro_batch=micro, dp_size=dp_size), num_samples=total, sharded=sharded
    )  # fmt: skip
    ranks = lists(total, micro, dp_size=dp_size, epochs=epochs, sharded=sharded)
    found, consumed, step = [], 0, 1  # (sample, step, row, rank, microbatch)
    while (consumed + sizes.at(consumed)) // group <= len(ranks[0]):
        size = sizes.at(consumed)
        mine = [[ranks[r][consumed // group + m] for m in range(size // group)] for r in range(dp_size)]
        rows = [k for m in range(size // group) for r in range(dp_size) for k in mine[r][m]]
        assert steps.rows(step).tolist() == rows
        for rank in range(dp_size):
            assert steps.rows(step)[steps.rank_rows(step, rank)].tolist() == [k for one in mine[rank] for k in one]
        found += [(k, step, i, i % group // micro, i // group) for i, k in enumerate(rows)]
        assert [steps.sample_at(consumed + i) for i in range(size)] == rows
        consumed, step = consumed + size, step + 1
    for sample in range(total):
        told = [(sample, p.step, p.row, p.dp_rank, p.microbatch) for p in steps.places(sample, step - 1)]
        assert told == [one for one in found if one[0] == sample]


def test_ends_and_what_is_not_dealt():
    span = StepSpan(sizes=constant(8), micro_batch=2, dp_size=2)
    endless = CyclicSteps(span, num_samples=21)
    assert {sum(1 for _ in endless.places(sample)) for sample in range(20)} == {3}
    assert list(endless.places(20)) == []  # of 21 samples 20 are dealt
    ended = CyclicSteps(span, num_samples=21, total=3)
    assert sorted(p.step for sample in range(20) for p in ended.places(sample)) == [1] * 8 + [2] * 8 + [3] * 8
    with pytest.raises(UsageError, match="the run has no step 4"):
        ended.rows(4)
    with pytest.raises(UsageError, match="3 samples are less than a step"):
        CyclicSteps(span, num_samples=3)
    with pytest.raises(UsageError, match="a step of 6 samples cannot be split evenly over the ranks"):
        CyclicSteps(StepSpan(sizes=constant(6), micro_batch=2, dp_size=2), num_samples=21)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    path = tmp_path_factory.mktemp("shuffled") / "x"
    write_pair(path, [[3 + n % 7] for n in range(60)])
    return path


WORDS = ["--sequence-length", "8", "--order", "megatron", "--num-samples", "30", "--dataloader-type", "cyclic",
         "--global-batch", "8", "--micro-batch", "2", "--dp", "2"]  # fmt: skip


def test_documents_and_their_steps(prefix):
    data = mdata.open_dataset(prefix, sequence_length=8, num_samples=30, order=mdata.MegatronOrder())
    span = StepSpan(sizes=constant(8), micro_batch=2, dp_size=2)
    tracer = mdata.Tracer(data, CyclicSteps(span, num_samples=data.num_samples, total=11))
    read: dict[int, list[tuple[int, int]]] = {}
    for step in range(1, 12):
        for row, sample in enumerate(tracer.step(step).tolist()):
            traced = tracer.sample(sample)
            assert (step, row) in [(place.step, place.row) for place in (traced.place, *traced.again)]
            for part in traced.parts:
                read.setdefault(part.document, []).append((step, row))
    for document in range(60):
        told = [(one.place.step, one.place.row) for one in tracer.readers(0, document)]
        assert told == sorted(set(read.get(document, [])))
        few = [one.place.step for one in tracer.readers(0, document, until_step=4)]
        assert few == [step for step, _ in told if step <= 4]


def test_the_trace_command_knows_steps_of_shuffled_epochs(prefix, capsys):
    assert main(["trace", str(prefix), *WORDS, "--step", "5", "--dp-rank", "1", "--json"]) == 0
    head, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (head["samples"], len(rows)) == (4, 4)
    assert {row["rank"] for row in rows} == {1} and {row["step"] for row in rows} == {5}
    assert [row["row"] for row in rows] == [2, 3, 6, 7]
    sample = rows[0]["sample"]
    assert main(["trace", str(prefix), *WORDS, "--sample", str(sample)]) == 0
    assert ", again step " in capsys.readouterr().out.splitlines()[0]
    assert main(["trace", str(prefix), *WORDS, "--token", str(8 * 33), "--json"]) == 0
    traced = json.loads(capsys.readouterr().out)
    data = mdata.open_dataset(prefix, sequence_length=8, num_samples=30, order=mdata.MegatronOrder())
    steps = CyclicSteps(StepSpan(sizes=constant(8), micro_batch=2, dp_size=2), num_samples=data.num_samples)
    assert traced["sample"] == steps.sample_at(33) == int(steps.rows(5)[1])
    assert main(["trace", str(prefix), *WORDS, "--document", "7"]) == 0
    assert "in the first 3 epochs" in capsys.readouterr().out
    assert main(["trace", str(prefix), *WORDS, "--document", "7", "--until-step", "2"]) == 0
    assert "in the first 3 epochs" not in capsys.readouterr().out
    for words, text in (
        (["--sequence-length", "8", *WORDS[6:]], "the native order has no end, and no epochs to shuffle"),
        (WORDS[:-2], "a shuffled epoch needs the number of ranks"),
    ):
        assert main(["trace", str(prefix), *words, "--step", "1"]) == 2
        assert text in capsys.readouterr().err
