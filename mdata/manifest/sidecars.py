"""The tokenizer facts of a manifest, and the names of the files beside a pair. Pure.

Shared by all code that writes manifests (preprocess, adopt).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET

from mdata.manifest.types import Level, TokenizerFacts

if TYPE_CHECKING:
    from mdata.tokenizers.base.tokenizer import Tokenizer


# Older corpora use the second one: tools that merge a folder (Megatron's, gpt-neox's) take such a file as a part of the
# pair PREFIX.bin.bin and PREFIX.bin.idx, which does not exist, and stop.
HASHES_ENDINGS = (".blake3", ".bin.blake3")


def manifest_path(prefix: Path) -> Path:
    """The manifest of the pair with this prefix."""
    return prefix.with_name(prefix.name + ".json")


def level_named(prefix: Path) -> Level:
    """The level that the ending of a prefix names."""
    endings: tuple[Level, ...] = ("sentence", "chat", "pairs")
    return next((level for level in endings if prefix.name.endswith(f"_{level}")), "document")


def hashes_path(prefix: Path) -> Path:
    """The name of the sidecar with the hashes of .bin's blocks in new corpora; a manifest records the actual name."""
    return prefix.with_name(prefix.name + HASHES_ENDINGS[0])


def hashes_paths(prefix: Path) -> tuple[Path, ...]:
    """The names that this sidecar may have, the current one first."""
    return tuple(prefix.with_name(prefix.name + ending) for ending in HASHES_ENDINGS)


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
        bos=UNSET if tokenizer.bos is None else tokenizer.bos,
    )
