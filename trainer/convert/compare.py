"""Checks that two folders hold the same model: compares logits on the same seeded tokens, in fp32 on the CPU.

A Hugging Face folder is run by transformers if that is installed, every other one by our model. So a mistake in a table
of names or in a configuration is found too; if our model runs both, only mistakes in copying are, and the result says
so. One model is in memory at a time. The tokenizer of a folder that was written for transformers is compared as well:
for some families transformers keeps only the vocabulary of its files.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdata import DamageError, UsageError
from mdata.tokenizers.base.self_check_texts import byte_level_texts
from mdata.tokenizers.base.tokenizer import TextRefused, TokenizerConfig
from mdata.tokenizers.registry import build_tokenizer
from mdata.util.machine_limits import available_bytes
from mdata.util.stop_signals import LibraryError, library_errors
from trainer.checkpoint.tiling import Rectangle
from trainer.convert.hf_config import hugging_face
from trainer.convert.links import Source, TensorInfo
from trainer.convert.masked_tokenizer import JSON
from trainer.convert.model_folder import ModelFolder, fill_buffers, num_bytes
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


def compare_logits(before: ModelFolder, after: ModelFolder, *, finite: bool = True) -> dict[str, Any]:
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
    if not first.isfinite().all():
        if not finite:
            return {"compared": False, "why": "its weights hold values that are not finite, and so do its logits"}
        raise DamageError(
            f"{before.path} computes logits that are not numbers",
            found=f"{int((~first.isfinite()).sum())} of {first.numel()} are not finite",
            fix="its weights hold numbers that overflow; convert an intact model, or choose another --dtype",
        )
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
        "formats": [before.format, after.format],
        "tokens": tokens_BS.numel(),
        "largest_difference": difference,
        "largest_logit": largest,
    }


def check_text(check: Mapping[str, Any]) -> str:
    """The comparison of logits, as one line for the user."""
    if not check["compared"]:
        return f"not checked: {check['why']}"
    difference = f"largest difference of logits {check['largest_difference']:.3g}"
    before, after = check["by"]
    if before != after:
        return f"checked: {difference} (source by {before}, target by {after})"
    if "hf" in check["formats"] and not has_transformers():
        return f"not checked: transformers is not installed, so mtrain computed both sides; {difference}"
    return f"copy checked: {difference}; mtrain computed both sides, and no other program read them"


def compare_token_ids(tokenizer: TokenizerConfig, folder: Path) -> dict[str, Any]:
    """Whether transformers' AutoTokenizer gives the ids of this tokenizer with the files in a folder."""
    if not has_transformers():
        return {"compared": False, "why": "transformers is not installed"}
    import transformers

    ours = build_tokenizer(tokenizer.name, tokenizer.files, options=tokenizer.options)
    plain = tokenizer.options.get("special_in_text") == "plain"
    expected: dict[str, list[int]] = {}
    for text in sorted(byte_level_texts((), () if plain else tuple(ours.special_ids)), key=len):
        with suppress(TextRefused):  # training could not contain it either
            expected[text] = ours.encode_batch([text])[0].tolist()
    # The ends of texts that only the copy adds were not there in training.
    definition, stored = tokenizer.files.get(JSON), folder / JSON
    same_ends = definition is None or not stored.is_file() or _ends(stored.read_bytes()) == _ends(definition)
    add, opened = same_ends and bool(tokenizer.options.get("include_special_tokens", True)), {"local_files_only": True}
    try:
        with library_errors():
            theirs = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **opened)
            different = [
                text for text, ids in expected.items() if list(theirs(text, add_special_tokens=add).input_ids) != ids
            ]
    except LibraryError as error:
        return {"compared": False, "why": f"transformers cannot open a tokenizer in it: {error}"}
    facts = {"compared": True, "by": type(theirs).__name__, "texts": len(expected), "different": len(different)}
    if different:
        text = different[0]
        facts |= {"text": text, "ids": theirs(text, add_special_tokens=add).input_ids, "training_ids": expected[text]}
        facts["has_json"] = JSON in tokenizer.files
    return facts


def _ends(definition: bytes) -> object:
    """What adds tokens to the ends of a text, of a tokenizer.json."""
    return json.loads(definition).get("post_processor")


def token_ids_text(result: Mapping[str, Any]) -> str:
    """The result of `compare_token_ids`, as one line for the user."""
    if not result["compared"]:
        return f"the tokenizer was not compared with that of transformers: {result['why']}"
    if not result["different"]:
        return f"token ids are those of training on {result['texts']} texts (by transformers' {result['by']})"
    remedy = "; PreTrainedTokenizerFast.from_pretrained gives those of tokenizer.json" if result["has_json"] else ""
    return (
        f"transformers' AutoTokenizer makes a {result['by']} of this folder, which gives {result['different']} of "
        f"{result['texts']} texts other ids than training did ({result['text'][:40]!r}: {result['ids'][:6]}, was "
        f"{result['training_ids'][:6]}){remedy}"
    )


def has_transformers() -> bool:
    """Whether transformers is installed, to run Hugging Face folders."""
    return importlib.util.find_spec("transformers") is not None


def runner(model: ModelFolder) -> str:
    """Which library computes a folder's logits."""
    return "transformers" if model.format == "hf" and has_transformers() else "mtrain"


def logits_of(model: ModelFolder, tokens_BS: Tensor) -> Tensor:
    """fp32[B, S, vocab_size] of a folder's model; of one that classifies rows [B, classes]."""
    if runner(model) == "transformers":
        return _by_transformers(model, tokens_BS)
    return _by_mtrain(model, tokens_BS)


@torch.no_grad()
def _by_mtrain(model: ModelFolder, tokens_BS: Tensor) -> Tensor:
    logits: Tensor = build_model(model).logits(tokens_BS)[..., : model.vocab_size]
    return logits


@torch.no_grad()
def build_model(model: ModelFolder) -> Any:
    """A folder's model as a whole, in fp32 on the CPU."""
    family, shape = family_of(model.config), model.shape
    device = torch.device("cpu")
    built = family.build(shape, Place(), groups={"tp": Group.single("tp")}, dtype=torch.float32, device=device).eval()
    named = dict(built.named_parameters())
    for spec in family.parameters(shape, Place()):
        flat = named[spec.name].data.zero_().view(-1)
        for piece in spec.pieces:
            values = model.source.read(f"weight/{piece.name}", (piece.start, piece.size)).float()
            flat[piece.offset : piece.offset + math.prod(piece.size)] = values.reshape(-1)
    fill_buffers(built, model, family.buffers(shape, Place()), device=device)
    return built


@torch.no_grad()
def _by_transformers(model: ModelFolder, tokens_BS: Tensor) -> Tensor:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    more = {"local_files_only": True, "trust_remote_code": False, "attn_implementation": "eager"}
    try:
        with library_errors():
            name = hugging_face(model.config).auto_class(model.config)
            auto = getattr(transformers, name)
            built = auto.from_pretrained(str(model.path), dtype=torch.float32, **more).eval()
            # Both stacks read the same tokens, as in `logits` of our stages.
            read_too = {"decoder_input_ids": tokens_BS} if built.config.is_encoder_decoder else {}
            if built.config.model_type == "roberta":  # counts tokens but padding's, and one of these may be of its kind
                read_too = {"position_ids": torch.arange(tokens_BS.shape[1])[None] + built.config.pad_token_id + 1}
            chooses = name.endswith("ForMultipleChoice")  # among the rows of a sample
            logits: Tensor = built(tokens_BS[None] if chooses else tokens_BS, **read_too).logits
            logits = logits.T if chooses else logits
    except LibraryError as error:
        raise UsageError(
            f"transformers {transformers.__version__} cannot run {model.path}, which the result is compared with",
            found=str(error),
            fix="repair the folder, or convert without comparing (--no-check)",
        ) from error
    return logits


def _weights(model: ModelFolder) -> dict[str, TensorInfo]:
    return {name: info for name, info in model.source.tensors.items() if name.startswith("weight/")}
