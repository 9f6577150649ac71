"""Recorded passes give the bits of passes that are computed, whatever the steps between them are like.

On CPUs a tape (tests/helpers/tape.py) takes the place of a CUDA graph; benchmarks/cuda_graphs.py compares real ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.examples import soaked
from tests.helpers.ranks import run_ranks
from tests.helpers.tape import TapeRecorder
from tests.trainer.engines import SEQUENCE, held_state, layouts, microbatches, small_config, with_documents
from tests.trainer.models import test_bert, test_mamba, test_moe, test_t5
from trainer.config.sections import (
    KernelsSection,
    MeshSection,
    MoESection,
    OptimizerSection,
    PrecisionSection,
    RecomputeSection,
    RunConfig,
)
from trainer.kernels.recording import RecordedFunction
from trainer.models.stage import Microbatch, only_tokens
from trainer.pipeline.graphs import MOST_SHAPES, StageGraphs
from trainer.run.data import DocumentPlaces, in_few_sizes, predicted_tokens

STEPS = 6
Rows = Callable[[Any, int], list[Microbatch]]


def _config(name: str, *, dropout: float = 0.0, dtype: str = "fp32", **mesh: Any) -> RunConfig:
    config = small_config(name, dtype=dtype, kernels=KernelsSection(loss="plain", optimizer="plain"))
    recompute = RecomputeSection(mode=mesh.pop("recompute", "none"))
    precision = PrecisionSection(dtype="bf16", fp8="delayed") if mesh.pop("fp8", False) else config.precision
    average = mesh.pop("loss_average", "token")
    tied = mesh.pop("tied", config.model.tie_embeddings)
    layers = 2 * mesh.get("pp", 1)  # two of a stage, or a chunk of each of its two
    model = replace(config.model, num_layers=layers, hidden_dropout=dropout, tie_embeddings=tied)
    train = replace(config.train, global_batch=8, loss_average=average)
    optimizer = OptimizerSection(lr=1e-2)
    config = replace(config, precision=precision, recompute=recompute, optimizer=optimizer, train=train)
    return replace(config, model=model, mesh=MeshSection(**mesh))


def _trained(context: Any, config: RunConfig, recorded: bool, beside: bool = False, rows: Rows = microbatches) -> Any:
    """Of steps with different numbers of microbatches, an evaluation and documents between them.

    Returns: (losses, sums between ranks that had begun when the passes ended); the state; the number of recordings.
    """
    engine = layouts(context, config)
    recorder = TapeRecorder()
    if recorded:
        shared = engine.plan.sharing > 1
        channel = engine.world.channel.use
        engine.executor.graphs = StageGraphs(recorder, shared=shared, overlap=beside, channel=channel)
        engine._training = replace(engine.plan.pipeline, ahead=int(beside)).lowered
        engine.optimizer._recorder = None if shared else recorder
    losses, pending, reducer = [], list[int](), engine.optimizer.reducer
    finish = reducer.finish

    def finished() -> None:
        pending.append(len(reducer._pending) if engine.plan.sharing > 1 else 0)
        finish()

    reducer.finish = finished
    for step in range(STEPS):
        batches = rows(engine, step)
        if step == 3:
            batches = batches[: len(batches) // 2]
        if step == 4:
            losses.append(engine.evaluate(rows(engine, 99)))
            if config.mesh.pp == config.mesh.tp == 1 and rows is microbatches:
                batches = with_documents(batches)
        losses.append(engine.step(batches, 1e-2).read().loss)
    return (losses, pending), held_state(engine), recorder.recordings


def _padded(engine: Any, step: int) -> list[Microbatch]:
    """Rows of BERT or T5 whose real tokens have several sizes; the same sizes in every second step."""
    is_computed = bool(engine.config.model.attention_dropout)
    if engine.config.data.kind == "t5":
        return test_t5._microbatches(engine, step % 2, multiple=0 if is_computed else 8)
    batches = test_bert._microbatches(engine, step % 2, multiple=0 if is_computed else 4)
    masks = (batch.loss_mask_BS.numpy() for batch in batches)
    predicted = (torch.from_numpy(predicted_tokens(mask, 4)) for mask in masks)
    return [replace(batch, predicted_M=each) for batch, each in zip(batches, predicted, strict=True)]


def _trained_padded(context: Any, config: RunConfig, recorded: bool, most: int) -> Any:
    engine, recorder = layouts(context, config), TapeRecorder()
    if recorded:
        engine.executor.graphs = StageGraphs(recorder, shared=False, most_shapes=most)
    losses = [engine.step(_padded(engine, step), 1e-2).read().loss for step in range(5)]
    shapes = {stage: len(slots.shapes) for stage, slots in engine.executor.graphs._slots.items()} if recorded else {}
    return losses, held_state(engine), recorder.recordings, shapes


PADDED: dict[str, tuple[int, RunConfig]] = {
    "bert, pairs": (1, test_bert._config()),
    "bert, post-norm, full": (1, test_bert._config(norm="post", recompute="full", dropout=0.1)),
    "t5": (1, test_t5._config(micro_batch=2)),
    "t5, one size": (1, test_t5._config(micro_batch=2)),
    "t5, dropout, full": (1, test_t5._config(micro_batch=2, dropout=0.2, recompute={"mode": "full"})),
    "t5, pp 2": (2, test_t5._config(micro_batch=2, pp=2)),
}


@pytest.mark.parametrize("case", soaked(PADDED, but=["bert, pairs", "t5, one size", "t5, pp 2"]))
def test_each_size_of_rows_without_padding_has_recordings(case):
    ranks, config = PADDED[case]
    config = replace(config, kernels=KernelsSection(loss="plain", optimizer="plain"))
    most = 1 if case == "t5, one size" else MOST_SHAPES
    computed, replayed = (run_ranks(_trained_padded, ranks, config, recorded, most) for recorded in (False, True))
    for (losses, state, *_), (others, other_state, recordings, shapes) in zip(computed, replayed, strict=True):
        assert others == losses and len(set(losses)) == len(losses)
        for key, values in state.items():
            assert torch.equal(values, other_state[key]), key
        assert recordings and all(size == 1 if most == 1 else 1 < size <= most for size in shapes.values()), shapes


def _documents(batches: list[Microbatch], step: int, *, few_sizes: bool) -> list[Microbatch]:
    """Rows of other documents in each microbatch, as many as 5 to 12 of them."""
    out = []
    for number, batch in enumerate(batches):
        rows, length = batch.tokens_BS.shape
        generator = np.random.default_rng((step, number))
        inside = generator.permutation(rows * length - 1)[: generator.integers(5, 12)] + 1
        bounds = np.unique([*inside, *range(0, rows * length + 1, length)]).astype(np.int32)
        positions = np.arange(rows * length) - np.repeat(bounds[:-1], np.diff(bounds))
        places = DocumentPlaces(positions.reshape(rows, length), bounds, int(np.diff(bounds).max()))
        places = in_few_sizes(places, length) if few_sizes else places
        tensors = {"positions_BS": torch.from_numpy(places.positions), "bounds": torch.from_numpy(places.bounds)}
        out.append(replace(batch, longest=places.longest, **tensors))
    return out


def _trained_on_documents(context: Any, config: RunConfig, recorded: bool) -> Any:
    engine, recorder = layouts(context, config), TapeRecorder()
    if recorded:
        engine.executor.graphs = StageGraphs(recorder, shared=False)
    losses = []
    for step in range(5):
        losses.append(engine.step(_documents(microbatches(engine, step), step, few_sizes=recorded), 1e-2).read().loss)
    slots = engine.executor.graphs._slots if recorded else {}
    return losses, held_state(engine), sum(len(each.shapes) for each in slots.values())


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.soak)])
def test_documents_of_few_sizes_are_recorded(recompute):
    config = _config("llama", recompute=recompute)
    computed, replayed = (run_ranks(_trained_on_documents, 1, config, recorded) for recorded in (False, True))
    for (losses, state, _), (others, other_state, shapes) in zip(computed, replayed, strict=True):
        assert others == losses and len(set(losses)) == len(losses)
        for key, values in state.items():
            assert torch.equal(values, other_state[key]), key
        assert 1 <= shapes <= 2


def _trained_beside_short_rows(context: Any, recorded: bool) -> Any:
    """Losses of steps, and of short rows between them, whose rotary table is made after recordings."""
    engine, recorder, losses = layouts(context, _config("llama")), TapeRecorder(), []
    if recorded:
        engine.executor.graphs = StageGraphs(recorder, shared=False)
    for step in range(6):
        batches = microbatches(engine, step)
        losses.append(engine.step(batches, 1e-2).read().loss)
        if step > 2:
            length = batches[0].tokens_BS.shape[1] // 2
            cut = ("tokens_BS", "labels_BS", "loss_mask_BS")
            short = [replace(batch, **{name: getattr(batch, name)[:, :length] for name in cut}) for batch in batches]
            losses.append(engine.evaluate(short))
    return losses, recorder.recordings


def test_what_a_computed_pass_leaves_in_the_memory_of_recordings_stays():
    """Recordings that might write there are made anew."""
    ((computed, _),), ((replayed, recordings),) = (
        run_ranks(_trained_beside_short_rows, 1, way) for way in (False, True)
    )
    assert replayed == computed
    assert recordings == 2 * 4  # forward and backward of the first and of later microbatches, twice


def _tables(context: Any) -> list[int]:
    model = layouts(context, _config("llama")).model
    lengths = [SEQUENCE, *range(1, 200), *(1 << k for k in range(8, 15)), SEQUENCE]
    tables = [model._rotations(only_tokens(torch.zeros(1, n, dtype=torch.int64))).full.cosine for n in lengths]
    return [table.data_ptr() for table in tables]


def test_rows_of_other_lengths_free_no_table_that_recordings_read():
    """A replay would read what took its memory."""
    ((first, *others, last),) = run_ranks(_tables, 1)
    assert first == last and len(set(others)) == 15, "one for each power of two"


def test_a_recorded_function_is_not_replayed_with_or_without_another_tensor():
    x = torch.ones(2)
    for recorded_with, given in ((x, None), (None, x)):
        function = RecordedFunction(lambda *given: given, (x, recorded_with), lane=TapeRecorder()())
        with pytest.raises(AssertionError, match="recorded with a tensor"):
            function(x, given)


LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, "llama", {}),
    "one rank, tied, dropout, means": (1, "gpt2", {"tied": True, "dropout": 0.3, "loss_average": "megatron"}),
    "one rank, selective": (1, "llama", {"recompute": "selective"}),
    "one rank, full": (1, "gpt2", {"recompute": "full"}),
    "one rank, fp8": (1, "llama", {"fp8": True}),
    "dp 2": (2, "llama", {}),
    "dp 2, fp8": (2, "llama", {"fp8": True}),
    "tp 2, sequence parallel": (2, "llama", {"tp": 2, "sequence_parallel": True}),
    "one rank, beside": (1, "llama", {"beside": True}),
    "one rank, fp8, full, beside": (1, "llama", {"fp8": True, "recompute": "full", "beside": True}),
    "dp 2, gpt2": (2, "gpt2", {}),
    "dp 2, full": (2, "llama", {"recompute": "full"}),
    "dp 2, zb_h1": (4, "llama", {"pp": 2, "schedule": "zb_h1"}),
    "dp 2, zb_v, tied": (4, "gpt2", {"pp": 2, "schedule": "zb_v", "tied": True}),
    "dp 2, beside": (2, "llama", {"beside": True}),
    "tp 2, beside": (2, "llama", {"tp": 2, "sequence_parallel": True, "beside": True}),
    "1f1b": (2, "gpt2", {"pp": 2}),
    "interleaved": (2, "llama", {"pp": 2, "schedule": "interleaved"}),
    "zb_h1": (2, "llama", {"pp": 2, "schedule": "zb_h1"}),
    "zb_v, tied": (2, "gpt2", {"pp": 2, "schedule": "zb_v", "tied": True}),
}


OFTEN = ["one rank, fp8, full, beside", "dp 2, fp8", "dp 2, zb_h1", "zb_v, tied", "tp 2, sequence parallel"]


@pytest.mark.parametrize("case", soaked(LAYOUTS, but=OFTEN))
def test_recorded_passes_give_the_same_bits(case):
    ranks, name, options = LAYOUTS[case]
    config = _config(name, **{key: value for key, value in options.items() if key != "beside"})
    _check_the_same_bits(ranks, config, beside=options.get("beside", False))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"recompute": {"mode": "selective"}}),
        pytest.param(1, {}, marks=pytest.mark.soak),
        pytest.param(2, {"tp": 2, "sequence_parallel": True}, marks=pytest.mark.soak),
    ],
)
def test_recorded_passes_of_hybrids_give_the_same_bits(ranks, options):
    """Without experts, whose plain products ask the host where an expert ends."""
    config = test_mamba.config_of("M-*M", dtype="fp32", **options)
    train, kernels = replace(config.train, global_batch=8), KernelsSection(loss="plain", optimizer="plain")
    _check_the_same_bits(ranks, replace(config, train=train, kernels=kernels))


@pytest.mark.parametrize("sharding", ["state", pytest.param("none", marks=pytest.mark.soak)])
def test_what_ranks_share_of_experts_alone_is_not_recorded(sharding):
    """tp ranks with whole experts: every token goes to all of them, so that the host is not asked where one ends."""
    moe, mesh = MoESection(num_experts=2, top_k=2, ffn_hidden_size=16), {"tp": 2, "etp": 1, "sequence_parallel": True}
    config = test_moe._config(moe, dtype="fp32", sharding=sharding, **mesh)
    model, train = replace(config.model, num_layers=2), replace(config.train, global_batch=8)
    kernels = KernelsSection(loss="plain", optimizer="plain")
    _check_the_same_bits(2, replace(config, model=model, train=train, kernels=kernels))


@functools.cache
def _computed(ranks: int, config: RunConfig, rows: Rows) -> Any:
    """Several cases are replays of one run."""
    return run_ranks(_trained, ranks, config, False, False, rows)


def _check_the_same_bits(ranks: int, config: RunConfig, *, beside: bool = False, rows: Rows = microbatches) -> None:
    computed = _computed(ranks, config, rows)
    replayed = run_ranks(_trained, ranks, config, True, beside, rows)
    for ((losses, pending), state, none), (others, other_state, recordings) in zip(computed, replayed, strict=True):
        assert others == (losses, pending) and len(set(losses)) == len(losses)
        for key, values in state.items():
            assert torch.equal(values, other_state[key]), key
        assert recordings and not none
