"""cuDNN's attention within sequences against all scores in plain fp32, with heads as a run's layers make them."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from trainer.arithmetic import power_of_two
from trainer.kernels import cudnn_sequences, gpu, plain
from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import ScoreShape
from trainer.layers.attention import Documents

missing = "no GPU" if not torch.cuda.is_available() else ""
if not missing and importlib.util.find_spec("cudnn") is None:
    missing = "nvidia-cudnn-frontend is not installed"
on_gpu = pytest.mark.skipif(bool(missing), reason=missing)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
MARGIN = 4096  # elements of NaN before and behind what a kernel may read and write


def _poisoned(x):
    """A copy in the middle of NaN."""
    memory = torch.full((x.numel() + 2 * MARGIN,), math.nan, dtype=x.dtype, device=x.device)
    inside = memory[MARGIN : MARGIN + x.numel()].view(x.shape)
    inside.copy_(x)
    return memory, inside


def _draw(*size, seed=0, dtype=torch.bfloat16):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def _projection(rows, length, heads, groups, width, *, seed=0, dtype=torch.bfloat16):
    """What one projection gives for q, k and v: [B, S, H + 2 G, K]."""
    return _draw(rows * length, (heads + 2 * groups) * width, seed=seed, dtype=dtype).view(rows, length, -1, width)


def _documents(ends):
    bounds = [0, *ends]
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    return Documents(torch.tensor(bounds, dtype=torch.int32, device="cuda"), longest)


def _error(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def _close(got, expected, dtype=torch.bfloat16, what=""):
    assert got.shape == expected.shape
    error = _error(got, expected)
    assert error <= TOLERANCE[dtype], f"{what}: off by {error:.3g}, {int(got.isnan().sum())} NaN of {got.numel()}"


def _compare(qkv, sizes, attend, twin, *, dy=None, layout="views"):
    """The result and the gradient of the projection, beside those of the twin in fp32."""
    ours, right = qkv.clone().requires_grad_(), qkv.float().requires_grad_()
    heads = [x if layout == "views" else x.contiguous() for x in ours.split(sizes, dim=2)]
    y, expected = attend(*heads), twin(*right.split(sizes, dim=2))
    _close(y, expected, qkv.dtype, "the result")
    dy = _draw(*y.shape, seed=9, dtype=qkv.dtype) if dy is None else dy
    y.backward(dy), expected.backward(dy.float())
    for name, mine, other in zip("qkv", ours.grad.split(sizes, 2), right.grad.split(sizes, 2), strict=True):
        _close(mine, other, qkv.dtype, f"the gradient of {name}")
    return y.detach(), ours.grad


class _Graph:
    """A graph of cuDNN's, computed by reading and writing memory where its sizes, strides and offsets say."""

    def __init__(self, **_):
        self.tensors, self.options = {}, {}

    def tensor(self, *, uid, **layout):
        self.tensors[uid] = layout
        return uid

    def _returned(self, number):
        return [_Returned(self) for _ in range(number)]

    def sdpa(self, **options):
        self.options = options
        return self._returned(2)

    def sdpa_backward(self, **options):
        self.options = options
        return self._returned(3)

    def get_workspace_size(self):
        return 0

    def _sequences(self, given, uid):
        """The tokens of each sequence of a tensor: views [heads, tokens, features]."""
        layout, x = self.tensors[uid], given[uid]
        (_, heads, room, width), (_, of_head, of_token, _) = layout["dim"], layout["stride"]
        is_key = uid in (2, 3, 8, 9)
        sizes, offsets = given[17 if is_key else 16].tolist(), given[layout["ragged_offset"]].tolist()
        assert len(offsets) > len(sizes) and max(sizes) <= room
        return [
            x.as_strided((heads, size, width), (of_head, of_token, 1), x.storage_offset() + at)
            for at, size in zip(offsets, sizes, strict=False)
        ]

    @torch.enable_grad()
    def execute(self, given, workspace, handle):
        options, backward = self.options, "stats" in self.options
        assert len(given) == len(self.tensors)
        names = (1, 2, 3, 4, 5, 6, 7, 8, 9) if backward else (1, 2, 3, 4, *([5] if 5 in self.tensors else []))
        for parts in zip(*(self._sequences(given, uid) for uid in names), strict=True):
            q, k, v = (x.detach().double().requires_grad_() for x in parts[:3])
            if not q.shape[1]:
                continue
            wide = [x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v)]
            scores = q @ wide[0].transpose(1, 2) * options["attn_scale"]
            shift = k.shape[1] - q.shape[1] if options["use_causal_mask_bottom_right"] else 0
            if options["use_causal_mask_bottom_right"] or options["use_causal_mask"]:
                scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + shift), -math.inf)
            y = scores.softmax(-1) @ wide[1]
            if backward:
                layouts = [self.tensors[uid] for uid in (1, 7)]  # cuDNN 9.19 writes dq with the offsets of q
                assert layouts[0]["ragged_offset"] == layouts[1]["ragged_offset"]
                torch.testing.assert_close(parts[3], y.detach().to(parts[3].dtype), rtol=0.02, atol=0.02)
                gradients = torch.autograd.grad(y, (q, k, v), parts[5].double())
                for out, gradient in zip(parts[6:], gradients, strict=True):
                    out.copy_(gradient)
            else:
                parts[3].copy_(y.detach())
                parts[4:] and parts[4].copy_(scores.detach().logsumexp(-1, keepdim=True))


class _Returned:
    """A tensor that a graph returns."""

    def __init__(self, graph):
        self._graph, self._layout = graph, {}

    def __getattr__(self, name):
        def keep(value):
            self._layout[name.removeprefix("set_")] = value
            if name == "set_uid":
                self._graph.tensors[value] = self._layout
            return self

        return keep


@pytest.fixture
def imitated(monkeypatch):
    """The package, imitated on a CPU."""
    types = SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32", INT32="int32", INT64="int64")
    for name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
        monkeypatch.setattr(_Graph, name, lambda *_: None, raising=False)
    monkeypatch.setattr(_Graph, "deselect_engines", lambda *_: None, raising=False)
    library = SimpleNamespace(
        pygraph=_Graph, data_type=types, heur_mode=SimpleNamespace(A="A"), set_stream=lambda **_: None,
        cudnnGraphNotSupportedError=NotImplementedError,
    )  # fmt: skip
    monkeypatch.setattr(cudnn_sequences, "_library", lambda: library)
    monkeypatch.setattr(cudnn_sequences, "refusals", lambda: ())
    monkeypatch.setattr(cudnn_sequences, "_handle", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    plans = {}
    monkeypatch.setattr(cudnn_sequences, "_plans", lambda: plans)
    return plans


def test_offsets_count_elements_of_each_tensor(imitated):
    """Views of one projection, grouped heads, documents without tokens and rows with padding, both passes."""
    assert cudnn_sequences.differs_by(torch.device("cpu"), torch.bfloat16) < TOLERANCE[torch.bfloat16]
    assert {case.kind for case in imitated} == {"forward", "backward"}
    distances = {(case.kind, case.distances) for case in imitated}
    assert distances == {("forward", (8 * 64,) * 3), ("backward", (4 * 64, 8 * 64, 8 * 64))}


def test_prompts_of_which_a_part_is_new(imitated):
    bounds = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 8], [0, 7, 12])]
    q, k, v = (torch.randn(n, h, 16, dtype=torch.bfloat16) for n, h in ((8, 4), (12, 2), (12, 2)))
    queries, keys = (cudnn_sequences.Places(x, 7) for x in bounds)
    got = cudnn_sequences.attention((q, k, v), (queries, keys), causal=True)
    for (a, b), (c, d) in zip(*(itertools.pairwise(x.tolist()) for x in bounds), strict=True):
        tensors = ScoreTensors(column_S=torch.arange(d - c - (b - a), d - c))
        expected = plain.scored_attention(*(x[None].float() for x in (q[a:b], k[c:d], v[c:d])), ScoreShape(), tensors)
        _close(got[a:b], expected[0])
    assert [case.kind for case in imitated] == ["inference"]


def test_heads_that_cudnn_would_misread_are_copied(imitated):
    made = torch.randn(2, 40, 4, 16, dtype=torch.bfloat16)
    places = (cudnn_sequences.Places(torch.tensor([0, 30, 40], dtype=torch.int32), 30),) * 2
    expected = cudnn_sequences.attention((made[0], made[1], made[1]), places, causal=False)
    apart = torch.zeros(40, 5, 19, dtype=torch.bfloat16)[:, :4, 3:]
    apart.copy_(made[0])
    behind = torch.zeros(40 * 64 + 1, dtype=torch.bfloat16)[1:].view(40, 4, 16)
    behind.copy_(made[0])
    across = made[0].transpose(0, 1).contiguous().transpose(0, 1)
    for q in (apart, behind, across):
        assert torch.equal(cudnn_sequences.attention((q, made[1], made[1]), places, causal=False), expected)
    assert {case.distances for case in imitated} == {(64, 64, 64)}


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, AttributeError])
def test_without_a_plan_another_kernel_computes(imitated, monkeypatch, error):
    """Also where only the gradients have none; it is asked once."""
    asked = []

    def refuse(graph, **_):
        asked.append(graph)
        raise error("no plan")

    monkeypatch.setattr(_Graph, "sdpa_backward", refuse)
    heads = [torch.randn(40, 4, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    places = (cudnn_sequences.Places(torch.tensor([0, 40], dtype=torch.int32), 40),) * 2
    for _ in range(2):
        assert cudnn_sequences.attention(tuple(heads), places, causal=False) is None
    assert len(asked) == 1
    with torch.no_grad():
        assert cudnn_sequences.attention(tuple(heads), places, causal=False) is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cudnn_sequences.attention(tuple(heads), places, causal=True) is None, "nothing is planned while recording"
    assert len(imitated) == 3


@pytest.fixture
def taken(monkeypatch):
    """Flash attention, and plain arithmetic in its place, fail the test."""
    monkeypatch.setattr(gpu, "_varlen_options", lambda *_, **__: pytest.fail("flash attention was used"))
    assert cudnn_sequences.works(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_trial_passes(dtype):
    assert cudnn_sequences.differs_by(torch.device("cuda", torch.cuda.current_device()), dtype) < TOLERANCE[dtype]


ENDS = {
    "even": (512, 1024),
    "odd lengths": (37, 301, 302, 1024),
    "none and one": (0, 0, 1, 2, 130, 130, 1023, 1024),
    "one": (1024,),
    "many": (*range(3, 1024, 7), 1024),
}


@on_gpu
@pytest.mark.parametrize("layout", ["views", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("sizes", [(8, 2, 2), (4, 4, 4)], ids=["grouped", "own keys"])
@pytest.mark.parametrize("width", [64, 128])
def test_documents(taken, ends, causal, sizes, layout, width):
    documents, qkv = _documents(ends), _projection(1, 1024, sizes[0], sizes[1], width)
    _compare(
        qkv,
        sizes,
        lambda q, k, v: gpu.document_attention(q, k, v, documents, 0.2, None, causal),
        lambda q, k, v: plain.document_attention(q, k, v, documents, 0.2, None, causal),
        layout=layout,
    )


@on_gpu
@pytest.mark.parametrize("layout", ["views", "contiguous"])
@pytest.mark.parametrize("lengths", [(300, 1, 77), (300, 300, 300), (64, 128, 299)])
def test_padded_rows(taken, lengths, layout):
    length_B, qkv = torch.tensor(lengths, dtype=torch.int32, device="cuda"), _projection(3, 300, 8, 8, 64)
    real = torch.arange(300, device="cuda") < length_B[:, None]
    _compare(
        qkv,
        (8, 8, 8),
        lambda q, k, v: gpu.padded_attention(q, k, v, length_B) * real[..., None, None],
        lambda q, k, v: plain.padded_attention(q, k, v, length_B) * real[..., None, None],
        layout=layout,
    )
    if min(lengths) < 300:
        heads = [x.detach().requires_grad_() for x in qkv.split(8, dim=2)]
        gpu.padded_attention(*heads, length_B).square().sum().backward()
        assert not heads[1].grad[~real].any() and not heads[2].grad[~real].any(), "of keys that nobody sees"
        assert all(x.grad.isfinite().all() for x in heads)


@on_gpu
@pytest.mark.parametrize("by_cudnn", [False, True], ids=["flash", "cuDNN"])
def test_rows_of_a_decoder_see_the_real_keys(by_cudnn, monkeypatch, request):
    if by_cudnn:
        request.getfixturevalue("taken")
    else:
        monkeypatch.setattr(cudnn_sequences, "takes", lambda *_: False)
    length_B = torch.tensor([300, 1, 77], dtype=torch.int32, device="cuda")
    for queries in (114, 300):
        made = _draw(3, queries, 8, 64), *_draw(2, 3, 300, 8, 64, seed=1).unbind()
        heads, twin = [x.clone().requires_grad_() for x in made], [x.float().requires_grad_() for x in made]
        y = gpu.padded_attention(*heads, length_B, own_rows=False)
        expected = plain.padded_attention(*twin, length_B)
        dy = _draw(*y.shape, seed=3)
        y.backward(dy), expected.backward(dy.float())
        _close(y, expected, what="the result")
        for name, x, right in zip("qkv", heads, twin, strict=True):
            _close(x.grad, right.grad, what=f"the gradient of {name}")


@on_gpu
@pytest.mark.parametrize("lengths", [(5, 300, 1), (40, 300, 129), (4000,)])
@pytest.mark.parametrize("groups", [2, 8])
def test_prompts(monkeypatch, lengths, groups):
    monkeypatch.setattr(
        torch.ops.aten, "_flash_attention_forward", lambda *_, **__: pytest.fail("flash"), raising=False
    )
    monkeypatch.setattr(gpu, "MANY_QUERIES", 1)
    for counts in (lengths, tuple(max(1, n // 3) for n in lengths)):
        q, (k, v) = _draw(sum(counts), 8, 128), _draw(2, sum(lengths), groups, 128, seed=1).unbind()
        with torch.no_grad():
            got = gpu.ragged_attention(q, k, v, counts, lengths, ScoreShape(), ScoreTensors())
        begin = [list(itertools.accumulate(part, initial=0)) for part in (counts, lengths)]
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            column = torch.arange(length - count, length, device="cuda")
            mine, keys = (slice(first[row], first[row + 1]) for first in begin)
            parts = (x[None].float() for x in (q[mine], k[keys], v[keys]))
            expected = plain.scored_attention(*parts, ScoreShape(), ScoreTensors(column_S=column))
            _close(got[mine], expected[0], what=f"{count} of {length}")


@on_gpu
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_nothing_outside_the_tensors_is_read_or_written(taken, heads):
    """50 times, in the middle of NaN; all else that the allocator gives is NaN, too."""
    (num_heads, groups), width, tokens = heads, 64, 1000
    sizes = (num_heads, groups, groups)
    waste = [torch.full((1 << 24,), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    del waste  # the allocator keeps it
    for turn in range(50):
        made = _projection(1, tokens, num_heads, groups, width, seed=turn)
        memory, qkv = _poisoned(made)
        documents = _documents(sorted({(turn * 37 + i * (71 + turn)) % tokens for i in range(turn % 9)} | {tokens}))
        dy_memory, dy = _poisoned(_draw(1, tokens, num_heads, width, seed=turn + 1))
        right, mine = made.float().requires_grad_(), qkv.requires_grad_()
        y = gpu.document_attention(*mine.split(sizes, dim=2), documents, None, None, turn % 2 == 0)
        expected = plain.document_attention(*right.split(sizes, dim=2), documents, None, None, turn % 2 == 0)
        _close(y, expected, what=f"the result of turn {turn}")
        (got,), (gradient,) = torch.autograd.grad(y, mine, dy), torch.autograd.grad(expected, right, dy.float())
        for name, x, other in zip("qkv", got.split(sizes, 2), gradient.split(sizes, 2), strict=True):
            _close(x, other, what=f"the gradient of {name} of turn {turn}")
        for held, inside in ((memory, made.numel()), (dy_memory, dy.numel())):
            assert held[:MARGIN].isnan().all() and held[MARGIN + inside :].isnan().all(), turn
            assert not held[MARGIN : MARGIN + inside].isnan().any(), turn


@on_gpu
def test_outputs_stay_within_their_memory(taken):
    """The kernels' own results in the middle of NaN: what lies around them stays."""
    documents, qkv = _documents((37, 37, 301, 1000)), _projection(1, 1000, 8, 2, 64)
    made = []

    def poisoned(self, size, *, dtype=None):
        memory, inside = _poisoned(torch.full(tuple(size), math.nan, dtype=dtype or self.dtype, device=self.device))
        made.append((memory, inside))
        return inside

    heads = tuple(x.flatten(0, 1).detach().requires_grad_() for x in qkv.split((8, 2, 2), dim=2))
    places = cudnn_sequences.Places(documents.bounds, documents.longest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", poisoned)
        y = cudnn_sequences.attention(heads, (places, places), causal=True)
        y.sum().backward()
    assert len(made) == 5, "the result, the sums and three gradients"
    for memory, inside in made:
        assert memory[:MARGIN].isnan().all() and memory[MARGIN + inside.numel() :].isnan().all()
        assert not inside.isnan().any(), inside.shape


@on_gpu
def test_one_plan_serves_other_numbers_of_sequences(taken):
    qkv, sizes = _projection(1, 1024, 8, 2, 64), (8, 2, 2)
    plans = cudnn_sequences._plans()
    for number, ends in enumerate(((500, 1024), (400, 1024), (513, 513, 600, 601, 700, 800, 1024))):
        documents = _documents(ends)
        before = len(plans)
        _compare(
            qkv,
            sizes,
            lambda q, k, v, documents=documents: gpu.document_attention(q, k, v, documents, 0.123),
            lambda q, k, v, documents=documents: plain.document_attention(q, k, v, documents, 0.123),
        )
        assert len(plans) - before == (2 if number == 0 else 0), ends


@on_gpu
@pytest.mark.parametrize("kind", ["transposed", "slice", "expanded", "misaligned"])
def test_a_gradient_of_any_layout(taken, kind):
    shape, documents = (1, 600, 4, 64), _documents((100, 600))
    dy = {
        "transposed": lambda: _draw(1, 4, 600, 64, seed=5).transpose(1, 2),
        "slice": lambda: _draw(1, 600, 4, 128, seed=5)[..., :64],
        "expanded": lambda: _draw(1, 1, 1, 1, seed=5).expand(shape),
        "misaligned": lambda: _draw(600 * 4 * 64 + 3, seed=5)[3:].view(shape),
    }[kind]()
    _compare(
        _projection(1, 600, 4, 4, 64),
        (4, 4, 4),
        lambda q, k, v: gpu.document_attention(q, k, v, documents),
        lambda q, k, v: plain.document_attention(q, k, v, documents),
        dy=dy,
    )


@on_gpu
def test_streams_and_threads(taken):
    documents, qkv = _documents((100, 350, 1024)), _projection(1, 1024, 8, 2, 64)
    expected = plain.document_attention(*qkv.float().split((8, 2, 2), dim=2), documents)
    errors = []

    def work():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(20):
                heads = [x.detach().requires_grad_() for x in qkv.split((8, 2, 2), dim=2)]
                y = gpu.document_attention(*heads, documents)
                y.backward(y.detach())
                errors.append(_error(y.detach(), expected))
                errors.extend(0.0 if x.grad.isfinite().all() else math.nan for x in heads)
            stream.synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert len(errors) == 3 * 20 * 4 and max(errors) <= TOLERANCE[torch.bfloat16], errors


@on_gpu
def test_recomputed(taken):
    from torch.utils.checkpoint import checkpoint

    documents, qkv = _documents((100, 350, 1024)), _projection(1, 1024, 8, 2, 64)

    def attend(x):
        return gpu.document_attention(*x.split((8, 2, 2), dim=2), documents)

    results = []
    for recomputed in (False, True):
        x = qkv.clone().requires_grad_()
        y = checkpoint(attend, x, use_reentrant=False) if recomputed else attend(x)
        y.backward(_draw(*y.shape, seed=4))
        results.append((y.detach(), x.grad))
    _close(results[1][0], results[0][0]), _close(results[1][1], results[0][1])


@on_gpu
def test_recorded_as_a_cuda_graph_and_replayed_with_other_lengths(taken):
    from trainer.kernels.recording import CudaLane, RecordedFunction

    sizes, lane = (8, 2, 2), CudaLane(torch.device("cuda", torch.cuda.current_device()))
    dy = _draw(1, 1024, 8, 64, seed=6)

    def run(qkv, bounds):
        x = qkv.detach().requires_grad_()
        y = gpu.document_attention(*x.split(sizes, dim=2), Documents(bounds, 1024))
        return y.detach(), *torch.autograd.grad(y, x, dy)

    given = [
        (_projection(1, 1024, 8, 2, 64, seed=seed), torch.tensor(bounds, dtype=torch.int32, device="cuda"))
        for seed, bounds in enumerate(
            ([0, 100, 350, 1024], [0, 1, 1, 1024], [0, 1024, 1024, 1024], [0, 511, 513, 1024])
        )
    ]
    run(*given[0])
    torch.cuda.synchronize()
    recorded = RecordedFunction(run, given[0], lane=lane)
    for qkv, bounds in given:
        y, gradient = recorded(qkv, bounds)
        right = qkv.float().requires_grad_()
        expected = plain.document_attention(*right.split(sizes, dim=2), Documents(bounds, 1024))
        expected.backward(dy.float())
        _close(y, expected, what="the result"), _close(gradient, right.grad, what="the gradient")


@on_gpu
def test_compiled_around(taken, monkeypatch):
    """torch.compile traces flash attention, as it did before."""
    monkeypatch.undo()
    documents, qkv = _documents((100, 350, 1024)), _projection(1, 1024, 8, 8, 64)

    @torch.compile
    def around(x):
        return gpu.document_attention(*(2 * x).split((8, 8, 8), dim=2), documents) + 1

    expected = plain.document_attention(*(2 * qkv.float()).split((8, 8, 8), dim=2), documents) + 1
    _close(around(qkv), expected)


@on_gpu
@pytest.mark.parametrize("off", ["deterministic", "cudnn_sdp", "fp32", "width"])
def test_flash_attention_takes_the_rest(off, monkeypatch):
    dtype, width = (torch.float32 if off == "fp32" else torch.bfloat16), 72 if off == "width" else 64
    x = _draw(1, 64, 2, width, dtype=dtype)
    monkeypatch.setattr(cudnn_sequences, "works", lambda *_: True)
    assert cudnn_sequences.takes(x, x, x) == (off in ("deterministic", "cudnn_sdp"))
    if off == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif off == "cudnn_sdp":
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert not cudnn_sequences.takes(x, x, x)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_a_cpu_and_a_gpu_without_the_package_use_what_they_used(monkeypatch):
    x = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
    assert not cudnn_sequences.takes(x, x, x)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not cudnn_sequences._trial(torch.device("cuda"), torch.bfloat16)


def test_rooms_of_a_plan():
    """Batches share plans, and none is too small."""
    assert [power_of_two(n) for n in (1, 2, 3, 128, 129)] == [1, 2, 4, 128, 256]
    rounded = [cudnn_sequences._rounded(n) for n in (1, 128, 129, 8192, 8193, 32_000)]
    assert rounded == [128, 128, 256, 8192, 10_240, 32_768]
    assert len({cudnn_sequences._rounded(n) for n in range(4097, 8193)}) == 4


def test_places():
    in_rows = functools.partial(cudnn_sequences.in_rows, 5, rows=2, device=torch.device("cpu"))
    rows = in_rows(sizes_B=torch.tensor([4, 5]))
    assert (rows.first.tolist(), rows.longest, rows.sizes.tolist()) == ([0, 5, 10], 5, [4, 5])
    assert in_rows(sizes_B=None).sizes is None
