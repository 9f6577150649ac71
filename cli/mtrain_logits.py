"""Write the logits of a trained model after each token of given texts.

The file has a tensor for each line of the input, fp32 [tokens, vocabulary], named by the line's number from 0; --json
prints the token ids. The vocabulary has no padding, whatever the layout of the checkpoint or of the ranks. One line is
in memory at a time. In Python: trainer.Model.load(MODEL).logits(ids).

Examples:
  mtrain logits runs/first --input texts.jsonl --output x.safetensors
  mtrain logits Llama-3.2-1B --input texts.jsonl --output y.safetensors
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mdata.errors import UsageError, counted

from .console import Console
from .mtrain_model import add_model_arguments, opened, ran_on_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.tasks.loaded_model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain logits --help`."""
    add_model_arguments(parser, dp=False)
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help='lines of {"prompt": TEXT or [IDS]}')
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a new .safetensors file")
    parser.add_argument("--strict", action="store_true", help="refuse other keys in --input (default: ignore them)")
    parser.add_argument("--add-bos", action="store_true", help="begin a text with the begin-of-text token")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Compute, and write the file."""
    import torch

    from trainer.convert.links import TensorInfo
    from trainer.convert.safetensors_stream import write_safetensors
    from trainer.tasks.generate import check_prompts, read_prompts

    if arguments.output.exists():
        raise UsageError(f"{arguments.output} exists", fix="name a new file")
    prompts = read_prompts(arguments.input, strict=arguments.strict)
    if ran_on_ranks(arguments, console, command="logits"):
        return
    with opened(arguments, console, command="logits") as model:
        model.check_tokens()
        model.check_no_encoder()
        check_prompts(model, prompts, arguments.input)
        rows = [
            model.encode(prompt, add_bos=arguments.add_bos) if isinstance(prompt, str) else prompt
            for prompt in prompts.values()
        ]
        if model.world.is_main:
            sizes = ((str(number), (len(row), model.vocab_size)) for number, row in enumerate(rows))
            entries = {name: TensorInfo(size, torch.float32) for name, size in sizes}
            write_safetensors(arguments.output, entries, pieces=_pieces(model, rows))
            facts = {"output": str(arguments.output), "tokens": rows}
            console.result(f"{counted(len(rows), 'row')} in {arguments.output}", facts)
        else:
            for _ in _pieces(model, rows):
                pass  # the other ranks take part


def _pieces(model: Model, rows: list[list[int]]) -> Iterator[Tensor]:
    for row in rows:
        yield model.logits(row).cpu()
