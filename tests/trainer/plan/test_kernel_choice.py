"""The kernels that `mtrain plan` names are those in the kernel tables that the layers call."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mdata import UsageError
from tests.trainer.plan.test_plan import FACTS, config
from trainer.config.sections import KernelsSection, MoESection, MTPSection
from trainer.kernels import biased_attention, chunk_attention, cudnn_sequences, gpu, plain
from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import ScoreShape
from trainer.kernels.table import GROUPS, LIBRARY, PLAIN, Kernels, choose_kernels
from trainer.layers.attention import Attention, Documents, Sequences
from trainer.layers.base import Parallel
from trainer.layers.shapes import AttentionShape
from trainer.parallel.collectives import Group
from trainer.plan import kernel_choice
from trainer.plan.facts import plan_facts
from trainer.plan.kernel_choice import attention_choice, kernel_choices, option_names, pointwise_choice
from trainer.plan.plan import make_plan

BERT = {"family": "bert", "activation": "gelu", "position": "learned"}
FORMS = {
    "": ScoreShape(scale=0.3),
    "model.attention_softcap": ScoreShape(softcap=2.0),
    'model.position = "alibi"': ScoreShape(alibi=True),
    "model.window": ScoreShape(window=2),
    "model.attention_sinks": ScoreShape(sinks="zero"),
    "model.attention_dropout": ScoreShape(dropout=0.1),
    'model.position = "relative"': ScoreShape(relative=True),
    "rows of the encoder": ScoreShape(causal=False),
}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_layer_calls_what_its_form_of_attention_says(name, documents):
    scores, called = FORMS[name], []
    recorders = {
        operation: lambda q, *rest, operation=operation: called.append(operation) or q
        for operation in ("attention", "document_attention", "padded_attention", "scored_attention")
    }
    shape = AttentionShape(width=8, num_heads=2, num_kv_heads=2, head_dim=4, bias=False, out_bias=False, scores=scores)
    layer = Attention(shape, Parallel(Group.single("tp"), sequence_parallel=False), kernels=Kernels(**recorders))
    bounds = Documents(torch.tensor([0, 2, 4], dtype=torch.int32), 2) if documents else None
    layer(torch.zeros(4, 8), Sequences(1, 4, None, bounds))
    assert called == [scores.operation(documents=documents)]
    assert option_names(scores) == [name][: bool(name)]


def test_every_option_of_scores_is_named():
    fields = {field.name for field in dataclasses.fields(ScoreShape)} - {"scale"}
    every = ScoreShape(softcap=1.0, alibi=True, window=1, sinks="zero", dropout=0.5, relative=True, causal=False)
    assert len(option_names(every)) == len(fields)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_pointwise_kernels_are_those_of_the_table(dtype):
    torch_dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    expected = {kernel_choice.LIBRARY: LIBRARY, kernel_choice.PLAIN: PLAIN}
    assert choose_kernels(torch.device("cpu"), torch_dtype) is expected[pointwise_choice("cpu", dtype=dtype).kernel]
    on_gpu = choose_kernels(torch.device("cuda"), torch_dtype)
    assert pointwise_choice("gpu", dtype=dtype).kernel == kernel_choice.COMPILED
    assert on_gpu.rms_norm not in (PLAIN.rms_norm, LIBRARY.rms_norm)
    assert on_gpu.attention is chunk_attention.attention and on_gpu.scored_attention is gpu.scored_attention


def _kernel(scores, device, **how):
    return attention_choice(scores, device, **how).kernel


def test_attention_on_a_gpu_goes_where_the_plan_says(monkeypatch):
    q, used = torch.zeros(1, 4, 2, 4), []
    monkeypatch.setattr(plain, "scored_attention", lambda *_: used.append(kernel_choice.PLAIN))
    gpu.scored_attention(q, q, q, FORMS["model.attention_dropout"], ScoreTensors(keep_BHST=torch.ones(1, 2, 4, 4) > 0))
    assert used.pop() == _kernel(FORMS["model.attention_dropout"], "gpu", dtype="bf16")
    relative, bias = FORMS['model.position = "relative"'], torch.zeros(2, 4, 4)
    for name, dtype, works in (
        ("fp32", torch.float32, False),
        ("bf16", torch.bfloat16, True),
        ("bf16", torch.bfloat16, False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(biased_attention, "works", lambda *_, works=works: works)
            patch.setattr(biased_attention, "biased_attention", lambda *_: used.append(kernel_choice.BIASED))
            patch.setattr(gpu, "_masked_attention", lambda *_: used.append(kernel_choice.SDPA))
            tensors = ScoreTensors(bias_HST=bias, mask_BHST=gpu.bias_mask(bias, relative, None, dtype))
            gpu.scored_attention(q.to(dtype), q.to(dtype), q.to(dtype), relative, tensors)
        choice = attention_choice(relative, "gpu", dtype=name)
        assert used.pop() == (choice.kernel if works or name == "fp32" else choice.others[0][0]), name
    assert _kernel(FORMS["model.window"], "gpu", dtype="bf16") == kernel_choice.FLEX
    monkeypatch.setattr(plain, "padded_attention", lambda *_: used.append(kernel_choice.SDPA))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x = q.to(dtype)
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "_varlen", lambda: lambda q, *_, **__: used.append(kernel_choice.VARLEN) or q)
            gpu.padded_attention(x, x, x, torch.tensor([3]))
        assert used.pop() == _kernel(FORMS["rows of the encoder"], "gpu", dtype=name, without_sequences="x"), name
    monkeypatch.setattr(gpu, "scored_attention", lambda *_: used.append(kernel_choice.FLEX))
    monkeypatch.setattr(gpu, "_varlen", lambda: lambda q, *_, **__: used.append(kernel_choice.VARLEN) or q)
    bounds = Documents(torch.tensor([0, 2, 4], dtype=torch.int32), 2)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp64", torch.float64)):
        x = q.to(dtype)
        gpu.document_attention(x, x, x, bounds)
        assert used.pop() == _kernel(ScoreShape(), "gpu", dtype=name, documents=True, without_sequences="x"), name
    monkeypatch.setattr(cudnn_sequences, "takes", lambda *_: True)
    monkeypatch.setattr(
        cudnn_sequences, "attention", lambda qkv, *_, **__: used.append(kernel_choice.SEQUENCES) or qkv[0]
    )
    x = q.bfloat16()
    gpu.document_attention(x, x, x, bounds), gpu.padded_attention(x, x, x, torch.tensor([3]))
    for scores, documents in ((FORMS["rows of the encoder"], False), (ScoreShape(), True)):
        assert used.pop() == _kernel(scores, "gpu", dtype="bf16", documents=documents)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({}, ""),
        ({"run": {"folder": "x", "deterministic": True}}, "run.deterministic"),
        ({"mesh": {"tp": 1, "cp": 2}}, "rows are computed in chunks"),
        ({"model": {"hidden_size": 80, "num_heads": 2}}, "not for heads of 40"),
        ({"model": {"hidden_size": 512, "num_heads": 2}}, "not for heads of 256"),
        (None, "nvidia-cudnn-frontend is not installed"),
    ],
)
def test_documents_use_cudnn_where_it_has_a_kernel(sections, reason, monkeypatch):
    monkeypatch.setattr(
        kernel_choice.importlib.util, "find_spec", lambda name: object() if sections is not None else None
    )
    given = {"precision": {"dtype": "bf16"}, "mesh": {"tp": 1}, "data": {"document_masks": True}, **(sections or {})}
    model = {"position": "rope", "hidden_size": 128, "num_heads": 2, "num_kv_heads": 1} | given.get("model", {})
    run = config(**{**given, "model": model})
    first, *_ = kernel_choices(run, make_plan(run, 2, facts=FACTS), device="gpu")
    assert first.kernel == (kernel_choice.VARLEN if reason else kernel_choice.SEQUENCES)
    assert dict(first.others).get(kernel_choice.SEQUENCES, "") == reason


def test_a_kernel_is_not_named_as_used_and_not_used():
    for form in FORMS.values():
        for device in kernel_choice.DEVICES:
            for documents in (False, True):
                choice = attention_choice(form, device, dtype="bf16", documents=documents)
                assert choice.kernel not in dict(choice.others) and choice.others


def test_layers_of_different_forms_are_listed_apart():
    model = {"num_layers": 4, "window": 8, "window_interval": 4}
    windowed = config(model=model)
    plan = make_plan(windowed, 2, facts=FACTS)
    some, rest, *_ = kernel_choices(windowed, plan, device="gpu")
    assert (some.operation, some.kernel) == ("attention in 3 of 4 layers", kernel_choice.FLEX)
    assert (rest.operation, rest.kernel) == ("attention in 1 of 4 layers", kernel_choice.SDPA)


def test_document_masks_choose_the_kernel_too():
    masked = config(data={"document_masks": True})
    first, *_ = kernel_choices(masked, make_plan(masked, 2, facts=FACTS), device="gpu")
    assert (first.kernel, first.reason) == (kernel_choice.FLEX, "documents within rows")  # fp32


@pytest.mark.parametrize(
    ("sections", "kernel"),
    [
        ({}, kernel_choice.CUDNN),
        ({"precision": {"dtype": "fp32"}}, kernel_choice.SDPA),
        ({"run": {"folder": "x", "deterministic": True}}, kernel_choice.SDPA),
        ({"model": {"num_heads": 1}}, kernel_choice.SDPA),
    ],
    ids=["bf16", "fp32", "deterministic", "heads of 256"],
)
def test_chunks_of_context_parallelism_have_a_kernel_of_their_own(sections, kernel):
    given = {"precision": {"dtype": "bf16"}, "mesh": {"tp": 1, "cp": 2}, "model": {"num_heads": 2}, **sections}
    model = {"hidden_size": 256, "position": "rope", "num_kv_heads": 1, **given["model"]}
    run = config(**{**given, "model": model})
    first, *_ = kernel_choices(run, make_plan(run, 2, facts=FACTS), device="gpu")
    assert (first.operation, first.kernel) == ("attention", kernel)


FP8 = {"dtype": "bf16", "fp8": "delayed"}


def _choices(device, **sections):
    run = config(**sections)
    return {each.operation: each for each in kernel_choices(run, make_plan(run, 2, facts=FACTS), device=device)}


def test_kernels_that_the_section_names_are_listed_apart():
    found = _choices("gpu", kernels={"norm": "apex", "attention": "transformer_engine", "weight_gradient": "apex"})
    assert found["norms"].kernel == found["weight gradients"].kernel == kernel_choice.APEX
    assert found["norms"].reason == 'kernels.norm="apex"; compared with the plain one when a run starts'
    assert found["attention"].kernel == kernel_choice.TRANSFORMER_ENGINE
    assert dict(found["attention"].others)[kernel_choice.SDPA] == "another one is named"
    assert found["activations, rotary positions, loss, optimizer"].kernel == kernel_choice.COMPILED
    named = dict.fromkeys(kernel_choice.POINTWISE, "plain")
    assert list(_choices("cpu", kernels=named))[4:-1] == list(kernel_choice.POINTWISE.values())
    assert _choices("cpu", kernels={"norm": "apex"})["norms"].reason == 'kernels.norm="apex"; refused on a CPU'


def test_every_key_of_the_section_is_described():
    described = {*kernel_choice.POINTWISE, "attention", "weight_gradient", "scan"}
    fields = {field.name for field in dataclasses.fields(KernelsSection)}
    assert described | {"tensor_parallel", "cuda_graphs", "overlap_passes"} == fields and described == set(GROUPS)


def test_communication_of_tensor_parallelism_is_listed_where_there_is_some():
    name, mesh = kernel_choice.TENSOR_PARALLEL, {"tp": 2, "sequence_parallel": True}
    assert name not in _choices("gpu", mesh={"tp": 1})
    assert (_choices("gpu", mesh={"tp": 2})[name].kernel, _choices("cpu", mesh=mesh)[name].kernel) == ("NCCL", "gloo")
    with pytest.raises(UsageError, match=r"kernels\.tensor_parallel is 'symmetric_memory'; expected 'auto'"):
        _choices("gpu", mesh=mesh, kernels={"tensor_parallel": "symmetric_memory"})  # removed: it was slower


def test_graphs_are_listed_with_what_they_hold_and_refused_where_they_cannot_be_recorded():
    name, on = kernel_choice.LAUNCHES, {"cuda_graphs": "on"}
    for mesh in ({"tp": 1}, {"tp": 2}):  # two data-parallel ranks, or one
        assert _choices("gpu", mesh=mesh)[name].kernel == "CUDA graphs"
    assert _choices("gpu", mesh={"tp": 1, "cp": 2})[name].kernel == "one by one"
    experts, bf16 = {"moe": MoESection(num_experts=4)}, {"dtype": "bf16"}
    narrow = {"moe": MoESection(num_experts=4, ffn_hidden_size=24)}
    assert _choices("gpu", mesh={"tp": 2}, model=experts)[name].kernel == "one by one"
    assert _choices("gpu", mesh={"tp": 2}, model=experts, kernels=on, precision=bf16)[name].kernel == "CUDA graphs"
    assert _choices("gpu", mesh={"tp": 2}, model={"mtp": MTPSection(num_layers=1)})[name].kernel == "CUDA graphs"
    assert _choices("gpu", mesh={"tp": 2}, kernels={"cuda_graphs": "off"})[name].kernel == "one by one"
    assert _choices("cpu", mesh={"tp": 2})[name].kernel == "one by one"
    assert _choices("gpu", kernels=on, mesh={"tp": 1})[name].reason.endswith("of passes"), "two data-parallel ranks"
    beside = {"kernels": {**on, "overlap_passes": "on"}, "model": {"tie_embeddings": False}}
    assert "but the first and last" in _choices("gpu", mesh={"tp": 1}, **beside)[name].reason
    assert _choices("gpu", kernels=on, mesh={"tp": 2})[name].reason.endswith("of passes and the update")
    copies = {"mesh": {"tp": 2, "etp": 1, "sequence_parallel": True}, "model": experts, "precision": bf16}
    assert _choices("gpu", kernels=on, **copies)[name].reason.endswith("of passes"), "two ranks share experts"
    assert _choices("cpu", kernels=on)[name].reason.endswith("refused on a CPU")
    masked = {"mesh": {"tp": 2}, "data": {"document_masks": True}}
    assert _choices("gpu", **masked)[name].reason.endswith("for numbers and lengths of documents that recur")
    padded = _choices("gpu", kernels=on, mesh={"tp": 2}, data={"kind": "bert"}, model=BERT)[name]
    assert padded.reason.endswith("of passes and the update, for sizes of rows without padding that recur")
    for sections, words in {
        "sharding": ({"optimizer": {"sharding": "gradients"}, "mesh": {"tp": 1}}, "moves buffers"),
        "sharding of experts": ({"optimizer": {"sharding": "gradients"}, **copies}, "moves buffers"),
        "pairs": ({"data": {"kind": "pairs"}}, "the number of pairs"),
        "dtype of experts": ({"model": experts, "precision": {"dtype": "fp16"}}, "experts wait for the host"),
        "width of experts": ({"model": narrow, "precision": bf16}, "12, is no multiple of 8"),
    }.values():
        with pytest.raises(UsageError, match=f'kernels.cuda_graphs="on" cannot be used: .*{words}'):
            _choices("gpu", kernels=on, **sections)
        assert words in dict(_choices("gpu", **sections)[name].others)["CUDA graphs"]


@pytest.mark.parametrize("installed", [False, True])
def test_a_library_that_is_not_used_says_why(installed, monkeypatch):
    monkeypatch.setattr(kernel_choice.importlib.util, "find_spec", lambda _: object() if installed else None)
    reason = "it is not installed"
    found = _choices("gpu", precision=FP8)
    others = dict(found["norms, activations, rotary positions, loss, optimizer"].others)
    assert others[kernel_choice.APEX] == ("more passes over memory; kernels.norm can name it" if installed else reason)
    assert dict(found["weight gradients"].others)[kernel_choice.APEX] == (
        "no faster; kernels.weight_gradient can name it" if installed else reason
    )
    linear = found["products of linear layers"]
    assert linear.kernel == f"{kernel_choice.TRANSFORMER_ENGINE} in FP8"
    assert linear.reason == 'precision.fp8="delayed"' + ("" if installed else f"; {reason}, so a run is refused")
    assert "emulated" in _choices("cpu", precision=FP8)["products of linear layers"].kernel


def test_the_facts_of_a_plan_are_json():
    selective = config(recompute={"mode": "selective"})
    facts = plan_facts(selective, make_plan(selective, 2, facts=FACTS))
    none = plan_facts(config(), make_plan(config(), 2, facts=FACTS))
    assert facts["recompute"]["mode"] == "selective" and 0 < facts["activation_bytes"] < none["activation_bytes"]
    assert facts["state_bytes"] == none["state_bytes"] > 0 and set(facts["kernels"]) == {"cpu", "gpu"}
    assert facts["kernels"]["gpu"][0]["others"][kernel_choice.PLAIN] == kernel_choice.ALL_SCORES


def test_the_scan_of_mixers_is_listed_where_there_are_some():
    assert kernel_choice.SCAN not in _choices("gpu")
    for device, kernel in (("cpu", kernel_choice.PLAIN), ("gpu", kernel_choice.TRITON_SCAN)):
        choice = kernel_choice.scan_choice(KernelsSection(), device, dtype="bf16")
        assert choice.kernel == kernel and kernel_choice.MAMBA_SSM in dict(choice.others)
    assert kernel_choice.scan_choice(KernelsSection(), "gpu", dtype="fp64").kernel == kernel_choice.PLAIN
    assert kernel_choice.scan_choice(KernelsSection(scan="plain"), "gpu", dtype="bf16").kernel == kernel_choice.PLAIN
