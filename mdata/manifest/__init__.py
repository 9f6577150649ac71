"""Manifests: what a corpus or a blend is, in one JSON document that is checked whenever it is read."""

from mdata.manifest.identity import blend_id, checksum, corpus_id, hash_of, manifest_id, sealed
from mdata.manifest.store import load, parse, save
from mdata.manifest.structs import (
    FORMAT,
    VERSION,
    BlendComponent,
    BlendManifest,
    BlockHashes,
    CorpusManifest,
    InputFile,
    Manifest,
    Origins,
    Phase,
    Provenance,
    Shard,
    Share,
    Statistics,
    TokenizerFacts,
)

__all__ = [
    "FORMAT",
    "VERSION",
    "BlendComponent",
    "BlendManifest",
    "BlockHashes",
    "CorpusManifest",
    "InputFile",
    "Manifest",
    "Origins",
    "Phase",
    "Provenance",
    "Shard",
    "Share",
    "Statistics",
    "TokenizerFacts",
    "blend_id",
    "checksum",
    "corpus_id",
    "hash_of",
    "load",
    "manifest_id",
    "parse",
    "save",
    "sealed",
]
