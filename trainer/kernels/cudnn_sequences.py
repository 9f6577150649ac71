"""Attention within sequences by cuDNN: each query attends to keys of its own sequence among flat tokens.

A graph of the package nvidia-cudnn-frontend describes both tensors and sequences; planning it takes longer than running
it, so a plan is kept for each shape, with more room than needed: sequences that there are not have no tokens, and the
longest may be shorter. What is unusual about cuDNN's "ragged" tensors: where a sequence begins is counted in elements
of each tensor, so tensors with other distances between tokens (heads are often views of one projection) have other
offsets. Sequences need not touch. Offsets lie on the device: nothing waits for them.

Not used with deterministic algorithms, while torch.compile traces, and where a trial differs from the plain twin,
plain.scored_attention. `torch.backends.cuda.enable_cudnn_sdp(False)` turns it off.

Shapes: N flat queries, M flat keys, C sequences, H query heads, G key-value heads, K head width.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
import warnings
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.arithmetic import power_of_two, round_up
from trainer.kernels import plain
from trainer.kernels.chunk_attention import CuDnn
from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import CUDNN_HEAD_MULTIPLE, ScoreShape
from trainer.kernels.self_test import refusals

ALIGNMENT = 16  # bytes, of the first head of each token; others give wrong numbers without an error
FEWEST_SEQUENCES, FEWEST_TOKENS = 8, 128  # that a plan has room for
TOLERANCE = 2e-2  # of the trial, in 16 bits


class Places(NamedTuple):
    """Where C sequences lie among flat tokens.

    Args:
        first: int32[C + 1], their first tokens, then the number of all tokens.
        longest: tokens of the longest, or more.
        sizes: int32[C], their tokens; None: each ends where the next begins.
    """

    first: Tensor
    longest: int
    sizes: Tensor | None = None


def in_rows(length: int, *, rows: int, sizes_B: Tensor | None, device: torch.device) -> Places:
    """Sequences at the beginnings of rows; sizes_B: their tokens, None: rows are full."""
    first = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
    return Places(first, length, None if sizes_B is None else sizes_B.int())


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attention` is worth a call, for heads [..., H, K] of queries and [..., G, K] of keys and values."""
    if torch.compiler.is_compiling() or not (q.is_cuda and q.numel() and k.numel()):
        return False
    alike = v.shape == k.shape and q.dtype == k.dtype == v.dtype and q.shape[-1] % CUDNN_HEAD_MULTIPLE == 0
    return alike and CuDnn.fits(q) and works(q.device, q.dtype)


def attention(
    heads: tuple[Tensor, ...], places: tuple[Places, Places], *, causal: bool, scale: float | None = None
) -> Tensor | None:
    """Attention within sequences: [N, H, K]; None where cuDNN has no kernel for it. Call it where `takes` is true.

    A sequence with queries has keys. A query without a sequence, and its gradient, have any values; keys without one
    have the gradient 0.

    Args:
        heads: flat q, k and v. places: of queries and of keys; the same object where they are the same tokens.
        causal: the last query sees the last key.
    """
    heads, (queries, keys) = tuple(_aligned(x) for x in heads), places
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in heads)
    mask = "none" if not causal else "top_left" if queries is keys else "bottom_right"
    case = _Case.of(heads, places, mask=mask, scale=scale, kind="forward" if trained else "inference")
    plan, after = _plan_of(case), _plan_of(case.backward()) if trained else None
    if plan is None or (trained and after is None):
        return None
    lists = plan.lists(queries, keys)
    if not trained:
        return plan.forward(heads, lists)[0]
    y_NHK: Tensor = _Attention.apply(*heads, (plan, after, keys.sizes is None), *lists)
    return y_NHK


def _aligned(x_NHK: Tensor) -> Tensor:
    """The heads, or a copy of them, where those of a token lie side by side and begin at aligned addresses."""
    heads, width = x_NHK.shape[1:]
    dense = x_NHK.stride(2) == 1 and x_NHK.stride(1) == width and x_NHK.stride(0) >= heads * width
    if dense and x_NHK.stride(0) * x_NHK.element_size() % ALIGNMENT == 0 and x_NHK.data_ptr() % ALIGNMENT == 0:
        return x_NHK
    return x_NHK.clone(memory_format=torch.contiguous_format)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, plans: tuple[_Plan, _Plan, bool], *lists: Tensor
    ) -> Tensor:
        plan, *ctx.after = plans
        y_NHK, sums_NH = plan.forward((q_NHK, k_MGK, v_MGK), lists)
        ctx.save_for_backward(q_NHK, k_MGK, v_MGK, y_NHK, sums_NH, *lists)
        return y_NHK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (plan, complete), (dy_NHK,), saved = ctx.after, gradients, ctx.saved_tensors  # which may be read once
        of_heads = plan.backward(dy_NHK, saved[:5], saved[5:], complete=complete)
        return (*of_heads, None, *[None] * len(LISTS))


class _Case(NamedTuple):
    """All that a plan depends on.

    Args:
        distances: elements from a token to the next, of q, k and v. sequences, longest, tokens: what there is room for;
            the last two of queries and of keys.
        mask: "none"; "top_left": the first query sees the first key; "bottom_right": the last sees the last.
        kind: "inference", "forward" with sums for the gradients, or "backward".
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    width: int
    distances: tuple[int, int, int]
    sequences: int
    longest: tuple[int, int]
    tokens: tuple[int, int]
    mask: str
    scale: float
    kind: str

    @classmethod
    def of(
        cls, heads: tuple[Tensor, ...], places: tuple[Places, Places], *, mask: str, scale: float | None, kind: str
    ) -> _Case:
        """Rounded up, so that batches share plans."""
        q, k, v = heads
        longest = tuple(power_of_two(max(FEWEST_TOKENS, each.longest)) for each in places)
        tokens = (0, 0) if kind == "inference" else (_rounded(len(q)), _rounded(len(k)))  # the size of its workspace
        return cls(
            q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], (q.stride(0), k.stride(0), v.stride(0)),
            power_of_two(max(FEWEST_SEQUENCES, len(places[0].first) - 1)), (longest[0], longest[1]), tokens,
            mask, scale or q.shape[2] ** -0.5, kind,
        )  # fmt: skip

    def backward(self) -> _Case:
        """The gradients' case, with queries laid out as the result is: contiguous.

        Its workspace, of sums in fp32 that are set to 0, is as large as the queries' layout; and where cuDNN 9.19
        writes their gradient it counts with the offsets of the queries, whatever that gradient is said to have.
        """
        return self._replace(kind="backward", distances=(self.heads * self.width, *self.distances[1:]))


def _rounded(number: int) -> int:
    """Up to a multiple of an eighth of the power of two."""
    return round_up(number, max(FEWEST_TOKENS, power_of_two(number) // 8))


class _Id(IntEnum):
    """The tensors of a graph; the last eight tell where sequences are, offsets and numbers of tokens."""

    Q, K, V, Y, SUMS, DY, DQ, DK, DV = range(1, 10)
    AT_Q, AT_Y, AT_SUMS, AT_K, AT_V, AT_DK, QUERIES, KEYS = range(10, 18)


LISTS = (_Id.AT_Q, _Id.AT_Y, _Id.AT_SUMS, _Id.AT_K, _Id.AT_V, _Id.AT_DK, _Id.QUERIES, _Id.KEYS)


class _Plan:
    """A planned graph."""

    def __init__(self, case: _Case) -> None:
        self._case, self._lock = case, threading.Lock()  # a backward pass runs in a thread of autograd
        with torch.cuda.device(case.device):
            self._graph, self._uses = _graph(case)
        self._workspace_bytes = max(1, int(self._graph.get_workspace_size()))
        q, k, v = case.distances
        of_y, of_dk = case.heads * case.width, case.groups * case.width
        elements = [[q], [of_y], [case.heads], [k], [v], [of_dk]]
        self._elements_61 = torch.tensor(elements, dtype=torch.int64, device=case.device)

    def lists(self, queries: Places, keys: Places) -> tuple[Tensor, ...]:
        """Offsets in elements, int64, and tokens, int32, of as many sequences as the plan has room for."""
        more = self._case.sequences + 1 - len(queries.first)
        both = (queries,) if queries is keys else (queries, keys)
        # One more offset than there is: an even number, so that each list of them is aligned.
        first = [torch.cat((each.first, each.first[-1:].expand(more + 1))) for each in both]
        sizes = [
            at.diff()[:-1] if each.sizes is None else F.pad(each.sizes, (0, more))
            for at, each in zip(first, both, strict=True)
        ]
        parts = self._elements_61.split(6 // len(both))
        offsets = [row for at, part in zip(first, parts, strict=True) for row in (at * part).unbind()]
        return (*offsets, sizes[0], sizes[-1])

    def forward(self, heads: tuple[Tensor, ...], lists: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """The result, contiguous, and the logarithms of the softmax's sums [N, H] unless for inference."""
        (q, k, v), case = heads, self._case
        y_NHK, sums_NH = q.new_empty(q.shape), None
        tensors = {_Id.Q: q, _Id.K: k, _Id.V: v, _Id.Y: y_NHK}
        if case.kind != "inference":
            tensors[_Id.SUMS] = sums_NH = q.new_empty(q.shape[:2], dtype=torch.float32)
        self._run(tensors, lists)
        return y_NHK, sums_NH

    def backward(
        self, dy_NHK: Tensor, attended: tuple[Tensor, ...], lists: tuple[Tensor, ...], *, complete: bool
    ) -> tuple[Tensor, ...]:
        """The gradients, contiguous; attended: q, k, v, the result and the sums."""
        (q, dy), (k, v, y, sums) = (x.contiguous() for x in (attended[0], dy_NHK)), attended[1:]
        dy = dy if dy.data_ptr() % ALIGNMENT == 0 else dy.clone()
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        if not complete:
            dk.zero_(), dv.zero_()
        tensors = {_Id.Q: q, _Id.K: k, _Id.V: v, _Id.Y: y, _Id.SUMS: sums, _Id.DY: dy}
        self._run(tensors | {_Id.DQ: dq, _Id.DK: dk, _Id.DV: dv}, lists)
        return dq, dk, dv

    def _run(self, tensors: dict[_Id, Tensor], lists: tuple[Tensor, ...]) -> None:
        device, given = self._case.device, tensors | dict(zip(LISTS, lists, strict=True))
        by_number = {int(name): x.detach() for name, x in given.items() if name in self._uses}
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=device)
        with torch.cuda.device(device), self._lock:
            handle = _handle(device, threading.get_ident())
            _library().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
            self._graph.execute(by_number, workspace, handle=handle)


def _graph(case: _Case) -> tuple[Any, set[_Id]]:
    """The graph, planned, and the tensors that it reads and writes."""
    cudnn, room, (queries, keys), width = _library(), case.sequences, case.longest, case.width
    types, at = cudnn.data_type, {}
    graph = cudnn.pygraph(
        io_data_type=types.BFLOAT16 if case.dtype == torch.bfloat16 else types.HALF,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=_handle(case.device, threading.get_ident()),
    )

    def numbers(name: _Id, size: int, dtype: Any) -> Any:
        dim, stride = [size, 1, 1, 1], [1, 1, 1, 1]
        return graph.tensor(name=name.name, uid=int(name), dim=dim, stride=stride, data_type=dtype)

    def offsets(name: _Id) -> Any:
        if name not in at:
            at[name] = numbers(name, room + 1, types.INT64)
        return at[name]

    def of_heads(where: _Id, distance: int) -> dict[str, Any]:
        """Sizes and strides, in cuDNN's order of sequences, heads, tokens, features."""
        is_key = where in (_Id.AT_K, _Id.AT_V, _Id.AT_DK)
        heads, tokens = (case.groups, keys) if is_key else (case.heads, queries)
        dim, stride = [room, heads, tokens, width], [tokens * distance, width, distance, 1]
        return {"dim": dim, "stride": stride, "ragged_offset": offsets(where)}

    def given(name: _Id, where: _Id, distance: int) -> Any:
        return graph.tensor(name=name.name, uid=int(name), **of_heads(where, distance))

    def returned(tensor: Any, name: _Id, *, dim: list[int], stride: list[int], ragged_offset: Any) -> None:
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_ragged_offset(ragged_offset)
        tensor.set_name(name.name).set_uid(int(name))

    at_q = _Id.AT_Y if case.kind == "backward" else _Id.AT_Q
    q, k, v = (
        given(name, where, distance)
        for name, where, distance in zip((_Id.Q, _Id.K, _Id.V), (at_q, _Id.AT_K, _Id.AT_V), case.distances, strict=True)
    )
    options = {
        "attn_scale": case.scale,
        "use_padding_mask": True,
        "seq_len_q": numbers(_Id.QUERIES, room, types.INT32),
        "seq_len_kv": numbers(_Id.KEYS, room, types.INT32),
        "use_causal_mask": case.mask == "top_left",
        "use_causal_mask_bottom_right": case.mask == "bottom_right",
    }
    of_y, of_dk = case.heads * width, case.groups * width
    uses = {_Id.Q, _Id.K, _Id.V, _Id.Y, _Id.QUERIES, _Id.KEYS}
    sums_layout = {"dim": [room, case.heads, queries, 1], "stride": [queries * case.heads, 1, case.heads, 1]}
    if case.kind == "backward":
        y, dy = (given(name, _Id.AT_Y, of_y) for name in (_Id.Y, _Id.DY))
        sums = graph.tensor(
            name="SUMS", uid=int(_Id.SUMS), data_type=types.FLOAT, ragged_offset=offsets(_Id.AT_SUMS), **sums_layout
        )
        limits = {"max_total_seq_len_q": case.tokens[0], "max_total_seq_len_kv": case.tokens[1]}
        dq, dk, dv = graph.sdpa_backward(q=q, k=k, v=v, o=y, dO=dy, stats=sums, **options, **limits)
        returned(dq, _Id.DQ, **of_heads(_Id.AT_Y, of_y))
        returned(dk, _Id.DK, **of_heads(_Id.AT_DK, of_dk))
        returned(dv, _Id.DV, **of_heads(_Id.AT_DK, of_dk))
        uses |= {_Id.SUMS, _Id.DY, _Id.DQ, _Id.DK, _Id.DV}
    else:
        y, sums = graph.sdpa(q=q, k=k, v=v, generate_stats=case.kind == "forward", **options)
        returned(y, _Id.Y, **of_heads(_Id.AT_Y, of_y))
        if case.kind == "forward":
            returned(sums, _Id.SUMS, ragged_offset=offsets(_Id.AT_SUMS), **sums_layout)
            sums.set_data_type(types.FLOAT)
            uses.add(_Id.SUMS)
    graph.validate()
    graph.build_operation_graph()
    graph.deselect_engines(["sdpa_fwd", "sdpa_bwd"])  # the package's own kernels take sequences that touch only
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, uses | set(at)


def _plan_of(case: _Case) -> _Plan | None:
    """A plan; None where cuDNN has none, or where none may be made: while a CUDA graph is recorded."""
    plans = _plans()
    if case not in plans and not torch.cuda.is_current_stream_capturing():
        try:
            plans[case] = _Plan(case)
        except _failures():
            plans[case] = None
    return plans.get(case)


@functools.cache
def _plans() -> dict[_Case, _Plan | None]:
    """The plans of the process, made when they are first needed."""
    return {}


@functools.cache
def _handle(device: torch.device, thread: int) -> Any:
    """Threads may not share one."""
    return _library().create_handle()


@functools.cache
def _library() -> Any:
    import cudnn  # at the first use: it loads many files and need not be installed

    loaded, of_torch = cudnn.backend_version(), torch.backends.cudnn.version()
    if loaded != of_torch:
        raise ImportError(f"nvidia-cudnn-frontend loads cuDNN {loaded} beside PyTorch's {of_torch}")
    return cudnn


def _failures() -> tuple[type[Exception], ...]:
    """Of a graph that cuDNN refuses, or that another version of the package describes in other words."""
    return (*refusals(), ValueError, TypeError, AttributeError, _library().cudnnGraphNotSupportedError)


def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the package is installed, and its attention on this device is that of the plain twin."""
    trials = _trials()
    if (device, dtype) not in trials and not torch.cuda.is_current_stream_capturing():
        trials[device, dtype] = _trial(device, dtype)
    return trials.get((device, dtype), False)


@functools.cache
def _trials() -> dict[tuple[torch.device, torch.dtype], bool]:
    return {}


def _trial(device: torch.device, dtype: torch.dtype) -> bool:
    if importlib.util.find_spec("cudnn") is None:
        return False
    try:
        failures = _failures()
    except (ImportError, OSError, AttributeError) as error:
        reason = f"it does not load: {error}"
    else:
        try:
            error_size = differs_by(device, dtype)
            if error_size <= TOLERANCE:  # not so for NaN
                return True
            reason = f"it differs from the plain kernel's by {error_size:.2g}, and {TOLERANCE:g} is allowed"
        except failures as error:
            reason = f"its trial failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    warnings.warn(f"flash attention instead of cuDNN's within sequences: {reason}", RuntimeWarning, stacklevel=2)
    return False


@torch.inference_mode(False)
@torch.enable_grad()
def differs_by(device: torch.device, dtype: torch.dtype) -> float:
    """The largest ||ours - plain|| / ||plain|| of results and gradients.

    Heads are views of a projection, some grouped; sequences have 0, 1 and more tokens, and rows have padding.
    """
    generator, worst = torch.Generator().manual_seed(1), 0.0
    rows, length, heads, groups = 2, 200, 4, 2
    qkv = torch.randn(rows, length, heads + 2 * groups, 64, generator=generator).to(device, dtype)
    dy = torch.randn(rows, length, heads, 64, generator=generator).to(device, dtype)
    bounds = torch.tensor([0, 70, 70, 71, 200, 329, rows * length], dtype=torch.int32, device=device)
    number = torch.searchsorted(bounds, torch.arange(rows * length, device=device, dtype=torch.int32), right=True)
    length_B = torch.tensor([length, 3], dtype=torch.int32, device=device)
    full, filled = (in_rows(length, rows=rows, sizes_B=sizes_B, device=device) for sizes_B in (None, length_B))
    documents, real = Places(bounds, 150), ScoreTensors(length_B=length_B)
    apart = ScoreTensors(document_BS=number.view(rows, length))
    for causal, queries, keys, tensors in (
        (True, documents, documents, apart),
        (False, documents, documents, apart),
        (False, full, filled, real),
    ):
        ours, twin = qkv.clone().requires_grad_(), qkv.float().requires_grad_()
        flat = tuple(x.flatten(0, 1) for x in ours.split((heads, groups, groups), dim=2))
        y = attention(flat, (queries, keys), causal=causal, scale=0.2)
        if y is None:
            raise RuntimeError("cuDNN has no kernel for it")
        parts, scores = twin.split((heads, groups, groups), dim=2), ScoreShape(scale=0.2, causal=causal)
        expected = plain.scored_attention(parts[0], parts[1], parts[2], scores, tensors)
        results = (y.view(dy.shape).detach(), *torch.autograd.grad(y, ours, dy.flatten(0, 1)))
        right = (expected.detach(), *torch.autograd.grad(expected, twin, dy.float()))
        errors = [
            float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(results, right, strict=True)
        ]
        worst = max(worst, *errors) if all(error == error for error in errors) else math.nan
    return worst
