"""Train a model further on conversations or texts: write a run.toml with good defaults, and run it.

MODEL is a folder that `mtrain convert` reads: of Hugging Face, of a run, one checkpoint, or of Megatron-LM. DATA is the
manifest of a corpus or blend, or jsonl (also compressed), which is tokenized in the run's folder by the model's own
tokenizer: conversations where records have `messages` or `conversations`, or the fields of alpaca or dolly; texts where
they have `text`; pairs of conversations, `chosen` and `rejected`, with --dpo. All weights are trained, or with --lora
adapters beside them. Length, batch, learning rate and layout follow from model, data and GPUs; section.key=value sets
any other key. The same command continues; so does `mtrain train FOLDER/run.toml`.

--task finetunes a BERT on labelled rows: MNLI, QQP, RACE, or your own.

Examples:
  mtrain finetune models/Llama-3.2-1B chats.jsonl
  mtrain finetune runs/first web.jsonl --epochs 3 --print
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mdata
from mdata import BadInputError, UsageError
from mdata.errors import OtherResultsError, few, os_errors_named
from mdata.util import atomic_io
from mdata.util.config_text import parse_toml
from trainer.config.parse import ReadConfig, apply_override, key_names, problems_error, setting_problem
from trainer.parallel.placement import find_placement

from .console import Console, Parser
from .finetune_task import BATCH, WARMUP, add_task_arguments, check_task_options, prepare
from .finetune_task import EPOCHS as TASK_EPOCHS
from .mtrain_init import (
    PRECISIONS,
    RECIPES,
    Draft,
    NoLayoutError,
    Tables,
    batch_rows,
    check_regular,
    explained,
    parsed,
    refuse_unread_hardware,
    summary,
    visible_gpus,
    with_layout,
)
from .mtrain_plan import HARDWARE
from .preprocess_options import TURNS

if TYPE_CHECKING:
    from mdata.blend.blend import OpenBlend
    from mdata.tokenizers.base.tokenizer import TokenizerConfig
    from trainer.config.sections import RunConfig
    from trainer.convert.model_folder import ModelFolder
    from trainer.plan.layouts import Layout
    from trainer.run.data import RunData

CHAT_KEYS = ("messages", "conversations")
# The fields by which records of other schemas are known.
CHAT_FIELDS = (
    ("pairs", "chosen", "rejected"),
    ("alpaca", "instruction", "output"),
    ("dolly", "instruction", "response"),
)
EPOCHS = 2
DPO_EPOCHS, DPO_LR_SHARE = 1, 0.003  # 1e-6 for a model of 1B
LR_SHARE = 0.1  # of the learning rate with which a model of this size is pretrained
LORA_LR_FACTOR = 10  # adapters want ten times the rate of all weights (Schulman et al. 2025, "LoRA Without Regret")
BATCH_TOKENS = 262144  # 64 rows of 4,096 tokens (Touvron et al. 2023)
LEAST_STEPS = 32  # of an epoch, where the data has as many rows
USUAL_ROW, SHORTEST_ROW = 2048, 256  # tokens
LAYOUT_KEYS = ("mesh.", "recompute.", "train.micro_batch=")
TEMPLATE_FILE, TOKENIZER_SETTINGS = "chat_template.jinja", "tokenizer_config.json"


def add_arguments(parser: Parser) -> None:
    """See `mtrain finetune --help`."""
    parser.settings = key_names
    parser.no_option = "section.key=value, such as optimizer.weight_decay=0"
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder of Hugging Face, a run, a checkpoint, or of Megatron-LM")
    add("data", metavar="DATA", help="manifest of a corpus or blend, or jsonl")
    add("overrides", nargs="*", default=[], metavar="section.key=value", help="other settings of the run")
    add = parser.add_argument_group("training").add_argument
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank, such as 16 (default: all weights)")
    add(
        "--epochs",
        type=float,
        metavar="N",
        help=f"how often all rows are read (default: {EPOCHS}; --dpo: {DPO_EPOCHS})",
    )
    add("--lr", type=float, metavar="RATE", help="largest learning rate (default: by the model's size)")
    add("--batch-tokens", metavar="N", help="tokens of a step, such as 256K (default: by the rows of an epoch)")
    add("--sequence-length", type=int, metavar="N", help="tokens of a row (default: by the longest document)")
    add(
        "--precision",
        choices=PRECISIONS,
        metavar="NAME",
        help="bf16, fp8, fp16 or fp32 (default: bf16; without GPUs fp32)",
    )
    add("--gpus", type=int, metavar="N", help="GPUs; 0: the CPU (default: those of this machine)")
    add("--nodes", type=int, metavar="N", help="with --print: machines (default: one per 8 GPUs)")
    add("--device", metavar="NAME", help="with --print: kind of GPU (default: that of this machine, or H100)")
    add("--valid", metavar="DATA", help="held-out data (default: the last 2 %% of DATA, if that is a document)")
    add("--dpo", action="store_true", help="DATA is pairs of a chosen and a rejected conversation")
    add(
        "--beta",
        type=float,
        metavar="B",
        help="with --dpo: how strongly the model is held near its first weights (default: 0.1)",
    )
    add = parser.add_argument_group("how data is read").add_argument
    add("--tokenizer", metavar="FOLDER", help="tokenizer of a model whose folder has none")
    add(
        "--add-tokens",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="new special tokens, such as '<|im_start|>' '<|im_end|>', whose weights begin as the mean of all others",
    )
    add("--chat-template", metavar="T", help="tokenizer, chatml, plain, or a Jinja file (default: the tokenizer's own)")
    add("--chat-date", metavar="DAY", help="YYYY-MM-DD, for a chat template that writes today's date")
    add(
        "--chat-train-on",
        choices=TURNS,
        default=TURNS[0],
        metavar="T",
        help="turns to train on: assistant (default), last or all",
    )
    add_task_arguments(parser, add)
    add = parser.add_argument_group("the run").add_argument
    add("--folder", metavar="FOLDER", help="folder of the run (default: runs/MODEL-DATA)")
    add("--output", metavar="FILE", help="where the run.toml is written (default: FOLDER/run.toml)")
    add("--overwrite", action="store_true", help="replace a run.toml, or tokenized data, of other settings")
    add("--print", action="store_true", help="print the run.toml and do not train; jsonl is tokenized into FOLDER/data")
    parser.set_defaults(**dict.fromkeys(HARDWARE))


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Prepare the data, choose, check, write the file, and train."""
    from trainer.checkpoint.location import location_of
    from trainer.convert.convert import open_model, with_tokenizer
    from trainer.plan.check import least_ranks
    from trainer.run.launch import survey

    if find_placement(os.environ) is not None:
        raise UsageError(
            "mtrain finetune starts its ranks itself, and a launcher has started this one",
            fix="write the file once with --print > run.toml, and start mtrain train run.toml on each rank",
        )
    visible = visible_gpus()
    gpus = visible if arguments.gpus is None else arguments.gpus
    if gpus > visible and not arguments.print:
        fix = "--print > run.toml writes the file for other machines; see mtrain launch"
        raise UsageError(f"--gpus {gpus}: this machine has {visible}", fix=fix)
    _check_numbers(arguments)
    layout_keys = [word for word in arguments.overrides if word.startswith(LAYOUT_KEYS)]
    refuse_unread_hardware(arguments, gpus, layout_keys=layout_keys)
    _check_methods(arguments)
    check_task_options(arguments)
    given = _given(arguments.overrides)
    model = with_tokenizer(open_model(location_of(arguments.model)), arguments.tokenizer or "")
    _check_family(model, arguments)
    _check_length(model, given, arguments)
    model, new_rows = _with_new_tokens(model, arguments.add_tokens) if arguments.add_tokens else (model, {})
    folder = Path(given.get("run", {}).get("folder") or arguments.folder or _default_folder(arguments))
    output = Path(arguments.output or folder / "run.toml")
    if not arguments.print:
        check_regular(output)
    sources = [_Source(folder / "data", arguments.data), _Source(folder / "data/valid", arguments.valid or "")]
    sources = [] if arguments.task else [source.looked_at() for source in sources]
    begun = (folder / "config.toml").exists()
    if not arguments.print or arguments.task or any(source.key is not None for source in sources):
        weights = given.get("checkpoint", {}).get("init_from", _first_weights(model, arguments))
        _refuse_other_run(output, folder, weights, sources[0] if sources else None, arguments.overwrite)
    with _other_data_refused(folder, begun=begun):
        replaces = arguments.overwrite and not begun  # the data of a run that goes on stays as it is
        task = prepare(arguments, model, folder / "data", replaces, console) if arguments.task else None
        if task is not None:
            blend, valid = task.train, ""
        else:
            blend, valid = (_prepared(source, model, replaces, arguments, console) for source in sources)
    opened = mdata.open_blend(blend, tokenizer_unknown="ok")
    _check_data(opened, model, arguments)
    is_pairs = any(corpus.manifest.level == "pairs" for corpus in opened.corpora)
    _check_pairs(is_pairs, arguments.data, arguments)
    settings: Tables = {
        "run": {"folder": str(folder)},
        "model": model_keys(model) | _lora_keys(model, arguments.lora, new_tokens=bool(arguments.add_tokens)),
        "data": {"blend": blend, **_kind(opened), **({"valid": [valid]} if valid else {})},
        "checkpoint": {"init_from": _first_weights(model, arguments)} | new_rows,
    }
    if task is not None:
        settings |= {"model": task.model_keys(settings["model"]), "data": task.data_keys()}
    config, layout, tables = _chosen(settings, given, opened, model, gpus=gpus, arguments=arguments, console=console)
    ranks = gpus or least_ranks(config.mesh)
    text = explained(tables, command=f"mtrain train {output}")
    if not arguments.print and not arguments.overwrite:
        _refuse_other(output, text)
    surveyed = survey(ReadConfig(config, []), ranks, elsewhere=arguments.print)
    if surveyed.problems:
        raise surveyed.error("this run")
    if arguments.print:
        console.result(text.rstrip("\n"), {"config": tables, "ranks": ranks})
        return 0
    with os_errors_named("writing the run.toml"):
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.atomic_write(output, text.encode())
    facts = summary(config, layout, ranks) if layout or not gpus else "the layout of the command line"
    console.note(f"{output}: {facts}")
    return _train(output, config, opened, ranks=ranks, console=console)


class _Source(NamedTuple):
    """Data that a user names, and the folder into which it is tokenized if it is jsonl.

    `schema` and `key`: see `_schema_and_key`.
    """

    folder: Path
    path: str
    schema: str = ""
    key: str | None = None

    @property
    def prefix(self) -> str:
        """That of the tokenized files."""
        return str(self.folder / Path(self.path.rstrip("/")).name.split(".")[0])

    def looked_at(self) -> _Source:
        """With what its records are."""
        schema, key = _schema_and_key(self.path) if self.path else ("", None)
        return self._replace(schema=schema, key=key)


def _refuse_other_run(output: Path, folder: Path, weights: str, source: _Source | None, overwrite: bool) -> None:
    """Refuse the file or the folder of a run of another model or other data, before any data is tokenized."""
    for written in (folder / "config.toml", output):  # the first is that of a run that has begun
        if overwrite and written == output:
            continue
        with os_errors_named("reading the run.toml"):
            if not written.exists():
                continue
            text = written.read_bytes()
        try:
            tables = parse_toml(text.decode())
            same = tables["checkpoint"]["init_from"] == weights
            if source is not None and source.key is not None:
                same &= str(tables["data"]["blend"]).startswith(source.prefix)
        except (ValueError, KeyError, TypeError):  # not written by this command
            same = False
        if not same:
            raise _other(written)


def _refuse_other(output: Path, text: str) -> None:
    with os_errors_named("reading the run.toml"):
        differs = output.exists() and output.read_bytes() != text.encode()
    if differs:
        raise _other(output)


def _other(written: Path) -> UsageError:
    replaces = "" if written.name == "config.toml" else ", --overwrite replaces the file"
    return UsageError(
        f"{written} already exists, with other settings",
        fix=f"--folder begins another run{replaces}; mtrain train {written} continues it",
    )


@contextmanager
def _other_data_refused(folder: Path, *, begun: bool) -> Iterator[None]:
    """Say with this command's options what to do about data in the folder that other options would replace."""
    try:
        yield
    except OtherResultsError as error:
        raise UsageError(
            f"{folder / 'data'} has data that was tokenized from other input or with other options"
            + (", for a run that has begun" if begun else ""),
            found=error.found,
            fix="--folder begins another run" + ("" if begun else ", --overwrite replaces the data"),
        ) from error


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("epochs", "lr", "sequence_length", "beta"):
        if (value := getattr(arguments, name)) is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} is {value}", expected="a number above 0")
    if arguments.gpus is not None and arguments.gpus < 0:
        raise UsageError(f"--gpus is {arguments.gpus}", expected="integer >= 0")
    if arguments.lora is not None and arguments.lora < 1:
        fix = "leave --lora out to train all weights"
        raise UsageError(f"--lora is {arguments.lora}", expected="integer >= 1: the rank of the adapters", fix=fix)
    if arguments.batch_tokens is not None:
        batch_rows(arguments.batch_tokens, arguments.sequence_length or 1, 0)  # before data is tokenized


def _check_methods(arguments: argparse.Namespace) -> None:
    """Refuse ways of training that exclude each other, before any data is tokenized."""
    if arguments.beta is not None and not arguments.dpo:
        raise UsageError("--beta is an option of --dpo, which is not given", fix="add --dpo, or leave --beta out")
    if taken := [token for token in arguments.add_tokens if re.match(r"[a-z]+\.[a-z_.]+=", token)]:
        found, fix = f"--add-tokens {' '.join(arguments.add_tokens)}", "write settings before --add-tokens"
        raise UsageError(f"{taken[0]} is a setting, and follows --add-tokens", found=found, fix=fix)
    if arguments.add_tokens and arguments.task:
        why = "--add-tokens and --task exclude each other: --task does not read texts"
        raise UsageError(why, fix="leave one of them out")
    if arguments.task and (arguments.dpo or arguments.lora is not None):
        option = "--dpo" if arguments.dpo else "--lora"
        why = "trains a model that continues texts" if arguments.dpo else "does not support BERT"
        raise UsageError(
            f"--task {arguments.task} and {option} exclude each other: {option} {why}", fix="leave one of them out"
        )


def _given(overrides: list[str]) -> Tables:
    """The settings on the command line, by section."""
    given: Tables = {}
    problems = [problem for text in overrides if (problem := apply_override(given, text))]
    for section, table in given.items():
        for key, value in table.items():
            inner = value if isinstance(value, dict) else {}
            named = {f"{section}.{key}.{name}": setting for name, setting in inner.items()} or {
                f"{section}.{key}": value
            }
            problems += [
                problem
                for name, setting in named.items()
                if setting is not None and (problem := setting_problem(name, setting))
            ]
    if problems:
        raise problems_error("the command line", problems)
    return given


def _check_family(model: ModelFolder, arguments: argparse.Namespace) -> None:
    from trainer.models.gpt.check import without_lora

    kinds, name = model.family.data_kinds, arguments.model
    if ("classify" if arguments.task else "chat") in kinds:
        if arguments.lora is not None and (sections := without_lora(model.config.model)):
            raise UsageError(
                f"--lora does not support {', '.join(f'[model.{section}]' for section in sections)} of {name}",
                fix="leave --lora out to train all weights",
            )
        return
    if arguments.task:
        raise UsageError(
            f"{name} is a model of family {model.config.model.family}, which has no head that classifies rows",
            expected="a BERT",
        )
    raise UsageError(
        f"{name} is a model of family {model.config.model.family}",
        expected="one that continues texts: gpt, gpt_neox or mamba",
        fix="--task finetunes it on labelled rows"
        if "classify" in kinds
        else "write a run.toml with checkpoint.init_from; mtrain init --model begins one",
    )


def _default_folder(arguments: argparse.Namespace) -> str:
    model, data = (Path(text.rstrip("/")).name for text in (arguments.model, arguments.data))
    return f"runs/{model.removesuffix('.zip')}-{data.split('.')[0]}"


def model_keys(model: ModelFolder) -> dict[str, Any]:
    """[model] for a run that begins with these weights: keys that differ from their defaults, sub-sections whole.

    The model's length is one of them: rows may be shorter, and generation still uses all of it.
    """
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(model.config.model):
        value = getattr(model.config.model, field.name)
        if dataclasses.is_dataclass(value):
            keys[field.name] = {
                name: list(inner) if isinstance(inner, tuple) else inner
                for name, inner in dataclasses.asdict(value).items()  # type: ignore[arg-type]
                if inner not in (None, ())
            }
        elif value is not None and value != field.default:
            keys[field.name] = list(value) if isinstance(value, tuple) else value
    keys.pop("preset", None)  # its values are written out
    return keys | {"vocab_size": model.vocab_size, "max_position": _context(model)}


def _lora_keys(model: ModelFolder, rank: int | None, *, new_tokens: bool) -> dict[str, Any]:
    """[model.lora], with the settings of the adapters that the folder holds; none to train all weights.

    With new tokens their layers are trained as well.
    """
    if rank is None:
        return {}
    there = dataclasses.asdict(model.adapter.lora) if model.adapter is not None else {}
    keys = {name: list(value) if isinstance(value, tuple) else value for name, value in there.items()}
    if new_tokens:
        keys["modules_to_save"] = ["embedding", *([] if model.config.model.tie_embeddings else ["head"])]
    return {"lora": {name: value for name, value in keys.items() if value not in (None, [])} | {"rank": rank}}


def _with_new_tokens(model: ModelFolder, tokens: list[str]) -> tuple[ModelFolder, dict[str, Any]]:
    """The model with a tokenizer and weights for new tokens, and keys of [checkpoint] that say so."""
    from mdata.tokenizers.base.tokenizer import token_id
    from mdata.tokenizers.base.tokenizer_json import with_special_tokens
    from mdata.tokenizers.registry import build_tokenizer
    from trainer.convert.model_folder import with_new_rows

    made = model.tokenizer
    if made is None or "tokenizer.json" not in made.files:
        raise UsageError(
            f"--add-tokens: {model.path} has no tokenizer.json",
            found=made.name if made else "no tokenizer",
            fix="--tokenizer FOLDER with a tokenizer of Hugging Face",
        )
    before = build_tokenizer(made.name, made.files, options=made.options)
    definition = json.loads(made.files["tokenizer.json"])
    if present := [token for token in tokens if token_id(before, token) is not None]:
        raise UsageError(f"--add-tokens: the tokenizer has {few(present, 4)} already", fix="leave them out")
    definition = with_special_tokens(definition, tokens)
    files = {**made.files, "tokenizer.json": json.dumps(definition, ensure_ascii=False).encode()}
    tokenizer = made._replace(files=files)
    after = build_tokenizer(tokenizer.name, files, options=tokenizer.options)
    first = min(token_id(after, token) or 0 for token in tokens)
    rows = max(model.vocab_size, after.vocab_size)
    model = dataclasses.replace(model, tokenizer=tokenizer)
    return with_new_rows(model, first, rows, where=str(model.path)), {"new_rows_from": first}


def _first_weights(model: ModelFolder, arguments: argparse.Namespace) -> str:
    """checkpoint.init_from: with frozen weights one checkpoint of a run, which may go on and have newer ones."""
    return str(model.path) if arguments.lora is not None and model.format == "mtrain" else arguments.model


def _context(model: ModelFolder) -> int:
    """The longest row that the model was made for."""
    return model.config.model.max_position or model.config.train.sequence_length


def _prepared(
    data: _Source, model: ModelFolder, overwrite: bool, arguments: argparse.Namespace, console: Console
) -> str:
    """The manifest of the data, which is tokenized into its folder if it is jsonl; "" for no data."""
    from mdata.sources.record_batch import BadRowError

    folder, source, schema, key = data
    if key is None:
        return source
    _check_pairs(schema == "pairs", source, arguments)
    if model.tokenizer is None:
        raise UsageError(
            f"{arguments.model} has no tokenizer for the texts in {source}",
            fix="--tokenizer FOLDER with the one that the model was trained with",
        )
    is_chat = schema != "text"
    files = _write_tokenizer(folder / "tokenizer", model, model.tokenizer)
    template = arguments.chat_template
    if is_chat and template is None and _lacks_template(files, model.tokenizer):
        template = "plain"
        console.note("the tokenizer has no chat template: plain is used (User: ..., Assistant: ...)")
    kind = "texts" if not is_chat else "pairs of conversations" if schema == "pairs" else "conversations"
    kind += f" of {schema}" if schema in ("alpaca", "dolly") else f" under {key!r}"
    of_chat = {"chat_schema": schema, "chat_template": template, "chat_date": arguments.chat_date}
    of_chat["chat_train_on"] = arguments.chat_train_on
    console.note(f"{source}: {kind}, tokenized into {folder} by the model's tokenizer")
    options = mdata.PreprocessOptions(
        input=(source,),
        output_prefix=data.prefix,
        json_keys=(key,),
        append_eod=not is_chat,
        chat=is_chat,
        overwrite=overwrite,
        on_error=arguments.on_error or "stop",
        **(of_chat if is_chat else {}),
        **_tokenizer_options(folder / "tokenizer", files, model.tokenizer),
    )
    try:
        with console.progress() as progress:
            result = mdata.preprocess(options, progress)
    except BadRowError as error:  # this command has no option for another key or for longer records
        fix = "correct or remove this record, or skip such records (--on-error skip)"
        raise BadInputError(error.problem, found=error.found, fix=fix) from error
    (manifest,), (path,) = result.manifests.values(), result.paths.values()
    skipped = manifest.provenance.skipped if manifest.provenance else {}
    if counts := ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()) if count):
        console.note(f"{source}: left out: {counts}")
    return str(path)


def _schema_and_key(source: str) -> tuple[str, str | None]:
    """What the records of jsonl are, and the key whose values are tokenized; None: the source is not jsonl.

    Raises:
        UsageError: nothing there, an empty file, or records without such a key.
    """
    from mdata.sources.chunk import chunks, read_chunk
    from mdata.sources.input_files import find_inputs
    from mdata.sources.record_batch import ReadSpec

    if not Path(source).exists():
        if Path(f"{source}.idx").exists():
            return "", None
        raise UsageError(f"there is no data {source}", fix="give the manifest of a corpus or blend, or jsonl")
    if Path(source).is_file() and not Path(source).stat().st_size:
        raise UsageError(f"{source} is empty", expected='records such as {"messages": [...]}, one a line')
    if source.endswith((".toml", ".csv")):
        return "", None
    spec = ReadSpec()
    files = find_inputs([source]).files[:1]
    if not files or files[0].format != "jsonl":
        raise UsageError(
            f"{source} is not jsonl", fix="tokenize it with mdata preprocess, and give the manifest in its place"
        )
    chunk = next(chunks(files, 1, spec=spec), None)
    line = b"" if chunk is None else read_chunk(chunk, spec).split(b"\n", 1)[0]
    beginning = f"{line[:60].decode(errors='replace')!r}"
    try:
        record = json.loads(line)
    except ValueError as error:
        if "jsonl" in Path(source).name.split("."):
            raise BadInputError(
                f"the first line of {source} is not JSON",
                found=beginning,
                expected='a record, such as {"messages": [...]}',
            ) from error
        return "", None  # the first line of a manifest
    keys = list(record) if isinstance(record, dict) else []
    for schema, field, other in CHAT_FIELDS:
        if field in keys and other in keys:
            return schema, field
    key = next((key for key in (*CHAT_KEYS, "text") if key in keys), None)
    if key is None and not {"format", "shards", "components"} & set(keys):
        raise UsageError(
            f"the first record of {source} has nothing to train on",
            found=f"keys {', '.join(map(repr, keys[:8]))}" if keys else beginning,
            expected="messages or conversations, text, chosen and rejected, or the fields of alpaca or dolly",
            fix="mdata preprocess --json-keys reads other names; give its manifest in place of the file",
        )
    return "text" if key == "text" else "messages", key


def _write_tokenizer(folder: Path, model: ModelFolder, tokenizer: TokenizerConfig) -> dict[str, bytes]:
    """The tokenizer's files, written to the folder; a chat template beside them becomes part of its settings.

    So it stays with the tokenizer in corpora, runs and exports, whose folders have no further file.
    """
    from mdata.tokenizers.base.tokenizer_folder import write_folder

    files = dict(tokenizer.files)
    path = model.adapter.base.path if model.adapter is not None and model.format == "peft" else model.path
    with os_errors_named("writing the tokenizer"):
        template = path / TEMPLATE_FILE if isinstance(path, Path) else None
        if template is not None and template.is_file() and "tokenizer.json" in files:
            settings = json.loads(files.get(TOKENIZER_SETTINGS, b"{}"))
            settings["chat_template"] = template.read_text(encoding="utf-8")
            files[TOKENIZER_SETTINGS] = json.dumps(settings, indent=1, ensure_ascii=False).encode()
        if files:
            write_folder(folder, files)
    return files


def _tokenizer_options(folder: Path, files: Mapping[str, bytes], tokenizer: TokenizerConfig) -> dict[str, Any]:
    """The options of preprocess for a tokenizer whose files lie in the folder."""
    from mdata.tokenizers.registry import FILES_OF

    options: dict[str, Any] = {
        "tokenizer_type": tokenizer.name,
        "tokenizer_options": tuple(sorted(tokenizer.options.items())),
    }
    for field in FILES_OF[tokenizer.name]:
        if tokenizer.name == "HuggingFaceTokenizer":
            options[field] = str(folder)
        else:
            start = {"vocab_file": "vocab", "merge_file": "merges"}.get(field, "")
            options[field] = str(next(folder / name for name in sorted(files) if name.startswith(start)))
    return options


def _lacks_template(files: Mapping[str, bytes], tokenizer: TokenizerConfig) -> bool:
    """Whether the tokenizer has neither a template nor the tokens of ChatML."""
    from mdata.chat.templates import END, START
    from mdata.tokenizers.base.tokenizer import token_id
    from mdata.tokenizers.registry import build_tokenizer

    built = build_tokenizer(tokenizer.name, files, options=tokenizer.options)
    own = "chat_template" in json.loads(files.get(TOKENIZER_SETTINGS, b"{}"))
    return not own and None in (token_id(built, START), token_id(built, END))


def _check_length(model: ModelFolder, given: Tables, arguments: argparse.Namespace) -> None:
    """See that rows are not longer than the model's, before data is tokenized."""
    most = given.get("model", {}).get("max_position") or model.config.model.max_position
    length = given.get("train", {}).get("sequence_length") or arguments.sequence_length
    if most and isinstance(length, int) and length > most:
        raise UsageError(
            f"rows of {length:,} tokens are longer than those of {arguments.model}",
            found=f"model.max_position={most}",
            fix=f"--sequence-length {most} or less",
        )


def _check_data(opened: OpenBlend, model: ModelFolder, arguments: argparse.Namespace) -> None:
    """See that there are tokens, and that they belong to the model."""
    from mdata.tokenizers.base.tokenizer import TokenizerConfig
    from mdata.tokenizers.registry import WITHOUT_FILES
    from trainer.convert.first_state import check_tokenizer, refuse_more_ids

    if not sum(corpus.num_tokens for corpus in opened.corpora):
        raise UsageError(f"{arguments.data} has nothing to train on", found="0 tokens", fix="give data with records")
    for corpus in opened.corpora:
        facts, where = corpus.tokenizer, str(arguments.model)
        if facts is not None:
            refuse_more_ids(facts.vocab_size, model, where=where)
        if (
            facts is not None
            and model.tokenizer is not None
            and ((files := corpus.tokenizer_files()) or facts.type in WITHOUT_FILES)
        ):
            made = TokenizerConfig(facts.type, files, facts.options, "tokenizers")
            check_tokenizer(made, model.tokenizer, where=where)


def _check_pairs(is_pairs: bool, source: str, arguments: argparse.Namespace) -> None:
    """See that --dpo and pairs come together."""
    if is_pairs and not arguments.dpo:
        raise UsageError(f"{source} holds pairs of conversations", fix="--dpo trains on them")
    if arguments.dpo and not is_pairs:
        expected = "records with chosen and rejected, or a corpus of mdata preprocess --chat --chat-schema pairs"
        raise UsageError(f"--dpo: {source} holds no pairs of conversations", expected=expected)


def _kind(opened: OpenBlend) -> dict[str, Any]:
    """Conversations, pairs of them, or whole texts that do not attend to each other."""
    if any(corpus.manifest.level == "pairs" for corpus in opened.corpora):
        return {"kind": "pairs"}
    if all(corpus.manifest.level == "chat" for corpus in opened.corpora):
        return {"kind": "chat"}
    return {"kind": "packed", "document_masks": True}


def _row_length(opened: OpenBlend, context: int) -> int:
    """A power of two for the longest document, at least the usual row where there are many; at most the context.

    Labelled rows are not packed: their longest is enough, with [CLS] and two [SEP].
    """
    if all(corpus.manifest.level == "labelled" for corpus in opened.corpora):
        longest = max((_longest(corpus) for corpus in opened.corpora), default=1)
        return min(1 << max(longest + 2, 16).bit_length(), context)
    tokens = sum(corpus.num_tokens for corpus in opened.corpora)
    longest = max((_longest(corpus) for corpus in opened.corpora), default=1)
    wanted = max(longest, min(USUAL_ROW, tokens // LEAST_STEPS), 16)
    return min(1 << (wanted - 1).bit_length(), context)


def _longest(corpus: mdata.Corpus) -> int:
    """Tokens of the longest document."""
    import numpy as np

    longest = 0
    for reader in corpus.readers:
        ends = np.append(0, np.cumsum(reader.lengths, dtype=np.int64))
        longest = max(longest, int(np.diff(ends[reader.boundaries]).max(initial=0)))
    return longest


def _chosen(
    settings: Tables,
    given: Tables,
    opened: OpenBlend,
    model: ModelFolder,
    *,
    gpus: int,
    arguments: argparse.Namespace,
    console: Console,
) -> tuple[RunConfig, Layout | None, Tables]:
    """The configuration with every default, its layout, and its tables; shorter rows where none fits the memory."""
    asked = given.get("train", {}).get("sequence_length") or arguments.sequence_length
    length = asked or _row_length(opened, _context(model))
    while True:
        draft = _draft(settings, given, model, length=length, gpus=gpus, arguments=arguments)
        try:
            if any(word.startswith(LAYOUT_KEYS) for word in arguments.overrides):
                layout, tables = None, _merged(_merged(draft.tables, {"train": {"micro_batch": 1}}), given)
            else:
                _, layout = with_layout(draft, arguments)
                tables = _merged(draft.tables, given)
            return parsed(tables), layout, tables
        except NoLayoutError:
            if asked or length <= SHORTEST_ROW:
                raise
        console.note(f"rows of {length} tokens do not fit into memory; trying {length // 2}")
        length //= 2


def _draft(
    settings: Tables, given: Tables, model: ModelFolder, *, length: int, gpus: int, arguments: argparse.Namespace
) -> Draft:
    from trainer.plan.plan import make_plan

    classifies = settings["data"].get("kind") == "classify"
    epochs, share = (TASK_EPOCHS if classifies else EPOCHS), LR_SHARE
    if arguments.dpo:
        epochs, share = DPO_EPOCHS, DPO_LR_SHARE
    train: dict[str, Any] = {"sequence_length": length, "global_batch": 1, "micro_batch": 1, "steps": 1}
    if arguments.beta is not None:
        train["dpo_beta"] = arguments.beta
    precision = PRECISIONS[arguments.precision or ("bf16" if gpus else "fp32")]
    tables: Tables = {
        **{name: dict(settings[name]) for name in ("run", "model", "data")},
        "mesh": {},
        "train": train,
        "optimizer": {"lr": 1e-5, "warmup_fraction": 0.1 if arguments.dpo else 0.03},
        "precision": dict(precision),
        "recompute": {},
        "checkpoint": settings["checkpoint"],
    }
    data = _opened(tables, given)
    rows = sum(component.samples.samples_per_epoch for component in data.train.components)
    if not rows:
        raise UsageError(
            f"{arguments.data} has nothing to train on",
            found=f"no row of {length} tokens",
            fix="a longer --sequence-length, or data.longer=cut",
        )
    if arguments.batch_tokens:
        batch = batch_rows(arguments.batch_tokens, length, gpus)
    elif classifies:
        batch = -(-min(BATCH, rows) // max(gpus, 1)) * max(gpus, 1)
    else:
        batch = _usual_batch(rows, length=length, gpus=gpus)
    batch = given.get("train", {}).get("global_batch", batch)
    train["global_batch"] = batch
    if {"steps", "samples", "tokens"} & given.get("train", {}).keys():
        if arguments.epochs:
            raise UsageError("--epochs and train.* both say how long to train", fix="leave one of them out")
        del train["steps"]
    else:
        train["steps"] = max(math.ceil((arguments.epochs or epochs) * rows / batch), 1)
    if data.facts.has_valid:
        train["eval_interval"] = math.ceil(rows / batch)
    if classifies and data.facts.has_valid:  # after each epoch, on all rows
        train["eval_samples"] = 0
        tables["checkpoint"] = {**tables["checkpoint"], "interval": train["eval_interval"], "keep_best": 1}
    if classifies:
        tables["optimizer"]["warmup_fraction"] = WARMUP
    parameters = make_plan(parsed(_merged(tables, given) | {"mesh": {}}), 1, facts=data.facts).num_parameters
    recipe = min(RECIPES, key=lambda recipe: abs(math.log(parameters / recipe.parameters)))
    if "lora" in _merged(tables, given)["model"]:
        share *= LORA_LR_FACTOR
    tables["optimizer"]["lr"] = arguments.lr or float(f"{share * recipe.lr:.3g}")
    return Draft(_merged(tables, given), gpus, data.facts)


def _opened(tables: Tables, given: Tables) -> RunData:
    """The data of the tables, to which a split is added if there is no validation set and enough documents."""
    from trainer.run.data import open_data

    data = open_data(parsed(_merged(tables, given)))
    if data.facts.has_valid or "split" in given.get("data", {}):
        return data
    tables["data"]["split"] = "98,2,0"
    try:
        return open_data(parsed(_merged(tables, given)))
    except UsageError:  # too few documents
        del tables["data"]["split"]
        return data


def _usual_batch(rows: int, *, length: int, gpus: int) -> int:
    """Rows of a step: a multiple of the GPUs."""
    batch = max(round(min(BATCH_TOKENS, rows // LEAST_STEPS * length) / length), 1)
    return max(round(batch / gpus), 1) * gpus if gpus else batch


def _merged(tables: Tables, given: Mapping[str, Any]) -> Tables:
    """The tables with the given keys, which win; keys that are given as not set are left out."""
    merged = {name: dict(table) for name, table in tables.items()}
    for name, table in given.items():
        own = merged.setdefault(name, {})
        for key, value in table.items():
            if isinstance(value, dict):
                own[key] = {**own.get(key, {}), **value}
            elif value is None:
                own.pop(key, None)
            else:
                own[key] = value
    return merged


def _train(output: Path, config: RunConfig, opened: OpenBlend, *, ranks: int, console: Console) -> int:
    from .mtrain_train import main as train

    code = train(argparse.Namespace(config=str(output), overrides=[], nproc=ranks), console)
    if config.data.kind in ("chat", "pairs") and not code:
        provenance = opened.corpora[0].manifest.provenance
        template = (provenance.options if provenance else {}).get("chat_template")
        name = template.get("name", "") if isinstance(template, Mapping) else ""
        option = " --chat-template plain" if name == "plain" else ""
        console.note(f"chat with it: mtrain chat {config.run.folder}{option}")
    return code
