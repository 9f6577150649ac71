"""From text to Megatron-format token files, to an exact order, to numpy batches. No torch anywhere in here.

`__all__` is the public surface; everything else may move. Heavy libraries are imported where they are used.
"""

from mdata import durable, errors
from mdata.errors import (
    BadInputError,
    DamageError,
    MdataError,
    ResourceError,
    StoppedError,
    UsageError,
    explain_os_error,
    nearest,
    os_errors_named,
)
from mdata.indexed import IndexedReader, IndexedWriter, ShardFacts
from mdata.keys import Key, derive_key
from mdata.manifest import BlendManifest, CorpusManifest
from mdata.manifest import load as load_manifest
from mdata.preprocess import PreprocessOptions, PreprocessResult, preprocess
from mdata.progress import SILENT, Progress
from mdata.tokenizers import Tokenizer, build_tokenizer, load_tokenizer
from mdata.tokenizers.train import train_tokenizer

__all__ = [
    "SILENT",
    "BadInputError",
    "BlendManifest",
    "CorpusManifest",
    "DamageError",
    "IndexedReader",
    "IndexedWriter",
    "Key",
    "MdataError",
    "PreprocessOptions",
    "PreprocessResult",
    "Progress",
    "ResourceError",
    "ShardFacts",
    "StoppedError",
    "Tokenizer",
    "UsageError",
    "build_tokenizer",
    "derive_key",
    "durable",
    "errors",
    "explain_os_error",
    "load_manifest",
    "load_tokenizer",
    "nearest",
    "os_errors_named",
    "preprocess",
    "train_tokenizer",
]
