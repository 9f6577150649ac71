"""The only module of the trainer that reads data through mdata: the corpora of a run, their facts, and its batches.

`open_data` opens the training blend and the validation corpora by name and checks that they have one tokenizer.
`plan.check` compares `facts` with the model before any GPU is used; a foreign corpus without a manifest has no facts,
so the ids of every batch are checked instead. Everything here is numpy until `to_device` makes it torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

import mdata
from mdata import DamageError, MdataError, UsageError
from mdata.dataset.dataset_options import document_mask_keys
from mdata.dataset.eval_sets import EvaluationSplit, evaluation_sets, samples_asked
from mdata.dataset.mock_data import LEAST_MASKED_VOCABULARY, MOCK, MockDataset
from mdata.dataset.run_paths import StartedIn
from mdata.loader.loader import BatchPlan, collate
from mdata.progress import SILENT, Progress
from mdata.tracing.run_record import RecordedSets, RecordedSpan, RunRecord, continued_spans, merged_ranges, span_of
from trainer.arithmetic import power_of_two, round_up
from trainer.config.sections import TEXT_KINDS, DataSection, RunConfig, TrainSection
from trainer.models.stage import NO_PAIR, EncoderTokens, Microbatch, PairRows, RealTokens
from trainer.parallel.collectives import Group
from trainer.plan.check import DataFacts
from trainer.plan.lengths import batch_sizes, order_samples, run_length, skipped_ranges
from trainer.plan.plan import Plan
from trainer.tasks.in_training import FixedTask, Prompt, read_prompts, read_tasks, task_problems

COUNTED_ROWS, COUNTED_TOKENS = 256, 64  # evenly spaced samples of the run for counting attention
CHECKED_ROWS = 32  # the same for checking the spans of T5
MOST_ENDS_INSIDE = 0.5  # share of the rows
FEWEST_DOCUMENTS, SHORTEST_DOCUMENT = 8, 128  # that graphs have room for, so that few of them serve all microbatches
GRAPH_SIZES = 32  # of the real tokens of a microbatch's rows, so that few graphs serve them (pipeline/graphs.py)
TOKENS_MULTIPLE = 128  # of the tokens that a BERT, and its head, computes on a GPU: few sizes, and of whole tiles


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run.

    Args:
        train: endless in the native order; in Megatron's order as many samples as the run reads, or a few more.
        valid, test: name -> finite set; in file order for the native order.
        facts: of the training data, from its manifests, and whether there are validation sets.
        tasks: that score the run. prompts: that it answers. tokenizer: of the data, if there are any.
        notes: on the training data, a line each.
    """

    train: mdata.Dataset
    valid: Mapping[str, mdata.Dataset]
    test: Mapping[str, mdata.Dataset]
    facts: DataFacts
    tasks: Sequence[FixedTask] = ()
    tokenizer: mdata.Tokenizer | None = None
    prompts: Sequence[Prompt] = ()
    notes: Sequence[str] = ()


def open_data(config: RunConfig, *, progress: Progress = SILENT) -> RunData:
    """Open the data that the configuration names.

    Raises:
        UsageError: a file is missing, a corpus is too short, or two corpora have different tokenizers.
    """
    if config.data.blend == MOCK:
        return _mock(config)
    options = mdata.DatasetOptions.from_keys(_option_keys(config))
    train = mdata.Dataset.from_options(config.data.blend, options, progress=progress)
    notes = list(_masked_notes(config, train)) if config.data.kind in ("bert", "t5") else []

    def sets(split: EvaluationSplit, paths: Sequence[str], *, interval: int) -> Mapping[str, mdata.Dataset]:
        if not config.train.evaluate:
            return {}
        asked = samples_asked(config.train.eval_samples, steps=run_length(config.train).steps, interval=interval)
        overlap = config.data.allow_overlap
        return evaluation_sets(train, split, paths=paths, num_samples=asked, allow_overlap=overlap, progress=progress)

    valid = sets("valid", config.data.valid, interval=config.train.eval_interval or 0)
    test = sets("test", config.data.test, interval=0)
    largest_ids = [data.largest_id for data in (train, *valid.values(), *test.values()) if data.largest_id is not None]
    facts = DataFacts(
        vocab_size=train.vocab_size,
        largest_id=max(largest_ids, default=None),
        eod=train.eod,
        fingerprint=train.fingerprint,
        num_tokens=sum(c.num_tokens for c in train.components),
        components=tuple((c.name, c.num_tokens) for c in train.components),
        num_samples=train.num_samples,
        has_valid=bool(valid),
        document_lengths=_document_lengths(train, config.train) if config.data.documents_apart else (),
    )
    tokenizer = train.load_tokenizer() if config.evaluate.tasks or config.evaluate.prompts else None
    tasks = read_tasks(config.evaluate.tasks, tokenizer=tokenizer is not None)
    prompts = read_prompts(config.evaluate.prompts, train, tokenizer)
    return RunData(train, valid, test, facts, tasks, tokenizer, prompts, notes)


def _masked_notes(config: RunConfig, train: mdata.Dataset) -> Iterator[str]:
    """Read a few rows of BERT or T5: what the user should know of them.

    Raises:
        UsageError: spans do not fit, or generation would begin with another token than these rows.
    """
    samples = _spread_samples(train, config.train, CHECKED_ROWS)
    if not len(samples):
        return
    section = config.model.t5
    if config.data.kind == "t5":
        train.check_spans(samples)
        first = int(train.read(samples[:1]).fields["text_dec"][0, 0])
        if section is not None and section.start_token not in (-1, first):
            raise UsageError(
                f"model.t5.start_token={section.start_token} is not the token with which the decoder's rows begin",
                expected=f"{first}, which is taken if model.t5.start_token is left out",
            )
    share = train.rows_with_ends_inside(samples)
    if share > MOST_ENDS_INSIDE:  # a few come from masks, some of which are random entries of the vocabulary
        added = "[CLS] or [SEP]" if config.data.kind == "bert" else "the token that ends a text"
        yield (
            f"{share:.0%} of the rows hold {added} in their sentences, beside what samples add; encode the corpus with "
            "--tokenizer-hf-no-include-special-tokens"
        )


def problems_of_sets(config: RunConfig) -> list[MdataError]:
    """Errors of opening the training data, each set that is given by its path, and each task, separately."""
    data, errors = config.data, list[MdataError]()
    evaluated = (*data.valid, *data.test) if config.train.evaluate else ()
    for path in dict.fromkeys((data.blend, *evaluated) if data.blend != MOCK else ()):
        try:
            mdata.open_blend(
                path,
                checked=False,
                tokenizer_unknown="ok",
                allow_outside=data.allow_outside,
                evaluation=path != data.blend,
                cache=(data.cache, data.cache_size),
            )
        except (UsageError, DamageError) as error:
            errors.append(error)
    return errors + task_problems(config.evaluate.tasks)


def _mock(config: RunConfig) -> RunData:
    """Mock data with the model's vocabulary; no evaluation sets."""
    size = config.model.vocab_size or 0
    length = config.train.sequence_length
    keys = {"sequence_length": length, **_kind_keys(config.data), "document_masks": config.data.document_masks}
    kind = mdata.DatasetOptions.from_keys(keys).kind
    least = 0 if config.data.kind in TEXT_KINDS else LEAST_MASKED_VOCABULARY  # `check` names a smaller size
    train = MockDataset(vocab_size=max(size, least), sequence_length=length, seed=config.run.seed, kind=kind)
    facts = DataFacts(
        vocab_size=size or None,
        largest_id=None,
        eod=None,
        fingerprint=None,
        num_tokens=0,
        has_valid=False,
        document_lengths=_mock_lengths(train) if config.data.documents_apart and size else (),
    )
    tasks, prompts = read_tasks(config.evaluate.tasks, tokenizer=False), config.evaluate.prompts
    return RunData(train, {}, {}, facts, tasks, prompts=read_prompts(prompts, train, None))


def training_batches(
    data: RunData,
    config: RunConfig,
    *,
    plan: Plan,
    dp: Group,
    consumed: int,
    progress: Progress = SILENT,
) -> mdata.Loader:
    """This rank's microbatches of every step after `consumed` samples, read ahead.

    `progress` is notified when a step has to wait for data. Ranks along the tensor axis read the same rows separately:
    the file is read from disk once per node (docs/design/loader.md).
    """
    batches = BatchPlan(
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        dp_rank=dp.rank,
        dp_size=dp.size,
        seed=config.run.seed,
        sizes=batch_sizes(config.train),
    )
    return mdata.Loader(data.train, batches, consumed=consumed, prefetch=config.data.prefetch, progress=progress)


class References:
    """log p of the trained tokens of each conversation under the first weights (references.py).

    Args:
        values: identity of a data set -> for each component, float64[its conversations].
    """

    def __init__(self, values: Mapping[str, Sequence[np.ndarray]]) -> None:
        self._values = values

    def of(self, dataset: mdata.Dataset, batch: mdata.Batch) -> np.ndarray:
        """float64[K], those of a batch's conversations, in order."""
        numbers, bounds = batch.rows.conversations, batch.rows.cu_seqlens
        assert numbers is not None and bounds is not None, "rows of kind pairs"
        components = dataset.locate(batch.samples)[0][bounds[:-1] // batch.tokens.shape[1]]
        arrays, values = self._values[dataset.data_id], np.empty(len(numbers))
        for component in np.unique(components).tolist():
            places = components == component
            values[places] = arrays[component][numbers[places]]
        return values


def rounds_of_pairs(
    dataset: mdata.Dataset, *, micro_batch: int, together: int, dp: Group
) -> Iterator[tuple[int, list[tuple[mdata.Batch, bool]]]]:
    """This rank's share of all rows of a data set, each once: (component, (batch, whether it counts) of each round).

    All ranks have as many batches in a round; `together`: at most.
    """
    for number, component in enumerate(dataset.components):
        rows = component.samples.samples_per_epoch
        for first in range(0, rows, micro_batch * together * dp.size):
            part = np.arange(first, min(first + micro_batch * together * dp.size, rows))
            mine, most = part[dp.rank :: dp.size], len(part[:: dp.size])
            batches = []
            for start in range(0, most, micro_batch):
                chosen = mine[start : start + micro_batch]
                counts = len(chosen) > 0
                read = chosen if counts else part[:1]
                batches.append((mdata.Batch(read, dataset.read_component(number, read)), counts))
            yield number, batches


def evaluation_batches(
    dataset: mdata.Dataset, samples: np.ndarray, *, micro_batch: int, dp: Group
) -> Iterator[mdata.Batch]:
    """This rank's share of a validation or test set, in batches of at most micro_batch."""
    mine = samples[dp.rank :: dp.size]
    for first in range(0, len(mine), micro_batch):
        yield collate(dataset, mine[first : first + micro_batch])


def to_device(
    batch: mdata.Batch,
    device: torch.device,
    *,
    vocab_size: int,
    numbered: bool = False,
    cp: Group | None = None,
    components: np.ndarray | None = None,
    skipped: np.ndarray | None = None,
    multiple: int = 0,
    few_sizes: bool = False,
    reference: np.ndarray | None = None,
    beta: float = 0.1,
) -> Microbatch:
    """Check the ids and move one microbatch to the device.

    Rows of bert and t5 have lengths; where a label has no loss, it is 0.

    Args:
        numbered: the microbatch with its sample numbers. cp: the ranks that share its rows; None: rows are whole.
        components: int64[B], the component of each row, if the microbatch should have them.
        skipped: bool[B], rows whose tokens do not count in the loss; None: all count.
        multiple: of the real tokens of BERT and T5, computed without the padding; 0: whole rows are computed.
        few_sizes: as CUDA graphs need them: a larger multiple, of a GRAPH_SIZES-th of a microbatch, and
            `in_few_sizes` of documents.
        reference: of rows of pairs, for DPO: log p of each conversation under the first weights; None: another loss.
        beta: of DPO.

    Raises:
        UsageError: an id is outside the model's vocabulary (possible only in a foreign corpus).
    """
    skipped = skipped if skipped is not None and skipped.any() else None
    choices = None
    if isinstance(batch.rows, mdata.FieldRows) and isinstance(batch.rows.kind, mdata.Classify):
        choices = batch.rows.kind.choices
        microbatch = _labelled_rows(batch, batch.rows, device, vocab_size=vocab_size, multiple=multiple)
    elif isinstance(batch.rows, mdata.FieldRows):
        microbatch = _masked_rows(
            batch,
            batch.rows,
            device,
            vocab_size=vocab_size,
            skipped=skipped,
            multiple=multiple,
            few_sizes=few_sizes,
        )
    else:
        microbatch = _text_rows(batch, device, vocab_size=vocab_size, few_sizes=few_sizes and reference is None)
        if reference is not None:
            microbatch = _of_pairs(microbatch, _moved(reference, device), beta)
    if skipped is not None:
        counts_B = _moved(np.repeat(np.float32(1) - skipped.astype(np.float32), choices or 1), device)
        microbatch = replace(microbatch, loss_mask_BS=microbatch.loss_mask_BS * counts_B[:, None])
    if numbered:
        samples = np.asarray(batch.samples, np.int64)
        if choices:  # each row of a sample drops other numbers
            samples = (samples[:, None] * choices + np.arange(choices)).flatten()
        microbatch = replace(microbatch, samples_B=_moved(samples, device))
    if components is not None:
        microbatch = replace(microbatch, components_B=_moved(components, device))
    return microbatch if cp is None else microbatch.on_context_rank(cp)


def _text_rows(batch: mdata.Batch, device: torch.device, *, vocab_size: int, few_sizes: bool) -> Microbatch:
    """Rows of text, whose labels are the next tokens."""
    text = batch.rows.text  # tokens and labels are views of it: one check, one copy
    _check_ids(batch, text, vocab_size=vocab_size)
    moved = _moved(text, device)
    tokens, labels = moved[:, :-1], moved[:, 1:]
    mask = torch.ones(tokens.shape, device=device) if batch.rows.unmasked else _moved(batch.loss_mask, device)
    microbatch = Microbatch(tokens_BS=tokens, labels_BS=labels, loss_mask_BS=mask)
    documents = documents_of(batch)
    if documents is None:
        return microbatch
    if few_sizes:
        documents = in_few_sizes(documents, tokens.shape[1])
    positions, bounds = (_moved(array, device) for array in (documents.positions, documents.bounds))
    return replace(microbatch, positions_BS=positions, bounds=bounds, longest=documents.longest)


def numbered_conversations(microbatch: Microbatch) -> torch.Tensor:
    """int64[B, S], the conversation that each token belongs to, by its number in the microbatch."""
    assert microbatch.bounds is not None, "conversations are kept apart"
    starts, tokens = microbatch.bounds[1:-1].long(), microbatch.tokens_BS
    begins = torch.zeros(tokens.numel(), dtype=torch.int64, device=tokens.device)
    begins[starts] = 1
    return begins.cumsum(0).view(tokens.shape)


def _of_pairs(microbatch: Microbatch, reference_K: torch.Tensor, beta: float) -> Microbatch:
    """Rows of pairs for DPO, whose mask has 1 at the first token of each pair."""
    assert microbatch.bounds is not None, "conversations are kept apart"
    pairs = PairRows(numbered_conversations(microbatch), microbatch.loss_mask_BS, reference_K, beta)
    mask_N = torch.zeros_like(microbatch.loss_mask_BS).flatten()
    mask_N[microbatch.bounds[:-1:2].long()] = 1
    return replace(microbatch, loss_mask_BS=mask_N.view_as(microbatch.loss_mask_BS), pairs=pairs)


def _masked_rows(
    batch: mdata.Batch,
    rows: mdata.FieldRows,
    device: torch.device,
    *,
    vocab_size: int,
    skipped: np.ndarray | None,
    multiple: int,
    few_sizes: bool,
) -> Microbatch:
    """Rows of bert, or of t5, whose decoder predicts the masked spans."""
    fields, loss, length = rows.fields, rows.loss_mask, rows.loss_mask.shape[1]
    labels = np.where(loss > 0, fields["labels"], 0)
    inputs = [fields[name] for name in ("text", "text_enc", "text_dec") if name in fields]
    for ids in (*inputs, labels):
        _check_ids(batch, ids, vocab_size=vocab_size)
    lengths = _lengths(fields["dec_mask" if "text_enc" in fields else "padding_mask"])
    microbatch = Microbatch(
        tokens_BS=_moved(inputs[-1], device),
        labels_BS=_moved(labels, device),
        loss_mask_BS=_moved(loss, device),
        lengths_B=_moved(lengths, device),
        real=real_tokens(lengths, length, multiple, device, few_sizes=few_sizes) if multiple else None,
    )
    if "text_enc" in fields:
        read, size = _lengths(fields["enc_mask"]), inputs[0].shape[1]
        real = real_tokens(read, size, multiple, device, few_sizes=few_sizes) if multiple else None
        return replace(microbatch, encoder=EncoderTokens(_moved(inputs[0], device), _moved(read, device), real))
    assert isinstance(rows.kind, mdata.Bert), "rows of bert or t5"
    predicted = predicted_tokens(loss, TOKENS_MULTIPLE if device.type == "cuda" else 1, few_sizes=few_sizes)
    microbatch = replace(microbatch, predicted_M=_moved(predicted, device))
    if multiple and (lengths == length).all():
        microbatch = replace(microbatch, lengths_B=None, real=None)  # kernels need not check for padding
    if not rows.kind.head:
        return microbatch
    # Padding has the type 0, and in Megatron's order the padding's id.
    types = np.where(np.arange(length) < lengths[:, None], fields["types"], 0)
    swapped = fields["is_random"] if skipped is None else np.where(skipped, NO_PAIR, fields["is_random"])
    return replace(microbatch, types_BS=_moved(types, device), swapped_B=_moved(swapped, device))


def _labelled_rows(
    batch: mdata.Batch, rows: mdata.FieldRows, device: torch.device, *, vocab_size: int, multiple: int
) -> Microbatch:
    """Rows for classification: label and loss are at the first token of each sample."""
    fields, length = rows.fields, rows.text.shape[-1]
    text, types, padding = (fields[name].reshape(-1, length) for name in ("text", "types", "padding_mask"))
    _check_ids(batch, text, vocab_size=vocab_size)
    labels, loss = np.zeros(text.shape, np.int64), np.zeros(text.shape, np.float32)
    step = len(text) // len(fields["labels"])
    labels[::step, 0], loss[::step, 0] = np.maximum(fields["labels"], 0), fields["loss_mask"]
    lengths = padding.sum(1, dtype=np.int32)
    return Microbatch(
        tokens_BS=_moved(text, device),
        labels_BS=_moved(labels, device),
        loss_mask_BS=_moved(loss, device),
        types_BS=_moved(types, device),
        lengths_B=_moved(lengths, device),
        real=real_tokens(lengths, length, multiple, device) if multiple else None,
        choices=step if step > 1 else None,
    )


def _lengths(padding_mask: np.ndarray) -> np.ndarray:
    """int32[B], the tokens before the padding, from a mask that is 1 where there is text.

    The mask of Megatron's order has the padding's id elsewhere, and also in place of a real token that equals it.
    """
    ends = np.argmax(padding_mask[:, ::-1] == 1, axis=1)  # a row has text: at least its first token
    return (padding_mask.shape[1] - ends).astype(np.int32)


def predicted_tokens(loss: np.ndarray, multiple: int, *, few_sizes: bool = False) -> np.ndarray:
    """int64[M], the flat tokens with a loss in order; M is a multiple, which tokens without a loss make up."""
    if few_sizes:  # a few tokens of a hundred are masked: finer than for `real_tokens`
        multiple = round_up(max(1, loss.size // (2 * GRAPH_SIZES)), multiple)
    tokens, others = np.flatnonzero(loss > 0), np.flatnonzero(loss <= 0)
    return np.sort(np.append(tokens, others[: -len(tokens) % multiple]))


def real_tokens(
    lengths: np.ndarray, length: int, multiple: int, device: torch.device, *, few_sizes: bool = False
) -> RealTokens | None:
    """The real tokens of rows, and some padding, on the device; None if that would be all tokens.

    Args:
        few_sizes: a multiple of a GRAPH_SIZES-th of all tokens, and `longest` as if rows were full.
    """
    if few_sizes:
        multiple = round_up(max(1, len(lengths) * length // GRAPH_SIZES), multiple)
    is_real = (np.arange(length) < lengths[:, None]).flatten()
    real, padding = np.flatnonzero(is_real), np.flatnonzero(~is_real)
    more = padding[: -len(real) % multiple]
    if len(more) == len(padding):
        return None
    parts = -(-multiple // length)  # of the padding, so that none is longer than a row
    ends = len(real) + len(more) * np.arange(1, parts + 1) // parts
    bounds = np.concatenate(([0], np.cumsum(lengths), ends)).astype(np.int32)
    flat = _moved(np.append(real, more), device)
    return RealTokens(flat, _moved(bounds, device), length if few_sizes else int(np.diff(bounds).max()))


def _check_ids(batch: mdata.Batch, ids: np.ndarray, *, vocab_size: int) -> None:
    largest = int(ids.max())
    if largest >= vocab_size or int(ids.min()) < 0:
        raise UsageError(
            f"a batch holds a token id outside the model's vocabulary (samples {batch.samples.tolist()[:8]})",
            found=f"largest id {largest}",
            expected=f"0 to {vocab_size - 1}",
            fix="set model.vocab_size to the size of the vocabulary that made the corpus",
        )


class DocumentPlaces(NamedTuple):
    """The positions of the documents in some rows.

    Args:
        positions: int64[B, S], positions of tokens in their documents. bounds: int32, where documents begin in the
            concatenated rows, then B S. longest: tokens of the longest document.
    """

    positions: np.ndarray
    bounds: np.ndarray
    longest: int


def documents_of(batch: mdata.Batch) -> DocumentPlaces | None:
    """The documents that a batch keeps apart; None if each row is one document."""
    rows, options = batch.rows, batch.rows.options
    by_id = options is not None and options.reset_attention_mask and options.reset_position_ids
    if rows.documents is None and not by_id:
        return None
    positions = rows.position_ids
    assert positions is not None, "documents are told without positions"
    if rows.documents is not None:
        return DocumentPlaces(positions, *rows.documents)
    # Megatron's rules give no lengths; but with both of them a document begins where positions restart.
    bounds = np.append(np.flatnonzero(positions == 0), positions.size).astype(np.int32)
    return DocumentPlaces(positions, bounds, int(np.diff(bounds).max()))


def in_few_sizes(documents: DocumentPlaces, length: int) -> DocumentPlaces:
    """A power of two of documents, those at the end without tokens; so is the longest, unless rows have `length`."""
    count = documents.bounds.size - 1
    more = power_of_two(max(FEWEST_DOCUMENTS, count)) - count
    longest = min(length, power_of_two(max(SHORTEST_DOCUMENT, documents.longest)))
    return documents._replace(bounds=np.pad(documents.bounds, (0, more), mode="edge"), longest=longest)


def _moved(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device: the batch's memory may be reused as soon as the batch is freed.

    Uses pinned memory, from which a GPU copies without the host waiting for earlier steps.
    """
    if device.type != "cuda":
        return torch.from_numpy(values).clone()
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)


def _option_keys(config: RunConfig) -> dict[str, Any]:
    """The options of the training data, for `DatasetOptions.from_keys`."""
    data, train = config.data, config.train
    return {
        "sequence_length": train.sequence_length,
        "seed": config.run.seed,
        "split": "train",
        "split_shares": data.split,
        "order": data.order,
        "num_samples": order_samples(config) if data.order == "megatron" else None,
        **_kind_keys(data),
        **document_mask_keys(order=data.order, wanted=data.document_masks),
        "shuffle_block": data.shuffle_block or 0,
        "blend_surplus": data.blend_surplus,
        "tokenizer_unknown": data.tokenizer_unknown,
        "allow_outside": data.allow_outside,
        "cache": data.cache,
        "cache_size": data.cache_size if data.cache else None,  # plan/check.py refuses it without a cache
    }


def _kind_keys(data: DataSection) -> dict[str, Any]:
    """The kind of samples and its options."""
    options = {} if data.of_kind is None else dataclasses.asdict(data.of_kind)
    if data.kind == "fim":
        return {"kind": mdata.Gpt.name, **{f"fim_{key}": value for key, value in options.items()}}
    longer = "drop" if data.kind == "pairs" else data.longer  # a pair is whole
    return {"kind": data.kind, "longer": longer, **options}


def record_of(
    config: RunConfig,
    plan: Plan,
    *,
    data: RunData,
    steps: int,
    samples: int,
    earlier: Sequence[RecordedSpan],
    started_in: StartedIn,
) -> RunRecord:
    """What the run reads, for data.json.

    Args:
        steps, samples: done already. earlier: the spans of these steps, as far as they are known.
        started_in: where relative paths of the configuration start.
    """
    span = span_of(
        batch_sizes(config.train),
        steps_before=steps,
        samples_before=samples,
        micro_batch=plan.micro_batch,
        data_ranks=plan.dp,
        blend=config.data.blend,
        data_id=data.train.data_id,
    )
    valid = _recorded_sets(config.data.valid, data.valid, config.train, interval=config.train.eval_interval or 0)
    return RunRecord(
        num_steps=plan.steps,
        spans=continued_spans(earlier, span),
        options={key: value for key, value in _option_keys(config).items() if value is not None},
        identity=data.train.identity,
        corpora={component.name: component.corpus.id for component in data.train.components},
        valid=valid if config.train.evaluate else None,
        test=_recorded_sets(config.data.test, data.test, config.train) if config.train.evaluate else None,
        started_in=started_in,
        skip=merged_ranges(skipped_ranges(config.data.skip)),
    )


def _recorded_sets(
    paths: Sequence[str], sets: Mapping[str, mdata.Dataset], train: TrainSection, *, interval: int = 0
) -> RecordedSets:
    return RecordedSets(
        paths=tuple(paths),
        data_ids={name: dataset.data_id for name, dataset in sets.items()},
        num_samples=samples_asked(train.eval_samples, steps=run_length(train).steps, interval=interval),
        eval_samples=train.eval_samples,
        interval=interval,
    )


def _spread_samples(dataset: mdata.Dataset, train: TrainSection, most: int) -> np.ndarray:
    """At most so many samples, evenly spaced over those that the run reads."""
    num_samples = run_length(train).samples
    end = num_samples if dataset.num_samples is None else min(num_samples, dataset.num_samples)
    return np.unique(np.linspace(0, end - 1, most, dtype=np.int64)) if end > 0 else np.empty(0, np.int64)


def _document_lengths(dataset: mdata.Dataset, train: TrainSection) -> tuple[int, ...]:
    """The lengths of the documents around evenly spaced tokens of the run's rows; no token is read."""
    length, samples = train.sequence_length, _spread_samples(dataset, train, COUNTED_ROWS)
    if not len(samples):
        return ()  # less than a step, which is reported separately
    lengths = []
    for component, inside in zip(*dataset.locate(samples), strict=True):
        part = dataset.components[component]
        with part.damage_check:
            pieces = part.samples.pieces(int(inside))
        ends = np.cumsum([piece.length for piece in pieces])[:-1]
        if isinstance(dataset.options.kind, mdata.Packed):  # a conversation has several sequences
            numbers = [part.corpus.document_of(piece.sequence) for piece in pieces]
            ends = ends[np.diff(numbers) != 0]
        # The last token of a row is only a label; padding belongs to the last document.
        lengths.append(np.diff(np.append(ends[ends < length], length), prepend=0))
    return _middles(np.concatenate(lengths))


def _mock_lengths(train: MockDataset) -> tuple[int, ...]:
    """The same of mock data: the documents of its first rows."""
    documents = documents_of(collate(train, np.arange(COUNTED_TOKENS)))
    return () if documents is None else _middles(np.diff(documents.bounds))


def _middles(lengths: np.ndarray) -> tuple[int, ...]:
    """The lengths of the documents around evenly spaced tokens of documents with these lengths."""
    documents = np.sort(lengths)
    tokens = np.cumsum(documents)
    middles = (np.arange(COUNTED_TOKENS) + 0.5) / COUNTED_TOKENS * tokens[-1]
    return tuple(documents[np.searchsorted(tokens, middles, side="right")].tolist())
