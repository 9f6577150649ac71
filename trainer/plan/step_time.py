"""Estimates the time of a step from a plan: operations and bytes divided by the rates that a device reaches.

An estimate for choosing between layouts, not a simulation; docs/design/parallel.md compares it with measured runs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import fmean

from trainer.config.sections import MeshSection, RunConfig
from trainer.models.family import family_of
from trainer.parallel.buckets import cut_buckets
from trainer.parallel.params import Place
from trainer.pipeline.simulate import Costs
from trainer.plan import devices
from trainer.plan.check import uses_graphs
from trainer.plan.devices import Device
from trainer.plan.kernel_choice import chunks_by_cudnn
from trainer.plan.memory import BYTES, alike, element_bytes, tables
from trainer.plan.plan import Plan
from trainer.plan.stages import LOOKUP_BYTES

NETWORK = 50e9  # bytes a second of one GPU to other machines: a port of 400 Gbit/s
UPDATE_BYTES = 30  # moved by AdamW for one parameter in 16 bits: weight and moments twice, gradient, parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The parts of a step, in seconds, on the slowest rank.

    Args:
        products, attention, memory: kernels, by what limits them. idle: the device waits for the host.
        tensor_parallel, data_parallel, context_parallel: collectives that are not overlapped.
        update: of the optimizer.
        bubble: the rank waits for others of its pipeline, and for messages.
    """

    products: float
    attention: float
    memory: float
    idle: float
    tensor_parallel: float
    context_parallel: float
    data_parallel: float
    update: float
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What limits the GPUs of a run, of one kind.

    Args:
        gpus_per_node: ranks that share a machine. network: bytes per second of each rank to other machines.
        launch: seconds in which the host launches a kernel.
    """

    device: Device
    gpus_per_node: int
    network: float = NETWORK
    launch: float = devices.LAUNCH_S

    @property
    def host_pass(self) -> float:
        """Seconds in which the host launches a block's pass."""
        return devices.PASS_LAUNCHES * self.launch

    def among(self, ranks: int) -> float:
        """The rate of a collective over a group of this many neighbouring ranks."""
        return devices.LINK * (self.device.link if ranks <= self.gpus_per_node else self.network)


def step_time(config: RunConfig, plan: Plan, rates: Rates) -> StepTime:
    """Estimate a step of a plan."""
    time = busy_time(config, plan, rates)
    if plan.pp == 1:
        return time
    return dataclasses.replace(time, bubble=_bubble(config, plan, _of_ranks(config, plan, rates), rates))


def busy_time(config: RunConfig, plan: Plan, rates: Rates) -> StepTime:
    """The same without the bubble, whose simulation takes longer than everything else: the least that a step takes."""
    device = rates.device
    busiest = max(_of_ranks(config, plan, rates), key=lambda stages: sum(stage.total for stage in stages))
    times, parts = plan.num_microbatches, ("products", "attention", "memory", "idle", "tensor_parallel")
    kernels = {name: times * sum(getattr(stage, name) for stage in busiest) for name in (*parts, "context_parallel")}
    kernels["idle"] += devices.STEP_S
    data = plan.cp * plan.dp
    updated = _trained_per_rank(plan) // (1 if config.optimizer.sharding == "none" else data)
    computed = kernels["products"] + kernels["attention"] + kernels["memory"]
    return StepTime(
        **kernels,
        data_parallel=exposed_data_parallel(config, plan, rate=rates.among(plan.tp * data), computed=computed),
        update=updated * UPDATE_BYTES / (devices.MEMORY * device.bandwidth),
    )


def _of_ranks(config: RunConfig, plan: Plan, rates: Rates) -> list[list[StepTime]]:
    """One microbatch through each stage of each pipeline rank."""
    like = _place(config.mesh, plan)
    return [
        [_microbatch(config, plan, place, rates) for place in plan.pipeline.places(r, like)] for r in range(plan.pp)
    ]


def _place(mesh: MeshSection, plan: Plan) -> Place:
    return plan.place(sequence_parallel=mesh.sequence_parallel)


def _microbatch(config: RunConfig, plan: Plan, place: Place, rates: Rates) -> StepTime:
    """One microbatch through one stage, forward and backward."""
    element, device = BYTES[config.precision.dtype], rates.device
    cost = family_of(config).stage_cost(
        plan.shape,
        place,
        tokens=plan.micro_batch * plan.sample_tokens // plan.cp,
        document_lengths=plan.document_lengths,
        element=element,
        recompute=config.recompute,
        float8=config.precision.float8_blocks(plan.shape.num_layers),
    )
    flops = cost.product_flops + 2 * devices.EXPERT_ROWS * cost.expert_elements
    products = flops / devices.PRODUCTS + cost.float8_flops / devices.FLOAT8_PRODUCTS
    share = devices.attention_share(plan.head_dim, fmean(plan.document_lengths))
    by_cudnn = chunks_by_cudnn(config, plan)
    if plan.cp > 1:
        share *= devices.CUDNN_CHUNKS if by_cudnn else devices.OTHER_CHUNKS
    attention = cost.attention_flops / (share * device.flops)
    # The embedding, which the family's cost leaves out.
    looked_up = (place.stage == 0) * plan.micro_batch * plan.sample_tokens // plan.cp * plan.shape.hidden_size
    gathered = _gathered_numbers(config, plan, place) * element * (plan.cp - 1) / plan.cp
    # A rank attends to its own keys, an even share of the work, while others travel (layers/context_attention.py).
    meanwhile = attention / plan.cp if by_cudnn and not config.data.documents_apart else 0.0
    starts = cost.passes * devices.TENSOR_PARALLEL_START_S if plan.tp > 1 else 0.0
    time = StepTime(
        products=products / device.flops,
        attention=attention,
        memory=(cost.moved_bytes + looked_up * LOOKUP_BYTES) / (devices.MEMORY * device.bandwidth),
        idle=0.0,
        tensor_parallel=cost.sent_bytes / rates.among(plan.tp) + starts,
        context_parallel=max(0.0, 2 * gathered / rates.among(plan.tp * plan.cp) - meanwhile),
        data_parallel=0.0,
        update=0.0,
    )
    waits = max(0.0, cost.passes * (rates.host_pass if plan.tp > 1 else 0.0) - time.total)
    gaps = cost.passes * devices.PASS_S + cost.expert_passes * devices.EXPERT_PASS_S
    idle = max(gaps, waits * _launched_one_by_one(config, plan)) + cost.host_waits * rates.host_pass
    return dataclasses.replace(time, idle=idle)


def _launched_one_by_one(config: RunConfig, plan: Plan) -> float:
    """The share of microbatches that are not launched as CUDA graphs; see pipeline/graphs.py."""
    if not uses_graphs(config, sharing=plan.sharing):
        return 1.0
    computed = 2 if plan.sharing > 1 and config.kernels.overlap_passes == "on" else 0
    return min(1.0, computed / plan.num_microbatches)


def _gathered_numbers(config: RunConfig, plan: Plan, place: Place) -> int:
    """Numbers that a stage gathers over cp for a microbatch: what its layers would keep of each token in generation, or
    of each of the 2 cp chunks of a row.
    """
    if plan.cp == 1:
        return 0
    family, count = family_of(config), 0
    for layer in place.blocks(plan.shape.num_layers):
        state = family.decode_state(plan.shape, family.kinds(plan.shape)[layer])
        of_row = plan.sample_tokens if state.per == "token" else 2 * plan.cp
        count += of_row * sum(map(math.prod, state.tensors.values())) // (plan.tp if state.divided else 1)
    return plan.micro_batch * count


def exposed_data_parallel(config: RunConfig, plan: Plan, *, rate: float, computed: float) -> float:
    """Seconds of gradient sums and parameter gathers that are not overlapped with computation.

    Each overlaps with a pass (a third or two thirds of the computation), except for one bucket.

    Args:
        rate: bytes per second. computed: seconds of all forward and backward passes of a step.
    """
    optimizer, data, times = config.optimizer, plan.cp * plan.dp, plan.num_microbatches
    weight, gradient = element_bytes(config.precision)
    sharded = optimizer.sharding in ("gradients", "parameters")
    sums = gradient * (times if sharded else 2 if optimizer.sharding == "none" else 1)
    gathers = weight * {"none": 0, "parameters": 2 * times}.get(optimizer.sharding, 1)
    beside_sums = computed * 2 / 3 / (1 if sharded else times)
    beside_gathers = computed if optimizer.sharding == "parameters" else computed / 3 / times
    second = (data - 1) / data / rate  # for a byte of each element
    gathered = plan.parameters_per_rank if optimizer.sharding == "parameters" else _trained_per_rank(plan)
    exposed = 0.0
    if data == 1:
        return exposed
    of_rank = tables(config, plan)
    buckets = min(len(list(cut_buckets(of_rank[r], bucket_size=optimizer.bucket_size or 0))) for r in set(alike(plan)))
    for seconds, beside, overlaps in (
        (sums * _trained_per_rank(plan) * second, beside_sums, optimizer.overlap_grad_reduce),
        (gathers * gathered * second, beside_gathers, optimizer.overlap_param_gather),
    ):
        exposed += max(seconds - beside, seconds / buckets) if overlaps else seconds
    return exposed


def _trained_per_rank(plan: Plan) -> int:
    """Elements of a rank that are not frozen."""
    return plan.parameters_per_rank * plan.trained_parameters // plan.num_parameters


def _bubble(config: RunConfig, plan: Plan, ranks: list[list[StepTime]], rates: Rates) -> float:
    """Seconds of a step in which the busiest rank waits.

    Backward is assumed to be two thirds of a pass, in two halves; recomputation is part of the first half. For a long
    step a shorter one is simulated: after the beginning each round of microbatches takes as long as the previous one.
    """
    layout, stages = plan.pipeline, {}
    for rank, of_rank in enumerate(ranks):
        for place, time in zip(layout.places(rank, _place(config.mesh, plan)), of_rank, strict=True):
            stages[place.stage] = time.total
    again = 1 if config.recompute.mode == "full" else 0
    third = tuple(stages[s] / (3 + again) for s in range(len(stages)))
    inputs = tuple((1 + again) * part for part in third)
    split = plan.tp if config.mesh.sequence_parallel else 1
    width = plan.shape.hidden_size * BYTES[config.precision.dtype]
    sent = plan.micro_batch * plan.sample_tokens // plan.cp // split * width
    # A link between two machines is the slowest; everything after it waits for it.
    costs = Costs(forward=third, inputs=inputs, weights=third, transfer=sent / rates.among(plan.world_size))
    busy = plan.num_microbatches * max(sum(time.total for time in of_rank) for of_rank in ranks)
    return max(0.0, layout.step_seconds(plan.num_microbatches, costs) - busy)
