"""Rules that make the sections besides [model] from Megatron-LM's arguments. Pure.

Settings select Megatron-LM's behaviour where ours differs: its order of data, its average of losses over microbatches,
and a learning rate that counts the steps before the update.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainer.migrate.arguments import Given
from trainer.migrate.settings import Refusal, Setting

_SCHEDULES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
_SHARDINGS = {
    "no_shard": "none",
    "optim": "state",
    "optim_grads": "gradients",
    "optim_grads_params": "parameters",
}


def run_rules(a: Given, world_size: int | None) -> Iterator[Setting | Refusal]:
    """Settings of all sections besides [model]; `world_size`: ranks, None: unknown."""
    yield from _folder(a)
    yield from _data(a)
    yield from _mesh(a)
    yield from _train(a, world_size)
    yield from _optimizer(a)
    yield from _sharding(a)
    yield from _precision(a)
    yield from _recompute(a)


def _folder(a: Given) -> Iterator[Setting | Refusal]:
    yield Setting("run.folder", a["--save"] or "runs/megatron", ("--save", "--load"))
    yield from _first_weights(a)
    if a["--save-interval"]:
        yield Setting("checkpoint.interval", a["--save-interval"], ("--save-interval",))


def _first_weights(a: Given) -> Iterator[Setting | Refusal]:
    elsewhere = a["--load"] is not None and a["--load"] != a["--save"]
    if a["--finetune"] and a["--load"] is not None:
        yield Setting("checkpoint.init_from", a["--load"], ("--load", "--finetune", "--no-load-optim"))
    elif elsewhere:
        yield Setting("checkpoint.init_from", a["--load"], ("--load",))
        yield Setting("checkpoint.init_data", True, ("--load",), False)
        # Megatron-LM's scheduler is loaded with the optimizer: without it the learning rate starts again.
        note = "the learning rate begins anew, as there" if a["--no-load-optim"] else ""
        for key in ("init_optimizer", "init_schedule"):
            flags = ("--load", "--no-load-optim")
            yield Setting(f"checkpoint.{key}", not a["--no-load-optim"], flags, False, note * (key == "init_schedule"))
        return
    elif a["--finetune"]:
        yield Refusal("--finetune", "needs --load, the folder of the weights")
    elif a["--pretrained-checkpoint"]:
        yield Setting("checkpoint.init_from", a["--pretrained-checkpoint"], ("--pretrained-checkpoint",))
    if a["--no-load-optim"] and not a["--finetune"]:
        reason = "a run continues with its moments; give another folder to --save to begin one without them"
        yield Refusal("--no-load-optim", reason)


def _data(a: Given) -> Iterator[Setting | Refusal]:
    parts = [f"--{part}-data-path" for part in ("train", "valid", "test") if a[f"--{part}-data-path"]]
    sources = [name for name in ("--mock-data", "--data-path") if a[name]] + parts[:1]
    if len(sources) != 1 or sources == parts[:1] != ["--train-data-path"]:
        missing = "missing; give the data's prefix, or --mock-data"
        several = f"one source of data is expected, {', '.join(sources)} are given"
        yield Refusal(sources[0] if len(sources) > 1 else "--data-path", several if len(sources) > 1 else missing)
        return
    source = sources[0]
    if a["--mock-data"]:
        note = "random tokens; there is no validation set, whatever --split says"
        yield Setting("data.blend", "mock", (source,), note=note)
        for flag in ("--reset-position-ids", "--reset-attention-mask"):
            if a[flag]:
                yield Refusal(flag, "mock data has no documents; leave it out when --mock-data is given")
        return
    yield Setting("data.blend", " ".join(a[source]), (source,))
    yield Setting("data.order", "megatron", ())
    numbers = re.findall(r"[0-9]*\.?[0-9]+", a["--split"] or "969,30,1")
    if source == "--train-data-path":
        numbers = ["100"]
        for name in parts[1:]:
            words = a[name]
            paths = words[1::2] if len(words) % 2 == 0 and _is_number(words[0]) else words
            yield Setting(f"data.{name[2:-10]}", tuple(paths), (name,))
    yield Setting("data.split", ",".join([*numbers, "0", "0"][:3]), () if parts else ("--split",))
    caches = ("--data-cache-path", "--object-storage-cache-path", "--s3-cache-path")
    if cache := next((flag for flag in caches if a[flag]), None):
        yield Setting("data.cache", a[cache], (cache,))
    yield Setting("data.blend_surplus", a["--mid-level-dataset-surplus"], ("--mid-level-dataset-surplus",))
    masks = ("--reset-position-ids", "--reset-attention-mask")
    if a[masks[0]] and a[masks[1]]:
        yield Setting("data.document_masks", True, masks)
    elif a[masks[0]] or a[masks[1]]:
        yield Refusal(masks[0] if a[masks[0]] else masks[1], f"only {masks[0]} and {masks[1]} together are supported")


def _is_number(word: str) -> bool:
    return bool(re.fullmatch(r"\d*\.?\d+(e-?\d+)?", word))


def _mesh(a: Given) -> Iterator[Setting | Refusal]:
    tp = "--tensor-model-parallel-size"
    both = a["--sequence-parallel"] and a[tp] > 1
    yield Setting("mesh.sequence_parallel", both, ("--sequence-parallel",))
    yield Setting("mesh.pp", a["--pipeline-model-parallel-size"], ("--pipeline-model-parallel-size",), 1)
    yield Setting("mesh.cp", a["--context-parallel-size"], ("--context-parallel-size",), 1)
    yield from _stages(a)


def _stages(a: Given) -> Iterator[Setting | Refusal]:
    """How layers are divided into pipeline stages; by default ranks in Megatron's layouts hold equal numbers."""
    pp, layers = a["--pipeline-model-parallel-size"], a["--num-layers"] or 0
    per_stage, per_rank = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    chunks = a[per_rank] or (layers // (pp * a[per_stage]) if a[per_stage] else 1)
    if pp > 1 and chunks > 1:
        flag = per_rank if a[per_rank] else per_stage
        yield Setting("mesh.schedule", "interleaved", (flag,))
        yield Setting("mesh.virtual_pipeline", chunks, (flag,))
    ends = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    counted = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    given = tuple(flag for flag in (*ends, *counted) if a[flag])
    if pp == 1 or not given:
        return
    if chunks > 1:
        reason = "with virtual pipeline stages, set mesh.layers_per_stage by hand and leave it out"
        yield from (Refusal(flag, reason) for flag in given)
        return
    split = _layers_per_stage(layers, pp, ends=(a[ends[0]], a[ends[1]]), counted=(a[counted[0]], a[counted[1]]))
    if sum(split) == layers and min(split) > 0:
        yield Setting("mesh.layers_per_stage", split, given)
    else:
        yield Refusal(
            given[0], f"{layers} layers cannot be split this way into {pp} stages; Megatron-LM refuses it too"
        )


def _layers_per_stage(
    layers: int, pp: int, *, ends: tuple[int | None, int | None], counted: tuple[bool, bool]
) -> tuple[int, ...]:
    """Layers of each stage: the given numbers at the ends, and equal numbers in all others."""
    if any(counted):
        each = (layers + sum(map(bool, counted))) // pp
        split = [each] * pp
        split[0] -= bool(counted[0])
        split[-1] -= bool(counted[1])
        return tuple(split)
    rest = layers - sum(end or 0 for end in ends)
    each = rest // max(1, pp - sum(end is not None for end in ends))
    return (each if ends[0] is None else ends[0], *[each] * (pp - 2), each if ends[1] is None else ends[1])


def _train(a: Given, world_size: int | None) -> Iterator[Setting | Refusal]:
    batch = a["--global-batch-size"]
    if not batch and a["--micro-batch-size"]:
        model = a["--tensor-model-parallel-size"] * a["--pipeline-model-parallel-size"] * a["--context-parallel-size"]
        if world_size is None or model < 1:
            yield Refusal("--global-batch-size", "missing, and the number of ranks is not known; give it")
        batch = a["--micro-batch-size"] * max((world_size or 1) // max(model, 1), 1)
    if batch:
        yield Setting("train.global_batch", batch, ("--global-batch-size",))
        if "--eval-iters" in a or not a["--full-validation"]:
            samples = 0 if a["--full-validation"] else max(a["--eval-iters"] * batch, 1)
            yield Setting("train.eval_samples", samples, ("--eval-iters", "--full-validation"))
        else:
            yield Setting("train.eval_samples", 0, ("--full-validation",))
    if a["--rampup-batch-size"]:
        yield Setting("train.batch_ramp", " ".join(a["--rampup-batch-size"]), ("--rampup-batch-size",))
    if a["--train-iters"] and a["--train-samples"]:
        yield Refusal("--train-samples", "Megatron-LM refuses it together with --train-iters; leave one of them out")
    elif a["--train-samples"]:
        yield Setting("train.samples", a["--train-samples"], ("--train-samples",))
    elif a["--train-iters"]:
        yield Setting("train.steps", a["--train-iters"], ("--train-iters",))
    else:
        yield Refusal("--train-iters", "missing; give it, or --train-samples")
    if a["--deterministic-mode"]:
        yield Setting("run.deterministic", True, ("--deterministic-mode",))
    if a["--eval-interval"]:
        yield Setting("train.eval_interval", a["--eval-interval"], ("--eval-interval",))
    # Without masked tokens both averages are equal.
    average = "token" if a["--calculate-per-token-loss"] else "megatron"
    yield Setting("train.loss_average", average, ("--calculate-per-token-loss",), average)


def _optimizer(a: Given) -> Iterator[Setting | Refusal]:
    if a["--optimizer"] == "adam":
        yield Setting("optimizer.name", "adamw", ("--optimizer",), "adamw")
    elif a["--optimizer"] == "sgd":
        yield Setting("optimizer.name", "sgd", ("--optimizer",))
        yield Setting("optimizer.momentum", a["--sgd-momentum"], ("--sgd-momentum",))
    elif a["--optimizer"] in ("muon", "dist_muon"):
        yield from _muon(a)
    else:
        yield Refusal("--optimizer", f"{a['--optimizer']} is not supported; adam is the nearest")
    yield from _learning_rate(a)
    yield from _weight_decay(a)


def _sharding(a: Given) -> Iterator[Setting | Refusal]:
    """All choices give the same numbers; state that is always sharded here needs no argument."""
    strategy = "--data-parallel-sharding-strategy"
    if a["--use-torch-fsdp2"]:
        yield Setting("optimizer.sharding", "parameters", ("--use-torch-fsdp2",))
    elif a["--use-megatron-fsdp"] and a[strategy] not in _SHARDINGS:
        yield Refusal(strategy, f"{a[strategy]} is not one of {', '.join(_SHARDINGS)}")
    elif a["--use-megatron-fsdp"]:
        yield Setting("optimizer.sharding", _SHARDINGS[a[strategy]], ("--use-megatron-fsdp", strategy))
    if a["--ddp-bucket-size"]:
        yield Setting("optimizer.bucket_size", a["--ddp-bucket-size"], ("--ddp-bucket-size",))


def _muon(a: Given) -> Iterator[Setting | Refusal]:
    note = "gate and up are matrices of their own; Megatron-LM joins them" if a["--swiglu"] else ""
    yield Setting("optimizer.name", "muon", ("--optimizer",), note=note)
    yield Setting("optimizer.muon_nesterov", a["--muon-nesterov"], ("--muon-nesterov",))
    yield Setting("optimizer.muon_ns_steps", a["--muon-num-ns-steps"], ("--muon-num-ns-steps",))
    for part in ("momentum", "coefficient-type", "scale-mode", "extra-scale-factor"):
        flag = f"--muon-{part}"
        yield Setting(f"optimizer.muon_{part.replace('-', '_')}", a[flag], (flag,))
    if a["--muon-tp-mode"] == "blockwise" and a["--tensor-model-parallel-size"] > 1:
        reason = "with it updates depend on the tensor-parallel size; matrices are made orthogonal as a whole here"
        yield Refusal("--muon-tp-mode", f"blockwise is not supported: {reason}; choose duplicated")


def _learning_rate(a: Given) -> Iterator[Setting | Refusal]:
    style = a["--lr-decay-style"]
    if style not in _SCHEDULES:
        yield Refusal("--lr-decay-style", f"expected one of {', '.join(_SCHEDULES)}")
        return
    yield Setting("optimizer.schedule", _SCHEDULES[style], ("--lr-decay-style",), "cosine")
    yield Setting("optimizer.init_lr", a["--lr-warmup-init"], ("--lr-warmup-init",), 0.0)
    yield Setting("optimizer.warmup_count", "before", ())
    unit, ours = ("samples", "samples") if a["--train-samples"] else ("iters", "steps")
    for other in ("iters", "samples"):
        for name in (f"--lr-decay-{other}", f"--lr-warmup-{other}", f"--lr-wsd-decay-{other}"):
            if other != unit and a[name]:
                yield Refusal(name, f"Megatron-LM refuses it with --train-{unit}; use {name.replace(other, unit)}")
    if a["--lr-warmup-fraction"] is not None:
        yield Setting("optimizer.warmup_fraction", a["--lr-warmup-fraction"], ("--lr-warmup-fraction",), 0.0)
        if a[f"--lr-warmup-{unit}"]:
            yield Refusal(f"--lr-warmup-{unit}", "Megatron-LM refuses it together with --lr-warmup-fraction")
    elif warmup := a[f"--lr-warmup-{unit}"]:
        yield Setting(f"optimizer.warmup_{ours}", warmup, (f"--lr-warmup-{unit}",))
    if decay := a[f"--lr-decay-{unit}"] or (unit == "samples" and a["--train-samples"]):
        yield Setting(f"optimizer.decay_{ours}", decay, (f"--lr-decay-{unit}",))
    if style == "WSD":
        yield Setting("optimizer.wsd_decay", a["--lr-wsd-decay-style"], ("--lr-wsd-decay-style",))
        name = f"--lr-wsd-decay-{unit}"
        if a[name]:
            yield Setting(f"optimizer.wsd_decay_{ours}", a[name], (name,))
        else:
            yield Refusal(name, "missing; --lr-decay-style WSD needs it")


def _weight_decay(a: Given) -> Iterator[Setting | Refusal]:
    style = a["--weight-decay-incr-style"]
    flags = ("--start-weight-decay", "--end-weight-decay")
    if style == "constant":
        yield Setting("optimizer.weight_decay", a["--weight-decay"], ("--weight-decay",))
        for name in flags:
            if a[name] is not None:
                yield Refusal(name, "Megatron-LM refuses it without --weight-decay-incr-style linear or cosine")
    elif style not in ("linear", "cosine"):
        yield Refusal("--weight-decay-incr-style", "expected constant, linear or cosine")
    elif a[flags[0]] is None or a[flags[1]] is None:
        yield Refusal(flags[0], f"missing, or {flags[1]} is; --weight-decay-incr-style {style} needs both")
    else:
        yield Setting("optimizer.weight_decay", a[flags[0]], flags[:1])
        yield Setting("optimizer.weight_decay_end", a[flags[1]], flags[1:])
        yield Setting("optimizer.weight_decay_schedule", style, ("--weight-decay-incr-style",))


def _precision(a: Given) -> Iterator[Setting | Refusal]:
    if a["--fp16"] and a["--bf16"]:
        yield Refusal("--fp16", "Megatron-LM refuses it together with --bf16; leave one of them out")
        return
    kind = "fp16" if a["--fp16"] else "bf16" if a["--bf16"] else "fp32"
    yield Setting("precision.dtype", kind, ("--fp16", "--bf16"))
    half = a["--grad-reduce-in-bf16"] if kind == "bf16" else not a["--accumulate-allreduce-grads-in-fp32"]
    flag = "--accumulate-allreduce-grads-in-fp32" if kind == "fp16" else "--grad-reduce-in-bf16"
    kept = "params" if half and kind != "fp32" else "main"
    yield Setting("precision.gradients", kept, (flag,) if kind != "fp32" else (), "main")
    if kind == "fp16":
        yield Setting("optimizer.count_skipped", False, (), True)
    if kind == "fp16" and a["--loss-scale"]:
        yield Setting("precision.loss_scale", a["--loss-scale"], ("--loss-scale",))
    elif kind == "fp16":
        for name in ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"):
            value = int(a[name]) if a[name] == int(a[name]) else a[name]
            key = "loss_scale_hysteresis" if name == "--hysteresis" else name.removeprefix("--").replace("-", "_")
            yield Setting(f"precision.{key}", value, (name,))
    yield from _fp8(a)


def _fp8(a: Given) -> Iterator[Setting | Refusal]:
    if a["--fp8-format"] is None:
        return
    recipes = {"delayed": "delayed", "tensorwise": "current"}
    if a["--fp8-format"] not in ("hybrid", "e4m3"):
        yield Refusal("--fp8-format", "hybrid and e4m3 are supported")
    elif a["--fp8-recipe"] not in recipes:
        yield Refusal("--fp8-recipe", "delayed and tensorwise are supported")
    else:
        yield Setting("precision.fp8", recipes[a["--fp8-recipe"]], ("--fp8-format", "--fp8-recipe"))
        yield Setting("precision.fp8_format", a["--fp8-format"], ("--fp8-format",), "hybrid")
    ends = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
    if a["--first-last-layers-bf16"] and a[ends[0]] != a[ends[1]]:
        yield Refusal(ends[0], f"the same number as {ends[1]} is supported")
    elif a["--first-last-layers-bf16"]:
        yield Setting("precision.fp8_first_last_bf16", a[ends[0]], ("--first-last-layers-bf16", *ends))


def _recompute(a: Given) -> Iterator[Setting | Refusal]:
    kind = "selective" if a["--recompute-activations"] else a["--recompute-granularity"]
    if kind not in (None, "selective", "full"):
        yield Refusal("--recompute-granularity", "selective and full are supported")
        return
    yield Setting("recompute.mode", kind or "none", ("--recompute-activations", "--recompute-granularity"), "none")
    if kind == "full" and a["--recompute-method"] not in ("uniform", "block"):
        yield Refusal("--recompute-method", "--recompute-granularity full needs uniform or block")
    elif kind == "full":
        yield Setting("recompute.method", a["--recompute-method"], ("--recompute-method",))
        yield Setting("recompute.layers", a["--recompute-num-layers"] or 1, ("--recompute-num-layers",))
