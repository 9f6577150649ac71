"""Whether two folders hold the same model: logits of both on the same seeded tokens, in fp32 on the CPU.

A Hugging Face folder is run by transformers where that is installed, every other one by our model; so a mistake in a
table of names or in a configuration is seen, and not only one in copying. One model is in memory at a time.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mdata import DamageError
from mdata.util.machine_limits import available_bytes
from trainer.checkpoint.tiling import Rectangle
from trainer.convert.links import Source, TensorInfo
from trainer.convert.model_folder import ModelFolder, num_bytes
from trainer.errors import size_text
from trainer.models.family import family_of
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place

ROWS, TOKENS, SEED = 2, 64, 0
TOLERANCE = 1e-3  # of the largest logit; fp32 of two implementations differs by about 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Rounded:
    """A source as it is after storing it in a dtype of fewer bits."""

    source: Source
    dtype: torch.dtype

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `Source`."""
        return {name: TensorInfo(info.shape, self.dtype) for name, info in self.source.tensors.items()}

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        return self.source.read(name, box).to(self.dtype)


def compare_logits(before: ModelFolder, after: ModelFolder) -> dict[str, Any]:
    """The largest difference of two models' logits, or why they were not compared.

    Raises:
        DamageError: they are different models.
    """
    needed = 2 * num_bytes(_weights(before), torch.float32)
    if (free := available_bytes()) is not None and free < needed:
        return {"compared": False, "why": f"{size_text(needed)} of memory are needed, {size_text(free)} are free"}
    length = min(TOKENS, before.config.train.sequence_length)
    tokens_BS = torch.randint(
        min(before.vocab_size, after.vocab_size), (ROWS, length), generator=torch.Generator().manual_seed(SEED)
    )
    rows = min(before.vocab_size, after.vocab_size)
    first, second = (logits_of(model, tokens_BS)[..., :rows] for model in (before, after))
    difference, largest = (first - second).abs().max().item(), first.abs().max().item()
    if not difference <= TOLERANCE * max(largest, 1.0):
        raise DamageError(
            f"{after.path} does not compute what {before.path} computes",
            found=f"a largest difference of {difference:g} in logits of up to {largest:g}",
            expected=f"at most {TOLERANCE * max(largest, 1.0):g}",
            fix="report this with both configurations; nothing was left in the target",
        )
    return {
        "compared": True,
        "by": [runner(before), runner(after)],
        "tokens": tokens_BS.numel(),
        "largest_difference": difference,
        "largest_logit": largest,
    }


def runner(model: ModelFolder) -> str:
    """Which library computes a folder's logits."""
    return "transformers" if model.format == "hf" and importlib.util.find_spec("transformers") else "mtrain"


def logits_of(model: ModelFolder, tokens_BS: Tensor) -> Tensor:
    """fp32[B, S, vocab_size] of a folder's model."""
    if runner(model) == "transformers":
        return _by_transformers(model, tokens_BS)
    return _by_mtrain(model, tokens_BS)


@torch.no_grad()
def _by_mtrain(model: ModelFolder, tokens_BS: Tensor) -> Tensor:
    family, shape = family_of(model.config), model.shape
    device = torch.device("cpu")
    built = family.build(shape, Place(), groups={"tp": Group.single("tp")}, dtype=torch.float32, device=device).eval()
    named = dict(built.named_parameters())
    for spec in family.parameters(shape, Place()):
        flat = named[spec.name].data.zero_().view(-1)
        for piece in spec.pieces:
            found = model.source.read(f"weight/{piece.name}", (piece.start, piece.size)).float()
            flat[piece.offset : piece.offset + math.prod(piece.size)] = found.reshape(-1)
    logits: Tensor = built.logits(tokens_BS)[..., : shape.vocab_size]
    return logits


@torch.no_grad()
def _by_transformers(model: ModelFolder, tokens_BS: Tensor) -> Tensor:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    built = transformers.AutoModelForCausalLM.from_pretrained(
        str(model.path), dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    )
    logits: Tensor = built.eval()(tokens_BS).logits
    return logits


def _weights(model: ModelFolder) -> dict[str, TensorInfo]:
    return {name: info for name, info in model.source.tensors.items() if name.startswith("weight/")}
