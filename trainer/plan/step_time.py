"""How long a step takes, estimated from a plan: operations and bytes over the rates that a device reaches.

An estimate for choosing between layouts, not a simulation; docs/design/parallel.md compares it with measured runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.sections import RunConfig
from trainer.models.family import family_of
from trainer.parallel.buckets import cut_buckets
from trainer.parallel.params import Place
from trainer.plan import devices
from trainer.plan.devices import Device
from trainer.plan.memory import BYTES, element_bytes, tables
from trainer.plan.plan import Plan

NETWORK = 50e9  # bytes a second of one GPU to other machines: a port of 400 Gbit/s
UPDATE_BYTES = 30  # moved by AdamW for one parameter in 16 bits: weight and moments twice, gradient, parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The parts of a step, in seconds, on the slowest rank.

    Args:
        products, attention, memory: kernels, by what bounds them. idle: nothing runs, for the host's sake.
        tensor_parallel, data_parallel, context_parallel: collectives, as far as nothing hides them.
        update: of the optimizer.
    """

    products: float
    attention: float
    memory: float
    idle: float
    tensor_parallel: float
    context_parallel: float
    data_parallel: float
    update: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
        parts = (self.products, self.attention, self.memory, self.idle, self.update)
        return sum(parts) + self.tensor_parallel + self.context_parallel + self.data_parallel


def step_time(
    config: RunConfig, plan: Plan, *, device: Device, gpus_per_node: int, network: float = NETWORK
) -> StepTime:
    """The estimate for a plan on GPUs of one kind.

    Args:
        gpus_per_node: ranks that share a machine. network: bytes a second of each of them to other machines.
    """
    place = Place(tp_size=plan.tp, sequence_parallel=config.mesh.sequence_parallel)
    element = BYTES[config.precision.dtype]
    cost = family_of(config).stage_cost(
        plan.shape,
        place,
        tokens=plan.micro_batch * plan.sequence_length // plan.cp,
        length=plan.sequence_length,
        element=element,
        recompute=config.recompute,
    )

    def link(ranks: int) -> float:
        """The rate of a collective over a group of so many neighbouring ranks."""
        return devices.LINK * (device.link if ranks <= gpus_per_node else network)

    times = plan.num_microbatches
    share = devices.attention_share(plan.head_dim) * (devices.CHUNKED_ATTENTION if plan.cp > 1 else 1)
    data = plan.cp * plan.dp
    updated = plan.parameters_per_rank // (1 if config.optimizer.sharding == "none" else data)
    keys = 2 * plan.shape.num_kv_heads * plan.head_dim // plan.tp * plan.shape.num_layers * element
    gathered = keys * plan.micro_batch * plan.sequence_length * (plan.cp - 1) / plan.cp
    bandwidth = devices.MEMORY * device.bandwidth
    products = times * cost.product_flops / (devices.PRODUCTS * device.flops)
    attention, memory = times * cost.attention_flops / (share * device.flops), times * cost.moved_bytes / bandwidth
    return StepTime(
        products=products,
        attention=attention,
        memory=memory,
        idle=times * cost.passes * devices.PASS_S + devices.STEP_S,
        tensor_parallel=times * cost.sent_bytes / link(plan.tp),
        context_parallel=times * 2 * gathered / link(plan.tp * plan.cp),
        data_parallel=exposed_data_parallel(
            config, plan, rate=link(plan.tp * data), computed=products + attention + memory
        ),
        update=updated * UPDATE_BYTES / bandwidth,
    )


def exposed_data_parallel(config: RunConfig, plan: Plan, *, rate: float, computed: float) -> float:
    """Seconds of sums of gradients and gathers of parameters that computation does not hide.

    Each is hidden by the pass beside which it goes on, a third or two of what is computed, but for one bucket.

    Args:
        rate: bytes a second. computed: seconds of all forward and backward passes of a step.
    """
    optimizer, data, times = config.optimizer, plan.cp * plan.dp, plan.num_microbatches
    weight, gradient = element_bytes(config)
    sharded = optimizer.sharding in ("gradients", "parameters")
    sums = gradient * (times if sharded else 2 if optimizer.sharding == "none" else 1)
    gathers = weight * {"none": 0, "parameters": 2 * times}.get(optimizer.sharding, 1)
    beside_sums = computed * 2 / 3 / (1 if sharded else times)
    beside_gathers = computed if optimizer.sharding == "parameters" else computed / 3 / times
    second = plan.parameters_per_rank * (data - 1) / data / rate  # for a byte of each parameter
    buckets = min(len(list(cut_buckets(table, bucket_size=optimizer.bucket_size))) for table in tables(config, plan))
    exposed = 0.0
    for seconds, beside, overlaps in (
        (sums * second, beside_sums, optimizer.overlap_grad_reduce),
        (gathers * second, beside_gathers, optimizer.overlap_param_gather),
    ):
        exposed += max(seconds - beside, seconds / buckets) if overlaps else seconds
    return exposed
