"""The likeliest tokens for the masks of a text, by a bidirectional model.

A text is read as samples are: [CLS], its tokens, [SEP], or with RoBERTa's vocabulary <s>, its tokens, </s>. All masks
are predicted at once, each from the whole text in which the others are still masks. Runs on all ranks of tensor and
pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mdata
from mdata import UsageError
from mdata.tokenizers.base.tokenizer import TextRefused
from trainer.tasks.loaded_model import Model

MASK, FIRST, LAST = "[MASK]", "[CLS]", "[SEP]"
ROBERTA = {MASK: "<mask>", FIRST: "<s>", LAST: "</s>"}


class Candidate(NamedTuple):
    """A token for a mask, with its text without the mark of a continued word."""

    token: int
    text: str
    probability: float


class Filled(NamedTuple):
    """A prompt, the candidates of each of its masks, the likeliest first, and the text with the likeliest tokens."""

    prompt: str
    masks: tuple[tuple[Candidate, ...], ...]
    text: str

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {"prompt": self.prompt, "text": self.text, "masks": [[c._asdict() for c in mask] for mask in self.masks]}

    def lines(self) -> str:
        """The text, followed by a line for each mask."""
        rows = [", ".join(f"{token.text!r} {token.probability:.3f}" for token in mask) for mask in self.masks]
        return "\n".join([self.text, *(f"  {MASK} {number}: {row}" for number, row in enumerate(rows, 1))])


def fill_masks(model: Model, prompts: Sequence[str], *, top: int = 5) -> list[Filled]:
    """The `top` likeliest tokens of each mask of each prompt; [MASK] is a mask with RoBERTa's vocabulary too.

    Raises:
        UsageError: no tokenizer, or one without masks; a prompt without a mask, or one that is too long.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UsageError(f"{model.name} has no tokenizer, so masks cannot be found in a text", fix="--tokenizer FOLDER")
    is_roberta = ROBERTA[MASK] in getattr(tokenizer, "special_ids", {})
    names = ROBERTA if is_roberta else {name: name for name in ROBERTA}
    ids = {role: named_id(tokenizer, name) for role, name in names.items()}
    rows = [_row(tokenizer, prompt.replace(MASK, names[MASK]), ids) for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if ids[MASK] not in row:
            raise UsageError(
                f"there is nothing to fill in the prompt {prompt[:80]!r}",
                found=f"no {names[MASK]}",
                expected=f"a text such as 'The capital of {names[MASK]} is Paris.'",
            )
    return [_filled(model, prompt, row, ids, top=top) for prompt, row in zip(prompts, rows, strict=True)]


def named_id(tokenizer: mdata.Tokenizer, name: str) -> int:
    """The id of a special token.

    Raises:
        UsageError: the tokenizer has no such token.
    """
    token_id: int | None = getattr(tokenizer, "special_ids", {}).get(name)
    if token_id is None:
        raise UsageError(f"the tokenizer {tokenizer.name} has no {name}", expected="a tokenizer of BERT")
    return token_id


def _row(tokenizer: mdata.Tokenizer, prompt: str, ids: dict[str, int]) -> list[int]:
    try:
        row: list[int] = tokenizer.encode_batch([prompt])[0].tolist()
    except TextRefused as refused:
        raise UsageError(f"the prompt has no tokens: {refused.reason}", found=repr(prompt[:80])) from refused
    return [ids[FIRST], *(token for token in row if token not in (ids[FIRST], ids[LAST])), ids[LAST]]


def _filled(model: Model, prompt: str, row: list[int], ids: dict[str, int], *, top: int) -> Filled:
    tokenizer = model.tokenizer
    assert tokenizer is not None, "fill_masks has one"
    places = [place for place, token in enumerate(row) if token == ids[MASK]]
    shares_MV = model.logits(row)[places].softmax(-1)
    values_MK, tokens_MK = shares_MV.sort(dim=-1, descending=True, stable=True)
    masks = tuple(
        tuple(Candidate(token, tokenizer.decode([token]).removeprefix("##"), share) for token, share in pairs)
        for pairs in (
            zip(tokens[:top], values[:top], strict=True)
            for tokens, values in zip(tokens_MK.tolist(), values_MK.tolist(), strict=True)
        )
    )
    best = dict(zip(places, (mask[0].token for mask in masks), strict=True))
    filled_ids = [best.get(place, token) for place, token in enumerate(row)][1:-1]
    return Filled(prompt, masks, tokenizer.decode(filled_ids))
