"""Mamba-2 and its hybrids as Megatron-Core has them: their arguments, and the names and forms of their tensors.

Megatron has z, x, B, C and dt one after the other in one matrix, of each tp rank, and x, B and C in one convolution. In
torch_dist each is a tensor of its own. A mixer's norm is "norm", an MLP's is not fused into a layer of experts. Pure.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from trainer.models.family import Form, Json, Megatron, split_block
from trainer.models.gpt.megatron import arguments as gpt_arguments
from trainer.models.gpt.megatron import tensor as gpt_tensor
from trainer.models.mamba.shape import MambaShape


def tensor(name: str, size: tuple[int, ...], shape: MambaShape, version: float, fused: bool) -> Form:
    """Where one of our tensors is in theirs."""
    _, rest = split_block(name)
    if not rest.startswith("mixer"):
        return gpt_tensor(name, size, shape, version, fused)
    if rest == "mixer_norm.weight" or rest == "mixer_norm.bias":
        kind = rest.rsplit(".", 1)[1]
        theirs = f"mixer.in_proj.layer_norm_{kind}" if fused else f"norm.{kind}"
        return Form(theirs, "row", "row", {"row": size[0]})
    part = rest.removeprefix("mixer.")
    if part in ("dt_bias", "A_log", "D", "norm.weight"):
        return Form(f"mixer.{part}", "row", "row", {"row": size[0]}, cut="row")
    if part == "out_proj.weight":
        lengths = dict(zip(("row", "column"), size, strict=True))
        return Form(f"mixer.{part}", "row column", "row column", lengths, cut="column")
    return _of_parts(part, size, shape)


def _of_parts(part: str, size: tuple[int, ...], shape: MambaShape) -> Form:
    """A part of the first projection, or of the convolution."""
    mixer = shape.mixer
    inner, of_groups = mixer.inner, mixer.of_groups
    rows = {"z": inner, "x": inner, "B": of_groups, "C": of_groups, "dt": mixer.num_heads}
    layer, dims = "in_proj", ["row", "column"]
    if part.startswith("conv1d."):
        layer, part, dims = "conv1d", part.removeprefix("conv1d."), ["row", "one", "column"]
        rows = {name: rows[name] for name in ("x", "B", "C")}
    letter, kind = part.split(".")
    first = dict(zip(rows, accumulate(rows.values(), initial=0), strict=False))[letter]
    notation = " ".join(dims[: len(size)])
    return Form(
        f"mixer.{layer}.{kind}",
        notation,
        notation,
        dict(zip(dims, size, strict=False)),
        {"row": (first, sum(rows.values()))},
        "row",
        split=f"mixer.{layer}.{kind}.{letter}",
    )


def arguments(keys: Json) -> dict[str, Any]:
    """The arguments with which Megatron-LM builds a model with these keys of [model]."""
    defaults = {"num_heads": 1, "num_kv_heads": 1, "head_dim": keys["hidden_size"], "qk_norm": False, "window": None}
    defaults |= {"attention_sinks": "none", "ffn_hidden_size": 4 * keys["hidden_size"], "activation": "gelu"}
    return gpt_arguments({**defaults, **keys}) | {
        "is_hybrid_model": True,
        "hybrid_override_pattern": keys["mamba.pattern"],
        "mamba_num_heads": keys["mamba.num_heads"],
        "mamba_head_dim": keys["mamba.head_dim"],
        "mamba_num_groups": keys["mamba.num_groups"],
        "mamba_state_dim": keys["mamba.state_size"],
    }


MEGATRON = Megatron(arguments=arguments, tensor=tensor, last_norm="final_norm", stacks=False)
