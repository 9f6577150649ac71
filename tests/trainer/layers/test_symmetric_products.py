"""Products joined with the communication of sequence parallelism give what collectives before and after them give."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from mdata import UsageError
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import assemble, layouts, microbatches, reduced, small_config
from trainer.config.sections import MeshSection
from trainer.layers.linear import Linear
from trainer.parallel import symmetric_products
from trainer.parallel.collectives import all_gather, all_reduce_
from trainer.parallel.mesh import Mesh
from trainer.parallel.symmetric_products import TOLERANCE, open_symmetric_products

ON_GPUS = os.environ.get("MTRAIN_TEST_DEVICE") == "cuda"


class InParts:
    """The slow twin of `SymmetricProducts`: one product for each rank's tokens.

    Args:
        error: what all results are multiplied by, less 1.
    """

    def __init__(self, group, *, error=0.0):
        self.group, self.error, self.calls = group, error, 0

    def gather_product(self, x_ND, right_DO):
        self.calls += 1
        whole_MD = all_gather(x_ND, self.group)
        parts = [part @ right_DO for part in whole_MD.chunk(self.group.size)]
        return whole_MD, torch.cat(parts) * (1 + self.error)

    def product_reduce(self, x_MD, right_DO):
        self.calls += 1
        parts_RNO = torch.stack([part @ right_DO for part in x_MD.chunk(self.group.size)])
        return all_reduce_(parts_RNO, self.group)[self.group.rank] * (1 + self.error)


def _step(context, name, schedule, joined):
    mesh = MeshSection(tp=2, sequence_parallel=True, pp=context.world // 2, schedule=schedule)
    engine = layouts(context, small_config(name, mesh=mesh))
    products = InParts(engine.tp)
    for layer in engine.model.modules():
        if isinstance(layer, Linear) and joined:
            layer.parallel.products = products
    totals = engine.add_gradients(microbatches(engine, 1), own_means=False, scale=None, num_components=0)
    return totals, reduced(engine), products.calls


@pytest.mark.parametrize(
    ("name", "world", "schedule"), [("llama", 2, "1f1b"), ("gpt2", 2, "1f1b"), ("gpt2", 4, "zb_h1")]
)
def test_a_step_is_that_of_collectives(name, world, schedule):
    """With and without biases, and with weights' gradients put off."""
    plain, joined = (run_ranks(_step, world, name, schedule, how) for how in (False, True))
    expected, found = (assemble([part for _, parts, _ in results for part in parts]) for results in (plain, joined))
    assert expected.keys() == found.keys()
    for key, values in expected.items():
        torch.testing.assert_close(*map(torch.from_numpy, (found[key], values)), rtol=1e-10, atol=1e-12, msg=key)
    assert all(calls == 0 for *_, calls in plain) and all(calls > 0 for *_, calls in joined)
    for (totals, *_), (others, *_) in zip(plain, joined, strict=True):
        torch.testing.assert_close(others, totals, rtol=1e-12, atol=0)


def _open(context, error, fails):
    world = context.join(Mesh(context.world, context.world))
    group = world.groups["tp"]

    def make(group, *, workspace_bytes, device):
        assert workspace_bytes >= 1000
        if context.rank == fails:
            raise RuntimeError("no peer access\nat line 1")
        return InParts(group, error=error * (context.rank == 1))

    real, symmetric_products.SymmetricProducts = symmetric_products.SymmetricProducts, make
    try:
        open_symmetric_products(group, workspace_bytes=1, device=world.device, dtype=torch.float32)
    except UsageError as refused:
        return str(refused)
    finally:
        symmetric_products.SymmetricProducts = real
    return ""


@pytest.mark.parametrize(
    ("error", "fails", "expected"),
    [
        (0.0, None, ""),
        (TOLERANCE / 2, None, ""),
        (2 * TOLERANCE, None, "its self-test failed: 0.02 of the norm"),
        (float("nan"), None, "its self-test failed: nan of the norm"),
        (0.0, 0, "no peer access"),
        (0.0, 1, "no peer access"),
    ],
)
def test_what_one_rank_cannot_use_all_ranks_refuse(error, fails, expected):
    """One rank computes something else, or shares no memory; nobody is left waiting."""
    for text in run_ranks(_open, 2, error, fails):
        assert text == (
            f'kernels.tensor_parallel="symmetric_memory" cannot be used: {expected}; set kernels.tensor_parallel="auto"'
            if expected
            else ""
        )


def _on_a_cpu(context):
    mesh = MeshSection(tp=2, sequence_parallel=True)
    config = small_config("llama", mesh=mesh)
    with pytest.raises(UsageError, match="cannot be used: it runs on GPUs only"):
        layouts(context, replace(config, kernels=replace(config.kernels, tensor_parallel="symmetric_memory")))


@pytest.mark.skipif(ON_GPUS, reason="it is not refused there")
def test_on_a_cpu_it_is_refused():
    run_ranks(_on_a_cpu, 2)


def _gradients(context, dtype, how):
    mesh = MeshSection(tp=2, sequence_parallel=True)
    config = small_config("gpt2", dtype=dtype, mesh=mesh)
    engine = layouts(context, replace(config, kernels=replace(config.kernels, tensor_parallel=how)))
    linears = [layer for layer in engine.model.modules() if isinstance(layer, Linear)]
    assert linears and all((layer.parallel.products is None) == (how == "auto") for layer in linears)
    engine.add_gradients(microbatches(engine, 1), own_means=False, scale=None, num_components=0)
    return reduced(engine)


@pytest.mark.skipif(not ON_GPUS, reason="symmetric memory is that of GPUs")
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_gradients_by_symmetric_memory_are_those_of_collectives(dtype, tolerance):
    results = [run_ranks(_gradients, 2, dtype, how) for how in ("auto", "symmetric_memory")]
    plain, joined = (assemble([part for parts in ranks for part in parts]) for ranks in results)
    for key, values in plain.items():
        right = torch.from_numpy(values).double()
        assert (torch.from_numpy(joined[key]).double() - right).norm() <= tolerance * right.norm(), key
