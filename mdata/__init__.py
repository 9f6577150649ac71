"""From text to Megatron-format token files, to an exact order, to numpy batches. No torch anywhere in here.

`__all__` is the public surface; everything else may move. A public name is imported when it is first used, and stands
here three times: for type checkers, in the table of where it lives, and in `__all__` (tests/mdata/test_lazy.py compares
them). Heavy libraries are imported where they are used.
"""

from typing import TYPE_CHECKING

from mdata.lazy import attach

if TYPE_CHECKING:
    from mdata import durable, errors
    from mdata.adopt import Adopted, adopt
    from mdata.blend.spec import Amount, BlendEntry, BlendSpec, PhaseSpec, spec_of_mapping, spec_of_splits
    from mdata.blend.split import parse_split
    from mdata.blending.change import BlendEdits, change_blend
    from mdata.blending.change_table import ChangeRow, change_table
    from mdata.blending.opening import OpenBlend, make_blend, open_blend, plan_blend, read_spec, save_blend
    from mdata.blending.preview import BlendPreview, BlendRow, blend_table, preview_blend
    from mdata.blending.redistribute import redistribute_blend
    from mdata.build import BuildResult, BuiltArrays, build
    from mdata.component import Component
    from mdata.convert import convert
    from mdata.corpus import Corpus, open_corpus
    from mdata.dataset import Dataset, open, open_dataset
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
    from mdata.evaluation import evaluated_samples, evaluation_sets, samples_asked
    from mdata.indexed import IndexedReader, IndexedWriter, ShardFacts
    from mdata.keys import Key, derive_key
    from mdata.loading.batch_sizes import BatchSizes, read_ramp
    from mdata.loading.loader import Batch, BatchPlan, Loader, collate, collate_step
    from mdata.loading.resuming import resumes
    from mdata.loading.sampler import Sampler, global_batch, rank_rows
    from mdata.manifest import BlendManifest, CorpusManifest
    from mdata.manifest import load as load_manifest
    from mdata.preprocess.estimate import Estimate, estimate
    from mdata.preprocess.options import PreprocessOptions
    from mdata.preprocess.results import PreprocessResult
    from mdata.preprocess.run import preprocess
    from mdata.progress import SILENT, Progress
    from mdata.reporting.report import Report, report
    from mdata.samples.masked import MaskingOptions
    from mdata.samples.options import DatasetOptions
    from mdata.samples.rows import Rows
    from mdata.samples.vocabulary import MaskedVocabulary, vocabulary_of
    from mdata.tokenizers import TextRefused, Tokenizer, TokenizerSpec, build_tokenizer, load_tokenizer
    from mdata.tokenizers.train import Learnt, learn_tokenizer, train_tokenizer
    from mdata.tokenizers.train_options import TrainOptions
    from mdata.tracing.run import is_run, trace_run
    from mdata.tracing.shuffled import ShuffledSteps
    from mdata.tracing.steps import Place, Steps, StepSpan
    from mdata.tracing.trace import TracedPart, TracedSample, Tracer
    from mdata.verify import Verified, verify
    from mdata.version import __version__

attach(
    __name__,
    {
        "mdata.durable": "durable=",
        "mdata.errors": "errors= BadInputError DamageError MdataError ResourceError StoppedError "
        "UsageError explain_os_error nearest os_errors_named",
        "mdata.adopt": "Adopted adopt",
        "mdata.blend.spec": "Amount BlendEntry BlendSpec PhaseSpec spec_of_mapping spec_of_splits",
        "mdata.blending.change": "BlendEdits change_blend",
        "mdata.blending.change_table": "ChangeRow change_table",
        "mdata.blending.preview": "BlendPreview BlendRow blend_table preview_blend",
        "mdata.blending.redistribute": "redistribute_blend",
        "mdata.blending.opening": "OpenBlend make_blend open_blend plan_blend read_spec save_blend",
        "mdata.build": "BuildResult BuiltArrays build",
        "mdata.convert": "convert",
        "mdata.corpus": "Corpus open_corpus",
        "mdata.component": "Component",
        "mdata.blend.split": "parse_split",
        "mdata.dataset": "Dataset open open_dataset",
        "mdata.evaluation": "evaluated_samples evaluation_sets samples_asked",
        "mdata.indexed": "IndexedReader IndexedWriter ShardFacts",
        "mdata.keys": "Key derive_key",
        "mdata.loading.loader": "Batch BatchPlan Loader collate collate_step",
        "mdata.manifest": "BlendManifest CorpusManifest load_manifest=load",
        "mdata.preprocess.estimate": "Estimate estimate",
        "mdata.preprocess.options": "PreprocessOptions",
        "mdata.preprocess.results": "PreprocessResult",
        "mdata.preprocess.run": "preprocess",
        "mdata.progress": "SILENT Progress",
        "mdata.reporting.report": "Report report",
        "mdata.loading.batch_sizes": "BatchSizes read_ramp",
        "mdata.loading.resuming": "resumes",
        "mdata.loading.sampler": "Sampler global_batch rank_rows",
        "mdata.samples.options": "DatasetOptions",
        "mdata.samples.masked": "MaskingOptions",
        "mdata.samples.rows": "Rows",
        "mdata.samples.vocabulary": "MaskedVocabulary vocabulary_of",
        "mdata.tokenizers": "TextRefused Tokenizer TokenizerSpec build_tokenizer load_tokenizer",
        "mdata.tokenizers.train": "Learnt learn_tokenizer train_tokenizer",
        "mdata.tokenizers.train_options": "TrainOptions",
        "mdata.tracing.trace": "TracedPart TracedSample Tracer",
        "mdata.tracing.run": "is_run trace_run",
        "mdata.tracing.shuffled": "ShuffledSteps",
        "mdata.tracing.steps": "Place StepSpan Steps",
        "mdata.verify": "Verified verify",
        "mdata.version": "__version__",
    },
)

__all__ = [
    "SILENT",
    "Adopted",
    "Amount",
    "BadInputError",
    "Batch",
    "BatchPlan",
    "BatchSizes",
    "BlendEdits",
    "BlendEntry",
    "BlendManifest",
    "BlendPreview",
    "BlendRow",
    "BlendSpec",
    "BuildResult",
    "BuiltArrays",
    "ChangeRow",
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
    "MaskedVocabulary",
    "MaskingOptions",
    "MdataError",
    "OpenBlend",
    "PhaseSpec",
    "Place",
    "PreprocessOptions",
    "PreprocessResult",
    "Progress",
    "Report",
    "ResourceError",
    "Rows",
    "Sampler",
    "ShardFacts",
    "ShuffledSteps",
    "StepSpan",
    "Steps",
    "StoppedError",
    "TextRefused",
    "Tokenizer",
    "TokenizerSpec",
    "TracedPart",
    "TracedSample",
    "Tracer",
    "TrainOptions",
    "UsageError",
    "Verified",
    "__version__",
    "adopt",
    "blend_table",
    "build",
    "build_tokenizer",
    "change_blend",
    "change_table",
    "collate",
    "collate_step",
    "convert",
    "derive_key",
    "durable",
    "errors",
    "estimate",
    "evaluated_samples",
    "evaluation_sets",
    "explain_os_error",
    "global_batch",
    "is_run",
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
    "plan_blend",
    "preprocess",
    "preview_blend",
    "rank_rows",
    "read_ramp",
    "read_spec",
    "redistribute_blend",
    "report",
    "resumes",
    "samples_asked",
    "save_blend",
    "spec_of_mapping",
    "spec_of_splits",
    "trace_run",
    "train_tokenizer",
    "verify",
    "vocabulary_of",
]
