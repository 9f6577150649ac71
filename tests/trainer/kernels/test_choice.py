"""The section [kernels]: a named kernel is used if it is available and correct, otherwise refused in one line."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from mdata import UsageError
from trainer.config.sections import KernelsSection
from trainer.kernels import apex, mamba_ssm, plain, scan, self_test, table, transformer_engine, triton_scan
from trainer.kernels.float8 import float8_product, float8_quantize
from trainer.kernels.scan import ScanSizes
from trainer.kernels.self_test import EXAMPLES, SCAN, TOLERANCES, differences, float8_differences, refusals
from trainer.kernels.table import GROUPS, LIBRARY, PLAIN, choose_kernels, float8_kernels

CPU = torch.device("cpu")


@pytest.fixture
def without_libraries(monkeypatch):
    """Neither apex nor Transformer Engine is installed, whatever this machine has."""
    hidden = {"transformer_engine", "mamba_ssm", *apex.EXTENSIONS.values()}
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *given: None if name in hidden else find_spec(name, *given)
    )


def test_every_key_of_the_section_decides_operations_and_none_is_decided_twice():
    others = {"tensor_parallel", "cuda_graphs", "overlap_passes"}  # decided for layers, not for operations
    assert list(GROUPS) == [field.name for field in dataclasses.fields(KernelsSection) if field.name not in others]
    decided = [operation for operations in GROUPS.values() for operation in operations]
    assert len(decided) == len(set(decided)) and set(decided) <= {f.name for f in dataclasses.fields(PLAIN)}


def test_named_kernels_take_the_place_of_the_fastest():
    chosen = choose_kernels(CPU, torch.float32, KernelsSection(norm="plain", optimizer="plain"))
    assert chosen.layer_norm is plain.layer_norm and chosen.adamw_ is plain.adamw_
    assert chosen.swiglu_backward_ is LIBRARY.swiglu_backward_
    assert choose_kernels(CPU, torch.bfloat16, KernelsSection(loss="library")).logits_to_gradient_ is not (
        plain.logits_to_gradient_
    )


@pytest.mark.usefixtures("without_libraries")
@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"norm": "compiled"}, 'kernels.norm="compiled" cannot be used: it runs on GPUs only'),
        ({"norm": "apex"}, "its extension fused_layer_norm_cuda is not installed"),
        ({"attention": "transformer_engine"}, "it is not installed; set kernels.attention="),
        ({"scan": "mamba_ssm"}, "mamba-ssm is not installed; set kernels.scan="),
        ({"scan": "triton"}, "; set kernels.scan="),
    ],
)
def test_a_kernel_that_is_not_there_is_refused(wanted, text):
    with pytest.raises(UsageError) as error:
        choose_kernels(CPU, torch.float32, KernelsSection(**wanted))
    assert text in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("group", EXAMPLES)
def test_the_plain_kernels_pass_their_own_test(group, dtype):
    assert differences(group, PLAIN, device=CPU, dtype=dtype) == ""


WRONG = {
    "norm": ("rms_norm_backward", lambda right, *given: (right(*given)[0], right(*given)[1] * 1.05, None)),
    "attention": ("attention", lambda right, q, k, v, scale: right(q, k, v)),  # forgets the scale
    "optimizer": ("adamw_", lambda right, state, g, n, applied, c: right(state, g, n, torch.tensor(True), c)),
    "weight_gradient": ("add_product", lambda right, target, dy, x_NI, overwrite=False: right(target, dy, x_NI=x_NI)),
    "scan": ("chunk_scan", lambda right, *given, document_BS=None, **named: right(*given, **named)),  # no documents
}


@pytest.mark.parametrize("group", WRONG)
def test_a_kernel_that_computes_something_else_is_refused_by_name(group, monkeypatch):
    name, wrong = WRONG[group]
    right = getattr(PLAIN, name)
    broken = types.SimpleNamespace(**{each: getattr(PLAIN, each) for each in GROUPS[group]})
    setattr(broken, name, lambda *given, **named: wrong(right, *given, **named))
    assert "its self-test failed: " in differences(group, broken, device=CPU, dtype=torch.bfloat16)
    monkeypatch.setattr(table, "APEX", broken)
    monkeypatch.setattr(apex, "missing", lambda *_: "")
    monkeypatch.setattr(table, "TRANSFORMER_ENGINE", broken)
    monkeypatch.setattr(transformer_engine, "missing", lambda *_: "")
    monkeypatch.setattr(table, "MAMBA_SSM", broken)
    monkeypatch.setattr(mamba_ssm, "missing", lambda *_: "")
    library = {"attention": "transformer_engine", "scan": "mamba_ssm"}.get(group, "apex")
    with pytest.raises(UsageError, match=f'kernels.{group}="{library}" cannot be used: its self-test failed: .*; set'):
        choose_kernels(CPU, torch.float32, KernelsSection(**{group: library}))


def test_a_kernel_that_fails_outright_says_what_failed():
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("undefined symbol: x\nmore")

    reason = differences("weight_gradient", types.SimpleNamespace(add_product=broken), device=CPU, dtype=torch.float32)
    assert reason == "its self-test failed: RuntimeError: undefined symbol: x"


BREAKS_THE_GPU = """
import types, torch
from mdata import UsageError
from trainer.kernels.self_test import differences
def broken(x, *_, **__):  # outside of a tensor, which the GPU finds when it is launched
    y = x[torch.full((1,), 2**30, device=x.device)]
    return y, y, y
try:
    differences("norm", types.SimpleNamespace(rms_norm=broken), device=torch.device("cuda"), dtype=torch.bfloat16)
except UsageError as error:
    print(error)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_that_breaks_the_gpu_names_the_way_out():
    """The process cannot go on with other kernels, as it does after other failures."""
    child = subprocess.run([sys.executable, "-c", BREAKS_THE_GPU], capture_output=True, text=True)
    assert "tried for norm left the GPU unusable" in child.stdout, child.stderr
    assert 'kernels.norm="plain"' in child.stdout


def test_fp8_kernels_are_compared_as_well():
    assert float8_differences(float8_quantize, float8_product, device=CPU) == ""

    def overwrites(left, right, **how):  # what is added to is lost
        return float8_product(left, right, **{**how, "add": False})

    assert "the weight's gradient differs" in float8_differences(float8_quantize, overwrites, device=CPU)

    def forgets(x, dtype, *, scaling, columns):  # the largest value is not raised
        return float8_quantize(x, dtype, scaling=scaling._replace(largest_1=None), columns=columns)

    assert "a largest value differs" in float8_differences(forgets, float8_product, device=CPU)


@pytest.mark.usefixtures("without_libraries")
def test_fp8_on_a_gpu_needs_the_library():
    for without_data in (CPU, torch.device("meta")):  # a rehearsal's
        assert float8_kernels(without_data) == (float8_quantize, float8_product)
    with pytest.raises(
        UsageError, match=r"precision\.fp8 needs Transformer Engine .*, but it is not installed; install"
    ):
        float8_kernels(torch.device("cuda"))


def test_fp8_on_a_gpu_without_it_is_refused(monkeypatch):
    monkeypatch.setattr(transformer_engine, "missing", lambda _: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(UsageError, match=r"but NVIDIA A100 has no FP8; it needs compute capability 8\.9"):
        float8_kernels(torch.device("cuda"))


def test_every_example_belongs_to_a_key():
    assert set(self_test.EXAMPLES) <= set(GROUPS)


@pytest.mark.parametrize("given", [None, "/other"])
def test_the_library_takes_every_part_of_the_cudnn_that_is_loaded(tmp_path, monkeypatch, given):
    """Two versions of cuDNN in a process either fail to load or lose its attention."""
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    monkeypatch.setenv("CUDNN_PATH", given or "")
    if given is None:
        monkeypatch.delenv("CUDNN_PATH")
    names = ["libcudnn.so.9", "libcudnn_adv.so.9", "libcudnn_graph.so.9"]
    for name in (*names, "libother.so.9"):
        (tmp_path / name).touch()
    maps = f"7f00-7f01 r-xp 00000000 08:01 42    {tmp_path}/libcudnn.so.9\n7f02 r--p 0 0:0 0\n"
    loaded: list[str] = []
    monkeypatch.setattr(transformer_engine.ctypes, "CDLL", lambda path, mode: loaded.append(Path(path).name))
    monkeypatch.setattr(transformer_engine.Path, "read_text", lambda *_, **__: maps)
    transformer_engine.share_cudnn()
    assert (os.environ["CUDNN_PATH"], loaded) == ((given, []) if given else (str(tmp_path), names))


def test_without_cudnn_in_the_process_the_library_takes_its_own(monkeypatch):
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(transformer_engine.Path, "read_text", lambda *_, **__: "7f02 r--p 0 0:0 0 \n")
    transformer_engine.share_cudnn()
    assert "CUDNN_PATH" not in os.environ


@pytest.mark.usefixtures("without_libraries")
def test_without_a_scan_for_gpus_a_warning_says_how_slow_mixers_are(monkeypatch):
    monkeypatch.setattr(triton_scan, "missing", lambda *_: "no Triton")
    gpu = torch.device("cuda")
    with pytest.warns(
        RuntimeWarning, match="plain PyTorch in fp32.* at 44 % of the speed .*: no Triton; mamba-ssm is not installed"
    ):
        chosen = choose_kernels(gpu, torch.bfloat16, scans=SCAN)
    assert chosen.chunk_scan is scan.chunk_scan
    assert choose_kernels(gpu, torch.bfloat16, KernelsSection(scan="plain"), scans=SCAN).chunk_scan is scan.chunk_scan
    choose_kernels(gpu, torch.bfloat16)  # other models are told nothing


@pytest.mark.usefixtures("without_libraries")
@pytest.mark.parametrize("sizes", [(80, 64), (64, 256)])
def test_sizes_that_the_scan_has_no_kernels_for_are_named(sizes):
    """They ran on plain PyTorch without a word, and mamba-ssm was not tried."""
    gpu, words = torch.device("cuda"), f"heads and states of 16, 32, 64, 128, not {sizes[0]} and {sizes[1]}"
    with pytest.warns(RuntimeWarning, match=f"{words}; mamba-ssm is not installed"):
        assert choose_kernels(gpu, torch.bfloat16, scans=ScanSizes(*sizes)).chunk_scan is scan.chunk_scan
    with pytest.raises(UsageError, match=words):
        choose_kernels(gpu, torch.bfloat16, KernelsSection(scan="triton"), scans=ScanSizes(*sizes))


@pytest.mark.usefixtures("without_libraries")
def test_a_scan_is_tried_with_the_sizes_of_the_model(monkeypatch):
    """One that lacks shared memory for them alone ended runs in their first step."""

    def scans(x, delta, A, B, C, **how):
        if x.shape[-1] * B.shape[-1] > 64 * 64:
            raise refusals()[-1]("out of resource: shared memory")
        return scan.chunk_scan(x, delta, A, B, C, **how)

    monkeypatch.setattr(table, "TRITON", dataclasses.replace(PLAIN, chunk_scan=scans))
    monkeypatch.setattr(triton_scan, "missing", lambda *_: "")
    monkeypatch.setattr(table, "differences", lambda *given, device, **how: differences(*given, device=CPU, **how))
    gpu = torch.device("cuda")
    assert choose_kernels(gpu, torch.float32, scans=SCAN).chunk_scan is scans
    large = ScanSizes(head_dim=64, state_size=128)
    with pytest.warns(RuntimeWarning, match="its self-test failed: .*: out of resource: shared memory; mamba-ssm"):
        assert choose_kernels(gpu, torch.float32, scans=large).chunk_scan is scan.chunk_scan
    assert choose_kernels(gpu, torch.float32, KernelsSection(scan="triton"), scans=SCAN).chunk_scan is scans
    with pytest.raises(
        UsageError, match=r'kernels\.scan="triton" cannot be used: .* out of resource: shared memory; set'
    ):
        choose_kernels(gpu, torch.float32, KernelsSection(scan="triton"), scans=large)


def test_mamba_ssm_is_used_where_it_computes_the_same(monkeypatch):
    """Its functions, called as a library of that name would be: layouts, kinds of numbers and names of arguments."""

    def convolve(x_BCS, weight_CK, bias_C, seq_idx=None, activation=None):
        assert activation == "silu" and x_BCS.stride(1) == 1 and (seq_idx is None or seq_idx.dtype == torch.int32)
        return scan.causal_conv(x_BCS.mT, weight_CK, bias_C, document_BS=seq_idx).mT

    def combined(x, dt, A, B, C, chunk_size, initial_states=None, seq_idx=None, return_final_states=False):
        assert return_final_states and (seq_idx is None or seq_idx.is_contiguous())
        y, state = scan.chunk_scan(x, dt, A, B, C, chunk=chunk_size, document_BS=seq_idx, state_BHPN=initial_states)
        return y.to(x.dtype), state

    functions = {"causal_conv1d_fn": convolve, "mamba_chunk_scan_combined": combined}
    monkeypatch.setattr(mamba_ssm, "_function", lambda _, name: functions[name])
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    monkeypatch.setattr(mamba_ssm, "missing", lambda _: "")
    assert differences("scan", table.MAMBA_SSM, device=CPU, dtype=torch.bfloat16) == ""
    chosen = choose_kernels(CPU, torch.float32, KernelsSection(scan="mamba_ssm"))
    assert chosen.chunk_scan is mamba_ssm.chunk_scan and chosen.causal_conv is mamba_ssm.causal_conv
