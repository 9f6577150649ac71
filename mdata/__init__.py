"""From text to Megatron-format token files, to an exact order, to numpy batches. No torch anywhere in here.

`__all__` is the public surface; everything else may move. Heavy libraries are imported where they are used.
"""

from mdata import durable, errors
from mdata.adopt import Adopted, adopt
from mdata.blending import BlendRow, OpenBlend, blend_table, make_blend, open_blend
from mdata.convert import convert
from mdata.corpus import Corpus, open_corpus
from mdata.dataset import Component, Dataset, open, open_dataset, parse_split
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
from mdata.loader import Batch, BatchPlan, Loader, collate
from mdata.manifest import BlendManifest, CorpusManifest
from mdata.manifest import load as load_manifest
from mdata.preprocess import Estimate, PreprocessOptions, PreprocessResult, estimate, preprocess
from mdata.progress import SILENT, Progress
from mdata.sampler import global_batch, rank_rows
from mdata.samples.options import DatasetOptions
from mdata.samples.rows import Rows
from mdata.tokenizers import TextRefused, Tokenizer, TokenizerSpec, build_tokenizer, load_tokenizer
from mdata.tokenizers.train import Learnt, learn_tokenizer, train_tokenizer
from mdata.tokenizers.train_options import TrainOptions
from mdata.verify import Verified, verify

__all__ = [
    "SILENT",
    "Adopted",
    "BadInputError",
    "Batch",
    "BatchPlan",
    "BlendManifest",
    "BlendRow",
    "Component",
    "Corpus",
    "CorpusManifest",
    "DamageError",
    "Dataset",
    "DatasetOptions",
    "Estimate",
    "IndexedReader",
    "IndexedWriter",
    "Key",
    "Learnt",
    "Loader",
    "MdataError",
    "OpenBlend",
    "PreprocessOptions",
    "PreprocessResult",
    "Progress",
    "ResourceError",
    "Rows",
    "ShardFacts",
    "StoppedError",
    "TextRefused",
    "Tokenizer",
    "TokenizerSpec",
    "TrainOptions",
    "UsageError",
    "Verified",
    "adopt",
    "blend_table",
    "build_tokenizer",
    "collate",
    "convert",
    "derive_key",
    "durable",
    "errors",
    "estimate",
    "explain_os_error",
    "global_batch",
    "learn_tokenizer",
    "load_manifest",
    "load_tokenizer",
    "make_blend",
    "nearest",
    "open",
    "open_blend",
    "open_corpus",
    "open_dataset",
    "os_errors_named",
    "parse_split",
    "preprocess",
    "rank_rows",
    "train_tokenizer",
    "verify",
]
