"""Every rule between the sections of a configuration, its ranks and its data.

`check` lists all problems of a configuration for a number of ranks and, where known, the facts of the data. Each is
one line with the values that clash and a remedy. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from mdata import MegatronOrder, UsageError
from mdata.dataset.mock_data import MOCK
from trainer.config.parse import value_problems
from trainer.config.sections import ModelSection, RecomputeSection, RunConfig
from trainer.layers.shapes import GATED
from trainer.models.gpt_shape import ffn_hidden_size, head_dim, round_up
from trainer.plan.check_optimizer import optimizer_problems
from trainer.plan.check_pipeline import pipeline_problems
from trainer.plan.check_precision import kernel_problems, precision_problems
from trainer.plan.check_schedule import schedule_problems
from trainer.plan.lengths import batch_sizes, training_samples

_MOST_PARTS = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """What the training data says about itself; None where it does not know (a prefix without a manifest).

    Args:
        vocab_size: entries of the tokenizer, added tokens included.
        largest_id: largest token id that occurs in the files.
        eod: id of the end-of-document token.
        fingerprint: content hash of the tokenizer.
        num_tokens: training tokens over all components.
        components: (name, training tokens) of each component.
        num_samples: of the training data; None: without end.
    """

    vocab_size: int | None
    largest_id: int | None
    eod: int | None
    fingerprint: str | None
    num_tokens: int
    components: tuple[tuple[str, int], ...] = ()
    num_samples: int | None = None


def check(config: RunConfig, world_size: int, *, facts: DataFacts | None) -> list[str]:
    """Every problem of a configuration on `world_size` ranks; without facts, none of those with the data.

    Each problem is one line with the values that clash and a remedy.
    """
    problems = value_problems(config)
    if problems:
        return problems
    if not config.run.folder.strip():
        problems.append("run.folder is empty; set it to a folder for the run, such as runs/first")
    problems += [*_layout_problems(config, world_size), *_size_problems(config), *_option_problems(config)]
    problems += pipeline_problems(config, world_size)
    problems += [*schedule_problems(config), *optimizer_problems(config), *precision_problems(config)]
    problems += [] if problems else kernel_problems(config)
    if config.data.blend == MOCK:
        return problems + list(_mock_problems(config))
    problems += _order_problems(config)
    return problems + list(_data_problems(config, facts) if facts else ())


def _layout_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    tp, cp, train = config.mesh.tp, config.mesh.cp, config.train
    cut, kv_heads = _cut_by_tp(config), config.model.num_kv_heads or config.model.num_heads
    fit = [size for size in _common_divisors(*cut.values()) if not (kv_heads % size and size % kv_heads)]
    remedy = f"choose mesh.tp from {_listed(fit)}"
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
        yield f"{world_size} ranks are not a multiple of {ranks}; start --nproc {model}, or {remedy}"
        return
    dp = world_size // model
    part = train.micro_batch * dp
    if train.global_batch % part:
        yield (
            f"train.global_batch={train.global_batch} is not a multiple of "
            f"train.micro_batch={train.micro_batch} x {dp} data-parallel ranks; "
            f"choose a multiple of {part}, such as {round_up(train.global_batch, part)}"
        )
    yield from _ramp_problems(config, part)


def _context_problems(config: RunConfig) -> Iterator[str]:
    cp, length = config.mesh.cp, config.train.sequence_length
    tp = config.mesh.tp if config.mesh.sequence_parallel else 1
    part = math.lcm(2 * cp, tp * cp)
    if cp > 1 and length % part:
        of_tp = f", and those of a rank are cut over mesh.tp={tp}" if tp > 1 else ""
        yield (
            f"train.sequence_length={length} is not a multiple of {part}: with mesh.cp={cp} a sample is cut into "
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
            f"train.batch_ramp={config.train.batch_ramp!r} has a step of {wrong[0]} samples, which is not a "
            f"multiple of train.micro_batch x data-parallel ranks = {part}; "
            f"choose multiples of {part} to start and to add"
        )


def _size_problems(config: RunConfig) -> Iterator[str]:
    model, length = config.model, config.train.sequence_length
    kv_heads = model.num_kv_heads or model.num_heads
    if not model.head_dim and model.hidden_size % model.num_heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not a multiple of model.num_heads={model.num_heads}; "
            f"choose a multiple, such as {round_up(model.hidden_size, model.num_heads)}, or set model.head_dim"
        )
    elif model.position == "rope" and model.rope_fraction == 1 and head_dim(config) % 2:
        quotient = f"model.hidden_size={model.hidden_size} / model.num_heads={model.num_heads}"
        yield (
            f"{f'model.head_dim={model.head_dim}' if model.head_dim else quotient} is odd, but rope "
            'rotates features in pairs; choose an even head size, or model.position="learned"'
        )
    elif model.position == "rope" and int(head_dim(config) * model.rope_fraction) % 2:
        yield (
            f"model.rope_fraction={model.rope_fraction:g} of {head_dim(config)} features of a head is "
            f"{int(head_dim(config) * model.rope_fraction)}, but rope rotates features in pairs; choose an even number"
        )
    elif model.position == "rope" and int(head_dim(config) * model.rope_fraction) == 0:
        yield (
            f"model.rope_fraction={model.rope_fraction:g} of {head_dim(config)} features of a head rotates none; "
            'raise it, or choose model.position="none"'
        )
    elif model.rope_scaling == "ntk" and int(head_dim(config) * model.rope_fraction) <= 2:
        yield 'model.rope_scaling="ntk" needs more than 2 rotated features of a head; raise model.head_dim'
    if model.num_heads % kv_heads:
        yield (
            f"model.num_heads={model.num_heads} is not a multiple of model.num_kv_heads={kv_heads}; "
            f"choose model.num_kv_heads from {_listed(_common_divisors(model.num_heads))}"
        )
    if model.max_position and model.max_position < length:
        yield (
            f"train.sequence_length={length} is longer than model.max_position={model.max_position}; "
            f"shorten the sequence, or set model.max_position to 0 or at least {length}"
        )


def _option_problems(config: RunConfig) -> Iterator[str]:
    """Options of the model that mean nothing, or something impossible, beside others."""
    model = config.model
    needs: tuple[tuple[str, bool, str], ...] = (
        ("rope_fraction", model.position == "rope", 'model.position="rope"'),
        ("rope_interleaved", model.position == "rope", 'model.position="rope"'),
        ("rope_interval", model.position == "rope", 'model.position="rope"'),
        ("rope_scaling", model.position == "rope", 'model.position="rope"'),
        ("rope_factor", model.rope_scaling != "none", "a model.rope_scaling"),
        ("rope_original_length", model.rope_scaling in ("yarn", "llama3"), 'model.rope_scaling="yarn" or "llama3"'),
        ("rope_low_freq_factor", model.rope_scaling == "llama3", 'model.rope_scaling="llama3"'),
        ("rope_high_freq_factor", model.rope_scaling == "llama3", 'model.rope_scaling="llama3"'),
        ("rope_beta_fast", model.rope_scaling == "yarn", 'model.rope_scaling="yarn"'),
        ("rope_beta_slow", model.rope_scaling == "yarn", 'model.rope_scaling="yarn"'),
        ("activation_clamp", model.activation in GATED, f"model.activation from {', '.join(GATED)}"),
        ("activation_offset", model.activation in GATED, f"model.activation from {', '.join(GATED)}"),
        ("window_interval", model.window > 0, "a model.window"),
    )
    for key, holds, what in needs:
        value = getattr(model, key)
        if not holds and not model.preset and value != ModelSection.__dataclass_fields__[key].default:
            yield f"model.{key}={value!r} needs {what}; set that, or leave model.{key} out"
    if model.rope_scaling in ("yarn", "llama3") and not model.rope_original_length:
        yield (
            f'model.rope_scaling="{model.rope_scaling}" needs model.rope_original_length, the tokens of a sequence '
            "before scaling; set it, such as to 8192"
        )
    if model.rope_low_freq_factor >= model.rope_high_freq_factor:
        yield (
            f"model.rope_low_freq_factor={model.rope_low_freq_factor:g} is not below "
            f"model.rope_high_freq_factor={model.rope_high_freq_factor:g}; choose a smaller one"
        )
    if model.rope_beta_slow >= model.rope_beta_fast:
        yield (
            f"model.rope_beta_slow={model.rope_beta_slow:g} is not below "
            f"model.rope_beta_fast={model.rope_beta_fast:g}; choose a smaller one"
        )
    yield from _recompute_problems(config)


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


def _mock_problems(config: RunConfig) -> Iterator[str]:
    """What mock data lacks, and settings that are about files."""
    if not config.model.vocab_size:
        yield 'data.blend="mock" has no tokenizer, so it needs model.vocab_size; set it, such as to 50257'
    for field in dataclasses.fields(config.data):
        value = getattr(config.data, field.name)
        if field.name not in ("blend", "prefetch") and value != field.default:
            shown = list(value) if isinstance(value, tuple) else value
            yield f'data.{field.name}={shown!r} does not apply to data.blend="mock", which reads no file; leave it out'


def _data_problems(config: RunConfig, facts: DataFacts) -> Iterator[str]:
    vocab_size, length = config.model.vocab_size, config.train.sequence_length
    if not vocab_size and not facts.vocab_size:
        least = f" to at least {facts.largest_id + 1}" if facts.largest_id is not None else ""
        yield f"model.vocab_size=0, and {config.data.blend} names no tokenizer; set model.vocab_size{least}"
    needed = max(facts.vocab_size or 0, -1 if facts.largest_id is None else facts.largest_id + 1)
    if 0 < vocab_size < needed:
        yield (
            f"model.vocab_size={vocab_size} is too small for {config.data.blend}: its tokenizer has "
            f"{_known(facts.vocab_size)} entries and its largest token id is {_known(facts.largest_id)}; "
            f"set model.vocab_size to 0 or at least {needed}"
        )
    if not vocab_size and facts.vocab_size and facts.vocab_size < needed:
        yield (
            f"{config.data.blend} holds token id {facts.largest_id}, outside its tokenizer's "
            f"{facts.vocab_size} entries; it was made with another tokenizer, preprocess it again"
        )
    if facts.num_samples is not None and training_samples(config) > facts.num_samples:
        yield _too_few_samples(config, facts.num_samples)
    # Others pad, or read a corpus again before its end.
    runs = config.data.order == "native" and config.data.kind == "gpt"
    for name, tokens in facts.components or ((config.data.blend, facts.num_tokens),):
        if runs and tokens < length + 1:
            yield (
                f"train.sequence_length={length} needs {length + 1} tokens (the last label is one more), but "
                f"{name} has {tokens} for training; choose at most {max(tokens - 1, 1)}, or add text"
            )


def _too_few_samples(config: RunConfig, num_samples: int) -> str:
    asked, train, blend = training_samples(config), config.train, config.data.blend
    remedy = "or a blend whose amounts and caps allow more"
    if train.steps:
        return (
            f"train.steps={train.steps} x train.global_batch={train.global_batch} reads {asked} samples, "
            f"and {blend} ends after {num_samples}; choose at most "
            f"{num_samples // train.global_batch} steps, {remedy}"
        )
    unit, most = ("samples", num_samples) if train.samples else ("tokens", num_samples * train.sequence_length)
    return (
        f"train.{unit}={getattr(train, unit)} reads {asked} samples, and {blend} ends after {num_samples}; "
        f"choose at most train.{unit}={most}, {remedy}"
    )


def _cut_by_tp(config: RunConfig) -> dict[str, int]:
    """The sizes that tensor parallelism cuts, by the names that the user knows."""
    model = config.model
    sizes = {"model.num_heads": model.num_heads}
    sizes["model.ffn_hidden_size" + ("" if model.ffn_hidden_size else " (derived)")] = ffn_hidden_size(config)
    if config.mesh.sequence_parallel:
        sizes["train.sequence_length"] = config.train.sequence_length
    return sizes


def _common_divisors(*values: int) -> list[int]:
    """The small ones: nobody has more ranks or heads, and sizes may be mistyped."""
    common = math.gcd(*values)
    return [d for d in range(1, min(common, _MOST_PARTS) + 1) if common % d == 0]


def _listed(values: list[int]) -> str:
    return ", ".join(str(value) for value in values[:12])


def _known(value: int | None) -> str:
    return "an unknown number of" if value is None else str(value)
