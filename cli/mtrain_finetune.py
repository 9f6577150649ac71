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
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import mdata
from mdata import UsageError
from mdata.errors import OtherResultsError, os_errors_named
from mdata.util import atomic_io
from mdata.util.config_text import parse_toml
from trainer.config.parse import RESUME_ADVICE, ReadConfig, apply_override, key_names, problems_error, setting_problem
from trainer.parallel.placement import find_placement

from .console import Console, Parser
from .finetune_data import Source, check_data, check_pairs, prepare_data, schema_and_key, with_new_tokens
from .finetune_recipe import DPO_EPOCHS, EPOCHS, choose_settings, kind_keys, layout_keys, lora_keys, model_keys
from .finetune_task import add_task_arguments, check_task_options, prepare_task
from .mtrain_init import (
    PRECISIONS,
    Tables,
    batch_rows,
    check_regular,
    explained,
    refuse_unread_hardware,
    summary,
    visible_gpus,
)
from .mtrain_plan import HARDWARE
from .preprocess_options import TURNS

if TYPE_CHECKING:
    from trainer.convert.model_folder import ModelFolder


def add_arguments(parser: Parser) -> None:
    """See `mtrain finetune --help`."""
    parser.settings = key_names
    parser.no_option = "section.key=value, such as optimizer.weight_decay=0"
    parser.resume = RESUME_ADVICE
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


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Prepare the data, choose, check, write the file, and train."""
    from trainer.checkpoint.location import location_of
    from trainer.convert.convert import open_model, with_tokenizer
    from trainer.plan.check import least_ranks
    from trainer.run.launch import survey

    from .mtrain_train import main as train

    gpus = _num_gpus(arguments)
    _check_numbers(arguments)
    refuse_unread_hardware(arguments, gpus, layout_keys=layout_keys(arguments.overrides))
    _check_methods(arguments)
    check_task_options(arguments)
    given = _given(arguments.overrides)
    model = with_tokenizer(open_model(location_of(arguments.model)), arguments.tokenizer or "")
    _check_family(model, arguments)
    _check_length(model, given, arguments)
    model, new_rows = with_new_tokens(model, arguments.add_tokens) if arguments.add_tokens else (model, {})
    folder = Path(given.get("run", {}).get("folder") or arguments.folder or _default_folder(arguments))
    output = Path(arguments.output or folder / "run.toml")
    if not arguments.print:
        check_regular(output)
    paths = {} if arguments.task else {folder / "data": arguments.data, folder / "data/valid": arguments.valid or ""}
    sources = [Source(to, path, *schema_and_key(path)) for to, path in paths.items()]
    begun = (folder / "config.toml").exists()
    if not arguments.print or arguments.task or any(source.key is not None for source in sources):
        weights = given.get("checkpoint", {}).get("init_from", _first_weights(model, arguments))
        _refuse_other_run(output, folder, weights, sources[0] if sources else None, arguments.overwrite)
    with _other_data_refused(folder, begun=begun):
        replaces = arguments.overwrite and not begun  # the data of a run that goes on stays as it is
        task = prepare_task(arguments, model, folder / "data", replaces, console) if arguments.task else None
        if task is not None:
            blend, valid = task.train, ""
        else:
            blend, valid = (prepare_data(source, model, replaces, arguments, console) for source in sources)
    opened = mdata.open_blend(blend, tokenizer_unknown="ok")
    check_data(opened, model, arguments)
    of_kind = kind_keys(opened)
    check_pairs(of_kind["kind"] == "pairs", arguments.data, arguments)
    settings: Tables = {
        "run": {"folder": str(folder)},
        "model": model_keys(model) | lora_keys(model, arguments.lora, new_tokens=bool(arguments.add_tokens)),
        "data": {"blend": blend, **of_kind, **({"valid": [valid]} if valid else {})},
        "checkpoint": {"init_from": _first_weights(model, arguments)} | new_rows,
    }
    if task is not None:
        settings |= {"model": task.model_keys(settings["model"]), "data": task.data_keys()}
    config, layout, tables = choose_settings(
        settings, given, opened, model, gpus=gpus, arguments=arguments, console=console
    )
    ranks = gpus or least_ranks(config.mesh)
    text = explained(tables, command=f"mtrain train {output}")
    if not arguments.print and not arguments.overwrite:
        _refuse_other(output, text)
    surveyed = survey(ReadConfig(config, []), ranks, elsewhere=arguments.print)
    if surveyed.problems:
        raise surveyed.error("this run")
    if arguments.print:
        console.result(text.rstrip("\n"), {"config": tables, "ranks": ranks})
        return
    with os_errors_named("writing the run.toml"):
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.atomic_write(output, text.encode())
    facts = summary(config, layout, ranks) if layout or not gpus else "the layout of the command line"
    console.note(f"{output}: {facts}")
    train(argparse.Namespace(config=str(output), overrides=[], nproc=ranks), console)


def _num_gpus(arguments: argparse.Namespace) -> int:
    """GPUs of the run; 0: the CPU."""
    if find_placement(os.environ) is not None:
        raise UsageError(
            "mtrain finetune starts its ranks itself, and a launcher has started this one",
            fix="write the file once with --print > run.toml, and start mtrain train run.toml on each rank",
        )
    visible = visible_gpus()
    gpus: int = visible if arguments.gpus is None else arguments.gpus
    if gpus > visible and not arguments.print:
        fix = "--print > run.toml writes the file for other machines; see mtrain launch"
        raise UsageError(f"--gpus {gpus}: this machine has {visible}", fix=fix)
    return gpus


def _refuse_other_run(output: Path, folder: Path, weights: str, source: Source | None, overwrite: bool) -> None:
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


def _first_weights(model: ModelFolder, arguments: argparse.Namespace) -> str:
    """checkpoint.init_from: with frozen weights one checkpoint of a run, which may go on and have newer ones."""
    return str(model.path) if arguments.lora is not None and model.format == "mtrain" else arguments.model


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
