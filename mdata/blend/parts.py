"""A corpus that a blend's description names, open, with the share asked for it.

What `compose` collects from entries, folders and other blends before it writes a manifest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mdata.blend.spec import Amount
from mdata.corpus.corpus import Corpus
from mdata.mixing.schedule import TOKENS, SetBy


@dataclass
class Part:
    """A corpus of the blend in the making; `weight`, set by `weight_by`, divides the entry it came with."""

    corpus: Corpus
    weight: str
    cap: str | None
    weight_by: SetBy = TOKENS
    name: str = ""
    group: str | None = None
    share: Amount = field(default_factory=lambda: Amount("0"))
