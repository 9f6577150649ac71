"""Convert models between mtrain, Hugging Face and Megatron-LM; merge and reshard our own checkpoints.

The format of SOURCE is detected from its files. TARGET is a new folder. No GPU is needed. Tensors are converted in
pieces of 64 MiB, so memory does not grow with the model. At the end the logits of both are compared if each model fits
into memory in fp32 (--no-check: not compared). The result is written to conversion.json in TARGET. Adapters (LoRA) are
merged with their weights, or with --to peft written alone, as a folder of Hugging Face's peft.

--push uploads TARGET to the Hugging Face hub, into a private repository; the same command continues an upload that was
interrupted.

Examples:
  mtrain convert runs/first hf --to hf
  mtrain convert Llama-3.2-1B llama --to mtrain
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mdata import UsageError
from mdata.object_storage.address import address_of, is_address
from mdata.util.config_text import parse_size

from .console import Console, Parser


def add_arguments(parser: Parser) -> None:
    """See `mtrain convert --help`."""
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="a run folder, a checkpoint in it (both also in object storage), or a folder of another project",
    )
    parser.no_option = "mtrain convert SOURCE TARGET --to FORMAT: the new folder is the second word"
    add("target", metavar="TARGET", help="the new folder")
    add("--to", required=True, choices=("mtrain", "hf", "torch_dist", "mp_rank", "peft"), help="format of the target")
    add(
        "--checkpoint",
        default="latest",
        metavar="NAME",
        help='checkpoint of a run folder, such as "step-400" (default: latest)',
    )
    add(
        "--model-type",
        default="",
        metavar="TYPE",
        help="model_type of config.json (default: the one that fits the model)",
    )
    add("--tokenizer", default="", metavar="FOLDER", help="folder with the tokenizer (default: that of SOURCE)")
    add("--set", action="append", default=[], metavar="model.KEY=VALUE", help="setting that SOURCE does not record")
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the logits of both models (default: yes)",
    )
    add = parser.add_argument_group("for the weights that are written").add_argument
    add("--dtype", default="", choices=("fp32", "bf16", "fp16"), help="type of the stored weights (default: unchanged)")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of one weights file (default: 5GB)")
    add = parser.add_argument_group("for the Hugging Face hub (--to hf)").add_argument
    add("--push", default="", metavar="hf://OWNER/NAME", help="upload TARGET to a private repository")
    add("--public", action="store_true", help="create, or allow, a public repository")
    add = parser.add_argument_group("for Megatron-LM (torch_dist, mp_rank)").add_argument
    add("--no-optimizer", action="store_true", help="do not write the optimizer's state")
    add(
        "--optimizer-form",
        default="distributed",
        choices=("distributed", "adam"),
        help="torch_dist: form of the optimizer state (default: distributed)",
    )
    add("--tp", type=int, default=1, metavar="N", help="mp_rank: tensor-parallel ranks (default: 1)")
    add("--pp", type=int, default=1, metavar="N", help="mp_rank: pipeline stages (default: 1)")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Convert, and print the result."""
    from trainer.checkpoint.location import location_of
    from trainer.convert.compare import check_text, token_ids_text
    from trainer.convert.convert import ConvertOptions, convert
    from trainer.convert.hf_config import families_of_types
    from trainer.convert.push import check_push, push

    to_push, public = arguments.push, arguments.public
    if idle := "--push" if to_push and arguments.to != "hf" else "--public" if public and not to_push else "":
        raise UsageError(f"{idle} would be ignored", expected="--to hf with --push hf://OWNER/NAME", fix="leave it out")
    if to_push:
        check_push(to_push, public=public)
    if arguments.model_type not in ("", *(types := families_of_types())):
        raise UsageError(f"no model type {arguments.model_type!r}", expected=f"one of {', '.join(types)}")
    options = ConvertOptions(
        to=arguments.to,
        dtype=arguments.dtype,
        max_shard_bytes=_size(arguments.max_shard_size),
        checkpoint=arguments.checkpoint,
        model_type=arguments.model_type,
        settings=tuple(arguments.set),
        tokenizer=arguments.tokenizer,
        optimizer=not arguments.no_optimizer,
        optimizer_form=arguments.optimizer_form,
        tp=arguments.tp,
        pp=arguments.pp,
        check=arguments.check,
    )
    with console.progress() as progress:
        result = convert(location_of(arguments.source), _target(arguments.target), options=options, progress=progress)
        if to_push:
            result |= {"push": push(_target(arguments.target), to_push, public=public, tell=progress.note)}
    lines = [arguments.target, check_text(result["check"])]
    if (ids := result["token_ids"]) is not None and not ids.get("different", 1):
        lines.append(token_ids_text(ids))
    lines += [f"uploaded to {to_push}"] if to_push else []
    console.result("\n".join(lines), result)


def _target(text: str) -> Path:
    if is_address(text) or address_of(text):
        raise UsageError(
            f"{text} is an address", expected="a folder on a disk", fix="convert there, and copy the folder"
        )
    return Path(text)


def _size(text: str) -> int:
    """The number of bytes in a text such as "5GB"."""
    size = parse_size(text)
    if size is None:
        raise UsageError(f"--max-shard-size {text!r} is not a size", expected="such as 5GB, 500MB or 2GiB")
    return size
