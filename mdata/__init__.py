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
from mdata.manifest import BlendManifest, CorpusManifest
from mdata.manifest import load as load_manifest
from mdata.progress import SILENT, Progress

__all__ = [
    "SILENT",
    "BadInputError",
    "BlendManifest",
    "CorpusManifest",
    "DamageError",
    "MdataError",
    "Progress",
    "ResourceError",
    "StoppedError",
    "UsageError",
    "durable",
    "errors",
    "explain_os_error",
    "load_manifest",
    "nearest",
    "os_errors_named",
]
