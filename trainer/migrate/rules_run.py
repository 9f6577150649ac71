"""Rules that make the sections besides [model] from Megatron-LM's arguments. Pure.

Settings select Megatron-LM's behaviour where ours differs: its order of data, its average of losses over microbatches,
and a learning rate that counts the steps before the update.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mdata import UsageError
from mdata.loader.batch_sizes import by_steps
from trainer.migrate.arguments import Given
from trainer.migrate.rules_model import has_experts
from trainer.migrate.settings import Refusal, Setting, is_count

_SCHEDULES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
_ALL = 1_000_000_000  # checkpoints to keep: more than a run can have
_LAYOUT = "--pipeline-model-parallel-layout"
_LONGEST_LAYOUT = 1 << 16  # characters
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
    yield from _samples(a)
    yield from _mesh(a)
    yield from _train(a, world_size)
    yield from _skipped(a, batch_of(a, world_size))
    yield from _evaluation(a, batch_of(a, world_size))
    yield from _optimizer(a, batch_of(a, world_size))
    yield from _sharding(a)
    yield from _precision(a)
    yield from _recompute(a)
    yield from _watching(a)


def _folder(a: Given) -> Iterator[Setting | Refusal]:
    yield Setting("run.folder", a["--save"] or "runs/megatron", ("--save", "--load"))
    yield from _first_weights(a)
    yield from _saving(a)
    if a["--exit-duration-in-mins"]:  # 0 turns it off there, too
        yield Setting("run.exit_after", float(a["--exit-duration-in-mins"]), ("--exit-duration-in-mins",))
    if a["--verify-integrity"]:
        yield Setting("checkpoint.load", "latest-valid", ("--verify-integrity",))


def _watching(a: Given) -> Iterator[Setting | Refusal]:
    """Measurements, profiles and trackers; Megatron-LM counts the steps of a profile from 0, up to the last."""
    if a["--log-params-norm"]:
        yield Setting("run.log_params_norm", True, ("--log-params-norm",))
    if a["--log-num-zeros-in-grad"]:
        yield Setting("run.log_num_zeros", True, ("--log-num-zeros-in-grad",))
    if a["--profile"]:
        first, last = a["--profile-step-start"] + 1, a["--profile-step-end"]
        if 1 <= first <= last:
            names = ("--profile", "--use-pytorch-profiler", "--profile-step-start", "--profile-step-end")
            yield Setting("run.profile", (first, last), names)
        else:
            yield Refusal("--profile-step-end", f"--profile-step-start is {first - 1}; give a later end")
        ranks = a["--profile-ranks"]
        if ranks and all(map(is_count, ranks)):
            yield Setting("run.profile_ranks", tuple(map(int, ranks)), ("--profile-ranks",))
        elif ranks:
            yield Refusal("--profile-ranks", "ranks are whole numbers")
    to = [name for name, flag in (("tensorboard", "--tensorboard-dir"), ("wandb", "--wandb-project")) if a[flag]]
    if to:
        yield Setting("track.to", tuple(to), ("--tensorboard-dir", "--wandb-project"))
    if a["--tensorboard-dir"]:
        yield Setting("track.tensorboard_dir", a["--tensorboard-dir"], ("--tensorboard-dir",))
    if a["--wandb-project"]:
        for key, flag in (
            ("project", "--wandb-project"),
            ("name", "--wandb-exp-name"),
            ("entity", "--wandb-entity"),
            ("wandb_dir", "--wandb-save-dir"),
        ):
            if a[flag]:
                yield Setting(f"track.{key}", a[flag], (flag,))


def _saving(a: Given) -> Iterator[Setting | Refusal]:
    """When checkpoints are written, and which are kept; by default Megatron-LM deletes none."""
    names = ("--save-interval", "--save-retain-interval", "--non-persistent-save-interval")
    every, retained, between = (a[name] for name in names)
    if every is None:
        for name in names[1:]:
            if a[name] is not None:
                yield Refusal(name, "needs --save-interval")
        return
    if between and every % between:
        yield Refusal(names[2], f"expected a number that divides --save-interval {every}")
    elif retained and every and retained % every:
        yield Refusal(names[1], f"expected a multiple of --save-interval {every}, as Megatron-LM does")
    interval = (names[0], names[2]) if between else names[:1]
    yield Setting("checkpoint.interval", between or every, interval)
    if retained or between:
        yield Setting("checkpoint.keep", 1, names[1:], note="the newest, in addition to those of keep_every")
        yield Setting("checkpoint.keep_every", retained or every, names[:1] if not retained else names[1:2])
        return
    yield Setting("checkpoint.keep", _ALL, (), note="Megatron-LM deletes none")
    yield Setting("checkpoint.minutes", 0.0, (), note="all are kept, so none are written in between")


def _first_weights(a: Given) -> Iterator[Setting | Refusal]:
    elsewhere = a["--load"] is not None and a["--load"] != a["--save"]
    first, step, scheduler = a["--load"], a["--ckpt-step"], "--use-checkpoint-opt_param-scheduler"
    if step is not None and (elsewhere or (a["--finetune"] and first is not None)):
        first = f"{first}/iter_{step:07d}"
    elif step is not None:
        yield Refusal("--ckpt-step", "a run continues with its newest checkpoint; give another folder to --save")
    if a["--finetune"] and first is not None:
        yield Setting("checkpoint.init_from", first, ("--load", "--finetune", "--no-load-optim", "--ckpt-step"))
    elif elsewhere:
        yield Setting("checkpoint.init_from", first, ("--load", "--ckpt-step"))
        yield Setting("checkpoint.init_data", True, ("--load",), False)
        # Megatron-LM's scheduler is loaded with the optimizer: without it the learning rate starts again.
        note = "the learning rate starts from the beginning, as in Megatron-LM" if a["--no-load-optim"] else ""
        if a[scheduler] and not note:
            note = "with the values of this file; Megatron-LM takes the rates and lengths of the checkpoint"
        for key in ("init_optimizer", "init_schedule"):
            flags = ("--load", "--no-load-optim", *([scheduler] if key == "init_schedule" else []))
            yield Setting(f"checkpoint.{key}", not a["--no-load-optim"], flags, False, note * (key == "init_schedule"))
        return
    elif a["--finetune"]:
        yield Refusal("--finetune", "needs --load, the folder of the weights")
    elif a["--pretrained-checkpoint"]:
        yield Setting("checkpoint.init_from", a["--pretrained-checkpoint"], ("--pretrained-checkpoint",))
    if a["--no-load-optim"] and first is not None and not a["--finetune"]:
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


def _samples(a: Given) -> Iterator[Setting | Refusal]:
    """The kind of samples; what the programs of BERT and T5 fix of their masks is our default, too."""
    if a.continues_text:
        yield from _rearranged(a)
        return
    section = f"data.{a.family}"
    yield Setting("data.kind", a.family, ())
    yield Setting(f"{section}.mask_probability", a["--mask-prob"], ("--mask-prob",))
    yield Setting(f"{section}.short_probability", a["--short-seq-prob"], ("--short-seq-prob",))
    if a.family == "bert":
        yield Setting(f"{section}.head", not a["--bert-no-binary-head"], ("--bert-no-binary-head",))
    elif a["--decoder-seq-length"]:
        yield Setting(f"{section}.decoder_length", a["--decoder-seq-length"], ("--decoder-seq-length",))
    else:
        yield Refusal("--decoder-seq-length", "missing; a T5 needs it")
    if a["--fim-data"]:
        yield Refusal("--fim-data", f"{a.program} has no such samples; leave it out")


def _rearranged(a: Given) -> Iterator[Setting | Refusal]:
    if not a["--fim-data"]:
        return
    note = "the same rules, with other random draws: Megatron-LM's depend on what was read before"
    yield Setting("data.kind", "fim", ("--fim-data",), note=note)
    for key in ("rate", "spm_rate", "split_sample", "fragment_rate", "no_prefix"):
        flag = f"--fim-{key.replace('_', '-')}"
        if a[flag] is not None:
            yield Setting(f"data.fim.{key}", a[flag], (flag,))
    flags = tuple(f"--fim-{role}-token" for role in ("prefix", "middle", "suffix", "pad", "eod"))
    # By default the last two are those of the tokenizer, if it has them.
    count = 5 if flags[4] in a else 4 if flags[3] in a else 3
    yield Setting("data.fim.tokens", tuple(a[flag] for flag in flags[:count]), flags[:count])


def _skipped(a: Given, batch: int | None) -> Iterator[Setting | Refusal]:
    """Iterations that are read and left out; Megatron-LM counts those done before them."""
    name, words = "--iterations-to-skip", a["--iterations-to-skip"]
    if not words or a["--mock-data"]:  # which are the same with other samples
        return
    if not all(map(is_count, words)):
        yield Refusal(name, "expected whole numbers, the iterations to skip")
    elif a["--rampup-batch-size"] or a["--step-batch-size-schedule"] or not batch:
        yield Refusal(name, "its samples are known for a constant batch only; use `mtrain skip RUN --steps A-B`")
    else:
        skip = tuple(f"{int(word) * batch}-{(int(word) + 1) * batch - 1}" for word in words)
        note = "iteration k is step k + 1, because Megatron-LM counts the iterations that are done"
        yield Setting("data.skip", skip, (name,), note=note)


def _is_number(word: str) -> bool:
    return bool(re.fullmatch(r"\d*\.?\d+(e-?\d+)?", word))


def _mesh(a: Given) -> Iterator[Setting | Refusal]:
    tp = "--tensor-model-parallel-size"
    both = a["--sequence-parallel"] and a[tp] > 1
    yield Setting("mesh.sequence_parallel", both, ("--sequence-parallel",))
    yield Setting("mesh.pp", a["--pipeline-model-parallel-size"], ("--pipeline-model-parallel-size",), 1)
    yield Setting("mesh.cp", a["--context-parallel-size"], ("--context-parallel-size",), 1)
    if has_experts(a):
        yield Setting("mesh.ep", a["--expert-model-parallel-size"], ("--expert-model-parallel-size",), 1)
        if a["--expert-tensor-parallel-size"]:
            yield Setting("mesh.etp", a["--expert-tensor-parallel-size"], ("--expert-tensor-parallel-size",))
    yield from _stages(a)


def _stages(a: Given) -> Iterator[Setting | Refusal]:
    """How layers are divided into pipeline stages; by default ranks in Megatron's layouts hold equal numbers."""
    pp, layers = a["--pipeline-model-parallel-size"], a["--num-layers"] or 0
    if pp < 1:
        return
    per_stage, per_rank = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    ends = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    counted = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    if a[_LAYOUT] is not None:
        yield from _given_stages(a, others=(per_stage, per_rank, *ends, *counted))
        return
    counted_layers = layers + sum(bool(a[flag]) for flag in counted)
    chunks = a[per_rank] or (counted_layers // (pp * a[per_stage]) if (a[per_stage] or 0) > 0 else 1)
    if not a[per_rank] and (a[per_stage] or 0) > 0 and pp > 1 and counted_layers % (pp * a[per_stage]):
        yield Refusal(per_stage, f"{layers} layers cannot be divided like this; Megatron-LM refuses it too")
        return
    if pp > 1 and chunks > 1:
        flag = per_rank if a[per_rank] else per_stage
        yield Setting("mesh.schedule", "interleaved", (flag,))
        yield Setting("mesh.virtual_pipeline", chunks, (flag,))
    used = tuple(flag for flag in (*ends, *counted) if a[flag])
    if pp == 1 or not used:
        return
    if pp * chunks > layers or layers >= 1 << 16:
        yield Refusal(
            "--pipeline-model-parallel-size", f"{layers} layers cannot be divided into {pp * chunks} stages here"
        )
        return
    ends_given, counts = (a[ends[0]], a[ends[1]]), (a[counted[0]], a[counted[1]])
    split = _layers_per_stage(layers, pp, chunks=chunks, ends=ends_given, counted=counts)
    if sum(split) == layers and min(split) > 0:
        yield Setting("mesh.layers_per_stage", split, used)
    else:
        yield Refusal(
            used[0], f"{layers} layers cannot be split this way into {pp * chunks} stages; Megatron-LM refuses it too"
        )


def _given_stages(a: Given, *, others: tuple[str, ...]) -> Iterator[Setting | Refusal]:
    """A layout such as "Et*3|(tt|)*2tL": E the embedding, t a layer, L the loss, and | between stages."""
    pp, layers, text = a["--pipeline-model-parallel-size"], a["--num-layers"] or 0, a[_LAYOUT].replace(",", "")
    reason = ""
    for repeat in (r"\(([^)]+)\)\*([0-9]{1,9})", r"(.)\*([0-9]{1,9})"):  # a group; one layer
        if sum(len(part) * int(count) for part, count in re.findall(repeat, text)) < _LONGEST_LAYOUT:
            text = re.sub(repeat, lambda match: match[1] * int(match[2]), text)
    stages = text.split("|")
    counts, all_stages = tuple(stage.count("t") for stage in stages), "".join(stages)
    if clash := next((flag for flag in others if a[flag]), None):
        reason = f"Megatron-LM refuses it together with {clash}; leave one of them out"
    elif "m" in all_stages:
        reason = "m is a layer of multi-token prediction, which no model here has"
    elif not re.fullmatch("Et*L", all_stages) or sum(counts) != layers:
        reason = f"expected E, t {layers} times (--num-layers) and L in this order; Megatron-LM refuses it too"
    elif len(stages) % pp or (pp == 1 and len(stages) > 1):
        reason = f"{len(stages)} stages for --pipeline-model-parallel-size {pp}; Megatron-LM refuses it too"
    elif min(counts) < 1:
        reason = (
            "a stage without a t is not supported; here each stage has one or more, beside the embedding or the loss"
        )
    if reason:
        yield Refusal(_LAYOUT, reason)
    elif pp > 1:
        if len(stages) > pp:
            yield Setting("mesh.schedule", "interleaved", (_LAYOUT,))
            yield Setting("mesh.virtual_pipeline", len(stages) // pp, (_LAYOUT,))
        yield Setting("mesh.layers_per_stage", counts, (_LAYOUT,))


def _layers_per_stage(
    layers: int, pp: int, *, chunks: int, ends: tuple[int | None, int | None], counted: tuple[bool, bool]
) -> tuple[int, ...]:
    """Layers of each stage: the given numbers on the ranks at the ends, and equal numbers on all others.

    A rank's layers are divided equally among its `chunks` stages.
    """
    if any(counted):
        each = (layers + sum(map(bool, counted))) // (pp * chunks)
        split = [each] * (pp * chunks)
        split[0] -= bool(counted[0])
        split[-1] -= bool(counted[1])
        return tuple(split)
    rest = layers - sum(end or 0 for end in ends)
    each = rest // max(1, pp - sum(end is not None for end in ends))
    of_ranks = (each if ends[0] is None else ends[0], *[each] * (pp - 2), each if ends[1] is None else ends[1])
    return tuple(number // chunks for number in of_ranks) * chunks


def batch_of(a: Given, world_size: int | None) -> int | None:
    """Megatron-LM's global batch: the given one, or the microbatches of all ranks; None: the ranks are not known."""
    if a["--global-batch-size"]:
        return int(a["--global-batch-size"])
    model = a["--tensor-model-parallel-size"] * a["--pipeline-model-parallel-size"] * a["--context-parallel-size"]
    if world_size is None or model < 1 or not a["--micro-batch-size"]:
        return None
    return int(a["--micro-batch-size"]) * max(world_size // model, 1)


def _train(a: Given, world_size: int | None) -> Iterator[Setting | Refusal]:
    batch = batch_of(a, world_size)
    if a["--step-batch-size-schedule"]:
        yield from _batch_schedule(a, batch)
    elif batch:
        yield Setting("train.global_batch", batch, ("--global-batch-size",))
    elif a["--micro-batch-size"]:
        yield Refusal("--global-batch-size", "missing, and the number of ranks is not known; give it")
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
    # Without masked tokens both averages are equal.
    average = "token" if a["--calculate-per-token-loss"] else "megatron"
    yield Setting("train.loss_average", average, ("--calculate-per-token-loss",), average)


def _batch_schedule(a: Given, batch: int | None) -> Iterator[Setting | Refusal]:
    """A table of batch sizes; train.global_batch is its last size."""
    name, text = "--step-batch-size-schedule", " ".join(a["--step-batch-size-schedule"])
    if a["--rampup-batch-size"]:
        yield Refusal(name, "--rampup-batch-size is given too; leave one of them out")
        return
    try:
        last = by_steps(text, sequence_length=max(a["--seq-length"] or 1, 1)).sizes[-1]
    except UsageError as error:
        yield Refusal(name, " ".join(str(error).split()))
        return
    if a["--global-batch-size"] not in (None, last):
        reason = f"it ends with {last}, but --global-batch-size is {a['--global-batch-size']}; leave the latter out"
        yield Refusal(name, reason)
        return
    note = ""
    if a["--train-iters"] and not a["--global-batch-size"]:
        note = f"Megatron-LM builds its data for --train-iters x {batch or 'the microbatches of all ranks'} samples"
    yield Setting("train.global_batch", last, (name, "--global-batch-size"))
    yield Setting("train.batch_schedule", text, (name,), note=note)


def _evaluation(a: Given, batch: int | None) -> Iterator[Setting | Refusal]:
    full_validation, iterations = a["--full-validation"], "--eval-iters"
    if not (full_validation or a[iterations]):
        yield Setting("train.evaluate", False, (iterations,))
    if a["--eval-interval"]:
        yield Setting("train.eval_interval", a["--eval-interval"], ("--eval-interval",))
    rows, flags = a["--eval-global-batch-size"] or batch, (iterations, "--full-validation", "--eval-global-batch-size")
    if full_validation or not a[iterations]:
        yield Setting("train.eval_samples", 0, ("--full-validation", *([iterations] if iterations in a else [])), 0)
    elif rows:
        yield Setting("train.eval_samples", a[iterations] * rows, flags)
    elif a["--step-batch-size-schedule"]:
        yield Refusal("--eval-global-batch-size", "missing, and the number of ranks is not known; give it")


def _optimizer(a: Given, batch: int | None) -> Iterator[Setting | Refusal]:
    if a["--optimizer"] == "adam":
        yield Setting("optimizer.name", "adamw", ("--optimizer",), "adamw")
    elif a["--optimizer"] == "sgd":
        yield Setting("optimizer.name", "sgd", ("--optimizer",))
        yield Setting("optimizer.momentum", a["--sgd-momentum"], ("--sgd-momentum",))
    elif a["--optimizer"] in ("muon", "dist_muon"):
        yield from _muon(a)
    else:
        yield Refusal("--optimizer", f"{a['--optimizer']} is not supported; adam is the nearest")
    if a["--optimizer"] != "sgd":
        for flag, key in (("--adam-beta1", "beta1"), ("--adam-beta2", "beta2"), ("--adam-eps", "epsilon")):
            yield Setting(f"optimizer.{key}", a[flag], (flag,))
    yield from _learning_rate(a, batch)
    yield from _weight_decay(a, batch)


def _sharding(a: Given) -> Iterator[Setting | Refusal]:
    """All choices give the same numbers; state that is always sharded here needs no argument."""
    strategy = "--data-parallel-sharding-strategy"
    for name in ("--overlap-grad-reduce", "--overlap-param-gather"):
        if a[name]:
            yield Setting(f"optimizer.{name[2:].replace('-', '_')}", True, (name,))
    if a["--use-torch-fsdp2"]:
        keep_parameters = a["--torch-fsdp2-no-reshard-after-forward"]
        flags = ("--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward")
        yield Setting("optimizer.sharding", "gradients" if keep_parameters else "parameters", flags)
    elif a["--use-megatron-fsdp"] and a[strategy] not in _SHARDINGS:
        yield Refusal(strategy, f"{a[strategy]} is not one of {', '.join(_SHARDINGS)}")
    elif a["--use-megatron-fsdp"]:
        yield Setting("optimizer.sharding", _SHARDINGS[a[strategy]], ("--use-megatron-fsdp", strategy))
    if a["--ddp-bucket-size"]:
        yield Setting("optimizer.bucket_size", a["--ddp-bucket-size"], ("--ddp-bucket-size",))


def _muon(a: Given) -> Iterator[Setting | Refusal]:
    note = "gate and up are matrices of their own; Megatron-LM joins them" if a["--swiglu"] else ""
    yield Setting("optimizer.name", "muon", ("--optimizer", "--muon-tp-mode"), note=note)
    yield Setting("optimizer.muon_nesterov", a["--muon-nesterov"], ("--muon-nesterov",))
    yield Setting("optimizer.muon_ns_steps", a["--muon-num-ns-steps"], ("--muon-num-ns-steps",))
    for part in ("momentum", "coefficient-type", "scale-mode", "extra-scale-factor"):
        flag = f"--muon-{part}"
        yield Setting(f"optimizer.muon_{part.replace('-', '_')}", a[flag], (flag,))
    if a["--muon-tp-mode"] not in ("blockwise", "duplicated", "distributed"):
        yield Refusal("--muon-tp-mode", "expected blockwise, duplicated or distributed")
    elif a["--muon-tp-mode"] == "blockwise" and a["--tensor-model-parallel-size"] > 1:
        reason = "with it updates depend on the tensor-parallel size; matrices are made orthogonal as a whole here"
        yield Refusal("--muon-tp-mode", f"blockwise is not supported: {reason}; choose duplicated")


def _embedding_rate(a: Given) -> Iterator[Setting | Refusal]:
    own, least = "--decoupled-lr", "--decoupled-min-lr"
    if a[own] == 0:
        yield Refusal(own, "0 would not train the embedding and the head; give a rate above 0, or leave it out")
    elif a[own] is not None:
        yield Setting("optimizer.embedding_lr", a[own], (own,))
        yield Setting("optimizer.embedding_min_lr", a["--min-lr"] if a[least] is None else a[least], (least,))


def _learning_rate(a: Given, batch: int | None) -> Iterator[Setting | Refusal]:
    yield from _embedding_rate(a)
    style = a["--lr-decay-style"]
    if style not in _SCHEDULES:
        yield Refusal("--lr-decay-style", f"expected one of {', '.join(_SCHEDULES)}")
        return
    yield Setting("optimizer.schedule", _SCHEDULES[style], ("--lr-decay-style",), "cosine")
    yield Setting("optimizer.init_lr", a["--lr-warmup-init"], ("--lr-warmup-init",), 0.0)
    yield Setting("optimizer.warmup_count", "before", ())
    unit = "samples" if a["--train-samples"] else "iters"
    ours, each = _counter(a, batch)
    if each is None:
        yield Refusal("--global-batch-size", "missing, and the number of ranks is not known; give it")
        return
    for other in ("iters", "samples"):
        for name in (f"--lr-decay-{other}", f"--lr-warmup-{other}", f"--lr-wsd-decay-{other}"):
            if other != unit and a[name]:
                yield Refusal(name, f"Megatron-LM refuses it with --train-{unit}; use {name.replace(other, unit)}")
    if a["--lr-warmup-fraction"] is not None:
        yield Setting("optimizer.warmup_fraction", a["--lr-warmup-fraction"], ("--lr-warmup-fraction",), 0.0)
        if a[f"--lr-warmup-{unit}"]:
            yield Refusal(f"--lr-warmup-{unit}", "Megatron-LM refuses it together with --lr-warmup-fraction")
    elif warmup := a[f"--lr-warmup-{unit}"]:
        yield Setting(f"optimizer.warmup_{ours}", warmup * each, (f"--lr-warmup-{unit}",))
    if decay := a[f"--lr-decay-{unit}"] or (ours == "samples" and a[f"--train-{unit}"]):
        yield Setting(f"optimizer.decay_{ours}", decay * each, (f"--lr-decay-{unit}",))
    if style == "WSD":
        yield Setting("optimizer.wsd_decay", a["--lr-wsd-decay-style"], ("--lr-wsd-decay-style",))
        name = f"--lr-wsd-decay-{unit}"
        if a[name]:
            yield Setting(f"optimizer.wsd_decay_{ours}", a[name] * each, (name,))
        else:
            yield Refusal(name, "missing; --lr-decay-style WSD needs it")


def _counter(a: Given, batch: int | None) -> tuple[str, int | None]:
    """(the unit of the schedules here, how many of them make an iteration); Megatron-LM counts samples.

    With a table of batch sizes, a length in iterations there means that many global batches, regardless of the steps.
    """
    if a["--train-samples"]:
        return "samples", 1
    return ("samples", batch) if a["--step-batch-size-schedule"] else ("steps", 1)


def _weight_decay(a: Given, batch: int | None) -> Iterator[Setting | Refusal]:
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
        unit, each = _counter(a, batch)
        if unit == "samples" and a["--train-iters"] and each:
            yield Setting("optimizer.weight_decay_samples", a["--train-iters"] * each, ("--train-iters",))


def _precision(a: Given) -> Iterator[Setting | Refusal]:
    if a["--fp16"] and a["--bf16"]:
        yield Refusal("--fp16", "Megatron-LM refuses it together with --bf16; leave one of them out")
        return
    kind = "fp16" if a["--fp16"] else "bf16" if a["--bf16"] else "fp32"
    yield Setting("precision.dtype", kind, ("--fp16", "--bf16"))
    half = a["--grad-reduce-in-bf16"] if kind == "bf16" else not a["--accumulate-allreduce-grads-in-fp32"]
    flag = "--accumulate-allreduce-grads-in-fp32" if kind == "fp16" else "--grad-reduce-in-bf16"
    gradient_dtype = "params" if half and kind != "fp32" else "main"
    fsdp = ("--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype")
    for name in fsdp:
        if a[name] not in ("auto", "fp32"):
            yield Refusal(name, "auto and fp32 are supported")
        elif a[name] == "fp32" and gradient_dtype == "params":
            yield Refusal(name, f"gradients are {kind} with the other arguments; leave it out")
    yield Setting("precision.gradients", gradient_dtype, (*([flag] if kind != "fp32" else []), *fsdp), "main")
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
    recipes = {"delayed": "delayed", "tensorwise": "current", "blockwise": "blockwise"}
    if not a["--bf16"]:
        yield Refusal("--fp8-format", "--bf16 is needed, too: everything but the FP8 products is bf16")
    elif a["--fp8-format"] not in ("hybrid", "e4m3"):
        yield Refusal("--fp8-format", "hybrid and e4m3 are supported")
    elif a["--fp8-recipe"] not in recipes:
        yield Refusal("--fp8-recipe", "delayed, tensorwise and blockwise are supported")
    else:
        yield Setting("precision.fp8", recipes[a["--fp8-recipe"]], ("--fp8-format", "--fp8-recipe"))
        yield Setting("precision.fp8_format", a["--fp8-format"], ("--fp8-format",), "hybrid")
        if a["--fp8-recipe"] == "delayed":
            yield from _fp8_history(a)
    ends = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
    if a["--first-last-layers-bf16"] and a[ends[0]] != a[ends[1]]:
        yield Refusal(ends[0], f"the same number as {ends[1]} is supported")
    elif a["--first-last-layers-bf16"]:
        yield Setting("precision.fp8_first_last_bf16", a[ends[0]], ("--first-last-layers-bf16", *ends))


def _fp8_history(a: Given) -> Iterator[Setting | Refusal]:
    """Delayed scaling; with Megatron-LM's defaults, the scale comes from the last step only."""
    compute = a["--fp8-amax-compute-algo"]
    if compute not in ("max", "most_recent"):
        yield Refusal("--fp8-amax-compute-algo", "max and most_recent are supported")
        return
    yield Setting("precision.fp8_amax_history_len", a["--fp8-amax-history-len"], ("--fp8-amax-history-len",))
    yield Setting("precision.fp8_amax_compute", compute, ("--fp8-amax-compute-algo",))
    yield Setting("precision.fp8_margin", a["--fp8-margin"], ("--fp8-margin",), 0)


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
