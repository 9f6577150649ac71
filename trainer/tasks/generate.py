"""Text from a trained model: greedy, or top-p sampling (Holtzman et al. 2020).

Every draw is f(seed, prompt number, position), so a text can be had again whatever the layout or the other prompts.
Thin on purpose: the whole context is computed anew for every token (no key-value cache yet), and a context longer
than the training sequence keeps its last tokens. Any number of ranks may serve any checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mdata
from mdata import DamageError, UsageError
from mdata.errors import os_errors_named
from mdata.progress import SILENT, Progress
from mdata.tokenizers.base.tokenizer import TextRefused
from mdata.tokenizers.registry import build_tokenizer
from mdata.util import atomic_io
from mdata.util.random_keys import derive_key
from trainer.checkpoint.folder import ResumePoint, find_checkpoint, run_state
from trainer.checkpoint.location import Location, checkpoints_of
from trainer.checkpoint.stored_files import files_of, folders_in
from trainer.config.parse import load_config
from trainer.config.sections import MeshSection
from trainer.errors import out_of_memory_in
from trainer.models.stage import only_tokens
from trainer.parallel.collectives import all_gather, all_reduce_, start_receive_, start_send
from trainer.parallel.world import World
from trainer.plan.check import DataFacts
from trainer.plan.plan import make_plan
from trainer.run.load_model import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Args:
        max_tokens: generated for each prompt at most; the end-of-document token ends a text earlier.
        greedy: always the likeliest token; the next two are not used then.
        temperature: divides the logits; above 0.
        top_p: the likeliest tokens that together reach this probability take part; in (0, 1].
        seed: of the draws.
    """

    max_tokens: int = 64
    greedy: bool = False
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 1234

    def problems(self) -> list[str]:
        """Everything that is wrong with these numbers."""
        rules = [
            (self.max_tokens >= 1, f"max_tokens={self.max_tokens} is below 1"),
            (self.temperature > 0, f"temperature={self.temperature} is not above 0; use greedy instead of 0"),
            (0 < self.top_p <= 1, f"top_p={self.top_p} is not in (0, 1]"),
        ]
        return [text for holds, text in rules if not holds]


@dataclass(frozen=True, slots=True)
class Generated:
    """One text: the prompt, what the model added, and the checkpoint's step."""

    prompt: str
    text: str
    step: int


def generate(
    run_folder: Path,
    prompts: Sequence[str],
    *,
    sampling: Sampling,
    world: World,
    from_checkpoint: str = "latest",
    progress: Progress = SILENT,
) -> list[Generated]:
    """Continue each prompt with the model of a run; also written to generated.jsonl in the run folder.

    Args:
        run_folder: a folder that `train` wrote.
        from_checkpoint: "latest" or a name such as "step-400".
        progress: is notified which checkpoint it is where `latest` names none.

    Raises:
        UsageError: no such run or checkpoint, options out of range, or a prompt without tokens.
        DamageError: the checkpoint is damaged.
    """
    if problems := sampling.problems():
        raise UsageError("cannot generate: " + "; ".join(problems))
    folder = _checkpoint_folder(run_folder, from_checkpoint, progress)
    config = load_config(run_folder / "config.toml")
    tokenizer = run_tokenizer(run_folder)
    facts = DataFacts(
        vocab_size=tokenizer.vocab_size,
        largest_id=None,
        eod=tokenizer.eod,
        fingerprint=None,
        num_tokens=2**62,
    )
    # All ranks share one copy of the model, whatever layout trained it.
    config = dataclasses.replace(config, mesh=MeshSection(tp=world.mesh.tp, pp=world.mesh.pp))
    plan = make_plan(config, world.world_size, facts=facts)
    model = load_model(folder, config, plan=plan, world=world)
    step = run_state(folder).step
    out = []
    for number, prompt in enumerate(prompts):
        ids = _encode(tokenizer, prompt)
        choose = Chooser(sampling, number)
        new = continue_ids(model, ids, choose=choose, eod=tokenizer.eod, context=plan.sequence_length, world=world)
        out.append(Generated(prompt, _added_text(tokenizer, ids, new), step))
    if world.rank == 0:
        lines = "".join(
            json.dumps({"prompt": g.prompt, "text": g.text, "step": g.step}, ensure_ascii=False) + "\n" for g in out
        )
        atomic_io.atomic_write(run_folder / "generated.jsonl", lines.encode())
    return out


def run_tokenizer(run_folder: Path) -> mdata.Tokenizer:
    """The tokenizer of a run's data, from what `train` kept of it.

    Raises:
        UsageError: the run keeps none, because its data does not name one.
        DamageError: what it keeps is not the tokenizer of its data.
    """
    facts_path, folder = run_folder / "tokenizer_facts.json", run_folder / "tokenizer"
    with os_errors_named(f"reading the tokenizer of {run_folder}"):
        files = {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}
        facts_text = facts_path.read_bytes() if facts_path.exists() else None
    if facts_text is None:
        return _undescribed_tokenizer(run_folder, files)
    try:
        facts = json.loads(facts_text)
        name, options, expected = facts["type"], facts["options"], facts["fingerprint"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamageError(
            f"{facts_path} does not name a tokenizer", found=repr(error), fix="continue training, which rewrites it"
        ) from error
    tokenizer = build_tokenizer(name, files, options=options)
    if tokenizer.fingerprint != expected:
        raise DamageError(
            f"{folder} is not the tokenizer that {facts_path.name} describes",
            found=f"fingerprint {tokenizer.fingerprint}",
            expected=expected,
            fix="put the original files back",
        )
    return tokenizer


def _undescribed_tokenizer(run_folder: Path, files: Mapping[str, bytes]) -> mdata.Tokenizer:
    """That of a run of an older version, which knew one type and no options."""
    if "tokenizer.json" not in files:
        raise UsageError(
            f"{run_folder} has no tokenizer: the data of the run does not name one",
            fix="record it in the manifests of its corpora (mdata adopt), and start a new run; or for a converted "
            "folder, convert again with --tokenizer FOLDER",
        )
    return build_tokenizer("HuggingFaceTokenizer", files)


@torch.no_grad()
def continue_ids(
    model: Any, ids: Sequence[int], *, choose: Chooser, eod: int | None, context: int, world: World
) -> list[int]:
    """New token ids after `ids`, until the end-of-document token or sampling.max_tokens."""
    device = next(model.parameters()).device
    context_ids, new = list(ids), list[int]()
    while len(new) < choose.sampling.max_tokens:
        tokens_BS = torch.tensor([context_ids[-context:]], device=device)
        token = choose(next_logits(model, tokens_BS, world=world))
        if token == eod:
            break
        context_ids.append(token)
        new.append(token)
    return new


@out_of_memory_in("the forward pass of text generation", fix="shorter prompts and fewer --max-tokens, or more ranks")
def next_logits(model: Any, tokens_BS: Tensor, *, world: World) -> Tensor:
    """Logits after the last position of one row, over the whole vocabulary without padding: fp32[vocab_size].

    The row goes from stage to stage, and the logits of the last stage to all of them.
    """
    pp, batch = world.groups["pp"], only_tokens(tokens_BS)
    received = model.received(batch)
    for buffer in received:
        start_receive_(buffer, world.links[pp.rank - 1, pp.rank]).wait()
    if pp.rank + 1 == pp.size:
        local_V = model.logits(tokens_BS, received)[0, -1].float()
        return all_reduce_(all_gather(local_V, model.parallel.tp)[: model.shape.vocab_size].contiguous(), pp)
    for tensor in model(received, batch):
        start_send(tensor.contiguous(), world.links[pp.rank, pp.rank + 1]).wait()
    return all_reduce_(torch.zeros(model.shape.vocab_size, device=tokens_BS.device), pp)


class Chooser:
    """Picks the next token of one prompt; call it once a position."""

    def __init__(self, sampling: Sampling, prompt_number: int) -> None:
        self.sampling, self.prompt_number, self.position = sampling, prompt_number, 0

    def __call__(self, logits: Tensor) -> int:
        """The next token after fp32[vocab_size] logits."""
        if self.sampling.greedy:
            return int(logits.argmax())
        key = derive_key("mtrain generate v1", self.sampling.seed, self.prompt_number, self.position)
        self.position += 1
        return top_p_token(logits, self.sampling, uniform=key.below(2**53) / 2**53)


def top_p_token(logits: Tensor, sampling: Sampling, *, uniform: float) -> int:
    """The token at quantile `uniform` of the distribution cut to its top-p nucleus."""
    probability, token = (logits.double().cpu() / sampling.temperature).softmax(0).sort(descending=True, stable=True)
    cumulative = probability.cumsum(0)
    # The nucleus is the shortest head that reaches top_p; the likeliest token is always in it.
    size = int((cumulative < sampling.top_p).sum()) + 1
    size = min(size, len(token))
    target = uniform * cumulative[size - 1]
    return int(token[min(int((cumulative[:size] <= target).sum()), size - 1)])


def _encode(tokenizer: mdata.Tokenizer, prompt: str) -> list[int]:
    if not prompt.isascii() and prompt.encode(errors="replace").decode() != prompt:
        raise UsageError("the prompt is not UTF-8 text", found=repr(prompt[:80]))
    try:
        ids = tokenizer.encode_batch([prompt])[0].tolist()
    except TextRefused as refused:
        if prompt:
            raise UsageError(f"the prompt has no tokens: {refused.reason}", found=repr(prompt[:80])) from refused
        ids = []  # a tokenizer that knows no empty text
    if not ids:
        if tokenizer.eod is None:
            raise UsageError("the prompt has no tokens", found=repr(prompt), fix="give some text to continue")
        return [tokenizer.eod]  # the start of a document
    # A tokenizer that ends every text by itself would have us continue after the end of the document.
    ended = tokenizer.eod is not None and ids[-1] == tokenizer.eod and len(ids) > 1
    if ended and not prompt.endswith(tokenizer.decode(ids[-1:])):
        del ids[-1]
    return ids


def _added_text(tokenizer: mdata.Tokenizer, ids: Sequence[int], new: Sequence[int]) -> str:
    """The text of new tokens after others; alone, a SentencePiece-like decoder drops the space before the first."""
    before, full_text = tokenizer.decode(ids), tokenizer.decode([*ids, *new])
    return full_text[len(before) :] if full_text.startswith(before) else tokenizer.decode(new)


def _checkpoint_folder(run_folder: Path, name: str, progress: Progress) -> Location:
    root = checkpoints_of(run_folder)
    resume_point = find_checkpoint(root) if name == "latest" else ResumePoint(root / name)
    if resume_point.warning:
        progress.note(resume_point.warning)
    if resume_point.folder is None or not files_of(resume_point.folder).exists():
        have = sorted(name for name in folders_in(root) if name.startswith("step-"))
        raise UsageError(
            f"there is no checkpoint {name!r} in {root}",
            found=", ".join(have) or "no checkpoint",
            fix="train first (mtrain train), or name one of those found",
        )
    return resume_point.folder
