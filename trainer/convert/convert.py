"""`mtrain convert`: a model folder of one format becomes one of another, in one pass and with bounded memory.

The format of a folder follows from its files. The target is written under a hidden name beside its final one, compared
with the source (`compare.py`) and renamed, so a folder with the final name is complete. Its conversion.json records the
source and the result of the comparison, by which a repeated conversion finds its own result. Memory holds a few pieces
of one tensor.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

import mdata
from mdata import DamageError, MdataError, UsageError
from mdata.errors import counted, few, os_errors_named
from mdata.progress import SILENT, Progress
from mdata.tokenizers.registry import build_tokenizer
from mdata.util import atomic_io, file_lock
from mdata.util.canonical_json import hash_of
from mdata.util.config_text import load_toml
from trainer.checkpoint.location import Location
from trainer.checkpoint.save import SPARE_BYTES, check_room
from trainer.checkpoint.stored_files import INDEX, files_of
from trainer.convert.adapters import is_peft, open_peft, with_base, write_peft
from trainer.convert.compare import Rounded, compare_logits, compare_token_ids, token_ids_text
from trainer.convert.hf_folder import find_tokenizer, is_hf, open_hf, write_hf
from trainer.convert.links import TensorInfo, Watched
from trainer.convert.meta_llama import is_meta, open_meta
from trainer.convert.model_folder import BUFFER, Format, ModelFolder, boxes, check_new, num_bytes, read_json
from trainer.convert.mp_rank import is_mp_rank, open_mp_rank, scratch_bytes, write_mp_rank
from trainer.convert.native import is_native, open_native, write_native
from trainer.convert.published_archive import unpacked
from trainer.convert.torch_dist import is_torch_dist, open_torch_dist

if TYPE_CHECKING:
    from trainer.convert.torch_dist_write import OptimizerForm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RESULT = "conversion.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """How to convert.

    Args:
        to: format of the target.
        dtype: of stored weights, a key of DTYPES; "": unchanged (ours are always fp32).
        max_shard_bytes: of one file of weights.
        checkpoint: which one of a run folder: "latest" or a name.
        model_type: of config.json; "": the one that fits the model.
        settings: `model.key=value`, for settings that the source lacks or has wrong.
        tokenizer: a folder with the tokenizer; "": that of the source.
        optimizer: whether moments are converted, where both formats have them.
        optimizer_form: of a torch_dist target; see torch_dist_write.py.
        tp, pp: ranks for which an mp_rank target is cut.
        check: whether logits of both sides are compared.
    """

    to: Format
    dtype: str = ""
    max_shard_bytes: int = 5_000_000_000
    checkpoint: str = "latest"
    model_type: str = ""
    settings: tuple[str, ...] = ()
    tokenizer: str = ""
    optimizer: bool = True
    optimizer_form: OptimizerForm = "distributed"
    tp: int = 1
    pp: int = 1
    check: bool = True


_COUNTS_FOR: Mapping[str, tuple[str, str, tuple[Format, ...]]] = MappingProxyType(
    {
        "max_shard_bytes": ("--max-shard-size", "to", ("mtrain", "hf")),
        "model_type": ("--model-type", "to", ("hf", "peft")),
        "tokenizer": ("--tokenizer", "to", ("mtrain", "hf")),
        "optimizer_form": ("--optimizer-form", "to", ("torch_dist",)),
        "tp": ("--tp", "to", ("mp_rank",)),
        "pp": ("--pp", "to", ("mp_rank",)),
        "checkpoint": ("--checkpoint", "source", ("mtrain",)),
        "settings": ("--set", "source", ("torch_dist", "mp_rank")),
    }
)
_DEFAULTS = MappingProxyType(
    {
        field.name: field.default
        for field in dataclasses.fields(ConvertOptions)
        if field.default is not dataclasses.MISSING
    }
)


def convert(source: Location, target: Path, *, options: ConvertOptions, progress: Progress = SILENT) -> dict[str, Any]:
    """Write the model of one folder into a new one; returns the content of conversion.json.

    Raises:
        UsageError: a folder of no known format, a model that the target's format cannot express, or a target that
            exists or that another process is writing. DamageError: files that are missing, do not fit, or were not what
            was written. ResourceError: too little room.
    """
    there = _earlier_result(target)
    if there is None:
        check_new(target)
    model = open_model(source, checkpoint=options.checkpoint, settings=options.settings)
    _check_used(options, model.format)
    job = _job_id(model, options)
    if there is not None:
        if there.get("job") != job:
            check_new(target)
        progress.note(f"{target} is finished and made of the same source; nothing is left to do")
        file_lock.remove_left(_lock_path(target))
        return there
    model = with_tokenizer(model, options.tokenizer)
    for note in model.notes:
        progress.note(note)
    if model.tokenizer is None and options.to in ("hf", "mtrain"):
        progress.note(f"{source} has no tokenizer; for mtrain generate, convert with --tokenizer FOLDER")
    if options.to == "peft" and model.adapter is not None and model.adapter.base.format != "hf":
        progress.note(
            f"peft cannot read {model.adapter.base.path}: convert it with --to hf, and write that folder into "
            "base_model_name_or_path of adapter_config.json"
        )
    dtype = DTYPES[options.dtype] if options.dtype else model.weights_dtype
    if options.to == "mtrain" or (options.to == "peft" and not options.dtype):
        dtype = torch.promote_types(dtype, torch.float32)
    states = _states(model, options, progress.note)
    total = _written_bytes(model, states, dtype=dtype, options=options)
    scratch = scratch_bytes(model, dtype=dtype, tp=options.tp, pp=options.pp) if options.to == "mp_rank" else 0
    fix = "free some space, choose another disk, or a smaller --dtype"
    check_room(target, total + scratch + SPARE_BYTES, subject="the converted model", fix=fix)
    with os_errors_named("making the target's folder"):
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
    with file_lock.hold(_lock_path(target), remove=True):
        return _write_target(target, model, job=job, states=states, dtype=dtype, options=options, progress=progress)


def _write_target(
    target: Path,
    model: ModelFolder,
    *,
    job: str,
    states: tuple[str, ...],
    dtype: torch.dtype,
    options: ConvertOptions,
    progress: Progress,
) -> dict[str, Any]:
    """Write, compare and rename; returns the content of conversion.json."""
    partial = atomic_io.partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        total = _written_bytes(model, states, dtype=dtype, options=options)
        progress.begin("convert", total, unit="B")
        watched = Watched(model.source)
        watched_model = dataclasses.replace(model, source=watched)
        _write(partial, watched_model, states=states, dtype=dtype, options=options, report=progress.advance)
        progress.end()
        not_finite = _not_finite(watched, model)
        if not_finite:
            progress.note(f"values that are not finite are converted as they are: {few(not_finite, 4)}")
        facts = _result(model, partial, dtype=dtype, states=states, options=options, finite=not not_finite)
        result = {"job": job, **facts}
        if (ids := result["token_ids"]) is not None and ids.get("different", 1):
            progress.note(token_ids_text(ids))
        atomic_io.atomic_write(partial / RESULT, (json.dumps(result, indent=1) + "\n").encode())
        if target.is_dir():
            target.rmdir()  # it is empty
        atomic_io.rename(partial, target)
        atomic_io.sync_folder(target.absolute().parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return result


def _lock_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


def open_model(path: Location, *, checkpoint: str = "latest", settings: Sequence[str] = ()) -> ModelFolder:
    """A model folder of any format that we read.

    Args:
        checkpoint: which one of a run folder. settings: see ConvertOptions.

    Raises:
        UsageError: there is no such folder, or its format is not known.
    """
    if not isinstance(path, Path):
        return with_base(open_native(path, checkpoint=checkpoint), open_model)
    if path.suffix == ".zip" and path.is_file():
        path = unpacked(path)
    if not path.is_dir():
        raise UsageError(
            f"{path} is a file, not a folder" if path.exists() else f"there is no folder {path}",
            fix="give the folder of a run, of a Hugging Face model on this disk, or of a Megatron-LM checkpoint",
        )
    keys = _model_keys(settings)
    if is_native(path):
        return with_base(open_native(path, checkpoint=checkpoint), open_model)
    if is_hf(path):
        return open_hf(path)
    if is_meta(path):
        return open_meta(path)
    if is_peft(path):
        return open_peft(path, open_model)
    if is_torch_dist(path):
        return open_torch_dist(path, settings=keys)
    if is_mp_rank(path):
        return open_mp_rank(path, settings=keys)
    raise UsageError(
        f"{path} is not a model that mtrain can read",
        found=", ".join(sorted(file.name for file in path.iterdir())[:5]) or "an empty folder",
        expected="a run folder of mtrain, a Hugging Face folder with config.json, Llama 2 as Meta distributes it, or a"
        " checkpoint of Megatron-LM",
    )


def _earlier_result(target: Path) -> dict[str, Any] | None:
    """The content of conversion.json in the target; None if it cannot be read."""
    try:
        return read_json(target / RESULT, subject="the result of a conversion")
    except MdataError:
        return None


def _job_id(model: ModelFolder, options: ConvertOptions) -> str:
    """Identifies a conversion: the source's files, by size and time of change, and the options."""
    if isinstance(model.path, Path):
        paths = sorted(path for path in model.path.rglob("*") if path.is_file())
        facts = [(str(path.relative_to(model.path)), path.stat()) for path in paths]
        source: Any = [str(model.path.absolute()), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in facts]]
    else:
        source = [str(model.path), blake3(files_of(model.path).read(INDEX)).hexdigest()]
    return hash_of([source, dataclasses.asdict(options), mdata.__version__])


def _write(
    target: Path,
    model: ModelFolder,
    *,
    states: tuple[str, ...],
    dtype: torch.dtype,
    options: ConvertOptions,
    report: Callable[[int], None],
) -> None:
    limit, form = options.max_shard_bytes, options.optimizer_form
    if options.to == "mtrain":
        write_native(target, model, states=states, max_shard_bytes=limit, report=report)
    elif options.to == "torch_dist":
        # torch.distributed.checkpoint loads FSDP and sympy: over a second that no training needs.
        from trainer.convert.torch_dist_write import write_torch_dist

        write_torch_dist(target, model, states=states, dtype=dtype, form=form, report=report)
    elif options.to == "mp_rank":
        write_mp_rank(target, model, dtype=dtype, tp=options.tp, pp=options.pp, report=report)
    elif options.to == "peft":
        write_peft(target, model, dtype=dtype, model_type=options.model_type, report=report)
    else:
        write_hf(target, model, dtype=dtype, max_shard_bytes=limit, model_type=options.model_type, report=report)


def _check_used(options: ConvertOptions, source: Format) -> None:
    """Refuse options that would be ignored.

    Raises:
        UsageError: names them, and the formats for which they count.
    """
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    idle = [
        f"{flag} counts {'for targets' if of == 'to' else 'for sources'} of format {' or '.join(formats)}"
        for name, (flag, of, formats) in _COUNTS_FOR.items()
        if given[name] != _DEFAULTS[name] and (options.to if of == "to" else source) not in formats
    ]
    if options.to == "mtrain" and options.dtype not in ("", "fp32"):
        idle.append("--dtype counts for other targets: checkpoints of mtrain are fp32")
    if idle:
        problem = f"a conversion from {source} to {options.to} ignores some of these options"
        raise UsageError(problem, found="; ".join(idle), fix="leave them out")


def _written_bytes(model: ModelFolder, states: tuple[str, ...], *, dtype: torch.dtype, options: ConvertOptions) -> int:
    """Of the target's tensors; rows of padding and copies of a tied embedding are not counted."""
    if options.to == "peft":
        tensors = {} if model.adapter is None else model.adapter.source.tensors
        return num_bytes({name: info for name, info in tensors.items() if name.startswith("weight/")}, dtype)
    of = {state: dict[str, TensorInfo]() for state in states}
    for name, info in model.source.tensors.items():
        if (state := name.split("/", 1)[0]) in of:
            of[state][name] = info
    if options.to == "mtrain":
        return sum(
            num_bytes({name: info}, torch.promote_types(info.dtype, torch.float32))
            for some in of.values()
            for name, info in some.items()
        )
    weights = of.pop("weight")
    # Moments and main weights are fp32 whatever the weights are.
    main = [weights] if _has_main(states, options) else []
    return num_bytes(weights, dtype) + sum(num_bytes(some, torch.float32) for some in (*main, *of.values()))


def _has_main(states: tuple[str, ...], options: ConvertOptions) -> bool:
    """Whether a torch_dist target has main weights beside the moments."""
    return len(states) > 1 and options.optimizer_form == "distributed"


def _states(model: ModelFolder, options: ConvertOptions, tell: Callable[[str], None]) -> tuple[str, ...]:
    """The states that the target gets; a requested state that is left out is reported."""
    states = tuple(state for state in model.states if state != BUFFER or options.to == "mtrain")  # else beside weights
    if options.to in ("hf", "mp_rank", "peft") or not options.optimizer:
        return tuple(state for state in states if state in ("weight", BUFFER))
    rule = model.config.optimizer.name
    if options.to == "torch_dist" and len(states) > 1 and rule != "adamw":
        tell(f"the moments are those of {rule} and are left out: torch_dist is written with those of Adam")
        return ("weight",)
    return states


def _not_finite(source: Watched, model: ModelFolder) -> list[str]:
    """The tensors that hold NaN or infinite values, with their numbers.

    Raises:
        DamageError: all values of one are NaN.
    """
    notes = []
    for name in source.suspects:
        info = source.tensors[name]
        nan, infinite, numel = 0, 0, math.prod(info.shape)
        for box in boxes(info, info.dtype):
            piece = source.read(name, box)
            nan, infinite = nan + int(piece.isnan().sum()), infinite + int(piece.isinf().sum())
        if nan == numel:
            raise DamageError(
                f"{model.path} holds a tensor that is all NaN",
                found=f"{name}: all {numel:,} values are NaN",
                fix="convert an intact model",
            )
        if nan or infinite:
            notes.append(f"{name} ({nan:,} NaN and {infinite:,} infinite of {numel:,})")
    return notes


def _result(
    model: ModelFolder,
    target: Path,
    *,
    dtype: torch.dtype,
    states: tuple[str, ...],
    options: ConvertOptions,
    finite: bool,
) -> dict[str, Any]:
    check: dict[str, Any] = {"compared": False, "why": "--no-check"}
    if options.check:
        # Where main weights lie beside those of the model, they are the weights that a reader takes. Adapters are
        # merged with weights as they are.
        main = options.to == "peft" or (options.to == "torch_dist" and _has_main(states, options))
        stored = torch.float32 if main else dtype
        rounded = dataclasses.replace(model, source=Rounded(model.source, stored), format=_runner(model, stored))
        check = compare_logits(rounded, open_model(target), finite=finite)
    exported = model.tokenizer if options.check and options.to == "hf" else None
    return {
        "source": {"format": model.format, "folder": model.path.name, "step": model.run.step},
        "target": {"format": options.to, "dtype": str(dtype).removeprefix("torch."), "states": list(states)},
        "check": check,
        "token_ids": None if exported is None else compare_token_ids(exported, target),
        "version": mdata.__version__,
    }


def _runner(model: ModelFolder, stored: torch.dtype) -> Format:
    """transformers reads a folder as it is; where the target is rounded, the source is run by us, rounded as well."""
    narrowed = stored.itemsize < model.weights_dtype.itemsize
    return "mtrain" if narrowed else model.format


def with_tokenizer(model: ModelFolder, folder: str) -> ModelFolder:
    """The model with the requested tokenizer, if it fits.

    Raises:
        UsageError: there is none in the folder, or it has more ids than the model has rows.
    """
    if folder:
        tokenizer = find_tokenizer(Path(folder))
        if tokenizer is None:
            raise UsageError(
                f"--tokenizer {folder}: there is no tokenizer in it",
                fix="give a folder with tokenizer.json, vocab.json and merges.txt, or tokenizer.model",
            )
        model = dataclasses.replace(model, tokenizer=tokenizer, template=None)
    if model.tokenizer is not None:
        size = build_tokenizer(*model.tokenizer[:2], options=model.tokenizer.options).vocab_size
        if size > model.vocab_size:
            raise UsageError(
                f"the tokenizer of {folder or model.path} does not fit the model",
                found=f"{size} ids",
                expected=f"at most the {counted(model.vocab_size, 'row')} of its embedding",
                fix="name the tokenizer that the model was trained with (--tokenizer FOLDER)",
            )
    return model


def _model_keys(settings: Sequence[str]) -> Mapping[str, Any]:
    """Keys of [model] from `model.key=value`."""
    keys: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("model."):
            raise UsageError(
                f"{text!r} does not set a key of the model", expected="model.key=value, such as model.rope_theta=5e5"
            )
        try:
            parsed = load_toml(f"value = {value}")["value"]
        except ValueError:
            parsed = value
        *section, key = name.removeprefix("model.").split(".")
        (keys.setdefault(section[0], {}) if section else keys)[key] = parsed
    return keys
