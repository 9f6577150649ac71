"""`Model`: a trained model with its tokenizer, opened for inference from any folder that mtrain reads.

From a run folder or one of its checkpoints, in any layout; from a Hugging Face folder, without converting it; from a
checkpoint of Megatron-LM. All ranks of a world share one copy over tp and pp; along dp each rank has its own rows. A
row is padded on the right, where causal attention does not look, so a row in a batch equals the row alone; only where
experts have a capacity, padding counts in it, as in Megatron. What is unusual: log probabilities are reduced over tp by
maximum and sum; logits over the whole vocabulary are gathered only for requested positions. Generation with a key-value
cache is in engine.py.

Shapes: B rows, S tokens of the longest, V entries of the vocabulary without padding.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mdata
from mdata import DamageError, UsageError
from mdata.chat.templates import RecordedTemplate, template_of_facts
from mdata.errors import counted, os_errors_named
from mdata.progress import SILENT, Progress
from mdata.tokenizers.base.special_names import decoder_ends
from mdata.tokenizers.base.tokenizer import TextRefused
from mdata.tokenizers.registry import build_tokenizer
from trainer.checkpoint.folder import checkpoint_at
from trainer.checkpoint.load import load_state
from trainer.checkpoint.location import Location, checkpoints_of, location_of
from trainer.checkpoint.stored_files import files_of, folders_in
from trainer.config.sections import MeshSection, PrecisionSection, RunConfig
from trainer.convert.convert import DTYPES, open_model
from trainer.convert.hf_folder import find_tokenizer
from trainer.convert.model_folder import ModelFolder, fill_buffers, read_json
from trainer.convert.native import is_native
from trainer.errors import out_of_memory_in
from trainer.layers.linear import use_one_row_kernel
from trainer.models.family import family_of
from trainer.models.float8_layers import keep_float8_weights
from trainer.models.stage import Microbatch, Tensors, only_tokens
from trainer.optim.layout import make_layout
from trainer.optim.model_buffers import STATE, ModelBuffers
from trainer.optim.ownership import everything
from trainer.parallel.collectives import all_gather, all_reduce_, start_receive_, start_send
from trainer.parallel.mesh import Mesh
from trainer.parallel.params import Place
from trainer.parallel.placement import Placement
from trainer.parallel.world import World, join_world
from trainer.plan.check import DataFacts, layout_problems
from trainer.plan.plan import Plan, make_plan
from trainer.tasks.score import ScoredSpan, SpanScore, batches_by_length

GENERATION_CONFIG = "generation_config.json"
# Options that a Hugging Face folder may recommend, by our names.
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Scores(NamedTuple):
    """The scores of given rows, for each token from the second on.

    Args:
        log_prob_BS: fp32[B, S - 1]. greedy_BS: whether it is the likeliest token, the lowest id of equal ones.
        top_BSN: (log probabilities, tokens) of the n likeliest, largest first; None: not requested.
    """

    log_prob_BS: Tensor
    greedy_BS: Tensor
    top_BSN: tuple[Tensor, Tensor] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Model:
    """A model to run forward; see `load`.

    Args:
        module: this rank's stage. world: of all ranks.
        vocab_size: entries that may be chosen. rows: of the embedding; tokens of a prompt lie below.
        context: the longest row. step: of the checkpoint; None for a folder without steps, such as one of Hugging Face.
        tokenizer: None where the folder has none; only token ids are taken then.
        start: the decoder's first token, if an encoder reads the prompt; None: the prompt is continued.
        reads: limit on the tokens that this encoder reads.
        ends: ids that end a text. bos: the id that begins one; None where the tokenizer has none.
        recommended: sampling options of the folder's generation_config.json.
        name: of the folder. run_folder: with its checkpoints, on a disk; None: another folder.
        weights: "fp8", or "": as in the folder.
        notes: for the user, a line each.
        fills_masks: whether it predicts masked tokens from both sides, not the next token.
        classes: the names of the classes of rows; (): it chooses one of several rows; None: it predicts tokens.
    """

    module: Any
    world: World
    vocab_size: int
    rows: int
    context: int
    step: int | None = None
    tokenizer: mdata.Tokenizer | None = None
    ends: frozenset[int] = frozenset()
    bos: int | None = None
    start: int | None = None
    reads: int = 0
    recommended: Mapping[str, float] = dataclasses.field(default_factory=dict)
    name: str = "model"
    run_folder: Path | None = None
    weights: str = ""
    notes: tuple[str, ...] = ()
    fills_masks: bool = False
    classes: tuple[str, ...] | None = None

    @classmethod
    def load(
        cls,
        path: str | Location,
        *,
        world: World | None = None,
        checkpoint: str = "latest",
        tokenizer: str = "",
        settings: Sequence[str] = (),
        dtype: str = "",
        weights: str = "",
        forward: bool = True,
        progress: Progress = SILENT,
    ) -> Model:
        """Open a folder and set up this rank's part of its model.

        Args:
            path: a run folder or one of its checkpoints, a Hugging Face folder, or a checkpoint of Megatron-LM.
            world: the ranks that share it; None: this process alone.
            checkpoint: of a run folder: "latest" or a name such as "step-400".
            tokenizer: a folder with the tokenizer; "": that of `path`.
            settings: `model.key=value` for what a checkpoint of Megatron-LM does not state.
            dtype: "fp32", "bf16" or "fp16"; "": that of the run; of a foreign folder fp32 on the CPU and that of its
                weights on a GPU.
            weights: "fp8": those of linear layers are kept and multiplied in FP8; "": in `dtype`.
            forward: whether the model will be run; otherwise no weights are read, and `module` is None.
            progress: is notified of what is unusual about the folder.

        Raises:
            UsageError: no such folder or checkpoint, a format that is not known, or a tokenizer that does not fit.
            DamageError: files are incomplete or damaged.
        """
        if weights not in ("", "fp8"):
            raise UsageError(f"--weights {weights} is not known", expected="fp8")
        location = location_of(path) if isinstance(path, str) else path
        _check_checkpoint(location, checkpoint)
        folder = open_model(location, checkpoint=checkpoint, settings=settings)
        world = world or join_world(Mesh(1), placement=Placement())
        for note in folder.notes:
            progress.note(note)
        spoken = _tokenizer_of(folder, location, named=tokenizer)
        rows = folder.vocab_size
        # Megatron-LM pads the vocabulary; transformers chooses among all rows of its models, and so do we.
        padded = folder.format in ("torch_dist", "mp_rank")
        facts, classes = _generation_facts(folder), folder.family.classes(folder.config)
        start, end = folder.family.decoder_start(folder.config, spoken), None
        if spoken is not None:
            end = spoken.eod if start is None else decoder_ends(spoken)[1]
        ends = facts.ends or frozenset(() if end is None else (end,))
        return cls(
            module=_set_up(folder, world, dtype=_dtype(folder, world, dtype), weights=weights) if forward else None,
            world=world,
            vocab_size=min(rows, spoken.vocab_size) if padded and spoken else rows,
            rows=rows,
            context=_context(folder.config),
            step=None if folder.format in ("hf", "meta") else folder.run.step,
            tokenizer=spoken,
            ends=ends,
            bos=None if spoken is None else spoken.bos,
            start=start,
            reads=folder.config.train.sequence_length,
            recommended=facts.recommended,
            name=str(location).rstrip("/").rpartition("/")[2],
            run_folder=_run_folder(location),
            weights=weights,
            notes=folder.notes,
            fills_masks=folder.family.predicts == "masked" and classes is None,
            classes=classes,
        )

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits after each token of one row, over the whole vocabulary without padding: fp32[S, V].

        Raises:
            UsageError: a row without tokens, longer than the context, or with ids outside the model's; or a model that
                classifies rows, or whose encoder reads a text.
        """
        self.check_tokens()
        self.check_no_encoder()
        return self._gathered(self._forward(self._padded([ids])), range(len(ids)), row=0)

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]], *, top: int = 0, bias: Mapping[int, float] | None = None) -> Scores:
        """The log probability of each token after those before it; values beyond a row's end have no meaning.

        A row may have one token more than the context: its last one is only predicted.

        Args:
            top: number of likeliest tokens to return as well. bias: token -> value added to its logit.

        Raises:
            UsageError: as `logits`.
        """
        self.check_continues()
        self.check_no_encoder()
        whole_BS = self._padded(rows, most=self.context + 1)
        tokens_BS, labels_BS = whole_BS[:, :-1], whole_BS[:, 1:]
        local_BSV = self._forward(tokens_BS) if tokens_BS.numel() else None
        return self.scores(local_BSV, labels_BS, top=top, biases=[bias or {}] * len(rows))

    def scores(
        self, local_BSV: Tensor | None, labels_BS: Tensor, *, top: int, biases: Sequence[Mapping[int, float]]
    ) -> Scores:
        """The scores of the labels by the logits of the last stage (None on the others); returned on all ranks.

        Args:
            local_BSV: this rank's entries, with padding; overwritten. biases: of each row, as for `score`.
        """
        shape, device, top = tuple(labels_BS.shape), labels_BS.device, min(top, self.vocab_size)
        if local_BSV is None:
            parts: tuple[Tensor, ...] = (torch.zeros(shape, device=device), torch.zeros(shape, device=device))
            if top:
                tops = torch.zeros(*shape, top, device=device)
                parts += (tops, tops.long())
        else:
            local_BSV = local_BSV.float()
            first = self._columns(local_BSV)
            for row, bias in enumerate(biases):
                for token, more in bias.items():
                    if 0 <= token - first < local_BSV.shape[-1]:
                        local_BSV[row, :, token - first] += more
            parts = self._reduced(local_BSV, labels_BS, first=first, top=top)
        pp = self.world.groups["pp"]
        log_prob_BS, greedy_BS, *top_BSN = (all_reduce_(part.contiguous(), pp) for part in parts)
        return Scores(log_prob_BS, greedy_BS > 0, (top_BSN[0], top_BSN[1]) if top else None)

    def score_spans(
        self, spans: Sequence[ScoredSpan], *, batch_size: int = 8, greedy: bool = True, progress: Progress = SILENT
    ) -> list[SpanScore]:
        """The score of each span, on all ranks; `greedy` comes with the log probabilities.

        Raises:
            UsageError: a span is longer than the context and one token, or batch_size is below 1.
        """
        if batch_size < 1:
            raise UsageError(f"a batch of {batch_size} rows", expected="1 or more (--batch-size)")
        dp = self.world.groups["dp"]
        sums = torch.zeros(len(spans), 2, dtype=torch.float64, device=self.world.device)
        progress.begin("score", len(spans), unit="rows")
        for number, batch in enumerate(batches_by_length(spans, batch_size)):
            if number % dp.size == dp.rank:
                scores = self.score([spans[i].ids for i in batch])
                for row, i in enumerate(batch):
                    first, stop = max(0, spans[i].first - 1), len(spans[i].ids) - 1
                    sums[i, 0] = scores.log_prob_BS[row, first:stop].double().sum()
                    sums[i, 1] = scores.greedy_BS[row, first:stop].all()
            progress.advance(len(batch))
        progress.end()
        return [SpanScore(log_prob, greedy > 0) for log_prob, greedy in all_reduce_(sums, dp).tolist()]

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """The ids of a text, such as a prompt; an empty one is the beginning of a document.

        Args:
            add_bos: begin with the begin-of-text id, or with that of a document's end where the tokenizer has none.

        Raises:
            UsageError: the text cannot be tokenized, or the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise UsageError(
                f"{self.name} has no tokenizer, so text cannot become token ids",
                found=repr(text[:80]),
                fix="name one with --tokenizer FOLDER, or give token ids",
            )
        return prompt_ids(self.tokenizer, text, bos=self.bos, add_bos=add_bos)

    def world_count(self, count: int) -> int:
        """The main rank's number, on all ranks."""
        value = torch.tensor([count if self.world.is_main else 0], device=self.world.device)
        for axis in ("tp", "pp", "dp"):
            if axis in self.world.groups:
                all_reduce_(value, self.world.groups[axis])
        return int(value)

    def check_continues(self) -> None:
        """Refuse a model that does not predict the next token.

        Raises:
            UsageError: it predicts masked ones, or none.
        """
        self.check_tokens()
        if self.fills_masks:
            raise UsageError(
                f"{self.name} predicts masked tokens, and not the next one",
                expected="a model that continues texts, such as a GPT",
                fix="mtrain generate fills the masks of a prompt: --prompt 'The capital of [MASK] is Paris.'",
            )

    def check_tokens(self) -> None:
        """Refuse a model that predicts no tokens.

        Raises:
            UsageError: it classifies rows.
        """
        if self.classes is not None:
            raise UsageError(
                f"{self.name} {'classifies rows' if self.classes else 'chooses one of several rows'}",
                expected="a model that predicts tokens",
                fix=f"mtrain eval MODEL --task {'classify' if self.classes else 'race'} --data FILE gives accuracy and "
                "predictions",
            )

    def check_no_encoder(self) -> None:
        """Refuse a model whose encoder reads a text before its decoder writes another.

        Raises:
            UsageError: it is one; the probability of a text's tokens would be that of tokens that it has read.
        """
        if self.start is not None:
            raise UsageError(
                f"{self.name} has no probabilities of the text that its encoder reads",
                expected="a model that continues texts, such as a GPT",
                fix="mtrain generate --log-probs gives those of what its decoder writes",
            )

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse anything but token ids of this model.

        Raises:
            UsageError: names the first invalid one.
        """
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise UsageError("a token is not an integer", found=repr(token)[:80])
            if not 0 <= token < self.rows:
                raise UsageError(
                    f"token {token} is outside the vocabulary", expected=f"0 to {self.rows - 1}, as in {self.name}"
                )

    def _padded(self, rows: Sequence[Sequence[int]], *, most: int = 0) -> Tensor:
        most = most or self.context
        for row in rows:
            self.check_ids(row)
            if not 0 < len(row) <= most:
                raise UsageError(
                    f"a row of {len(row):,} tokens does not fit the model",
                    expected=f"1 to {most:,}; the context of {self.name} is {self.context:,}",
                )
        longest = max(map(len, rows))
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        return torch.tensor(padded, device=self.world.device)

    def class_logits(self, batch: Microbatch) -> Tensor:
        """Of a model with `classes`: the logits of each sample, on all ranks: fp32[samples, classes or choices]."""
        pp = self.world.groups["pp"]
        logits = self._staged(batch, lambda received: self.module.class_logits(batch, received))
        if logits is None:
            rows = len(batch.tokens_BS)
            shape = (rows // batch.choices, batch.choices) if batch.choices else (rows, len(self.classes or ()))
            logits = torch.zeros(shape, device=self.world.device)
        return all_reduce_(logits, pp)

    def _forward(self, tokens_BS: Tensor) -> Tensor | None:
        """Logits of this rank's entries of the vocabulary, with padding, on the last stage; None on the others."""
        return self._staged(only_tokens(tokens_BS), lambda received: self.module.logits(tokens_BS, received))

    @torch.no_grad()
    def _staged(self, batch: Microbatch, last: Callable[[Tensors], Tensor]) -> Tensor | None:
        """Pass tensors through the stages; returns the last stage's result, None on the others."""
        with out_of_memory_in("the forward pass of a model", fix="shorter or fewer rows (--batch-size), or more ranks"):
            pp, links = self.world.groups["pp"], self.world.links
            received = self.module.received(batch)
            for buffer in received:
                start_receive_(buffer, links[pp.rank - 1, pp.rank]).wait()
            if pp.rank + 1 == pp.size:
                return last(received)
            for tensor in self.module(received, batch):
                start_send(tensor.contiguous(), links[pp.rank, pp.rank + 1]).wait()
            return None

    def _gathered(self, local_BSV: Tensor | None, positions: range, *, row: int) -> Tensor:
        local = None if local_BSV is None else local_BSV[row, positions.start : positions.stop]
        return self.whole_vocabulary(local, len(positions))

    def gathered_vocabulary(self, local_BV: Tensor) -> Tensor:
        """On the last stage: the logits of all tp ranks without padding, on each of them: fp32[B, V]."""
        tp = self.world.groups["tp"]
        if tp.size == 1:
            return local_BV[:, : self.vocab_size].float()
        whole_VB = all_gather(local_BV.float().t().contiguous(), tp)
        return whole_VB[: self.vocab_size].t().contiguous()

    def whole_vocabulary(self, local_BV: Tensor | None, num_rows: int) -> Tensor:
        """The same on all ranks; those that are not on the last stage pass None."""
        pp = self.world.groups["pp"]
        if local_BV is None:
            return all_reduce_(torch.zeros(num_rows, self.vocab_size, device=self.world.device), pp)
        return all_reduce_(self.gathered_vocabulary(local_BV).contiguous(), pp)

    def _columns(self, local_BSV: Tensor) -> int:
        """The first entry of the vocabulary that this rank holds; entries of padding get no probability."""
        first = self.world.groups["tp"].rank * local_BSV.shape[-1]
        local_BSV[..., max(0, self.vocab_size - first) :] = -math.inf
        return first

    def _reduced(self, local_BSV: Tensor, labels_BS: Tensor, *, first: int, top: int) -> tuple[Tensor, ...]:
        """Log probability of the labels, 1 where they are the likeliest; with `top`, values and ids of the best."""
        tp, width = self.world.groups["tp"], local_BSV.shape[-1]
        largest_BS = all_reduce_(local_BSV.amax(-1), tp, op="max")
        total_BS = all_reduce_((local_BSV - largest_BS.unsqueeze(-1)).exp_().sum(-1), tp)
        logarithm_BS = largest_BS + total_BS.log()
        ours_BS = (labels_BS >= first) & (labels_BS < first + width)
        at_BS = (labels_BS - first).clamp(0, width - 1).unsqueeze(-1)
        label_BS = all_reduce_(torch.where(ours_BS, local_BSV.gather(-1, at_BS).squeeze(-1), 0.0), tp)
        ids_V = torch.arange(first, first + width, device=local_BSV.device)
        best_BS = -torch.where(local_BSV == largest_BS.unsqueeze(-1), ids_V, width * tp.size).amin(-1)
        best_BS = -all_reduce_(best_BS, tp, op="max")
        per_token = label_BS - logarithm_BS, (best_BS == labels_BS).float()
        if not top:
            return per_token
        values, places = local_BSV.sort(dim=-1, descending=True, stable=True)
        count = min(top, width)
        mine = (values[..., :count] - logarithm_BS.unsqueeze(-1), ids_V[places[..., :count]])
        values, ids = (all_gather(part.movedim(-1, 0).contiguous(), tp).movedim(0, -1) for part in mine)
        values, places = values.sort(dim=-1, descending=True, stable=True)
        return *per_token, values[..., :top], ids.gather(-1, places)[..., :top]


def prompt_ids(tokenizer: mdata.Tokenizer, prompt: str, *, bos: int | None = None, add_bos: bool = False) -> list[int]:
    """The ids of a text to continue; see `Model.encode`."""
    if not prompt.isascii() and prompt.encode(errors="replace").decode() != prompt:
        raise UsageError("the prompt is not UTF-8 text", found=repr(prompt[:80]))
    try:
        ids = tokenizer.encode_batch([prompt])[0].tolist()
    except TextRefused as refused:
        if prompt:
            raise UsageError(f"the prompt has no tokens: {refused.reason}", found=repr(prompt[:80])) from refused
        ids = []  # a tokenizer that refuses an empty text
    begin = tokenizer.eod if bos is None else bos
    # With a tokenizer that ends every text, the continuation would come after the end of the document.
    ended = tokenizer.eod is not None and len(ids) > 1 and ids[-1] == tokenizer.eod
    if ended and not prompt.endswith(tokenizer.decode(ids[-1:])):
        del ids[-1]
    if ids and not (add_bos and ids[0] != begin):
        return ids
    if begin is None:
        raise UsageError(
            "the prompt has no tokens" if not ids else "the tokenizer has no token that begins a text",
            found=repr(prompt[:80]),
            fix="give some text to continue" if not ids else "leave --add-bos out",
        )
    return [begin, *ids]


def _context(config: RunConfig) -> int:
    """The longest row: that of training, or of the weights that a run began with, whose own rows may be shorter."""
    begun_with = config.model.max_position if config.checkpoint.init_from else None
    return max(begun_with or 0, config.train.sequence_length)


def run_tokenizer(run_folder: Path) -> mdata.Tokenizer:
    """The tokenizer of a run's data, from the files that `train` stored.

    Raises:
        UsageError: the run stores none, because its data does not name one. DamageError: the stored files are not the
            tokenizer of its data.
    """
    facts_path, folder = run_folder / "tokenizer_facts.json", run_folder / "tokenizer"
    with os_errors_named(f"reading the tokenizer of {run_folder}"):
        files = {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}
        kept = facts_path.read_bytes() if facts_path.exists() else None
    if kept is None:
        return _undescribed_tokenizer(run_folder, files)
    try:
        facts = json.loads(kept)
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


def template_of_run(run_folder: Path) -> RecordedTemplate | None:
    """The chat template that made a run's conversations; None: there were none, or it is the tokenizer's own."""
    path = run_folder / "tokenizer_facts.json"
    facts = read_json(path, subject="the template of a run") if path.is_file() else {}
    return template_of_facts(facts)


def _undescribed_tokenizer(run_folder: Path, files: Mapping[str, bytes]) -> mdata.Tokenizer:
    """The tokenizer of a run of an older version, which had one type and no options."""
    if "tokenizer.json" not in files:
        raise UsageError(
            f"{run_folder} has no tokenizer: the data of the run does not name one",
            fix="record it in the manifests of its corpora (mdata adopt), and start a new run; or for a converted "
            "folder, mtrain convert again with --tokenizer FOLDER",
        )
    return build_tokenizer("HuggingFaceTokenizer", files)


class _GenerationFacts(NamedTuple):
    ends: frozenset[int]
    recommended: Mapping[str, float]


def _generation_facts(folder: ModelFolder) -> _GenerationFacts:
    """The generation options of a Hugging Face folder, where several ids may end a text."""
    if folder.format != "hf" or not isinstance(folder.path, Path):
        return _GenerationFacts(frozenset(), {})
    path = folder.path / GENERATION_CONFIG
    said = read_json(path, subject="the generation settings") if path.is_file() else {}
    ends = said.get("eos_token_id")
    if ends is None:
        path = folder.path / "config.json"
        ends = read_json(path, subject="the model's configuration").get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < folder.vocab_size:
            raise DamageError(
                f"{path} names an end-of-text token that the model does not have",
                found=f"eos_token_id {ends!r}",
                expected=f"ids from 0 to {folder.vocab_size - 1}",
                fix="restore the file from a copy",
            )
    numbers = {
        key: said[key]
        for key in _RECOMMENDED
        if isinstance(said.get(key), int | float) and not isinstance(said[key], bool)
    }
    return _GenerationFacts(frozenset(ids), numbers)


def _tokenizer_of(folder: ModelFolder, location: Location, *, named: str) -> mdata.Tokenizer | None:
    if named:
        config = find_tokenizer(Path(named))
        if config is None:
            raise UsageError(
                f"--tokenizer {named}: there is no tokenizer in it",
                fix="give a folder with tokenizer.json, vocab.json and merges.txt, or tokenizer.model",
            )
    elif (run_folder := _run_folder(location)) is not None and (run_folder / "tokenizer").is_dir():
        return run_tokenizer(run_folder)
    else:
        config = folder.tokenizer
    if config is None:
        return None
    tokenizer = build_tokenizer(config.name, config.files, options=config.options)
    if tokenizer.vocab_size > folder.vocab_size:
        raise UsageError(
            f"the tokenizer of {named or folder.path} does not fit the model",
            found=f"{tokenizer.vocab_size} ids",
            expected=f"at most the {counted(folder.vocab_size, 'row')} of its embedding",
            fix="name the tokenizer that the model was trained with (--tokenizer FOLDER)",
        )
    return tokenizer


def _run_folder(location: Location) -> Path | None:
    return location if isinstance(location, Path) and (location / "config.toml").is_file() else None


def _check_checkpoint(location: Location, name: str) -> None:
    """Check that a run has the checkpoint; the error names those that it has."""
    if isinstance(location, Path) and not is_native(location):
        if name != "latest" and location.is_dir():
            raise UsageError(
                f"--checkpoint {name}: a run folder alone has checkpoints", found=str(location), fix="leave it out"
            )
        return
    checkpoint = checkpoint_at(location, name=name).folder
    if checkpoint is None or not files_of(checkpoint).exists():
        root = checkpoints_of(location) if isinstance(location, Path) else location
        have = sorted(name for name in folders_in(root) if name.startswith("step-"))
        raise UsageError(
            f"there is no checkpoint {name!r} in {root}",
            found=", ".join(have) or "no checkpoint",
            fix="name one of those found" if have else "give the folder of a run that has trained (run.folder)",
        )


def _dtype(folder: ModelFolder, world: World, name: str) -> str:
    if name and name not in DTYPES:
        raise UsageError(f"--dtype {name} is not known", expected=f"one of {', '.join(DTYPES)}")
    if name:
        return name
    if folder.format == "mtrain":
        return folder.config.precision.dtype
    stored = next((key for key, dtype in DTYPES.items() if dtype == folder.weights_dtype), "fp32")
    return stored if world.device.type == "cuda" else "fp32"


@out_of_memory_in("setting up the model", fix="more ranks: each holds a part of the model")
def _set_up(folder: ModelFolder, world: World, *, dtype: str, weights: str) -> Any:
    """This rank's stage with its weights."""
    tp, pp = world.groups["tp"], world.groups["pp"]
    config = _for_these_ranks(folder.config, tp.size, pp.size, dtype=dtype)
    facts = DataFacts(vocab_size=folder.vocab_size, largest_id=None, eod=None, fingerprint=None, num_tokens=2**62)
    check_ranks(folder, tp.size, pp.size)
    plan = make_plan(config, tp.size * pp.size, facts=facts)
    if folder.format == "mtrain" and folder.adapter is None:
        module = load_model(folder.path, config, plan=plan, world=world)
    else:
        module = _from_source(folder, config, plan, world=world, dtype=DTYPES[dtype])
    if weights == "fp8":
        keep_float8_weights(module, device=world.device)
    else:
        use_one_row_kernel(module, device=world.device)
    return module.eval()


@out_of_memory_in("setting up the model", fix="more ranks: each holds a part of the model")
def load_model(folder: Location, config: RunConfig, *, plan: Plan, world: World) -> Any:
    """This rank's stage with its weights alone: no optimizer, no sequence parallelism, from a checkpoint of any layout.

    To continue training from a checkpoint, use Engine.load, which reads the optimizer's state, too.

    Args:
        plan: with one stage for each pipeline rank.
    """
    family, tp = family_of(config), world.groups["tp"]
    (place,) = plan.pipeline.places(world.groups["pp"].rank, Place(tp_rank=tp.rank, tp_size=tp.size))
    layout = make_layout(family.parameters(plan.shape, place), {"data": 1, "edp": 1})
    dtype = (DTYPES | {"fp64": torch.float64})[config.precision.dtype]
    main = torch.promote_types(dtype, torch.float32)
    weights = load_state(folder, {"weight": everything(layout)}, dtype=main)["weight"]
    model = family.build(plan.shape, place, groups={"tp": tp}, dtype=dtype, device=world.device)
    named = dict(model.named_parameters())
    for slot in layout.slots:
        flat = weights[slot.start : slot.start + slot.spec.numel]
        named[slot.spec.name].data.copy_(flat.view(slot.spec.shape))
    if specs := family.buffers(plan.shape, place):
        buffers = ModelBuffers(model, specs, device=world.device)
        buffers.values.copy_(load_state(folder, {STATE: buffers.holds}, dtype=torch.float32)[STATE])
    return model.eval()


def _from_source(folder: ModelFolder, config: RunConfig, plan: Plan, *, world: World, dtype: torch.dtype) -> Any:
    """This rank's stage from a folder of another project."""
    tp, pp = world.groups["tp"], world.groups["pp"]
    (place,) = plan.pipeline.places(pp.rank, Place(tp_rank=tp.rank, tp_size=tp.size))
    family = family_of(config)
    module = family.build(plan.shape, place, groups={"tp": tp}, dtype=dtype, device=world.device)
    named = dict(module.named_parameters())
    for spec in family.parameters(plan.shape, place):
        flat = named[spec.name].data.zero_().view(-1)
        for piece in spec.pieces:
            stored = folder.source.read(f"weight/{piece.name}", (piece.start, piece.size))
            flat[piece.offset : piece.offset + math.prod(piece.size)] = stored.reshape(-1).to(flat)
    fill_buffers(module, folder, family.buffers(plan.shape, place), device=world.device)
    return module


def check_ranks(folder: ModelFolder, tp: int, pp: int) -> None:
    """Refuse ranks over which the model cannot be divided.

    Raises:
        UsageError: names the sizes that do not fit, and those that do.
    """

    def problems(tp: int, pp: int) -> list[str]:
        return layout_problems(_for_these_ranks(folder.config, tp, pp, dtype=folder.config.precision.dtype), tp * pp)

    if wrong := problems(tp, pp):
        fit_tp = [str(size) for size in range(1, max(tp, 8) + 1) if not problems(size, 1)]
        fit_pp = [str(size) for size in range(1, max(pp, 8) + 1) if not problems(1, size)]
        raise UsageError(
            f"{folder.path} cannot be divided over tp={tp} x pp={pp} ranks",
            found="; ".join(problem.partition(";")[0] for problem in wrong),
            expected=f"tp {' or '.join(fit_tp)}; pp {' or '.join(fit_pp)}",
        )


def _for_these_ranks(config: RunConfig, tp: int, pp: int, *, dtype: str) -> RunConfig:
    """The configuration with the layout of the ranks that use the model, whatever layout trained it."""
    precision: Any = config.precision if config.precision.dtype == dtype else PrecisionSection(dtype=dtype)  # type: ignore[arg-type]
    return dataclasses.replace(config, mesh=MeshSection(tp=tp, pp=pp), precision=precision)
