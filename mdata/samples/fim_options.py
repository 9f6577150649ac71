"""What a run says of fill-in-the-middle: shares, levels and the names of its tokens, checked.

Every dataset has these options, so they stand apart from the samples (fim.py), which few need and which load
tokenizers. Which ids the names are is not known here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mdata.errors import UsageError

CHARACTER, TOKEN = "character", "token"
LEVELS = (CHARACTER, TOKEN)
VERSION = 1  # of the rules and their draws
# Megatron's defaults: prefix, middle, suffix.
NAMES = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
ROLES = ("prefix", "middle", "suffix", "pad", "eod")

Name = int | str


@dataclass(frozen=True, kw_only=True)
class FimOptions:
    """How documents are rearranged.

    Args:
        rate: share of documents.
        spm_rate: share of these that begin with the suffix.
        level: places are drawn between characters or between tokens.
        tokens: prefix, middle, suffix; then pad and eod, if they are not "<fim_pad>" (where the tokenizer has it) and
            the corpus' end of a document. Ids or texts.
        split_sample: the token between parts of a document that are rearranged each by itself.
        fragment_rate: share of these, of a document that is chosen.
        no_prefix: what begins so stays as it is.
    """

    rate: float
    spm_rate: float = 0.5
    level: str = CHARACTER
    tokens: tuple[Name, ...] = NAMES
    split_sample: Name | None = None
    fragment_rate: float | None = None
    no_prefix: str | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"no fim_level {self.level!r}", expected=" or ".join(LEVELS))
        rates = {"fim_rate": self.rate, "fim_spm_rate": self.spm_rate, "fim_fragment_rate": self.fragment_rate or 0.0}
        for name, rate in rates.items():
            if not 0.0 <= rate <= 1.0:
                raise UsageError(f"{name} is not a share", found=str(rate), expected="0 to 1")
        if not len(NAMES) <= len(self.tokens) <= len(ROLES):
            raise UsageError(
                "fim_tokens are not prefix, middle and suffix, with pad and eod if need be", found=str(self.tokens)
            )
        if (self.split_sample is None) != (self.fragment_rate is None):
            raise UsageError("fim_split_sample and fim_fragment_rate go together", fix="give both, or neither")

    @property
    def identity(self) -> dict[str, Any]:
        """All of it, as JSON types without floats: part of a data id."""
        found: dict[str, Any] = {**asdict(self), "version": VERSION, "tokens": list(self.tokens)}
        return {name: repr(value) if isinstance(value, float) else value for name, value in found.items()}
