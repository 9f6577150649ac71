"""All rules between the sections of a configuration, its ranks and its data.

`check` lists all problems of a configuration for a number of ranks and, if known, the facts of the data. Each is one
line with the conflicting values and advice. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from mdata import MegatronOrder, UsageError
from mdata.dataset.mock_data import MOCK
from trainer.config.parse import value_problems
from trainer.config.sections import RecomputeSection, RunConfig
from trainer.models.arithmetic import common_divisors, listed, round_up
from trainer.models.family import family_of
from trainer.plan.check_optimizer import optimizer_problems
from trainer.plan.check_pipeline import pipeline_problems
from trainer.plan.check_precision import kernel_problems, precision_problems
from trainer.plan.check_schedule import schedule_problems
from trainer.plan.lengths import batch_sizes, run_length, sizes_setting


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
        has_valid: whether there are validation sets, whoever names them.
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
    if not config.run.folder.strip():
        problems.append("run.folder is empty; set it to a folder for the run, such as runs/first")
    problems += [*layout_problems(config, world_size), *(of_model := list(family_of(config).problems(config)))]
    problems += _recompute_problems(config)
    problems += [*schedule_problems(config), *optimizer_problems(config), *precision_problems(config)]
    problems += [*_first_state_problems(config), *_keep_best_problems(config, facts)]
    problems += [] if of_model else kernel_problems(config, world_size)  # these build the model's shape
    if config.data.blend == MOCK:
        return problems + list(_mock_problems(config))
    problems += _order_problems(config)
    return problems + list(_data_problems(config, facts) if facts else ())


def _first_state_problems(config: RunConfig) -> Iterator[str]:
    settings = config.checkpoint
    keys = [key for key in ("init_optimizer", "init_schedule", "init_data") if getattr(settings, key)]
    if keys and not settings.init_from:
        named = " and ".join(f"checkpoint.{key}" for key in keys)
        yield f"{named}=true without checkpoint.init_from; name the folder to begin with, or set it to false"


def _keep_best_problems(config: RunConfig, facts: DataFacts | None) -> Iterator[str]:
    best, mock = config.checkpoint.keep_best, config.data.blend == MOCK
    lacks = {}
    if not config.train.evaluate:
        lacks["train.evaluate"] = "train.evaluate=false reads no validation set"
    elif mock or (facts and not facts.has_valid):
        lacks["data.valid"] = "the data has no validation set"
    if not config.train.eval_interval:
        lacks["train.eval_interval"] = "train.eval_interval=0 validates at the end only"
    if best and lacks:
        why, keys = " and ".join(lacks.values()), "" if mock else f"{' and '.join(lacks)}, or "
        yield f"checkpoint.keep_best={best} would keep nothing: {why}; set {keys}checkpoint.keep_best=0"


def layout_problems(config: RunConfig, world_size: int) -> list[str]:
    """Every problem of the mesh, the pipeline and the microbatches: those that nearest_layout.py can solve."""
    return [*_mesh_problems(config, world_size), *pipeline_problems(config, world_size)]


def _mesh_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    tp, cp, train = config.mesh.tp, config.mesh.cp, config.train
    cut, kv_heads = family_of(config).cut_by_tp(config), config.model.num_kv_heads or config.model.num_heads
    fit = [size for size in common_divisors(*cut.values()) if not (kv_heads % size and size % kv_heads)]
    remedy = f"choose mesh.tp from {listed(fit)}"
    for what, size in cut.items():
        if size % tp:
            yield f"{what}={size} is not a multiple of mesh.tp={tp}; {remedy}"
    if kv_heads % tp and tp % kv_heads and config.model.num_kv_heads:
        yield f"model.num_kv_heads={kv_heads} is neither a multiple nor a divisor of mesh.tp={tp}; {remedy}"
    yield from _context_problems(config)
    sizes = {"tp": tp, "cp": cp, "pp": config.mesh.pp}
    model = math.prod(sizes.values())
    if world_size % model:
        ranks = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size > 1 or axis == "tp")
        divides = [size for size in fit if world_size % size == 0]
        others = f"mesh.tp from {listed(divides)}" if model == tp else f"mesh sizes whose product divides {world_size}"
        yield f"{world_size} ranks are not a multiple of {ranks}; start --nproc {model}, or choose {others}"
        return
    dp = world_size // model
    part = train.micro_batch * dp
    if train.global_batch % part:
        yield (
            f"train.global_batch={train.global_batch} is not a multiple of "
            f"train.micro_batch={train.micro_batch} x {dp} data-parallel ranks; "
            f"choose a multiple, such as {round_up(train.global_batch, part)}"
        )
    yield from _ramp_problems(config, part)


def _context_problems(config: RunConfig) -> Iterator[str]:
    cp, length = config.mesh.cp, config.train.sequence_length
    tp = config.mesh.tp if config.mesh.sequence_parallel else 1
    part = math.lcm(2 * cp, tp * cp)
    if cp > 1 and length % part:
        of_tp = f", and a rank's tokens are split over mesh.tp={tp}" if tp > 1 else ""
        yield (
            f"train.sequence_length={length} is not a multiple of {part}: with mesh.cp={cp} a sample is split into "
            f"2 x {cp} chunks{of_tp}; choose a multiple, such as {round_up(length, part)}, or a smaller mesh.cp"
        )


def _ramp_problems(config: RunConfig, part: int) -> Iterator[str]:
    try:
        sizes = batch_sizes(config).sizes
    except UsageError as error:
        yield str(error)
        return
    wrong = [size for size in sizes if size % part and size != config.train.global_batch]
    if wrong:
        yield (
            f"{sizes_setting(config)} has a step of {wrong[0]} samples, which is not a "
            f"multiple of train.micro_batch x data-parallel ranks = {part}; choose multiples of {part}"
            + ("" if config.train.batch_schedule else " as START and as INCREMENT")
        )


def _recompute_problems(config: RunConfig) -> Iterator[str]:
    recompute, num_layers = config.recompute, config.model.num_layers
    if recompute.mode == "full":
        if recompute.layers > num_layers:
            yield (
                f"recompute.layers={recompute.layers} is more than model.num_layers={num_layers}; "
                f"choose at most {num_layers}"
            )
        return
    for key in ("method", "layers"):
        value = getattr(recompute, key)
        if value != RecomputeSection.__dataclass_fields__[key].default:
            yield (
                f'recompute.{key}={value!r} applies only to recompute.mode="full"; '
                f"set that, or leave recompute.{key} out"
            )


def _order_problems(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.order == "megatron" and data.kind != "gpt":
        yield f'data.kind="{data.kind}" needs data.order="native"; set that, or choose data.kind="gpt"'
    if data.shuffle_block and (data.order == "megatron" or data.kind != "gpt"):
        yield (
            f'data.shuffle_block={data.shuffle_block} applies only to data.order="native" with data.kind="gpt"; '
            "set it to 0: other orders and kinds shuffle documents anyway"
        )
    if data.document_masks and data.kind == "document":
        yield (
            'data.document_masks=true changes nothing with data.kind="document", where each row is one document; '
            "set it to false"
        )
    if data.blend_surplus != MegatronOrder.blend_surplus and data.order != "megatron":
        yield f'data.blend_surplus={data.blend_surplus:g} applies only to data.order="megatron"; leave it out'
    if data.cache_size and not data.cache:
        yield f'data.cache_size="{data.cache_size}" has no effect without data.cache; set that, or leave it out'


def _mock_problems(config: RunConfig) -> Iterator[str]:
    """Settings that mock data does not support, and settings that apply only to files."""
    if not config.model.vocab_size:
        yield 'data.blend="mock" has no tokenizer, so it needs model.vocab_size; set it, such as to 50257'
    for field in dataclasses.fields(config.data):
        value = getattr(config.data, field.name)
        if field.name not in ("blend", "prefetch") and value != field.default:
            shown = list(value) if isinstance(value, tuple) else value
            yield f'data.{field.name}={shown!r} does not apply to data.blend="mock", which reads no file; leave it out'


def small_vocabulary(config: RunConfig, facts: DataFacts) -> str | None:
    """The problem, if the model has too few ids for the data."""
    if not 0 < config.model.vocab_size < facts.num_ids:
        return None
    return (
        f"model.vocab_size={config.model.vocab_size} is too small for {config.data.blend}: its tokenizer has "
        f"{_known(facts.vocab_size)} entries and its largest token id is {_known(facts.largest_id)}; "
        f"set model.vocab_size to 0 or at least {facts.num_ids}"
    )


def _data_problems(config: RunConfig, facts: DataFacts) -> Iterator[str]:
    vocab_size, length = config.model.vocab_size, config.train.sequence_length
    if not vocab_size and not facts.vocab_size:
        least = f" to at least {facts.largest_id + 1}" if facts.largest_id is not None else ""
        yield f"model.vocab_size=0, and {config.data.blend} names no tokenizer; set model.vocab_size{least}"
    if problem := small_vocabulary(config, facts):
        yield problem
    if not vocab_size and facts.vocab_size and facts.vocab_size < facts.num_ids:
        yield (
            f"{config.data.blend} holds token id {facts.largest_id}, outside its tokenizer's "
            f"{facts.vocab_size} entries; it was made with another tokenizer, preprocess it again"
        )
    if facts.num_samples is not None and run_length(config).samples > facts.num_samples:
        yield _too_few_samples(config, facts.num_samples)
    # Other kinds pad, or repeat a corpus before its end.
    runs = config.data.order == "native" and config.data.kind == "gpt"
    for name, tokens in facts.components or ((config.data.blend, facts.num_tokens),):
        if runs and tokens < length + 1:
            yield (
                f"train.sequence_length={length} needs {length + 1} tokens (the last label is one more), but "
                f"{name} has {tokens} for training; choose at most {max(tokens - 1, 1)}, or add text"
            )


def _too_few_samples(config: RunConfig, num_samples: int) -> str:
    asked, train, blend, sizes = run_length(config).samples, config.train, config.data.blend, batch_sizes(config)
    remedy = "or a blend whose amounts and caps allow more"
    if train.steps:
        size = sizes_setting(config) if len(sizes.sizes) > 1 else f"train.global_batch={train.global_batch}"
        return (
            f"train.steps={train.steps} x {size} reads {asked} samples, and {blend} ends after {num_samples}; "
            f"choose at most {sizes.within(num_samples)} steps, {remedy}"
        )
    unit, most = ("samples", num_samples) if train.samples else ("tokens", num_samples * train.sequence_length)
    return (
        f"train.{unit}={getattr(train, unit)} reads {asked} samples, and {blend} ends after {num_samples}; "
        f"choose at most train.{unit}={most}, {remedy}"
    )


def _known(value: int | None) -> str:
    return "an unknown number of" if value is None else str(value)
