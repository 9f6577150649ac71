"""Which kernels a run uses on a CPU and on a GPU, with the reason for each, and for each that is not used.

The choices themselves are made in kernels/table.py, kernels/gpu.py and `ScoreShape.operation`; this module describes
them, and tests/trainer/plan/test_kernel_choice.py compares the two. It checks which libraries are installed, but
imports neither them nor torch: only a run's start shows whether one loads and passes its self-test.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Literal

from trainer.config.sections import KernelsSection, PrecisionSection, RunConfig
from trainer.kernels.scores import CUDNN_HEAD_MULTIPLE, WIDEST_CUDNN_HEAD, ScoreShape
from trainer.models.family import family_of
from trainer.plan.check import uses_graphs, why_not_recorded
from trainer.plan.plan import Plan

Device = Literal["cpu", "gpu"]
DEVICES: tuple[Device, ...] = ("cpu", "gpu")
SDPA = "PyTorch's scaled_dot_product_attention"
CUDNN = "cuDNN's attention"
SEQUENCES = "cuDNN's attention within sequences"
FLEX = "FlexAttention, compiled"
VARLEN = "PyTorch's variable-length flash attention"
BIASED = "a Triton kernel that reads the biases"
PLAIN = "plain PyTorch"
LIBRARY = "PyTorch's own kernels"
COMPILED = "torch.compile"
ALL_SCORES = "it holds all attention scores in memory"
PRODUCT = "PyTorch's matrix product"
TRANSFORMER_ENGINE = "Transformer Engine"
APEX = "NVIDIA apex"
MAMBA_SSM, TRITON_SCAN = "mamba-ssm", "mtrain's Triton kernels"
NAMES = {
    "plain": PLAIN,
    "library": LIBRARY,
    "compiled": COMPILED,
    "transformer_engine": TRANSFORMER_ENGINE,
    "apex": APEX,
    "mamba_ssm": MAMBA_SSM,
    "triton": TRITON_SCAN,
}
POINTWISE = {
    "norm": "norms",
    "activation": "activations",
    "rope": "rotary positions",
    "loss": "loss",
    "optimizer": "optimizer",
}
SCAN = "scan and convolution of mixers"
ATTENTION, WEIGHT_GRADIENT, LINEAR = "attention", "weight gradients", "products of linear layers"
EXPERTS = "products of experts"
TENSOR_PARALLEL, LAUNCHES = "communication of tensor parallelism", "kernel launches"
GPU_LIBRARIES = ("transformer_engine", "apex", "mamba_ssm", "triton")
# An operation's libraries, and the key of [kernels] that selects them.
LIBRARIES = {
    "pointwise": (("transformer_engine", "norm"), ("apex", "norm")),
    ATTENTION: (("transformer_engine", "attention"),),
    WEIGHT_GRADIENT: (("apex", "weight_gradient"),),
}
# The extension of apex for each key; other libraries are one module of their own name.
APEX_MODULES = {
    "norm": "fused_layer_norm_cuda",
    "optimizer": "distributed_adam_cuda",
    "weight_gradient": "fused_weight_gradient_mlp_cuda",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of one operation.

    Args:
        operation: such as "attention", with its layers if these differ.
        kernel: the one that runs. reason: why.
        others: (kernel, why it is not used).
    """

    operation: str
    kernel: str
    reason: str
    others: tuple[tuple[str, str], ...] = ()


def kernel_choices(config: RunConfig, plan: Plan, *, device: Device) -> tuple[Choice, ...]:
    """The kernels of every form of attention in the model, of linear layers, and of the pointwise operations."""
    dtype, family = config.precision.dtype, family_of(config)
    forms: dict[ScoreShape, list[int]] = {}
    for block, kind in enumerate(family.kinds(plan.shape)):
        if (scores := family.scores(plan.shape, kind)) is not None:
            forms.setdefault(scores, []).append(block)
    documents, chunks = config.data.documents_apart, device == "gpu" and chunks_by_cudnn(config, plan)
    without = why_not_within_sequences(config, plan)
    attention = [
        attention_choice(scores, device, dtype=dtype, documents=documents, chunks=chunks, without_sequences=without)
        for scores in forms
    ]
    if len(forms) > 1:
        attention = [
            dataclasses.replace(choice, operation=f"attention in {len(blocks)} of {plan.shape.num_layers} layers")
            for choice, blocks in zip(attention, forms.values(), strict=True)
        ]
    attention = [_named_attention(choice, config.kernels, device) for choice in attention]
    linear = (
        *linear_choices(config.precision, config.kernels, device),
        *tensor_parallel_choices(plan, device=device),
    )
    if config.model.moe is not None and config.precision.fp8 != "none":
        linear = (Choice(EXPERTS, PRODUCT, f"in {dtype}: only linear layers are computed in FP8"), *linear)
    pointwise = pointwise_choices(config.kernels, device, dtype=dtype)
    if family.scans(plan.shape):
        attention.append(scan_choice(config.kernels, device, dtype=dtype))
    return (*attention, *linear, *pointwise, launch_choice(config, plan, device=device))


def missing_kernel_libraries(kernels: KernelsSection) -> list[str]:
    """A problem for each named kernel whose library is not installed."""
    problems = []
    for key, name in dataclasses.asdict(kernels).items():
        if name in GPU_LIBRARIES and importlib.util.find_spec(module := _module(name, key)) is None:
            text = f'kernels.{key}="{name}" cannot be used: {module} is not installed'
            problems.append(f'{text}; install it, or set kernels.{key}="auto"')
    return problems


def chunks_by_cudnn(config: RunConfig, plan: Plan) -> bool:
    """Whether cuDNN on a GPU computes the chunks of rows of context parallelism (chunk_attention.py)."""
    half = config.precision.dtype in ("bf16", "fp16")
    return plan.cp > 1 and half and plan.head_dim <= WIDEST_CUDNN_HEAD and not config.run.deterministic


def why_not_within_sequences(config: RunConfig, plan: Plan) -> str:
    """Why a GPU does not compute attention within sequences by cuDNN (cudnn_sequences.py); empty: it does."""
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    if config.run.deterministic:
        return "run.deterministic"
    if plan.cp > 1:
        return "rows are computed in chunks"
    width = plan.head_dim
    return f"not for heads of {width}" if width % CUDNN_HEAD_MULTIPLE or width > WIDEST_CUDNN_HEAD else ""


def _named_attention(choice: Choice, kernels: KernelsSection, device: Device) -> Choice:
    if choice.kernel not in (SDPA, CUDNN):
        return choice
    if kernels.attention == "auto":
        others = library_reasons(ATTENTION, "no faster") if device == "gpu" else ()
        return dataclasses.replace(choice, others=(*choice.others, *others))
    named = _named(choice.operation, "attention", kernels.attention, device)
    return dataclasses.replace(named, others=((choice.kernel, "another one is named"), *choice.others))


def linear_choices(precision: PrecisionSection, kernels: KernelsSection, device: Device) -> tuple[Choice, ...]:
    """The kernels for products of linear layers, and for adding a weight's gradient to its sum."""
    not_gpu = device == "cpu"
    products = Choice(LINEAR, PRODUCT, f"in {precision.dtype}", ((TRANSFORMER_ENGINE, 'precision.fp8="none"'),))
    if precision.fp8 != "none":
        kernel = f"{PLAIN}, FP8 emulated" if not_gpu else f"{TRANSFORMER_ENGINE} in FP8"
        slow = "; slow, for trying a configuration" if not_gpu else ""
        if not not_gpu and importlib.util.find_spec("transformer_engine") is None:
            slow = "; it is not installed, so a run is refused"
        products = Choice(LINEAR, kernel, f'precision.fp8="{precision.fp8}"{slow}', ((PRODUCT, "it is not in FP8"),))
    if kernels.weight_gradient != "auto":
        return products, _named(WEIGHT_GRADIENT, "weight_gradient", kernels.weight_gradient, device)
    others = () if not_gpu else library_reasons(WEIGHT_GRADIENT, "no faster")
    return products, Choice(WEIGHT_GRADIENT, PRODUCT, "it adds to fp32 by itself on a GPU", others)


def scan_choice(kernels: KernelsSection, device: Device, *, dtype: str) -> Choice:
    """The kernels of scan and convolution of mixers."""
    if kernels.scan != "auto":
        return _named(SCAN, "scan", kernels.scan, device)
    if device == "cpu" or dtype == "fp64":
        why = "used on GPUs only" if device == "cpu" else f"it has no {dtype}"
        return Choice(SCAN, PLAIN, "in chunks, in at least fp32", ((TRITON_SCAN, why), (MAMBA_SSM, why)))
    others = (
        (MAMBA_SSM, "used where the trial differs"),
        (PLAIN, "in fp32 without Tensor Cores; a hybrid of 8 layers trained at 44 % of the speed"),
    )
    return Choice(SCAN, TRITON_SCAN, "compared with the plain one when a run starts", others)


def tensor_parallel_choices(plan: Plan, *, device: Device) -> tuple[Choice, ...]:
    """What moves tokens between tensor-parallel ranks."""
    if plan.tp == 1:
        return ()
    return (Choice(TENSOR_PARALLEL, "NCCL" if device == "gpu" else "gloo", "beside products of weights' gradients"),)


def launch_choice(config: RunConfig, plan: Plan, *, device: Device) -> Choice:
    """Whether kernels are launched one by one or as CUDA graphs."""
    one_by_one, graphs = "one by one", "CUDA graphs"
    setting, sharing = config.kernels.cuda_graphs, plan.sharing
    reason = f'kernels.cuda_graphs="{setting}"'
    if uses_graphs(config, sharing=sharing) and (device == "gpu" or setting == "on"):
        if device == "cpu":
            return Choice(LAUNCHES, graphs, f"{reason}; refused on a CPU")
        parts = "passes and the update" if sharing == 1 else "passes"
        if sharing > 1 and config.kernels.overlap_passes == "on":
            parts = "passes of all but the first and last microbatch of a step"
        if config.data.kind in ("bert", "t5"):
            parts += ", for sizes of rows without padding that recur"
        elif config.data.documents_apart:
            parts += ", for numbers and lengths of documents that recur"
        other = "another way is named" if setting == "on" else "GPUs would wait for the host"
        return Choice(LAUNCHES, graphs, f"{reason}; of {parts}", ((one_by_one, other),))
    why = why_not_recorded(config, sharing=sharing) or "kernels.cuda_graphs can turn them on"
    return Choice(LAUNCHES, one_by_one, reason, ((graphs, "used on GPUs only" if device == "cpu" else why),))


def library_reasons(operation: str, why: str) -> tuple[tuple[str, str], ...]:
    """Why libraries with a kernel for an operation are not used."""
    reasons = []
    for name, key in LIBRARIES[operation]:
        is_installed = importlib.util.find_spec(_module(name, key)) is not None
        reasons.append((NAMES[name], f"{why}; kernels.{key} can name it" if is_installed else "it is not installed"))
    return tuple(reasons)


def _module(name: str, key: str) -> str:
    """The module that exists if a library's kernel is installed."""
    return APEX_MODULES[key] if name == "apex" else name


def _named(operation: str, key: str, name: str, device: Device) -> Choice:
    reason = f'kernels.{key}="{name}"'
    if name in GPU_LIBRARIES:
        reason += "; refused on a CPU" if device == "cpu" else "; compared with the plain one when a run starts"
    return Choice(operation, NAMES[name], reason)


def attention_choice(
    scores: ScoreShape,
    device: Device,
    *,
    dtype: str,
    documents: bool = False,
    chunks: bool = False,
    without_sequences: str = "",
) -> Choice:
    """The kernel of one form of attention.

    Args:
        documents: rows hold several. chunks: see chunks_by_cudnn. without_sequences: see why_not_within_sequences.
    """
    operation = scores.operation(documents=documents)
    keys = " and ".join(option_names(scores))
    if operation == "attention" and chunks:
        slower = (SDPA, "slower for fewer queries than keys; used on GPUs before Hopper")
        return Choice(
            "attention",
            CUDNN,
            "chunks of each row, whose own keys come first while others travel",
            (slower, *_others_than_sdpa(device)),
        )
    if operation == "attention":
        return Choice("attention", SDPA, "causal attention over whole rows", _others_than_sdpa(device))
    if operation == "padded_attention":
        if device == "gpu" and dtype in ("bf16", "fp16"):
            return _within_sequences("real tokens of each row", without_sequences, (SDPA, "it also computes padding"))
        return Choice("attention", SDPA, "a mask hides padding", _others_than_sdpa(device))
    no_sdpa = (SDPA, f"it has no fused kernel for {keys or 'documents within rows'}")
    if device == "cpu":
        return Choice("attention", PLAIN, f"{ALL_SCORES} (not in the estimate)", (no_sdpa, (FLEX, "used on GPUs only")))
    if scores.dropout:
        reason = f"model.attention_dropout; {ALL_SCORES} (not in the estimate)"
        return Choice("attention", PLAIN, reason, (no_sdpa, (FLEX, "it cannot drop attention weights")))
    if scores.relative and dtype in ("bf16", "fp16"):
        flex = (FLEX, "its gradients of biases differ between runs")
        masked = (SDPA, "one mask for all layers; used for heads of other widths, and where the trial fails")
        reason = "relative positions; tried when a run starts"
        return Choice("attention", BIASED, reason, (masked, flex, (PLAIN, ALL_SCORES)))
    if scores.relative:
        reason = f"relative positions; {ALL_SCORES} (not in the estimate)"
        return Choice("attention", PLAIN, reason, (no_sdpa, (FLEX, "its gradients of biases differ between runs")))
    not_plain = (PLAIN, ALL_SCORES)
    if operation == "scored_attention":
        return Choice("attention", FLEX, keys, (no_sdpa, not_plain))
    if dtype in ("bf16", "fp16"):
        return _within_sequences("documents within rows", without_sequences, no_sdpa, not_plain)
    return Choice("attention", FLEX, "documents within rows", (no_sdpa, (VARLEN, f"not for {dtype}"), not_plain))


def _within_sequences(reason: str, without: str, *others: tuple[str, str]) -> Choice:
    if without:
        return Choice("attention", VARLEN, reason, ((SEQUENCES, without), *others))
    reason += "; on Hopper and Blackwell, tried when a run starts"
    slower = (VARLEN, "slower; used on other GPUs, and where the trial fails")
    return Choice("attention", SEQUENCES, reason, (slower, *others))


def _others_than_sdpa(device: Device) -> tuple[tuple[str, str], ...]:
    flex = "used on GPUs only" if device == "cpu" else "no option of the model needs it"
    return ((FLEX, flex), (PLAIN, ALL_SCORES))


def option_names(scores: ScoreShape) -> list[str]:
    """What rules out a fused kernel of causal attention, in the order in which it applies."""
    named = {
        "model.attention_softcap": scores.softcap,
        'model.position = "alibi"': scores.alibi,
        "model.window": scores.window,
        "model.attention_sinks": scores.sinks != "none",
        "model.attention_dropout": scores.dropout,
        'model.position = "relative"': scores.relative,
        "rows of the encoder": not scores.causal,
    }
    return [name for name, is_set in named.items() if is_set]


def pointwise_choices(kernels: KernelsSection, device: Device, *, dtype: str) -> tuple[Choice, ...]:
    """The kernels that the section names, one by one, and the rest together."""
    named = {key: getattr(kernels, key) for key in POINTWISE if getattr(kernels, key) != "auto"}
    choices = [_named(POINTWISE[key], key, name, device) for key, name in named.items()]
    if rest := [name for key, name in POINTWISE.items() if key not in named]:
        choices.append(dataclasses.replace(pointwise_choice(device, dtype=dtype), operation=", ".join(rest)))
    return tuple(choices)


def pointwise_choice(device: Device, *, dtype: str) -> Choice:
    """Norms, activations, rotary positions, the loss and the optimizer's update."""
    operation, slow = ", ".join(POINTWISE.values()), "more passes over memory"
    if device == "gpu":
        others = ((LIBRARY, slow), (PLAIN, slow), *library_reasons("pointwise", slow))
        return Choice(operation, COMPILED, "one or two passes over memory each", others)
    compiled = (COMPILED, "used on GPUs only")
    if dtype in ("fp32", "fp64"):
        reason = f"where PyTorch has one, else {PLAIN}"
        return Choice(operation, LIBRARY, reason, (compiled,))
    rounding = f"they round intermediate results to {dtype}"
    return Choice(operation, PLAIN, f"exact up to one rounding to {dtype}", (compiled, (LIBRARY, rounding)))
