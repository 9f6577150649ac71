"""The tokenizer facts of a manifest, and the names of the files beside a pair. Pure.

Shared by all code that writes manifests (preprocess, adopt).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mdata.manifest.types import Level, TokenizerFacts

if TYPE_CHECKING:
    from mdata.tokenizers.base.tokenizer import Tokenizer


def manifest_path(prefix: Path) -> Path:
    """The manifest of the pair with this prefix."""
    return prefix.with_name(prefix.name + ".json")


def level_named(prefix: Path) -> Level:
    """The level that the ending of a prefix names."""
    endings: tuple[Level, ...] = ("sentence", "chat")
    return next((level for level in endings if prefix.name.endswith(f"_{level}")), "document")


def hashes_path(prefix: Path) -> Path:
    """The sidecar with the hashes of .bin's blocks."""
    return prefix.with_name(prefix.name + ".bin.blake3")


def tokenizer_facts(tokenizer: Tokenizer) -> TokenizerFacts:
    """The facts from which the tokenizer can be rebuilt with the folder beside the corpus."""
    from mdata.tokenizers.base.tokenizer_folder import folder_name

    return TokenizerFacts(
        type=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        special_ids=dict(tokenizer.special_ids),
        options=dict(tokenizer.options),
        folder=folder_name(tokenizer.files) if tokenizer.files else None,
    )
