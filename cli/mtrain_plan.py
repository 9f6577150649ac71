"""Print what follows from a run's configuration: layout, batches, model, learning rate, memory, kernels.

--gpus N lists the possible layouts of N GPUs, the fastest first.

The data is opened to find the vocabulary size; if it does not exist yet, set model.vocab_size. Speed and memory of
layouts are estimates; for bf16 on an H200 they were within 10 % and 5 % of measurements.

Examples:
  mtrain plan run.toml --ranks 8
  mtrain plan run.toml --gpus 64 --nodes 8 --device H100
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from typing import TYPE_CHECKING, Any

from mdata import UsageError
from mdata.errors import counted
from trainer.config.parse import load_config, problems_error

from .console import Console, Parser
from .mtrain_options import add_config_arguments, world_size

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.plan.check import DataFacts
    from trainer.plan.layouts import Hardware, Layout
    from trainer.plan.plan import Plan

HARDWARE = ("memory", "link", "network", "launch")  # read by gpus_described; None where a command has no such option


def add_arguments(parser: Parser) -> None:
    """See `mtrain plan --help`."""
    add_config_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks of the whole run, on all machines (default: the GPUs of this one; without any, "
        "as few as [mesh] needs)",
    )
    parser.add_argument(
        "--schedule",
        action="store_true",
        help="draw what each pipeline rank does in a step, with its bubble and memory",
    )
    add = parser.add_argument_group("list layouts instead of one plan").add_argument
    add("--gpus", type=int, metavar="N", help="the possible layouts of N GPUs, on all machines")
    add("--layouts", action="store_true", help="with --ranks N: the same as --gpus N")
    add("--nodes", type=int, metavar="N", help="machines (default: one per 8 GPUs)")
    add("--device", metavar="NAME", help="kind of GPU (default: that of this machine, or H100)")
    add("--memory", type=float, metavar="GIB", help="GiB of a GPU (default: the device's)")
    add("--link", type=float, metavar="GBYTE", help="GB/s of a GPU to others of its machine, one direction")
    add("--network", type=float, metavar="GBIT", help="Gbit/s of a GPU to other machines (default: 400)")
    add("--launch", type=float, metavar="US", help="microseconds in which the host launches a kernel (default: 6.9)")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Print the plan, or the layouts, as a table."""
    from trainer.plan.facts import plan_facts
    from trainer.plan.plan import make_plan

    if arguments.layouts:
        if (arguments.ranks is None) == (arguments.gpus is None):
            raise UsageError("--layouts needs --ranks N or --gpus N", fix="mtrain plan run.toml --layouts --ranks 64")
        arguments.gpus = arguments.ranks if arguments.gpus is None else arguments.gpus
        arguments.ranks = None
    if arguments.gpus is not None:
        _list_layouts(arguments, console)
        return
    for name in ("nodes", "device", *HARDWARE):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} needs --gpus N, which lists layouts", fix=f"add --gpus, or leave --{name} out")
    config = load_config(arguments.config, arguments.overrides)
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError("--ranks is too small", found=str(arguments.ranks), expected="1 or more, on all machines")
    ranks = world_size(config, None) if arguments.ranks is None else arguments.ranks
    plan = make_plan(config, ranks, facts=_facts(config, console))
    rows = [(name, f"{value:,}") for name, value in plan_rows(config, plan)] + _memory_rows(config, plan)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:>15}" for name, value in rows]
    more = _schedule_lines(config, plan) if arguments.schedule else _kernel_lines(config, plan)
    console.result("\n".join(lines + more), plan_facts(config, plan))


def plan_rows(config: RunConfig, plan: Plan) -> list[tuple[str, int]]:
    """The plan's numbers in reading order, with display names."""
    from trainer.models.family import family_of
    from trainer.plan.lengths import batch_sizes

    sizes = batch_sizes(config.train).sizes
    changing = [("  in the first step", sizes[0]), ("  number of sizes", len(sizes))] if len(sizes) > 1 else []
    keys = family_of(config).effective(config)  # without those of layers that the model does not have
    of_layers = [
        ("head_dim", "head size", plan.head_dim),
        ("ffn_hidden_size", "hidden size of the MLP", plan.ffn_hidden_size),
        ("num_heads", "heads per rank", plan.heads_per_rank),
        ("num_kv_heads", "key and value heads per rank", plan.kv_heads_per_rank),
    ]
    return [
        ("ranks", plan.world_size),
        ("tensor-parallel ranks (tp)", plan.tp),
        ("context-parallel ranks (cp)", plan.cp),
        *([("pipeline ranks (pp)", plan.pp), ("  stages", len(plan.pipeline.stage_ranks))] if plan.pp > 1 else []),
        ("data-parallel ranks (dp)", plan.dp),
        ("steps", plan.steps),
        *_schedule_rows(plan),
        ("tokens per sample", plan.sequence_length),
        ("samples per step", plan.global_batch),
        *changing,
        ("samples per microbatch", plan.micro_batch),
        ("microbatches per rank and step", plan.num_microbatches),
        ("tokens per step", plan.tokens_per_step),
        ("tokens in the run", plan.num_samples * plan.sequence_length),
        ("vocabulary", plan.vocab_size),
        ("  padded", plan.padded_vocab_size),
        *[(name, value) for key, name, value in of_layers if key in keys],
        ("parameters", plan.num_parameters),
        *([("  active for a token", active)] if (active := plan.active_parameters) < plan.num_parameters else []),
        *([("  trained", trained)] if (trained := plan.trained_parameters) < plan.num_parameters else []),
        ("  per rank, with padding", plan.parameters_per_rank),
        ("floating-point operations per token", plan.flops_per_token),
    ]


def _schedule_rows(plan: Plan) -> list[tuple[str, int]]:
    """Where the learning rate changes, in steps, or in samples if one of its lengths is given in samples."""
    lengths = plan.schedule
    unit = "" if lengths.counter == "steps" else "samples "
    decay = [("of WSD's decay", lengths.wsd_decay)] if lengths.wsd_decay else []
    numbers = [("of warmup", lengths.warmup), *decay, ("until the end of the decay", lengths.decay)]
    return [(f"  {unit}{name}", round(number)) for name, number in numbers]


def _memory_rows(config: RunConfig, plan: Plan) -> list[tuple[str, str]]:
    """Estimates for one rank, without memory outside of tensors."""
    from trainer.errors import size_text
    from trainer.plan.memory import activation_bytes, state_bytes

    return [
        ("memory per rank: weights, gradients, optimizer", size_text(state_bytes(config, plan))),
        (
            f"  activations of {'microbatches in progress' if plan.pp > 1 else 'a microbatch'}",
            size_text(activation_bytes(config, plan)),
        ),
        ("  recomputation", config.recompute.mode),
    ]


def _schedule_lines(config: RunConfig, plan: Plan) -> list[str]:
    """The grid of a step's first microbatches, the bubble of the whole step, and what each pipeline rank holds."""
    from trainer.errors import size_text
    from trainer.pipeline.actions import stages_of
    from trainer.pipeline.render import render_text
    from trainer.plan.memory import rank_bytes

    layout, count = plan.pipeline, plan.num_microbatches
    shown = min(count, 2 * plan.pp)
    full_step, grid = layout.timeline(count), layout.timeline(shown)
    each = f"{count} microbatch{'es' * (count > 1)}" + (f", the grid shows a step of {shown}" if shown < count else "")
    lines = ["", f"schedule {layout.schedule}, {each}", render_text(grid, num_stages=len(layout.stage_ranks))]
    bubble = f"bubble: {full_step.bubble:.1%} of the busiest rank's work"
    if plan.pp > 1:
        most = max(full_step.idle)
        bubble += (
            f"; rank {full_step.idle.index(most)} is idle for {most / full_step.step:.1%} of the step, the longest"
        )
    lines.append(f"{bubble} (work is counted in layers, without communication)")
    memory = rank_bytes(config, plan)
    for rank, held in enumerate(plan.parameters_per_stage):
        layers = [layout.layers_per_stage[stage] for stage in stages_of(layout.stage_ranks, rank)]
        lines.append(
            f"rank {rank}: {' + '.join(map(str, layers))} layer{'s' * (sum(layers) != 1)}, {held:,} parameters, "
            f"state {size_text(memory[rank].state)}, activations {size_text(memory[rank].activations)}, "
            f"in all {size_text(memory[rank].total)}, idle {full_step.idle[rank] / full_step.step:.1%}"
        )
    return lines


def _kernel_lines(config: RunConfig, plan: Plan) -> list[str]:
    """For each kind of device the kernels and their reasons; this machine's kind first."""
    import torch

    from trainer.plan.kernel_choice import DEVICES, kernel_choices

    here = "gpu" if torch.cuda.is_available() else "cpu"
    lines = []
    for device in sorted(DEVICES, key=lambda device: device != here):
        lines += ["", f"kernels on a {device.upper()}" + (", as on this machine" if device == here else "")]
        for choice in kernel_choices(config, plan, device=device):
            lines.append(f"  {choice.operation}: {choice.kernel}; {choice.reason}")
            lines += [f"    not {kernel}: {reason}" for kernel, reason in choice.others]
    return lines


def _facts(config: RunConfig, console: Console) -> DataFacts | None:
    from trainer.run.data import open_data

    try:
        return open_data(config).facts
    except UsageError as error:
        if not config.model.vocab_size:
            raise
        console.note(f"mtrain: warning: planned without the data: {error}")
        return None


def _list_layouts(arguments: argparse.Namespace, console: Console) -> None:
    from trainer.plan.layouts import find_layouts, problems_of_every_layout
    from trainer.plan.plan import make_plan
    from trainer.run.measuring import peak_flops

    if arguments.ranks is not None:
        raise UsageError("--ranks plans one layout, and --gpus lists all of them", fix="give one of them")
    _refuse_idle(arguments)
    config, hardware = load_config(arguments.config, arguments.overrides), gpus_described(arguments)
    facts = _facts(config, console)
    with console.progress() as progress:
        layouts = find_layouts(config, hardware, facts=facts, progress=progress)
    none_runs = all(layout.problem for layout in layouts)
    if none_runs and (problems := problems_of_every_layout(config, hardware, facts=facts)):
        raise problems_error(arguments.config, problems)
    plan = make_plan(layouts[0].config, hardware.gpus, facts=facts) if not none_runs else None
    peak = peak_flops(hardware.device.name, config.precision.dtype)
    of_peak = plan.flops_per_token / (peak * hardware.gpus) if plan and peak else None
    rows = [_layout_row(layout, hardware, of_peak) for layout in layouts]
    header = ("tp", "cp", "pp", "dp", "bubble", "tokens/s", "per GPU", "MFU", "GiB", "settings, or why not")
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header) - 1)]
    lines = ["  ".join([*map(str.rjust, row, widths), row[-1]]).rstrip() for row in (header, *rows)]
    gib, nodes = hardware.memory_bytes / 2**30, counted(hardware.nodes, "node")
    lines.insert(0, f"{hardware.gpus} x {hardware.device.name} of {gib:.0f} GiB on {nodes}; estimates")
    console.result("\n".join(lines), {"layouts": [_layout_facts(layout, hardware, of_peak) for layout in layouts]})


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """Refuse options and settings that a list of layouts would ignore."""
    words = ["mtrain", "plan", arguments.config, "--ranks", str(arguments.gpus), *arguments.overrides]
    one_layout = f"plan one layout: {shlex.join(words)}"
    if arguments.schedule:
        fix = f"leave --schedule out, or {one_layout} --schedule mesh.pp=2"
        raise UsageError("--schedule draws one layout, and --gpus lists all of them", fix=fix)
    chosen = ("mesh.", "recompute.", "train.micro_batch=")  # the list tries all of their values
    if idle := [word for word in arguments.overrides if word.startswith(chosen)]:
        text = f"--gpus tries every mesh, microbatch and recomputation, so {' '.join(idle)} has no effect"
        raise UsageError(text, fix=f"leave it out, or {one_layout}")


def gpus_described(arguments: argparse.Namespace) -> Hardware:
    """The GPUs that the arguments describe.

    Raises:
        UsageError: an invalid number, or an unknown device.
    """
    from trainer.plan.devices import DEVICES, GIB, LAUNCH_S, device_named
    from trainer.plan.layouts import Hardware
    from trainer.plan.step_time import NETWORK

    if arguments.gpus < 1:
        raise UsageError("--gpus is too small", found=str(arguments.gpus), expected="1 or more, on all machines")
    nodes = -(-arguments.gpus // 8) if arguments.nodes is None else arguments.nodes
    if nodes < 1 or arguments.gpus % nodes:
        raise UsageError(
            "the GPUs cannot be divided over the machines",
            found=f"--gpus {arguments.gpus}, --nodes {nodes}",
            expected="a number of GPUs that is a multiple of the machines, both at least 1",
        )
    device = device_named(arguments.device or _this_gpu())
    if device is None:
        device_names = ", ".join(device.name for device in DEVICES)
        raise UsageError(f"unknown --device {arguments.device}", expected=f"one of {device_names}")
    memory = device.memory_bytes if arguments.memory is None else round(arguments.memory * GIB)
    network = NETWORK if arguments.network is None else arguments.network * 1e9 / 8
    launch = LAUNCH_S if arguments.launch is None else arguments.launch * 1e-6
    link = device.link if arguments.link is None else arguments.link * 1e9
    for name, value in (("memory", memory), ("link", link), ("network", network), ("launch", launch)):
        if not 0 < value < float("inf"):
            raise UsageError(f"--{name} is {getattr(arguments, name)}", expected="a number above 0")
    device = dataclasses.replace(device, link=link)
    return Hardware(
        gpus=arguments.gpus, nodes=nodes, device=device, memory_bytes=memory, network=network, launch=launch
    )


def _this_gpu() -> str:
    """The name of this machine's first GPU if its speed is known, otherwise a common one."""
    import torch

    from trainer.plan.devices import device_named

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return name if device_named(name) else "H100"


def _layout_facts(layout: Layout, hardware: Hardware, of_peak: float | None) -> dict[str, Any]:
    """A layout as JSON; `of_peak`: MFU per token per second of the run."""
    config = layout.config
    return {
        "tp": config.mesh.tp,
        "cp": config.mesh.cp,
        "pp": config.mesh.pp,
        "dp": hardware.gpus // (config.mesh.tp * config.mesh.cp * config.mesh.pp),
        "schedule": config.mesh.schedule if config.mesh.pp > 1 else "",
        "stage_balance": config.mesh.stage_balance if config.mesh.pp > 1 else "",
        "bubble": layout.time and round(layout.time.bubble / layout.time.total, 4),
        "micro_batch": config.train.micro_batch,
        "recompute": config.recompute.mode,
        "settings": layout_settings(config),
        "tokens_per_s": round(layout.tokens_per_s),
        "mfu": None if of_peak is None or layout.problem else round(layout.tokens_per_s * of_peak, 4),
        "memory_bytes": layout.memory_bytes,
        "problem": layout.problem,
        "time_s": None if layout.time is None else dataclasses.asdict(layout.time),
    }


def layout_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of a layout, by section.key: those of the mesh and of recomputation that are not the default."""
    settings = {}
    for name in ("mesh", "recompute"):
        section = getattr(config, name)
        for field in dataclasses.fields(section):
            if (value := getattr(section, field.name)) != field.default:
                settings[f"{name}.{field.name}"] = value
    return settings | {"train.micro_batch": config.train.micro_batch}


def _layout_row(layout: Layout, hardware: Hardware, of_peak: float | None) -> tuple[str, ...]:
    facts = _layout_facts(layout, hardware, of_peak)
    mesh = (*(str(facts[axis]) for axis in ("tp", "cp", "pp", "dp")),)
    gib = f"{layout.memory_bytes / 2**30:.1f}" if layout.memory_bytes else ""
    if layout.problem:
        return (*mesh, "", "", "", "", gib, layout.problem)
    assert layout.time is not None, "a layout that runs"
    from trainer.plan.nearest_layout import settings_text

    bubble = f"{layout.time.bubble / layout.time.total:.1%}" if facts["schedule"] else ""
    speed = (f"{layout.tokens_per_s:,.0f}", f"{layout.tokens_per_s / hardware.gpus:,.0f}")
    mfu = "" if facts["mfu"] is None else f"{facts['mfu']:.1%}"
    return (*mesh, bubble, *speed, mfu, gib, settings_text(facts["settings"]))
