"""GPUs by their vendors' data sheets, and the fractions of their rates that this trainer was measured to reach.

The fractions were measured on an H200 (docs/design/parallel.md) and are assumed for the others. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of GPU.

    Args:
        name: part of the name that CUDA gives.
        flops: dense, of bf16 and fp16 products, per second.
        memory_bytes: total. bandwidth: of the memory, bytes per second.
        link: bytes per second to the GPUs of the same machine, one direction.
    """

    name: str
    flops: float
    memory_bytes: int
    bandwidth: float
    link: float


DEVICES = (  # the first whose name is part of CUDA's
    Device(name="B200", flops=2.25e15, memory_bytes=180 * GIB, bandwidth=8.0e12, link=900e9),
    Device(name="H200", flops=989.4e12, memory_bytes=140 * GIB, bandwidth=4.8e12, link=450e9),
    Device(name="H100 PCIe", flops=756e12, memory_bytes=80 * GIB, bandwidth=2.0e12, link=64e9),
    Device(name="H100 NVL", flops=835e12, memory_bytes=94 * GIB, bandwidth=3.9e12, link=300e9),
    Device(name="H100", flops=989.4e12, memory_bytes=80 * GIB, bandwidth=3.35e12, link=450e9),
    Device(name="A100", flops=312e12, memory_bytes=80 * GIB, bandwidth=2.04e12, link=300e9),
    Device(name="L40S", flops=362e12, memory_bytes=48 * GIB, bandwidth=0.86e12, link=32e9),
)

PRODUCTS = 0.72  # of the flops, in matrix products
FLOAT8_PRODUCTS = 1.28  # the same in FP8, whose peak is twice that
# Of the flops, forward and backward together, by the width of heads: in rows of 4,096 tokens, and in far longer ones.
ATTENTION = {64: (0.31, 0.45), 128: (0.47, 0.53)}
CUDNN_CHUNKS = 0.9  # of that, for the chunks of context parallelism: 0.7 (8,192 tokens) to 1.0 (32,768 and more)
OTHER_CHUNKS = 0.6  # the same, by flash attention
MEMORY = 0.78  # of the bandwidth, in everything else
LINK = 0.75  # of a link, in collectives of some megabytes
# That a block's pass with tensor parallelism waits for its collectives to start, whatever their size: what llama7b on
# tp 4, gpt1.3b on tp 2 and llama7b on tp 2 with pp 2 took beyond their products and the bytes they sent.
TENSOR_PARALLEL_START_S = 3e-4
# A block's pass takes the host as long as this many launches of a kernel, including Python's share: llama7b on tp 4
# took 2.99 ms a pass where a launch took 8.74 us. CUDA graphs need next to nothing.
PASS_LAUNCHES = 342
LAUNCH_S = 6.9e-6  # of one: five other hosts took 1.9 to 3.5 ms a pass; this is their median
# A grouped product takes as long as if each expert had so many more rows: weight gradients of 512 and 2,048 rows reach
# 36 and 56 % of the flops where large products reach 72.
EXPERT_ROWS = 550
# That a pass through experts leaves the device without work or with small kernels; profiles show 0.5 ms without work.
EXPERT_PASS_S = 4e-4
PASS_S = 4e-5  # that a block's pass leaves the device without work
STEP_S = 3e-3  # the same, once a step


def device_named(name: str) -> Device | None:
    """The entry of a device by its CUDA name; None if unknown."""
    return next((device for device in DEVICES if re.search(rf"{device.name}(?!\d)", name)), None)


def attention_share(head_dim: int, length: float) -> float:
    """The fraction of flops in attention for a head width, or the next smaller measured one, and tokens of a row."""
    short, long = ATTENTION[max((width for width in ATTENTION if width <= head_dim), default=min(ATTENTION))]
    return long - (long - short) * min(1.0, 4096 / length)
