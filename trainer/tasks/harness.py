"""A model for lm-evaluation-harness (the extra `eval`): tp, pp and dp, in this process.

The harness runs alike on every rank, as if it were the only one; rows are divided over the data-parallel ranks when
they are computed. Contexts are cut from the left as in HFLM, so that the same weights give the same numbers. As a
program, `python -m trainer.tasks.harness` is lm_eval's command with `--model mtrain` in its list of models.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mdata import UsageError
from mdata.errors import counted
from mdata.progress import SILENT, Progress
from trainer.parallel.collectives import gather_objects
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement, find_placement
from trainer.parallel.world import World, join_world, leave_at_the_end
from trainer.tasks.generate import GenerationRequest, answers_of
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling
from trainer.tasks.score import ScoredSpan

MOST_NEW = 256  # tokens of an answer if the task sets no limit, as in HFLM
# Options of a task's generation_kwargs with the same names here.
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model("mtrain")
class MtrainLM(TemplateLM):
    """The model interface of the harness; see the methods of its base class.

    Args:
        model: a folder (see `Model.load`), or an opened model.
        max_length: tokens of a row at most; None: the model's context.
        batch_size: rows that are computed together.
        tp, pp: ranks that share a folder's model; all ranks of torchrun beyond these divide the rows.
        options: further arguments of `Model.load`; others are the harness's own.
    """

    def __init__(
        self,
        model: str | Model,
        *,
        max_length: int | str | None = None,
        batch_size: int | str | None = None,
        progress: Progress = SILENT,
        tp: int | str = 1,
        pp: int | str = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        kept = {key: options[key] for key in ("checkpoint", "tokenizer", "dtype", "weights") if options.get(key)}
        self.model = model if isinstance(model, Model) else Model.load(model, world=_world(int(tp), int(pp)), **kept)
        if self.model.tokenizer is None:
            raise UsageError(f"{self.model.name} has no tokenizer", fix="name one with tokenizer=FOLDER")
        self._tokens = self.model.tokenizer
        longest = self.model.context
        self._length = longest if max_length is None else min(int(max_length), longest)
        self._batch_size = int(str(batch_size)) if str(batch_size).isdigit() else 8
        self._progress = progress
        bos = self.model.bos
        self._adds_bos = bos is not None and self.model.encode("a")[:1] == [bos]

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        token_id = self._tokens.eod if self._tokens.eod is not None else min(self.model.ends, default=None)
        if token_id is None:
            raise UsageError(f"{self.model.name} has no token that ends a text", fix="--tokenizer FOLDER with one")
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """The token from which the first token of a text is predicted."""
        return self.eot_token_id if self.model.bos is None else self.model.bos

    @property
    def max_length(self) -> int:
        """Tokens of a row at most."""
        return self._length

    @property
    def batch_size(self) -> int:
        """Rows that are computed together."""
        return self._batch_size

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches requests."""
        return self._tokens.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, with the begin-of-text id if the tokenizer adds it, unless the caller declines it."""
        if not string:
            return []
        ids, bos = self.model.encode(string), self.model.bos
        # A text that begins with the token itself does not get it twice.
        twice = ids[:2] == [bos, bos]
        return ids[1:] if self._adds_bos and (add_special_tokens is False or twice) else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        spans = []
        for _text, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UsageError(
                    f"a text of {len(continuation)} tokens cannot be scored", expected=f"1 to {self.max_length}"
                )
            ids = [*context, *continuation][-self.max_length - 1 :]
            spans.append(ScoredSpan(ids, len(ids) - len(continuation)))
        scores = self.model.score_spans(spans, batch_size=self.batch_size, progress=self._progress)
        return [(score.log_prob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log probability of each text, in windows that predict each token once."""
        owner, parts = list[int](), []
        for number, request in enumerate(requests):
            token_windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows = [(None, *make_disjoint_window(window)) for window in token_windows]
            owner += [number] * len(windows)
            parts += windows
        totals = [0.0] * len(requests)
        for number, (log_prob, _greedy) in zip(owner, self._loglikelihood_tokens(parts), strict=True):
            totals[number] += log_prob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to the task's stop strings."""
        asked = [self._request(number, *request.args) for number, request in enumerate(requests)]
        order = sorted(range(len(asked)), key=lambda i: (-len(asked[i].ids), i))
        dp, texts = self.model.world.groups["dp"], dict[int, str]()
        mine = order[dp.rank :: dp.size]
        self._progress.begin("generate", len(mine), unit="texts")
        for i, answer in zip(
            mine, answers_of(self.model, [asked[i] for i in mine], batch_size=self.batch_size), strict=True
        ):
            texts[i] = answer.text
            self._progress.advance(1)
        self._progress.end()
        every = {i: text for part in gather_objects(texts, dp) for i, text in part.items()}
        return [every[i] for i in range(len(asked))]

    def _request(self, number: int, context: str, options: Mapping[str, Any]) -> GenerationRequest:
        given = dict(normalize_gen_kwargs(dict(options), MOST_NEW))
        most = int(given["max_gen_toks"])
        if most >= self.max_length:
            raise UsageError(
                f"a task asks for {counted(most, 'new token')}",
                expected=f"fewer than {self.max_length}, the longest row of {self.model.name}",
                fix="max_gen_toks in the task's generation_kwargs",
            )
        rules: dict[str, Any] = {key: given[key] for key in _OPTIONS if given.get(key) is not None}
        if not given.get("do_sample"):
            rules["temperature"] = 0.0
        stop = tuple(text for text in given["until"] if text)
        ids = self.tok_encode(context) or [self.prefix_token_id]
        sampling = Sampling(**{"temperature": 1.0, "top_p": 1.0, **rules}, max_tokens=most, stop=stop)
        return GenerationRequest(ids=tuple(ids[-(self.max_length - most) :]), rules=sampling, number=number)


def _world(tp: int, pp: int) -> World:
    """The ranks that torchrun started, or this process alone."""
    place = find_placement(os.environ) or Placement()
    if min(tp, pp) < 1 or place.world_size % (tp * pp):
        raise UsageError(
            f"tp={tp} and pp={pp} cannot divide a model over {counted(place.world_size, 'rank')}",
            expected="a divisor of the number of ranks, at least 1",
            fix="torchrun --nproc-per-node N -m trainer.tasks.harness ...",
        )
    return join_world(Mesh(place.world_size, tp, pp=pp), placement=place)


def evaluate_tasks(
    model: Model,
    tasks: Sequence[str],
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    include_path: Path | None = None,
    log_samples: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """The harness's results of some tasks: {"results": task -> metric -> number, ...}; see its documentation.

    Only the first rank of a machine has them; on others there are no tasks in "results".

    Args:
        include_path: a folder with further tasks. log_samples: with each request and its answer.

    Raises:
        UsageError: there is no such task.
    """
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise UsageError(
            f"lm-evaluation-harness has no task {unknown[0]!r}", fix="lm_eval ls tasks lists them; --include-path DIR"
        )
    results: dict[str, Any] | None = simple_evaluate(
        model=MtrainLM(model, max_length=max_length, batch_size=batch_size, progress=progress),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        log_samples=log_samples,
        task_manager=manager,
        bootstrap_iters=0,
    )
    return {"results": {}} if results is None else results


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
    leave_at_the_end(lambda _: None)
