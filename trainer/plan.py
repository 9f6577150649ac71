"""Every derived number of a run, computed once, and every rule between sections of the configuration.

`check` lists all problems of a configuration for a number of ranks and, where known, the facts of the data;
`make_plan` turns a sound one into a frozen `Plan`. Nothing derived is written back into the configuration,
and nobody computes these numbers a second time. Also here: the learning rate as a function of the step.
Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from mdata import MegatronOrder, UsageError
from mdata.loader.batch_sizes import BatchSizes, read_ramp
from trainer.config import OptimizerSection, RunConfig, problems_error, value_problems
from trainer.models.gpt_table import GPTShape, num_parameters

_MOST_PARTS = 1 << 16
VOCABULARY_MULTIPLE = 128  # rows per tp rank, as Megatron's --make-vocab-size-divisible-by


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All derived numbers of a run.

    Args:
        world_size, tp, dp: ranks, and how they are laid out.
        sequence_length: tokens of a sample; tokens_per_step: of a global batch.
        num_microbatches: forward passes of a rank in one step.
        num_samples: of the whole run.
        heads_per_rank, kv_heads_per_rank: attention heads of one tp rank.
        shape: the model without any layout but the padding of its vocabulary.
        num_parameters: of the logical model, without padding.
        flops_per_token: floating-point operations of forward and backward, see `flops_per_token`.
        warmup_steps, decay_steps: ends of warmup and decay, in steps.
    """

    world_size: int
    tp: int
    dp: int
    sequence_length: int
    global_batch: int
    micro_batch: int
    num_microbatches: int
    tokens_per_step: int
    num_samples: int
    heads_per_rank: int
    kv_heads_per_rank: int
    shape: GPTShape
    num_parameters: int
    flops_per_token: int
    steps: int
    warmup_steps: int
    decay_steps: int

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.shape.head_dim

    @property
    def ffn_hidden_size(self) -> int:
        """Inner features of the MLP, over all ranks."""
        return self.shape.ffn_hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the logical embedding."""
        return self.shape.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all ranks, padding included."""
        return self.shape.padded_vocab_size


def make_plan(config: RunConfig, world_size: int, *, facts: DataFacts | None) -> Plan:
    """The derived numbers of a run on `world_size` ranks.

    Raises:
        UsageError: the configuration does not fit; every problem is named.
    """
    problems = check(config, world_size, facts=facts)
    shape = None if problems else gpt_shape(config, facts)
    if shape is None:
        unknown = "model.vocab_size is 0 and the data names no tokenizer; set model.vocab_size"
        raise problems_error("this configuration", problems or [unknown])
    train, tp = config.train, config.mesh.tp
    dp = world_size // tp
    return Plan(
        world_size=world_size,
        tp=tp,
        dp=dp,
        sequence_length=train.sequence_length,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        num_microbatches=train.global_batch // (train.micro_batch * dp),
        tokens_per_step=train.global_batch * train.sequence_length,
        num_samples=batch_sizes(config).after(train.steps),
        heads_per_rank=shape.num_heads // tp,
        kv_heads_per_rank=shape.num_kv_heads // tp,
        shape=shape,
        num_parameters=num_parameters(shape),
        flops_per_token=flops_per_token(shape, train.sequence_length),
        steps=train.steps,
        warmup_steps=config.optimizer.warmup_steps,
        decay_steps=config.optimizer.decay_steps or train.steps,
    )


def gpt_shape(config: RunConfig, facts: DataFacts | None) -> GPTShape | None:
    """The model with every 0 of its section derived; None where no vocabulary is known."""
    model = config.model
    vocab_size = model.vocab_size or (facts.vocab_size if facts else None)
    if not vocab_size:
        return None
    return GPTShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=_head_dim(config),
        ffn_hidden_size=_ffn_hidden_size(config),
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size(vocab_size, config.mesh.tp),
        max_position=model.max_position or config.train.sequence_length,
        position=model.position,
        rope_theta=model.rope_theta,
        norm=model.norm,
        norm_epsilon=model.norm_epsilon,
        activation=model.activation,
        bias=model.bias,
        tie_embeddings=model.tie_embeddings,
        init_std=model.init_std,
    )


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The smallest multiple of 128 x tp that holds the vocabulary, as Megatron pads."""
    return _round_up(vocab_size, VOCABULARY_MULTIPLE * tp)


def flops_per_token(shape: GPTShape, sequence_length: int) -> int:
    """Operations of forward and backward per token: 6 N + 12 L H S (Chowdhery et al. 2022, PaLM, appendix B).

    N counts the parameters that are multiplied: all but the tables that are only looked up (learned
    positions, an untied embedding). L layers, H = heads x head_dim, S = sequence length; the half of the
    attention matrix that a causal mask hides is counted, as is usual, so that figures compare.
    """
    lookups = shape.max_position * shape.hidden_size if shape.position == "learned" else 0
    lookups += 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size
    attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * sequence_length
    return 6 * (num_parameters(shape) - lookups) + attention


def learning_rate(step: int, optimizer: OptimizerSection, *, steps: int) -> float:
    """The learning rate of the update that follows `step` finished ones (so the first is step 0).

    It rises linearly over warmup_steps updates, the last of which has `lr`, then falls along half a cosine
    (Loshchilov and Hutter 2017) from `lr` to `min_lr`, where it stays from decay_steps (0: `steps`) on.
    """
    decay_steps = optimizer.decay_steps or steps
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if step >= decay_steps:
        return optimizer.min_lr
    progress = (step - optimizer.warmup_steps) / (decay_steps - optimizer.warmup_steps)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def check(config: RunConfig, world_size: int, *, facts: DataFacts | None) -> list[str]:
    """Every problem of a configuration on `world_size` ranks; without facts, none of those with the data.

    Each problem is one line with the values that clash and a remedy.
    """
    problems = value_problems(config)
    if problems:
        return problems
    if not config.run.folder.strip():
        problems.append("run.folder is empty; set it to a folder for the run, such as runs/first")
    problems += [*_layout_problems(config, world_size), *_model_problems(config), *_schedule_problems(config)]
    problems += _order_problems(config)
    return problems + list(_data_problems(config, facts) if facts else ())


def _layout_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    tp, train = config.mesh.tp, config.train
    cut = _cut_by_tp(config)
    remedy = f"choose mesh.tp from {_listed(_common_divisors(*cut.values()))}"
    for what, size in cut.items():
        if size % tp:
            yield f"{what}={size} is not a multiple of mesh.tp={tp}; {remedy}"
    if world_size % tp:
        yield f"{world_size} ranks are not a multiple of mesh.tp={tp}; start --nproc {tp}, or {remedy}"
        return
    dp = world_size // tp
    part = train.micro_batch * dp
    if train.global_batch % part:
        yield (
            f"train.global_batch={train.global_batch} is not a multiple of "
            f"train.micro_batch={train.micro_batch} x {dp} data-parallel ranks; "
            f"choose a multiple of {part}, such as {_round_up(train.global_batch, part)}"
        )
    yield from _ramp_problems(config, part)


def _ramp_problems(config: RunConfig, part: int) -> Iterator[str]:
    try:
        sizes = batch_sizes(config).sizes
    except UsageError as error:
        yield f"train.batch_ramp={config.train.batch_ramp!r}: {error}"
        return
    wrong = [size for size in sizes if size % part and size != config.train.global_batch]
    if wrong:
        yield (
            f"train.batch_ramp={config.train.batch_ramp!r} has a step of {wrong[0]} samples, no multiple of "
            f"train.micro_batch x data-parallel ranks = {part}; choose multiples of {part} to start and to add"
        )


def batch_sizes(config: RunConfig) -> BatchSizes:
    """Samples of each step, by the samples consumed before it.

    Raises:
        UsageError: a ramp that cannot be read, or that does not arrive at the global batch.
    """
    return read_ramp(config.train.batch_ramp, size=config.train.global_batch)


def _model_problems(config: RunConfig) -> Iterator[str]:
    model, length = config.model, config.train.sequence_length
    kv_heads = model.num_kv_heads or model.num_heads
    if not model.head_dim and model.hidden_size % model.num_heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not a multiple of model.num_heads={model.num_heads}; "
            f"choose a multiple, such as {_round_up(model.hidden_size, model.num_heads)}, or set model.head_dim"
        )
    elif model.position == "rope" and _head_dim(config) % 2:
        quotient = f"model.hidden_size={model.hidden_size} / model.num_heads={model.num_heads}"
        yield (
            f"{f'model.head_dim={model.head_dim}' if model.head_dim else quotient} is odd, but rope "
            'rotates features in pairs; choose an even head size, or model.position="learned"'
        )
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


def _schedule_problems(config: RunConfig) -> Iterator[str]:
    optimizer, steps = config.optimizer, config.train.steps
    decay_steps = optimizer.decay_steps or steps
    if optimizer.warmup_steps > min(steps, decay_steps):
        name = "optimizer.decay_steps" if decay_steps < steps else "train.steps"
        yield (
            f"optimizer.warmup_steps={optimizer.warmup_steps} is more than {name}={min(steps, decay_steps)}; "
            f"warm up for fewer steps, or raise {name}"
        )
    if optimizer.min_lr > optimizer.lr:
        yield (
            f"optimizer.min_lr={optimizer.min_lr:g} is more than optimizer.lr={optimizer.lr:g}; "
            f"choose an optimizer.min_lr of at most {optimizer.lr:g}"
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
    if data.blend_surplus != MegatronOrder.blend_surplus and data.order != "megatron":
        yield f'data.blend_surplus={data.blend_surplus:g} applies only to data.order="megatron"; leave it out'


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
    asked = config.train.steps * config.train.global_batch
    if facts.num_samples is not None and asked > facts.num_samples:
        yield (
            f"train.steps={config.train.steps} x train.global_batch={config.train.global_batch} reads {asked} samples, "
            f"and {config.data.blend} ends after {facts.num_samples}; choose at most "
            f"{facts.num_samples // config.train.global_batch} steps, or a blend whose amounts and caps allow more"
        )
    # Others pad, or read a corpus again before its end.
    runs = config.data.order == "native" and config.data.kind == "gpt"
    for name, tokens in facts.components or ((config.data.blend, facts.num_tokens),):
        if runs and tokens < length + 1:
            yield (
                f"train.sequence_length={length} needs {length + 1} tokens (the last label is one more), but "
                f"{name} has {tokens} for training; choose at most {max(tokens - 1, 1)}, or add text"
            )


def _cut_by_tp(config: RunConfig) -> dict[str, int]:
    """The sizes that tensor parallelism cuts, by the names that the user knows."""
    model = config.model
    sizes = {"model.num_heads": model.num_heads}
    if model.num_kv_heads:
        sizes["model.num_kv_heads"] = model.num_kv_heads
    sizes["model.ffn_hidden_size" + ("" if model.ffn_hidden_size else " (derived)")] = _ffn_hidden_size(config)
    if config.mesh.sequence_parallel:
        sizes["train.sequence_length"] = config.train.sequence_length
    return sizes


def _head_dim(config: RunConfig) -> int:
    return config.model.head_dim or config.model.hidden_size // config.model.num_heads


def _ffn_hidden_size(config: RunConfig) -> int:
    """4 x hidden; for swiglu, whose MLP has three matrices, 2/3 of that (Shazeer 2020), rounded up to 64."""
    model = config.model
    if model.ffn_hidden_size:
        return model.ffn_hidden_size
    return _round_up(-(-8 * model.hidden_size // 3), 64) if model.activation == "swiglu" else 4 * model.hidden_size


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _common_divisors(*values: int) -> list[int]:
    """The small ones: nobody has more ranks or heads, and sizes may be mistyped."""
    common = math.gcd(*values)
    return [d for d in range(1, min(common, _MOST_PARTS) + 1) if common % d == 0]


def _listed(values: list[int]) -> str:
    return ", ".join(str(value) for value in values[:12])


def _known(value: int | None) -> str:
    return "an unknown number of" if value is None else str(value)
