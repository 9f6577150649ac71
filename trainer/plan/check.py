"""All rules between the sections of a configuration, its ranks and its data.

`check` lists all problems of a configuration for a number of ranks and, if known, the facts of the data: of the mesh
and the batch, the lengths and values of schedules, the pipeline, the optimizer, FP8 and named kernels, and the data.
Each is one line with the conflicting values and advice. Lengths may be in different units: they are compared in the
unit in which the schedules count (lengths.py). Whether the machine has a named library is found out when a run starts.
Pure, no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from mdata import MegatronOrder, UsageError
from mdata.dataset.mock_data import LEAST_MASKED_VOCABULARY, MOCK
from mdata.errors import counted
from trainer.arithmetic import common_divisors, listed, round_up
from trainer.config.parse import sub_sections, value_problems
from trainer.config.sections import (
    TEXT_KINDS,
    BertSamplesSection,
    CheckpointSection,
    DataSection,
    FimSection,
    MeshSection,
    OptimizerSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.models.family import FAMILIES, family_named, family_of
from trainer.pipeline.generators import default_chunks, impossible
from trainer.plan.lengths import (
    SCHEDULE_LENGTHS,
    RunLength,
    ScheduleLengths,
    batch_sizes,
    given_lengths,
    run_length,
    schedule_lengths,
    sizes_setting,
    skipped_ranges,
    training_samples,
)
from trainer.plan.stages import num_chunks

DOCUMENT_KINDS = ("document", "packed", "chat", "pairs")  # whose rows begin with a document
NO_DOCUMENT_MASKS = {
    "document": 'changes nothing with data.kind="document", where each row is one document',
    "chat": 'changes nothing with data.kind="chat", where conversations are always kept apart',
    "pairs": 'changes nothing with data.kind="pairs", where conversations are always kept apart',
    "bert": 'does not apply to data.kind="bert", where each token attends to its whole row',
    "t5": 'does not apply to data.kind="t5", where each row is of one document',
    "classify": 'does not apply to data.kind="classify", where each token attends to its whole row',
}
MOCK_KEYS = ("blend", "prefetch", "kind", "fim", "bert", "t5", "classify")  # apply to mock data, or to kinds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """The facts of the training data; None if the data does not record one (a prefix without a manifest).

    Args:
        vocab_size: entries of the tokenizer, with added tokens.
        largest_id: largest token id that occurs in the files.
        eod: id of the end-of-document token.
        fingerprint: content hash of the tokenizer.
        num_tokens: training tokens over all components.
        components: (name, training tokens) of each component.
        num_samples: of the training data; None: endless.
        has_valid: whether there are validation sets, named by the blend or the configuration.
        document_lengths: see `Plan`; (): rows are attended to as a whole.
    """

    vocab_size: int | None
    largest_id: int | None
    eod: int | None
    fingerprint: str | None
    num_tokens: int
    components: tuple[tuple[str, int], ...] = ()
    num_samples: int | None = None
    has_valid: bool = True
    document_lengths: tuple[int, ...] = ()

    @property
    def num_ids(self) -> int:
        """How many ids a model for this data needs; 0: unknown."""
        return max(self.vocab_size or 0, -1 if self.largest_id is None else self.largest_id + 1)


def check(config: RunConfig, world_size: int, *, facts: DataFacts | None) -> list[str]:
    """Every problem of a configuration on `world_size` ranks; without facts, problems with the data are not checked.

    Each problem is one line with the values that clash and a remedy.
    """
    problems = value_problems(config)
    if problems:
        return problems
    model_problems = list(_model_problems(config))
    problems = [
        *_run_problems(config.run, world_size),
        *layout_problems(config, world_size),
        *model_problems,
        *_recompute_problems(config),
        *schedule_problems(config),
        *optimizer_problems(config.optimizer, config.precision),
        *precision_problems(config),
        *_first_state_problems(config.checkpoint),
        *_keep_best_problems(config, facts),
        *_spike_problems(config),
        *_kind_problems(config),
        *sample_problems(config.data),
    ]
    if not model_problems:  # the rules for kernels build the model's shape
        problems += kernel_problems(config, world_size)
    if config.data.blend == MOCK:
        problems += _mock_problems(config.data, config.model.vocab_size)
    else:
        problems += _unused_options(config.data)
        problems += _data_problems(config, facts) if facts else ()
    return problems


def _non_default(section: Any, keys: Iterable[str]) -> dict[str, Any]:
    """Those of the keys whose values are not the defaults, with the values; tuples as lists, as TOML writes them."""
    values = {key: getattr(section, key) for key in keys}
    fields = section.__dataclass_fields__
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if value != fields[key].default
    }


def _run_problems(run: RunSection, world_size: int) -> Iterator[str]:
    if not run.folder.strip():
        yield "run.folder is empty; set it to a folder for the run, such as runs/first"
    steps = run.profile
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        yield f"run.profile={list(steps)} is not [first, last]; write two steps, such as [10, 12]"
    if steps and (outside := [rank for rank in run.profile_ranks if not 0 <= rank < world_size]):
        yield f"run.profile_ranks={list(run.profile_ranks)} has rank {outside[0]}, but there are {world_size} ranks"


def _first_state_problems(settings: CheckpointSection) -> Iterator[str]:
    keys = [key for key in ("init_optimizer", "init_schedule", "init_data") if getattr(settings, key)]
    if keys and not settings.init_from:
        named = " and ".join(f"checkpoint.{key}" for key in keys)
        yield f"{named}=true without checkpoint.init_from; name the folder to begin with, or set it to false"
    if settings.new_rows_from and not settings.init_from:
        yield "checkpoint.new_rows_from without checkpoint.init_from; all weights are drawn, so leave it out"
    if settings.new_rows_from and settings.init_optimizer:
        yield "checkpoint.init_optimizer=true, and rows of checkpoint.new_rows_from have no moments; set it to false"


def _keep_best_problems(config: RunConfig, facts: DataFacts | None) -> Iterator[str]:
    best, mock = config.checkpoint.keep_best, config.data.blend == MOCK
    missing = {}
    if not config.train.evaluate:
        missing["train.evaluate"] = "train.evaluate=false reads no validation set"
    elif mock or (facts and not facts.has_valid):
        missing["data.valid"] = "the data has no validation set"
    if not config.train.eval_interval:
        missing["train.eval_interval"] = "without train.eval_interval it validates at the end only"
    if best and missing:
        why, keys = " and ".join(missing.values()), "" if mock else f"{' and '.join(missing)}, or "
        yield f"checkpoint.keep_best={best} would keep nothing: {why}; set {keys}checkpoint.keep_best=0"


def _spike_problems(config: RunConfig) -> Iterator[str]:
    try:
        skipped_ranges(config.data.skip)
    except UsageError as error:
        yield str(error).replace("\n  ", "; ")
    saves = config.checkpoint.interval or config.checkpoint.minutes
    if config.spikes.action == "roll_back" and not saves:
        yield (
            'spikes.action="roll_back" has no checkpoint to return to: checkpoint.interval is not set and '
            'checkpoint.minutes=0; set one of them, or spikes.action="skip"'
        )


def _model_problems(config: RunConfig) -> Iterator[str]:
    """The problems that the model's family finds, and sub-sections that it does not read, which have no others."""
    family = family_of(config)
    foreign = [
        name
        for name in sub_sections("model")
        if getattr(config.model, name) is not None and name not in family.sections
    ]
    for name in foreign:
        readers = [other for other in FAMILIES if name in family_named(other).sections]
        yield (
            f'[model.{name}] is for model.family="{" or ".join(readers)}", not "{config.model.family}"; '
            "set that family, or leave the section out"
        )
    left_out: dict[str, Any] = dict.fromkeys(foreign)
    model = dataclasses.replace(config.model, **left_out)
    yield from family.problems(dataclasses.replace(config, model=model))


def layout_problems(config: RunConfig, world_size: int) -> list[str]:
    """Every problem of the mesh, the pipeline and the microbatches: those that nearest_layout.py can solve."""
    return [*_mesh_problems(config, world_size), *pipeline_problems(config, world_size)]


def _mesh_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    tp, cp, train = config.mesh.tp, config.mesh.cp, config.train
    cut, kv_heads = family_of(config).cut_by_tp(config), config.model.num_kv_heads or config.model.num_heads
    fit = [size for size in common_divisors(*cut.values()) if not (kv_heads % size and size % kv_heads)]
    remedy = f"choose mesh.tp from {listed(fit)}" if len(fit) > 1 else "set mesh.tp=1"
    for setting, size in cut.items():
        if size % tp:
            yield f"{setting}={size} is not a multiple of mesh.tp={tp}; {remedy}"
    if kv_heads % tp and tp % kv_heads and config.model.num_kv_heads:
        yield f"model.num_kv_heads={kv_heads} is neither a multiple nor a divisor of mesh.tp={tp}; {remedy}"
    yield from _context_problems(config.mesh, config.train.sequence_length)
    yield from _expert_problems(config, world_size)
    sizes = {"tp": tp, "cp": cp, "pp": config.mesh.pp}
    model = math.prod(sizes.values())
    if world_size % model:
        ranks = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size > 1 or axis == "tp")
        divides = [size for size in fit if world_size % size == 0]
        others = f"mesh.tp from {listed(divides)}" if model == tp else f"mesh sizes whose product divides {world_size}"
        of = counted(world_size, "rank is", "ranks are")
        yield f"{of} not a multiple of {ranks}; start {counted(model, 'rank')}, or choose {others}"
        return
    dp = world_size // model
    part = train.micro_batch * dp
    if train.global_batch % part:
        remedy = f"choose a multiple, such as {round_up(train.global_batch, part)}"
        if train.global_batch % dp == 0:
            rows = max(size for size in common_divisors(train.global_batch // dp) if size <= train.micro_batch)
            remedy = f"set train.micro_batch={rows}, or {remedy}"
        yield (
            f"train.global_batch={train.global_batch} is not a multiple of "
            f"train.micro_batch={train.micro_batch} x {counted(dp, 'data-parallel rank')}; {remedy}"
        )
    yield from _ramp_problems(config.train, part)


def least_ranks(mesh: MeshSection) -> int:
    """The fewest ranks that the sizes of [mesh] divide: stages of tp x cp ranks, which ep x etp divides as well."""
    return mesh.pp * math.lcm(mesh.tp * mesh.cp, mesh.ep * (mesh.etp or mesh.tp))


def _expert_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Ranks that share experts."""
    mesh, moe = config.mesh, config.model.moe
    ep, etp = mesh.ep, mesh.etp or mesh.tp
    if moe is None:
        for key, value in (("ep", ep if ep > 1 else None), ("etp", mesh.etp)):
            if value is not None:
                yield f"mesh.{key}={value} divides experts, but the model has none; leave it out, or add [model.moe]"
        return
    buffer = mesh.expert_buffer
    if mesh.expert_dispatch == "all_to_all" and config.kernels.cuda_graphs == "on" and buffer is None:
        yield (
            'mesh.expert_dispatch="all_to_all" waits for the host, which kernels.cuda_graphs="on" cannot; set '
            'mesh.expert_buffer=1.5, mesh.expert_dispatch="gather", or kernels.cuda_graphs="off"'
        )
    if buffer is not None and buffer < 1:
        yield f"mesh.expert_buffer={buffer:g} is below 1, an even load; choose a larger one, such as 1.5"
    inner = moe.ffn_hidden_size or config.model.ffn_hidden_size
    if moe.num_experts % ep:
        yield (
            f"model.moe.num_experts={moe.num_experts} is not a multiple of mesh.ep={ep}; choose mesh.ep from "
            f"{listed(common_divisors(moe.num_experts))}"
        )
    name = f"mesh.etp={etp}" if mesh.etp else f"mesh.etp={etp}, which is that of mesh.tp"
    if mesh.tp % etp:
        yield f"mesh.etp={etp} does not divide mesh.tp={mesh.tp}; choose from {listed(common_divisors(mesh.tp))}"
    elif inner is not None and inner % etp:
        yield f"the hidden size of an expert, {inner}, is not a multiple of {name}; choose a smaller mesh.etp"
    if etp < mesh.tp and not mesh.sequence_parallel:
        yield (
            f"mesh.etp={etp} is below mesh.tp={mesh.tp}, whose ranks all have the same tokens; set "
            "mesh.sequence_parallel=true, or leave mesh.etp out"
        )
    stage = world_size // mesh.pp
    if stage % (etp * ep):
        yield (
            f"{counted(stage, 'rank')} of a pipeline stage cannot be divided into mesh.ep={ep} x mesh.etp={etp}; "
            f"start {least_ranks(mesh)} ranks, or choose a product that divides {stage}"
        )


def _context_problems(mesh: MeshSection, sequence_length: int) -> Iterator[str]:
    cp, length = mesh.cp, sequence_length
    tp = mesh.tp if mesh.sequence_parallel else 1
    part = math.lcm(2 * cp, tp * cp)
    if cp > 1 and length % part:
        of_tp = f", and a rank's tokens are split over mesh.tp={tp}" if tp > 1 else ""
        yield (
            f"train.sequence_length={length} is not a multiple of {part}: with mesh.cp={cp} a sample is split into "
            f"2 x {cp} chunks{of_tp}; choose a multiple, such as {round_up(length, part)}, or a smaller mesh.cp"
        )


def _ramp_problems(train: TrainSection, part: int) -> Iterator[str]:
    try:
        sizes = batch_sizes(train).sizes
    except UsageError as error:
        yield str(error)
        return
    uneven = [size for size in sizes if size % part and size != train.global_batch]
    if uneven:
        yield (
            f"{sizes_setting(train)} has a step of {uneven[0]} samples, which is not a "
            f"multiple of train.micro_batch x data-parallel ranks = {part}; choose multiples of {part}"
            + ("" if train.batch_schedule else " as START and as INCREMENT")
        )


def _recompute_problems(config: RunConfig) -> Iterator[str]:
    recompute, num_layers = config.recompute, config.model.num_layers
    if recompute.mla_up_proj:
        if config.model.mla is None:
            yield "recompute.mla_up_proj=true needs latent attention; add [model.mla], or leave it out"
        elif recompute.mode == "full":
            yield 'recompute.mla_up_proj=true adds nothing to recompute.mode="full"; leave one of them out'
        elif config.precision.fp8 != "none":
            yield 'recompute.mla_up_proj=true would round twice with precision.fp8; set precision.fp8="none"'
    if recompute.mode == "full":
        if recompute.layers > num_layers:
            yield (
                f"recompute.layers={recompute.layers} is more than model.num_layers={num_layers}; "
                f"choose at most {num_layers}"
            )
        return
    for key, value in _non_default(recompute, ("method", "layers")).items():
        yield (
            f'recompute.{key}={value!r} applies only to recompute.mode="full"; set that, or leave recompute.{key} out'
        )


def _kind_problems(config: RunConfig) -> Iterator[str]:
    """A kind of samples that the model's family does not train on, and options of other kinds."""
    data, family = config.data, family_of(config)
    if data.kind not in family.data_kinds:
        families = [name for name in FAMILIES if data.kind in family_named(name).data_kinds]
        own = '" or "'.join(family.data_kinds)
        other = ", or " + " or ".join(f'model.family="{name}"' for name in families) if families else ""
        yield (
            f'data.kind="{data.kind}" is not what model.family="{config.model.family}" trains on; set '
            f'data.kind="{own}"{other}'
        )
    for name in sub_sections("data"):
        if getattr(data, name) is not None and name != data.kind:
            yield (
                f'[data.{name}] is for data.kind="{name}", not "{data.kind}"; set that kind, or leave the section out'
            )
    if data.kind == "pairs" and config.model.mtp is not None:
        yield 'data.kind="pairs" trains no layers of later tokens; leave [model.mtp] out'
    if _non_default(config.train, ["dpo_beta"]) and data.kind != "pairs":
        yield f'train.dpo_beta={config.train.dpo_beta:g} applies only to data.kind="pairs"; leave it out'
    if data.document_masks and data.kind in NO_DOCUMENT_MASKS and data.kind in TEXT_KINDS:
        yield f"data.document_masks=true {NO_DOCUMENT_MASKS[data.kind]}; set it to false"
    if data.kind not in TEXT_KINDS:
        for name, verb in (("tasks", "score"), ("prompts", "show")):
            if entries := getattr(config.evaluate, name):
                yield (
                    f"evaluate.{name}={list(entries)} {verb} how a model continues a text, which "
                    f'data.kind="{data.kind}" does not train; leave it out'
                )


def sample_problems(data: DataSection) -> list[str]:
    """Options of samples and of their order that exclude each other; mdata refuses each of them in its own words."""
    mock = data.blend == MOCK  # its options of files are named as such
    return [*_sample_option_problems(data), *(() if mock else _order_option_problems(data))]


def _sample_option_problems(data: DataSection) -> Iterator[str]:
    if _non_default(data, ["longer"]) and data.kind not in DOCUMENT_KINDS:
        kinds = ", ".join(f'"{kind}"' for kind in DOCUMENT_KINDS)
        yield f'data.longer="{data.longer}" applies only to data.kind {kinds}; leave it out'
    if data.document_masks and data.kind in NO_DOCUMENT_MASKS and data.kind not in TEXT_KINDS:
        yield f"data.document_masks=true {NO_DOCUMENT_MASKS[data.kind]}; set it to false"
    if isinstance(data.of_kind, BertSamplesSection):
        yield from _bert_problems(data.of_kind, data.order)
    if isinstance(data.of_kind, FimSection):
        yield from _fim_problems(data.of_kind)


def _bert_problems(options: BertSamplesSection, order: str) -> Iterator[str]:
    if options.full_rows and (options.head or order == "megatron"):
        needs = "data.bert.head=false" if options.head else 'data.order="native"'
        yield f"data.bert.full_rows=true needs {needs}; set that, or leave data.bert.full_rows out"
    if options.permutation and (options.geometric or order == "megatron"):
        other = "data.bert.geometric=true" if options.geometric else 'data.order="megatron"'
        yield f"data.bert.permutation=true cannot be used with {other}; leave one of them out"


def _fim_problems(options: FimSection) -> Iterator[str]:
    if (options.split_sample is None) != (options.fragment_rate is None):
        yield "data.fim.split_sample and data.fim.fragment_rate go together; set both, or neither"
    if not 3 <= len(options.tokens) <= 5:
        yield (
            f"data.fim.tokens={list(options.tokens)} has {counted(len(options.tokens), 'token')}; write prefix, middle "
            "and suffix, and after them pad and eod if they are not the tokenizer's"
        )


def _order_option_problems(data: DataSection) -> Iterator[str]:
    if data.order == "megatron" and data.kind in (*DOCUMENT_KINDS, "classify"):
        yield f'data.kind="{data.kind}" needs data.order="native"; set that, or choose data.kind="gpt"'
    if data.shuffle_block and (data.order == "megatron" or data.kind not in ("gpt", "fim")):
        yield (
            f'data.shuffle_block={data.shuffle_block} applies only to data.order="native" with data.kind="gpt"; '
            "leave it out: other orders and kinds shuffle documents anyway"
        )
    if data.blend_surplus != MegatronOrder.blend_surplus and data.order != "megatron":
        yield f'data.blend_surplus={data.blend_surplus:g} applies only to data.order="megatron"; leave it out'


def _unused_options(data: DataSection) -> Iterator[str]:
    """Options that nothing reads, which mdata does not know or leaves unread."""
    if data.order_samples and data.order != "megatron":
        yield f'data.order_samples={data.order_samples} applies only to data.order="megatron"; leave it out'
    if data.cache_size and not data.cache:
        yield f'data.cache_size="{data.cache_size}" has no effect without data.cache; set that, or leave it out'


def _mock_problems(data: DataSection, vocab_size: int | None) -> Iterator[str]:
    """Settings that mock data does not support, and settings that apply only to files."""
    least = LEAST_MASKED_VOCABULARY
    if vocab_size and vocab_size < least and data.kind not in TEXT_KINDS:
        yield (
            f'model.vocab_size={vocab_size} is too small for data.kind="{data.kind}" of data.blend="mock", which takes '
            f"special tokens from it; set at least {least}"
        )
    if not vocab_size:
        yield 'data.blend="mock" has no tokenizer, so it needs model.vocab_size; set it, such as to 50257'
    of_files = [field.name for field in dataclasses.fields(data) if field.name not in MOCK_KEYS]
    of_kinds = {
        "document_masks": data.kind == "packed" or data.kind in NO_DOCUMENT_MASKS,
        "longer": data.kind not in DOCUMENT_KINDS,
    }
    for key, value in _non_default(data, of_files).items():
        if not of_kinds.get(key):
            shown = json.dumps(value)
            yield f'data.{key}={shown} does not apply to data.blend="mock", which reads no file; leave it out'


def small_vocabulary(config: RunConfig, facts: DataFacts) -> str | None:
    """The problem, if the model has too few ids for the data."""
    if config.model.vocab_size is None or config.model.vocab_size >= facts.num_ids:
        return None
    entries = "an unknown number of" if facts.vocab_size is None else facts.vocab_size
    largest_id = "unknown" if facts.largest_id is None else facts.largest_id
    return (
        f"model.vocab_size={config.model.vocab_size} is too small for {config.data.blend}: its tokenizer has "
        f"{entries} entries and its largest token id is {largest_id}; "
        f"set model.vocab_size to at least {facts.num_ids}, or leave it out"
    )


def _data_problems(config: RunConfig, facts: DataFacts) -> Iterator[str]:
    vocab_size, length = config.model.vocab_size, config.train.sequence_length
    if not vocab_size and not facts.vocab_size:
        least = f" to at least {facts.largest_id + 1}" if facts.largest_id is not None else ""
        yield (
            f"model.vocab_size is not set, and {config.data.blend} names no tokenizer; "
            f"record it with mdata adopt, or set model.vocab_size{least}"
        )
    if problem := small_vocabulary(config, facts):
        yield problem
    if not vocab_size and facts.vocab_size and facts.vocab_size < facts.num_ids:
        yield (
            f"{config.data.blend} holds token id {facts.largest_id}, outside its tokenizer's "
            f"{facts.vocab_size} entries; it was made with another tokenizer, preprocess it again"
        )
    if facts.num_samples is not None and run_length(config.train).samples > facts.num_samples:
        yield _too_few_samples(config.train, config.data, facts.num_samples)
    # Other kinds pad, or repeat a corpus before its end.
    runs = config.data.order == "native" and config.data.kind in ("gpt", "fim")
    for name, tokens in facts.components or ((config.data.blend, facts.num_tokens),):
        if runs and tokens < length + 1:
            yield (
                f"train.sequence_length={length} needs {length + 1} tokens (the last label is one more), but "
                f"{name} has {tokens} for training; choose at most {max(tokens - 1, 1)}, or add text"
            )


def _too_few_samples(train: TrainSection, data: DataSection, num_samples: int) -> str:
    asked, sizes, blend = run_length(train).samples, batch_sizes(train), data.blend
    remedy = "or a blend whose amounts and caps allow more"
    if data.order_samples:
        remedy = f"or in a new run at least data.order_samples={training_samples(train)}"
    if train.steps:
        size = sizes_setting(train) if len(sizes.sizes) > 1 else f"train.global_batch={train.global_batch}"
        return (
            f"train.steps={train.steps} x {size} reads {counted(asked, 'sample')}, and {blend} ends after "
            f"{num_samples}; choose at most {counted(sizes.within(num_samples), 'step')}, {remedy}"
        )
    unit, most = ("samples", num_samples) if train.samples else ("tokens", num_samples * train.sequence_length)
    return (
        f"train.{unit}={getattr(train, unit)} reads {counted(asked, 'sample')}, and {blend} ends after {num_samples}; "
        f"choose at most train.{unit}={most}, {remedy}"
    )


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """Every problem of the run's length and of its schedules."""
    run, unclear = given_lengths(config.train), list(_unclear(config.optimizer))
    if not run:
        yield "the run has no length; set one of train.steps, train.samples and train.tokens"
    if len(run) > 1:
        yield f"{_settings('train.', run)} are set; a run has one length, keep one of them"
    yield from unclear
    if len(run) == 1 and not unclear:
        with suppress(UsageError):  # an invalid ramp is reported separately
            yield from _length_problems(config, schedule_lengths(config), run_length(config.train))
    yield from _value_problems(config.optimizer)


def _unclear(optimizer: OptimizerSection) -> Iterator[str]:
    """Lengths that are given twice."""
    for prefix in SCHEDULE_LENGTHS:
        lengths: dict[str, float] = dict(given_lengths(optimizer, prefix))
        if prefix == "warmup_" and optimizer.warmup_fraction:
            lengths["fraction"] = optimizer.warmup_fraction
        if len(lengths) > 1:
            yield f"{_settings(f'optimizer.{prefix}', lengths)} are set; keep one of them"


def _length_problems(config: RunConfig, lengths: ScheduleLengths, run: RunLength) -> Iterator[str]:
    optimizer, run_setting = config.optimizer, _settings("train.", given_lengths(config.train))
    if run.steps < 1:
        yield _less_than_a_step(config.train, run_setting)
        return
    end = run.steps if lengths.counter == "steps" else run.samples
    # A schedule with a length of its own may be longer than this run, which may then end within the warmup.
    if lengths.warmup > lengths.decay:
        limit = (
            _settings("optimizer.decay_", given_lengths(optimizer, "decay_")) if lengths.decay < end else run_setting
        )
        fraction = {"fraction": optimizer.warmup_fraction or 0.0}
        warmup = _settings("optimizer.warmup_", given_lengths(optimizer, "warmup_") or fraction)
        fewer, raised = f"fewer {lengths.counter}", limit.partition("=")[0]
        yield f"{warmup} is more than {limit}; warm up for {fewer}, or raise {raised}"
    wsd_lengths = given_lengths(optimizer, "wsd_decay_")
    if wsd_lengths and optimizer.schedule != "wsd":
        yield f'{_settings("optimizer.wsd_decay_", wsd_lengths)} applies only to optimizer.schedule="wsd"; leave it out'
    if optimizer.schedule == "wsd" and not wsd_lengths:
        yield 'optimizer.schedule="wsd" needs a length of its decay; set optimizer.wsd_decay_steps, _samples or _tokens'
    elif optimizer.schedule == "wsd" and lengths.wsd_decay > lengths.decay:
        wsd_decay, most = _settings("optimizer.wsd_decay_", wsd_lengths), f"{lengths.decay:g} {lengths.counter}"
        yield f"{wsd_decay} is longer than the schedule, of {most}; choose at most that many"


def _less_than_a_step(train: TrainSection, run_setting: str) -> str:
    samples, unit = batch_sizes(train).at(0), "samples"
    if train.tokens:
        samples, unit = samples * train.sequence_length, "tokens"
    return f"{run_setting} is less than the first step, which reads {samples} {unit}; choose at least {samples}"


def _value_problems(optimizer: OptimizerSection) -> Iterator[str]:
    for name in ("min_lr", "init_lr"):
        if getattr(optimizer, name) > optimizer.lr:
            yield (
                f"optimizer.{name}={getattr(optimizer, name):g} is more than optimizer.lr={optimizer.lr:g}; "
                f"choose an optimizer.{name} of at most {optimizer.lr:g}"
            )
    lr, min_lr = optimizer.embedding_lr, optimizer.embedding_min_lr
    if lr and max(min_lr, optimizer.init_lr) > lr:
        name = "embedding_min_lr" if min_lr > lr else "init_lr"
        value = getattr(optimizer, name)
        yield (
            f"optimizer.{name}={value:g} is more than optimizer.embedding_lr={lr:g}; choose at most {lr:g}, or a "
            "larger optimizer.embedding_lr"
        )
    if min_lr and not lr:
        yield f"optimizer.embedding_min_lr={min_lr:g} needs optimizer.embedding_lr; set both, or leave it out"
    if optimizer.weight_decay_schedule != "constant":
        return
    decay_lengths = given_lengths(optimizer, "weight_decay_")
    given_text = _settings(
        "optimizer.weight_decay_", {"end": optimizer.weight_decay_end} if optimizer.weight_decay_end else decay_lengths
    )
    if given_text:
        yield f'{given_text} needs optimizer.weight_decay_schedule="linear" or "cosine"; set one, or leave it out'


def _settings(prefix: str, amounts: Mapping[str, float]) -> str:
    """ "a=1 and b=2"."""
    return " and ".join(f"{prefix}{unit}={amount}" for unit, amount in amounts.items())


def pipeline_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every problem of the pipeline; those of its microbatches only if the ranks can be divided."""
    mesh = config.mesh
    if mesh.pp == 1:
        yield from _without_effect(mesh)
        return
    chunks, num_layers = num_chunks(mesh), config.model.num_layers
    wrong_chunks = impossible(mesh.schedule, num_ranks=mesh.pp, chunks=chunks, num_microbatches=mesh.pp)
    stages = mesh.pp * (default_chunks(mesh.schedule) if wrong_chunks else chunks)
    if stages > num_layers:
        yield _too_many_stages(config, world_size, chunks=stages // mesh.pp)
    yield from _layer_problems(mesh, num_layers, stages)
    others = mesh.tp * mesh.cp
    part = world_size // (others * mesh.pp)
    if part and world_size % (others * mesh.pp) == 0:
        yield from _schedule_problems(config, chunks, config.train.micro_batch * part)
    elif wrong_chunks:
        yield f"mesh.schedule={mesh.schedule}: {wrong_chunks}; {_other_chunks(mesh, num_layers, chunks)}"


def _too_many_stages(config: RunConfig, world_size: int, *, chunks: int) -> str:
    """A problem whose every remedy works: fewer ranks, one stage for each, or more layers."""
    mesh, num_layers = config.mesh, config.model.num_layers
    stages = f"mesh.pp={mesh.pp}" + (f" x {chunks} stages per rank = {mesh.pp * chunks}" if chunks > 1 else "")
    remedies, sizes = [], _batches(config.train)
    for pp in range(num_layers // chunks, 0, -1):
        fewer = dataclasses.replace(mesh, pp=pp)
        dp, rest = divmod(world_size, mesh.tp * mesh.cp * pp)
        if rest or (pp == 1 and list(_without_effect(fewer))):
            continue
        if all(_can_be_run(fewer, chunks, size=size, part=config.train.micro_batch * dp) for size in sizes):
            remedies.append(f"mesh.pp={pp}")
            break
    if chunks > 1 and mesh.pp <= num_layers:
        remedies.append(
            'mesh.schedule="1f1b"' + (" without mesh.virtual_pipeline" if (mesh.virtual_pipeline or 1) > 1 else "")
        )
    ways = ", ".join([*remedies, "or a deeper model"]) if remedies else "a deeper model"
    return f"{stages} stages are more than model.num_layers={num_layers}; choose {ways}"


def _can_be_run(mesh: MeshSection, chunks: int, *, size: int, part: int) -> bool:
    """Whether a batch of `size` samples divides into microbatches of `part` that the schedule takes."""
    count, rest = divmod(size, part)
    return not (rest or impossible(mesh.schedule, num_ranks=mesh.pp, chunks=chunks, num_microbatches=count))


def _batches(train: TrainSection) -> list[int]:
    """The sizes of batch that a run has."""
    sizes = {train.global_batch}
    with suppress(UsageError):  # an invalid ramp is reported separately
        sizes.update(batch_sizes(train).sizes)
    return sorted(sizes)


def _other_chunks(mesh: MeshSection, num_layers: int, chunks: int) -> str:
    """The remedy for a number of stages per rank that a schedule does not have."""
    enough = chunks > 1 and mesh.pp * chunks <= num_layers
    return "leave mesh.virtual_pipeline out" + (', or set mesh.schedule="interleaved"' if enough else "")


def _without_effect(mesh: MeshSection) -> Iterator[str]:
    keys = ("schedule", "virtual_pipeline", "stage_balance", "layers_per_stage")
    for key, value in _non_default(mesh, keys).items():
        if (key, value) != ("virtual_pipeline", 1):
            yield f"mesh.{key}={value!r} applies only to mesh.pp above 1; set that, or leave mesh.{key} out"


def _layer_problems(mesh: MeshSection, num_layers: int, stages: int) -> Iterator[str]:
    layers = mesh.layers_per_stage
    if not layers:
        return
    shown = f"mesh.layers_per_stage={list(layers)}"
    if mesh.stage_balance != "layers":
        yield f'{shown} and mesh.stage_balance="{mesh.stage_balance}" are both set; keep one of them'
    if len(layers) != stages:
        yield f"{shown} has {counted(len(layers), 'number')} for {counted(stages, 'stage')}; give one for each"
    if min(layers) < 1:
        yield f"{shown} has a stage without layers; give each at least 1"
    if sum(layers) != num_layers:
        yield f"{shown} has {counted(sum(layers), 'layer')} in all, and model.num_layers={num_layers}; make them equal"


def _schedule_problems(config: RunConfig, chunks: int, part: int) -> Iterator[str]:
    """Batches that the schedule cannot divide; `part`: the samples of one microbatch of all data-parallel ranks."""
    mesh, train = config.mesh, config.train
    for size in _batches(train):
        if size % part:
            continue  # reported with the other layouts
        count = size // part
        problem = impossible(mesh.schedule, num_ranks=mesh.pp, chunks=chunks, num_microbatches=count)
        if not problem:
            continue
        remedy = _other_chunks(mesh, config.model.num_layers, chunks)
        if count % mesh.pp and mesh.schedule == "interleaved" and chunks > 1:
            fitting_batch = round_up(count, mesh.pp) * part
            ramp = f"a step of {sizes_setting(train).partition('=')[0]}"
            setting = "train.global_batch" if size == train.global_batch else ramp
            remedy = f'choose {setting}={fitting_batch}, or mesh.schedule="1f1b"'
        yield f"mesh.schedule={mesh.schedule} with a batch of {size} samples: {problem}; {remedy}"
        return


def optimizer_problems(optimizer: OptimizerSection, precision: PrecisionSection) -> Iterator[str]:
    """Every problem of the update rule's settings."""
    if precision.gradients == "params" and precision.dtype not in ("bf16", "fp16"):
        yield (
            f'precision.gradients="params" changes nothing with precision.dtype="{precision.dtype}"; '
            'choose "bf16" or "fp16", or leave precision.gradients out'
        )
    if optimizer.name != "muon":
        muon_keys = [field.name for field in dataclasses.fields(optimizer) if field.name.startswith("muon_")]
        for key, value in _non_default(optimizer, muon_keys).items():
            yield (
                f'optimizer.{key}={value!r} applies only to optimizer.name="muon"; '
                f"set that, or leave optimizer.{key} out"
            )
    moments: tuple[str, ...] = ("momentum",)
    rules = 'optimizer.name="sgd"'
    if optimizer.name == "sgd":
        moments, rules = ("beta1", "beta2", "epsilon"), 'optimizer.name="adamw" and "muon"'
    for key, value in _non_default(optimizer, moments).items():
        yield f'optimizer.{key}={value!r} applies only to {rules}, not "{optimizer.name}"; leave optimizer.{key} out'
    if optimizer.name == "muon" and optimizer.muon_coefficient_type == "quintic" and optimizer.muon_ns_steps % 5:
        yield (
            f"optimizer.muon_ns_steps={optimizer.muon_ns_steps} is not a multiple of the five polynomials of "
            'optimizer.muon_coefficient_type="quintic"; choose 5 or 10, or "simple"'
        )


GROUPED_MULTIPLE = 8  # of the widths of experts in products that do not wait for the host
MULTIPLE = 16  # of every dimension of a product of FP8 matrices: required by cuBLAS
BLOCK = 128  # the same with blockwise scales, whose blocks have this side: no block is then shared by two ranks
DELAYED_KEYS = ("fp8_amax_history_len", "fp8_amax_compute", "fp8_margin")
FP8_KEYS = ("fp8_format", "fp8_first_last_bf16", *DELAYED_KEYS)


def precision_problems(config: RunConfig) -> Iterator[str]:
    """One line for each setting of [precision] that conflicts with others, the model or the batch."""
    precision = config.precision
    idle = FP8_KEYS if precision.fp8 == "none" else DELAYED_KEYS if precision.fp8 != "delayed" else ()
    for key, value in _non_default(precision, idle).items():
        yield (
            f'precision.{key}={value!r} has no effect with precision.fp8="{precision.fp8}"; '
            'leave it out, or set precision.fp8="delayed"'
        )
    if precision.fp8 == "none":
        return
    if precision.dtype != "bf16":
        yield (
            f'precision.fp8="{precision.fp8}" needs precision.dtype="bf16", the type of everything but the products of '
            f'linear layers, not "{precision.dtype}"; set precision.dtype="bf16"'
        )
    bf16 = 2 * precision.fp8_first_last_bf16
    if bf16 >= config.model.num_layers:
        yield (
            f"precision.fp8_first_last_bf16={precision.fp8_first_last_bf16} at both ends leaves no layer of "
            f'model.num_layers={config.model.num_layers} in FP8; lower it, or set precision.fp8="none"'
        )
    blocks = precision.fp8 == "blockwise"
    multiple, others = (BLOCK, "another precision.fp8") if blocks else (MULTIPLE, 'precision.fp8="none"')
    for setting, size in family_of(config).float8_sizes(config).items():
        if size % multiple:
            yield (
                f"{setting} is {size}, but FP8 matrices must have multiples of {multiple} rows and columns"
                f"{' with scales of blocks' * blocks}; choose {round_up(size, multiple)}, or set {others}"
            )


def why_not_recorded(config: RunConfig, *, sharing: int) -> str:
    """Why CUDA graphs cannot launch the passes of this run (pipeline/graphs.py); "" if they can.

    Args:
        sharing: ranks that share a parameter, at most; see `Plan.sharing`.
    """
    sharding = config.optimizer.sharding
    if sharing > 1 and sharding in ("gradients", "parameters"):
        return f'optimizer.sharding="{sharding}" moves buffers during a step'
    if config.data.kind == "pairs":
        return 'the number of pairs of data.kind="pairs" differs between microbatches'
    if config.data.kind == "classify":
        return 'rows of data.kind="classify" have padding, whose length differs between microbatches'
    return why_experts_wait(config)


def why_experts_wait(config: RunConfig) -> str:
    """Why products of experts wait for the host on every GPU; "" if they need not (see kernels/gpu.py)."""
    model, mesh = config.model, config.mesh
    if model.moe is None:
        return ""
    if (dtype := config.precision.dtype) != "bf16":
        return f'products of experts wait for the host with precision.dtype="{dtype}", but not with "bf16"'
    inner = (model.moe.ffn_hidden_size or model.ffn_hidden_size or model.hidden_size) // (mesh.etp or mesh.tp)
    for name, width in (("model.hidden_size", model.hidden_size), ("the hidden size of an expert on a rank", inner)):
        if width % GROUPED_MULTIPLE:
            return f"products of experts wait for the host where {name}, {width}, is no multiple of {GROUPED_MULTIPLE}"
    return ""


def uses_graphs(config: RunConfig, *, sharing: int) -> bool:
    """Whether a GPU launches the passes of this run as CUDA graphs.

    "auto": where they can be recorded, but not for experts, which gain less than 1 % and need a GPU of Hopper or later,
    and not for rows that ranks share, which are too long to wait for the host.
    """
    if (setting := config.kernels.cuda_graphs) != "auto":
        return setting == "on"
    return config.mesh.cp == 1 and config.model.moe is None and not why_not_recorded(config, sharing=sharing)


def why_not_beside(config: RunConfig) -> str:
    """Why passes of two microbatches cannot run beside each other; "" if they can."""
    if config.kernels.cuda_graphs != "on":
        return 'it needs kernels.cuda_graphs="on"'
    if config.mesh.pp > 1:
        return f"passes of a pipeline wait for messages, and mesh.pp is {config.mesh.pp}"
    if config.model.tie_embeddings:
        return "with model.tie_embeddings both passes add to the gradient of the embedding"
    return "" if config.mesh.schedule == "1f1b" else f'mesh.schedule is "{config.mesh.schedule}", not "1f1b"'


def kernel_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """One line for each named kernel that does not support its use in this run."""
    kernels, family, mesh = config.kernels, family_of(config), config.mesh
    sharing = world_size // mesh.pp // min(mesh.tp, (mesh.etp or mesh.tp) * mesh.ep)
    if kernels.cuda_graphs == "on" and (reason := why_not_recorded(config, sharing=sharing)):
        yield f'kernels.cuda_graphs="on" cannot be used: {reason}; set kernels.cuda_graphs="auto"'
    if kernels.overlap_passes == "on" and (reason := why_not_beside(config)):
        yield f'kernels.overlap_passes="on" cannot be used: {reason}; set kernels.overlap_passes="auto"'
    if kernels.optimizer == "apex" and config.optimizer.name != "adamw":
        yield (
            f'kernels.optimizer="apex" supports only optimizer.name="adamw", not "{config.optimizer.name}"; '
            'set kernels.optimizer="auto"'
        )
    if kernels.attention == "auto":
        return
    if config.mesh.cp > 1:
        yield (
            f'kernels.attention="{kernels.attention}" with mesh.cp={config.mesh.cp}; it does not support rows that '
            'ranks share: set kernels.attention="auto", or mesh.cp=1'
        )
    shape = family.shape(config, config.model.vocab_size or 1)
    attentions = (family.scores(shape, kind) for kind in {*family.kinds(shape)})
    ordinary = any(scores is not None and scores.is_ordinary for scores in attentions)
    if config.data.documents_apart or not ordinary:
        option = "these options of the model"
        if config.data.documents_apart:
            option = "data.document_masks" if config.data.document_masks else f'data.kind="{config.data.kind}"'
        yield (
            f'kernels.attention="{kernels.attention}" supports only causal attention over whole rows, '
            f'which no layer has with {option}; set kernels.attention="auto"'
        )
