"""`checkpoint.init_from`: the first weights of a new run, and its moments, from any folder that can be converted.

Each rank reads the rectangles that it owns, as it does from a checkpoint; nothing is converted on the disk. Tensors
have to fit; a model with equal tensors and another function (such as another rope_theta) is reported, not refused,
because some runs need that. The progress of the other run is in `FirstState.run`; run/resume.py decides how to use it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from torch import Tensor

from mdata import MdataError, UsageError
from mdata.errors import few, wanted_by
from mdata.tokenizers.base.tokenizer import TokenizerConfig
from mdata.tokenizers.registry import build_tokenizer
from trainer.checkpoint.format import RunState
from trainer.checkpoint.load import load_into
from trainer.checkpoint.location import Location, location_of
from trainer.checkpoint.tiling import cut
from trainer.config.sections import LoRASection, LoRATarget, RunConfig
from trainer.convert.adapters import base_of
from trainer.convert.convert import open_model
from trainer.convert.links import Source
from trainer.convert.model_folder import BUFFER, CHUNK_BYTES, ModelFolder, NewRows, expected_tensors, with_new_rows
from trainer.convert.model_keys import effective
from trainer.kernels.updates import state_names
from trainer.models.family import family_of
from trainer.optim.ownership import Ownership
from trainer.parallel.params import Place

TEXT = "The year is 1969."  # that tokenizers of one vocabulary agree about, however they cut it


class FirstState(NamedTuple):
    """The state with which a new run begins.

    Args:
        folder: the checkpoint. run: the progress of its run; None if the folder records none. notes: for the user.
        config: of that run; None if it was not one of ours.
    """

    folder: Location
    run: RunState | None
    notes: tuple[str, ...]
    config: RunConfig | None = None


class ForeignTokenizer(UsageError):
    """The training data was made with a tokenizer other than that of the initial weights; no model.vocab_size helps."""


def first_state(
    config: RunConfig, vocab_size: int, *, tokenizer: TokenizerConfig | None = None, data_ids: int = 0
) -> FirstState | None:
    """The state in checkpoint.init_from, after comparing it with the model; None if the key is not set.

    Args:
        tokenizer: of the training data; None: unknown. data_ids: the number of its ids; 0: unknown.

    Raises:
        ForeignTokenizer: the data has more ids than the weights, or its ids are other text in the folder's tokenizer.
        UsageError: weights or moments are missing or do not fit; names them. DamageError: the folder is incomplete.
    """
    settings = config.checkpoint
    if not settings.init_from:
        return None
    try:
        model = open_model(location_of(settings.init_from))
    except UsageError as error:
        raise wanted_by(f"checkpoint.init_from = {settings.init_from}", error) from error
    where = f"checkpoint.init_from = {settings.init_from}"
    if settings.new_rows_from:
        model = with_new_rows(model, settings.new_rows_from, vocab_size, where=where)
    refuse_more_ids(data_ids, model, where=where)
    if config.model.lora is None:
        _check_weights(config, model, vocab_size)
    else:
        if model.adapter is not None:
            _check_adapter(config.model.lora, model.adapter.lora, where=where)
        frozen = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None))
        _check_weights(frozen, base_of(model), vocab_size)
    if tokenizer is not None and model.tokenizer is not None:
        check_tokenizer(tokenizer, model.tokenizer, where=where)
    if settings.init_optimizer:
        _check_moments(config, model, vocab_size)
    differ = [f"{name} {before!r} -> {now!r}" for name, (before, now) in _differing(model.config, config).items()]
    restored = "first weights and moments" if settings.init_optimizer else "first weights"
    if config.model.lora is not None:
        restored = "frozen weights" if model.adapter is None else "frozen weights and first adapters"
    # Not where this host unpacked it: ranks compare their folders.
    opened = location_of(settings.init_from) if settings.init_from.endswith(".zip") else model.path
    origin = f"the {restored} are those of {opened} ({model.format})"
    other = [f"they were trained with other settings: {', '.join(differ)}"] if differ else []
    if settings.new_rows_from:
        first, last = settings.new_rows_from, vocab_size - 1
        other.append(f"rows {first} to {last} of embedding and head begin as the mean of the rows before")
    drawn = sorted(heads_to_draw(config, model, vocab_size))
    other += [f"the head starts from new weights: {opened} lacks {', '.join(drawn)}"] if drawn else []
    # A converted model of Hugging Face has a checkpoint of step 1, for which nothing was done.
    run = model.run if model.run.optimizer_steps or model.run.data_id else None
    return FirstState(opened, run, (*model.notes, origin, *other), model.config if model.run.data_id else None)


def refuse_more_ids(data_ids: int, model: ModelFolder, *, where: str) -> None:
    """Check that the data has no more ids than the weights; `where`: the folder, for the message."""
    if data_ids > model.vocab_size:
        raise ForeignTokenizer(
            f"the training data does not belong to the weights of {where}",
            found=f"data of a tokenizer with {data_ids} ids, weights for {model.vocab_size}",
            expected="data made with the tokenizer of these weights",
            fix="preprocess the texts with that tokenizer, or leave checkpoint.init_from out",
        )


def check_tokenizer(data: TokenizerConfig, folder: TokenizerConfig, *, where: str) -> None:
    """Check that the folder's tokenizer decodes ids of the data alike; `where`: the folder, for the message."""
    if "NullTokenizer" in (data.name, folder.name):
        return  # ids that never were text
    ours, theirs = (
        build_tokenizer(tokenizer_files.name, tokenizer_files.files, options=tokenizer_files.options)
        for tokenizer_files in (data, folder)
    )
    if ours.fingerprint == theirs.fingerprint:
        return
    try:
        ids = ours.encode_batch([TEXT])[0].tolist()
    except MdataError:
        return  # ids that never were text
    expected = ours.decode(ids)
    try:
        decoded = theirs.decode(ids)
    except (MdataError, ValueError, LookupError, OverflowError):
        decoded = "no text: they are not its ids"
    if decoded.strip() != expected.strip():
        raise ForeignTokenizer(
            f"the training data was made with another tokenizer than that of {where}",
            found=f"ids that are {expected!r} in the data ({ours.name} of {ours.vocab_size} ids), and {decoded[:60]!r} "
            f"to the folder's tokenizer ({theirs.name} of {theirs.vocab_size})",
            expected="data that was made with the folder's tokenizer",
            fix="preprocess the texts with that tokenizer; a folder without tokenizer files is not compared",
        )


def heads_to_draw(config: RunConfig, model: ModelFolder, vocab_size: int) -> frozenset[str]:
    """The parameters of the run's head that the folder lacks, or has in another shape."""
    family = family_of(config)
    heads, stored = family.heads(family.shape(config, vocab_size)), model.source.tensors
    return frozenset(
        name.removeprefix("weight/")
        for name, size in expected_tensors(config, vocab_size).items()
        if name.removeprefix("weight/").startswith(heads) and (name not in stored or stored[name].shape != size)
    )


def read_model(
    state: Mapping[str, Tensor],
    model: ModelFolder,
    *,
    owned: Mapping[str, Ownership],
    without: frozenset[str] = frozenset(),
) -> None:
    """Read what a rank of any layout owns: name -> flat tensor that its runs lie in; padding becomes 0.

    In addition to these tensors, memory holds a few pieces of CHUNK_BYTES. Parameters `without` values there become 0.
    """
    is_stored = model.format == "mtrain" and model.adapter is None and not isinstance(model.source, NewRows)
    if is_stored and not without:
        load_into(state, model.path, owned=owned)
        return
    read_tensors(state, model.source, owned=owned, without=without)


def read_tensors(
    state: Mapping[str, Tensor],
    source: Source,
    *,
    owned: Mapping[str, Ownership],
    without: frozenset[str] = frozenset(),
) -> None:
    """`read_model` for tensors of any source."""
    for name, runs in owned.items():
        flat = state[name]
        for span in runs.spans():
            flat[span].zero_()
        for _, part, first in runs.slices():
            if part.name in without:
                continue
            at = first
            for box in cut((tuple(part.start), tuple(part.size)), CHUNK_BYTES // flat.element_size()):
                count = math.prod(box[1])
                flat[at : at + count] = source.read(f"{name}/{part.name}", box).reshape(-1)
                at += count


def _check_weights(config: RunConfig, model: ModelFolder, vocab_size: int) -> None:
    expected = expected_tensors(config, vocab_size)
    tensors = model.source.tensors.items()
    shapes = {name: info.shape for name, info in tensors if name.partition("/")[0] in ("weight", BUFFER)}
    family = family_of(config)
    heads = tuple(f"weight/{head}" for head in family.heads(family.shape(config, vocab_size)))
    wrong = [
        f"{name.removeprefix('weight/')} {list(shapes.get(name, ())) or 'missing'} instead of "
        f"{list(expected.get(name, ())) or 'none'}"
        for name in {**expected, **shapes}
        if shapes.get(name) != expected.get(name) and not name.startswith(heads)
    ]
    if wrong:
        keys = [
            f"no {name}" if before is None else f"{name} = {json.dumps(before)}"
            for name, (before, _) in _differing(model.config, config).items()
        ]
        rows = model.vocab_size != vocab_size
        raise UsageError(
            f"checkpoint.init_from = {config.checkpoint.init_from} does not fit [model]",
            found=few(wrong, 2),
            expected=", ".join([*keys, *([f"model.vocab_size = {model.vocab_size}"] if rows else [])]),
            fix="set [model] so, or leave checkpoint.init_from out",
        )


def _check_adapter(asked: LoRASection, there: LoRASection, *, where: str) -> None:
    """Check that the adapters of a folder are those that the run continues to train."""
    every = get_args(LoRATarget)
    values = [
        (lora.rank, lora.scale, sorted(lora.targets or every), sorted(lora.modules_to_save)) for lora in (asked, there)
    ]
    if values[0] != values[1]:
        texts = [
            f"rank {rank}, scale {scale:g}, targets {', '.join(targets)}, modules_to_save {', '.join(saved) or 'none'}"
            for rank, scale, targets, saved in values
        ]
        raise UsageError(
            f"{where} holds adapters that differ from [model.lora]",
            found=texts[0],
            expected=texts[1],
            fix="set [model.lora] so; or merge them (mtrain convert --to mtrain), and begin with the result",
        )


def _differing(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Keys of [model] that change what the same tensors compute, or their shapes: "model.key" -> (before, now)."""
    old, new = effective(before), effective(now)
    return {
        f"model.{name}": (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name != "vocab_size"
    }


def _check_moments(config: RunConfig, model: ModelFolder, vocab_size: int) -> None:
    """Check that the state of this update rule exists; its shapes are those of the weights."""
    family, rule = family_of(config), config.optimizer.name
    table = family.parameters(family.shape(config, vocab_size), Place())
    missing = [
        f"{state}/{piece.name}"
        for spec in table
        for piece in spec.pieces
        for state in state_names(rule, matrix=spec.matrix)
        if f"{state}/{piece.name}" not in model.source.tensors
    ]
    if missing:
        has = f"{', '.join(model.states)} in {model.path} ({model.format})"
        raise UsageError(
            f"checkpoint.init_optimizer asks for the moments of {rule}, which checkpoint.init_from lacks",
            found="; ".join((has, *(note for note in model.notes if "optimizer" in note))),
            expected=few(missing, 3),
            fix="set checkpoint.init_optimizer=false to begin with weights alone, or name a folder with these moments",
        )
