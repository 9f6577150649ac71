"""Products of linear layers cut into one part per rank, whose tokens move between GPUs while other parts are computed.

Sequence parallelism gathers tokens before some products and sums the results of others. Here each rank's tokens are
multiplied as soon as they are there, and results are sent while the next part is computed (Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition"). PyTorch's symmetric memory moves them with the GPU's copy
engines, which take no multiprocessors from the products. That needs GPUs that reach each other's memory, as those of
one host with NVLink do. Multicast is never used: not every host allows it.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from mdata import UsageError
from trainer.parallel.collectives import Group, all_gather, gather_objects

TOLERANCE = 1e-2  # of the norm; a few roundings to bf16
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
TOKENS, WIDTH, OUTPUTS = 256, 256, 128  # of the self-test, on each rank


class JoinedProducts(Protocol):
    """Products joined with the communication of a tensor-parallel group.

    Shapes: N tokens of this rank, M of all ranks (in rank order), D inputs, O outputs.
    """

    def gather_product(self, x_ND: Tensor, right_DO: Tensor) -> tuple[Tensor, Tensor]:
        """Every rank's x along dim 0, and its product: [M, D], [M, O]."""

    def product_reduce(self, x_MD: Tensor, right_DO: Tensor) -> Tensor:
        """The sum over the ranks of x right, for this rank's tokens: [N, O]."""


class SymmetricProducts:
    """`JoinedProducts` by symmetric memory.

    Args:
        group: of GPUs that reach each other's memory.
        workspace_bytes: allocated at once, so that it is not replaced while another rank still reads it.

    Raises:
        RuntimeError: the group's devices cannot share memory. All ranks have to call this.
    """

    def __init__(self, group: Group, *, workspace_bytes: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        if device.type != "cuda":
            raise RuntimeError("it runs on GPUs only")
        assert group.group is not None, "a group of one gathers nothing"
        self._name = group.group.group_name
        _symmetric_memory.get_symm_mem_workspace(self._name, min_size=workspace_bytes)

    def gather_product(self, x_ND: Tensor, right_DO: Tensor) -> tuple[Tensor, Tensor]:
        """See `JoinedProducts`."""
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        whole_MD, (y_MO,) = fused(x_ND.contiguous(), [right_DO], 0, self._name, return_A=True)
        return whole_MD, y_MO

    def product_reduce(self, x_MD: Tensor, right_DO: Tensor) -> Tensor:
        """See `JoinedProducts`."""
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x_MD.contiguous(), right_DO, "sum", 0, self._name)


def workspace_bytes(num_tokens: int, width: int, *, group_size: int, dtype: torch.dtype) -> int:
    """Symmetric memory for products of microbatches: two buffers of one rank's tokens.

    Args:
        num_tokens: of a microbatch, on all ranks of the group.
        width: of the features between the layers.
    """
    return 2 * (num_tokens // group_size) * width * dtype.itemsize


def open_symmetric_products(
    group: Group, *, workspace_bytes: int, device: torch.device, dtype: torch.dtype
) -> SymmetricProducts:
    """Symmetric products of a group, compared with plain ones on small matrices; every rank has to call this.

    Raises:
        UsageError: they do not work here, or compute something else; on all ranks of the group alike.
    """
    os.environ.setdefault(NO_MULTICAST, "1")
    enough = max(workspace_bytes, 2 * TOKENS * WIDTH * dtype.itemsize)
    products, fault = None, ""
    try:
        products = SymmetricProducts(group, workspace_bytes=enough, device=device)
    except (RuntimeError, AttributeError, ImportError) as error:
        fault = (str(error).splitlines() or [""])[0]
    # All ranks have to agree before anybody computes: a rank that computes alone would wait in a kernel.
    faults = [item for item in gather_objects(fault, group) if item]
    if products is not None and not faults:
        difference = _largest_difference(products, group, device=device, dtype=dtype)
        differences = gather_objects(difference, group)
        faults = [f"its self-test failed: {item:.2g} of the norm" for item in differences if not item <= TOLERANCE]
    if products is None or faults:
        raise _refused(faults[0])
    return products


def _refused(reason: str) -> UsageError:
    return UsageError(
        f'kernels.tensor_parallel="symmetric_memory" cannot be used: {reason}; set kernels.tensor_parallel="auto"'
    )


def _largest_difference(products: JoinedProducts, group: Group, *, device: torch.device, dtype: torch.dtype) -> float:
    """How far results are from products in fp32 after plain collectives, relative to their norms."""
    generator = torch.Generator().manual_seed(1 + group.rank)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    x_ND, right_DO, tall_MD = draw(TOKENS, WIDTH), draw(OUTPUTS, WIDTH).t(), draw(TOKENS * group.size, WIDTH)
    whole_MD, y_MO = products.gather_product(x_ND, right_DO)
    expected_MD = all_gather(x_ND, group)
    results = [(whole_MD, expected_MD.float()), (y_MO, expected_MD.float() @ right_DO.float())]
    parts_RMO = all_gather((tall_MD.float() @ right_DO.float()).unsqueeze(0), group)
    mine = slice(group.rank * TOKENS, (group.rank + 1) * TOKENS)
    results.append((products.product_reduce(tall_MD, right_DO), parts_RMO.sum(0)[mine]))
    errors = torch.stack([(result.float() - right).norm() / right.norm() for result, right in results])
    return float(errors.max())  # NaN if any is
